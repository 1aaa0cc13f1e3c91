//! `shoal run`: one command, from its sandbox's making to its deletion, as if it ran here.

use std::future::Future;
use std::io::{self, IsTerminal};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use client::{Client, CommandId, CommandStream, SandboxId, StreamEvent, api};

use crate::args::{Run, value};
use crate::commands::{forward, image, net, sandbox, shell, variables};
use crate::daemon::find;
use crate::daemon::private::{self, Private};
use crate::environment::Environment;
use crate::output::print;
use crate::output::progress::Waiting;
use crate::output::report::{self, hinted};
use crate::terminal;
use crate::terminal::detach::DetachKeys;
use crate::terminal::interrupts::Interrupts;
use crate::terminal::pipes::{Pipe, feed_stdin};
use crate::terminal::session::Left;

/// After a timeout, as with timeout(1).
const TIMED_OUT: i32 = 124;
/// Our own failure.
const FAILED: i32 = 125;
/// What a program ends with when its reader has gone: 128 and SIGPIPE.
const READER_GONE: i32 = 128 + 13;
/// How long a second Ctrl-C waits for a request to delete the sandbox to be on its way.
const LEAVE_MAX: Duration = Duration::from_secs(2);
/// How much of each stream is kept for `--json`.
const JSON_OUTPUT_MAX: usize = 16 << 20;
/// How long a command that was just started may take to be known, so that it can be killed.
const KNOWN_MAX: Duration = Duration::from_secs(5);
/// Between two tries to kill it.
const KILL_STEP: Duration = Duration::from_millis(50);

/// A daemon to run on.
enum Daemon {
    Shared(Client),
    Private(Private),
}

impl Daemon {
    async fn find(environment: &Environment) -> anyhow::Result<Self> {
        match find::named_or_living(environment)? {
            Some(client) => Ok(Self::Shared(client)),
            None => {
                let linger = linger(environment)?;
                // One is ready for the next command. Without a next one, it would be made beside the command and thrown away.
                let spares = u32::from(!linger.is_zero());
                let site = private::Site { base: environment.private_dir.clone(), spares, linger };
                let _waiting = Waiting::new("starting a private daemon");
                Ok(Self::Private(private::join(site).await?))
            }
        }
    }

    fn client(&self) -> &Client {
        match self {
            Self::Shared(client) => client,
            Self::Private(private) => &private.client,
        }
    }
}

/// How long the private daemon stays after the last command.
fn linger(environment: &Environment) -> anyhow::Result<Duration> {
    match &environment.private_linger {
        None => Ok(private::LINGER_DEFAULT),
        Some(text) => value::duration(text).map_err(|why| {
            hinted(format!("SHOAL_PRIVATE_LINGER is `{text}`: {why}"), "unset it, or write 10m")
        }),
    }
}

/// How the run of a command came to its end.
enum Over {
    /// The command ended.
    Ended(Box<api::Command>),
    /// A signal came first; the exit code that goes with it.
    Interrupted(i32),
    /// The reader of our output has gone.
    ReaderGone,
}

