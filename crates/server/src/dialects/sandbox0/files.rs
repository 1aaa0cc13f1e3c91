//! Files: read, write, directories, move, delete, look.
//!
//! A path that is not absolute is below the directory for work. The whole file system can be reached.

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::Response;
use engine::{EngineError, Field, Files};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::files::{Condition, FileKind, FileStat, LIST_MAX, Links, Relocate, WriteOptions};

use super::answer::{Answer, done, with};
use super::error::Refusal;
use super::read::{Awake, Body};
use super::sandboxes::WORKSPACE;
use crate::http::app::App;
use crate::http::clock::guest_time;
use crate::http::download::{self, Unsent};
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::text::join;
use crate::http::upload::{check_whole, pour};

/// The largest file that is written, as the vendor has it.
const FILE_MAX: u64 = 100 << 20;
/// Entries in one listing.
const ENTRIES_MAX: usize = 100_000;

/// An absolute path.
pub fn absolute(path: &[u8]) -> Result<Vec<u8>, Refusal> {
    match path {
        [] => Err(Refusal::new(StatusCode::BAD_REQUEST, "invalid_request", "`path` must be given")),
        [b'/', ..] => Ok(path.to_vec()),
        _ => Ok(join(WORKSPACE.as_bytes(), path)),
    }
}

/// The path that a query names.
fn named(params: &mut Params) -> Result<Vec<u8>, Refusal> {
    absolute(&params.bytes("path").unwrap_or_default())
}

fn files(app: &App, awake: &Awake) -> Result<Files, EngineError> {
    app.engine.files(&awake.key.owner, awake.sandbox.id, None)
}

/// Reads a file.
pub async fn read(
    State(app): State<App>,
    awake: Awake,
    mut params: Params,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let (path, files) = (named(&mut params)?, files(&app, &awake)?);
    let sent = download::download(&app, &awake.key, &files, &path, &headers).await;
    sent.map_err(|unsent| match unsent {
        Unsent::Engine(error) => error.into(),
        Unsent::ConditionFailed => ApiError::from(unsent).into(),
    })
}

fn too_large() -> Refusal {
    let message =
        format!("a file must have at most {FILE_MAX} bytes: write it in a command, or with `shoal cp`");
    Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "file_too_large", message)
}

/// Writes a file, whole or not at all; or makes a directory.
pub async fn write(
    State(app): State<App>,
    awake: Awake,
    mut params: Params,
    request: Request,
) -> Result<Answer, Refusal> {
    let (path, files) = (named(&mut params)?, files(&app, &awake)?);
    if params.flag("mkdir", false)? {
        let parents = params.flag("recursive", false)?;
        files.make_directory(&path, parents, None).await?;
        return Ok(with(StatusCode::CREATED, json!({"created": true})));
    }
    let (head, body) = request.into_parts();
    check_whole(&head.headers)?;
    let announced =
        head.headers.get(header::CONTENT_LENGTH).and_then(|text| text.to_str().ok()?.parse().ok());
    if announced.is_some_and(|length: u64| length > FILE_MAX) {
        return Err(too_large());
    }
    let options =
        WriteOptions { path, mode: None, parents: true, size: announced, condition: Condition::None };
    let mut writing = files.write(options).await?;
    let mut stopping = app.stopping(&awake.key);
    let mut refused = None;
    pour(body, &mut stopping, async |mut incoming| {
        let mut length = 0;
        while let Some(bytes) = incoming.next().await? {
            length += bytes.len() as u64;
            let taken = match length > FILE_MAX {
                true => Err(too_large()),
                false => writing.write(bytes).await.map_err(Refusal::from),
            };
            if let Err(refusal) = taken {
                refused = Some(refusal);
                break;
            }
        }
        Ok(())
    })
    .await?;
    if let Some(refusal) = refused {
        return Err(refusal);
    }
    writing.finish().await?;
    Ok(done(json!({"written": true})))
}

/// Deletes a file, or a directory with all that is in it.
pub async fn remove(State(app): State<App>, awake: Awake, mut params: Params) -> Result<Answer, Refusal> {
    let (path, files) = (named(&mut params)?, files(&app, &awake)?);
    files.remove(&path, true, Condition::None).await?;
    Ok(done(json!({"deleted": true})))
}

/// `POST .../files/move`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Move {
    source: String,
    destination: String,
}

/// Gives a file another name. What has that name is replaced.
pub async fn relocate(
    State(app): State<App>,
    awake: Awake,
    Body(body): Body<Move>,
) -> Result<Answer, Refusal> {
    let wish = Relocate {
        from: absolute(body.source.as_bytes())?,
        to: absolute(body.destination.as_bytes())?,
        overwrite: true,
        parents: true,
        recursive: true,
    };
    files(&app, &awake)?.rename(wish).await?;
    Ok(done(json!({"moved": true})))
}

/// Describes a file.
pub async fn stat(State(app): State<App>, awake: Awake, mut params: Params) -> Result<Answer, Refusal> {
    let (path, files) = (named(&mut params)?, files(&app, &awake)?);
    let stat = files.stat(&path, Links::Keep).await?;
    Ok(done(info(&path, &stat)))
}

/// What is in a directory.
pub async fn list(State(app): State<App>, awake: Awake, mut params: Params) -> Result<Answer, Refusal> {
    let (path, files) = (named(&mut params)?, files(&app, &awake)?);
    let (mut entries, mut after) = (Vec::new(), Vec::new());
    loop {
        let page = files.list(&path, &after, LIST_MAX).await.map_err(|error| match error {
            EngineError::File { ref source } if source.kind == wire::files::FileErrorKind::NotFound => {
                Refusal::from(error).status(StatusCode::NOT_FOUND, "directory_not_found")
            }
            error => error.into(),
        })?;
        after = page.entries.last().map(|last| last.name.clone()).unwrap_or_default();
        entries.extend(page.entries.iter().map(|entry| info(&join(&path, &entry.name), &entry.stat)));
        if entries.len() > ENTRIES_MAX {
            return Err(Field::Path
                .must(format!("lead to a directory with at most {ENTRIES_MAX} entries"))
                .into());
        }
        if !page.more {
            return Ok(done(json!({"entries": entries})));
        }
    }
}

/// A file as clients see it.
fn info(path: &[u8], stat: &FileStat) -> Value {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut info = json!({
        "name": text(path.rsplit(|byte| *byte == b'/').next().unwrap_or_default()),
        "path": text(path),
        "type": match stat.kind {
            FileKind::Directory => "dir",
            FileKind::Symlink => "symlink",
            _ => "file",
        },
        "size": stat.size,
        "mode": format!("{:04o}", stat.mode),
        "mod_time": guest_time(&stat.modified),
        "is_link": stat.kind == FileKind::Symlink,
    });
    if let Some(target) = &stat.target {
        info["link_target"] = text(target).into();
    }
    info
}
