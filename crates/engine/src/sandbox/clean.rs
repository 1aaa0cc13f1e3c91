//! How a driver ends its sandbox: when it fails, when it is deleted, and when the sweep finds remains.
//!
//! A sandbox that fails while it runs keeps its disk, and the driver ends its processes. Ending processes and deleting
//! are retried until they succeed.

use std::sync::Arc;
use std::time::Instant;

use runtime::BackendError;
use tracing::{Instrument, error, info, warn};
use wire::SandboxId;
use wire::launch::Processes;

use crate::command::LiveCommand;
use crate::error::{DbError, EngineError, chain};
use crate::guest::LinkEnd;
use crate::model::hook::HookPoint;
use crate::observe::events::Happened;
use crate::observe::metrics::{Verb, Verdict};
use crate::sandbox::driver::{Again, Deleter, Driver, Life, Message, Then, Work, within};
use crate::sandbox::hooks::Then as After;
use crate::sandbox::lifecycle::{Disk, Goal, State, Wish};
use crate::sandbox::live::LiveSandbox;
use crate::task::Task;

/// How long a teardown may take. Removing a large tree of files takes a while.
const TEARDOWN_SECONDS: u64 = 120;
/// How long ending the processes of a sandbox may take.
pub(super) const END_SECONDS: u64 = 60;
/// How often the driver replaces a link that panicked.
const RELINKS_MAX: u32 = 5;

impl Driver {
    /// The link to a running sandbox ended: its init is gone, or broke the protocol. The sandbox is marked as failed. Its
    /// disk stays, because the files are the owner's; a delete removes them. Its processes are ended, because no caller can
    /// reach them any more. Some may run even if init seems to be gone.
    ///
    /// An init that shares no protocol version with this daemon is different: the sandbox is shown as failed, but its row,
    /// its commands and its processes stay as they are, for a daemon that speaks its version.
    pub(super) async fn lost(&mut self, end: LinkEnd) {
        if let LinkEnd::Bug = end
            && self.relinks < RELINKS_MAX
        {
            // The bug is in the daemon and may not happen again, so the sandbox should not fail for it.
            self.relinks += 1;
            return self.link();
        }
        let reason = chain(&end);
        if let LinkEnd::NoCommonVersion { theirs } = end {
            warn!(reason, "sandbox cannot be used by this daemon");
            self.live.set_unspoken(theirs, reason);
            return;
        }
        self.fail(State::Failed { disk: Disk::Whole }, reason).await;
    }

    /// Marks the sandbox as failed and ends its processes. Its files stay.
    pub(super) async fn fail(&mut self, state: State, reason: String) {
        warn!(reason, "sandbox failed");
        let commands = self.live.close_commands();
        if let Err(error) = self.record(state, Goal::Running, Some(reason.clone())).await {
            // The row still says `running`. The next daemon will notice the same failure.
            error!(error = chain(&error), "cannot record that a sandbox failed");
            self.live.set_state(state, Some(reason));
        }
        self.goal = Goal::Running;
        self.break_holds();
        self.refuse_waiting();
        for command in commands {
            command.sandbox_gone();
        }
        self.end_processes();
        self.judge().await;
    }

    pub(super) fn end_processes(&mut self) {
        let live = Arc::clone(&self.live);
        let task = Task::spawn(async move {
            live.detach_network().await;
            let end = live.shared.backend.end_processes(live.id, Processes::All);
            within(END_SECONDS, "end the sandbox's processes", end).await
        });
        self.work = Work::Cleaning { task, then: Then::Ended, hurry: None };
    }

    /// Begins to delete the sandbox, unless a delete is under way; first its hook runs, if it has one and runs. Returns
    /// whether a delete is under way afterwards. `reason` is for deletes that no caller asked for.
    pub(super) async fn delete(&mut self, reason: Option<String>) -> bool {
        if self.deletes_after_hook() {
            return true;
        }
        self.abandon_hook(); // A delete waits for no other hook.
        match self.hook_at(HookPoint::BeforeDelete) {
            Some(hook) if self.runs_first(HookPoint::BeforeDelete) => {
                self.run_hook(HookPoint::BeforeDelete, hook, After::Delete(reason));
                true
            }
            _ => self.delete_now(reason).await,
        }
    }

