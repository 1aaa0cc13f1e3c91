//! Files of a devbox. A path that is not absolute is meant in the user's home directory.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{EngineError, Field, Files, Key, Sandbox};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::files::{ByteRange, Condition, PATH_MAX, WriteOptions};

use super::devboxes::user_of;
use super::error::Refusal;
use super::ids;
use super::read::{Body, Target};
use crate::dialects::common::form::{Form, FormError, Part};
use crate::dialects::common::home::home;
use crate::http::app::{App, Stopping};
use crate::http::download::{self, Unsent};
use crate::http::error::ApiError;
use crate::http::text::join;

/// A file as text in an answer. Larger ones are downloaded.
const TEXT_MAX: usize = 32 << 20;

/// The files of a devbox, as the user whom its executions run as.
pub struct Place {
    app: App,
    key: Key,
    sandbox: Sandbox,
    /// Them.
    pub files: Files,
}

impl Place {
    /// Of a devbox.
    pub fn of(app: &App, target: &Target) -> Result<Self, Refusal> {
        let (key, sandbox) = (target.key.clone(), target.sandbox.clone());
        let files = app.engine.files(&key.owner, sandbox.id, user_of(&sandbox)?)?;
        Ok(Self { app: app.clone(), key, sandbox, files })
    }

    /// An absolute path.
    pub async fn path(&self, path: &str) -> Result<Vec<u8>, EngineError> {
        match path {
            "" => Err(Field::Path.must("not be empty")),
            path if path.starts_with('/') => Ok(path.as_bytes().to_vec()),
            path => {
                let home = home(&self.app, &self.key, &self.sandbox, user_of(&self.sandbox)?).await?;
                let below = path.strip_prefix("~/").unwrap_or(path);
                Ok(join(home.as_bytes(), below.as_bytes()))
            }
        }
    }
}

fn options(path: Vec<u8>) -> WriteOptions {
    WriteOptions { path, mode: None, parents: true, size: None, condition: Condition::None }
}

/// `POST .../upload_file`: the part `path` of a form, then the part `file`.
pub async fn upload(
    State(app): State<App>,
    target: Target,
    request: Request,
) -> Result<Json<Value>, Refusal> {
    let mut stopping = app.stopping(&target.key);
    let form = Form::of(request).await;
    let mut form = form.map_err(|error| Refusal::new(error.status(), "bad_form", error.body_text()))?;
    let place = Place::of(&app, &target)?;
    let mut path = None;
    while let Some(mut part) = unless_stopped(&mut stopping, form.next()).await? {
        match part.name() {
            Some("path") => path = Some(text(&mut part, &mut stopping).await?),
            Some("file") => {
                let Some(path) = path else {
                    return Err(Refusal::must("path", "come before the file in the form"));
                };
                let mut output = place.files.write(options(place.path(&path).await?)).await?;
                while let Some(bytes) = unless_stopped(&mut stopping, part.chunk()).await? {
                    if !bytes.is_empty() {
                        output.write(bytes).await?;
                    }
                }
                output.finish().await?;
                return Ok(Json(json!({})));
            }
            _ => while unless_stopped(&mut stopping, part.chunk()).await?.is_some() {},
        }
    }
    Err(Refusal::must("file", "be a part of the form"))
}

/// A part that is a path.
async fn text(part: &mut Part<'_>, stopping: &mut Stopping) -> Result<String, Refusal> {
    let mut bytes = Vec::new();
    while let Some(piece) = unless_stopped(stopping, part.chunk()).await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > PATH_MAX {
            return Err(Refusal::must("path", format!("have at most {PATH_MAX} bytes")));
        }
    }
    String::from_utf8(bytes).map_err(|_| Refusal::must("path", "be UTF-8"))
}

async fn unless_stopped<T>(
    stopping: &mut Stopping,
    reading: impl Future<Output = Result<T, FormError>>,
) -> Result<T, Refusal> {
    let read = tokio::select! {
        read = reading => read,
        halt = stopping.wait() => return Err(ApiError::from(halt).into()),
    };
    // The client repeats a request that was too slow, so it is not told that it was: its next try would be as slow.
    read.map_err(|error| Refusal::new(StatusCode::BAD_REQUEST, "bad_form", error.to_string()))
}

/// `POST .../download_file`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Download {
    path: String,
}

/// Sends a file.
pub async fn download(
    State(app): State<App>,
    target: Target,
    Body(body): Body<Download>,
) -> Result<Response, Refusal> {
    let place = Place::of(&app, &target)?;
    let path = place.path(&body.path).await?;
    let sent = download::download(&app, &target.key, &place.files, &path, &HeaderMap::new()).await;
    sent.map_err(|unsent| match unsent {
        Unsent::Engine(error) => error.into(),
        Unsent::ConditionFailed => Refusal::bug(),
    })
}

/// `POST .../read_file_contents`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Read {
    file_path: String,
}

/// Sends a file as text.
pub async fn read(
    State(app): State<App>,
    target: Target,
    Body(body): Body<Read>,
) -> Result<Response, Refusal> {
    let place = Place::of(&app, &target)?;
    let mut reading = place.files.read(&place.path(&body.file_path).await?, ByteRange::Whole).await?;
    let mut bytes = Vec::new();
    while let Some(piece) = reading.next().await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > TEXT_MAX {
            let message = format!("the file has more than {TEXT_MAX} bytes; download it instead");
            return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "file_too_large", message));
        }
    }
    let text = String::from_utf8_lossy(&bytes).into_owned();
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}

/// `POST .../write_file_contents`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Write {
    file_path: String,
    contents: String,
}

/// Writes a text to a file. Directories that are missing are made.
pub async fn write(
    State(app): State<App>,
    target: Target,
    Body(body): Body<Write>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    let mut output = place.files.write(options(place.path(&body.file_path).await?)).await?;
    if !body.contents.is_empty() {
        output.write(body.contents.into()).await?;
    }
    output.finish().await?;
    let devbox = ids::devbox(&app.engine, &target.key.owner, target.sandbox.id);
    Ok(Json(json!({"devbox_id": devbox, "exit_status": 0, "stdout": "", "stderr": ""})))
}
