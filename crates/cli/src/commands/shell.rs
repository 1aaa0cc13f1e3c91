//! `shoal shell` and `shoal attach`: work in a sandbox, at a terminal.
//!
//! What goes back and forth is in `session`; here is which command it is, and what becomes of it afterwards.

use std::time::Duration;

use client::{Client, ClientError, CommandId, Offsets, SandboxId, api};

use crate::args::{Attach, Manner, Run, Shell};
use crate::commands::{run, sandbox};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;
use crate::output::report::{hinted, hinted_by};
use crate::terminal;
use crate::terminal::detach::DetachKeys;
use crate::terminal::interrupts::Interrupts;
use crate::terminal::session::{HUNG_UP, Left, REPLAY_MAX, Session};

/// The shell that the sandbox says its user has, as at a login. Init sets SHELL from the sandbox's own list of users.
const LOGIN_SHELL: [&str; 3] = ["/bin/sh", "-c", "exec \"${SHELL:-/bin/sh}\" -l"];

/// `shoal shell`
pub async fn shell(arguments: Shell, environment: &Environment) -> anyhow::Result<i32> {
    let manner = Manner {
        terminal: terminal::is_typed_on(),
        interactive: true,
        detach: arguments.detach,
        background: false,
        timeout: None,
        json: false,
    };
    let arguments = Run {
        sandbox: arguments.sandbox,
        process: arguments.process,
        manner,
        rm: false,
        name: None,
        spec: arguments.spec,
        ports: Vec::new(),
        greeting: true,
        command: LOGIN_SHELL.map(str::to_owned).to_vec(),
    };
    run::run(arguments, environment).await
}

/// `shoal attach`
pub async fn attach(arguments: Attach, environment: &Environment) -> anyhow::Result<i32> {
    if !terminal::is_typed_on() {
        return Err(hinted(
            "stdin is not a terminal",
            "use `shoal logs -f` to follow the output of a command",
        ));
    }
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?;
    let command = match &arguments.command {
        Some(text) => find::command(&client, sandbox.id, text).await?,
        None => newest_terminal(&client, sandbox.id).await?,
    };
    if !command.terminal {
        return Err(hinted(
            format!("command `{}` has no terminal", command.id),
            "use `shoal logs -f` to follow its output",
        ));
    }
    let mut interrupts = Interrupts::catch()?;
    let until = command.stdout.end;
    let from = until.saturating_sub(REPLAY_MAX).max(command.stdout.start);
    let stream = client.attach(sandbox.id, command.id.clone(), Offsets { stdout: from, stderr: 0 });
    let session = Session::joined(stream, arguments.detach.detach_keys, until);
    let left = session.run(&mut interrupts).await;
    let place = Place {
        client: &client,
        sandbox: &sandbox,
        command: command.id,
        newest: arguments.command.is_none(),
    };
    // A client that joined did not start it, so it goes on when that client leaves.
    let left = match left {
        Ok(Left::Interrupted(code)) => return Ok(code),
        left => left,
    };
    place.leave(left, None, &mut interrupts, environment).await
}

async fn newest_terminal(client: &Client, sandbox: SandboxId) -> anyhow::Result<api::Command> {
    let commands = client.commands(sandbox).await?;
    let lives = |command: &api::Command| command.terminal && command.state != api::CommandState::Ended;
    commands.into_iter().rfind(lives).ok_or_else(|| {
        hinted("no command with a terminal is running in this sandbox", "start a shell with `shoal shell`")
    })
}

/// Starts a command at a terminal like ours, and stays with it.
pub async fn run(
    client: &Client,
    sandbox: &api::Sandbox,
    arguments: &Run,
    keys: DetachKeys,
    interrupts: &mut Interrupts,
    environment: &Environment,
) -> (CommandId, anyhow::Result<Left>) {
    let prompt = prompt(&sandbox::handle(sandbox));
    let wish = api::RunCommand {
        // What was asked for by name goes before what our terminal is.
        env: prompt
            .into_iter()
            .chain(environment.terminal.iter().chain(&arguments.process.env).cloned())
            .collect(),
        stdin: true,
        terminal: Some(terminal::size()),
        ..run::wish(arguments)
    };
    if arguments.greeting {
        let leave = if keys.is_none() { String::new() } else { format!("; {keys} leaves the shell running") };
        let fate = if arguments.sandbox.is_none() { ", deleted when the shell exits" } else { "" };
        eprintln!("sandbox {}{fate}{leave}", print::plain(&sandbox.name));
    }
    let stream = client.stream(sandbox.id, wish);
    let command = stream.id().clone();
    (command, Session::started(stream, keys).run(interrupts).await)
}

/// Variables that make shells show the sandbox's name in their prompt.
///
/// Other shells take `PS1` as it is. Bash reads its own files after that, so it replaces the host name in whatever prompt they
/// have set, once, before it first shows it. The handle is made of characters that mean nothing to a shell.
fn prompt(handle: &str) -> [(String, String); 2] {
    let replace = format!("PS1=${{PS1//\\\\h/{handle}}}; unset PROMPT_COMMAND");
    [("PS1".into(), format!("{handle}:${{PWD}}\\$ ")), ("PROMPT_COMMAND".into(), replace)]
}

/// A command in a sandbox that stays.
pub struct Place<'a> {
    /// For calls.
    pub client: &'a Client,
    /// Where it is.
    pub sandbox: &'a api::Sandbox,
    /// Which it is.
    pub command: CommandId,
    /// Whether it is the newest with a terminal, which `shoal attach` finds without its id.
    pub newest: bool,
}

impl Place<'_> {
    /// After a session: the exit code, and what becomes of the command.
    pub async fn leave(
        self,
        left: anyhow::Result<Left>,
        timeout: Option<Duration>,
        interrupts: &mut Interrupts,
        environment: &Environment,
    ) -> anyhow::Result<i32> {
        let Self { client, sandbox, command, newest } = self;
        let mut handle = sandbox::handle(sandbox);
        if !newest {
            handle.push_str(&format!(" {}", print::short_id(&command.to_string())));
        }
        match left {
            Ok(Left::Ended(command)) => run::concluded(&command, timeout, environment),
            Ok(Left::Detached) => {
                say_left_running(&handle);
                Ok(0)
            }
            // Of the window that was closed, and of the connection that was lost: one comes back.
            Ok(Left::Interrupted(HUNG_UP)) => Ok(HUNG_UP),
            Ok(Left::Interrupted(code)) => {
                // As the kernel does when a line is hung up: a shell ends and tells its jobs, and what should outlive it
                // has asked not to hear. If it cannot be told it goes on, and can be come back to.
                tokio::select! {
                    _ = client.signal(sandbox.id, &command, "SIGHUP") => {}
                    _ = interrupts.next() => {}
                }
                Ok(code)
            }
            // The daemon has not said that the command is over, so it may go on.
            Err(error) if error.downcast_ref::<ClientError>().is_some_and(|error| error.code().is_none()) => {
                let hint =
                    format!("if the command is still running, return to it with `shoal attach {handle}`");
                Err(hinted_by(error, "lost the connection to the terminal", hint))
            }
            Err(error) => Err(error),
        }
    }
}

/// Tells how to come back.
pub fn say_left_running(handle: &str) {
    eprintln!("left running; return with `shoal attach {handle}`");
}