    /// Begins to delete the sandbox, unless a delete is under way.
    pub(super) async fn delete_now(&mut self, reason: Option<String>) -> bool {
        match self.live.state().goal(Wish::Delete) {
            Ok(Some(_)) => {
                self.live.guest.uses.close_if(|_| true);
                if let Err(error) = self.record_delete(reason).await {
                    // Nothing has begun, so the sandbox goes on as before.
                    self.live.guest.uses.reopen();
                    match self.deletes.is_empty() {
                        true => warn!(error = chain(&error), "cannot record that a sandbox is to be deleted"),
                        false => self.tell_deleters(Err(error)),
                    }
                    return false;
                }
                self.look = None;
                self.deadlines.plan(State::Deleting, None, self.live.shared.clock.now());
            }
            Ok(None) if matches!(self.work, Work::None | Work::Resting { .. }) => {} // An earlier attempt failed: retry now.
            Ok(None) | Err(_) => return true,
        }
        self.began = Some(Instant::now());
        self.break_holds();
        self.refuse_waiting();
        let state = State::Deleting.word();
        self.tell_creator(Err(EngineError::WrongState { id: self.live.id, state }));
        let commands = self.live.close_commands();
        let before = match std::mem::replace(&mut self.work, Work::None) {
            Work::None | Work::Resting { .. } => None,
            Work::Making { task, cancel } => {
                cancel.send_replace(true);
                Some(Before::Making(task))
            }
            Work::Linked(link) => {
                drop(link); // Dropping the task ends the link.
                None
            }
            Work::Cleaning { task, hurry, .. } => {
                drop(hurry); // A delete waits for no grace.
                Some(Before::Cleaning(task))
            }
        };
        self.clean(before, commands, Then::Gone);
        true
    }

    /// Records that the sandbox is being deleted. If the disk is full, its output makes room first: nobody can read it
    /// after the delete.
    async fn record_delete(&mut self, reason: Option<String>) -> Result<(), EngineError> {
        match self.record(State::Deleting, Goal::Gone, reason.clone()).await {
            Err(EngineError::Store { source, .. }) if source.is_disk_full() => {
                for command in self.live.close_commands() {
                    command.deleted().await;
                }
                let commands = Arc::clone(&self.live.commands);
                match tokio::task::spawn_blocking(move || commands.remove_all_output()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => warn!(%error, "cannot remove output to make room for a delete"),
                    Err(error) => warn!(%error, "removing output panicked"),
                }
                self.record(State::Deleting, Goal::Gone, reason).await
            }
            result => result,
        }
    }

    pub(super) fn clean(&mut self, before: Option<Before>, commands: Vec<Arc<LiveCommand>>, then: Then) {
        let live = Arc::clone(&self.live);
        let logs = match then {
            Then::Gone => Logs::Remove(commands),
            Then::Failed(_) | Then::Nothing | Then::Ended | Then::Paused => Logs::Keep,
        };
        let task = Task::spawn(clean(live, before, logs).instrument(self.trace.clone()));
        self.work = Work::Cleaning { task, then, hurry: None };
    }

    /// A teardown for a delete has finished, or failed.
    pub(super) async fn gone(&mut self, result: Result<(), BackendError>) -> Life {
        let id = self.live.id;
        if let Err(source) = result {
            warn!(error = chain(&source), "cannot delete sandbox; it will be tried again");
            self.measure(Verb::Delete, Verdict::Failed);
            self.tell_deleters(Err(EngineError::Delete { id, source }));
            self.rest(Again::Delete);
            return Life::On;
        }
        let deleted = self.live.shared.db.delete_sandbox(self.live.row_key).await;
        if let Err(error) = deleted.or_else(superseded_is_gone) {
            warn!(error = chain(&error), "cannot delete a sandbox's row; it will be tried again");
            self.tell_deleters(Err(error));
            self.rest(Again::Delete);
            return Life::On;
        }
        self.live.shared.registry().remove(id);
        self.live.shared.links.forget(id);
        let name = self.live.view().name.clone();
        self.live.tell(Happened::Deleted { name });
        info!("sandbox is gone");
        if !self.live.over().is_empty() || self.live.history() > 0 {
            self.live.shared.files_freed.notify_one();
        }
        self.measure(Verb::Delete, Verdict::Ok);
        self.tell_deleters(Ok(()));
        // Callers that asked for a delete during the last steps have what they want.
        self.inbox.close();
        while let Some(message) = self.inbox.recv().await {
            if let Message::Delete { done, .. } = message {
                let _ = done.send(Ok(()));
            }
        }
        Life::Over
    }

