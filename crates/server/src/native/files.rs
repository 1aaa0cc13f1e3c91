//! Files: read, write, inspect, change, search, watch, and whole directories as tar streams.
//!
//! Paths are in the query, where percent-encoding can express any byte of a name. Bodies of files and archives are
//! streams of any size: bytes that the caller does not read wait in the guest, and bytes that the guest does not accept
//! wait at the caller. If the caller disconnects, the operation in the guest ends.

use std::convert::Infallible;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response, Sse};
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use engine::Files;
use engine::files::{Found, MATCHES_MAX, Made, Watching};
use futures_util::stream::{self, Stream};
use wire::api;
use wire::files::{
    Change, Condition, Cut, Edit, FileKind, FileStat, Grep, GrepMatch, GrepWith, LIST_MAX, LineEnds, Links,
    Relocate, SearchLimits, WatchEvent, WriteOptions,
};

use super::common::{ResumeParams, guest_user, resume_param};
use crate::http::app::{App, Caller, Stopping};
use crate::http::body::{CommandJson, FoundSandbox, SandboxPath};
use crate::http::clock::guest_time;
use crate::http::conditions::{Conditions, etag};
use crate::http::download::{Source, body_of, describe_file, download, inert, value};
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::sse::{self, HEARTBEAT};
use crate::http::text::{join, text_and_base64};
use crate::http::upload::{check_whole, pour};

/// How long a search takes by default, and at most.
const SEARCH_SECONDS_DEFAULT: u64 = 20;
const SEARCH_SECONDS_MAX: u64 = 300;
/// How many matches a search returns by default.
const SEARCH_MATCHES_DEFAULT: u32 = 1000;
/// How many directory entries a search examines.
const SEARCH_ENTRIES_MAX: u64 = 1_000_000;
/// How many bytes a search reads by default.
const SEARCH_BYTES_DEFAULT: u64 = 1 << 30;

/// Reads a file.
///
/// `Range` with one range, `If-Match`, `If-None-Match`, `If-Modified-Since`, `If-Unmodified-Since` and `If-Range` are supported. The
/// body is the file as long as it was when it was opened; if it becomes shorter meanwhile, the connection is cut.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute. Bytes that are not UTF-8 are percent-encoded."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, content_type = "application/octet-stream", body = Vec<u8>),
    (status = 206, description = "The range that was asked for.", content_type = "application/octet-stream", body = Vec<u8>),
    (status = 304, description = "It is what `If-None-Match` or `If-Modified-Since` says."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It is a directory, a FIFO, a device; or the sandbox does not run.", body = api::ErrorBody),
    (status = 412, description = "It is not what `If-Match` says.", body = api::ErrorBody),
    (status = 416, description = "The range begins after the end of the file.", body = api::ErrorBody),
))]
pub async fn read(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let path = params.path("path")?;
    let files = files(&app, &caller, id, params)?;
    Ok(download(&app, &caller.0, &files, &path, &headers).await?)
}

/// What `GET` would answer, without the bytes.
#[utoipa::path(head, path = "/v1/sandboxes/{sandbox}/files", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, description = "`Content-Length`, `ETag` and `Last-Modified` describe the file."),
    (status = 304, description = "As with `GET`."),
    (status = 404, description = "As with `GET`."),
))]
pub async fn head(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let path = params.path("path")?;
    let files = files(&app, &caller, id, params)?;
    Ok(describe_file(&files, &path, &headers).await?)
}

