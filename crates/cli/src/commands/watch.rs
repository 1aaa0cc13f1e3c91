//! `shoal watch`: what happens to sandboxes and their commands, line by line, as it happens.

use std::collections::HashMap;

use client::{Client, SandboxId, api};

use crate::args::Watch;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print::{self, Paint, word};
use crate::output::{amount, report};
use crate::terminal::interrupts::Interrupts;

/// `shoal watch`
pub async fn watch(arguments: Watch, environment: &Environment) -> anyhow::Result<i32> {
    let mut interrupts = Interrupts::catch()?;
    tokio::select! {
        watched = follow(&arguments, environment) => watched.map(|()| 0),
        // How people end something that has no end.
        code = interrupts.next() => Ok(code),
    }
}

async fn follow(arguments: &Watch, environment: &Environment) -> anyhow::Result<()> {
    let client = find::daemon(environment)?;
    let only = match &arguments.sandbox {
        Some(text) => Some(find::sandbox(&client, text).await?.id),
        None => None,
    };
    let mut events = client.watch(only);
    let mut view = View { client, only, names: HashMap::new() };
    loop {
        let event = events.next().await?;
        let gone = matches!(event, api::SandboxEvent::Deleted { .. });
        let lines = if arguments.json {
            format!("{}\n", serde_json::to_string(&event)?)
        } else {
            if event == api::SandboxEvent::Missed {
                report::warning("some events were missed; showing the current state", environment.colour);
            }
            view.shown(event).await?
        };
        // Of one sandbox, its end is the last that can happen.
        if !print::live(&lines)? || (gone && only.is_some()) {
            return Ok(());
        }
    }
}

struct View {
    client: Client,
    only: Option<SandboxId>,
    /// Events of commands do not carry them.
    names: HashMap<SandboxId, String>,
}

impl View {
    /// Lines for people.
    async fn shown(&mut self, event: api::SandboxEvent) -> anyhow::Result<String> {
        Ok(match event {
            api::SandboxEvent::Ready | api::SandboxEvent::Missed => self.now().await?,
            api::SandboxEvent::Sandbox { at, sandbox_id, name, state, reason } => {
                let what = match reason {
                    Some(reason) => format!("{}: {}", word(&state), print::harmless(&reason)),
                    None => word(&state),
                };
                let line = self.line(&at, sandbox_id, &name, &painted(&what, state));
                self.names.insert(sandbox_id, name);
                line
            }
            api::SandboxEvent::Deleted { at, sandbox_id, name } => {
                self.names.remove(&sandbox_id);
                self.line(&at, sandbox_id, &name, &print::painted("deleted", Paint::Dim))
            }
            api::SandboxEvent::CommandStarted { at, sandbox_id, command_id, pid } => {
                let name = self.names.get(&sandbox_id).cloned().unwrap_or_default();
                self.line(&at, sandbox_id, &name, &format!("command {command_id} started, pid {pid}"))
            }
            api::SandboxEvent::CommandEnded { at, sandbox_id, command_id, result } => {
                let name = self.names.get(&sandbox_id).cloned().unwrap_or_default();
                self.line(&at, sandbox_id, &name, &format!("command {command_id} {}", ending(&result)))
            }
            api::SandboxEvent::Template { at, name, version, state, reason } => {
                let reason = because(reason);
                line_of("template", &at, &name, &format!("version {version} {}{reason}", word(&state)))
            }
            api::SandboxEvent::TemplateDeleted { at, name } => line_of("template", &at, &name, "deleted"),
            api::SandboxEvent::HookFailed { at, sandbox_id, hook, reason } => {
                let name = self.names.get(&sandbox_id).cloned().unwrap_or_default();
                let what = format!("hook {hook} failed: {}", print::harmless(&reason));
                self.line(&at, sandbox_id, &name, &print::painted(&what, Paint::Red))
            }
            api::SandboxEvent::Snapshot { at, name, state, reason, .. } => {
                line_of("snapshot", &at, &name, &format!("{}{}", word(&state), because(reason)))
            }
            api::SandboxEvent::SnapshotDeleted { at, name, .. } => line_of("snapshot", &at, &name, "deleted"),
            api::SandboxEvent::Volume { at, name, size_bytes } => {
                line_of("volume", &at, &name, &amount::memory(size_bytes))
            }
            api::SandboxEvent::VolumeDeleted { at, name } => line_of("volume", &at, &name, "deleted"),
            api::SandboxEvent::Pool { at, name, replicas, reason } => {
                line_of("pool", &at, &name, &format!("{replicas} replicas{}", because(reason)))
            }
            api::SandboxEvent::PoolDeleted { at, name } => line_of("pool", &at, &name, "deleted"),
            api::SandboxEvent::Test { .. } => String::new(), // It comes to webhooks only.
        })
    }

