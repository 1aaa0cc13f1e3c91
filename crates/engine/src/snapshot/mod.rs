//! Snapshots: sources for sandboxes, published under a name and tags.
//!
//! A snapshot is a template with another naming scheme. It is made from an image, or captured from a running or
//! paused sandbox. It never changes, and it has an id. Several snapshots can share a name, and each tag of that name
//! refers to one of them: publishing again moves the tag, and the earlier snapshot can still be found by its id. A
//! tag moves when the new snapshot is ready, so that callers never start from a half-made one.
//!
//! A template that was not published as a snapshot can be named as one too.

mod capture;
mod diff;
mod export;
mod family;
mod fork;
mod freed;
mod history;
mod import;
mod native;
mod rollback;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tracing::{Instrument, info, info_span, warn};
use wire::{SandboxId, SnapshotId, TemplateId};

use crate::Engine;
use crate::db::{Descent, Purpose, SnapshotRow};
use crate::error::{EngineError, Field, Resource, chain, shown};
use crate::image;
use crate::model::labels::Labels;
pub use crate::model::progress::SnapshotState;
use crate::model::random::random_u128;
use crate::model::{Key, Owner};
use crate::observe::events::SnapshotHappened;
use crate::sandbox::hold::end_old_holds;
use crate::sandbox::lifecycle::State;
use crate::sandbox::live::LiveSandbox;
use crate::sandbox::take::take;
use crate::template::{Origin, Preparation, Prepared, Template, TemplateName, TemplateSpec, TemplateTold};
pub use diff::{Change, Compared};
pub use export::{Exported, HostUsr};
pub use family::{Member, PromoteParent};
pub use fork::{FORK_MAX, ForkSpec};
pub(crate) use freed::keep_freed;
pub use history::HistoryEntry;
pub use import::ImportSpec;
pub use native::TakeSpec;

/// The tag that a name without a tag refers to.
pub const LATEST: &str = "latest";
/// The maximum length of a name, in bytes. The name of the snapshot's template is longer.
pub const NAME_MAX: usize = 200;
/// The maximum length of a tag, in bytes, as for images.
pub const TAG_MAX: usize = 128;
/// The maximum size of the note that a dialect stores with a snapshot.
pub const NOTE_BYTES_MAX: usize = 64 * 1024;
/// The prefix of the names that captured images have until a template holds them.
const NAMES: &str = "localhost/snapshot:";

/// A request for a new snapshot.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// The name, which several snapshots may share.
    pub name: String,
    /// The tags that refer to the snapshot once it is ready.
    pub tags: Vec<String>,
    /// The settings for sandboxes made from the snapshot. A capture replaces the image.
    pub template: TemplateSpec,
    /// A note that a dialect stores with the snapshot.
    pub note: String,
    /// How it can be found.
    pub labels: Labels,
}

/// A snapshot at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The id, which does not depend on tags. For a template that was not published as a snapshot, the template's id.
    pub id: String,
    /// The name that the snapshot was published under.
    pub name: String,
    /// The tags that refer to the snapshot now.
    pub tags: Vec<String>,
    /// The state of the snapshot.
    pub state: SnapshotState,
    /// The template that sandboxes are made from, once it exists.
    pub template: Option<Template>,
    /// The sandbox that was captured.
    pub sandbox: Option<SandboxId>,
    /// The image that the caller asked for, unless the snapshot was captured.
    pub image: Option<String>,
    /// The note that a dialect stored with the snapshot.
    pub note: String,
    /// How it can be found.
    pub labels: Labels,
    /// The snapshot that its source began with, or was rolled back to.
    pub parent: Option<SnapshotId>,
    /// What its source had written, if the store has its files.
    pub size_bytes: Option<u64>,
    /// How long its source stood still, if the store has its files.
    pub stopped: Option<Duration>,
    /// When the caller asked for the snapshot.
    pub created_at: SystemTime,
    /// When the state last changed.
    pub updated_at: SystemTime,
}

