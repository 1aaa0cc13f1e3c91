//! The task that owns one sandbox: only this task changes its state, launches it and tears it down.
//!
//! The driver takes one message at a time from a bounded inbox. Slow work runs in tasks beside the inbox, so that the
//! driver reacts to a delete at once. Every change of state takes the same steps: write the goal to the row, act, write
//! the result to the row, notify watchers. `lifecycle` decides which changes are allowed.
//!
//! What the driver does is in the files beside this one: `make` launches a sandbox and links to its init, `clean` ends it and
//! removes it, `hold` freezes and thaws its processes, `pause` and `resume` do as they say, `rollback` replaces its files,
//! `claim` gives it to a caller, `hooks` runs its owner's commands at points of its life, `judge` applies its lifetime
//! rules.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use runtime::{BackendError, Usage};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinError;
use tokio::time::{Sleep, timeout};
use tracing::{Instrument, Span, debug_span, error, info, info_span, warn};

use crate::TRACE_TARGET;
use crate::db::{SandboxChange, SandboxRow};
use crate::error::{EngineError, chain};
use crate::guest::LinkEnd;
use crate::model::{NetworkChange, PauseSpec, SandboxUpdate, Wait};
use crate::observe::metrics::{Verb, Verdict};
use crate::observe::timing;
use crate::sandbox::claim::Claim;
use crate::sandbox::clean::teardown;
use crate::sandbox::deadlines::Deadlines;
use crate::sandbox::hold::{Hold, Holds};
use crate::sandbox::hooks::{self, Hooking, Then as After};
use crate::sandbox::lifecycle::{Goal, Recovery, State, recovery};
use crate::sandbox::lifetime::Explanation;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::make::Remains;
use crate::sandbox::pause::Pausing;
use crate::sandbox::resume::Resumer;
use crate::sandbox::rollback::Rollback;
use crate::task::Task;

/// How many messages may wait for a driver. The queue stays short: the driver itself waits for database commits only.
pub(crate) const INBOX_MAX: usize = 64;
/// The first and the longest pause between two attempts at work that must succeed in the end.
pub(super) const RETRY_MIN: Duration = Duration::from_millis(100);
pub(super) const RETRY_MAX: Duration = Duration::from_secs(30);

/// What others ask of a driver, or report to it.
pub(crate) enum Message {
    /// Delete the sandbox, and answer when it is gone.
    Delete {
        done: oneshot::Sender<Result<(), EngineError>>,
        /// Whether no hook may prevent it.
        insists: bool,
        /// The caller's span, which becomes the parent of the delete in traces.
        cause: Span,
    },
    /// Change its name, labels, notes or lifetime. The caller has already reserved a new name.
    Update { update: Box<SandboxUpdate>, done: oneshot::Sender<Result<(), EngineError>> },
    /// Restart the clocks of its start and its last use, so that it lives on.
    Touch { done: oneshot::Sender<Result<Explanation, EngineError>> },
    /// Explain which rules apply, and when they end the sandbox.
    Explain { done: oneshot::Sender<Result<Explanation, EngineError>> },
    /// A caller has claimed it from its pool.
    Claim(Box<Claim>),
    /// Pause it, and answer when it is paused.
    Pause { spec: PauseSpec, done: oneshot::Sender<Result<(), EngineError>> },
    /// Let it run, and answer when it does.
    Resume(Resumer),
    /// Keep its processes frozen until the hold ends.
    Hold { done: oneshot::Sender<Result<Hold, EngineError>> },
    /// Replace its files by those of a snapshot.
    Rollback(Rollback),
    /// An earlier daemon died while it may have held the sandbox.
    EndOldHolds { done: oneshot::Sender<Result<(), EngineError>> },
    /// Whether the sweep found the sandbox on the host.
    Swept { present: bool },
}

/// Where a driver's sandbox comes from.
pub(crate) enum Birth {
    /// A caller has just asked for it.
    New { row: Box<SandboxRow>, wait: Wait, created: oneshot::Sender<Result<(), EngineError>> },
    /// Its row was in the database when the daemon started.
    Recovered {
        /// What the driver was working towards.
        goal: Goal,
        /// Why the output of its commands cannot be read, if it cannot.
        unreadable: Option<String>,
    },
}

