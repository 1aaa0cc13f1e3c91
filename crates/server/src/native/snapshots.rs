//! Snapshots, forks, rollbacks, families and history.

use axum::Json;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::Labels;
use engine::snapshot::{
    ForkSpec, HistoryEntry, HostUsr, ImportSpec, Member, PromoteParent, Snapshot, SnapshotState, TakeSpec,
};
use wire::api;
use wire::launch::{DifferenceKind, FileSort};

use super::common::{carried_on, sandbox_env};
use super::sandboxes::{sandbox_state, to_api as sandbox};
use crate::http::app::{App, Caller};
use crate::http::body::{self, FoundSandbox, OptionalJson, SandboxPath, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::download::{Source, body_of, inert, value};
use crate::http::error::ApiError;
use crate::http::params::Params;
use crate::http::upload::received;

/// A snapshot's id or name in a path, percent-encoded.
pub struct SnapshotPath(pub String);

impl<S: Send + Sync> FromRequestParts<S> for SnapshotPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        text_in_path(parts, state, "snapshot").await.map(Self)
    }
}

/// Takes a snapshot of a running or paused sandbox. Answers when sandboxes can be made from it.
///
/// If nothing has changed since a snapshot with the same name and labels, the answer is that snapshot.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/snapshots", tag = "snapshots", request_body = api::TakeSnapshot,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 201, body = api::Snapshot),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The sandbox neither runs nor is paused.", body = api::ErrorBody),
    (status = 503, description = "The machine has no room.", body = api::ErrorBody),
))]
pub async fn take(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    OptionalJson(body): OptionalJson<api::TakeSnapshot>,
) -> Result<(StatusCode, Json<api::Snapshot>), ApiError> {
    let api::TakeSnapshot { name, labels } = body;
    let spec = TakeSpec { name, labels: Labels::new(labels)?, note: String::new() };
    let taken = app.engine.take_snapshot(&key, id, spec).await?;
    Ok((StatusCode::CREATED, Json(to_api(taken))))
}

/// The snapshots of the key's owner, newest first.
#[utoipa::path(get, path = "/v1/snapshots", tag = "snapshots", responses((status = 200, body = api::SnapshotList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Result<Json<api::SnapshotList>, ApiError> {
    let all = app.engine.published_snapshots(&key.owner).await?;
    Ok(Json(api::SnapshotList { snapshots: all.into_iter().map(to_api).collect() }))
}

/// A snapshot.
#[utoipa::path(get, path = "/v1/snapshots/{snapshot}", tag = "snapshots",
    params(("snapshot" = String, Path, description = "Its id or its name, percent-encoded.")), responses(
    (status = 200, body = api::Snapshot),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    SnapshotPath(text): SnapshotPath,
) -> Result<Json<api::Snapshot>, ApiError> {
    Ok(Json(to_api(app.engine.snapshot(&key.owner, &text).await?)))
}

/// Deletes a snapshot. Its files stay as long as a sandbox or another snapshot needs them.
#[utoipa::path(delete, path = "/v1/snapshots/{snapshot}", tag = "snapshots",
    params(("snapshot" = String, Path, description = "Its id or its name, percent-encoded.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    SnapshotPath(text): SnapshotPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_snapshot(&key.owner, &text).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// All files of a snapshot as one OCI archive with one layer, which other tools read.
///
/// `/run/shoal`, sockets and devices are left out. Sandboxes over the image `host` see this machine's own `/usr`, so a snapshot
/// of one is exported only with `usr=include`, and its archive contains those files.
#[utoipa::path(get, path = "/v1/snapshots/{snapshot}/export", tag = "snapshots", params(
    ("snapshot" = String, Path, description = "Its id or its name, percent-encoded."),
    ("usr" = Option<String>, Query, description = "`include` or `refuse` the `/usr` of this machine; `refuse` if left out.")),
    responses(
    (status = 200, content_type = "application/x-tar", body = Vec<u8>),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The snapshot is not complete, or an archive cannot hold it.", body = api::ErrorBody),
    (status = 507, description = "The disk is full.", body = api::ErrorBody),
))]
pub async fn export(
    State(app): State<App>,
    Caller(key): Caller,
    SnapshotPath(text): SnapshotPath,
    mut params: Params,
) -> Result<Response, ApiError> {
    let usr = match params.text("usr")?.as_deref() {
        None | Some("refuse") => HostUsr::Refuse,
        Some("include") => HostUsr::Include,
        Some(_) => return Err(ApiError::must("usr", "be `include` or `refuse`")),
    };
    params.finish()?;
    let mut stopping = app.stopping(&key);
    let exported = tokio::select! {
        exported = app.engine.export_snapshot(&key, &text, usr) => exported?,
        halt = stopping.wait() => return Err(halt.into()),
    };
    let length = exported.length;
    let mut answer = body_of(Source::Snapshot(Box::new(exported)), &app, &key).into_response();
    answer.headers_mut().insert(header::CONTENT_TYPE, value("application/x-tar"));
    answer.headers_mut().insert(header::CONTENT_LENGTH, length.into());
    inert(answer.headers_mut());
    Ok(answer)
}

