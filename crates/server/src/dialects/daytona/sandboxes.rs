//! Sandboxes on the control plane: create, get, list, labels, lifetimes, start, stop, delete.

use std::collections::BTreeMap;

use axum::Json;
use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use engine::snapshot::SnapshotState;
use engine::{
    EngineError, Field, GuestUser, Key, LabelChanges, Labels, ListQuery, NetworkChange, NetworkMode,
    NetworkPolicy, NoteChanges, Sandbox, SandboxEnv, SandboxName, SandboxSpec, SandboxUpdate, Selector,
    TemplateName, Wait,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::Refusal;
use super::json::{self, AUTO_STOP_DEFAULT, Intervals, Notes, minutes};
use super::read::{Body, Meant, in_path};
use super::{NOTES, PREFIX};
use crate::dialects::common::{self, dockerfile, pause};
use crate::http::app::{App, Caller};
use crate::http::params::Params;

const GIB: f64 = (1u64 << 30) as f64;
const MILLIS: f64 = 1000.0;
/// More processors, or GiB of memory or disk, than this is a mistake.
const AMOUNT_MAX: f64 = 65_536.0;
/// Entries on a page, if the caller does not say.
const PAGE_DEFAULT: u64 = 100;

/// `POST /sandbox`. What is absent and what is `null` are the same.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct Create {
    name: Option<String>,
    snapshot: Option<String>,
    user: Option<String>,
    env: Option<BTreeMap<String, String>>,
    labels: Option<BTreeMap<String, String>>,
    public: Option<bool>,
    target: Option<String>,
    cpu: Option<f64>,
    gpu: Option<f64>,
    memory: Option<f64>,
    disk: Option<f64>,
    auto_stop_interval: Option<i64>,
    auto_pause_interval: Option<i64>,
    auto_archive_interval: Option<i64>,
    auto_delete_interval: Option<i64>,
    ttl_minutes: Option<i64>,
    volumes: Option<Vec<Value>>,
    secrets: Option<Vec<Value>>,
    network_block_all: Option<bool>,
    network_allow_list: Option<String>,
    domain_allow_list: Option<String>,
    outbound_proxy_url: Option<String>,
    kvm: Option<bool>,
    linked_sandbox: Option<Value>,
    build_info: Option<BuildInfo>,
}

/// What to build a sandbox's image from.
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct BuildInfo {
    dockerfile_content: Option<String>,
    context_hashes: Option<Vec<String>>,
}

/// Makes a sandbox, and answers when it runs.
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    Body(body): Body<Create>,
) -> Result<Json<Value>, Refusal> {
    let spec = spec(&app, &key, body).await?;
    let sandbox = app.engine.create(&key, spec, Wait::Ready).await?;
    tracing::Span::current().record("sandbox", tracing::field::display(sandbox.id));
    Ok(show(&app, &sandbox, &headers))
}

fn show(app: &App, sandbox: &Sandbox, headers: &HeaderMap) -> Json<Value> {
    Json(json::sandbox(sandbox, &app.origin(headers)))
}

