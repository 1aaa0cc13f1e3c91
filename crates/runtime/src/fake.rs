//! A backend for tests: sandboxes in memory, each with an init that speaks the real frames.
//!
//! Owns a small world in which every step can be made to fail, connections break at any byte, an init falls silent, dies
//! or breaks the rules, and what is left behind can be counted. It isolates nothing and runs nothing: a command is a
//! script of the few words below, one per line or separated by `;`.
//!
//! ```text
//! echo TEXT   err TEXT        a line on stdout, on stderr
//! flood N     flooderr N      N bytes of `pattern`, as fast as they are taken
//! cat                         stdin to stdout, to its end
//! sleep MS    gate NAME       waits for a time; for `FakeHost::open_gate`
//! exit N      signal N        ends so
//! oom                         ends as the kernel ends what took too much memory
//! oomchild                    the kernel ends a child so, which the command swallows
//! hang                        waits to be killed
//! missing                     (alone) does not start
//! ```
//!
//! Of files there are these:
//!
//! ```text
//! /flood/N    N bytes of `pattern`; a write to it must be just that
//! /hang       waits to be killed, read or written
//! ```

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, Semaphore};
use wire::files::{
    COMMIT, FileDone, FileError, FileErrorKind, FileKind, FileOp, FileStat, Opened, Timestamp, put_record,
    result_bytes,
};
use wire::frame::{self, CHUNK_MAX, Decoder, Incoming, MESSAGE_TO_INIT_MAX};
use wire::guest::{
    COMMANDS_MAX, End, EndCause, ExitStatus, FromInit, Handle, OUTPUT_WINDOW, Program, STDIN_WINDOW, Start,
    StartError, Stream, ToInit, VERSION, VERSION_MIN, Versions,
};
use wire::launch::{
    LayerFacts, LayerFault, LayerSource, Limits, Motion, Processes, Rootfs, StoreFacts, StoreKind,
};
use wire::{Digest, SandboxId, VolumeId};

use crate::backend::{Backend, BackendError, DiskUsage, GuestStream, LayerSpec, Machine, Spec, Usage};

/// What the pipe between daemon and init holds, as a socket's buffer would.
const PIPE_BYTES: usize = 256 * 1024;
const SIGKILL: i32 = 9;

/// What is done to make a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FakeStep {
    /// Making its image ready.
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
    /// Unpacking a layer. Not a step of making a sandbox.
    Unpack,
    /// Removing a layer. Not a step of making a sandbox.
    RemoveLayer,
    /// The end of processes from outside; no part of making a sandbox.
    End,
    /// Not a step of making one: counting what its files take.
    DiskUsage,
    /// Making, changing or removing a volume; no part of making a sandbox.
    Volume,
    /// Having a sandbox stand still; no part of making one. It stands still also where this fails: the kernel was told.
    Still,
    /// Having it go on; no part of making one.
    Going,
}

impl FakeStep {
    /// All that make a sandbox, in their order.
    pub const ALL: [Self; 6] =
        [Self::Prepare, Self::Disk, Self::Limits, Self::Process, Self::Connect, Self::Greet];
}

/// How a step fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FakeFailure {
    /// The kernel says no.
    Refused,
    /// The launcher dies in the middle.
    LauncherGone,
    /// There is no init, and there will not be one.
    Gone,
    /// Whoever asked has a bug, and panics.
    Panic,
}

/// Something that exists on the fake host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FakeThing {
    /// A writable directory.
    Disk,
    /// A control group.
    Limits,
    /// A process.
    Process,
}

/// The byte at an offset of what `flood` writes.
pub fn pattern(offset: u64) -> u8 {
    (offset % PATTERN_PERIOD) as u8
}

/// A prime, so that no block size divides it.
const PATTERN_PERIOD: u64 = 251;

/// A machine that exists in memory. Clones are the same machine.
#[derive(Clone, Default)]
pub struct FakeHost {
    host: Arc<Host>,
}

#[derive(Default)]
struct Host {
    state: Mutex<HostState>,
    gates: Arc<Gates>,
}

#[derive(Default)]
struct HostState {
    volumes: BTreeMap<VolumeId, u64>,
    volume_bytes: HashMap<VolumeId, u64>,
    without_limits: bool,
    things: BTreeSet<(SandboxId, FakeThing)>,
    inits: HashMap<SandboxId, Arc<Init>>,
    oom_kills: HashMap<SandboxId, u64>,
    usage: HashMap<SandboxId, Usage>,
    disk_bytes: HashMap<SandboxId, u64>,
    /// Steps that fail, how, and how often still.
    failing: HashMap<FakeStep, (FakeFailure, u32)>,
    /// Sandboxes whose processes stand still.
    frozen: BTreeSet<SandboxId>,
    frozen_max: usize,
    /// Teardowns that fail, still.
    teardowns_failing: u32,
    /// Steps that wait for a permit.
    held: HashMap<FakeStep, Arc<Semaphore>>,
    /// Inits do not end commands at their timeouts.
    timeouts_ignored: bool,
    /// What new connections speak, where it is not the newest.
    versions: Option<Versions>,
    /// Each connection breaks after a random number of bytes up to this.
    break_after: Option<u64>,
    random: u64,
    launches: u64,
    layers: BTreeSet<Digest>,
    /// Layers whose contents are not what they should be.
    bad_layers: BTreeSet<Digest>,
    unpacked: u64,
}

#[derive(Default)]
struct Gates {
    open: Mutex<BTreeSet<String>>,
    changed: Notify,
}

