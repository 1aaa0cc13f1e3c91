//! Sandboxes: create, wait, terminate, list, tags, names, and the program that a sandbox was made with.
//!
//! A sandbox that is gone is remembered by its last event, so that clients learn how it ended.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use engine::{
    Action, CommandEnv, CommandRef, CommandSpec, CommandState, EngineError, Field, GuestPath, IdempotencyKey,
    Key, LabelChanges, Labels, Lifetime, ListQuery, NetworkMode, NetworkPolicy, Offsets, Outcome, Output,
    OutputEvent, Program, Rule, Sandbox, SandboxEnv, SandboxName, SandboxSpec, SandboxUpdate, Selector,
    Since, State, Wait,
};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use wire::guest::{ExitStatus, Stream};
use wire::{CommandId, SandboxId};

use super::grpc::{self, Code, Status};
use super::messages::*;
use super::names::{self, AppId, Family, ImageId, SecretId};
use super::{Call, NOTES};
use crate::dialects::common;
use crate::http::app::{App, Stopping};
use crate::http::error::ApiError;

/// The id of the program that a sandbox was made with, among its commands.
const ENTRYPOINT: &str = "modal-entrypoint";
/// The label with the app's name. All other labels are tags.
const APP_LABEL: &str = "modal.app";
/// The lifetime where the caller does not say, as the vendor has it.
const TIMEOUT_SECONDS_DEFAULT: u32 = 300;
/// The longest wait of one call: clients ask again.
const WAIT_SECONDS_MAX: f32 = 60.0;
/// The most sandboxes of one page of a list.
const PAGE: u32 = 500;
/// What a client says about networks, in the vendor's numbers.
const NETWORK_BLOCKED: i32 = 2;
const NETWORK_ALLOWLIST: i32 = 3;
/// How a sandbox or its program ended, in the vendor's numbers.
const SUCCESS: i32 = 1;
const FAILURE: i32 = 2;
const TERMINATED: i32 = 3;
const TIMED_OUT: i32 = 4;
const INTERNAL_FAILURE: i32 = 6;
const IDLE: i32 = 7;
const OUT_OF_MEMORY: i32 = 10;
/// What `file_descriptor` says of stderr.
const STDERR: i32 = 2;

/// What is kept of a sandbox beside what the engine knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    app: String,
    image: String,
    /// Where commands run that do not say.
    pub workdir: Option<String>,
    /// Whether it was made with a program.
    entrypoint: bool,
}

impl Notes {
    /// Of a sandbox; nothing, if another kind of client has made it.
    pub fn of(sandbox: &Sandbox) -> Self {
        // What a later version wrote and this one cannot read is as good as absent.
        sandbox.notes.get(NOTES).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }
}

/// The older way to make a sandbox.
pub async fn create(call: &Call, wish: SandboxCreateRequest) -> Result<SandboxCreateResponse, Status> {
    let (sandbox, app_id) = make(call, wish.app_id, wish.definition, wish.tags, BTreeMap::new()).await?;
    Ok(SandboxCreateResponse {
        sandbox_id: names::sandbox(sandbox, Family::Older),
        metadata: Some(HandleMetadata { result: None, app_id }),
    })
}

/// The newer way. The answer saves the client two calls before its first command.
pub async fn create_newer(
    call: &Call,
    wish: SandboxCreateV2Request,
) -> Result<SandboxCreateV2Response, Status> {
    let mut env = wish.ephemeral_secrets.map(|map| map.contents).unwrap_or_default();
    env.extend(variables(&call.app, &call.key, &[], wish.secret_sources)?);
    let (sandbox, app_id) = make(call, wish.app_id, wish.definition, wish.tags, env).await?;
    Ok(SandboxCreateV2Response {
        sandbox_id: names::sandbox(sandbox, Family::Newer),
        task_id: names::task(sandbox, Family::Newer),
        metadata: Some(HandleMetadata { result: None, app_id }),
        command_router_access: Some(router(call, sandbox)),
    })
}