impl SnapshotSpec {
    fn check(&self) -> Result<(), EngineError> {
        let plain = |text: &str| {
            !matches!(text, "" | "." | "..")
                && !text.chars().any(|c| c.is_control() || c.is_whitespace() || c == ':')
        };
        if !plain(&self.name) || self.name.len() > NAME_MAX {
            let rule =
                format!("be 1 to {NAME_MAX} bytes without spaces and colons, got `{}`", shown(&self.name));
            return Err(Field::Name.must(rule));
        }
        if let Some(tag) = self.tags.iter().find(|tag| !plain(tag) || tag.len() > TAG_MAX) {
            let rule = format!("be 1 to {TAG_MAX} bytes without spaces and colons, got `{}`", shown(tag));
            return Err(Field::Tag.must(rule));
        }
        if self.note.len() > NOTE_BYTES_MAX {
            let rule = format!("have at most {NOTE_BYTES_MAX} bytes, got {}", self.note.len());
            return Err(Field::Note.must(rule));
        }
        Ok(())
    }

    fn row(&self, owner: &Owner, sandbox: Option<SandboxId>) -> SnapshotRow {
        let now = crate::observe::clock::now();
        SnapshotRow {
            id: SnapshotId::from_random(random_u128()),
            owner: owner.clone(),
            name: self.name.clone(),
            wanted_tags: self.tags.clone(),
            template: None,
            sandbox,
            image: sandbox.is_none().then(|| self.template.image.clone()),
            state: SnapshotState::Building,
            note: self.note.clone(),
            created_at: now,
            updated_at: now,
            tags: Vec::new(),
            purpose: Purpose::Named,
            labels: self.labels.clone(),
            parent: None,
            taken: None,
            over: Default::default(),
        }
    }
}

/// The name of a snapshot's template: readable, and unique.
fn template_name(row: &SnapshotRow) -> Result<TemplateName, EngineError> {
    TemplateName::parse(&format!("{}@{}", row.name, row.id))
}

/// The calls about snapshots.
impl Engine {
    /// Makes a snapshot of an image. Returns when the snapshot's row is written; the image is prepared afterwards.
    pub async fn create_snapshot(&self, key: &Key, spec: SnapshotSpec) -> Result<Snapshot, EngineError> {
        spec.check()?;
        self.finish_snapshot_deletes().await;
        self.check_snapshots(key).await?;
        let row = spec.row(&key.owner, None);
        self.shared().db.insert_snapshot(row.clone()).await?;
        let made = self.create_template(&key.owner, template_name(&row)?, spec.template).await;
        let template = match made {
            Ok(template) => template,
            Err(error) => {
                // The snapshot never existed for callers, so remove its row and return the error.
                self.shared().db.delete_snapshot(row.id).await?;
                return Err(error);
            }
        };
        if let Some(template) = template.id {
            self.shared().db.set_snapshot_template(row.id, template).await?;
        }
        match &template.preparation {
            Preparation::Ready(_) => self.settle(&row, SnapshotState::Ready).await?,
            Preparation::Preparing | Preparation::Failed { .. } | Preparation::Replaced => {
                self.follow(row.clone(), template.name);
            }
        }
        self.snapshot_of(row.id).await
    }

    /// Captures a running or paused sandbox. Returns when the row is written. The capture freezes the sandbox
    /// afterwards, while it reads the files.
    pub async fn capture_snapshot(
        &self,
        key: &Key,
        sandbox: SandboxId,
        spec: SnapshotSpec,
    ) -> Result<Snapshot, EngineError> {
        spec.check()?;
        self.finish_snapshot_deletes().await;
        self.check_snapshots(key).await?;
        let live = self.live(&key.owner, sandbox)?;
        match live.state() {
            State::Running | State::Paused(_) => {}
            State::Creating | State::Deleting | State::Failed { .. } => return Err(live.wrong_state()),
        }
        let row = spec.row(&key.owner, Some(sandbox));
        self.shared().db.insert_snapshot(row.clone()).await?;
        let (engine, span) = (self.clone(), info_span!("capture", snapshot = %row.id, sandbox = %sandbox));
        let (captured, id) = (row.clone(), row.id);
        let capturing = async move {
            let state = match engine.captured(&captured, &live, spec.template).await {
                Ok(()) => SnapshotState::Ready,
                Err(error) => {
                    warn!(error = chain(&error), "cannot capture a sandbox");
                    SnapshotState::Failed { reason: chain(&error) }
                }
            };
            if let Err(error) = engine.settle_capture(&captured, state).await {
                warn!(error = chain(&error), "cannot record what came of a capture; the next start does");
            }
        };
        self.shared().runtime.spawn(capturing.instrument(span));
        self.snapshot_of(id).await
    }

