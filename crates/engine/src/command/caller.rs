//! What a caller can do with a command: inspect it, wait for it, read its output, write to its stdin, signal it.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use wire::guest::{TerminalSize, ToInit};

use super::sink::State;
use super::{ANSWER_SECONDS, LiveCommand, Output, STDIN_SECONDS};
use crate::command::log::{Next, ReadPlan};
use crate::error::{EngineError, Field};
use crate::guest::{Carrier, STREAMS, Unsaid, Use};
use crate::model::{Command, Gathered, Offsets, Resume, Signal, Span};

/// A command that can be watched and acted on. Holding this keeps nothing alive but memory.
#[derive(Clone)]
pub struct CommandRef {
    pub(crate) command: Arc<LiveCommand>,
    resume: Resume,
}

impl CommandRef {
    pub(crate) fn new(command: Arc<LiveCommand>) -> Self {
        Self { command, resume: Resume::default() }
    }

    /// Whether input and signals resume a paused sandbox first. Reading the state and the output never does.
    pub fn with_resume(self, resume: Resume) -> Self {
        Self { resume, ..self }
    }

    /// Begins a use to act on the command.
    async fn enter(&self) -> Result<Use, EngineError> {
        // A sandbox is not resumed for a command that has ended.
        if self.command.lane.lock().sink.ending.is_some() {
            return Err(EngineError::CommandEnded { id: self.command.id.clone() });
        }
        self.command.guest().enter(self.resume).await
    }

    /// The command's current state.
    pub fn now(&self) -> Command {
        self.command.now()
    }

    /// Waits for the command to end.
    pub async fn ended(&self) -> Command {
        let over = |state: &mut State| match state.sink.result() {
            Some(_) => ControlFlow::Break(()),
            None => ControlFlow::Continue(()),
        };
        // A caller that waits for a command uses the sandbox until the command ends.
        let _using = Use::begin(self.command.guest());
        self.command.lane.until(over).await;
        self.command.now()
    }

    /// How often programs tried to reach a network since a result last said so, if the sandbox has none. Ask when the command has
    /// ended: attempts of commands that run at the same time are counted with the first that ends.
    pub async fn network_attempts(&self) -> u64 {
        self.command.guest().new_attempts().await
    }

    /// Streams output from these offsets on, live, until the end. While a reader is attached and makes progress, output
    /// that it has not read is not dropped; the command waits instead.
    pub fn attach(&self, from: Offsets) -> Output {
        Output::attach(&self.command, from)
    }

    /// All output that is kept now: at most `limit` bytes of each stream, from the first kept byte on.
    pub async fn output(&self, limit: usize) -> Result<Gathered, EngineError> {
        let reading = self.attach(Offsets::default());
        let spans = {
            let state = self.command.lane.lock();
            [state.sink.logs[0].span(), state.sink.logs[1].span()]
        };
        let mut all = [Vec::new(), Vec::new()];
        let mut cut = [false, false];
        for log in 0..STREAMS.len() {
            let Span { start, end } = spans[log];
            let until = end.min(start.saturating_add(limit as u64));
            cut[log] = start > 0 || until < end;
            let mut at = start;
            while at < until {
                let next = self.command.lane.lock().sink.logs[log].next(&self.command.directory(), at, until);
                let bytes = match next {
                    Next::Memory(bytes, _) => bytes,
                    Next::File(plan) => self.read_file(plan).await?,
                    Next::Lost(to) => {
                        cut[log] = true;
                        at = to;
                        continue;
                    }
                    Next::Nothing => break,
                };
                at += bytes.len() as u64;
                all[log].extend_from_slice(&bytes);
            }
        }
        drop(reading);
        let [stdout, stderr] = all;
        Ok(Gathered { stdout, stdout_cut: cut[0], stderr, stderr_cut: cut[1] })
    }

    async fn read_file(&self, plan: ReadPlan) -> Result<Bytes, EngineError> {
        let read = tokio::task::spawn_blocking(move || plan.read()).await;
        let read = read.unwrap_or_else(|error| Err(std::io::Error::other(error)));
        read.map_err(|source| EngineError::Log { doing: "read", id: self.command.id.clone(), source })
    }

    /// Hands bytes to stdin; waits while the command's window is full, at most [`STDIN_SECONDS`]. `at` is the offset of
    /// the first byte, so that a retry writes the bytes only once; `None` appends. Returns the length of stdin so far.
    ///
    /// The bytes are only in the daemon's memory until [`StdinAck`](crate::OutputEvent::StdinAck) covers them. A caller
    /// that must survive the daemon's death keeps the bytes that are not covered, and sends them again with `at`.
    pub async fn write_stdin(&self, at: Option<u64>, bytes: Bytes) -> Result<u64, EngineError> {
        let _using = self.enter().await?;
        let deadline = Instant::now() + Duration::from_secs(STDIN_SECONDS);
        let late = |_| EngineError::StdinStalled { id: self.command.id.clone() };
        timeout_at(deadline, self.take_all_input(at, bytes)).await.map_err(late)?
    }

    /// Appends bytes to stdin, and waits for as long as the command does not read them. For a caller that has its own
    /// deadline, and that would not know the offset to retry at after a timeout.
    pub async fn append_stdin(&self, bytes: Bytes) -> Result<u64, EngineError> {
        let _using = self.enter().await?;
        self.take_all_input(None, bytes).await
    }

    async fn take_all_input(&self, mut at: Option<u64>, mut rest: Bytes) -> Result<u64, EngineError> {
        loop {
            let step = self.command.lane.until(|state| self.take_input(state, &mut at, &mut rest)).await;
            self.command.offer_stdin(&mut self.command.lane.lock());
            if let Some(result) = step {
                return result;
            }
        }
    }

