//! What is kept of a sandbox beside what the engine knows.

use std::time::Duration;

use engine::{Action, EngineError, Lifetime, Rule, Sandbox, Since};
use serde::{Deserialize, Serialize};

/// The key of this dialect's notes.
const KEY: &str = "e2b";
/// The shortest lifetime that the engine takes.
const TIMEOUT_MIN: Duration = Duration::from_millis(100);

/// What the caller said at the create, as far as it matters later.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// As the caller named it.
    pub template: Option<String>,
    /// As the caller said.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub internet: Option<bool>,
    /// What a timeout does.
    pub on_timeout: OnTimeout,
    /// Whether a call of the agent resumes the sandbox.
    pub auto_resume: bool,
}

/// What happens when the timeout is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The sandbox is deleted.
    #[default]
    Kill,
    /// It is paused with its memory.
    Pause,
    /// It is paused, and only its files are kept.
    PauseFiles,
}

impl Notes {
    /// Those of a sandbox that this dialect made.
    pub fn of(sandbox: &Sandbox) -> Option<Self> {
        // What a later version wrote and this one cannot read is as good as absent.
        sandbox.notes.get(KEY).and_then(|text| serde_json::from_str(text).ok())
    }

    /// As the engine keeps them.
    pub fn stored(&self) -> Result<engine::Notes, EngineError> {
        let text = serde_json::to_string(self).expect("notes are made of types that JSON can write");
        engine::Notes::one(KEY, text)
    }
}

impl OnTimeout {
    /// As the client reads it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Kill => "kill",
            Self::Pause | Self::PauseFiles => "pause",
        }
    }

    /// The rule for a timeout from now on.
    pub fn after(self, timeout: Duration) -> Result<Lifetime, EngineError> {
        let action = match self {
            Self::Kill => Action::Delete,
            Self::Pause => Action::PauseKeepMemory,
            Self::PauseFiles => Action::PauseDropMemory,
        };
        Lifetime::new(vec![Rule { since: Since::Start, after: timeout.max(TIMEOUT_MIN), action }])
    }
}
