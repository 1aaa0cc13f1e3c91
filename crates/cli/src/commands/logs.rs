//! `shoal logs`: what a command has written, and what it goes on to write.

use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use client::{Client, Offsets, SandboxId, StreamEvent, api};

use crate::args::Logs;
use crate::commands::command;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::report::{self, hinted};
use crate::output::{age, print};
use crate::terminal::pipes::Pipe;

/// How far back the last lines of a stream are looked for.
const TAIL_MAX: u64 = 1 << 20;

/// `shoal logs`
pub async fn logs(arguments: Logs, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?.id;
    if let Some(since) = arguments.since {
        let mut commands = client.commands(sandbox).await?;
        commands.retain(|command| age::is_within(&command.created_at, since));
        for command in commands {
            let program = command::program(&command);
            print::line(&format!(
                "==> {} {} <==",
                print::short_id(&command.id.to_string()),
                print::plain(&program)
            ))?;
            if !show(&client, sandbox, command, &arguments, environment).await? {
                break;
            }
        }
        return Ok(0);
    }
    let command = match &arguments.command {
        Some(text) => find::command(&client, sandbox, text).await?,
        None => match client.commands(sandbox).await?.pop() {
            Some(command) => command,
            None => return Err(hinted("the sandbox has no commands", "run one with `shoal run --sandbox`")),
        },
    };
    show(&client, sandbox, command, &arguments, environment).await?;
    Ok(0)
}

/// Shows the output of one command, and returns whether someone still reads.
async fn show(
    client: &Client,
    sandbox: SandboxId,
    command: api::Command,
    arguments: &Logs,
    environment: &Environment,
) -> anyhow::Result<bool> {
    let until =
        (!arguments.follow).then_some(Offsets { stdout: command.stdout.end, stderr: command.stderr.end });
    let before = Offsets { stdout: command.stdout.end, stderr: command.stderr.end };
    let mut seen = Offsets { stdout: command.stdout.start, stderr: command.stderr.start };
    // Of what was written before, the last lines alone are wanted: held back until all of it is here.
    let mut tail = arguments.tail.map(|lines| Tail { lines, held: Vec::new() });
    if tail.is_some() {
        seen.stdout = seen.stdout.max(before.stdout.saturating_sub(TAIL_MAX));
        seen.stderr = seen.stderr.max(before.stderr.saturating_sub(TAIL_MAX));
    }
    for (name, start) in [("stdout", seen.stdout), ("stderr", seen.stderr)] {
        if start > 0 && tail.is_none() {
            report::warning(&format!("the first {start} bytes of {name} were dropped"), environment.colour);
        }
    }
    let mut stream = client.attach(sandbox, command.id, seen);
    let mut pipes = Pipes { stdout: Pipe::stdout(), stderr: Pipe::stderr(), json: arguments.json };
    while !until.is_some_and(|until| seen.stdout >= until.stdout && seen.stderr >= until.stderr) {
        match stream.next().await.transpose()? {
            Some(StreamEvent::Output { stream, offset, bytes }) => {
                let (at, until) = match stream {
                    api::OutputStream::Stdout => (&mut seen.stdout, until.map(|u| u.stdout)),
                    api::OutputStream::Stderr => (&mut seen.stderr, until.map(|u| u.stderr)),
                };
                // What was written after we asked is for those who follow.
                let wanted = until.map_or(u64::MAX, |until| until.saturating_sub(offset));
                let bytes = bytes.slice(..bytes.len().min(usize::try_from(wanted).unwrap_or(usize::MAX)));
                *at = offset + bytes.len() as u64;
                let piece = Piece { stream, offset, bytes };
                let pieces = match &mut tail {
                    None => vec![piece],
                    Some(held) => {
                        held.held.push(piece);
                        let complete = seen.stdout >= before.stdout && seen.stderr >= before.stderr;
                        if complete { tail.take().map(Tail::last).unwrap_or_default() } else { Vec::new() }
                    }
                };
                if !pipes.write(pieces).await? {
                    return Ok(false);
                }
            }
            Some(StreamEvent::Lost { stream, from, to }) => {
                match stream {
                    api::OutputStream::Stdout => seen.stdout = to,
                    api::OutputStream::Stderr => seen.stderr = to,
                }
                report::warning(&format!("{} bytes were dropped", to - from), environment.colour);
            }
            Some(StreamEvent::Command(_) | StreamEvent::Refused(_)) => {}
            Some(StreamEvent::Ended(_)) | None => break,
        }
    }
    pipes.write(tail.map(Tail::last).unwrap_or_default()).await?;
    let read = still_read(pipes.stdout.finish().await)?;
    Ok(still_read(pipes.stderr.finish().await)? && read)
}

