//! What a fake command does: the words of its script, one after another, or a file operation.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;
use wire::SandboxId;
use wire::files::{
    COMMIT, FileDone, FileError, FileErrorKind, FileKind, FileOp, FileStat, Opened, Timestamp, put_record,
    result_bytes,
};
use wire::frame::CHUNK_MAX;
use wire::guest::{End, EndCause, ExitStatus, Handle, OUTPUT_WINDOW};

use crate::fake::files;
use crate::fake::host::FakeHost;
use crate::fake::init::{Command, Init, Interrupted, SIGKILL, SIGTERM};

/// The byte at an offset of what `flood` writes.
pub fn pattern(offset: u64) -> u8 {
    (offset % PATTERN_PERIOD) as u8
}

/// A prime, so that no block size divides it.
const PATTERN_PERIOD: u64 = 251;

/// Gates that a test has opened.
#[derive(Default)]
pub(super) struct Gates {
    open: Mutex<BTreeSet<String>>,
    changed: Notify,
}

impl Gates {
    pub(super) fn open(&self, name: &str) {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).insert(name.into());
        self.changed.notify_waiters();
    }

    fn is_open(&self, name: &str) -> bool {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).contains(name)
    }
}

/// When a command is killed.
pub(super) struct Timeouts {
    /// After it has run for this long.
    pub whole: Option<Duration>,
    /// After it has written nothing for this long.
    pub idle: Option<Duration>,
}

async fn sleep_for(length: Option<Duration>) {
    match length {
        Some(length) => tokio::time::sleep(length).await,
        None => std::future::pending().await,
    }
}

/// One command's script.
pub(super) struct Runner {
    pub init: Arc<Init>,
    pub host: FakeHost,
    pub sandbox: SandboxId,
    pub handle: Handle,
    pub user: Option<String>,
}

impl Runner {
    /// Runs a script to its end, or to its timeout.
    pub(super) async fn run(&self, script: &str, timeouts: Timeouts) {
        let timed_out = |cause| Some(End { status: ExitStatus::Signal(SIGTERM), cause });
        let end = tokio::select! {
            end = self.walk(script) => end,
            () = sleep_for(timeouts.whole) => timed_out(EndCause::Timeout),
            () = self.silent_for(timeouts.idle) => timed_out(EndCause::IdleTimeout),
        };
        if let Some(end) = end {
            self.init.end_command(self.handle, end);
        }
    }

    /// Waits until the command has written nothing for this long. A full window does not count: then the command waits
    /// for the daemon.
    async fn silent_for(&self, length: Option<Duration>) {
        let Some(length) = length else { return std::future::pending().await };
        let mut heard = Instant::now();
        let mut written = 0;
        loop {
            tokio::time::sleep_until(heard + length).await;
            let output = self.init.change(self.handle, |command| (command.written(), command.is_held_up()));
            match output {
                Some((so_far, held_up)) if so_far > written || held_up => {
                    (heard, written) = (Instant::now(), so_far);
                }
                Some(_) | None => return,
            }
        }
    }

    /// A file operation.
    pub(super) async fn run_files(&self, operation: FileOp) {
        let done = async {
            let result = self.files(operation).await?;
            self.write(1, &result_bytes(&result)).await?;
            Ok(if result.is_ok() { 0 } else { 1 })
        };
        let end = match done.await {
            Ok(code) => End { status: ExitStatus::Code(code), cause: EndCause::Itself },
            Err(Interrupted::Dead) => return,
            Err(Interrupted::Killed) => End { status: ExitStatus::Signal(SIGKILL), cause: EndCause::Killed },
            Err(Interrupted::Signal(signal)) => {
                End { status: ExitStatus::Signal(signal), cause: EndCause::Itself }
            }
        };
        self.init.end_command(self.handle, end);
    }

    async fn files(&self, operation: FileOp) -> Result<Result<FileDone, FileError>, Interrupted> {
        if files::is_known(&operation) {
            return self.change_files(operation).await;
        }
        let path = match &operation {
            FileOp::Read { path, .. } | FileOp::Stat { path, .. } => path.clone(),
            FileOp::Write(options) => options.path.clone(),
            other => panic!("the fake init does not know how to {other:?}"),
        };
        let text = String::from_utf8_lossy(&path).into_owned();
        if text == "/hang" {
            self.init.until(self.handle, |_| None::<()>).await?;
        }
        let Some(size) = text.strip_prefix("/flood/").and_then(|size| size.parse::<u64>().ok()) else {
            let detail = String::new();
            return Ok(Err(FileError { kind: FileErrorKind::NotFound, path, detail }));
        };
        let stat = FileStat {
            kind: FileKind::File,
            size,
            mode: 0o644,
            uid: 0,
            gid: 0,
            inode: 1,
            links: 1,
            modified: Timestamp { seconds: 0, nanoseconds: 0 },
            target: None,
        };
        match operation {
            FileOp::Read { .. } => {
                let mut front = Vec::new();
                put_record(&Opened { stat, start: 0, length: Some(size) }, &mut front);
                self.write(0, &front).await?;
                self.flood(0, front.len() as u64, size).await?;
                Ok(Ok(FileDone::Sent { bytes: size, skipped: 0 }))
            }
            FileOp::Write(_) => {
                let mut at = 0;
                let mut last = None;
                while let Some(bytes) = self.input().await? {
                    for byte in bytes {
                        if let Some(before) = last.replace(byte) {
                            assert_eq!(before, pattern(at), "what arrives is what was sent, at {at}");
                            at += 1;
                        }
                    }
                }
                assert_eq!((at, last), (size, Some(COMMIT)), "all of it arrives");
                Ok(Ok(FileDone::Written { stat, created: true }))
            }
            _ => Ok(Ok(FileDone::Stat(stat))),
        }
    }