/// `shoal run`
pub async fn run(mut arguments: Run, environment: &Environment) -> anyhow::Result<i32> {
    let process = &mut arguments.process;
    process.env = variables::collect(std::mem::take(&mut process.env), &process.env_files, environment)?;
    if arguments.manner.background {
        return background(&find::daemon(environment)?, &arguments, environment).await;
    }
    if arguments.manner.terminal && !terminal::is_typed_on() {
        return Err(hinted("-t needs a terminal, and stdin is not one", "leave out -t"));
    }
    // Before anything is made, so that a port that is taken here leaves nothing behind.
    let bound = forward::Bound::bind(&arguments.ports).await?;
    let mut interrupts = Interrupts::catch()?;
    let daemon = tokio::select! {
        daemon = Daemon::find(environment) => daemon?,
        code = interrupts.next() => return Ok(code),
    };
    let client = daemon.client();
    if let Some(text) = &arguments.sandbox {
        let sandbox = tokio::select! {
            sandbox = find::sandbox(client, text) => sandbox?,
            code = interrupts.next() => return Ok(code),
        };
        let _forwards = bound.serve(client, sandbox.id, environment);
        if arguments.manner.terminal {
            let keys = arguments.manner.detach.detach_keys.clone();
            let (command, left) =
                shell::run(client, &sandbox, &arguments, keys, &mut interrupts, environment).await;
            let place = shell::Place { client, sandbox: &sandbox, command, newest: true };
            return place.leave(left, arguments.manner.timeout, &mut interrupts, environment).await;
        }
        return in_sandbox(client, sandbox.id, &arguments, &mut interrupts, environment).await;
    }
    let sandbox = match create(client, &arguments, &mut interrupts, environment).await? {
        Ok(sandbox) => sandbox,
        Err(code) => return Ok(code),
    };
    let forwards = bound.serve(client, sandbox.id, environment);
    let result = if arguments.manner.terminal {
        let keys = match &daemon {
            Daemon::Shared(_) => arguments.manner.detach.detach_keys.clone(),
            // It ends with us, and so would what is left in it.
            Daemon::Private(_) => DetachKeys::none(),
        };
        let (_, left) = shell::run(client, &sandbox, &arguments, keys, &mut interrupts, environment).await;
        match left {
            Ok(Left::Detached) => {
                let handle = sandbox::handle(&sandbox);
                shell::say_left_running(&handle);
                eprintln!("the sandbox stays until you delete it with `shoal rm {handle}`");
                return Ok(0);
            }
            Ok(Left::Interrupted(code)) => Ok(code),
            Ok(Left::Ended(command)) => concluded(&command, arguments.manner.timeout, environment),
            Err(error) => Err(error),
        }
    } else {
        in_own_sandbox(client, sandbox.id, &arguments, &mut interrupts, environment).await
    };
    drop(forwards);
    let _waiting = Waiting::new("deleting the sandbox");
    // A second signal leaves at once; the daemon carries the deletion on.
    tokio::select! {
        deleted = client.delete_sandbox(sandbox.id) => if let Err(error) = deleted {
            // Someone else deleted it, which is the result that was wanted.
            if error.code() != Some("sandbox_not_found") {
                report::warning(&format!("cannot delete sandbox `{}`: {error}", sandbox.name), environment.colour);
            }
        },
        code = interrupts.next() => return Ok(code),
    }
    result
}

/// Starts a command and leaves it running; prints the id to ask for it by.
async fn background(client: &Client, arguments: &Run, environment: &Environment) -> anyhow::Result<i32> {
    if let Some(text) = &arguments.sandbox {
        let sandbox = find::sandbox(client, text).await?;
        let command = client.start(sandbox.id, wish(arguments)).await?;
        print::line(&command.id.to_string())?;
        return Ok(0);
    }
    if let Some(image) = &arguments.spec.image {
        image::have(client, image, environment).await?;
    }
    let waiting = Waiting::new("creating a sandbox");
    let sandbox = client.create_sandbox(&new_sandbox(arguments)?).await?;
    drop(waiting);
    if let Err(error) = client.start(sandbox.id, wish(arguments)).await {
        // Nobody knows of the sandbox yet. If it cannot be deleted, that is less than what there is to say already.
        let _ = client.delete_sandbox(sandbox.id).await;
        return Err(error.into());
    }
    print::line(&sandbox.id.to_string())?;
    let handle = sandbox::handle(&sandbox);
    report::done(&format!(
        "follow the output with `shoal logs -f {handle}`, delete with `shoal rm {handle}`"
    ));
    Ok(0)
}

/// The sandbox that a command wants for itself.
fn new_sandbox(arguments: &Run) -> anyhow::Result<api::CreateSandbox> {
    Ok(api::CreateSandbox {
        name: arguments.name.clone(),
        template: arguments.spec.template.clone(),
        pool: arguments.spec.pool.clone(),
        image: arguments.spec.image.clone(),
        cpu: arguments.spec.cpu.clone(),
        memory: arguments.spec.memory.clone(),
        disk: arguments.spec.disk.clone(),
        mounts: arguments.spec.mounts.clone(),
        network: net::network(arguments.spec.net.as_deref())?,
        inject: arguments.spec.inject.clone(),
        ..Default::default()
    })
}

