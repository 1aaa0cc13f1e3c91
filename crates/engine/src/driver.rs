//! The task that owns one sandbox: it alone changes its state, and it alone calls `launch` and `teardown`.
//!
//! It takes one message at a time from a bounded inbox. Slow work runs beside the inbox, so that a delete is heard at
//! once. Every change goes the same way: the row says what is aimed at, then it is done, then the row says what came
//! of it, then whoever watches is told. What is allowed is `lifecycle`'s business.
//!
//! A create that fails is torn down and stays as `Failed` with its reason. If the launcher died in the middle of it, it
//! is torn down and tried once more. If cleaning up fails too, both reasons are kept, and the sweep tries again.

use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use runtime::{BackendError, Spec};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinHandle};
use tokio::time::timeout;
use tracing::{Instrument, error, info, info_span, warn};
use wire::SandboxId;

use crate::command::Hub;
use crate::error::{EngineError, chain};
use crate::events::Happened;
use crate::guest::{LinkEnd, keep_connected};
use crate::home::Home;
use crate::lifecycle::{Disk, Goal, Recovery, State, Wish};
use crate::model::Wait;
use crate::store::SandboxRow;
use crate::template::Template;

/// Messages that wait for a driver, at most. A driver never waits itself, save for a commit.
pub(crate) const INBOX_MAX: usize = 64;
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

/// What a driver is told.
pub(crate) enum Message {
    /// Be gone, and say when.
    Delete { done: oneshot::Sender<Result<(), EngineError>> },
    /// What the sweep saw of the sandbox on the host.
    Swept { present: bool },
}