/// Variables in the order that clients give; later ones win.
pub fn variables(
    app: &App,
    key: &Key,
    ids: &[String],
    sources: Vec<SecretSource>,
) -> Result<BTreeMap<String, String>, Status> {
    let mut env = BTreeMap::new();
    for id in ids {
        env.extend(names::kept::<SecretId>(&app.engine, key, id)?.env);
    }
    for source in sources {
        if let Some(id) = source.secret_id {
            env.extend(names::kept::<SecretId>(&app.engine, key, &id)?.env);
        }
        env.extend(source.env.map(|map| map.contents).unwrap_or_default());
    }
    Ok(env)
}

async fn make(
    call: &Call,
    app_id: String,
    definition: Option<Definition>,
    tags: Vec<Tag>,
    env: BTreeMap<String, String>,
) -> Result<(SandboxId, String), Status> {
    let definition = definition.ok_or_else(|| Status::invalid("`definition` is missing"))?;
    check(&definition)?;
    let engine = &call.app.engine;
    let app: AppId = names::kept(engine, &call.key, &app_id)?;
    let image: ImageId = names::kept(engine, &call.key, &definition.image_id)?;
    let workdir = definition.workdir.clone().or_else(|| image.workdir.clone());
    let workdir = workdir.filter(|path| !path.is_empty()).map(GuestPath::parse).transpose();
    let workdir = workdir.map_err(|must| Status::invalid(format!("`workdir` must {must}")))?;
    let notes = Notes {
        app: app.name.clone(),
        image: definition.image_id.clone(),
        workdir: workdir.as_ref().map(|path| path.as_str().to_owned()),
        entrypoint: !definition.entrypoint_args.is_empty(),
    };
    let mut all = image.env.clone();
    all.extend(variables(&call.app, &call.key, &definition.secret_ids, Vec::new())?);
    all.extend(env);
    let spec = spec(call, &definition, &app, image, tags, all, &notes)?;
    let sandbox = engine.create(&call.key, spec, Wait::Ready).await?;
    tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
    if let Err(error) = furnish(call, sandbox.id, workdir, definition.entrypoint_args).await {
        // The caller gets no id, so nobody else would delete it.
        if let Err(error) = engine.delete(&call.key.owner, sandbox.id).await {
            tracing::warn!(sandbox = %sandbox.id, %error, "cannot delete a sandbox that is not complete");
        }
        return Err(error);
    }
    Ok((sandbox.id, app_id))
}

/// What would be a promise that this server does not keep is refused.
fn check(definition: &Definition) -> Result<(), Status> {
    let resources = definition.resources.clone().unwrap_or_default();
    let gpu =
        resources.gpu_config.is_some_and(|gpu| gpu.count > 0 || gpu.kind > 0 || !gpu.gpu_type.is_empty());
    let ports = definition.open_ports.as_ref().is_some_and(|ports| !ports.ports.is_empty());
    let refused = [
        (gpu, "`gpu`: this server has no GPUs"),
        (!definition.volume_mounts.is_empty(), "`volumes`: mount volumes through a template"),
        (!definition.cloud_bucket_mounts.is_empty(), "buckets: this server does not mount them"),
        (!definition.nfs_mounts.is_empty(), "network file systems: this server does not mount them"),
        (!definition.mount_ids.is_empty(), "local files: write them into the sandbox"),
        (ports, "`encrypted_ports`: reach the ports of a sandbox with `shoal url` or `shoal forward`"),
        (definition.proxy_id.as_ref().is_some_and(|id| !id.is_empty()), "`proxy`: this server has none"),
    ];
    match refused.iter().find(|(given, _)| *given) {
        Some((_, why)) => Err(Status::invalid(format!("this server cannot do {why}"))),
        None => Ok(()),
    }
}

