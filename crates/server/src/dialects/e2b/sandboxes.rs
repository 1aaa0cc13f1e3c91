//! Sandboxes on the control plane: create, connect, show, list, change the timeout, pause, kill.
//!
//! A *timeout* of theirs is a rule of ours that deletes or pauses a sandbox that long after its start or its last touch,
//! since a new timeout counts from the moment it is set. It does not count while the sandbox is paused. *Metadata* are
//! labels.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use engine::{
    Action, EngineError, Field, IdempotencyKey, Kept, Key, Labels, Lifetime, ListQuery, NetworkChange,
    NetworkMode, NetworkPolicy, PauseSpec, Rule, Sandbox, SandboxEnv, SandboxSpec, SandboxUpdate, Selector,
    TemplateName, Wait,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tracing::Instrument;

use super::error::Refusal;
use super::notes::{Notes, OnTimeout};
use super::read::{Body, DONE, Meant, shown};
use super::{home, names};
use crate::dialects::common;
use crate::http::app::{App, Caller};
use crate::http::clock::rfc3339;
use crate::http::params::{Params, decode};

/// The lifetime where the caller does not say, as the vendor has it.
const TIMEOUT_SECONDS_DEFAULT: u64 = 300;
/// As above, for the routes of older clients.
const TIMEOUT_SECONDS_DEFAULT_OLD: u64 = 15;
/// The version of the vendor's agent whose calls are served: clients offer what it has. Later ones keep metadata of files.
const AGENT_VERSION: &str = "0.6.1";
/// Names that clients send by themselves. They mean the built-in template unless the owner has one of that name.
const TEMPLATES_BUILT_IN: &[&str] = &["base", "code-interpreter-v1"];
/// A page of a list, if the caller does not say.
const PAGE_DEFAULT: u32 = 100;
const NEXT_TOKEN: HeaderName = HeaderName::from_static("x-next-token");
const MIB: u64 = 1 << 20;
/// Thousandths in a processor.
const MILLIS: u32 = 1000;

/// `POST /sandboxes` and `/v2/sandboxes`. What is absent and what is `null` are the same.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Create {
    #[serde(rename = "templateID")]
    template: Option<String>,
    timeout: Option<i64>,
    metadata: Option<BTreeMap<String, String>>,
    env_vars: Option<BTreeMap<String, String>>,
    auto_pause: Option<bool>,
    /// Whether the pause at the end of the timeout keeps the memory.
    auto_pause_memory: Option<bool>,
    auto_resume: Option<AutoResume>,
    #[serde(rename = "allow_internet_access")]
    internet: Option<bool>,
    network: Option<Value>,
    mcp: Option<Value>,
    iam: Option<Value>,
    volume_mounts: Option<Vec<Value>>,
}

/// Whether a call of the agent resumes a paused sandbox.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct AutoResume {
    enabled: Option<bool>,
}

/// Creates a sandbox, and answers when it takes commands.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    Body(body): Body<Create>,
) -> Result<Response, Refusal> {
    create_with(app, key, headers, body, TIMEOUT_SECONDS_DEFAULT).await
}

/// As [`create`], for clients before 2.51.
pub async fn create_old(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    Body(body): Body<Create>,
) -> Result<Response, Refusal> {
    create_with(app, key, headers, body, TIMEOUT_SECONDS_DEFAULT_OLD).await
}

async fn create_with(
    app: App,
    key: Key,
    headers: HeaderMap,
    body: Create,
    timeout_default: u64,
) -> Result<Response, Refusal> {
    let spec = spec(&app, &key, &headers, body, timeout_default)?;
    let making = {
        let (app, key) = (app.clone(), key.clone());
        async move {
            let sandbox = app.engine.create(&key, spec, Wait::Ready).await?;
            match home::prepare(&app.engine, &key.owner, sandbox.id).await {
                Ok(()) => Ok(sandbox),
                Err(error) => {
                    // The caller gets no id, so nobody else would delete it.
                    if let Err(error) = app.engine.delete(&key.owner, sandbox.id).await {
                        tracing::warn!(sandbox = %sandbox.id, %error, "cannot delete a sandbox without a home");
                    }
                    Err(error)
                }
            }
        }
    };
    // A task of its own, so that what was begun is finished when the caller leaves.
    let made = tokio::spawn(making.in_current_span()).await.map_err(|_| Refusal::bug())?;
    let made = made.map_err(Refusal::control)?;
    tracing::Span::current().record("sandbox", tracing::field::display(made.id));
    Ok((StatusCode::CREATED, Json(opened(&app, &key, &made, &headers))).into_response())
}

