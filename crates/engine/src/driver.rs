//! The task that owns one sandbox: it alone changes its state, and it alone calls `launch` and `teardown`.
//!
//! It takes one message at a time from a bounded inbox. Slow work runs beside the inbox, so that a delete is heard at
//! once. Every change goes the same way: the row says what is aimed at, then it is done, then the row says what came
//! of it, then whoever watches is told. What is allowed is `lifecycle`'s business.
//!
//! Lifetime rules strike here too (`keeper` says when): a touch, a change of the rules and the end by them come one after the
//! other, and the uses under way are looked at in the moment of the decision. So whoever was told that a sandbox lives on is right.
//!
//! A create that fails is torn down and stays as `Failed` with its reason. If the launcher died in the middle of it, it
//! is torn down and tried once more. If cleaning up fails too, both reasons are kept, and the sweep tries again.
//! A sandbox that breaks later is `Failed` with its disk; its processes are ended. That, like a delete, is tried until it is done.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use runtime::{BackendError, Spec, Usage};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::{Sleep, timeout};
use tracing::{Instrument, Span, debug, debug_span, error, info, info_span, warn};
use wire::SandboxId;
use wire::launch::{Processes, Rootfs};

use crate::TRACE_TARGET;
use crate::clock::Moment;
use crate::command::Hub;
use crate::error::{EngineError, StoreError, chain};
use crate::events::Happened;
use crate::guest::{LinkEnd, keep_connected};
use crate::home::Home;
use crate::images::{self, ImageName, PullSpec};
use crate::keeper::Keeper;
use crate::lifecycle::{Disk, Goal, Recovery, State, Wish};
use crate::lifetime::{Explanation, Lifetime};
use crate::metrics::{Verb, Verdict};
use crate::model::{SandboxUpdate, Wait};
use crate::slow;
use crate::store::{SandboxChange, SandboxRow};
use crate::volumes::Mounted;

/// Messages that wait for a driver, at most. A driver never waits itself, save for a commit.
pub(crate) const INBOX_MAX: usize = 64;
/// How long an image may take to arrive.
const PULL_SECONDS: u64 = 3600;
/// How often an image is looked for, and pulled where it is not: others may remove it as soon as it is here.
const TAKES_MAX: usize = 4;
/// How long an image may take to be made ready.
const PREPARE_SECONDS: u64 = 300;
/// How long the backend may take to make a sandbox.
const LAUNCH_SECONDS: u64 = 30;
/// How long a new init may take until it has said hello.
const READY_SECONDS: u64 = 20;
/// How long a sandbox that is being adopted keeps others waiting.
const ADOPT_SECONDS: u64 = 1;
/// How long a teardown may take. Large trees take a while to remove.
const TEARDOWN_SECONDS: u64 = 120;
/// How long the end of a sandbox's processes may take.
const END_SECONDS: u64 = 60;
/// How often a link that panicked is made anew.
const RELINKS_MAX: u32 = 5;
/// Between two attempts at what must succeed in the end, at first and at most.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(30);
/// How long a look at what a sandbox has used may take. It is read from a file on the host.
const LOOK_SECONDS: u64 = 10;

/// What a driver is told.
pub(crate) enum Message {
    /// Be gone, and say when.
    Delete {
        done: oneshot::Sender<Result<(), EngineError>>,
        /// For traces: what the caller was doing.
        cause: Span,
    },
    /// Change what people say of it. A new name was reserved before.
    Update { update: Box<SandboxUpdate>, done: oneshot::Sender<Result<(), EngineError>> },
    /// Live on.
    Touch { done: oneshot::Sender<Result<Explanation, EngineError>> },
    /// Say why it lives, and when it ends.
    Explain { done: oneshot::Sender<Result<Explanation, EngineError>> },
    /// Its row says that it belongs to whoever claimed it. Its clocks began then.
    Claimed { lifetime: Lifetime, at: Moment },
    /// It was to be claimed, and that came to nothing: nobody finds it any more.
    Unclaimed,
    /// What the sweep saw of the sandbox on the host.
    Swept { present: bool },
}

/// How a driver's sandbox came to be.
pub(crate) enum Birth {
    /// Someone asked for it just now.
    New { row: Box<SandboxRow>, wait: Wait, created: oneshot::Sender<Result<(), EngineError>> },
    /// A row told of it.
    Recovered {
        /// Why the output of its commands cannot be found, where that is so.
        unreadable: Option<String>,
    },
}

