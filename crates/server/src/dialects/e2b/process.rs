//! `process.Process`: commands and terminals of a sandbox, by their process ids.
//!
//! ```text
//! Start, Connect     one message, then a stream: start{pid}, data..., end{exit code}; a client that leaves ends nothing
//! List, SendInput, SendSignal, CloseStdin, Update     one message, one answer
//! ```
//!
//! The timeout of `Start` is the command's own. A process id is the guest's, and a command that has ended has none.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use engine::{
    Command, CommandEnv, CommandRef, CommandSpec, CommandState, EngineError, Field, Offsets, Outcome, Output,
    OutputEvent, Program, Signal,
};
use futures_util::stream;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument;
use wire::guest::{self, Cwd, ExitStatus, Stream, TerminalSize};

use super::error::Refusal;
use super::read::{Streamed, Target, Unary};
use super::{connect, home};
use crate::http::app::{App, Halt, Stopping};
use crate::http::websocket::STDIN_WRITE_MAX;

/// How long the answer to a kill waits for the end, so that a second kill finds nothing.
const KILL_SECONDS_MAX: u64 = 5;
/// What a process that a signal ended exits with, as the vendor has it.
const EXIT_BY_SIGNAL: i32 = -1;

/// `Start`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Start {
    process: Config,
    pty: Option<Pty>,
    tag: Option<String>,
    stdin: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Config {
    cmd: String,
    args: Vec<String>,
    envs: BTreeMap<String, String>,
    cwd: Option<String>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Pty {
    size: Option<Size>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Size {
    cols: u32,
    rows: u32,
}

/// Which process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Selector {
    pid: Option<u32>,
    tag: Option<String>,
}

/// A call that says no more than which process.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Selected {
    process: Selector,
}

/// `SendInput`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendInput {
    process: Selector,
    input: Input,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Input {
    stdin: Option<String>,
    pty: Option<String>,
}

/// `SendSignal`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct SendSignal {
    process: Selector,
    signal: Value,
}

/// `Update`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    process: Selector,
    pty: Option<Pty>,
}

/// A process in its first and later streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Pipes,
    Terminal,
}

/// Starts a process and streams it from its start.
pub async fn start(
    State(app): State<App>,
    target: Target,
    Streamed(wish): Streamed<Start>,
) -> Result<Response, Refusal> {
    let spec = spec(&app, &target, wish).await.map_err(Refusal::rpc)?;
    let kind = if spec.terminal.is_some() { Kind::Terminal } else { Kind::Pipes };
    let (engine, owner, id) = (app.engine.clone(), target.key.owner.clone(), target.id);
    // A task of its own, so that nothing is left half done when the client leaves.
    let starting = tokio::spawn(async move { engine.run(&owner, id, spec).await }.in_current_span());
    let started = starting.await.map_err(|_| Refusal::bug().rpc())?;
    let command = started.map_err(|error| Refusal::agent(id, error).rpc())?;
    if let CommandState::Ended { outcome: Outcome::FailedToStart(why), .. } = command.now().state {
        return Err(Refusal::not_started(&why).rpc());
    }
    Ok(respond(&app, &target, command, Offsets::default(), kind, None))
}

/// Streams a process from now on.
pub async fn attach(
    State(app): State<App>,
    target: Target,
    Streamed(wish): Streamed<Selected>,
) -> Result<Response, Refusal> {
    let command = find(&app, &target, &wish.process)?;
    let now = command.now();
    let kind = if now.start.terminal.is_some() { Kind::Terminal } else { Kind::Pipes };
    let from = Offsets { stdout: now.stdout.end, stderr: now.stderr.end };
    let deadline = target.timeout.map(|timeout| Instant::now() + timeout);
    Ok(respond(&app, &target, command, from, kind, deadline))
}

async fn spec(app: &App, target: &Target, wish: Start) -> Result<CommandSpec, Refusal> {
    let Start { process, pty, tag, stdin } = wish;
    let refused = |error: EngineError| Refusal::agent(target.id, error);
    if tag.is_some_and(|tag| !tag.is_empty()) {
        return Err(Refusal::unsupported("this server knows processes by their ids and not by tags"));
    }
    let named = target.user.as_deref();
    let user = home::user(named).map_err(refused)?;
    let home = home::of(&app.engine, &target.key.owner, target.id, user.as_str()).await.map_err(refused)?;
    let cwd = home::directory(&home, process.cwd.as_deref().unwrap_or_default()).map_err(refused)?;
    let argv = std::iter::once(process.cmd).chain(process.args).collect();
    let program = Program::argv(argv).map_err(|must| refused(must.of(Field::Command)))?;
    Ok(CommandSpec {
        env: CommandEnv::new(process.envs).map_err(|must| refused(must.of(Field::Env)))?,
        cwd: Some(cwd),
        user: Some(user),
        stdin: pty.is_some() || stdin.unwrap_or(true),
        terminal: pty.map(size).transpose()?,
        timeout: target.timeout,
        ..CommandSpec::new(program)
    })
}

