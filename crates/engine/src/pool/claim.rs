//! Gives a create a ready sandbox from a pool.

use std::sync::{Arc, Weak};
use std::time::Instant;

use tokio::sync::mpsc::OwnedPermit;
use tokio::sync::oneshot;

use crate::Shared;
use crate::db::Identity;
use crate::db::{ClaimRow, Stamps};
use crate::observe::clock::{Moment, Stamp, in_micros};
use crate::observe::metrics::{Verb, Verdict};
use crate::pool::Pool;
use crate::sandbox::admit::{Admitted, Basis, Unclaimed};
use crate::sandbox::driver::Message;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::registry::Registry;
use crate::{DbError, EngineError, Key, SandboxName, SandboxSpec};

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
        // Sandboxes in pools have the template's image, and no volumes.
        if spec.image.is_some() || !basis.mounts.is_empty() {
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
            let row = claim_row(spec, basis, request_digest, &pool, now);
            let name_before = assign(&live, &row);
            registry.show(&live);
            pool.claimed();
            self.metrics.claimed();
            let claimed = self.write_claim(&live, row, name_before, place, now);
            return Ok(Some(Admitted::Claimed(live, claimed)));
        }
        Ok(None)
    }

    /// Writes the row of a claim, and then sends the driver a message. The caller waits for the row alone, not for the driver.
    fn write_claim(
        &self,
        live: &Arc<LiveSandbox>,
        row: ClaimRow,
        name_before: Option<SandboxName>,
        place: OwnedPermit<Message>,
        now: Moment,
    ) -> oneshot::Receiver<Result<(), Unclaimed>> {
        let (done, claimed) = oneshot::channel();
        let (began, lifetime, claimer) = (Instant::now(), row.lifetime.clone(), Arc::clone(live));
        self.db.claim_sandbox(live.id, row, move |written| {
            let message = match &written {
                Ok(true) => Message::Claimed { lifetime, at: now },
                Ok(false) | Err(_) => Message::Unclaimed,
            };
            let result = end_claim(&claimer, written, name_before, began);
            place.send(message);
            let _ = done.send(result); // A caller that left owns the sandbox all the same, as after any create.
        });
        claimed
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
        stamps: Stamps { started: Some(Stamp::of(now)), ..Stamps::born(Stamp::of(now)) },
        identity,
        claimed_from: pool.name().to_string(),
    }
}

/// Makes the sandbox look like the caller's. Returns the name that it had, if the caller chose another.
fn assign(live: &LiveSandbox, row: &ClaimRow) -> Option<SandboxName> {
    let mut view = live.view();
    (view.identity, view.labels, view.lifetime) =
        (Arc::clone(&row.identity), row.labels.clone(), row.lifetime.clone());
    view.notes = row.notes.clone();
    (view.waits_in, view.claimed_from) = (None, Some(row.claimed_from.clone()));
    view.recorded = false;
    row.name.clone().map(|name| std::mem::replace(&mut view.name, name))
}

/// Ends a claim: shows the sandbox as the caller's, or hides it again if the row could not be written.
fn end_claim(
    live: &Arc<LiveSandbox>,
    written: Result<bool, DbError>,
    name_before: Option<SandboxName>,
    began: Instant,
) -> Result<(), Unclaimed> {
    if let Ok(true) = written {
        if let Some(before) = name_before {
            live.shared.registry().free_name(live, &before);
        }
        live.set_recorded();
        live.tell_state();
        live.shared.metrics.operation(Verb::Create, Verdict::Ok, began.elapsed());
        return Ok(());
    }
    {
        // Frees the name and the idempotency key for the next attempt.
        let mut registry = live.shared.registry();
        registry.hide(live);
        let mut view = live.view();
        view.waits_in = Some(Weak::<Pool>::new());
        let claimed_name = name_before.map(|before| std::mem::replace(&mut view.name, before));
        drop(view);
        if let Some(name) = claimed_name {
            registry.free_name(live, &name);
        }
    }
    Err(match written {
        Ok(_) => Unclaimed::Broken,
        Err(source) => {
            Unclaimed::Unwritten(EngineError::Store { doing: "write the claim of the sandbox", source })
        }
    })
}
