//! Files of a sandbox: typed calls, streams both ways, and whole directories.
//!
//! A path in a sandbox is bytes, so that every file can be named; text works too. Streams are not repeated when they break:
//! a write is complete or did not happen, and the reader of a broken read gets an error.

use std::io;
use std::path::Path;

use bytes::Bytes;
use futures_util::stream;
use http::header::{self, HeaderValue};
use http::{Method, StatusCode};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use wire::SandboxId;
use wire::api;

use crate::error::ClientError;
use crate::sse::{SseReader, next_bytes};
use crate::transport::{Body, Call, Wait};
use crate::{Client, Repeat, escape, json, plain};

/// Pieces that are buffered between a directory on disk and the connection.
const PIECES_MAX: usize = 8;
/// The size of one piece.
const PIECE: usize = 256 * 1024;

/// The files of one sandbox.
#[derive(Clone)]
pub struct Files {
    client: Client,
    sandbox: SandboxId,
    user: Option<String>,
}

/// How to write a file.
#[derive(Debug, Clone, Default)]
pub struct WriteFile {
    /// Permissions. `None` keeps those of an existing file, or sets 0644.
    pub mode: Option<u32>,
    /// Fail if a directory is missing.
    pub no_parents: bool,
    /// Fail if the file exists.
    pub only_new: bool,
    /// Fail unless the existing file has this tag.
    pub only_if: Option<String>,
}

/// A search in the contents of files.
#[derive(Debug, Clone, Default)]
pub struct GrepFiles {
    /// The pattern.
    pub pattern: String,
    /// Whether the pattern is a regular expression.
    pub regex: bool,
    /// Whether to ignore case.
    pub ignore_case: bool,
    /// Only files that match one of these globs.
    pub include: Vec<String>,
    /// Skip directories whose name matches one of these globs.
    pub exclude_directories: Vec<String>,
    /// Whether to search names that begin with a dot.
    pub hidden: bool,
    /// The maximum number of lines.
    pub limit: Option<u32>,
}

impl Client {
    /// The files of a sandbox, as root sees them.
    pub fn files(&self, sandbox: SandboxId) -> Files {
        Files { client: self.clone(), sandbox, user: None }
    }
}

/// Bodies of any length, in both directions.
impl Client {
    pub(crate) async fn download(&self, call: Call) -> Result<Download, ClientError> {
        let response = self.transport.stream(&call, None).await?;
        let headers = response.headers();
        let text = |name| headers.get(name).and_then(|value: &HeaderValue| value.to_str().ok());
        Ok(Download {
            size: text(header::CONTENT_LENGTH).and_then(|length| length.parse().ok()),
            etag: text(header::ETAG).map(str::to_owned),
            partial: response.status() == StatusCode::PARTIAL_CONTENT,
            url: self.url(),
            body: response.into_body(),
        })
    }

