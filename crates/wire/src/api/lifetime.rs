//! How long sandboxes live, and why.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::SandboxState;
use crate::SandboxId;

/// A lifetime rule: some time after an event, do something. If several rules apply, the earliest one acts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LifetimeRule {
    /// The event that starts the clock.
    pub since: RuleSince,
    /// The time after the event, 0.1 seconds to ten years.
    pub after_seconds: f64,
    /// The action.
    pub action: RuleAction,
    /// Has no effect: this version performs every action. Earlier versions could not pause, and kept a rule to pause only with
    /// this.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub accept_inactive: bool,
}

/// The event that starts a rule's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleSince {
    /// The end of the last use: a request to the sandbox's commands or files, an open stream, a command that a caller
    /// waits for or that uses the processor. Reading the sandbox's state does not count as a use.
    LastUse,
    /// The sandbox's start, or the last touch after it.
    Start,
    /// The last pause, while it lasts.
    Paused,
    /// The create request. Nothing restarts this clock.
    Creation,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum RuleAction {
    /// Pause the sandbox and keep its memory.
    PauseKeepMemory,
    /// Pause the sandbox, end its processes and keep its files. One that is paused with its memory gives it up.
    PauseDropMemory,
    /// Delete the sandbox and everything in it.
    Delete,
}

/// A rule of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct KeptRule {
    /// The event that starts the clock.
    pub since: RuleSince,
    /// The time after the event.
    pub after_seconds: f64,
    /// The action.
    pub action: RuleAction,
    /// Whether this version performs the action: always. Earlier versions could not pause.
    pub acts: bool,
}

/// `GET /v1/sandboxes/{id}/explain` and `POST /v1/sandboxes/{id}/touch`: why a sandbox is alive, and when and how it
/// ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Explanation {
    /// The sandbox's id.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// A summary in one sentence, for people.
    pub sentence: String,
    /// The sandbox's state.
    pub state: SandboxState,
    /// Number of uses in progress: requests, open streams, commands that a caller waits for.
    pub uses: u32,
    /// The last use. Absent if unknown: without a rule that acts, it is not stored across a restart of the daemon.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_use: Option<LastUse>,
    /// How the sandbox ends if nothing happens before. Absent while no rule ends it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub end: Option<SandboxEnd>,
    /// All rules, in the order they were given.
    pub rules: Vec<ExplainedRule>,
}

/// The last use of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LastUse {
    /// When it ended; now, while a use is in progress.
    pub at: String,
    /// What kind of use it was.
    pub by: UsedBy,
}

/// What used a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum UsedBy {
    /// Nothing yet: the time is that of the sandbox's start.
    Start,
    /// A request or a stream.
    Request,
    /// A touch, or a change of the lifetime.
    Touch,
    /// A command that no caller waits for and that uses the processor.
    Processor,
}

/// How a sandbox ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SandboxEnd {
    /// The action.
    pub action: RuleAction,
    /// The time.
    pub at: String,
    /// The time left.
    pub in_seconds: f64,
    /// The rule that causes it: its index in `rules`, from 0.
    pub rule: usize,
    /// What would postpone it.
    pub postponed_by: PostponedBy,
}

/// What restarts the clock of a rule.
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

/// A rule, with its times at one moment.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ExplainedRule {
    /// The rule.
    #[serde(flatten)]
    pub rule: KeptRule,
    /// When it acts if nothing happens before. Absent if it does not act, or its clock is not running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_at: Option<String>,
    /// The time left until then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strikes_in_seconds: Option<f64>,
}