async fn spec(app: &App, key: &Key, body: Create) -> Result<SandboxSpec, Refusal> {
    let Create {
        name,
        snapshot,
        user,
        env,
        labels,
        public,
        target,
        cpu,
        gpu,
        memory,
        disk,
        auto_stop_interval,
        auto_pause_interval,
        auto_archive_interval,
        auto_delete_interval,
        ttl_minutes,
        volumes,
        secrets,
        network_block_all,
        network_allow_list,
        domain_allow_list,
        outbound_proxy_url,
        kvm,
        linked_sandbox,
        build_info,
    } = body;
    let some = |text: Option<String>| text.is_some_and(|text| !text.is_empty());
    for (field, given) in [
        ("volumes", volumes.is_some_and(|volumes| !volumes.is_empty())),
        ("secrets", secrets.is_some_and(|secrets| !secrets.is_empty())),
        ("outboundProxyUrl", some(outbound_proxy_url)),
        ("kvm", kvm == Some(true)),
        ("gpu", gpu.is_some_and(|gpu| gpu > 0.0)),
        ("linkedSandbox", linked_sandbox.is_some_and(|linked| !linked.is_null())),
    ] {
        if given {
            return Err(Refusal::unsupported(format!("this server does not support `{field}`")));
        }
    }
    if let Some(user) = &user {
        GuestUser::parse(user.clone()).map_err(|must| must.of(Field::User))?;
    }
    let mut intervals = Intervals {
        stop: minutes("autoStopInterval", auto_stop_interval)?.unwrap_or(AUTO_STOP_DEFAULT),
        pause: minutes("autoPauseInterval", auto_pause_interval)?.unwrap_or(0),
        delete: 0,
        ephemeral: false,
        ttl: minutes("ttlMinutes", ttl_minutes)?.unwrap_or(0),
    };
    if intervals.pause > 0 && auto_stop_interval.is_none() {
        intervals.stop = 0;
    }
    if let Some(minutes) = auto_delete_interval {
        intervals.set_delete(minutes)?;
    }
    let dockerfile = dockerfile_of(build_info)?;
    let (template, image) = match (&snapshot, &dockerfile) {
        (Some(_), Some(_)) => return Err(Refusal::must("snapshot", "be left out if there is `buildInfo`")),
        (_, Some(text)) => match dockerfile::only_image(text) {
            Some(image) => (TemplateName::built_in(), Some(image)),
            None => (dockerfile::template(app, key, NOTES, text).await?, None),
        },
        (Some(name), None) => (named_snapshot(app, key, name).await?, None),
        (None, None) => (TemplateName::built_in(), None),
    };
    let notes = Notes {
        user,
        snapshot,
        dockerfile,
        target,
        public: public.unwrap_or(false),
        ephemeral: intervals.ephemeral,
        auto_archive: minutes("autoArchiveInterval", auto_archive_interval)?,
    };
    let amount = |field: &str, given: Option<f64>, unit: f64| match given {
        None => Ok(None),
        Some(given) if given > 0.0 && given <= AMOUNT_MAX => Ok(Some((given * unit) as u64)),
        Some(given) => Err(Refusal::must(field, format!("be above 0 and at most {AMOUNT_MAX}, got {given}"))),
    };
    let cpu_millis = amount("cpu", cpu, MILLIS)?;
    Ok(SandboxSpec {
        name: name.as_deref().map(SandboxName::parse).transpose()?,
        template,
        image,
        env: SandboxEnv::new(env.unwrap_or_default()).map_err(|must| must.of(Field::Env))?,
        cpu_millis: cpu_millis.map(|millis| u32::try_from(millis).unwrap_or(u32::MAX)),
        memory_bytes: amount("memory", memory, GIB)?,
        disk_bytes: amount("disk", disk, GIB)?,
        labels: Labels::new(labels.unwrap_or_default())?,
        lifetime: intervals.rules()?,
        network: policy(network_block_all, network_allow_list, domain_allow_list)?,
        network_default: common::network::open(),
        notes: engine::Notes::one(NOTES, notes.text())?,
        ..SandboxSpec::default()
    })
}

/// What a caller says about the network; `None` if that is nothing.
fn policy(
    block_all: Option<bool>,
    blocks: Option<String>,
    domains: Option<String>,
) -> Result<Option<NetworkPolicy>, Refusal> {
    if block_all == Some(true) {
        return Ok(Some(common::network::closed()));
    }
    let lists = [blocks, domains].map(Option::unwrap_or_default);
    let entries = lists.iter().flat_map(|list| list.split(',')).map(str::trim);
    let allowed: Vec<String> = entries.filter(|entry| !entry.is_empty()).map(str::to_owned).collect();
    match allowed.is_empty() {
        true => Ok(None),
        false => Ok(Some(common::network::with(NetworkMode::None, &allowed, &[])?)),
    }
}

/// `POST /sandbox/{sandbox}/network-settings`
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct NetworkSettings {
    network_block_all: Option<bool>,
    network_allow_list: Option<String>,
    domain_allow_list: Option<String>,
}

/// Replaces what a sandbox may reach.
pub async fn change_network(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    headers: HeaderMap,
    Body(body): Body<NetworkSettings>,
) -> Result<Json<Value>, Refusal> {
    let policy = policy(body.network_block_all, body.network_allow_list, body.domain_allow_list)?;
    let policy = policy.unwrap_or_else(common::network::open);
    let update = SandboxUpdate { network: Some(NetworkChange::Replace(policy)), ..SandboxUpdate::default() };
    let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(show(&app, &sandbox, &headers))
}

