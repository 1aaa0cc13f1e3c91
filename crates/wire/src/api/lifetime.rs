//! How long sandboxes live, and why.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SandboxState;
use crate::SandboxId;

/// A wish for how long a sandbox lives: so long since something, then do this. Of several rules, the first to strike wins.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LifetimeRule {
    /// From when it counts.
    pub since: RuleSince,
    /// The length, 0.1 seconds to ten years.
    pub after_seconds: f64,
    /// What is done then.
    pub action: RuleAction,
    /// Takes a rule with an action that this version cannot do: it is kept and shown with `"acts": false`, and does
    /// nothing. Without this, such a rule is refused.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_inactive: bool,
}

/// From when a rule counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleSince {
    /// The end of the last use: a request to its commands or files, an open stream, a command that someone waits for or
    /// that uses the processor. Reading its state is no use.
    LastUse,
    /// Its start, or the last touch after it.
    Start,
    /// The last pause, while it lasts.
    Paused,
    /// When it was asked for. Nothing renews it.
    Creation,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleAction {
    /// Pauses it and keeps its memory. Not done by this version.
    PauseKeepMemory,
    /// Pauses it, ends its processes and keeps its files. Not done by this version.
    PauseDropMemory,
    /// Deletes it with all that is in it.
    Delete,
}

/// A rule as a sandbox has it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeptRule {
    /// From when it counts.
    pub since: RuleSince,
    /// The length.
    pub after_seconds: f64,
    /// What is done then.
    pub action: RuleAction,
    /// Whether this version does it.
    pub acts: bool,
}

/// `GET /v1/sandboxes/{id}/explain` and `POST /v1/sandboxes/{id}/touch`: why a sandbox lives, and when and how it ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// Which sandbox.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// All of it in one sentence, for people.
    pub sentence: String,
    /// Where it is in its life.
    pub state: SandboxState,
    /// Uses under way: requests, open streams, commands that someone waits for.
    pub uses: u32,
    /// The last use. Absent where nobody knows: without a rule that acts, it is not kept over a restart of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_use: Option<LastUse>,
    /// How it ends if nothing happens until then. Absent while no rule ends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<SandboxEnd>,
    /// All rules, in the order they were given.
    pub rules: Vec<ExplainedRule>,
}

/// The last use of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LastUse {
    /// When it ended; now, while there are uses under way.
    pub at: String,
    /// What it was.
    pub by: UsedBy,
}

/// What used a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UsedBy {
    /// Nobody yet: it is its start.
    Start,
    /// A request or a stream.
    Request,
    /// A touch, or a change of the lifetime.
    Touch,
    /// A command that nobody waits for and that uses the processor.
    Processor,
}

/// How a sandbox ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxEnd {
    /// What happens then.
    pub action: RuleAction,
    /// When.
    pub at: String,
    /// In how long.
    pub in_seconds: f64,
    /// By which rule: its place in `rules`, from 0.
    pub rule: usize,
    /// What would postpone it.
    pub postponed_by: PostponedBy,
}

/// What begins the clock of a rule anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PostponedBy {
    /// Any use, and a touch.
    UseOrTouch,
    /// A touch.
    Touch,
    /// Nothing.
    Nothing,
}

/// A rule at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedRule {
    /// The rule.
    #[serde(flatten)]
    pub rule: KeptRule,
    /// When it strikes if nothing happens until then. Absent where it does not act, or does not count now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_at: Option<String>,
    /// In how long that is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_in_seconds: Option<f64>,
}
