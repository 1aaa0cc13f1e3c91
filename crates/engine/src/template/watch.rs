//! Watches a template until it is ready or has failed.

use std::sync::Arc;

use tokio::sync::watch;

use crate::error::EngineError;
use crate::image::PullProgress;
use crate::model::Owner;
use crate::template::{DEFAULT, Preparation, Template, Version};

/// A step of a template's preparation.
#[derive(Debug, Clone)]
pub enum TemplateTold {
    /// The pull of its image has come this far.
    Progress(PullProgress),
    /// The template is ready, or its preparation failed. This is the last step.
    Settled(Box<Template>),
}

/// Watches a template until it is ready or has failed.
pub struct TemplateWatcher {
    pub(super) engine: crate::Engine,
    pub(super) owner: Owner,
    pub(super) followed: Option<FollowedVersion>,
    pub(super) over: bool,
}

pub(super) struct FollowedVersion {
    version: Arc<Version>,
    preparation: watch::Receiver<Preparation>,
    progress: watch::Receiver<PullProgress>,
}

impl FollowedVersion {
    pub(super) fn new(version: Arc<Version>) -> Self {
        let (preparation, progress) = (version.preparation.subscribe(), version.progress.subscribe());
        Self { version, preparation, progress }
    }
}

impl TemplateWatcher {
    /// The next step; `None` at the end. If the version is replaced, the watcher follows the new one. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<TemplateTold>, EngineError> {
        if self.over {
            return Ok(None);
        }
        loop {
            let Some(followed) = &mut self.followed else {
                self.over = true;
                let template = self.engine.template(&self.owner, DEFAULT)?;
                return Ok(Some(TemplateTold::Settled(Box::new(template))));
            };
            let name = followed.version.head.name();
            let now = followed.preparation.borrow_and_update().clone();
            if is_settled(&now) {
                let template = self.engine.template(&self.owner, name.as_str())?;
                if is_settled(&template.preparation) {
                    self.over = true;
                    return Ok(Some(TemplateTold::Settled(Box::new(template))));
                }
            }
            if now != Preparation::Preparing {
                // The version was replaced, perhaps at this moment, or its preparation is retried.
                let newest = self.engine.shared().templates.newest(&self.owner, name.as_str())?;
                self.followed = Some(FollowedVersion::new(newest));
                continue;
            }
            tokio::select! {
                changed = followed.preparation.changed() => {
                    changed.map_err(|_| EngineError::Stopping)?;
                }
                changed = followed.progress.changed() => {
                    changed.map_err(|_| EngineError::Stopping)?;
                    let progress = followed.progress.borrow_and_update().clone();
                    return Ok(Some(TemplateTold::Progress(progress)));
                }
            }
        }
    }
}

fn is_settled(preparation: &Preparation) -> bool {
    match preparation {
        Preparation::Ready(_) | Preparation::Failed { .. } => true,
        Preparation::Preparing | Preparation::Replaced => false,
    }
}
