//! Files in the toolbox: several up or down in one request, list, info, folders, move, delete, and searches.
//!
//! A path that is not absolute is meant where commands run.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use engine::files::Reading;
use engine::{EngineError, Field, Files};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use wire::files::{
    ByteRange, Condition, Edit, FileEntry, FileKind, FileStat, Grep, LIST_MAX, LineEnds, Links, Relocate,
    SearchLimits, WriteOptions,
};

use super::error::Refusal;
use super::read::{Target, ToolboxBody};
use super::sandboxes::user_of;
use crate::dialects::common::form::{Form, FormError, Part};
use crate::dialects::common::home::home;
use crate::http::app::{App, Stopping};
use crate::http::clock::guest_time;
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::text::join;

/// Files in one request.
const FILES_MAX: usize = 10_000;
/// The longest path.
const PATH_MAX: usize = wire::files::PATH_MAX;
/// How long a search takes at most: shorter than clients wait.
const SEARCH_SECONDS: u64 = 45;
const SEARCH_ENTRIES_MAX: u64 = 1_000_000;
const SEARCH_BYTES_MAX: u64 = 1 << 30;
/// Entries in one answer.
const ENTRIES_MAX: usize = 100_000;

/// The files of a sandbox, as the user whom its commands run as.
struct Place {
    files: Files,
    directory: String,
}

impl Place {
    fn of(app: &App, target: &Target) -> Result<Self, Refusal> {
        let place = || -> Result<Self, EngineError> {
            let user = user_of(&target.sandbox)?;
            Ok(Self {
                files: app.engine.files(&target.key.owner, target.sandbox.id, user)?,
                directory: app.engine.working_directory(&target.key.owner, target.sandbox.id)?,
            })
        };
        place().map_err(Refusal::toolbox)
    }

    /// An absolute path.
    fn path(&self, path: &[u8]) -> Vec<u8> {
        if path.starts_with(b"/") { path.to_vec() } else { join(self.directory.as_bytes(), path) }
    }

    /// The path that a query names.
    fn named(&self, params: &mut Params, name: &str) -> Result<Vec<u8>, Refusal> {
        match params.bytes(name).filter(|path| !path.is_empty()) {
            Some(path) => Ok(self.path(&path)),
            None => Err(Refusal::daemon(
                StatusCode::BAD_REQUEST,
                "INVALID_FILE_PATH",
                format!("`{name}` must be given"),
            )),
        }
    }

    /// The directory that a query names, or the one in which commands run.
    fn root(&self, params: &mut Params) -> Vec<u8> {
        let path = params.bytes("path").filter(|path| !path.is_empty() && path != b".");
        path.map_or_else(|| self.directory.clone().into_bytes(), |path| self.path(&path))
    }
}

/// `POST {toolbox}/files/bulk-upload`: the parts `files[N].path` and `files[N].file` of a form, in this order for each number.
pub async fn upload(State(app): State<App>, target: Target, request: Request) -> Result<Response, Refusal> {
    let mut stopping = app.stopping(&target.key);
    let form = Form::of(request).await;
    let mut form = form.map_err(|error| Refusal::daemon(error.status(), "BAD_REQUEST", error.body_text()))?;
    let place = Place::of(&app, &target)?;
    let mut paths: BTreeMap<usize, String> = BTreeMap::new();
    let (mut written, mut failed) = (Vec::new(), Vec::new());
    while let Some(mut part) = unless_stopped(&mut stopping, form.next()).await? {
        match FormField::of(part.name()) {
            Some(FormField::Path(number)) if paths.len() < FILES_MAX => {
                let path = text(&mut part, &mut stopping).await?;
                paths.insert(number, path);
            }
            Some(FormField::File(number)) => {
                let Some(path) = paths.remove(&number) else {
                    return Err(bad(format!("the form has no `files[{number}].path` before its file")));
                };
                match write(&place, &path, &mut part, &mut stopping).await? {
                    Ok(stat) => written.push(json!({"path": path, "bytes": stat.size})),
                    Err(refusal) => {
                        // The rest of it is read, so that the next part is found.
                        while unless_stopped(&mut stopping, part.chunk()).await?.is_some() {}
                        failed.push((path, refusal));
                    }
                }
            }
            Some(FormField::Path(_)) => {
                return Err(bad(format!("a form must have at most {FILES_MAX} files")));
            }
            None => while unless_stopped(&mut stopping, part.chunk()).await?.is_some() {},
        }
    }
    let Some((_, first)) = failed.first() else { return Ok(Json(json!({"files": written})).into_response()) };
    let errors: Vec<String> =
        failed.iter().map(|(path, refusal)| format!("{path}: {}", refusal.message())).collect();
    let mut body = first.body();
    body["statusCode"] = 400.into();
    body["message"] = errors.join("; ").into();
    body["errors"] = json!(errors);
    body["files"] = json!(written);
    Ok((StatusCode::BAD_REQUEST, Json(body)).into_response())
}

