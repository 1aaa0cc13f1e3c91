//! How a driver makes its sandbox, and how it links to one that already runs.
//!
//! If a create fails, the driver tears the sandbox down and keeps it as `Failed` with the reason. If the launcher died
//! during the create, the driver tears the sandbox down and tries once more. If the teardown fails too, the reason names
//! both errors, and the sweep removes what is left.

use std::sync::Arc;
use std::time::Duration;

use runtime::{BackendError, Spec};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinError;
use tracing::{Instrument, error, info, warn};
use wire::launch::{Processes, Rootfs, Writable};

use crate::error::{EngineError, chain};
use crate::guest::{LinkEnd, Peer, keep_connected};
use crate::image::{self, ImageName, PullSpec};
use crate::observe::metrics::{Verb, Verdict};
use crate::observe::timing;
use crate::sandbox::clean::{END_SECONDS, teardown};
use crate::sandbox::driver::{Driver, Then, Work, panicked, within};
use crate::sandbox::hooks::Then as After;
use crate::sandbox::lifecycle::{Disk, Goal, State};
use crate::sandbox::live::LiveSandbox;
use crate::task::Task;
use crate::volume::Mounted;

/// How long pulling an image may take.
const PULL_SECONDS: u64 = 3600;
/// How often the driver looks for an image and pulls it if it is missing. One round is not enough: the image may be
/// removed after the pull and before the sandbox takes it.
const TAKES_MAX: usize = 4;
/// How long the backend may take to prepare an image.
const PREPARE_SECONDS: u64 = 300;
/// How long the backend may take to make a sandbox.
const LAUNCH_SECONDS: u64 = 30;
/// How long a new init may take to greet the daemon.
const READY_SECONDS: u64 = 20;
/// How long a sandbox that is being adopted may hold one of the few places for adoptions.
const ADOPT_SECONDS: u64 = 1;

impl Driver {
    pub(super) fn make(&mut self, remains: Remains) {
        let (cancel, cancelled) = watch::channel(false);
        let task =
            Task::spawn(make(Arc::clone(&self.live), remains, cancelled).instrument(self.trace.clone()));
        self.work = Work::Making { task, cancel };
    }

    /// Launches the sandbox over the files that it has kept.
    pub(super) fn make_again(&mut self) {
        let (cancel, cancelled) = watch::channel(false);
        let task = Task::spawn(make_again(Arc::clone(&self.live), cancelled));
        self.work = Work::Making { task, cancel };
    }

    pub(super) fn link(&mut self) {
        let live = Arc::clone(&self.live);
        // Beside the link: an egress that is slow must not keep callers from the sandbox, which has no more than its policy meanwhile.
        self.live.shared.runtime.spawn(async move {
            if let Err(error) = live.attach_network().await {
                warn!(error = chain(&error), sandbox = %live.id, "a sandbox has lost its network");
            }
        });
        let live = Arc::clone(&self.live);
        self.work = Work::Linked(Task::spawn(async move {
            // After a restart all sandboxes are adopted at once; this bounds how many at a time. An init that is stuck
            // gives up its place after `ADOPT_SECONDS`.
            let place = live.shared.adoptions.acquire().await;
            let (ready, is_ready) = oneshot::channel();
            let mut link = std::pin::pin!(keep_connected(Arc::clone(&live) as Arc<dyn Peer>, ready));
            tokio::select! {
                end = &mut link => return end,
                _ = is_ready => {}
                () = tokio::time::sleep(Duration::from_secs(ADOPT_SECONDS)) => {}
            }
            drop(place);
            link.await
        }));
    }

    /// The sandbox runs: records it and answers the caller.
    pub(super) async fn made(&mut self) {
        self.deadlines.started(self.live.shared.clock.now());
        if !self.deadlines.lifetime().rules().is_empty() {
            // Queued before the change of the state, so that a daemon that finds the sandbox running also finds when it started.
            self.note_use();
        }
        match self.record(State::Running, Goal::Running, None).await {
            Ok(()) => {
                self.live.reopen_commands(); // A rollback has closed them.
                info!("sandbox runs");
                self.measure(Verb::Create, Verdict::Ok);
                if self.run_due(After::Made).is_some() {
                    self.tell_creator(Ok(()));
                }
                self.judge().await;
            }
            Err(error) => {
                // No caller can have used it yet. Its row still says `creating`, so the next daemon makes it again.
                self.work = Work::None;
                error!(error = chain(&error), "cannot record that a sandbox runs");
                let source = std::io::Error::other(chain(&error));
                let error = BackendError::Refused { doing: "record that the sandbox runs".into(), source };
                self.clean(None, Vec::new(), Then::Failed(error));
            }
        }
    }

    /// A create failed, and what it had made was cleaned up, or could not be.
    pub(super) async fn failed(&mut self, error: BackendError, cleaned: Result<(), BackendError>) {
        let mut reason = chain(&error);
        if let Err(left) = cleaned {
            reason = format!("{reason}; cleaning up failed too: {}", chain(&left));
        }
        warn!(reason, "cannot create sandbox");
        self.measure(Verb::Create, Verdict::Failed);
        self.live.close_commands();
        let state = State::Failed { disk: Disk::Lost };
        if let Err(error) = self.record(state, Goal::Running, Some(reason.clone())).await {
            error!(error = chain(&error), "cannot record that a sandbox failed");
            self.live.set_state(state, Some(reason));
        }
        let id = self.live.id;
        self.tell_creator(Err(EngineError::Create { id, source: error }));
        self.judge().await;
    }

