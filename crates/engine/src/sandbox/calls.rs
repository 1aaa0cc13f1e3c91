//! Calls about sandboxes that exist: show, list, change, touch, explain, pause, resume, delete.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use wire::SandboxId;

use crate::model::check::page_limit;
use crate::model::labels::SELECTORS_MAX;
use crate::sandbox::driver::Message;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::pause::pause;
use crate::sandbox::registry::Place;
use crate::sandbox::resume::resume;
use crate::{
    Deletion, Engine, EngineError, EventId, Explanation, Field, Key, ListQuery, Owner, Page, PauseSpec,
    Sandbox, SandboxName, SandboxUpdate, Watcher,
};

/// How many sandboxes `delete_all` deletes at the same time.
const DELETIONS_MAX: usize = 32;

impl Engine {
    /// A sandbox at this moment.
    pub async fn get(&self, owner: &Owner, id: SandboxId) -> Result<Sandbox, EngineError> {
        Ok(self.live(owner, id)?.describe())
    }

    /// A sandbox by its name, or by its id if no sandbox has that name.
    pub async fn find(&self, owner: &Owner, text: &str) -> Result<Sandbox, EngineError> {
        let named = self.shared().registry().newest(owner, None, Some(text), &[], 1)?;
        if let Some(live) = named.first() {
            return Ok(live.describe());
        }
        let not_found =
            |_| EngineError::SandboxNotFound { id: text.chars().take(SandboxName::LENGTH_MAX).collect() };
        self.get(owner, text.parse().map_err(not_found)?).await
    }

    /// How a sandbox that is gone was deleted; `None` if it is there, was never there, or if that is too long ago.
    pub fn deletion(&self, owner: &Owner, id: SandboxId) -> Option<Deletion> {
        self.shared().events.deletion(owner, id)
    }

    /// The working directory of commands that do not set one.
    pub fn working_directory(&self, owner: &Owner, id: SandboxId) -> Result<String, EngineError> {
        Ok(self.live(owner, id)?.with_surroundings(|around| around.working_directory()))
    }

    /// An owner's sandboxes, newest first.
    pub async fn list(&self, owner: &Owner, query: ListQuery) -> Result<Page<Sandbox>, EngineError> {
        let limit = page_limit(query.limit)?;
        let before = query.cursor.as_deref().map(Place::from_cursor).transpose()?;
        if query.selectors.len() > SELECTORS_MAX {
            let rule = format!("be given at most {SELECTORS_MAX} times, got {}", query.selectors.len());
            return Err(Field::Label.must(rule));
        }
        let name = query.name.as_deref();
        let mut sandboxes =
            self.shared().registry().newest(owner, before, name, &query.selectors, limit + 1)?;
        let more = sandboxes.len() > limit;
        sandboxes.truncate(limit);
        let next_cursor = sandboxes.last().filter(|_| more).map(|last| Place::of_home(last).to_cursor());
        Ok(Page { items: sandboxes.iter().map(|live| live.describe()).collect(), next_cursor })
    }

    /// Renames a sandbox.
    pub async fn rename(
        &self,
        owner: &Owner,
        id: SandboxId,
        name: SandboxName,
    ) -> Result<Sandbox, EngineError> {
        self.update(owner, id, SandboxUpdate { name: Some(name), ..SandboxUpdate::default() }).await
    }

    /// Changes a sandbox's name, labels and lifetime, as a whole or not at all.
    pub async fn update(
        &self,
        owner: &Owner,
        id: SandboxId,
        update: SandboxUpdate,
    ) -> Result<Sandbox, EngineError> {
        let live = self.live(owner, id)?;
        if update.is_empty() {
            return Ok(live.describe());
        }
        if update.network.is_some() {
            live.check_network().await?;
        }
        if let Some(kept) = update.history {
            self.check_history(kept)?;
            self.shared().db.set_history(id, kept).await?;
            live.set_history(kept);
            self.shared().db.trim_history(id, kept).await?;
            self.shared().files_freed.notify_one();
        }
        if let Some(hooks) = &update.hooks {
            self.shared().db.set_hooks(id, hooks.clone()).await?;
            live.set_hooks(hooks.clone());
        }
        if let Some(name) = &update.name {
            self.shared().registry().reserve_name(&live, name)?;
        }
        // A task of its own, so that a caller who disconnects in the middle does not leave the name reserved.
        let updating = tokio::spawn(async move {
            let name = update.name.clone();
            let network = update.network.is_some();
            let updated = ask(&live, |done| Message::Update { update: Box::new(update), done }).await;
            if let (Err(_), Some(name)) = (&updated, name) {
                live.shared.registry().free_name(&live, &name);
            }
            updated?;
            if network {
                live.apply_network().await?;
            }
            Ok(live.describe())
        });
        updating.await.map_err(|_| EngineError::Stopping)?
    }

    /// Restarts the clocks of the sandbox's start and last use, and returns what the rules say now. If a touch
    /// succeeds, no rule that was due before the touch ends the sandbox.
    pub async fn touch(&self, owner: &Owner, id: SandboxId) -> Result<Explanation, EngineError> {
        ask(&*self.live(owner, id)?, |done| Message::Touch { done }).await
    }

