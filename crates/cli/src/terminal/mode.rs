//! The terminal that a person sits at: its size, and raw mode, which is undone on every way out.
//!
//! In raw mode the terminal hands on every key as it is typed, Ctrl-C included, and whatever runs in the sandbox decides
//! what it means. A terminal left so would be of no use to the shell that comes after us. So the mode from before
//! is kept where the panic handler finds it too; the holder of [`Raw`] catches signals. After SIGKILL it stays changed.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, Once, PoisonError};

use anyhow::Context;
use client::api::TerminalSize;
use rustix::stdio::{stderr, stdin, stdout};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetwinsize, tcsetattr};

/// What a terminal that does not know its size is taken for.
const SIZE_DEFAULT: TerminalSize = TerminalSize { rows: 24, columns: 80 };

/// The mode to go back to, while the terminal is in raw mode.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// Raw mode, until it is dropped.
pub struct Raw(());

impl Raw {
    /// Puts the terminal on stdin into raw mode.
    pub fn enter() -> anyhow::Result<Self> {
        restore_on_panic();
        let before = tcgetattr(stdin()).context("cannot read the mode of the terminal")?;
        *BEFORE.lock().unwrap_or_else(PoisonError::into_inner) = Some(before.clone());
        let raw = Self(());
        raw.apply(before)?;
        Ok(raw)
    }

    /// Once more: a shell that stopped us and let us go on has set its own mode in between.
    pub fn again(&self) -> anyhow::Result<()> {
        self.apply(tcgetattr(stdin()).context("cannot read the mode of the terminal")?)
    }

    fn apply(&self, mut mode: Termios) -> anyhow::Result<()> {
        mode.make_raw();
        // At once, and without throwing away what was typed ahead.
        tcsetattr(stdin(), OptionalActions::Now, &mode).context("cannot put the terminal into raw mode")
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore();
    }
}

/// Back to the mode from before, if there is one. A terminal that is gone needs none.
fn restore() {
    let before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(before) = before {
        let _ = tcsetattr(stdin(), OptionalActions::Now, &before);
    }
}

/// A panic may be in another thread than the one that holds the [`Raw`], and its message should be readable.
fn restore_on_panic() {
    static SET: Once = Once::new();
    SET.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore();
            default(panic);
        }));
    });
}

/// The size of the terminal we are at, whichever of our streams is one.
pub fn size() -> TerminalSize {
    let known = [stdin(), stdout(), stderr()].into_iter().find_map(|stream| tcgetwinsize(stream).ok());
    match known {
        Some(size) if size.ws_row > 0 && size.ws_col > 0 => {
            TerminalSize { rows: size.ws_row, columns: size.ws_col }
        }
        Some(_) | None => SIZE_DEFAULT,
    }
}

/// Whether a person types on stdin.
pub fn is_typed_on() -> bool {
    io::stdin().is_terminal()
}
