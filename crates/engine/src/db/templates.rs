//! Rows of templates: their versions, the image that each version holds, and which sandboxes were made from which version.
//!
//! The newest version of a template holds its image, so that the image is never collected; a sandbox holds its own. A
//! version stays while there are sandboxes that were made from it, and a template cannot be deleted before its sandboxes:
//! foreign keys ensure both.

use std::collections::BTreeMap;
use std::time::SystemTime;

use image::Digest;
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use wire::launch::Access;
use wire::{SandboxId, TemplateId};

use super::Db;
use super::hooks::HooksText;
use super::images::{find_image, optional_digest, text};
use super::network::PolicyText;
use super::rows::{from_json, id_bytes, json, micros, owner_from, sandbox_id, time, unreadable};
use crate::error::EngineError;
use crate::model::labels::Labels;
use crate::model::names::TemplateName;
use crate::model::template::VolumeMount;
use crate::model::template::{Preparation, Prepared, TemplateSpec};
use crate::model::{Argv, GuestPath, GuestUser, Owner, SandboxEnv};

/// How many older versions of a template are kept even if no sandbox was made from them.
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

/// The row of one version of a template.
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

/// A spec as it is stored in a row.
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
    /// Rows that are older than volumes do not have it.
    #[serde(default)]
    mounts: Vec<MountText>,
    /// Rows that are older than networks do not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    network: Option<PolicyText>,
    #[serde(default, skip_serializing_if = "is_zero")]
    history: u32,
    #[serde(default, skip_serializing_if = "HooksText::is_empty")]
    hooks: HooksText,
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

/// A mount as it is stored in a row.
#[derive(Serialize, Deserialize)]
struct MountText {
    volume: String,
    path: String,
    read_only: bool,
}

fn spec_text(spec: &TemplateSpec) -> String {
    let TemplateSpec {
        image,
        cpu_millis,
        memory_bytes,
        disk_bytes,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    } = spec.clone();
    let (env, labels) = (env.into_pairs(), labels.pairs().clone());
    let (cwd, user) = (cwd.map(GuestPath::into_string), user.map(GuestUser::into_string));
    let command = command.map(Argv::into_words).unwrap_or_default();
    let mounts = mounts.into_iter().map(|VolumeMount { volume, path, access }| MountText {
        volume,
        path,
        read_only: access == Access::ReadOnly,
    });
    let mounts = mounts.collect();
    let network = network.as_ref().map(PolicyText::from);
    let spec = SpecText {
        image,
        cpu_millis,
        memory_bytes,
        disk_bytes,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks: HooksText::from(&hooks),
    };
    json(&spec)
}

fn spec_from(row: &Row<'_>, column: &str) -> rusqlite::Result<TemplateSpec> {
    let SpecText {
        image,
        cpu_millis,
        memory_bytes,
        disk_bytes,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    } = from_json(row, column)?;
    let hooks = hooks.hooks().ok_or_else(|| unreadable(row, column, "hook"))?;
    let network = match network {
        Some(text) => Some(text.policy().ok_or_else(|| unreadable(row, column, "policy"))?),
        None => None,
    };
    let labels = Labels::new(labels).map_err(|_| unreadable(row, column, "template"))?;
    let (env, cwd, user) = (SandboxEnv::kept(env), cwd.map(GuestPath::kept), user.map(GuestUser::kept));
    let command = Some(command).filter(|words| !words.is_empty()).map(Argv::kept);
    let mounts = mounts.into_iter().map(|MountText { volume, path, read_only }| VolumeMount {
        volume,
        path,
        access: if read_only { Access::ReadOnly } else { Access::ReadWrite },
    });
    let mounts = mounts.collect();
    Ok(TemplateSpec {
        image,
        cpu_millis,
        memory_bytes,
        disk_bytes,
        env,
        cwd,
        user,
        command,
        labels,
        mounts,
        network,
        history,
        hooks,
    })
}

