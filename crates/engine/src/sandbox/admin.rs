//! Sandboxes of all owners, for an operator: which exist, and delete one.
//!
//! Every other call sees the sandboxes of one owner only. The caller checks that the key may do this.

use std::time::SystemTime;

use wire::SandboxId;

use crate::model::check::page_limit;
use crate::sandbox::calls::delete;
use crate::sandbox::live::Visibility;
use crate::sandbox::registry::Place;
use crate::{Engine, EngineError, Owner, Page, SandboxName, State};

/// What an operator sees of a sandbox: nothing of what is in it.
#[derive(Debug, Clone)]
pub struct AnySandbox {
    /// Its id.
    pub id: SandboxId,
    /// Whose it is.
    pub owner: Owner,
    /// Its name.
    pub name: SandboxName,
    /// Its state.
    pub state: State,
    /// What it is for.
    pub role: Role,
    /// How much output of its commands is kept on the host's disk.
    pub output_bytes: u64,
    /// When it was created.
    pub created_at: SystemTime,
}

/// What a sandbox is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Its owner asked for it.
    Sandbox,
    /// It waits in a pool.
    PoolMember,
    /// A step of a build runs in it.
    Build,
}

impl Engine {
    /// The sandboxes of all owners, newest first, hidden ones included.
    pub async fn list_all_owners(
        &self,
        limit: Option<u32>,
        cursor: Option<String>,
    ) -> Result<Page<AnySandbox>, EngineError> {
        let limit = page_limit(limit)?;
        let before = cursor.as_deref().map(Place::from_cursor).transpose()?;
        let mut all = self.shared().registry().all();
        all.retain(|live| before.is_none_or(|before| Place::of_home(live) < before));
        all.sort_by_key(|live| std::cmp::Reverse(Place::of_home(live)));
        let more = all.len() > limit;
        all.truncate(limit);
        let next_cursor = all.last().filter(|_| more).map(|last| Place::of_home(last).to_cursor());
        let describe = |live: std::sync::Arc<crate::sandbox::live::LiveSandbox>| {
            let view = live.view().clone();
            AnySandbox {
                id: live.id,
                owner: live.owner.clone(),
                name: view.name,
                state: view.state,
                role: match view.visibility {
                    Visibility::Visible => Role::Sandbox,
                    Visibility::PoolMember(_) => Role::PoolMember,
                    Visibility::Build(_) => Role::Build,
                },
                output_bytes: live.commands.output_bytes(),
                created_at: view.identity.created_at,
            }
        };
        Ok(Page { items: all.into_iter().map(describe).collect(), next_cursor })
    }

    /// Deletes a sandbox of any owner. Returns when nothing of the sandbox is left.
    pub async fn delete_of_any_owner(&self, id: SandboxId) -> Result<(), EngineError> {
        let live = self.shared().registry().get(id);
        delete(&*live.ok_or_else(|| EngineError::SandboxNotFound { id: id.to_string() })?).await
    }
}
