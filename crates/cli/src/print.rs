//! Results on stdout: JSON for programs, tables for people.

use std::io::{self, Write};

use serde::Serialize;

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

/// Prints rows in columns as wide as they need to be.
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

/// Rows in columns as wide as they need to be.
pub fn columns(header: &[&str], rows: &[Vec<String>]) -> String {
    let header: Vec<String> = header.iter().map(|word| word.to_uppercase()).collect();
    let shown: Vec<Vec<String>> = std::iter::once(&header)
        .chain(rows)
        .map(|row| row.iter().map(|cell| cell.chars().map(printable).collect()).collect())
        .collect();
    let width =
        |column: usize| shown.iter().map(|row: &Vec<String>| row[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let mut text = String::new();
    for row in &shown {
        let cells: Vec<String> =
            row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

/// A text of others, on one line.
pub fn plain(text: &str) -> String {
    text.chars().map(printable).collect()
}

/// Names are free text of others; none may move the cursor of whoever lists them.
fn printable(character: char) -> char {
    if character.is_control() { '\u{fffd}' } else { character }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_they_need_to_be() {
        let rows =
            [vec!["1".into(), "a long name".into(), "x".into()], vec!["22".into(), "b".into(), "y".into()]];
        assert_eq!(
            columns(&["id", "name", "z"], &rows),
            "ID  NAME         Z\n1   a long name  x\n22  b            y\n"
        );
    }

    #[test]
    fn a_name_cannot_move_the_cursor() {
        assert_eq!(columns(&["name"], &[vec!["a\x1b[2Jb".into()]]), "NAME\na\u{fffd}[2Jb\n");
    }
}