fn size(pty: Pty) -> Result<TerminalSize, Refusal> {
    let Size { cols, rows } = pty.size.unwrap_or(Size { cols: 80, rows: 24 });
    let side = |length: u32| u16::try_from(length).ok().filter(|length| *length > 0);
    match (side(rows), side(cols)) {
        (Some(rows), Some(columns)) => Ok(TerminalSize { rows, columns }),
        _ => {
            Err(Refusal::invalid(format!("`pty.size` must be 1 to 65535 on each side, got {cols} x {rows}")))
        }
    }
}

/// The process that a caller selects.
fn find(app: &App, target: &Target, selector: &Selector) -> Result<CommandRef, Refusal> {
    let refused = |error: EngineError| Refusal::agent(target.id, error).rpc();
    let not_found =
        |what: String| Refusal::new(StatusCode::NOT_FOUND, format!("process {what} not found")).rpc();
    let pid = match (selector.pid, &selector.tag) {
        (Some(pid), _) => pid,
        (None, Some(_)) => return Err(not_found("with this tag".into())),
        (None, None) => return Err(Refusal::invalid("`process` must name a process id").rpc()),
    };
    let running = app.engine.running_commands(&target.key.owner, target.id).map_err(refused)?;
    let is_it = |command: &CommandRef| command.now().state == CommandState::Running { pid };
    running.into_iter().find(is_it).ok_or_else(|| not_found(format!("with pid {pid}")))
}

/// All processes that run.
pub async fn list(State(app): State<App>, target: Target) -> Result<Json<Value>, Refusal> {
    let running = app.engine.running_commands(&target.key.owner, target.id);
    let running = running.map_err(|error| Refusal::agent(target.id, error).rpc())?;
    let processes = running.iter().filter_map(|command| {
        let Command { state: CommandState::Running { pid }, start, .. } = command.now() else { return None };
        let (cmd, args) = match &start.program {
            guest::Program::Argv(words) => (words.first().cloned().unwrap_or_default(), words[1..].to_vec()),
            guest::Program::Shell { script } => ("/bin/sh".to_owned(), vec!["-c".to_owned(), script.clone()]),
            // Transfers are not commands.
            guest::Program::Files(_) => return None,
        };
        let (Cwd::Named(cwd) | Cwd::Default(cwd)) = &start.cwd;
        let envs: BTreeMap<&String, &String> = start.env.iter().map(|(name, value)| (name, value)).collect();
        Some(json!({"config": {"cmd": cmd, "args": args, "envs": envs, "cwd": cwd}, "pid": pid}))
    });
    Ok(Json(json!({"processes": processes.collect::<Vec<_>>()})))
}

/// Writes to a process.
pub async fn send_input(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<SendInput>,
) -> Result<Json<Value>, Refusal> {
    let command = find(&app, &target, &wish.process)?;
    let text = wish.input.stdin.or(wish.input.pty);
    let text = text.ok_or_else(|| Refusal::invalid("`input` must have `stdin` or `pty`").rpc())?;
    let bytes = BASE64_STANDARD.decode(text.as_bytes());
    let mut bytes = Bytes::from(bytes.map_err(|_| Refusal::invalid("`input` must be base64").rpc())?);
    while !bytes.is_empty() {
        let piece = bytes.split_to(bytes.len().min(STDIN_WRITE_MAX));
        command.write_stdin(None, piece).await.map_err(|error| Refusal::agent(target.id, error).rpc())?;
    }
    Ok(Json(json!({})))
}

/// Ends what a process reads.
pub async fn close_stdin(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<Selected>,
) -> Result<Json<Value>, Refusal> {
    let command = find(&app, &target, &wish.process)?;
    if command.now().start.terminal.is_some() {
        return Err(Refusal::invalid("a terminal has no stdin to close; write Ctrl+D to it").rpc());
    }
    command.end_stdin().await.map_err(|error| Refusal::agent(target.id, error).rpc())?;
    Ok(Json(json!({})))
}

