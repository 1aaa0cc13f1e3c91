//! Calls about templates: list, show, create, apply, update, prepare, delete, watch.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use tracing::info;
use wire::TemplateId;

use crate::Shared;
use crate::db::{TemplateRow, VersionRow};
use crate::error::{EngineError, Resource};
use crate::image::{self, PullProgress};
use crate::model::Owner;
use crate::model::random::random_u128;
use crate::template::check::checked;
use crate::template::prepare::{first_preparation, publish, set_preparation, start_preparing};
use crate::template::watch::FollowedVersion;
use crate::template::{
    DEFAULT, Preparation, Prepared, Source, Template, TemplateHead, TemplateName, TemplateSpec,
    TemplateUpdate, TemplateWatcher, Version,
};

/// The maximum number of templates of one owner.
const TEMPLATES_MAX: usize = 10_000;

impl crate::Engine {
    /// An owner's templates, sorted by name after the built-in one.
    pub fn templates(&self, owner: &Owner) -> Vec<Template> {
        let index: Vec<_> = self.shared().templates.index().values().cloned().collect();
        let mine = index.iter().filter(|version| version.head.owner == *owner);
        let counts = self.sandboxes_by_template(owner);
        let count = |id: Option<TemplateId>| counts.get(&id).copied().unwrap_or(0);
        let mut list = vec![built_in(count(None))];
        list.extend(mine.map(|version| described(version, count(Some(version.head.id)))));
        list
    }

    /// A template by its name.
    pub fn template(&self, owner: &Owner, name: &str) -> Result<Template, EngineError> {
        let counts = self.sandboxes_by_template(owner);
        let count = |id: Option<TemplateId>| counts.get(&id).copied().unwrap_or(0);
        Ok(match self.shared().templates.find(owner, name)? {
            Source::BuiltIn => built_in(count(None)),
            Source::Version(version) => described(&version, count(Some(version.head.id))),
        })
    }

    fn sandboxes_by_template(&self, owner: &Owner) -> BTreeMap<Option<TemplateId>, usize> {
        let mut counts = BTreeMap::new();
        for live in self.shared().registry().all() {
            if live.owner == *owner && !live.is_hidden() {
                *counts.entry(live.version.as_ref().map(|version| version.head.id)).or_default() += 1;
            }
        }
        counts
    }

    /// Makes a template. Returns when its row is written; a task prepares it afterwards.
    pub async fn create_template(
        &self,
        owner: &Owner,
        name: TemplateName,
        spec: TemplateSpec,
    ) -> Result<Template, EngineError> {
        let _changing = self.shared().templates.changing.lock().await;
        self.check_template_name(owner, &name)?;
        self.insert_template(owner, name, spec, None).await
    }

    /// Makes a template, or gives an existing one exactly these contents. If it has them already, it stays as it is, but a failed
    /// preparation is retried. With `prepared`, the version is ready at once.
    pub async fn apply_template(
        &self,
        owner: &Owner,
        name: TemplateName,
        spec: TemplateSpec,
        prepared: Option<Prepared>,
    ) -> Result<Template, EngineError> {
        let _changing = self.shared().templates.changing.lock().await;
        match self.shared().templates.newest(owner, name.as_str()) {
            Ok(version) => self.change_template(version, None, spec, prepared).await,
            Err(_) => {
                self.check_template_name(owner, &name)?;
                self.insert_template(owner, name, spec, prepared).await
            }
        }
    }

    /// Changes a template. New contents make a new version; a new name does not.
    pub async fn update_template(
        &self,
        owner: &Owner,
        name: &str,
        mut update: TemplateUpdate,
    ) -> Result<Template, EngineError> {
        let _changing = self.shared().templates.changing.lock().await;
        if name == DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        let version = self.shared().templates.newest(owner, name)?;
        let other = update.name.take().filter(|other| *other != version.head.name());
        if let Some(other) = &other {
            self.check_template_name(owner, other)?;
        }
        let spec = update.applied(&version.spec);
        self.change_template(version, other, spec, None).await
    }

