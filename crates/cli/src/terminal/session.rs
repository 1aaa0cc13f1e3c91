//! A person at a terminal, and a command with one in a sandbox.
//!
//! Keys go to the command as they are typed, Ctrl-C included; what it writes goes to the screen; the sizes are kept alike.
//! Waiting for one never holds up the other, so that someone can leave while the daemon is away or the screen stands still.
//! What becomes of the command and its sandbox afterwards is up to the caller, who learns how the session ended.

use std::io::{self, Read};
use std::time::Duration;

use anyhow::Context;
use bytes::Bytes;
use client::{CommandStream, Input, StreamEvent, api};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until, timeout};

use crate::terminal::detach::{DetachKeys, Typed, Watch};
use crate::terminal::interrupts::Interrupts;
use crate::terminal::pipes::Pipe;
use crate::terminal::screen::{self, Screen};
use crate::terminal::{self, Raw};

/// How long keys that may be the beginning of the sequence to leave are held back.
const HOLD: Duration = Duration::from_millis(400);
/// What was typed and not yet sent. While it is full, nothing more is read from the terminal.
const TYPED_MAX: usize = 1 << 20;
/// What is sent at once.
const TYPED_PIECE_MAX: usize = 32 << 10;
/// What is read from the terminal at once, and how many such pieces wait.
const READ_MAX: usize = 16 << 10;
const READS_MAX: usize = 4;
/// How much earlier output a joining client reads to find the terminal modes in force.
pub const REPLAY_MAX: u64 = 1 << 20;
/// How long a program may take to redraw at another size before it gets the right one.
const REDRAW_MAX: Duration = Duration::from_millis(150);
/// How long the daemon may be away before the person sees a message.
const AWAY_TOLD_AFTER: Duration = Duration::from_secs(1);
/// How long what was typed before someone left may take to reach the command, and what is left to say may take to be shown
/// on a terminal that may be gone.
const FAREWELL_MAX: Duration = Duration::from_secs(1);
/// 128 and SIGHUP: the terminal has gone.
pub const HUNG_UP: i32 = 128 + 1;

/// How a session ended.
pub enum Left {
    /// The command is over.
    Ended(Box<api::Command>),
    /// The person has left, and the command goes on.
    Detached,
    /// A signal came, or the terminal has gone; the exit code that goes with it.
    Interrupted(i32),
}

/// What was written before someone joined.
struct Earlier {
    until: u64,
    bytes: Vec<u8>,
}

/// A person at a command's terminal.
pub struct Session {
    stream: CommandStream,
    input: Input,
    watch: Watch,
    screen: Screen,
    output: Pipe,
    earlier: Option<Earlier>,
    /// Written by the command and on its way to the screen.
    unshown: Bytes,
    /// Typed and on its way to the command.
    typed: Bytes,
    /// When keys that are held back are sent all the same.
    release_at: Option<Instant>,
    /// When a program that got a wrong size, so that it redraws, gets the right one.
    redraw_at: Option<Instant>,
    away: Away,
}

/// Whether the daemon is there, and whether a person knows.
enum Away {
    Here,
    Since(Instant),
    Told,
}

impl Session {
    /// With a command that is being started.
    pub fn started(stream: CommandStream, keys: DetachKeys) -> Self {
        let input = stream.input();
        Self {
            stream,
            input,
            watch: Watch::new(keys),
            screen: Screen::default(),
            output: Pipe::stdout(),
            earlier: None,
            unshown: Bytes::new(),
            typed: Bytes::new(),
            release_at: None,
            redraw_at: None,
            away: Away::Here,
        }
    }

    /// With a command that has written so much already; the stream begins somewhere before.
    pub fn joined(stream: CommandStream, keys: DetachKeys, until: u64) -> Self {
        let earlier = Some(Earlier { until, bytes: Vec::new() });
        Self { earlier, ..Self::started(stream, keys) }
    }

    /// Until the command ends or the person leaves. The terminal is as it was before when this returns.
    pub async fn run(mut self, interrupts: &mut Interrupts) -> anyhow::Result<Left> {
        let raw = Raw::enter()?;
        let left = self.follow(&raw, interrupts).await;
        if matches!(left, Ok(Left::Detached)) {
            // What is still not taken then is lost, as with any line that is hung up.
            let _ = timeout(FAREWELL_MAX, self.send_rest()).await;
        }
        let farewell = match &left {
            // The end of its output is part of the result, however slow the terminal is.
            Ok(Left::Ended(command)) => {
                self.farewell(needs_word(command)).await.context("cannot write to the terminal")
            }
            // A terminal that is gone, or stands still, needs none.
            Ok(Left::Detached | Left::Interrupted(_)) | Err(_) => {
                let _ = timeout(FAREWELL_MAX, self.farewell(true)).await;
                Ok(())
            }
        };
        drop(raw);
        farewell.and(left)
    }

