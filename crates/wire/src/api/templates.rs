//! Bodies about templates.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::{ErrorBody, Hook, LayerProgress, Network, NetworkPolicy, SandboxLimits, VolumeMount, is_zero};

/// `POST /v1/templates`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTemplate {
    /// Any text of up to 255 bytes, unique among the owner's templates. `default` is built in.
    pub name: String,
    /// `host`, a reference such as `python:3.12`, or an alias. Default: `host`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Processors, as `"500m"` or `"2"`. Default: `"1"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// Memory, as `"512Mi"` or `"2Gi"`. Default: `"1Gi"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// Disk limit for a sandbox's files, as `"5Gi"`. Default: `"10Gi"`. Not enforced where the store uses plain
    /// directories.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Variables for every command, added to the image's environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Absolute path where commands run. Default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User that commands run as. Default: the image's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What runs when a command names no program. If empty or left out, the image's.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Labels for every sandbox made from this template; labels of the create request take precedence.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Volumes that every sandbox mounts, at most 64. They must exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<VolumeMount>,
    /// What sandboxes may reach, as in `CreateSandbox`. Default: the operator's default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// How many snapshots of the history of its sandboxes to keep, 0 to 100. Default: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<u32>,
    /// Commands that run in its sandboxes when something is done to them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, Hook>,
}

/// `PUT /v1/templates/{template}`: replaces all settings. Fields that are left out get their defaults.
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
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<u32>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, Hook>,
}

/// `PATCH /v1/templates/{template}`. Fields that are left out keep their values; lists and maps are replaced as a
/// whole.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct UpdateTemplate {
    /// A new name. A new name alone makes no new version.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A new image.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<String>,
    /// As in `CreateTemplate`; `null` removes it.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given")]
    #[schema(value_type = Option<String>)]
    pub disk: Option<Option<String>>,
    /// Replaces all variables.
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
    /// Replaces the whole command; an empty one means the image's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// Replaces all labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
    /// Replaces all mounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mounts: Option<Vec<VolumeMount>>,
    /// As in `CreateTemplate`; `null` for the operator's default.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "given_network")]
    #[schema(value_type = Option<Network>)]
    pub network: Option<Option<Network>>,
    /// As in `CreateTemplate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub history: Option<u32>,
    /// Replaces all hooks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hooks: Option<BTreeMap<String, Hook>>,
}

/// Distinguishes `null` from a missing field.
fn given<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<String>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// The same for a policy.
fn given_network<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Option<Network>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}

/// A template.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Template {
    /// A UUID that stays the same when the name changes; absent for built-in templates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// The template's name.
    pub name: String,
    /// The newest version, which new sandboxes use. The first is 1.
    pub version: u32,
    /// Whether that version is ready.
    pub state: TemplateState,
    /// Why the state is `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The image, as requested.
    pub image: String,
    /// The image that an alias resolved to, if `image` is an alias and was resolved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_target: Option<String>,
    /// The image's digest, once the image is present; absent for `host`. It does not change when the image's name
    /// moves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    /// Limits of each sandbox.
    pub limits: SandboxLimits,
    /// Disk limit for a sandbox's files, if the store enforces one; 10 GiB if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
    /// Variables added to the image's environment.
    pub env: BTreeMap<String, String>,
    /// Where commands run; the image's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User that commands run as; the image's if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// What runs when a command names no program; the image's if empty.
    pub command: Vec<String>,
    /// Labels for every sandbox.
    pub labels: BTreeMap<String, String>,
    /// Volumes that every sandbox mounts.
    pub mounts: Vec<VolumeMount>,
    /// What every sandbox may reach; the operator's default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkPolicy>,
    /// How many snapshots of the history of its sandboxes are kept; absent if none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub history: u32,
    /// Commands that run in its sandboxes when something is done to them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub hooks: BTreeMap<String, Hook>,
    /// Number of the owner's sandboxes that were made from any version of this template.
    pub sandboxes: u64,
    /// Whether the template is built in and cannot be changed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub built_in: bool,
    /// When the template was created; absent for built-in templates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<String>,
    /// When its newest version was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub updated_at: Option<String>,
}

/// State of a template's newest version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TemplateState {
    /// The image is being fetched. Creating a sandbox waits for it.
    Preparing,
    /// The image is present, so sandboxes start at full speed.
    Ready,
    /// The image could not be prepared; `reason` says why. It can be retried.
    Failed,
}

/// `GET /v1/templates`, by name, the built-in one first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct TemplateList {
    /// All templates that this key's owner may use.
    pub templates: Vec<Template>,
}

/// Progress of a template: `GET /v1/templates/{template}/events`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum TemplateEvent {
    /// The image is being fetched.
    Progress {
        /// Layers, lowest first.
        layers: Vec<LayerProgress>,
    },
    /// The template is ready. The last event.
    Ready(Box<Template>),
    /// The template could not be prepared. The last event.
    Failed(Box<Template>),
    /// The template was deleted. This is the last event.
    Gone(ErrorBody),
}