fn dockerfile_of(build: Option<BuildInfo>) -> Result<Option<String>, Refusal> {
    let Some(build) = build else { return Ok(None) };
    if build.context_hashes.is_some_and(|hashes| !hashes.is_empty()) {
        let message =
            "this server does not receive local files for an image; build a template with `shoal build`";
        return Err(Refusal::unsupported(message));
    }
    let text = build.dockerfile_content.filter(|text| !text.trim().is_empty());
    text.map(Some).ok_or_else(|| Refusal::must("buildInfo.dockerfileContent", "be given"))
}

/// The template that a snapshot is. A snapshot is one of the engine's, or any template.
async fn named_snapshot(app: &App, key: &Key, name: &str) -> Result<TemplateName, Refusal> {
    if name == engine::template::DEFAULT {
        return Ok(TemplateName::built_in());
    }
    let snapshot = app.engine.snapshot(&key.owner, name).await?;
    let message = match (snapshot.state, snapshot.template) {
        (SnapshotState::Failed { reason }, _) => format!("snapshot `{name}` could not be made: {reason}"),
        (_, Some(template)) => return Ok(TemplateName::parse(&template.name)?),
        (_, None) => format!("snapshot `{name}` is not ready yet"),
    };
    Err(Refusal::new(StatusCode::BAD_REQUEST, "SNAPSHOT_NOT_ACTIVE", message))
}

/// What to list.
struct Wanted {
    id: Option<String>,
    name: Option<String>,
    states: Vec<String>,
    snapshots: Vec<String>,
    selectors: Vec<Selector>,
}

impl Wanted {
    fn read(params: &mut Params) -> Result<Self, Refusal> {
        let texts = |values: Vec<Vec<u8>>| -> Vec<String> {
            let texts = values.into_iter().map(|value| String::from_utf8_lossy(&value).into_owned());
            texts.flat_map(|text| text.split(',').map(str::to_owned).collect::<Vec<_>>()).collect()
        };
        let labels: BTreeMap<String, String> = match params.text("labels")? {
            None => BTreeMap::new(),
            Some(text) => serde_json::from_str(&text)
                .map_err(|error| Refusal::must("labels", format!("be a JSON object of strings: {error}")))?,
        };
        // Checked as labels are: what cannot be one is a mistake, and not a label that nothing has.
        let labels = Labels::new(labels)?;
        let selectors =
            labels.pairs().iter().map(|(key, value)| Selector::Is(key.clone(), value.clone())).collect();
        Ok(Self {
            id: params.text("id")?.filter(|id| !id.is_empty()),
            name: params.text("name")?.filter(|name| !name.is_empty()),
            states: texts(params.all("states")),
            snapshots: texts(params.all("snapshots")),
            selectors,
        })
    }

    fn wants(&self, sandbox: &Sandbox) -> bool {
        let among = |list: &[String], word: &str| list.is_empty() || list.iter().any(|one| one == word);
        let snapshot = Notes::of(sandbox).snapshot;
        self.id.as_ref().is_none_or(|id| sandbox.id.to_string().starts_with(id))
            && self.name.as_ref().is_none_or(|name| sandbox.name.as_str().contains(name.as_str()))
            && among(&self.states, json::state(sandbox.state))
            && among(&self.snapshots, snapshot.as_deref().unwrap_or(&sandbox.template))
    }
}

/// `GET /sandbox`: a page by its cursor, newest first.
pub async fn list(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let wanted = Wanted::read(&mut params)?;
    let limit = params.number("limit", 1..=u64::MAX)?.unwrap_or(PAGE_DEFAULT) as usize;
    let mut cursor = params.text("cursor")?.filter(|cursor| !cursor.is_empty());
    let origin = app.origin(&headers);
    let mut items = Vec::new();
    let next = loop {
        // A page of one is what a cursor can begin behind, wherever the filter has stopped.
        let query = ListQuery { limit: Some(1), cursor, name: None, selectors: wanted.selectors.clone() };
        let page = app.engine.list(&key.owner, query).await?;
        let found = page.items.iter().filter(|sandbox| wanted.wants(sandbox));
        items.extend(found.map(|sandbox| json::sandbox(sandbox, &origin)));
        match page.next_cursor {
            None => break None,
            Some(next) if items.len() >= limit => break Some(next),
            Some(next) => cursor = Some(next),
        }
    };
    Ok(Json(json!({"items": items, "nextCursor": next})))
}