    /// Checks that the key allows one more snapshot.
    async fn check_snapshots(&self, key: &Key) -> Result<(), EngineError> {
        let Some(limit) = key.limits.snapshots.map(u64::from) else { return Ok(()) };
        match self.snapshots(&key.owner).await?.len() as u64 >= limit {
            true => Err(EngineError::Quota { resource: Resource::Snapshots, limit }),
            false => Ok(()),
        }
    }

    async fn captured(
        &self,
        row: &SnapshotRow,
        live: &Arc<LiveSandbox>,
        spec: TemplateSpec,
    ) -> Result<(), EngineError> {
        // A capture counts as a use, so that the sandbox does not end for being idle meanwhile.
        let _using = live.guest.begin_use()?;
        if self.shared().backend.store().kind.has_snapshots() {
            return self.taken(row, live, spec).await;
        }
        let resolved = format!("{NAMES}{}", row.id);
        let failed = |source: image::ImageFault| EngineError::Image {
            doing: "capture",
            name: row.name.clone(),
            source: source.into(),
        };
        let image = capture::capture(live, &row.id.to_string(), resolved.clone()).await.map_err(failed)?;
        let prepared = Prepared { resolved: resolved.clone(), image: Some(image.digest) };
        let spec = TemplateSpec { image: resolved.clone(), ..spec };
        let made = self.apply_template(&row.owner, template_name(row)?, spec, Some(prepared)).await?;
        if let Some(template) = made.id {
            self.shared().db.set_snapshot_template(row.id, template).await?;
        }
        image::unname(self.shared(), &resolved).await
    }

    /// Takes a snapshot in the store, and makes the template that sandboxes start from.
    async fn taken(
        &self,
        row: &SnapshotRow,
        live: &Arc<LiveSandbox>,
        spec: TemplateSpec,
    ) -> Result<(), EngineError> {
        let shared = self.shared();
        let (taken, over) = take(live, row.id).await?;
        shared.db.put_snapshot_files(row.id, taken, over.clone()).await?;
        let image = live.stored_image().map(|image| image.digest);
        let prepared = Prepared { resolved: live.image.clone(), image };
        let spec = TemplateSpec { image: live.image.clone(), ..spec };
        let name = template_name(row)?;
        let origin = Origin { over, descent: Descent { parent: live.id, snapshot: row.id } };
        shared.templates.announce_origin(&row.owner, &name, origin);
        let made = self.apply_template(&row.owner, name.clone(), spec, Some(prepared)).await;
        let template = made.as_ref().ok().and_then(|template| template.id);
        shared.templates.settle_origin(&row.owner, &name, template);
        made?;
        match template {
            Some(template) => shared.db.set_snapshot_template(row.id, template).await,
            None => Ok(()),
        }
    }

    /// Records the result of a capture. If a caller has deleted the snapshot meanwhile, its row is removed only now:
    /// until the capture ends, the row shows that a sandbox may be frozen.
    async fn settle_capture(&self, row: &SnapshotRow, state: SnapshotState) -> Result<(), EngineError> {
        self.settle(row, state).await?;
        match self.shared().db.snapshot(row.id).await? {
            Some(now) if now.state == SnapshotState::Deleting => self.finish_delete(&now).await,
            _ => Ok(()),
        }
    }

    /// The template that sandboxes of a snapshot are made from. Found by name if a daemon was killed before it wrote
    /// the template's id.
    fn template_of(&self, row: &SnapshotRow) -> Option<Template> {
        let name = template_name(row).ok();
        let is_it = |template: &Template| match row.template {
            Some(id) => template.id == Some(id),
            None => name.as_ref().is_some_and(|name| template.name == name.as_str()),
        };
        self.templates(&row.owner).into_iter().find(is_it)
    }

