//! Executions, which are commands: started and waited for, in one request or several.
//!
//! A command is a text for a login shell in the user's home directory. The client waits at most two minutes for what it has started,
//! whatever time its caller gives; but it says how long it would read the answer to the start. So the start holds its answer until the
//! command is over, as long as the client reads, and at least a moment, which saves short commands a round trip.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use engine::{
    CommandRef, CommandSpec, CommandState, EngineError, Field, Offsets, Outcome, OutputEvent, Program, Signal,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::timeout_at;
use tracing::Instrument;
use wire::CommandId;
use wire::guest::{ExitStatus, Stream};

use super::devboxes::{Statuses, user_of};
use super::error::Refusal;
use super::ids;
use super::read::{Body, Execution, Target, request_id};
use crate::http::app::App;

/// Output of one stream in an answer, the last of it. The client streams what is longer.
const INLINE_MAX: u64 = 4 << 20;
/// How long a start holds its answer for any client.
const HOLD_MIN: Duration = Duration::from_secs(1);
/// A client that reads longer than this waits for the end of the command.
const PATIENT: Duration = Duration::from_secs(60);
/// How much earlier than a patient client gives up it is answered.
const HOLD_MARGIN: Duration = Duration::from_secs(10);
/// The longest that an answer is held for a patient client.
const HOLD_MAX: Duration = Duration::from_secs(3600);
/// The longest that a wait holds its answer, and `execute`.
const WAIT_MAX: Duration = Duration::from_secs(25);
/// Where the client says how long it reads, in seconds.
const READ_TIMEOUT: &str = "x-stainless-read-timeout";
/// What a killed command exits with, where the kernel does not say otherwise.
const KILLED: i32 = 137;
/// What a command exits with that did not start.
const NOT_STARTED: i32 = 127;

/// A text as a login shell in the home directory would run it, whatever its length.
pub fn login_script(text: &str) -> Result<Program, Refusal> {
    const LOGIN: &str = r#"cd 2>/dev/null
[ ! -r /etc/profile ] || . /etc/profile
if [ -r ~/.bash_profile ]; then . ~/.bash_profile; elif [ -r ~/.bash_login ]; then . ~/.bash_login; elif [ -r ~/.profile ]; then . ~/.profile; fi
"#;
    let program = Program::script(format!("{LOGIN}{text}"));
    Ok(program.map_err(|must| must.of(Field::Command))?)
}

/// What to run.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Execute {
    command: String,
    command_id: Option<String>,
    attach_stdin: Option<bool>,
    optimistic_timeout: Option<f64>,
}

/// Starts a command, or finds the one that was started by the same request.
async fn start(
    app: &App,
    target: &Target,
    headers: &HeaderMap,
    body: &Execute,
) -> Result<CommandRef, Refusal> {
    if body.command.trim().is_empty() {
        return Err(Refusal::must("command", "not be empty"));
    }
    let id = body.command_id.as_deref().or_else(|| request_id(headers));
    let mut spec = CommandSpec::new(login_script(&body.command)?);
    // What cannot be an id of ours is no id: the request is then not repeatable.
    spec.id = id.and_then(|id| id.parse::<CommandId>().ok());
    spec.stdin = body.attach_stdin.unwrap_or(false);
    spec.user = user_of(&target.sandbox)?;
    let (engine, owner, sandbox) = (app.engine.clone(), target.key.owner.clone(), target.sandbox.id);
    let known = spec.id.clone();
    // A task of its own, so that nothing is left half done when the client leaves.
    let starting = tokio::spawn(
        async move {
            match (engine.run(&owner, sandbox, spec).await, known) {
                (Err(EngineError::CommandIdReused { .. }), Some(id)) => {
                    engine.command(&owner, sandbox, &id).await
                }
                (result, _) => result,
            }
        }
        .in_current_span(),
    );
    Ok(starting.await.map_err(|_| Refusal::bug())??)
}

/// Waits for the end of a command, until a deadline or until the daemon stops.
async fn wait_until(app: &App, target: &Target, command: &CommandRef, deadline: tokio::time::Instant) {
    let mut stopping = app.stopping(&target.key);
    tokio::select! {
        _ = timeout_at(deadline, command.ended()) => {}
        _ = stopping.wait() => {}
    }
}