/// Signals a process. A kill ends all that the process has started too.
pub async fn send_signal(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<SendSignal>,
) -> Result<Json<Value>, Refusal> {
    let command = find(&app, &target, &wish.process)?;
    let refused = |error: EngineError| Refusal::agent(target.id, error).rpc();
    match (wish.signal.as_str(), wish.signal.as_i64()) {
        (Some("SIGNAL_SIGKILL"), _) | (_, Some(9)) => {
            command.kill().await.map_err(refused)?;
            let patience = Duration::from_secs(KILL_SECONDS_MAX);
            if tokio::time::timeout(patience, command.ended()).await.is_err() {
                tracing::info!("a killed command has not ended yet");
            }
        }
        (Some("SIGNAL_SIGTERM"), _) | (_, Some(15)) => {
            let signal = Signal::parse("TERM").map_err(refused)?;
            command.signal(signal).await.map_err(refused)?;
        }
        _ => return Err(Refusal::invalid("`signal` must be SIGNAL_SIGTERM or SIGNAL_SIGKILL").rpc()),
    }
    Ok(Json(json!({})))
}

/// Resizes a terminal.
pub async fn update(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<Update>,
) -> Result<Json<Value>, Refusal> {
    let command = find(&app, &target, &wish.process)?;
    if let Some(pty) = wish.pty {
        let TerminalSize { rows, columns } = size(pty).map_err(Refusal::rpc)?;
        let resized = command.resize(rows, columns).await;
        resized.map_err(|error| Refusal::agent(target.id, error).rpc())?;
    }
    Ok(Json(json!({})))
}

/// Input as a stream, which clients use only if asked to.
pub async fn stream_input(_: Target) -> Refusal {
    Refusal::unsupported("this server takes input in single calls and not as a stream").rpc()
}

fn respond(
    app: &App,
    target: &Target,
    command: CommandRef,
    from: Offsets,
    kind: Kind,
    deadline: Option<Instant>,
) -> Response {
    let output = command.attach(from);
    let sending = Sending {
        command,
        output,
        kind,
        at: from,
        keepalive: target.keepalive,
        deadline,
        stopping: app.stopping(&target.key),
        target: target.id,
        started: false,
        ready: Vec::new(),
        over: false,
    };
    connect::stream(stream::unfold(sending, async |mut sending| {
        let envelope = sending.next().await?;
        Some((Ok::<_, Infallible>(envelope), sending))
    }))
}

/// One client on one process.
struct Sending {
    command: CommandRef,
    output: Output,
    kind: Kind,
    /// What was sent.
    at: Offsets,
    keepalive: Duration,
    deadline: Option<Instant>,
    stopping: Stopping,
    target: wire::SandboxId,
    started: bool,
    /// What comes next, the last first.
    ready: Vec<Bytes>,
    over: bool,
}

impl Sending {
    async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(envelope) = self.ready.pop() {
                return Some(envelope);
            }
            if self.over {
                return None;
            }
            let quiet = sleep_until(Instant::now() + self.keepalive);
            let deadline = async {
                match self.deadline {
                    Some(deadline) => sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let next = tokio::select! {
                biased;
                halt = self.stopping.wait() => {
                    self.fail(&halted(halt));
                    continue;
                }
                event = self.output.next() => event,
                () = deadline => {
                    self.fail(&Refusal::new(StatusCode::GATEWAY_TIMEOUT, "the stream's time is over"));
                    continue;
                }
                () = quiet => return Some(event(json!({"keepalive": {}}))),
            };
            match next {
                Some(OutputEvent::Started { pid }) => {
                    if !std::mem::replace(&mut self.started, true) {
                        return Some(event_start(pid));
                    }
                }
                Some(OutputEvent::Bytes { stream, offset, bytes }) => {
                    *self.reached(stream) = offset + bytes.len() as u64;
                    let name = match (self.kind, stream) {
                        (Kind::Terminal, _) => "pty",
                        (Kind::Pipes, Stream::Stderr) => "stderr",
                        (Kind::Pipes, Stream::Stdout | Stream::Stdin) => "stdout",
                    };
                    return Some(event(json!({"data": {name: BASE64_STANDARD.encode(&bytes)}})));
                }
                Some(OutputEvent::Lost { stream, to, .. }) => *self.reached(stream) = to,
                Some(OutputEvent::StdinAck { .. }) => {}
                Some(OutputEvent::Ended(command)) => self.end(&command),
                // A client need not read a stream that it has opened: the output waits in the log until it does.
                Some(OutputEvent::Stalled) => self.output = self.command.attach(self.at),
                None => self.fail(&Refusal::from(crate::http::error::ApiError::stopping())),
            }
        }
    }

