//! Rows of images: what each is made of, what it is called, and who uses it.
//!
//! An image is kept while it has a name, a sandbox or a template, a layer while it has an image. A sandbox takes its reference in the
//! same change that finds the image, so nothing is ever collected between the two.

use std::time::SystemTime;

use image::Digest;
use rusqlite::{Connection, OptionalExtension, Row, params};
use wire::SandboxId;
use wire::launch::LayerFacts;

use super::Store;
use super::rows::{id_bytes, micros, sandbox_id, signed, time, unreadable, unsigned};
use crate::error::EngineError;

/// The tables, for the list of migrations.
pub(super) const TABLES: &str = "
    CREATE TABLE layers (
        layer              TEXT NOT NULL PRIMARY KEY,
        blob               TEXT,
        contents           TEXT,
        size               INTEGER NOT NULL,
        entries            INTEGER NOT NULL,
        bytes              INTEGER NOT NULL,
        devices_skipped    INTEGER NOT NULL,
        owners_changed     INTEGER NOT NULL,
        attributes_dropped INTEGER NOT NULL,
        created_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE images (
        digest             TEXT NOT NULL PRIMARY KEY,
        config             TEXT NOT NULL,
        created_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE image_layers (
        image              TEXT NOT NULL REFERENCES images (digest) ON DELETE CASCADE,
        position           INTEGER NOT NULL,
        layer              TEXT NOT NULL REFERENCES layers (layer),
        PRIMARY KEY (image, position)
    ) WITHOUT ROWID;
    CREATE INDEX image_layers_by_layer ON image_layers (layer);
    CREATE TABLE image_names (
        -- The empty owner is everyone.
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        image              TEXT NOT NULL REFERENCES images (digest),
        named_at           INTEGER NOT NULL,
        PRIMARY KEY (owner, name)
    ) WITHOUT ROWID;
    CREATE INDEX image_names_by_image ON image_names (image);
    CREATE TABLE image_aliases (
        name               TEXT NOT NULL PRIMARY KEY,
        target             TEXT NOT NULL,
        created_at         INTEGER NOT NULL
    ) WITHOUT ROWID;
    CREATE TABLE sandbox_images (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        image              TEXT REFERENCES images (digest),
        alias              TEXT
    ) WITHOUT ROWID;
    CREATE INDEX sandbox_images_by_image ON sandbox_images (image) WHERE image IS NOT NULL;
";

/// A layer's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LayerRow {
    pub layer: Digest,
    /// What it came from and what was in that; none for layers that are our own.
    pub blob: Option<Digest>,
    pub contents: Option<Digest>,
    pub size: u64,
    pub facts: LayerFacts,
    pub created_at: SystemTime,
}

/// An image's row, with its layers, the lowest first.
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
    /// Empty for everyone.
    pub owner: String,
    pub name: String,
    pub image: Digest,
    pub named_at: SystemTime,
}

/// An alias's row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AliasRow {
    pub name: String,
    pub target: String,
    pub created_at: SystemTime,
}

/// What a sandbox was made from.
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

fn digest_from(row: &Row<'_>, column: usize) -> rusqlite::Result<Digest> {
    row.get_ref(column)?.as_str()?.parse().map_err(|_| unreadable(column, "digest"))
}

pub(super) fn optional_digest(row: &Row<'_>, column: usize) -> rusqlite::Result<Option<Digest>> {
    let text: Option<String> = row.get(column)?;
    text.map(|text| text.parse().map_err(|_| unreadable(column, "digest"))).transpose()
}

const LAYER_COLUMNS: &str = "layer, blob, contents, size, entries, bytes, devices_skipped, owners_changed,
    attributes_dropped, created_at";

fn layer_from(row: &Row<'_>) -> rusqlite::Result<LayerRow> {
    Ok(LayerRow {
        layer: digest_from(row, 0)?,
        blob: optional_digest(row, 1)?,
        contents: optional_digest(row, 2)?,
        size: unsigned(row, 3)?,
        facts: LayerFacts {
            entries: unsigned(row, 4)?,
            bytes: unsigned(row, 5)?,
            devices_skipped: unsigned(row, 6)?,
            owners_changed: unsigned(row, 7)?,
            attributes_dropped: unsigned(row, 8)?,
        },
        created_at: time(row, 9)?,
    })
}

pub(super) fn text(digest: Digest) -> String {
    digest.to_string()
}