    /// Waits in the background until the template is ready or has failed, and records the result.
    fn follow(&self, row: SnapshotRow, template: String) {
        let engine = self.clone();
        let span = info_span!("snapshot", id = %row.id);
        let following = async move {
            let settled = async {
                let mut watcher = engine.watch_template(&row.owner, &template)?;
                while let Some(told) = watcher.next().await? {
                    if let TemplateTold::Settled(template) = told {
                        return Ok(match template.preparation {
                            Preparation::Failed { reason } => SnapshotState::Failed { reason },
                            _ => SnapshotState::Ready,
                        });
                    }
                }
                Err(EngineError::Stopping)
            };
            let state = match settled.await {
                Ok(state) => state,
                // The next daemon continues.
                Err(EngineError::Stopping) => return,
                Err(error) => SnapshotState::Failed { reason: chain(&error) },
            };
            if let Err(error) = engine.settle(&row, state).await {
                warn!(error = chain(&error), "cannot record what came of a snapshot; the next start does");
            }
        };
        self.shared().runtime.spawn(following.instrument(span));
    }

    async fn settle(&self, row: &SnapshotRow, state: SnapshotState) -> Result<(), EngineError> {
        info!(snapshot = %row.id, name = row.name, ?state, "snapshot is made");
        self.shared().db.settle_snapshot(row.id, state.clone(), crate::observe::clock::now()).await?;
        self.tell_snapshot(row, Some(state));
        Ok(())
    }

    /// Notifies watchers of a snapshot that a caller asked for.
    fn tell_snapshot(&self, row: &SnapshotRow, state: Option<SnapshotState>) {
        if row.purpose == Purpose::Named {
            let (id, name) = (row.id.to_string(), row.name.clone());
            let what = SnapshotHappened { id, name, sandbox: row.sandbox, state };
            self.shared().events.publish_snapshot(&row.owner, what);
        }
    }

    /// An owner's snapshots, newest first; then the templates that were not published as snapshots.
    pub async fn snapshots(&self, owner: &Owner) -> Result<Vec<Snapshot>, EngineError> {
        let rows = self.shared().db.snapshots(Some(owner.clone())).await?;
        let templates = self.templates(owner);
        let known: Vec<TemplateId> = rows.iter().filter_map(|row| row.template).collect();
        let find = |id: TemplateId| templates.iter().find(|template| template.id == Some(id)).cloned();
        let mut list: Vec<Snapshot> = rows
            .into_iter()
            .filter(|row| row.state != SnapshotState::Deleting && row.purpose == Purpose::Named)
            .map(|row| described(row, &find))
            .collect();
        let others = templates.iter().filter(|template| template.id.is_some_and(|id| !known.contains(&id)));
        list.extend(others.map(of_template));
        Ok(list)
    }

    /// Finds a snapshot by its id, by `name:tag`, or by its name alone. A name alone refers to its tag `latest`, or
    /// else to the newest snapshot that is ready. Also finds a template by its name.
    pub async fn snapshot(&self, owner: &Owner, text: &str) -> Result<Snapshot, EngineError> {
        let not_found =
            || EngineError::SnapshotNotFound { name: text.chars().take(NAME_MAX + TAG_MAX).collect() };
        let all = self.snapshots(owner).await?;
        if let Some(found) = all.iter().find(|snapshot| snapshot.id == text) {
            return Ok(found.clone());
        }
        let (name, tag) = match text.rsplit_once(':') {
            Some((name, tag)) => (name, Some(tag)),
            None => (text, None),
        };
        let wanted = tag.unwrap_or(LATEST);
        let tagged =
            |snapshot: &&Snapshot| snapshot.name == name && snapshot.tags.iter().any(|tag| tag == wanted);
        let newest = |snapshot: &&Snapshot| {
            tag.is_none() && snapshot.name == name && snapshot.state == SnapshotState::Ready
        };
        all.iter().find(tagged).or_else(|| all.iter().find(newest)).cloned().ok_or_else(not_found)
    }

    async fn snapshot_of(&self, id: SnapshotId) -> Result<Snapshot, EngineError> {
        let not_found = || EngineError::SnapshotNotFound { name: id.to_string() };
        let row = self.shared().db.snapshot(id).await?.ok_or_else(not_found)?;
        let templates = self.templates(&row.owner);
        Ok(described(row, &|id| templates.iter().find(|template| template.id == Some(id)).cloned()))
    }

