//! The commands of a sandbox. Clients choose the ids, so a start that they repeat finds the command that it has started.
//!
//! Output is in the engine's log: clients wait first and read afterwards, from the first byte.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use engine::{
    CommandEnv, CommandRef, CommandSpec, CommandState, EngineError, Field, GuestPath, Key, Offsets, Outcome,
    OutputEvent, Program,
};
use futures_util::{StreamExt, stream};
use tracing::Instrument;
use wire::guest::{ExitStatus, StartError, Stream, TerminalSize};
use wire::{CommandId, SandboxId};

use super::grpc::{self, Code, Incoming, Status};
use super::messages::*;
use super::sandboxes::{self, Notes};
use super::{names, tools, unknown};
use crate::http::app::App;
use crate::http::error::ApiError;
use crate::http::websocket::STDIN_WRITE_MAX;

/// How much longer than the client a command is given: the client's own clock decides, and reports a timeout.
const TIMEOUT_MARGIN: Duration = Duration::from_secs(1);
/// What `stderr_config` says of a command whose two streams are one.
const STDERR_TO_STDOUT: i32 = 2;
/// What `file_descriptor` says of stderr.
const STDERR: i32 = 1;
/// What shells answer for a program that is not there.
const NOT_FOUND: i32 = 127;
/// And for one that is no program.
const NOT_EXECUTABLE: i32 = 126;
const SIGKILL: i32 = 9;

/// The sandbox that a token opens.
pub struct Target {
    pub app: App,
    pub key: Key,
    pub id: SandboxId,
}

impl Target {
    /// Answers a call.
    pub async fn answer(self, method: &str, request: Request) -> Result<Response, Status> {
        match method {
            "TaskExecStart" => {
                let wish = grpc::read(request, &self.app).await?;
                // A task of its own, so that nothing is left half done when the caller leaves.
                let starting = tokio::spawn(async move { self.start(wish).await }.in_current_span());
                starting.await.map_err(|_| Status::bug())??;
                Ok(grpc::one(&Empty {}))
            }
            "TaskExecWait" => {
                let command = self.command(grpc::read(request, &self.app).await?).await?;
                let mut stopping = self.app.stopping(&self.key);
                let ended = tokio::select! {
                    ended = command.ended() => ended,
                    halt = stopping.wait() => return Err(ApiError::from(halt).into()),
                };
                Ok(grpc::one(&status(&ended.state)?))
            }
            "TaskExecPoll" => {
                let command = self.command(grpc::read(request, &self.app).await?).await?;
                Ok(grpc::one(&status(&command.now().state)?))
            }
            "TaskExecStdioRead" => {
                let wish: StdioReadRequest = grpc::read(request, &self.app).await?;
                let command =
                    self.command(ExecRequest { task_id: wish.task_id, exec_id: wish.exec_id }).await?;
                Ok(self.read(command, wish.offset, wish.file_descriptor, |data, _| {
                    grpc::framed(&StdioReadResponse { data })
                }))
            }
            "TaskExecStdinWrite" => {
                let wish: ExecStdinWriteRequest = grpc::read(request, &self.app).await?;
                let command =
                    self.command(ExecRequest { task_id: wish.task_id, exec_id: wish.exec_id }).await?;
                give(&command, Some(wish.offset), wish.data, wish.eof).await?;
                Ok(grpc::one(&Empty {}))
            }
            "TaskExecStdinWriteStream" => self.write_stream(request).await,
            "TaskExecStdinStatus" => {
                let command = self.command(grpc::read(request, &self.app).await?).await?;
                Ok(grpc::one(&stdin_status(&command).await?))
            }
            "SandboxStdioReadV2" => {
                let wish: SandboxStdioReadRequest = grpc::read(request, &self.app).await?;
                self.check(&wish.task_id)?;
                match sandboxes::entrypoint_of(&self.app, &self.key, self.id).await? {
                    Some(command) => {
                        Ok(self.read(command, wish.offset, wish.file_descriptor, |data, starting_offset| {
                            grpc::framed(&SandboxStdioReadResponse { data, starting_offset })
                        }))
                    }
                    None => Ok(grpc::many(stream::iter([]))),
                }
            }
            "SandboxStdinWriteV2" => {
                let wish: SandboxStdinWriteRequest = grpc::read(request, &self.app).await?;
                self.check(&wish.task_id)?;
                let command = sandboxes::entrypoint_of(&self.app, &self.key, self.id).await?;
                let command = command.ok_or_else(sandboxes::no_entrypoint)?;
                give(&command, Some(wish.offset), wish.data, wish.eof).await?;
                Ok(grpc::one(&Empty {}))
            }
            "SandboxWaitUntilReady" => {
                let wish: TaskRequest = grpc::read(request, &self.app).await?;
                self.check(&wish.task_id)?;
                let sandbox = self.app.engine.get(&self.key.owner, self.id).await?;
                let ready = sandbox.created_at.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
                Ok(grpc::one(&WaitUntilReadyResponse { ready_at: ready.as_secs_f64() }))
            }
            _ => Err(unknown(method)),
        }
    }

