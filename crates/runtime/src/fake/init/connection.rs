//! One connection to the daemon: checks and handles incoming messages, and sends those that are due.

use std::collections::VecDeque;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use wire::SandboxId;
use wire::frame::{self, Decoder, FrameError, Incoming, MESSAGE_TO_INIT_MAX};
use wire::guest::{
    COMMANDS_MAX, FromInit, Handle, Program, STDIN_WINDOW, Start, StartError, Stream, ToInit, VERSION,
    VERSION_MIN, Versions,
};

use super::{Command, Init, InitState, Told};
use crate::fake::faults::Lifespan;
use crate::fake::host::FakeHost;
use crate::fake::script::{Runner, Timeouts};

/// While this many bytes wait to be written, nothing more is read: every answer is the result of a request.
const OUT_MAX: usize = 1024 * 1024;
/// Signals are 1 to this (signal(7)).
const SIGNAL_MAX: i32 = 64;

/// A rule of the protocol that the daemon broke. It ends the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Bytes that are not a frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The hello was not the first message.
    #[error("something came before the hello")]
    BeforeHello,
    /// The hello came twice.
    #[error("a second hello")]
    SecondHello,
    /// An operation that is newer than the version in use.
    #[error("something that the version agreed on does not know")]
    NotAgreedOn,
    /// The daemon may only write to stdin, and only acknowledge output.
    #[error("{stream:?} of command {} is not the daemon's to use so", handle.0)]
    WrongStream {
        /// Which command.
        handle: Handle,
        /// Which stream.
        stream: Stream,
    },
    /// The daemon acknowledged more than was sent.
    #[error("{offset} bytes of command {} were acknowledged, and {sent} were sent", handle.0)]
    AckBeyondSent {
        /// Which command.
        handle: Handle,
        /// What was acknowledged.
        offset: u64,
        /// What was sent.
        sent: u64,
    },
    /// The command has not ended.
    #[error("the result of command {} was acknowledged before there was one", handle.0)]
    NoResultYet {
        /// Which command.
        handle: Handle,
    },
    /// The signal does not exist.
    #[error("signal {0} does not exist")]
    BadSignal(i32),
    /// Bytes of stdin are missing.
    #[error("stdin at offset {offset} leaves a gap after {received}")]
    StdinGap {
        /// Where the bytes begin.
        offset: u64,
        /// How much had arrived before.
        received: u64,
    },
    /// More stdin than the window allows.
    #[error("stdin beyond its window of {STDIN_WINDOW} bytes")]
    StdinBeyondWindow,
}

enum Mood {
    Talking,
    Silent,
    Over,
}

/// One connection to the daemon.
pub(in crate::fake) struct Connection {
    init: Arc<Init>,
    generation: u64,
    lifespan: Lifespan,
    host: FakeHost,
    sandbox: SandboxId,
    /// The version, once agreed on.
    version: Option<u32>,
    /// The connection closes once the output is written.
    parting: bool,
    out: Vec<u8>,
}

impl Connection {
    /// Creates a connection; the previous one is no longer served.
    pub(in crate::fake) fn replace(
        init: Arc<Init>,
        lifespan: Lifespan,
        host: FakeHost,
        sandbox: SandboxId,
    ) -> Self {
        let generation = {
            let mut state = init.state();
            state.generation += 1;
            state.commands.values_mut().for_each(Command::detach);
            state.generation
        };
        init.notify();
        Self { init, generation, lifespan, host, sandbox, version: None, parting: false, out: Vec::new() }
    }

    /// Serves until it is replaced or breaks. Drops the stream at the end.
    pub(in crate::fake) async fn serve(mut self, stream: DuplexStream) {
        let (mut reader, mut writer) = tokio::io::split(stream);
        let mut decoder: Decoder<ToInit> = Decoder::new(MESSAGE_TO_INIT_MAX);
        let mut written = 0;
        loop {
            let init = Arc::clone(&self.init);
            let mut wake = std::pin::pin!(init.wake.notified());
            wake.as_mut().enable();
            match self.mood() {
                Mood::Over => return,
                Mood::Silent => {
                    wake.await;
                    continue;
                }
                Mood::Talking => {}
            }
            if written == self.out.len() {
                self.out.clear();
                written = 0;
                if self.parting {
                    return;
                }
                if self.version.is_some() {
                    self.fill();
                }
            }
            let limit = usize::try_from(self.lifespan.bytes).unwrap_or(usize::MAX);
            let unwritten = &self.out[written..self.out.len().min(written.saturating_add(limit))];
            let listens = self.out.len() - written < OUT_MAX;
            let space = decoder.space();
            let room = space.len().min(limit);
            tokio::select! {
                wrote = writer.write(unwritten), if !unwritten.is_empty() => match wrote {
                    Ok(length) if length > 0 => {
                        written += length;
                        self.lifespan.bytes -= length as u64;
                    }
                    Ok(_) | Err(_) => return,
                },
                read = reader.read(&mut space[..room]), if listens => match read {
                    Ok(length) if length > 0 => {
                        decoder.filled(length);
                        self.lifespan.bytes -= length as u64;
                        if let Err(violation) = self.take_all(&mut decoder) {
                            self.init.state().violations.push(violation);
                            return;
                        }
                    }
                    Ok(_) | Err(_) => return,
                },
                () = wake => {}
            }
        }
    }

