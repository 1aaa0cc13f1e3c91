//! What the engine counts, for the operator. Names and labels are part of the contract with people's dashboards.
//!
//! Labels take few values, all known when the program is built; a sandbox's id is never one of them. Counting is an atomic
//! addition, or a lock that is held for one; nothing here waits.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use runtime::BackendError;
use wire::files::FileOp;
use wire::guest::Stream;

use crate::Shared;
use crate::error::EngineError;
use crate::model::Outcome;

/// From half a millisecond, about what a command takes, to a minute.
const DURATIONS: [f64; 16] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// From a tenth of a millisecond, about what a commit takes.
const COMMITS: [f64; 12] = [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0];
/// A command may take a millisecond or a day.
const COMMANDS: [f64; 12] = [0.001, 0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0, 86_400.0];
/// Changes in one commit.
const CHANGES: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// All of it. Cheap to use from anywhere.
#[derive(Debug)]
pub(crate) struct Metrics {
    operations: Family<Operation, Histogram, fn() -> Histogram>,
    backend: Family<BackendRequest, Histogram, fn() -> Histogram>,
    commands: Family<Ended, Histogram, fn() -> Histogram>,
    output: Family<OfStream, Counter>,
    output_read: Counter,
    stdin: Counter,
    file_bytes: Family<Way, Counter>,
    commits: Histogram,
    changes: Histogram,
    sweeps: Histogram,
    strays: Counter,
    connections: Counter,
    violations: Counter,
    slow: Family<OfStep, Counter>,
    sandboxes: Family<OfState, Gauge>,
    pools: Gauge,
    pool_members: Family<OfState, Gauge>,
    pool_claims: Family<Ended, Counter>,
    pool_refills: Family<Ended, Counter>,
    commands_live: Gauge,
    transfers_live: Gauge,
}

