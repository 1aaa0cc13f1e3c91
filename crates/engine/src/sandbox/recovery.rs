//! How a starting daemon recovers the sandboxes that it finds.
//!
//! Rows hold the goal of each sandbox. Every sandbox gets a driver, and the driver finishes or undoes what was under
//! way (`lifecycle::recovery`). Startup waits for rows and for the names and lengths of logs, which are quick to
//! read; it waits for no sandbox.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use tokio::sync::mpsc;
use tracing::info;
use wire::SandboxId;

use crate::Shared;
use crate::command::LiveCommand;
use crate::db::{CommandRow, ImageUseRow, Tally};
use crate::error::{EngineError, chain};
use crate::observe::events::Happened;
use crate::sandbox::deadlines::Deadlines;
use crate::sandbox::driver::{self, Birth, INBOX_MAX};
use crate::sandbox::lifecycle::{Kept, State};
use crate::sandbox::live::LiveSandbox;
use crate::template::Version;

/// Adds the sandbox of every row to the registry and starts its driver.
pub(crate) async fn recover(
    shared: &Arc<Shared>,
    uses: Vec<ImageUseRow>,
    mut versions: BTreeMap<SandboxId, Arc<Version>>,
) -> Result<(), EngineError> {
    let mut uses: HashMap<SandboxId, ImageUseRow> = uses.into_iter().map(|row| (row.sandbox, row)).collect();
    let now = shared.clock.now();
    let rebooted = shared.db.note_boot(now.boot).await?;
    if rebooted > 0 {
        info!(
            sandboxes = rebooted,
            "the machine was restarted; sandboxes that ran are paused and keep their files"
        );
    }
    let loaded = shared.db.load(now).await?;
    let tallies: HashMap<SandboxId, Tally> = loaded.tallies.into_iter().collect();
    let mut commands: HashMap<SandboxId, Vec<CommandRow>> = HashMap::new();
    for row in loaded.commands {
        commands.entry(row.sandbox).or_default().push(row);
    }
    // On a first start there is nothing to report.
    if !loaded.sandboxes.is_empty() {
        info!(sandboxes = loaded.sandboxes.len(), commands = commands.len(), "recovering");
    }
    let mut found: Vec<(Arc<LiveSandbox>, _, _, _)> = Vec::new();
    for row in loaded.sandboxes {
        let (inbox, messages) = mpsc::channel(INBOX_MAX);
        let (version, tally) = (versions.remove(&row.id), tallies.get(&row.id).copied().unwrap_or_default());
        let live = LiveSandbox::new(Arc::clone(shared), &row, version, tally, inbox);
        if let Some(used) = uses.remove(&row.id) {
            live.set_image_alias(used.alias);
            if let Some(image) = used.image.and_then(|digest| shared.images.get(digest)) {
                live.set_image(image);
            }
        }
        let commands = commands.remove(&row.id).unwrap_or_default();
        let deadlines = Deadlines::recovered(row.lifetime, row.stamps, row.state, now);
        found.push((live, messages, commands, (deadlines, row.goal)));
    }
    let ready = tokio::task::spawn_blocking(move || {
        let adopt = |(live, messages, commands, plans)| {
            let unreadable = adopt_commands(&live, commands).err();
            (live, messages, unreadable, plans)
        };
        found.into_iter().map(adopt).collect::<Vec<_>>()
    });
    for (live, messages, unreadable, (deadlines, goal)) in ready.await.map_err(|_| EngineError::Stopping)? {
        let unreadable = unreadable.map(|error| chain(&error));
        shared.registry().insert(&live);
        // A crash may have come after the sandbox's processes ended, for a rollback too, and before the results of
        // its commands were written.
        if matches!(live.state(), State::Creating | State::Failed { .. } | State::Paused(Kept::Dropped)) {
            live.commands.live().iter().for_each(LiveCommand::sandbox_gone);
        }
        driver::spawn(&live, messages, deadlines, Birth::Recovered { goal, unreadable });
    }
    Ok(())
}

/// Tells watchers what an earlier daemon did and had no time to tell.
pub(crate) fn tell_untold(shared: &Arc<Shared>) {
    let mut told = shared.events.last_told();
    for live in shared.registry().all() {
        let last = told.remove(&live.id);
        if !live.is_hidden() && last.is_none_or(|last| last.state != live.state()) {
            live.tell_state();
        }
    }
    for (id, last) in told {
        shared.events.publish(&last.owner, id, Happened::Deleted { name: last.name });
    }
}

/// Finds the logs of a sandbox's commands. Blocks.
///
/// If a log cannot be read, only its own sandbox fails. The command cannot be skipped, because the daemon would then
/// confirm to init that the command's result is stored.
fn adopt_commands(live: &Arc<LiveSandbox>, rows: Vec<CommandRow>) -> Result<(), EngineError> {
    for row in rows {
        let id = row.id.clone();
        let log = |source| EngineError::Log { doing: "find", id, source };
        live.commands.adopt(row).map_err(log)?;
    }
    Ok(())
}
