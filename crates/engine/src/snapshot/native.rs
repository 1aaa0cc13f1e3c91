//! Takes snapshots that callers ask for by name, and waits for them.

use std::time::Instant;

use tracing::warn;
use wire::SandboxId;

use super::{NAME_MAX, Snapshot, SnapshotSpec, SnapshotState};
use crate::Engine;
use crate::db::Purpose;
use crate::error::{EngineError, chain};
use crate::model::labels::Labels;
use crate::model::{Key, Owner};
use crate::observe::metrics::{Verb, Verdict};
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::LiveSandbox;
use crate::template::{TemplateName, TemplateSpec};

/// The name of a snapshot whose sandbox has a name that snapshots cannot have.
const NAME_DEFAULT: &str = "snapshot";

/// A request for a snapshot of a sandbox.
#[derive(Debug, Clone, Default)]
pub struct TakeSpec {
    /// The name, which several snapshots may share. The sandbox's name by default.
    pub name: Option<String>,
    /// How it can be found.
    pub labels: Labels,
    /// A note that a dialect stores with the snapshot.
    pub note: String,
}

impl Engine {
    /// Takes a snapshot of a running or paused sandbox, and returns when sandboxes can be made from it. If nothing has
    /// changed since a snapshot of the same name, returns that one.
    pub async fn take_snapshot(
        &self,
        key: &Key,
        sandbox: SandboxId,
        spec: TakeSpec,
    ) -> Result<Snapshot, EngineError> {
        let began = Instant::now();
        let taken = self.take_or_find(key, sandbox, spec).await;
        self.shared().metrics.operation(Verb::Snapshot, Verdict::of(&taken), began.elapsed());
        taken
    }

    /// An owner's snapshots, newest first, without the templates that can be named as snapshots.
    pub async fn published_snapshots(&self, owner: &Owner) -> Result<Vec<Snapshot>, EngineError> {
        let rows = self.shared().db.snapshots(Some(owner.clone())).await?;
        let published: Vec<String> = rows.iter().map(|row| row.id.to_string()).collect();
        let mut all = self.snapshots(owner).await?;
        all.retain(|snapshot| published.contains(&snapshot.id));
        Ok(all)
    }

    /// The template that a create names: one of the owner's templates or, if none has this name, the template of a
    /// snapshot with this id or name.
    pub(crate) async fn template_or_snapshot(
        &self,
        owner: &Owner,
        name: TemplateName,
    ) -> Result<TemplateName, EngineError> {
        if self.shared().templates.find(owner, name.as_str()).is_ok() {
            return Ok(name);
        }
        match self.snapshot(owner, name.as_str()).await {
            Ok(Snapshot { template: Some(template), state: SnapshotState::Ready, .. }) => {
                Ok(TemplateName::kept(&template.name))
            }
            Ok(Snapshot { name, state: SnapshotState::Failed { .. }, .. }) => {
                Err(EngineError::SnapshotNotReady { name, state: "failed" })
            }
            Ok(Snapshot { name, .. }) => Err(EngineError::SnapshotNotReady { name, state: "not complete" }),
            // The create reports it, unless it repeats an earlier one.
            Err(EngineError::SnapshotNotFound { .. }) => Ok(name),
            Err(error) => Err(error),
        }
    }

    async fn take_or_find(
        &self,
        key: &Key,
        sandbox: SandboxId,
        spec: TakeSpec,
    ) -> Result<Snapshot, EngineError> {
        let live = self.live(&key.owner, sandbox)?;
        match live.state() {
            State::Running | State::Paused(_) => {}
            State::Creating | State::Deleting | State::Failed { .. } => return Err(live.wrong_state()),
        }
        let name = spec.name.unwrap_or_else(|| name_of(&live));
        let spec = SnapshotSpec {
            name,
            tags: Vec::new(),
            template: settings_of(&live),
            note: spec.note,
            labels: spec.labels,
        };
        spec.check()?;
        let db = &self.shared().db;
        let failed = |source| EngineError::Snapshot { id: sandbox, source };
        let mark = self.shared().backend.files_mark(sandbox).await.map_err(failed)?;
        if let Some(mark) = mark
            && let Some(found) = db.snapshot_at(sandbox, Purpose::Named, mark).await?
            && found.name == spec.name
            && found.labels == spec.labels
            && found.note == spec.note
        {
            return self.snapshot_of(found.id).await;
        }
        let row = crate::db::SnapshotRow {
            parent: live.over().all().next(),
            ..spec.row(&key.owner, Some(sandbox))
        };
        self.check_snapshots(key).await?;
        db.insert_snapshot(row.clone()).await?;
        // A task of its own, so that a caller who disconnects does not leave half of a snapshot.
        let engine = self.clone();
        let taking = tokio::spawn(async move {
            let result = engine.captured(&row, &live, spec.template).await;
            match result {
                Ok(()) => {
                    engine.settle_capture(&row, SnapshotState::Ready).await?;
                    engine.snapshot_of(row.id).await
                }
                Err(error) => {
                    // The caller gets the error, so nothing is left to show.
                    let gone = engine.forget(&row).await;
                    if let Err(left) = gone {
                        warn!(snapshot = %row.id, error = chain(&left), "cannot remove a snapshot that failed");
                    }
                    Err(error)
                }
            }
        });
        taking.await.map_err(|_| EngineError::Stopping)?
    }

    /// Removes a snapshot that could not be made.
    pub(super) async fn forget(&self, row: &crate::db::SnapshotRow) -> Result<(), EngineError> {
        let now = crate::observe::clock::now();
        self.shared().db.settle_snapshot(row.id, SnapshotState::Deleting, now).await?;
        self.finish_delete(row).await
    }
}

/// The sandbox's name, if a snapshot can have it.
fn name_of(live: &LiveSandbox) -> String {
    let name = live.view().name.to_string();
    let fits = !name.chars().any(|c| c.is_control() || c.is_whitespace() || c == ':')
        && !matches!(name.as_str(), "" | "." | "..")
        && name.len() <= NAME_MAX;
    if fits { name } else { NAME_DEFAULT.into() }
}

/// The settings of sandboxes that are made from a snapshot: those of the source, without its own variables and labels.
fn settings_of(live: &LiveSandbox) -> TemplateSpec {
    let template = live.version.as_ref().map(|version| version.spec.clone()).unwrap_or_default();
    TemplateSpec {
        image: live.image.clone(),
        cpu_millis: live.limits.cpu_millis,
        memory_bytes: live.limits.memory_bytes,
        disk_bytes: live.limits.disk_bytes,
        ..template
    }
}
