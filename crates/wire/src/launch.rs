//! Requests of the daemon to the launcher.
//!
//! One message per packet on a seqpacket socket, encoded with postcard. Requests name ids, never paths: the launcher
//! builds every host path itself, beneath its own root descriptor. Requests are answered in any order, each with its
//! serial.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::guest::Handle;
use crate::network::{Family, Listener, NetworkFault, Routes};
use crate::{Digest, InstallationId, SandboxId, SnapshotId, VolumeId};

/// The version of these types. Daemon and launcher are one binary, so there is no range: they agree or they part.
pub const VERSION: u32 = 6;
/// A packet is at most this long.
pub const PACKET_MAX: usize = 64 * 1024;
/// Descriptors that come with one packet, at most.
pub const DESCRIPTORS_MAX: usize = 16;
/// Sandboxes named in one answer to [`Ask::Inventory`].
pub const INVENTORY_PAGE: usize = 512;
/// The most layers in one answer to [`Ask::Layers`].
pub const LAYERS_PAGE: usize = 1024;
/// In a smaller store of kind `loop`, most space would go to metadata.
pub const STORE_BYTES_MIN: u64 = 256 << 20;
/// A larger size is a typing error.
pub const STORE_BYTES_MAX: u64 = 64 << 40;
/// The most volumes in one answer to [`Ask::Volumes`].
pub const VOLUMES_PAGE: usize = 1024;
/// The most volumes in one sandbox.
pub const MOUNTS_MAX: usize = 64;
/// The most layers below a sandbox's own writable one: as many as other systems accept, and one of ours on top.
pub const LAYERS_MAX: usize = 128;
/// The most layers over the image `host`: each is mounted twice, since `/usr` is a union of its own.
pub const HOST_LAYERS_MAX: usize = 48;

/// The most snapshots that one sandbox lies over. Each is a layer that every lookup of a file may search, so beyond this
/// many the sandbox starts from a writable copy of a snapshot.
pub const SNAPSHOT_LAYERS_MAX: usize = 8;
/// The most snapshots in one answer to [`Ask::Snapshots`].
pub const SNAPSHOTS_PAGE: usize = 1024;

/// From the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Returned in the reply.
    pub serial: u64,
    /// The request.
    pub ask: Ask,
}