/// A task that ends when nobody holds it any more.
pub(crate) struct Task<T>(JoinHandle<T>);

impl<T: Send + 'static> Task<T> {
    pub fn spawn(work: impl Future<Output = T> + Send + 'static) -> Self {
        Self(tokio::spawn(work.in_current_span()))
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl<T> Future for Task<T> {
    type Output = Result<T, JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

/// Starts the driver of a sandbox that is in the directory.
pub(crate) fn spawn(home: &Arc<Home>, inbox: mpsc::Receiver<Message>, keeper: Keeper, birth: Birth) {
    let span = info_span!("sandbox", id = %home.id);
    let driver = Driver {
        home: Arc::clone(home),
        inbox,
        work: Work::None,
        failures: 0,
        relinks: 0,
        keeper,
        look: None,
        deletes: Vec::new(),
        created: None,
        began: None,
        trace: match birth {
            Birth::New { .. } => {
                debug_span!(target: TRACE_TARGET, "create", shoal.sandbox = %home.id)
            }
            Birth::Recovered { .. } => Span::none(),
        },
    };
    let task = home.shared.runtime.spawn(driver.run(birth).instrument(span));
    *home.driver.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
}

struct Driver {
    home: Arc<Home>,
    inbox: mpsc::Receiver<Message>,
    work: Work,
    /// Of the present work, in a row.
    failures: u32,
    /// How often the link was made anew after a panic.
    relinks: u32,
    keeper: Keeper,
    /// What the sandbox has had of the processors is being read.
    look: Option<Task<Result<Usage, BackendError>>>,
    /// Who waits for the end.
    deletes: Vec<oneshot::Sender<Result<(), EngineError>>>,
    /// Who waits for the beginning.
    created: Option<oneshot::Sender<Result<(), EngineError>>>,
    /// Since when it is being made, or being deleted.
    began: Option<Instant>,
    /// For traces: of what is being done, while it is.
    trace: Span,
}

/// What goes on beside the inbox.
enum Work {
    None,
    Making {
        task: Task<Result<Task<LinkEnd>, BackendError>>,
        cancel: watch::Sender<bool>,
    },
    Linked(Task<LinkEnd>),
    Cleaning {
        task: Task<Result<(), BackendError>>,
        then: Then,
    },
    /// Until what failed is tried again.
    Resting {
        until: Pin<Box<Sleep>>,
        again: Again,
    },
}

/// What is tried again.
#[derive(Clone, Copy)]
enum Again {
    Delete,
    EndProcesses,
}

/// What a teardown is for.
enum Then {
    /// A create failed.
    Failed(BackendError),
    /// A delete.
    Gone,
    /// The sweep found something of a failed sandbox.
    Nothing,
    /// A sandbox that failed had processes.
    Ended,
}

/// What came of it.
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

fn panicked(doing: &str, error: JoinError) -> BackendError {
    BackendError::Refused { doing: doing.into(), source: std::io::Error::other(error) }
}

/// Whether the driver goes on.
#[derive(PartialEq, Eq)]
enum Life {
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
            let nap = self.keeper.nap(self.home.shared.clock.now());
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
                () = sleep(&self.home, nap) => {
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
                let inserted = self.home.shared.store.insert_sandbox(*row);
                let inserted = slow::ROW.watch(&self.home.shared.metrics, self.home.id, inserted);
                match inserted.instrument(self.trace.clone()).await {
                    Ok(image) => {
                        if let Some(image) = image.and_then(|digest| self.home.shared.images.get(digest)) {
                            self.home.set_image(image);
                        }
                    }
                    Err(error) => {
                        self.home.shared.directory().remove(self.home.id);
                        self.home.set_state(State::Deleting, None); // Whoever found it meanwhile is told that it is over.
                        // It may be one that stood ready; that is nobody's now.
                        if let Err(left) = teardown(&self.home).await {
                            warn!(
                                error = chain(&left),
                                "cannot remove a sandbox that has no row; the sweep tries again"
                            );
                        }
                        let _ = created.send(Err(error)); // A caller that left needs no answer.
                        return Life::Over;
                    }
                }
                self.home.set_recorded();
                self.home.tell_state();
                match wait {
                    Wait::Ready => self.created = Some(created),
                    Wait::No => drop(created.send(Ok(()))),
                }
                self.make(Remains::Nothing);
            }
            Birth::Recovered { unreadable } => {
                self.home.set_recorded();
                match self.home.state().recovery() {
                    Recovery::Adopt if unreadable.is_some() => {
                        self.lost(LinkEnd::Unreadable(unreadable.unwrap_or_default())).await;
                    }
                    Recovery::MakeAgain => self.make(Remains::Perhaps),
                    Recovery::Adopt => self.link(),
                    Recovery::Finish => self.clean(None, self.home.close_commands(), Then::Gone),
                    // The daemon may have died before it had ended what a broken sandbox still ran.
                    Recovery::Keep if self.home.state() == (State::Failed { disk: Disk::Whole }) => {
                        self.end_processes();
                    }
                    Recovery::Keep => {}
                }
            }
        }
        Life::On
    }

    async fn hear(&mut self, message: Message) -> Life {
        match message {
            Message::Delete { done, cause } => {
                self.deletes.push(done);
                if self.deletes.len() == 1 {
                    let id = self.home.id;
                    self.trace =
                        debug_span!(target: TRACE_TARGET, parent: &cause, "delete", shoal.sandbox = %id);
                }
                self.delete(None).await; // Whoever asked is told what came of it.
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
            Message::Claimed { lifetime, at } => {
                self.keeper = Keeper::newborn(lifetime, at);
                self.keeper.started(at);
                self.keeper.stored();
                self.judge().await;
            }
            Message::Unclaimed => {
                self.delete(None).await; // If it cannot be recorded, the sandbox has failed or a later delete comes.
            }
            Message::Swept { present } => self.swept(present).await,
        }
        Life::On
    }

    // Making.

    fn make(&mut self, remains: Remains) {
        let (cancel, cancelled) = watch::channel(false);
        let task =
            Task::spawn(make(Arc::clone(&self.home), remains, cancelled).instrument(self.trace.clone()));
        self.work = Work::Making { task, cancel };
    }

    fn link(&mut self) {
        let home = Arc::clone(&self.home);
        self.work = Work::Linked(Task::spawn(async move {
            // Bounds the storm after a restart. A stuck init keeps its place for a moment only.
            let place = home.shared.adoptions.acquire().await;
            let (ready, is_ready) = oneshot::channel();
            let mut link = std::pin::pin!(keep_connected(Arc::clone(&home), ready));
            tokio::select! {
                end = &mut link => return end,
                _ = is_ready => {}
                () = tokio::time::sleep(Duration::from_secs(ADOPT_SECONDS)) => {}
            }
            drop(place);
            link.await
        }));
    }

    async fn conclude(&mut self, finished: Finished) -> Life {
        match (std::mem::replace(&mut self.work, Work::None), finished) {
            (_, Finished::Made(Ok(link))) => {
                self.work = Work::Linked(link);
                self.made().await;
            }
            (_, Finished::Made(Err(error))) => self.clean(None, Vec::new(), Then::Failed(error)),
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
                        warn!(
                            error = chain(&error),
                            "cannot end the processes of a failed sandbox; trying again"
                        );
                        self.rest(Again::EndProcesses);
                    }
                },
            },
            (Work::Resting { again, .. }, Finished::Rested) => match again {
                Again::Delete => self.clean(None, self.home.close_commands(), Then::Gone),
                Again::EndProcesses => self.end_processes(),
            },
            (_, Finished::Cleaned(_) | Finished::Rested) => {
                unreachable!("what finished is what was under way")
            }
        }
        Life::On
    }

    /// It runs: say so.
    async fn made(&mut self) {
        match self.record(State::Running, Goal::Running, None).await {
            Ok(()) => {
                info!("sandbox runs");
                self.keeper.started(self.home.shared.clock.now());
                self.measure(Verb::Create, Verdict::Ok);
                self.tell_creator(Ok(()));
                if !self.keeper.lifetime().rules().is_empty() {
                    self.note_use();
                }
                self.judge().await;
            }
            Err(error) => {
                // Nobody can have used it. A row that says `creating` is made again by the next daemon.
                self.work = Work::None;
                error!(error = chain(&error), "cannot record that a sandbox runs");
                let source = std::io::Error::other(chain(&error));
                let error = BackendError::Refused { doing: "record that the sandbox runs".into(), source };
                self.clean(None, Vec::new(), Then::Failed(error));
            }
        }
    }

    /// A create failed and was cleaned up.
    async fn failed(&mut self, error: BackendError, cleaned: Result<(), BackendError>) {
        let mut reason = chain(&error);
        if let Err(left) = cleaned {
            reason = format!("{reason}; cleaning up failed too: {}", chain(&left));
        }
        warn!(reason, "cannot create sandbox");
        self.measure(Verb::Create, Verdict::Failed);
        self.home.close_commands();
        let state = State::Failed { disk: Disk::Lost };
        if let Err(error) = self.record(state, Goal::Running, Some(reason.clone())).await {
            error!(error = chain(&error), "cannot record that a sandbox failed");
            self.home.set_state(state, Some(reason));
        }
        let id = self.home.id;
        self.tell_creator(Err(EngineError::Create { id, source: error }));
        self.judge().await;
    }

    /// A running sandbox lost its init, or the right to be listened to. Its disk is left as it is: a teardown would take the
    /// files of whoever owns it, and a delete does that when it is wanted. Its processes are ended, since nobody can reach them
    /// any more: an init that was taken over may have some, also when it seems to be gone.
    ///
    /// One that speaks no version of ours is shown as failed and left alone, row, commands and all: a daemon that speaks its
    /// version finds it as it was.
    async fn lost(&mut self, end: LinkEnd) {
        if let LinkEnd::Bug = end
            && self.relinks < RELINKS_MAX
        {
            // The bug is ours, and may not show again. Whoever owns the sandbox should not pay for it.
            self.relinks += 1;
            return self.link();
        }
        let reason = chain(&end);
        if let LinkEnd::NoCommonVersion { theirs } = end {
            warn!(reason, "sandbox cannot be used by this daemon");
            self.home.set_unspoken(theirs, reason);
            return;
        }
        match self.home.is_end_expected() {
            true => debug!(reason, "the processes of a sandbox were ended"),
            false => warn!(reason, "sandbox failed"),
        }
        let commands = self.home.close_commands();
        let state = State::Failed { disk: Disk::Whole };
        if let Err(error) = self.record(state, Goal::Running, Some(reason.clone())).await {
            // The row still says `running`; the next daemon will find out as this one did.
            error!(error = chain(&error), "cannot record that a sandbox failed");
            self.home.set_state(state, Some(reason));
        }
        for command in commands {
            command.sandbox_gone();
        }
        self.end_processes();
        self.judge().await;
    }

    fn end_processes(&mut self) {
        let home = Arc::clone(&self.home);
        let task = Task::spawn(async move {
            let end = home.shared.backend.end_processes(home.id, Processes::All);
            within(END_SECONDS, "end the sandbox's processes", end).await
        });
        self.work = Work::Cleaning { task, then: Then::Ended };
    }

    /// Waits a while, longer each time, before what failed is tried again.
    fn rest(&mut self, again: Again) {
        let pause = RETRY_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures += 1;
        self.work = Work::Resting { until: Box::pin(tokio::time::sleep(pause)), again };
    }

    /// How long it was being made, or deleted.
    fn measure(&mut self, verb: Verb, verdict: Verdict) {
        self.trace = Span::none();
        if let Some(began) = self.began.take() {
            self.home.shared.metrics.operation(verb, verdict, began.elapsed());
        }
    }

    fn tell_creator(&mut self, result: Result<(), EngineError>) {
        if let Some(created) = self.created.take() {
            let _ = created.send(result); // A caller that left needs no answer.
        }
    }

    /// Writes a new state, from the one that the sandbox is in, and tells whoever watches.
    async fn record(&self, to: State, goal: Goal, reason: Option<String>) -> Result<(), EngineError> {
        let from = self.home.state_in_row();
        let changed = self.home.shared.store.change_state(self.home.id, from, to, goal, reason.clone());
        let changed = slow::ROW.watch(&self.home.shared.metrics, self.home.id, changed);
        let changed = changed.instrument(self.trace.clone()).await?;
        if !changed {
            // Nobody else changes this row. If it happens, memory is as good a guess as the row.
            error!(from = from.word(), to = to.word(), "a sandbox's row was not in the state it was left in");
        }
        self.home.set_state(to, reason);
        Ok(())
    }

    // What people say of it.

    async fn update(&mut self, update: SandboxUpdate) -> Result<(), EngineError> {
        self.check_lives()?;
        let home = Arc::clone(&self.home);
        let now = home.shared.clock.now();
        let labels = match update.labels.is_empty() {
            true => None,
            false => Some(home.face().labels.changed(&update.labels)?),
        };
        let notes = match update.notes.is_empty() {
            true => None,
            false => Some(home.face().notes.changed(&update.notes)?),
        };
        let stamps = update.lifetime.is_some().then(|| self.keeper.stamps_touched(now));
        let change = SandboxChange {
            name: update.name.clone(),
            labels: labels.clone(),
            notes: notes.clone(),
            lifetime: update.lifetime.clone(),
            stamps,
        };
        if !home.shared.store.change_sandbox(home.id, change).await? {
            return Err(home.wrong_state());
        }
        if let Some(name) = update.name {
            let before = std::mem::replace(&mut home.face().name, name);
            home.shared.directory().free_name(&home, &before);
            home.tell_state();
        }
        if let Some(labels) = labels {
            home.shared.directory().relabel(&home, labels);
        }
        if let Some(notes) = notes {
            home.face().notes = notes;
        }
        if let Some(lifetime) = update.lifetime {
            home.face().lifetime = lifetime.clone();
            self.keeper.change(lifetime, now);
            self.keeper.stored();
            self.judge().await;
        }
        Ok(())
    }

    /// What is going is not changed any more.
    fn check_lives(&self) -> Result<(), EngineError> {
        match self.home.state() {
            State::Deleting => Err(self.home.wrong_state()),
            State::Creating | State::Running | State::Paused(_) | State::Failed { .. } => Ok(()),
        }
    }

    // How long it lives.

    async fn touch(&mut self) -> Result<Explanation, EngineError> {
        self.check_lives()?;
        let now = self.home.shared.clock.now();
        let stamps = Some(self.keeper.stamps_touched(now));
        let change = SandboxChange { stamps, ..SandboxChange::default() };
        // Written before it is answered: a crash must not take a renewal back.
        if !self.home.shared.store.change_sandbox(self.home.id, change).await? {
            return Err(self.home.wrong_state());
        }
        self.keeper.touched(now);
        self.keeper.stored();
        self.judge().await;
        // A touch does not renew the clock of creation, which may have struck in this moment.
        self.check_lives()?;
        Ok(self.explain())
    }

    fn explain(&mut self) -> Explanation {
        let face = self.home.face().clone();
        let now = self.home.shared.clock.now();
        self.keeper.explain(face.state, self.home.uses.now(), face.reason.as_deref(), now)
    }

    /// It is time to look at the rules.
    async fn wake(&mut self) {
        if !self.keeper.asks_for_cpu(self.home.state(), self.home.uses.now()) {
            return self.judge().await;
        }
        if self.look.is_none() {
            let home = Arc::clone(&self.home);
            self.look = Some(Task::spawn(async move {
                let usage = home.shared.backend.usage(std::slice::from_ref(&home.id));
                let usage = within(LOOK_SECONDS, "read what the sandbox uses", usage).await?;
                usage.into_iter().next().flatten().ok_or(BackendError::Gone)
            }));
        }
        self.keeper.pause_looking();
    }

    /// What the sandbox has used is known, or is not.
    async fn looked(&mut self, looked: Result<Usage, BackendError>) {
        self.look = None;
        let now = self.home.shared.clock.now();
        match looked {
            Ok(usage) => self.keeper.saw_cpu(usage.cpu_time, self.home.uses.now(), now),
            Err(error) => {
                warn!(error = chain(&error), "cannot tell whether a command in the sandbox works");
                self.keeper.saw_nothing(now);
            }
        }
        self.judge().await;
    }

    /// Ends the sandbox if its rules say so and nobody uses it in a way that they respect; else says when to look again.
    async fn judge(&mut self) {
        let state = self.home.state();
        if !self.keeper.lifetime().acts() || matches!(state, State::Creating | State::Deleting) {
            return self.keeper.plan(state, None, self.home.shared.clock.now());
        }
        let now = self.home.shared.clock.now();
        let keeper = &mut self.keeper;
        let mut strike = None;
        // Under the lock of the uses: none can begin between the decision and its taking hold.
        let over = self.home.uses.close_if(|uses| {
            strike = keeper.strike(state, uses, now);
            strike.is_some_and(|strike| strike.left.is_zero())
        });
        if self.keeper.is_unstored() {
            self.note_use();
        }
        match strike {
            Some(strike) if over => {
                let reason = self.keeper.lifetime().rules()[strike.rule].reason();
                info!(reason, "the sandbox's time is over");
                if !self.delete(Some(reason)).await {
                    self.keeper.retry_later(now);
                }
            }
            strike => self.keeper.plan(state, strike.map(|strike| strike.left), now),
        }
    }

    /// Tells the row when the sandbox was last used. Nobody waits for it.
    fn note_use(&mut self) {
        let id = self.home.id;
        self.keeper.stored();
        self.home.shared.store.note_use(id, self.keeper.stamps(), move |noted| match noted {
            Ok(()) | Err(StoreError::Closed) => {}
            // The next look writes again if there was another use; if not, a restart finds the sandbox a little older.
            Err(error) => {
                warn!(sandbox = %id, error = chain(&error), "cannot write when a sandbox was last used")
            }
        });
    }

    // Deleting.

    /// Begins to delete it, unless that has begun. Tells whether it is under way. The reason is for those who did not ask for it.
    async fn delete(&mut self, reason: Option<String>) -> bool {
        match self.home.state().goal(Wish::Delete) {
            Ok(Some(_)) => {
                self.home.uses.close_if(|_| true);
                if let Err(error) = self.record(State::Deleting, Goal::Gone, reason).await {
                    // Nothing was begun. The sandbox is as it was.
                    self.home.uses.reopen();
                    match self.deletes.is_empty() {
                        true => warn!(error = chain(&error), "cannot record that a sandbox is to be deleted"),
                        false => self.tell_deleters(Err(error)),
                    }
                    return false;
                }
                self.look = None;
                self.keeper.plan(State::Deleting, None, self.home.shared.clock.now());
            }
            Ok(None) if matches!(self.work, Work::None | Work::Resting { .. }) => {} // An earlier attempt failed.
            Ok(None) | Err(_) => return true,
        }
        self.began = Some(Instant::now());
        let state = State::Deleting.word();
        self.tell_creator(Err(EngineError::WrongState { id: self.home.id, state }));
        let commands = self.home.close_commands();
        let before = match std::mem::replace(&mut self.work, Work::None) {
            Work::None | Work::Resting { .. } => None,
            Work::Making { task, cancel } => {
                cancel.send_replace(true);
                Some(Before::Making(task))
            }
            Work::Linked(link) => {
                drop(link); // Ends it.
                None
            }
            Work::Cleaning { task, .. } => Some(Before::Cleaning(task)),
        };
        self.clean(before, commands, Then::Gone);
        true
    }

    fn clean(&mut self, before: Option<Before>, commands: Vec<Arc<Hub>>, then: Then) {
        let home = Arc::clone(&self.home);
        let logs = match then {
            Then::Gone => Logs::Remove(commands),
            Then::Failed(_) | Then::Nothing | Then::Ended => Logs::Keep,
        };
        let task = Task::spawn(clean(home, before, logs).instrument(self.trace.clone()));
        self.work = Work::Cleaning { task, then };
    }

    /// A delete has run its course.
    async fn gone(&mut self, result: Result<(), BackendError>) -> Life {
        let id = self.home.id;
        if let Err(source) = result {
            warn!(error = chain(&source), "cannot delete sandbox; it will be tried again");
            self.measure(Verb::Delete, Verdict::Failed);
            self.tell_deleters(Err(EngineError::Delete { id, source }));
            self.rest(Again::Delete);
            return Life::On;
        }
        if let Err(error) = self.home.shared.store.delete_sandbox(id).await {
            warn!(error = chain(&error), "cannot delete a sandbox's row; it will be tried again");
            self.tell_deleters(Err(error));
            self.rest(Again::Delete);
            return Life::On;
        }
        self.home.shared.directory().remove(id);
        let name = self.home.face().name.clone();
        self.home.tell(Happened::Deleted { name });
        info!("sandbox is gone");
        self.measure(Verb::Delete, Verdict::Ok);
        self.tell_deleters(Ok(()));
        // Those that came while the last steps were taken have what they want.
        self.inbox.close();
        while let Some(message) = self.inbox.recv().await {
            if let Message::Delete { done, .. } = message {
                let _ = done.send(Ok(()));
            }
        }
        Life::Over
    }

    fn tell_deleters(&mut self, result: Result<(), EngineError>) {
        let id = self.home.id;
        let text = result.as_ref().err().map(|error| chain(error));
        let mut result = Some(result);
        for done in self.deletes.drain(..) {
            // The first gets the error itself, the others its words.
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

    // Sweeping.

    async fn swept(&mut self, present: bool) {
        if !matches!(self.work, Work::None | Work::Linked(_)) {
            return; // Something is under way, and will see for itself.
        }
        match (self.home.state(), present) {
            (State::Deleting, _) => self.clean(None, self.home.close_commands(), Then::Gone),
            (State::Failed { disk: Disk::Lost }, true) => self.clean(None, Vec::new(), Then::Nothing),
            (State::Running, false) if !self.home.outbox.is_connected() => {
                self.work = Work::None;
                self.lost(LinkEnd::Gone).await;
            }
            (State::Creating | State::Running | State::Paused(_) | State::Failed { .. }, _) => {}
        }
    }
}

/// What came of a task, if there is one.
async fn finished<T>(task: &mut Option<Task<Result<T, BackendError>>>) -> Result<T, BackendError> {
    match task {
        Some(task) => task.await.unwrap_or_else(|error| Err(panicked("look at the sandbox", error))),
        None => pending().await,
    }
}

async fn sleep(home: &Home, nap: Option<Duration>) {
    match nap {
        Some(nap) => home.shared.clock.sleep(nap).await,
        None => pending().await,
    }
}

/// What may exist of a sandbox that is to be made.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Remains {
    Nothing,
    /// A daemon or a launcher died while it was being made.
    Perhaps,
}

