//! Admits the sandboxes that a pool makes.

use std::sync::Arc;

use wire::SandboxId;

use crate::db::{SandboxRow, Visibility};
use crate::model::random::random_u128;
use crate::pool::{Pool, Standing};
use crate::sandbox::admit::{Based, Created, ImageMissing, Newborn, basis, enter, free_name};
use crate::sandbox::live::LiveSandbox;
use crate::{EngineError, Labels, NetworkPolicy, SandboxSpec, Shared, TemplateName, Wait};

/// Admits a sandbox that will wait in a pool. The sandbox counts against the owner's quota and the machine's
/// capacity.
pub(super) fn admit_member(
    shared: &Arc<Shared>,
    pool: &Arc<Pool>,
) -> Result<(Arc<LiveSandbox>, Created), EngineError> {
    let registry = shared.registry();
    let spec = SandboxSpec { template: TemplateName::kept(&pool.template()), ..SandboxSpec::default() };
    let source = shared.templates.find(&pool.owner, spec.template.as_str())?;
    let Based::On(basis) = basis(shared, &registry, &pool.owner, source, &spec, ImageMissing::Tell)? else {
        return Err(EngineError::Full { what: format!("template `{}` is not ready", spec.template) });
    };
    registry.check_room(&pool.owner, &basis.limits, &pool.limits(), &shared.config.capacity)?;
    let newborn = Newborn {
        // A new id: the backend's spares are for creates that a caller waits for.
        id: SandboxId::from_random(random_u128()),
        owner: pool.owner.clone(),
        name: free_name(&registry, &pool.owner)?,
        template: spec.template.to_string(),
    };
    // The claim sets the labels. A template with mounts has no pool.
    let row = SandboxRow {
        labels: Labels::default(),
        // Nor has it a network before that.
        network: NetworkPolicy::default(),
        visibility: Visibility::PoolMember(pool.id),
        ..newborn.row(&basis, shared.clock.now())
    };
    let (live, created) = enter(shared, registry, row, basis.version, Wait::Ready);
    pool.enroll(&live, Standing::Making);
    Ok((live, created))
}
