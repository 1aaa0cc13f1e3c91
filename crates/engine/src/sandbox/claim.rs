//! How a driver gives a sandbox that waits in a pool to a caller.
//!
//! The pool has taken the sandbox out of its queue, so no other caller can get it. The driver writes the claim to the row, changes
//! what callers see, and lets the owner find the sandbox. Requests that mean the same sandbox wait for that (`Claiming`).

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{oneshot, watch};

use crate::db::ClaimRow;
use crate::error::{EngineError, chain};
use crate::model::hook::HookPoint;
use crate::model::labels::Labels;
use crate::observe::clock::Moment;
use crate::observe::metrics::{Verb, Verdict};
use crate::sandbox::deadlines::Deadlines;
use crate::sandbox::driver::Driver;
use crate::sandbox::live::Visibility;

/// A claim, as the driver gets it.
pub(crate) struct Claim {
    pub row: Arc<ClaimRow>,
    /// When the caller claimed the sandbox. The clocks of its lifetime start then.
    pub at: Moment,
    pub began: Instant,
    pub done: oneshot::Sender<Result<(), Unclaimed>>,
    /// Dropped when the claim is over.
    pub under_way: watch::Sender<()>,
}

/// Why a caller did not get the chosen sandbox. The driver deletes that sandbox.
pub(crate) enum Unclaimed {
    /// The sandbox broke before the claim.
    Broken,
    /// The row could not be written.
    Unwritten(EngineError),
}

/// A claim that is under way, for other requests that mean the same sandbox.
pub(crate) struct Claiming {
    pub idempotency_key: Option<String>,
    pub request_digest: [u8; 32],
    pub labels: Labels,
    under_way: watch::Receiver<()>,
}

impl Claiming {
    pub fn new(row: &ClaimRow, under_way: watch::Receiver<()>) -> Arc<Self> {
        Arc::new(Self {
            idempotency_key: row.identity.idempotency_key.clone(),
            request_digest: row.identity.request_digest,
            labels: row.labels.clone(),
            under_way,
        })
    }

    /// Waits until the claim has succeeded or failed.
    pub async fn over(&self) {
        let mut under_way = self.under_way.clone();
        while under_way.changed().await.is_ok() {} // The driver sends nothing; it drops the sender.
    }
}

impl Driver {
    /// A caller has claimed the sandbox.
    pub(super) async fn claim(&mut self, claim: Claim) {
        let Claim { row, at, began, done, under_way } = claim;
        let written = self.live.shared.db.claim_sandbox(self.live.row_key, Arc::clone(&row)).await;
        let result = match written {
            Ok(true) => Ok(()),
            Ok(false) => Err(Unclaimed::Broken),
            Err(error) => Err(Unclaimed::Unwritten(error)),
        };
        match &result {
            Ok(()) => {
                self.become_claimed(&row);
                self.deadlines = Deadlines::newborn(row.lifetime.clone(), at);
                self.deadlines.started(at);
                self.deadlines.stored();
                self.live.shared.metrics.operation(Verb::Create, Verdict::Ok, began.elapsed());
            }
            Err(_) => self.live.shared.registry().abandon_claim(&self.live, row.name.as_ref()),
        }
        let failed = result.is_err();
        let done = match self.hook_at(HookPoint::AfterClaim).filter(|_| !failed) {
            Some(hook) => {
                let (claimed, claim) = oneshot::channel();
                self.run_claim_hook(hook, claim, done);
                claimed
            }
            None => done,
        };
        if !failed && !row.network.is_none() {
            self.open_for_claimer(done, under_way);
        } else {
            drop(under_way);
            let _ = done.send(result); // A caller that left owns the sandbox all the same, as after any create.
        }
        match failed {
            false => self.judge().await,
            true => drop(self.delete(None).await), // `delete` reports why, if it cannot begin.
        }
    }

    /// Puts the claimer's policy in force and answers. A waiting sandbox has no network.
    fn open_for_claimer(&self, done: oneshot::Sender<Result<(), Unclaimed>>, under_way: watch::Sender<()>) {
        let live = Arc::clone(&self.live);
        self.live.shared.runtime.spawn(async move {
            let opened = live.apply_network().await;
            let failed = opened.is_err();
            drop(under_way);
            let _ = done.send(opened.map_err(Unclaimed::Unwritten)); // As above.
            if failed && let Err(error) = crate::sandbox::calls::delete(&live).await {
                tracing::warn!(sandbox = %live.id, error = chain(&error), "cannot delete a sandbox without a network");
            }
        });
    }

    /// Makes the sandbox look like the caller's, and lets the caller find it.
    fn become_claimed(&self, row: &ClaimRow) {
        let name_before = {
            let mut view = self.live.change_view();
            view.visibility = Visibility::Visible;
            view.identity = Arc::clone(&row.identity);
            (view.labels, view.notes) = (row.labels.clone(), row.notes.clone());
            view.network = row.network.clone();
            (view.lifetime, view.claimed_from) = (row.lifetime.clone(), Some(row.claimed_from.clone()));
            row.name.clone().map(|name| std::mem::replace(&mut view.name, name))
        };
        self.live.shared.registry().finish_claim(&self.live, name_before.as_ref());
        self.live.tell_state();
    }
}
