//! Snapshots: what sandboxes can be made from, published under a name and tags.
//!
//! A snapshot is a template with another way of being called. It is made of an image, or captured from a sandbox that runs; it never
//! changes, and has an id. Its name is shared with those that were published before it, and a tag of that name means one of them:
//! publishing again moves the tag, and what had it before can still be found by its id. A tag moves when the new one is ready, so that
//! what people start from is never half made.
//!
//! A template that was made otherwise can be named as a snapshot too.

mod capture;

use std::time::SystemTime;

use tracing::{Instrument, info, info_span, warn};
use wire::{SandboxId, SnapshotId, TemplateId};

use crate::Engine;
use crate::db::SnapshotRow;
use crate::error::{EngineError, Field, chain, shown};
use crate::image;
pub use crate::model::progress::SnapshotState;
use crate::model::random::random_u128;
use crate::model::{Key, Owner};
use crate::sandbox::hold::end_old_holds;
use crate::sandbox::lifecycle::State;
use crate::template::{Preparation, Prepared, Template, TemplateName, TemplateSpec, TemplateTold};

/// The tag that a name without one means.
pub const LATEST: &str = "latest";
/// A name, in bytes. The name of its template is longer.
pub const NAME_MAX: usize = 200;
/// A tag, in bytes, as with images.
pub const TAG_MAX: usize = 128;
/// What a dialect keeps with a snapshot.
pub const NOTE_BYTES_MAX: usize = 64 * 1024;
/// Names of images that were captured, until a template holds them.
const NAMES: &str = "localhost/snapshot:";

/// What a new snapshot should be.
#[derive(Debug, Clone)]
pub struct SnapshotSpec {
    /// Shared with those that were published before.
    pub name: String,
    /// What should mean it once it is ready.
    pub tags: Vec<String>,
    /// What sandboxes of it have. Its image is what it is made of, unless it is captured.
    pub template: TemplateSpec,
    /// What a dialect wants to find again.
    pub note: String,
}

/// A snapshot, as it is at one moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Names it whatever its tags mean. A template that was made otherwise has its own.
    pub id: String,
    /// What it was published as.
    pub name: String,
    /// The tags that mean it now.
    pub tags: Vec<String>,
    /// How far it is.
    pub state: SnapshotState,
    /// What sandboxes are made from, once there is that.
    pub template: Option<Template>,
    /// Where it was captured.
    pub sandbox: Option<SandboxId>,
    /// The image that was asked for, unless it was captured.
    pub image: Option<String>,
    /// What a dialect kept with it.
    pub note: String,
    /// When it was asked for.
    pub created_at: SystemTime,
    /// When its state last changed.
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
        }
    }
}

/// What the template of a snapshot is called: readable, and nobody else's.
fn template_name(row: &SnapshotRow) -> Result<TemplateName, EngineError> {
    TemplateName::parse(&format!("{}@{}", row.name, row.id))
}

