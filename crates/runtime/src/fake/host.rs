//! The machine: its sandboxes, layers and volumes, their usage, and what a test can do to them.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use wire::guest::Handle;
use wire::launch::{
    DiffSide, Difference, DifferenceKind, FileSort, FilesMark, LayerFacts, LayerFault, LayerSource, Limits,
    Motion, Processes, Rootfs, StoreFacts, StoreKind, Writable,
};
use wire::{Digest, SandboxId, SnapshotId, VolumeId};

use crate::backend::{
    BackendError, Differences, DiskUsage, GuestStream, Isolation, LayerSpec, Machine, Spec, Storage, Usage,
};
use crate::fake::faults::{FakeFailure, FakeStep, Faults};
use crate::fake::files::{FakeFile, FakeFiles};
use crate::fake::init::{Connection, Init, SIGKILL, Violation};
use crate::fake::network::Networks;
use crate::fake::script::Gates;

/// The capacity of the pipe between daemon and init, like a socket's buffer.
const PIPE_BYTES: usize = 256 * 1024;

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
pub(super) struct HostState {
    volumes: BTreeMap<VolumeId, u64>,
    volume_bytes: HashMap<VolumeId, u64>,
    mounted: Vec<(VolumeId, String)>,
    without_limits: bool,
    without_snapshots: bool,
    /// The files of snapshots, those below included.
    snapshots: BTreeMap<SnapshotId, FakeFiles>,
    /// Which launch made the files of a sandbox.
    subvolumes: HashMap<SandboxId, u64>,
    things: BTreeSet<(SandboxId, FakeThing)>,
    inits: HashMap<SandboxId, Arc<Init>>,
    pub(super) oom_kills: HashMap<SandboxId, u64>,
    usage: HashMap<SandboxId, Usage>,
    disk_bytes: HashMap<SandboxId, u64>,
    /// The files of sandboxes, of layers that were captured from them, and of the machine.
    pub(super) files: HashMap<SandboxId, FakeFiles>,
    layer_files: HashMap<Digest, FakeFiles>,
    host_files: FakeFiles,
    /// Frozen sandboxes.
    frozen: BTreeSet<SandboxId>,
    frozen_max: usize,
    pub(super) faults: Faults,
    launches: u64,
    layers: BTreeSet<Digest>,
    /// Contents that fail to unpack.
    bad_layers: BTreeSet<Digest>,
    unpacked: u64,
    listings: u64,
    pub(super) networks: Networks,
}

impl HostState {
    /// Whether something of a sandbox exists.
    pub(super) fn exists(&self, sandbox: SandboxId, thing: FakeThing) -> bool {
        self.things.contains(&(sandbox, thing))
    }

    fn mark(&self, sandbox: SandboxId) -> FilesMark {
        let mut hasher = DefaultHasher::new();
        for (path, file) in self.files.get(&sandbox).into_iter().flatten() {
            (path, &file.contents).hash(&mut hasher);
        }
        let subvolume = self.subvolumes.get(&sandbox).copied().unwrap_or(0);
        FilesMark { subvolume, transaction: hasher.finish() }
    }

    /// Lets a frozen init say nothing.
    fn silence(&self, sandbox: SandboxId, silent: bool) {
        if let Some(init) = self.inits.get(&sandbox) {
            init.silence(silent);
        }
    }

    /// Ends all processes of a sandbox. Its files stay.
    fn end_processes(&mut self, sandbox: SandboxId) {
        self.things.remove(&(sandbox, FakeThing::Limits));
        self.things.remove(&(sandbox, FakeThing::Process));
        self.frozen.remove(&sandbox);
        self.oom_kills.remove(&sandbox);
        if let Some(init) = self.inits.remove(&sandbox) {
            init.end();
        }
    }
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

    pub(super) fn state(&self) -> MutexGuard<'_, HostState> {
        self.host.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the usage of a sandbox from now on.
    pub fn set_usage(&self, sandbox: SandboxId, usage: Usage) {
        self.state().usage.insert(sandbox, usage);
    }