    pub(super) fn tell_deleters(&mut self, result: Result<(), EngineError>) {
        let id = self.live.id;
        let text = result.as_ref().err().map(|error| chain(error));
        let mut result = Some(result);
        for Deleter { done, .. } in self.deletes.drain(..) {
            // The first caller gets the error itself, the others its text: errors cannot be cloned.
            let answer = result.take().unwrap_or_else(|| match &text {
                None => Ok(()),
                Some(text) => {
                    let source = std::io::Error::other(text.clone());
                    Err(EngineError::Delete {
                        id,
                        source: BackendError::Refused { doing: "delete it".into(), source },
                    })
                }
            });
            let _ = done.send(answer); // A caller that left needs no answer.
        }
    }

    pub(super) async fn swept(&mut self, present: bool) {
        if !matches!(self.work, Work::None | Work::Linked(_)) {
            return; // The work under way will notice it.
        }
        match (self.live.state(), present) {
            (State::Deleting, _) => self.clean(None, self.live.close_commands(), Then::Gone),
            (State::Failed { disk: Disk::Lost }, true) => self.clean(None, Vec::new(), Then::Nothing),
            (State::Running, false) if !self.live.guest.outbox.is_connected() => {
                self.work = Work::None;
                self.lost(LinkEnd::Gone).await;
            }
            (State::Creating | State::Running | State::Paused(_) | State::Failed { .. }, _) => {}
        }
    }
}

/// If the row is gone, or another daemon's by now, nothing is left for this one to delete.
fn superseded_is_gone(error: EngineError) -> Result<(), EngineError> {
    match error {
        EngineError::Store { source: DbError::Superseded, .. } => {
            error!("the row of a deleted sandbox was gone, or another daemon's");
            Ok(())
        }
        error => Err(error),
    }
}

/// Work that must end before a teardown can complete.
pub(super) enum Before {
    Making(Task<Result<Task<LinkEnd>, BackendError>>),
    Cleaning(Task<Result<(), BackendError>>),
}

/// Whether a teardown also removes the output of commands.
enum Logs {
    Keep,
    Remove(Vec<Arc<LiveCommand>>),
}

/// Removes a sandbox from the host. Every delete comes here, and every create that failed half-way.
async fn clean(live: Arc<LiveSandbox>, before: Option<Before>, logs: Logs) -> Result<(), BackendError> {
    match before {
        None => {}
        Some(Before::Making(making)) => {
            // The first teardown removes what exists, so that the create fails soon. The create may still add something
            // until it ends, so wait for it; the teardown below removes the rest.
            if let Err(error) = teardown(&live).await {
                warn!(error = chain(&error), "cannot stop a create; waiting for its end");
            }
            drop(making.await); // Nothing needs the result. Dropping it ends the link.
        }
        Some(Before::Cleaning(cleaning)) => drop(cleaning.await),
    }
    teardown(&live).await?;
    if let Logs::Remove(commands) = logs {
        for command in commands {
            command.deleted().await;
        }
        let owned = Arc::clone(&live.commands);
        let removed = tokio::task::spawn_blocking(move || owned.remove_all_output()).await;
        let removed = removed.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        removed.map_err(|source| BackendError::Refused {
            doing: "remove the output of its commands".into(),
            source,
        })?;
    }
    Ok(())
}

pub(super) async fn teardown(live: &LiveSandbox) -> Result<(), BackendError> {
    live.detach_network().await;
    teardown_id(live.shared.backend.as_ref(), live.id).await
}

/// Removes everything that exists of a sandbox on the host. Tries once more if the launcher died meanwhile.
pub(crate) async fn teardown_id(backend: &dyn runtime::Backend, id: SandboxId) -> Result<(), BackendError> {
    match within(TEARDOWN_SECONDS, "tear the sandbox down", backend.teardown(id)).await {
        Err(BackendError::LauncherGone { .. }) => {
            within(TEARDOWN_SECONDS, "tear the sandbox down", backend.teardown(id)).await
        }
        result => result,
    }
}