/// Writes a file: the body as it is, of any size.
///
/// It replaces what was there when all of it has arrived, and not before; permissions and owner stay. With
/// `If-None-Match: *` there must be none, with `If-Match` it must be one of those.
#[utoipa::path(put, path = "/v1/sandboxes/{sandbox}/files", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute. A link at its end is followed."),
    ("mode" = Option<String>, Query, description = "Permissions in octal. Default: those of the existing file, otherwise 0644."),
    ("parents" = Option<bool>, Query, description = "Whether to create missing directories; `true` by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 200, description = "The file was replaced.", body = api::FileInfo),
    (status = 201, description = "It is new.", body = api::FileInfo),
    (status = 403, body = api::ErrorBody),
    (status = 404, description = "With `parents=false`: its directory does not exist.", body = api::ErrorBody),
    (status = 408, description = "The body did not arrive in time.", body = api::ErrorBody),
    (status = 409, description = "The path is a directory or a device, or the sandbox does not run.", body = api::ErrorBody),
    (status = 412, body = api::ErrorBody),
    (status = 507, description = "The disk is full. The existing file did not change.", body = api::ErrorBody),
))]
pub async fn write(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
    request: Request,
) -> Result<Response, ApiError> {
    let path = params.path("path")?;
    let (mode, parents) = (params.mode("mode")?, params.flag("parents", true)?);
    let files = files(&app, &caller, id, params)?;
    let (head, body) = request.into_parts();
    check_whole(&head.headers)?;
    let condition = Conditions::read(&head.headers).for_write()?;
    let size = head.headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse().ok());
    let options = WriteOptions { path: path.clone(), mode, parents, size, condition };
    let mut stopping = app.stopping(&caller.0);
    let written = pour(body, &mut stopping, async |mut incoming| {
        let mut writing = files.write(options).await?;
        while let Some(bytes) = incoming.next().await? {
            writing.write(bytes).await?;
        }
        Ok(writing.finish().await?)
    });
    let written = written.await?;
    let status = if written.created { StatusCode::CREATED } else { StatusCode::OK };
    let mut answer = (status, Json(file_info(&path, &written.stat))).into_response();
    answer.headers_mut().insert(header::ETAG, value(&etag(&written.stat.version())));
    Ok(answer)
}

