//! What this dialect writes and keeps: a sandbox as the client reads it, and the notes that hold what the engine has no word for.

use std::time::Duration;

use engine::{Action, Lifetime, Rule, Sandbox, Since, State};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::Refusal;
use super::{NOTES, PREFIX};
use crate::http::clock::rfc3339;

/// Idle for so many minutes: stopped, unless the caller says otherwise. As the vendor has it.
pub const AUTO_STOP_DEFAULT: u64 = 15;
/// Stopped for so many minutes: archived, unless the caller says otherwise. As the vendor has it: 7 days.
pub const AUTO_ARCHIVE_DEFAULT: u64 = 7 * 24 * 60;
/// Says that a sandbox that is stopped is never deleted.
const NEVER: i64 = -1;
const MINUTE: u64 = 60;
const GIB: u64 = 1 << 30;
/// What the vendor calls the place that sandboxes are in.
const TARGET: &str = "local";

/// What is kept of a sandbox beside what the engine knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// Who commands run as.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The Dockerfile that it was made from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dockerfile: Option<String>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// As it was given; it has no effect.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub public: bool,
    /// Deleted as soon as it is stopped.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub ephemeral: bool,
    /// In minutes; it has no effect.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto_archive: Option<u64>,
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

/// How long a sandbox lives, in this dialect's words: minutes, and 0 for never.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Without use, until it is stopped.
    pub stop: u64,
    /// Without use, until it is paused.
    pub pause: u64,
    /// Stopped, until it is deleted.
    pub delete: u64,
    /// It is deleted as soon as it is stopped.
    pub ephemeral: bool,
    /// Since it was made, until it is deleted.
    pub ttl: u64,
}

impl Intervals {
    /// What the rules of a sandbox come to.
    pub fn of(sandbox: &Sandbox) -> Self {
        let length = |since, action: &[Action]| {
            let mut rules = sandbox.lifetime.rules().iter();
            let rule = rules.find(|rule| rule.since == since && action.contains(&rule.action));
            rule.map_or(0, |rule| rule.after.as_secs() / MINUTE)
        };
        Self {
            stop: length(Since::LastUse, &[Action::PauseDropMemory, Action::Delete]),
            pause: length(Since::LastUse, &[Action::PauseKeepMemory]),
            delete: length(Since::Paused, &[Action::Delete]),
            ephemeral: Notes::of(sandbox).ephemeral,
            ttl: length(Since::Creation, &[Action::Delete]),
        }
    }

    /// What `autoDeleteInterval` says.
    pub fn set_delete(&mut self, minutes: i64) -> Result<(), Refusal> {
        (self.ephemeral, self.delete) = match u64::try_from(minutes) {
            Ok(0) => (true, 0),
            Ok(minutes) => (false, minutes),
            Err(_) if minutes == NEVER => (false, 0),
            Err(_) => {
                return Err(Refusal::must("autoDeleteInterval", format!("be -1 or more, got {minutes}")));
            }
        };
        Ok(())
    }

    fn delete_interval(self) -> i64 {
        match (self.ephemeral, self.delete) {
            (true, _) => 0,
            (false, 0) => NEVER,
            (false, minutes) => i64::try_from(minutes).unwrap_or(i64::MAX),
        }
    }

    /// As rules.
    pub fn rules(self) -> Result<Lifetime, Refusal> {
        let stopping = if self.ephemeral { Action::Delete } else { Action::PauseDropMemory };
        let rules = [
            (Since::LastUse, self.stop, stopping),
            (Since::LastUse, self.pause, Action::PauseKeepMemory),
            (Since::Paused, self.delete, Action::Delete),
            (Since::Creation, self.ttl, Action::Delete),
        ];
        let rules =
            rules.into_iter().filter(|(_, minutes, _)| *minutes > 0).map(|(since, minutes, action)| Rule {
                since,
                after: Duration::from_secs(minutes.saturating_mul(MINUTE)),
                action,
            });
        Ok(Lifetime::new(rules.collect())?)
    }
}

