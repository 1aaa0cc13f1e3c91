//! What this dialect writes and keeps: a sandbox as its clients read it, and the notes that hold what the engine has no word for.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use engine::{
    Action, COMMAND_BYTES_MAX, Env, GuestPath, GuestUser, Lifetime, Must, Rule, Sandbox, Since, State,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use wire::launch::Access;

use super::{NOTES, PREFIX};
use crate::dialects::langsmith::Refusal;
use crate::http::clock::rfc3339;

/// Idle for so long: stopped, unless the caller says otherwise. As the vendor has it.
pub const IDLE_SECONDS_DEFAULT: u64 = 600;
/// Stopped for so long: deleted, unless the caller says otherwise. As the vendor has it: 14 days.
pub const DELETE_AFTER_STOP_SECONDS_DEFAULT: u64 = 14 * 86_400;
/// Lengths are whole minutes.
const LENGTH_STEP_SECONDS: u64 = 60;

/// Who commands run as, where, and with what. Layers: the snapshot's, the sandbox's, the command's; the later wins.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunConfig {
    /// `name`, `uid`, `name:group` or `uid:gid`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Absolute.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work_dir: Option<String>,
    /// Merged over the layer below.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env_vars: Option<BTreeMap<String, String>>,
}

impl RunConfig {
    /// Whether it says nothing.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// What is wrong with it, if anything is.
    pub fn check(&self) -> Result<(), Refusal> {
        let broken = |field: &'static str| move |must: Must| Refusal::must(field, must);
        self.work_dir().map_err(broken("run_config.work_dir"))?;
        self.user().map_err(broken("run_config.user"))?;
        self.env::<{ COMMAND_BYTES_MAX }>().map_err(broken("run_config.env_vars"))?;
        Ok(())
    }

    /// The working directory, checked.
    pub fn work_dir(&self) -> Result<Option<GuestPath>, Must> {
        self.work_dir.clone().map(GuestPath::parse).transpose()
    }

    /// The user, checked.
    pub fn user(&self) -> Result<Option<GuestUser>, Must> {
        self.user.clone().map(GuestUser::parse).transpose()
    }

    /// The variables, checked.
    pub fn env<const BYTES_MAX: usize>(&self) -> Result<Env<BYTES_MAX>, Must> {
        Env::new(self.env_vars.clone().unwrap_or_default())
    }

    /// This layer with another above it.
    pub fn under(&self, above: Self) -> Self {
        let env_vars = match (&self.env_vars, above.env_vars) {
            (Some(below), Some(above)) => {
                let mut all = below.clone();
                all.extend(above);
                Some(all)
            }
            (below, above) => above.or_else(|| below.clone()),
        };
        Self {
            user: above.user.or_else(|| self.user.clone()),
            work_dir: above.work_dir.or_else(|| self.work_dir.clone()),
            env_vars,
        }
    }
}

/// What is kept of a sandbox beside what the engine knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// It was made by a client that knows templates. Those look at the status by themselves, and cannot start what is stopped.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub from_template: bool,
    /// For all its commands.
    #[serde(skip_serializing_if = "RunConfig::is_empty")]
    pub run_config: RunConfig,
    /// As it was given, without secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub proxy_config: Option<Value>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub access_delegation: Option<Value>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub persistent: Option<bool>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preserve_memory_on_stop: Option<bool>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fs_capacity_bytes: Option<u64>,
}

impl Notes {
    /// Of a sandbox. One that was made otherwise has none.
    pub fn of(sandbox: &Sandbox) -> Self {
        // What a version of ours wrote that is gone is as good as nothing written.
        sandbox.notes.get(NOTES).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    /// For the row.
    pub fn text(&self) -> String {
        serde_json::to_string(self).expect("notes are made of types that JSON can write")
    }
}

/// How long a sandbox lives, in this dialect's words. 0 is never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lengths {
    /// Without use, until it is stopped.
    pub idle: u64,
    /// Stopped, until it is deleted.
    pub delete_after_stop: u64,
    /// Since it was made, until it is deleted. Clients from 0.7.23 to 0.8.2 have it.
    pub ttl: u64,
}

impl Lengths {
    /// What the rules of a sandbox come to.
    pub fn of(lifetime: &Lifetime) -> Self {
        let length = |since, action: fn(Action) -> bool| {
            let rule = lifetime.rules().iter().find(|rule| rule.since == since && action(rule.action));
            rule.map_or(0, |rule| rule.after.as_secs())
        };
        let pauses = |action| matches!(action, Action::PauseKeepMemory | Action::PauseDropMemory);
        let deletes = |action| action == Action::Delete;
        Self {
            idle: length(Since::LastUse, pauses),
            delete_after_stop: length(Since::Paused, deletes),
            ttl: length(Since::Creation, deletes),
        }
    }

    /// As rules. Those of other kinds that a sandbox has besides are kept.
    pub fn rules(self, others: &Lifetime) -> Result<Lifetime, Refusal> {
        let ours = [
            (Since::LastUse, self.idle, Action::PauseDropMemory),
            (Since::Paused, self.delete_after_stop, Action::Delete),
            (Since::Creation, self.ttl, Action::Delete),
        ];
        let is_ours = |rule: &&Rule| {
            !ours.iter().any(|(since, _, action)| {
                let pauses = |action| action != Action::Delete;
                rule.since == *since && pauses(rule.action) == pauses(*action)
            })
        };
        let mut rules: Vec<Rule> = others.rules().iter().filter(is_ours).copied().collect();
        for (since, seconds, action) in ours {
            if seconds > 0 {
                rules.push(Rule { since, after: Duration::from_secs(seconds), action });
            }
        }
        Ok(Lifetime::new(rules)?)
    }
}

