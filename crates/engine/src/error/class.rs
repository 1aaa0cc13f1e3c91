//! What kind of failure an error is, and what it is about: most protocols can report no more than that to their
//! clients.
//!
//! A dialect maps classes, and overrides the few errors that its clients know by name. Neither match has a `_` arm, so
//! a new error does not compile until it is classified here.

use runtime::BackendError;
use wire::network::NetworkFault;

use super::EngineError;
use ::image::registry::RegistryError;

use crate::error::ImageFault;

/// What kind of failure an error is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// It does not exist, or belongs to another owner.
    NotFound,
    /// Something of this name or id exists already.
    Exists,
    /// Something else needs it, so it cannot be deleted.
    InUse,
    /// The request is not acceptable as it is; a corrected one can succeed.
    Invalid,
    /// The current state does not allow it.
    WrongState,
    /// The key may not do this.
    Forbidden,
    /// This daemon's setup or version does not support it.
    Unsupported,
    /// The sandbox and this daemon have no protocol version in common.
    Incompatible,
    /// A limit of the owner is reached.
    Quota,
    /// The machine has no room for it now.
    Full,
    /// The daemon's disk is full: the operator must act.
    DiskFull,
    /// A retry may succeed.
    Unavailable,
    /// A bug, or a machine that misbehaves.
    Internal,
}

/// What an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // They are the nouns of the whole project.
pub enum Noun {
    Sandbox,
    Command,
    File,
    Image,
    Build,
    Template,
    Snapshot,
    Volume,
    Pool,
    Key,
    /// The request as a whole, or the daemon.
    Daemon,
}

impl EngineError {
    /// What kind of failure this is.
    pub fn class(&self) -> ErrorClass {
        use ErrorClass::*;
        match self {
            Self::SandboxNotFound { .. }
            | Self::CommandNotFound { .. }
            | Self::CommandExpired { .. }
            | Self::TemplateNotFound { .. }
            | Self::SnapshotNotFound { .. }
            | Self::PoolNotFound { .. }
            | Self::VolumeNotFound { .. }
            | Self::SecretNotFound { .. }
            | Self::KeyNotFound { .. }
            | Self::ImageNotFound { .. }
            | Self::AliasNotFound { .. }
            | Self::BuildNotFound { .. }
            | Self::WatchNotFound { .. }
            | Self::LinkNotFound { .. }
            | Self::WebhookNotFound { .. } => NotFound,
            Self::TemplateNameTaken { .. }
            | Self::PoolNameTaken { .. }
            | Self::VolumeNameTaken { .. }
            | Self::NameTaken { .. }
            | Self::CommandIdReused { .. }
            | Self::IdempotencyKeyReused => Exists,
            Self::TemplateInUse { .. } | Self::VolumeInUse { .. } | Self::ImageInUse { .. } => InUse,
            Self::Invalid { .. } | Self::PoolVolumes { .. } | Self::Build { .. } | Self::Policy { .. } => {
                Invalid
            }
            Self::PoolGoing { .. }
            | Self::TemplateFailed { .. }
            | Self::TemplateBuiltIn
            | Self::NotAncestor { .. }
            | Self::NoParent { .. }
            | Self::OtherImage { .. }
            | Self::SnapshotNotReady { .. }
            | Self::HostUsr { .. }
            | Self::NotExportable { .. }
            | Self::VolumeTooSmall { .. }
            | Self::WrongState { .. }
            | Self::SandboxFailed { .. }
            | Self::HookFailed { .. }
            | Self::StdinClosed { .. }
            | Self::CommandEnded { .. }
            | Self::NoTerminal { .. }
            | Self::File { .. }
            | Self::FileNotStarted { .. }
            | Self::FileOutOfMemory { .. }
            | Self::FileKilled { .. }
            | Self::FileStrange { .. }
            | Self::PortClosed { .. }
            | Self::PortWait { .. } => WrongState,
            Self::AdminOnly { .. } => Forbidden,
            Self::CopiesUnsupported | Self::DiskLimitsUnsupported | Self::SnapshotsUnsupported { .. } => {
                Unsupported
            }
            Self::InitTooOld { .. } | Self::NoCommonVersion { .. } | Self::SandboxTooOld { .. } => {
                Incompatible
            }
            Self::Quota { .. } | Self::PortConnections { .. } => Quota,
            Self::Full { .. } => Full,
            Self::StdinStalled { .. }
            | Self::FileStalled
            | Self::Unresponsive { .. }
            | Self::PortStuck { .. }
            | Self::Stopping => Unavailable,
            Self::Create { source, .. }
            | Self::Delete { source, .. }
            | Self::Pause { source, .. }
            | Self::Network { source, .. }
            | Self::Snapshot { source, .. }
            | Self::Resume { source, .. }
            | Self::Usage { source }
            | Self::PortSockets { source, .. }
            | Self::Volume { source, .. } => backend(source),
            Self::Store { source, .. } if source.is_disk_full() => DiskFull,
            Self::Store { .. } | Self::Log { .. } | Self::Clock { .. } | Self::PortConnect { .. } => Internal,
            Self::Image { source, .. } => image(source),
        }
    }

