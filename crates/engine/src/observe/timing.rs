//! Logs and counts steps that take too long, with the sandbox and the step.
//!
//! A threshold is about a hundred times what the step takes on an idle machine: beyond it, something is wrong with a
//! disk, a machine or a guest, and the log should show that. Nothing is aborted here; deadlines are elsewhere.

use std::future::Future;
use std::time::{Duration, Instant};

use runtime::BackendError;
use tracing::field::{Empty, display};
use tracing::{Instrument, Span, debug_span, warn};
use wire::SandboxId;

use crate::TRACE_TARGET;
use crate::observe::metrics::Metrics;

/// A step, and its threshold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// Its name in the log, and its label in metrics.
    pub name: &'static str,
    /// A longer duration is slow.
    pub after: Duration,
}

const fn step(name: &'static str, millis: u64) -> Step {
    Step { name, after: Duration::from_millis(millis) }
}

/// Comparing the image with the machine takes a millisecond; building it reads all of `/usr`, and is worth a log
/// line.
pub(crate) const PREPARE: Step = step("prepare", 1000);
/// Namespaces, mounts, init: 2 ms.
pub(crate) const LAUNCH: Step = step("launch", 500);
/// From init's start to its hello: 1 ms.
pub(crate) const GREET: Step = step("greet", 500);
/// A connection to a Unix socket.
pub(crate) const CONNECT: Step = step("connect", 500);
/// Kills processes and removes files; there may be many.
pub(crate) const TEARDOWN: Step = step("teardown", 2000);
/// Kills processes and waits until they are gone.
pub(crate) const END_PROCESSES: Step = step("end_processes", 1000);
/// Reads a few directories.
pub(crate) const INVENTORY: Step = step("inventory", 2000);
/// Reads one small file.
pub(crate) const OOM_KILLS: Step = step("oom_kills", 500);
/// Reads and writes what may be gigabytes; half a minute is some of them.
pub(crate) const UNPACK_LAYER: Step = step("unpack_layer", 30_000);
/// Removes files; there may be many.
pub(crate) const REMOVE_LAYER: Step = step("remove_layer", 10_000);
/// Reads one directory.
pub(crate) const LAYERS: Step = step("layers", 2000);
/// Waits until every process is frozen.
pub(crate) const FREEZE: Step = step("freeze", 500);
/// Reads some small files for each sandbox.
pub(crate) const USAGE: Step = step("usage", 1000);
/// Looks at every file; its own bound is ten seconds.
pub(crate) const DISK_USAGE: Step = step("disk_usage", 9000);
/// A new volume is written to disk; a copy first writes back what is pending in the other.
pub(crate) const VOLUME: Step = step("volume", 2000);
/// A snapshot writes recent changes to disk.
pub(crate) const SNAPSHOT: Step = step("snapshot", 2000);
/// Routes, rules and listeners in a namespace: 2 ms with the walker.
pub(crate) const NETWORK: Step = step("network", 500);
/// One process.
pub(crate) const EGRESS: Step = step("egress", 500);
/// A few sockets in a namespace.
pub(crate) const SOCKETS: Step = step("sockets", 500);
/// Reads two small files.
pub(crate) const ATTEMPTS: Step = step("attempts", 500);
/// Reads what a guest has open.
pub(crate) const LISTENING: Step = step("listening", 1000);
/// Reads two small files.
pub(crate) const MACHINE: Step = step("machine", 500);
/// A change of a row: its turn, and the commit.
pub(crate) const ROW: Step = step("row", 250);
/// One commit of the database.
pub(crate) const COMMIT: Step = step("commit", 250);
/// From the `Start` frame to init's answer: half a millisecond.
pub(crate) const START: Step = step("start", 500);
/// Until a file operation has begun in the guest.
pub(crate) const FILE_START: Step = step("file_start", 500);
/// One write of output to a log.
pub(crate) const LOG_WRITE: Step = step("log_write", 500);
/// A whole sweep.
pub(crate) const SWEEP: Step = step("sweep", 10_000);

impl Step {
    /// Logs if `took` was too long.
    pub fn check(self, metrics: &Metrics, sandbox: Option<SandboxId>, took: Duration) {
        if took < self.after {
            return;
        }
        metrics.slow(self.name);
        let (millis, threshold) = (took.as_millis() as u64, self.after.as_millis() as u64);
        match sandbox {
            Some(id) => warn!(sandbox = %id, step = self.name, millis, threshold, "slow"),
            None => warn!(step = self.name, millis, threshold, "slow"),
        }
    }

    /// For traces.
    fn span(self, sandbox: Option<SandboxId>) -> Span {
        let span = debug_span!(target: TRACE_TARGET, "step", otel.name = self.name, shoal.sandbox = Empty);
        if let Some(id) = sandbox {
            span.record("shoal.sandbox", display(id));
        }
        span
    }

    /// Times `work`.
    pub async fn watch<T>(self, metrics: &Metrics, sandbox: SandboxId, work: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let done = work.instrument(self.span(Some(sandbox))).await;
        self.check(metrics, Some(sandbox), began.elapsed());
        done
    }

    /// Times a request to the backend, for the log and for metrics.
    pub async fn request<T>(
        self,
        metrics: &Metrics,
        sandbox: Option<SandboxId>,
        work: impl Future<Output = Result<T, BackendError>>,
    ) -> Result<T, BackendError> {
        let began = Instant::now();
        let result = work.instrument(self.span(sandbox)).await;
        let took = began.elapsed();
        metrics.backend(self.name, &result, took);
        self.check(metrics, sandbox, took);
        result
    }
}