    /// Retries a failed preparation. Has no effect if the preparation has not failed.
    pub async fn prepare_template(&self, owner: &Owner, name: &str) -> Result<Template, EngineError> {
        let shared = self.shared();
        let _changing = shared.templates.changing.lock().await;
        if let Source::Version(version) = shared.templates.find(owner, name)? {
            self.retry_failed(&version).await?;
        }
        self.template(owner, name)
    }

    /// Deletes a template. Fails while a sandbox exists that was made from any of its versions, or while a pool uses
    /// the template.
    pub async fn delete_template(&self, owner: &Owner, name: &str) -> Result<(), EngineError> {
        let shared = self.shared();
        let _changing = shared.templates.changing.lock().await;
        if name == DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        let version = shared.templates.newest(owner, name)?;
        let key = (owner.clone(), version.head.name());
        {
            // Creates look the template up under the same lock, so none can start using it now.
            let registry = shared.registry();
            let id = version.head.id;
            let pools = shared.pools.holding(owner, id);
            let all = registry.all();
            let made = all.iter().filter(|live| {
                live.version.as_ref().is_some_and(|version| version.head.id == id)
                    && (pools == 0 || !live.is_hidden())
            });
            let sandboxes = made.count();
            if sandboxes > 0 || pools > 0 {
                return Err(EngineError::TemplateInUse { name: name.to_owned(), sandboxes, pools });
            }
            shared.templates.index().remove(&key);
        }
        if let Err(error) = shared.db.delete_template(version.head.id).await {
            shared.templates.index().insert(key, version);
            return Err(error);
        }
        version.retire();
        publish(shared, &version, None);
        info!(template = name, "template deleted");
        Ok(())
    }

    /// Watches a template's preparation.
    pub fn watch_template(&self, owner: &Owner, name: &str) -> Result<TemplateWatcher, EngineError> {
        let followed = match self.shared().templates.find(owner, name)? {
            Source::BuiltIn => None,
            Source::Version(version) => Some(FollowedVersion::new(version)),
        };
        Ok(TemplateWatcher { engine: self.clone(), owner: owner.clone(), followed, over: false })
    }

    /// Checks that the name is free, and that the owner may have another template.
    fn check_template_name(&self, owner: &Owner, name: &TemplateName) -> Result<(), EngineError> {
        let index = self.shared().templates.index();
        if name.as_str() == DEFAULT {
            return Err(EngineError::TemplateBuiltIn);
        }
        if index.contains_key(&(owner.clone(), name.clone())) {
            return Err(EngineError::TemplateNameTaken { name: name.to_string() });
        }
        if index.keys().filter(|(other, _)| other == owner).count() >= TEMPLATES_MAX {
            return Err(EngineError::Quota { resource: Resource::Templates, limit: TEMPLATES_MAX as u64 });
        }
        Ok(())
    }

    /// The caller holds `changing`.
    async fn insert_template(
        &self,
        owner: &Owner,
        name: TemplateName,
        spec: TemplateSpec,
        prepared: Option<Prepared>,
    ) -> Result<Template, EngineError> {
        let (shared, spec, now) = (self.shared(), checked(spec)?, crate::observe::clock::now());
        // Report an unknown volume now, not when the first sandbox is made.
        shared.volumes.resolve(owner, spec.mounts.clone())?;
        let id = TemplateId::from_random(random_u128());
        let first = VersionRow {
            template: id,
            version: 1,
            preparation: first_preparation(shared, &spec, prepared)?,
            spec,
            made_at: now,
        };
        let row = TemplateRow { id, owner: owner.clone(), name: name.clone(), version: 1, created_at: now };
        shared.db.insert_template(row, first.clone()).await?;
        info!(template = %name, "template made");
        let head = TemplateHead { id, owner: owner.clone(), created_at: now, name: Mutex::new(name.clone()) };
        let version = Version::new(&Arc::new(head), &first);
        self.make_newest(&version);
        Ok(described(&version, 0))
    }