/// A part of an upload, by its name.
enum FormField {
    Path(usize),
    File(usize),
}

impl FormField {
    fn of(name: Option<&str>) -> Option<Self> {
        let (number, kind) = name?.strip_prefix("files[")?.split_once("].")?;
        let number = number.parse().ok()?;
        match kind {
            "path" => Some(Self::Path(number)),
            "file" => Some(Self::File(number)),
            _ => None,
        }
    }
}

fn bad(message: String) -> Refusal {
    Refusal::daemon(StatusCode::BAD_REQUEST, "BAD_REQUEST", message)
}

/// A part that is a path.
async fn text(part: &mut Part<'_>, stopping: &mut Stopping) -> Result<String, Refusal> {
    let mut bytes = Vec::new();
    while let Some(piece) = unless_stopped(stopping, part.chunk()).await? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > PATH_MAX {
            return Err(bad(format!("a path must have at most {PATH_MAX} bytes")));
        }
    }
    String::from_utf8(bytes).map_err(|_| bad("a path must be UTF-8".into()))
}

/// Writes a part as it comes. The inner failure is about this file alone.
async fn write(
    place: &Place,
    path: &str,
    part: &mut Part<'_>,
    stopping: &mut Stopping,
) -> Result<Result<FileStat, Refusal>, Refusal> {
    let options = WriteOptions {
        path: place.path(path.as_bytes()),
        mode: None,
        parents: true,
        size: None,
        condition: Condition::None,
    };
    let mut output = match place.files.write(options).await {
        Ok(output) => output,
        Err(error) => return Ok(Err(Refusal::toolbox(error))),
    };
    while let Some(bytes) = unless_stopped(stopping, part.chunk()).await? {
        if !bytes.is_empty()
            && let Err(error) = output.write(bytes).await
        {
            return Ok(Err(Refusal::toolbox(error)));
        }
    }
    Ok(output.finish().await.map(|written| written.stat).map_err(Refusal::toolbox))
}

async fn unless_stopped<T>(
    stopping: &mut Stopping,
    reading: impl Future<Output = Result<T, FormError>>,
) -> Result<T, Refusal> {
    let read = tokio::select! {
        read = reading => read,
        halt = stopping.wait() => return Err(Refusal::toolbox_api(ApiError::from(halt))),
    };
    read.map_err(|error| {
        let status = match &error {
            FormError::Broken(_) | FormError::Shapeless => StatusCode::BAD_REQUEST,
            FormError::Late => StatusCode::REQUEST_TIMEOUT,
        };
        Refusal::daemon(status, "BAD_REQUEST", error.to_string())
    })
}

/// `POST {toolbox}/files/bulk-download`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Download {
    paths: Vec<String>,
}

/// Sends files as the parts of a form: `file` with its bytes, or `error` with the reason. Who finds no end of the form knows that it was
/// cut.
pub async fn download(
    State(app): State<App>,
    target: Target,
    ToolboxBody(Download { paths }): ToolboxBody<Download>,
) -> Result<Response, Refusal> {
    if paths.is_empty() || paths.len() > FILES_MAX {
        return Err(bad(format!("`paths` must have 1 to {FILES_MAX} entries, got {}", paths.len())));
    }
    let boundary = format!("shoal-{:032x}", getrandom::u64().map_or(0, u128::from));
    let kind = format!("multipart/form-data; boundary={boundary}");
    let sending = Sending {
        place: Place::of(&app, &target)?,
        stopping: app.stopping(&target.key),
        paths: paths.into_iter(),
        now: Now::Between,
        boundary,
    };
    let bytes = stream::unfold(sending, async |mut sending| {
        let next = sending.next().await?;
        Some((next, sending))
    });
    Ok(([(header::CONTENT_TYPE, kind)], Body::from_stream(bytes)).into_response())
}

