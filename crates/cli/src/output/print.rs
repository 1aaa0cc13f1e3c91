//! Results on stdout: JSON for programs, tables for people.
//!
//! On a terminal a table fits its width and has colours; into a pipe it goes whole and plain.

use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::terminal;

/// A column is not made narrower than this.
const COLUMN_MIN: usize = 6;
/// Between two columns.
const GAP: &str = "  ";

/// Whether stdout may be coloured, as `main` has found out.
static COLOUR: AtomicBool = AtomicBool::new(false);

/// Says whether stdout may be coloured.
pub fn set_colour(colour: bool) {
    COLOUR.store(colour, Ordering::Relaxed);
}

/// A colour, as a terminal knows it by number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Paint {
    /// As it should be.
    Green,
    /// On its way, or not as it should be.
    Yellow,
    /// Broken.
    Red,
    /// Of little interest.
    Dim,
    /// What the rest is about.
    Bold,
}

impl Paint {
    fn code(self) -> &'static str {
        match self {
            Self::Green => "32",
            Self::Yellow => "33",
            Self::Red => "31",
            Self::Dim => "2",
            Self::Bold => "1",
        }
    }
}

/// A text for stdout in a colour, where colours are wanted.
pub fn painted(text: &str, paint: Paint) -> String {
    paint_if(text, Some(paint), COLOUR.load(Ordering::Relaxed))
}

fn paint_if(text: &str, paint: Option<Paint>, colour: bool) -> String {
    match paint {
        Some(paint) if colour => format!("\x1b[{}m{text}\x1b[0m", paint.code()),
        Some(_) | None => text.to_owned(),
    }
}

/// Prints a value as JSON, indented.
pub fn json<T: Serialize>(value: &T) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    raw(text.as_bytes())
}

/// Prints a line.
pub fn line(text: &str) -> anyhow::Result<()> {
    raw(format!("{text}\n").as_bytes())
}

/// Prints text as it is.
pub fn text(text: &str) -> anyhow::Result<()> {
    raw(text.as_bytes())
}

/// Prints rows in columns.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> anyhow::Result<()> {
    raw(columns(header, rows).as_bytes())
}

/// Prints text, and tells whether anybody still reads: for what goes on until nobody does.
pub fn live(text: &str) -> anyhow::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        result => Ok(result.map(|()| true)?),
    }
}

fn raw(bytes: &[u8]) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
        // Whoever read has seen enough, as with `| head -1`.
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => Ok(result?),
    }
}

/// Rows in columns, for stdout.
pub fn columns(header: &[&str], rows: &[Vec<String>]) -> String {
    laid_out(header, rows, width(), COLOUR.load(Ordering::Relaxed))
}

/// How wide the terminal on stdout is, where there is one.
pub fn width() -> Option<usize> {
    io::stdout().is_terminal().then(|| usize::from(terminal::size().columns))
}

fn laid_out(header: &[&str], rows: &[Vec<String>], room: Option<usize>, colour: bool) -> String {
    let header: Vec<String> = header.iter().map(|word| word.to_uppercase()).collect();
    let shown: Vec<Vec<String>> = std::iter::once(&header)
        .chain(rows)
        .map(|row| row.iter().map(|cell| cell.chars().map(printable).collect()).collect())
        .collect();
    let widest = |column: usize| shown.iter().map(|row| row[column].width()).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..header.len()).map(widest).collect();
    if let Some(room) = room {
        narrow(&mut widths, room);
    }
    let mut text = String::new();
    for (number, row) in shown.iter().enumerate() {
        let last = row.iter().rposition(|cell| !cell.is_empty()).map_or(0, |at| at + 1);
        for (at, cell) in row[..last].iter().enumerate() {
            let cell = cut(cell, widths[at]);
            let paint = if number == 0 { Some(Paint::Bold) } else { paint_of(&header[at], &cell) };
            text.push_str(&paint_if(&cell, paint, colour));
            if at + 1 < last {
                text.push_str(&" ".repeat(widths[at].saturating_sub(cell.width())));
                text.push_str(GAP);
            }
        }
        text.push('\n');
    }
    text
}

