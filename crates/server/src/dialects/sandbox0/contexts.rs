//! Contexts: programs and interpreters of a sandbox, each a command.
//!
//! A context that was restarted is several commands, of which the last one counts (`names::run`).

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use engine::{
    Attendance, CommandEnv, CommandQuery, CommandRef, CommandSpec, CommandState, EngineError, Field,
    GuestPath, Kept, Key, Must, Offsets, Outcome, Program, Sandbox, SandboxUpdate, Signal, TextEvent,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};
use tracing::Instrument;
use wire::CommandId;
use wire::guest::{self, Cwd, TerminalSize};

use super::answer::{Answer, done, with};
use super::error::Refusal;
use super::names::{self, ALIAS_MAX, Kind};
use super::notes::{self, Notes};
use super::output::{end, show, show_with_output};
use super::read::{Awake, Body, Meant};
use super::repl::{self, Filter, Piece};
use super::sandboxes::{WORKSPACE, seconds, wake};
use crate::http::app::App;
use crate::http::body::text_in_path;
use crate::http::text::join;

/// How long a request to an interpreter may take.
const EXEC_MAX: Duration = Duration::from_secs(30);
/// How long a program may take to end by itself when its context is deleted or restarted.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// And how long after that until it is gone.
const KILL_MAX: Duration = Duration::from_secs(10);
/// The longest argument of a program, in bytes, as the kernel has it.
const ARGUMENT_MAX: usize = 128 * 1024 - 1;
/// What login shells do first.
const LOGIN: &str = r#"[ ! -r /etc/profile ] || . /etc/profile
if [ -r ~/.bash_profile ]; then . ~/.bash_profile; elif [ -r ~/.bash_login ]; then . ~/.bash_login; elif [ -r ~/.profile ]; then . ~/.profile; fi
"#;

