//! Open files of the older clients (`Sandbox.open`, `ls`, `mkdir`, `rm`): each step is a call that does it, and a second that
//! reads its output.
//!
//! What a step has come to is in the id that the first call returns, so nothing is kept of it; bytes of a file are read by
//! the second call. Where an open file stands is a note of the sandbox, one for each.

use std::collections::VecDeque;

use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use engine::files::Reading;
use engine::{CommandSpec, EngineError, Field, Files, NoteChanges, Program, SandboxUpdate};
use futures_util::stream;
use serde::{Deserialize, Serialize};
use serde_json::json;
use wire::SandboxId;
use wire::files::{ByteRange, Condition, FileErrorKind, FileKind, LIST_MAX, Links, WriteOptions};

use super::grpc::{self, Status};
use super::messages::*;
use super::names::{self, Kept};
use super::{Call, commands};

/// The beginning of the keys of the notes of open files.
const NOTE: &str = "modal.fd.";
/// The most open files of one sandbox.
const OPEN_MAX: usize = 256;
/// How much is looked at for the end of a line.
const LINE_MAX: u64 = 1 << 20;
/// The most entries of one list.
const ENTRIES_MAX: usize = 50_000;

/// The kernel's numbers for errors, which clients map to exceptions.
mod errno {
    pub const PERMISSION: i32 = 1;
    pub const NOT_FOUND: i32 = 2;
    pub const BAD_DESCRIPTOR: i32 = 22;
    pub const EXISTS: i32 = 17;
    pub const NOT_A_DIRECTORY: i32 = 20;
    pub const IS_A_DIRECTORY: i32 = 21;
    pub const INVALID: i32 = 22;
    pub const TOO_MANY: i32 = 24;
    pub const NO_SPACE: i32 = 28;
    pub const IO: i32 = 5;
}

/// What a step has come to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Step {
    sandbox: String,
    result: Outcome,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
enum Outcome {
    Done,
    Failed { code: i32, message: String },
    Read { path: String, start: u64, end: u64 },
    Listed { path: String },
}

impl Kept for Step {
    const PREFIX: &'static str = "fe-";
    const WORD: &'static str = "Exec";
}

/// An open file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OpenFile {
    path: String,
    /// Where the next byte is read or written.
    at: u64,
    readable: bool,
    writable: bool,
}

/// A failure of a step, which the second call reports.
struct Failure {
    code: i32,
    message: String,
}

impl Failure {
    fn new(code: i32, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        let code = match &error {
            EngineError::File { source } => match source.kind {
                FileErrorKind::NotFound => errno::NOT_FOUND,
                FileErrorKind::PermissionDenied | FileErrorKind::ReadOnly => errno::PERMISSION,
                FileErrorKind::IsDirectory => errno::IS_A_DIRECTORY,
                FileErrorKind::NotADirectory => errno::NOT_A_DIRECTORY,
                FileErrorKind::AlreadyExists | FileErrorKind::ConditionFailed => errno::EXISTS,
                FileErrorKind::NoSpace => errno::NO_SPACE,
                FileErrorKind::InvalidPath => errno::INVALID,
                _ => errno::IO,
            },
            _ => errno::IO,
        };
        Self::new(code, error.to_string())
    }
}

/// The first call of a step.
pub async fn exec(call: &Call, wish: FilesystemExecRequest) -> Result<FilesystemExecResponse, Status> {
    let id = names::parse_task(&wish.task_id)?;
    let files = call.app.engine.files(&call.key.owner, id, None)?;
    let place = Place { call, id, files };
    let mut descriptor = None;
    let result = place.step(wish, &mut descriptor).await.unwrap_or_else(|Failure { code, message }| {
        Outcome::Failed { code, message: names::shown(&message) }
    });
    let step = Step { sandbox: id.to_string(), result };
    Ok(FilesystemExecResponse {
        exec_id: names::keep(&call.app.engine, &call.key, &step),
        file_descriptor: descriptor,
    })
}

struct Place<'a> {
    call: &'a Call,
    id: SandboxId,
    files: Files,
}