impl FakeHost {
    /// A machine on which everything works.
    pub fn new() -> Self {
        Self::default()
    }

    /// A machine on which one step always fails.
    pub fn failing_at(step: FakeStep) -> Self {
        let host = Self::new();
        host.fail(step, FakeFailure::Refused, u32::MAX);
        host
    }

    fn state(&self) -> MutexGuard<'_, HostState> {
        self.host.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a step fail so many times.
    pub fn fail(&self, step: FakeStep, how: FakeFailure, times: u32) {
        self.state().failing.insert(step, (how, times));
    }

    /// Makes teardown fail so many times.
    pub fn fail_teardown(&self, times: u32) {
        self.state().teardowns_failing = times;
    }

    /// Makes a step wait until it is released.
    pub fn hold(&self, step: FakeStep) {
        self.state().held.insert(step, Arc::new(Semaphore::new(0)));
    }

    /// Lets whoever waits at a step go on, and all that come later.
    pub fn release(&self, step: FakeStep) {
        if let Some(held) = self.state().held.remove(&step) {
            held.close();
        }
    }

    /// Breaks every connection after a random number of bytes, up to `most`, in either direction. `None`: no more.
    pub fn break_connections(&self, most: Option<u64>, seed: u64) {
        let mut state = self.state();
        (state.break_after, state.random) = (most, seed | 1);
    }

    /// From now on, no init ends a new command at its timeout.
    pub fn ignore_timeouts(&self) {
        self.state().timeouts_ignored = true;
    }

    /// From now on, every init speaks these versions.
    pub fn speak(&self, versions: Versions) {
        self.state().versions = Some(versions);
    }

    /// Says what a sandbox uses from now on.
    pub fn set_usage(&self, sandbox: SandboxId, usage: Usage) {
        self.state().usage.insert(sandbox, usage);
    }

    /// Says what a sandbox's files take from now on.
    pub fn set_disk_bytes(&self, sandbox: SandboxId, bytes: u64) {
        self.state().disk_bytes.insert(sandbox, bytes);
    }

    /// Says what a volume's files take from now on.
    pub fn set_volume_bytes(&self, volume: VolumeId, bytes: u64) {
        self.state().volume_bytes.insert(volume, bytes);
    }

    /// From now on, nothing can be held to a disk limit.
    pub fn lose_disk_limits(&self) {
        self.state().without_limits = true;
    }