/// Makes a snapshot of an OCI archive with one image: an exported snapshot, or what another tool has saved.
///
/// The body is the file, compressed or not. Answers when sandboxes can be made from it.
#[utoipa::path(post, path = "/v1/snapshots", tag = "snapshots", params(
    ("name" = String, Query, description = "The name of the snapshot."),
    ("label" = Option<Vec<String>>, Query, description = "A label, `key=value`. Repeatable.")),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"), responses(
    (status = 201, body = api::Snapshot),
    (status = 400, description = "Not an archive, or not of an image that can be used here.", body = api::ErrorBody),
    (status = 429, description = "The key allows no more snapshots.", body = api::ErrorBody),
    (status = 507, description = "The disk is full.", body = api::ErrorBody),
))]
pub async fn import(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
    request: Request,
) -> Result<(StatusCode, Json<api::Snapshot>), ApiError> {
    let name = params.text("name")?.ok_or_else(|| ApiError::must("name", "be given"))?;
    let pairs = params.all("label").into_iter().map(|label| {
        let pair = String::from_utf8(label).ok();
        let pair = pair.as_deref().and_then(|pair| pair.split_once('='));
        let (key, value) = pair.ok_or_else(|| ApiError::must("label", "have the form `key=value`"))?;
        Ok::<_, ApiError>((key.to_owned(), value.to_owned()))
    });
    let labels = Labels::new(pairs.collect::<Result<_, _>>()?)?;
    params.finish()?;
    let spec = ImportSpec { name, labels };
    // Before the archive is received, which may take long.
    app.engine.check_import(&key, &spec).await?;
    let (head, body) = request.into_parts();
    let upload = received(&app, &key, &head, body, u64::MAX).await?;
    let mut stopping = app.stopping(&key);
    let imported = tokio::select! {
        imported = app.engine.import_snapshot(&key, upload, spec) => imported?,
        halt = stopping.wait() => return Err(halt.into()),
    };
    Ok((StatusCode::CREATED, Json(to_api(imported))))
}

/// Replaces the files of a sandbox by those of a snapshot, in place. Answers when it runs again.
///
/// Id, name, labels, variables, limits and volumes stay. Commands end, and `/dev/shm` is empty.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/rollback", tag = "snapshots", request_body = api::Rollback,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 404, description = "No such sandbox or snapshot.", body = api::ErrorBody),
    (status = 409, description = "The snapshot is of another sandbox.", body = api::ErrorBody),
))]
pub async fn rollback(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    body::Json(body): body::Json<api::Rollback>,
) -> Result<Json<api::Sandbox>, ApiError> {
    let rolled = carried_on(async move { app.engine.rollback(&key.owner, id, &body.snapshot).await }).await?;
    Ok(Json(sandbox(rolled)))
}