/// What callers ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verb {
    Create,
    Delete,
    Run,
    Snapshot,
    File(FileVerb),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum FileVerb {
    Read,
    Write,
    Stat,
    List,
    MakeDirectory,
    Move,
    Copy,
    Remove,
    Glob,
    Grep,
    Watch,
    Pack,
    Unpack,
    Edit,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Verdict {
    /// It was done.
    Ok,
    /// The caller could have known better.
    Refused,
    /// It should have worked.
    Failed,
    /// The caller left before the end.
    Left,
}

impl Verdict {
    pub fn of<T>(result: &Result<T, EngineError>) -> Self {
        use EngineError::*;
        let Err(error) = result else { return Self::Ok };
        let ours = matches!(
            error,
            Create { .. }
                | Delete { .. }
                | Pause { .. }
                | Resume { .. }
                | Usage { .. }
                | Store { .. }
                | Log { .. }
                | Unresponsive { .. }
        );
        let guests = matches!(error, FileStrange { .. } | FileOutOfMemory { .. } | FileKilled { .. });
        if ours || guests { Self::Failed } else { Self::Refused }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Operation {
    verb: Verb,
    outcome: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BackendRequest {
    request: &'static str,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Ended {
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStream {
    stream: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Way {
    direction: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfStep {
    step: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfState {
    state: &'static str,
}

impl EncodeLabelValue for Verb {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Create => "create",
            Self::Delete => "delete",
            Self::Run => "run",
            Self::Snapshot => "snapshot",
            Self::File(verb) => verb.word(),
        };
        word.encode(encoder)
    }
}

impl EncodeLabelValue for Verdict {
    fn encode(&self, encoder: &mut LabelValueEncoder) -> Result<(), std::fmt::Error> {
        let word = match self {
            Self::Ok => "ok",
            Self::Refused => "refused",
            Self::Failed => "failed",
            Self::Left => "left",
        };
        word.encode(encoder)
    }
}

impl FileVerb {
    pub fn of(op: &FileOp) -> Self {
        match op {
            FileOp::Read { .. } => Self::Read,
            FileOp::Write(_) => Self::Write,
            FileOp::Stat { .. } => Self::Stat,
            FileOp::List { .. } => Self::List,
            FileOp::MakeDirectory { .. } => Self::MakeDirectory,
            FileOp::Move(_) => Self::Move,
            FileOp::Copy(_) => Self::Copy,
            FileOp::Remove { .. } => Self::Remove,
            FileOp::Glob { .. } => Self::Glob,
            FileOp::Grep(_) | FileOp::GrepWith(_) => Self::Grep,
            FileOp::Watch { .. } => Self::Watch,
            FileOp::Pack { .. } => Self::Pack,
            FileOp::Unpack { .. } => Self::Unpack,
            FileOp::Edit(_) => Self::Edit,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Read => "file_read",
            Self::Write => "file_write",
            Self::Stat => "file_stat",
            Self::List => "file_list",
            Self::MakeDirectory => "file_mkdir",
            Self::Move => "file_move",
            Self::Copy => "file_copy",
            Self::Remove => "file_remove",
            Self::Glob => "file_glob",
            Self::Grep => "file_grep",
            Self::Watch => "file_watch",
            Self::Pack => "file_pack",
            Self::Unpack => "file_unpack",
            Self::Edit => "file_edit",
        }
    }
}

fn durations() -> Histogram {
    Histogram::new(DURATIONS)
}

fn commands() -> Histogram {
    Histogram::new(COMMANDS)
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            operations: Family::new_with_constructor(durations),
            backend: Family::new_with_constructor(durations),
            commands: Family::new_with_constructor(commands),
            output: Family::default(),
            output_read: Counter::default(),
            stdin: Counter::default(),
            file_bytes: Family::default(),
            commits: Histogram::new(COMMITS),
            changes: Histogram::new(CHANGES),
            sweeps: durations(),
            strays: Counter::default(),
            connections: Counter::default(),
            violations: Counter::default(),
            slow: Family::default(),
            sandboxes: Family::default(),
            pools: Gauge::default(),
            pool_members: Family::default(),
            pool_claims: Family::default(),
            pool_refills: Family::default(),
            commands_live: Gauge::default(),
            transfers_live: Gauge::default(),
        }
    }
}

impl Metrics {
    /// Puts all of it into a registry. The registry adds `_total` to counters and the unit to the names.
    pub fn register(&self, to: &mut Registry) {
        let seconds = || Unit::Seconds;
        let bytes = || Unit::Bytes;
        to.register_with_unit(
            "operation_duration",
            "How long callers' wishes took, by verb and outcome; a command's is its start, a file's the whole transfer",
            seconds(),
            self.operations.clone(),
        );
        to.register_with_unit(
            "backend_request_duration",
            "How long the backend took, most of all its launcher, by request and outcome",
            seconds(),
            self.backend.clone(),
        );
        to.register_with_unit(
            "command_duration",
            "How long commands ran, by how they ended",
            seconds(),
            self.commands.clone(),
        );
        to.register_with_unit("output", "What commands wrote", bytes(), self.output.clone());
        to.register_with_unit(
            "output_read",
            "What commands wrote, as handed to readers",
            bytes(),
            self.output_read.clone(),
        );
        to.register_with_unit("stdin", "What was sent to commands", bytes(), self.stdin.clone());
        to.register_with_unit(
            "file",
            "What was carried into sandboxes and out of them as files, with the records around it",
            bytes(),
            self.file_bytes.clone(),
        );
        to.register_with_unit(
            "store_commit_duration",
            "How long commits of the database took",
            seconds(),
            self.commits.clone(),
        );
        to.register("store_commit_changes", "How many changes shared a commit", self.changes.clone());
        to.register_with_unit(
            "sweep_duration",
            "How long comparing kernel, disk and rows took",
            seconds(),
            self.sweeps.clone(),
        );
        to.register("strays_removed", "Remains that nobody owned", self.strays.clone());
        to.register("guest_connections", "Connections to sandboxes' inits", self.connections.clone());
        to.register("guest_violations", "Times that an init broke the protocol", self.violations.clone());
        to.register("slow_steps", "Steps that took longer than they should, by step", self.slow.clone());
        to.register(
            "sandboxes",
            "Sandboxes, by state, without those that wait in pools",
            self.sandboxes.clone(),
        );
        to.register("pools", "Pools", self.pools.clone());
        to.register(
            "pool_members",
            "Sandboxes that wait in pools, by how they stand",
            self.pool_members.clone(),
        );
        to.register(
            "pool_claims",
            "Creates for which there is a pool: `claimed` found a sandbox ready, `missed` did not",
            self.pool_claims.clone(),
        );
        to.register("pool_refills", "Sandboxes made for pools, by outcome", self.pool_refills.clone());
        to.register("commands_running", "Commands that have no result yet", self.commands_live.clone());
        to.register("file_operations_running", "File operations under way", self.transfers_live.clone());
    }

    /// Brings those up to date that are not counted but looked up.
    pub fn look(&self, shared: &Shared) {
        let sandboxes = shared.registry().all();
        let (mut commands, mut transfers) = (0, 0);
        let mut states = crate::model::state::State::WORDS.map(|word| (word, 0));
        for live in sandboxes.iter().filter(|live| !live.is_hidden()) {
            commands += live.commands.count();
            transfers += live.transfers.count();
            let word = live.state().word();
            if let Some((_, count)) = states.iter_mut().find(|(state, _)| *state == word) {
                *count += 1;
            }
        }
        for (state, count) in states {
            self.sandboxes.get_or_create(&OfState { state }).set(count);
        }
        self.pools.set(shared.pools.count() as i64);
        for (standing, count) in shared.pools.counts() {
            self.pool_members.get_or_create(&OfState { state: standing.word() }).set(count as i64);
        }
        self.commands_live.set(commands as i64);
        self.transfers_live.set(transfers as i64);
    }

    pub fn operation(&self, verb: Verb, outcome: Verdict, took: Duration) {
        self.operations.get_or_create(&Operation { verb, outcome }).observe(took.as_secs_f64());
    }

    pub fn backend<T>(&self, request: &'static str, result: &Result<T, BackendError>, took: Duration) {
        let outcome = match result {
            Ok(_) => "ok",
            Err(BackendError::Refused { .. }) => "refused",
            Err(BackendError::LauncherGone { .. }) => "launcher_gone",
            Err(BackendError::Late { .. }) => "late",
            Err(BackendError::Layer { .. }) => "layer",
            Err(BackendError::Network { .. }) => "network",
            Err(BackendError::Gone) => "gone",
            Err(BackendError::Full { .. }) => "full",
        };
        self.backend.get_or_create(&BackendRequest { request, outcome }).observe(took.as_secs_f64());
    }

    pub fn command_ended(&self, outcome: &Outcome, took: Duration) {
        let outcome = match outcome {
            Outcome::Exited(_) => "exited",
            Outcome::Signaled(_) => "signaled",
            Outcome::TimedOut(_) | Outcome::TimedOutUnheard => "timed_out",
            Outcome::IdleTimedOut(_) => "idle_timed_out",
            Outcome::Killed(_) => "killed",
            Outcome::OutOfMemory(_) => "out_of_memory",
            Outcome::FailedToStart(_) => "failed_to_start",
            Outcome::SandboxGone => "sandbox_gone",
        };
        self.commands.get_or_create(&Ended { outcome }).observe(took.as_secs_f64());
    }

    pub fn received(&self, stream: Stream, bytes: usize) {
        let stream = match stream {
            Stream::Stdin => "stdin",
            Stream::Stdout => "stdout",
            Stream::Stderr => "stderr",
        };
        self.output.get_or_create(&OfStream { stream }).inc_by(bytes as u64);
    }

    pub fn read(&self, bytes: usize) {
        self.output_read.inc_by(bytes as u64);
    }

    pub fn stdin(&self, bytes: usize) {
        self.stdin.inc_by(bytes as u64);
    }

    pub fn file_bytes_in(&self, bytes: usize) {
        self.file_bytes.get_or_create(&Way { direction: "in" }).inc_by(bytes as u64);
    }

    pub fn file_bytes_out(&self, bytes: usize) {
        self.file_bytes.get_or_create(&Way { direction: "out" }).inc_by(bytes as u64);
    }

    pub fn committed(&self, changes: usize, took: Duration) {
        self.commits.observe(took.as_secs_f64());
        self.changes.observe(changes as f64);
    }

    pub fn swept(&self, removed: usize, took: Duration) {
        self.sweeps.observe(took.as_secs_f64());
        self.strays.inc_by(removed as u64);
    }

    pub fn connected(&self) {
        self.connections.inc();
    }

    pub fn claimed(&self) {
        self.pool_claims.get_or_create(&Ended { outcome: "claimed" }).inc();
    }

    pub fn missed(&self) {
        self.pool_claims.get_or_create(&Ended { outcome: "missed" }).inc();
    }

    pub fn refilled<E>(&self, result: &Result<(), E>) {
        let outcome = if result.is_ok() { "ok" } else { "failed" };
        self.pool_refills.get_or_create(&Ended { outcome }).inc();
    }

    pub fn violated(&self) {
        self.violations.inc();
    }

    pub fn slow(&self, step: &'static str) {
        self.slow.get_or_create(&OfStep { step }).inc();
    }
}

/// Times a file operation from its start until its caller lets go of it.
pub(crate) struct FileMeter {
    metrics: Arc<Metrics>,
    verb: FileVerb,
    began: Instant,
    verdict: OnceLock<Verdict>,
}

impl FileMeter {
    pub fn start(metrics: &Arc<Metrics>, op: &FileOp) -> Self {
        let metrics = Arc::clone(metrics);
        Self { metrics, verb: FileVerb::of(op), began: Instant::now(), verdict: OnceLock::new() }
    }

    /// What came of it. The first word counts.
    pub fn conclude<T>(&self, result: &Result<T, EngineError>) {
        self.verdict.get_or_init(|| Verdict::of(result));
    }
}

impl Drop for FileMeter {
    fn drop(&mut self) {
        let verdict = self.verdict.get().copied().unwrap_or(Verdict::Left);
        self.metrics.operation(Verb::File(self.verb), verdict, self.began.elapsed());
    }
}