impl Place<'_> {
    async fn step(
        &self,
        wish: FilesystemExecRequest,
        descriptor: &mut Option<String>,
    ) -> Result<Outcome, Failure> {
        if let Some(open) = wish.open {
            // Clients need one even for a file that cannot be opened.
            let name = format!(
                "{:016x}",
                getrandom::u64().map_err(|error| Failure::new(errno::IO, error.to_string()))?
            );
            *descriptor = Some(name.clone());
            let file = self.open(&open.path, &open.mode).await?;
            self.note(&name, Some(&file)).await?;
            return Ok(Outcome::Done);
        }
        if let Some(write) = wish.write {
            let mut file = self.opened(&write.file_descriptor).await?;
            let length = write.data.len() as u64;
            self.write(&file, write.data).await?;
            file.at += length;
            self.note(&write.file_descriptor, Some(&file)).await?;
            return Ok(Outcome::Done);
        }
        if let Some(read) = wish.read {
            let file = self.readable(&read.file_descriptor).await?;
            let end = read.n.map_or(u64::MAX, |length| file.at.saturating_add(u64::from(length)));
            return self.read(&read.file_descriptor, file, end).await;
        }
        if let Some(line) = wish.read_line {
            let file = self.readable(&line.file_descriptor).await?;
            let end = self.line_end(&file).await?;
            return self.read(&line.file_descriptor, file, end).await;
        }
        if let Some(seek) = wish.seek {
            let mut file = self.opened(&seek.file_descriptor).await?;
            let from = match seek.whence {
                0 => 0,
                1 => file.at,
                2 => self.size(&file).await?,
                _ => return Err(Failure::new(errno::INVALID, "`whence` must be 0, 1 or 2")),
            };
            let at = from.checked_add_signed(i64::from(seek.offset));
            file.at =
                at.ok_or_else(|| Failure::new(errno::INVALID, "a file has no bytes before its first"))?;
            self.note(&seek.file_descriptor, Some(&file)).await?;
            return Ok(Outcome::Done);
        }
        if let Some(flush) = wish.flush {
            self.opened(&flush.file_descriptor).await?;
            return Ok(Outcome::Done);
        }
        if let Some(close) = wish.close {
            self.note(&close.file_descriptor, None).await?;
            return Ok(Outcome::Done);
        }
        if let Some(ls) = wish.ls {
            self.files.list(ls.path.as_bytes(), b"", 1).await?;
            return Ok(Outcome::Listed { path: ls.path });
        }
        if let Some(mkdir) = wish.mkdir {
            self.files.make_directory(mkdir.path.as_bytes(), mkdir.make_parents, None).await?;
            return Ok(Outcome::Done);
        }
        if let Some(rm) = wish.rm {
            self.files.remove(rm.path.as_bytes(), rm.recursive, Condition::None).await?;
            return Ok(Outcome::Done);
        }
        Err(Failure::new(errno::INVALID, "this server does not do this to files for this client"))
    }

    async fn open(&self, path: &str, mode: &str) -> Result<OpenFile, Failure> {
        let kind = mode.chars().find(|letter| "rwax".contains(*letter));
        let kind =
            kind.ok_or_else(|| Failure::new(errno::INVALID, format!("`{}` is no mode", names::shown(mode))))?;
        let both = mode.contains('+');
        let file = |at| OpenFile {
            path: path.to_owned(),
            at,
            readable: kind == 'r' || both,
            writable: kind != 'r' || both,
        };
        let stat = self.files.stat(path.as_bytes(), Links::Follow).await;
        if let Ok(stat) = &stat
            && stat.kind == FileKind::Directory
        {
            return Err(Failure::new(
                errno::IS_A_DIRECTORY,
                format!("`{}` is a directory", names::shown(path)),
            ));
        }
        match (kind, stat) {
            ('r', Ok(_)) => Ok(file(0)),
            ('a', Ok(stat)) => Ok(file(stat.size)),
            ('r', Err(error)) => Err(error.into()),
            ('x', Ok(_)) => {
                Err(Failure::new(errno::EXISTS, format!("`{}` exists already", names::shown(path))))
            }
            ('w', Ok(_)) => self.whole(path, Bytes::new()).await.map(|()| file(0)),
            (_, Ok(_)) => Ok(file(0)),
            (_, Err(EngineError::File { source })) if source.kind == FileErrorKind::NotFound => {
                self.whole(path, Bytes::new()).await.map(|()| file(0))
            }
            (_, Err(error)) => Err(error.into()),
        }
    }

    /// Writes a whole file, with the directories above it.
    async fn whole(&self, path: &str, data: Bytes) -> Result<(), Failure> {
        let options = WriteOptions {
            path: path.into(),
            mode: None,
            parents: true,
            size: Some(data.len() as u64),
            condition: Condition::None,
        };
        let mut writing = self.files.write(options).await?;
        if !data.is_empty() {
            writing.write(data).await?;
        }
        writing.finish().await?;
        Ok(())
    }

    async fn size(&self, file: &OpenFile) -> Result<u64, Failure> {
        Ok(self.files.stat(file.path.as_bytes(), Links::Follow).await?.size)
    }

    /// Writes where the file stands: all of it, or behind its end. The engine writes files whole, so that a program of the
    /// guest does the latter.
    async fn write(&self, file: &OpenFile, data: Bytes) -> Result<(), Failure> {
        if !file.writable {
            return Err(Failure::new(errno::BAD_DESCRIPTOR, "the file is not open for writing"));
        }
        match (file.at, self.size(file).await?) {
            (0, 0) => self.whole(&file.path, data).await,
            (at, size) if at == size => self.append(&file.path, data).await,
            _ => Err(Failure::new(
                errno::INVALID,
                "this server writes at the end of a file, not in its middle",
            )),
        }
    }

    async fn append(&self, path: &str, data: Bytes) -> Result<(), Failure> {
        let argv = ["/bin/sh", "-c", "cat >> \"$1\"", "sh", path].map(str::to_owned).to_vec();
        let program = Program::argv(argv).map_err(|must| Failure::from(must.of(Field::Path)))?;
        let spec = CommandSpec { stdin: true, ..CommandSpec::new(program) };
        let command = self.call.app.engine.run(&self.call.key.owner, self.id, spec).await?;
        let given = commands::give(&command, Some(0), data, true).await;
        given.map_err(|status| Failure::new(errno::IO, status.message()))?;
        match command.ended().await.state {
            engine::CommandState::Ended { outcome: engine::Outcome::Exited(0), .. } => Ok(()),
            _ => Err(Failure::new(errno::IO, format!("`{}` cannot be written", names::shown(path)))),
        }
    }

    /// The bytes up to `end`, which the second call sends.
    async fn read(&self, name: &str, mut file: OpenFile, end: u64) -> Result<Outcome, Failure> {
        let end = end.min(self.size(&file).await?).max(file.at);
        let read = Outcome::Read { path: file.path.clone(), start: file.at, end };
        file.at = end;
        self.note(name, Some(&file)).await?;
        Ok(read)
    }

    /// The offset behind the line that begins where the file stands.
    async fn line_end(&self, file: &OpenFile) -> Result<u64, Failure> {
        let size = self.size(file).await?;
        if file.at >= size {
            return Ok(file.at);
        }
        let range = ByteRange::Span { start: file.at, end: Some(size.min(file.at + LINE_MAX)) };
        let mut reading = self.files.read(file.path.as_bytes(), range).await?;
        let mut at = file.at;
        while let Some(bytes) = reading.next().await? {
            if let Some(found) = bytes.iter().position(|byte| *byte == b'\n') {
                return Ok(at + found as u64 + 1);
            }
            at += bytes.len() as u64;
        }
        Ok(at)
    }

    async fn opened(&self, name: &str) -> Result<OpenFile, Failure> {
        let sandbox = self.call.app.engine.get(&self.call.key.owner, self.id).await?;
        let note =
            sandbox.notes.get(&format!("{NOTE}{name}")).and_then(|text| serde_json::from_str(text).ok());
        note.ok_or_else(|| Failure::new(errno::BAD_DESCRIPTOR, "the file is not open"))
    }

    async fn readable(&self, name: &str) -> Result<OpenFile, Failure> {
        match self.opened(name).await? {
            file if file.readable => Ok(file),
            _ => Err(Failure::new(errno::BAD_DESCRIPTOR, "the file is not open for reading")),
        }
    }

    /// Keeps where an open file stands, or that it is closed.
    async fn note(&self, name: &str, file: Option<&OpenFile>) -> Result<(), Failure> {
        let (engine, owner) = (&self.call.app.engine, &self.call.key.owner);
        if file.is_some() {
            let sandbox = engine.get(owner, self.id).await?;
            let open = sandbox.notes.pairs().keys().filter(|key| key.starts_with(NOTE)).count();
            if open >= OPEN_MAX {
                return Err(Failure::new(errno::TOO_MANY, format!("{OPEN_MAX} files are open")));
            }
        }
        let text = file.map(|file| {
            serde_json::to_string(file).expect("an open file is made of types that JSON can write")
        });
        let notes = NoteChanges([(format!("{NOTE}{name}"), text)].into());
        engine.update(owner, self.id, SandboxUpdate { notes, ..SandboxUpdate::default() }).await?;
        Ok(())
    }
}