    /// A token opens one sandbox.
    fn check(&self, task: &str) -> Result<(), Status> {
        match names::parse_task(task)? == self.id {
            true => Ok(()),
            false => Err(Status::not_found(format!("Task with ID {} not found", names::shown(task)))),
        }
    }

    fn id(exec: &str) -> Result<CommandId, Status> {
        exec.parse().map_err(|error| Status::invalid(format!("`exec_id` is not valid: {error}")))
    }

    async fn command(&self, wish: ExecRequest) -> Result<CommandRef, Status> {
        self.check(&wish.task_id)?;
        Ok(self.app.engine.command(&self.key.owner, self.id, &Self::id(&wish.exec_id)?).await?)
    }

    async fn start(&self, wish: ExecStartRequest) -> Result<(), Status> {
        self.check(&wish.task_id)?;
        let id = Self::id(&wish.exec_id)?;
        let (engine, owner) = (&self.app.engine, &self.key.owner);
        let sandbox = engine.get(owner, self.id).await?;
        let workdir = Notes::of(&sandbox).workdir;
        if let Some(asked) = tools::asked(&wish.command_args) {
            return match engine.command(owner, self.id, &id).await {
                // The client repeats itself; what was done is not done twice.
                Ok(_) => Ok(()),
                Err(EngineError::CommandNotFound { .. }) => tools::run(self, id, asked?, workdir).await,
                Err(error) => Err(error.into()),
            };
        }
        let mut env: BTreeMap<String, String> =
            sandboxes::variables(&self.app, &self.key, &wish.secret_ids, wish.secret_sources)?;
        env.extend(wish.env);
        let argv = match wish.stderr_config {
            STDERR_TO_STDOUT => {
                let joined = ["/bin/sh", "-c", "exec \"$@\" 2>&1", "sh"];
                joined.into_iter().map(str::to_owned).chain(wish.command_args).collect()
            }
            _ => wish.command_args,
        };
        let cwd = wish.workdir.filter(|path| !path.is_empty()).or(workdir);
        let pty = wish.pty_info.filter(|pty| pty.enabled);
        let spec = CommandSpec {
            id: Some(id),
            env: CommandEnv::new(env).map_err(|must| must.of(Field::Env))?,
            cwd: cwd.map(GuestPath::parse).transpose().map_err(|must| must.of(Field::Cwd))?,
            stdin: true,
            terminal: pty.map(|pty| size(&pty)),
            // Zero is no limit.
            timeout: wish
                .timeout_secs
                .filter(|seconds| *seconds > 0)
                .map(|seconds| Duration::from_secs(u64::from(seconds)) + TIMEOUT_MARGIN),
            ..CommandSpec::new(Program::argv(argv).map_err(|must| must.of(Field::Argv))?)
        };
        self.run(spec).await
    }