fn spec(
    app: &App,
    key: &Key,
    headers: &HeaderMap,
    body: Create,
    timeout_default: u64,
) -> Result<SandboxSpec, Refusal> {
    let Create {
        template,
        timeout,
        metadata,
        env_vars,
        auto_pause,
        auto_pause_memory,
        auto_resume,
        internet,
        network,
        mcp,
        iam,
        volume_mounts,
    } = body;
    for (field, given) in [("mcp", &mcp), ("iam", &iam)] {
        if given.as_ref().is_some_and(|given| !given.is_null()) {
            return Err(Refusal::invalid(format!("this server does not have `{field}`")));
        }
    }
    if volume_mounts.is_some_and(|mounts| !mounts.is_empty()) {
        return Err(Refusal::invalid("this server mounts volumes through templates only"));
    }
    let on_timeout = match (auto_pause, auto_pause_memory) {
        (Some(true), Some(false)) => OnTimeout::PauseFiles,
        (Some(true), _) => OnTimeout::Pause,
        _ => OnTimeout::Kill,
    };
    let auto_resume = auto_resume.and_then(|wish| wish.enabled).unwrap_or(false);
    if auto_resume && on_timeout != OnTimeout::Pause {
        return Err(Refusal::invalid("`autoResume` needs `autoPause` with memory"));
    }
    let network = policy(internet, network.as_ref())?;
    let asked = template.filter(|name| !name.is_empty());
    let engine = |error: EngineError| Refusal::control(error);
    let idempotency_key = headers.get("idempotency-key").and_then(|key| key.to_str().ok());
    let idempotency_key = idempotency_key.map(IdempotencyKey::parse).transpose();
    let timeout = seconds(timeout)?.unwrap_or(Duration::from_secs(timeout_default));
    let notes = Notes { template: asked.clone(), internet, on_timeout, auto_resume };
    Ok(SandboxSpec {
        template: named_template(app, key, asked.as_deref())?,
        env: SandboxEnv::new(env_vars.unwrap_or_default()).map_err(|must| engine(must.of(Field::Env)))?,
        labels: Labels::new(metadata.unwrap_or_default()).map_err(engine)?,
        lifetime: on_timeout.after(timeout).map_err(engine)?,
        network,
        network_default: common::network::open(),
        notes: notes.stored().map_err(engine)?,
        idempotency_key: idempotency_key.map_err(|must| engine(must.of(Field::IdempotencyKey)))?,
        ..SandboxSpec::default()
    })
}

/// The template that a caller names, with or without a tag.
fn named_template(app: &App, key: &Key, asked: Option<&str>) -> Result<TemplateName, Refusal> {
    let Some(asked) = asked else { return Ok(TemplateName::built_in()) };
    let untagged = asked.split_once(':').map_or(asked, |(name, _)| name);
    for name in [asked, untagged] {
        if let (Ok(known), Ok(_)) = (TemplateName::parse(name), app.engine.template(&key.owner, name)) {
            return Ok(known);
        }
    }
    if TEMPLATES_BUILT_IN.contains(&untagged) {
        return Ok(TemplateName::built_in());
    }
    const SHOWN_MAX: usize = 64;
    let name: String = asked.chars().take(SHOWN_MAX).collect();
    Err(Refusal::new(StatusCode::NOT_FOUND, format!("template '{name}' not found")))
}

/// Every IPv4 address, which stands for everything.
const EVERYTHING: &[&str] = &["0.0.0.0/0", "::/0"];

/// What a caller says about the network; `None` if that is nothing. Rules that this server would not keep are refused,
/// since a caller may rely on them.
fn policy(internet: Option<bool>, network: Option<&Value>) -> Result<Option<NetworkPolicy>, Refusal> {
    let empty = serde_json::Map::new();
    let network = network.and_then(Value::as_object).unwrap_or(&empty);
    let list = |field: &str| -> Result<Vec<String>, Refusal> {
        match network.get(field) {
            None | Some(Value::Null) => Ok(Vec::new()),
            Some(given) => serde_json::from_value(given.clone())
                .map_err(|_| Refusal::invalid(format!("`network.{field}` must be a list of texts"))),
        }
    };
    let (allow, mut deny) = (list("allowOut")?, list("denyOut")?);
    // Ports need a key or a link here in any case, so nothing has to be done for `allowPublicTraffic`.
    const KNOWN: &[&str] = &["allowOut", "denyOut", "allowPublicTraffic"];
    let empty = |value: &Value| match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    if let Some((field, _)) =
        network.iter().find(|(field, value)| !KNOWN.contains(&field.as_str()) && !empty(value))
    {
        return Err(Refusal::invalid(format!(
            "this server cannot do `network.{field}`; set what the sandbox may reach with `shoal net set`"
        )));
    }
    if internet != Some(false) && allow.is_empty() && deny.is_empty() {
        return Ok(None);
    }
    let all = deny.len();
    deny.retain(|target| !EVERYTHING.contains(&target.trim()));
    let mode = match internet == Some(false) || deny.len() < all {
        true => NetworkMode::None,
        false => NetworkMode::Open,
    };
    common::network::with(mode, &allow, &deny).map(Some).map_err(Refusal::control)
}

