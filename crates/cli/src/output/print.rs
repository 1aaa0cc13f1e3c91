//! Results on stdout: JSON for programs, tables for people.
//!
//! On a terminal a table fits its width and has colours; into a pipe it goes whole and plain.

use std::collections::HashSet;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;
use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use crate::terminal;

/// A column of text is not made narrower than this.
const COLUMN_MIN: usize = 8;
/// How much of an id is shown where a table has no room for all of it: enough to be typed.
pub const SHORT_ID: usize = 8;
/// Columns of ids, which are shortened before anything else: the beginning of an id is as good as all of it.
const IDS: [&str; 3] = ["ID", "MEMBER", "COMMAND"];
/// Columns of words and numbers that mean nothing when they are cut.
const UNCUT: [&str; 21] = [
    "STATE",
    "CPU",
    "TIME",
    "MEMORY",
    "PIDS",
    "DISK",
    "CMDS",
    "CREATED",
    "UPDATED",
    "EXIT",
    "SIZE",
    "USED",
    "READY",
    "MAKING",
    "CLAIMS",
    "MISSES",
    "VERSION",
    "SANDBOXES",
    "ACCESS",
    "UNPACKED",
    "DIGEST",
];
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
        // The reader has seen enough, as with `| head -1`.
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
    let mut shown: Vec<Vec<String>> = std::iter::once(&header)
        .chain(rows)
        .map(|row| row.iter().map(|cell| cell.chars().map(printable).collect()).collect())
        .collect();
    let widest = |column: usize| shown.iter().map(|row| row[column].width()).max().unwrap_or(0);
    let mut widths: Vec<usize> = (0..header.len()).map(widest).collect();
    if let Some(room) = room {
        let total =
            |widths: &[usize]| widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1);
        if IDS.contains(&header[0].as_str()) && total(&widths) > room {
            widths[0] = shorten(&mut shown);
        }
        narrow(&mut widths, &header, room);
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

/// A state as the API spells it.
pub fn word<T: Serialize>(state: &T) -> String {
    match serde_json::to_value(state) {
        Ok(serde_json::Value::String(word)) => word,
        Ok(_) | Err(_) => String::new(),
    }
}

/// A text of others, on one line.
pub fn plain(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// Replaces the ids in the first column by beginnings that tell them apart, and returns how wide it is now.
fn shorten(shown: &mut [Vec<String>]) -> usize {
    let ids: Vec<String> = shown.iter().skip(1).map(|row| row[0].clone()).collect();
    let beginnings = |length: usize| -> HashSet<String> {
        ids.iter().map(|id| id.chars().take(length).collect()).collect()
    };
    let all: HashSet<&String> = ids.iter().collect();
    let longest = ids.iter().map(|id| id.chars().count()).max().unwrap_or(0);
    let length = (SHORT_ID..longest).find(|length| beginnings(*length).len() == all.len()).unwrap_or(longest);
    for row in shown.iter_mut().skip(1) {
        row[0] = row[0].chars().take(length).collect();
    }
    shown.iter().map(|row| row[0].width()).max().unwrap_or(0)
}

/// The beginning of an id, as tables show it.
pub fn short_id(id: &str) -> &str {
    id.char_indices().nth(SHORT_ID).map_or(id, |(at, _)| &id[..at])
}

/// Takes from the widest columns of text until all fit, and then from whatever is widest: a line that is broken by the
/// terminal is worse than a cell that is cut. The first stays: it is what a row is known by, and is copied.
fn narrow(widths: &mut [usize], header: &[String], room: usize) {
    let room = room.saturating_sub(GAP.len() * widths.len().saturating_sub(1));
    for (least, uncut) in [(COLUMN_MIN, true), (1, false)] {
        while widths.iter().sum::<usize>() > room {
            let columns = widths.iter_mut().zip(header).skip(1);
            let may = |(width, name): &(&mut usize, &String)| {
                **width > least && !(uncut && UNCUT.contains(&name.as_str()))
            };
            let Some((widest, _)) = columns.filter(may).max_by_key(|(width, _)| **width) else { break };
            *widest -= 1;
        }
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

/// Names are free text from other people; none may move the cursor when they are listed.
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
        let text = laid_out(&["key", "name", "z"], &rows, Some(30), false);
        assert_eq!(text, "KEY         NAME         Z\n0123456789  a name tha…  short\n");
        // Where there is no room at all, something is shown all the same.
        let text = laid_out(&["key", "name", "z"], &rows, Some(3), false);
        assert_eq!(text, "KEY         …  Z\n0123456789  …  …\n");
        assert_eq!(cut("日本語", 5), "日本…");
        assert_eq!(cut("日本語", 4), "日…");
        assert_eq!(cut("", 0), "");
    }

    #[test]
    fn an_id_is_shortened_before_anything_is_cut_and_tells_rows_apart() {
        let header = ["id", "name", "state", "memory"];
        let row = |id: &str, name: &str| {
            vec![id.to_owned(), name.to_owned(), "running".to_owned(), "808Ki/1Gi".to_owned()]
        };
        let rows = [
            row("ef54aa3e-fabe-47eb-aab8-d69b8fc04652", "w1"),
            row("ef54aa3e-0abe-47eb-aab8-d69b8fc04652", "silver-spoon-of-a-long-name"),
        ];
        let text = laid_out(&header, &rows, Some(80), false);
        assert!(text.contains("\nef54aa3e-f  w1 "), "{text}");
        assert!(text.contains("\nef54aa3e-0  silver-spoon-of-a-long-name  running  808Ki/1Gi\n"), "{text}");
        let text = laid_out(&header, &rows, Some(45), false);
        assert!(text.lines().all(|line| line.width() <= 45), "{text}");
        assert!(text.contains("silver-spoon…  running  808Ki/1Gi\n"), "the name gives way first: {text}");
        let whole = laid_out(&header, &rows, None, false);
        assert!(whole.contains("ef54aa3e-fabe-47eb-aab8-d69b8fc04652"), "into a pipe it goes whole");
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
