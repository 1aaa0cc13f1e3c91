//! Snapshots from archives: an exported snapshot, or an image that another tool has saved.
//!
//! The archive becomes an image that its owner alone can use, unpacked by the backend's confined process, and a template
//! over it. The row is written when the image is complete, so an import that a crash interrupts leaves nothing: the image has
//! no name any more after the next start, and is collected.

use tracing::warn;

use super::{NAMES, Snapshot, SnapshotSpec, SnapshotState, template_name};
use crate::Engine;
use crate::db::SnapshotRow;
use crate::error::{EngineError, chain};
use crate::image::{self, ImageFault, ImageRef, Upload};
use crate::model::Key;
use crate::model::labels::Labels;
use crate::template::{Prepared, TemplateSpec};

/// A request to make a snapshot of an archive.
#[derive(Debug, Clone)]
pub struct ImportSpec {
    /// Its name.
    pub name: String,
    /// How it can be found.
    pub labels: Labels,
}

impl Engine {
    /// Checks a request before its archive is received.
    pub async fn check_import(&self, key: &Key, spec: &ImportSpec) -> Result<(), EngineError> {
        wish(spec).check()?;
        self.check_snapshots(key).await
    }

    /// Makes a snapshot of an archive with one image. Returns when sandboxes can be made from it.
    pub async fn import_snapshot(
        &self,
        key: &Key,
        upload: Upload,
        spec: ImportSpec,
    ) -> Result<Snapshot, EngineError> {
        self.check_import(key, &spec).await?;
        self.finish_snapshot_deletes().await;
        let spec = wish(&spec);
        let mut row = spec.row(&key.owner, None);
        let resolved = format!("{NAMES}{}", row.id);
        row.image = Some(resolved.clone());
        let name = ImageRef::parse(&resolved).map_err(|error| EngineError::Image {
            doing: "import",
            name: row.name.clone(),
            source: std::sync::Arc::new(ImageFault::Keep {
                doing: "name the image",
                source: std::io::Error::other(error),
            }),
        })?;
        let pull = self.import_private(key, upload, name);
        // A task of its own, so that a caller who disconnects does not leave half of a snapshot.
        let (engine, key) = (self.clone(), key.clone());
        let importing = tokio::spawn(async move {
            let made = async {
                let images = pull.finished().await?;
                // Others may have taken the last place while the archive was unpacked.
                engine.check_snapshots(&key).await?;
                engine.shared().db.insert_snapshot(row.clone()).await?;
                let image = images.first().map(|image| image.digest);
                let made = engine
                    .made_from(&row, spec.template, Prepared { resolved: resolved.clone(), image })
                    .await;
                if made.is_err()
                    && let Err(left) = engine.forget(&row).await
                {
                    warn!(snapshot = %row.id, error = chain(&left), "cannot remove a snapshot that failed");
                }
                made
            };
            let made = made.await;
            if let Err(error) = image::unname(engine.shared(), &resolved).await {
                warn!(error = chain(&error), "cannot remove the name of an image; the next start does");
            }
            made?;
            engine.settle_capture(&row, SnapshotState::Ready).await?;
            engine.snapshot_of(row.id).await
        });
        importing.await.map_err(|_| EngineError::Stopping)?
    }

    async fn made_from(
        &self,
        row: &SnapshotRow,
        spec: TemplateSpec,
        prepared: Prepared,
    ) -> Result<(), EngineError> {
        let spec = TemplateSpec { image: prepared.resolved.clone(), ..spec };
        let made = self.apply_template(&row.owner, template_name(row)?, spec, Some(prepared)).await?;
        match made.id {
            Some(template) => self.shared().db.set_snapshot_template(row.id, template).await,
            None => Ok(()),
        }
    }
}

fn wish(spec: &ImportSpec) -> SnapshotSpec {
    SnapshotSpec {
        name: spec.name.clone(),
        tags: Vec::new(),
        template: TemplateSpec::default(),
        note: String::new(),
        labels: spec.labels.clone(),
    }
}