/// `PUT /sandboxes/{sandbox}/network`: replaces everything that was said about the network.
pub async fn change_network(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Value>,
) -> Result<StatusCode, Refusal> {
    let mut network = body;
    let internet = network.as_object_mut().and_then(|network| network.remove("allow_internet_access"));
    let policy = policy(internet.and_then(|given| given.as_bool()), Some(&network))?;
    let policy = policy.unwrap_or_else(common::network::open);
    let update = SandboxUpdate { network: Some(NetworkChange::Replace(policy)), ..SandboxUpdate::default() };
    app.engine.update(&key.owner, sandbox.id, update).await.map_err(Refusal::control)?;
    Ok(StatusCode::NO_CONTENT)
}

fn seconds(timeout: Option<i64>) -> Result<Option<Duration>, Refusal> {
    let wrong = |given: i64| {
        Refusal::invalid(format!("`timeout` must be a number of seconds from 0 on, got {given}"))
    };
    timeout.map(|given| u64::try_from(given).map(Duration::from_secs).map_err(|_| wrong(given))).transpose()
}

/// What opens a sandbox: the answer of create and connect.
fn opened(app: &App, key: &Key, sandbox: &Sandbox, headers: &HeaderMap) -> Value {
    json!({
        "templateID": template_of(sandbox),
        "sandboxID": names::id(sandbox.id),
        "clientID": "shoal",
        "envdVersion": AGENT_VERSION,
        "envdAccessToken": names::token(&app.engine, key, sandbox.id),
        "domain": domain(app, headers),
    })
}

/// A client that knows only half of its settings goes to this host, and not to the vendor's.
fn domain(app: &App, headers: &HeaderMap) -> String {
    let origin = app.origin(headers);
    origin.split_once("://").map_or(origin.clone(), |(_, host)| host.to_owned())
}

fn template_of(sandbox: &Sandbox) -> String {
    Notes::of(sandbox).and_then(|notes| notes.template).unwrap_or_else(|| sandbox.template.clone())
}

/// When a sandbox ends; one without a rule for it, much later.
async fn end_of(app: &App, key: &Key, sandbox: &Sandbox) -> Result<SystemTime, Refusal> {
    const NEVER: Duration = Duration::from_secs(3650 * 86_400);
    let explanation = app.engine.explain(&key.owner, sandbox.id).await.map_err(Refusal::control)?;
    Ok(explanation.end.map_or_else(|| SystemTime::now() + NEVER, |end| end.at))
}

async fn described(app: &App, key: &Key, sandbox: &Sandbox) -> Result<Value, Refusal> {
    let limits = &sandbox.limits;
    Ok(json!({
        "templateID": template_of(sandbox),
        "sandboxID": names::id(sandbox.id),
        "clientID": "shoal",
        "startedAt": rfc3339(sandbox.created_at),
        "endAt": rfc3339(end_of(app, key, sandbox).await?),
        "envdVersion": AGENT_VERSION,
        "cpuCount": limits.cpu_millis.div_ceil(MILLIS),
        "memoryMB": limits.memory_bytes / MIB,
        "diskSizeMB": limits.disk_bytes.unwrap_or(0) / MIB,
        "state": state(sandbox),
        "metadata": sandbox.labels.pairs(),
    }))
}

fn state(sandbox: &Sandbox) -> &'static str {
    match sandbox.state {
        engine::State::Paused(_) => "paused",
        _ => "running",
    }
}