    async fn send_rest(&mut self) {
        while !self.typed.is_empty() {
            let Some(length) = send_some(&self.input, &self.typed).await else { return };
            let _ = self.typed.split_to(length);
        }
        let _ = self.input.taken().await;
    }

    /// The last of the output, and the undoing of what a program in the middle of its work has done to the screen.
    /// Then the line's end, if something is to be said and the cursor is not where a line begins.
    async fn farewell(&mut self, more_follows: bool) -> io::Result<()> {
        let rest = std::mem::take(&mut self.unshown);
        self.output.write(rest).await?;
        if self.screen.is_changed() {
            self.output.write(self.screen.undo().into()).await?;
        }
        if more_follows && !self.screen.is_at_line_start() {
            self.output.write(Bytes::from_static(b"\r\n")).await?;
        }
        self.output.finish().await
    }

    async fn follow(&mut self, raw: &Raw, interrupts: &mut Interrupts) -> anyhow::Result<Left> {
        let mut resized = signal(SignalKind::window_change()).context("cannot catch signals")?;
        // SIGCONT: we were stopped, and another program may have changed the mode of the terminal meanwhile.
        let mut continued = signal(SignalKind::from_raw(rustix::process::Signal::CONT.as_raw()))
            .context("cannot catch signals")?;
        let mut keys = read_keys();
        let mut connected = self.stream.connected();
        if self.earlier.is_none() {
            // It may have changed since the command was asked for and before we listened.
            self.stream.resize(terminal::size());
        }
        loop {
            let takes_keys = self.typed.len() < TYPED_MAX;
            let shows = self.unshown.is_empty();
            let timer = self.next_timer();
            tokio::select! {
                event = self.stream.next(), if shows => {
                    let event = event.context("the stream ended before the command did")??;
                    if let Some(left) = self.hear(event) {
                        return Ok(left);
                    }
                }
                shown = self.output.write(self.unshown.clone()), if !shows => match shown {
                    Ok(()) => self.unshown = Bytes::new(),
                    Err(_) => return Ok(Left::Interrupted(HUNG_UP)),
                },
                bytes = keys.recv(), if takes_keys => match bytes {
                    Some(bytes) => if let Some(left) = self.type_in(&bytes) {
                        return Ok(left);
                    },
                    None => return Ok(Left::Interrupted(HUNG_UP)),
                },
                sent = send_some(&self.input, &self.typed), if !self.typed.is_empty() => match sent {
                    Some(length) => { let _ = self.typed.split_to(length); }
                    // It takes no more input: it is about to end, or was started without.
                    None => self.typed = Bytes::new(),
                },
                _ = resized.recv() => self.stream.resize(terminal::size()),
                _ = continued.recv() => {
                    raw.again()?;
                    self.stream.resize(terminal::size());
                }
                is_connected = changed(&mut connected) => self.hear_connected(is_connected),
                () = sleep_until(timer.unwrap_or_else(Instant::now)), if timer.is_some() => self.on_timer(),
                code = interrupts.next() => return Ok(Left::Interrupted(code)),
            }
        }
    }

    /// Something came from the command.
    fn hear(&mut self, event: StreamEvent) -> Option<Left> {
        match event {
            StreamEvent::Output { bytes, offset, .. } => self.hear_output(offset, bytes),
            // Dropped output cannot be shown; a joining client begins at the first byte that is kept.
            StreamEvent::Lost { .. } | StreamEvent::Refused(_) => {}
            StreamEvent::Command(command) => {
                if self.earlier.as_ref().is_some_and(|earlier| earlier.until <= command.stdout.start) {
                    self.show_earlier();
                }
            }
            StreamEvent::Ended(command) => {
                self.show_earlier();
                // The screen is never written to without a wait, so the last of it goes with the farewell.
                return Some(Left::Ended(command));
            }
        }
        None
    }

    fn hear_output(&mut self, offset: u64, mut bytes: Bytes) {
        if let Some(earlier) = &mut self.earlier {
            let old = bytes.split_to(bytes.len().min(earlier.until.saturating_sub(offset) as usize));
            earlier.bytes.extend_from_slice(&old);
            if offset + old.len() as u64 >= earlier.until {
                self.show_earlier();
            }
        }
        self.show(&bytes);
    }