/// A length as clients send it: whole minutes, 0 for never.
pub fn length(field: &str, seconds: Option<i64>) -> Result<Option<u64>, Refusal> {
    let Some(seconds) = seconds else { return Ok(None) };
    match u64::try_from(seconds) {
        Ok(seconds) if seconds.is_multiple_of(LENGTH_STEP_SECONDS) => Ok(Some(seconds)),
        Ok(_) | Err(_) => Err(Refusal::invalid(field, "it is a multiple of 60 seconds, or 0")),
    }
}

/// Where a sandbox is in its life, in this dialect's words.
pub fn status(sandbox: &Sandbox, notes: &Notes) -> &'static str {
    match sandbox.state {
        State::Creating => "provisioning",
        State::Running => "ready",
        State::Paused(_) if notes.from_template => "ready",
        State::Paused(_) => "stopped",
        State::Failed { .. } => "failed",
        State::Deleting => "deleting",
    }
}

/// A sandbox as clients see it. `origin` is how they reach this daemon; `snapshot` the id of what it was made from.
pub fn sandbox(sandbox: &Sandbox, snapshot: Option<String>, origin: &str) -> Value {
    let notes = Notes::of(sandbox);
    let lengths = Lengths::of(&sandbox.lifetime);
    let created_at = rfc3339(sandbox.created_at);
    let ttl = Some(lengths.ttl).filter(|ttl| *ttl > 0);
    let volumes: Vec<Value> = sandbox
        .mounts
        .iter()
        .map(|mount| {
            json!({
                "volume_id": null,
                "volume_name": mount.volume,
                "mount_path": mount.path,
                "read_only": mount.access == Access::ReadOnly,
            })
        })
        .collect();
    let expires_at = ttl.map(|ttl| rfc3339(sandbox.created_at + Duration::from_secs(ttl)));
    let mut body = json!({
        "id": sandbox.id.to_string(),
        "name": sandbox.name.as_str(),
        "status": status(sandbox, &notes),
        "status_message": sandbox.reason,
        "dataplane_url": format!("{origin}{PREFIX}/dp/{}", sandbox.id),
        "created_at": created_at,
        "updated_at": created_at,
        "created_by": null,
        "updated_by": null,
        "template_name": sandbox.template,
        "snapshot_id": snapshot,
        "idle_ttl_seconds": lengths.idle,
        "delete_after_stop_seconds": lengths.delete_after_stop,
        "stopped_at": sandbox.paused_at.map(rfc3339),
        "ttl_seconds": ttl,
        "expires_at": expires_at,
        "vcpus": sandbox.limits.cpu_millis.div_ceil(1000),
        "cpu_millicores": sandbox.limits.cpu_millis,
        "mem_bytes": sandbox.limits.memory_bytes,
        "fs_capacity_bytes": notes.fs_capacity_bytes,
        "persistent": notes.persistent.unwrap_or(true),
        "preserve_memory_on_stop": notes.preserve_memory_on_stop.unwrap_or(false),
        "labels": sandbox.labels.pairs(),
        "volumes": volumes,
        "size_class": null,
    });
    let object = body.as_object_mut().expect("it was just made as one");
    if !notes.run_config.is_empty() {
        object.insert("run_config".into(), json!(notes.run_config));
    }
    for (name, value) in
        [("proxy_config", notes.proxy_config), ("access_delegation", notes.access_delegation)]
    {
        if let Some(value) = value {
            object.insert(name.into(), value);
        }
    }
    body
}

/// What is shown of something that was given with secrets in it: that they are set, and not what they are.
pub fn without_secrets(value: Value) -> Value {
    match value {
        Value::Object(fields) if fields.get("type").is_some_and(|kind| kind == "opaque") => {
            let mut kept: Map<String, Value> =
                fields.into_iter().filter(|(name, _)| name != "value").collect();
            kept.insert("is_set".into(), Value::Bool(true));
            Value::Object(kept)
        }
        Value::Object(fields) => {
            Value::Object(fields.into_iter().map(|(name, value)| (name, without_secrets(value))).collect())
        }
        Value::Array(items) => Value::Array(items.into_iter().map(without_secrets).collect()),
        other => other,
    }
}

/// A list as both kinds of clients read it: under the name of its things, and under `items` with a cursor.
pub fn listed(name: &str, items: Vec<Value>, next_cursor: Option<String>, offset: u64) -> Value {
    let mut body = Map::new();
    body.insert(name.into(), Value::Array(items.clone()));
    body.insert("items".into(), Value::Array(items));
    body.insert("next_cursor".into(), json!(next_cursor));
    body.insert("offset".into(), json!(offset));
    Value::Object(body)
}

/// When something was made and last changed.
pub fn times(created_at: SystemTime, updated_at: SystemTime) -> (String, String) {
    (rfc3339(created_at), rfc3339(updated_at))
}
