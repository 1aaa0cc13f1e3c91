//! Bodies about builds.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::TemplateSpec;

/// The header `Shoal-Build` of `POST /v1/builds`, as JSON in ASCII.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct StartBuild {
    /// The template that is made or changed.
    pub template: String,
    /// What else is in it. Its `image` is what is built, so none is given; its limits are those of the build too.
    #[serde(default)]
    pub spec: TemplateSpec,
    /// The path of the Dockerfile in the context; `Dockerfile` if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dockerfile: Option<String>,
    /// The stage to build; the last if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Values for `ARG`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub args: BTreeMap<String, String>,
    /// Secrets in base64, by id. Steps see those that they name, and nothing of them is kept.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
}

/// A build.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Build {
    /// A UUID.
    pub id: String,
    /// What it becomes.
    pub template: String,
    /// Where it is in its life.
    pub state: BuildState,
    /// Why it is `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of the template, once it is `done`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<u32>,
    /// How long its log is so far.
    pub log_bytes: u64,
    /// When it was asked for.
    pub created_at: String,
    /// When it was over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_at: Option<String>,
}

/// Where a build is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum BuildState {
    /// Steps are done.
    Running,
    /// The template has it.
    Done,
    /// It broke off; `reason` says why.
    Failed,
}

/// `GET /v1/builds`, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct BuildList {
    /// Those of this key's owner that are remembered.
    pub builds: Vec<Build>,
}
