//! How a driver replaces the files of its sandbox by those of a snapshot, under the same id and name.
//!
//! One commit says that the sandbox is being made and which snapshots it lies over; then the driver removes what runs and
//! what was written, and makes the sandbox as after any create. A daemon that dies in the middle leaves a row that says so,
//! and the next daemon finishes the rollback.

use tokio::sync::oneshot;
use tracing::info;
use wire::launch::Over;

use crate::command::LiveCommand;
use crate::error::EngineError;
use crate::model::hook::HookPoint;
use crate::sandbox::calls::ask;
use crate::sandbox::driver::{Driver, Message, Work};
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::make::Remains;

/// What a sandbox is rolled back to.
pub(crate) struct Rollback {
    over: Over,
    done: oneshot::Sender<Result<(), EngineError>>,
}

/// Rolls a sandbox back to the files of snapshots, and returns when it runs again.
pub(crate) async fn roll_back(live: &LiveSandbox, over: Over) -> Result<(), EngineError> {
    ask(live, |done| Message::Rollback(Rollback { over, done })).await
}

impl Driver {
    pub(super) async fn rollback(&mut self, Rollback { over, done }: Rollback) {
        self.abandon_hook(); // What it is for is over.
        let idle = matches!(self.work, Work::None | Work::Linked(_) | Work::Resting { .. });
        let state = self.live.state();
        let allowed = match state {
            State::Running | State::Paused(_) | State::Failed { .. } => {
                idle && self.goal == state.settled_goal() && self.live.view().unspoken.is_none()
            }
            State::Creating | State::Deleting => false,
        };
        if !allowed {
            let _ = done.send(Err(self.live.wrong_state())); // A caller that left needs no answer.
            return;
        }
        let begun = self.live.shared.db.begin_rollback(self.live.row_key, state, over.clone()).await;
        if let Err(error) = begun {
            let _ = done.send(Err(error)); // As above.
            return;
        }
        info!("rolling a sandbox back");
        self.live.set_hook_due(None);
        self.hook_is_due(HookPoint::AfterRollback).await;
        self.goal = State::Creating.settled_goal();
        self.live.set_over(over);
        self.live.guest.memory_kills.start_over();
        self.live.set_state(State::Creating, None);
        self.break_holds();
        self.holds = crate::sandbox::hold::Holds::of(State::Creating);
        self.tell_pausers(Err(self.live.wrong_state()));
        // The link goes first, so that the end of init is not taken for a failure.
        self.work = Work::None;
        self.live.close_commands().iter().for_each(LiveCommand::sandbox_gone);
        self.failures = 0;
        self.created = Some(done);
        self.look = None;
        self.make(Remains::Perhaps);
    }
}
