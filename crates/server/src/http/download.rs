//! Sends a file or an archive: conditions, ranges, and a streamed body of any size.
//!
//! Bytes that the caller does not read wait in the guest. If the caller disconnects, the operation in the guest ends.

use axum::body::Body;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::files::{Packing, Reading};
use engine::snapshot::Exported;
use engine::volume::VolumeFiles;
use engine::{EngineError, Files, Key};
use futures_util::stream;
use wire::files::{ByteRange, FileErrorKind, FileStat, Links};

use crate::http::app::App;
use crate::http::conditions::{Conditions, Verdict, etag, http_date, parse_range};
use crate::http::error::ApiError;
use crate::observe::log::chain_of;

/// Why a file is not sent.
pub enum Unsent {
    /// The engine failed.
    Engine(EngineError),
    /// A condition of the request does not hold.
    ConditionFailed,
}

impl From<EngineError> for Unsent {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

impl From<Unsent> for ApiError {
    fn from(unsent: Unsent) -> Self {
        match unsent {
            Unsent::Engine(error) => error.into(),
            Unsent::ConditionFailed => ApiError::new(
                StatusCode::PRECONDITION_FAILED,
                "condition_failed",
                "the file is not what the request's condition says",
            ),
        }
    }
}

/// Sends a file, or the part of it that the request's headers ask for. Dialects use this too.
pub async fn download(
    app: &App,
    key: &Key,
    files: &Files,
    path: &[u8],
    headers: &HeaderMap,
) -> Result<Response, Unsent> {
    let conditions = Conditions::read(headers);
    if conditions.may_be_fresh() {
        // Checked first: a file that the caller has already need not be opened.
        let stat = files.stat(path, Links::Follow).await?;
        if let Some(answer) = conditional(&conditions, &stat) {
            return answer;
        }
    }
    let range = headers.get(header::RANGE).and_then(|value| parse_range(value.to_str().ok()?));
    let mut reading = files.read(path, range.unwrap_or(ByteRange::Whole)).await?;
    let mut partial = range.is_some();
    if partial && !conditions.range_holds(&reading.opened().stat) {
        // The file is not the version that the caller has a part of.
        (reading, partial) = (files.read(path, ByteRange::Whole).await?, false);
    }
    let opened = reading.opened().clone();
    if let Some(answer) = conditional(&conditions, &opened.stat) {
        return answer;
    }
    let status = if partial { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let mut answer = (status, body_of(Source::File(Box::new(reading)), app, key)).into_response();
    describe(answer.headers_mut(), &opened.stat);
    if let Some(length) = opened.length {
        answer.headers_mut().insert(header::CONTENT_LENGTH, length.into());
        if partial {
            let (start, size) = (opened.start, opened.stat.size);
            let last = (start + length).saturating_sub(1);
            answer
                .headers_mut()
                .insert(header::CONTENT_RANGE, value(&format!("bytes {start}-{last}/{size}")));
        }
    }
    Ok(answer)
}

/// The response of [`download`] without the body.
pub async fn describe_file(files: &Files, path: &[u8], headers: &HeaderMap) -> Result<Response, Unsent> {
    let stat = files.stat(path, Links::Follow).await?;
    if let Some(answer) = conditional(&Conditions::read(headers), &stat) {
        return answer;
    }
    let kind = match stat.kind {
        wire::files::FileKind::File => None,
        wire::files::FileKind::Directory => Some(FileErrorKind::IsDirectory),
        _ => Some(FileErrorKind::NotARegularFile),
    };
    if let Some(kind) = kind {
        let source = wire::files::FileError { kind, path: path.to_vec(), detail: String::new() };
        return Err(EngineError::File { source }.into());
    }
    let mut answer = StatusCode::OK.into_response();
    describe(answer.headers_mut(), &stat);
    if stat.size > 0 {
        answer.headers_mut().insert(header::CONTENT_LENGTH, stat.size.into());
    }
    Ok(answer)
}

/// The response if it is 304 or 412.
fn conditional(conditions: &Conditions, stat: &FileStat) -> Option<Result<Response, Unsent>> {
    match conditions.verdict(stat) {
        Verdict::GoOn => None,
        Verdict::NotModified => {
            let mut answer = StatusCode::NOT_MODIFIED.into_response();
            describe(answer.headers_mut(), stat);
            answer.headers_mut().remove(header::CONTENT_TYPE);
            Some(Ok(answer))
        }
        Verdict::Failed => Some(Err(Unsent::ConditionFailed)),
    }
}

/// The headers of a file. A browser must never render a guest's bytes as a page of ours.
fn describe(headers: &mut HeaderMap, stat: &FileStat) {
    headers.insert(header::CONTENT_TYPE, value("application/octet-stream"));
    headers.insert(header::ETAG, value(&etag(&stat.version())));
    headers.insert(header::ACCEPT_RANGES, value("bytes"));
    if let Some(date) = http_date(&stat.modified) {
        headers.insert(header::LAST_MODIFIED, value(&date));
    }
    inert(headers);
}

/// Headers that keep a browser from running or storing a guest's bytes.
pub fn inert(headers: &mut HeaderMap) {
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, value("nosniff"));
    headers.insert(header::CONTENT_SECURITY_POLICY, value("sandbox"));
    headers.insert(header::CACHE_CONTROL, value("no-cache"));
}

/// A header value of plain ASCII.
pub fn value(text: &str) -> header::HeaderValue {
    header::HeaderValue::from_str(text).expect("what we say of files in headers is plain ASCII")
}

/// The source of a response's bytes.
pub enum Source {
    /// One file.
    File(Box<Reading>),
    /// A directory as a tar stream.
    Archive(Box<Packing>),
    /// With the object that keeps the volume mounted.
    Volume(Box<Packing>, Box<VolumeFiles>),
    /// The archive of a snapshot.
    Snapshot(Box<Exported>),
}

/// Streams the bytes. An error in the middle cuts the connection, since the status has been sent.
pub fn body_of(source: Source, app: &App, key: &Key) -> Body {
    let stopping = app.stopping(key);
    let bytes = stream::unfold(Some((source, stopping)), async |state| {
        let (mut source, mut stopping) = state?;
        let next = async {
            match &mut source {
                Source::File(reading) => reading.next().await,
                Source::Archive(packing) | Source::Volume(packing, _) => packing.next().await,
                Source::Snapshot(exported) => exported.next().await,
            }
        };
        let next = tokio::select! {
            next = next => next,
            // The client sees a cut connection in both cases.
            _ = stopping.wait() => Err(EngineError::Stopping),
        };
        match next {
            Ok(Some(bytes)) => Some((Ok(bytes), Some((source, stopping)))),
            Ok(None) => {
                // Before the stream ends, so that a client that has received everything can delete the volume at once.
                if let Source::Volume(_, volume) = source
                    && let Err(error) = volume.close().await
                {
                    tracing::warn!(error = chain_of(&error), "cannot delete a volume's sandbox");
                }
                None
            }
            Err(error) => {
                tracing::info!(error = chain_of(&error), "a download was cut off");
                Some((Err(error), None))
            }
        }
    });
    Body::from_stream(bytes)
}