/// The second call of a step. Its last message says no more than that, since clients look at nothing else in it.
pub async fn output(call: Call, request: Request) -> Result<Response, Status> {
    let wish: FilesystemOutputRequest = grpc::read(request, &call.app).await?;
    let step: Step = names::kept(&call.app.engine, &call.key, &wish.exec_id)?;
    let id: SandboxId = step.sandbox.parse().map_err(|_| Status::bug())?;
    let mut error = None;
    let mut ahead = VecDeque::new();
    let mut reading = None;
    match step.result {
        Outcome::Done => {}
        Outcome::Failed { code, message } => {
            error = Some(SystemError { error_code: code, error_message: message });
        }
        Outcome::Read { start, end, .. } if start >= end => {}
        Outcome::Read { path, start, end } => {
            let files = call.app.engine.files(&call.key.owner, id, None)?;
            let range = ByteRange::Span { start, end: Some(end) };
            match files.read(path.as_bytes(), range).await {
                Ok(opened) => reading = Some(opened),
                Err(failed) => error = Some(system_error(failed)),
            }
        }
        Outcome::Listed { path } => {
            let files = call.app.engine.files(&call.key.owner, id, None)?;
            match listed(&files, &path).await {
                Ok(text) => ahead.push_back(Bytes::from(text)),
                Err(failed) => error = Some(system_error(failed)),
            }
        }
    }
    let sending = Sending { ahead, reading, error, ended: false, stopping: call.app.stopping(&call.key) };
    Ok(grpc::many(stream::unfold(sending, async |mut sending| {
        let message = sending.next().await?;
        Some((message, sending))
    })))
}