    /// Moves the bytes that fit into the window. Breaks with `None` if some are left.
    #[allow(clippy::type_complexity)] // Only `write_stdin` sees it.
    fn take_input(
        &self,
        state: &mut State,
        at: &mut Option<u64>,
        rest: &mut Bytes,
    ) -> ControlFlow<Option<Result<u64, EngineError>>> {
        if let Err(error) = self.takes_input(state) {
            return ControlFlow::Break(Some(Err(error)));
        }
        if state.stdin.is_unknown() {
            return ControlFlow::Continue(());
        }
        let accepted = state.stdin.accepted();
        if let Some(from) = at.take() {
            if from > accepted {
                let rule = format!("be at most {accepted}, the bytes that have come, got {from}");
                return ControlFlow::Break(Some(Err(Field::StdinOffset.must(rule))));
            }
            // Bytes that were accepted before are not written twice.
            let again = usize::try_from(accepted - from).unwrap_or(usize::MAX).min(rest.len());
            let _ = rest.split_to(again);
        }
        if rest.is_empty() {
            return ControlFlow::Break(Some(Ok(accepted)));
        }
        let fits = state.stdin.room().min(rest.len());
        if fits == 0 {
            return ControlFlow::Continue(());
        }
        state.stdin.push(rest.split_to(fits));
        ControlFlow::Break(rest.is_empty().then(|| Ok(state.stdin.accepted())))
    }

    fn takes_input(&self, state: &State) -> Result<(), EngineError> {
        if state.sink.ending.is_some() {
            return Err(EngineError::CommandEnded { id: self.command.id.clone() });
        }
        if state.stdin.is_ended() {
            return Err(EngineError::StdinClosed { id: self.command.id.clone() });
        }
        Ok(())
    }

    /// Ends stdin. Returns once init knows; repeating the call is harmless.
    pub async fn end_stdin(&self) -> Result<(), EngineError> {
        let deadline = Instant::now() + Duration::from_secs(STDIN_SECONDS);
        let stalled = |_| EngineError::StdinStalled { id: self.command.id.clone() };
        let set = self.command.lane.until(|state| {
            if state.stdin.is_ended() {
                // The command has no stdin, or its stdin has ended already.
                return ControlFlow::Break(Ok(()));
            }
            if state.sink.ending.is_some() {
                return ControlFlow::Break(Err(EngineError::CommandEnded { id: self.command.id.clone() }));
            }
            if state.stdin.is_unknown() {
                return ControlFlow::Continue(());
            }
            state.stdin.end();
            ControlFlow::Break(Ok(()))
        });
        timeout_at(deadline, set).await.map_err(stalled)??;
        self.command.offer_stdin(&mut self.command.lane.lock());
        let sent = self.command.lane.until(|state| {
            let done = state.stdin.is_end_known() || state.sink.ending.is_some();
            if done { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        timeout_at(deadline, sent).await.map_err(stalled)?;
        // The link sends the end again on a new connection, so an answer to any later message shows that init has it.
        match self.request(None, Resend::Yes).await {
            Err(EngineError::CommandEnded { .. }) => Ok(()),
            result => result,
        }
    }

    /// Signals the command's process group. If the connection to init breaks during the call, it is unknown whether the
    /// signal was sent; it is not sent twice, and the call returns [`EngineError::Unresponsive`].
    pub async fn signal(&self, signal: Signal) -> Result<(), EngineError> {
        let message = ToInit::Signal { handle: self.command.lane.handle(), signal: signal.number() };
        self.request(Some(message), Resend::No).await
    }

    /// Kills the command's whole process tree at once. Returns once init has the request; the end itself arrives as a
    /// result.
    pub async fn kill(&self) -> Result<(), EngineError> {
        self.request(Some(ToInit::Kill { handle: self.command.lane.handle() }), Resend::Yes).await
    }

    /// Gives the command's terminal a new size.
    pub async fn resize(&self, rows: u16, columns: u16) -> Result<(), EngineError> {
        if self.command.lane.start.terminal.is_none() {
            return Err(EngineError::NoTerminal { id: self.command.id.clone() });
        }
        let size = TerminalSize { rows, columns };
        self.request(Some(ToInit::Resize { handle: self.command.lane.handle(), size }), Resend::Yes).await
    }

    /// Sends a message to init and waits until init has read it.
    async fn request(&self, message: Option<ToInit>, resend: Resend) -> Result<(), EngineError> {
        let _using = self.enter().await?;
        let deadline = Instant::now() + Duration::from_secs(ANSWER_SECONDS);
        let unresponsive = || self.command.guest().unresponsive();
        loop {
            if self.command.lane.lock().sink.ending.is_some() {
                return Err(EngineError::CommandEnded { id: self.command.id.clone() });
            }
            let said = timeout_at(deadline, self.command.guest().outbox.say(message.clone()));
            let said = tokio::select! {
                biased;
                said = said => said.map_err(|_| unresponsive())?,
                () = self.command.lane.over() => return Ok(()),
            };
            match (said, resend) {
                (Ok(()), _) => return Ok(()),
                (Err(Unsaid::Broken), Resend::Yes) => {}
                (Err(Unsaid::Broken), Resend::No) => return Err(unresponsive()),
                (Err(Unsaid::TooMany), _) => return Err(unresponsive()),
            }
        }
    }
}

/// Whether a request may be sent twice.
#[derive(Clone, Copy)]
enum Resend {
    Yes,
    No,
}
