//! Bodies about builds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{Network, TemplateSpec};

/// The header `Shoal-Build` of `POST /v1/builds`, as JSON in ASCII.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartBuild {
    /// The template to create or change.
    pub template: String,
    /// Further settings of the template. `image` must be left out, since the build makes it; the limits apply to the
    /// build too.
    #[serde(default)]
    pub spec: TemplateSpec,
    /// Path of the Dockerfile in the context. Default: `Dockerfile`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dockerfile: Option<String>,
    /// The stage to build. Default: the last.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Values for `ARG`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub args: BTreeMap<String, String>,
    /// Secrets in base64, by id. A step sees only the secrets that it names, and none is stored.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
    /// What `RUN` steps may reach, as in `CreateSandbox`. Default: `registries`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
}

/// A build.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// A UUID.
    pub id: String,
    /// The template that it makes.
    pub template: String,
    /// State of the build.
    pub state: BuildState,
    /// Why the state is `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The template's new version, once the build is `done`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// Length of the log so far.
    pub log_bytes: u64,
    /// When the build was requested.
    pub created_at: String,
    /// When the build ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

/// State of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BuildState {
    /// Steps are running.
    Running,
    /// The template has the new version.
    Done,
    /// The build failed; `reason` says why.
    Failed,
}

/// `GET /v1/builds`, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BuildList {
    /// This key's owner's builds, as far as the daemon still remembers them.
    pub builds: Vec<Build>,
}