/// Output of a command.
#[derive(Debug, PartialEq)]
struct Piece {
    stream: api::OutputStream,
    offset: u64,
    bytes: Bytes,
}

/// Where output goes.
struct Pipes {
    stdout: Pipe,
    stderr: Pipe,
    json: bool,
}

impl Pipes {
    /// Writes, and says whether someone still reads.
    async fn write(&mut self, pieces: Vec<Piece>) -> anyhow::Result<bool> {
        for Piece { stream, offset, bytes } in pieces {
            let written = match (self.json, stream) {
                (true, _) => self.stdout.write(as_json(stream, offset, &bytes)?).await,
                (false, api::OutputStream::Stdout) => self.stdout.write(bytes).await,
                (false, api::OutputStream::Stderr) => self.stderr.write(bytes).await,
            };
            if !still_read(written)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The last lines of both streams together, in the order in which they came.
struct Tail {
    lines: usize,
    held: Vec<Piece>,
}

impl Tail {
    fn last(self) -> Vec<Piece> {
        let Self { mut lines, mut held } = self;
        // What ends the last line begins no other.
        let mut last = true;
        let mut begin = held.len();
        for (at, piece) in held.iter_mut().enumerate().rev() {
            let end = piece.bytes.len() - usize::from(last && piece.bytes.ends_with(b"\n"));
            last &= piece.bytes.is_empty();
            if lines == 0 {
                break;
            }
            let newlines = |(at, byte): (usize, &u8)| (*byte == b'\n').then_some(at);
            let shown = &piece.bytes[..end];
            match shown.iter().enumerate().rev().filter_map(newlines).nth(lines - 1) {
                // The line begins with the next piece.
                Some(newline) if newline + 1 == piece.bytes.len() => break,
                Some(newline) => {
                    piece.offset += newline as u64 + 1;
                    piece.bytes = piece.bytes.slice(newline + 1..);
                    begin = at;
                    break;
                }
                None => {
                    lines -= shown.iter().filter(|byte| **byte == b'\n').count();
                    begin = at;
                }
            }
        }
        held.split_off(begin)
    }
}

/// Whether someone still reads what we write.
fn still_read(written: io::Result<()>) -> io::Result<bool> {
    match written {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}

fn as_json(stream: api::OutputStream, offset: u64, bytes: &[u8]) -> anyhow::Result<Bytes> {
    let (text, base64) = match std::str::from_utf8(bytes) {
        Ok(text) => (Some(text.to_owned()), None),
        Err(_) => (None, Some(BASE64.encode(bytes))),
    };
    let mut line = serde_json::to_vec(&api::CommandEvent::Output { stream, offset, text, base64 })?;
    line.push(b'\n');
    Ok(line.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_those_of_both_streams_together() {
        let piece = |stream, offset, text: &'static str| Piece {
            stream,
            offset,
            bytes: Bytes::from_static(text.as_bytes()),
        };
        let (out, err) = (api::OutputStream::Stdout, api::OutputStream::Stderr);
        let held = || vec![piece(out, 0, "1\n2\n"), piece(err, 0, "oops\n"), piece(out, 4, "3\n4\n")];
        let last = |lines| Tail { lines, held: held() }.last();
        assert_eq!(last(0), []);
        assert_eq!(last(1), [piece(out, 6, "4\n")]);
        assert_eq!(last(2), [piece(out, 4, "3\n4\n")]);
        assert_eq!(last(3), [piece(err, 0, "oops\n"), piece(out, 4, "3\n4\n")]);
        assert_eq!(last(4)[0], piece(out, 2, "2\n"));
        assert_eq!(last(99), held());
        let open = vec![piece(out, 0, "a\nb\nno end")];
        assert_eq!(Tail { lines: 1, held: open }.last(), [piece(out, 4, "no end")]);
    }
}
