//! Rows of templates: their versions, which image each of them holds, and which sandboxes were made from which.
//!
//! The newest version of a template holds its image, so that it is never collected; a sandbox holds its own. A version stays while
//! a sandbox was made from it, and a template cannot go before its sandboxes: the tables say so too.

use std::collections::BTreeMap;
use std::time::SystemTime;

use image::Digest;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use wire::launch::Access;
use wire::{SandboxId, TemplateId};

use super::Store;
use super::images::{find_image, optional_digest, text};
use super::rows::{from_json, id_bytes, json, micros, sandbox_id, time, unreadable};
use crate::error::EngineError;
use crate::labels::Labels;
use crate::model::Owner;
use crate::templates::{Preparation, Prepared, TemplateName, TemplateSpec};
use crate::volumes::VolumeMount;

/// The tables, for the list of migrations.
pub(super) const TABLES: &str = "
    CREATE TABLE templates (
        id                 BLOB NOT NULL PRIMARY KEY,
        owner              TEXT NOT NULL,
        name               TEXT NOT NULL,
        -- The newest.
        version            INTEGER NOT NULL,
        created_at         INTEGER NOT NULL,
        UNIQUE (owner, name)
    ) WITHOUT ROWID;
    CREATE TABLE template_versions (
        template           BLOB NOT NULL REFERENCES templates (id) ON DELETE CASCADE,
        version            INTEGER NOT NULL,
        spec               TEXT NOT NULL,
        state              TEXT NOT NULL,
        reason             TEXT,
        -- What the image's name meant, and just which image that was.
        resolved           TEXT,
        image              TEXT REFERENCES images (digest),
        made_at            INTEGER NOT NULL,
        PRIMARY KEY (template, version)
    ) WITHOUT ROWID;
    CREATE INDEX template_versions_by_image ON template_versions (image) WHERE image IS NOT NULL;
    CREATE TABLE sandbox_templates (
        sandbox            BLOB NOT NULL PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
        template           BLOB NOT NULL,
        version            INTEGER NOT NULL,
        FOREIGN KEY (template, version) REFERENCES template_versions (template, version)
    ) WITHOUT ROWID;
    CREATE INDEX sandbox_templates_by_version ON sandbox_templates (template, version);
";

/// Versions of a template that are kept although nothing was made from them.
const VERSIONS_KEPT: u32 = 20;

/// A template's row.
#[derive(Debug, Clone)]
pub(crate) struct TemplateRow {
    pub id: TemplateId,
    pub owner: Owner,
    pub name: TemplateName,
    pub version: u32,
    pub created_at: SystemTime,
}

/// The row of one of its versions.
#[derive(Debug, Clone)]
pub(crate) struct VersionRow {
    pub template: TemplateId,
    pub version: u32,
    pub spec: TemplateSpec,
    pub preparation: Preparation,
    pub made_at: SystemTime,
}

/// Which version a sandbox was made from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TemplateUseRow {
    pub sandbox: SandboxId,
    pub template: TemplateId,
    pub version: u32,
}

/// Everything about templates that a starting daemon reads.
#[derive(Debug, Default)]
pub(crate) struct LoadedTemplates {
    pub templates: Vec<TemplateRow>,
    pub versions: Vec<VersionRow>,
    pub uses: Vec<TemplateUseRow>,
}

/// A spec as a row keeps it.
#[derive(Serialize, Deserialize)]
struct SpecText {
    image: String,
    cpu_millis: u32,
    memory_bytes: u64,
    disk_bytes: Option<u64>,
    env: BTreeMap<String, String>,
    cwd: Option<String>,
    user: Option<String>,
    command: Vec<String>,
    labels: BTreeMap<String, String>,
    /// Not in rows from before there were volumes.
    #[serde(default)]
    mounts: Vec<MountText>,
}

/// A mount as a row keeps it.
#[derive(Serialize, Deserialize)]
struct MountText {
    volume: String,
    path: String,
    read_only: bool,
}

fn spec_text(spec: &TemplateSpec) -> String {
    let TemplateSpec { image, cpu_millis, memory_bytes, disk_bytes, env, cwd, user, command, labels, mounts } =
        spec.clone();
    let labels = labels.pairs().clone();
    let mounts = mounts.into_iter().map(|VolumeMount { volume, path, access }| MountText {
        volume,
        path,
        read_only: access == Access::ReadOnly,
    });
    let mounts = mounts.collect();
    json(&SpecText { image, cpu_millis, memory_bytes, disk_bytes, env, cwd, user, command, labels, mounts })
}