/// Starts the driver of a sandbox that is in the registry.
pub(crate) fn spawn(
    live: &Arc<LiveSandbox>,
    inbox: mpsc::Receiver<Message>,
    deadlines: Deadlines,
    birth: Birth,
) {
    let span = info_span!("sandbox", id = %live.id);
    let driver = Driver {
        live: Arc::clone(live),
        inbox,
        goal: match birth {
            Birth::New { .. } => Goal::Running,
            Birth::Recovered { goal, .. } => goal,
        },
        holds: Holds::of(live.state()),
        pauses: Vec::new(),
        pausing: Pausing { spec: PauseSpec::default(), reason: None },
        next_pause: None,
        resumes: Vec::new(),
        work: Work::None,
        failures: 0,
        relinks: 0,
        deadlines,
        look: None,
        deletes: Vec::new(),
        hooking: None,
        created: None,
        began: None,
        trace: match birth {
            Birth::New { .. } => {
                debug_span!(target: TRACE_TARGET, "create", shoal.sandbox = %live.id)
            }
            Birth::Recovered { .. } => Span::none(),
        },
    };
    let task = live.shared.runtime.spawn(driver.run(birth).instrument(span));
    *live.driver.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
}

pub(super) struct Driver {
    pub(super) live: Arc<LiveSandbox>,
    pub(super) inbox: mpsc::Receiver<Message>,
    /// What the driver works towards, as the row says.
    pub(super) goal: Goal,
    pub(super) holds: Holds,
    /// Callers that wait until the sandbox is paused.
    pub(super) pauses: Vec<oneshot::Sender<Result<(), EngineError>>>,
    /// The pause that is under way, or was last.
    pub(super) pausing: Pausing,
    /// The pause that follows what is under way.
    pub(super) next_pause: Option<Pausing>,
    /// Callers that wait until the sandbox runs.
    pub(super) resumes: Vec<Resumer>,
    pub(super) work: Work,
    /// Failed attempts at the current work, in a row.
    pub(super) failures: u32,
    /// How often the driver has replaced a link that panicked.
    pub(super) relinks: u32,
    pub(super) deadlines: Deadlines,
    /// Reads the processor time that the sandbox has used.
    pub(super) look: Option<Task<Result<Usage, BackendError>>>,
    /// Callers that wait until the sandbox is deleted.
    pub(super) deletes: Vec<Deleter>,
    /// The hook that is running.
    pub(super) hooking: Option<Hooking>,
    /// The caller that waits until the sandbox runs.
    pub(super) created: Option<oneshot::Sender<Result<(), EngineError>>>,
    /// When the create or delete that is under way began.
    pub(super) began: Option<Instant>,
    /// The span of the create or delete that is under way.
    pub(super) trace: Span,
}

/// A caller that waits until the sandbox is deleted.
pub(super) struct Deleter {
    pub done: oneshot::Sender<Result<(), EngineError>>,
    /// Whether no hook may prevent it.
    pub insists: bool,
}

/// The slow work that runs beside the inbox.
pub(super) enum Work {
    None,
    Making {
        task: Task<Result<Task<LinkEnd>, BackendError>>,
        cancel: watch::Sender<bool>,
    },
    Linked(Task<LinkEnd>),
    Cleaning {
        task: Task<Result<(), BackendError>>,
        then: Then,
        /// Dropped or sent to, ends the grace that the task gives processes.
        hurry: Option<oneshot::Sender<()>>,
    },
    /// A pause before the driver retries what failed.
    Resting {
        until: Pin<Box<Sleep>>,
        again: Again,
    },
}

/// What the driver retries.
#[derive(Clone, Copy)]
pub(super) enum Again {
    Delete,
    EndProcesses,
    Pause,
}

/// Why something is being cleaned up, and so what follows it.
pub(super) enum Then {
    /// A create failed. It is recorded with this error.
    Failed(BackendError),
    /// The sandbox is being deleted.
    Gone,
    /// The sweep found remains of a failed sandbox.
    Nothing,
    /// Its processes are being ended and the sandbox stays as it is: it failed, or a resume is undone.
    Ended,
    /// Its processes are being ended to pause it.
    Paused,
}

/// The result of the work.
enum Finished {
    Made(Result<Task<LinkEnd>, BackendError>),
    Unlinked(LinkEnd),
    Cleaned(Result<(), BackendError>),
    Rested,
}

