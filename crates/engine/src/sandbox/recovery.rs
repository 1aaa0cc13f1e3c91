//! What a starting daemon does with what it finds.
//!
//! Rows say what was aimed at; each sandbox gets a driver, and the driver finishes or undoes it (`State::recovery`).
//! Starting waits for rows and for the names and lengths of logs, which are quick; it waits for no sandbox.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::info;
use wire::SandboxId;

use crate::command::Hub;
use crate::driver::{self, Birth, INBOX_MAX};
use crate::error::{EngineError, chain};
use crate::home::{Home, Shared};
use crate::keeper::Keeper;
use crate::lifecycle::State;
use crate::store::{CommandRow, ImageUseRow, Tally};
use crate::templates::Version;

/// Takes every row's sandbox into the directory and starts its driver.
pub(crate) async fn recover(
    shared: &Arc<Shared>,
    uses: Vec<ImageUseRow>,
    mut versions: BTreeMap<SandboxId, Arc<Version>>,
) -> Result<(), EngineError> {
    let mut uses: HashMap<SandboxId, ImageUseRow> = uses.into_iter().map(|row| (row.sandbox, row)).collect();
    let now = shared.clock.now();
    let loaded = shared.store.load(now).await?;
    let tallies: HashMap<SandboxId, Tally> = loaded.tallies.into_iter().collect();
    let mut commands: HashMap<SandboxId, Vec<CommandRow>> = HashMap::new();
    for row in loaded.commands {
        commands.entry(row.sandbox).or_default().push(row);
    }
    // Of a first start there is nothing to tell.
    if !loaded.sandboxes.is_empty() {
        info!(sandboxes = loaded.sandboxes.len(), commands = commands.len(), "recovering");
    }
    let mut found: Vec<(Arc<Home>, _, _, _)> = Vec::new();
    for row in loaded.sandboxes {
        let (inbox, messages) = mpsc::channel(INBOX_MAX);
        let (version, tally) = (versions.remove(&row.id), tallies.get(&row.id).copied().unwrap_or_default());
        let home = Home::new(Arc::clone(shared), &row, version, tally, inbox);
        if let Some(used) = uses.remove(&row.id) {
            home.set_image_alias(used.alias);
            if let Some(image) = used.image.and_then(|digest| shared.images.get(digest)) {
                home.set_image(image);
            }
        }
        let commands = commands.remove(&row.id).unwrap_or_default();
        let keeper = Keeper::recovered(row.lifetime, row.stamps, row.state, now);
        found.push((home, messages, commands, keeper));
    }
    let ready = tokio::task::spawn_blocking(move || {
        let adopt = |(home, messages, commands, keeper)| {
            let unreadable = adopt_commands(&home, commands).err();
            (home, messages, unreadable, keeper)
        };
        found.into_iter().map(adopt).collect::<Vec<_>>()
    });
    for (home, messages, unreadable, keeper) in ready.await.map_err(|_| EngineError::Stopping)? {
        let unreadable = unreadable.map(|error| chain(&error));
        shared.directory().insert(&home);
        // A crash may have come between the sandbox's failure and the results of its commands.
        if matches!(home.state(), State::Failed { .. }) {
            home.live_commands().iter().for_each(Hub::sandbox_gone);
        }
        driver::spawn(&home, messages, keeper, Birth::Recovered { unreadable });
    }
    Ok(())
}

/// Reads what the logs of a sandbox's commands are. Blocks.
///
/// A log that cannot be read is the end of its sandbox, and of no other: without the command, init would be told that its result is
/// stored.
fn adopt_commands(home: &Arc<Home>, rows: Vec<CommandRow>) -> Result<(), EngineError> {
    for row in rows {
        let id = row.id.clone();
        let log = |source| EngineError::Log { doing: "find", id, source };
        home.adopt_command(Hub::recovered(home, row).map_err(log)?);
    }
    Ok(())
}