    /// The caller holds `changing`.
    async fn change_template(
        &self,
        version: Arc<Version>,
        name: Option<TemplateName>,
        spec: TemplateSpec,
        prepared: Option<Prepared>,
    ) -> Result<Template, EngineError> {
        let shared = self.shared();
        let (head, spec) = (&version.head, checked(spec)?);
        if spec.mounts != version.spec.mounts {
            shared.volumes.resolve(&head.owner, spec.mounts.clone())?;
        }
        let next = next_version(shared, &version, spec, prepared)?;
        if name.is_none() && next.is_none() {
            self.retry_failed(&version).await?;
            return self.template(&head.owner, head.name().as_str());
        }
        shared.db.change_template(head.id, name.clone(), next.clone()).await?;
        if let Some(name) = name {
            shared.templates.rename(&version, name);
            if next.is_none() {
                publish(shared, &version, Some(version.preparation()));
            }
        }
        if let Some(next) = next {
            info!(template = %head.name(), version = next.version, "template has a new version");
            let next = Version::new(head, &next);
            self.make_newest(&next);
            // Retired after the new version is in the index, because callers that wait for the old version look for
            // the new one there.
            version.retire();
        }
        self.template(&head.owner, head.name().as_str())
    }

    /// Makes a version whose row is written the newest of its template.
    fn make_newest(&self, version: &Arc<Version>) {
        let shared = self.shared();
        let key = (version.head.owner.clone(), version.head.name());
        shared.templates.index().insert(key, Arc::clone(version));
        publish(shared, version, Some(version.preparation()));
        if version.preparation() == Preparation::Preparing {
            start_preparing(shared, version);
        }
    }

    /// Retries the preparation of a version if it failed.
    async fn retry_failed(&self, version: &Arc<Version>) -> Result<(), EngineError> {
        let shared = self.shared();
        if let Preparation::Failed { .. } = version.preparation() {
            let preparing = Preparation::Preparing;
            shared.db.record_preparation(version.head.id, version.number, preparing).await?;
            version.progress.send_replace(PullProgress::default());
            set_preparation(shared, version, Preparation::Preparing);
            start_preparing(shared, version);
        }
        Ok(())
    }
}

/// The version that a change makes; `None` if the newest one is the same.
fn next_version(
    shared: &Shared,
    newest: &Version,
    spec: TemplateSpec,
    prepared: Option<Prepared>,
) -> Result<Option<VersionRow>, EngineError> {
    let same_image = match (&prepared, newest.preparation()) {
        (None, _) => true,
        (Some(next), Preparation::Ready(now)) => *next == now,
        (Some(_), _) => false,
    };
    if spec == newest.spec && same_image {
        return Ok(None);
    }
    Ok(Some(VersionRow {
        template: newest.head.id,
        version: newest.number + 1,
        preparation: first_preparation(shared, &spec, prepared)?,
        spec,
        made_at: crate::observe::clock::now(),
    }))
}

fn built_in(sandboxes: usize) -> Template {
    Template {
        id: None,
        name: DEFAULT.into(),
        version: 1,
        spec: TemplateSpec::default(),
        preparation: Preparation::Ready(Prepared { resolved: image::HOST.into(), image: None }),
        sandboxes,
        created_at: SystemTime::UNIX_EPOCH,
        updated_at: SystemTime::UNIX_EPOCH,
    }
}

fn described(version: &Version, sandboxes: usize) -> Template {
    Template {
        id: Some(version.head.id),
        name: version.head.name().to_string(),
        version: version.number,
        spec: TemplateSpec { image: image::familiar(&version.spec.image), ..version.spec.clone() },
        preparation: version.preparation(),
        sandboxes,
        created_at: version.head.created_at,
        updated_at: version.made_at,
    }
}
