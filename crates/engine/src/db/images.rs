//! Rows of images: their layers, their names and aliases, and which sandboxes use them.
//!
//! An image is kept while a name, a sandbox or a template refers to it; a layer is kept while an image has it. The change
//! that finds an image for a sandbox also writes the reference, so the image cannot be collected in between.

use std::time::SystemTime;

use image::Digest;
use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::SandboxId;
use wire::launch::LayerFacts;

use super::Db;
use super::rows::{id_bytes, micros, sandbox_id, signed, time, unreadable, unsigned};
use crate::error::EngineError;

/// A layer's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerRow {
    pub layer: Digest,
    /// The digests of the compressed blob and of its contents; none for layers that were made on this machine.
    pub blob: Option<Digest>,
    pub contents: Option<Digest>,
    pub size: u64,
    pub facts: LayerFacts,
    pub created_at: SystemTime,
}

/// An image's row, with its layers from the lowest up.
#[derive(Debug, Clone)]
pub(crate) struct ImageRow {
    pub digest: Digest,
    pub config: String,
    pub over_host: bool,
    pub layers: Vec<Digest>,
    pub created_at: SystemTime,
}

/// A name's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NameRow {
    /// Empty for a name that all owners share.
    pub owner: String,
    pub name: String,
    pub image: Digest,
    pub named_at: SystemTime,
}

/// Where a layer comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerOrigin {
    /// From a registry or an archive. Its digest is that of its contents.
    Fetched,
    /// Made on this machine. Its digest is computed from how it was made.
    Made,
}

/// An alias's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AliasRow {
    pub name: String,
    pub target: String,
    pub created_at: SystemTime,
}

/// The image that a sandbox uses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageUseRow {
    pub sandbox: SandboxId,
    pub image: Option<Digest>,
    pub alias: Option<String>,
}

/// Everything about images that a starting daemon reads.
#[derive(Debug, Default)]
pub(crate) struct LoadedImages {
    pub layers: Vec<LayerRow>,
    pub images: Vec<ImageRow>,
    pub names: Vec<NameRow>,
    pub aliases: Vec<AliasRow>,
    pub uses: Vec<ImageUseRow>,
}

fn digest_from(row: &Row<'_>, column: &str) -> rusqlite::Result<Digest> {
    row.get_ref(column)?.as_str()?.parse().map_err(|_| unreadable(row, column, "digest"))
}

pub(super) fn optional_digest(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Digest>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| text.parse().map_err(|_| unreadable(row, column, "digest"))).transpose()
}

const LAYER_COLUMNS: &str = "layer, blob, contents, size, entries, bytes, devices_skipped, owners_changed,
    attributes_dropped, created_at";

fn layer_from(row: &Row<'_>) -> rusqlite::Result<LayerRow> {
    Ok(LayerRow {
        layer: digest_from(row, "layer")?,
        blob: optional_digest(row, "blob")?,
        contents: optional_digest(row, "contents")?,
        size: unsigned(row, "size")?,
        facts: LayerFacts {
            entries: unsigned(row, "entries")?,
            bytes: unsigned(row, "bytes")?,
            devices_skipped: unsigned(row, "devices_skipped")?,
            owners_changed: unsigned(row, "owners_changed")?,
            attributes_dropped: unsigned(row, "attributes_dropped")?,
        },
        created_at: time(row, "created_at")?,
    })
}

pub(super) fn text(digest: Digest) -> String {
    digest.to_string()
}

impl Db {
    /// All rows about images.
    pub async fn load_images(&self) -> Result<LoadedImages, EngineError> {
        self.question("read the images' rows", |db| {
            let layers = db
                .prepare(&format!("SELECT {LAYER_COLUMNS} FROM layers"))?
                .query_map([], layer_from)?
                .collect::<Result<_, _>>()?;
            let mut images: Vec<ImageRow> = db
                .prepare("SELECT digest, config, created_at, over_host FROM images")?
                .query_map([], |row| {
                    let (digest, config) = (digest_from(row, "digest")?, row.get("config")?);
                    let (created_at, over_host) = (time(row, "created_at")?, row.get("over_host")?);
                    Ok(ImageRow { digest, config, over_host, layers: Vec::new(), created_at })
                })?
                .collect::<Result<_, _>>()?;
            let mut stack =
                db.prepare("SELECT layer FROM image_layers WHERE image = ?1 ORDER BY position")?;
            for image in &mut images {
                let layers = stack.query_map([text(image.digest)], |row| digest_from(row, "layer"))?;
                image.layers = layers.collect::<Result<_, _>>()?;
            }
            let names = db
                .prepare("SELECT owner, name, image, named_at FROM image_names")?
                .query_map([], |row| {
                    let (owner, name) = (row.get("owner")?, row.get("name")?);
                    Ok(NameRow {
                        owner,
                        name,
                        image: digest_from(row, "image")?,
                        named_at: time(row, "named_at")?,
                    })
                })?
                .collect::<Result<_, _>>()?;
            let aliases = db
                .prepare("SELECT name, target, created_at FROM image_aliases")?
                .query_map([], |row| {
                    Ok(AliasRow {
                        name: row.get("name")?,
                        target: row.get("target")?,
                        created_at: time(row, "created_at")?,
                    })
                })?
                .collect::<Result<_, _>>()?;
            let uses = db
                .prepare("SELECT sandbox, image, alias FROM sandbox_images")?
                .query_map([], |row| {
                    let (image, alias) = (optional_digest(row, "image")?, row.get("alias")?);
                    Ok(ImageUseRow { sandbox: sandbox_id(row, "sandbox")?, image, alias })
                })?
                .collect::<Result<_, _>>()?;
            Ok(LoadedImages { layers, images, names, aliases, uses })
        })
        .await
    }