    async fn change_files(&self, operation: FileOp) -> Result<Result<FileDone, FileError>, Interrupted> {
        let mut input = Vec::new();
        if operation.takes_input() {
            while let Some(bytes) = self.input().await? {
                input.extend(bytes);
            }
            assert_eq!(input.pop(), Some(COMMIT), "all of it arrives");
        }
        let mut output = Vec::new();
        let result = {
            let mut state = self.host.state();
            let files = state.files.entry(self.sandbox).or_default();
            files::change(files, &operation, self.user.as_deref(), &input, &mut output)
        };
        self.write(0, &output).await?;
        Ok(result)
    }

    async fn walk(&self, script: &str) -> Option<End> {
        let itself = |status| Some(End { status, cause: EndCause::Itself });
        for statement in script.split([';', '\n']).map(str::trim).filter(|statement| !statement.is_empty()) {
            match self.statement(statement).await {
                Ok(None) => {}
                Ok(Some(status)) => return itself(status),
                Err(Interrupted::Dead) => return None,
                Err(Interrupted::Killed) => {
                    return Some(End { status: ExitStatus::Signal(SIGKILL), cause: EndCause::Killed });
                }
                Err(Interrupted::Signal(signal)) => return itself(ExitStatus::Signal(signal)),
            }
        }
        itself(ExitStatus::Code(0))
    }

    async fn statement(&self, statement: &str) -> Result<Option<ExitStatus>, Interrupted> {
        let (word, rest) = statement.split_once(' ').unwrap_or((statement, ""));
        let number = || rest.trim().parse::<u64>().expect("a number in the script");
        match word {
            "true" => {}
            "exec" => return Ok(Some(ExitStatus::Code(0))),
            "echo" => self.write(0, format!("{rest}\n").as_bytes()).await?,
            "err" => self.write(1, format!("{rest}\n").as_bytes()).await?,
            "flood" => self.flood(0, 0, number()).await?,
            "flooderr" => self.flood(1, 0, number()).await?,
            "cat" => self.cat().await?,
            "sleep" => {
                let sleep = tokio::time::sleep(Duration::from_millis(number()));
                tokio::select! {
                    () = sleep => {}
                    interrupted = self.init.until(self.handle, |_| None::<()>) => interrupted?,
                }
            }
            "gate" => self.gate(rest).await?,
            "exit" => return Ok(Some(ExitStatus::Code(number() as i32))),
            "signal" => return Ok(Some(ExitStatus::Signal(number() as i32))),
            "oom" | "oomchild" => {
                *self.host.state().oom_kills.entry(self.sandbox).or_default() += 1;
                if word == "oom" {
                    return Ok(Some(ExitStatus::Signal(SIGKILL)));
                }
            }
            "hang" => self.init.until(self.handle, |_| None).await?,
            unknown => panic!("the fake init does not know the word `{unknown}`"),
        }
        Ok(None)
    }

    async fn write(&self, stream: usize, mut bytes: &[u8]) -> Result<(), Interrupted> {
        while !bytes.is_empty() {
            let taken = self.room(stream).await?.min(bytes.len());
            self.init.change(self.handle, |command| command.output[stream].bytes.extend(&bytes[..taken]));
            bytes = &bytes[taken..];
        }
        Ok(())
    }

    async fn room(&self, stream: usize) -> Result<usize, Interrupted> {
        let room = |command: &mut Command| {
            Some(OUTPUT_WINDOW - command.output[stream].bytes.len()).filter(|room| *room > 0)
        };
        self.init.until(self.handle, room).await
    }

    /// `base`: where in the stream the pattern begins.
    async fn flood(&self, stream: usize, base: u64, length: u64) -> Result<(), Interrupted> {
        let stretch: Vec<u8> = (0..CHUNK_MAX as u64 + PATTERN_PERIOD).map(pattern).collect();
        let mut left = length;
        while left > 0 {
            let taken = left.min(self.room(stream).await? as u64).min(CHUNK_MAX as u64);
            self.init.change(self.handle, |command| {
                let output = &mut command.output[stream];
                let from = output.end();
                // The pattern repeats, so any long enough buffer contains the needed piece.
                let start = ((from - base) % PATTERN_PERIOD) as usize;
                output.bytes.extend(&stretch[start..start + taken as usize]);
            });
            left -= taken;
            tokio::task::yield_now().await;
        }
        Ok(())
    }

    async fn cat(&self) -> Result<(), Interrupted> {
        while let Some(bytes) = self.input().await? {
            self.write(0, &bytes).await?;
        }
        Ok(())
    }

    /// The next bytes of stdin, or `None` at its end.
    async fn input(&self) -> Result<Option<Vec<u8>>, Interrupted> {
        let next = |command: &mut Command| {
            if !command.stdin.is_empty() {
                let bytes: Vec<u8> = command.stdin.drain(..).collect();
                command.stdin_given += bytes.len() as u64;
                return Some(Some(bytes));
            }
            (command.stdin_end == Some(command.stdin_given)).then_some(None)
        };
        self.init.until(self.handle, next).await
    }

    async fn gate(&self, name: &str) -> Result<(), Interrupted> {
        loop {
            let gates = &self.init.gates;
            let mut changed = std::pin::pin!(gates.changed.notified());
            changed.as_mut().enable();
            if gates.is_open(name) {
                return Ok(());
            }
            tokio::select! {
                () = changed => {}
                interrupted = self.init.until(self.handle, |_| None::<()>) => interrupted?,
            }
        }
    }
}