impl Store {
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
                    let (digest, config) = (digest_from(row, 0)?, row.get(1)?);
                    let (created_at, over_host) = (time(row, 2)?, row.get(3)?);
                    Ok(ImageRow { digest, config, over_host, layers: Vec::new(), created_at })
                })?
                .collect::<Result<_, _>>()?;
            let mut stack =
                db.prepare("SELECT layer FROM image_layers WHERE image = ?1 ORDER BY position")?;
            for image in &mut images {
                let layers = stack.query_map([text(image.digest)], |row| digest_from(row, 0))?;
                image.layers = layers.collect::<Result<_, _>>()?;
            }
            let names = db
                .prepare("SELECT owner, name, image, named_at FROM image_names")?
                .query_map([], |row| {
                    let (owner, name) = (row.get(0)?, row.get(1)?);
                    Ok(NameRow { owner, name, image: digest_from(row, 2)?, named_at: time(row, 3)? })
                })?
                .collect::<Result<_, _>>()?;
            let aliases = db
                .prepare("SELECT name, target, created_at FROM image_aliases")?
                .query_map([], |row| {
                    Ok(AliasRow { name: row.get(0)?, target: row.get(1)?, created_at: time(row, 2)? })
                })?
                .collect::<Result<_, _>>()?;
            let uses = db
                .prepare("SELECT sandbox, image, alias FROM sandbox_images")?
                .query_map([], |row| {
                    let (image, alias) = (optional_digest(row, 1)?, row.get(2)?);
                    Ok(ImageUseRow { sandbox: sandbox_id(row, 0)?, image, alias })
                })?
                .collect::<Result<_, _>>()?;
            Ok(LoadedImages { layers, images, names, aliases, uses })
        })
        .await
    }

    /// A layer that is whole and on disk.
    pub async fn put_layer(&self, row: LayerRow) -> Result<(), EngineError> {
        self.change("write the layer's row", move |db| {
            db.prepare_cached(
                "INSERT OR IGNORE INTO layers VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
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

    /// Whether there is a row. Asked among the changes, so that it is true with regard to all that were asked before.
    pub async fn has_layer(&self, layer: Digest) -> Result<bool, EngineError> {
        self.change("look for the layer's row", move |db| {
            db.prepare_cached("SELECT 1 FROM layers WHERE layer = ?1")?.exists([text(layer)])
        })
        .await
    }

    /// What came of making a layer, if there is a row. Asked as with [`Self::has_layer`].
    pub async fn layer_facts(&self, layer: Digest) -> Result<Option<LayerFacts>, EngineError> {
        self.change("look for the layer's row", move |db| {
            db.prepare_cached(&format!("SELECT {LAYER_COLUMNS} FROM layers WHERE layer = ?1"))?
                .query_row([text(layer)], |row| Ok(layer_from(row)?.facts))
                .optional()
        })
        .await
    }

    /// An image with its names. Gives the facts of its layers; `None`: one of them is not there.
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
                .prepare_cached("INSERT OR IGNORE INTO images VALUES (?1, ?2, ?3, ?4)")?
                .execute(params![text(row.digest), row.config, micros(row.created_at), row.over_host])?;
            if added == 1 {
                let mut add = db.prepare_cached("INSERT INTO image_layers VALUES (?1, ?2, ?3)")?;
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

    /// The image that an owner means by a name, for a sandbox that takes it in the same step.
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

    /// Takes a name away. `false`: there was none.
    pub async fn remove_image_name(&self, owner: String, name: String) -> Result<bool, EngineError> {
        self.change("remove the image's name", move |db| {
            let changed = db
                .prepare_cached("DELETE FROM image_names WHERE owner = ?1 AND name = ?2")?
                .execute(params![owner, name])?;
            Ok(changed == 1)
        })
        .await
    }

    /// Takes all names from images that have a layer which is not on disk any more, so that they are pulled again. Tells which.
    pub async fn forget_images_of(&self, layer: Digest) -> Result<Vec<Digest>, EngineError> {
        self.change("forget broken images", move |db| {
            let broken: Vec<Digest> = db
                .prepare_cached("SELECT DISTINCT image FROM image_layers WHERE layer = ?1")?
                .query_map([text(layer)], |row| digest_from(row, 0))?
                .collect::<Result<_, _>>()?;
            let mut forget = db.prepare_cached("DELETE FROM image_names WHERE image = ?1")?;
            // Whoever starts next prepares them again, should this daemon not get to it.
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

    /// Removes the images that have neither a name nor a sandbox nor a template, if they are older than `before`. Tells which.
    pub async fn collect_images(&self, before: SystemTime) -> Result<Vec<Digest>, EngineError> {
        self.change("remove unused images", move |db| {
            let unused: Vec<Digest> = db
                .prepare_cached(
                    "SELECT digest FROM images WHERE created_at < ?1
                       AND NOT EXISTS (SELECT 1 FROM image_names WHERE image = digest)
                       AND NOT EXISTS (SELECT 1 FROM sandbox_images WHERE image = digest)
                       AND NOT EXISTS (SELECT 1 FROM template_versions WHERE image = digest)",
                )?
                .query_map([micros(before)], |row| digest_from(row, 0))?
                .collect::<Result<_, _>>()?;
            let mut remove = db.prepare_cached("DELETE FROM images WHERE digest = ?1")?;
            for image in &unused {
                remove.execute([text(*image)])?;
            }
            Ok(unused)
        })
        .await
    }

    /// The layers that no image has, if they are older than `before`.
    pub async fn unused_layers(&self, before: SystemTime) -> Result<Vec<Digest>, EngineError> {
        self.question("find unused layers", move |db| {
            db.prepare_cached(
                "SELECT layer FROM layers WHERE created_at < ?1
                   AND NOT EXISTS (SELECT 1 FROM image_layers WHERE image_layers.layer = layers.layer)",
            )?
            .query_map([micros(before)], |row| digest_from(row, 0))?
            .collect()
        })
        .await
    }

    /// The names of all layers.
    pub async fn layers(&self) -> Result<Vec<Digest>, EngineError> {
        self.question("list the layers' rows", |db| {
            db.prepare("SELECT layer FROM layers")?.query_map([], |row| digest_from(row, 0))?.collect()
        })
        .await
    }

    /// Removes a layer's row, unless an image has it or it is pinned. Tells what it held, if it is gone.
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
                .query_row([text(layer)], |row| unsigned(row, 0))
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

    /// A new alias, or another target for an old one.
    pub async fn put_alias(&self, row: AliasRow) -> Result<(), EngineError> {
        self.change("write the alias", move |db| {
            db.prepare_cached("INSERT OR REPLACE INTO image_aliases VALUES (?1, ?2, ?3)")?
                .execute(params![row.name, row.target, micros(row.created_at)])?;
            Ok(())
        })
        .await
    }

    /// `false`: there was none.
    pub async fn delete_alias(&self, name: String) -> Result<bool, EngineError> {
        self.change("delete the alias", move |db| {
            Ok(db.prepare_cached("DELETE FROM image_aliases WHERE name = ?1")?.execute([name])? == 1)
        })
        .await
    }
}

fn put_name(db: &Connection, name: &NameRow) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT OR REPLACE INTO image_names VALUES (?1, ?2, ?3, ?4)")?.execute(params![
        name.owner,
        name.name,
        text(name.image),
        micros(name.named_at)
    ])?;
    Ok(())
}

/// An owner's own image of that name goes before everyone's.
pub(super) fn find_image(db: &Connection, owner: &str, name: &str) -> rusqlite::Result<Option<Digest>> {
    db.prepare_cached(
        "SELECT image FROM image_names WHERE name = ?1 AND owner IN (?2, '') ORDER BY owner DESC LIMIT 1",
    )?
    .query_row(params![name, owner], |row| digest_from(row, 0))
    .optional()
}

fn exists(db: &Connection, image: Digest) -> rusqlite::Result<bool> {
    db.prepare_cached("SELECT 1 FROM images WHERE digest = ?1")?.exists([text(image)])
}

/// In the change that inserts a sandbox: what it is made from, if that is here.
pub(super) fn insert_use(
    db: &Connection,
    sandbox: SandboxId,
    owner: &str,
    image: &str,
    alias: Option<&str>,
    held: Option<Digest>,
) -> rusqlite::Result<Option<Digest>> {
    let found = match (image, held) {
        (crate::images::HOST, _) if alias.is_none() => return Ok(None),
        (crate::images::HOST, _) => None,
        // What its template holds, unless that let go of it this moment.
        (name, Some(held)) => match exists(db, held)? {
            true => Some(held),
            false => find_image(db, owner, name)?,
        },
        (name, None) => find_image(db, owner, name)?,
    };
    db.prepare_cached("INSERT INTO sandbox_images VALUES (?1, ?2, ?3)")?.execute(params![
        id_bytes(sandbox),
        found.map(text),
        alias
    ])?;
    Ok(found)
}
