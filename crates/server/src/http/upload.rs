//! Receives a body of any size: streamed, with a limit on how long its sender may be silent.

use std::time::Duration;

use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use bytes::Bytes;
use engine::Key;
use engine::image::Upload;
use http_body_util::BodyExt;
use tokio::io::AsyncWriteExt;

use crate::http::app::{App, Stopping};
use crate::http::error::ApiError;

/// How long a caller may pause in the middle of a body.
const BODY_IDLE_MAX: Duration = Duration::from_secs(60);

/// A body must be a whole, unencoded file: the headers that would make it anything else are not supported.
pub fn check_whole(headers: &HeaderMap) -> Result<(), ApiError> {
    if headers.contains_key(header::CONTENT_RANGE) {
        return Err(ApiError::must("Content-Range", "be left out: files are written whole"));
    }
    match headers.get(header::CONTENT_ENCODING) {
        Some(encoding) if encoding != "identity" => Err(ApiError::new(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "unsupported_encoding",
            "the body must not be encoded",
        )),
        Some(_) | None => Ok(()),
    }
}

/// A body that is being received.
pub struct Incoming<'a> {
    body: &'a mut Body,
    stopping: &'a mut Stopping,
}

impl Incoming<'_> {
    /// The next bytes; `None` at the end of the body.
    pub async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            let frame = tokio::select! {
                frame = tokio::time::timeout(BODY_IDLE_MAX, self.body.frame()) => frame,
                halt = self.stopping.wait() => return Err(halt.into()),
            };
            match frame {
                Ok(None) => return Ok(None),
                Ok(Some(Ok(frame))) => {
                    if let Ok(bytes) = frame.into_data() {
                        return Ok(Some(bytes));
                    }
                }
                Ok(Some(Err(_))) => {
                    return Err(ApiError::new(
                        StatusCode::BAD_REQUEST,
                        "body_incomplete",
                        "the connection ended before the body did",
                    ));
                }
                Err(_) => {
                    return Err(ApiError::new(
                        StatusCode::REQUEST_TIMEOUT,
                        "body_too_slow",
                        format!("nothing of the body came for {} s", BODY_IDLE_MAX.as_secs()),
                    ));
                }
            }
        }
    }
}

/// Passes the chunks of a body to `take`.
pub async fn pour<T>(
    mut body: Body,
    stopping: &mut Stopping,
    take: impl AsyncFnOnce(Incoming<'_>) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    take(Incoming { body: &mut body, stopping }).await
}

/// After how many bytes the free space is read again. Other uploads and pulls use the same disk.
const ROOM_CHECK_BYTES: u64 = 1 << 20;

/// Stores a body of at most `most` bytes in a new file, as far as the disk has room for it.
pub async fn received(app: &App, key: &Key, head: &Parts, body: Body, most: u64) -> Result<Upload, ApiError> {
    let upload = app.engine.upload()?;
    let room = app.engine.upload_room()?;
    let full = || {
        ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "disk_full", "the archive does not fit on the disk")
            .detail("free_bytes", room)
    };
    let announced = head.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > room) {
        return Err(full());
    }
    let too_large = || {
        let message = format!("the archive must have at most {most} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    };
    if announced.is_some_and(|length: u64| length > most) {
        return Err(too_large());
    }
    let failed = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::StorageFull | std::io::ErrorKind::QuotaExceeded => full(),
        _ => ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the archive cannot be kept"),
    };
    let mut file = tokio::fs::File::from_std(upload.file.try_clone().map_err(failed)?);
    let mut stopping = app.stopping(key);
    let poured = pour(body, &mut stopping, async |mut incoming| {
        let (mut length, mut checked) = (0u64, 0u64);
        while let Some(bytes) = incoming.next().await? {
            length += bytes.len() as u64;
            if length > most {
                return Err(too_large());
            }
            if length - checked >= ROOM_CHECK_BYTES {
                checked = length;
                if app.engine.upload_room()? == 0 {
                    return Err(full());
                }
            }
            file.write_all(&bytes).await.map_err(failed)?;
        }
        file.flush().await.map_err(failed)
    });
    poured.await?;
    Ok(upload)
}