    /// What this is about.
    pub fn noun(&self) -> Noun {
        match self {
            Self::SandboxNotFound { .. }
            | Self::NameTaken { .. }
            | Self::WrongState { .. }
            | Self::NoParent { .. }
            | Self::SandboxFailed { .. }
            | Self::DiskLimitsUnsupported
            | Self::Unresponsive { .. }
            | Self::Create { .. }
            | Self::Delete { .. }
            | Self::Pause { .. }
            | Self::Resume { .. }
            | Self::Usage { .. }
            | Self::Network { .. }
            | Self::SandboxTooOld { .. }
            | Self::Policy { .. }
            | Self::NoCommonVersion { .. }
            | Self::PortClosed { .. }
            | Self::PortStuck { .. }
            | Self::PortConnect { .. }
            | Self::PortSockets { .. }
            | Self::PortConnections { .. }
            | Self::PortWait { .. }
            | Self::HookFailed { .. }
            | Self::LinkNotFound { .. } => Noun::Sandbox,
            Self::CommandNotFound { .. }
            | Self::CommandExpired { .. }
            | Self::CommandIdReused { .. }
            | Self::StdinClosed { .. }
            | Self::StdinStalled { .. }
            | Self::CommandEnded { .. }
            | Self::NoTerminal { .. }
            | Self::Log { .. } => Noun::Command,
            Self::File { .. }
            | Self::FileNotStarted { .. }
            | Self::FileOutOfMemory { .. }
            | Self::FileKilled { .. }
            | Self::FileStrange { .. }
            | Self::FileStalled
            | Self::WatchNotFound { .. }
            | Self::InitTooOld { .. } => Noun::File,
            Self::ImageNotFound { .. }
            | Self::ImageInUse { .. }
            | Self::AliasNotFound { .. }
            | Self::Image { .. } => Noun::Image,
            Self::BuildNotFound { .. } | Self::Build { .. } => Noun::Build,
            Self::TemplateNotFound { .. }
            | Self::TemplateNameTaken { .. }
            | Self::TemplateInUse { .. }
            | Self::TemplateFailed { .. }
            | Self::TemplateBuiltIn => Noun::Template,
            Self::SnapshotNotFound { .. }
            | Self::Snapshot { .. }
            | Self::NotAncestor { .. }
            | Self::OtherImage { .. }
            | Self::SnapshotNotReady { .. }
            | Self::HostUsr { .. }
            | Self::NotExportable { .. }
            | Self::SnapshotsUnsupported { .. } => Noun::Snapshot,
            Self::VolumeNotFound { .. }
            | Self::VolumeNameTaken { .. }
            | Self::VolumeInUse { .. }
            | Self::VolumeTooSmall { .. }
            | Self::CopiesUnsupported
            | Self::Volume { .. } => Noun::Volume,
            Self::PoolNotFound { .. }
            | Self::PoolNameTaken { .. }
            | Self::PoolGoing { .. }
            | Self::PoolVolumes { .. } => Noun::Pool,
            Self::KeyNotFound { .. } | Self::AdminOnly { .. } | Self::SecretNotFound { .. } => Noun::Key,
            Self::IdempotencyKeyReused
            | Self::Invalid { .. }
            | Self::Quota { .. }
            | Self::Full { .. }
            | Self::Store { .. }
            | Self::Clock { .. }
            | Self::WebhookNotFound { .. }
            | Self::Stopping => Noun::Daemon,
        }
    }
}

fn backend(error: &BackendError) -> ErrorClass {
    match error {
        BackendError::Full { .. } => ErrorClass::Full,
        BackendError::LauncherGone { .. } | BackendError::Late { .. } => ErrorClass::Unavailable,
        BackendError::Layer { .. } | BackendError::Refused { .. } | BackendError::Gone => {
            ErrorClass::Internal
        }
        BackendError::Network { source, .. } => network(source),
    }
}

fn network(fault: &NetworkFault) -> ErrorClass {
    match fault {
        NetworkFault::NoNfTables | NetworkFault::NoTproxy => ErrorClass::Unsupported,
        NetworkFault::TooOld => ErrorClass::Incompatible,
        NetworkFault::PortTaken { .. } | NetworkFault::NotRunning => ErrorClass::WrongState,
        NetworkFault::Routes { .. } => ErrorClass::Invalid,
        NetworkFault::Kernel { .. } => ErrorClass::Internal,
    }
}

fn image(fault: &ImageFault) -> ErrorClass {
    match fault {
        fault if fault.is_disk_full() => ErrorClass::DiskFull,
        ImageFault::Registry(error) => match error {
            RegistryError::Unreachable { .. }
            | RegistryError::Broken { .. }
            | RegistryError::Late { .. }
            | RegistryError::Busy { .. } => ErrorClass::Unavailable,
            RegistryError::NotFound { .. } => ErrorClass::NotFound,
            RegistryError::Keep { .. } | RegistryError::Tls { .. } => ErrorClass::Internal,
            _ => ErrorClass::Invalid,
        },
        ImageFault::Archive(_) => ErrorClass::Invalid,
        ImageFault::Layer { source, .. } | ImageFault::Pack { source } => backend(source),
        ImageFault::Removed | ImageFault::Stopping => ErrorClass::Unavailable,
        ImageFault::Store(_) | ImageFault::Keep { .. } => ErrorClass::Internal,
    }
}

#[cfg(test)]
mod tests {
    use wire::SandboxId;

    use super::*;

    #[test]
    fn an_error_has_a_class_and_a_noun() {
        let id = SandboxId::from_random(1);
        for (error, class, noun) in [
            (EngineError::SandboxNotFound { id: "x".into() }, ErrorClass::NotFound, Noun::Sandbox),
            (EngineError::VolumeNameTaken { name: "x".into() }, ErrorClass::Exists, Noun::Volume),
            (
                EngineError::Create { id, source: BackendError::Full { what: "ranges" } },
                ErrorClass::Full,
                Noun::Sandbox,
            ),
            (EngineError::Create { id, source: BackendError::Gone }, ErrorClass::Internal, Noun::Sandbox),
            (EngineError::Stopping, ErrorClass::Unavailable, Noun::Daemon),
        ] {
            assert_eq!((error.class(), error.noun()), (class, noun), "{error}");
        }
    }
}
