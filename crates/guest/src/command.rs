//! One command: its state, and what init has reported to the daemon.
//!
//! ```text
//! Starting ──▶ Running ──▶ Exited ──(all its output is in the windows)──▶ result due ──AckResult──▶ forgotten
//!     └──────▶ Failed ────────────────────────────────────────────────────────▲
//! ```
//!
//! A forgotten command stays here while anything is left of it: processes that write to its pipes, or its cgroup.

use std::os::fd::OwnedFd;

use wire::guest::{End, EndCause, ExitStatus, FromInit, Handle, Start, StartError, Stream};

use crate::spawn::{Asked, Spawned};
use crate::streams::{Input, Output, Source};
use crate::timers::Deadlines;
use crate::tree::Root;

/// State of a command.
#[derive(Debug)]
pub enum Life {
    /// The process exists and is about to execute the program.
    Starting {
        report: OwnedFd,
        asked: Box<Asked>,
    },
    Running,
    /// The main process has exited and was reaped.
    Exited(ExitStatus),
    /// The program never ran.
    Failed(StartError),
}

/// What was reported on the current connection.
#[derive(Debug, Default, Clone, Copy)]
struct Told {
    started: bool,
    ended: bool,
    stdin_closed: bool,
}

/// One command.
#[derive(Debug)]
pub struct Command {
    handle: Handle,
    id: Box<str>,
    pub life: Life,
    pid: i32,
    /// The main process was reaped, or never existed.
    pub reaped: bool,
    /// Its cgroup may still exist.
    pub group_left: bool,
    /// The caller asked for a writable stdin.
    takes_stdin: bool,
    pub terminal: bool,
    pub stdin: Input,
    stdout: Output,
    stderr: Output,
    pub deadlines: Deadlines,
    /// When its deadlines are checked next.
    pub scheduled: Option<u64>,
    /// What ended it, or would have if it had not ended already.
    pub cause: EndCause,
    /// Signals that arrived before the program ran, one bit each; they are delivered when it runs.
    pub pending_signals: u64,
    /// The daemon wants its output on the current connection.
    attached: bool,
    told: Told,
    /// The daemon has stored its result.
    forgotten: bool,
}

impl Command {
    /// A command whose process was started.
    pub fn starting(start: &Start, spawned: Spawned, deadlines: Deadlines) -> Self {
        let source = if start.terminal.is_some() { Source::Terminal } else { Source::Pipe };
        let asked = Box::new(Asked::new(start));
        let mut stdin = Input::new(spawned.stdin, source);
        if source == Source::Terminal && !start.stdin {
            // The caller will not write: a process that reads from the terminal gets end-of-file.
            stdin.end_at(0);
            stdin.pump();
        }
        Self {
            pid: spawned.pid,
            reaped: false,
            group_left: true,
            stdin,
            stdout: Output::new(Some(spawned.stdout), source),
            stderr: Output::new(spawned.stderr, source),
            deadlines,
            ..Self::without_process(start, Life::Starting { report: spawned.report, asked })
        }
    }

    /// A command that could not even be forked.
    pub fn failed(start: &Start, error: StartError) -> Self {
        Self::without_process(start, Life::Failed(error))
    }

    fn without_process(start: &Start, life: Life) -> Self {
        Self {
            handle: start.handle,
            id: start.id.as_str().into(),
            life,
            pid: 0,
            reaped: true,
            group_left: false,
            takes_stdin: start.stdin,
            terminal: start.terminal.is_some(),
            stdin: Input::new(None, Source::Pipe),
            stdout: Output::new(None, Source::Pipe),
            stderr: Output::new(None, Source::Pipe),
            deadlines: Deadlines::new(0, None, None, 0),
            scheduled: None,
            cause: EndCause::Itself,
            pending_signals: 0,
            attached: false,
            told: Told::default(),
            forgotten: false,
        }
    }

