//! Bodies about hooks.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A command that runs in a sandbox when something is done to it. Where hooks are given, the keys say when: `after_create`,
/// `before_pause`, `after_resume`, `before_delete`, `after_fork`, `after_claim` or `after_rollback`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Hook {
    /// A script for the shell; this or `argv`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub script: Option<String>,
    /// A program and its arguments; this or `script`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub argv: Option<Vec<String>>,
    /// Who it runs as. Default: as for commands.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// How long it may take, at most 600. Default: 30.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<f64>,
    /// Whether what it belongs to fails if it fails. Default: `false`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub required: bool,
}

/// How the last run of a hook went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct HookRun {
    /// When it began.
    pub at: String,
    /// How long it took.
    pub took_ms: f64,
    /// The command that ran, if it started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command_id: Option<String>,
    /// Why it failed; absent if it succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<String>,
}
