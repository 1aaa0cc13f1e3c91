//! What the daemon asks of the launcher.
//!
//! One message per packet on a seqpacket socket, postcard inside. Requests speak of ids, never of paths:
//! the launcher builds every host path itself, beneath its own root descriptor. Requests are answered in any
//! order, each by its serial.

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::guest::Handle;
use crate::{Digest, InstallationId, SandboxId, VolumeId};

/// The version of these types. Daemon and launcher are one binary, so there is no range: they agree or they part.
pub const VERSION: u32 = 4;
/// A packet is at most this long.
pub const PACKET_MAX: usize = 64 * 1024;
/// Sandboxes named in one answer to [`Ask::Inventory`].
pub const INVENTORY_PAGE: usize = 512;
/// Layers named in one answer to [`Ask::Layers`].
pub const LAYERS_PAGE: usize = 1024;
/// A smaller store of kind `loop` spends most of itself on itself.
pub const STORE_BYTES_MIN: u64 = 256 << 20;
/// Nobody who asks for more means it.
pub const STORE_BYTES_MAX: u64 = 64 << 40;
/// Volumes named in one answer to [`Ask::Volumes`].
pub const VOLUMES_PAGE: usize = 1024;
/// Volumes in one sandbox.
pub const MOUNTS_MAX: usize = 64;
/// Layers below a sandbox's own writable one: as many as other systems take, and one of ours on top.
pub const LAYERS_MAX: usize = 128;
/// Layers over the image `host`, at most: each is mounted twice, since `/usr` is a union of its own.
pub const HOST_LAYERS_MAX: usize = 48;

/// From the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Comes back in the reply.
    pub serial: u64,
    /// What is asked.
    pub ask: Ask,
}

/// What the daemon may ask.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// The first request on a connection. It and its answer never change, so that any two versions understand each other this far.
    Hello {
        /// The daemon's version of these types.
        version: u32,
        /// Whose sandboxes this is about.
        installation: InstallationId,
    },
    /// Build or refresh the image `host`, unless it is still true.
    PrepareHostImage {
        /// Look at every file that it shows, and not only at what changes when packages come and go.
        thorough: bool,
    },
    /// Make namespaces ahead of a launch with this id range.
    PrepareSlot {
        /// The first host id of the range.
        base: u32,
    },
    /// Make a sandbox and start its init.
    Launch(Box<Plan>),
    /// End whatever exists of a sandbox and remove it. Harmless when nothing does.
    Teardown {
        /// Which one.
        sandbox: SandboxId,
    },
    /// What exists of this installation on the host, in the order of ids.
    Inventory {
        /// Only those after this one.
        after: Option<SandboxId>,
    },
    /// End processes of a sandbox and keep its files. Harmless when there are none.
    EndProcesses {
        /// Of which one.
        sandbox: SandboxId,
        /// Which of them.
        which: Processes,
    },
    /// Make every process of a sandbox stand still, or go on.
    Freeze {
        /// Which one.
        sandbox: SandboxId,
        /// What they are to do.
        motion: Motion,
    },
    /// What its writable files take on disk.
    DiskUsage {
        /// Which one.
        sandbox: SandboxId,
    },
    /// Make an empty volume, or a copy of another. Harmless when it is there already.
    CreateVolume {
        /// What it will be called.
        volume: VolumeId,
        /// What it may hold.
        size_bytes: u64,
        /// Whose files it begins with.
        from: Option<VolumeId>,
    },
    /// Let a volume hold more, or less. Files that are there stay, however many there are.
    ResizeVolume {
        /// Which one.
        volume: VolumeId,
        /// What it may hold.
        size_bytes: u64,
    },
    /// Remove a volume with all its files. Harmless when it is not there.
    RemoveVolume {
        /// Which one.
        volume: VolumeId,
    },
    /// What a volume's files take on disk.
    VolumeUsage {
        /// Which one.
        volume: VolumeId,
    },
    /// Which volumes there are, in the order of ids.
    Volumes {
        /// Only those after this one.
        after: Option<VolumeId>,
    },
    /// What the store is.
    Store,
    /// How much the store holds, and how much is free.
    StoreUsage,
    /// Unpack a layer. Harmless when it is there already.
    UnpackLayer(Box<UnpackLayer>),
    /// Remove a layer that nobody uses. Harmless when it is not there.
    RemoveLayer {
        /// Which one.
        layer: Digest,
    },
    /// Which layers there are, in the order of their names.
    Layers {
        /// Only those after this one.
        after: Option<Digest>,
    },
}