    fn mood(&self) -> Mood {
        let state = self.init.state();
        if state.dead || state.generation != self.generation || self.lifespan.bytes == 0 {
            Mood::Over
        } else if state.silent {
            Mood::Silent
        } else {
            Mood::Talking
        }
    }

    fn take_all(&mut self, decoder: &mut Decoder<ToInit>) -> Result<(), Violation> {
        while let Some(incoming) = decoder.next()? {
            match incoming {
                Incoming::Message(ToInit::Hello { version_min, version_max }) => {
                    self.greet(Versions { min: version_min, max: version_max })?;
                }
                Incoming::Message(_) | Incoming::Data { .. } if self.version.is_none() => {
                    return Err(Violation::BeforeHello);
                }
                Incoming::Message(message) => self.heed(message)?,
                Incoming::Data { handle, stream: Stream::Stdin, offset, bytes } => {
                    self.receive_stdin(handle, offset, bytes)?;
                }
                Incoming::Data { handle, stream, .. } => {
                    return Err(Violation::WrongStream { handle, stream });
                }
            }
        }
        Ok(())
    }

    fn greet(&mut self, theirs: Versions) -> Result<(), Violation> {
        if self.version.is_some() || self.parting {
            return Err(Violation::SecondHello);
        }
        let own = Versions { min: VERSION_MIN, max: VERSION };
        let own = self.host.state().faults.versions.unwrap_or(own);
        let version = theirs.max.min(own.max);
        if version < theirs.min || version < own.min {
            let (version_min, version_max) = (own.min, own.max);
            self.say(&FromInit::NoCommonVersion { version_min, version_max });
            self.parting = true;
            return Ok(());
        }
        self.version = Some(version);
        self.say(&FromInit::Hello { version });
        let mut known = Vec::new();
        if let Some(mut state) = self.current() {
            for (handle, command) in &state.commands {
                let stdin = state.stdin_claimed.unwrap_or(command.stdin_received);
                known.push(FromInit::Known { handle: *handle, pid: command.pid, stdin });
            }
            let claims = state.claims.iter();
            known.extend(claims.map(|claim| FromInit::Known { handle: Handle(*claim), pid: None, stdin: 0 }));
            state.says_now = true;
        }
        known.iter().for_each(|known| self.say(known));
        self.say(&FromInit::KnownEnd);
        Ok(())
    }

    fn say(&mut self, message: &FromInit) {
        frame::put_message(message, &mut self.out);
    }

