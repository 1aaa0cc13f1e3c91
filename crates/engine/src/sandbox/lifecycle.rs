//! Where a sandbox is in its life, and what may be asked of it there. Pure: no effects, no clock.
//!
//! ```text
//! Creating ──▶ Running ◀──pause, resume──▶ Paused(kept)      kept: Frozen, Saved, Dropped
//!     └───────────┴───────────delete────────────┴──▶ Deleting ──▶ (gone)
//! ```
//!
//! A break from any of these leads to `Failed`, which can be deleted, and resumed while its disk is whole.
//!
//! A row holds the state and the goal. The goal is written before acting, so after a crash recovery
//! knows what was under way and finishes it, or undoes it, and says which.

pub use crate::model::state::{Disk, Goal, Kept, State};

impl Kept {
    /// Whether what was kept is what `asked` for. A frozen sandbox is not a saved one: it still uses memory.
    fn satisfies(self, asked: Kept) -> bool {
        self == asked
    }
}

/// What a caller may ask; it can be denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wish {
    /// Stop running and keep this much.
    Pause(Kept),
    /// Run again.
    Resume,
    /// Be gone.
    Delete,
}

/// Why a wish is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Denied {
    /// It is still being made.
    NotReady,
    /// It is broken.
    Failed,
    /// It is going.
    Over,
}

impl State {
    /// The goal that `wish` sets. `Ok(None)` when the wish is already true or under way: asking twice is harmless.
    pub fn goal(self, wish: Wish) -> Result<Option<Goal>, Denied> {
        use State::{Creating, Deleting, Failed, Paused, Running};
        use Wish::{Delete, Pause, Resume};
        match (self, wish) {
            (Running, Pause(keep)) => Ok(Some(Goal::Paused(keep))),
            (Paused(kept), Pause(keep)) if kept.satisfies(keep) => Ok(None),
            (Paused(_), Pause(keep)) => Ok(Some(Goal::Paused(keep))),
            (Paused(_), Resume) => Ok(Some(Goal::Running)),
            (Failed { disk: Disk::Whole }, Resume) => Ok(Some(Goal::Running)),
            (Running, Resume) | (Deleting, Delete) => Ok(None),
            (Creating | Running | Paused(_) | Failed { .. }, Delete) => Ok(Some(Goal::Gone)),
            (Creating, Pause(_) | Resume) => Err(Denied::NotReady),
            (Failed { .. }, Pause(_)) | (Failed { disk: Disk::Lost }, Resume) => Err(Denied::Failed),
            (Deleting, Pause(_) | Resume) => Err(Denied::Over),
        }
    }
}

/// What recovery does with a row that it finds at the start of the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// It never ran, so nobody has seen it run: what exists of it is removed and it is made again. For whoever asked,
    /// that is a slow create and not a failed one.
    MakeAgain,
    /// Find its init and go on.
    Adopt,
    /// Finish the delete.
    Finish,
    /// Leave it as it is.
    Keep,
}

impl State {
    /// What a restarted daemon does with a sandbox whose row says this.
    pub fn recovery(self) -> Recovery {
        match self {
            Self::Creating => Recovery::MakeAgain,
            Self::Running => Recovery::Adopt,
            Self::Deleting => Recovery::Finish,
            Self::Paused(_) | Self::Failed { .. } => Recovery::Keep,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(state: State, wish: Wish, expected: Result<Option<Goal>, Denied>) {
        assert_eq!(state.goal(wish), expected, "{state:?} asked to {wish:?}");
    }

    #[test]
    fn every_state_answers_every_wish() {
        use {Disk::*, Kept::*, State::*, Wish::*};
        let gone = Ok(Some(Goal::Gone));
        let run = Ok(Some(Goal::Running));
        for keep in [Frozen, Saved, Dropped] {
            check(Creating, Pause(keep), Err(Denied::NotReady));
            check(Running, Pause(keep), Ok(Some(Goal::Paused(keep))));
            check(Deleting, Pause(keep), Err(Denied::Over));
            check(Failed { disk: Whole }, Pause(keep), Err(Denied::Failed));
            check(Failed { disk: Lost }, Pause(keep), Err(Denied::Failed));
            for kept in [Frozen, Saved, Dropped] {
                let expected = if kept == keep { None } else { Some(Goal::Paused(keep)) };
                check(Paused(kept), Pause(keep), Ok(expected));
            }
            check(Paused(keep), Resume, run);
            check(Paused(keep), Delete, gone);
        }
        check(Creating, Resume, Err(Denied::NotReady));
        check(Running, Resume, Ok(None));
        check(Deleting, Resume, Err(Denied::Over));
        check(Failed { disk: Whole }, Resume, run);
        check(Failed { disk: Lost }, Resume, Err(Denied::Failed));
        for state in [Creating, Running, Failed { disk: Whole }, Failed { disk: Lost }] {
            check(state, Delete, gone);
        }
        check(Deleting, Delete, Ok(None));
    }

    #[test]
    fn only_a_running_sandbox_takes_commands() {
        use {Disk::*, Kept::*, State::*};
        assert!(Running.takes_commands());
        for state in [Creating, Paused(Frozen), Deleting, Failed { disk: Whole }, Failed { disk: Lost }] {
            assert!(!state.takes_commands(), "{state:?}");
        }
    }
}