/// `GET /sandboxes/{sandbox}`
pub async fn get(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
) -> Result<Json<Value>, Refusal> {
    let mut detail = described(&app, &key, &sandbox).await?;
    let Notes { internet, on_timeout, auto_resume, .. } = Notes::of(&sandbox).unwrap_or_default();
    detail["domain"] = domain(&app, &headers).into();
    detail["envdAccessToken"] = names::token(&app.engine, &key, sandbox.id).into();
    detail["allowInternetAccess"] = json!(internet);
    detail["lifecycle"] = json!({"autoResume": auto_resume, "onTimeout": on_timeout.word()});
    if let engine::State::Paused(kept) = sandbox.state {
        detail["pauseMode"] = match kept {
            Kept::Frozen | Kept::Saved => "full".into(),
            Kept::Dropped => "filesystem".into(),
        };
    }
    Ok(Json(detail))
}

/// What to list.
#[derive(Clone)]
struct Wanted {
    limit: usize,
    next: Option<String>,
    oldest_first: bool,
    states: Vec<String>,
    template: Option<String>,
    selectors: Vec<Selector>,
}

impl Wanted {
    fn read(mut params: Params) -> Result<Self, Refusal> {
        let limit = params.number("limit", 1..=u64::from(engine::PAGE_MAX))?;
        let states = params.text("state")?.unwrap_or_default();
        let pairs = metadata(params.bytes("metadata").unwrap_or_default())?;
        let order = params.text("order")?;
        if !matches!(order.as_deref(), None | Some("asc" | "desc")) {
            return Err(Refusal::invalid("`order` must be `asc` or `desc`"));
        }
        Ok(Self {
            limit: limit.unwrap_or(u64::from(PAGE_DEFAULT)) as usize,
            next: params.text("nextToken")?.filter(|token| !token.is_empty()),
            oldest_first: order.as_deref() == Some("asc"),
            states: states.split(',').filter(|state| !state.is_empty()).map(str::to_owned).collect(),
            template: params.text("template")?,
            selectors: pairs.into_iter().map(|(key, value)| Selector::Is(key, value)).collect(),
        })
    }

    fn wants(&self, sandbox: &Sandbox) -> bool {
        let in_state = self.states.is_empty() || self.states.iter().any(|wanted| wanted == state(sandbox));
        let of_template = self.template.as_ref().is_none_or(|wanted| *wanted == template_of(sandbox));
        shown(sandbox) && in_state && of_template
    }
}

/// The pairs that clients filter by: a query whose names and values are encoded once more.
fn metadata(query: Vec<u8>) -> Result<Vec<(String, String)>, Refusal> {
    let wrong = || Refusal::invalid("`metadata` must be pairs, each part percent-encoded");
    let query = String::from_utf8(query).map_err(|_| wrong())?;
    let text = |part: &str| -> Option<String> {
        let once = String::from_utf8(decode(part)?).ok()?;
        String::from_utf8(decode(&once)?).ok()
    };
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).map(|pair| {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        Some((text(key)?, text(value)?))
    });
    pairs.collect::<Option<_>>().ok_or_else(wrong)
}

/// The sandboxes of the key's owner. The newest come first unless the caller says otherwise.
pub async fn list(State(app): State<App>, Caller(key): Caller, params: Params) -> Result<Response, Refusal> {
    let wanted = Wanted::read(params)?;
    let (found, next) = match wanted.oldest_first {
        false => newest(&app, &key, &wanted).await?,
        true => oldest(&app, &key, &wanted).await?,
    };
    let mut shown = Vec::with_capacity(found.len());
    for sandbox in &found {
        match described(&app, &key, sandbox).await {
            Ok(one) => shown.push(one),
            // It was deleted in the meantime.
            Err(refusal) if refusal.status() == StatusCode::NOT_FOUND => {}
            Err(refusal) => return Err(refusal),
        }
    }
    let mut response = Json(Value::Array(shown)).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert(NEXT_TOKEN, next);
    }
    Ok(response)
}

async fn newest(app: &App, key: &Key, wanted: &Wanted) -> Result<(Vec<Sandbox>, Option<String>), Refusal> {
    let mut found = Vec::new();
    let mut cursor = wanted.next.clone();
    loop {
        // A page of one is what a cursor can begin behind, wherever the filter has stopped.
        let query = ListQuery { limit: Some(1), cursor, name: None, selectors: wanted.selectors.clone() };
        let page = app.engine.list(&key.owner, query).await.map_err(Refusal::control)?;
        found.extend(page.items.into_iter().filter(|sandbox| wanted.wants(sandbox)));
        match page.next_cursor {
            None => return Ok((found, None)),
            Some(next) if found.len() >= wanted.limit => return Ok((found, Some(next))),
            Some(next) => cursor = Some(next),
        }
    }
}