fn spec(
    call: &Call,
    definition: &Definition,
    app: &AppId,
    image: ImageId,
    tags: Vec<Tag>,
    env: BTreeMap<String, String>,
    notes: &Notes,
) -> Result<SandboxSpec, Status> {
    let resources = definition.resources.clone().unwrap_or_default();
    let timeout = match definition.timeout_secs {
        0 => TIMEOUT_SECONDS_DEFAULT,
        seconds => seconds,
    };
    let rule = |since, seconds: u32| Rule {
        since,
        after: Duration::from_secs(u64::from(seconds)),
        action: Action::Delete,
    };
    let mut rules = vec![rule(Since::Creation, timeout)];
    rules.extend(
        definition.idle_timeout_secs.filter(|seconds| *seconds > 0).map(|idle| rule(Since::LastUse, idle)),
    );
    let idempotency_key = call.headers.get("x-idempotency-key").and_then(|key| key.to_str().ok());
    let idempotency_key = idempotency_key.map(IdempotencyKey::parse).transpose();
    let notes = serde_json::to_string(notes).expect("notes are made of types that JSON can write");
    let mut labels = labels(tags);
    labels.insert(APP_LABEL.into(), app.name.clone());
    let given = |amount: u32| (amount > 0).then_some(amount);
    Ok(SandboxSpec {
        name: definition
            .name
            .as_deref()
            .filter(|name| !name.is_empty())
            .map(SandboxName::parse)
            .transpose()?,
        image: image.image,
        env: SandboxEnv::new(env).map_err(|must| must.of(Field::Env))?,
        cpu_millis: given(resources.milli_cpu),
        memory_bytes: given(resources.memory_mb).map(|mib| u64::from(mib) << 20),
        labels: Labels::new(labels)?,
        lifetime: Lifetime::new(rules)?,
        network: policy(definition.network_access.as_ref())?,
        network_default: common::network::open(),
        notes: engine::Notes::one(NOTES, notes)?,
        idempotency_key: idempotency_key.map_err(|must| must.of(Field::IdempotencyKey))?,
        ..SandboxSpec::default()
    })
}

/// What a caller says about the network; `None` if that is nothing.
fn policy(access: Option<&NetworkAccess>) -> Result<Option<NetworkPolicy>, Status> {
    let Some(access) = access else { return Ok(None) };
    match access.network_access_type {
        NETWORK_BLOCKED => Ok(Some(common::network::closed())),
        NETWORK_ALLOWLIST => {
            let allowed = [access.allowed_cidrs.as_slice(), &access.allowed_domains].concat();
            Ok(Some(common::network::with(NetworkMode::None, &allowed, &[])?))
        }
        _ => Ok(None),
    }
}

/// Makes the working directory, and starts the program. Both may be repeated.
async fn furnish(
    call: &Call,
    id: SandboxId,
    workdir: Option<GuestPath>,
    entrypoint: Vec<String>,
) -> Result<(), Status> {
    let engine = &call.app.engine;
    if let Some(path) = &workdir {
        let files = engine.files(&call.key.owner, id, None)?;
        files.make_directory(path.as_str().as_bytes(), true, None).await?;
    }
    if entrypoint.is_empty() {
        return Ok(());
    }
    let program = Program::argv(entrypoint).map_err(|must| must.of(Field::Argv))?;
    let command = CommandSpec {
        id: Some(entrypoint_id()),
        env: CommandEnv::default(),
        cwd: workdir,
        stdin: true,
        ..CommandSpec::new(program)
    };
    let command = engine.run(&call.key.owner, id, command).await?;
    match command.now().state {
        CommandState::Ended { outcome: Outcome::FailedToStart(why), .. } => {
            Err(Status::invalid(why.to_string()))
        }
        _ => Ok(()),
    }
}

fn entrypoint_id() -> CommandId {
    ENTRYPOINT.parse().expect("it is made of letters and a dash")
}

fn labels(tags: Vec<Tag>) -> BTreeMap<String, String> {
    tags.into_iter().map(|tag| (tag.tag_name, tag.tag_value)).collect()
}

fn tags_of(sandbox: &Sandbox) -> Vec<Tag> {
    let tags = sandbox.labels.pairs().iter().filter(|(name, _)| *name != APP_LABEL);
    tags.map(|(name, value)| Tag { tag_name: name.clone(), tag_value: value.clone() }).collect()
}

fn router(call: &Call, id: SandboxId) -> RouterAccess {
    RouterAccess { jwt: names::token(&call.app.engine, &call.key, id), url: call.app.origin(&call.headers) }
}

