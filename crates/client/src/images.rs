//! Images: pull, import, list and name them.

use http::Method;
use http::header::{self, HeaderValue};
use wire::api;

use crate::error::ClientError;
use crate::files::Upload;
use crate::sse::SseReader;
use crate::transport::{Call, Wait};
use crate::{Client, Repeat, in_query, json, plain};

/// What to do with the last name of an image that sandboxes use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InUse {
    /// Keep it, and fail.
    Refuse,
    /// Remove it. The sandboxes keep what they need.
    Release,
}

/// Progress of a pull or import.
pub struct ImageEvents {
    reader: SseReader,
    over: bool,
}

impl ImageEvents {
    /// Returns the next event. The last one names the images; a failure is an error.
    pub async fn next(&mut self) -> Result<Option<api::ImageEvent>, ClientError> {
        if self.over {
            return Ok(None);
        }
        let strange =
            |reader: &SseReader, what: String| ClientError::Strange { url: reader.url().to_owned(), what };
        let event = loop {
            match self.reader.next().await? {
                Some(Some(event)) => break event,
                Some(None) => {} // A comment: the stream is alive.
                None => return Err(strange(&self.reader, "it ended before the image was stored".into())),
            }
        };
        match serde_json::from_slice(&event.data).map_err(|error| strange(&self.reader, error.to_string()))? {
            api::ImageEvent::Failed(body) => Err(ClientError::Refused { status: None, body: Box::new(body) }),
            event => {
                self.over = matches!(event, api::ImageEvent::Done { .. });
                Ok(Some(event))
            }
        }
    }

    /// Waits for the images.
    pub async fn finished(mut self) -> Result<Vec<api::Image>, ClientError> {
        loop {
            match self.next().await? {
                Some(api::ImageEvent::Done { images }) => return Ok(images),
                Some(api::ImageEvent::Progress { .. } | api::ImageEvent::Failed(_)) => {}
                None => return Ok(Vec::new()),
            }
        }
    }
}

impl Client {
    /// Pulls an image. Dropping the events stops the pull, unless another caller waits for it too.
    pub async fn pull_image(&self, wish: &api::PullImage) -> Result<ImageEvents, ClientError> {
        self.image_events(json(Method::POST, "/v1/images/pull".into(), wish), None).await
    }

    /// Imports the images of an archive.
    pub async fn import_image(
        &self,
        archive: Upload,
        name: Option<&str>,
        format: Option<&str>,
    ) -> Result<ImageEvents, ClientError> {
        let mut query = String::new();
        for (key, value) in [("name", name), ("format", format)] {
            if let Some(value) = value {
                query += &format!("{}{key}={}", if query.is_empty() { '?' } else { '&' }, in_query(value));
            }
        }
        let mut call = plain(Method::POST, format!("/v1/images/import{query}"));
        call.headers.push((header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream")));
        self.image_events(call, Some(archive)).await
    }

    async fn image_events(
        &self,
        mut call: Call,
        archive: Option<Upload>,
    ) -> Result<ImageEvents, ClientError> {
        call.wait = Wait::Forever;
        call.headers.push((header::ACCEPT, HeaderValue::from_static("text/event-stream")));
        let body = archive.map(|archive| {
            let (size, body) = archive.into_parts();
            if let Some(size) = size {
                call.headers.push((header::CONTENT_LENGTH, size.into()));
            }
            body
        });
        let response = self.transport.stream(&call, body).await?;
        Ok(ImageEvents { reader: SseReader::new(response.into_body(), self.url()), over: false })
    }

    /// Lists all images, newest first.
    pub async fn images(&self) -> Result<Vec<api::Image>, ClientError> {
        let list: api::ImageList = self.read("/v1/images".into()).await?;
        Ok(list.images)
    }

    /// Returns an image by name, alias or digest.
    pub async fn image(&self, name: &str) -> Result<api::Image, ClientError> {
        self.read(format!("/v1/images/{}", in_query(name))).await
    }

    /// Removes an image's name, and then what is no longer used.
    pub async fn remove_image(&self, name: &str, in_use: InUse) -> Result<api::CollectedImages, ClientError> {
        let force = match in_use {
            InUse::Refuse => "",
            InUse::Release => "?force=true",
        };
        let call = plain(Method::DELETE, format!("/v1/images/{}{force}", in_query(name)));
        self.call(call, Repeat::Never).await
    }

    /// Removes unused images and layers.
    pub async fn collect_images(&self) -> Result<api::CollectedImages, ClientError> {
        self.call(plain(Method::POST, "/v1/images/gc".into()), Repeat::Harmless).await
    }

    /// Lists all aliases, sorted by name.
    pub async fn image_aliases(&self) -> Result<Vec<api::ImageAlias>, ClientError> {
        let list: api::ImageAliasList = self.read("/v1/image-aliases".into()).await?;
        Ok(list.aliases)
    }

    /// Makes `name` stand for `target`.
    pub async fn set_image_alias(&self, name: &str, target: &str) -> Result<api::ImageAlias, ClientError> {
        let path = format!("/v1/image-aliases/{}", in_query(name));
        let wish = api::SetImageAlias { target: target.to_owned() };
        self.call(json(Method::PUT, path, &wish), Repeat::Harmless).await
    }

    /// Deletes an alias.
    pub async fn delete_image_alias(&self, name: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, format!("/v1/image-aliases/{}", in_query(name)), Repeat::Never).await
    }
}