    /// Inserts a layer that is complete on disk.
    pub async fn put_layer(&self, row: LayerRow) -> Result<(), EngineError> {
        self.change("write the layer's row", move |db| {
            db.prepare_cached(
                "INSERT OR IGNORE INTO layers (layer, blob, contents, size, entries, bytes,
                     devices_skipped, owners_changed, attributes_dropped, created_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            )?
            .execute(params![
                text(row.layer),
                row.blob.map(text),
                row.contents.map(text),
                signed(row.size),
                signed(row.facts.entries),
                signed(row.facts.bytes),
                signed(row.facts.devices_skipped),
                signed(row.facts.owners_changed),
                signed(row.facts.attributes_dropped),
                micros(row.created_at),
            ])?;
            Ok(())
        })
        .await
    }

    /// Whether a layer has a row. Runs on the writer's thread, so that the answer includes all earlier changes.
    pub async fn has_layer(&self, layer: Digest) -> Result<bool, EngineError> {
        self.change("look for the layer's row", move |db| {
            db.prepare_cached("SELECT 1 FROM layers WHERE layer = ?1")?.exists([text(layer)])
        })
        .await
    }

    /// Where a layer comes from, if it has a row. Runs on the writer's thread like [`Self::has_layer`].
    pub async fn layer_origin(&self, layer: Digest) -> Result<Option<LayerOrigin>, EngineError> {
        self.change("look for the layer's row", move |db| {
            db.prepare_cached("SELECT contents IS NOT NULL AS is_fetched FROM layers WHERE layer = ?1")?
                .query_row([text(layer)], |row| {
                    Ok(if row.get("is_fetched")? { LayerOrigin::Fetched } else { LayerOrigin::Made })
                })
                .optional()
        })
        .await
    }

    /// Whether an owner has proved access to a layer, or everyone has it. The empty owner is everyone. Runs on the
    /// writer's thread like [`Self::has_layer`].
    pub async fn may_use_layer(&self, layer: Digest, owner: String) -> Result<bool, EngineError> {
        self.change("look who may use the layer", move |db| {
            db.prepare_cached("SELECT 1 FROM layer_access WHERE layer = ?1 AND owner IN ('', ?2)")?
                .exists(params![text(layer), owner])
        })
        .await
    }

    /// Records that an owner, or everyone, has proved access to a layer.
    pub async fn allow_layer(&self, layer: Digest, owner: String) -> Result<(), EngineError> {
        self.change("write who may use the layer", move |db| {
            db.prepare_cached(
                "INSERT OR IGNORE INTO layer_access (layer, owner)
                 SELECT layer, ?2 FROM layers WHERE layer = ?1",
            )?
            .execute(params![text(layer), owner])?;
            Ok(())
        })
        .await
    }

    /// The blob that a layer was unpacked from.
    pub async fn layer_blob(&self, layer: Digest) -> Result<Option<Digest>, EngineError> {
        let blob = self.question("look for the layer's row", move |db| {
            db.prepare_cached("SELECT blob FROM layers WHERE layer = ?1")?
                .query_row([text(layer)], |row| row.get::<_, Option<String>>("blob"))
                .optional()
        });
        Ok(blob.await?.flatten().and_then(|blob| blob.parse().ok()))
    }

    /// The facts about a layer's contents, if it has a row. Runs on the writer's thread like [`Self::has_layer`].
    pub async fn layer_facts(&self, layer: Digest) -> Result<Option<LayerFacts>, EngineError> {
        self.change("look for the layer's row", move |db| {
            db.prepare_cached(&format!("SELECT {LAYER_COLUMNS} FROM layers WHERE layer = ?1"))?
                .query_row([text(layer)], |row| Ok(layer_from(row)?.facts))
                .optional()
        })
        .await
    }