    /// The state, unless another connection has replaced this one: late messages must not be mixed in.
    fn current(&self) -> Option<MutexGuard<'_, InitState>> {
        let state = self.init.state();
        (state.generation == self.generation).then_some(state)
    }

    /// Changes a command, if it is known. Otherwise the daemon has asked init to forget it, and there is nothing to do.
    fn change(
        &self,
        handle: Handle,
        change: impl FnOnce(&mut Command) -> Result<(), Violation>,
    ) -> Result<(), Violation> {
        let result = match self.current().as_mut().and_then(|state| state.commands.get_mut(&handle)) {
            Some(command) => change(command),
            None => Ok(()),
        };
        self.init.notify();
        result
    }

    fn heed(&mut self, message: ToInit) -> Result<(), Violation> {
        // If a test makes init send arbitrary bytes, the daemon's answers do not match init's own state.
        let hostile = !self.init.state().says.is_empty();
        match message {
            ToInit::Hello { .. } => Err(Violation::SecondHello),
            ToInit::Start(start) => self.start(*start),
            ToInit::StdinEnd { handle, offset } => self.change(handle, |command| {
                command.end_stdin(offset);
                Ok(())
            }),
            ToInit::Signal { signal, .. } if !(1..=SIGNAL_MAX).contains(&signal) => {
                Err(Violation::BadSignal(signal))
            }
            ToInit::Signal { handle, signal } => self.change(handle, |command| {
                command.signal = Some(signal);
                Ok(())
            }),
            ToInit::Kill { handle } => self.change(handle, |command| {
                command.killed = true;
                Ok(())
            }),
            ToInit::Resize { .. } => Ok(()),
            ToInit::Ack { handle, stream, offset } => self.change(handle, |command| {
                let output = command.output_of(stream).ok_or(Violation::WrongStream { handle, stream })?;
                if offset > output.sent && !hostile {
                    return Err(Violation::AckBeyondSent { handle, offset, sent: output.sent });
                }
                output.acknowledge(offset);
                Ok(())
            }),
            ToInit::AckResult { handle } => {
                let Some(mut state) = self.current() else { return Ok(()) };
                match state.commands.get(&handle) {
                    Some(command) if command.result.is_none() && !hostile => {
                        return Err(Violation::NoResultYet { handle });
                    }
                    Some(_) | None => state.commands.remove(&handle),
                };
                Ok(())
            }
            ToInit::Resume { handle, stdout, stderr } => {
                self.change(handle, |command| command.resume(handle, [stdout, stderr], hostile))
            }
            ToInit::Ping { serial } => {
                self.say(&FromInit::Pong { serial });
                Ok(())
            }
        }
    }

    fn receive_stdin(&mut self, handle: Handle, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        let mut refused = false;
        self.change(handle, |command| {
            let is_over = command.stdin_end.is_some_and(|end| offset >= end);
            if command.stdin_is_closed() || is_over {
                refused = command.attached && !std::mem::replace(&mut command.told.stdin_closed, true);
                return Ok(());
            }
            command.receive_stdin(offset, bytes)
        })?;
        if refused {
            self.say(&FromInit::StdinClosed { handle });
        }
        Ok(())
    }

    fn start(&mut self, start: Start) -> Result<(), Violation> {
        let handle = start.handle;
        if let Program::Files(operation) = &start.program
            && self.version.is_none_or(|version| version < operation.since())
        {
            return Err(Violation::NotAgreedOn);
        }
        let Some(mut state) = self.current() else { return Ok(()) };
        if let Some(command) = state.commands.get_mut(&handle) {
            command.attached = true;
            return Ok(());
        }
        *state.starts.entry(handle).or_default() += 1;
        if state.commands.len() >= COMMANDS_MAX {
            drop(state);
            // Not remembered, or there would be no limit.
            let error = StartError::NoRoom { reason: format!("it has {COMMANDS_MAX} commands already") };
            self.say(&FromInit::StartFailed { handle, error });
            return Ok(());
        }
        let (script, operation) = match start.program {
            Program::Argv(argv) => (argv.join(" "), None),
            Program::Shell { script } => (script, None),
            Program::Files(operation) => (String::new(), Some(operation)),
        };
        let missing = script.trim() == "missing";
        let pid = (!missing).then(|| {
            state.pid_last += 1;
            state.pid_last + 1
        });
        let command = Command {
            pid,
            output: Default::default(),
            takes_stdin: start.stdin,
            stdin: VecDeque::new(),
            stdin_received: 0,
            stdin_given: 0,
            stdin_end: if start.stdin { None } else { Some(0) },
            killed: false,
            signal: None,
            result: missing.then(|| Err(StartError::ProgramNotFound { program: script.clone() })),
            attached: true,
            told: Told { stdin: Some(0), ..Told::default() },
        };
        state.commands.insert(handle, command);
        drop(state);
        self.init.notify();
        if missing {
            return Ok(());
        }
        let init = Arc::clone(&self.init);
        let (host, sandbox, user) = (self.host.clone(), self.sandbox, start.user);
        let runner = Runner { init, host, sandbox, handle, user };
        let ignored = self.host.state().faults.timeouts_ignored;
        let length = |ms: Option<u64>| ms.filter(|_| !ignored).map(Duration::from_millis);
        let timeouts = Timeouts { whole: length(start.timeout_ms), idle: length(start.idle_timeout_ms) };
        tokio::spawn(async move {
            match operation {
                Some(operation) => runner.run_files(*operation).await,
                None => runner.run(&script, timeouts).await,
            }
        });
        Ok(())
    }

    /// Encodes a bounded part of the pending messages.
    fn fill(&mut self) {
        let init = Arc::clone(&self.init);
        let mut state = init.state();
        if state.generation != self.generation {
            return;
        }
        if std::mem::take(&mut state.says_now) {
            self.out.extend_from_slice(&state.says);
        }
        for (handle, command) in &mut state.commands {
            command.put_news(*handle, self.lifespan.chunk_max, &mut self.out);
        }
    }
}