    /// All earlier output was read: shows its last lines, and makes the program redraw.
    fn show_earlier(&mut self) {
        let Some(earlier) = self.earlier.take() else { return };
        let size = terminal::size();
        let shown = screen::replay(&earlier.bytes, usize::from(size.rows).saturating_sub(1));
        self.show(&shown);
        // A program that hears of the size that it has already need not draw.
        let rows = if size.rows > 1 { size.rows - 1 } else { size.rows + 1 };
        self.stream.resize(api::TerminalSize { rows, columns: size.columns });
        self.redraw_at = Some(Instant::now() + REDRAW_MAX);
    }

    fn show(&mut self, bytes: &[u8]) {
        self.screen.follow(bytes);
        self.unshown = if self.unshown.is_empty() {
            Bytes::copy_from_slice(bytes)
        } else {
            [&self.unshown, bytes].concat().into()
        };
    }

    /// Something was typed.
    fn type_in(&mut self, bytes: &[u8]) -> Option<Left> {
        let (bytes, left) = match self.watch.typed(bytes) {
            Typed::Bytes(bytes) => (bytes, None),
            Typed::Detach(bytes) => (bytes, Some(Left::Detached)),
        };
        self.queue(&bytes);
        self.release_at = self.watch.is_holding().then(|| Instant::now() + HOLD);
        left
    }

    fn queue(&mut self, bytes: &[u8]) {
        if !bytes.is_empty() {
            self.typed = [&self.typed, bytes].concat().into();
        }
    }

    fn hear_connected(&mut self, is_connected: bool) {
        match (&self.away, is_connected) {
            (Away::Here, false) => self.away = Away::Since(Instant::now()),
            (Away::Told, true) => {
                self.tell("the daemon is back");
                self.away = Away::Here;
            }
            (_, true) => self.away = Away::Here,
            (Away::Since(_) | Away::Told, false) => {}
        }
    }

    /// A line of our own, where it does not spoil a picture.
    fn tell(&mut self, what: &str) {
        if !self.screen.is_other() {
            self.show(format!("\r\n[shoal] {what}\r\n").as_bytes());
        }
    }

    fn next_timer(&self) -> Option<Instant> {
        let away = match self.away {
            Away::Since(since) => Some(since + AWAY_TOLD_AFTER),
            Away::Here | Away::Told => None,
        };
        [self.release_at, self.redraw_at, away].into_iter().flatten().min()
    }

    fn on_timer(&mut self) {
        let now = Instant::now();
        if self.release_at.is_some_and(|at| at <= now) {
            self.release_at = None;
            let held = self.watch.release();
            self.queue(&held);
        }
        if self.redraw_at.is_some_and(|at| at <= now) {
            self.redraw_at = None;
            self.stream.resize(terminal::size());
        }
        if let Away::Since(since) = self.away
            && since + AWAY_TOLD_AFTER <= now
        {
            self.away = Away::Told;
            self.tell("the daemon is away, waiting for it");
        }
    }
}

/// Whether something is said about how a command ended.
fn needs_word(command: &api::Command) -> bool {
    let quiet = [api::Outcome::Exited, api::Outcome::Signaled, api::Outcome::Killed];
    !command.result.as_ref().is_some_and(|result| quiet.contains(&result.outcome))
}

/// Sends the first piece of what was typed; how much that was, or `None` if nobody takes it. Cancel-safe: what was not
/// taken over was not sent.
async fn send_some(input: &Input, typed: &Bytes) -> Option<usize> {
    let piece = typed.slice(..typed.len().min(TYPED_PIECE_MAX));
    let length = piece.len();
    input.write(piece).await.ok().map(|()| length)
}

/// The next change; for ever away once there is none.
async fn changed(connected: &mut watch::Receiver<bool>) -> bool {
    match connected.changed().await {
        Ok(()) => *connected.borrow_and_update(),
        Err(_) => std::future::pending().await,
    }
}

/// What is typed, as it comes. Ends when the terminal does. The thread is left behind when the program ends.
fn read_keys() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(READS_MAX);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = vec![0; READ_MAX];
        loop {
            match stdin.read(&mut buffer) {
                Ok(length @ 1..) => {
                    if sender.blocking_send(Bytes::copy_from_slice(&buffer[..length])).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Ok(0) | Err(_) => return,
            }
        }
    });
    receiver
}