/// Requests of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The first request on a connection. This request and its answer never change, so that any two versions
    /// understand each other this far.
    Hello {
        /// The daemon's version of these types.
        version: u32,
        /// The daemon's installation.
        installation: InstallationId,
    },
    /// Build or refresh the image `host`, unless it is up to date.
    PrepareHostImage {
        /// Check every file that the image shows, and not only the files that change when packages are installed or
        /// removed.
        thorough: bool,
    },
    /// Create namespaces for this id range ahead of a launch.
    PrepareSlot {
        /// The first host id of the range.
        base: u32,
    },
    /// Create a sandbox and start its init.
    Launch(Box<Plan>),
    /// End and remove everything of a sandbox. No effect if nothing exists.
    Teardown {
        /// Which one.
        sandbox: SandboxId,
    },
    /// List what exists of this installation on the host, ordered by id.
    Inventory {
        /// Only those after this one.
        after: Option<SandboxId>,
    },
    /// End processes of a sandbox and keep its files. No effect if there are none.
    EndProcesses {
        /// Of which one.
        sandbox: SandboxId,
        /// Which of them.
        which: Processes,
    },
    /// Freeze or thaw every process of a sandbox.
    Freeze {
        /// Which one.
        sandbox: SandboxId,
        /// The new state.
        motion: Motion,
    },
    /// Measure the disk usage of a sandbox's writable files.
    DiskUsage {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Create an empty volume, or a copy of another. No effect if it exists already.
    CreateVolume {
        /// Id of the new volume.
        volume: VolumeId,
        /// Size limit.
        size_bytes: u64,
        /// Volume to copy.
        from: Option<VolumeId>,
    },
    /// Change a volume's size limit. Existing files stay, even beyond the limit.
    ResizeVolume {
        /// Which one.
        volume: VolumeId,
        /// New size limit.
        size_bytes: u64,
    },
    /// Remove a volume with all its files. No effect if it does not exist.
    RemoveVolume {
        /// Which one.
        volume: VolumeId,
    },
    /// Measure the disk usage of a volume's files.
    VolumeUsage {
        /// Which one.
        volume: VolumeId,
    },
    /// List the volumes, ordered by id.
    Volumes {
        /// Only those after this one.
        after: Option<VolumeId>,
    },
    /// Write recent changes of a sandbox's files to disk, so that a snapshot has little left to write. Does nothing if that
    /// would slow down the whole machine.
    SettleFiles {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Take a read-only snapshot of a sandbox's writable files.
    TakeSnapshot {
        /// Of which one. Its processes are frozen, or have ended.
        sandbox: SandboxId,
        /// Id of the new snapshot.
        snapshot: SnapshotId,
    },
    /// Remove a snapshot that no sandbox lies over. No effect if it does not exist.
    RemoveSnapshot {
        /// Which one.
        snapshot: SnapshotId,
    },
    /// List the snapshots, ordered by id.
    Snapshots {
        /// Only those after this one.
        after: Option<SnapshotId>,
    },
    /// Report how far the changes of a sandbox's files have got.
    FilesMark {
        /// Of which one.
        sandbox: SandboxId,
    },
    /// Compare two snapshots. The differences go into the pipe that comes with the request, as [`Difference`]s.
    Diff(Box<DiffSnapshots>),
    /// Describe the store.
    Store,
    /// Report the size of the store and its free space.
    StoreUsage,
    /// Unpack a layer. No effect if it exists already.
    UnpackLayer(Box<UnpackLayer>),
    /// Remove a layer that is not in use. No effect if it does not exist.
    RemoveLayer {
        /// Which one.
        layer: Digest,
    },
    /// List the layers, ordered by name.
    Layers {
        /// Only those after this one.
        after: Option<Digest>,
    },
    /// Give a sandbox routes, rules and listeners. The listeners come with the answer.
    OpenNetwork {
        /// Which one. It runs.
        sandbox: SandboxId,
        /// What it can send to.
        routes: Routes,
    },
    /// Replace the routes of a sandbox. Listeners that the new ones need and the old ones did not come with the answer.
    ChangeRoutes {
        /// Which one. It runs, and its network is open.
        sandbox: SandboxId,
        /// What it can send to from now on.
        routes: Routes,
    },
    /// Take routes and rules away. Its listeners are closed by those who hold them. Harmless when there are none.
    CloseNetwork {
        /// Which one. It runs.
        sandbox: SandboxId,
    },
    /// Make TCP sockets in a sandbox's namespace, not connected. They come with the answer.
    Sockets {
        /// Which one. It runs.
        sandbox: SandboxId,
        /// What they can be connected to.
        family: Family,
        /// How many, [`crate::network::SOCKETS_MAX`] at most.
        count: u8,
    },
    /// Start the egress process in its directory. The first descriptor of the request becomes its standard input, the others
    /// its own from 3 up.
    StartEgress {
        /// The host id that it runs under, which is the installation's own.
        id: u32,
    },
    /// End every egress process of the installation. Harmless when there is none.
    EndEgress,
    /// Pack the files of a snapshot. The tar stream goes into the pipe that comes with the request.
    Export(Box<ExportSnapshot>),
}

/// A layer to make, and its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpackLayer {
    /// Name of the new layer: it identifies the layer's contents and everything below it.
    pub layer: Digest,
    /// The layers below, the uppermost first: entries of the layer may refer to them.
    pub below: Vec<Digest>,
    /// Whether the image `host` is below those.
    pub over_host: bool,
    /// Source of its contents.
    pub from: LayerSource,
    /// The first host id of a range for the process that unpacks it.
    pub base: u32,
}

/// Source of a layer's contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerSource {
    /// A tar stream, compressed or not.
    Blob {
        /// Digest of the compressed bytes: the name of a file among the blobs.
        blob: Digest,
        /// Digest of the tar stream in it.
        contents: Digest,
    },
    /// What every sandbox needs and an image may not have: mount points, name service, `/workspace`.
    Finish(Finish),
    /// What a sandbox over the layers below has written. Its processes have ended.
    Sandbox {
        /// The sandbox.
        sandbox: SandboxId,
        /// Limit of what it may have written. Files that share blocks take more space when they are read one by one.
        bytes_max: u64,
    },
}

/// Parameters of the uppermost layer of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finish {
    /// Whether `/workspace` is writable for every user, because commands do not run as root by default.
    pub open_workspace: bool,
    /// Working directory of the image, created if missing, as other systems do.
    pub working_directory: Option<String>,
}

