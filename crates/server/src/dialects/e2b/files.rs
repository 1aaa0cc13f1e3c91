//! Contents of files over plain HTTP: `GET` and `POST /files`, and whether a sandbox runs.

use std::io::Write;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use engine::files::Writing;
use flate2::write::GzDecoder;
use serde_json::{Value, json};
use wire::files::{Condition, WriteOptions};

use super::error::Refusal;
use super::filesystem::Place;
use super::read::{DONE, Target};
use crate::dialects::common::form::{Form, FormError};
use crate::http::app::{App, Stopping};
use crate::http::download::{self, Unsent};
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::upload::pour;

/// How much is decompressed at once: a thousand times as much may come of it.
const GZIP_PIECE: usize = 1 << 10;

/// `GET /health`: the target is there, so it runs.
pub async fn health(_: Target) -> StatusCode {
    DONE
}

/// What the query says.
async fn place(app: &App, target: &Target, params: &mut Params) -> Result<(Place, Option<String>), Refusal> {
    let user = params.text("username")?.filter(|user| !user.is_empty());
    let path = params.text("path")?.filter(|path| !path.is_empty());
    Ok((Place::of(app, target, user.as_deref()).await?, path))
}

/// Reads a file, or a range of it.
pub async fn read(
    State(app): State<App>,
    target: Target,
    mut params: Params,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let (place, path) = place(&app, &target, &mut params).await?;
    let path = place.path(&path.unwrap_or_default());
    let sent = download::download(&app, &target.key, &place.files, &path, &headers).await;
    sent.map_err(|unsent| match unsent {
        Unsent::Engine(error) => Refusal::agent(target.id, error),
        Unsent::ConditionFailed => {
            Refusal::new(StatusCode::PRECONDITION_FAILED, "the file is not what the request's condition says")
        }
    })
}

/// Writes files: one that is the body, or those of a form. Directories that are missing are made.
pub async fn write(
    State(app): State<App>,
    target: Target,
    mut params: Params,
    request: Request,
) -> Result<Json<Value>, Refusal> {
    let (place, path) = place(&app, &target, &mut params).await?;
    let uploading = Uploading { target: &target, place: &place };
    let mut stopping = app.stopping(&target.key);
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let written = match kind.is_some_and(|kind| kind.starts_with("multipart/form-data")) {
        true => uploading.form(request, path, &mut stopping).await?,
        false => vec![uploading.body(request, path, &mut stopping).await?],
    };
    if written.is_empty() {
        return Err(Refusal::invalid("the form has no part `file`"));
    }
    Ok(Json(Value::Array(written)))
}

struct Uploading<'a> {
    target: &'a Target,
    place: &'a Place,
}

impl Uploading<'_> {
    async fn begin(&self, path: &[u8]) -> Result<Writing, Refusal> {
        let options = WriteOptions {
            path: path.to_vec(),
            mode: None,
            parents: true,
            size: None,
            condition: Condition::None,
        };
        self.place.files.write(options).await.map_err(|error| Refusal::agent(self.target.id, error))
    }

    async fn give(&self, writing: &mut Writing, bytes: Bytes) -> Result<(), Refusal> {
        match bytes.is_empty() {
            true => Ok(()),
            false => writing.write(bytes).await.map_err(|error| Refusal::agent(self.target.id, error)),
        }
    }

    async fn finish(&self, writing: Writing, path: &[u8]) -> Result<Value, Refusal> {
        writing.finish().await.map_err(|error| Refusal::agent(self.target.id, error))?;
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Ok(json!({"path": text(path), "name": text(name), "type": "file"}))
    }

    /// The body is the file.
    async fn body(
        &self,
        request: Request,
        path: Option<String>,
        stopping: &mut Stopping,
    ) -> Result<Value, Refusal> {
        let path = path.ok_or_else(|| Refusal::invalid("`path` is missing"))?;
        let path = self.place.path(&path);
        let encoding = request.headers().get(header::CONTENT_ENCODING);
        let mut gzip = match encoding.and_then(|encoding| encoding.to_str().ok()) {
            None | Some("" | "identity") => None,
            Some("gzip") => Some(GzDecoder::new(Vec::new())),
            Some(_) => return Err(Refusal::invalid("`Content-Encoding` must be `gzip` or `identity`")),
        };
        let body: Body = request.into_body();
        let mut writing = self.begin(&path).await?;
        let mut failed = None;
        let poured = pour(body, stopping, async |mut incoming| {
            while let Some(bytes) = incoming.next().await? {
                if let Err(refusal) = self.take(&mut writing, &mut gzip, bytes).await {
                    failed = Some(refusal);
                    return Ok(());
                }
            }
            Ok(())
        });
        poured.await?;
        if let Some(refusal) = failed {
            return Err(refusal);
        }
        if let Some(gzip) = gzip {
            let rest = gzip.finish().map_err(|_| not_gzip())?;
            self.give(&mut writing, rest.into()).await?;
        }
        self.finish(writing, &path).await
    }

    async fn take(
        &self,
        writing: &mut Writing,
        gzip: &mut Option<GzDecoder<Vec<u8>>>,
        bytes: Bytes,
    ) -> Result<(), Refusal> {
        let Some(gzip) = gzip else { return self.give(writing, bytes).await };
        for piece in bytes.chunks(GZIP_PIECE) {
            gzip.write_all(piece).map_err(|_| not_gzip())?;
            let plain = std::mem::take(gzip.get_mut());
            self.give(writing, plain.into()).await?;
        }
        Ok(())
    }

    /// Each part `file` is a file. Its name is where it goes, unless the query says.
    async fn form(
        &self,
        request: Request,
        path: Option<String>,
        stopping: &mut Stopping,
    ) -> Result<Vec<Value>, Refusal> {
        let form = Form::of(request).await;
        let mut form = form.map_err(|error| Refusal::invalid(error.body_text()))?;
        let mut written = Vec::new();
        while let Some(mut part) = unless_stopped(stopping, form.next()).await? {
            if part.name() != Some("file") {
                while unless_stopped(stopping, part.chunk()).await?.is_some() {}
                continue;
            }
            let named = path.clone().or_else(|| part.file_name().map(str::to_owned));
            let named = named.ok_or_else(|| Refusal::invalid("a part of the form has no file name"))?;
            let path = self.place.path(&named);
            let mut writing = self.begin(&path).await?;
            while let Some(bytes) = unless_stopped(stopping, part.chunk()).await? {
                self.give(&mut writing, bytes).await?;
            }
            written.push(self.finish(writing, &path).await?);
        }
        Ok(written)
    }
}

fn not_gzip() -> Refusal {
    Refusal::invalid("the body must be gzip, as its `Content-Encoding` says")
}

async fn unless_stopped<T>(
    stopping: &mut Stopping,
    reading: impl Future<Output = Result<T, FormError>>,
) -> Result<T, Refusal> {
    let read = tokio::select! {
        read = reading => read,
        halt = stopping.wait() => return Err(ApiError::from(halt).into()),
    };
    read.map_err(|error| match &error {
        FormError::Broken(_) | FormError::Shapeless => Refusal::invalid(error.to_string()),
        FormError::Late => Refusal::new(StatusCode::REQUEST_TIMEOUT, error.to_string()),
    })
}