/// Creates children of a running or paused sandbox that begin with its files as they are now.
///
/// The answer has a sandbox or an error for each child. Children share neither memory nor processes with their parent.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/fork", tag = "snapshots", request_body = api::Fork,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 201, body = api::Forked),
    (status = 400, body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "The sandbox neither runs nor is paused.", body = api::ErrorBody),
))]
pub async fn fork(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    OptionalJson(body): OptionalJson<api::Fork>,
) -> Result<(StatusCode, Json<api::Forked>), ApiError> {
    let api::Fork { count, env, labels } = body;
    let spec = ForkSpec { count: count.unwrap_or(1), env: sandbox_env(env)?, labels: Labels::new(labels)? };
    let made = app.engine.fork(&key, id, spec).await?;
    let child = |made| match made {
        Ok(made) => api::ForkedChild { sandbox: Some(Box::new(sandbox(made))), error: None },
        Err(error) => api::ForkedChild { sandbox: None, error: Some(ApiError::from(error).into_body()) },
    };
    Ok((StatusCode::CREATED, Json(api::Forked { children: made.into_iter().map(child).collect() })))
}

/// The families of all sandboxes that were forked, or made from snapshots of sandboxes.
#[utoipa::path(get, path = "/v1/tree", tag = "snapshots", responses((status = 200, body = api::Tree)))]
pub async fn trees(State(app): State<App>, Caller(key): Caller) -> Result<Json<api::Tree>, ApiError> {
    Ok(Json(tree_of(app.engine.family(&key.owner, None).await?)))
}

/// Deletes a sandbox and all that descend from it by forks, the youngest first.
///
/// If one cannot be deleted, the response is that error, and older ones stay.
#[utoipa::path(delete, path = "/v1/sandboxes/{sandbox}/tree", tag = "snapshots",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::DeletedTree),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "`hook_failed`: a required hook of one failed.", body = api::ErrorBody),
))]
pub async fn delete_tree(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::DeletedTree>, ApiError> {
    let deleted = carried_on(async move { app.engine.delete_tree(&key.owner, id).await }).await?;
    Ok(Json(api::DeletedTree { deleted }))
}

/// The family of a sandbox: what it was forked from, and what was forked from that. Members may be gone.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/tree", tag = "snapshots",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Tree),
    (status = 404, body = api::ErrorBody),
))]
pub async fn tree(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::Tree>, ApiError> {
    Ok(Json(tree_of(app.engine.family(&key.owner, Some(id)).await?)))
}

/// Gives a child the name and the labels of its parent, which gets another name.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/promote", tag = "snapshots", request_body = api::Promote,
    params(("sandbox" = String, Path, description = "The child's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "It has no parent that exists.", body = api::ErrorBody),
))]
pub async fn promote(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    OptionalJson(body): OptionalJson<api::Promote>,
) -> Result<Json<api::Sandbox>, ApiError> {
    let then = match body.parent {
        None | Some(api::PromoteParent::Keep) => PromoteParent::Keep,
        Some(api::PromoteParent::Pause) => PromoteParent::Pause,
        Some(api::PromoteParent::Delete) => PromoteParent::Delete,
    };
    let promoted = carried_on(async move { app.engine.promote(&key.owner, id, then).await }).await?;
    Ok(Json(sandbox(promoted)))
}

/// The snapshots that were taken before commands of a sandbox with a history, newest first.
#[utoipa::path(get, path = "/v1/sandboxes/{sandbox}/history", tag = "snapshots",
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::History),
    (status = 404, body = api::ErrorBody),
))]
pub async fn history(
    State(app): State<App>,
    Caller(key): Caller,
    SandboxPath(id): SandboxPath,
) -> Result<Json<api::History>, ApiError> {
    let step = |HistoryEntry { step, snapshot, taken_at, size_bytes }| api::HistoryStep {
        step,
        snapshot: snapshot.to_string(),
        taken_at: rfc3339(taken_at),
        size_bytes,
    };
    let steps = app.engine.history(&key.owner, id).await?;
    Ok(Json(api::History { steps: steps.into_iter().map(step).collect() }))
}

/// Rolls a sandbox back to its files before the last command that changed something, or further.
#[utoipa::path(post, path = "/v1/sandboxes/{sandbox}/undo", tag = "snapshots", request_body = api::Undo,
    params(("sandbox" = String, Path, description = "The sandbox's id.")), responses(
    (status = 200, body = api::Sandbox),
    (status = 400, description = "The history is not that long.", body = api::ErrorBody),
    (status = 404, body = api::ErrorBody),
))]
pub async fn undo(
    State(app): State<App>,
    Caller(key): Caller,
    FoundSandbox(id): FoundSandbox,
    OptionalJson(body): OptionalJson<api::Undo>,
) -> Result<Json<api::Sandbox>, ApiError> {
    let steps = body.steps.unwrap_or(1);
    let undone = carried_on(async move { app.engine.undo(&key.owner, id, steps).await }).await?;
    Ok(Json(sandbox(undone)))
}