/// What was found while unpacking a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFacts {
    /// Files, links and directories.
    pub entries: u64,
    /// Total size of the files.
    pub bytes: u64,
    /// Device nodes, which no sandbox gets.
    pub devices_skipped: u64,
    /// Entries with an owner id beyond 65,535, which now belong to `nobody`.
    pub owners_changed: u64,
    /// Extended attributes that a sandbox must not have, or that the file system rejected.
    pub attributes_dropped: u64,
}

/// Why a layer cannot be unpacked. All variants except [`LayerFault::Kernel`] are faults of the layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum LayerFault {
    /// The contents do not match the digest in the image.
    #[error("its contents must have the digest {expected}, got {found}")]
    Digest {
        /// The digest in the image.
        expected: Digest,
        /// The digest of the contents.
        found: Digest,
    },
    /// Not a tar stream, or a truncated one.
    #[error("it is damaged: {why}")]
    Damaged {
        /// What is wrong.
        why: String,
    },
    /// A name that leads out of the layer, or nowhere.
    #[error("the name `{path}` is not allowed: {why}")]
    Name {
        /// As written in the layer.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// A decompression bomb, or something equally large.
    #[error("it is too large: it has more than {limit} {what}")]
    TooLarge {
        /// The unit.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// A feature that is not unpacked, by rule.
    #[error("it contains {what}, which is not supported")]
    Unsupported {
        /// The feature.
        what: String,
    },
    /// The kernel refused.
    #[error("cannot {doing} `{path}`: {}", std::io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// What was being done; reads after "cannot".
        doing: String,
        /// Path in the layer.
        path: String,
        /// The error.
        errno: i32,
    },
}

/// Some of a sandbox's processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Processes {
    /// All of them, its init included.
    All,
    /// Those of one command.
    OfCommand(Handle),
}

/// Whether processes run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Motion {
    /// Frozen: they stay in memory and use no processor time.
    Still,
    /// They run.
    Going,
}

/// From the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Serial of the request.
    pub serial: u64,
    /// The result.
    pub result: Result<Answer, Failure>,
}

/// Answers of the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Hello`.
    Hello {
        /// The launcher's version of these types.
        version: u32,
    },
    /// To requests whose result has no details.
    Done,
    /// To `Teardown`, in place of `Done`: egress holds sockets of the sandbox, and with them its network namespace.
    Held {
        /// How many.
        sockets: u32,
    },
    /// To `PrepareHostImage`.
    Prepared {
        /// Increases whenever the image is rebuilt.
        generation: u64,
    },
    /// To `Launch` and `StartEgress`: the program was executed.
    Launched {
        /// Its process on the host.
        pid: u32,
    },
    /// To `Inventory`, at most [`INVENTORY_PAGE`]; a shorter list is the last one.
    Inventory(Vec<Found>),
    /// To `DiskUsage` and `VolumeUsage`.
    DiskUsage {
        /// Total size of the files that were examined.
        bytes: u64,
        /// Whether all files were examined.
        complete: bool,
    },
    /// To `Volumes`, at most [`VOLUMES_PAGE`]; a shorter list is the last one.
    Volumes(Vec<VolumeId>),
    /// To `Snapshots`, at most [`SNAPSHOTS_PAGE`]; a shorter list is the last one.
    Snapshots(Vec<SnapshotId>),
    /// To `TakeSnapshot`, and to `FilesMark`; `None` if the store does not count changes.
    FilesMark(Option<FilesMark>),
    /// To `Store`.
    Store {
        /// Where writable files are kept.
        facts: StoreFacts,
        /// The size of a store of kind `loop` that was created just now.
        made_bytes: Option<u64>,
        /// What it cannot do on this machine, a sentence each.
        notes: Vec<String>,
    },
    /// To `StoreUsage`.
    StoreUsage {
        /// Total size.
        bytes: u64,
        /// Free space.
        available_bytes: u64,
    },
    /// To `UnpackLayer`, any number of times before its answer.
    Unpacking {
        /// Bytes of the blob that were read.
        bytes: u64,
    },
    /// To `UnpackLayer`.
    Unpacked(Result<LayerFacts, LayerFault>),
    /// To `Layers`, at most [`LAYERS_PAGE`]; a shorter list is the last one.
    Layers(Vec<Digest>),
    /// To `OpenNetwork` and `ChangeRoutes`, with a descriptor for each listener in this order. To `CloseNetwork` without any, and to
    /// `Sockets` with the sockets as descriptors.
    Network(Result<Vec<Listener>, NetworkFault>),
}