    /// Inserts an image with its names. Returns the facts of its layers, or `None` if a layer is missing.
    pub async fn put_image(
        &self,
        row: ImageRow,
        names: Vec<NameRow>,
    ) -> Result<Option<Vec<LayerFacts>>, EngineError> {
        self.change("write the image's row", move |db| {
            let mut facts = Vec::new();
            for layer in &row.layers {
                let found = db
                    .prepare_cached(&format!("SELECT {LAYER_COLUMNS} FROM layers WHERE layer = ?1"))?
                    .query_row([text(*layer)], layer_from)
                    .optional()?;
                match found {
                    Some(found) => facts.push(found.facts),
                    None => return Ok(None),
                }
            }
            let added = db
                .prepare_cached(
                    "INSERT OR IGNORE INTO images (digest, config, created_at, over_host)
                     VALUES (?1, ?2, ?3, ?4)",
                )?
                .execute(params![text(row.digest), row.config, micros(row.created_at), row.over_host])?;
            if added == 1 {
                let mut add = db.prepare_cached(
                    "INSERT INTO image_layers (image, position, layer) VALUES (?1, ?2, ?3)",
                )?;
                for (position, layer) in row.layers.iter().enumerate() {
                    add.execute(params![text(row.digest), position as i64, text(*layer)])?;
                }
            }
            for name in &names {
                put_name(db, name)?;
            }
            Ok(Some(facts))
        })
        .await
    }

    /// Finds the image that a name of the owner refers to, and takes it for a sandbox in the same change.
    pub async fn take_image(
        &self,
        sandbox: SandboxId,
        owner: String,
        name: String,
    ) -> Result<Option<Digest>, EngineError> {
        self.change("take the image for the sandbox", move |db| {
            let Some(image) = find_image(db, &owner, &name)? else { return Ok(None) };
            let changed = db
                .prepare_cached("UPDATE sandbox_images SET image = ?1 WHERE sandbox = ?2")?
                .execute(params![text(image), id_bytes(sandbox)])?;
            Ok((changed == 1).then_some(image))
        })
        .await
    }

    /// Deletes a name. `false` if there was none.
    pub async fn remove_image_name(&self, owner: String, name: String) -> Result<bool, EngineError> {
        self.change("remove the image's name", move |db| {
            let changed = db
                .prepare_cached("DELETE FROM image_names WHERE owner = ?1 AND name = ?2")?
                .execute(params![owner, name])?;
            Ok(changed == 1)
        })
        .await
    }

    /// Deletes all names of images with a layer that is missing on disk, so that they are pulled again. Returns the images.
    pub async fn forget_images_of(&self, layer: Digest) -> Result<Vec<Digest>, EngineError> {
        self.change("forget broken images", move |db| {
            let broken: Vec<Digest> = db
                .prepare_cached("SELECT DISTINCT image FROM image_layers WHERE layer = ?1")?
                .query_map([text(layer)], |row| digest_from(row, "image"))?
                .collect::<Result<_, _>>()?;
            let mut forget = db.prepare_cached("DELETE FROM image_names WHERE image = ?1")?;
            // If this daemon does not get to prepare them again, the next one does.
            let mut unprepare = db.prepare_cached(
                "UPDATE template_versions SET state = 'preparing', resolved = NULL, image = NULL WHERE image = ?1",
            )?;
            for image in &broken {
                forget.execute([text(*image)])?;
                unprepare.execute([text(*image)])?;
            }
            Ok(broken)
        })
        .await
    }

    /// Deletes the images older than `before` that no name, sandbox or template refers to. Returns them.
    pub async fn collect_images(&self, before: SystemTime) -> Result<Vec<Digest>, EngineError> {
        self.change("remove unused images", move |db| {
            let unused: Vec<Digest> = db
                .prepare_cached(
                    "SELECT digest FROM images WHERE created_at < ?1
                       AND NOT EXISTS (SELECT 1 FROM image_names WHERE image = digest)
                       AND NOT EXISTS (SELECT 1 FROM sandbox_images WHERE image = digest)
                       AND NOT EXISTS (SELECT 1 FROM template_versions WHERE image = digest)",
                )?
                .query_map([micros(before)], |row| digest_from(row, "digest"))?
                .collect::<Result<_, _>>()?;
            let mut remove = db.prepare_cached("DELETE FROM images WHERE digest = ?1")?;
            for image in &unused {
                remove.execute([text(*image)])?;
            }
            Ok(unused)
        })
        .await
    }

    /// Deletes those of `images` that no name, sandbox or template refers to. Returns them.
    pub async fn remove_unused_images(&self, images: Vec<Digest>) -> Result<Vec<Digest>, EngineError> {
        self.change("remove the images of a build", move |db| {
            let mut remove = db.prepare_cached(
                "DELETE FROM images WHERE digest = ?1
                   AND NOT EXISTS (SELECT 1 FROM image_names WHERE image = digest)
                   AND NOT EXISTS (SELECT 1 FROM sandbox_images WHERE image = digest)
                   AND NOT EXISTS (SELECT 1 FROM template_versions WHERE image = digest)",
            )?;
            let mut removed = Vec::new();
            for image in images {
                if remove.execute([text(image)])? > 0 {
                    removed.push(image);
                }
            }
            Ok(removed)
        })
        .await
    }