    pub(crate) async fn upload<T: DeserializeOwned>(
        &self,
        mut call: Call,
        contents: Upload,
    ) -> Result<T, ClientError> {
        let Upload { size, body } = contents;
        call.headers.push((header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream")));
        if let Some(size) = size {
            call.headers.push((header::CONTENT_LENGTH, size.into()));
        }
        let response = self.transport.stream(&call, Some(body)).await?;
        let broken = |source: hyper::Error| ClientError::Broken { url: self.url(), source: source.into() };
        let body = response.into_body().collect().await.map_err(broken)?.to_bytes();
        serde_json::from_slice(&body)
            .map_err(|error| ClientError::Strange { url: self.url(), what: error.to_string() })
    }
}

impl Files {
    /// The same, as a user of the sandbox sees them.
    pub fn as_user(mut self, user: impl Into<String>) -> Self {
        self.user = Some(user.into());
        self
    }

    fn target(&self, route: &str, pairs: &[(&str, &[u8])]) -> String {
        let mut target = format!("/v1/sandboxes/{}/files{route}", self.sandbox);
        let user = self.user.iter().map(|user| ("user", user.as_bytes()));
        for (at, (name, value)) in pairs.iter().copied().chain(user).enumerate() {
            target.push(if at == 0 { '?' } else { '&' });
            target.push_str(name);
            target.push('=');
            target.push_str(&escape(value));
        }
        target
    }

    async fn ask<T: DeserializeOwned>(&self, route: &str, pairs: &[(&str, &[u8])]) -> Result<T, ClientError> {
        let call = Call { wait: Wait::Forever, ..plain(Method::GET, self.target(route, pairs)) };
        self.client.call(call, Repeat::Harmless).await
    }

    async fn act(
        &self,
        method: Method,
        route: &str,
        pairs: &[(&str, &[u8])],
        repeat: Repeat,
    ) -> Result<Bytes, ClientError> {
        let call = Call { wait: Wait::Forever, ..plain(method, self.target(route, pairs)) };
        self.client.send(&call, repeat).await
    }

    /// Returns information about a file. Follows a link at the end of the path.
    pub async fn stat(&self, path: impl AsRef<[u8]>) -> Result<api::FileInfo, ClientError> {
        self.ask("/stat", &[("path", path.as_ref())]).await
    }

    /// Returns information about a file, or about the link itself if the path ends in one.
    pub async fn stat_link(&self, path: impl AsRef<[u8]>) -> Result<api::FileInfo, ClientError> {
        self.ask("/stat", &[("path", path.as_ref()), ("follow", b"false")]).await
    }

    /// Lists one page of a directory, sorted by name.
    pub async fn list_page(
        &self,
        path: impl AsRef<[u8]>,
        cursor: Option<&str>,
    ) -> Result<api::FileList, ClientError> {
        let mut pairs = vec![("path", path.as_ref())];
        pairs.extend(cursor.map(|cursor| ("cursor", cursor.as_bytes())));
        self.ask("/list", &pairs).await
    }

    /// Lists a whole directory, sorted by name.
    pub async fn list(&self, path: impl AsRef<[u8]>) -> Result<Vec<api::FileInfo>, ClientError> {
        let (mut all, mut cursor) = (Vec::new(), None::<String>);
        loop {
            let page = self.list_page(path.as_ref(), cursor.as_deref()).await?;
            all.extend(page.entries);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Opens a file to read it.
    pub async fn read(&self, path: impl AsRef<[u8]>) -> Result<Download, ClientError> {
        self.download("", path.as_ref(), None).await
    }

    /// Opens a part of a file: at most `length` bytes from `start`.
    pub async fn read_range(
        &self,
        path: impl AsRef<[u8]>,
        start: u64,
        length: Option<u64>,
    ) -> Result<Download, ClientError> {
        let last =
            length.map_or(String::new(), |length| start.saturating_add(length).saturating_sub(1).to_string());
        self.download("", path.as_ref(), Some(format!("bytes={start}-{last}"))).await
    }

    async fn download(
        &self,
        route: &str,
        path: &[u8],
        range: Option<String>,
    ) -> Result<Download, ClientError> {
        let mut call = plain(Method::GET, self.target(route, &[("path", path)]));
        if let Some(range) = range {
            let range = HeaderValue::try_from(range).expect("digits and dashes may stand in a header");
            call.headers.push((header::RANGE, range));
        }
        self.client.download(call).await
    }

    /// Writes a file.
    pub async fn write(
        &self,
        path: impl AsRef<[u8]>,
        contents: Upload,
        options: &WriteFile,
    ) -> Result<api::FileInfo, ClientError> {
        let mode = options.mode.map(|mode| format!("{mode:04o}"));
        let mut pairs = vec![("path", path.as_ref())];
        pairs.extend(mode.as_ref().map(|mode| ("mode", mode.as_bytes())));
        if options.no_parents {
            pairs.push(("parents", b"false"));
        }
        let mut call = plain(Method::PUT, self.target("", &pairs));
        if options.only_new {
            call.headers.push((header::IF_NONE_MATCH, HeaderValue::from_static("*")));
        }
        if let Some(tag) = &options.only_if {
            let strange = |_| ClientError::Strange {
                url: self.client.url(),
                what: "the entity tag is not one of a file".into(),
            };
            call.headers.push((header::IF_MATCH, HeaderValue::from_str(tag).map_err(strange)?));
        }
        self.upload(call, contents).await
    }

    async fn upload<T: DeserializeOwned>(&self, call: Call, contents: Upload) -> Result<T, ClientError> {
        self.client.upload(call, contents).await
    }

    /// Replaces text in a file. Never repeated: a second attempt would not find the text.
    pub async fn edit(
        &self,
        path: impl AsRef<[u8]>,
        wish: &api::EditFile,
    ) -> Result<api::EditedFile, ClientError> {
        let call = json(Method::POST, self.target("/edit", &[("path", path.as_ref())]), wish);
        self.client.call(Call { wait: Wait::Forever, ..call }, Repeat::Never).await
    }

    /// Creates a directory and its parents. It may exist already.
    pub async fn make_directory(&self, path: impl AsRef<[u8]>) -> Result<(), ClientError> {
        self.act(Method::POST, "/mkdir", &[("path", path.as_ref())], Repeat::Harmless).await.map(drop)
    }

    /// Moves a file or directory. Never repeated: a second attempt would not find it.
    pub async fn rename(
        &self,
        from: impl AsRef<[u8]>,
        to: impl AsRef<[u8]>,
        overwrite: bool,
    ) -> Result<(), ClientError> {
        let pairs = [("from", from.as_ref()), ("to", to.as_ref()), ("overwrite", truth(overwrite))];
        self.act(Method::POST, "/move", &pairs, Repeat::Never).await.map(drop)
    }

    /// Copies a file, or a directory with its contents, inside the sandbox.
    pub async fn copy(
        &self,
        from: impl AsRef<[u8]>,
        to: impl AsRef<[u8]>,
        overwrite: bool,
    ) -> Result<api::FilesMade, ClientError> {
        let pairs = [
            ("from", from.as_ref()),
            ("to", to.as_ref()),
            ("overwrite", truth(overwrite)),
            ("recursive", b"true"),
        ];
        let body = self.act(Method::POST, "/copy", &pairs, Repeat::Never).await?;
        serde_json::from_slice(&body)
            .map_err(|error| ClientError::Strange { url: self.client.url(), what: error.to_string() })
    }

    /// Deletes a file or a link; with `recursive`, a directory with its contents.
    pub async fn remove(&self, path: impl AsRef<[u8]>, recursive: bool) -> Result<(), ClientError> {
        let pairs = [("path", path.as_ref()), ("recursive", truth(recursive))];
        self.act(Method::DELETE, "", &pairs, Repeat::Never).await.map(drop)
    }

    /// Finds paths below a directory that match a pattern. Without `limit`, at most 1000.
    pub async fn glob(
        &self,
        path: impl AsRef<[u8]>,
        pattern: &str,
        limit: Option<u32>,
    ) -> Result<api::FoundFiles, ClientError> {
        let limit = limit.map(|limit| limit.to_string());
        let mut pairs = vec![("path", path.as_ref()), ("pattern", pattern.as_bytes())];
        pairs.extend(limit.as_ref().map(|limit| ("limit", limit.as_bytes())));
        self.ask("/glob", &pairs).await
    }

    /// Finds lines that match a pattern, in a file or in files below a directory.
    pub async fn grep(
        &self,
        path: impl AsRef<[u8]>,
        wish: &GrepFiles,
    ) -> Result<api::FoundLines, ClientError> {
        let limit = wish.limit.map(|limit| limit.to_string());
        let mut pairs = vec![
            ("path", path.as_ref()),
            ("pattern", wish.pattern.as_bytes()),
            ("regex", truth(wish.regex)),
            ("ignore_case", truth(wish.ignore_case)),
            ("hidden", truth(wish.hidden)),
        ];
        pairs.extend(wish.include.iter().map(|glob| ("include", glob.as_bytes())));
        pairs.extend(wish.exclude_directories.iter().map(|glob| ("exclude_directory", glob.as_bytes())));
        pairs.extend(limit.as_ref().map(|limit| ("limit", limit.as_bytes())));
        self.ask("/grep", &pairs).await
    }

    /// Streams changes of a file or in a directory.
    pub async fn watch(&self, path: impl AsRef<[u8]>, recursive: bool) -> Result<FileWatch, ClientError> {
        let pairs = [("path", path.as_ref()), ("recursive", truth(recursive))];
        let call = plain(Method::GET, self.target("/watch", &pairs));
        let response = self.client.transport.stream(&call, None).await?;
        Ok(FileWatch(SseReader::new(response.into_body(), self.client.url())))
    }

    /// Reads a directory, or one file, as a tar stream.
    pub async fn pack(&self, path: impl AsRef<[u8]>) -> Result<Download, ClientError> {
        self.download("/tar", path.as_ref(), None).await
    }

    /// Unpacks a tar stream into a directory.
    pub async fn unpack(
        &self,
        path: impl AsRef<[u8]>,
        archive: Upload,
    ) -> Result<api::FilesMade, ClientError> {
        let call = plain(Method::PUT, self.target("/tar", &[("path", path.as_ref())]));
        self.upload(call, archive).await
    }

    /// Copies the contents of a local directory into one of the sandbox. Calls `seen` with the bytes sent so far.
    pub async fn upload_directory(
        &self,
        from: &Path,
        to: impl AsRef<[u8]>,
        seen: impl Fn(u64) + Send + 'static,
    ) -> Result<api::FilesMade, ClientError> {
        let local = |source: io::Error| ClientError::Local { path: from.to_owned(), source };
        let top = std::fs::File::open(from).map_err(local)?;
        let (pieces, body) = mpsc::channel(PIECES_MAX);
        let packing = tokio::task::spawn_blocking(move || {
            let mut out = io::BufWriter::with_capacity(PIECE, Pieces { pieces, seen });
            let packed = archive::pack_directory(top.into(), &mut out);
            if let Err(error) = &packed {
                // The stream is incomplete, and must not look complete.
                let broken = Err(io::Error::other(error.to_string()));
                let _ = out.get_ref().pieces.blocking_send(broken);
            }
            packed
        });
        let unpacked = self.unpack(to, Upload::pieces(body, None)).await;
        let packed = packing.await.unwrap_or_else(|error| Err(io::Error::other(error).into()));
        match (packed, unpacked) {
            // If the receiver is gone, it reports the better error.
            (Ok(_), unpacked) | (Err(archive::PackError::Write { .. }), unpacked) => unpacked,
            (Err(error), _) => Err(local(io::Error::other(error))),
        }
    }

    /// Copies the contents of a directory of the sandbox into a local one, which is created if needed. Does not trust the
    /// sandbox: writes nothing outside the directory, and skips links that lead out of it. Calls `seen` with the bytes
    /// received so far.
    pub async fn download_directory(
        &self,
        from: impl AsRef<[u8]>,
        to: &Path,
        seen: impl Fn(u64) + Send,
    ) -> Result<api::FilesMade, ClientError> {
        let local = |source: io::Error| ClientError::Local { path: to.to_owned(), source };
        let mut download = self.pack(from).await?;
        std::fs::create_dir_all(to).map_err(local)?;
        let top = std::fs::File::open(to).map_err(local)?;
        let (pieces, source) = mpsc::channel(PIECES_MAX);
        let unpacking = tokio::task::spawn_blocking(move || {
            let mut source = Received { pieces: source, piece: Bytes::new(), whole: false };
            archive::unpack(&mut source, &top.into(), archive::Links::Inside)
        });
        let received = async {
            while let Some(piece) = download.next().await? {
                seen(piece.len() as u64);
                if pieces.send(Some(piece)).await.is_err() {
                    return Ok(()); // The unpacking thread has failed, and returns the error.
                }
            }
            let _ = pieces.send(None).await; // As above.
            Ok(())
        };
        let received: Result<(), ClientError> = received.await;
        drop(pieces);
        let unpacked = unpacking.await.map_err(|error| local(io::Error::other(error)))?;
        received?;
        match unpacked {
            Ok(archive::Unpacked { entries, bytes, skipped }) => {
                Ok(api::FilesMade { entries, bytes, skipped })
            }
            Err(error) => Err(local(io::Error::other(error))),
        }
    }
}

fn truth(truth: bool) -> &'static [u8] {
    if truth { b"true" } else { b"false" }
}

/// The body of an upload.
pub struct Upload {
    size: Option<u64>,
    body: Body,
}

impl Upload {
    /// The whole body at once.
    pub fn bytes(bytes: impl Into<Bytes>) -> Self {
        let bytes = bytes.into();
        Self { size: Some(bytes.len() as u64), body: crate::transport::whole(bytes) }
    }

    /// A local directory as a tar stream, with the numeric ids of its owners. Calls `seen` with the bytes sent so far.
    pub fn directory(from: &Path, seen: impl Fn(u64) + Send + 'static) -> Result<Self, ClientError> {
        Self::directory_if(from, |_| true, seen)
    }

    /// The part of a directory that the filter accepts, by path. Skips everything in a directory that it rejects.
    pub fn directory_if(
        from: &Path,
        wanted: impl Fn(&[u8]) -> bool + Send + 'static,
        seen: impl Fn(u64) + Send + 'static,
    ) -> Result<Self, ClientError> {
        let local = |source: io::Error| ClientError::Local { path: from.to_owned(), source };
        let top = std::fs::File::open(from).map_err(local)?;
        let (pieces, body) = mpsc::channel(PIECES_MAX);
        tokio::task::spawn_blocking(move || {
            let mut out = io::BufWriter::with_capacity(PIECE, Pieces { pieces, seen });
            if let Err(error) = archive::pack_directory_if(top.into(), &mut out, &wanted) {
                // The stream is incomplete, and must not look complete.
                let _ = out.get_ref().pieces.blocking_send(Err(io::Error::other(error.to_string())));
            }
        });
        Ok(Self::pieces(body, None))
    }

    pub(crate) fn into_parts(self) -> (Option<u64>, Body) {
        (self.size, self.body)
    }

    /// A body in pieces. An error, or a wrong size, makes the whole upload fail.
    pub fn pieces(pieces: mpsc::Receiver<io::Result<Bytes>>, size: Option<u64>) -> Self {
        let frames = stream::unfold(pieces, async |mut pieces| {
            let piece = pieces.recv().await?;
            Some((piece.map(Frame::data), pieces))
        });
        Self { size, body: StreamBody::new(frames).map_err(Into::into).boxed_unsync() }
    }
}

/// The body of a download.
pub struct Download {
    /// The length, if known.
    pub size: Option<u64>,
    /// The entity tag of this content.
    pub etag: Option<String>,
    /// Whether this is the requested range, and not the whole file.
    pub partial: bool,
    url: String,
    body: Incoming,
}

impl Download {
    /// Returns the next bytes, or `None` at the end. After an error, the content is incomplete.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ClientError> {
        next_bytes(&mut self.body, &self.url).await
    }

    /// Returns all bytes, if there are at most `limit`.
    pub async fn collect(mut self, limit: usize) -> Result<Vec<u8>, ClientError> {
        let mut all = Vec::new();
        while let Some(bytes) = self.next().await? {
            if all.len() + bytes.len() > limit {
                let what = format!("it is longer than {limit} bytes");
                return Err(ClientError::Strange { url: self.url, what });
            }
            all.extend_from_slice(&bytes);
        }
        Ok(all)
    }
}

/// Changes of files.
pub struct FileWatch(SseReader);

impl FileWatch {
    /// Returns the next event, or `None` if the daemon stops; then start another watch.
    pub async fn next(&mut self) -> Result<Option<api::FileEvent>, ClientError> {
        loop {
            // Comments have no data: they only show that the stream is alive.
            let Some(event) = self.0.next().await? else { return Ok(None) };
            let Some(event) = event else { continue };
            let told = serde_json::from_slice(&event.data);
            let strange = |what| ClientError::Strange { url: self.0.url().to_owned(), what };
            return told.map(Some).map_err(|error| strange(error.to_string()));
        }
    }
}

/// Where an archive is written to.
struct Pieces<F> {
    pieces: mpsc::Sender<io::Result<Bytes>>,
    seen: F,
}

impl<F: Fn(u64)> io::Write for Pieces<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let piece = Bytes::copy_from_slice(bytes);
        self.pieces.blocking_send(Ok(piece)).map_err(|_| io::Error::from(io::ErrorKind::BrokenPipe))?;
        (self.seen)(bytes.len() as u64);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Where an archive is read from.
struct Received {
    pieces: mpsc::Receiver<Option<Bytes>>,
    piece: Bytes,
    /// The sender has marked the end; a closed channel alone does not mean the end.
    whole: bool,
}

impl io::Read for Received {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() && !self.whole {
            match self.pieces.blocking_recv() {
                Some(Some(piece)) => self.piece = piece,
                Some(None) => self.whole = true,
                None => return Err(io::ErrorKind::ConnectionAborted.into()),
            }
        }
        let length = into.len().min(self.piece.len());
        into[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}
