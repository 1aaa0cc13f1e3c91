//! What the database knows of the machine: in which boot the last daemon ran.

use rusqlite::{OptionalExtension, params};

use super::Db;
use crate::error::EngineError;

/// Why a sandbox is paused that ran, or was frozen, when the machine went down.
const REBOOTED: &str = "the machine was restarted: its processes have ended, its files are kept";

impl Db {
    /// Writes in which boot this daemon runs. If the last daemon ran in another one, every process of every sandbox has ended with
    /// it: sandboxes that ran or were frozen are to be paused without their memory, and their rows say why. All in one commit, so
    /// that a daemon that dies right afterwards changes nothing. Returns how many sandboxes there are to pause.
    pub async fn note_boot(&self, boot: u128) -> Result<usize, EngineError> {
        self.change("write in which boot this daemon runs", move |db| {
            let boot = boot.to_be_bytes();
            let last: Option<[u8; 16]> =
                db.query_row("SELECT boot FROM machine", [], |row| row.get(0)).optional()?;
            db.execute("INSERT OR REPLACE INTO machine (id, boot) VALUES (1, ?1)", params![boot])?;
            if last.is_none_or(|last| last == boot) {
                return Ok(0);
            }
            db.execute(
                "UPDATE sandboxes SET goal = 'paused', goal_kept = 'dropped', reason = ?1
                 WHERE goal <> 'gone' AND (state = 'running' OR state = 'paused' AND detail = 'frozen')",
                params![REBOOTED],
            )
        })
        .await
    }
}
