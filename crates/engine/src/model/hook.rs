//! Hooks: commands that run in a sandbox when something is done to it.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, SystemTime};

use crate::error::{EngineError, Field};
use crate::model::{GuestUser, Program};
use wire::CommandId;

/// When a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum HookPoint {
    /// After the sandbox was made.
    AfterCreate,
    /// Before it is paused.
    BeforePause,
    /// After it was resumed.
    AfterResume,
    /// Before it is deleted, if it runs.
    BeforeDelete,
    /// After it was forked from another one, in the child.
    AfterFork,
    /// After it was claimed from a pool.
    AfterClaim,
    /// After it was rolled back.
    AfterRollback,
}

impl HookPoint {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::AfterCreate,
        Self::BeforePause,
        Self::AfterResume,
        Self::BeforeDelete,
        Self::AfterFork,
        Self::AfterClaim,
        Self::AfterRollback,
    ];

    /// Its name.
    pub fn word(self) -> &'static str {
        match self {
            Self::AfterCreate => "after_create",
            Self::BeforePause => "before_pause",
            Self::AfterResume => "after_resume",
            Self::BeforeDelete => "before_delete",
            Self::AfterFork => "after_fork",
            Self::AfterClaim => "after_claim",
            Self::AfterRollback => "after_rollback",
        }
    }

    /// The point with this name.
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|point| point.word() == word)
    }
}

impl fmt::Display for HookPoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A command that runs at one point.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hook {
    /// What to run.
    pub program: Program,
    /// Who it runs as; the sandbox's own where there is none.
    pub user: Option<GuestUser>,
    /// How long it may take.
    pub timeout: Duration,
    /// Whether what it belongs to fails with it.
    pub required: bool,
}

/// The hooks of a sandbox: at most one for each point. A script can do several things.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Hooks(BTreeMap<HookPoint, Hook>);

impl Hooks {
    /// How long a hook may take by default.
    pub const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
    /// The longest that a hook may take. A pause or a delete waits for it.
    pub const TIMEOUT_MAX: Duration = Duration::from_secs(600);
    /// The maximum size of all programs together.
    pub const BYTES_MAX: usize = 64 * 1024;

    /// Checks hooks.
    pub fn new(hooks: BTreeMap<HookPoint, Hook>) -> Result<Self, EngineError> {
        let mut bytes = 0;
        for (point, hook) in &hooks {
            let timeout = hook.timeout;
            if timeout.is_zero() || timeout > Self::TIMEOUT_MAX {
                let (most, given) = (Self::TIMEOUT_MAX.as_secs(), timeout.as_secs_f64());
                let rule = format!(
                    "have a time limit of more than 0 and at most {most} seconds, but that of `{point}` is {given}"
                );
                return Err(Field::Hooks.must(rule));
            }
            bytes += match &hook.program {
                Program::Default => {
                    return Err(
                        Field::Hooks.must(format!("have a script or an argv, but `{point}` has neither"))
                    );
                }
                Program::Argv(argv) => argv.words().iter().map(String::len).sum(),
                Program::Script(script) => script.as_str().len(),
            };
        }
        match bytes > Self::BYTES_MAX {
            true => {
                Err(Field::Hooks
                    .must(format!("have at most {} bytes together, got {bytes}", Self::BYTES_MAX)))
            }
            false => Ok(Self(hooks)),
        }
    }

    /// Hooks from a row, which were checked when it was written.
    pub(crate) fn kept(hooks: BTreeMap<HookPoint, Hook>) -> Self {
        Self(hooks)
    }

    /// The hook at a point.
    pub fn at(&self, point: HookPoint) -> Option<&Hook> {
        self.0.get(&point)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of them, in the order of the points.
    pub fn all(&self) -> &BTreeMap<HookPoint, Hook> {
        &self.0
    }

    /// These hooks, and those of `below` at points where there is none.
    pub fn over(mut self, below: &Self) -> Self {
        for (point, hook) in &below.0 {
            self.0.entry(*point).or_insert_with(|| hook.clone());
        }
        self
    }
}

/// How the last run of a hook went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HookRun {
    /// When it began.
    pub at: SystemTime,
    /// How long it took.
    pub took: Duration,
    /// The command that ran, if it started.
    pub command: Option<CommandId>,
    /// Why it failed, if it did.
    pub failure: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hook(script: &str, seconds: u64) -> Hook {
        let program = Program::script(script).expect("a script");
        Hook { program, user: None, timeout: Duration::from_secs(seconds), required: false }
    }

    #[test]
    fn hooks_are_bounded() {
        let one = |hook| Hooks::new(BTreeMap::from([(HookPoint::BeforePause, hook)]));
        one(hook("true", 1)).expect("it is short");
        one(hook("true", 0)).expect_err("it could never succeed");
        one(hook("true", 601)).expect_err("a pause would wait for it");
        one(hook(&"x".repeat(Hooks::BYTES_MAX + 1), 1)).expect_err("it is large");
        one(Hook { program: Program::Default, ..hook("true", 1) }).expect_err("it runs nothing");
    }

    #[test]
    fn the_hooks_of_a_sandbox_go_before_those_of_its_template() {
        let template = Hooks::kept(BTreeMap::from([
            (HookPoint::AfterCreate, hook("template", 1)),
            (HookPoint::BeforeDelete, hook("template", 1)),
        ]));
        let own = Hooks::kept(BTreeMap::from([(HookPoint::AfterCreate, hook("own", 1))]));
        let both = own.over(&template);
        assert_eq!(both.at(HookPoint::AfterCreate), Some(&hook("own", 1)));
        assert_eq!(both.at(HookPoint::BeforeDelete), Some(&hook("template", 1)));
    }

    #[test]
    fn points_are_read_as_they_are_written() {
        for point in HookPoint::ALL {
            assert_eq!(HookPoint::parse(point.word()), Some(point));
        }
        assert_eq!(HookPoint::parse("before_lunch"), None);
    }
}