    /// The tags of a name, and the id of the snapshot that each refers to. An error if no snapshot has this name.
    pub async fn snapshot_tags(
        &self,
        owner: &Owner,
        name: &str,
    ) -> Result<Vec<(String, String)>, EngineError> {
        let all = self.snapshots(owner).await?;
        if !all.iter().any(|snapshot| snapshot.name == name) {
            return Err(EngineError::SnapshotNotFound { name: name.chars().take(NAME_MAX).collect() });
        }
        let tags = self.shared().db.snapshot_tags(owner.clone(), name.to_owned()).await?;
        let mut tags: Vec<(String, String)> =
            tags.into_iter().map(|(tag, id)| (tag, id.to_string())).collect();
        if tags.is_empty() {
            let named = all.iter().filter(|snapshot| snapshot.name == name);
            tags.extend(
                named.flat_map(|snapshot| snapshot.tags.iter().map(|tag| (tag.clone(), snapshot.id.clone()))),
            );
        }
        Ok(tags)
    }

    /// Deletes a snapshot. Sandboxes that were made from the snapshot stay, and its template is removed after the
    /// last of them.
    pub async fn delete_snapshot(&self, owner: &Owner, text: &str) -> Result<(), EngineError> {
        let found = self.snapshot(owner, text).await?;
        let Ok(id) = found.id.parse::<SnapshotId>() else {
            return Err(EngineError::SnapshotNotFound { name: found.name });
        };
        let store = &self.shared().db;
        let Some(before) = store.snapshot(id).await? else {
            // A template that was not published as a snapshot.
            return self.delete_template(owner, &found.name).await;
        };
        store.settle_snapshot(id, SnapshotState::Deleting, crate::observe::clock::now()).await?;
        self.tell_snapshot(&before, None);
        match store.snapshot(id).await? {
            Some(now) if !(before.state == SnapshotState::Building && is_being_made(&now)) => {
                self.finish_delete(&now).await
            }
            // The capture under way finishes the delete.
            _ => Ok(()),
        }
    }