/// Creates a sandbox. After a signal it is waited for all the same, so that it can be deleted.
async fn create(
    client: &Client,
    arguments: &Run,
    interrupts: &mut Interrupts,
    environment: &Environment,
) -> anyhow::Result<Result<api::Sandbox, i32>> {
    if let Some(image) = &arguments.spec.image {
        tokio::select! {
            had = image::have(client, image, environment) => had?,
            code = interrupts.next() => return Ok(Err(code)),
        }
    }
    let wish = new_sandbox(arguments)?;
    let _waiting = Waiting::new("creating a sandbox");
    let creating = client.create_sandbox(&wish);
    tokio::pin!(creating);
    let code = tokio::select! {
        sandbox = &mut creating => return Ok(Ok(sandbox?)),
        code = interrupts.next() => code,
    };
    let undo = async {
        // If it was not created there is nothing to undo; if it cannot be deleted, this run is over all the same.
        if let Ok(sandbox) = creating.await {
            let _ = client.delete_sandbox(sandbox.id).await;
        }
    };
    tokio::pin!(undo);
    tokio::select! {
        () = &mut undo => {}
        _ = interrupts.next() => {
            let _ = tokio::time::timeout(LEAVE_MAX, undo).await;
        }
    }
    Ok(Err(code))
}

/// In a sandbox that is deleted afterwards: a signal need only stop the waiting.
async fn in_own_sandbox(
    client: &Client,
    sandbox: SandboxId,
    arguments: &Run,
    interrupts: &mut Interrupts,
    environment: &Environment,
) -> anyhow::Result<i32> {
    let mut streaming = Streaming::start(client, sandbox, arguments);
    let over = tokio::select! {
        over = streaming.follow(environment) => over?,
        code = interrupts.next() => Over::Interrupted(code),
    };
    streaming.conclude(over, arguments, environment)
}

/// In a sandbox that stays: a signal kills the command, and its end is waited for.
async fn in_sandbox(
    client: &Client,
    sandbox: SandboxId,
    arguments: &Run,
    interrupts: &mut Interrupts,
    environment: &Environment,
) -> anyhow::Result<i32> {
    let mut streaming = Streaming::start(client, sandbox, arguments);
    let id = streaming.stream.id().clone();
    let over = {
        let follow = streaming.follow(environment);
        tokio::pin!(follow);
        tokio::select! {
            over = &mut follow => over?,
            code = interrupts.next() => {
                let killed = async {
                    let (killed, ended) = tokio::join!(kill(client, sandbox, &id), &mut follow);
                    killed.and(ended)
                };
                tokio::select! {
                    ended = killed => { ended?; }
                    _ = interrupts.next() => {}
                }
                Over::Interrupted(code)
            }
        }
    };
    if matches!(over, Over::ReaderGone) {
        tokio::select! {
            killed = kill(client, sandbox, &id) => killed?,
            _ = interrupts.next() => {}
        }
    }
    streaming.conclude(over, arguments, environment)
}

/// The exit code of a command whose output was shown as it came, with a word on stderr where it needs one.
pub fn concluded(
    command: &api::Command,
    timeout: Option<Duration>,
    environment: &Environment,
) -> anyhow::Result<i32> {
    let Some(result) = &command.result else {
        return Err(anyhow::Error::msg("the command ended without a result"));
    };
    if let Some(error) = complaint(result, timeout) {
        report::failure(&error, environment.colour);
    }
    say_attempts(result, environment);
    Ok(exit_code(result))
}

/// What was asked for, without how it is streamed.
pub fn wish(arguments: &Run) -> api::RunCommand {
    api::RunCommand {
        // Where nothing is named, the image's own entrypoint runs.
        argv: Some(arguments.command.clone()).filter(|command| !command.is_empty()),
        env: arguments.process.env.iter().cloned().collect(),
        cwd: arguments.process.workdir.clone(),
        user: arguments.process.user.clone(),
        timeout_seconds: arguments.manner.timeout.map(|timeout| timeout.as_secs_f64()),
        ..Default::default()
    }
}

