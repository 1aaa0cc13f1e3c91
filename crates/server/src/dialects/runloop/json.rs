//! What this dialect writes and keeps: a devbox as the client reads it, and the notes that hold what the engine has no word for.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::{Action, Engine, Lifetime, Rule, Sandbox, Since, State};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::Refusal;
use super::{NOTES, ids};

/// How long a devbox lives without `keep_alive`, unless the caller says otherwise. As the vendor has it.
pub const KEEP_ALIVE_SECONDS_DEFAULT: u64 = 3600;

/// What is kept of a sandbox beside what the engine knows.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// The name, which need not be the only one of its kind.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Who executions run as.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// As it was given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blueprint_id: Option<String>,
    /// As they were given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub launch_parameters: Option<Value>,
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

/// What happens to a devbox that nobody uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnIdle {
    /// It is deleted.
    Shutdown,
    /// It is stopped, and keeps its files.
    Suspend,
}

/// After which time without use, and what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub struct AfterIdle {
    idle_time_seconds: u64,
    on_idle: OnIdle,
}

/// The rules of a devbox: deleted so long after its start or the last `keep_alive`, and what happens when nobody uses it.
pub fn rules(keep_alive_seconds: u64, idle: Option<AfterIdle>) -> Result<Lifetime, Refusal> {
    let after = Duration::from_secs(keep_alive_seconds);
    let mut rules = vec![Rule { since: Since::Start, after, action: Action::Delete }];
    if let Some(AfterIdle { idle_time_seconds, on_idle }) = idle {
        let action = match on_idle {
            OnIdle::Shutdown => Action::Delete,
            OnIdle::Suspend => Action::PauseDropMemory,
        };
        rules.push(Rule { since: Since::LastUse, after: Duration::from_secs(idle_time_seconds), action });
    }
    Ok(Lifetime::new(rules)?)
}

/// Where a sandbox is in its life, in this dialect's words.
pub fn status(state: State) -> &'static str {
    match state {
        State::Creating => "provisioning",
        State::Running => "running",
        State::Paused(_) => "suspended",
        State::Deleting => SHUTDOWN,
        State::Failed { .. } => "failure",
    }
}

/// The status of a devbox of which nothing is left.
pub const SHUTDOWN: &str = "shutdown";

/// A time as the client reads it.
pub fn milliseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// A devbox as the client sees it.
pub fn devbox(engine: &Engine, sandbox: &Sandbox) -> Value {
    let notes = Notes::of(sandbox);
    let (status, created) = (status(sandbox.state), milliseconds(sandbox.created_at));
    let mut body = json!({
        "id": ids::devbox(engine, &sandbox.owner, sandbox.id),
        "name": notes.name.as_deref().unwrap_or(sandbox.name.as_str()),
        "status": status,
        "capabilities": [],
        "create_time_ms": created,
        "launch_parameters": notes.launch_parameters.unwrap_or_else(|| json!({})),
        "metadata": sandbox.labels.pairs(),
        "state_transitions": [{"status": status, "transition_time_ms": created}],
    });
    let object = body.as_object_mut().expect("it was just made as one");
    if let Some(id) = notes.blueprint_id {
        object.insert("blueprint_id".into(), id.into());
    }
    if let State::Failed { .. } = sandbox.state {
        object.insert("failure_reason".into(), "execution_failed".into());
    }
    body
}

/// A devbox that was shut down.
pub fn gone(id: &str) -> Value {
    json!({
        "id": id,
        "status": SHUTDOWN,
        "capabilities": [],
        "create_time_ms": 0,
        "launch_parameters": {},
        "metadata": {},
        "state_transitions": [],
    })
}
