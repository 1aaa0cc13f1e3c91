//! Families of sandboxes: which was forked from which, and how a child takes its parent's place.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use wire::{SandboxId, SnapshotId};

use crate::Engine;
use crate::error::EngineError;
use crate::model::labels::LabelChanges;
use crate::model::state::State;
use crate::model::{Owner, PauseSpec, Sandbox, SandboxUpdate};
use crate::sandbox::admit::free_name;
use crate::sandbox::pause::pause;

/// A sandbox in a family. It may be gone.
#[derive(Debug, Clone)]
pub struct Member {
    /// The sandbox.
    pub sandbox: SandboxId,
    /// Its name, or the name that it had.
    pub name: String,
    /// The sandbox that it was made from.
    pub parent: Option<SandboxId>,
    /// The snapshot that it was made from.
    pub snapshot: Option<SnapshotId>,
    /// Its state; `None` if it is gone.
    pub state: Option<State>,
    /// When it was requested.
    pub created_at: SystemTime,
    /// When it was deleted.
    pub deleted_at: Option<SystemTime>,
}

/// What becomes of the parent of a child that takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum PromoteParent {
    /// It goes on, under another name.
    #[default]
    Keep,
    /// It is paused, under another name.
    Pause,
    /// It is deleted.
    Delete,
}

impl Engine {
    /// The family of a sandbox, oldest member first; or all families of an owner.
    pub async fn family(
        &self,
        owner: &Owner,
        sandbox: Option<SandboxId>,
    ) -> Result<Vec<Member>, EngineError> {
        let alone = sandbox.map(|id| self.live(owner, id)).transpose()?;
        let rows = self.shared().db.lineage(owner.clone(), sandbox).await?;
        let mut members: Vec<Member> = Vec::with_capacity(rows.len());
        for row in rows {
            let live = self.live(owner, row.sandbox).ok();
            members.push(Member {
                sandbox: row.sandbox,
                name: live.as_ref().map_or(row.name, |live| live.view().name.to_string()),
                parent: row.parent,
                snapshot: row.snapshot,
                state: live.as_ref().map(|live| live.state()),
                created_at: row.created_at,
                deleted_at: row.ended_at,
            });
        }
        if let (Some(live), true) = (alone, members.is_empty()) {
            let Sandbox { id, name, state, created_at, .. } = live.describe();
            members.push(Member {
                sandbox: id,
                name: name.to_string(),
                parent: None,
                snapshot: None,
                state: Some(state),
                created_at,
                deleted_at: None,
            });
        }
        Ok(members)
    }

    /// Deletes a sandbox and all that descend from it, the youngest first. Returns which were deleted. If one cannot be
    /// deleted, those that are older stay.
    pub async fn delete_tree(&self, owner: &Owner, root: SandboxId) -> Result<Vec<SandboxId>, EngineError> {
        let mut deleted = Vec::new();
        // Children that are forked meanwhile are found in the next round, until the root is gone.
        while self.live(owner, root).is_ok() {
            let members = self.family(owner, Some(root)).await?;
            let mut tree = BTreeSet::from([root]);
            // A parent comes before its children.
            for member in &members {
                if member.parent.is_some_and(|parent| tree.contains(&parent)) {
                    tree.insert(member.sandbox);
                }
            }
            let youngest_first = members.iter().rev().filter(|member| tree.contains(&member.sandbox));
            for member in youngest_first.filter(|member| member.state.is_some()) {
                match self.delete(owner, member.sandbox).await {
                    Ok(()) => deleted.push(member.sandbox),
                    Err(EngineError::SandboxNotFound { .. }) => {} // Another caller has deleted it.
                    Err(error) => return Err(error),
                }
            }
        }
        match deleted.is_empty() {
            true => Err(EngineError::SandboxNotFound { id: root.to_string() }),
            false => Ok(deleted),
        }
    }

    /// Gives a child the name and the labels of its parent. The parent gets a new name and, if it is kept, keeps its labels.
    pub async fn promote(
        &self,
        owner: &Owner,
        child: SandboxId,
        then: PromoteParent,
    ) -> Result<Sandbox, EngineError> {
        let members = self.family(owner, Some(child)).await?;
        let parent = members.iter().find(|member| member.sandbox == child).and_then(|member| member.parent);
        let parent = parent.filter(|parent| self.live(owner, *parent).is_ok());
        let Some(parent) = parent else {
            return Err(EngineError::NoParent { id: child });
        };
        let before = self.get(owner, parent).await?;
        let other = free_name(&self.shared().registry(), owner)?;
        self.rename(owner, parent, other).await?;
        let labels: BTreeMap<String, Option<String>> =
            before.labels.pairs().iter().map(|(key, value)| (key.clone(), Some(value.clone()))).collect();
        let update = SandboxUpdate {
            name: Some(before.name.clone()),
            labels: LabelChanges::new(labels)?,
            ..SandboxUpdate::default()
        };
        let promoted = match self.update(owner, child, update).await {
            Ok(promoted) => promoted,
            Err(error) => {
                self.rename(owner, parent, before.name).await?;
                return Err(error);
            }
        };
        match then {
            PromoteParent::Keep => {}
            PromoteParent::Pause => pause(&*self.live(owner, parent)?, PauseSpec::default()).await?,
            PromoteParent::Delete => self.delete(owner, parent).await?,
        }
        Ok(promoted)
    }
}