impl Work {
    async fn finished(&mut self) -> Finished {
        match self {
            Self::None => pending().await,
            Self::Making { task, .. } => {
                Finished::Made(task.await.unwrap_or_else(|error| Err(panicked("make the sandbox", error))))
            }
            Self::Linked(task) => Finished::Unlinked(task.await.unwrap_or_else(|error| {
                error!(%error, "the link to init panicked");
                LinkEnd::Bug
            })),
            Self::Cleaning { task, .. } => {
                Finished::Cleaned(task.await.unwrap_or_else(|error| Err(panicked("clean up", error))))
            }
            Self::Resting { until, .. } => {
                until.await;
                Finished::Rested
            }
        }
    }
}

pub(super) fn panicked(doing: &str, error: JoinError) -> BackendError {
    BackendError::Refused { doing: doing.into(), source: std::io::Error::other(error) }
}

/// Whether the driver continues.
#[derive(PartialEq, Eq)]
pub(super) enum Life {
    On,
    Over,
}

impl Driver {
    async fn run(mut self, birth: Birth) {
        if self.begin(birth).await == Life::Over {
            return;
        }
        self.judge().await;
        loop {
            self.carry_on().await;
            let nap = self.deadlines.nap(self.live.shared.clock.now());
            let life = tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(message) => self.hear(message).await,
                    None => Life::Over,
                },
                finished = self.work.finished() => self.conclude(finished).await,
                looked = finished(&mut self.look) => {
                    self.looked(looked).await;
                    Life::On
                }
                hooked = hooks::ended(&mut self.hooking) => {
                    self.hooked(hooked).await;
                    Life::On
                }
                event = self.holds.next() => {
                    self.holds_changed(event).await;
                    Life::On
                }
                () = sleep(&self.live, nap) => {
                    self.wake().await;
                    Life::On
                }
            };
            if life == Life::Over {
                return;
            }
        }
    }

    async fn begin(&mut self, birth: Birth) -> Life {
        match birth {
            Birth::New { row, wait, created } => {
                self.began = Some(Instant::now());
                let inserted = self.live.shared.db.insert_sandbox(*row);
                let inserted = timing::ROW.watch(&self.live.shared.metrics, self.live.id, inserted);
                match inserted.instrument(self.trace.clone()).await {
                    Ok(image) => {
                        if let Some(image) = image.and_then(|digest| self.live.shared.images.get(digest)) {
                            self.live.set_image(image);
                        }
                    }
                    Err(error) => {
                        self.live.shared.registry().remove(self.live.id);
                        self.live.set_state(State::Deleting, None); // For callers that have found it in the meantime.
                        // The id may be that of a spare that the backend holds ready. No row refers to it now.
                        if let Err(left) = teardown(&self.live).await {
                            warn!(
                                error = chain(&left),
                                "cannot remove a sandbox that has no row; the sweep tries again"
                            );
                        }
                        let _ = created.send(Err(error)); // A caller that left needs no answer.
                        return Life::Over;
                    }
                }
                self.live.set_recorded();
                self.live.tell_state();
                match wait {
                    Wait::Ready => self.created = Some(created),
                    Wait::No => drop(created.send(Ok(()))),
                }
                self.make(Remains::Nothing);
            }
            Birth::Recovered { unreadable, .. } => {
                self.live.set_recorded();
                self.recover(unreadable).await;
            }
        }
        Life::On
    }

    /// Finishes what an earlier daemon was doing to the sandbox, or undoes it.
    async fn recover(&mut self, unreadable: Option<String>) {
        let state = self.live.state();
        let recovery = recovery(state, self.goal);
        match (recovery, unreadable) {
            (Recovery::Adopt | Recovery::GoOn | Recovery::Pause(_), Some(reason)) => {
                self.lost(LinkEnd::Unreadable(reason)).await;
            }
            (Recovery::Adopt, None) => {
                self.link();
                drop(self.run_due(After::Nothing)); // If none is due, nothing follows.
            }
            (Recovery::MakeAgain, _) => self.make(Remains::Perhaps),
            (Recovery::Pause(kept), None) => {
                info!("finishing a pause that an earlier daemon began");
                // A frozen init cannot answer, so the link waits until it is thawed.
                self.finish_pause(kept);
            }
            (Recovery::GoOn, None) => {
                info!("letting a sandbox run that an earlier daemon was pausing or resuming");
                self.aim_at(Goal::Running).await;
                self.holds.forget_motion();
                self.link();
                self.settle_motion();
            }
            (Recovery::EndProcesses, _) => {
                self.aim_at(state.settled_goal()).await;
                self.end_processes();
            }
            (Recovery::Delete, _) if state == State::Deleting => {
                self.clean(None, self.live.close_commands(), Then::Gone);
            }
            (Recovery::Delete, _) => drop(self.delete(None).await),
            (Recovery::Keep, _) => self.aim_at(state.settled_goal()).await,
        }
    }

    async fn hear(&mut self, message: Message) -> Life {
        match message {
            Message::Delete { done, insists, cause } => {
                self.deletes.push(Deleter { done, insists });
                if self.deletes.len() == 1 {
                    let id = self.live.id;
                    self.trace =
                        debug_span!(target: TRACE_TARGET, parent: &cause, "delete", shoal.sandbox = %id);
                }
                self.delete(None).await; // `tell_deleters` reports the result to the caller.
            }
            Message::Update { update, done } => {
                let _ = done.send(self.update(*update).await); // A caller that left needs no answer.
            }
            Message::Touch { done } => {
                let _ = done.send(self.touch().await); // As above.
            }
            Message::Explain { done } => {
                let _ = done.send(Ok(self.explain())); // As above.
            }
            Message::Claim(claim) => self.claim(*claim).await,
            Message::Pause { spec, done } => self.asked_to_pause(spec, done).await,
            Message::Resume(resumer) => self.resumes.push(resumer), // `carry_on` begins it.
            Message::Hold { done } => self.hold(done),
            Message::Rollback(rollback) => self.rollback(rollback).await,
            Message::EndOldHolds { done } => self.end_old_holds(done),
            Message::Swept { present } => self.swept(present).await,
        }
        Life::On
    }

    async fn conclude(&mut self, finished: Finished) -> Life {
        match (std::mem::replace(&mut self.work, Work::None), finished) {
            (_, Finished::Made(made)) => match (self.live.state(), made) {
                (State::Creating, Ok(link)) => {
                    self.work = Work::Linked(link);
                    self.made().await;
                }
                (State::Creating, Err(error)) => self.clean(None, Vec::new(), Then::Failed(error)),
                (_, Ok(link)) => self.relaunched(link).await,
                (_, Err(error)) => self.relaunch_failed(error).await,
            },
            (_, Finished::Unlinked(end)) => self.lost(end).await,
            (Work::Cleaning { then, .. }, Finished::Cleaned(result)) => match then {
                Then::Failed(error) => self.failed(error, result).await,
                Then::Gone => return self.gone(result).await,
                Then::Nothing => {
                    if let Err(error) = result {
                        warn!(error = chain(&error), "cannot remove what is left of a failed sandbox");
                    }
                }
                Then::Ended => match result {
                    Ok(()) => self.failures = 0,
                    Err(error) => {
                        warn!(error = chain(&error), "cannot end the processes of a sandbox; trying again");
                        self.rest(Again::EndProcesses);
                    }
                },
                Then::Paused => self.dropped_processes(result).await,
            },
            (Work::Resting { again, .. }, Finished::Rested) => match again {
                Again::Delete => self.clean(None, self.live.close_commands(), Then::Gone),
                Again::EndProcesses => self.end_processes(),
                Again::Pause => self.drop_processes(),
            },
            (_, Finished::Cleaned(_) | Finished::Rested) => {
                unreachable!("what finished is what was under way")
            }
        }
        Life::On
    }

    async fn update(&mut self, update: SandboxUpdate) -> Result<(), EngineError> {
        self.check_lives()?;
        let live = Arc::clone(&self.live);
        let now = live.shared.clock.now();
        let labels = match update.labels.is_empty() {
            true => None,
            false => Some(live.view().labels.changed(&update.labels)?),
        };
        let notes = match update.notes.is_empty() {
            true => None,
            false => Some(live.view().notes.changed(&update.notes)?),
        };
        let network = match update.network {
            None => None,
            Some(NetworkChange::Replace(policy)) => {
                for name in policy.inject() {
                    if !live.shared.secrets.has(&live.owner, name) {
                        return Err(EngineError::SecretNotFound { name: name.clone() });
                    }
                }
                Some(match live.view().network.family_given() {
                    Some(family) => policy.of_family(family),
                    None => policy,
                })
            }
            Some(NetworkChange::Add(rule)) => Some(live.view().network.with(rule)?),
        };
        let stamps = update.lifetime.is_some().then(|| self.deadlines.stamps_touched(now));
        let change = SandboxChange {
            name: update.name.clone(),
            labels: labels.clone(),
            notes: notes.clone(),
            lifetime: update.lifetime.clone(),
            stamps,
            network: network.clone(),
        };
        if !live.shared.db.change_sandbox(live.row_key, change).await? {
            return Err(live.wrong_state());
        }
        if let Some(name) = update.name {
            let before = std::mem::replace(&mut live.change_view().name, name);
            live.shared.registry().free_name(&live, &before);
            live.tell_state();
        }
        if let Some(labels) = labels {
            live.shared.registry().relabel(&live, labels);
        }
        if let Some(notes) = notes {
            live.change_view().notes = notes;
        }
        if let Some(network) = network {
            // The caller puts it in force, beside this task.
            live.change_view().network = network;
        }
        if let Some(lifetime) = update.lifetime {
            live.change_view().lifetime = lifetime.clone();
            self.deadlines.change(lifetime, now);
            self.deadlines.stored();
            self.judge().await;
        }
        Ok(())
    }

    /// An error if the sandbox is being deleted: then it cannot be changed.
    pub(super) fn check_lives(&self) -> Result<(), EngineError> {
        match self.live.state() {
            State::Deleting => Err(self.live.wrong_state()),
            State::Creating | State::Running | State::Paused(_) | State::Failed { .. } => Ok(()),
        }
    }

    /// Writes the change from the current state to `to`, then notifies watchers.
    pub(super) async fn record(
        &mut self,
        to: State,
        goal: Goal,
        reason: Option<String>,
    ) -> Result<(), EngineError> {
        let from = self.live.state_in_row();
        let changed = self.live.shared.db.change_state(self.live.row_key, from, to, goal, reason.clone());
        let changed = timing::ROW.watch(&self.live.shared.metrics, self.live.id, changed);
        changed.instrument(self.trace.clone()).await?;
        self.goal = goal;
        self.live.set_state(to, reason);
        Ok(())
    }

    /// Writes what the driver is about to do, so that the next daemon knows it if this one dies in the middle.
    pub(super) async fn aim(&mut self, goal: Goal) -> Result<(), EngineError> {
        if self.goal == goal {
            return Ok(());
        }
        self.live.shared.db.change_goal(self.live.row_key, self.live.state_in_row(), goal).await?;
        self.goal = goal;
        Ok(())
    }

    /// Like `aim`, for goals that may reach the row later: a daemon that reads the old goal comes to the same
    /// decision.
    pub(super) async fn aim_at(&mut self, goal: Goal) {
        if let Err(error) = self.aim(goal).await {
            warn!(
                error = chain(&error),
                "cannot write what a sandbox is to become; the next start decides again"
            );
            self.goal = goal;
        }
    }

    /// Records how long the create or delete took, and ends its trace.
    pub(super) fn measure(&mut self, verb: Verb, verdict: Verdict) {
        self.trace = Span::none();
        if let Some(began) = self.began.take() {
            self.live.shared.metrics.operation(verb, verdict, began.elapsed());
        }
    }

    /// Pauses before the next attempt. The pause doubles with each failure in a row.
    pub(super) fn rest(&mut self, again: Again) {
        let pause = RETRY_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures += 1;
        self.work = Work::Resting { until: Box::pin(tokio::time::sleep(pause)), again };
    }
}

/// Waits for a task, or forever if there is none.
async fn finished<T>(task: &mut Option<Task<Result<T, BackendError>>>) -> Result<T, BackendError> {
    match task {
        Some(task) => task.await.unwrap_or_else(|error| Err(panicked("look at the sandbox", error))),
        None => pending().await,
    }
}

async fn sleep(live: &LiveSandbox, nap: Option<Duration>) {
    match nap {
        Some(nap) => live.shared.clock.sleep(nap).await,
        None => pending().await,
    }
}

pub(super) async fn within<T>(
    seconds: u64,
    doing: &'static str,
    work: impl Future<Output = Result<T, BackendError>>,
) -> Result<T, BackendError> {
    let late = |_| BackendError::Late { doing, seconds };
    timeout(Duration::from_secs(seconds), work).await.map_err(late)?
}
