//! Files on the data plane: upload, download, stat, glob, grep.
//!
//! A path that is not absolute is meant where commands run.

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use engine::{EngineError, Field, Files, GuestUser, Key, Sandbox};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::files::{Condition, FileStat, Grep, SearchLimits, WriteOptions};

use super::error::{Doing, Refusal};
use super::json::Notes;
use super::read::{DataBody, Target};
use crate::dialects::common::form::{Form, FormError};
use crate::http::app::{App, Stopping};
use crate::http::clock::guest_time;
use crate::http::download::{self, Unsent};
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::text::join;

/// Matches of a search, if the caller does not say.
const MATCHES_DEFAULT: u32 = 1000;
/// How long a search takes at most: shorter than clients wait.
const SEARCH_SECONDS: u64 = 45;
const SEARCH_ENTRIES_MAX: u64 = 1_000_000;
const SEARCH_BYTES_MAX: u64 = 1 << 30;

fn reading(error: EngineError) -> Refusal {
    Refusal::data(Doing::Read, error)
}

/// Why a file is not sent, in this dialect's shape.
pub fn unsent(unsent: Unsent) -> Refusal {
    match unsent {
        Unsent::Engine(error) => reading(error),
        Unsent::ConditionFailed => {
            let message = "the file is not what the request's condition says";
            Refusal::new(StatusCode::PRECONDITION_FAILED, Doing::Read.error(), message)
        }
    }
}

fn writing(error: EngineError) -> Refusal {
    Refusal::data(Doing::Write, error)
}

/// The files of a sandbox, as the user whom its commands run as.
fn files(app: &App, key: &Key, sandbox: &Sandbox) -> Result<Files, EngineError> {
    let user = Notes::of(sandbox).run_config.user.map(GuestUser::parse).transpose();
    app.engine.files(&key.owner, sandbox.id, user.map_err(|must| must.of(Field::User))?)
}

/// An absolute path.
pub fn absolute(app: &App, key: &Key, sandbox: &Sandbox, path: Vec<u8>) -> Result<Vec<u8>, EngineError> {
    if path.is_empty() {
        return Err(Field::Path.must("not be empty"));
    }
    if path.starts_with(b"/") {
        return Ok(path);
    }
    let place = match Notes::of(sandbox).run_config.work_dir {
        Some(place) => place,
        None => app.engine.working_directory(&key.owner, sandbox.id)?,
    };
    Ok(join(place.as_bytes(), &path))
}

fn path(app: &App, target: &Target, params: &mut Params) -> Result<Vec<u8>, EngineError> {
    let path = params.bytes("path").ok_or_else(|| Field::Path.must("be given"))?;
    absolute(app, &target.key, &target.sandbox, path)
}

/// Writes a file: the part `file` of a form. Directories that are missing are made.
pub async fn upload(
    State(app): State<App>,
    target: Target,
    mut params: Params,
    request: Request,
) -> Result<Json<Value>, Refusal> {
    let mut stopping = app.stopping(&target.key);
    let mut form = Form::of(request)
        .await
        .map_err(|error| Refusal::new(error.status(), Doing::Write.error(), error.body_text()))?;
    let path = path(&app, &target, &mut params).map_err(writing)?;
    let files = files(&app, &target.key, &target.sandbox).map_err(writing)?;
    let stat = write_part(&files, &path, &mut form, &mut stopping).await?;
    Ok(Json(json!({"path": String::from_utf8_lossy(&path), "size_bytes": stat.size})))
}

/// Writes the part `file` of a form as it comes.
async fn write_part(
    files: &Files,
    path: &[u8],
    form: &mut Form,
    stopping: &mut Stopping,
) -> Result<FileStat, Refusal> {
    while let Some(mut part) = unless_stopped(stopping, form.next()).await? {
        if part.name() != Some("file") {
            while unless_stopped(stopping, part.chunk()).await?.is_some() {}
            continue;
        }
        let options = WriteOptions {
            path: path.to_vec(),
            mode: None,
            parents: true,
            size: None,
            condition: Condition::None,
        };
        let mut output = files.write(options).await.map_err(writing)?;
        while let Some(bytes) = unless_stopped(stopping, part.chunk()).await? {
            if !bytes.is_empty() {
                output.write(bytes).await.map_err(writing)?;
            }
        }
        return Ok(output.finish().await.map_err(writing)?.stat);
    }
    Err(Refusal::new(StatusCode::BAD_REQUEST, Doing::Write.error(), "the form has no part `file`"))
}