/// Kills a command whose start may still be on its way.
async fn kill(client: &Client, sandbox: SandboxId, command: &CommandId) -> anyhow::Result<()> {
    let kill = async {
        loop {
            match client.kill(sandbox, command).await {
                Err(error) if error.code() == Some("command_not_found") => {
                    tokio::time::sleep(KILL_STEP).await
                }
                Err(error) if error.code() == Some("command_ended") => return Ok(()),
                result => return Ok(result?),
            }
        }
    };
    // If it is not known by then, it was never started.
    tokio::time::timeout(KNOWN_MAX, kill).await.unwrap_or(Ok(()))
}

/// A command and where its output goes.
struct Streaming {
    stream: CommandStream,
    to: Output,
}

enum Output {
    /// Our own stdout and stderr.
    Pipes { stdout: Pipe, stderr: Pipe },
    /// The object that is printed at the end.
    Json { stdout: Kept, stderr: Kept },
}

/// Output for `--json`.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    cut: bool,
}

impl Kept {
    fn add(&mut self, bytes: &[u8]) {
        let room = JSON_OUTPUT_MAX - self.bytes.len();
        self.cut |= bytes.len() > room;
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn text_or_base64(self) -> (Option<String>, Option<String>) {
        match String::from_utf8(self.bytes) {
            Ok(text) => (Some(text), None),
            Err(error) => (None, Some(BASE64.encode(error.as_bytes()))),
        }
    }
}

impl Streaming {
    fn start(client: &Client, sandbox: SandboxId, arguments: &Run) -> Self {
        let stdin = !io::stdin().is_terminal();
        let stream = client.stream(sandbox, api::RunCommand { stdin, ..wish(arguments) });
        if stdin {
            feed_stdin(stream.input());
        }
        let to = if arguments.manner.json {
            Output::Json { stdout: Kept::default(), stderr: Kept::default() }
        } else {
            Output::Pipes { stdout: Pipe::stdout(), stderr: Pipe::stderr() }
        };
        Self { stream, to }
    }

    /// Until the command has ended and all its output is written.
    async fn follow(&mut self, environment: &Environment) -> anyhow::Result<Over> {
        loop {
            let Some(event) = self.stream.next().await else {
                return Err(anyhow::Error::msg("the stream ended before the command did"));
            };
            match event? {
                StreamEvent::Output { stream, bytes, .. } => match &mut self.to {
                    Output::Json { stdout, stderr } => match stream {
                        api::OutputStream::Stdout => stdout.add(&bytes),
                        api::OutputStream::Stderr => stderr.add(&bytes),
                    },
                    Output::Pipes { stdout, stderr } => {
                        let pipe = match stream {
                            api::OutputStream::Stdout => stdout,
                            api::OutputStream::Stderr => stderr,
                        };
                        if reader_gone(pipe.write(bytes)).await? {
                            return Ok(Over::ReaderGone);
                        }
                    }
                },
                StreamEvent::Lost { stream, from, to } => {
                    let name = match stream {
                        api::OutputStream::Stdout => "stdout",
                        api::OutputStream::Stderr => "stderr",
                    };
                    report::warning(&format!("{} bytes of {name} were lost", to - from), environment.colour);
                }
                // What is refused here is stdin that the command does not take, as with any pipe.
                StreamEvent::Command(_) | StreamEvent::Refused(_) => {}
                StreamEvent::Ended(command) => {
                    if let Output::Pipes { stdout, stderr } = &mut self.to
                        && (reader_gone(stdout.finish()).await? | reader_gone(stderr.finish()).await?)
                    {
                        return Ok(Over::ReaderGone);
                    }
                    return Ok(Over::Ended(command));
                }
            }
        }
    }

