//! Admits the children of a fork: sandboxes that begin with the files of another one.
//!
//! A child has the settings of its source and its own identity: id, name, range of ids, processes, network. What it has of
//! the source's memory is nothing.

use std::collections::BTreeMap;
use std::sync::Arc;

use ::image::Digest;
use wire::SandboxId;

use crate::db::{HookRows, SandboxRow};
use crate::image::{Choice, ImageName};
use crate::model::hook::HookPoint;
use crate::model::random::random_u128;
use crate::sandbox::admit::{Basis, Created, Newborn, enter, free_name};
use crate::sandbox::live::LiveSandbox;
use crate::template::Origin;
use crate::{EngineError, Field, Key, Labels, SandboxEnv, Wait};

/// What the children of one fork have beyond their source.
#[derive(Debug, Clone, Default)]
pub(crate) struct ChildSpec {
    /// Added to the source's variables.
    pub env: BTreeMap<String, String>,
    /// Added to the source's labels.
    pub labels: Labels,
}

/// The files that children begin with.
#[derive(Clone)]
pub(crate) struct ChildFiles {
    /// The name of the image.
    pub image: String,
    /// The image itself; `None` for `host`.
    pub held: Option<Digest>,
    /// The snapshots over it.
    pub origin: Origin,
}

/// Admits one child, within the limits of the caller's key.
pub(crate) fn admit_child(
    key: &Key,
    source: &Arc<LiveSandbox>,
    spec: &ChildSpec,
    files: ChildFiles,
) -> Result<(Arc<LiveSandbox>, Created), EngineError> {
    let shared = &source.shared;
    let parent = source.describe();
    let mut env = parent.env.clone();
    env.extend(spec.env.clone());
    let basis = Basis {
        version: source.version.clone(),
        choice: Choice { name: ImageName::parse(&files.image)?, alias: parent.image_alias.clone() },
        held: files.held,
        limits: source.limits,
        labels: parent.labels.with(&spec.labels)?,
        mounts: source.mounts.clone(),
        network: parent.network.of_family(parent.network.family(source.id)),
        origin: Some(files.origin),
        history: source.history(),
        hooks: source.hooks(),
    };
    let env = SandboxEnv::new(env).map_err(|must| must.of(Field::Env))?;
    let registry = shared.registry();
    registry.check_room(&key.owner, &basis.limits, &key.limits, &shared.config.capacity)?;
    let newborn = Newborn {
        id: SandboxId::from_random(random_u128()),
        owner: key.owner.clone(),
        name: free_name(&registry, &key.owner)?,
        template: parent.template.clone(),
    };
    let row = SandboxRow {
        env: env.pairs().clone(),
        lifetime: parent.lifetime.clone(),
        ..newborn.row(&basis, shared.clock.now())
    };
    let due = row.hooks.hooks.at(HookPoint::AfterFork).map(|_| HookPoint::AfterFork);
    let row = SandboxRow { hooks: HookRows { due, ..row.hooks.clone() }, ..row };
    Ok(enter(shared, registry, row, basis.version, Wait::Ready))
}
