//! The request of a command, and the reason why it could not start, as stored in the command's row.
//!
//! These are the columns `start` and `start_error`, in JSON. They began as the frames to and from init, but are
//! separate from them now: a frame may change with the protocol, and rows of older daemons must stay readable.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use wire::guest::{Cwd, Handle, Program, Start, StartError, TerminalSize};

/// The column `start`.
#[derive(Serialize, Deserialize)]
pub(super) struct StartRecord<'a> {
    handle: u32,
    id: Cow<'a, str>,
    program: ProgramRecord<'a>,
    env: Cow<'a, [(String, String)]>,
    cwd: CwdRecord<'a>,
    user: Option<Cow<'a, str>>,
    stdin: bool,
    terminal: Option<TerminalRecord>,
    timeout_ms: Option<u64>,
    idle_timeout_ms: Option<u64>,
    grace_ms: u64,
}

#[derive(Serialize, Deserialize)]
enum ProgramRecord<'a> {
    Argv(Cow<'a, [String]>),
    Shell { script: Cow<'a, str> },
}

#[derive(Serialize, Deserialize)]
enum CwdRecord<'a> {
    Named(Cow<'a, str>),
    Default(Cow<'a, str>),
}

#[derive(Serialize, Deserialize)]
struct TerminalRecord {
    rows: u16,
    columns: u16,
}

impl<'a> StartRecord<'a> {
    pub(super) fn of(start: &'a Start) -> Self {
        Self {
            handle: start.handle.0,
            id: Cow::Borrowed(&start.id),
            program: match &start.program {
                Program::Argv(argv) => ProgramRecord::Argv(Cow::Borrowed(argv)),
                Program::Shell { script } => ProgramRecord::Shell { script: Cow::Borrowed(script) },
                Program::Files(_) => unreachable!("file operations have no rows"),
            },
            env: Cow::Borrowed(&start.env),
            cwd: match &start.cwd {
                Cwd::Named(path) => CwdRecord::Named(Cow::Borrowed(path)),
                Cwd::Default(path) => CwdRecord::Default(Cow::Borrowed(path)),
            },
            user: start.user.as_deref().map(Cow::Borrowed),
            stdin: start.stdin,
            terminal: start.terminal.map(|size| TerminalRecord { rows: size.rows, columns: size.columns }),
            timeout_ms: start.timeout_ms,
            idle_timeout_ms: start.idle_timeout_ms,
            grace_ms: start.grace_ms,
        }
    }

    pub(super) fn into_start(self) -> Start {
        Start {
            handle: Handle(self.handle),
            id: self.id.into_owned(),
            program: match self.program {
                ProgramRecord::Argv(argv) => Program::Argv(argv.into_owned()),
                ProgramRecord::Shell { script } => Program::Shell { script: script.into_owned() },
            },
            env: self.env.into_owned(),
            cwd: match self.cwd {
                CwdRecord::Named(path) => Cwd::Named(path.into_owned()),
                CwdRecord::Default(path) => Cwd::Default(path.into_owned()),
            },
            user: self.user.map(Cow::into_owned),
            stdin: self.stdin,
            terminal: self.terminal.map(|size| TerminalSize { rows: size.rows, columns: size.columns }),
            timeout_ms: self.timeout_ms,
            idle_timeout_ms: self.idle_timeout_ms,
            grace_ms: self.grace_ms,
        }
    }
}

/// The column `start_error`.
#[derive(Serialize, Deserialize)]
pub(super) enum StartErrorRecord {
    ProgramNotFound { program: String },
    NotExecutable { program: String, reason: String },
    ArgumentsTooLong,
    BadCwd { path: String, reason: String },
    UnknownUser { user: String },
    NulByte { what: String },
    NoRoom { reason: String },
}

impl From<StartError> for StartErrorRecord {
    fn from(error: StartError) -> Self {
        match error {
            StartError::ProgramNotFound { program } => Self::ProgramNotFound { program },
            StartError::NotExecutable { program, reason } => Self::NotExecutable { program, reason },
            StartError::ArgumentsTooLong => Self::ArgumentsTooLong,
            StartError::BadCwd { path, reason } => Self::BadCwd { path, reason },
            StartError::UnknownUser { user } => Self::UnknownUser { user },
            StartError::NulByte { what } => Self::NulByte { what },
            StartError::NoRoom { reason } => Self::NoRoom { reason },
        }
    }
}

impl From<StartErrorRecord> for StartError {
    fn from(record: StartErrorRecord) -> Self {
        match record {
            StartErrorRecord::ProgramNotFound { program } => Self::ProgramNotFound { program },
            StartErrorRecord::NotExecutable { program, reason } => Self::NotExecutable { program, reason },
            StartErrorRecord::ArgumentsTooLong => Self::ArgumentsTooLong,
            StartErrorRecord::BadCwd { path, reason } => Self::BadCwd { path, reason },
            StartErrorRecord::UnknownUser { user } => Self::UnknownUser { user },
            StartErrorRecord::NulByte { what } => Self::NulByte { what },
            StartErrorRecord::NoRoom { reason } => Self::NoRoom { reason },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A value from the rows of running daemons.
    const SCRIPT: &str = r#"{"handle":1,"id":"cmd_exited","program":{"Shell":{"script":"echo hello"}},"env":[["A","1"]],"cwd":{"Default":"/workspace"},"user":null,"stdin":false,"terminal":null,"timeout_ms":null,"idle_timeout_ms":null,"grace_ms":5000}"#;
    const PROGRAM: &str = r#"{"handle":7,"id":"cmd_1","program":{"Argv":["/bin/echo","\"x\""]},"env":[],"cwd":{"Named":"/tmp"},"user":"1000:1000","stdin":true,"terminal":{"rows":24,"columns":80},"timeout_ms":1500,"idle_timeout_ms":3,"grace_ms":2000}"#;

    #[test]
    fn the_column_is_the_same_in_every_version() {
        for text in [SCRIPT, PROGRAM] {
            let start = serde_json::from_str::<StartRecord>(text).expect(text).into_start();
            assert_eq!(serde_json::to_string(&StartRecord::of(&start)).expect("JSON"), text);
        }
    }

    #[test]
    fn the_reasons_of_failed_starts_are_the_same_in_every_version() {
        for text in [
            r#"{"ProgramNotFound":{"program":"nope"}}"#,
            r#"{"NotExecutable":{"program":"x","reason":"y"}}"#,
            r#""ArgumentsTooLong""#,
            r#"{"BadCwd":{"path":"/x","reason":"y"}}"#,
            r#"{"UnknownUser":{"user":"x"}}"#,
            r#"{"NulByte":{"what":"x"}}"#,
            r#"{"NoRoom":{"reason":"x"}}"#,
        ] {
            let error = StartError::from(serde_json::from_str::<StartErrorRecord>(text).expect(text));
            assert_eq!(serde_json::to_string(&StartErrorRecord::from(error)).expect("JSON"), text);
        }
    }
}