/// Compares the files of two sandboxes or snapshots over the same image.
#[utoipa::path(get, path = "/v1/diff", tag = "snapshots", params(
    ("a" = String, Query, description = "The id or name of a sandbox or a snapshot."),
    ("b" = String, Query, description = "The id or name of another one."),
    ("content" = Option<bool>, Query, description = "Whether to show the contents of text files.")), responses(
    (status = 200, body = api::Diff),
    (status = 404, body = api::ErrorBody),
    (status = 409, description = "They are over different images, or the store has no snapshots.", body = api::ErrorBody),
))]
pub async fn diff(
    State(app): State<App>,
    Caller(key): Caller,
    mut params: Params,
) -> Result<Json<api::Diff>, ApiError> {
    let given = |text: Option<String>, name: &str| text.ok_or_else(|| ApiError::must(name, "be given"));
    let (a, b) = (given(params.text("a")?, "a")?, given(params.text("b")?, "b")?);
    let content = params.flag("content", false)?;
    params.finish()?;
    let compared = app.engine.diff(&key, &a, &b, content).await?;
    let entry = |entry: engine::snapshot::Change| api::DiffEntry {
        path: String::from_utf8_lossy(&entry.path).into_owned(),
        change: match entry.kind {
            DifferenceKind::Added => api::DiffChange::Added,
            DifferenceKind::Changed => api::DiffChange::Changed,
            DifferenceKind::Removed => api::DiffChange::Removed,
        },
        kind: match entry.sort {
            FileSort::File => "file",
            FileSort::Directory => "directory",
            FileSort::Symlink => "symlink",
            FileSort::Other => "other",
        }
        .to_owned(),
        size_before: entry.size_before,
        size_after: entry.size_after,
        before: entry.before,
        after: entry.after,
    };
    let entries = compared.entries.into_iter().map(entry).collect();
    Ok(Json(api::Diff { entries, complete: compared.complete }))
}

pub(super) fn snapshot_state(state: &SnapshotState) -> api::SnapshotState {
    match state {
        SnapshotState::Building => api::SnapshotState::Building,
        SnapshotState::Ready | SnapshotState::Deleting => api::SnapshotState::Ready,
        SnapshotState::Failed { .. } => api::SnapshotState::Failed,
    }
}

/// A snapshot as clients see it.
fn to_api(snapshot: Snapshot) -> api::Snapshot {
    let state = snapshot_state(&snapshot.state);
    let reason = match snapshot.state {
        SnapshotState::Failed { reason } => Some(reason),
        SnapshotState::Building | SnapshotState::Ready | SnapshotState::Deleting => None,
    };
    let image = snapshot.template.as_ref().map(|template| template.spec.image.clone()).or(snapshot.image);
    api::Snapshot {
        id: snapshot.id,
        name: snapshot.name,
        state,
        reason,
        sandbox_id: snapshot.sandbox,
        parent: snapshot.parent.map(|parent| parent.to_string()),
        template: snapshot.template.map(|template| template.name),
        image,
        labels: snapshot.labels.pairs().clone(),
        size_bytes: snapshot.size_bytes,
        stopped_ms: snapshot.stopped.map(|stopped| stopped.as_micros() as f64 / 1000.0),
        created_at: rfc3339(snapshot.created_at),
    }
}

fn tree_of(members: Vec<Member>) -> api::Tree {
    let member = |member: Member| api::TreeMember {
        sandbox_id: member.sandbox,
        name: member.name,
        parent: member.parent,
        snapshot: member.snapshot.map(|snapshot| snapshot.to_string()),
        state: member.state.map(sandbox_state),
        created_at: rfc3339(member.created_at),
        deleted_at: member.deleted_at.map(rfc3339),
    };
    api::Tree { members: members.into_iter().map(member).collect() }
}