/// How a driver's sandbox came to be.
pub(crate) enum Birth {
    /// Someone asked for it just now.
    New { row: Box<SandboxRow>, wait: Wait, created: oneshot::Sender<Result<(), EngineError>> },
    /// A row told of it.
    Recovered,
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
pub(crate) fn spawn(home: &Arc<Home>, inbox: mpsc::Receiver<Message>, birth: Birth) {
    let span = info_span!("sandbox", id = %home.id);
    let driver =
        Driver { home: Arc::clone(home), inbox, work: Work::None, deletes: Vec::new(), created: None };
    let task = home.shared.runtime.spawn(driver.run(birth).instrument(span));
    *home.driver.lock().unwrap_or_else(PoisonError::into_inner) = Some(task.abort_handle());
}

struct Driver {
    home: Arc<Home>,
    inbox: mpsc::Receiver<Message>,
    work: Work,
    /// Who waits for the end.
    deletes: Vec<oneshot::Sender<Result<(), EngineError>>>,
    /// Who waits for the beginning.
    created: Option<oneshot::Sender<Result<(), EngineError>>>,
}

/// What goes on beside the inbox.
enum Work {
    None,
    Making { task: Task<Result<Task<LinkEnd>, BackendError>>, cancel: watch::Sender<bool> },
    Linked(Task<LinkEnd>),
    Cleaning { task: Task<Result<(), BackendError>>, then: Then },
}

/// What a teardown is for.
enum Then {
    /// A create failed.
    Failed(BackendError),
    /// A delete.
    Gone,
    /// The sweep found something of a failed sandbox.
    Nothing,
}

/// What came of it.
enum Finished {
    Made(Result<Task<LinkEnd>, BackendError>),
    Unlinked(LinkEnd),
    Cleaned(Result<(), BackendError>),
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
                LinkEnd::Gone
            })),
            Self::Cleaning { task, .. } => {
                Finished::Cleaned(task.await.unwrap_or_else(|error| Err(panicked("clean up", error))))
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
        loop {
            let life = tokio::select! {
                message = self.inbox.recv() => match message {
                    Some(message) => self.hear(message).await,
                    None => Life::Over,
                },
                finished = self.work.finished() => self.conclude(finished).await,
            };
            if life == Life::Over {
                return;
            }
        }
    }

    async fn begin(&mut self, birth: Birth) -> Life {
        match birth {
            Birth::New { row, wait, created } => {
                if let Err(error) = self.home.shared.store.insert_sandbox(*row).await {
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
                self.home.tell_state();
                match wait {
                    Wait::Ready => self.created = Some(created),
                    Wait::No => drop(created.send(Ok(()))),
                }
                self.make(Remains::Nothing);
            }
            Birth::Recovered => match self.home.state().recovery() {
                Recovery::MakeAgain => self.make(Remains::Perhaps),
                Recovery::Adopt => self.link(),
                Recovery::Finish => self.clean(None, self.home.close_commands(), Then::Gone),
                Recovery::Keep => {}
            },
        }
        Life::On
    }

    async fn hear(&mut self, message: Message) -> Life {
        match message {
            Message::Delete { done } => {
                self.deletes.push(done);
                self.delete().await;
            }
            Message::Swept { present } => self.swept(present).await,
        }
        Life::On
    }

    // Making.

    fn make(&mut self, remains: Remains) {
        let (cancel, cancelled) = watch::channel(false);
        let task = Task::spawn(make(Arc::clone(&self.home), remains, cancelled));
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
            },
            (Work::None | Work::Making { .. } | Work::Linked(_), Finished::Cleaned(_)) => {
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
                self.tell_creator(Ok(()));
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
        self.home.close_commands();
        let state = State::Failed { disk: Disk::Lost };
        if let Err(error) = self.record(state, Goal::Running, Some(reason.clone())).await {
            error!(error = chain(&error), "cannot record that a sandbox failed");
            self.home.set_state(state, Some(reason));
        }
        let id = self.home.id;
        self.tell_creator(Err(EngineError::Create { id, source: error }));
    }

    /// A running sandbox lost its init, or the right to be listened to. Its disk is left as it is, and so are processes
    /// that a hostile init may still have, within their limits: a teardown would take the files of whoever owns it, and
    /// a delete does that when it is wanted.
    async fn lost(&mut self, end: LinkEnd) {
        let reason = chain(&end);
        warn!(reason, "sandbox failed");
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
    }

    fn tell_creator(&mut self, result: Result<(), EngineError>) {
        if let Some(created) = self.created.take() {
            let _ = created.send(result); // A caller that left needs no answer.
        }
    }

    /// Writes a new state, from the one that the sandbox is in, and tells whoever watches.
    async fn record(&self, to: State, goal: Goal, reason: Option<String>) -> Result<(), EngineError> {
        let from = self.home.state();
        let changed =
            self.home.shared.store.change_state(self.home.id, from, to, goal, reason.clone()).await?;
        if !changed {
            // Nobody else changes this row. If it happens, memory is as good a guess as the row.
            error!(from = from.word(), to = to.word(), "a sandbox's row was not in the state it was left in");
        }
        self.home.set_state(to, reason);
        Ok(())
    }

    // Deleting.

    async fn delete(&mut self) {
        match self.home.state().goal(Wish::Delete) {
            Ok(Some(_)) => {
                if let Err(error) = self.record(State::Deleting, Goal::Gone, None).await {
                    // Nothing was begun. The sandbox is as it was.
                    return self.tell_deleters(Err(error));
                }
            }
            Ok(None) if matches!(self.work, Work::None) => {} // An earlier attempt failed.
            Ok(None) | Err(_) => return,
        }
        let state = State::Deleting.word();
        self.tell_creator(Err(EngineError::WrongState { id: self.home.id, state }));
        let commands = self.home.close_commands();
        let before = match std::mem::replace(&mut self.work, Work::None) {
            Work::None => None,
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
    }

    fn clean(&mut self, before: Option<Before>, commands: Vec<Arc<Hub>>, then: Then) {
        let home = Arc::clone(&self.home);
        let logs = match then {
            Then::Gone => Logs::Remove(commands),
            Then::Failed(_) | Then::Nothing => Logs::Keep,
        };
        let task = Task::spawn(clean(home, before, logs));
        self.work = Work::Cleaning { task, then };
    }

    /// A delete has run its course.
    async fn gone(&mut self, result: Result<(), BackendError>) -> Life {
        let id = self.home.id;
        if let Err(source) = result {
            warn!(error = chain(&source), "cannot delete sandbox; it will be tried again");
            self.tell_deleters(Err(EngineError::Delete { id, source }));
            return Life::On;
        }
        if let Err(error) = self.home.shared.store.delete_sandbox(id).await {
            warn!(error = chain(&error), "cannot delete a sandbox's row; it will be tried again");
            self.tell_deleters(Err(error));
            return Life::On;
        }
        self.home.shared.directory().remove(id);
        let name = self.home.face().name.clone();
        self.home.tell(Happened::Deleted { name });
        info!("sandbox is gone");
        self.tell_deleters(Ok(()));
        // Those that came while the last steps were taken have what they want.
        self.inbox.close();
        while let Some(message) = self.inbox.recv().await {
            if let Message::Delete { done } = message {
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
    let template = Template::find(&home.template).ok_or_else(|| BackendError::Refused {
        doing: format!("find template `{}`", home.template),
        source: std::io::ErrorKind::NotFound.into(),
    })?;
    let backend = &home.shared.backend;
    let rootfs = template.rootfs();
    tokio::select! {
        // Nothing exists yet, so this may simply stop.
        () = is_cancelled(cancelled) => return Err(BackendError::Gone),
        prepared = within(PREPARE_SECONDS, "prepare the image", backend.prepare(&rootfs)) => prepared?,
    }
    let spec = Spec { sandbox: home.id, rootfs, limits: home.limits };
    // From here on it runs to its end, so that a teardown that follows knows that nothing is added after it.
    within(LAUNCH_SECONDS, "launch the sandbox", backend.launch(&spec)).await?;
    let (ready, is_ready) = oneshot::channel();
    let mut link = Task::spawn(keep_connected(Arc::clone(home), ready));
    let late = BackendError::Late { doing: "greet init", seconds: READY_SECONDS };
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
}

async fn is_cancelled(cancelled: &mut watch::Receiver<bool>) {
    // The sender lives as long as the driver; when it is gone, so is the need for this.
    let _ = cancelled.wait_for(|cancelled| *cancelled).await;
}

fn link_ended(end: Result<LinkEnd, JoinError>) -> BackendError {
    match end {
        Ok(LinkEnd::Gone) => BackendError::Gone,
        Ok(end @ (LinkEnd::Hostile(_) | LinkEnd::NoCommonVersion { .. })) => {
            BackendError::Refused { doing: "talk to init".into(), source: std::io::Error::other(end) }
        }
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