    /// The exit code, with a word on stderr where it needs one.
    fn conclude(self, over: Over, arguments: &Run, environment: &Environment) -> anyhow::Result<i32> {
        let command = match over {
            Over::Ended(command) => command,
            Over::Interrupted(code) => return Ok(code),
            Over::ReaderGone => return Ok(READER_GONE),
        };
        let Some(result) = command.result.clone() else {
            return Err(anyhow::Error::msg("the command ended without a result"));
        };
        if let Output::Json { stdout, stderr } = self.to {
            let (stdout_cut, stderr_cut) = (stdout.cut, stderr.cut);
            let (stdout_text, stdout_base64) = stdout.text_or_base64();
            let (stderr_text, stderr_base64) = stderr.text_or_base64();
            print::json(&api::FinishedCommand {
                command: *command,
                stdout_text,
                stdout_base64,
                stderr_text,
                stderr_base64,
                stdout_cut,
                stderr_cut,
            })?;
        } else {
            if let Some(error) = complaint(&result, arguments.manner.timeout) {
                report::failure(&error, environment.colour);
            }
            say_attempts(&result, environment);
        }
        Ok(exit_code(&result))
    }
}

/// Says so if the command tried to reach a network in a sandbox that has none, or cannot be undone.
fn say_attempts(result: &api::CommandResult, environment: &Environment) {
    if let Some(api::CommandNetwork { attempts }) = result.network {
        let times = if attempts == 1 { "once".into() } else { format!("{attempts} times") };
        let what = format!(
            "the command tried to reach a network ({times}) and this sandbox has none; add --net registries for package \
             installs or --net open for the internet"
        );
        report::warning(&what, environment.colour);
    }
    if result.not_undoable {
        let what = "no snapshot could be taken before the command, so `shoal undo` cannot undo it";
        report::warning(what, environment.colour);
    }
}

/// Whether a write found nobody to read it.
async fn reader_gone(write: impl Future<Output = io::Result<()>>) -> anyhow::Result<bool> {
    match write.await {
        Ok(()) => Ok(false),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(true),
        Err(error) => Err(anyhow::Error::new(error).context("cannot write the command's output")),
    }
}

fn exit_code(result: &api::CommandResult) -> i32 {
    match (result.outcome, result.exit_code) {
        (api::Outcome::TimedOut | api::Outcome::IdleTimedOut, _) => TIMED_OUT,
        (_, Some(code)) => code,
        (_, None) => FAILED,
    }
}

/// What is said about a command that did not end by itself.
fn complaint(result: &api::CommandResult, timeout: Option<Duration>) -> Option<anyhow::Error> {
    let message = || result.message.clone().unwrap_or_else(|| "no reason given".into());
    match result.outcome {
        api::Outcome::Exited | api::Outcome::Signaled | api::Outcome::Killed => None,
        api::Outcome::TimedOut | api::Outcome::IdleTimedOut => {
            let seconds =
                timeout.map_or_else(String::new, |timeout| format!(" after {} s", timeout.as_secs_f64()));
            Some(anyhow::Error::msg(format!("the command was killed{seconds}: {}", message())))
        }
        api::Outcome::OutOfMemory => Some(hinted(message(), "give the sandbox more memory with --memory")),
        api::Outcome::FailedToStart | api::Outcome::SandboxGone => Some(anyhow::Error::msg(message())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn result(outcome: api::Outcome, exit_code: Option<i32>) -> api::CommandResult {
        api::CommandResult {
            outcome,
            exit_code,
            signal: None,
            message: None,
            network: None,
            not_undoable: false,
        }
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        for (outcome, code, expected) in [
            (api::Outcome::Exited, Some(0), 0),
            (api::Outcome::Exited, Some(3), 3),
            (api::Outcome::Signaled, Some(139), 139),
            (api::Outcome::TimedOut, Some(137), 124),
            (api::Outcome::IdleTimedOut, Some(143), 124),
            (api::Outcome::OutOfMemory, Some(137), 137),
            (api::Outcome::FailedToStart, Some(127), 127),
            (api::Outcome::FailedToStart, None, 125),
            (api::Outcome::SandboxGone, None, 125),
        ] {
            assert_eq!(exit_code(&result(outcome, code)), expected, "{outcome:?}");
        }
    }

    #[test]
    fn output_for_json_has_a_bound() {
        let mut kept = Kept::default();
        kept.add(&vec![b'x'; JSON_OUTPUT_MAX - 1]);
        assert!(!kept.cut);
        kept.add(b"yz");
        assert!(kept.cut);
        assert_eq!(kept.bytes.len(), JSON_OUTPUT_MAX);
    }
}