/// Removes a file, a link, or a directory.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/files", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute. A link is removed, not what it leads to."),
    ("recursive" = Option<bool>, Query, description = "Whether to include everything in a directory; `false` by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 204, description = "It is gone."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The directory is not empty, and `recursive` is not set.", body = api::ErrorBody),
    (status = 412, body = api::ErrorBody),
))]
pub async fn remove(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
    headers: HeaderMap,
) -> Result<StatusCode, ApiError> {
    let path = params.path("path")?;
    let recursive = params.flag("recursive", false)?;
    let condition = Conditions::read(&headers).for_write()?;
    if condition == Condition::Absent {
        return Err(ApiError::must("If-None-Match", "not be `*`: only a file that exists can be removed"));
    }
    files(&app, &caller, id, params)?.remove(&path, recursive, condition).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Describes a file.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/stat", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("follow" = Option<bool>, Query, description = "Whether to follow a link at the end of the path; `true` by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, body = api::FileInfo),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn stat(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::FileInfo>, ApiError> {
    let path = params.path("path")?;
    let links = if params.flag("follow", true)? { Links::Follow } else { Links::Keep };
    let stat = files(&app, &caller, id, params)?.stat(&path, links).await?;
    Ok(Json(file_info(&path, &stat)))
}

/// The entries of a directory, by name.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/list", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("limit" = Option<u32>, Query, description = "The maximum number of entries, 1 to 1000; 1000 by default."),
    ("cursor" = Option<String>, Query, description = "`next_cursor` of the page before."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, body = api::FileList),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It is not a directory.", body = api::ErrorBody),
))]
pub async fn list(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::FileList>, ApiError> {
    let path = params.path("path")?;
    let limit = params.number("limit", 1..=u64::from(LIST_MAX))?.map_or(LIST_MAX, |limit| limit as u32);
    let after = match params.text("cursor")? {
        None => Vec::new(),
        Some(cursor) => BASE64_URL_SAFE_NO_PAD
            .decode(cursor)
            .map_err(|_| ApiError::must("cursor", "be the `next_cursor` of a page"))?,
    };
    let listing = files(&app, &caller, id, params)?.list(&path, &after, limit).await?;
    let next_cursor =
        listing.entries.last().filter(|_| listing.more).map(|last| BASE64_URL_SAFE_NO_PAD.encode(&last.name));
    let entries =
        listing.entries.iter().map(|entry| file_info(&join(&path, &entry.name), &entry.stat)).collect();
    Ok(Json(api::FileList { entries, next_cursor }))
}

/// Creates a directory.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/mkdir", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("parents" = Option<bool>, Query, description = "Whether to create missing parents and accept an existing directory; `true` by default."),
    ("mode" = Option<String>, Query, description = "Permissions in octal; 0755 by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 204, description = "It is there."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
))]
pub async fn make_directory(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<StatusCode, ApiError> {
    let path = params.path("path")?;
    let (mode, parents) = (params.mode("mode")?, params.flag("parents", true)?);
    files(&app, &caller, id, params)?.make_directory(&path, parents, mode).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Moves or renames a file or directory.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/move", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("from" = String, Query, description = "Absolute. A link is moved, not what it leads to."),
    ("to" = String, Query, description = "Absolute: the new name itself."),
    ("overwrite" = Option<bool>, Query, description = "Whether to replace an existing file; `false` by default."),
    ("parents" = Option<bool>, Query, description = "Whether to create missing directories; `true` by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 204, description = "Done."),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
))]
pub async fn rename(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<StatusCode, ApiError> {
    let wish = relocate(&mut params, true)?;
    files(&app, &caller, id, params)?.rename(wish).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Copies a file or directory inside the sandbox.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/copy", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("from" = String, Query, description = "Absolute. A link is copied, not what it leads to."),
    ("to" = String, Query, description = "Absolute: the name of the copy itself."),
    ("recursive" = Option<bool>, Query, description = "Whether to include everything in a directory; `false` by default."),
    ("overwrite" = Option<bool>, Query, description = "Whether to replace existing files; `false` by default."),
    ("parents" = Option<bool>, Query, description = "Whether to create missing directories; `true` by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, body = api::FilesMade),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
    (status = 507, body = api::ErrorBody),
))]
pub async fn copy(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::FilesMade>, ApiError> {
    let recursive = params.flag("recursive", false)?;
    let wish = relocate(&mut params, recursive)?;
    let made = files(&app, &caller, id, params)?.copy(wish).await?;
    Ok(Json(files_made(made)))
}

fn relocate(params: &mut Params, recursive: bool) -> Result<Relocate, ApiError> {
    Ok(Relocate {
        from: params.path("from")?,
        to: params.path("to")?,
        overwrite: params.flag("overwrite", false)?,
        parents: params.flag("parents", true)?,
        recursive,
    })
}

/// Replaces text in a file.
///
/// The file is UTF-8 text of at most 16 MiB, before and after. It is replaced whole or not at all, with its permissions and
/// owner. A file that has several names keeps them: it is written in place, as is one whose directory takes no new file. Edits
/// of one file at the same time come one after the other, and none is lost.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/files/edit", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute. A link at its end is followed."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams),
    request_body = api::EditFile, responses(
    (status = 200, body = api::EditedFile),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The file does not contain the text (`no_match`), or has it more than once (`several_matches`, with their number in `details.matches`), or is not text.", body = api::ErrorBody),
    (status = 412, description = "It is not what `If-Match` says.", body = api::ErrorBody),
    (status = 413, description = "It is too large, or would be.", body = api::ErrorBody),
    (status = 507, description = "The disk is full. The existing file did not change.", body = api::ErrorBody),
))]
pub async fn edit(
    State(app): State<App>,
    caller: Caller,
    FoundSandbox(id): FoundSandbox,
    mut params: Params,
    headers: HeaderMap,
    CommandJson(body): CommandJson<api::EditFile>,
) -> Result<Response, ApiError> {
    let path = params.path("path")?;
    let condition = Conditions::read(&headers).for_write()?;
    if condition == Condition::Absent {
        return Err(ApiError::must("If-None-Match", "not be `*`: only a file that exists can be edited"));
    }
    let line_ends = if body.adapt_line_ends { LineEnds::Adapted } else { LineEnds::Exact };
    let wish = Edit { path: path.clone(), old: body.old, new: body.new, all: body.all, line_ends, condition };
    let edited = files(&app, &caller, id, params)?.edit(wish).await?;
    let file = file_info(&path, &edited.stat);
    let mut answer = Json(api::EditedFile { replaced: edited.replaced, file }).into_response();
    answer.headers_mut().insert(header::ETAG, value(&etag(&edited.stat.version())));
    Ok(answer)
}

