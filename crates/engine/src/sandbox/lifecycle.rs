//! The states of a sandbox, and what callers may ask for in each. Pure: no effects, no clock.
//!
//! ```text
//! Creating ──▶ Running ◀──pause, resume──▶ Paused(kept)      kept: Frozen, Saved, Dropped
//!     └───────────┴───────────delete────────────┴──▶ Deleting ──▶ (gone)
//! ```
//!
//! A failure in any of these states leads to `Failed`. A failed sandbox can be deleted, and resumed if its disk is
//! whole.
//!
//! A row holds the state and the goal. The driver writes the goal before it acts, so after a crash [`recovery`] knows
//! what was under way and finishes it, or undoes it.

use wire::launch::Motion;

pub use crate::model::state::{Disk, Goal, Kept, State};

impl Kept {
    /// Whether a pause that kept `self` satisfies a request for `asked`. A frozen sandbox does not count as saved,
    /// because it still uses memory. One without processes has no memory left to keep.
    fn satisfies(self, asked: Kept) -> bool {
        self == asked || self == Kept::Dropped
    }
}

/// What a caller may ask for. It can be denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wish {
    /// Stop running and keep this much.
    Pause(Kept),
    /// Run again.
    Resume,
    /// Delete the sandbox.
    Delete,
}

/// Why a wish is denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Denied {
    /// The sandbox is still being created.
    NotReady,
    /// The sandbox has failed.
    Failed,
    /// The sandbox is being deleted.
    Over,
}

impl State {
    /// The goal that `wish` sets. `Ok(None)` if the wish is already fulfilled or under way: asking twice is harmless.
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

/// What a starting daemon does with a sandbox that it finds in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Recovery {
    /// Nothing was under way: connect to its init.
    Adopt,
    /// Nothing was under way, and nothing runs: leave it.
    Keep,
    /// Finish a create. No caller has seen the sandbox run, so it is removed and made again: a slow create, not a failed one.
    MakeAgain,
    /// Finish a pause that keeps this much.
    Pause(Kept),
    /// Let its processes run and connect to its init: finishes a resume, or undoes a pause that had not saved the memory yet.
    GoOn,
    /// End processes that should not exist, and leave the sandbox as it is: undoes a resume, or completes a failure.
    EndProcesses,
    /// Finish the delete.
    Delete,
}

/// What a starting daemon does with a sandbox whose row says this. It finishes what was under way where that is safe after a
/// crash at any point, and undoes it otherwise.
pub fn recovery(state: State, goal: Goal) -> Recovery {
    use {Disk::*, Kept::*, State::*};
    match (state, goal) {
        (Deleting, Goal::Running | Goal::Paused(_) | Goal::Gone)
        | (Creating | Running | Paused(_) | Failed { .. }, Goal::Gone) => Recovery::Delete,

        (Creating, Goal::Running | Goal::Paused(_)) => Recovery::MakeAgain,

        (Running, Goal::Running) => Recovery::Adopt,
        (Running, Goal::Paused(Frozen)) => Recovery::Pause(Frozen),
        // Memory that was written halfway is of no use, and the processes that it is a copy of still exist.
        (Running, Goal::Paused(Saved)) => Recovery::GoOn,
        // Some processes may have been ended already, so the pause can only be finished, not undone.
        (Running, Goal::Paused(Dropped)) => Recovery::Pause(Dropped),

        (Paused(Frozen), Goal::Running) => Recovery::GoOn,
        (Paused(Frozen), Goal::Paused(Frozen | Saved)) => Recovery::Keep,
        (Paused(Frozen), Goal::Paused(Dropped)) => Recovery::Pause(Dropped),

        // A resume that did not finish may have left processes. What the resume started from still exists.
        (Paused(Saved), Goal::Running | Goal::Paused(Frozen)) => Recovery::EndProcesses,
        (Paused(Saved), Goal::Paused(Saved)) => Recovery::Keep,
        (Paused(Saved), Goal::Paused(Dropped)) => Recovery::Pause(Dropped),

        (Paused(Dropped), Goal::Running | Goal::Paused(Frozen | Saved)) => Recovery::EndProcesses,
        (Paused(Dropped), Goal::Paused(Dropped)) => Recovery::Keep,

        // The daemon may have died before it ended the processes of the failed sandbox.
        (Failed { disk: Whole }, Goal::Running | Goal::Paused(_)) => Recovery::EndProcesses,
        (Failed { disk: Lost }, Goal::Running | Goal::Paused(_)) => Recovery::Keep,
    }
}

/// Whether the processes of a sandbox should run or stand still. `None`: the sandbox has no processes, or the engine
/// expects nothing of them.
///
/// `held`: a caller reads the sandbox's files and must not see them change.
pub fn motion(state: State, goal: Goal, held: bool) -> Option<Motion> {
    use {Kept::*, State::*};
    match (state, goal) {
        (Creating | Deleting | Failed { .. } | Paused(Saved | Dropped), _) => None,
        (Running | Paused(Frozen), _) if held => Some(Motion::Still),
        (Running, Goal::Running | Goal::Paused(Saved | Dropped) | Goal::Gone) => Some(Motion::Going),
        (Running, Goal::Paused(Frozen)) => Some(Motion::Still),
        (Paused(Frozen), Goal::Paused(_) | Goal::Gone) => Some(Motion::Still),
        (Paused(Frozen), Goal::Running) => Some(Motion::Going),
    }
}