async fn unless_stopped<T>(
    stopping: &mut Stopping,
    reading: impl Future<Output = Result<T, FormError>>,
) -> Result<T, Refusal> {
    let read = tokio::select! {
        read = reading => read,
        halt = stopping.wait() => return Err(ApiError::from(halt).into()),
    };
    read.map_err(|error| {
        let status = match &error {
            FormError::Broken(_) | FormError::Shapeless => StatusCode::BAD_REQUEST,
            FormError::Late => StatusCode::REQUEST_TIMEOUT,
        };
        Refusal::new(status, Doing::Write.error(), error.to_string())
    })
}

/// Reads a file, or a range of it.
pub async fn download(
    State(app): State<App>,
    target: Target,
    mut params: Params,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let path = path(&app, &target, &mut params).map_err(reading)?;
    let files = files(&app, &target.key, &target.sandbox).map_err(reading)?;
    download::download(&app, &target.key, &files, &path, &headers).await.map_err(unsent)
}

/// What `GET` would answer, without the bytes.
pub async fn stat(
    State(app): State<App>,
    target: Target,
    mut params: Params,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let path = path(&app, &target, &mut params).map_err(reading)?;
    let files = files(&app, &target.key, &target.sandbox).map_err(reading)?;
    download::describe_file(&files, &path, &headers).await.map_err(unsent)
}

/// `POST {dataplane}/glob` and `/grep`
#[derive(Debug, Deserialize)]
pub struct Search {
    pattern: String,
    #[serde(default)]
    path: Option<String>,
    #[serde(default)]
    glob: Option<String>,
    #[serde(default)]
    limit: Option<i64>,
}

impl Search {
    fn root(&self, app: &App, target: &Target) -> Result<Vec<u8>, Refusal> {
        let path = self.path.clone().filter(|path| !path.is_empty()).unwrap_or_else(|| ".".into());
        let path = absolute(app, &target.key, &target.sandbox, path.into_bytes()).map_err(reading)?;
        Ok(path.strip_suffix(b"/.").map(<[u8]>::to_vec).unwrap_or(path))
    }

    fn limits(&self) -> Result<SearchLimits, Refusal> {
        let most = engine::files::MATCHES_MAX;
        let matches = match self.limit {
            None => MATCHES_DEFAULT,
            Some(limit) if limit > 0 => u32::try_from(limit).unwrap_or(most).min(most),
            Some(_) => return Err(reading(Field::Limit.must("be a number above zero"))),
        };
        Ok(SearchLimits {
            matches,
            entries: SEARCH_ENTRIES_MAX,
            bytes: SEARCH_BYTES_MAX,
            milliseconds: SEARCH_SECONDS * 1000,
            hidden: true,
        })
    }
}

/// Finds files by name.
pub async fn glob(
    State(app): State<App>,
    target: Target,
    DataBody(body): DataBody<Search>,
) -> Result<Json<Value>, Refusal> {
    let root = body.root(&app, &target)?;
    let files = files(&app, &target.key, &target.sandbox).map_err(reading)?;
    let found = files.glob(&root, body.pattern.as_bytes(), body.limits()?).await.map_err(reading)?;
    let truncated = found.cut.is_some();
    let mut matches = found.matches;
    matches.sort_by(|one, other| one.name.cmp(&other.name));
    let matches: Vec<Value> = matches
        .iter()
        .map(|entry| {
            json!({
                "path": String::from_utf8_lossy(&join(&root, &entry.name)),
                "is_dir": entry.stat.kind == wire::files::FileKind::Directory,
                "size_bytes": entry.stat.size,
                "modified_at": guest_time(&entry.stat.modified),
            })
        })
        .collect();
    Ok(Json(json!({"matches": matches, "truncated": truncated})))
}

/// Finds lines that contain a text.
pub async fn grep(
    State(app): State<App>,
    target: Target,
    DataBody(body): DataBody<Search>,
) -> Result<Json<Value>, Refusal> {
    let grep = Grep {
        root: body.root(&app, &target)?,
        pattern: body.pattern.clone(),
        regex: false,
        ignore_case: false,
        include: body
            .glob
            .iter()
            .filter(|glob| !glob.is_empty())
            .map(|glob| glob.clone().into_bytes())
            .collect(),
        limits: body.limits()?,
    };
    let files = files(&app, &target.key, &target.sandbox).map_err(reading)?;
    let found = files.grep(grep).await.map_err(reading)?;
    let truncated = found.cut.is_some();
    let mut matches = found.matches;
    matches.sort_by(|one, other| (&one.path, one.line).cmp(&(&other.path, other.line)));
    let matches: Vec<Value> = matches
        .iter()
        .map(|found| {
            let (path, text) = (String::from_utf8_lossy(&found.path), String::from_utf8_lossy(&found.text));
            json!({"path": path, "line": found.line, "text": text})
        })
        .collect();
    Ok(Json(json!({"matches": matches, "truncated": truncated})))
}
