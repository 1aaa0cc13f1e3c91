//! What is kept of a sandbox beside what the engine knows: each part under a key of its own, so that changes of one do not undo changes
//! of another.

use std::time::{Duration, SystemTime};

use engine::{Action, EngineError, Lifetime, NoteChanges, Rule, Sandbox, Since};
use serde::{Deserialize, Serialize};

/// What the caller said at the claim, and later changes.
const CONFIG: &str = "sandbox0";
/// How often the sandbox was resumed through this dialect.
const GENERATION: &str = "sandbox0.generation";
/// The network as the caller wrote it.
pub const NETWORK: &str = "sandbox0.network";
/// The services as the caller wrote them.
pub const SERVICES: &str = "sandbox0.services";
/// Contexts that were deleted.
const DELETED: &str = "sandbox0.deleted";
/// Deleted contexts that are remembered. Of those before, the results can be read again.
const DELETED_MAX: usize = 1000;

/// What the caller said.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Notes {
    /// As the caller named it.
    pub template: Option<String>,
    /// Seconds until a pause; 0 for never.
    pub ttl: u64,
    /// Seconds until the end; 0 for never.
    pub hard_ttl: u64,
    /// Whether a use resumes the sandbox.
    pub auto_resume: bool,
    /// Whether `/workspace` was made for it, so that commands run there.
    pub workspace: bool,
}

impl Default for Notes {
    fn default() -> Self {
        Self { template: None, ttl: 0, hard_ttl: 0, auto_resume: true, workspace: false }
    }
}

impl Notes {
    /// Those of a sandbox. One that another client made has the defaults.
    pub fn of(sandbox: &Sandbox) -> Self {
        // What a later version wrote and this one cannot read is as good as absent.
        sandbox.notes.get(CONFIG).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
    }

    fn text(&self) -> String {
        serde_json::to_string(self).expect("notes are made of types that JSON can write")
    }

    /// For a new sandbox.
    pub fn stored(&self) -> Result<engine::Notes, EngineError> {
        engine::Notes::one(CONFIG, self.text())
    }

    /// For one that exists.
    pub fn changes(&self) -> NoteChanges {
        NoteChanges::set(CONFIG, self.text())
    }

    /// The rules of a lifetime. `age` is how old the sandbox is now: the hard limit counts from now on, and nothing that is done to the
    /// sandbox moves it but a refresh.
    pub fn rules(&self, ttl: u64, age: Duration) -> Result<Lifetime, EngineError> {
        let pause = (ttl > 0).then(|| Rule {
            since: Since::Start,
            after: Duration::from_secs(ttl),
            action: Action::PauseDropMemory,
        });
        let delete = (self.hard_ttl > 0).then(|| Rule {
            since: Since::Creation,
            after: age.saturating_add(Duration::from_secs(self.hard_ttl)),
            action: Action::Delete,
        });
        Lifetime::new(pause.into_iter().chain(delete).collect())
    }
}

/// How old a sandbox is.
pub fn age(sandbox: &Sandbox) -> Duration {
    SystemTime::now().duration_since(sandbox.created_at).unwrap_or_default()
}

/// The number of a sandbox's run, from 1 on.
pub fn generation(sandbox: &Sandbox) -> u64 {
    sandbox.notes.get(GENERATION).and_then(|text| text.parse().ok()).unwrap_or(1)
}

/// The next run.
pub fn next_generation(sandbox: &Sandbox) -> NoteChanges {
    NoteChanges::set(GENERATION, (generation(sandbox) + 1).to_string())
}

/// Whether a context was deleted.
pub fn is_deleted(sandbox: &Sandbox, context: &str) -> bool {
    sandbox.notes.get(DELETED).is_some_and(|text| text.lines().any(|line| line == context))
}

/// Remembers that a context was deleted.
pub fn with_deleted(sandbox: &Sandbox, context: &str) -> NoteChanges {
    let before: Vec<&str> = sandbox.notes.get(DELETED).unwrap_or_default().lines().collect();
    let kept = &before[before.len().saturating_sub(DELETED_MAX - 1)..];
    let all: Vec<&str> = kept.iter().copied().filter(|line| *line != context).chain([context]).collect();
    NoteChanges::set(DELETED, all.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lifetime_pauses_first_and_deletes_in_the_end() {
        let notes = Notes { ttl: 3600, hard_ttl: 2_592_000, ..Notes::default() };
        let rules = notes.rules(notes.ttl, Duration::from_secs(10)).expect("they are lengths");
        let [pause, delete] = rules.rules() else { panic!("there are two: {rules:?}") };
        assert_eq!((pause.since, pause.action), (Since::Start, Action::PauseDropMemory));
        assert_eq!(pause.after.as_secs(), 3600);
        assert_eq!((delete.since, delete.action), (Since::Creation, Action::Delete));
        assert_eq!(delete.after.as_secs(), 2_592_010, "from now on, and not from the creation");
        assert!(Notes::default().rules(0, Duration::ZERO).expect("there are none").is_empty());
    }

    #[test]
    fn what_was_never_said_has_its_default() {
        let notes: Notes = serde_json::from_str("{}").expect("it is JSON");
        assert_eq!(notes, Notes::default());
        assert!(notes.auto_resume);
    }
}