/// How a sandbox has ended; `None` while it runs.
async fn ended(app: &App, key: &Key, id: SandboxId) -> Result<Option<GenericResult>, Status> {
    let gone = |reason: Option<&str>| GenericResult {
        status: match reason {
            None => TERMINATED,
            Some(reason) if reason.starts_with("nobody has used it") => IDLE,
            Some(_) => TIMED_OUT,
        },
        ..GenericResult::default()
    };
    let sandbox = match app.engine.get(&key.owner, id).await {
        Ok(sandbox) => sandbox,
        Err(error @ EngineError::SandboxNotFound { .. }) => {
            let deletion = app.engine.deletion(&key.owner, id).ok_or(error)?;
            return Ok(Some(gone(deletion.reason.as_deref())));
        }
        Err(error) => return Err(error.into()),
    };
    match sandbox.state {
        State::Deleting => Ok(Some(gone(sandbox.reason.as_deref()))),
        State::Failed { .. } => Ok(Some(GenericResult {
            status: INTERNAL_FAILURE,
            exception: sandbox.reason.unwrap_or_default(),
            exitcode: 1,
        })),
        State::Creating | State::Running | State::Paused(_) => match Notes::of(&sandbox).entrypoint {
            false => Ok(None),
            true => Ok(entrypoint(app, key, id).await?.and_then(|command| result(&command.now().state))),
        },
    }
}