    pub(super) fn tell_creator(&mut self, result: Result<(), EngineError>) {
        if let Some(created) = self.created.take() {
            let _ = created.send(result); // A caller that left needs no answer.
        }
    }
}

/// What may exist on the host of a sandbox that is about to be made.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Remains {
    Nothing,
    /// A daemon died while it was making the sandbox.
    Perhaps,
}

/// Makes a sandbox and waits for its init. Returns the link to init.
async fn make(
    live: Arc<LiveSandbox>,
    remains: Remains,
    mut cancelled: watch::Receiver<bool>,
) -> Result<Task<LinkEnd>, BackendError> {
    if remains == Remains::Perhaps {
        teardown(&live).await?;
    }
    match attempt(&live, Writable::New, &mut cancelled).await {
        Err(error @ BackendError::LauncherGone { .. }) => {
            warn!(error = chain(&error), "trying once more");
            teardown(&live).await?;
            attempt(&live, Writable::New, &mut cancelled).await
        }
        result => result,
    }
}

/// Like [`make`], over the files that the sandbox has kept. Ends what may be left of its processes first.
async fn make_again(
    live: Arc<LiveSandbox>,
    mut cancelled: watch::Receiver<bool>,
) -> Result<Task<LinkEnd>, BackendError> {
    let end = async || {
        live.detach_network().await;
        let end = live.shared.backend.end_processes(live.id, Processes::All);
        within(END_SECONDS, "end the sandbox's processes", end).await
    };
    end().await?;
    match attempt(&live, Writable::Kept, &mut cancelled).await {
        Err(error @ BackendError::LauncherGone { .. }) => {
            warn!(error = chain(&error), "trying once more");
            end().await?;
            attempt(&live, Writable::Kept, &mut cancelled).await
        }
        result => result,
    }
}

async fn attempt(
    live: &Arc<LiveSandbox>,
    writable: Writable,
    cancelled: &mut watch::Receiver<bool>,
) -> Result<Task<LinkEnd>, BackendError> {
    let backend = &live.shared.backend;
    let rootfs = tokio::select! {
        // Nothing exists on the host yet, so the create can stop here.
        () = is_cancelled(cancelled) => return Err(BackendError::Gone),
        rootfs = within(PULL_SECONDS, "pull the image", rootfs_of(live)) => rootfs?,
    };
    tokio::select! {
        () = is_cancelled(cancelled) => return Err(BackendError::Gone),
        prepared = within(PREPARE_SECONDS, "prepare the image", backend.prepare(&rootfs)) => prepared?,
    }
    let mounts = live.mounts.iter().map(Mounted::plan).collect();
    let spec = Spec { sandbox: live.id, rootfs, limits: live.limits, mounts, over: live.over(), writable };
    // A launch is never cancelled: the teardown that follows a cancelled create must be sure that nothing is added
    // after it.
    within(LAUNCH_SECONDS, "launch the sandbox", backend.launch(&spec)).await?;
    let (ready, is_ready) = oneshot::channel();
    let mut link = Task::spawn(keep_connected(Arc::clone(live) as Arc<dyn Peer>, ready));
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
    let greeted = timing::GREET.watch(&live.shared.metrics, live.id, greeted);
    // No command starts before both are done.
    let opened = async {
        live.attach_network().await?;
        live.show_trust(&spec.rootfs).await
    };
    let (link, ()) = tokio::try_join!(greeted, opened)?;
    Ok(link)
}

/// The root filesystem for a sandbox. Pulls the image if it is missing, and takes it for the sandbox.
async fn rootfs_of(live: &Arc<LiveSandbox>) -> Result<Rootfs, BackendError> {
    if live.image == image::HOST {
        return Ok(Rootfs::Host);
    }
    let refused = |error: EngineError| BackendError::Refused {
        doing: format!("get the image `{}`", image::familiar(&live.image)),
        source: std::io::Error::other(chain(&error)),
    };
    if let Some(image) = live.stored_image() {
        return Ok(image.rootfs());
    }
    let name = ImageName::parse(&live.image).map_err(refused)?;
    for _ in 0..TAKES_MAX {
        if let Some(image) =
            image::take(&live.shared, live.id, &live.owner, &live.image).await.map_err(refused)?
        {
            live.set_image(Arc::clone(&image));
            return Ok(image.rootfs());
        }
        if let ImageName::Reference(reference) = name.clone() {
            let pull = image::pull(&live.shared, &live.owner, PullSpec::new(reference));
            pull.finished().await.map_err(refused)?;
        }
    }
    Err(refused(EngineError::ImageNotFound { name: image::familiar(&live.image) }))
}

async fn is_cancelled(cancelled: &mut watch::Receiver<bool>) {
    // An error means that the sender, and so the driver, is gone. Then the result of this task is not needed either.
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