fn system_error(error: EngineError) -> SystemError {
    let Failure { code, message } = error.into();
    SystemError { error_code: code, error_message: message }
}

struct Sending {
    ahead: VecDeque<Bytes>,
    reading: Option<Reading>,
    /// Sent in a message of its own.
    error: Option<SystemError>,
    ended: bool,
    stopping: crate::http::app::Stopping,
}

impl Sending {
    async fn next(&mut self) -> Option<Result<Bytes, Status>> {
        let piece = |bytes: Bytes| {
            Some(Ok(grpc::framed(&FilesystemOutput { output: vec![bytes], ..FilesystemOutput::default() })))
        };
        if let Some(bytes) = self.ahead.pop_front() {
            return piece(bytes);
        }
        if let Some(reading) = &mut self.reading {
            let next = tokio::select! {
                next = reading.next() => next,
                halt = self.stopping.wait() => {
                    self.ended = true;
                    return Some(Err(crate::http::error::ApiError::from(halt).into()));
                }
            };
            match next {
                Ok(Some(bytes)) => return piece(bytes),
                Ok(None) => self.reading = None,
                Err(error) => {
                    self.reading = None;
                    self.error = Some(system_error(error));
                }
            }
        }
        if self.ended {
            return None;
        }
        let error = self.error.take();
        self.ended = error.is_none();
        Some(Ok(grpc::framed(&FilesystemOutput { eof: self.ended, error, ..FilesystemOutput::default() })))
    }
}

async fn listed(files: &Files, path: &str) -> Result<String, EngineError> {
    let mut paths: Vec<String> = Vec::new();
    let mut after = Vec::new();
    loop {
        let listing = files.list(path.as_bytes(), &after, LIST_MAX).await?;
        paths.extend(listing.entries.iter().map(|entry| String::from_utf8_lossy(&entry.name).into_owned()));
        if paths.len() > ENTRIES_MAX {
            return Err(Field::Path.must(format!("lead to at most {ENTRIES_MAX} entries")));
        }
        match listing.entries.into_iter().next_back() {
            Some(last) if listing.more => after = last.name,
            _ => return Ok(json!({"paths": paths}).to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use wire::files::FileError;

    use super::*;

    #[test]
    fn clients_get_the_kernels_numbers() {
        let failed = |kind| {
            let source = FileError { kind, path: b"/x".to_vec(), detail: String::new() };
            Failure::from(EngineError::File { source }).code
        };
        assert_eq!(failed(FileErrorKind::NotFound), 2);
        assert_eq!(failed(FileErrorKind::IsDirectory), 21);
        assert_eq!(failed(FileErrorKind::PermissionDenied), 1);
    }
}