impl State {
    /// The goal of a sandbox in this state when no change is under way.
    pub fn settled_goal(self) -> Goal {
        match self {
            Self::Creating | Self::Running | Self::Failed { .. } => Goal::Running,
            Self::Paused(kept) => Goal::Paused(kept),
            Self::Deleting => Goal::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

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
                let satisfied = kept == keep || kept == Dropped;
                let expected = if satisfied { None } else { Some(Goal::Paused(keep)) };
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

    const KEPT: [Kept; 3] = [Kept::Frozen, Kept::Saved, Kept::Dropped];

    fn states() -> Vec<State> {
        use {Disk::*, State::*};
        let paused = KEPT.map(Paused);
        let others = [Creating, Running, Deleting, Failed { disk: Whole }, Failed { disk: Lost }];
        others.into_iter().chain(paused).collect()
    }

    fn goals() -> Vec<Goal> {
        [Goal::Running, Goal::Gone].into_iter().chain(KEPT.map(Goal::Paused)).collect()
    }

    #[test]
    fn every_state_with_every_goal_is_finished_or_undone() {
        use {Disk::*, Kept::*, State::*};
        let to = |kept| Goal::Paused(kept);
        let expected = [
            (Creating, Goal::Running, Recovery::MakeAgain),
            (Creating, to(Frozen), Recovery::MakeAgain),
            (Creating, to(Saved), Recovery::MakeAgain),
            (Creating, to(Dropped), Recovery::MakeAgain),
            (Creating, Goal::Gone, Recovery::Delete),
            (Running, Goal::Running, Recovery::Adopt),
            (Running, to(Frozen), Recovery::Pause(Frozen)),
            (Running, to(Saved), Recovery::GoOn),
            (Running, to(Dropped), Recovery::Pause(Dropped)),
            (Running, Goal::Gone, Recovery::Delete),
            (Paused(Frozen), Goal::Running, Recovery::GoOn),
            (Paused(Frozen), to(Frozen), Recovery::Keep),
            (Paused(Frozen), to(Saved), Recovery::Keep),
            (Paused(Frozen), to(Dropped), Recovery::Pause(Dropped)),
            (Paused(Frozen), Goal::Gone, Recovery::Delete),
            (Paused(Saved), Goal::Running, Recovery::EndProcesses),
            (Paused(Saved), to(Frozen), Recovery::EndProcesses),
            (Paused(Saved), to(Saved), Recovery::Keep),
            (Paused(Saved), to(Dropped), Recovery::Pause(Dropped)),
            (Paused(Saved), Goal::Gone, Recovery::Delete),
            (Paused(Dropped), Goal::Running, Recovery::EndProcesses),
            (Paused(Dropped), to(Frozen), Recovery::EndProcesses),
            (Paused(Dropped), to(Saved), Recovery::EndProcesses),
            (Paused(Dropped), to(Dropped), Recovery::Keep),
            (Paused(Dropped), Goal::Gone, Recovery::Delete),
            (Deleting, Goal::Running, Recovery::Delete),
            (Deleting, to(Frozen), Recovery::Delete),
            (Deleting, to(Saved), Recovery::Delete),
            (Deleting, to(Dropped), Recovery::Delete),
            (Deleting, Goal::Gone, Recovery::Delete),
            (Failed { disk: Whole }, Goal::Running, Recovery::EndProcesses),
            (Failed { disk: Whole }, to(Frozen), Recovery::EndProcesses),
            (Failed { disk: Whole }, to(Saved), Recovery::EndProcesses),
            (Failed { disk: Whole }, to(Dropped), Recovery::EndProcesses),
            (Failed { disk: Whole }, Goal::Gone, Recovery::Delete),
            (Failed { disk: Lost }, Goal::Running, Recovery::Keep),
            (Failed { disk: Lost }, to(Frozen), Recovery::Keep),
            (Failed { disk: Lost }, to(Saved), Recovery::Keep),
            (Failed { disk: Lost }, to(Dropped), Recovery::Keep),
            (Failed { disk: Lost }, Goal::Gone, Recovery::Delete),
        ];
        for (state, goal, recovered) in expected {
            assert_eq!(recovery(state, goal), recovered, "{state:?} on its way to {goal:?}");
        }
        let pairs: HashSet<_> = expected.iter().map(|(state, goal, _)| (*state, *goal)).collect();
        assert_eq!(pairs.len(), states().len() * goals().len(), "the table has every pair once");
    }

    /// A daemon may die at any point of a recovery, so the next one must be able to recover what the first one wrote.
    #[test]
    fn what_recovery_leaves_is_left_alone_by_the_next_recovery() {
        for state in states() {
            let settled = recovery(state, state.settled_goal());
            let quiet = match state {
                State::Creating => Recovery::MakeAgain,
                State::Running => Recovery::Adopt,
                State::Paused(_) | State::Failed { disk: Disk::Lost } => Recovery::Keep,
                State::Failed { disk: Disk::Whole } => Recovery::EndProcesses,
                State::Deleting => Recovery::Delete,
            };
            assert_eq!(settled, quiet, "{state:?}");
        }
    }

    #[test]
    fn a_hold_never_lets_a_paused_sandbox_run() {
        use {Kept::*, State::*};
        for goal in goals() {
            assert_eq!(motion(Running, goal, true), Some(Motion::Still), "{goal:?}");
            assert_eq!(motion(Paused(Frozen), goal, true), Some(Motion::Still), "{goal:?}");
            for state in states() {
                if !matches!(state, Running | Paused(Frozen)) {
                    assert_eq!((motion(state, goal, true), motion(state, goal, false)), (None, None));
                }
            }
        }
        assert_eq!(motion(Running, Goal::Running, false), Some(Motion::Going));
        assert_eq!(motion(Running, Goal::Paused(Frozen), false), Some(Motion::Still));
        assert_eq!(motion(Paused(Frozen), Goal::Paused(Frozen), false), Some(Motion::Still));
        assert_eq!(motion(Paused(Frozen), Goal::Running, false), Some(Motion::Going));
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