    /// How everything is, for someone who has seen nothing of it.
    async fn now(&mut self) -> anyhow::Result<String> {
        let sandboxes = match self.only {
            Some(id) => vec![self.client.sandbox(id).await?],
            None => self.client.sandboxes().await?,
        };
        let mut lines = String::new();
        self.names.clear();
        for sandbox in sandboxes.into_iter().rev() {
            let state = painted(&word(&sandbox.state), sandbox.state);
            lines.push_str(&self.line("", sandbox.id, &sandbox.name, &state));
            self.names.insert(sandbox.id, sandbox.name);
        }
        Ok(lines)
    }

    fn line(&self, at: &str, id: SandboxId, name: &str, what: &str) -> String {
        // The time of day is enough for someone who watches; programs get all of it.
        let time = at.get(11..19).unwrap_or("now");
        format!("{time:8}  {id}  {}  {what}\n", print::harmless(name))
    }
}

fn because(reason: Option<String>) -> String {
    reason.map(|reason| format!(": {reason}")).unwrap_or_default()
}

/// A line about something that is no sandbox.
fn line_of(noun: &str, at: &str, name: &str, what: &str) -> String {
    let time = at.get(11..19).unwrap_or("now");
    format!("{time:8}  {noun}  {}  {}\n", print::harmless(name), print::harmless(what))
}

fn painted(what: &str, state: api::SandboxState) -> String {
    let paint = match state {
        api::SandboxState::Running => Paint::Green,
        api::SandboxState::Creating | api::SandboxState::Deleting => Paint::Yellow,
        api::SandboxState::Paused => Paint::Dim,
        api::SandboxState::Failed => Paint::Red,
    };
    print::painted(what, paint)
}

/// How a command ended, in a few words.
fn ending(result: &api::CommandResult) -> String {
    let paint = if result.exit_code == Some(0) { Paint::Green } else { Paint::Red };
    let what = match (result.outcome, result.exit_code, result.signal) {
        (api::Outcome::Exited, Some(code), _) => format!("exited with {code}"),
        (api::Outcome::Signaled, _, Some(signal)) => format!("was killed by signal {signal}"),
        (outcome, ..) => match &result.message {
            Some(message) => format!("ended: {}, {}", word(&outcome), print::harmless(message)),
            None => format!("ended: {}", word(&outcome)),
        },
    };
    print::painted(&what, paint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_is_told_in_a_few_words() {
        let result = |outcome, exit_code, signal, message: Option<&str>| api::CommandResult {
            outcome,
            exit_code,
            signal,
            message: message.map(str::to_owned),
            network: None,
            not_undoable: false,
        };
        for (result, text) in [
            (result(api::Outcome::Exited, Some(3), None, None), "exited with 3"),
            (result(api::Outcome::Signaled, Some(137), Some(9), None), "was killed by signal 9"),
            (result(api::Outcome::Killed, Some(137), Some(9), None), "ended: killed"),
            (
                result(api::Outcome::TimedOut, None, None, Some("too\x1blong")),
                "ended: timed_out, too\u{fffd}long",
            ),
        ] {
            assert_eq!(ending(&result), text);
        }
    }
}