/// The token counts what was listed before, which new sandboxes do not change: they come last.
async fn oldest(app: &App, key: &Key, wanted: &Wanted) -> Result<(Vec<Sandbox>, Option<String>), Refusal> {
    let wrong = |_| Refusal::invalid("`nextToken` must be one that an earlier page returned");
    let skip: usize = wanted.next.as_deref().map_or(Ok(0), str::parse).map_err(wrong)?;
    let all = Wanted { limit: usize::MAX, next: None, ..wanted.clone() };
    let (mut found, _) = newest(app, key, &all).await?;
    found.reverse();
    let more = found.len() > skip.saturating_add(wanted.limit);
    let page = found.into_iter().skip(skip).take(wanted.limit).collect();
    Ok((page, more.then(|| (skip + wanted.limit).to_string())))
}

/// `DELETE /sandboxes/{sandbox}`
pub async fn kill(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<StatusCode, Refusal> {
    app.engine.delete(&key.owner, sandbox.id).await.map_err(Refusal::control)?;
    Ok(DONE)
}

/// `POST .../timeout`, `/connect` and `/resume`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Timeout {
    timeout: Option<i64>,
    /// Whether a paused sandbox gets its memory back; it does unless the caller says otherwise.
    memory: Option<bool>,
}

/// Sets how long a sandbox lives from now on.
pub async fn set_timeout(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Timeout>,
) -> Result<StatusCode, Refusal> {
    let timeout = seconds(body.timeout)?.ok_or_else(|| Refusal::invalid("`timeout` is missing"))?;
    if let engine::State::Paused(_) = sandbox.state {
        return Err(Refusal::new(StatusCode::CONFLICT, "the sandbox is paused: connect to it first"));
    }
    live_for(&app, &key, &sandbox, timeout).await?;
    Ok(DONE)
}

async fn live_for(app: &App, key: &Key, sandbox: &Sandbox, timeout: Duration) -> Result<(), Refusal> {
    let on_timeout = Notes::of(sandbox).unwrap_or_default().on_timeout;
    live_by(app, key, sandbox, on_timeout.after(timeout).map_err(Refusal::control)?).await
}

async fn live_by(app: &App, key: &Key, sandbox: &Sandbox, lifetime: Lifetime) -> Result<(), Refusal> {
    let update = SandboxUpdate { lifetime: Some(lifetime), ..SandboxUpdate::default() };
    app.engine.update(&key.owner, sandbox.id, update).await.map(drop).map_err(Refusal::control)
}

/// Opens a sandbox that exists, and resumes a paused one. The life of one that runs becomes longer if need be, and
/// never shorter.
pub async fn connect(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Timeout>,
) -> Result<Response, Refusal> {
    let timeout = seconds(body.timeout)?.unwrap_or(Duration::from_secs(TIMEOUT_SECONDS_DEFAULT));
    let made_here = Notes::of(&sandbox).is_some();
    let status = match sandbox.state {
        engine::State::Paused(kept) => {
            if kept != Kept::Dropped && body.memory == Some(false) {
                let spec = PauseSpec { kept: Kept::Dropped, grace: Duration::ZERO };
                app.engine.pause(&key.owner, sandbox.id, spec).await.map_err(Refusal::control)?;
            }
            app.engine.resume(&key, sandbox.id).await.map_err(Refusal::control)?;
            StatusCode::CREATED
        }
        _ => StatusCode::OK,
    };
    // A pause has put its own rule in the place of the timeout.
    let renewed = made_here && status == StatusCode::CREATED;
    if renewed || end_of(&app, &key, &sandbox).await? < SystemTime::now() + timeout {
        live_for(&app, &key, &sandbox, timeout).await?;
    }
    if !made_here {
        // It was made by another kind of client.
        home::prepare(&app.engine, &key.owner, sandbox.id).await.map_err(Refusal::control)?;
    }
    Ok((status, Json(opened(&app, &key, &sandbox, &headers))).into_response())
}

/// As [`connect`], for clients that know it by another name and read one status only.
pub async fn resume(
    state: State<App>,
    headers: HeaderMap,
    meant: Meant,
    body: Body<Timeout>,
) -> Result<Response, Refusal> {
    let mut response = connect(state, headers, meant, body).await?;
    *response.status_mut() = StatusCode::CREATED;
    Ok(response)
}

/// `POST .../pause`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Pause {
    /// Whether the memory is kept; it is unless the caller says otherwise.
    memory: Option<bool>,
}