    /// Sets the size of a sandbox's files from now on.
    pub fn set_disk_bytes(&self, sandbox: SandboxId, bytes: u64) {
        self.state().disk_bytes.insert(sandbox, bytes);
    }

    /// Sets the size of a volume's files from now on.
    pub fn set_volume_bytes(&self, volume: VolumeId, bytes: u64) {
        self.state().volume_bytes.insert(volume, bytes);
    }

    /// The size limit of a volume.
    pub fn volume_size(&self, volume: VolumeId) -> Option<u64> {
        self.state().volumes.get(&volume).copied()
    }

    /// The volumes that sandboxes have mounted so far, and where.
    pub fn mounted(&self) -> Vec<(VolumeId, String)> {
        self.state().mounted.clone()
    }

    /// Creates or replaces a file of the machine, which the image `host` shows to sandboxes that are launched from now
    /// on.
    pub fn set_host_file(&self, path: &str, contents: &str) {
        let file = FakeFile { user: None, contents: Some(contents.into()) };
        self.state().host_files.insert(path.to_owned(), file);
    }

    /// The files of a captured layer and of the layers below it.
    pub fn files_in(&self, layer: Digest) -> FakeFiles {
        self.state().layer_files.get(&layer).cloned().unwrap_or_default()
    }

    /// From now on, there are no disk limits.
    pub fn lose_disk_limits(&self) {
        self.state().without_limits = true;
    }

    /// From now on, the store has no snapshots.
    pub fn lose_snapshots(&self) {
        self.state().without_snapshots = true;
    }

    /// The snapshots that exist.
    pub fn snapshots_there(&self) -> Vec<SnapshotId> {
        self.state().snapshots.keys().copied().collect()
    }

    /// Creates a snapshot that no engine knows.
    pub fn plant_snapshot(&self, snapshot: SnapshotId) {
        self.state().snapshots.insert(snapshot, FakeFiles::new());
    }

    /// Creates or replaces a file of a sandbox.
    pub fn set_file(&self, sandbox: SandboxId, path: &str, contents: &str) {
        let file = FakeFile { user: None, contents: Some(contents.into()) };
        self.state().files.entry(sandbox).or_default().insert(path.to_owned(), file);
    }

    /// The contents of a file of a sandbox.
    pub fn file(&self, sandbox: SandboxId, path: &str) -> Option<String> {
        let state = self.state();
        let contents = state.files.get(&sandbox)?.get(path)?.contents.clone()?;
        Some(String::from_utf8_lossy(&contents).into_owned())
    }

    /// Releases commands that wait at a gate.
    pub fn open_gate(&self, name: &str) {
        self.host.gates.open(name);
    }

    /// Everything that exists, of any sandbox.
    pub fn leftovers(&self) -> Vec<(SandboxId, FakeThing)> {
        self.state().things.iter().copied().collect()
    }

    /// Creates something that no engine knows.
    pub fn plant(&self, sandbox: SandboxId, thing: FakeThing) {
        self.state().things.insert((sandbox, thing));
    }

    /// The frozen sandboxes, and the most that were frozen at the same time.
    pub fn frozen(&self) -> (Vec<SandboxId>, usize) {
        let state = self.state();
        (state.frozen.iter().copied().collect(), state.frozen_max)
    }

    /// The layers that exist.
    pub fn layers_there(&self) -> Vec<Digest> {
        self.state().layers.iter().copied().collect()
    }

    /// Creates a layer that no engine knows.
    pub fn plant_layer(&self, layer: Digest) {
        self.state().layers.insert(layer);
    }

    /// Removes a layer without a request.
    pub fn lose_layer(&self, layer: Digest) {
        self.state().layers.remove(&layer);
    }

    /// From now on, a layer with these contents fails to unpack.
    pub fn spoil_layer(&self, contents: Digest) {
        self.state().bad_layers.insert(contents);
    }