/// `GET /sandbox/paginated`: a page by its number, for clients before 0.190.
pub async fn paginated(
    State(app): State<App>,
    Caller(key): Caller,
    headers: HeaderMap,
    mut params: Params,
) -> Result<Json<Value>, Refusal> {
    let wanted = Wanted::read(&mut params)?;
    let limit = params.number("limit", 1..=u64::MAX)?.unwrap_or(PAGE_DEFAULT);
    let number = params.number("page", 1..=u64::MAX)?.unwrap_or(1);
    let origin = app.origin(&headers);
    let (mut items, mut total, mut cursor) = (Vec::new(), 0, None);
    let first = (number - 1).saturating_mul(limit);
    loop {
        let query = ListQuery {
            limit: Some(engine::PAGE_MAX),
            cursor,
            name: None,
            selectors: wanted.selectors.clone(),
        };
        let page = app.engine.list(&key.owner, query).await?;
        for sandbox in page.items.iter().filter(|sandbox| wanted.wants(sandbox)) {
            if (first..first.saturating_add(limit)).contains(&total) {
                items.push(json::sandbox(sandbox, &origin));
            }
            total += 1;
        }
        match page.next_cursor {
            None => break,
            next => cursor = next,
        }
    }
    let pages = total.div_ceil(limit);
    Ok(Json(json!({"items": items, "total": total, "page": number, "totalPages": pages})))
}

/// A sandbox.
pub async fn get(State(app): State<App>, headers: HeaderMap, meant: Meant) -> Json<Value> {
    show(&app, &meant.sandbox, &headers)
}

/// A sandbox that is gone, as it was.
fn destroyed(app: &App, sandbox: &Sandbox, headers: &HeaderMap) -> Json<Value> {
    let Json(mut body) = show(app, sandbox, headers);
    body["state"] = "destroyed".into();
    body["desiredState"] = "destroyed".into();
    Json(body)
}

/// Deletes a sandbox with all that is in it.
pub async fn delete(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
) -> Result<Json<Value>, Refusal> {
    app.engine.delete(&key.owner, sandbox.id).await?;
    Ok(destroyed(&app, &sandbox, &headers))
}

/// Lets a stopped sandbox run again. One that runs stays as it is.
pub async fn start(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
) -> Result<Json<Value>, Refusal> {
    let sandbox = pause::start(&app, &key, &sandbox).await?;
    Ok(show(&app, &sandbox, &headers))
}

/// Stops a sandbox and keeps its files, unless it is ephemeral: then nothing of it is left.
pub async fn stop(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
) -> Result<Json<Value>, Refusal> {
    if Notes::of(&sandbox).ephemeral {
        app.engine.delete(&key.owner, sandbox.id).await?;
        return Ok(destroyed(&app, &sandbox, &headers));
    }
    let sandbox = pause::stop(&app, &key, &sandbox).await?;
    Ok(show(&app, &sandbox, &headers))
}

/// `PUT /sandbox/{sandbox}/labels`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct NewLabels {
    labels: BTreeMap<String, String>,
}

/// Replaces all labels.
pub async fn labels(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    Body(NewLabels { labels }): Body<NewLabels>,
) -> Result<Json<Value>, Refusal> {
    let old = sandbox.labels.pairs().keys().map(|key| (key.clone(), None));
    let mut changes: BTreeMap<String, Option<String>> = old.collect();
    changes.extend(labels.into_iter().map(|(key, value)| (key, Some(value))));
    let update = SandboxUpdate { labels: LabelChanges::new(changes)?, ..SandboxUpdate::default() };
    let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(Json(json!({"labels": sandbox.labels.pairs()})))
}

/// A sandbox, and the number of minutes in the path.
pub struct Timed {
    meant: Meant,
    minutes: i64,
}

impl FromRequestParts<App> for Timed {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let meant = Meant::from_request_parts(parts, app).await?;
        let text = in_path(parts, app, "minutes").await?;
        let wrong = |_| Refusal::must("interval", format!("be a number, got `{}`", engine::shown(&text)));
        Ok(Self { minutes: text.parse().map_err(wrong)?, meant })
    }
}

impl Timed {
    fn minutes(&self) -> Result<u64, Refusal> {
        Ok(minutes("interval", Some(self.minutes))?.unwrap_or(0))
    }

