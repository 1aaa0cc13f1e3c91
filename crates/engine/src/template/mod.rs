//! Templates: environments that are described once, and prepared so that sandboxes start fast.
//!
//! A template has a name, which may change, and versions, which do not: every change of its contents makes a new
//! version. Sandboxes are made from the newest version and keep the one they were made from. A new version is
//! *prepared*: its image is pulled, if it is not on this machine, and held from then on. So a template keeps its
//! image when the image's name moves to another image. A task prepares a version in the background; after a crash,
//! the next daemon starts that task again.
//!
//! Read in this order: `check` has the rules (pure), `live` is one template in memory, `registry` holds all of them,
//! `prepare` has the tasks that prepare versions, `watch` follows a preparation, `calls` has the calls. `image`
//! pulls; `sandbox` admits sandboxes.

mod calls;
mod check;
mod live;
mod prepare;
mod registry;
mod watch;

use std::time::SystemTime;

use wire::TemplateId;

use crate::model::labels::Labels;
use crate::model::{Argv, GuestPath, GuestUser, Hooks, NetworkPolicy, SandboxEnv};
use crate::volume::VolumeMount;

pub use crate::model::defaults::{self, DEFAULT, LIMITS};
pub use crate::model::names::TemplateName;
pub use crate::model::template::{Preparation, Prepared, TemplateSpec};
pub use watch::{TemplateTold, TemplateWatcher};

pub(crate) use check::{check_disk, check_limits, limits_of};
pub(crate) use live::{Source, TemplateHead, Version};
pub(crate) use prepare::{prepare_again, resume_interrupted};
pub(crate) use registry::{Origin, Templates};

/// A change to a template, applied as a whole or not at all. Fields that are `None` stay as they are.
#[derive(Debug, Clone, Default)]
pub struct TemplateUpdate {
    /// The new name.
    pub name: Option<TemplateName>,
    /// The new image.
    pub image: Option<String>,
    /// Thousandths of a processor.
    pub cpu_millis: Option<u32>,
    /// The new memory limit.
    pub memory_bytes: Option<u64>,
    /// The new disk limit; `Some(None)` for the default.
    pub disk_bytes: Option<Option<u64>>,
    /// Replaces all variables.
    pub env: Option<SandboxEnv>,
    /// The new working directory; `Some(None)` for the image's.
    pub cwd: Option<Option<GuestPath>>,
    /// The new user; `Some(None)` for the image's.
    pub user: Option<Option<GuestUser>>,
    /// Replaces the whole command; `Some(None)` for the image's.
    pub command: Option<Option<Argv>>,
    /// Replaces all labels.
    pub labels: Option<Labels>,
    /// Replaces all mounts.
    pub mounts: Option<Vec<VolumeMount>>,
    /// The new policy; `Some(None)` for the operator's default.
    pub network: Option<Option<NetworkPolicy>>,
    /// How many snapshots of the history of its sandboxes are kept; 0 for none.
    pub history: Option<u32>,
    /// Replaces all hooks.
    pub hooks: Option<Hooks>,
}

impl TemplateUpdate {
    fn applied(self, spec: &TemplateSpec) -> TemplateSpec {
        let spec = spec.clone();
        TemplateSpec {
            image: self.image.unwrap_or(spec.image),
            cpu_millis: self.cpu_millis.unwrap_or(spec.cpu_millis),
            memory_bytes: self.memory_bytes.unwrap_or(spec.memory_bytes),
            disk_bytes: self.disk_bytes.unwrap_or(spec.disk_bytes),
            env: self.env.unwrap_or(spec.env),
            cwd: self.cwd.unwrap_or(spec.cwd),
            user: self.user.unwrap_or(spec.user),
            command: self.command.unwrap_or(spec.command),
            labels: self.labels.unwrap_or(spec.labels),
            mounts: self.mounts.unwrap_or(spec.mounts),
            network: self.network.unwrap_or(spec.network),
            history: self.history.unwrap_or(spec.history),
            hooks: self.hooks.unwrap_or(spec.hooks),
        }
    }
}

/// A template at one moment.
#[derive(Debug, Clone)]
pub struct Template {
    /// Stays the same when the name changes. The built-in template has none.
    pub id: Option<TemplateId>,
    /// Unique among the owner's templates.
    pub name: String,
    /// The number of the newest version; the first is 1.
    pub version: u32,
    /// The contents of the newest version.
    pub spec: TemplateSpec,
    /// Whether the newest version is ready.
    pub preparation: Preparation,
    /// How many sandboxes exist that were made from any of its versions.
    pub sandboxes: usize,
    /// When the template was made.
    pub created_at: SystemTime,
    /// When its newest version was made.
    pub updated_at: SystemTime,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_out_of_an_update_stays() {
        let spec = TemplateSpec {
            cwd: Some(GuestPath::kept("/srv".into())),
            user: Some(GuestUser::kept("ada".into())),
            disk_bytes: Some(5),
            ..TemplateSpec::default()
        };
        assert_eq!(TemplateUpdate::default().applied(&spec), spec);
        let eve = Some(GuestUser::kept("eve".into()));
        let update = TemplateUpdate { cwd: Some(None), user: Some(eve.clone()), ..Default::default() };
        let expected = TemplateSpec { cwd: None, user: eve, ..spec.clone() };
        assert_eq!(update.applied(&spec), expected);
    }
}