/// `POST .../contexts`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    #[serde(rename = "type")]
    kind: Option<String>,
    cmd: Option<Cmd>,
    repl: Option<Repl>,
    wait_until_done: Option<bool>,
    cwd: Option<String>,
    env_vars: Option<BTreeMap<String, String>>,
    pty_size: Option<Size>,
    idle_timeout_sec: Option<i64>,
    ttl_sec: Option<i64>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Cmd {
    command: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Repl {
    alias: Option<String>,
    input: Option<String>,
    repl_config: Option<Value>,
}

/// The size of a terminal.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(default)]
pub struct Size {
    rows: u16,
    cols: u16,
}

impl Size {
    fn terminal(self) -> Result<TerminalSize, Refusal> {
        match self {
            Self { rows: 0, .. } | Self { cols: 0, .. } => Err(Refusal::must("pty_size", "be above zero")),
            Self { rows, cols } => Ok(TerminalSize { rows, columns: cols }),
        }
    }
}

fn broken(field: Field) -> impl Fn(Must) -> EngineError {
    move |must| must.of(field)
}

/// A program with its arguments. A script that is longer than an argument may be is passed to the shell otherwise.
fn program(mut argv: Vec<String>) -> Result<Program, EngineError> {
    let long = argv.last().is_some_and(|last| last.len() > ARGUMENT_MAX);
    let is_bash = |word: &String| matches!(word.as_str(), "bash" | "/bin/bash" | "/usr/bin/bash");
    if long && argv.len() == 3 && argv.first().is_some_and(is_bash) {
        let script = argv.pop().unwrap_or_default();
        match argv[1].as_str() {
            "-c" => return Program::script(script).map_err(broken(Field::Command)),
            "-lc" => return Program::script(format!("{LOGIN}{script}")).map_err(broken(Field::Command)),
            _ => argv.push(script),
        }
    }
    Program::argv(argv).map_err(broken(Field::Command))
}

/// Where a command runs: what is relative is below the directory for work.
fn directory(sandbox: &Sandbox, cwd: Option<&str>) -> Result<Option<GuestPath>, EngineError> {
    let path = match cwd.filter(|cwd| !cwd.is_empty()) {
        None if Notes::of(sandbox).workspace => WORKSPACE.to_owned(),
        None => return Ok(None),
        Some(cwd) if cwd.starts_with('/') => cwd.to_owned(),
        Some(cwd) => String::from_utf8(join(WORKSPACE.as_bytes(), cwd.as_bytes()))
            .map_err(|_| Field::Cwd.must("be text"))?,
    };
    GuestPath::parse(path).map(Some).map_err(broken(Field::Cwd))
}

impl Create {
    /// For the engine, and what the context is.
    fn spec(self, sandbox: &Sandbox) -> Result<(CommandSpec, Kind, Option<String>), Refusal> {
        let terminal = self.pty_size.map(Size::terminal).transpose()?;
        let (kind, input, argv) = match (self.kind.as_deref().unwrap_or("repl"), self.cmd, self.repl) {
            ("cmd", cmd, _) => {
                let argv = cmd.and_then(|cmd| cmd.command).filter(|argv| !argv.is_empty());
                let argv = argv.ok_or_else(|| Refusal::must("cmd.command", "name a program"))?;
                (Kind::Cmd, None, program(argv)?)
            }
            ("repl", _, repl) => {
                let Repl { alias, input, repl_config } = repl.unwrap_or_default();
                if repl_config.is_some_and(|config| !config.is_null()) {
                    let message =
                        "this server does not run interpreters of your own: run the program with `cmd`";
                    return Err(Refusal::unsupported(message));
                }
                let alias = alias.filter(|alias| !alias.is_empty()).unwrap_or_else(|| "python".into());
                let known = match terminal {
                    Some(_) => repl::program_on_terminal(&alias),
                    None => repl::program(&alias),
                };
                let argv = known.filter(|_| alias.len() <= ALIAS_MAX).ok_or_else(|| {
                    let (alias, known) = (engine::shown(&alias), repl::KNOWN);
                    let message = format!("this server has no interpreter `{alias}`: use {known}, or `cmd`");
                    Refusal::unsupported(message)
                })?;
                (Kind::Repl(alias), input, Program::argv(argv).map_err(broken(Field::Command))?)
            }
            (other, ..) => {
                return Err(Refusal::must(
                    "type",
                    format!("be `cmd` or `repl`, got `{}`", engine::shown(other)),
                ));
            }
        };
        let waits = kind == Kind::Cmd && self.wait_until_done == Some(true);
        let length = |field, given| -> Result<Option<Duration>, Refusal> {
            Ok(seconds(field, given)?.filter(|seconds| *seconds > 0).map(Duration::from_secs))
        };
        let spec = CommandSpec {
            id: Some(names::new_context(&kind)?),
            env: CommandEnv::new(self.env_vars.unwrap_or_default()).map_err(broken(Field::Env))?,
            cwd: directory(sandbox, self.cwd.as_deref())?,
            stdin: terminal.is_some() || !waits,
            terminal,
            timeout: length("ttl_sec", self.ttl_sec)?,
            idle_timeout: length("idle_timeout_sec", self.idle_timeout_sec)?,
            attendance: Attendance::default(),
            ..CommandSpec::new(argv)
        };
        Ok((spec, kind, input))
    }
}

/// Starts a command, also if the client leaves meanwhile.
async fn start(app: &App, key: &Key, sandbox: &Sandbox, spec: CommandSpec) -> Result<CommandRef, Refusal> {
    let (engine, owner, id) = (app.engine.clone(), key.owner.clone(), sandbox.id);
    let starting = tokio::spawn(async move { engine.run(&owner, id, spec).await }.in_current_span());
    let command = starting.await.map_err(|_| Refusal::bug())??;
    let state = match command.now().state {
        // It has no process: why not is known when that is written down.
        CommandState::Starting => command.ended().await.state,
        state => state,
    };
    match state {
        CommandState::Ended { outcome: Outcome::FailedToStart(why), .. } => Err(failed(&why)),
        _ => Ok(command),
    }
}

fn failed(why: &guest::StartError) -> Refusal {
    Refusal::new(StatusCode::BAD_REQUEST, "create_failed", format!("the context cannot start: {why}"))
}

/// Starts a program or an interpreter. With `wait_until_done`, the answer comes when the program is over.
pub async fn create(
    State(app): State<App>,
    Awake { key, sandbox }: Awake,
    Body(body): Body<Create>,
) -> Result<Answer, Refusal> {
    let waits = body.wait_until_done == Some(true) && body.kind.as_deref() == Some("cmd");
    let (spec, kind, input) = body.spec(&sandbox)?;
    let command = start(&app, &key, &sandbox, spec).await?;
    if let (Kind::Repl(_), Some(input)) = (&kind, input.filter(|input| !input.is_empty())) {
        give(&command, "input", &input).await?;
    }
    if !waits {
        return Ok(with(StatusCode::CREATED, show(&command.now(), false)));
    }
    let mut stopping = app.stopping(&key);
    tokio::select! {
        _ = command.ended() => {}
        // The program goes on. Its result can be read by its id, but this client does not know it.
        _ = stopping.wait() => return Err(EngineError::Stopping.into()),
    }
    Ok(with(StatusCode::CREATED, show_with_output(&command).await))
}

/// A context in a sandbox.
pub struct Context {
    /// Whose.
    pub key: Key,
    /// Where.
    pub sandbox: Sandbox,
    /// The id that clients see.
    pub id: String,
    /// The number of its last run.
    run: u32,
    /// The command of that run.
    pub command: CommandRef,
}

impl FromRequestParts<App> for Context {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        // Reading a context resumes nothing; what acts on it resumes by itself.
        let Meant { key, sandbox } = Meant::from_request_parts(parts, app).await?;
        let id = text_in_path(parts, app, "context").await?;
        if notes::is_deleted(&sandbox, &id) {
            return Err(Refusal::no_context(&id));
        }
        let not_found = || Refusal::no_context(&id);
        let first: CommandId = id.parse().map_err(|_| not_found())?;
        if names::context(first.as_str()) != id {
            return Err(not_found());
        }
        let mut command = match app.engine.command(&key.owner, sandbox.id, &first).await {
            Err(EngineError::CommandNotFound { .. } | EngineError::CommandExpired { .. }) => {
                return Err(not_found());
            }
            found => found?,
        };
        let mut run = 0;
        while let Some(next) = names::run(&id, run + 1) {
            match app.engine.command(&key.owner, sandbox.id, &next).await {
                Ok(found) => (command, run) = (found, run + 1),
                Err(EngineError::CommandNotFound { .. } | EngineError::CommandExpired { .. }) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(Self { key, sandbox, id, run, command })
    }
}

impl Context {
    /// Resumes the sandbox, if it is paused, so that its context can be acted on.
    async fn wake(&self, app: &App) -> Result<(), Refusal> {
        match self.sandbox.state {
            engine::State::Paused(_) if Notes::of(&self.sandbox).auto_resume => {
                wake(app, &self.key, &self.sandbox).await?;
                Ok(())
            }
            engine::State::Paused(_) => Err(Refusal::conflict("the sandbox is paused: resume it")),
            _ => Ok(()),
        }
    }

    fn frozen(&self) -> bool {
        self.sandbox.state == engine::State::Paused(Kept::Frozen)
    }

    /// Whether it answers requests.
    pub fn is_interpreter(&self) -> bool {
        let now = self.command.now();
        names::kind(now.id.as_str()) != Kind::Cmd && now.start.terminal.is_none()
    }
}

/// The contexts of a sandbox, oldest first, each in its last run.
pub async fn list(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<Answer, Refusal> {
    let frozen = sandbox.state == engine::State::Paused(Kept::Frozen);
    let (mut order, mut shown, mut cursor) = (Vec::new(), BTreeMap::new(), None);
    loop {
        let query = CommandQuery { limit: Some(engine::PAGE_MAX), cursor };
        let page = app.engine.commands(&key.owner, sandbox.id, query).await?;
        for command in page.items {
            let id = names::context(command.id.as_str()).to_owned();
            if notes::is_deleted(&sandbox, &id) {
                continue;
            }
            if shown.insert(id.clone(), show(&command, frozen)).is_none() {
                order.push(id);
            }
        }
        match page.next_cursor {
            None => break,
            next => cursor = next,
        }
    }
    let contexts: Vec<Value> = order.iter().filter_map(|id| shown.remove(id)).collect();
    Ok(done(json!({"contexts": contexts})))
}

/// A context.
pub async fn get(context: Context) -> Answer {
    if context.frozen() {
        return done(show(&context.command.now(), true));
    }
    done(show_with_output(&context.command).await)
}

/// Ends what runs, and waits until it is gone.
async fn stop(context: &Context) -> Result<(), Refusal> {
    let command = &context.command;
    if matches!(command.now().state, CommandState::Ended { .. }) {
        return Ok(());
    }
    let over = |result: Result<(), EngineError>| match result {
        Ok(()) | Err(EngineError::CommandEnded { .. }) => Ok(()),
        Err(error) => Err(Refusal::from(error)),
    };
    over(command.signal(Signal::parse("TERM")?).await)?;
    if timeout_at(Instant::now() + STOP_GRACE, command.ended()).await.is_err() {
        over(command.kill().await)?;
        let gone = timeout_at(Instant::now() + KILL_MAX, command.ended()).await;
        gone.map_err(|_| Refusal::from(EngineError::Unresponsive { id: context.sandbox.id }))?;
    }
    Ok(())
}

/// Ends a context, and forgets it.
pub async fn delete(State(app): State<App>, context: Context) -> Result<Answer, Refusal> {
    let deleting = async move {
        if context.frozen() {
            context.wake(&app).await?;
        }
        stop(&context).await?;
        // As it is now: another context may have been deleted meanwhile.
        let sandbox = app.engine.get(&context.key.owner, context.sandbox.id).await?;
        let notes = notes::with_deleted(&sandbox, &context.id);
        let update = SandboxUpdate { notes, ..SandboxUpdate::default() };
        app.engine.update(&context.key.owner, context.sandbox.id, update).await?;
        Ok(done(json!({"deleted": true})))
    };
    tokio::spawn(deleting.in_current_span()).await.map_err(|_| Refusal::bug())?
}

/// Ends what runs, and runs the same again.
pub async fn restart(State(app): State<App>, context: Context) -> Result<Answer, Refusal> {
    let again = names::run(&context.id, context.run + 1);
    let again = again
        .ok_or_else(|| Refusal::unsupported("this context was not made by this client: create a new one"))?;
    context.wake(&app).await?;
    stop(&context).await?;
    let before = context.command.now().start;
    let program = match &before.program {
        guest::Program::Argv(argv) => Program::argv(argv.clone()).map_err(broken(Field::Command))?,
        guest::Program::Shell { script } => {
            Program::script(script.clone()).map_err(broken(Field::Command))?
        }
        guest::Program::Files(_) => return Err(Refusal::no_context(&context.id)),
    };
    let cwd = match &before.cwd {
        Cwd::Named(path) => Some(GuestPath::parse(path.clone()).map_err(broken(Field::Cwd))?),
        Cwd::Default(_) => None,
    };
    // What the daemon added for the run before is added again for this one.
    let own = before.env.iter().filter(|(name, _)| !name.starts_with("SHOAL_"));
    let env = own.cloned().collect();
    let millis = |given: Option<u64>| given.map(Duration::from_millis);
    let spec = CommandSpec {
        id: Some(again),
        env: CommandEnv::new(env).map_err(broken(Field::Env))?,
        cwd,
        stdin: before.stdin,
        terminal: before.terminal,
        timeout: millis(before.timeout_ms),
        idle_timeout: millis(before.idle_timeout_ms),
        ..CommandSpec::new(program)
    };
    let command = start(&app, &context.key, &context.sandbox, spec).await?;
    Ok(done(show(&command.now(), false)))
}

/// `POST .../input` and `.../exec`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Input {
    data: String,
}

/// Hands text to a program as it is, and to an interpreter as a request.
pub async fn give(command: &CommandRef, request: &str, text: &str) -> Result<(), EngineError> {
    let now = command.now();
    let interprets = names::kind(now.id.as_str()) != Kind::Cmd && now.start.terminal.is_none();
    let text = if interprets { repl::line(request, text) } else { text.to_owned() };
    command.write_stdin(None, text.into()).await.map(drop)
}

/// Writes to a context.
pub async fn input(
    State(app): State<App>,
    context: Context,
    Body(body): Body<Input>,
) -> Result<Answer, Refusal> {
    context.wake(&app).await?;
    give(&context.command, "input", &body.data).await?;
    Ok(done(json!({"written": true})))
}

/// Has an interpreter run a text, and answers with what that has written.
pub async fn exec(
    State(app): State<App>,
    context: Context,
    Body(body): Body<Input>,
) -> Result<Answer, Refusal> {
    if !context.is_interpreter() {
        let message =
            "this context is not an interpreter without a terminal: use `context_input`, or its stream";
        return Err(Refusal::conflict(message));
    }
    context.wake(&app).await?;
    let request = names::new_context(&Kind::Cmd)?.to_string();
    let command = &context.command;
    let from = command.now().stdout.end;
    let mut text = command.attach_text(Offsets { stdout: from, stderr: 0 });
    command.write_stdin(None, repl::line(&request, &body.data).into()).await?;
    let mut stopping = app.stopping(&context.key);
    let answered = async {
        let (mut filter, mut begun, mut output) = (Filter::default(), false, String::new());
        loop {
            let (pieces, ended) = match text.next().await {
                Some(TextEvent::Text { text, .. }) => (filter.take(&text), None),
                Some(TextEvent::Started { .. }) => continue,
                Some(TextEvent::Ended(command)) => (filter.end(), Some(command)),
                Some(TextEvent::Stalled) | None => return Err(Refusal::from(EngineError::Stopping)),
            };
            for piece in pieces {
                match piece {
                    Piece::Begun(number) if number == request => begun = true,
                    Piece::Over(number) if number == request => return Ok(json!({"output_raw": output})),
                    Piece::Text(text) if begun => output.push_str(&text),
                    Piece::Begun(_) | Piece::Over(_) | Piece::Text(_) => {}
                }
            }
            if let Some(command) = ended
                && let CommandState::Ended { outcome, .. } = &command.state
            {
                let (code, state) = end(outcome);
                return match begun {
                    true => Ok(json!({"output_raw": output, "exit_code": code, "state": state})),
                    false => Err(EngineError::CommandEnded { id: command.id.clone() }.into()),
                };
            }
        }
    };
    tokio::select! {
        answer = tokio::time::timeout(EXEC_MAX, answered) => match answer {
            Ok(answer) => Ok(done(answer?)),
            Err(_) => {
                let seconds = EXEC_MAX.as_secs();
                let message = format!("the interpreter has not answered within {seconds} s, and goes on");
                Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "exec_timeout", message))
            }
        },
        _ = stopping.wait() => Err(EngineError::Stopping.into()),
    }
}