struct Sending {
    place: Place,
    stopping: Stopping,
    paths: std::vec::IntoIter<String>,
    now: Now,
    boundary: String,
}

enum Now {
    Between,
    File(Box<Reading>),
    Over,
}

impl Sending {
    /// The next bytes. After an error there are none.
    async fn next(&mut self) -> Option<Result<Bytes, EngineError>> {
        let boundary = &self.boundary;
        match &mut self.now {
            Now::Over => None,
            Now::File(reading) => {
                let next = tokio::select! {
                    next = reading.next() => next,
                    _ = self.stopping.wait() => Err(EngineError::Stopping),
                };
                match next {
                    Ok(Some(bytes)) => Some(Ok(bytes)),
                    Ok(None) => {
                        self.now = Now::Between;
                        Some(Ok(Bytes::from_static(b"\r\n")))
                    }
                    Err(error) => {
                        self.now = Now::Over;
                        Some(Err(error))
                    }
                }
            }
            Now::Between => {
                let Some(path) = self.paths.next() else {
                    self.now = Now::Over;
                    return Some(Ok(format!("--{boundary}--\r\n").into()));
                };
                let reading = match path.is_empty() {
                    true => Err(Field::Path.must("not be empty")),
                    false => self.place.files.read(&self.place.path(path.as_bytes()), ByteRange::Whole).await,
                };
                let head = match reading {
                    Ok(reading) => {
                        let length = reading.opened().length;
                        self.now = Now::File(Box::new(reading));
                        let length =
                            length.map_or_else(String::new, |length| format!("Content-Length: {length}\r\n"));
                        let name = disposition("file", &path);
                        format!(
                            "--{boundary}\r\n{name}\r\nContent-Type: application/octet-stream\r\n{length}\r\n"
                        )
                    }
                    Err(error) => {
                        let (name, body) = (disposition("error", &path), Refusal::toolbox(error).body());
                        format!("--{boundary}\r\n{name}\r\nContent-Type: application/json\r\n\r\n{body}\r\n")
                    }
                };
                Some(Ok(head.into()))
            }
        }
    }
}

/// The header that names a part: in ASCII, and in full for clients that read that.
fn disposition(name: &str, path: &str) -> String {
    let mut plain = String::new();
    let mut full = String::new();
    for character in path.chars() {
        match character {
            '"' | '\\' => plain.extend(['\\', character]),
            ' '..='~' => plain.push(character),
            _ => plain.push('_'),
        }
    }
    for byte in path.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'.' | b'_' | b'-' => {
                full.push(char::from(byte));
            }
            _ => full.push_str(&format!("%{byte:02X}")),
        }
    }
    format!("Content-Disposition: form-data; name=\"{name}\"; filename=\"{plain}\"; filename*=utf-8''{full}")
}

/// A file as the client sees it.
fn describe(name: &[u8], path: &[u8], stat: &FileStat) -> Value {
    let modified = guest_time(&stat.modified);
    let letter = match stat.kind {
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        FileKind::Fifo => 'p',
        FileKind::Socket => 's',
        FileKind::Device => 'c',
        FileKind::File | FileKind::Unknown => '-',
    };
    let mut mode = String::from(letter);
    for shift in [6, 3, 0] {
        for (bit, sign) in [(4, 'r'), (2, 'w'), (1, 'x')] {
            mode.push(if (stat.mode >> shift) & bit == 0 { '-' } else { sign });
        }
    }
    json!({
        "name": String::from_utf8_lossy(name),
        "path": String::from_utf8_lossy(path),
        "isDir": stat.kind == FileKind::Directory,
        "size": stat.size,
        "mode": mode,
        "permissions": format!("{:04o}", stat.mode & 0o7777),
        "owner": stat.uid.to_string(),
        "group": stat.gid.to_string(),
        "modTime": modified,
        "modifiedAt": modified,
    })
}