/// A length as the client sends it.
pub fn minutes(field: &str, given: Option<i64>) -> Result<Option<u64>, Refusal> {
    let wrong = |given: i64| Refusal::must(field, format!("be a number of minutes, 0 or more, got {given}"));
    given.map(|given| u64::try_from(given).map_err(|_| wrong(given))).transpose()
}

/// Where a sandbox is in its life, in this dialect's words.
pub fn state(state: State) -> &'static str {
    match state {
        State::Creating => "creating",
        State::Running => "started",
        State::Paused(_) => "stopped",
        State::Deleting => "destroying",
        State::Failed { .. } => "error",
    }
}

fn desired(state: State) -> &'static str {
    match state {
        State::Creating | State::Running | State::Failed { .. } => "started",
        State::Paused(_) => "stopped",
        State::Deleting => "destroyed",
    }
}

/// The address of the toolbox of all sandboxes; the client appends an id.
pub fn toolbox_url(origin: &str) -> String {
    format!("{origin}{PREFIX}/toolbox")
}

/// A sandbox as the client sees it. `origin` is how it reaches this daemon.
pub fn sandbox(sandbox: &Sandbox, origin: &str) -> Value {
    let notes = Notes::of(sandbox);
    let intervals = Intervals::of(sandbox);
    let created_at = rfc3339(sandbox.created_at);
    let volumes: Vec<Value> = sandbox
        .mounts
        .iter()
        .map(|mount| json!({"volumeId": mount.volume, "mountPath": mount.path}))
        .collect();
    let build = notes.dockerfile.as_ref().map(|text| {
        json!({
            "dockerfileContent": text,
            "contextHashes": [],
            "snapshotRef": sandbox.image,
            "createdAt": created_at,
            "updatedAt": created_at,
        })
    });
    let mut body = json!({
        "id": sandbox.id.to_string(),
        "organizationId": sandbox.owner.as_str(),
        "name": sandbox.name.as_str(),
        "snapshot": notes.snapshot.as_deref().unwrap_or(&sandbox.template),
        "user": notes.user.as_deref().unwrap_or("root"),
        "env": sandbox.env,
        "labels": sandbox.labels.pairs(),
        "public": notes.public,
        "networkBlockAll": sandbox.network.is_none(),
        "kvm": false,
        "target": notes.target.as_deref().unwrap_or(TARGET),
        "cpu": sandbox.limits.cpu_millis.div_ceil(1000),
        "gpu": 0,
        "memory": sandbox.limits.memory_bytes.div_ceil(GIB),
        "disk": sandbox.limits.disk_bytes.unwrap_or(0).div_ceil(GIB),
        "state": state(sandbox.state),
        "desiredState": desired(sandbox.state),
        "toolboxProxyUrl": toolbox_url(origin),
    });
    let object = body.as_object_mut().expect("it was just made as one");
    for (name, value) in [
        ("errorReason", json!(sandbox.reason)),
        ("recoverable", false.into()),
        ("backupState", "None".into()),
        ("createdAt", created_at.as_str().into()),
        ("updatedAt", created_at.as_str().into()),
        ("lastActivityAt", created_at.as_str().into()),
        ("autoStopInterval", intervals.stop.into()),
        ("autoArchiveInterval", notes.auto_archive.unwrap_or(AUTO_ARCHIVE_DEFAULT).into()),
        ("autoDeleteInterval", intervals.delete_interval().into()),
        ("volumes", volumes.into()),
        ("sandboxClass", "container".into()),
        ("daemonVersion", crate::version().into()),
    ] {
        object.insert(name.into(), value);
    }
    if let Some(build) = build {
        object.insert("buildInfo".into(), build);
    }
    if intervals.pause > 0 {
        object.insert("autoPauseInterval".into(), intervals.pause.into());
    }
    if intervals.ttl > 0 {
        let at = sandbox.created_at + Duration::from_secs(intervals.ttl.saturating_mul(MINUTE));
        object.insert("autoDestroyAt".into(), rfc3339(at).into());
    }
    body
}
