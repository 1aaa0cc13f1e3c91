//! `shoal shell` and `shoal attach`: work in a sandbox, at a terminal.
//!
//! What goes back and forth is in `session`; here is which command it is, and what becomes of it afterwards.

use client::{Client, ClientError, CommandId, Offsets, SandboxId, api};

use crate::args::{Attach, Run, Shell};
use crate::detach::DetachKeys;
use crate::environment::Environment;
use crate::interrupts::Interrupts;
use crate::report::{hinted, hinted_by};
use crate::session::{HUNG_UP, Left, REPLAY_MAX, Session};
use crate::{find, run, terminal};

/// The shell that the sandbox says its user has, as at a login. Init sets SHELL from the sandbox's own list of users.
const LOGIN_SHELL: [&str; 3] = ["/bin/sh", "-c", "exec \"${SHELL:-/bin/sh}\" -l"];

/// `shoal shell`
pub async fn shell(arguments: Shell, environment: &Environment) -> anyhow::Result<i32> {
    let arguments = Run {
        sandbox: arguments.sandbox,
        env: arguments.env,
        workdir: arguments.workdir,
        user: arguments.user,
        terminal: terminal::is_typed_on(),
        detach: arguments.detach,
        timeout: None,
        spec: arguments.spec,
        json: false,
        greeting: true,
        command: LOGIN_SHELL.map(str::to_owned).to_vec(),
    };
    run::run(arguments, environment).await
}

/// `shoal attach`
pub async fn attach(arguments: Attach, environment: &Environment) -> anyhow::Result<i32> {
    if !terminal::is_typed_on() {
        return Err(hinted(
            "stdin is no terminal",
            "`shoal logs -f` follows what a command writes without one",
        ));
    }
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?.id;
    let command = match &arguments.command {
        Some(text) => client.command(sandbox, &text.parse()?).await?,
        None => newest_terminal(&client, sandbox).await?,
    };
    if !command.terminal {
        return Err(hinted(
            format!("command `{}` has no terminal", command.id),
            "`shoal logs -f` follows what it writes",
        ));
    }
    let mut interrupts = Interrupts::catch()?;
    let until = command.stdout.end;
    let from = until.saturating_sub(REPLAY_MAX).max(command.stdout.start);
    let stream = client.attach(sandbox, command.id.clone(), Offsets { stdout: from, stderr: 0 });
    let session = Session::joined(stream, arguments.detach.detach_keys, until);
    let left = session.run(&mut interrupts).await;
    let place = Place { client: &client, sandbox, command: command.id };
    // Whoever joined did not start it, so their going is no reason for it to end.
    let left = match left {
        Ok(Left::Interrupted(code)) => return Ok(code),
        left => left,
    };
    place.leave(left, None, &mut interrupts, environment).await
}

async fn newest_terminal(client: &Client, sandbox: SandboxId) -> anyhow::Result<api::Command> {
    let commands = client.commands(sandbox).await?;
    let lives = |command: &api::Command| command.terminal && command.state != api::CommandState::Ended;
    commands
        .into_iter()
        .rfind(lives)
        .ok_or_else(|| hinted("nothing runs at a terminal in this sandbox", "`shoal shell` starts a shell"))
}

/// Starts a command at a terminal like ours, and stays with it.
pub async fn run(
    client: &Client,
    sandbox: SandboxId,
    arguments: &Run,
    keys: DetachKeys,
    interrupts: &mut Interrupts,
    environment: &Environment,
) -> (CommandId, anyhow::Result<Left>) {
    let wish = api::RunCommand {
        // What was asked for by name goes before what our terminal is.
        env: environment.terminal.iter().chain(&arguments.env).cloned().collect(),
        stdin: true,
        terminal: Some(terminal::size()),
        ..run::wish(arguments)
    };
    if arguments.greeting {
        let leave = if keys.is_none() { String::new() } else { format!("; {keys} leaves the shell running") };
        let fate = if arguments.sandbox.is_none() { ", deleted at its end" } else { "" };
        eprintln!("sandbox {sandbox}{fate}{leave}");
    }
    let stream = client.stream(sandbox, wish);
    let command = stream.id().clone();
    (command, Session::started(stream, keys).run(interrupts).await)
}

/// A command in a sandbox that stays.
pub struct Place<'a> {
    /// For calls.
    pub client: &'a Client,
    /// Where it is.
    pub sandbox: SandboxId,
    /// Which it is.
    pub command: CommandId,
}

impl Place<'_> {
    /// After a session: the exit code, and what becomes of the command.
    pub async fn leave(
        self,
        left: anyhow::Result<Left>,
        timeout_seconds: Option<f64>,
        interrupts: &mut Interrupts,
        environment: &Environment,
    ) -> anyhow::Result<i32> {
        let Self { client, sandbox, command } = self;
        match left {
            Ok(Left::Ended(command)) => run::concluded(&command, timeout_seconds, environment),
            Ok(Left::Detached) => {
                say_left_running(sandbox, &command);
                Ok(0)
            }
            // Of the window that was closed, and of the connection that was lost: one comes back.
            Ok(Left::Interrupted(HUNG_UP)) => Ok(HUNG_UP),
            Ok(Left::Interrupted(code)) => {
                // As the kernel does when a line is hung up: a shell ends and tells its jobs, and what should outlive it
                // has asked not to hear. If it cannot be told it goes on, and can be come back to.
                tokio::select! {
                    _ = client.signal(sandbox, &command, "SIGHUP") => {}
                    _ = interrupts.next() => {}
                }
                Ok(code)
            }
            // The daemon has not said that the command is over, so it may go on.
            Err(error) if error.downcast_ref::<ClientError>().is_some_and(|error| error.code().is_none()) => {
                let hint = format!("if it still runs, `shoal attach {sandbox} {command}` comes back to it");
                Err(hinted_by(error, "the terminal was lost", hint))
            }
            Err(error) => Err(error),
        }
    }
}

/// Tells how to come back.
pub fn say_left_running(sandbox: SandboxId, command: &CommandId) {
    eprintln!("left running; come back with `shoal attach {sandbox} {command}`");
}