/// What callers ask about snapshots.
impl Engine {
    /// Makes a snapshot of an image. Answers when its row is written; the image comes behind that.
    pub async fn create_snapshot(&self, key: &Key, spec: SnapshotSpec) -> Result<Snapshot, EngineError> {
        spec.check()?;
        self.finish_snapshot_deletes().await;
        let row = spec.row(&key.owner, None);
        self.shared().db.insert_snapshot(row.clone()).await?;
        let made = self.create_template(&key.owner, template_name(&row)?, spec.template).await;
        let template = match made {
            Ok(template) => template,
            Err(error) => {
                // It never was one: whoever asked is told.
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

    /// Captures a running or paused sandbox. Answers when the row is written. The capture freezes the sandbox afterwards, while it
    /// reads the files.
    pub async fn capture_snapshot(
        &self,
        key: &Key,
        sandbox: SandboxId,
        spec: SnapshotSpec,
    ) -> Result<Snapshot, EngineError> {
        spec.check()?;
        self.finish_snapshot_deletes().await;
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

    async fn captured(
        &self,
        row: &SnapshotRow,
        live: &std::sync::Arc<crate::sandbox::live::LiveSandbox>,
        spec: TemplateSpec,
    ) -> Result<(), EngineError> {
        // Whoever captures it uses it: it must not go meanwhile.
        let _using = live.guest.begin_use()?;
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

    /// What came of a capture. If somebody deleted the snapshot meanwhile, it goes only now: until the end its row says that a
    /// sandbox may stand still.
    async fn settle_capture(&self, row: &SnapshotRow, state: SnapshotState) -> Result<(), EngineError> {
        self.settle(row, state).await?;
        match self.shared().db.snapshot(row.id).await? {
            Some(now) if now.state == SnapshotState::Deleting => self.finish_delete(&now).await,
            _ => Ok(()),
        }
    }

    /// What sandboxes of a snapshot are made from. By its name where a daemon was killed before it wrote down its id.
    fn template_of(&self, row: &SnapshotRow) -> Option<Template> {
        let name = template_name(row).ok();
        let is_it = |template: &Template| match row.template {
            Some(id) => template.id == Some(id),
            None => name.as_ref().is_some_and(|name| template.name == name.as_str()),
        };
        self.templates(&row.owner).into_iter().find(is_it)
    }

    /// Waits behind the caller until the template is ready or has failed.
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
                // The next start goes on.
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
        self.shared().db.settle_snapshot(row.id, state, crate::observe::clock::now()).await?;
        Ok(())
    }

    /// An owner's snapshots, newest first; then templates that were made otherwise.
    pub async fn snapshots(&self, owner: &Owner) -> Result<Vec<Snapshot>, EngineError> {
        let rows = self.shared().db.snapshots(Some(owner.clone())).await?;
        let templates = self.templates(owner);
        let known: Vec<TemplateId> = rows.iter().filter_map(|row| row.template).collect();
        let find = |id: TemplateId| templates.iter().find(|template| template.id == Some(id)).cloned();
        let mut list: Vec<Snapshot> = rows
            .into_iter()
            .filter(|row| row.state != SnapshotState::Deleting)
            .map(|row| described(row, &find))
            .collect();
        let others = templates.iter().filter(|template| template.id.is_some_and(|id| !known.contains(&id)));
        list.extend(others.map(of_template));
        Ok(list)
    }

    /// What someone means: an id, `name:tag`, or a name, which means its tag `latest`, or else the newest that is ready; or a template.
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

    /// The tags of a name, and the id that each of them means. Refused for a name that nothing was published under.
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

    /// Removes a snapshot. What was made from it stays, and what it is made of goes with the last of them.
    pub async fn delete_snapshot(&self, owner: &Owner, text: &str) -> Result<(), EngineError> {
        let found = self.snapshot(owner, text).await?;
        let Ok(id) = found.id.parse::<SnapshotId>() else {
            return Err(EngineError::SnapshotNotFound { name: found.name });
        };
        let store = &self.shared().db;
        let Some(before) = store.snapshot(id).await? else {
            // A template that was made otherwise.
            return self.delete_template(owner, &found.name).await;
        };
        store.settle_snapshot(id, SnapshotState::Deleting, crate::observe::clock::now()).await?;
        match store.snapshot(id).await? {
            Some(now) if !(before.state == SnapshotState::Building && is_captured(&now)) => {
                self.finish_delete(&now).await
            }
            // Whoever captures it finishes this.
            _ => Ok(()),
        }
    }

    async fn finish_delete(&self, row: &SnapshotRow) -> Result<(), EngineError> {
        let removed = match self.template_of(row) {
            Some(template) => self.delete_template(&row.owner, &template.name).await,
            None => Ok(()),
        };
        match removed {
            Ok(()) | Err(EngineError::TemplateNotFound { .. }) => {
                self.shared().db.delete_snapshot(row.id).await
            }
            // Sandboxes were made from it. It is looked at again when the next snapshot is made, and at the next start.
            Err(EngineError::TemplateInUse { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Removes what deleted snapshots were made of, where the last sandbox that was made from them is gone.
    async fn finish_snapshot_deletes(&self) {
        let rows = match self.shared().db.snapshots(None).await {
            Ok(rows) => rows,
            Err(error) => {
                warn!(error = chain(&error), "cannot look for deleted snapshots; the next snapshot does");
                return;
            }
        };
        for row in rows.iter().filter(|row| row.state == SnapshotState::Deleting && !is_captured(row)) {
            if let Err(error) = self.finish_delete(row).await {
                warn!(snapshot = %row.id, error = chain(&error), "cannot delete a snapshot; the next one tries again");
            }
        }
    }
}

/// Whether a sandbox is being captured for it, unless that has failed.
fn is_captured(row: &SnapshotRow) -> bool {
    row.sandbox.is_some() && row.template.is_none()
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
        created_at: template.created_at,
        updated_at: template.updated_at,
    }
}

/// Goes on with what a daemon before this one began, or says that it came to nothing.
pub(crate) async fn resume_interrupted(engine: &Engine) -> Result<(), EngineError> {
    let shared = engine.shared();
    for row in shared.db.snapshots(None).await? {
        if !matches!(row.state, SnapshotState::Building | SnapshotState::Deleting) {
            continue;
        }
        if let Some(sandbox) = row.sandbox {
            // The capture may have left it frozen.
            let live = shared.registry().get(sandbox);
            if let Some(live) = live
                && let Err(error) = end_old_holds(&live).await
            {
                info!(%sandbox, error = chain(&error), "cannot thaw a sandbox that was being captured");
            }
            image::unname(shared, &format!("{NAMES}{}", row.id)).await?;
        }
        if row.state == SnapshotState::Deleting {
            if let Err(error) = engine.finish_delete(&row).await {
                warn!(snapshot = %row.id, error = chain(&error), "cannot delete a snapshot; the next start tries again");
            }
            continue;
        }
        match engine.template_of(&row) {
            Some(template) => {
                if let Some(id) = template.id {
                    shared.db.set_snapshot_template(row.id, id).await?;
                }
                engine.follow(row, template.name);
            }
            None => {
                let reason = "the daemon ended while it was made; make it again".to_owned();
                engine.settle(&row, SnapshotState::Failed { reason }).await?;
            }
        }
    }
    Ok(())
}
