//! Faults that a test sets: steps that fail or wait, connections that break, inits of another version.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use tokio::sync::Semaphore;
use wire::frame::CHUNK_MAX;
use wire::guest::Versions;

use crate::backend::BackendError;
use crate::fake::host::FakeHost;

/// The steps of creating a sandbox, and other requests that can fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FakeStep {
    /// Preparing its image.
    Prepare,
    /// Its writable directory.
    Disk,
    /// Its limits.
    Limits,
    /// Its first process.
    Process,
    /// The stream to init.
    Connect,
    /// Init's hello.
    Greet,
    /// Unpacking a layer. Not a step of creating a sandbox.
    Unpack,
    /// Removing a layer. Not a step of creating a sandbox.
    RemoveLayer,
    /// Listing layers. Not a step of creating a sandbox. The list has the layers that existed when the step began.
    ListLayers,
    /// Ending processes from the host. Not a step of creating a sandbox.
    End,
    /// Measuring disk usage. Not a step of creating a sandbox.
    DiskUsage,
    /// Taking a snapshot. Not a step of creating a sandbox.
    TakeSnapshot,
    /// Removing a snapshot. Not a step of creating a sandbox.
    RemoveSnapshot,
    /// Creating, resizing or removing a volume. Not a step of creating a sandbox.
    Volume,
    /// Freezing. Not a step of creating a sandbox. The sandbox is frozen even if this fails, as with the kernel.
    Still,
    /// Thawing. Not a step of creating a sandbox.
    Going,
    /// Opening a network. Not a step of creating a sandbox.
    OpenNetwork,
    /// Changing routes. Not a step of creating a sandbox.
    ChangeRoutes,
    /// Closing a network. Not a step of creating a sandbox.
    CloseNetwork,
    /// Creating sockets inside. Not a step of creating a sandbox.
    Sockets,
    /// Counting attempts to reach a network. Not a step of creating a sandbox.
    Attempts,
    /// Listing ports. Not a step of creating a sandbox.
    Listening,
    /// Showing a policy. Not a step of creating a sandbox.
    ShowPolicy,
    /// Starting egress. Not a step of creating a sandbox.
    StartEgress,
    /// Ending egress. Not a step of creating a sandbox.
    EndEgress,
}

impl FakeStep {
    /// The steps of creating a sandbox, in their order.
    pub const ALL: [Self; 6] =
        [Self::Prepare, Self::Disk, Self::Limits, Self::Process, Self::Connect, Self::Greet];
}

/// How a step fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FakeFailure {
    /// The kernel returns an error.
    Refused,
    /// The launcher dies in the middle.
    LauncherGone,
    /// Init has ended.
    Gone,
    /// The caller panics, as if it had a bug.
    Panic,
}

/// The faults that are set.
#[derive(Default)]
pub(super) struct Faults {
    /// Steps that fail: how, and how many more times.
    failing: HashMap<FakeStep, (FakeFailure, u32)>,
    /// How many more teardowns fail.
    teardowns_failing: u32,
    /// Steps that wait for a permit.
    held: HashMap<FakeStep, Arc<Semaphore>>,
    /// Inits do not end commands at their timeouts.
    pub(super) timeouts_ignored: bool,
    /// The versions that new connections speak, if not the newest.
    pub(super) versions: Option<Versions>,
    /// Each connection breaks after a random number of bytes up to this.
    break_after: Option<u64>,
    random: u64,
}

/// How long a connection lives, and how small its frames are.
pub(super) struct Lifespan {
    /// Bytes until it breaks, in both directions together.
    pub bytes: u64,
    /// If connections break early, frames are small, or none would ever get through.
    pub chunk_max: usize,
}

impl Faults {
    /// For the next connection.
    pub(super) fn lifespan(&mut self) -> Lifespan {
        let Some(most) = self.break_after else { return Lifespan { bytes: u64::MAX, chunk_max: CHUNK_MAX } };
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        Lifespan { bytes: self.random % most.max(1), chunk_max: (most as usize / 8).clamp(1, CHUNK_MAX) }
    }

    /// Whether this teardown fails.
    pub(super) fn take_teardown(&mut self) -> bool {
        let fails = self.teardowns_failing > 0;
        self.teardowns_failing = self.teardowns_failing.saturating_sub(1);
        fails
    }
}

impl FakeHost {
    /// Makes a step fail this many times.
    pub fn fail(&self, step: FakeStep, how: FakeFailure, times: u32) {
        self.state().faults.failing.insert(step, (how, times));
    }

    /// Makes teardown fail this many times.
    pub fn fail_teardown(&self, times: u32) {
        self.state().faults.teardowns_failing = times;
    }

    /// Makes a step wait until it is released.
    pub fn hold(&self, step: FakeStep) {
        self.state().faults.held.insert(step, Arc::new(Semaphore::new(0)));
    }

    /// Releases the callers that wait at a step, and all that come later.
    pub fn release(&self, step: FakeStep) {
        if let Some(held) = self.state().faults.held.remove(&step) {
            held.close();
        }
    }

    /// Breaks every connection after a random number of bytes, up to `most`, in either direction. `None` stops that.
    pub fn break_connections(&self, most: Option<u64>, seed: u64) {
        let faults = &mut self.state().faults;
        (faults.break_after, faults.random) = (most, seed | 1);
    }

    /// From now on, no init ends a new command at its timeout.
    pub fn ignore_timeouts(&self) {
        self.state().faults.timeouts_ignored = true;
    }

    /// From now on, every init speaks these versions.
    pub fn speak(&self, versions: Versions) {
        self.state().faults.versions = Some(versions);
    }

    /// Passes a step, or fails at it.
    pub(super) async fn step(&self, step: FakeStep, doing: &'static str) -> Result<(), BackendError> {
        let held = self.state().faults.held.get(&step).cloned();
        if let Some(held) = held {
            // The test releases the step by closing the semaphore.
            let _ = held.acquire().await;
        }
        let mut state = self.state();
        match state.faults.failing.get_mut(&step) {
            Some((how, times)) if *times > 0 => {
                *times = times.saturating_sub(1);
                Err(match how {
                    FakeFailure::Refused => BackendError::Refused {
                        doing: format!("{doing} (step {step:?})"),
                        source: io::Error::from(io::ErrorKind::StorageFull),
                    },
                    FakeFailure::LauncherGone => BackendError::LauncherGone { doing },
                    FakeFailure::Gone => BackendError::Gone,
                    FakeFailure::Panic => {
                        drop(state);
                        panic!("a bug at step {step:?}, as the test wishes");
                    }
                })
            }
            Some(_) | None => Ok(()),
        }
    }
}