/// Makes a sandbox and waits for its init. Gives the link to it.
async fn make(
    home: Arc<Home>,
    remains: Remains,
    mut cancelled: watch::Receiver<bool>,
) -> Result<Task<LinkEnd>, BackendError> {
    if remains == Remains::Perhaps {
        teardown(&home).await?;
    }
    match attempt(&home, &mut cancelled).await {
        Err(error @ BackendError::LauncherGone { .. }) => {
            warn!(error = chain(&error), "trying once more");
            teardown(&home).await?;
            attempt(&home, &mut cancelled).await
        }
        result => result,
    }
}

async fn attempt(
    home: &Arc<Home>,
    cancelled: &mut watch::Receiver<bool>,
) -> Result<Task<LinkEnd>, BackendError> {
    let backend = &home.shared.backend;
    let rootfs = tokio::select! {
        // Nothing exists yet, so this may simply stop.
        () = is_cancelled(cancelled) => return Err(BackendError::Gone),
        rootfs = within(PULL_SECONDS, "pull the image", rootfs_of(home)) => rootfs?,
    };
    tokio::select! {
        () = is_cancelled(cancelled) => return Err(BackendError::Gone),
        prepared = within(PREPARE_SECONDS, "prepare the image", backend.prepare(&rootfs)) => prepared?,
    }
    let mounts = home.mounts.iter().map(Mounted::plan).collect();
    let spec = Spec { sandbox: home.id, rootfs, limits: home.limits, mounts };
    // From here on it runs to its end, so that a teardown that follows knows that nothing is added after it.
    within(LAUNCH_SECONDS, "launch the sandbox", backend.launch(&spec)).await?;
    let (ready, is_ready) = oneshot::channel();
    let mut link = Task::spawn(keep_connected(Arc::clone(home), ready));
    let late = BackendError::Late { doing: "greet init", seconds: READY_SECONDS };
    let greeted = async {
        tokio::select! {
            biased;
            ready = is_ready => match ready {
                Ok(()) => Ok(link),
                Err(_) => Err(link_ended(link.await)),
            },
            end = &mut link => Err(link_ended(end)),
            () = is_cancelled(cancelled) => Err(BackendError::Gone),
            () = tokio::time::sleep(Duration::from_secs(READY_SECONDS)) => Err(late),
        }
    };
    slow::GREET.watch(&home.shared.metrics, home.id, greeted).await
}