/// `GET {toolbox}/files`: what is in a directory, down to a depth.
pub async fn list(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    let depth = params.number("depth", 1..=64).map_err(Refusal::toolbox_api)?.unwrap_or(1);
    let mut waiting = vec![(place.root(&mut params), 1)];
    let mut entries = Vec::new();
    while let Some((directory, level)) = waiting.pop() {
        for entry in directory_of(&place.files, &directory).await? {
            let path = join(&directory, &entry.name);
            if entries.len() >= ENTRIES_MAX {
                return Err(bad(format!("a listing must have at most {ENTRIES_MAX} entries")));
            }
            entries.push(describe(&entry.name, &path, &entry.stat));
            if level < depth && entry.stat.kind == FileKind::Directory {
                waiting.push((path, level + 1));
            }
        }
    }
    Ok(Json(Value::Array(entries)))
}

/// All entries of a directory.
async fn directory_of(files: &Files, directory: &[u8]) -> Result<Vec<FileEntry>, Refusal> {
    let mut all: Vec<FileEntry> = Vec::new();
    loop {
        let after = all.last().map_or_else(Vec::new, |entry| entry.name.clone());
        let page = files.list(directory, &after, LIST_MAX).await.map_err(Refusal::toolbox)?;
        let none = page.entries.is_empty();
        all.extend(page.entries);
        if !page.more || none || all.len() > ENTRIES_MAX {
            return Ok(all);
        }
    }
}

/// `GET {toolbox}/files/info`
pub async fn info(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    let path = place.named(&mut params, "path")?;
    let stat = place.files.stat(&path, Links::Follow).await.map_err(Refusal::toolbox)?;
    let name = path.rsplit(|byte| *byte == b'/').find(|part| !part.is_empty()).unwrap_or(b"/");
    Ok(Json(describe(name, &path, &stat)))
}