fn spec_from(row: &Row<'_>, column: usize) -> rusqlite::Result<TemplateSpec> {
    let SpecText { image, cpu_millis, memory_bytes, disk_bytes, env, cwd, user, command, labels, mounts } =
        from_json(row, column)?;
    let labels = Labels::new(labels).map_err(|_| unreadable(column, "template"))?;
    let mounts = mounts.into_iter().map(|MountText { volume, path, read_only }| VolumeMount {
        volume,
        path,
        access: if read_only { Access::ReadOnly } else { Access::ReadWrite },
    });
    let mounts = mounts.collect();
    Ok(TemplateSpec { image, cpu_millis, memory_bytes, disk_bytes, env, cwd, user, command, labels, mounts })
}

fn id(template: TemplateId) -> [u8; 16] {
    template.bits().to_be_bytes()
}

fn template_id(row: &Row<'_>, column: usize) -> rusqlite::Result<TemplateId> {
    Ok(TemplateId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

/// Its word, why it failed, what its image's name meant, and the image.
fn preparation_words(
    preparation: &Preparation,
) -> (&'static str, Option<&str>, Option<&str>, Option<String>) {
    match preparation {
        Preparation::Preparing => ("preparing", None, None, None),
        Preparation::Ready(Prepared { resolved, image }) => ("ready", None, Some(resolved), image.map(text)),
        Preparation::Failed { reason } => ("failed", Some(reason), None, None),
        Preparation::Replaced => ("replaced", None, None, None),
    }
}

fn version_from(row: &Row<'_>) -> rusqlite::Result<VersionRow> {
    let preparation = match row.get_ref(3)?.as_str()? {
        "preparing" => Preparation::Preparing,
        "ready" => Preparation::Ready(Prepared { resolved: row.get(5)?, image: optional_digest(row, 6)? }),
        "failed" => Preparation::Failed { reason: row.get::<_, Option<String>>(4)?.unwrap_or_default() },
        "replaced" => Preparation::Replaced,
        _ => return Err(unreadable(3, "state")),
    };
    Ok(VersionRow {
        template: template_id(row, 0)?,
        version: row.get(1)?,
        spec: spec_from(row, 2)?,
        preparation,
        made_at: time(row, 7)?,
    })
}

fn insert_version(db: &Connection, row: &VersionRow) -> rusqlite::Result<()> {
    let (state, reason, resolved, image) = preparation_words(&row.preparation);
    db.prepare_cached("INSERT INTO template_versions VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?.execute(
        params![
            id(row.template),
            row.version,
            spec_text(&row.spec),
            state,
            reason,
            resolved,
            image,
            micros(row.made_at)
        ],
    )?;
    Ok(())
}

/// In the change that inserts a sandbox: what it was made from.
pub(super) fn insert_template_use(
    db: &Connection,
    sandbox: SandboxId,
    template: TemplateId,
    version: u32,
) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT INTO sandbox_templates VALUES (?1, ?2, ?3)")?.execute(params![
        id_bytes(sandbox),
        id(template),
        version
    ])?;
    Ok(())
}

impl Store {
    /// All rows about templates.
    pub async fn load_templates(&self) -> Result<LoadedTemplates, EngineError> {
        self.question("read the templates' rows", |db| {
            let templates = db
                .prepare("SELECT id, owner, name, version, created_at FROM templates")?
                .query_map([], |row| {
                    Ok(TemplateRow {
                        id: template_id(row, 0)?,
                        owner: Owner::parse(row.get_ref(1)?.as_str()?).map_err(|_| unreadable(1, "owner"))?,
                        name: TemplateName::kept(row.get_ref(2)?.as_str()?),
                        version: row.get(3)?,
                        created_at: time(row, 4)?,
                    })
                })?
                .collect::<Result<_, _>>()?;
            let versions = db
                .prepare(
                    "SELECT template, version, spec, state, reason, resolved, image, made_at FROM template_versions",
                )?
                .query_map([], version_from)?
                .collect::<Result<_, _>>()?;
            let uses = db
                .prepare("SELECT sandbox, template, version FROM sandbox_templates")?
                .query_map([], |row| {
                    let (sandbox, template) = (sandbox_id(row, 0)?, template_id(row, 1)?);
                    Ok(TemplateUseRow { sandbox, template, version: row.get(2)? })
                })?
                .collect::<Result<_, _>>()?;
            Ok(LoadedTemplates { templates, versions, uses })
        })
        .await
    }