    /// Lets commands that wait at a gate go on.
    pub fn open_gate(&self, name: &str) {
        self.host.gates.open.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into());
        self.host.gates.changed.notify_waiters();
    }

    /// What exists, of any sandbox.
    pub fn leftovers(&self) -> Vec<(SandboxId, FakeThing)> {
        self.state().things.iter().copied().collect()
    }

    /// Something that nobody knows of.
    pub fn plant(&self, sandbox: SandboxId, thing: FakeThing) {
        self.state().things.insert((sandbox, thing));
    }

    /// The sandboxes that stand still, and how many did at the same time at most.
    pub fn frozen(&self) -> (Vec<SandboxId>, usize) {
        let state = self.state();
        (state.frozen.iter().copied().collect(), state.frozen_max)
    }

    /// The layers that are there.
    pub fn layers_there(&self) -> Vec<Digest> {
        self.state().layers.iter().copied().collect()
    }

    /// Something that looks like a layer, and that nobody knows of.
    pub fn plant_layer(&self, layer: Digest) {
        self.state().layers.insert(layer);
    }

    /// Takes a layer away behind everyone's back.
    pub fn lose_layer(&self, layer: Digest) {
        self.state().layers.remove(&layer);
    }

    /// From now on, a layer of these contents cannot be unpacked.
    pub fn spoil_layer(&self, contents: Digest) {
        self.state().bad_layers.insert(contents);
    }

    /// How often a layer was unpacked.
    pub fn unpacked(&self) -> u64 {
        self.state().unpacked
    }

    /// How often a sandbox was launched.
    pub fn launches(&self) -> u64 {
        self.state().launches
    }

    fn init(&self, sandbox: SandboxId) -> Arc<Init> {
        Arc::clone(self.state().inits.get(&sandbox).expect("the test asks about a sandbox that exists"))
    }

    /// Stops init, as SIGSTOP would; or lets it go on.
    pub fn silence(&self, sandbox: SandboxId, silent: bool) {
        let init = self.init(sandbox);
        init.state().silent = silent;
        init.wake.notify_waiters();
    }

    /// Ends init, and with it the sandbox.
    pub fn kill_init(&self, sandbox: SandboxId) {
        let init = self.init(sandbox);
        init.end();
        let mut state = self.state();
        state.things.remove(&(sandbox, FakeThing::Process));
        state.inits.remove(&sandbox);
    }

    /// Breaks the connection once, at a frame's border.
    pub fn disconnect(&self, sandbox: SandboxId) {
        let init = self.init(sandbox);
        init.state().generation += 1;
        init.wake.notify_waiters();
    }

    /// From now on, init says these bytes on every connection once the two are in step; and at once on this one.
    pub fn say(&self, sandbox: SandboxId, bytes: Vec<u8>) {
        let init = self.init(sandbox);
        let mut state = init.state();
        state.says = bytes;
        state.says_now = true;
        drop(state);
        init.wake.notify_waiters();
    }

    /// From now on, init claims to know these commands too.
    pub fn claim(&self, sandbox: SandboxId, handles: Vec<u32>) {
        self.init(sandbox).state().claims = handles;
    }

    /// From now on, init claims to have this much stdin of every command.
    pub fn claim_stdin(&self, sandbox: SandboxId, taken: u64) {
        self.init(sandbox).state().stdin_claimed = Some(taken);
    }

    /// How often init started a command.
    pub fn starts(&self, sandbox: SandboxId, handle: Handle) -> u32 {
        self.init(sandbox).state().starts.get(&handle).copied().unwrap_or(0)
    }

    /// Commands that init has not been allowed to forget.
    pub fn remembered(&self, sandbox: SandboxId) -> usize {
        self.init(sandbox).state().commands.len()
    }

    /// Stdin that init holds and no command has read.
    pub fn stdin_held(&self, sandbox: SandboxId) -> usize {
        let init = self.init(sandbox);
        let state = init.state();
        state.commands.values().map(|command| command.stdin.len()).sum()
    }

    /// The most that any stream had to wait for an acknowledgement, in bytes.
    pub fn unacknowledged(&self, sandbox: SandboxId) -> usize {
        let init = self.init(sandbox);
        let state = init.state();
        let streams = state.commands.values().flat_map(|command| &command.output);
        streams.map(|output| output.bytes.len()).max().unwrap_or(0)
    }

    async fn step(&self, step: FakeStep, doing: &'static str) -> Result<(), BackendError> {
        let held = self.state().held.get(&step).cloned();
        if let Some(held) = held {
            // A closed semaphore is an open door.
            let _ = held.acquire().await;
        }
        let mut state = self.state();
        match state.failing.get_mut(&step) {
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

#[async_trait]
impl Backend for FakeHost {
    async fn prepare(&self, _rootfs: &Rootfs) -> Result<(), BackendError> {
        self.step(FakeStep::Prepare, "prepare the image").await
    }

    async fn unpack_layer(
        &self,
        wanted: &LayerSpec,
        read: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<LayerFacts, BackendError> {
        self.step(FakeStep::Unpack, "unpack a layer").await?;
        read(1);
        let mut state = self.state();
        if let LayerSource::Blob { contents, .. } = wanted.from
            && state.bad_layers.contains(&contents)
        {
            let source = Box::new(LayerFault::Damaged { why: "it was spoilt".into() });
            return Err(BackendError::Layer { layer: wanted.layer, source });
        }
        if let Some(missing) = wanted.below.iter().find(|below| !state.layers.contains(below)) {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(BackendError::Refused { doing: format!("find layer {missing}"), source });
        }
        if state.layers.insert(wanted.layer) {
            state.unpacked += 1;
        }
        Ok(LayerFacts { entries: 1, bytes: 1, ..LayerFacts::default() })
    }

    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError> {
        self.step(FakeStep::RemoveLayer, "remove a layer").await?;
        self.state().layers.remove(&layer);
        Ok(())
    }

    async fn layers(&self) -> Result<Vec<Digest>, BackendError> {
        Ok(self.layers_there())
    }

    async fn launch(&self, spec: &Spec) -> Result<(), BackendError> {
        let id = spec.sandbox;
        self.state().launches += 1;
        if let Rootfs::Layers(layers) | Rootfs::OverHost(layers) = &spec.rootfs
            && let Some(missing) = layers.iter().find(|layer| !self.state().layers.contains(layer))
        {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(BackendError::Refused { doing: format!("find layer {missing}"), source });
        }
        // The thing is there even when its step fails: half-made is the interesting case.
        self.state().things.insert((id, FakeThing::Disk));
        self.step(FakeStep::Disk, "make the disk").await?;
        self.state().things.insert((id, FakeThing::Limits));
        self.step(FakeStep::Limits, "set the limits").await?;
        self.state().things.insert((id, FakeThing::Process));
        self.step(FakeStep::Process, "start init").await?;
        let init = Arc::new(Init::new(Arc::clone(&self.host.gates)));
        self.state().inits.insert(id, init);
        Ok(())
    }

    async fn connect(&self, sandbox: SandboxId) -> Result<GuestStream, BackendError> {
        self.step(FakeStep::Connect, "connect to init").await?;
        let greets = match self.step(FakeStep::Greet, "greet init").await {
            Err(BackendError::Gone) => return Err(BackendError::Gone),
            result => result.is_ok(),
        };
        let mut state = self.state();
        let Some(init) = state.inits.get(&sandbox).cloned() else { return Err(BackendError::Gone) };
        // Where connections break early, frames are small, or none would ever get through.
        let chunk_max = state.break_after.map_or(CHUNK_MAX, |most| (most as usize / 8).clamp(1, CHUNK_MAX));
        let budget = match state.break_after {
            None => u64::MAX,
            Some(most) => {
                state.random ^= state.random << 13;
                state.random ^= state.random >> 7;
                state.random ^= state.random << 17;
                state.random % most.max(1)
            }
        };
        drop(state);
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        if greets {
            let generation = init.replace_connection();
            let host = self.clone();
            tokio::spawn(async move {
                Connection { init, generation, budget, chunk_max, host, sandbox }.serve(theirs).await;
            });
        }
        Ok(Box::new(ours))
    }

    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        let mut state = self.state();
        if state.teardowns_failing > 0 {
            state.teardowns_failing -= 1;
            let source = io::Error::from(io::ErrorKind::ResourceBusy);
            return Err(BackendError::Refused { doing: "unmount the root".into(), source });
        }
        state.things.retain(|(owner, _)| *owner != sandbox);
        if let Some(init) = state.inits.remove(&sandbox) {
            init.end();
        }
        Ok(())
    }

    async fn end_processes(&self, sandbox: SandboxId, which: Processes) -> Result<(), BackendError> {
        self.step(FakeStep::End, "end processes").await?;
        let mut state = self.state();
        match which {
            Processes::All => {
                state.things.remove(&(sandbox, FakeThing::Limits));
                state.things.remove(&(sandbox, FakeThing::Process));
                if let Some(init) = state.inits.remove(&sandbox) {
                    init.end();
                }
            }
            Processes::OfCommand(command) => {
                if let Some(init) = state.inits.get(&sandbox) {
                    init.change(command, |command| command.signal = Some(SIGKILL));
                }
            }
        }
        Ok(())
    }

    async fn inventory(&self) -> Result<Vec<SandboxId>, BackendError> {
        let found: BTreeSet<_> = self.state().things.iter().map(|(sandbox, _)| *sandbox).collect();
        Ok(found.into_iter().collect())
    }

    async fn oom_kills(&self, sandbox: SandboxId) -> Result<u64, BackendError> {
        Ok(self.state().oom_kills.get(&sandbox).copied().unwrap_or(0))
    }

    async fn usage(&self, sandboxes: &[SandboxId]) -> Result<Vec<Option<Usage>>, BackendError> {
        let state = self.state();
        let lives = |id: &SandboxId| state.things.contains(&(*id, FakeThing::Process));
        let usage = |id: &SandboxId| state.usage.get(id).copied().unwrap_or_default();
        Ok(sandboxes.iter().map(|id| lives(id).then(|| usage(id))).collect())
    }

    fn foresee(&self, _: &Rootfs, _: &Limits) {}

    /// Nothing is made ahead: each step of a create is to be seen.
    fn reserve(&self, _: &Rootfs, _: &Limits) -> Option<SandboxId> {
        None
    }

    async fn stop(&self) {}

    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError> {
        match motion {
            Motion::Still => {
                {
                    let mut state = self.state();
                    assert!(state.frozen.insert(sandbox), "{sandbox} stands still for two at once");
                    state.frozen_max = state.frozen_max.max(state.frozen.len());
                }
                self.step(FakeStep::Still, "freeze a sandbox").await?;
            }
            Motion::Going => {
                self.step(FakeStep::Going, "thaw a sandbox").await?;
                self.state().frozen.remove(&sandbox);
            }
        }
        Ok(())
    }

    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError> {
        self.step(FakeStep::DiskUsage, "look at its files").await?;
        let bytes = self.state().disk_bytes.get(&sandbox).copied().unwrap_or(0);
        Ok(DiskUsage { bytes, complete: true })
    }

    fn store(&self) -> StoreFacts {
        StoreFacts { kind: StoreKind::Loop, limits: !self.state().without_limits }
    }

    async fn create_volume(
        &self,
        volume: VolumeId,
        size_bytes: u64,
        from: Option<VolumeId>,
    ) -> Result<(), BackendError> {
        self.step(FakeStep::Volume, "make a volume").await?;
        let mut state = self.state();
        if from.is_some_and(|from| !state.volumes.contains_key(&from)) {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(BackendError::Refused { doing: "find a volume's files".into(), source });
        }
        state.volumes.insert(volume, size_bytes);
        Ok(())
    }

    async fn resize_volume(&self, volume: VolumeId, size_bytes: u64) -> Result<(), BackendError> {
        self.step(FakeStep::Volume, "resize a volume").await?;
        self.state().volumes.insert(volume, size_bytes);
        Ok(())
    }

    async fn remove_volume(&self, volume: VolumeId) -> Result<(), BackendError> {
        self.step(FakeStep::Volume, "remove a volume").await?;
        self.state().volumes.remove(&volume);
        Ok(())
    }

    async fn volume_usage(&self, volume: VolumeId) -> Result<DiskUsage, BackendError> {
        let bytes = self.state().volume_bytes.get(&volume).copied().unwrap_or(0);
        Ok(DiskUsage { bytes, complete: true })
    }

    async fn volumes(&self) -> Result<Vec<VolumeId>, BackendError> {
        Ok(self.state().volumes.keys().copied().collect())
    }

    async fn machine(&self) -> Result<Machine, BackendError> {
        Ok(Machine {
            cpus: 4,
            memory_bytes: 8 << 30,
            memory_available_bytes: 6 << 30,
            disk_bytes: 100 << 30,
            disk_available_bytes: 60 << 30,
            sandboxes: Usage::default(),
        })
    }
}

/// The first process of a fake sandbox.
struct Init {
    state: Mutex<InitState>,
    /// A connection may have something to do.
    wake: Notify,
    /// A command may have something to do.
    progress: Notify,
    gates: Arc<Gates>,
}

#[derive(Default)]
struct InitState {
    commands: BTreeMap<Handle, Command>,
    /// Counts connections; only the newest is served.
    generation: u64,
    silent: bool,
    dead: bool,
    says: Vec<u8>,
    says_now: bool,
    claims: Vec<u32>,
    /// How much stdin it says it has, of any command.
    stdin_claimed: Option<u64>,
    starts: HashMap<Handle, u32>,
    pid_last: u32,
}

struct Command {
    /// It is a file operation.
    files: bool,
    pid: Option<u32>,
    output: [OutputBuffer; 2],
    stdin: VecDeque<u8>,
    stdin_taken: u64,
    stdin_given: u64,
    stdin_end: Option<u64>,
    killed: bool,
    signal: Option<i32>,
    result: Option<Result<End, StartError>>,
    /// Per connection: whether the daemon has said where to send on from, and what it was told.
    resumed: bool,
    start_told: bool,
    result_told: bool,
    stdin_told: u64,
}

#[derive(Default)]
struct OutputBuffer {
    acknowledged: u64,
    /// From `acknowledged` on.
    bytes: VecDeque<u8>,
    /// On this connection.
    sent: u64,
}

impl OutputBuffer {
    fn end(&self) -> u64 {
        self.acknowledged + self.bytes.len() as u64
    }

    fn acknowledge(&mut self, offset: u64) {
        let length = offset.saturating_sub(self.acknowledged).min(self.bytes.len() as u64);
        self.bytes.drain(..length as usize);
        self.acknowledged += length;
        self.sent = self.sent.max(self.acknowledged);
    }
}

impl Init {
    fn new(gates: Arc<Gates>) -> Self {
        Self { state: Mutex::default(), wake: Notify::new(), progress: Notify::new(), gates }
    }

    fn state(&self) -> MutexGuard<'_, InitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self) {
        self.state().dead = true;
        self.wake.notify_waiters();
        self.progress.notify_waiters();
    }

    fn replace_connection(&self) -> u64 {
        let mut state = self.state();
        state.generation += 1;
        for command in state.commands.values_mut() {
            (command.resumed, command.start_told, command.result_told) = (false, true, false);
            command.stdin_told = 0; // Said again after the resume.
        }
        let generation = state.generation;
        drop(state);
        self.wake.notify_waiters();
        generation
    }

    /// Changes a command, if it is still there, and tells whoever may care.
    fn change<T>(&self, handle: Handle, change: impl FnOnce(&mut Command) -> T) -> Option<T> {
        let result = self.state().commands.get_mut(&handle).map(change);
        self.wake.notify_waiters();
        self.progress.notify_waiters();
        result
    }

    /// Waits until `check` gives something. `None`: the command was killed, signalled, or the sandbox is gone.
    async fn until<T>(
        &self,
        handle: Handle,
        mut check: impl FnMut(&mut Command) -> Option<T>,
    ) -> Result<T, Interrupted> {
        loop {
            let mut progress = std::pin::pin!(self.progress.notified());
            progress.as_mut().enable();
            {
                let mut state = self.state();
                if state.dead {
                    return Err(Interrupted::Dead);
                }
                let Some(command) = state.commands.get_mut(&handle) else { return Err(Interrupted::Dead) };
                if command.killed {
                    return Err(Interrupted::Killed);
                }
                if let Some(signal) = command.signal {
                    return Err(Interrupted::Signal(signal));
                }
                if let Some(value) = check(command) {
                    drop(state);
                    self.wake.notify_waiters();
                    return Ok(value);
                }
            }
            progress.await;
        }
    }
}

enum Interrupted {
    Dead,
    Killed,
    Signal(i32),
}

enum Mood {
    Talking,
    Silent,
    Over,
}

/// One connection to the daemon.
struct Connection {
    init: Arc<Init>,
    generation: u64,
    /// Bytes until it breaks.
    budget: u64,
    chunk_max: usize,
    host: FakeHost,
    sandbox: SandboxId,
}

impl Connection {
    /// Serves until it is replaced or breaks. Ends by dropping the stream.
    async fn serve(mut self, stream: DuplexStream) {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut decoder: Decoder<ToInit> = Decoder::new(MESSAGE_TO_INIT_MAX);
        let mut out = Vec::new();
        let mut written = 0;
        let mut greeted = false;
        loop {
            let init = Arc::clone(&self.init);
            let mut wake = std::pin::pin!(init.wake.notified());
            wake.as_mut().enable();
            match self.mood() {
                Mood::Over => return,
                Mood::Silent => {
                    wake.await;
                    continue;
                }
                Mood::Talking => {}
            }
            if written == out.len() {
                out.clear();
                written = 0;
                if greeted {
                    self.fill(&mut out);
                }
            }
            let limit = usize::try_from(self.budget).unwrap_or(usize::MAX);
            let unwritten = &out[written..out.len().min(written.saturating_add(limit))];
            let space = decoder.space();
            let room = space.len().min(limit);
            tokio::select! {
                wrote = writer.write(unwritten), if !unwritten.is_empty() => match wrote {
                    Ok(length) if length > 0 => {
                        written += length;
                        self.budget -= length as u64;
                    }
                    Ok(_) | Err(_) => return,
                },
                read = reader.read(&mut space[..room]) => match read {
                    Ok(length) if length > 0 => {
                        decoder.filled(length);
                        self.budget -= length as u64;
                        loop {
                            match decoder.next() {
                                Ok(Some(incoming)) => self.take(incoming, &mut out, &mut greeted),
                                Ok(None) => break,
                                Err(error) => panic!("the daemon sent {error}"),
                            }
                        }
                    }
                    Ok(_) | Err(_) => return,
                },
                () = wake => {}
            }
        }
    }

    fn mood(&self) -> Mood {
        let state = self.init.state();
        if state.dead || state.generation != self.generation || self.budget == 0 {
            Mood::Over
        } else if state.silent {
            Mood::Silent
        } else {
            Mood::Talking
        }
    }

    /// The state, unless another connection has replaced this one: what comes late must not be mixed in.
    fn current(&self) -> Option<MutexGuard<'_, InitState>> {
        let state = self.init.state();
        (state.generation == self.generation).then_some(state)
    }

    fn change(&self, handle: Handle, change: impl FnOnce(&mut Command)) {
        if let Some(command) = self.current().as_mut().and_then(|state| state.commands.get_mut(&handle)) {
            change(command);
        }
        self.init.wake.notify_waiters();
        self.init.progress.notify_waiters();
    }

    fn take(&self, incoming: Incoming<'_, ToInit>, out: &mut Vec<u8>, greeted: &mut bool) {
        let hostile = !self.init.state().says.is_empty();
        match incoming {
            Incoming::Message(ToInit::Hello { version_min, version_max }) => {
                let own = Versions { min: VERSION_MIN, max: VERSION };
                let own = self.host.state().versions.unwrap_or(own);
                let version = version_max.min(own.max);
                if version < version_min || version < own.min {
                    let (version_min, version_max) = (own.min, own.max);
                    frame::put_message(&FromInit::NoCommonVersion { version_min, version_max }, out);
                    return;
                }
                self.greet(version, out);
                *greeted = true;
            }
            Incoming::Message(ToInit::Start(start)) => self.start(*start),
            Incoming::Message(ToInit::StdinEnd { handle, offset }) => {
                self.change(handle, |command| command.stdin_end = Some(offset));
            }
            Incoming::Message(ToInit::Signal { handle, signal }) => {
                self.change(handle, |command| command.signal = Some(signal));
            }
            Incoming::Message(ToInit::Kill { handle }) => {
                self.change(handle, |command| command.killed = true);
            }
            Incoming::Message(ToInit::Resize { .. }) => {}
            Incoming::Message(ToInit::Ack { handle, stream, offset }) => {
                self.change(handle, |command| {
                    if let Some(output) = output_of(command, stream) {
                        // A hostile init has said more than is in its books.
                        assert!(
                            hostile || offset <= output.sent,
                            "an acknowledgement of what was never sent"
                        );
                        output.acknowledge(offset);
                    }
                });
            }
            Incoming::Message(ToInit::AckResult { handle }) => {
                if let Some(mut state) = self.current() {
                    state.commands.remove(&handle);
                }
            }
            Incoming::Message(ToInit::Resume { handle, stdout, stderr }) => {
                self.change(handle, |command| {
                    for (output, offset) in command.output.iter_mut().zip([stdout, stderr]) {
                        // Of what the daemon has no more use for, it wants whatever there is, to be rid of it.
                        let offset = if command.files || offset == 0 {
                            offset.max(output.acknowledged)
                        } else {
                            offset
                        };
                        assert!(offset >= output.acknowledged, "what was acknowledged is gone");
                        assert!(hostile || offset <= output.end(), "more than was ever there");
                        output.acknowledge(offset);
                        output.sent = offset;
                    }
                    command.resumed = true;
                });
            }
            Incoming::Message(ToInit::Ping { serial }) => {
                frame::put_message(&FromInit::Pong { serial }, out);
            }
            Incoming::Data { handle, stream, offset, bytes } => {
                assert_eq!(stream, Stream::Stdin, "only stdin goes to a command");
                self.change(handle, |command| {
                    assert!(offset <= command.stdin_taken, "a gap in stdin");
                    let skip = (command.stdin_taken - offset) as usize;
                    let fresh = bytes.get(skip..).unwrap_or_default();
                    command.stdin.extend(fresh);
                    command.stdin_taken += fresh.len() as u64;
                    assert!(command.stdin.len() <= STDIN_WINDOW, "more stdin than the window");
                });
            }
        }
    }

    fn greet(&self, version: u32, out: &mut Vec<u8>) {
        frame::put_message(&FromInit::Hello { version }, out);
        let Some(mut state) = self.current() else { return };
        for (handle, command) in &state.commands {
            let stdin = state.stdin_claimed.unwrap_or(command.stdin_taken);
            let known = FromInit::Known { handle: *handle, pid: command.pid, stdin };
            frame::put_message(&known, out);
        }
        for handle in &state.claims {
            let known = FromInit::Known { handle: Handle(*handle), pid: None, stdin: 0 };
            frame::put_message(&known, out);
        }
        frame::put_message(&FromInit::KnownEnd, out);
        state.says_now = true;
    }

    fn start(&self, start: Start) {
        let handle = start.handle;
        let Some(mut state) = self.current() else { return };
        if state.commands.contains_key(&handle) {
            return;
        }
        *state.starts.entry(handle).or_default() += 1;
        let (script, operation) = match &start.program {
            Program::Argv(argv) => (argv.join(" "), None),
            Program::Shell { script } => (script.clone(), None),
            Program::Files(operation) => (String::new(), Some(operation.clone())),
        };
        let missing = script.trim() == "missing";
        let full = state.commands.len() >= COMMANDS_MAX;
        let pid = (!missing && !full).then(|| {
            state.pid_last += 1;
            state.pid_last + 1
        });
        let failure = if missing {
            Some(Err(StartError::ProgramNotFound { program: script.clone() }))
        } else if full {
            Some(Err(StartError::NoRoom { reason: "command slots".into() }))
        } else {
            None
        };
        let command = Command {
            files: operation.is_some(),
            pid,
            output: Default::default(),
            stdin: VecDeque::new(),
            stdin_taken: 0,
            stdin_given: 0,
            stdin_end: if start.stdin { None } else { Some(0) },
            killed: false,
            signal: None,
            result: failure,
            resumed: true,
            start_told: false,
            result_told: false,
            stdin_told: 0,
        };
        state.commands.insert(handle, command);
        drop(state);
        self.init.wake.notify_waiters();
        if pid.is_some() {
            let runner = Runner {
                init: Arc::clone(&self.init),
                host: self.host.clone(),
                sandbox: self.sandbox,
                handle,
            };
            let ignored = self.host.state().timeouts_ignored;
            let timeout = start.timeout_ms.filter(|_| !ignored).map(Duration::from_millis);
            tokio::spawn(async move {
                match operation {
                    Some(operation) => runner.run_files(*operation).await,
                    None => runner.run(&script, timeout).await,
                }
            });
        }
    }

    /// Everything that init has to say, a bounded part of it.
    fn fill(&self, out: &mut Vec<u8>) {
        let Some(mut state) = self.current() else { return };
        if state.says_now {
            state.says_now = false;
            let says = state.says.clone();
            out.extend_from_slice(&says);
        }
        for (handle, command) in &mut state.commands {
            let handle = *handle;
            if let (false, Some(pid)) = (command.start_told, command.pid) {
                frame::put_message(&FromInit::Started { handle, pid }, out);
            }
            command.start_told = true;
            if !command.resumed {
                continue;
            }
            if command.stdin_told < command.stdin_given {
                command.stdin_told = command.stdin_given;
                frame::put_message(&FromInit::StdinAck { handle, offset: command.stdin_given }, out);
            }
            let mut all_sent = true;
            for (output, stream) in command.output.iter_mut().zip([Stream::Stdout, Stream::Stderr]) {
                let from = (output.sent - output.acknowledged) as usize;
                let length = output.bytes.len().saturating_sub(from).min(self.chunk_max);
                if length > 0 {
                    out.extend_from_slice(&frame::data_header(handle, stream, output.sent, length));
                    let (front, back) = output.bytes.as_slices();
                    let to = from + length;
                    out.extend_from_slice(&front[from.min(front.len())..to.min(front.len())]);
                    out.extend_from_slice(
                        &back[from.saturating_sub(front.len())..to.saturating_sub(front.len())],
                    );
                    output.sent += length as u64;
                }
                all_sent &= output.sent == output.end();
            }
            if let (true, false, Some(result)) = (all_sent, command.result_told, &command.result) {
                command.result_told = true;
                let message = match result {
                    Ok(end) => FromInit::Ended {
                        handle,
                        end: *end,
                        stdout_end: command.output[0].end(),
                        stderr_end: command.output[1].end(),
                    },
                    Err(error) => FromInit::StartFailed { handle, error: error.clone() },
                };
                frame::put_message(&message, out);
            }
        }
    }
}

