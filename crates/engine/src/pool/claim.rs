//! Chooses a ready sandbox of a pool for a create. The sandbox's driver gives it to the caller.

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use crate::Shared;
use crate::db::{ClaimRow, Identity, Stamps};
use crate::observe::clock::{Moment, Stamp, in_micros};
use crate::pool::Pool;
use crate::sandbox::admit::{Admitted, Basis};
use crate::sandbox::claim::{Claim, Claiming};
use crate::sandbox::driver::Message;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::registry::Registry;
use crate::{EngineError, Key, SandboxSpec};

impl Shared {
    /// Claims a ready sandbox for a create, if a pool has one that is exactly what the caller asks for.
    pub(crate) fn claim(
        self: &Arc<Self>,
        registry: &mut Registry,
        key: &Key,
        named: Option<&Arc<Pool>>,
        spec: &SandboxSpec,
        basis: &Basis,
        request_digest: [u8; 32],
    ) -> Result<Option<Admitted>, EngineError> {
        // Sandboxes in pools have the template's image, history and hooks, and no volumes.
        let own = spec.image.is_some() || spec.history.is_some() || !spec.hooks.is_empty();
        if own || !basis.mounts.is_empty() {
            return Ok(None);
        }
        let version = basis.version.as_ref();
        while let Some((pool, live)) =
            self.pools.take(&key.owner, named, version, &basis.limits, &self.metrics)
        {
            // Reserve a place in the driver's inbox, so that the message about the claim cannot be lost to a full inbox.
            let Ok(place) = live.inbox.clone().try_reserve_owned() else {
                pool.return_broken(&live);
                continue;
            };
            if let Err(error) = reserve(registry, key, spec, &live) {
                pool.put_back(&live);
                return Err(error);
            }
            let now = self.clock.now();
            let row = Arc::new(claim_row(spec, basis, request_digest, &pool, now));
            let (under_way, over) = watch::channel(());
            registry.begin_claim(&live, Claiming::new(&row, over));
            pool.claimed();
            self.metrics.claimed();
            let (done, claimed) = oneshot::channel();
            let claim = Claim { row, at: now, began: Instant::now(), done, under_way };
            place.send(Message::Claim(Box::new(claim)));
            return Ok(Some(Admitted::Claimed(live, claimed)));
        }
        Ok(None)
    }
}

/// Checks the caller's quota, and reserves the name that the caller chose.
fn reserve(
    registry: &mut Registry,
    key: &Key,
    spec: &SandboxSpec,
    live: &Arc<LiveSandbox>,
) -> Result<(), EngineError> {
    registry.check_claim(&key.owner, &key.limits)?;
    match &spec.name {
        Some(name) => registry.reserve_name(live, name),
        None => Ok(()),
    }
}

/// What a claim changes in the sandbox's row.
fn claim_row(
    spec: &SandboxSpec,
    basis: &Basis,
    request_digest: [u8; 32],
    pool: &Pool,
    now: Moment,
) -> ClaimRow {
    let identity = Arc::new(Identity {
        env: spec.env.pairs().clone(),
        created_at: in_micros(now.wall),
        idempotency_key: spec.idempotency_key.as_ref().map(|key| key.as_str().to_owned()),
        request_digest,
    });
    ClaimRow {
        name: spec.name.clone(),
        labels: basis.labels.clone(),
        notes: spec.notes.clone(),
        lifetime: spec.lifetime.clone(),
        network: basis.network.clone(),
        stamps: Stamps { started: Some(Stamp::of(now)), ..Stamps::born(Stamp::of(now)) },
        identity,
        claimed_from: pool.name().to_string(),
    }
}