/// What a backend mounts for a sandbox. Pulls its image if that is not here, and takes it for the sandbox.
async fn rootfs_of(home: &Arc<Home>) -> Result<Rootfs, BackendError> {
    if home.image == images::HOST {
        return Ok(Rootfs::Host);
    }
    let refused = |error: EngineError| BackendError::Refused {
        doing: format!("get the image `{}`", images::familiar(&home.image)),
        source: std::io::Error::other(chain(&error)),
    };
    if let Some(image) = home.stored_image() {
        return Ok(image.rootfs());
    }
    let name = ImageName::parse(&home.image).map_err(refused)?;
    for _ in 0..TAKES_MAX {
        if let Some(image) = images::take(home).await.map_err(refused)? {
            home.set_image(Arc::clone(&image));
            return Ok(image.rootfs());
        }
        if let ImageName::Reference(reference) = name.clone() {
            let pull = images::pull(&home.shared, &home.owner, PullSpec::new(reference));
            pull.finished().await.map_err(refused)?;
        }
    }
    Err(refused(EngineError::ImageNotFound { name: images::familiar(&home.image) }))
}

async fn is_cancelled(cancelled: &mut watch::Receiver<bool>) {
    // The sender lives as long as the driver; when it is gone, so is the need for this.
    let _ = cancelled.wait_for(|cancelled| *cancelled).await;
}