    /// What `tree` needs to know about its processes.
    pub fn root(&self) -> Root<'_> {
        let main = if self.reaped { None } else { Some(self.pid) };
        Root { handle: self.handle, id: &self.id, main }
    }

    /// Its output streams, both of them.
    pub fn outputs(&mut self) -> [&mut Output; 2] {
        [&mut self.stdout, &mut self.stderr]
    }

    /// One of its output streams; `None` for stdin.
    pub fn output(&self, stream: Stream) -> Option<&Output> {
        match stream {
            Stream::Stdin => None,
            Stream::Stdout => Some(&self.stdout),
            Stream::Stderr => Some(&self.stderr),
        }
    }

    /// One of its output streams, mutable.
    pub fn output_mut(&mut self, stream: Stream) -> Option<&mut Output> {
        match stream {
            Stream::Stdin => None,
            Stream::Stdout => Some(&mut self.stdout),
            Stream::Stderr => Some(&mut self.stderr),
        }
    }

    /// The program never ran.
    pub fn fail(&mut self, error: StartError) {
        self.life = Life::Failed(error);
        self.stdin.close();
        self.outputs().into_iter().for_each(Output::close);
    }

    /// The main process has exited: its streams end with what they contain now.
    pub fn exit(&mut self, status: ExitStatus) {
        self.life = Life::Exited(status);
        self.stdin.close();
        self.outputs().into_iter().for_each(Output::main_exited);
    }

    /// Whether its main process may still be signalled.
    pub fn is_alive(&self) -> bool {
        !self.reaped && matches!(self.life, Life::Starting { .. } | Life::Running)
    }

    /// Whether it is silent only because the daemon does not take its output.
    pub fn is_held_up(&self) -> bool {
        self.stdout.is_held_up() || self.stderr.is_held_up()
    }

    /// Whether the result is complete.
    pub fn result_is_due(&self) -> bool {
        match self.life {
            Life::Starting { .. } | Life::Running => false,
            Life::Exited(_) => self.stdout.is_over() && self.stderr.is_over(),
            Life::Failed(_) => true,
        }
    }

    /// Whether the daemon wants its output on the current connection.
    pub fn is_attached(&self) -> bool {
        self.attached
    }

    /// Whether the daemon has stored its result.
    pub fn is_forgotten(&self) -> bool {
        self.forgotten
    }

    /// Whether nothing is left of it.
    pub fn is_gone(&self) -> bool {
        self.forgotten
            && self.reaped
            && !self.group_left
            && self.stdout.is_closed()
            && self.stderr.is_closed()
    }

    /// The daemon has stored the result.
    pub fn forget(&mut self) {
        self.forgotten = true;
        self.attached = false;
    }

    /// The daemon wants its output from here on.
    pub fn attach(&mut self) {
        self.attached = true;
    }

    /// The connection is gone: everything that was not acknowledged is sent again.
    pub fn detach(&mut self) {
        self.attached = false;
        self.told = Told::default();
        for output in self.outputs() {
            output.sent = output.window.acked();
            output.waits_to_send = false;
        }
    }

    /// How a new connection learns of it.
    pub fn introduce(&mut self) -> FromInit {
        let pid = self.guest_pid();
        self.told.started = pid.is_some();
        FromInit::Known { handle: self.handle, pid, stdin: self.stdin.received() }
    }

    /// The next message about its state, if it is attached; each call returns the one after.
    pub fn news(&mut self) -> Option<FromInit> {
        let handle = self.handle;
        if !self.attached {
            return None;
        }
        if let Life::Failed(error) = &self.life {
            let news = FromInit::StartFailed { handle, error: error.clone() };
            return (!std::mem::replace(&mut self.told.ended, true)).then_some(news);
        }
        let pid = self.guest_pid()?;
        if !std::mem::replace(&mut self.told.started, true) {
            return Some(FromInit::Started { handle, pid });
        }
        if self.takes_stdin
            && self.stdin.is_closed()
            && matches!(self.life, Life::Running)
            && !std::mem::replace(&mut self.told.stdin_closed, true)
        {
            return Some(FromInit::StdinClosed { handle });
        }
        let Life::Exited(status) = self.life else { return None };
        let (stdout_end, stderr_end) = (self.stdout.window.end(), self.stderr.window.end());
        let all_sent = self.stdout.sent == stdout_end && self.stderr.sent == stderr_end;
        if !self.result_is_due() || !all_sent || std::mem::replace(&mut self.told.ended, true) {
            return None;
        }
        let end = End { status, cause: self.cause };
        Some(FromInit::Ended { handle, end, stdout_end, stderr_end })
    }

    /// Bytes arrived for a stdin that is closed. Returns the message about that, once.
    pub fn refuse_stdin(&mut self) -> Option<FromInit> {
        let news = FromInit::StdinClosed { handle: self.handle };
        (self.attached && !std::mem::replace(&mut self.told.stdin_closed, true)).then_some(news)
    }

    /// The message that says how much stdin was accepted.
    pub fn stdin_news(&self) -> Option<FromInit> {
        let news = FromInit::StdinAck { handle: self.handle, offset: self.stdin.taken() };
        (self.attached && self.takes_stdin && !self.stdin.is_closed()).then_some(news)
    }

    fn guest_pid(&self) -> Option<u32> {
        match self.life {
            Life::Running | Life::Exited(_) => Some(self.pid as u32),
            Life::Starting { .. } | Life::Failed(_) => None,
        }
    }
}