    /// Starts a command, or finds it. A program that is not there has run and failed, as in a shell.
    pub async fn run(&self, spec: CommandSpec) -> Result<(), Status> {
        let command = match self.app.engine.run(&self.key.owner, self.id, spec).await {
            Ok(command) => command,
            Err(EngineError::CommandIdReused { .. }) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        match command.now().state {
            CommandState::Ended { outcome: Outcome::FailedToStart(why), .. } => match why {
                StartError::ProgramNotFound { .. } | StartError::NotExecutable { .. } => Ok(()),
                why => Err(Status::invalid(why.to_string())),
            },
            _ => Ok(()),
        }
    }

    /// A stream of output from an offset to its end. Clients cannot read an empty message, so none is sent.
    fn read(
        &self,
        command: CommandRef,
        offset: u64,
        descriptor: i32,
        framed: impl Fn(Bytes, u64) -> Bytes + Send + 'static,
    ) -> Response {
        let wanted = if descriptor == STDERR { Stream::Stderr } else { Stream::Stdout };
        let from = move |at: u64| match wanted {
            Stream::Stderr => Offsets { stdout: u64::MAX, stderr: at },
            Stream::Stdout | Stream::Stdin => Offsets { stdout: at, stderr: u64::MAX },
        };
        let output = command.attach(from(offset));
        let reading = (output, self.app.stopping(&self.key), offset, false);
        let pieces = stream::unfold(reading, move |(mut output, mut stopping, mut at, over)| {
            let command = command.clone();
            async move {
                loop {
                    if over {
                        return None;
                    }
                    let event = tokio::select! {
                        event = output.next() => event,
                        halt = stopping.wait() => {
                            return Some((Err(Status::from(ApiError::from(halt))), (output, stopping, at, true)));
                        }
                    };
                    match event {
                        Some(OutputEvent::Bytes { stream, offset, bytes })
                            if stream == wanted && !bytes.is_empty() =>
                        {
                            at = offset + bytes.len() as u64;
                            return Some((Ok((bytes, offset)), (output, stopping, at, false)));
                        }
                        Some(OutputEvent::Lost { stream, from, to }) if stream == wanted => {
                            let message = format!("bytes {from} to {to} of the output are not kept any more");
                            return Some((
                                Err(Status::new(Code::DataLoss, message)),
                                (output, stopping, at, true),
                            ));
                        }
                        Some(OutputEvent::Ended(_)) => return None,
                        // A client need not read what it has opened: the output waits in the log until it does.
                        Some(OutputEvent::Stalled) => output = command.attach(from(at)),
                        None => {
                            let status = Status::from(ApiError::stopping());
                            return Some((Err(status), (output, stopping, at, true)));
                        }
                        Some(_) => {}
                    }
                }
            }
        });
        grpc::many(pieces.map(move |piece| piece.map(|(bytes, at)| framed(bytes, at))))
    }

    /// Input as a stream. One that ends without saying so was interrupted, and the client goes on where it was.
    async fn write_stream(&self, request: Request) -> Result<Response, Status> {
        let mut incoming = Incoming::of(request);
        let first: Option<StdinWriteStreamRequest> = incoming.next().await?;
        let start = first.and_then(|first| first.start);
        let start = start.ok_or_else(|| Status::invalid("the first message must be `start`"))?;
        let command = self.command(ExecRequest { task_id: start.task_id, exec_id: start.exec_id }).await?;
        let mut at = start.offset;
        while let Some(message) = incoming.next::<StdinWriteStreamRequest>().await? {
            if let Some(data) = message.data {
                let length = data.len() as u64;
                give(&command, Some(at), data, false).await?;
                at += length;
            }
            if message.end.is_some() {
                give(&command, None, Bytes::new(), true).await?;
                return Ok(grpc::one(&Empty {}));
            }
        }
        Err(Status::new(Code::Unavailable, "the stream ended before its last message"))
    }
}

fn size(pty: &PtyInfo) -> TerminalSize {
    let side =
        |length: u32, usual: u16| u16::try_from(length).ok().filter(|length| *length > 0).unwrap_or(usual);
    TerminalSize { rows: side(pty.winsz_rows, 24), columns: side(pty.winsz_cols, 80) }
}

/// Writes to a command's stdin at an offset, so that what is repeated is written once, and may end it.
pub async fn give(command: &CommandRef, at: Option<u64>, mut data: Bytes, eof: bool) -> Result<(), Status> {
    let mut at = at;
    while !data.is_empty() {
        let piece = data.split_to(data.len().min(STDIN_WRITE_MAX));
        let length = piece.len() as u64;
        command.write_stdin(at, piece).await?;
        at = at.map(|at| at + length);
    }
    if eof {
        command.end_stdin().await?;
    }
    Ok(())
}

async fn stdin_status(command: &CommandRef) -> Result<StdinStatusResponse, Status> {
    match command.write_stdin(None, Bytes::new()).await {
        Ok(written) => Ok(StdinStatusResponse { num_bytes_written: written, closed: false }),
        Err(EngineError::StdinClosed { .. }) => {
            Ok(StdinStatusResponse { num_bytes_written: 0, closed: true })
        }
        Err(error) => Err(error.into()),
    }
}

/// How a command has ended, or neither field while it runs.
fn status(state: &CommandState) -> Result<ExecStatus, Status> {
    let code = |code| Ok(ExecStatus { code: Some(code), signal: None });
    let signal = |signal| Ok(ExecStatus { code: None, signal: Some(signal) });
    let CommandState::Ended { outcome, .. } = state else { return Ok(ExecStatus::default()) };
    match outcome {
        Outcome::Exited(exit) => code(*exit),
        Outcome::Signaled(number) => signal(*number),
        // A program that reacts to the end of its time by exiting has still run out of it.
        Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => signal(SIGKILL),
        Outcome::Killed(how) | Outcome::OutOfMemory(how) => match how {
            ExitStatus::Code(exit) => code(*exit),
            ExitStatus::Signal(number) => signal(*number),
        },
        Outcome::FailedToStart(StartError::ProgramNotFound { .. }) => code(NOT_FOUND),
        Outcome::FailedToStart(_) => code(NOT_EXECUTABLE),
        Outcome::SandboxGone => Err(Status::not_found("the sandbox has finished")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_a_code_or_a_signal() {
        let ended = |outcome| status(&CommandState::Ended { pid: None, outcome });
        assert_eq!(ended(Outcome::Exited(3)).expect("it has ended").code, Some(3));
        assert_eq!(ended(Outcome::Signaled(9)).expect("it has ended").signal, Some(9));
        assert_eq!(ended(Outcome::TimedOut(ExitStatus::Code(0))).expect("it has ended").signal, Some(9));
        assert_eq!(status(&CommandState::Starting).expect("it runs"), ExecStatus::default());
        ended(Outcome::SandboxGone).expect_err("nobody knows how it has ended");
    }
}