/// The program that a sandbox was made with.
async fn entrypoint(app: &App, key: &Key, id: SandboxId) -> Result<Option<CommandRef>, Status> {
    match app.engine.command(&key.owner, id, &entrypoint_id()).await {
        Ok(command) => Ok(Some(command)),
        Err(EngineError::CommandNotFound { .. } | EngineError::CommandExpired { .. }) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

fn result(state: &CommandState) -> Option<GenericResult> {
    const BY_SIGNAL: i32 = 128;
    let CommandState::Ended { outcome, .. } = state else { return None };
    let code = |status: &ExitStatus| match status {
        ExitStatus::Code(code) => *code,
        ExitStatus::Signal(signal) => BY_SIGNAL + signal,
    };
    let by = |status, exitcode| Some(GenericResult { status, exception: String::new(), exitcode });
    match outcome {
        Outcome::Exited(0) => by(SUCCESS, 0),
        Outcome::Exited(code) => by(FAILURE, *code),
        Outcome::Signaled(signal) => by(FAILURE, BY_SIGNAL + signal),
        Outcome::OutOfMemory(status) => by(OUT_OF_MEMORY, code(status)),
        Outcome::Killed(status) | Outcome::TimedOut(status) | Outcome::IdleTimedOut(status) => {
            by(FAILURE, code(status))
        }
        Outcome::FailedToStart(_) | Outcome::TimedOutUnheard => by(FAILURE, 127),
        Outcome::SandboxGone => by(TERMINATED, 0),
    }
}

/// The task of a sandbox, which is the sandbox itself, or how it has ended.
pub async fn task(call: &Call, wish: SandboxRequest) -> Result<SandboxGetTaskIdResponse, Status> {
    let (id, family) = names::parse_sandbox(&wish.sandbox_id)?;
    Ok(match ended(&call.app, &call.key, id).await? {
        Some(result) => SandboxGetTaskIdResponse { task_id: None, task_result: Some(result) },
        None => SandboxGetTaskIdResponse { task_id: Some(names::task(id, family)), task_result: None },
    })
}

async fn open(call: &Call, id: SandboxId) -> Result<RouterAccess, Status> {
    match ended(&call.app, &call.key, id).await? {
        None => Ok(router(call, id)),
        Some(_) => Err(Status::new(Code::FailedPrecondition, "the sandbox has already finished")),
    }
}

/// Where commands of a sandbox are sent.
pub async fn access(call: &Call, wish: RouterAccessRequest) -> Result<RouterAccess, Status> {
    let id = match (wish.sandbox_id, wish.task_id) {
        (Some(id), _) => names::parse_sandbox(&id)?.0,
        (None, Some(id)) => names::parse_task(&id)?,
        (None, None) => return Err(Status::invalid("`target` is missing")),
    };
    open(call, id).await
}

/// As [`access`], by the task.
pub async fn access_by_task(call: &Call, wish: TaskRequest) -> Result<RouterAccess, Status> {
    open(call, names::parse_task(&wish.task_id)?).await
}

/// Waits for the end of a sandbox, as long as the caller says.
pub async fn wait(call: &Call, wish: SandboxRequest) -> Result<SandboxWaitResponse, Status> {
    let (id, _) = names::parse_sandbox(&wish.sandbox_id)?;
    let seconds = if wish.timeout.is_finite() { wish.timeout.clamp(0.0, WAIT_SECONDS_MAX) } else { 0.0 };
    let deadline = Instant::now() + Duration::from_secs_f32(seconds);
    let mut stopping = call.app.stopping(&call.key);
    // Events from here on, so that none is missed between a look and the wait.
    let mut watcher = call.app.engine.watch(&call.key.owner, Some(id), None).ok();
    loop {
        let result = ended(&call.app, &call.key, id).await?;
        if result.is_some() || Instant::now() >= deadline {
            let metadata = HandleMetadata { result: result.clone(), app_id: String::new() };
            return Ok(SandboxWaitResponse { result, metadata: Some(metadata) });
        }
        let happened = async {
            match &mut watcher {
                Some(watcher) => drop(watcher.next().await),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = happened => {}
            () = tokio::time::sleep_until(deadline) => {}
            halt = stopping.wait() => return Err(ApiError::from(halt).into()),
        }
    }
}

/// Ends a sandbox. One that has ended stays so.
pub async fn terminate(call: &Call, wish: SandboxRequest) -> Result<SandboxTerminateResponse, Status> {
    let (id, _) = names::parse_sandbox(&wish.sandbox_id)?;
    let existing_result = ended(&call.app, &call.key, id).await?;
    match call.app.engine.delete(&call.key.owner, id).await {
        Ok(()) | Err(EngineError::SandboxNotFound { .. }) => Ok(SandboxTerminateResponse { existing_result }),
        Err(error) => Err(error.into()),
    }
}

/// Sandboxes that run, newest first.
pub async fn list(call: &Call, wish: SandboxListRequest) -> Result<SandboxListResponse, Status> {
    listed(call, wish, Family::Older).await
}

/// As [`list`], with ids of the newer shape.
pub async fn list_newer(call: &Call, wish: SandboxListRequest) -> Result<SandboxListResponse, Status> {
    listed(call, wish, Family::Newer).await
}

async fn listed(
    call: &Call,
    wish: SandboxListRequest,
    family: Family,
) -> Result<SandboxListResponse, Status> {
    let mut selectors: Vec<Selector> =
        labels(wish.tags).into_iter().map(|(name, value)| Selector::Is(name, value)).collect();
    if !wish.app_id.is_empty() {
        let app: AppId = names::kept(&call.app.engine, &call.key, &wish.app_id)?;
        selectors.push(Selector::Is(APP_LABEL.into(), app.name));
    }
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let query = ListQuery { limit: Some(PAGE), cursor, name: None, selectors: selectors.clone() };
        let page = call.app.engine.list(&call.key.owner, query).await?;
        for sandbox in page.items {
            let created = seconds(sandbox.created_at);
            // The client asks for what is older than the last of its page, until there is none.
            let older = wish.before_timestamp <= 0.0 || created < wish.before_timestamp;
            if older && ended(&call.app, &call.key, sandbox.id).await.is_ok_and(|ended| ended.is_none()) {
                found.push(info(call, &sandbox, created, family));
            }
        }
        cursor = page.next_cursor;
        if cursor.is_none() || found.len() >= PAGE as usize {
            return Ok(SandboxListResponse { sandboxes: found });
        }
    }
}

fn info(call: &Call, sandbox: &Sandbox, created_at: f64, family: Family) -> SandboxInfo {
    let notes = Notes::of(sandbox);
    SandboxInfo {
        id: names::sandbox(sandbox.id, family),
        created_at,
        task_info: Some(TaskInfo { id: names::task(sandbox.id, family), started_at: created_at }),
        app_id: names::keep(&call.app.engine, &call.key, &AppId { name: notes.app }),
        tags: tags_of(sandbox),
        name: sandbox.name.as_str().to_owned(),
        image_id: notes.image,
    }
}

fn seconds(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

async fn live(call: &Call, id: &str) -> Result<Sandbox, Status> {
    let (id, _) = names::parse_sandbox(id)?;
    Ok(call.app.engine.get(&call.key.owner, id).await?)
}

/// The tags of a sandbox.
pub async fn tags(call: &Call, wish: SandboxRequest) -> Result<TagsGetResponse, Status> {
    Ok(TagsGetResponse { tags: tags_of(&live(call, &wish.sandbox_id).await?) })
}

/// Replaces the tags of a sandbox.
pub async fn set_tags(call: &Call, wish: TagsSetRequest) -> Result<Empty, Status> {
    let sandbox = live(call, &wish.sandbox_id).await?;
    let removed = tags_of(&sandbox).into_iter().map(|tag| (tag.tag_name, None));
    let mut changes: BTreeMap<String, Option<String>> = removed.collect();
    changes.extend(labels(wish.tags).into_iter().map(|(name, value)| (name, Some(value))));
    changes.remove(APP_LABEL);
    let update = SandboxUpdate { labels: LabelChanges::new(changes)?, ..SandboxUpdate::default() };
    call.app.engine.update(&call.key.owner, sandbox.id, update).await?;
    Ok(Empty {})
}

/// A sandbox by its name and its app's.
pub async fn from_name(call: &Call, wish: GetFromNameRequest) -> Result<GetFromNameResponse, Status> {
    named(call, wish, Family::Older).await
}

/// As [`from_name`], with an id of the newer shape.
pub async fn from_name_newer(call: &Call, wish: GetFromNameRequest) -> Result<GetFromNameResponse, Status> {
    named(call, wish, Family::Newer).await
}

async fn named(call: &Call, wish: GetFromNameRequest, family: Family) -> Result<GetFromNameResponse, Status> {
    let not_found = || {
        let (name, app) = (names::shown(&wish.sandbox_name), names::shown(&wish.app_name));
        Status::not_found(format!("Sandbox '{name}' of app '{app}' not found"))
    };
    let query = ListQuery { limit: Some(1), name: Some(wish.sandbox_name.clone()), ..ListQuery::default() };
    let page = call.app.engine.list(&call.key.owner, query).await?;
    let sandbox = page.items.into_iter().next().ok_or_else(not_found)?;
    if Notes::of(&sandbox).app != wish.app_name || ended(&call.app, &call.key, sandbox.id).await?.is_some() {
        return Err(not_found());
    }
    let app_id = names::keep(&call.app.engine, &call.key, &AppId { name: wish.app_name });
    Ok(GetFromNameResponse {
        sandbox_id: names::sandbox(sandbox.id, family),
        metadata: Some(HandleMetadata { result: None, app_id }),
    })
}

/// Writes to the program that a sandbox was made with. The number of a write is not an offset, so a write that a client
/// repeats is written twice.
pub async fn write_stdin(call: &Call, wish: StdinWriteRequest) -> Result<Empty, Status> {
    let (id, _) = names::parse_sandbox(&wish.sandbox_id)?;
    let command = entrypoint(&call.app, &call.key, id).await?.ok_or_else(no_entrypoint)?;
    super::commands::give(&command, None, wish.input, wish.eof).await?;
    Ok(Empty {})
}

/// A sandbox without a program has no streams.
pub fn no_entrypoint() -> Status {
    Status::new(Code::FailedPrecondition, "the sandbox was made without a program")
}

/// The command of [`entrypoint`], for the other service.
pub async fn entrypoint_of(app: &App, key: &Key, id: SandboxId) -> Result<Option<CommandRef>, Status> {
    entrypoint(app, key, id).await
}

/// The output of the program as text, for the older calls. The id of an entry is the offset behind it.
pub async fn logs(call: Call, request: Request) -> Result<Response, Status> {
    let wish: GetLogsRequest = grpc::read(request, &call.app).await?;
    let (id, _) = names::parse_sandbox(&wish.sandbox_id)?;
    let command = match ended(&call.app, &call.key, id).await {
        Ok(_) => entrypoint(&call.app, &call.key, id).await.unwrap_or(None),
        Err(status) => return Err(status),
    };
    let end = TaskLogsBatch { eof: true, ..TaskLogsBatch::default() };
    let Some(command) = command else { return Ok(grpc::one(&end)) };
    let at: u64 = wish.last_entry_id.parse().unwrap_or(0);
    let (wanted, from) = match wish.file_descriptor {
        STDERR => (Stream::Stderr, Offsets { stdout: u64::MAX, stderr: at }),
        _ => (Stream::Stdout, Offsets { stdout: at, stderr: u64::MAX }),
    };
    let sending = Logs {
        output: command.attach(from),
        stopping: call.app.stopping(&call.key),
        wanted,
        descriptor: wish.file_descriptor,
        rest: Vec::new(),
        over: false,
    };
    Ok(grpc::many(stream::unfold(sending, async |mut sending| {
        let batch = sending.next().await?;
        Some((batch, sending))
    })))
}

/// One client on one stream of the program.
struct Logs {
    output: Output,
    stopping: Stopping,
    wanted: Stream,
    descriptor: i32,
    /// The beginning of a character.
    rest: Vec<u8>,
    over: bool,
}

impl Logs {
    async fn next(&mut self) -> Option<Result<Bytes, Status>> {
        while !self.over {
            let event = tokio::select! {
                event = self.output.next() => event,
                halt = self.stopping.wait() => {
                    self.over = true;
                    return Some(Err(ApiError::from(halt).into()));
                }
            };
            match event {
                Some(OutputEvent::Bytes { stream, offset, bytes }) if stream == self.wanted => {
                    let end = offset + bytes.len() as u64;
                    let data = text(&mut self.rest, &bytes);
                    if !data.is_empty() {
                        let entry = TaskLogs { data, timestamp: 0.0, file_descriptor: self.descriptor };
                        let batch =
                            TaskLogsBatch { items: vec![entry], entry_id: end.to_string(), eof: false };
                        return Some(Ok(grpc::framed(&batch)));
                    }
                }
                Some(OutputEvent::Ended(_)) | None => {
                    self.over = true;
                    return Some(Ok(grpc::framed(&TaskLogsBatch { eof: true, ..TaskLogsBatch::default() })));
                }
                // The client asks again behind the last entry that it has.
                Some(OutputEvent::Stalled) => return None,
                Some(_) => {}
            }
        }
        None
    }
}

/// The text that is whole; the beginning of a character waits for its end.
fn text(rest: &mut Vec<u8>, bytes: &Bytes) -> String {
    rest.extend_from_slice(bytes);
    let whole = match std::str::from_utf8(rest) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        Ok(_) | Err(_) => rest.len(),
    };
    let tail = rest.split_off(whole);
    String::from_utf8_lossy(&std::mem::replace(rest, tail)).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_not_be_kept_is_refused() {
        check(&Definition::default()).expect("nothing is asked for");
        let gpu = GpuConfig { kind: 0, count: 1, gpu_type: "T4".into() };
        let resources = Some(Resources { gpu_config: Some(gpu), ..Resources::default() });
        let status = check(&Definition { resources, ..Definition::default() }).expect_err("there are none");
        assert!(status.message().contains("no GPUs") && status.code() == Code::InvalidArgument);
        let volume_mounts = vec![Empty {}];
        check(&Definition { volume_mounts, ..Definition::default() }).expect_err("they are not mounted");
    }

    #[test]
    fn a_character_is_not_cut() {
        let mut rest = Vec::new();
        assert_eq!(text(&mut rest, &Bytes::from_static(b"a\xe2\x82")), "a");
        assert_eq!(text(&mut rest, &Bytes::from_static(b"\xacb")), "€b");
        assert_eq!(text(&mut rest, &Bytes::from_static(b"\xff")), "\u{fffd}");
    }

    #[test]
    fn an_end_has_the_vendors_number() {
        let ended = |outcome| result(&CommandState::Ended { pid: None, outcome }).expect("it has ended");
        assert_eq!((ended(Outcome::Exited(0)).status, ended(Outcome::Exited(7)).exitcode), (1, 7));
        assert_eq!(ended(Outcome::Signaled(9)).exitcode, 137);
        assert_eq!(result(&CommandState::Running { pid: 1 }), None);
    }
}
