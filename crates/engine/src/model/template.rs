//! What is in a template, and how far its preparation is.

use ::image::Digest;
use wire::launch::Access;

use crate::model::defaults::LIMITS;
use crate::model::labels::Labels;
use crate::model::{Argv, GuestPath, GuestUser, SandboxEnv};

/// What is in a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// `host`, a reference or an alias.
    pub image: String,
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory.
    pub memory_bytes: u64,
    /// What a sandbox's files may take, where the store has limits; the usual where there is none.
    pub disk_bytes: Option<u64>,
    /// Added to the image's environment.
    pub env: SandboxEnv,
    /// Where commands run; the image's where there is none.
    pub cwd: Option<GuestPath>,
    /// Who commands run as; the image's where there is none.
    pub user: Option<GuestUser>,
    /// What a command runs that names no program; the image's where there is none.
    pub command: Option<Argv>,
    /// Given to every sandbox that is made from it.
    pub labels: Labels,
    /// Volumes and where they are mounted.
    pub mounts: Vec<VolumeMount>,
}

impl Default for TemplateSpec {
    fn default() -> Self {
        Self {
            image: HOST.into(),
            cpu_millis: LIMITS.cpu_millis,
            memory_bytes: LIMITS.memory_bytes,
            disk_bytes: None,
            env: SandboxEnv::default(),
            cwd: None,
            user: None,
            command: None,
            labels: Labels::default(),
            mounts: Vec::new(),
        }
    }
}

/// How far a version is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Preparation {
    /// Its image is on its way.
    Preparing,
    /// Sandboxes can be made from it at full speed.
    Ready(Prepared),
    /// It could not be prepared. It can be tried again.
    Failed {
        /// Why.
        reason: String,
    },
    /// There is a newer one.
    Replaced,
}

impl Preparation {
    /// As it is said.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Ready(_) => "ready",
            Self::Failed { .. } => "failed",
            Self::Replaced => "replaced",
        }
    }
}

/// What came of a preparation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// What the image's name meant: `host`, or a reference in its canonical spelling.
    pub resolved: String,
    /// Just which image; none for `host`.
    pub image: Option<Digest>,
}

/// A volume, mounted somewhere: as it is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VolumeMount {
    /// Its name.
    pub volume: String,
    /// Where.
    pub path: String,
    /// What may be done with it.
    pub access: Access,
}

/// The image that is the machine itself.
pub const HOST: &str = "host";
