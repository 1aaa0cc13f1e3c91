//! The arguments about labels and lifetimes.

use std::time::Duration;

use clap::Args;
use client::api;

/// Set and remove labels of a sandbox, all at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal label work app=chat thread=42      set two
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

/// Say anew how long a sandbox lives. What held before does not hold any more, and all clocks but that of creation begin anew.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal lifetime work --idle 30m
  shoal lifetime work --idle 30m --hard-ttl 7d
  shoal lifetime work --rule start:5m:delete      five minutes after its start, or after the last `shoal touch`
  shoal lifetime work --none                      until it is deleted

`shoal explain work` says what the rules come to.")]
#[group(id = "wish", required = true, multiple = true, args = ["idle", "hard_ttl", "rule", "none"])]
pub struct Lifetime {
    /// The sandbox's id or name
    pub sandbox: String,
    #[command(flatten)]
    pub rules: Rules,
    /// No rules: it lives until it is deleted
    #[arg(long, conflicts_with_all = ["idle", "hard_ttl", "rule"])]
    pub none: bool,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// Rules of a lifetime.
#[derive(Debug, Default, Args)]
pub struct Rules {
    /// Delete it when nobody has used it for so long, as 30m, 12h or 7d
    #[arg(long, value_name = "LENGTH", value_parser = length)]
    pub idle: Option<Duration>,
    /// Delete it so long after its creation, whatever happens
    #[arg(long, value_name = "LENGTH", value_parser = length)]
    pub hard_ttl: Option<Duration>,
    /// Any rule: since last-use, start or creation, so long, then what, as start:5m:delete; may be repeated
    #[arg(long, value_name = "SINCE:LENGTH:ACTION", value_parser = rule)]
    pub rule: Vec<api::LifetimeRule>,
    /// Keep rules whose action this version cannot do, without effect
    #[arg(long, requires = "rule")]
    pub accept_inactive: bool,
}

impl Rules {
    /// In the order of the help.
    pub fn list(self) -> Vec<api::LifetimeRule> {
        let accept_inactive = self.accept_inactive;
        let delete = |since, after: Duration| api::LifetimeRule {
            since,
            after_seconds: after.as_secs_f64(),
            action: api::RuleAction::Delete,
            accept_inactive: false,
        };
        let idle = self.idle.map(|after| delete(api::RuleSince::LastUse, after));
        let hard_ttl = self.hard_ttl.map(|after| delete(api::RuleSince::Creation, after));
        let others = self.rule.into_iter().map(|rule| api::LifetimeRule { accept_inactive, ..rule });
        idle.into_iter().chain(hard_ttl).chain(others).collect()
    }
}

/// Renew a sandbox: it lives on as if it were used and started now. Says when it ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal touch work")]
pub struct Touch {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print what is known as JSON
    #[arg(long)]
    pub json: bool,
}

/// Say why a sandbox lives, and when and how it ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal explain work\n  shoal explain --json work | jq .end.at")]
pub struct Explain {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print what is known as JSON
    #[arg(long)]
    pub json: bool,
}

pub(super) fn pair(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.is_empty() => Ok((key.to_owned(), value.to_owned())),
        Some(_) | None => Err("write it as KEY=VALUE".into()),
    }
}

fn change(text: &str) -> Result<LabelChange, String> {
    if let Ok((key, value)) = pair(text) {
        return Ok(LabelChange { key, value: Some(value) });
    }
    match text.strip_suffix('-') {
        Some(key) if !key.is_empty() => Ok(LabelChange { key: key.to_owned(), value: None }),
        Some(_) | None => Err("write it as KEY=VALUE to set it, or as KEY- to remove it".into()),
    }
}

/// A number with a unit; seconds where there is none.
fn length(text: &str) -> Result<Duration, String> {
    let wrong = || format!("`{text}` is not a length such as 90, 90s, 30m, 12h or 7d");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let seconds = match unit {
        "ms" => 0.001,
        "" | "s" => 1.0,
        "m" | "min" => 60.0,
        "h" => 3600.0,
        "d" => 86_400.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    Duration::try_from_secs_f64(number * seconds).map_err(|_| wrong())
}

fn rule(text: &str) -> Result<api::LifetimeRule, String> {
    let mut parts = text.split(':');
    let (Some(since), Some(after), Some(action), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err("write it as SINCE:LENGTH:ACTION, as start:5m:delete".into());
    };
    let since = match since.replace('_', "-").as_str() {
        "last-use" => api::RuleSince::LastUse,
        "start" => api::RuleSince::Start,
        "paused" => api::RuleSince::Paused,
        "creation" => api::RuleSince::Creation,
        _ => return Err("it counts since last-use, start, paused or creation".into()),
    };
    let action = match action.replace('_', "-").as_str() {
        "pause-keep-memory" => api::RuleAction::PauseKeepMemory,
        "pause-drop-memory" => api::RuleAction::PauseDropMemory,
        "delete" => api::RuleAction::Delete,
        _ => return Err("the action is delete, pause-keep-memory or pause-drop-memory".into()),
    };
    Ok(api::LifetimeRule {
        since,
        after_seconds: length(after)?.as_secs_f64(),
        action,
        accept_inactive: false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_have_units() {
        for (text, millis) in [
            ("90", 90_000),
            ("1.5s", 1500),
            ("250ms", 250),
            ("30m", 1_800_000),
            ("2h", 7_200_000),
            ("1d", 86_400_000),
        ] {
            assert_eq!(length(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in ["", "m", "-1s", "1 s", "1w", "1.2.3", "1e3", "inf", "NaN", "99999999999999999999999d"] {
            assert!(length(text).is_err(), "{text}");
        }
    }

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