    /// Explains why a sandbox lives, and when and how it ends. This does not count as a use.
    pub async fn explain(&self, owner: &Owner, id: SandboxId) -> Result<Explanation, EngineError> {
        ask(&*self.live(owner, id)?, |done| Message::Explain { done }).await
    }

    /// Pauses a sandbox: freezes its processes in memory, or ends them and keeps the files. Returns when it is paused. Has no
    /// effect on one that is paused like that.
    pub async fn pause(&self, owner: &Owner, id: SandboxId, spec: PauseSpec) -> Result<Sandbox, EngineError> {
        let live = self.live(owner, id)?;
        pause(&live, spec).await?;
        Ok(live.describe())
    }

    /// Lets a paused sandbox run again, or one that has failed and has all its files. Returns when it runs. A sandbox that was
    /// paused without its memory takes processor and memory again, within the limits of the caller's key.
    pub async fn resume(&self, key: &Key, id: SandboxId) -> Result<Sandbox, EngineError> {
        let live = self.live(&key.owner, id)?;
        resume(&live, key.limits).await?;
        Ok(live.describe())
    }

    /// Deletes a sandbox. Returns when nothing of the sandbox is left.
    pub async fn delete(&self, owner: &Owner, id: SandboxId) -> Result<(), EngineError> {
        let live = self.live(owner, id)?;
        delete_unless(&live, false).await
    }

    /// Events of one or all of an owner's sandboxes, from now on or after a given event.
    pub fn watch(
        &self,
        owner: &Owner,
        only: Option<SandboxId>,
        after: Option<EventId>,
    ) -> Result<Watcher, EngineError> {
        if let Some(id) = only {
            self.live(owner, id)?;
        }
        Ok(Watcher::new(Arc::clone(&self.shared().events), owner.clone(), only, after))
    }

    /// Deletes every sandbox of every owner, and what earlier daemons have left. Used when a private daemon ends.
    pub async fn delete_all(&self) -> Result<(), EngineError> {
        // Pools must not refill while their sandboxes are being deleted.
        self.shared().pools.halt();
        let sandboxes = self.shared().registry().all();
        let mut deletions = JoinSet::new();
        let mut result = Ok(());
        for live in sandboxes {
            if deletions.len() >= DELETIONS_MAX {
                result = result.and(joined(deletions.join_next().await));
            }
            deletions.spawn(async move { delete(&live).await });
        }
        while !deletions.is_empty() {
            result = result.and(joined(deletions.join_next().await));
        }
        // A daemon that ends as soon as it is ready may not have swept yet, and no later sweep will run.
        crate::sandbox::sweep::sweep(self.shared()).await;
        result
    }
}

/// Sends a driver a short request and waits for the answer.
pub(crate) async fn ask<T>(
    live: &LiveSandbox,
    message: impl FnOnce(oneshot::Sender<Result<T, EngineError>>) -> Message,
) -> Result<T, EngineError> {
    let (done, answer) = oneshot::channel();
    let over = || match gone(live) {
        Ok(()) => EngineError::SandboxNotFound { id: live.id.to_string() },
        Err(error) => error,
    };
    match live.inbox.send_timeout(message(done), crate::sandbox::live::INBOX_WAIT).await {
        Ok(()) => answer.await.unwrap_or_else(|_| Err(over())),
        Err(mpsc::error::SendTimeoutError::Timeout(_)) => Err(EngineError::Unresponsive { id: live.id }),
        Err(mpsc::error::SendTimeoutError::Closed(_)) => Err(over()),
    }
}

/// Deletes a sandbox. No hook prevents it.
pub(crate) async fn delete(live: &LiveSandbox) -> Result<(), EngineError> {
    delete_unless(live, true).await
}

/// Deletes a sandbox, unless `insists` is false and its hook prevents it.
async fn delete_unless(live: &LiveSandbox, insists: bool) -> Result<(), EngineError> {
    let (done, answer) = oneshot::channel();
    let sent = live
        .inbox
        .send_timeout(
            Message::Delete { done, insists, cause: tracing::Span::current() },
            crate::sandbox::live::INBOX_WAIT,
        )
        .await;
    match sent {
        Ok(()) => {}
        Err(mpsc::error::SendTimeoutError::Timeout(_)) => {
            return Err(EngineError::Unresponsive { id: live.id });
        }
        Err(mpsc::error::SendTimeoutError::Closed(_)) => return gone(live),
    }
    match answer.await {
        Ok(result) => result,
        Err(_) => gone(live),
    }
}

/// The driver has ended: `Ok` if the sandbox is gone, an error if the engine is stopping.
pub(crate) fn gone(live: &LiveSandbox) -> Result<(), EngineError> {
    let registry = live.shared.registry();
    match registry.get(live.id) {
        None if registry.is_stray(live.id) => Ok(()),
        None | Some(_) => Err(EngineError::Stopping),
    }
}

pub(crate) fn joined(
    result: Option<Result<Result<(), EngineError>, tokio::task::JoinError>>,
) -> Result<(), EngineError> {
    match result {
        Some(Ok(result)) => result,
        Some(Err(_)) => Err(EngineError::Stopping),
        None => Ok(()),
    }
}
