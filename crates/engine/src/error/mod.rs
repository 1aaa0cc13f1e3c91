//! Every error of the engine: one variant per case that a caller can act on.

mod class;
mod db;
mod field;
mod image;
mod network;

use std::error::Error;
use std::fmt::Write;
use std::io;

use std::sync::Arc;

use runtime::BackendError;
use wire::files::FileError;
use wire::guest::{StartError, Versions};
use wire::{CommandId, SandboxId};

pub use self::class::{ErrorClass, Noun};
pub use self::db::DbError;
pub use self::field::{Field, Must, Resource, shown};
pub use self::image::{BuildError, ImageFault};
pub use self::network::PolicyFault;

/// Why the engine did not do what the caller asked for.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// No such sandbox, or it is another owner's: the two look the same on purpose.
    #[error("sandbox `{id}` does not exist")]
    SandboxNotFound {
        /// As it was asked for.
        id: String,
    },
    /// No such command in this sandbox.
    #[error("command `{id}` does not exist")]
    CommandNotFound {
        /// As it was asked for.
        id: String,
    },
    /// The command ended, and its retention time is over.
    #[error("command `{id}` ended, and the time that it was kept for is over")]
    CommandExpired {
        /// Which command.
        id: CommandId,
    },
    /// No such template.
    #[error("template `{name}` does not exist")]
    TemplateNotFound {
        /// As it was asked for.
        name: String,
    },
    /// Names are unique among an owner's templates.
    #[error("a template named `{name}` exists already")]
    TemplateNameTaken {
        /// The name.
        name: String,
    },
    /// Existing sandboxes or pools were made from the template.
    #[error("template `{name}` is used by {}", users(&[(*sandboxes, "sandbox", "sandboxes"), (*pools, "pool", "pools")]))]
    TemplateInUse {
        /// As it was asked for.
        name: String,
        /// How many were made from it, not counting those that wait in a pool.
        sandboxes: usize,
        /// How many pools use it.
        pools: usize,
    },
    /// No such snapshot, or it is another owner's.
    #[error("snapshot `{name}` does not exist")]
    SnapshotNotFound {
        /// As it was asked for.
        name: String,
    },
    /// A snapshot could not be taken.
    #[error("cannot take a snapshot of sandbox `{id}`")]
    Snapshot {
        /// Of which one.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// Rolling back goes to the sandbox's own past only.
    #[error("snapshot `{name}` is not of sandbox `{id}`, nor of a sandbox that it was forked from")]
    NotAncestor {
        /// The sandbox.
        id: SandboxId,
        /// The snapshot.
        name: String,
    },
    /// Only a sandbox whose parent exists can take its place.
    #[error("sandbox `{id}` has no parent that exists")]
    NoParent {
        /// The sandbox.
        id: SandboxId,
    },
    /// Only snapshots over the same image can be compared.
    #[error("`{a}` and `{b}` are over different images")]
    OtherImage {
        /// The first, as it was asked for.
        a: String,
        /// The second, as it was asked for.
        b: String,
    },
    /// The snapshot is not complete, or it failed.
    #[error("snapshot `{name}` is {state}")]
    SnapshotNotReady {
        /// The snapshot.
        name: String,
        /// What it is instead.
        state: &'static str,
    },
    /// The files of the machine itself are part of an archive only if the caller wants that.
    #[error("snapshot `{name}` is over the image `host`, so its archive would contain this machine's `/usr`")]
    HostUsr {
        /// The snapshot.
        name: String,
    },
    /// An image archive cannot hold what is in the snapshot.
    #[error("snapshot `{name}` cannot be exported: cannot {why}")]
    NotExportable {
        /// The snapshot.
        name: String,
        /// As it reads after "cannot".
        why: String,
    },
    /// The store has no cheap snapshots.
    #[error("{what} needs a store with snapshots; this daemon keeps files in plain directories")]
    SnapshotsUnsupported {
        /// What was asked for, as it begins a sentence.
        what: &'static str,
    },
    /// No such pool, or it is another owner's.
    #[error("pool `{name}` does not exist")]
    PoolNotFound {
        /// As it was asked for.
        name: String,
    },
    /// Names are unique among an owner's pools.
    #[error("a pool named `{name}` exists already")]
    PoolNameTaken {
        /// The name.
        name: String,
    },
    /// The pool is being deleted.
    #[error("pool `{name}` is being deleted")]
    PoolGoing {
        /// Its name.
        name: String,
    },
    /// Sandboxes that wait in a pool cannot mount a volume of an owner.
    #[error("template `{template}` mounts volumes, so there can be no pool for it")]
    PoolVolumes {
        /// Its name.
        template: String,
    },
    /// The template could not be prepared.
    #[error("template `{name}` could not be prepared: {reason}")]
    TemplateFailed {
        /// Its name.
        name: String,
        /// Why.
        reason: String,
    },
    /// The built-in template cannot be changed.
    #[error("the template `default` is built in")]
    TemplateBuiltIn,
    /// No such secret, or it is another owner's.
    #[error("secret `{name}` does not exist")]
    SecretNotFound {
        /// As it was asked for.
        name: String,
    },
    /// No such volume, or it is another owner's.
    #[error("volume `{name}` does not exist")]
    VolumeNotFound {
        /// As it was asked for.
        name: String,
    },
    /// Names are unique among an owner's volumes.
    #[error("a volume named `{name}` exists already")]
    VolumeNameTaken {
        /// The name.
        name: String,
    },
    /// Sandboxes mount it.
    #[error("volume `{name}` is mounted by {}", named(holders))]
    VolumeInUse {
        /// As it was asked for.
        name: String,
        /// The names of those sandboxes.
        holders: Vec<String>,
    },
    /// The volume holds more than would fit.
    #[error("volume `{name}` holds {used_bytes} bytes, which do not fit into {size_bytes}")]
    VolumeTooSmall {
        /// Which one.
        name: String,
        /// The requested size.
        size_bytes: u64,
        /// The size of its files.
        used_bytes: u64,
    },
    /// The store has no snapshots.
    #[error("volumes cannot be copied: the store is made of plain directories")]
    CopiesUnsupported,
    /// The store has no limits.
    #[error("a disk limit cannot be kept: the store has none")]
    DiskLimitsUnsupported,
    /// The backend failed.
    #[error("cannot {doing} volume `{name}`")]
    Volume {
        /// As it reads after "cannot".
        doing: &'static str,
        /// Which one.
        name: String,
        /// Why.
        source: BackendError,
    },
    /// No such key.
    #[error("key `{id}` does not exist")]
    KeyNotFound {
        /// As it was asked for.
        id: String,
    },
    /// Names are unique among an owner's sandboxes.
    #[error("a sandbox named `{name}` exists already")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The id belongs to a command that was started with another request.
    #[error("command `{id}` was started before with another request")]
    CommandIdReused {
        /// The id.
        id: CommandId,
    },
    /// The idempotency key belongs to a sandbox that was created with another request.
    #[error("the idempotency key was used before with another request")]
    IdempotencyKeyReused,
    /// The sandbox is in a state that does not allow it.
    #[error("sandbox `{id}` is {state}")]
    WrongState {
        /// Which sandbox.
        id: SandboxId,
        /// [`crate::State::word`].
        state: &'static str,
    },
    /// The sandbox is broken.
    #[error("sandbox `{id}` failed: {reason}")]
    SandboxFailed {
        /// Which sandbox.
        id: SandboxId,
        /// Why it failed.
        reason: String,
    },
    /// Something the caller can change.
    #[error("`{field}` must {must}")]
    Invalid {
        /// Which part of the request.
        field: Field,
        /// The rule, and the given value.
        must: Must,
    },
    /// The owner has reached a limit of the key.
    #[error("the key's limit of {limit} {resource} is reached")]
    Quota {
        /// Of which resource.
        resource: Resource,
        /// How much.
        limit: u64,
    },
    /// The machine, or the sandbox, cannot take more.
    #[error("the machine has no room: {what}")]
    Full {
        /// What there is no room for.
        what: String,
    },
    /// Stdin was never open, was ended, or the command closed it.
    #[error("command `{id}` takes no input")]
    StdinClosed {
        /// Which command.
        id: CommandId,
    },
    /// The window stayed full until the deadline.
    #[error("command `{id}` does not read its input")]
    StdinStalled {
        /// Which command.
        id: CommandId,
    },
    /// The command has ended, so nothing can be done to it.
    #[error("command `{id}` is over")]
    CommandEnded {
        /// Which command.
        id: CommandId,
    },
    /// It was started without a terminal.
    #[error("command `{id}` has no terminal")]
    NoTerminal {
        /// Which command.
        id: CommandId,
    },
    /// Init did not answer in time. It is unknown whether init did what was asked.
    #[error("sandbox `{id}` does not answer")]
    Unresponsive {
        /// Which sandbox.
        id: SandboxId,
    },
    /// The sandbox could not be made.
    #[error("cannot create sandbox `{id}`")]
    Create {
        /// Which sandbox. Its row stays, `failed`, until it is deleted.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// Something of the sandbox is left. The engine retries until nothing is.
    #[error("cannot delete sandbox `{id}`")]
    Delete {
        /// Which sandbox.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// The sandbox cannot be frozen, or its processes cannot be killed.
    #[error("cannot stop the processes of sandbox `{id}`")]
    Pause {
        /// Which sandbox.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// The sandbox cannot be thawed, or not launched over its files. It stays as it was.
    #[error("cannot resume sandbox `{id}`")]
    Resume {
        /// Which sandbox.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// The policy cannot be put in force. The sandbox has no network.
    #[error("cannot change the network of sandbox `{id}`")]
    Network {
        /// Which sandbox.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// The sandbox was created by a version without networks.
    #[error("sandbox `{id}` was made before Shoal had networks, and has none")]
    SandboxTooOld {
        /// Which sandbox.
        id: SandboxId,
    },
    /// The policy is wrong. The one before stays in force.
    #[error("`network` must be a valid policy: {fault}")]
    Policy {
        /// What is wrong.
        fault: PolicyFault,
    },
    /// The counters cannot be read.
    #[error("cannot tell what sandboxes use")]
    Usage {
        /// Why.
        source: BackendError,
    },
    /// The database failed.
    #[error("cannot {doing}")]
    Store {
        /// What was being done, as it reads after "cannot".
        doing: &'static str,
        /// Why.
        source: DbError,
    },
    /// A log could not be read.
    #[error("cannot {doing} the output of command `{id}`")]
    Log {
        /// What was being done, as it reads after "cannot".
        doing: &'static str,
        /// Which command.
        id: CommandId,
        /// Why.
        source: io::Error,
    },
    /// A file operation failed, and the guest reports why.
    #[error(transparent)]
    File {
        /// What is wrong, with which path.
        source: FileError,
    },
    /// A file operation did not start.
    #[error("cannot use files: {why}")]
    FileNotStarted {
        /// Why.
        why: StartError,
    },
    /// The guest ran out of memory during the operation.
    #[error("sandbox `{id}` ran out of memory while it worked on files")]
    FileOutOfMemory {
        /// Which sandbox.
        id: SandboxId,
    },
    /// Something in the guest killed the operation.
    #[error("the file operation was killed in sandbox `{id}`")]
    FileKilled {
        /// Which sandbox.
        id: SandboxId,
    },
    /// The guest's answer about its files is malformed.
    #[error("sandbox `{id}` gave an answer about its files that makes no sense")]
    FileStrange {
        /// Which sandbox.
        id: SandboxId,
    },
    /// The caller read nothing for too long.
    #[error("the caller took nothing of the file for too long")]
    FileStalled,
    /// No kept watch has this id: it was dropped, it expired, or the daemon was restarted.
    #[error("watch `{id}` does not exist")]
    WatchNotFound {
        /// As it was asked for.
        id: String,
    },
    /// The sandbox was created by a daemon that did not know this file operation, or none at all.
    #[error("sandbox `{id}` is of an older version ({version}) that does not have this file operation")]
    InitTooOld {
        /// Which sandbox.
        id: SandboxId,
        /// What its init speaks.
        version: u32,
    },
    /// No such image here, or it is another owner's: the two look the same on purpose.
    #[error("image `{name}` is not here")]
    ImageNotFound {
        /// As it was asked for.
        name: String,
    },
    /// Removing the name would remove the image's last name while sandboxes or templates need it.
    #[error("image `{name}` is used by {}",
        users(&[(*sandboxes, "sandbox", "sandboxes"), (*templates, "template", "templates")]))]
    ImageInUse {
        /// As it was asked for.
        name: String,
        /// How many were made from it, over all owners.
        sandboxes: usize,
        /// How many use it, over all owners.
        templates: usize,
    },
    /// No such alias.
    #[error("`{name}` is not an alias")]
    AliasNotFound {
        /// As it was asked for.
        name: String,
    },
    /// An image could not be added.
    #[error("cannot {doing} image `{name}`")]
    Image {
        /// `pull` or `import`.
        doing: &'static str,
        /// Its name, as shown to users.
        name: String,
        /// Why. Shared by all callers that waited for the image.
        source: Arc<ImageFault>,
    },
    /// No such build, or it is another owner's.
    #[error("build `{id}` does not exist")]
    BuildNotFound {
        /// As it was asked for.
        id: String,
    },
    /// A build could not start.
    #[error("cannot build")]
    Build {
        /// Why.
        #[from]
        source: BuildError,
    },
    /// Only keys with admin rights may change what concerns all owners.
    #[error("only a key with admin rights may {doing}")]
    AdminOnly {
        /// As it reads after "may".
        doing: &'static str,
    },
    /// The kernel did not report which boot this is.
    #[error("cannot read the machine's clock")]
    Clock {
        /// Why.
        source: io::Error,
    },
    /// The sandbox's init and this daemon have no version of their protocol in common.
    #[error("sandbox `{id}` speaks versions {} to {} of the protocol, this daemon {} to {}",
        theirs.min, theirs.max, ours.min, ours.max)]
    NoCommonVersion {
        /// Which sandbox.
        id: SandboxId,
        /// What its init speaks.
        theirs: Versions,
        /// What this daemon speaks.
        ours: Versions,
    },
    /// No program listens on the port.
    #[error("nothing listens on port {port} of sandbox `{id}`")]
    PortClosed {
        /// Which sandbox.
        id: SandboxId,
        /// The port.
        port: u16,
    },
    /// A program listens on the port and accepts no connections.
    #[error("the program on port {port} of sandbox `{id}` accepts no connections")]
    PortStuck {
        /// Which sandbox.
        id: SandboxId,
        /// The port.
        port: u16,
    },
    /// The kernel refused the connection for another reason.
    #[error("cannot connect to port {port} of sandbox `{id}`")]
    PortConnect {
        /// Which sandbox.
        id: SandboxId,
        /// The port.
        port: u16,
        /// Why.
        source: io::Error,
    },
    /// The backend has no sockets, or cannot list those that listen.
    #[error("cannot use the network of sandbox `{id}`")]
    PortSockets {
        /// Which sandbox.
        id: SandboxId,
        /// Why.
        source: BackendError,
    },
    /// Too many connections are open.
    #[error("the {whose} has {limit} connections to ports, which is the most at once")]
    PortConnections {
        /// `sandbox` or `owner`.
        whose: &'static str,
        /// The limit.
        limit: usize,
    },
    /// No program listened on the port in time.
    #[error("nothing listened on port {port} of sandbox `{id}` within {seconds} s")]
    PortWait {
        /// Which sandbox.
        id: SandboxId,
        /// The port.
        port: u16,
        /// How long the caller waited.
        seconds: f64,
    },
    /// A required hook failed, so what was asked for did not happen, or the sandbox is `failed`.
    #[error("the hook `{hook}` of sandbox `{id}` failed: {reason}")]
    HookFailed {
        /// Which sandbox.
        id: SandboxId,
        /// Which hook.
        hook: &'static str,
        /// How.
        reason: String,
    },
    /// There is no such webhook.
    #[error("webhook `{id}` does not exist")]
    WebhookNotFound {
        /// As requested.
        id: String,
    },
    /// No such link.
    #[error("link `{id}` does not exist")]
    LinkNotFound {
        /// As it was asked for.
        id: String,
    },
    /// The daemon is stopping; sandboxes stay.
    #[error("the engine is stopping")]
    Stopping,
}

/// The first few names, and how many more there are.
fn named(names: &[String]) -> String {
    const NAMED_MAX: usize = 5;
    let some: Vec<String> = names.iter().take(NAMED_MAX).map(|name| format!("`{name}`")).collect();
    match names.len().saturating_sub(NAMED_MAX) {
        0 => some.join(", "),
        more => format!("{} and {more} more", some.join(", ")),
    }
}

/// The count of each kind that is in use, without the zeros.
fn users(all: &[(usize, &str, &str)]) -> String {
    let some = |(count, one, many): &(usize, &str, &str)| match count {
        0 => None,
        1 => Some(format!("1 {one}")),
        count => Some(format!("{count} {many}")),
    };
    all.iter().filter_map(some).collect::<Vec<_>>().join(" and ")
}

/// The beginning of a text, at most this many bytes.
pub(crate) fn truncated(mut text: String, bytes_max: usize) -> String {
    let end = (0..=text.len().min(bytes_max)).rev().find(|at| text.is_char_boundary(*at));
    text.truncate(end.unwrap_or(0));
    text
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let _ = write!(text, ": {cause}"); // Writing to a String does not fail.
        source = cause.source();
    }
    text
}
