//! Removes the image names and sandboxes of builds: at the end of a build, and at the start for builds that a crash interrupted.

use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tracing::warn;
use wire::BuildId;

use super::{Build, BuildState, View};
use crate::error::{EngineError, chain};
use crate::model::Owner;
use crate::{Engine, Shared};

/// The images of a running build's stages have names with this prefix, followed by the build's id and the stage's number.
pub(super) const NAMES: &str = "localhost/build:";

/// Reads the builds of earlier daemons. Those that were running have failed, and what they left is removed.
pub(crate) async fn recover(engine: &Engine) -> Result<(), EngineError> {
    let shared = engine.shared();
    remove_names_with(shared, NAMES).await?;
    for mut row in shared.db.builds().await? {
        if row.state == BuildState::Running {
            row.state =
                BuildState::Failed { reason: "the daemon was stopped in its middle; build it again".into() };
            row.ended_at = Some(crate::observe::clock::now());
            shared.db.put_build(row.clone()).await?;
            let (engine, owner, id) = (engine.clone(), row.owner.clone(), row.id);
            // In the background: sandboxes are adopted after the start, and a delete has to wait for that.
            tokio::spawn(async move { delete_sandboxes(&engine, &owner, id).await });
        }
        let log_bytes = std::fs::metadata(shared.builds.log(row.id)).map_or(0, |meta| meta.len());
        let view = View { state: row.state, log_bytes, ended_at: row.ended_at };
        shared.builds.all().push_back(Arc::new(Build {
            id: row.id,
            owner: row.owner,
            template: row.template,
            created_at: row.created_at,
            view: watch::Sender::new(view),
            task: Mutex::new(None),
        }));
    }
    Ok(())
}

/// The prefix of the idempotency keys of a build's sandboxes, by which they are found again.
pub(super) fn sandbox_prefix(id: BuildId) -> String {
    format!("shoal build {id} ")
}

/// Deletes all sandboxes of a build.
pub(super) async fn delete_sandboxes(engine: &Engine, owner: &Owner, id: BuildId) {
    let prefix = sandbox_prefix(id);
    let sandboxes = engine.shared().registry().all();
    let mine = |live: &&Arc<crate::sandbox::live::LiveSandbox>| {
        live.owner == *owner
            && live.identity().idempotency_key.as_ref().is_some_and(|key| key.starts_with(&prefix))
    };
    for live in sandboxes.iter().filter(mine) {
        if let Err(error) = engine.delete(owner, live.id).await {
            warn!(build = %id, sandbox = %live.id, error = chain(&error), "cannot delete a sandbox of a build");
        }
    }
}

/// Removes the names of a build's images, so that their layers can be collected.
pub(super) async fn remove_names(shared: &Shared, id: BuildId) -> Result<(), EngineError> {
    remove_names_with(shared, &format!("{NAMES}{id}")).await
}

async fn remove_names_with(shared: &Shared, prefix: &str) -> Result<(), EngineError> {
    shared.db.remove_build_names(prefix.to_owned()).await?;
    shared.images.stock().names.retain(|(name, _), _| !name.starts_with(prefix));
    Ok(())
}
