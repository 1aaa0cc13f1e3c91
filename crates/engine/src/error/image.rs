//! Why an image or a build fails.

use std::io;

use ::image::archive_file::ArchiveError;
use ::image::dockerfile::DockerfileError;
use ::image::registry::RegistryError;
use runtime::BackendError;
use wire::launch::LayerFault;

use crate::error::EngineError;

/// Why an image could not be added.
#[derive(Debug, thiserror::Error)]
pub enum ImageFault {
    /// The registry, the connection to it, or its response.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The archive that was sent.
    #[error(transparent)]
    Archive(#[from] ArchiveError),
    /// A layer, or the disk.
    #[error("cannot unpack its layer {number} of {count}")]
    Layer {
        /// From the lowest up.
        number: usize,
        /// How many there are.
        count: usize,
        /// Why.
        source: BackendError,
    },
    /// The process that packs a snapshot, or the disk.
    #[error("cannot pack its files")]
    Pack {
        /// Why.
        source: BackendError,
    },
    /// The database.
    #[error(transparent)]
    Store(Box<EngineError>),
    /// A file of Shoal's own.
    #[error("cannot {doing}")]
    Keep {
        /// As it reads after "cannot".
        doing: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// The image was removed at the same time.
    #[error("a part of it was removed while it was added")]
    Removed,
    /// The daemon is stopping.
    #[error("the engine is stopping")]
    Stopping,
}

impl ImageFault {
    /// Whether the disk was full.
    pub fn is_disk_full(&self) -> bool {
        let full = |error: &io::Error| {
            matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        };
        match self {
            Self::Registry(RegistryError::DiskFull { .. }) | Self::Archive(ArchiveError::DiskFull { .. }) => {
                true
            }
            Self::Registry(RegistryError::Keep { source, .. })
            | Self::Archive(ArchiveError::Io { source, .. })
            | Self::Keep { source, .. } => full(source),
            Self::Layer { source: BackendError::Layer { source, .. }, .. } => match source.as_ref() {
                LayerFault::Kernel { errno, .. } => full(&io::Error::from_raw_os_error(*errno)),
                _ => false,
            },
            Self::Layer { source: BackendError::Full { .. }, .. } => true,
            Self::Registry(_)
            | Self::Archive(_)
            | Self::Layer { .. }
            | Self::Pack { .. }
            | Self::Store(_)
            | Self::Removed
            | Self::Stopping => false,
        }
    }
}

impl From<EngineError> for ImageFault {
    fn from(error: EngineError) -> Self {
        Self::Store(Box::new(error))
    }
}

/// What went wrong with a build.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The Dockerfile.
    #[error("the Dockerfile is not valid")]
    Dockerfile {
        /// What and where.
        #[from]
        source: DockerfileError,
    },
    /// The context that was sent.
    #[error("the context cannot be used: {why}")]
    Context {
        /// Why.
        why: String,
    },
    /// A step.
    #[error("line {line}: {why}")]
    Step {
        /// Of the Dockerfile.
        line: usize,
        /// What happened.
        why: String,
    },
}