/// Pauses a sandbox. A paused sandbox stays until it is killed.
pub async fn pause(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Pause>,
) -> Result<StatusCode, Refusal> {
    if let engine::State::Paused(_) = sandbox.state {
        return Err(Refusal::new(StatusCode::CONFLICT, "the sandbox is paused already"));
    }
    let kept = if body.memory == Some(false) { Kept::Dropped } else { Kept::Frozen };
    let spec = PauseSpec { kept, ..PauseSpec::default() };
    // A rule that deletes would act on a paused sandbox too. If the daemon ends before the pause, a rule that pauses does
    // what the caller wanted. Rules that another kind of client made are its own.
    let former = Some(sandbox.lifetime.clone()).filter(|lifetime| {
        Notes::of(&sandbox).is_some() && lifetime.rules().iter().any(|rule| rule.action == Action::Delete)
    });
    if let Some(former) = &former {
        let pausing = |rule: &Rule| Rule { action: Action::PauseKeepMemory, ..*rule };
        let rules = former.rules().iter().map(pausing).collect();
        live_by(&app, &key, &sandbox, Lifetime::new(rules).map_err(Refusal::control)?).await?;
    }
    if let Err(error) = app.engine.pause(&key.owner, sandbox.id, spec).await {
        if let Some(former) = former
            && let Err(refusal) = live_by(&app, &key, &sandbox, former).await
        {
            tracing::warn!(sandbox = %sandbox.id, ?refusal, "cannot restore the timeout of a sandbox that was not paused");
        }
        return Err(Refusal::control(error));
    }
    Ok(DONE)
}

/// What a sandbox uses, as one sample.
pub async fn metrics(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<Json<Value>, Refusal> {
    let stats = app.engine.stats(&key.owner, sandbox.id).await.map_err(Refusal::control)?;
    let Some(usage) = stats.usage else { return Ok(Json(json!([]))) };
    let age = stats.at.duration_since(sandbox.created_at).unwrap_or_default().as_secs_f64();
    let cpus = f64::from(stats.limits.cpu_millis) / f64::from(MILLIS);
    // The kernel counts time and not a load: this is the average since the create.
    let cpu_percent = 100.0 * usage.cpu_time.as_secs_f64() / (age * cpus).max(f64::MIN_POSITIVE);
    let unix = stats.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    Ok(Json(json!([{
        "timestamp": rfc3339(stats.at),
        "timestampUnix": unix,
        "cpuCount": stats.limits.cpu_millis.div_ceil(MILLIS),
        "cpuUsedPct": cpu_percent,
        "memUsed": usage.memory_bytes,
        "memTotal": stats.limits.memory_bytes,
        "memCache": usage.memory_reclaimable_bytes,
        "diskUsed": stats.disk.map_or(0, |disk| disk.usage.bytes),
        "diskTotal": stats.limits.disk_bytes.unwrap_or(0),
    }])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_three_times_in_all() {
        // What is left after the query was decoded once.
        let pairs = metadata(b"a%2520b=c%252Fd&e=".to_vec()).expect("they are pairs");
        assert_eq!(pairs, [("a b".into(), "c/d".into()), ("e".into(), String::new())]);
        assert_eq!(metadata(Vec::new()).expect("there are none"), []);
        metadata(b"a=%zz".to_vec()).expect_err("it is no encoding");
    }

    #[test]
    fn what_a_caller_says_about_the_network_is_a_policy_or_refused() {
        assert_eq!(policy(None, None).expect("nothing said"), None);
        assert_eq!(policy(Some(true), Some(&json!({"rules": null}))).expect("nothing said"), None);
        let check = |internet, network: Value, expected: (&str, usize)| {
            let policy =
                policy(internet, Some(&network)).expect("it can be kept").expect("something was said");
            assert_eq!((policy.spec().mode.word(), policy.spec().rules.len()), expected, "{network}");
        };
        check(Some(false), json!({}), ("none", 0));
        check(
            None,
            json!({"denyOut": ["0.0.0.0/0"], "allowOut": ["192.0.2.1", "*.example.com"]}),
            ("none", 2),
        );
        check(None, json!({"denyOut": ["192.0.2.0/24"]}), ("open", 1));
        for network in
            [json!({"allowOut": ["a..b"]}), json!({"denyOut": 1}), json!({"egressProxy": {"address": "x"}})]
        {
            policy(None, Some(&network)).expect_err("it cannot be kept");
        }
    }
}
