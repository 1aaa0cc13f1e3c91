//! All templates in memory, by owner and name.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::image::Digest;
use wire::launch::Over;
use wire::{SandboxId, TemplateId};

use crate::db::{Descent, LoadedTemplates, TemplateRow, VersionRow};
use crate::error::EngineError;
use crate::model::Owner;
use crate::template::{DEFAULT, Preparation, Source, TemplateHead, TemplateName, Version};

/// The files that sandboxes of a template start with, if the template comes from a snapshot.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub over: Over,
    pub descent: Descent,
}

/// All templates of one data directory.
#[derive(Default)]
pub(crate) struct Templates {
    index: Mutex<TemplateIndex>,
    origins: Mutex<Origins>,
    /// Held from a change of the rows until the index matches them, as with images.
    pub(super) changing: tokio::sync::Mutex<()>,
}

/// The snapshots that templates come from.
#[derive(Default)]
struct Origins {
    /// Of templates that are being made.
    announced: BTreeMap<(Owner, TemplateName), Origin>,
    made: BTreeMap<TemplateId, Origin>,
}

/// The newest version of every template.
pub(super) type TemplateIndex = BTreeMap<(Owner, TemplateName), Arc<Version>>;

impl Templates {
    /// Opens the templates from their rows, and returns them with the version that each sandbox was made from.
    pub fn open(loaded: LoadedTemplates) -> (Self, BTreeMap<SandboxId, Arc<Version>>) {
        let mut versions: BTreeMap<(TemplateId, u32), VersionRow> =
            loaded.versions.into_iter().map(|row| ((row.template, row.version), row)).collect();
        let mut index = TemplateIndex::new();
        let mut heads = BTreeMap::new();
        let mut made = BTreeMap::new();
        for row in loaded.templates {
            let TemplateRow { id, owner, name, version, created_at } = row;
            let head = Arc::new(TemplateHead {
                id,
                owner: owner.clone(),
                created_at,
                name: Mutex::new(name.clone()),
            });
            if let Some(row) = versions.remove(&(id, version)) {
                let newest = Version::new(&head, &row);
                made.insert((id, version), Arc::clone(&newest));
                index.insert((owner, name), newest);
            }
            heads.insert(id, head);
        }
        let mut uses = BTreeMap::new();
        for held in loaded.uses {
            let key = (held.template, held.version);
            if !made.contains_key(&key)
                && let (Some(row), Some(head)) = (versions.remove(&key), heads.get(&held.template))
            {
                made.insert(key, Version::new(head, &row));
            }
            if let Some(version) = made.get(&key) {
                uses.insert(held.sandbox, Arc::clone(version));
            }
        }
        (Self { index: Mutex::new(index), ..Self::default() }, uses)
    }

    pub(super) fn index(&self) -> MutexGuard<'_, TemplateIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A template is about to be made from a snapshot. Before the template, so that no sandbox starts without the files.
    pub fn announce_origin(&self, owner: &Owner, name: &TemplateName, origin: Origin) {
        self.origins().announced.insert((owner.clone(), name.clone()), origin);
    }

    /// The announced template was made, or not.
    pub fn settle_origin(&self, owner: &Owner, name: &TemplateName, made: Option<TemplateId>) {
        let mut origins = self.origins();
        if let (Some(origin), Some(id)) = (origins.announced.remove(&(owner.clone(), name.clone())), made) {
            origins.made.insert(id, origin);
        }
    }

    /// Adds what the rows say.
    pub fn add_origin(&self, template: TemplateId, origin: Origin) {
        self.origins().made.insert(template, origin);
    }

    /// The template is gone.
    pub fn forget_origin(&self, template: TemplateId) {
        self.origins().made.remove(&template);
    }

    /// The snapshot that a template comes from.
    pub fn origin(&self, version: &Version) -> Option<Origin> {
        let origins = self.origins();
        let announced = || origins.announced.get(&(version.head.owner.clone(), version.head.name()));
        origins.made.get(&version.head.id).or_else(announced).cloned()
    }

    fn origins(&self) -> MutexGuard<'_, Origins> {
        self.origins.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all preparations.
    pub fn halt(&self) {
        self.index().values().for_each(|version| version.stop());
    }

    /// The template that a name of the owner refers to.
    pub fn find(&self, owner: &Owner, name: &str) -> Result<Source, EngineError> {
        if name == DEFAULT {
            return Ok(Source::BuiltIn);
        }
        self.newest(owner, name).map(Source::Version)
    }

    pub(super) fn newest(&self, owner: &Owner, name: &str) -> Result<Arc<Version>, EngineError> {
        let not_found = || EngineError::TemplateNotFound { name: name.to_owned() };
        let name = TemplateName::parse(name).map_err(|_| not_found())?;
        self.index().get(&(owner.clone(), name)).cloned().ok_or_else(not_found)
    }

    /// Renames a template in memory. Name and index change together: a caller who reads the new name finds the template.
    pub(super) fn rename(&self, newest: &Arc<Version>, name: TemplateName) {
        let (mut index, head) = (self.index(), &newest.head);
        let before = head.set_name(name.clone());
        index.remove(&(head.owner.clone(), before));
        index.insert((head.owner.clone(), name), Arc::clone(newest));
    }

    /// What all versions of a template share, by the template's id.
    pub fn head(&self, template: TemplateId) -> Option<Arc<TemplateHead>> {
        let index = self.index();
        index.values().find(|version| version.head.id == template).map(|version| Arc::clone(&version.head))
    }

    /// While this is held, no template is made, changed or deleted.
    pub async fn unchanged(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.changing.lock().await
    }

    /// How many templates hold an image.
    pub fn holding(&self, image: Digest) -> usize {
        let holds = |version: &&Arc<Version>| matches!(version.preparation(), Preparation::Ready(prepared) if prepared.image == Some(image));
        self.index().values().filter(holds).count()
    }
}