fn output_of(command: &mut Command, stream: Stream) -> Option<&mut OutputBuffer> {
    match stream {
        Stream::Stdin => None,
        Stream::Stdout => Some(&mut command.output[0]),
        Stream::Stderr => Some(&mut command.output[1]),
    }
}

/// One command's script.
struct Runner {
    init: Arc<Init>,
    host: FakeHost,
    sandbox: SandboxId,
    handle: Handle,
}

impl Runner {
    async fn run(&self, script: &str, timeout: Option<Duration>) {
        let words = self.walk(script);
        let end = match timeout {
            None => words.await,
            Some(length) => tokio::time::timeout(length, words)
                .await
                .unwrap_or(Some(End { status: ExitStatus::Signal(SIGKILL), cause: EndCause::Timeout })),
        };
        if let Some(end) = end {
            self.init.change(self.handle, |command| command.result = Some(Ok(end)));
        }
    }

    /// A file operation.
    async fn run_files(&self, operation: FileOp) {
        let done = async {
            let result = self.files(operation).await?;
            self.write(1, &result_bytes(&result)).await?;
            Ok(if result.is_ok() { 0 } else { 1 })
        };
        let end = match done.await {
            Ok(code) => End { status: ExitStatus::Code(code), cause: EndCause::Itself },
            Err(Interrupted::Dead) => return,
            Err(Interrupted::Killed) => End { status: ExitStatus::Signal(SIGKILL), cause: EndCause::Killed },
            Err(Interrupted::Signal(signal)) => {
                End { status: ExitStatus::Signal(signal), cause: EndCause::Itself }
            }
        };
        self.init.change(self.handle, |command| command.result = Some(Ok(end)));
    }

