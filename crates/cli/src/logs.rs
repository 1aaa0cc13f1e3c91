//! `shoal logs`: what a command has written, and what it goes on to write.

use std::io;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use client::{Offsets, StreamEvent, api};

use crate::args::Logs;
use crate::environment::Environment;
use crate::find;
use crate::pipes::Pipe;
use crate::report::{self, hinted};

/// `shoal logs`
pub async fn logs(arguments: Logs, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, &arguments.sandbox).await?.id;
    let command = match &arguments.command {
        Some(text) => client.command(sandbox, &text.parse()?).await?,
        None => match client.commands(sandbox).await?.pop() {
            Some(command) => command,
            None => return Err(hinted("the sandbox has run no command", "`shoal run --sandbox` runs one")),
        },
    };
    let until =
        (!arguments.follow).then_some(Offsets { stdout: command.stdout.end, stderr: command.stderr.end });
    let mut seen = Offsets { stdout: command.stdout.start, stderr: command.stderr.start };
    for (name, start) in [("stdout", seen.stdout), ("stderr", seen.stderr)] {
        if start > 0 {
            report::warning(
                &format!("the first {start} bytes of {name} are no longer kept"),
                environment.colour,
            );
        }
    }
    let mut stream = client.attach(sandbox, command.id, seen);
    let (mut stdout, mut stderr) = (Pipe::stdout(), Pipe::stderr());
    while !until.is_some_and(|until| seen.stdout >= until.stdout && seen.stderr >= until.stderr) {
        match stream.next().await.transpose()? {
            Some(StreamEvent::Output { stream, offset, bytes }) => {
                let (seen, until, pipe) = match stream {
                    api::OutputStream::Stdout => (&mut seen.stdout, until.map(|u| u.stdout), &mut stdout),
                    api::OutputStream::Stderr => (&mut seen.stderr, until.map(|u| u.stderr), &mut stderr),
                };
                // What was written after we asked is for those who follow.
                let wanted = until.map_or(u64::MAX, |until| until.saturating_sub(offset));
                let bytes = bytes.slice(..bytes.len().min(usize::try_from(wanted).unwrap_or(usize::MAX)));
                *seen = offset + bytes.len() as u64;
                let written = if arguments.json {
                    stdout.write(as_json(stream, offset, &bytes)?).await
                } else {
                    pipe.write(bytes).await
                };
                if !still_read(written)? {
                    return Ok(0);
                }
            }
            Some(StreamEvent::Lost { stream, from, to }) => {
                match stream {
                    api::OutputStream::Stdout => seen.stdout = to,
                    api::OutputStream::Stderr => seen.stderr = to,
                }
                report::warning(&format!("{} bytes are no longer kept", to - from), environment.colour);
            }
            Some(StreamEvent::Command(_) | StreamEvent::Refused(_)) => {}
            Some(StreamEvent::Ended(_)) | None => break,
        }
    }
    still_read(stdout.finish().await)?;
    still_read(stderr.finish().await)?;
    Ok(0)
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
