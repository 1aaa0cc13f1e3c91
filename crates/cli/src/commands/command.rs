//! `shoal ps` and `shoal kill`: the commands of a sandbox.

use client::api;

use crate::args::{Kill, List, Ps};
use crate::commands::sandbox;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::report::{self, hinted};
use crate::output::{age, print};

/// `shoal ps`
pub async fn list(arguments: Ps, environment: &Environment) -> anyhow::Result<i32> {
    let Some(text) = &arguments.sandbox else {
        let list =
            List { all_owners: false, labels: Vec::new(), quiet: arguments.quiet, json: arguments.json };
        return sandbox::list(list, environment).await;
    };
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, text).await?;
    let mut commands = client.commands(sandbox.id).await?;
    commands.retain(|command| arguments.all || runs(command));
    if arguments.json {
        print::json(&commands)?;
    } else if arguments.quiet {
        for command in &commands {
            print::line(&command.id.to_string())?;
        }
    } else {
        table(&commands)?;
    }
    Ok(0)
}

/// Prints commands for people.
pub fn table(commands: &[api::Command]) -> anyhow::Result<()> {
    let rows: Vec<Vec<String>> = commands.iter().map(row).collect();
    print::table(&["command", "state", "exit", "created", "program"], &rows)
}

/// What a command runs, on one line: a script has several.
pub fn program(command: &api::Command) -> String {
    let program = command.argv.as_ref().map(|argv| argv.join(" ")).or_else(|| command.script.clone());
    program.unwrap_or_default().split_whitespace().collect::<Vec<_>>().join(" ")
}

fn row(command: &api::Command) -> Vec<String> {
    vec![
        command.id.to_string(),
        print::word(&command.state),
        command.result.as_ref().map(ending).unwrap_or_default(),
        age::ago(&command.created_at),
        program(command),
    ]
}

/// How a command ended: its exit code if it exited, else in words, since a number would say less than is known.
fn ending(result: &api::CommandResult) -> String {
    match (result.outcome, result.exit_code, result.signal) {
        (api::Outcome::Exited | api::Outcome::FailedToStart, Some(code), _) => code.to_string(),
        (api::Outcome::Signaled, _, Some(signal)) => format!("signal {signal}"),
        (outcome, _, _) => print::word(&outcome).replace('_', " "),
    }
}

fn runs(command: &api::Command) -> bool {
    command.state != api::CommandState::Ended
}

/// `shoal kill`
pub async fn kill(arguments: Kill, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?;
    let mut commands = Vec::new();
    for text in &arguments.commands {
        commands.push(find::command(&client, sandbox.id, text).await?);
    }
    if commands.is_empty() {
        commands = client.commands(sandbox.id).await?;
        commands.retain(runs);
        if commands.is_empty() && !arguments.all {
            return Err(hinted(
                format!("no command is running in sandbox `{}`", sandbox.name),
                "`shoal ps -a SANDBOX` lists the commands that have ended",
            ));
        }
        if commands.len() > 1 && !arguments.all {
            return Err(hinted(
                format!("{} commands are running in sandbox `{}`", commands.len(), sandbox.name),
                format!(
                    "name one (`shoal ps {}` lists them), or kill all with --all",
                    sandbox::handle(&sandbox)
                ),
            ));
        }
    }
    let signal = arguments.signal.as_deref().map(signal_name);
    let mut failures = 0;
    for command in &commands {
        let sent = match &signal {
            Some(signal) => client.signal(sandbox.id, &command.id, signal).await,
            None => client.kill(sandbox.id, &command.id).await,
        };
        match sent {
            Ok(()) if arguments.quiet => {}
            Ok(()) => {
                let verb = signal.as_ref().map_or("killed".to_owned(), |signal| format!("sent {signal} to"));
                report::done(&format!("{verb} command {}", command.id));
            }
            Err(error) => {
                failures += 1;
                report::failure(&error.into(), environment.colour);
            }
        }
    }
    Ok(i32::from(failures > 0))
}

/// `SIGTERM`, however it was typed; numbers stay.
fn signal_name(text: &str) -> String {
    let upper = text.to_ascii_uppercase();
    let number = upper.chars().all(|character| character.is_ascii_digit());
    if number || upper.starts_with("SIG") { upper } else { format!("SIG{upper}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_named_as_people_type_them() {
        for (text, name) in [("TERM", "SIGTERM"), ("sigint", "SIGINT"), ("hup", "SIGHUP"), ("9", "9")] {
            assert_eq!(signal_name(text), name);
        }
    }
}