/// How long the client reads.
fn patience(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(READ_TIMEOUT)?.to_str().ok()?.parse().ok()?;
    Duration::try_from_secs_f64(seconds).ok()
}

/// How long the answer to a start is held.
fn hold(headers: &HeaderMap, body: &Execute) -> Duration {
    if body.attach_stdin == Some(true) {
        // A client needs the id before it can write.
        return Duration::ZERO;
    }
    match patience(headers) {
        Some(patience) if patience > PATIENT => (patience - HOLD_MARGIN).min(HOLD_MAX),
        Some(_) | None => HOLD_MIN,
    }
}

/// `POST .../execute_async`
pub async fn execute_async(
    State(app): State<App>,
    target: Target,
    headers: HeaderMap,
    Body(body): Body<Execute>,
) -> Result<Json<Value>, Refusal> {
    let command = start(&app, &target, &headers, &body).await?;
    let deadline = tokio::time::Instant::now() + hold(&headers, &body);
    wait_until(&app, &target, &command, deadline).await;
    view(&app, &target, &command).await
}

/// `POST .../execute`: answers after a while with how far the command is.
pub async fn execute(
    State(app): State<App>,
    target: Target,
    headers: HeaderMap,
    Body(body): Body<Execute>,
) -> Result<Json<Value>, Refusal> {
    let given = body.optimistic_timeout.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let deadline = tokio::time::Instant::now() + given.unwrap_or(WAIT_MAX).min(WAIT_MAX);
    let command = start(&app, &target, &headers, &body).await?;
    wait_until(&app, &target, &command, deadline).await;
    view(&app, &target, &command).await
}

/// `POST .../execute_sync`: answers when the command is over.
pub async fn execute_sync(
    State(app): State<App>,
    target: Target,
    headers: HeaderMap,
    Body(body): Body<Execute>,
) -> Result<Json<Value>, Refusal> {
    let command = start(&app, &target, &headers, &body).await?;
    let deadline = tokio::time::Instant::now() + HOLD_MAX;
    wait_until(&app, &target, &command, deadline).await;
    if !is_over(&command) {
        return Err(Refusal::not_yet("the command is not over yet"));
    }
    view(&app, &target, &command).await
}

/// An execution.
pub async fn get(State(app): State<App>, execution: Execution) -> Result<Json<Value>, Refusal> {
    view(&app, &execution.target, &execution.command).await
}

/// `POST .../executions/{execution}/wait_for_status`
pub async fn wait(
    State(app): State<App>,
    Execution { target, command }: Execution,
    Body(body): Body<Statuses>,
) -> Result<Json<Value>, Refusal> {
    let here = |status: &str| body.statuses.is_empty() || body.statuses.iter().any(|wanted| wanted == status);
    if !is_over(&command) && !here("running") {
        wait_until(&app, &target, &command, body.deadline(WAIT_MAX)).await;
    }
    match is_over(&command) || here("running") {
        true => view(&app, &target, &command).await,
        false => Err(Refusal::not_yet("the execution is still running")),
    }
}

