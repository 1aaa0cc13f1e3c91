//! Our own stdin, stdout and stderr, each with a thread, so that a reader who does not read holds up nothing else.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;

use bytes::Bytes;
use client::Input;
use tokio::sync::{mpsc, oneshot};

/// Pieces of output, of at most 64 KiB, that wait to be written.
const PIECES_MAX: usize = 8;
/// What is read from stdin at once.
const READ_MAX: usize = 64 << 10;

/// Writes to one of our streams, in order.
pub struct Pipe {
    pieces: Option<mpsc::Sender<Bytes>>,
    done: oneshot::Receiver<io::Result<()>>,
}

impl Pipe {
    /// Our stdout.
    pub fn stdout() -> Self {
        Self::of(io::stdout())
    }

    /// Our stderr.
    pub fn stderr() -> Self {
        Self::of(io::stderr())
    }

    /// The file itself: the streams of the standard library look for the ends of lines in every piece.
    fn of(stream: impl AsFd + Write + Send + 'static) -> Self {
        match stream.as_fd().try_clone_to_owned() {
            Ok(file) => Self::new(File::from(file)),
            // Out of descriptors.
            Err(_) => Self::new(stream),
        }
    }

    fn new(mut to: impl Write + Send + 'static) -> Self {
        let (sender, mut receiver) = mpsc::channel::<Bytes>(PIECES_MAX);
        let (tell, done) = oneshot::channel();
        std::thread::spawn(move || {
            let mut result = Ok(());
            while let Some(piece) = receiver.blocking_recv() {
                // Write each piece at once: a person who reads along should see a prompt that has no line end.
                result = to.write_all(&piece).and_then(|()| to.flush());
                if result.is_err() {
                    break;
                }
            }
            // If nobody waits any more, nobody wants to know.
            let _ = tell.send(result);
        });
        Self { pieces: Some(sender), done }
    }

    /// Writes; waits while too much waits to be written.
    pub async fn write(&mut self, piece: Bytes) -> io::Result<()> {
        let Some(pieces) = &self.pieces else { return Err(io::ErrorKind::BrokenPipe.into()) };
        if pieces.send(piece).await.is_ok() {
            return Ok(());
        }
        // The thread has ended, which it does on its own only after an error.
        self.finish().await.and(Err(io::ErrorKind::BrokenPipe.into()))
    }

    /// Returns when all is written, with the first error.
    pub async fn finish(&mut self) -> io::Result<()> {
        self.pieces = None;
        (&mut self.done).await.unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))
    }
}

/// Sends our stdin to a command, to its end. The thread is left behind when the program ends.
pub fn feed_stdin(input: Input) {
    let runtime = tokio::runtime::Handle::current();
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; READ_MAX];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => {
                    let piece = Bytes::copy_from_slice(&buffer[..length]);
                    if runtime.block_on(input.write(piece)).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A stdin that cannot be read is one without anything in it.
                Err(_) => break,
            }
        }
        // An error means that the command takes no more input, and needs no end of it.
        let _ = runtime.block_on(input.end());
    });
}
