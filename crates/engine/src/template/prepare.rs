//! The tasks that prepare versions: they pull the image, if it is not on this machine, and hold it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ::image::Digest;
use tracing::{Instrument, info, info_span, warn};

use crate::Shared;
use crate::error::{EngineError, chain, truncated};
use crate::image::{self, Choice, ImageName, PullSpec};
use crate::observe::events::TemplateHappened;
use crate::template::{Preparation, Prepared, TemplateSpec, Version};

/// How long a pull may take.
const PULL_SECONDS: u64 = 3600;
/// How often to pull an image that is removed before the version holds it.
const TAKES_MAX: usize = 3;
/// How many bytes of a failure's reason are kept.
const REASON_MAX: usize = 4096;

/// Restarts the preparations that an earlier daemon did not finish.
pub(crate) fn resume_interrupted(shared: &Arc<Shared>) {
    let all: Vec<_> = shared.templates.index().values().cloned().collect();
    for version in all {
        if version.preparation() == Preparation::Preparing {
            info!(template = %version.head.name(), "resuming the preparation of a template");
            start_preparing(shared, &version);
        }
    }
}

/// Prepares those versions again that hold one of these images, whose files are gone. The rows already say that these
/// versions are being prepared.
pub(crate) fn prepare_again(shared: &Arc<Shared>, broken: &[Digest]) {
    let all: Vec<_> = shared.templates.index().values().cloned().collect();
    for version in all {
        let is_broken = matches!(version.preparation(),
            Preparation::Ready(Prepared { image: Some(image), .. }) if broken.contains(&image));
        if is_broken {
            set_preparation(shared, &version, Preparation::Preparing);
            start_preparing(shared, &version);
        }
    }
}

pub(super) fn start_preparing(shared: &Arc<Shared>, version: &Arc<Version>) {
    let span = info_span!("template", name = %version.head.name(), version = version.number);
    let task = prepare(Arc::clone(shared), Arc::clone(version)).instrument(span);
    let task = shared.runtime.spawn(task).abort_handle();
    *version.task.lock().unwrap_or_else(PoisonError::into_inner) = Some(task);
}

async fn prepare(shared: Arc<Shared>, version: Arc<Version>) {
    let late = || EngineError::Full {
        what: format!("the pull of its image took longer than {PULL_SECONDS} seconds"),
    };
    let work = tokio::time::timeout(Duration::from_secs(PULL_SECONDS), hold_image(&shared, &version)).await;
    let preparation = match work.unwrap_or_else(|_| Err(late())) {
        Ok(prepared) => {
            info!("template is ready");
            Preparation::Ready(prepared)
        }
        Err(error) => record_failure(&shared, &version, &error).await,
    };
    set_preparation(&shared, &version, preparation);
}

async fn record_failure(shared: &Shared, version: &Version, error: &EngineError) -> Preparation {
    let reason = truncated(chain(error), REASON_MAX);
    warn!(reason, "cannot prepare template");
    let failed = Preparation::Failed { reason };
    let recorded = shared.db.record_preparation(version.head.id, version.number, failed.clone()).await;
    if let Err(error) = recorded {
        // The row still says that the version is being prepared, so the next daemon retries.
        warn!(error = chain(&error), "cannot record that a template failed");
    }
    failed
}

/// Pulls the image, if it is not on this machine, and holds it so that it cannot be removed.
async fn hold_image(shared: &Arc<Shared>, version: &Version) -> Result<Prepared, EngineError> {
    let (head, store) = (&version.head, &shared.db);
    let Choice { name, .. } = shared.images.choose(&version.spec.image)?;
    let ImageName::Reference(reference) = &name else {
        let prepared = Prepared { resolved: image::HOST.into(), image: None };
        store.record_preparation(head.id, version.number, Preparation::Ready(prepared.clone())).await?;
        return Ok(prepared);
    };
    let resolved = name.canonical();
    for _ in 0..TAKES_MAX {
        if shared.images.find(&head.owner, &resolved).is_none() {
            pull(shared, version, PullSpec::new(reference.clone())).await?;
        }
        let taken = store.take_template_image(head.id, version.number, head.owner.clone(), resolved.clone());
        if let Some(image) = taken.await? {
            return Ok(Prepared { resolved, image: Some(image) });
        }
    }
    Err(EngineError::ImageNotFound { name: name.familiar() })
}

/// Pulls an image, and reports the progress to those who watch the version.
async fn pull(shared: &Arc<Shared>, version: &Version, spec: PullSpec) -> Result<(), EngineError> {
    let pull = image::pull(shared, &version.head.owner, spec);
    let mut progress = pull.progress();
    let mut finished = std::pin::pin!(pull.finished());
    loop {
        tokio::select! {
            images = &mut finished => return images.map(|_| ()),
            Ok(()) = progress.changed() => {
                version.progress.send_replace(progress.borrow_and_update().clone());
            }
        }
    }
}

/// Sets the preparation state of a version, and notifies those who wait for it or watch events.
pub(super) fn set_preparation(shared: &Shared, version: &Version, preparation: Preparation) {
    let told = version.preparation.send_if_modified(|now| {
        // A version that was replaced in the meantime stays replaced.
        let stands = *now != Preparation::Replaced;
        if stands {
            *now = preparation.clone();
        }
        stands
    });
    if told {
        publish(shared, version, Some(preparation));
    }
}

pub(super) fn publish(shared: &Shared, version: &Version, preparation: Option<Preparation>) {
    let what = TemplateHappened { name: version.head.name(), version: version.number, preparation };
    shared.events.publish_template(&version.head.owner, what);
}

/// The state of a new version. The host's own files need no preparation.
pub(super) fn first_preparation(
    shared: &Shared,
    spec: &TemplateSpec,
    prepared: Option<Prepared>,
) -> Result<Preparation, EngineError> {
    let choice = shared.images.choose(&spec.image)?;
    Ok(match (prepared, choice.name) {
        (Some(prepared), _) => Preparation::Ready(prepared),
        (None, ImageName::Host) => Preparation::Ready(Prepared { resolved: image::HOST.into(), image: None }),
        (None, ImageName::Reference(_)) => Preparation::Preparing,
    })
}