    async fn files(&self, operation: FileOp) -> Result<Result<FileDone, FileError>, Interrupted> {
        let path = match &operation {
            FileOp::Read { path, .. } | FileOp::Stat { path, .. } => path.clone(),
            FileOp::Write(options) => options.path.clone(),
            other => panic!("the fake init does not know how to {other:?}"),
        };
        let text = String::from_utf8_lossy(&path).into_owned();
        if text == "/hang" {
            self.init.until(self.handle, |_| None::<()>).await?;
        }
        let Some(size) = text.strip_prefix("/flood/").and_then(|size| size.parse::<u64>().ok()) else {
            let detail = String::new();
            return Ok(Err(FileError { kind: FileErrorKind::NotFound, path, detail }));
        };
        let stat = FileStat {
            kind: FileKind::File,
            size,
            mode: 0o644,
            uid: 0,
            gid: 0,
            inode: 1,
            links: 1,
            modified: Timestamp { seconds: 0, nanoseconds: 0 },
            target: None,
        };
        match operation {
            FileOp::Read { .. } => {
                let mut front = Vec::new();
                put_record(&Opened { stat, start: 0, length: Some(size) }, &mut front);
                self.write(0, &front).await?;
                self.flood(0, front.len() as u64, size).await?;
                Ok(Ok(FileDone::Sent { bytes: size, skipped: 0 }))
            }
            FileOp::Write(_) => {
                let mut at = 0;
                let mut last = None;
                while let Some(bytes) = self.input().await? {
                    for byte in bytes {
                        if let Some(before) = last.replace(byte) {
                            assert_eq!(before, pattern(at), "what arrives is what was sent, at {at}");
                            at += 1;
                        }
                    }
                }
                assert_eq!((at, last), (size, Some(COMMIT)), "all of it arrives");
                Ok(Ok(FileDone::Written { stat, created: true }))
            }
            _ => Ok(Ok(FileDone::Stat(stat))),
        }
    }

