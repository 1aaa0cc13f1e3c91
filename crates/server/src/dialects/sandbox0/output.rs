//! What a command has written, and how it ended, as clients read it.

use engine::{Command, CommandRef, CommandState, Offsets, Outcome, OutputEvent};
use serde_json::{Value, json};
use wire::guest::{ExitStatus, Stream};

use super::names::{self, Kind};
use super::repl::{Filter, Piece};
use crate::http::clock::rfc3339;

/// The last of each stream that an answer has. Those who expect more open a stream.
const ANSWER_OUTPUT_MAX: u64 = 16 << 20;
/// What a program that a signal has ended exits with, as the vendor has it.
const EXIT_BY_SIGNAL: i32 = -1;
/// What a program exits with whose time was over.
const EXIT_TIMED_OUT: i32 = 124;
/// What a program exits with that the machine has ended.
const EXIT_KILLED: i32 = 137;
/// What a program exits with that did not start.
const EXIT_NOT_STARTED: i32 = 127;

/// How a command ended: its exit code, and the word for it.
pub fn end(outcome: &Outcome) -> (i32, &'static str) {
    match outcome {
        Outcome::Exited(0) => (0, "stopped"),
        Outcome::Exited(code) => (*code, "crashed"),
        Outcome::Signaled(_) => (EXIT_BY_SIGNAL, "killed"),
        Outcome::Killed(ExitStatus::Code(code)) if *code != 0 => (*code, "killed"),
        Outcome::Killed(_) => (EXIT_BY_SIGNAL, "killed"),
        Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => {
            (EXIT_TIMED_OUT, "killed")
        }
        Outcome::OutOfMemory(_) | Outcome::SandboxGone => (EXIT_KILLED, "killed"),
        Outcome::FailedToStart(_) => (EXIT_NOT_STARTED, "crashed"),
    }
}

/// A context as clients see it, without its output.
pub fn show(command: &Command, frozen: bool) -> Value {
    let id = names::context(command.id.as_str());
    let kind = names::kind(id);
    let running = !matches!(command.state, CommandState::Ended { .. });
    let mut body = json!({
        "id": id,
        "type": if kind == Kind::Cmd { "cmd" } else { "repl" },
        "running": running,
        "paused": frozen && running,
        "created_at": rfc3339(command.created_at),
        "state": "running",
    });
    if let wire::guest::Cwd::Named(cwd) = &command.start.cwd {
        body["cwd"] = cwd.as_str().into();
    }
    if let Kind::Repl(alias) = kind {
        body["alias"] = alias.into();
    }
    match &command.state {
        CommandState::Starting => body["state"] = "starting".into(),
        CommandState::Running { .. } if frozen => body["state"] = "paused".into(),
        CommandState::Running { .. } => {}
        CommandState::Ended { outcome, .. } => {
            let (code, state) = end(outcome);
            (body["exit_code"], body["state"]) = (code.into(), state.into());
        }
    }
    body
}

/// A context with the last of what it has written so far.
pub async fn show_with_output(command: &CommandRef) -> Value {
    let now = command.now();
    let mut body = show(&now, false);
    let Written { stdout, stderr } = written(command).await;
    let terminal = now.start.terminal.is_some();
    if names::kind(now.id.as_str()) != Kind::Cmd || terminal {
        body["output_raw"] = without_marks(&stdout).into();
        return body;
    }
    body["output_raw"] = format!("{stdout}{stderr}").into();
    (body["stdout"], body["stderr"]) = (stdout.into(), stderr.into());
    body
}

struct Written {
    stdout: String,
    stderr: String,
}

/// The last of each stream, up to now. What is no text is replaced.
async fn written(command: &CommandRef) -> Written {
    let now = command.now();
    let from = |end: u64| end.saturating_sub(ANSWER_OUTPUT_MAX);
    let mut output = command.attach(Offsets { stdout: from(now.stdout.end), stderr: from(now.stderr.end) });
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let (mut stdout_at, mut stderr_at) = (from(now.stdout.end), from(now.stderr.end));
    // A command that goes on writing is read up to where it was.
    while stdout_at < now.stdout.end || stderr_at < now.stderr.end {
        match output.next().await {
            Some(OutputEvent::Bytes { stream: Stream::Stderr, bytes, offset }) => {
                stderr_at = offset + bytes.len() as u64;
                stderr.extend_from_slice(&bytes);
            }
            Some(OutputEvent::Bytes { bytes, offset, .. }) => {
                stdout_at = offset + bytes.len() as u64;
                stdout.extend_from_slice(&bytes);
            }
            Some(OutputEvent::Lost { stream: Stream::Stderr, to, .. }) => stderr_at = to,
            Some(OutputEvent::Lost { to, .. }) => stdout_at = to,
            Some(OutputEvent::Started { .. } | OutputEvent::StdinAck { .. }) => {}
            Some(OutputEvent::Ended(_) | OutputEvent::Stalled) | None => break,
        }
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    Written { stdout: text(stdout), stderr: text(stderr) }
}

/// The output of an interpreter without the marks around each answer.
fn without_marks(text: &str) -> String {
    let mut filter = Filter::default();
    let pieces = filter.take(text).into_iter().chain(filter.end());
    pieces.filter_map(|piece| if let Piece::Text(text) = piece { Some(text) } else { None }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ends_have_the_vendors_words() {
        assert_eq!(end(&Outcome::Exited(0)), (0, "stopped"));
        assert_eq!(end(&Outcome::Exited(3)), (3, "crashed"));
        assert_eq!(end(&Outcome::Signaled(9)), (-1, "killed"));
        assert_eq!(end(&Outcome::Killed(ExitStatus::Signal(9))), (-1, "killed"));
        assert_eq!(end(&Outcome::TimedOut(ExitStatus::Code(0))), (124, "killed"));
        assert_eq!(end(&Outcome::SandboxGone), (137, "killed"));
    }
}