/// A layer to be made, and from what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnpackLayer {
    /// What it will be called: it stands for its contents and for all that lies below it.
    pub layer: Digest,
    /// What lies below it, the uppermost first: what its entries refer to may be there.
    pub below: Vec<Digest>,
    /// Whether the image `host` lies below those.
    pub over_host: bool,
    /// Where its contents come from.
    pub from: LayerSource,
    /// The first host id of a range for the process that reads it.
    pub base: u32,
}

/// Where a layer's contents come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum LayerSource {
    /// A tar stream, compressed or not.
    Blob {
        /// Of the bytes as they are: the name of a file among the blobs.
        blob: Digest,
        /// Of the tar stream in it.
        contents: Digest,
    },
    /// What every sandbox needs and an image may lack: places to mount on, name service, `/workspace`.
    Finish(Finish),
    /// What a sandbox over the layers below has written. Its processes have ended.
    Sandbox {
        /// Which.
        sandbox: SandboxId,
        /// What it may have written. Files that share their bytes take more when they are read one by one.
        bytes_max: u64,
    },
}

/// What the uppermost layer of an image depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finish {
    /// Whether everyone may write to `/workspace`, because commands do not run as root by default.
    pub open_workspace: bool,
    /// Where the image wants its programs to run. Made if it is missing, as it is elsewhere.
    pub working_directory: Option<String>,
}

/// What was found while a layer was unpacked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerFacts {
    /// Files, links and directories.
    pub entries: u64,
    /// What the files hold.
    pub bytes: u64,
    /// Device nodes, which no sandbox gets.
    pub devices_skipped: u64,
    /// Entries whose owner is beyond 65,535 and is now `nobody`.
    pub owners_changed: u64,
    /// Extended attributes that a sandbox may not have, or that the file system did not take.
    pub attributes_dropped: u64,
}

/// Why a layer cannot be unpacked. All of it is about the layer, save for [`LayerFault::Kernel`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum LayerFault {
    /// Its contents are not what the image says.
    #[error("its contents have the digest {found}, the image says {expected}")]
    Digest {
        /// What the image says.
        expected: Digest,
        /// What there is.
        found: Digest,
    },
    /// It is not a tar stream, or not whole.
    #[error("it is damaged: {why}")]
    Damaged {
        /// What is wrong.
        why: String,
    },
    /// A name that leads out of the layer, or nowhere.
    #[error("the name `{path}` is refused: {why}")]
    Name {
        /// As the layer has it.
        path: String,
        /// What is wrong.
        why: String,
    },
    /// A bomb, or something as large as one.
    #[error("it is too large: more than {limit} {what}")]
    TooLarge {
        /// Of what.
        what: String,
        /// How much there may be.
        limit: u64,
    },
    /// Something that is not unpacked by rule.
    #[error("it has {what}, which is not supported")]
    Unsupported {
        /// What.
        what: String,
    },
    /// The kernel refused.
    #[error("cannot {doing} `{path}`: {}", std::io::Error::from_raw_os_error(*errno))]
    Kernel {
        /// As it reads after "cannot".
        doing: String,
        /// In the layer.
        path: String,
        /// Why.
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
    /// They stand still, in memory, and use no processor.
    Still,
    /// They go on as if nothing had happened.
    Going,
}

/// From the launcher.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reply {
    /// Of the request.
    pub serial: u64,
    /// What came of it.
    pub result: Result<Answer, Failure>,
}

/// What the launcher answers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    /// To `Hello`.
    Hello {
        /// The launcher's version of these types.
        version: u32,
    },
    /// To requests that have nothing to tell.
    Done,
    /// To `PrepareHostImage`.
    Prepared {
        /// Grows whenever the image is built anew.
        generation: u64,
    },
    /// To `Launch`: init was executed.
    Launched {
        /// Its process on the host.
        pid: u32,
    },
    /// To `Inventory`, [`INVENTORY_PAGE`] at most; a shorter list is the last one.
    Inventory(Vec<Found>),
    /// To `DiskUsage` and `VolumeUsage`.
    DiskUsage {
        /// Of all files that were looked at.
        bytes: u64,
        /// Whether these are all that there are.
        complete: bool,
    },
    /// To `Volumes`, [`VOLUMES_PAGE`] at most; a shorter list is the last one.
    Volumes(Vec<VolumeId>),
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
        /// In all.
        bytes: u64,
        /// What is free.
        available_bytes: u64,
    },
    /// To `UnpackLayer`, any number of times before its answer.
    Unpacking {
        /// How much of the blob was read.
        bytes: u64,
    },
    /// To `UnpackLayer`.
    Unpacked(Result<LayerFacts, LayerFault>),
    /// To `Layers`, [`LAYERS_PAGE`] at most; a shorter list is the last one.
    Layers(Vec<Digest>),
}