    fn intervals(&self) -> Intervals {
        Intervals::of(&self.meant.sandbox)
    }

    /// Changes the lifetime, and answers with the sandbox.
    async fn set(self, app: &App, headers: &HeaderMap, intervals: Intervals) -> Result<Json<Value>, Refusal> {
        let Meant { key, sandbox } = self.meant;
        let notes = Notes { ephemeral: intervals.ephemeral, ..Notes::of(&sandbox) };
        let update = SandboxUpdate {
            lifetime: Some(intervals.rules()?),
            notes: NoteChanges::set(NOTES, notes.text()),
            ..SandboxUpdate::default()
        };
        let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
        Ok(show(app, &sandbox, headers))
    }
}

/// After how many idle minutes it is stopped.
pub async fn auto_stop(
    State(app): State<App>,
    headers: HeaderMap,
    timed: Timed,
) -> Result<Json<Value>, Refusal> {
    let intervals = Intervals { stop: timed.minutes()?, pause: 0, ..timed.intervals() };
    timed.set(&app, &headers, intervals).await
}

/// After how many idle minutes it is paused with its memory.
pub async fn auto_pause(
    State(app): State<App>,
    headers: HeaderMap,
    timed: Timed,
) -> Result<Json<Value>, Refusal> {
    let intervals = Intervals { stop: 0, pause: timed.minutes()?, ..timed.intervals() };
    timed.set(&app, &headers, intervals).await
}

/// After how many minutes a stopped one is deleted.
pub async fn auto_delete(
    State(app): State<App>,
    headers: HeaderMap,
    timed: Timed,
) -> Result<Json<Value>, Refusal> {
    let mut intervals = timed.intervals();
    intervals.set_delete(timed.minutes)?;
    timed.set(&app, &headers, intervals).await
}

/// How many minutes after its creation it is deleted.
pub async fn ttl(State(app): State<App>, headers: HeaderMap, timed: Timed) -> Result<Json<Value>, Refusal> {
    let intervals = Intervals { ttl: timed.minutes()?, ..timed.intervals() };
    timed.set(&app, &headers, intervals).await
}

/// After how many minutes a stopped one is archived: kept and shown, without effect.
pub async fn auto_archive(
    State(app): State<App>,
    headers: HeaderMap,
    timed: Timed,
) -> Result<Json<Value>, Refusal> {
    let minutes = timed.minutes()?;
    let Meant { key, sandbox } = timed.meant;
    let notes = Notes { auto_archive: Some(minutes), ..Notes::of(&sandbox) };
    let update = SandboxUpdate { notes: NoteChanges::set(NOTES, notes.text()), ..SandboxUpdate::default() };
    let sandbox = app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(show(&app, &sandbox, &headers))
}

/// Counts as a use.
pub async fn touch(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<StatusCode, Refusal> {
    app.engine.touch(&key.owner, sandbox.id).await?;
    Ok(StatusCode::CREATED)
}

/// For a client that has a sandbox without the address.
pub async fn toolbox_url(State(app): State<App>, headers: HeaderMap, _: Meant) -> Json<Value> {
    Json(json!({"url": json::toolbox_url(&app.origin(&headers))}))
}

/// `GET /config`: where clients up to 0.166 learn the toolbox's address.
pub async fn config(State(app): State<App>, headers: HeaderMap) -> Json<Value> {
    let origin = app.origin(&headers);
    Json(json!({
        "version": crate::version(),
        "oidc": {"issuer": "", "clientId": "", "audience": "", "provider": ""},
        "linkedAccountsEnabled": false,
        "announcements": {},
        "proxyTemplateUrl": origin,
        "proxyToolboxUrl": json::toolbox_url(&origin),
        "defaultSnapshot": engine::template::DEFAULT,
        "dashboardUrl": format!("{origin}{PREFIX}"),
        "maxAutoArchiveInterval": json::AUTO_ARCHIVE_DEFAULT,
        "maintananceMode": false,
        "environment": "shoal",
    }))
}

/// The user that commands and file operations of a sandbox run as.
pub fn user_of(sandbox: &Sandbox) -> Result<Option<GuestUser>, EngineError> {
    let user = Notes::of(sandbox).user.map(GuestUser::parse).transpose();
    user.map_err(|must| must.of(Field::User))
}