    /// The layers older than `before` that no image has.
    pub async fn unused_layers(&self, before: SystemTime) -> Result<Vec<Digest>, EngineError> {
        self.question("find unused layers", move |db| {
            db.prepare_cached(
                "SELECT layer FROM layers WHERE created_at < ?1
                   AND NOT EXISTS (SELECT 1 FROM image_layers WHERE image_layers.layer = layers.layer)",
            )?
            .query_map([micros(before)], |row| digest_from(row, "layer"))?
            .collect()
        })
        .await
    }

    /// The digests of all layers.
    pub async fn layers(&self) -> Result<Vec<Digest>, EngineError> {
        self.question("list the layers' rows", |db| {
            db.prepare("SELECT layer FROM layers")?.query_map([], |row| digest_from(row, "layer"))?.collect()
        })
        .await
    }

    /// Deletes a layer's row, unless an image has the layer or it is pinned. Returns the size of the layer's contents
    /// if it was deleted.
    pub async fn remove_layer(
        &self,
        layer: Digest,
        is_pinned: impl FnOnce() -> bool + Send + 'static,
    ) -> Result<Option<u64>, EngineError> {
        self.change("remove the layer's row", move |db| {
            if is_pinned() {
                return Ok(None);
            }
            let bytes = db
                .prepare_cached("SELECT bytes FROM layers WHERE layer = ?1")?
                .query_row([text(layer)], |row| unsigned(row, "bytes"))
                .optional()?;
            let changed = db
                .prepare_cached(
                    "DELETE FROM layers WHERE layer = ?1
                       AND NOT EXISTS (SELECT 1 FROM image_layers WHERE image_layers.layer = ?1)",
                )?
                .execute([text(layer)])?;
            Ok(bytes.filter(|_| changed == 1))
        })
        .await
    }

    /// Inserts an alias, or changes the target of an existing one.
    pub async fn put_alias(&self, row: AliasRow) -> Result<(), EngineError> {
        self.change("write the alias", move |db| {
            db.prepare_cached(
                "INSERT OR REPLACE INTO image_aliases (name, target, created_at) VALUES (?1, ?2, ?3)",
            )?
            .execute(params![row.name, row.target, micros(row.created_at)])?;
            Ok(())
        })
        .await
    }

    /// Deletes an alias. `false` if there was none.
    pub async fn delete_alias(&self, name: String) -> Result<bool, EngineError> {
        self.change("delete the alias", move |db| {
            Ok(db.prepare_cached("DELETE FROM image_aliases WHERE name = ?1")?.execute([name])? == 1)
        })
        .await
    }
}

fn put_name(db: &Connection, name: &NameRow) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT OR REPLACE INTO image_names (owner, name, image, named_at) VALUES (?1, ?2, ?3, ?4)",
    )?
    .execute(params![name.owner, name.name, text(name.image), micros(name.named_at)])?;
    Ok(())
}

/// The image with a name. An owner's own image takes precedence over a shared one.
pub(super) fn find_image(db: &Connection, owner: &str, name: &str) -> rusqlite::Result<Option<Digest>> {
    db.prepare_cached(
        "SELECT image FROM image_names WHERE name = ?1 AND owner IN (?2, '') ORDER BY owner DESC LIMIT 1",
    )?
    .query_row(params![name, owner], |row| digest_from(row, "image"))
    .optional()
}

fn exists(db: &Connection, image: Digest) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT 1 FROM images WHERE digest = ?1")?.exists([text(image)])
}

/// Part of the change that inserts a sandbox: writes which image it uses, if the image is on this machine.
pub(super) fn insert_use(
    db: &Connection,
    sandbox: SandboxId,
    owner: &str,
    image: &str,
    alias: Option<&str>,
    held: Option<Digest>,
) -> rusqlite::Result<Option<Digest>> {
    let found = match (image, held) {
        (crate::model::template::HOST, _) if alias.is_none() => return Ok(None),
        (crate::model::template::HOST, _) => None,
        // The image that its template holds, unless the template has just dropped it.
        (name, Some(held)) => match exists(db, held)? {
            true => Some(held),
            false => find_image(db, owner, name)?,
        },
        (name, None) => find_image(db, owner, name)?,
    };
    db.prepare_cached("INSERT INTO sandbox_images (sandbox, image, alias) VALUES (?1, ?2, ?3)")?
        .execute(params![id_bytes(sandbox), found.map(text), alias])?;
    Ok(found)
}
