//! One template in memory, and its versions.
//!
//! A sandbox holds the version that it was made from, so old versions stay in memory as long as such sandboxes exist.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::SystemTime;

use tokio::sync::watch;
use tokio::task::AbortHandle;
use wire::TemplateId;

use crate::db::VersionRow;
use crate::image::PullProgress;
use crate::model::Owner;
use crate::template::{Preparation, TemplateName, TemplateSpec};

/// What all versions of a template share.
#[derive(Debug)]
pub(crate) struct TemplateHead {
    pub id: TemplateId,
    pub owner: Owner,
    pub created_at: SystemTime,
    pub(super) name: Mutex<TemplateName>,
}

impl TemplateHead {
    /// Sets a new name, and returns the previous one.
    pub(super) fn set_name(&self, name: TemplateName) -> TemplateName {
        std::mem::replace(&mut *self.name.lock().unwrap_or_else(PoisonError::into_inner), name)
    }

    pub fn name(&self) -> TemplateName {
        self.name.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// One version of a template.
pub(crate) struct Version {
    pub head: Arc<TemplateHead>,
    pub number: u32,
    pub spec: TemplateSpec,
    pub(super) made_at: SystemTime,
    pub(super) preparation: watch::Sender<Preparation>,
    pub(super) progress: watch::Sender<PullProgress>,
    pub(super) task: Mutex<Option<AbortHandle>>,
}

impl Version {
    pub(super) fn new(head: &Arc<TemplateHead>, row: &VersionRow) -> Arc<Self> {
        Arc::new(Self {
            head: Arc::clone(head),
            number: row.version,
            spec: row.spec.clone(),
            made_at: row.made_at,
            preparation: watch::Sender::new(row.preparation.clone()),
            progress: watch::Sender::new(PullProgress::default()),
            task: Mutex::new(None),
        })
    }

    pub fn preparation(&self) -> Preparation {
        self.preparation.borrow().clone()
    }

    /// Follows the preparation.
    pub fn watch(&self) -> watch::Receiver<Preparation> {
        self.preparation.subscribe()
    }

    /// Waits until the version is no longer being prepared.
    pub async fn settled(&self) -> Preparation {
        let mut preparation = self.preparation.subscribe();
        let settled = preparation.wait_for(|now| *now != Preparation::Preparing).await;
        // An error would mean that the sender is gone, which is impossible: `self` owns it.
        settled.map_or(Preparation::Replaced, |now| now.clone())
    }

    /// Ends the preparation, and notifies those who wait for it that the version was replaced.
    pub(super) fn retire(&self) {
        self.stop();
        self.preparation.send_replace(Preparation::Replaced);
    }

    /// Ends the preparation.
    pub(super) fn stop(&self) {
        if let Some(task) = self.task.lock().unwrap_or_else(PoisonError::into_inner).take() {
            task.abort();
        }
    }
}

/// What a template's name refers to.
pub(crate) enum Source {
    /// The built-in template.
    BuiltIn,
    /// The newest version of an owner's template.
    Version(Arc<Version>),
}

impl Source {
    pub fn spec(&self) -> TemplateSpec {
        match self {
            Self::BuiltIn => TemplateSpec::default(),
            Self::Version(version) => version.spec.clone(),
        }
    }
}