    fn reached(&mut self, stream: Stream) -> &mut u64 {
        match stream {
            Stream::Stderr => &mut self.at.stderr,
            // Nothing comes out of stdin; the engine never sends it.
            Stream::Stdout | Stream::Stdin => &mut self.at.stdout,
        }
    }

    fn fail(&mut self, why: &Refusal) {
        self.over = true;
        self.ready = vec![connect::failed(why)];
    }

    fn end(&mut self, command: &Command) {
        let CommandState::Ended { pid, outcome } = &command.state else { return };
        if let Outcome::FailedToStart(why) = outcome {
            return self.fail(&Refusal::not_started(why));
        }
        match ended(outcome) {
            Ok(end) => {
                self.over = true;
                self.ready = vec![connect::end(), event(json!({"end": end}))];
            }
            Err(Unfinished::TimedOut) => {
                self.fail(&Refusal::new(StatusCode::GATEWAY_TIMEOUT, "the command's timeout has expired"));
            }
            Err(Unfinished::Gone) => self.fail(&Refusal::gone(self.target)),
        }
        if !std::mem::replace(&mut self.started, true) {
            self.ready.push(event_start(pid.unwrap_or(0)));
        }
    }
}

/// Why a process has no exit code.
#[derive(Debug, PartialEq, Eq)]
enum Unfinished {
    TimedOut,
    Gone,
}

/// The end of a process as clients read it.
fn ended(outcome: &Outcome) -> Result<Value, Unfinished> {
    let by_signal = |signal: i32, why: &str| {
        let status = if signal == 9 { "signal: killed".to_owned() } else { format!("signal: {signal}") };
        let error = if why.is_empty() { status.clone() } else { why.to_owned() };
        json!({"exitCode": EXIT_BY_SIGNAL, "exited": false, "status": status, "error": error})
    };
    let by_status = |status: &ExitStatus, why: &str| match status {
        ExitStatus::Code(0) => json!({"exitCode": 0, "exited": true, "status": "exit status 0"}),
        ExitStatus::Code(code) => {
            let status = format!("exit status {code}");
            let error = if why.is_empty() { status.clone() } else { why.to_owned() };
            json!({"exitCode": code, "exited": true, "status": status, "error": error})
        }
        ExitStatus::Signal(signal) => by_signal(*signal, why),
    };
    match outcome {
        Outcome::Exited(code) => Ok(by_status(&ExitStatus::Code(*code), "")),
        Outcome::Signaled(signal) => Ok(by_signal(*signal, "")),
        Outcome::Killed(status) => Ok(by_status(status, "")),
        Outcome::OutOfMemory(status) => Ok(by_status(status, "the sandbox has run out of memory")),
        Outcome::FailedToStart(why) => Ok(by_status(&ExitStatus::Code(127), &why.to_string())),
        Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => {
            Err(Unfinished::TimedOut)
        }
        Outcome::SandboxGone => Err(Unfinished::Gone),
    }
}

fn halted(halt: Halt) -> Refusal {
    Refusal::from(crate::http::error::ApiError::from(halt))
}

fn event(event: Value) -> Bytes {
    connect::message(&json!({"event": event}))
}

fn event_start(pid: u32) -> Bytes {
    event(json!({"start": {"pid": pid}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_says_what_clients_read() {
        let end = |outcome| ended(&outcome).expect("it has ended");
        assert_eq!(
            end(Outcome::Exited(0)),
            json!({"exitCode": 0, "exited": true, "status": "exit status 0"})
        );
        assert_eq!(end(Outcome::Exited(3))["error"], "exit status 3");
        let killed = end(Outcome::Killed(ExitStatus::Signal(9)));
        assert_eq!((&killed["exitCode"], &killed["status"]), (&json!(-1), &json!("signal: killed")));
        assert_eq!(ended(&Outcome::TimedOut(ExitStatus::Signal(15))), Err(Unfinished::TimedOut));
        assert_eq!(ended(&Outcome::SandboxGone), Err(Unfinished::Gone));
    }

    #[test]
    fn a_terminal_has_a_size() {
        let pty = |cols, rows| Pty { size: Some(Size { cols, rows }) };
        assert_eq!(size(pty(100, 40)).expect("it fits"), TerminalSize { rows: 40, columns: 100 });
        for wrong in [pty(0, 24), pty(80, 0), pty(65_536, 24)] {
            size(wrong).expect_err("no terminal is so");
        }
    }
}
