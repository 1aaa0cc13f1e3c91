//! Removes the image names and sandboxes of builds: at the end of a build, and at the start for builds that a crash interrupted.

use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tracing::warn;
use wire::BuildId;

use super::{Build, BuildState, View};
use crate::error::{EngineError, chain};
use crate::sandbox::calls::delete;
use crate::{Engine, Shared};

/// The images of a running build's stages have names with this prefix, followed by the build's id and the stage's number.
pub(super) const NAMES: &str = "localhost/build:";

/// Reads the builds of earlier daemons. Marks those that were running as failed, and removes what they left.
pub(crate) async fn recover(engine: &Engine) -> Result<(), EngineError> {
    let shared = engine.shared();
    remove_names_with(shared, NAMES).await?;
    for mut row in shared.db.builds().await? {
        if row.state == BuildState::Running {
            row.state =
                BuildState::Failed { reason: "the daemon was stopped in its middle; build it again".into() };
            row.ended_at = Some(crate::observe::clock::now());
            shared.db.put_build(row.clone()).await?;
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
    // No build outlives its daemon, so all sandboxes of builds are deleted. In the background, because a delete waits
    // until its sandbox is adopted.
    let shared = Arc::clone(shared);
    tokio::spawn(async move { delete_sandboxes_where(&shared, |_| true).await });
    Ok(())
}

/// Deletes all sandboxes of a build.
pub(super) async fn delete_sandboxes(shared: &Shared, id: BuildId) {
    delete_sandboxes_where(shared, |build| build == id).await;
}

async fn delete_sandboxes_where(shared: &Shared, meant: impl Fn(BuildId) -> bool) {
    let sandboxes = shared.registry().all();
    for live in sandboxes.iter().filter(|live| live.build().is_some_and(&meant)) {
        if let Err(error) = delete(live).await {
            warn!(sandbox = %live.id, error = chain(&error), "cannot delete a sandbox of a build");
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