    /// How often a layer was unpacked.
    pub fn unpacked(&self) -> u64 {
        self.state().unpacked
    }

    /// How often the layers were listed.
    pub fn listings(&self) -> u64 {
        self.state().listings
    }

    /// How often a sandbox was launched.
    pub fn launches(&self) -> u64 {
        self.state().launches
    }

    fn init(&self, sandbox: SandboxId) -> Arc<Init> {
        Arc::clone(self.state().inits.get(&sandbox).expect("the test asks about a sandbox that exists"))
    }

    /// Stops init, as SIGSTOP would, or continues it.
    pub fn silence(&self, sandbox: SandboxId, silent: bool) {
        self.init(sandbox).silence(silent);
    }

    /// Ends init, and with it the sandbox.
    pub fn kill_init(&self, sandbox: SandboxId) {
        let init = self.init(sandbox);
        init.end();
        let mut state = self.state();
        state.things.remove(&(sandbox, FakeThing::Process));
        state.inits.remove(&sandbox);
    }

    /// Restarts the machine: no process and no control group is left, and files stay.
    pub fn reboot(&self) {
        let mut state = self.state();
        let sandboxes: Vec<SandboxId> = state.inits.keys().copied().collect();
        sandboxes.into_iter().for_each(|sandbox| state.end_processes(sandbox));
    }

    /// Breaks the connection once, between two frames.
    pub fn disconnect(&self, sandbox: SandboxId) {
        self.init(sandbox).disconnect();
    }

    /// From now on, init sends these bytes on every connection after the greeting, and at once on the present one.
    pub fn say(&self, sandbox: SandboxId, bytes: Vec<u8>) {
        self.init(sandbox).say(bytes);
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

    /// The rules of the protocol that the daemon broke. Each ended its connection.
    pub fn violations(&self, sandbox: SandboxId) -> Vec<Violation> {
        self.init(sandbox).state().violations.clone()
    }

    /// How many commands init has not been allowed to forget.
    pub fn remembered(&self, sandbox: SandboxId) -> usize {
        self.init(sandbox).state().commands.len()
    }

    /// How many bytes of stdin init holds that no command has read.
    pub fn stdin_held(&self, sandbox: SandboxId) -> usize {
        let init = self.init(sandbox);
        let state = init.state();
        state.commands.values().map(|command| command.stdin.len()).sum()
    }

    /// The most bytes that any stream had waiting for an acknowledgement.
    pub fn unacknowledged(&self, sandbox: SandboxId) -> usize {
        let init = self.init(sandbox);
        let state = init.state();
        let streams = state.commands.values().flat_map(|command| &command.output);
        streams.map(|output| output.bytes.len()).max().unwrap_or(0)
    }
}

#[async_trait]
impl Isolation for FakeHost {
    async fn prepare(&self, _rootfs: &Rootfs) -> Result<(), BackendError> {
        self.step(FakeStep::Prepare, "prepare the image").await
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
        {
            let mut state = self.state();
            let there = state.exists(id, FakeThing::Disk);
            if there != (spec.writable == Writable::Kept) {
                let kind = if there { io::ErrorKind::AlreadyExists } else { io::ErrorKind::NotFound };
                let doing = "find the sandbox's files".into();
                return Err(BackendError::Refused { doing, source: io::Error::from(kind) });
            }
            let mut files = FakeFiles::new();
            if let Rootfs::Host | Rootfs::OverHost(_) = &spec.rootfs {
                files.extend(state.host_files.clone());
            }
            if let Rootfs::Layers(layers) | Rootfs::OverHost(layers) = &spec.rootfs {
                // The topmost layer comes first.
                for layer in layers.iter().rev() {
                    files.extend(state.layer_files.get(layer).cloned().unwrap_or_default());
                }
            }
            if let Some(missing) = spec.over.all().find(|snapshot| !state.snapshots.contains_key(snapshot)) {
                let source = io::Error::from(io::ErrorKind::NotFound);
                return Err(BackendError::Refused { doing: format!("find snapshot {missing}"), source });
            }
            if let Some(top) = spec.over.all().next() {
                files = state.snapshots[&top].clone();
            }
            if spec.writable == Writable::New {
                state.files.insert(id, files);
                let launch = state.launches;
                state.subvolumes.insert(id, launch);
            }
            let mounts = spec.mounts.iter().map(|mount| (mount.volume, mount.path.clone()));
            state.mounted.extend(mounts);
        }
        // The thing exists even if its step fails: a half-made sandbox is the interesting case.
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
        let lifespan = state.faults.lifespan();
        drop(state);
        let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
        if greets {
            let connection = Connection::replace(init, lifespan, self.clone(), sandbox);
            tokio::spawn(connection.serve(theirs));
        }
        Ok(Box::new(ours))
    }

