//! The contents of a template, and the state of its preparation.

use ::image::Digest;
use wire::launch::Access;

use crate::model::defaults::LIMITS;
use crate::model::hook::Hooks;
use crate::model::labels::Labels;
use crate::model::network::NetworkPolicy;
use crate::model::{Argv, GuestPath, GuestUser, SandboxEnv};

/// The contents of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// `host`, a reference or an alias.
    pub image: String,
    /// Thousandths of a processor.
    pub cpu_millis: u32,
    /// Memory.
    pub memory_bytes: u64,
    /// Disk limit for a sandbox's files, if the store enforces limits; `None` for the default.
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
    /// What its sandboxes may reach; the operator's default where there is none.
    pub network: Option<NetworkPolicy>,
    /// How many snapshots of the history of its sandboxes are kept; 0 for none.
    pub history: u32,
    /// What runs in its sandboxes when something is done to them.
    pub hooks: Hooks,
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
            network: None,
            history: 0,
            hooks: Hooks::default(),
        }
    }
}

/// State of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Preparation {
    /// Its image is being fetched.
    Preparing,
    /// Sandboxes start from it at full speed.
    Ready(Prepared),
    /// It could not be prepared. It can be retried.
    Failed {
        /// Why.
        reason: String,
    },
    /// There is a newer one.
    Replaced,
}

impl Preparation {
    /// Its name.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Preparing => "preparing",
            Self::Ready(_) => "ready",
            Self::Failed { .. } => "failed",
            Self::Replaced => "replaced",
        }
    }
}

/// Result of a preparation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prepared {
    /// What the image's name resolved to: `host`, or a canonical reference.
    pub resolved: String,
    /// Digest of the image; `None` for `host`.
    pub image: Option<Digest>,
}

/// A requested mount of a volume.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct VolumeMount {
    /// Its name.
    pub volume: String,
    /// Path in the sandbox.
    pub path: String,
    /// Access.
    pub access: Access,
}

/// The name of the image that is the machine itself.
pub const HOST: &str = "host";