    async fn walk(&self, script: &str) -> Option<End> {
        let itself = |status| Some(End { status, cause: EndCause::Itself });
        for statement in script.split([';', '\n']).map(str::trim).filter(|statement| !statement.is_empty()) {
            match self.statement(statement).await {
                Ok(None) => {}
                Ok(Some(status)) => return itself(status),
                Err(Interrupted::Dead) => return None,
                Err(Interrupted::Killed) => {
                    return Some(End { status: ExitStatus::Signal(SIGKILL), cause: EndCause::Killed });
                }
                Err(Interrupted::Signal(signal)) => return itself(ExitStatus::Signal(signal)),
            }
        }
        itself(ExitStatus::Code(0))
    }

    async fn statement(&self, statement: &str) -> Result<Option<ExitStatus>, Interrupted> {
        let (word, rest) = statement.split_once(' ').unwrap_or((statement, ""));
        let number = || rest.trim().parse::<u64>().expect("a number in the script");
        match word {
            "true" => {}
            "exec" => return Ok(Some(ExitStatus::Code(0))),
            "echo" => self.write(0, format!("{rest}\n").as_bytes()).await?,
            "err" => self.write(1, format!("{rest}\n").as_bytes()).await?,
            "flood" => self.flood(0, 0, number()).await?,
            "flooderr" => self.flood(1, 0, number()).await?,
            "cat" => self.cat().await?,
            "sleep" => {
                let sleep = tokio::time::sleep(Duration::from_millis(number()));
                tokio::select! {
                    () = sleep => {}
                    interrupted = self.init.until(self.handle, |_| None::<()>) => interrupted?,
                }
            }
            "gate" => self.gate(rest).await?,
            "exit" => return Ok(Some(ExitStatus::Code(number() as i32))),
            "signal" => return Ok(Some(ExitStatus::Signal(number() as i32))),
            "oom" | "oomchild" => {
                *self.host.state().oom_kills.entry(self.sandbox).or_default() += 1;
                if word == "oom" {
                    return Ok(Some(ExitStatus::Signal(SIGKILL)));
                }
            }
            "hang" => self.init.until(self.handle, |_| None).await?,
            unknown => panic!("the fake init does not know the word `{unknown}`"),
        }
        Ok(None)
    }

