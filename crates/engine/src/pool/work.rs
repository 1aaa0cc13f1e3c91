//! The work that the task of a pool starts: it makes, checks and removes sandboxes.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::{info, warn};
use wire::SandboxId;

use crate::Shared;
use crate::error::{chain, truncated};
use crate::files::transfer::rehearse;
use crate::guest::Unsaid;
use crate::pool::rules::RETRY_MIN;
use crate::pool::{Pool, Standing, member};
use crate::sandbox::live::LiveSandbox;

/// How long an init may take to answer a check.
const CHECK_WAIT: Duration = Duration::from_secs(5);
/// How many bytes of a failure's reason are kept.
const REASON_MAX: usize = 4096;

/// The result of a piece of work.
pub(super) enum WorkDone {
    /// A sandbox was made, or could not be made for this reason.
    Made(Result<(), String>),
    /// There is nothing to record.
    Unneeded,
    /// A sandbox was removed.
    Removed,
    /// The ready sandboxes were checked.
    Checked,
}

/// Makes a sandbox, unless the pool is being deleted by the time that a permit is free.
pub(super) async fn make(shared: Arc<Shared>, pool: Arc<Pool>) -> WorkDone {
    let _place = shared.pools.refills.acquire().await;
    let begun = {
        let wanted = !pool.view().deleting;
        let admitted = wanted.then(|| member::admit_member(&shared, &pool));
        // From here on the sandbox, if there is one, counts as a member.
        pool.members().begun -= 1;
        admitted
    };
    let (live, created) = match begun {
        None => return WorkDone::Unneeded,
        Some(Err(error)) => return WorkDone::Made(Err(shortened(chain(&error)))),
        Some(Ok(admitted)) => admitted,
    };
    let made = match created.await {
        Ok(Ok(())) => {
            rehearse(&live.transfers).await;
            Ok(())
        }
        Ok(Err(error)) => Err(shortened(chain(&error))),
        Err(_) => return WorkDone::Unneeded, // The engine is stopping.
    };
    settle(&pool, &live, made)
}

/// Marks a new sandbox as ready or broken, unless it is being removed already.
fn settle(pool: &Pool, live: &LiveSandbox, result: Result<(), String>) -> WorkDone {
    let mut members = pool.members();
    if members.standing(live.id) != Some(Standing::Making) {
        return WorkDone::Unneeded;
    }
    members.set(live.id, if result.is_ok() { Standing::Ready } else { Standing::Broken });
    WorkDone::Made(result)
}

/// Checks a sandbox that an earlier daemon left. If it answers, it is ready.
pub(super) async fn check_found(pool: Arc<Pool>, live: Arc<LiveSandbox>) -> WorkDone {
    let result = match live.made().await {
        Ok(()) if answers(&live).await => Ok(()),
        Ok(()) => Err(format!("sandbox `{}` does not answer after a restart", live.id)),
        Err(error) => Err(shortened(chain(&error))),
    };
    match settle(&pool, &live, result) {
        // A sandbox that broke while no daemon ran does not mean that the next create fails too.
        WorkDone::Made(Err(reason)) => info!(reason, "replacing a sandbox in the pool"),
        WorkDone::Made(Ok(())) | WorkDone::Unneeded | WorkDone::Removed | WorkDone::Checked => {}
    }
    WorkDone::Unneeded
}

/// Deletes a sandbox of the pool, and retries until it is gone.
pub(super) async fn remove(pool: Arc<Pool>, live: Arc<LiveSandbox>) -> WorkDone {
    while let Err(error) = crate::sandbox::calls::delete(&live).await {
        if live.shared.registry().get(live.id).is_none() {
            break;
        }
        warn!(sandbox = %live.id, error = chain(&error), "cannot remove a sandbox from the pool; retrying");
        tokio::time::sleep(RETRY_MIN).await;
    }
    pool.members().all.remove(&live.id);
    WorkDone::Removed
}

/// Asks all ready sandboxes whether they answer, and marks those that do not as broken.
pub(super) async fn check_ready(pool: Arc<Pool>) -> WorkDone {
    let ready: Vec<Arc<LiveSandbox>> = {
        let members = pool.members();
        members
            .ready
            .iter()
            .filter_map(|id| members.all.get(id))
            .map(|member| Arc::clone(&member.live))
            .collect()
    };
    let mut asked: JoinSet<Option<SandboxId>> = JoinSet::new();
    for live in ready {
        asked.spawn(async move { (!answers(&live).await).then_some(live.id) });
    }
    while let Some(answer) = asked.join_next().await {
        if let Ok(Some(id)) = answer {
            let mut members = pool.members();
            // If the sandbox was claimed in the meantime, it belongs to a caller.
            if members.standing(id) == Some(Standing::Ready) {
                warn!(sandbox = %id, "replacing a sandbox in the pool that does not answer");
                members.set(id, Standing::Broken);
            }
        }
    }
    WorkDone::Checked
}

/// Whether the sandbox's init answers. A broken connection is opened again, so the second attempt counts.
async fn answers(live: &LiveSandbox) -> bool {
    let asked = async {
        match live.guest.outbox.say(None).await {
            Err(Unsaid::Broken) => live.guest.outbox.say(None).await.is_ok(),
            said => said.is_ok(),
        }
    };
    timeout(CHECK_WAIT, asked).await.unwrap_or(false)
}

/// Cuts a reason to `REASON_MAX` bytes.
pub(super) fn shortened(reason: String) -> String {
    truncated(reason, REASON_MAX)
}