    async fn teardown(&self, sandbox: SandboxId) -> Result<(), BackendError> {
        let mut state = self.state();
        if state.faults.take_teardown() {
            let source = io::Error::from(io::ErrorKind::ResourceBusy);
            return Err(BackendError::Refused { doing: "unmount the root".into(), source });
        }
        state.things.retain(|(owner, _)| *owner != sandbox);
        state.networks.forget(sandbox);
        state.frozen.remove(&sandbox);
        state.files.remove(&sandbox);
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
                state.end_processes(sandbox);
            }
            Processes::OfCommand(command) => {
                if let Some(init) = state.inits.get(&sandbox) {
                    init.signal(command, SIGKILL);
                }
            }
        }
        Ok(())
    }

    async fn freeze(&self, sandbox: SandboxId, motion: Motion) -> Result<(), BackendError> {
        match motion {
            Motion::Still => {
                {
                    let mut state = self.state();
                    assert!(state.frozen.insert(sandbox), "{sandbox} stands still for two at once");
                    state.frozen_max = state.frozen_max.max(state.frozen.len());
                    state.silence(sandbox, true);
                }
                self.step(FakeStep::Still, "freeze a sandbox").await?;
            }
            Motion::Going => {
                self.step(FakeStep::Going, "thaw a sandbox").await?;
                let mut state = self.state();
                state.frozen.remove(&sandbox);
                state.silence(sandbox, false);
            }
        }
        Ok(())
    }

    fn foresee(&self, _: &Rootfs, _: &Limits) {}

    /// Prepares nothing, so that tests see each step of a create.
    fn reserve(&self, _: &Rootfs, _: &Limits) -> Option<SandboxId> {
        None
    }

    async fn stop(&self) {}

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

#[async_trait]
impl Storage for FakeHost {
    fn store(&self) -> StoreFacts {
        let state = self.state();
        let kind = if state.without_snapshots { StoreKind::Directory } else { StoreKind::Loop };
        StoreFacts { kind, limits: !state.without_limits }
    }

    async fn disk_usage(&self, sandbox: SandboxId) -> Result<DiskUsage, BackendError> {
        self.step(FakeStep::DiskUsage, "look at its files").await?;
        let bytes = self.state().disk_bytes.get(&sandbox).copied().unwrap_or(0);
        Ok(DiskUsage { bytes, complete: true })
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
        if let LayerSource::Sandbox { sandbox, .. } = wanted.from {
            let files = state.files.get(&sandbox).cloned().unwrap_or_default();
            state.layer_files.insert(wanted.layer, files);
        }
        Ok(LayerFacts { entries: 1, bytes: 1, ..LayerFacts::default() })
    }

    async fn remove_layer(&self, layer: Digest) -> Result<(), BackendError> {
        self.step(FakeStep::RemoveLayer, "remove a layer").await?;
        let mut state = self.state();
        state.layers.remove(&layer);
        state.layer_files.remove(&layer);
        Ok(())
    }