/// A text of others, on one line.
pub fn plain(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// Takes from the widest columns until all fit. The first stays: it is what a row is known by, and is copied.
fn narrow(widths: &mut [usize], room: usize) {
    let Some((first, others)) = widths.split_first_mut() else { return };
    let room = room.saturating_sub(*first + GAP.len() * others.len());
    while others.iter().sum::<usize>() > room {
        let Some(widest) = others.iter_mut().filter(|width| **width > COLUMN_MIN).max() else { return };
        *widest -= 1;
    }
}

/// The beginning of a text, with a mark where something is left out.
pub fn cut(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut shown = String::new();
    let mut taken = 0;
    for character in text.chars() {
        let more = character.width().unwrap_or(0);
        if taken + more + 1 > width {
            break;
        }
        taken += more;
        shown.push(character);
    }
    shown.push('…');
    shown
}

/// The colour of a state.
fn paint_of(header: &str, cell: &str) -> Option<Paint> {
    if header != "STATE" {
        return None;
    }
    match cell {
        "running" | "ready" => Some(Paint::Green),
        "creating" | "starting" | "deleting" | "preparing" | "filling" | "making" => Some(Paint::Yellow),
        "failed" | "failing" | "broken" => Some(Paint::Red),
        "paused" | "ended" => Some(Paint::Dim),
        _ => None,
    }
}

/// Names are free text of others; none may move the cursor of whoever lists them.
fn printable(character: char) -> char {
    if character.is_control() { '\u{fffd}' } else { character }
}

/// A text of others, fit to be shown on a terminal.
pub fn harmless(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// The same for a text of several lines, which stay.
pub fn harmless_lines(text: &str) -> String {
    text.chars()
        .map(|character| if matches!(character, '\n' | '\t') { character } else { printable(character) })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain(header: &[&str], rows: &[Vec<String>]) -> String {
        laid_out(header, rows, None, false)
    }

    #[test]
    fn columns_are_as_wide_as_they_need_to_be() {
        let rows =
            [vec!["1".into(), "a long name".into(), "x".into()], vec!["22".into(), "b".into(), "y".into()]];
        assert_eq!(
            plain(&["id", "name", "z"], &rows),
            "ID  NAME         Z\n1   a long name  x\n22  b            y\n"
        );
        // A character may take two places on the screen.
        let rows = [vec!["日本".into(), "x".into()], vec!["a".into(), String::new()]];
        assert_eq!(plain(&["name", "z"], &rows), "NAME  Z\n日本  x\na\n");
    }

    #[test]
    fn a_table_fits_its_terminal() {
        let rows = [vec!["0123456789".into(), "a name that is long".into(), "short".into()]];
        let text = laid_out(&["id", "name", "z"], &rows, Some(30), false);
        assert_eq!(text, "ID          NAME         Z\n0123456789  a name tha…  short\n");
        assert!(text.lines().all(|line| line.width() <= 30));
        // Where there is no room at all, something is shown all the same.
        let text = laid_out(&["id", "name", "z"], &rows, Some(3), false);
        assert_eq!(text, "ID          NAME    Z\n0123456789  a nam…  short\n");
        assert_eq!(cut("日本語", 5), "日本…");
        assert_eq!(cut("日本語", 4), "日…");
        assert_eq!(cut("", 0), "");
    }

    #[test]
    fn a_state_has_its_colour_and_nothing_else_has() {
        let rows = [vec!["running".into(), "running".into()]];
        assert_eq!(
            laid_out(&["name", "state"], &rows, None, true),
            "\x1b[1mNAME\x1b[0m     \x1b[1mSTATE\x1b[0m\nrunning  \x1b[32mrunning\x1b[0m\n"
        );
    }

    #[test]
    fn a_name_cannot_move_the_cursor() {
        assert_eq!(plain(&["name"], &[vec!["a\x1b[2Jb".into()]]), "NAME\na\u{fffd}[2Jb\n");
    }
}