/// A trace of a sandbox on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The first host id of its range, if known.
    pub base: Option<u32>,
    /// Whether any of its processes is alive.
    pub alive: bool,
}

/// A failed request: what was being done, and the kernel's error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("cannot {doing}")]
pub struct Failure {
    /// What was being done; reads after "cannot".
    pub doing: String,
    /// The kernel's error number, 0 if the error is not the kernel's.
    pub errno: i32,
}

/// How to make one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// The first of its 65,536 host ids.
    pub base: u32,
    /// Its root file system.
    pub rootfs: Rootfs,
    /// Its limits.
    pub limits: Limits,
    /// Its host name.
    pub hostname: String,
    /// Volumes to mount, at most [`MOUNTS_MAX`]. A mount below another comes after it.
    pub mounts: Vec<Mount>,
    /// The snapshots that it lies over.
    pub over: Over,
    /// Its writable files.
    pub writable: Writable,
}

/// The snapshots that a sandbox begins with, over its root file system.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Over {
    /// Snapshots as read-only layers, the uppermost first, at most [`SNAPSHOT_LAYERS_MAX`].
    pub layers: Vec<SnapshotId>,
    /// A snapshot over those, whose copy becomes the sandbox's writable files. Without one they are empty.
    pub copy: Option<SnapshotId>,
}

impl Over {
    /// Whether the sandbox begins with the root file system alone.
    pub fn is_empty(&self) -> bool {
        self.layers.is_empty() && self.copy.is_none()
    }

    /// What a sandbox begins with that starts from a snapshot: `taken` is the snapshot, and `self` what its source lay over.
    pub fn with(&self, taken: SnapshotId) -> Self {
        // A copy that the source began with is part of its files, and so of the snapshot.
        let below = self.layers.iter().copied();
        match self.layers.len() < SNAPSHOT_LAYERS_MAX {
            true => Self { layers: std::iter::once(taken).chain(below).collect(), copy: None },
            false => Self { layers: below.collect(), copy: Some(taken) },
        }
    }

    /// All snapshots that must exist for the sandbox to be made.
    pub fn all(&self) -> impl Iterator<Item = SnapshotId> {
        self.copy.into_iter().chain(self.layers.iter().copied())
    }
}

/// Two snapshots to compare.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffSnapshots {
    /// The first.
    pub before: DiffSide,
    /// The second.
    pub after: DiffSide,
    /// Whether the contents of text files are wanted.
    pub contents: bool,
    /// The first host id of a range for the process that compares them.
    pub base: u32,
}

/// Why [`Ask::Export`] fails for a snapshot with a file whose name an archive cannot have; with `EILSEQ`.
pub const EXPORT_NAME: &str = "pack a file whose name begins with `.wh.`, which image archives reserve";
/// Why [`Ask::Export`] fails for directories that are nested too deep; with `EILSEQ`.
pub const EXPORT_DEPTH: &str = "pack directories that are nested so deep";

/// A snapshot to pack.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportSnapshot {
    /// Its files.
    pub side: DiffSide,
    /// The first host id of a range for the process that packs them.
    pub base: u32,
}

/// One side of a comparison, or all files of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiffSide {
    /// The snapshot and those below it, the uppermost first.
    pub layers: Vec<SnapshotId>,
    /// What they lie over.
    pub rootfs: Rootfs,
}

/// Something that the process that compares snapshots has found. Each follows its length, in 4 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Difference {
    /// A file that differs.
    Entry {
        /// Its path, absolute.
        path: Vec<u8>,
        /// How it differs.
        kind: DifferenceKind,
        /// What it is, on the second side if it is there.
        sort: FileSort,
        /// Its size on the first side.
        size_before: Option<u64>,
        /// Its size on the second side.
        size_after: Option<u64>,
        /// Its contents on the first side, if they are text and wanted.
        before: Option<String>,
        /// Its contents on the second side, likewise.
        after: Option<String>,
    },
    /// All was compared.
    End {
        /// Whether nothing was left out: directories too deep inside each other are.
        complete: bool,
    },
}

/// How a file differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DifferenceKind {
    /// Only the second side has it.
    Added,
    /// Both have it, with other contents, owners or permissions.
    Changed,
    /// Only the first side has it.
    Removed,
}