/// Something of a sandbox that exists on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// Whose.
    pub sandbox: SandboxId,
    /// The first host id of its range, where it can be told.
    pub base: Option<u32>,
    /// Whether any process of it lives.
    pub alive: bool,
}

/// A request that failed: what was being done, and what the kernel said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("cannot {doing}")]
pub struct Failure {
    /// What was being done, as it reads after "cannot".
    pub doing: String,
    /// The kernel's error number, 0 where it was not the kernel that refused.
    pub errno: i32,
}

/// What will be done to the kernel to make one sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Plan {
    /// Whose.
    pub sandbox: SandboxId,
    /// The first of its 65,536 host ids.
    pub base: u32,
    /// What it sees as `/`.
    pub rootfs: Rootfs,
    /// What it may use.
    pub limits: Limits,
    /// Its host name.
    pub hostname: String,
    /// Volumes that it sees, [`MOUNTS_MAX`] at most. One below another comes after it.
    pub mounts: Vec<Mount>,
}

/// A volume in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Mount {
    /// Which one.
    pub volume: VolumeId,
    /// Where: absolute, without `.`, `..` and doubled slashes.
    pub path: String,
    /// What the sandbox may do with it.
    pub access: Access,
}

/// What may be done with a volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Access {
    /// Everything.
    #[default]
    ReadWrite,
    /// It is looked at, and nothing else.
    ReadOnly,
}

/// Where the writable files of sandboxes and volumes are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoreFacts {
    /// What it is.
    pub kind: StoreKind,
    /// Whether it holds sandboxes and volumes to their limits.
    pub limits: bool,
}

/// What a store is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreKind {
    /// Subvolumes in a data directory that is on btrfs.
    Btrfs,
    /// Subvolumes in a file of the data directory that holds a btrfs.
    Loop,
    /// Plain directories in the data directory.
    Directory,
}

impl StoreKind {
    /// As it is said.
    pub fn word(self) -> &'static str {
        match self {
            Self::Btrfs => "btrfs",
            Self::Loop => "loop",
            Self::Directory => "directory",
        }
    }
}

/// Which store is wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StoreWish {
    /// The best that the machine has room for.
    #[default]
    Auto,
    /// Just this one.
    Just(StoreKind),
}

impl StoreWish {
    /// As it is written.
    pub fn word(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Just(kind) => kind.word(),
        }
    }

    /// From its word.
    pub fn parse(word: &str) -> Option<Self> {
        let kinds = [StoreKind::Btrfs, StoreKind::Loop, StoreKind::Directory];
        let wishes = std::iter::once(Self::Auto).chain(kinds.map(Self::Just));
        wishes.into_iter().find(|wish| wish.word() == word)
    }
}

/// What a sandbox sees as `/`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rootfs {
    /// The machine's own `/usr` with a cleaned `/etc`, under a private writable layer.
    Host,
    /// Layers that were unpacked before, the uppermost first, under a private writable layer.
    Layers(Vec<Digest>),
    /// Layers as above, over what `Host` is. Each was captured from a sandbox over `Host` and has a directory `usr`.
    OverHost(Vec<Digest>),
}

/// What a sandbox may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory with page cache and tmpfs; swap is never given beyond it.
    pub memory_bytes: u64,
    /// Processes and threads.
    pub pids: u32,
    /// What its writable files may take on disk; no limit of its own where there is none, or where the store has no limits.
    pub disk_bytes: Option<u64>,
}

/// Writes one packet.
pub fn to_packet<T: Serialize>(message: &T) -> Vec<u8> {
    postcard::to_allocvec(message).expect("packets are made of types that postcard can write")
}

/// Reads one packet, whole.
pub fn from_packet<T: DeserializeOwned>(packet: &[u8]) -> Option<T> {
    match postcard::take_from_bytes(packet) {
        Ok((message, [])) => Some(message),
        Ok(_) | Err(_) => None,
    }
}