    /// A new template with its first version. The caller has checked that the name is free; the table checks again.
    pub async fn insert_template(&self, row: TemplateRow, first: VersionRow) -> Result<(), EngineError> {
        self.change("write the template's row", move |db| {
            db.prepare_cached("INSERT INTO templates VALUES (?1, ?2, ?3, ?4, ?5)")?.execute(params![
                id(row.id),
                row.owner.as_str(),
                row.name.as_str(),
                row.version,
                micros(row.created_at)
            ])?;
            insert_version(db, &first)
        })
        .await
    }

    /// Another name, another version, or both. What was prepared for older versions is let go.
    pub async fn change_template(
        &self,
        template: TemplateId,
        name: Option<TemplateName>,
        next: Option<VersionRow>,
    ) -> Result<(), EngineError> {
        self.change("write the template's changes", move |db| {
            if let Some(name) = &name {
                db.prepare_cached("UPDATE templates SET name = ?1 WHERE id = ?2")?
                    .execute(params![name.as_str(), id(template)])?;
            }
            if let Some(next) = &next {
                db.prepare_cached(
                    "UPDATE template_versions SET state = 'replaced', reason = NULL, image = NULL WHERE template = ?1",
                )?
                .execute(params![id(template)])?;
                insert_version(db, next)?;
                db.prepare_cached("UPDATE templates SET version = ?1 WHERE id = ?2")?
                    .execute(params![next.version, id(template)])?;
                db.prepare_cached(
                    "DELETE FROM template_versions WHERE template = ?1 AND version < ?2
                       AND NOT EXISTS (SELECT 1 FROM sandbox_templates AS held
                                       WHERE held.template = template_versions.template
                                         AND held.version = template_versions.version)",
                )?
                .execute(params![id(template), i64::from(next.version) - i64::from(VERSIONS_KEPT)])?;
            }
            Ok(())
        })
        .await
    }

    /// What came of a preparation. `false`: the version is not the newest any more, or the template is gone.
    pub async fn record_preparation(
        &self,
        template: TemplateId,
        version: u32,
        preparation: Preparation,
    ) -> Result<bool, EngineError> {
        self.change("write what came of a template's preparation", move |db| {
            set_preparation(db, template, version, &preparation)
        })
        .await
    }

    /// The image that an owner means by a name, held by a version from the same step on. `None`: it is not here.
    pub async fn take_template_image(
        &self,
        template: TemplateId,
        version: u32,
        owner: Owner,
        name: String,
    ) -> Result<Option<Digest>, EngineError> {
        self.change("take the image for the template", move |db| {
            let Some(image) = find_image(db, owner.as_str(), &name)? else { return Ok(None) };
            let ready = Preparation::Ready(Prepared { resolved: name, image: Some(image) });
            let _ = set_preparation(db, template, version, &ready)?; // One that was replaced meanwhile holds nothing.
            Ok(Some(image))
        })
        .await
    }

    /// A template with all its versions. Refused by the table while a sandbox was made from one of them.
    pub async fn delete_template(&self, template: TemplateId) -> Result<(), EngineError> {
        self.change("delete the template's row", move |db| {
            db.prepare_cached("DELETE FROM templates WHERE id = ?1")?.execute(params![id(template)])?;
            Ok(())
        })
        .await
    }
}

fn set_preparation(
    db: &Connection,
    template: TemplateId,
    version: u32,
    preparation: &Preparation,
) -> rusqlite::Result<bool> {
    let newest: Option<u32> = db
        .prepare_cached("SELECT version FROM templates WHERE id = ?1")?
        .query_row([id(template)], |row| row.get(0))
        .optional()?;
    if newest != Some(version) {
        return Ok(false);
    }
    let (state, reason, resolved, image) = preparation_words(preparation);
    let changed = db
        .prepare_cached(
            "UPDATE template_versions SET state = ?1, reason = ?2, resolved = ?3, image = ?4
             WHERE template = ?5 AND version = ?6",
        )?
        .execute(params![state, reason, resolved, image, id(template), version])?;
    Ok(changed == 1)
}