/// Describes a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileSort {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A FIFO, a socket or a device.
    Other,
}

/// How far the changes of files have got. Two equal marks mean that nothing changed in between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FilesMark {
    /// The number of the subvolume, which is never used again.
    pub subvolume: u64,
    /// The number of the transaction that changed it last.
    pub transaction: u64,
}

/// The writable files that a sandbox starts with.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Writable {
    /// None yet.
    #[default]
    New,
    /// Those that the sandbox had when its processes were ended.
    Kept,
}

/// A volume in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mount {
    /// The volume.
    pub volume: VolumeId,
    /// Path in the sandbox: absolute, without `.`, `..` and double slashes.
    pub path: String,
    /// What the sandbox may do with it.
    pub access: Access,
}

/// Access to a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Read and write.
    #[default]
    ReadWrite,
    /// Read-only.
    ReadOnly,
}

/// Where the writable files of sandboxes and volumes are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFacts {
    /// Its kind.
    pub kind: StoreKind,
    /// Whether it enforces the limits of sandboxes and volumes.
    pub limits: bool,
}

/// Kinds of stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreKind {
    /// Subvolumes in a data directory that is on btrfs.
    Btrfs,
    /// Subvolumes of a btrfs in a file in the data directory.
    Loop,
    /// Plain directories in the data directory.
    Directory,
}

impl StoreKind {
    /// The name of the kind.
    pub fn word(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Loop => "loop",
            Self::Directory => "directory",
        }
    }

    /// Whether it has cheap snapshots. Without them the engine copies what a sandbox has written.
    pub fn has_snapshots(self) -> bool {
        match self {
            Self::Btrfs | Self::Loop => true,
            Self::Directory => false,
        }
    }
}

/// The requested store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreWish {
    /// The best that the machine supports.
    #[default]
    Auto,
    /// This kind only.
    Just(StoreKind),
}

impl StoreWish {
    /// As written in the configuration.
    pub fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Just(kind) => kind.word(),
        }
    }

    /// Parses the name of a kind.
    pub fn parse(word: &str) -> Option<Self> {
        let kinds = [StoreKind::Btrfs, StoreKind::Loop, StoreKind::Directory];
        let wishes = std::iter::once(Self::Auto).chain(kinds.map(Self::Just));
        wishes.into_iter().find(|wish| wish.word() == word)
    }
}

/// Root file system of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rootfs {
    /// The machine's own `/usr` with a cleaned `/etc`, under a private writable layer.
    Host,
    /// Unpacked layers, the uppermost first, under a private writable layer.
    Layers(Vec<Digest>),
    /// Layers as above, over `Host`. Each was captured from a sandbox over `Host` and has a directory `usr`.
    OverHost(Vec<Digest>),
}

/// Limits of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory, including page cache and tmpfs; there is no swap beyond it.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// Disk limit for its writable files; `None` if there is none, or if the store enforces no limits.
    pub disk_bytes: Option<u64>,
}

/// Encodes one packet.
pub fn to_packet<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).expect("packets are made of types that postcard can write")
}

/// Decodes one complete packet.
pub fn from_packet<T: DeserializeOwned>(packet: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(packet) {
        Ok((message, [])) => Some(message),
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::network::{Hole, HoleAnswer, Prefix, ROUTES_MAX};

    #[test]
    fn a_chain_of_snapshots_has_a_bounded_depth() {
        let mut over = Over::default();
        for number in 1..=100 {
            let taken = SnapshotId::from_random(number);
            let next = over.with(taken);
            assert_eq!(next.all().next(), Some(taken), "the newest is on top");
            assert!(next.layers.len() <= SNAPSHOT_LAYERS_MAX);
            assert!(next.layers.ends_with(&over.layers), "what was below stays below");
            over = next;
        }
    }

    #[test]
    fn the_most_routes_fit_into_a_packet() {
        let prefix = Prefix { address: std::net::Ipv6Addr::from(u128::MAX).into(), bits: 128 };
        let routes = Routes::Open(vec![Hole { prefix, answer: HoleAnswer::Prohibited }; ROUTES_MAX]);
        let ask = Ask::OpenNetwork { sandbox: SandboxId::from_random(u128::MAX), routes };
        assert!(to_packet(&Request { serial: u64::MAX, ask }).len() <= PACKET_MAX);
    }
}