    async fn write(&self, stream: usize, mut bytes: &[u8]) -> Result<(), Interrupted> {
        while !bytes.is_empty() {
            let taken = self.room(stream).await?.min(bytes.len());
            self.init.change(self.handle, |command| command.output[stream].bytes.extend(&bytes[..taken]));
            bytes = &bytes[taken..];
        }
        Ok(())
    }

    async fn room(&self, stream: usize) -> Result<usize, Interrupted> {
        let room = |command: &mut Command| {
            Some(OUTPUT_WINDOW - command.output[stream].bytes.len()).filter(|room| *room > 0)
        };
        self.init.until(self.handle, room).await
    }

    /// `base`: where in the stream the pattern begins.
    async fn flood(&self, stream: usize, base: u64, length: u64) -> Result<(), Interrupted> {
        let stretch: Vec<u8> = (0..CHUNK_MAX as u64 + PATTERN_PERIOD).map(pattern).collect();
        let mut left = length;
        while left > 0 {
            let taken = left.min(self.room(stream).await? as u64).min(CHUNK_MAX as u64);
            self.init.change(self.handle, |command| {
                let output = &mut command.output[stream];
                let from = output.end();
                // The pattern repeats, so a piece of it is found in any long enough stretch.
                let start = ((from - base) % PATTERN_PERIOD) as usize;
                output.bytes.extend(&stretch[start..start + taken as usize]);
            });
            left -= taken;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn cat(&self) -> Result<(), Interrupted> {
        while let Some(bytes) = self.input().await? {
            self.write(0, &bytes).await?;
        }
        Ok(())
    }

    /// What came on stdin, or `None` at its end.
    async fn input(&self) -> Result<Option<Vec<u8>>, Interrupted> {
        let next = |command: &mut Command| {
            if !command.stdin.is_empty() {
                let bytes: Vec<u8> = command.stdin.drain(..).collect();
                command.stdin_given += bytes.len() as u64;
                return Some(Some(bytes));
            }
            (command.stdin_end == Some(command.stdin_given)).then_some(None)
        };
        self.init.until(self.handle, next).await
    }

    async fn gate(&self, name: &str) -> Result<(), Interrupted> {
        loop {
            let gates = &self.init.gates;
            let mut changed = std::pin::pin!(gates.changed.notified());
            changed.as_mut().enable();
            if gates.open.lock().unwrap_or_else(PoisonError::into_inner).contains(name) {
                return Ok(());
            }
            tokio::select! {
                () = changed => {}
                interrupted = self.init.until(self.handle, |_| None::<()>) => interrupted?,
            }
        }
    }
}
