//! The digest that distinguishes two requests with the same command id.
//!
//! The digest is stored in the command's row and compared when a caller repeats a request, perhaps after an upgrade of
//! the daemon. So its input is defined here and nowhere else: a new field of the frame to init does not change the
//! digest. A field that is added here is omitted where a request does not have it, so that requests of older daemons
//! keep their digests.

use serde::Serialize;
use wire::guest::{Cwd, Program, Start};

use crate::model::check::digest;

/// The digest of a request.
pub(super) fn request_digest(start: &Start) -> [u8; 32] {
    digest(&Asked {
        handle: 0,
        id: &start.id,
        program: match &start.program {
            Program::Argv(argv) => AskedProgram::Argv(argv),
            Program::Shell { script } => AskedProgram::Shell { script },
            Program::Files(_) => unreachable!("a command is not a file operation"),
        },
        env: start.env.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect(),
        cwd: match &start.cwd {
            Cwd::Named(path) => AskedCwd::Named(path),
            Cwd::Default(path) => AskedCwd::Default(path),
        },
        user: start.user.as_deref(),
        stdin: start.stdin,
        terminal: start.terminal.map(|size| AskedTerminal { rows: size.rows, columns: size.columns }),
        timeout_ms: start.timeout_ms,
        idle_timeout_ms: start.idle_timeout_ms,
        grace_ms: start.grace_ms,
    })
}

/// The names, order and spelling of all fields go into the digest.
#[derive(Serialize)]
struct Asked<'a> {
    /// Always 0, as it was when the first digests were written.
    handle: u32,
    id: &'a str,
    program: AskedProgram<'a>,
    env: Vec<(&'a str, &'a str)>,
    cwd: AskedCwd<'a>,
    user: Option<&'a str>,
    stdin: bool,
    terminal: Option<AskedTerminal>,
    timeout_ms: Option<u64>,
    idle_timeout_ms: Option<u64>,
    grace_ms: u64,
}

#[derive(Serialize)]
enum AskedProgram<'a> {
    Argv(&'a [String]),
    Shell { script: &'a str },
}

#[derive(Serialize)]
enum AskedCwd<'a> {
    Named(&'a str),
    Default(&'a str),
}

#[derive(Serialize)]
struct AskedTerminal {
    rows: u16,
    columns: u16,
}

#[cfg(test)]
mod tests {
    use wire::guest::{Handle, TerminalSize};

    use super::*;

    fn hex(bytes: [u8; 32]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Running daemons have these values in their rows, so they must never change.
    #[test]
    fn the_digest_of_a_request_is_the_same_in_every_version() {
        let script = Start {
            env: vec![("A".into(), "1".into())],
            cwd: Cwd::Default("/workspace".into()),
            grace_ms: 5000,
            ..Start::shell(Handle(0), "cmd_exited", "echo hello; err oops; exit 3")
        };
        assert_eq!(
            hex(request_digest(&script)),
            "aeed411cf154e8451d1b66d886395a7758e18e20517c10afaec331a2a0d3c723"
        );
        let program = Start {
            program: Program::Argv(vec!["/bin/echo".into(), "\"quoted\"".into()]),
            env: vec![("A".into(), "1".into()), ("PATH".into(), "/bin".into())],
            cwd: Cwd::Named("/tmp".into()),
            user: Some("1000:1000".into()),
            stdin: true,
            terminal: Some(TerminalSize { rows: 24, columns: 80 }),
            timeout_ms: Some(1500),
            ..Start::shell(Handle(7), "cmd_1", "")
        };
        assert_eq!(
            hex(request_digest(&program)),
            "a4098e7518c0c77ffac05dacc30ba6764bddbf3906c464c97209c27a28e9a92d"
        );
    }
}