fn id(template: TemplateId) -> [u8; 16] {
    template.bits().to_be_bytes()
}

fn template_id(row: &Row<'_>, column: &str) -> rusqlite::Result<TemplateId> {
    Ok(TemplateId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

/// The columns `state`, `reason`, `resolved` and `image`.
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
    let preparation = match row.get_ref("state")?.as_str()? {
        "preparing" => Preparation::Preparing,
        "ready" => Preparation::Ready(Prepared {
            resolved: row.get("resolved")?,
            image: optional_digest(row, "image")?,
        }),
        "failed" => {
            Preparation::Failed { reason: row.get::<_, Option<String>>("reason")?.unwrap_or_default() }
        }
        "replaced" => Preparation::Replaced,
        _ => return Err(unreadable(row, "state", "state")),
    };
    Ok(VersionRow {
        template: template_id(row, "template")?,
        version: row.get("version")?,
        spec: spec_from(row, "spec")?,
        preparation,
        made_at: time(row, "made_at")?,
    })
}

fn insert_version(db: &Connection, row: &VersionRow) -> rusqlite::Result<()> {
    let (state, reason, resolved, image) = preparation_words(&row.preparation);
    db.prepare_cached(
        "INSERT INTO template_versions (template, version, spec, state, reason, resolved, image, made_at)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?
    .execute(params![
        id(row.template),
        row.version,
        spec_text(&row.spec),
        state,
        reason,
        resolved,
        image,
        micros(row.made_at)
    ])?;
    Ok(())
}

/// Part of the change that inserts a sandbox: writes which version it was made from.
pub(super) fn insert_template_use(
    db: &Connection,
    sandbox: SandboxId,
    template: TemplateId,
    version: u32,
) -> rusqlite::Result<()> {
    db.prepare_cached("INSERT INTO sandbox_templates (sandbox, template, version) VALUES (?1, ?2, ?3)")?
        .execute(params![id_bytes(sandbox), id(template), version])?;
    Ok(())
}

impl Db {
    /// All rows about templates.
    pub async fn load_templates(&self) -> Result<LoadedTemplates, EngineError> {
        self.question("read the templates' rows", |db| {
            let templates = db
                .prepare("SELECT id, owner, name, version, created_at FROM templates")?
                .query_map([], |row| {
                    Ok(TemplateRow {
                        id: template_id(row, "id")?,
                        owner: owner_from(row)?,
                        name: TemplateName::kept(row.get_ref("name")?.as_str()?),
                        version: row.get("version")?,
                        created_at: time(row, "created_at")?,
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
                    let (sandbox, template) = (sandbox_id(row, "sandbox")?, template_id(row, "template")?);
                    Ok(TemplateUseRow { sandbox, template, version: row.get("version")? })
                })?
                .collect::<Result<_, _>>()?;
            Ok(LoadedTemplates { templates, versions, uses })
        })
        .await
    }

    /// Inserts a template with its first version. The caller has checked that the name is free; the table checks again.
    pub async fn insert_template(&self, row: TemplateRow, first: VersionRow) -> Result<(), EngineError> {
        self.change("write the template's row", move |db| {
            db.prepare_cached(
                "INSERT INTO templates (id, owner, name, version, created_at) VALUES (?1, ?2, ?3, ?4, ?5)",
            )?
            .execute(params![
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

    /// Writes a new name, a new version, or both. After a new version, older versions no longer hold an image.
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

    /// Writes the result of a preparation. `false` if the version is no longer the newest, or the template is gone.
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

    /// Finds the image that a name of the owner refers to, and makes a version hold it in the same change. `None` if
    /// the image is not on this machine.
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
            let _ = set_preparation(db, template, version, &ready)?; // A version that was replaced meanwhile holds no image.
            Ok(Some(image))
        })
        .await
    }

    /// Deletes a template with all its versions. Fails while there is a sandbox that was made from one of them.
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
        .query_row([id(template)], |row| row.get("version"))
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