/// Gives a terminal another size.
pub async fn resize(
    State(app): State<App>,
    context: Context,
    Body(size): Body<Size>,
) -> Result<Answer, Refusal> {
    let TerminalSize { rows, columns } = size.terminal()?;
    context.wake(&app).await?;
    context.command.resize(rows, columns).await?;
    Ok(done(json!({"resized": true})))
}

/// `POST .../signal`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Signalled {
    signal: String,
}

/// Sends a signal.
pub async fn signal(
    State(app): State<App>,
    context: Context,
    Body(body): Body<Signalled>,
) -> Result<Answer, Refusal> {
    let signal = Signal::parse(&body.signal)?;
    context.wake(&app).await?;
    context.command.signal(signal).await?;
    Ok(done(json!({"signaled": true})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_too_long_for_an_argument_is_still_run() {
        let argv =
            |script: &str| program(["bash", "-lc", script].map(str::to_owned).to_vec()).expect("it is one");
        assert!(matches!(argv("true"), Program::Argv(_)));
        let long = format!("echo {}", "x".repeat(ARGUMENT_MAX));
        let Program::Script(script) = argv(&long) else { panic!("it is no script") };
        assert!(script.as_str().starts_with(LOGIN) && script.as_str().ends_with(&long));
        let other = program(vec!["cat".into(), long]).expect("the kernel says so later");
        assert!(matches!(other, Program::Argv(_)));
    }
}