    async fn layers(&self) -> Result<Vec<Digest>, BackendError> {
        let there = {
            let mut state = self.state();
            state.listings += 1;
            state.layers.iter().copied().collect()
        };
        self.step(FakeStep::ListLayers, "list the layers").await?;
        Ok(there)
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

    async fn settle_files(&self, _: SandboxId) -> Result<(), BackendError> {
        Ok(())
    }

    async fn take_snapshot(
        &self,
        sandbox: SandboxId,
        snapshot: SnapshotId,
    ) -> Result<FilesMark, BackendError> {
        {
            let mut state = self.state();
            let runs = state.exists(sandbox, FakeThing::Process);
            assert!(!runs || state.frozen.contains(&sandbox), "a snapshot is taken of a sandbox that runs");
            let files = state.files.get(&sandbox).cloned().unwrap_or_default();
            state.snapshots.insert(snapshot, files);
        }
        self.step(FakeStep::TakeSnapshot, "take a snapshot").await?;
        Ok(self.state().mark(sandbox))
    }

    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), BackendError> {
        self.step(FakeStep::RemoveSnapshot, "remove a snapshot").await?;
        self.state().snapshots.remove(&snapshot);
        Ok(())
    }

    async fn snapshots(&self) -> Result<Vec<SnapshotId>, BackendError> {
        Ok(self.snapshots_there())
    }

    async fn diff(
        &self,
        before: &DiffSide,
        after: &DiffSide,
        contents: bool,
    ) -> Result<Differences, BackendError> {
        let state = self.state();
        let files = |side: &DiffSide| state.snapshots.get(&side.layers[0]).cloned().unwrap_or_default();
        let (before, after) = (files(before), files(after));
        let paths: BTreeSet<&String> = before.keys().chain(after.keys()).collect();
        let text = |file: Option<&FakeFile>| {
            let bytes = file?.contents.clone()?;
            Some(String::from_utf8_lossy(&bytes).into_owned()).filter(|_| contents)
        };
        let entry = |path: &String| {
            let (old, new) = (before.get(path), after.get(path));
            let kind = match (old, new) {
                (None, _) => DifferenceKind::Added,
                (_, None) => DifferenceKind::Removed,
                (old, new) if old == new => return None,
                _ => DifferenceKind::Changed,
            };
            Some(Difference::Entry {
                path: path.clone().into_bytes(),
                kind,
                sort: FileSort::File,
                size_before: None,
                size_after: None,
                before: text(old),
                after: text(new),
            })
        };
        Ok(Differences { entries: paths.into_iter().filter_map(entry).collect(), complete: true })
    }

    async fn export(&self, side: &DiffSide, to: OwnedFd) -> Result<(), BackendError> {
        use std::io::Write;
        let mut stream = Vec::new();
        {
            let state = self.state();
            let files = side.layers.first().and_then(|top| state.snapshots.get(top)).cloned();
            for (path, file) in files.unwrap_or_default() {
                let Some(contents) = file.contents else { continue };
                let entry = archive::Entry {
                    path: path.trim_start_matches('/').as_bytes().to_vec(),
                    kind: archive::EntryKind::File,
                    mode: 0o644,
                    size: contents.len() as u64,
                    modified: 0,
                    link: Vec::new(),
                    uid: 0,
                    gid: 0,
                    attributes: Vec::new(),
                };
                stream.extend(archive::entry_header(&entry));
                stream.extend(&contents);
                stream.resize(stream.len().next_multiple_of(archive::BLOCK), 0);
            }
            stream.resize(stream.len() + 2 * archive::BLOCK, 0);
        }
        std::fs::File::from(to)
            .write_all(&stream)
            .map_err(|source| BackendError::Refused { doing: "pack a snapshot".into(), source })
    }

    async fn files_mark(&self, sandbox: SandboxId) -> Result<Option<FilesMark>, BackendError> {
        let state = self.state();
        Ok((!state.without_snapshots).then(|| state.mark(sandbox)))
    }
}