    async fn finish_delete(&self, row: &SnapshotRow) -> Result<(), EngineError> {
        let removed = match self.template_of(row) {
            Some(template) => self.delete_template(&row.owner, &template.name).await,
            None => Ok(()),
        };
        match removed {
            Ok(()) | Err(EngineError::TemplateNotFound { .. }) => self.remove_files(row).await,
            // Sandboxes made from the snapshot still exist. The next snapshot that is made retries the delete, and so
            // does the next start.
            Err(EngineError::TemplateInUse { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Deletes a snapshot's row, and then its files, unless a sandbox or another snapshot lies over them.
    async fn remove_files(&self, row: &SnapshotRow) -> Result<(), EngineError> {
        let shared = self.shared();
        if shared.db.snapshot_is_held(row.id).await? {
            return Ok(()); // The end of the last one that needs it finishes the delete.
        }
        if let Some(template) = row.template {
            shared.templates.forget_origin(template);
        }
        shared.db.delete_snapshot(row.id).await?;
        if let Err(error) = shared.backend.remove_snapshot(row.id).await {
            warn!(snapshot = %row.id, error = chain(&error), "cannot remove a snapshot's files; the sweep tries again");
        }
        if row.over.all().any(|layer| layer != row.id) {
            shared.files_freed.notify_one(); // What it lay over may be free now.
        }
        Ok(())
    }

    /// Finishes the deletes of snapshots whose last sandbox is gone.
    async fn finish_snapshot_deletes(&self) {
        let rows = match self.shared().db.snapshots(None).await {
            Ok(rows) => rows,
            Err(error) => {
                warn!(error = chain(&error), "cannot look for deleted snapshots; the next snapshot does");
                return;
            }
        };
        for row in rows.iter().filter(|row| row.state == SnapshotState::Deleting && !is_being_made(row)) {
            if let Err(error) = self.finish_delete(row).await {
                warn!(snapshot = %row.id, error = chain(&error), "cannot delete a snapshot; the next one tries again");
            }
        }
    }
}

/// Whether a capture or an import may still be under way that will make a template.
fn is_being_made(row: &SnapshotRow) -> bool {
    row.purpose == Purpose::Named && (row.sandbox.is_some() || is_import(row)) && row.template.is_none()
}

/// Whether the files of a snapshot came from an archive.
fn is_import(row: &SnapshotRow) -> bool {
    row.image.as_deref().is_some_and(|image| image.starts_with(NAMES))
}

fn described(row: SnapshotRow, find: &dyn Fn(TemplateId) -> Option<Template>) -> Snapshot {
    Snapshot {
        id: row.id.to_string(),
        name: row.name,
        tags: row.tags,
        state: row.state,
        template: row.template.and_then(find),
        sandbox: row.sandbox,
        image: row.image.as_deref().map(image::familiar),
        note: row.note,
        labels: row.labels,
        parent: row.parent,
        size_bytes: row.taken.map(|taken| taken.size_bytes),
        stopped: row.taken.map(|taken| taken.stopped),
        created_at: row.created_at,
        updated_at: row.updated_at,
    }
}

fn of_template(template: &Template) -> Snapshot {
    Snapshot {
        id: template.id.map(|id| id.to_string()).unwrap_or_default(),
        name: template.name.clone(),
        tags: vec![LATEST.into()],
        state: match &template.preparation {
            Preparation::Ready(_) => SnapshotState::Ready,
            Preparation::Failed { reason } => SnapshotState::Failed { reason: reason.clone() },
            Preparation::Preparing | Preparation::Replaced => SnapshotState::Building,
        },
        template: Some(template.clone()),
        sandbox: None,
        image: Some(template.spec.image.clone()),
        note: String::new(),
        labels: template.spec.labels.clone(),
        parent: None,
        size_bytes: None,
        stopped: None,
        created_at: template.created_at,
        updated_at: template.updated_at,
    }
}

/// Continues what an earlier daemon began, or records that it failed.
pub(crate) async fn resume_interrupted(engine: &Engine) -> Result<(), EngineError> {
    let shared = engine.shared();
    // A name is there until a template holds the image: what is not held by now is half of a capture or an import.
    image::unname_all(shared, NAMES).await?;
    for row in shared.db.snapshots(None).await? {
        if let (Some(template), Some(parent), false) = (row.template, row.sandbox, row.over.is_empty()) {
            let descent = Descent { parent, snapshot: row.id };
            shared.templates.add_origin(template, Origin { over: row.over.clone(), descent });
        }
        // A fork ends with the daemon that made it; its children hold the files that they need.
        let unfinished = match row.purpose {
            Purpose::Named => false,
            Purpose::Fork => true,
            Purpose::History => row.state != SnapshotState::Ready,
        };
        if unfinished && row.state != SnapshotState::Deleting {
            shared.db.settle_snapshot(row.id, SnapshotState::Deleting, crate::observe::clock::now()).await?;
        }
        if !matches!(row.state, SnapshotState::Building | SnapshotState::Deleting) {
            continue;
        }
        if let Some(sandbox) = row.sandbox {
            // The capture may have left the sandbox frozen.
            let live = shared.registry().get(sandbox);
            if let Some(live) = live
                && let Err(error) = end_old_holds(&live).await
            {
                info!(%sandbox, error = chain(&error), "cannot thaw a sandbox that was being captured");
            }
        }
        if row.state == SnapshotState::Deleting {
            if let Err(error) = engine.finish_delete(&row).await {
                warn!(snapshot = %row.id, error = chain(&error), "cannot delete a snapshot; the next start tries again");
            }
            continue;
        }
        if row.purpose != Purpose::Named {
            continue; // `keep_freed` removes it.
        }
        match engine.template_of(&row) {
            Some(template) => {
                if let Some(id) = template.id {
                    shared.db.set_snapshot_template(row.id, id).await?;
                }
                engine.follow(row, template.name);
            }
            // The caller got no answer, and has the archive.
            None if is_import(&row) => engine.forget(&row).await?,
            None => {
                let reason = "the daemon ended while it was made; make it again".to_owned();
                engine.settle(&row, SnapshotState::Failed { reason }).await?;
            }
        }
    }
    Ok(())
}
