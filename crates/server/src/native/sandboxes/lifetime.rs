//! Labels, lifetime rules and their effect, between `wire::api` and the engine.

use std::time::Duration;

use engine::{
    Action, Explanation, LabelChanges, LastUse, Lifetime, NetworkChange, NoteChanges, Renewal, Rule,
    SandboxName, SandboxUpdate, Since,
};
use wire::{SandboxId, api};

use super::sandbox_state;
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::native::hooks::hooks_of;
use crate::native::network::policy_of;

/// `PATCH /v1/sandboxes/{sandbox}`
pub fn sandbox_update(body: api::UpdateSandbox) -> Result<SandboxUpdate, ApiError> {
    let api::UpdateSandbox { name, labels, lifetime, network, history, hooks } = body;
    Ok(SandboxUpdate {
        history,
        hooks: hooks.map(hooks_of).transpose()?,
        name: name.as_deref().map(SandboxName::parse).transpose()?,
        labels: LabelChanges::new(labels)?,
        notes: NoteChanges::default(),
        lifetime: lifetime.map(lifetime_of).transpose()?,
        network: network.map(policy_of).transpose()?.map(NetworkChange::Replace),
    })
}

pub(super) fn lifetime_of(rules: Vec<api::LifetimeRule>) -> Result<Lifetime, ApiError> {
    let rules = rules.into_iter().map(|rule| {
        let api::LifetimeRule { since, after_seconds, action, accept_inactive: _ } = rule;
        let action = match action {
            api::RuleAction::PauseKeepMemory => Action::PauseKeepMemory,
            api::RuleAction::PauseDropMemory => Action::PauseDropMemory,
            api::RuleAction::Delete => Action::Delete,
        };
        let since = match since {
            api::RuleSince::LastUse => Since::LastUse,
            api::RuleSince::Start => Since::Start,
            api::RuleSince::Paused => Since::Paused,
            api::RuleSince::Creation => Since::Creation,
        };
        let after = Duration::try_from_secs_f64(after_seconds)
            .map_err(|_| ApiError::must("lifetime", "give the length of each rule as a number of seconds"))?;
        Ok(Rule { since, after, action })
    });
    Ok(Lifetime::new(rules.collect::<Result<_, ApiError>>()?)?)
}

pub(super) fn kept_rule(rule: &Rule) -> api::KeptRule {
    let since = match rule.since {
        Since::LastUse => api::RuleSince::LastUse,
        Since::Start => api::RuleSince::Start,
        Since::Paused => api::RuleSince::Paused,
        Since::Creation => api::RuleSince::Creation,
    };
    let after_seconds = rule.after.as_secs_f64();
    api::KeptRule { since, after_seconds, action: rule_action(rule.action), acts: true }
}

fn rule_action(action: Action) -> api::RuleAction {
    match action {
        Action::PauseKeepMemory => api::RuleAction::PauseKeepMemory,
        Action::PauseDropMemory => api::RuleAction::PauseDropMemory,
        Action::Delete => api::RuleAction::Delete,
    }
}

/// Why a sandbox lives, and when and how it ends.
pub fn explanation(id: SandboxId, explanation: Explanation) -> api::Explanation {
    let last_use = explanation.last_use.map(|(at, by)| {
        let by = match by {
            LastUse::Start => api::UsedBy::Start,
            LastUse::Request => api::UsedBy::Request,
            LastUse::Touch => api::UsedBy::Touch,
            LastUse::Processor => api::UsedBy::Processor,
        };
        api::LastUse { at: rfc3339(at), by }
    });
    let end = explanation.end.map(|end| api::SandboxEnd {
        action: rule_action(end.action),
        at: rfc3339(end.at),
        in_seconds: seconds(end.left),
        rule: end.rule,
        postponed_by: match end.renewal {
            Renewal::UseOrTouch => api::PostponedBy::UseOrTouch,
            Renewal::Touch => api::PostponedBy::Touch,
            Renewal::Nothing => api::PostponedBy::Nothing,
        },
    });
    let rules = explanation.rules.iter().map(|now| api::ExplainedRule {
        rule: kept_rule(&now.rule),
        strikes_at: now.at.map(rfc3339),
        strikes_in_seconds: now.left.map(seconds),
    });
    api::Explanation {
        sandbox_id: id,
        sentence: explanation.sentence,
        state: sandbox_state(explanation.state),
        uses: explanation.uses,
        last_use,
        end,
        rules: rules.collect(),
    }
}

/// In whole milliseconds, as all times in responses.
fn seconds(length: Duration) -> f64 {
    length.as_millis() as f64 / 1000.0
}