/// `POST {toolbox}/files/folder`: a directory, with those above it.
pub async fn folder(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<StatusCode, Refusal> {
    let place = Place::of(&app, &target)?;
    let path = place.named(&mut params, "path")?;
    let mode = params.mode("mode").map_err(Refusal::toolbox_api)?;
    place.files.make_directory(&path, true, mode).await.map_err(Refusal::toolbox)?;
    Ok(StatusCode::CREATED)
}

/// `DELETE {toolbox}/files`
pub async fn remove(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<StatusCode, Refusal> {
    let place = Place::of(&app, &target)?;
    let path = place.named(&mut params, "path")?;
    let recursive = params.flag("recursive", false).map_err(Refusal::toolbox_api)?;
    let stat = place.files.stat(&path, Links::Keep).await.map_err(Refusal::toolbox)?;
    if stat.kind == FileKind::Directory && !recursive {
        let message = format!("`{}` is a directory; give `recursive`", String::from_utf8_lossy(&path));
        return Err(Refusal::daemon(StatusCode::BAD_REQUEST, "INVALID_FILE_PATH", message));
    }
    place.files.remove(&path, recursive, Condition::None).await.map_err(Refusal::toolbox)?;
    Ok(StatusCode::NO_CONTENT)
}

/// `POST {toolbox}/files/move`
pub async fn relocate(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    let wish = Relocate {
        from: place.named(&mut params, "source")?,
        to: place.named(&mut params, "destination")?,
        overwrite: false,
        parents: false,
        recursive: true,
    };
    place.files.rename(wish).await.map_err(Refusal::toolbox)?;
    Ok(Json(json!({})))
}

fn limits() -> SearchLimits {
    SearchLimits {
        matches: engine::files::MATCHES_MAX,
        entries: SEARCH_ENTRIES_MAX,
        bytes: SEARCH_BYTES_MAX,
        milliseconds: SEARCH_SECONDS * 1000,
        hidden: true,
    }
}

/// `GET {toolbox}/files/find`: lines that contain a text.
pub async fn find(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    let grep = Grep {
        root: place.root(&mut params),
        pattern: params.text("pattern").map_err(Refusal::toolbox_api)?.unwrap_or_default(),
        regex: false,
        ignore_case: false,
        include: Vec::new(),
        limits: limits(),
    };
    let mut matches = place.files.grep(grep).await.map_err(Refusal::toolbox)?.matches;
    matches.sort_by(|one, other| (&one.path, one.line).cmp(&(&other.path, other.line)));
    let matches = matches.iter().map(|found| {
        let (file, content) = (String::from_utf8_lossy(&found.path), String::from_utf8_lossy(&found.text));
        json!({"file": file, "line": found.line, "content": content})
    });
    Ok(Json(matches.collect()))
}

/// `GET {toolbox}/files/search`: files by a glob on their names.
pub async fn search(
    State(app): State<App>,
    target: Target,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    let root = place.root(&mut params);
    let pattern = params.bytes("pattern").unwrap_or_default();
    let pattern = if pattern.contains(&b'/') { pattern } else { [&b"**/"[..], &pattern].concat() };
    let found = place.files.glob(&root, &pattern, limits()).await.map_err(Refusal::toolbox)?;
    let mut files: Vec<String> = found
        .matches
        .iter()
        .map(|entry| String::from_utf8_lossy(&join(&root, &entry.name)).into_owned())
        .collect();
    files.sort();
    Ok(Json(json!({"files": files})))
}

/// `POST {toolbox}/files/replace`
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Replace {
    files: Vec<String>,
    pattern: String,
    new_value: String,
}

/// Replaces a text in files, each for itself.
pub async fn replace(
    State(app): State<App>,
    target: Target,
    ToolboxBody(body): ToolboxBody<Replace>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::of(&app, &target)?;
    if body.files.len() > FILES_MAX {
        return Err(bad(format!("`files` must have at most {FILES_MAX} entries, got {}", body.files.len())));
    }
    let mut results = Vec::new();
    for file in &body.files {
        let edit = Edit {
            path: place.path(file.as_bytes()),
            old: body.pattern.clone(),
            new: body.new_value.clone(),
            all: true,
            line_ends: LineEnds::Exact,
            condition: Condition::None,
        };
        results.push(match place.files.edit(edit).await {
            Ok(_) => json!({"file": file, "success": true}),
            Err(error) => json!({"file": file, "success": false, "error": error.to_string()}),
        });
    }
    Ok(Json(Value::Array(results)))
}

/// `GET {toolbox}/work-dir`
pub async fn work_dir(State(app): State<App>, target: Target) -> Result<Json<Value>, Refusal> {
    Ok(Json(json!({"dir": Place::of(&app, &target)?.directory})))
}

/// `GET {toolbox}/user-home-dir`
pub async fn home_dir(State(app): State<App>, target: Target) -> Result<Json<Value>, Refusal> {
    let user = user_of(&target.sandbox).map_err(Refusal::toolbox)?;
    let home = home(&app, &target.key, &target.sandbox, user).await.map_err(Refusal::toolbox)?;
    Ok(Json(json!({"dir": home})))
}

/// `GET {toolbox}/version`
pub async fn version(_: Target) -> Json<Value> {
    Json(json!({"version": crate::version()}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_named_in_ascii_and_in_full() {
        let line = disposition("file", "/a \"b\" \\ ü\n");
        assert!(line.is_ascii() && !line.contains('\n'), "{line}");
        assert!(line.contains("filename=\"/a \\\"b\\\" \\\\ __\""), "{line}");
        assert!(line.ends_with("filename*=utf-8''/a%20%22b%22%20%5C%20%C3%BC%0A"), "{line}");
    }

    #[test]
    fn parts_of_an_upload_are_paired_by_their_number() {
        assert!(matches!(FormField::of(Some("files[12].path")), Some(FormField::Path(12))));
        assert!(matches!(FormField::of(Some("files[0].file")), Some(FormField::File(0))));
        for name in [None, Some(""), Some("files[x].path"), Some("files[1]"), Some("files[1].other")] {
            assert!(FormField::of(name).is_none(), "{name:?}");
        }
    }
}