fn link_ended(end: Result<LinkEnd, JoinError>) -> BackendError {
    match end {
        Ok(LinkEnd::Gone) => BackendError::Gone,
        Ok(
            end @ (LinkEnd::Hostile(_)
            | LinkEnd::NoCommonVersion { .. }
            | LinkEnd::Bug
            | LinkEnd::Unreadable(_)),
        ) => BackendError::Refused { doing: "talk to init".into(), source: std::io::Error::other(end) },
        Err(error) => panicked("talk to init", error),
    }
}

/// What a teardown must see the end of.
enum Before {
    Making(Task<Result<Task<LinkEnd>, BackendError>>),
    Cleaning(Task<Result<(), BackendError>>),
}

/// What happens to the output of commands.
enum Logs {
    Keep,
    Remove(Vec<Arc<Hub>>),
}

/// The one way in which a sandbox ends.
async fn clean(home: Arc<Home>, before: Option<Before>, logs: Logs) -> Result<(), BackendError> {
    match before {
        None => {}
        Some(Before::Making(making)) => {
            // Take away what is being made, so that the making fails soon; then wait for that, because it may still add
            // something; then take away the rest.
            if let Err(error) = teardown(&home).await {
                warn!(error = chain(&error), "cannot stop a create; waiting for its end");
            }
            drop(making.await); // Whatever came of it, with its link, is unwanted.
        }
        Some(Before::Cleaning(cleaning)) => drop(cleaning.await),
    }
    teardown(&home).await?;
    if let Logs::Remove(commands) = logs {
        for command in commands {
            command.deleted().await;
        }
        let directory = home.directory();
        let removed = tokio::task::spawn_blocking(move || crate::log::remove_directory(&directory)).await;
        let removed = removed.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        removed.map_err(|source| BackendError::Refused {
            doing: "remove the output of its commands".into(),
            source,
        })?;
    }
    Ok(())
}

async fn teardown(home: &Home) -> Result<(), BackendError> {
    teardown_id(home.shared.backend.as_ref(), home.id).await
}

/// Ends whatever exists of a sandbox. A launcher that died in the middle is asked again, once.
pub(crate) async fn teardown_id(backend: &dyn runtime::Backend, id: SandboxId) -> Result<(), BackendError> {
    match within(TEARDOWN_SECONDS, "tear the sandbox down", backend.teardown(id)).await {
        Err(BackendError::LauncherGone { .. }) => {
            within(TEARDOWN_SECONDS, "tear the sandbox down", backend.teardown(id)).await
        }
        result => result,
    }
}

async fn within<T>(
    seconds: u64,
    doing: &'static str,
    work: impl Future<Output = Result<T, BackendError>>,
) -> Result<T, BackendError> {
    let late = |_| BackendError::Late { doing, seconds };
    timeout(Duration::from_secs(seconds), work).await.map_err(late)?
}
