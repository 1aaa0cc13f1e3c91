//! Bodies about templates.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::{ErrorBody, LayerProgress, SandboxLimits, VolumeMount};

/// `POST /v1/templates`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTemplate {
    /// Free text up to 255 bytes, unique among the owner's templates. `default` is built in.
    pub name: String,
    /// `host`, a reference such as `python:3.12`, or an alias; `host` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Processors, as `"500m"` or `"2"`; `"1"` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Memory, as `"512Mi"` or `"2Gi"`; `"1Gi"` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// What a sandbox's files may take, as `"5Gi"`; `"10Gi"` if left out. A store of plain directories cannot keep it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Added to the image's environment, for every command.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// An absolute path where commands run; the image's if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Who commands run as; the image's if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What runs when a command names no program; the image's if left out or empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Given to every sandbox that is made from it; those of the request win.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Volumes that every sandbox mounts, at most 64. They must exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
}

/// `PUT /v1/templates/{template}`: all that is in it. What is left out is as if it never was.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct TemplateSpec {
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
}

/// `PATCH /v1/templates/{template}`. What is left out stays as it is; lists and maps are replaced as a whole.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateTemplate {
    /// Another name. By itself it makes no new version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Another image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// As in `CreateTemplate`; `null` for none.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    pub disk: Option<Option<String>>,
    /// In place of all variables.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    /// As in `CreateTemplate`; `null` for the image's.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    pub cwd: Option<Option<String>>,
    /// As in `CreateTemplate`; `null` for the image's.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    pub user: Option<Option<String>>,
    /// In place of the whole command; an empty one for the image's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// In place of all labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// In place of all mounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mounts: Option<Vec<VolumeMount>>,
}

/// `null` is a value here, and not the same as nothing.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// A template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Template {
    /// A UUID that stays the same when the name changes; not there for what is built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// What it is called.
    pub name: String,
    /// The newest version: what sandboxes are made from. The first is 1.
    pub version: u32,
    /// How far that is.
    pub state: TemplateState,
    /// Why it is `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What it is made of.
    pub image: String,
    /// What that stands for, where it is an alias and was looked up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_target: Option<String>,
    /// Just which image, once it is here; not there for `host`. It stays the same whatever becomes of the image's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    /// What a sandbox may use.
    pub limits: SandboxLimits,
    /// What a sandbox's files may take, where the store can keep it; the usual 10 GiB where it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Added to the image's environment.
    pub env: BTreeMap<String, String>,
    /// Where commands run; the image's if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// Who commands run as; the image's if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What runs when a command names no program; the image's if it is empty.
    pub command: Vec<String>,
    /// Given to every sandbox.
    pub labels: BTreeMap<String, String>,
    /// Volumes that every sandbox mounts.
    pub mounts: Vec<VolumeMount>,
    /// How many of the owner's sandboxes were made from it, whichever version.
    pub sandboxes: u64,
    /// Whether it is built in, and cannot be changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub built_in: bool,
    /// When it was first made; not there for what is built in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<String>,
    /// When its newest version was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated_at: Option<String>,
}

/// How far a template's newest version is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TemplateState {
    /// Its image is on its way. Creating a sandbox waits for it.
    Preparing,
    /// Sandboxes start at full speed.
    Ready,
    /// It could not be prepared; `reason` says why. It can be tried again.
    Failed,
}

/// `GET /v1/templates`, by name, the built-in one first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TemplateList {
    /// All that this key's owner may use.
    pub templates: Vec<Template>,
}

/// How far a template is: `GET /v1/templates/{template}/events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TemplateEvent {
    /// Its image is on its way.
    Progress {
        /// The lowest first.
        layers: Vec<LayerProgress>,
    },
    /// It is ready. The last event.
    Ready(Box<Template>),
    /// It could not be prepared. The last event.
    Failed(Box<Template>),
    /// It was deleted meanwhile. The last event.
    Gone(ErrorBody),
}