/// Kills a command with everything that it started.
pub async fn kill(
    State(app): State<App>,
    Execution { target, command }: Execution,
) -> Result<Json<Value>, Refusal> {
    match command.kill().await {
        Ok(()) | Err(EngineError::CommandEnded { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    wait_until(&app, &target, &command, tokio::time::Instant::now() + HOLD_MIN).await;
    view(&app, &target, &command).await
}

/// `POST .../executions/{execution}/send_std_in`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct StdIn {
    text: Option<String>,
    signal: Option<String>,
}

/// Writes to a command's stdin, ends it, or interrupts the command.
pub async fn send(
    State(app): State<App>,
    Execution { target, command }: Execution,
    Body(body): Body<StdIn>,
) -> Result<Json<Value>, Refusal> {
    match (body.text, body.signal.as_deref()) {
        (Some(text), None) => {
            command.write_stdin(None, text.into()).await?;
        }
        (None, Some("EOF")) => command.end_stdin().await?,
        (None, Some("INTERRUPT")) => command.signal(Signal::parse("INT")?).await?,
        _ => return Err(Refusal::must("signal", "be `EOF` or `INTERRUPT`, or left out if there is `text`")),
    }
    Ok(Json(json!({
        "devbox_id": ids::devbox(&app.engine, &target.key.owner, target.sandbox.id),
        "execution_id": command.now().id.as_str(),
        "success": true,
    })))
}

fn is_over(command: &CommandRef) -> bool {
    matches!(command.now().state, CommandState::Ended { .. })
}

fn exit_code(outcome: &Outcome) -> i32 {
    let code = |status: &ExitStatus| match status {
        ExitStatus::Code(0) => KILLED,
        ExitStatus::Code(code) => *code,
        ExitStatus::Signal(signal) => 128 + signal,
    };
    match outcome {
        Outcome::Exited(code) => *code,
        Outcome::Signaled(signal) => 128 + signal,
        Outcome::Killed(status)
        | Outcome::OutOfMemory(status)
        | Outcome::TimedOut(status)
        | Outcome::IdleTimedOut(status) => code(status),
        Outcome::TimedOutUnheard | Outcome::SandboxGone => KILLED,
        Outcome::FailedToStart(_) => NOT_STARTED,
    }
}

/// The end of a command's output, each stream with whether something is missing before it.
struct Tail {
    stdout: (String, bool),
    stderr: (String, bool),
}

/// Of a command that is over.
async fn tail(command: &CommandRef) -> Tail {
    let now = command.now();
    let from = |end: u64| end.saturating_sub(INLINE_MAX);
    let mut at = Offsets { stdout: from(now.stdout.end), stderr: from(now.stderr.end) };
    let mut output = command.attach(at);
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    while let Some(event) = output.next().await {
        match event {
            OutputEvent::Bytes { stream: Stream::Stderr, bytes, .. } => stderr.extend_from_slice(&bytes),
            OutputEvent::Bytes { bytes, .. } => stdout.extend_from_slice(&bytes),
            // What is no longer stored is missing.
            OutputEvent::Lost { stream: Stream::Stderr, to, .. } => at.stderr = to,
            OutputEvent::Lost { to, .. } => at.stdout = to,
            OutputEvent::Started { .. } | OutputEvent::StdinAck { .. } => {}
            OutputEvent::Ended(_) | OutputEvent::Stalled => break,
        }
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Tail { stdout: (text(stdout), at.stdout > 0), stderr: (text(stderr), at.stderr > 0) }
}

/// An execution as the client sees it. Its output is there when it is over.
async fn view(app: &App, target: &Target, command: &CommandRef) -> Result<Json<Value>, Refusal> {
    let now = command.now();
    let mut body = json!({
        "devbox_id": ids::devbox(&app.engine, &target.key.owner, target.sandbox.id),
        "execution_id": now.id.as_str(),
        "status": "running",
    });
    if let CommandState::Ended { outcome, .. } = &now.state {
        let mut tail = tail(command).await;
        if let Outcome::FailedToStart(error) = outcome {
            tail.stderr.0.push_str(&format!("the command cannot start: {error}\n"));
        }
        let object = body.as_object_mut().expect("it was just made as one");
        object.insert("status".into(), "completed".into());
        object.insert("exit_status".into(), exit_code(outcome).into());
        for (name, (text, cut)) in [("stdout", tail.stdout), ("stderr", tail.stderr)] {
            object.insert(name.into(), text.into());
            object.insert(format!("{name}_truncated"), cut.into());
        }
    }
    Ok(Json(body))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn an_answer_is_held_as_long_as_the_client_reads() {
        let hold = |seconds: Option<&'static str>, stdin| {
            let mut headers = HeaderMap::new();
            if let Some(seconds) = seconds {
                headers.insert(READ_TIMEOUT, HeaderValue::from_static(seconds));
            }
            hold(&headers, &Execute { attach_stdin: Some(stdin), ..Execute::default() }).as_secs()
        };
        assert_eq!(hold(None, false), 1);
        assert_eq!(hold(Some("30"), false), 1);
        assert_eq!(hold(Some("35.0"), false), 1);
        assert_eq!(hold(Some("1800"), false), 1790);
        assert_eq!(hold(Some("1e300"), false), 1, "what is no length is not one");
        assert_eq!(hold(Some("1800"), true), 0);
    }
}