/// Finds files by name.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/glob", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute: where to look."),
    ("pattern" = String, Query, description = "Relative to `path`. `*`, `?`, `[a-z]`, `{a,b}`, and `**` for any directories."),
    ("hidden" = Option<bool>, Query, description = "Whether to find names that begin with a dot too; `false` by default."),
    ("limit" = Option<u32>, Query, description = "The maximum number of matches, 1 to 10000; 1000 by default."),
    ("timeout_seconds" = Option<u64>, Query, description = "The maximum number of seconds, 1 to 300; 20 by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, description = "`cut` says whether a limit ended the search.", body = api::FoundFiles),
    (status = 400, description = "The pattern is invalid.", body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn glob(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::FoundFiles>, ApiError> {
    let path = params.path("path")?;
    let pattern = params.bytes("pattern").ok_or_else(|| ApiError::must("pattern", "be given"))?;
    let limits = limits(&mut params)?;
    let found = files(&app, &caller, id, params)?.glob(&path, &pattern, limits).await?;
    let search = search(&found);
    let mut matches = found.matches;
    matches.sort_by(|one, other| one.name.cmp(&other.name));
    let files = matches.iter().map(|entry| file_info(&join(&path, &entry.name), &entry.stat)).collect();
    Ok(Json(api::FoundFiles { files, search }))
}

/// Finds lines in files.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/grep", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute: a directory, or one file."),
    ("pattern" = String, Query, description = "What to find."),
    ("regex" = Option<bool>, Query, description = "Whether the pattern is a regular expression; `false` by default. Classes such as `\\w` are ASCII."),
    ("ignore_case" = Option<bool>, Query, description = "`false` by default."),
    ("include" = Option<Vec<String>>, Query, description = "Only files that match this glob; may be repeated. Without a slash it is matched against the name alone."),
    ("exclude_directory" = Option<Vec<String>>, Query, description = "Directories of this name, a glob, are not entered; may be repeated."),
    ("carriage_returns" = Option<bool>, Query, description = "Whether a line is returned with the CR at its end; `false` by default."),
    ("hidden" = Option<bool>, Query, description = "Whether to search names that begin with a dot too; `false` by default."),
    ("limit" = Option<u32>, Query, description = "The maximum number of lines, 1 to 10000; 1000 by default."),
    ("bytes_max" = Option<u64>, Query, description = "The maximum number of bytes to read; 1 GiB by default."),
    ("timeout_seconds" = Option<u64>, Query, description = "The maximum number of seconds, 1 to 300; 20 by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, description = "`cut` says whether a limit ended the search.", body = api::FoundLines),
    (status = 400, description = "The pattern is invalid.", body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn grep(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Json<api::FoundLines>, ApiError> {
    let root = params.path("path")?;
    let pattern = params.text("pattern")?.ok_or_else(|| ApiError::must("pattern", "be given"))?;
    let grep = Grep {
        root,
        pattern,
        regex: params.flag("regex", false)?,
        ignore_case: params.flag("ignore_case", false)?,
        include: params.all("include"),
        limits: limits(&mut params)?,
    };
    let exclude_directories = params.all("exclude_directory");
    let carriage_returns = params.flag("carriage_returns", false)?;
    let with = GrepWith { grep, exclude_directories, carriage_returns };
    let (found, mixed) = files(&app, &caller, id, params)?.grep_with(with).await?;
    let search = search(&found);
    let mut matches = found.matches;
    matches.sort_by(|one, other| (&one.path, one.line).cmp(&(&other.path, other.line)));
    let matches = matches.into_iter().map(line_match).collect();
    Ok(Json(api::FoundLines { matches, mixed, search }))
}

fn limits(params: &mut Params) -> Result<SearchLimits, ApiError> {
    let matches = params.number("limit", 1..=u64::from(MATCHES_MAX))?;
    let seconds = params.number("timeout_seconds", 1..=SEARCH_SECONDS_MAX)?;
    Ok(SearchLimits {
        matches: matches.map_or(SEARCH_MATCHES_DEFAULT, |matches| matches as u32),
        entries: SEARCH_ENTRIES_MAX,
        bytes: params.number("bytes_max", 1..=u64::MAX)?.unwrap_or(SEARCH_BYTES_DEFAULT),
        milliseconds: seconds.unwrap_or(SEARCH_SECONDS_DEFAULT) * 1000,
        hidden: params.flag("hidden", false)?,
    })
}

/// What happens to a file, or in a directory, as server-sent events, until the caller leaves.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/watch", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("recursive" = Option<bool>, Query, description = "Whether to watch the directories below it too; `false` by default."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, body = api::FileEvent, content_type = "text/event-stream"),
    (status = 404, body = api::ErrorBody),
))]
pub async fn watch(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Sse<impl Stream<Item = Result<Event, Infallible>> + use<>>, ApiError> {
    let path = params.path("path")?;
    let recursive = params.flag("recursive", false)?;
    let watching = files(&app, &caller, id, params)?.watch(&path, recursive).await?;
    let watcher = Watcher { watching: Some(watching), stopping: app.stopping(&caller.0), greeted: false };
    let events = stream::unfold(watcher, async |mut watcher| {
        let event = watcher.next().await?;
        Some((Ok(to_event(&event)), watcher))
    });
    Ok(Sse::new(events).keep_alive(KeepAlive::new().interval(HEARTBEAT)))
}

struct Watcher {
    /// Set until the last event.
    watching: Option<Watching>,
    stopping: Stopping,
    greeted: bool,
}

impl Watcher {
    async fn next(&mut self) -> Option<api::FileEvent> {
        if !std::mem::replace(&mut self.greeted, true) {
            return Some(api::FileEvent::Ready);
        }
        loop {
            let next = tokio::select! {
                next = self.watching.as_mut()?.next() => next,
                _ = self.stopping.wait() => return None,
            };
            match next {
                Ok(Some(event)) => {
                    if event == WatchEvent::Gone {
                        self.watching = None;
                    }
                    if let Some(event) = file_event(event) {
                        return Some(event);
                    }
                }
                Ok(None) => return None,
                Err(error) => {
                    self.watching = None;
                    return Some(api::FileEvent::Failed(ApiError::from(error).into_body()));
                }
            }
        }
    }
}

fn to_event(event: &api::FileEvent) -> Event {
    let name = match event {
        api::FileEvent::Ready => "ready",
        api::FileEvent::Changed { .. } => "changed",
        api::FileEvent::Overflow => "overflow",
        api::FileEvent::NotWatched { .. } => "not_watched",
        api::FileEvent::Gone => "gone",
        api::FileEvent::Failed(_) => "failed",
    };
    sse::event(name, event)
}

/// A directory with everything in it, or one file, as a tar stream.
///
/// Names are relative to the directory. Sockets, FIFOs and devices are left out. If something in it cannot be read, or becomes
/// shorter while it is read, the connection is cut.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/files/tar", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams), responses(
    (status = 200, content_type = "application/x-tar", body = Vec<u8>),
    (status = 403, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn pack(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
) -> Result<Response, ApiError> {
    let path = params.path("path")?;
    let packing = files(&app, &caller, id, params)?.pack(&path).await?;
    let mut answer = body_of(Source::Archive(Box::new(packing)), &app, &caller.0).into_response();
    answer.headers_mut().insert(header::CONTENT_TYPE, value("application/x-tar"));
    inert(answer.headers_mut());
    Ok(answer)
}

/// Unpacks a tar stream into a directory, and creates the directory if it is missing.
///
/// The stream is not trusted: absolute names and `..` are refused, links are made but never followed, devices and FIFOs are left
/// out, setuid is taken away, owners are not kept. GNU, ustar and pax formats are read; sparse files are refused. What came before a
/// refusal stays.
#[utoipa::path(put, path = "/v1/sandboxes/{sandbox}/files/tar", tag = "files", params(
    ("sandbox" = String, Path, description = "The sandbox's id."),
    ("path" = String, Query, description = "Absolute."),
    ("user" = Option<String>, Query, description = "The user of the sandbox to act as; root by default."), ResumeParams),
    request_body(content = Vec<u8>, content_type = "application/x-tar"), responses(
    (status = 200, body = api::FilesMade),
    (status = 400, description = "The body is not an archive, or the archive contains an entry that is refused.", body = api::ErrorBody),
    (status = 403, body = api::ErrorBody),
    (status = 409, body = api::ErrorBody),
    (status = 507, body = api::ErrorBody),
))]
pub async fn unpack(
    State(app): State<App>,
    caller: Caller,
    SandboxPath(id): SandboxPath,
    mut params: Params,
    request: Request,
) -> Result<Json<api::FilesMade>, ApiError> {
    let path = params.path("path")?;
    let files = files(&app, &caller, id, params)?;
    let (head, body) = request.into_parts();
    check_whole(&head.headers)?;
    let mut stopping = app.stopping(&caller.0);
    let made = pour(body, &mut stopping, async |mut incoming| {
        let mut unpacking = files.unpack(&path).await?;
        while let Some(bytes) = incoming.next().await? {
            unpacking.write(bytes).await?;
        }
        Ok(unpacking.finish().await?)
    });
    Ok(Json(files_made(made.await?)))
}

/// The files of the sandbox, as the user that the query names. Fails if the query has other parameters.
fn files(app: &App, caller: &Caller, id: wire::SandboxId, mut params: Params) -> Result<Files, ApiError> {
    let (user, resume) = (params.text("user")?, resume_param(&mut params)?);
    params.finish()?;
    Ok(app.engine.files(&caller.0.owner, id, guest_user(user)?)?.with_resume(resume))
}

/// A file at a path.
pub fn file_info(path: &[u8], stat: &FileStat) -> api::FileInfo {
    let name = path.rsplit(|byte| *byte == b'/').find(|name| !name.is_empty()).unwrap_or(b"/");
    let (path, path_base64) = text_and_base64(path);
    let (name, name_base64) = text_and_base64(name);
    let (target, target_base64) = stat.target.as_deref().map(text_and_base64).unzip();
    api::FileInfo {
        path,
        path_base64,
        name,
        name_base64,
        kind: file_kind(stat.kind),
        size: stat.size,
        mode: format!("{:04o}", stat.mode),
        uid: stat.uid,
        gid: stat.gid,
        links: stat.links,
        modified_at: guest_time(&stat.modified),
        etag: etag(&stat.version()),
        target,
        target_base64: target_base64.flatten(),
    }
}

fn file_kind(kind: FileKind) -> api::FileKind {
    match kind {
        FileKind::File => api::FileKind::File,
        FileKind::Directory => api::FileKind::Directory,
        FileKind::Symlink => api::FileKind::Symlink,
        FileKind::Fifo => api::FileKind::Fifo,
        FileKind::Socket => api::FileKind::Socket,
        FileKind::Device => api::FileKind::Device,
        FileKind::Unknown => api::FileKind::Unknown,
    }
}

/// What a copy or an archive made.
pub fn files_made(made: Made) -> api::FilesMade {
    api::FilesMade { entries: made.entries, bytes: made.bytes, skipped: made.skipped }
}

/// What a search did.
pub fn search<T>(found: &Found<T>) -> api::Search {
    let cut = found.cut.map(|cut| match cut {
        Cut::Matches => api::SearchCut::Matches,
        Cut::Entries => api::SearchCut::Entries,
        Cut::Bytes => api::SearchCut::Bytes,
        Cut::Time => api::SearchCut::Time,
    });
    api::Search { entries_looked_at: found.entries, bytes_read: found.bytes, skipped: found.skipped, cut }
}

/// A line that matches a search.
pub fn line_match(found: GrepMatch) -> api::LineMatch {
    let (path, path_base64) = text_and_base64(&found.path);
    let (text, text_base64) = text_and_base64(&found.text);
    api::LineMatch {
        path,
        path_base64,
        line: found.line,
        column: found.column,
        text,
        text_base64,
        text_start: found.text_start,
        text_cut: found.text_cut,
    }
}

/// A file event. `None` for events that are not sent to callers.
pub fn file_event(event: WatchEvent) -> Option<api::FileEvent> {
    Some(match event {
        WatchEvent::Ready => return None, // Said when the stream began.
        WatchEvent::Changed { change, path, directory } => {
            let (path, path_base64) = text_and_base64(&path);
            let change = match change {
                Change::Created => api::FileChange::Created,
                Change::Modified => api::FileChange::Modified,
                Change::Written => api::FileChange::Written,
                Change::Attributes => api::FileChange::Attributes,
                Change::Removed => api::FileChange::Removed,
                Change::MovedFrom => api::FileChange::MovedFrom,
                Change::MovedTo => api::FileChange::MovedTo,
            };
            api::FileEvent::Changed { change, path, path_base64, directory }
        }
        WatchEvent::Overflow => api::FileEvent::Overflow,
        WatchEvent::NotWatched { path } => {
            let (path, path_base64) = text_and_base64(&path);
            api::FileEvent::NotWatched { path, path_base64 }
        }
        WatchEvent::Gone => api::FileEvent::Gone,
    })
}
