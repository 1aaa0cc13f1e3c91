//! Builds: start, follow and list them.

use bytes::Bytes;
use http::Method;
use http::header::{self, HeaderName, HeaderValue};
use hyper::body::Incoming;
use wire::api;

use crate::error::ClientError;
use crate::files::Upload;
use crate::sse::next_bytes;
use crate::transport::Wait;
use crate::{Client, Repeat, in_query, plain};

/// The log of a build.
pub struct BuildLog {
    url: String,
    body: Incoming,
}

impl BuildLog {
    /// Returns the next bytes, or `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        next_bytes(&mut self.body, &self.url).await
    }
}

/// A tar stream with one file.
pub fn one_file(name: &str, contents: &[u8]) -> Vec<u8> {
    let entry = archive::Entry {
        path: name.as_bytes().to_vec(),
        kind: archive::EntryKind::File,
        mode: 0o644,
        size: contents.len() as u64,
        modified: 0,
        link: Vec::new(),
        uid: 0,
        gid: 0,
        attributes: Vec::new(),
    };
    let mut stream = archive::entry_header(&entry);
    stream.extend_from_slice(contents);
    let whole = stream.len().next_multiple_of(archive::BLOCK) + 2 * archive::BLOCK;
    stream.resize(whole, 0);
    stream
}

/// JSON that a header can carry.
fn in_header(wish: &api::StartBuild) -> HeaderValue {
    let text = serde_json::to_string(wish).expect("requests are made of types that JSON can write");
    let mut ascii = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_ascii() {
            ascii.push(character);
        } else {
            let mut units = [0; 2];
            for unit in character.encode_utf16(&mut units) {
                ascii.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    HeaderValue::from_str(&ascii).expect("JSON escapes control characters, and the rest is ASCII")
}

impl Client {
    /// Starts a build with a context.
    pub async fn start_build(
        &self,
        wish: &api::StartBuild,
        context: Upload,
    ) -> Result<api::Build, ClientError> {
        let mut call = plain(Method::POST, "/v1/builds".into());
        call.wait = Wait::Forever;
        call.headers.push((HeaderName::from_static("shoal-build"), in_header(wish)));
        call.headers.push((header::CONTENT_TYPE, HeaderValue::from_static("application/x-tar")));
        let (size, body) = context.into_parts();
        if let Some(size) = size {
            call.headers.push((header::CONTENT_LENGTH, size.into()));
        }
        let response = self.transport.stream(&call, Some(body)).await?;
        let (mut body, url) = (response.into_body(), self.url().to_owned());
        let mut answer = Vec::new();
        while let Some(bytes) = next_bytes(&mut body, &url).await? {
            answer.extend_from_slice(&bytes);
        }
        serde_json::from_slice(&answer).map_err(|error| ClientError::Strange { url, what: error.to_string() })
    }

    /// Lists all builds that the daemon still has, newest first.
    pub async fn builds(&self) -> Result<Vec<api::Build>, ClientError> {
        let list: api::BuildList = self.read("/v1/builds".into()).await?;
        Ok(list.builds)
    }

    /// Returns a build.
    pub async fn build(&self, id: &str) -> Result<api::Build, ClientError> {
        self.read(format!("/v1/builds/{}", in_query(id))).await
    }

    /// Cancels a build, and deletes its record.
    pub async fn delete_build(&self, id: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, format!("/v1/builds/{}", in_query(id)), Repeat::Never).await
    }

    /// Streams a build's log from an offset until the build ends.
    pub async fn follow_build(&self, id: &str, offset: u64) -> Result<BuildLog, ClientError> {
        let path = format!("/v1/builds/{}/log?follow=true&offset={offset}", in_query(id));
        let mut call = plain(Method::GET, path);
        call.wait = Wait::Forever;
        let response = self.transport.stream(&call, None).await?;
        Ok(BuildLog { url: self.url().to_owned(), body: response.into_body() })
    }
}
