//! The arguments of `shoal label`, `lifetime`, `touch` and `explain`.

use std::time::Duration;

use clap::Args;
use client::api;

use super::value::{duration, pair};

/// Set, remove or print the labels of a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal label work app=chat thread=42      set two labels
  shoal label work thread-                 remove one
  shoal label work                         print them")]
pub struct Label {
    /// The sandbox's id or name
    pub sandbox: String,
    /// KEY=VALUE to set, KEY- to remove
    #[arg(value_name = "KEY=VALUE|KEY-", value_parser = change)]
    pub changes: Vec<LabelChange>,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// One change of a label.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LabelChange {
    pub key: String,
    /// `None` removes it.
    pub value: Option<String>,
}

/// Replace the lifetime rules of a sandbox. Every clock restarts, except the one since creation.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal lifetime work --idle 30m                delete it if unused
  shoal lifetime work --ttl 30m --hard-ttl 7d   pause if unused, then delete
  shoal lifetime work --rule start:5m:delete    after start or `shoal touch`
  shoal lifetime work --none                    until someone deletes it

`shoal explain work` shows when and how the sandbox ends.")]
#[group(id = "wish", required = true, multiple = true, args = ["ttl", "idle", "hard_ttl", "rule", "none"])]
pub struct Lifetime {
    /// The sandbox's id or name
    pub sandbox: String,
    #[command(flatten)]
    pub rules: Rules,
    /// Remove all rules: the sandbox lives until someone deletes it
    #[arg(long, conflicts_with_all = ["ttl", "idle", "hard_ttl", "rule"])]
    pub none: bool,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// Lifetime rules.
#[derive(Debug, Default, Args)]
pub struct Rules {
    /// Pause the sandbox when it is unused for this long: end its processes, keep its files
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub ttl: Option<Duration>,
    /// Delete the sandbox when it is unused for this long, for example 30m, 12h or 7d
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub idle: Option<Duration>,
    /// Delete the sandbox this long after its creation, used or not, paused or not
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub hard_ttl: Option<Duration>,
    /// Add a rule: since last-use, start, paused or creation, how long, and the action; repeatable
    #[arg(long, value_name = "SINCE:DURATION:ACTION", value_parser = rule)]
    pub rule: Vec<api::LifetimeRule>,
    /// Has no effect: this version performs every action
    #[arg(long, requires = "rule", hide = true)]
    pub accept_inactive: bool,
}

impl Rules {
    /// In the order of the help.
    pub fn list(self) -> Vec<api::LifetimeRule> {
        let rule = |since, action| {
            move |after: Duration| api::LifetimeRule {
                since,
                after_seconds: after.as_secs_f64(),
                action,
                accept_inactive: false,
            }
        };
        let ttl = self.ttl.map(rule(api::RuleSince::LastUse, api::RuleAction::PauseDropMemory));
        let idle = self.idle.map(rule(api::RuleSince::LastUse, api::RuleAction::Delete));
        let hard_ttl = self.hard_ttl.map(rule(api::RuleSince::Creation, api::RuleAction::Delete));
        ttl.into_iter().chain(idle).chain(hard_ttl).chain(self.rule).collect()
    }
}

/// Restart the idle and start clocks of a sandbox, and print when it ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal touch work")]
pub struct Touch {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print the explanation as JSON
    #[arg(long)]
    pub json: bool,
}

/// Explain when and how a sandbox ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal explain work\n  shoal explain --json work | jq .end.at")]
pub struct Explain {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print the explanation as JSON
    #[arg(long)]
    pub json: bool,
}

fn change(text: &str) -> Result<LabelChange, String> {
    if let Ok((key, value)) = pair(text) {
        return Ok(LabelChange { key, value: Some(value) });
    }
    match text.strip_suffix('-') {
        Some(key) if !key.is_empty() => Ok(LabelChange { key: key.to_owned(), value: None }),
        Some(_) | None => Err("write KEY=VALUE to set a label, or KEY- to remove it".into()),
    }
}

fn rule(text: &str) -> Result<api::LifetimeRule, String> {
    let mut parts = text.split(':');
    let (Some(since), Some(after), Some(action), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err("write SINCE:DURATION:ACTION, for example start:5m:delete".into());
    };
    let since = match since.replace('_', "-").as_str() {
        "last-use" => api::RuleSince::LastUse,
        "start" => api::RuleSince::Start,
        "paused" => api::RuleSince::Paused,
        "creation" => api::RuleSince::Creation,
        _ => return Err("SINCE must be last-use, start, paused or creation".into()),
    };
    let action = match action.replace('_', "-").as_str() {
        "pause-keep-memory" => api::RuleAction::PauseKeepMemory,
        "pause-drop-memory" => api::RuleAction::PauseDropMemory,
        "delete" => api::RuleAction::Delete,
        _ => return Err("ACTION must be delete, pause-keep-memory or pause-drop-memory".into()),
    };
    Ok(api::LifetimeRule {
        since,
        after_seconds: duration(after)?.as_secs_f64(),
        action,
        accept_inactive: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_set_and_removed() {
        let set = |key: &str, value: &str| LabelChange { key: key.into(), value: Some(value.into()) };
        assert_eq!(change("a=b"), Ok(set("a", "b")));
        assert_eq!(change("a=b="), Ok(set("a", "b=")));
        assert_eq!(change("a-=b-"), Ok(set("a-", "b-")));
        assert_eq!(change("a="), Ok(set("a", "")));
        assert_eq!(change("a-"), Ok(LabelChange { key: "a".into(), value: None }));
        for text in ["", "a", "-", "=b"] {
            assert!(change(text).is_err(), "{text}");
        }
    }

    #[test]
    fn rules_have_three_parts() {
        let read = rule("last-use:10m:pause-drop-memory").expect("it is a rule");
        assert_eq!((read.since, read.after_seconds), (api::RuleSince::LastUse, 600.0));
        assert_eq!(read.action, api::RuleAction::PauseDropMemory);
        assert_eq!(rule("last_use:10m:delete").expect("as in JSON").since, api::RuleSince::LastUse);
        for text in [
            "",
            "start",
            "start:5m",
            "start:5m:delete:now",
            "end:5m:delete",
            "start:x:delete",
            "start:5m:stop",
        ] {
            assert!(rule(text).is_err(), "{text}");
        }
    }
}
