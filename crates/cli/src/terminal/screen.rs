//! What the programs in a sandbox have done to our terminal, so that it can be undone, and shown again to people who join.
//!
//! Not an emulator: it knows control sequences by their shape and remembers the modes that outlive a program that does
//! not get to undo them: another screen, mouse reports, a hidden cursor, bracketed paste.

use std::collections::BTreeSet;

/// The longest control sequence that is followed. What is longer is passed on and not understood.
const SEQUENCE_MAX: usize = 4096;
/// Modes that are on unless a program turns them off: automatic wrap, a cursor that can be seen.
const ON_BY_DEFAULT: [u16; 2] = [7, 25];
/// Modes that are off unless a program turns them on: keys of the cursor, mouse reports and their encodings, reports of
/// focus, bracketed paste, drawing at once, and other screens. In the order in which they are undone: the screen last.
const OFF_BY_DEFAULT: [u16; 14] =
    [1, 9, 1000, 1002, 1003, 1004, 1005, 1006, 1015, 2004, 2026, 47, 1047, 1049];
/// Those of them that show another screen.
const OTHER_SCREENS: [u16; 3] = [47, 1047, 1049];

/// The modes of a terminal, as far as they were changed by what it was sent.
#[derive(Debug, Default)]
pub struct Screen {
    parser: Parser,
    /// Modes that are not as they are by default.
    changed: BTreeSet<u16>,
    /// The number pad sends sequences of its own.
    keypad: bool,
    /// How often a program asked for the keyboard protocol that names every key.
    keyboards: u16,
    /// Keys with modifiers are reported in another way.
    modified_keys: bool,
    /// The last thing that was sent is in the middle of a line, as far as one can tell.
    within_line: bool,
}

impl Screen {
    /// Follows what is sent to the terminal.
    pub fn follow(&mut self, bytes: &[u8]) {
        let mut parser = std::mem::take(&mut self.parser);
        parser.parse(bytes, |piece| self.hear(piece));
        self.parser = parser;
        if let Some(last) = bytes.last() {
            self.within_line = *last != b'\n';
        }
    }

    /// Whether the cursor is where a line begins.
    pub fn is_at_line_start(&self) -> bool {
        !self.within_line
    }

    fn hear(&mut self, piece: Piece<'_>) {
        match piece {
            Piece::Csi([b'?', modes @ .., b'h']) => self.set(modes, true),
            Piece::Csi([b'?', modes @ .., b'l']) => self.set(modes, false),
            Piece::Csi([b'>', .., b'u']) => self.keyboards = self.keyboards.saturating_add(1),
            Piece::Csi([b'<', .., b'u']) => self.keyboards = self.keyboards.saturating_sub(1),
            Piece::Csi([b'>', b'4', b'm']) => self.modified_keys = false,
            Piece::Csi([b'>', b'4', .., b'm']) => self.modified_keys = true,
            Piece::Escape(b'=') => self.keypad = true,
            Piece::Escape(b'>') => self.keypad = false,
            // Both kinds of reset.
            Piece::Escape(b'c') | Piece::Csi(b"!p") => {
                *self = Self::default();
            }
            Piece::Csi(_) | Piece::Escape(_) | Piece::Text(_) | Piece::Control(_) | Piece::Request => {}
        }
    }

    fn set(&mut self, modes: &[u8], on: bool) {
        let modes = modes
            .split(|byte| *byte == b';')
            .filter_map(|mode| std::str::from_utf8(mode).ok()?.parse::<u16>().ok());
        for mode in modes {
            if OFF_BY_DEFAULT.contains(&mode) && on || ON_BY_DEFAULT.contains(&mode) && !on {
                self.changed.insert(mode);
            } else {
                self.changed.remove(&mode);
            }
        }
    }

    /// Whether a program shows a screen of its own in place of lines that scroll.
    pub fn is_other(&self) -> bool {
        OTHER_SCREENS.iter().any(|mode| self.changed.contains(mode))
    }

    /// Whether a program has left something as it was not before.
    pub fn is_changed(&self) -> bool {
        !self.changed.is_empty() || self.keypad || self.keyboards > 0 || self.modified_keys
    }

    /// What makes a terminal as it was before all this.
    pub fn undo(&self) -> Vec<u8> {
        let mut undo = String::new();
        let changed = |mode: &&u16| self.changed.contains(mode);
        ON_BY_DEFAULT.iter().filter(changed).for_each(|mode| undo.push_str(&format!("\x1b[?{mode}h")));
        OFF_BY_DEFAULT.iter().filter(changed).for_each(|mode| undo.push_str(&format!("\x1b[?{mode}l")));
        if self.keypad {
            undo.push_str("\x1b>");
        }
        if self.keyboards > 0 {
            undo.push_str(&format!("\x1b[<{}u", self.keyboards));
        }
        if self.modified_keys {
            undo.push_str("\x1b[>4m");
        }
        // Colours last no longer than the line.
        undo.push_str("\x1b[0m");
        undo.into_bytes()
    }

    /// What makes a terminal as this one is.
    fn redo(&self) -> Vec<u8> {
        let mut redo = String::new();
        let changed = |mode: &&u16| self.changed.contains(mode);
        OFF_BY_DEFAULT.iter().filter(changed).for_each(|mode| redo.push_str(&format!("\x1b[?{mode}h")));
        ON_BY_DEFAULT.iter().filter(changed).for_each(|mode| redo.push_str(&format!("\x1b[?{mode}l")));
        if self.keypad {
            redo.push_str("\x1b=");
        }
        if self.modified_keys {
            redo.push_str("\x1b[>4;1m");
        }
        redo.into_bytes()
    }
}

/// What to show to someone who joins a terminal on which `written` was seen: its modes, and the last lines. A program
/// with a screen of its own draws it again when it hears of the new size.
pub fn replay(written: &[u8], lines_max: usize) -> Vec<u8> {
    let mut screen = Screen::default();
    screen.follow(written);
    let mut shown = screen.redo();
    if screen.is_other() {
        shown.extend_from_slice(b"\x1b[2J\x1b[H");
        return shown;
    }
    // A line is found by its end; the last one has none yet.
    let ends = written.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    let from = ends.map(|(at, _)| at + 1).nth(lines_max.saturating_sub(1)).unwrap_or(0);
    Parser::default().parse(&written[from..], |piece| match piece {
        Piece::Text(text) => shown.extend_from_slice(text),
        Piece::Control(ENQUIRY) => {}
        Piece::Control(control) => shown.push(control),
        Piece::Csi(sequence) if !is_question(sequence) => {
            shown.extend_from_slice(b"\x1b[");
            shown.extend_from_slice(sequence);
        }
        Piece::Escape(final_byte) => shown.extend_from_slice(&[0x1b, final_byte]),
        // The terminal would answer, and its answer would be typed into a program that has not asked now.
        Piece::Csi(_) | Piece::Request => {}
    });
    shown
}

const ENQUIRY: u8 = 0x05;

/// Whether a terminal answers it: where the cursor is, what it is, what modes it has, how large it is.
fn is_question(sequence: &[u8]) -> bool {
    matches!(
        sequence,
        [.., b'n' | b'c' | b't' | b'x'] | [.., b'$', b'p'] | [b'>', .., b'q'] | [b'?', .., b'u']
    )
}

/// A piece of what a terminal is sent.
#[derive(Debug, PartialEq, Eq)]
enum Piece<'a> {
    Text(&'a [u8]),
    Control(u8),
    /// ESC and one byte.
    Escape(u8),
    /// What follows `ESC [`, with its last byte.
    Csi(&'a [u8]),
    /// Everything from `ESC ]`, `ESC P` and their like to its end: titles, colours, questions of all kinds.
    Request,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum At {
    #[default]
    Text,
    Escape,
    /// Between ESC and its last byte, as in `ESC ( B`.
    Charset,
    Csi,
    Request,
    /// After an ESC in a request, which a `\` ends.
    RequestEnd,
}

/// Cuts what a terminal is sent into pieces, wherever it was cut before.
#[derive(Debug, Default)]
struct Parser {
    at: At,
    sequence: Vec<u8>,
}

impl Parser {
    fn parse(&mut self, bytes: &[u8], mut found: impl FnMut(Piece<'_>)) {
        let mut text_from = None;
        for (at, byte) in bytes.iter().copied().enumerate() {
            if self.at == At::Text && byte >= 0x20 {
                text_from.get_or_insert(at);
                continue;
            }
            if let Some(from) = text_from.take() {
                found(Piece::Text(&bytes[from..at]));
            }
            self.step(byte, &mut found);
        }
        if let Some(from) = text_from {
            found(Piece::Text(&bytes[from..]));
        }
    }

    fn step(&mut self, byte: u8, found: &mut impl FnMut(Piece<'_>)) {
        if self.sequence.len() >= SEQUENCE_MAX {
            self.sequence.clear();
            self.at = At::Text;
        }
        self.at = match (self.at, byte) {
            (At::Text, 0x1b) => At::Escape,
            (At::Text, control) => {
                found(Piece::Control(control));
                At::Text
            }
            (At::Escape, b'[') => At::Csi,
            (At::Escape, b']' | b'P' | b'X' | b'^' | b'_') => At::Request,
            (At::Escape, 0x20..0x30) => At::Charset,
            (At::Escape | At::Charset, 0x1b) => At::Escape,
            (At::Escape, final_byte) => {
                found(Piece::Escape(final_byte));
                At::Text
            }
            (At::Charset, 0x20..0x30) => At::Charset,
            (At::Charset, _) => At::Text,
            (At::Csi, 0x1b) => {
                self.sequence.clear();
                At::Escape
            }
            (At::Csi, byte) => {
                self.sequence.push(byte);
                if (0x40..0x7f).contains(&byte) {
                    found(Piece::Csi(&self.sequence));
                    self.sequence.clear();
                    At::Text
                } else {
                    At::Csi
                }
            }
            (At::Request, 0x1b) => At::RequestEnd,
            (At::Request, 0x07) | (At::RequestEnd, b'\\') => {
                found(Piece::Request);
                self.sequence.clear();
                At::Text
            }
            (At::Request | At::RequestEnd, byte) => {
                self.sequence.push(byte);
                At::Request
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(bytes: &[u8]) -> Screen {
        let mut screen = Screen::default();
        screen.follow(bytes);
        screen
    }

    #[track_caller]
    fn check_undo(sent: &str, undo: &str) {
        assert_eq!(String::from_utf8(after(sent.as_bytes()).undo()).expect("text"), format!("{undo}\x1b[0m"));
        // The same, one byte at a time.
        let mut screen = Screen::default();
        sent.bytes().for_each(|byte| screen.follow(&[byte]));
        assert_eq!(screen.undo(), after(sent.as_bytes()).undo());
    }

    #[test]
    fn what_a_program_leaves_on_is_turned_off() {
        check_undo("\x1b[?2004h$ ", "\x1b[?2004l");
        check_undo("\x1b[?2004h$ ls\x1b[?2004l\r\n", "");
        check_undo(
            "\x1b[?1049h\x1b[?25l\x1b[?1000;1006h\x1b=",
            "\x1b[?25h\x1b[?1000l\x1b[?1006l\x1b[?1049l\x1b>",
        );
        check_undo("\x1b[?25l\x1b]0;title ?1049h\x07\x1b[?25h", "");
        check_undo("\x1b[?1049h\x1bc", "");
        check_undo("\x1b[>1u\x1b[>1u\x1b[<u\x1b[>4;2m", "\x1b[<1u\x1b[>4m");
        check_undo("\x1bP+q\x1b[?25l\x1b\\ \x1b(B ä\x1b[999999999999999999h\x1b[?h\x1b[", "");
    }

    #[test]
    fn a_sequence_without_an_end_does_not_grow_for_ever() {
        let mut screen = after(b"\x1b]0;");
        for _ in 0..100 {
            screen.follow(&[b'x'; 1000]);
        }
        assert!(screen.parser.sequence.capacity() <= 4 * SEQUENCE_MAX);
        screen.follow(b"\x1b[?25l");
        assert_eq!(screen.undo(), b"\x1b[?25h\x1b[0m");
    }

    #[test]
    fn the_last_lines_are_shown_again_without_their_questions() {
        let written = b"one\r\ntwo\r\nthree\x1b[6n \x1b[31mred\x1b[0m\x1b]11;?\x07\x05\x1b[c\r\n$ ";
        assert_eq!(replay(written, 2), b"three \x1b[31mred\x1b[0m\r\n$ ");
        assert_eq!(replay(b"$ ", 10), b"$ ");
        assert_eq!(replay(b"a\nb", 0), b"b");
    }

    #[test]
    fn a_program_with_its_own_screen_gets_one_to_draw_on() {
        let shown = replay(b"$ vi\r\n\x1b[?1049h\x1b[?25lsome text\r\nmore", 10);
        assert_eq!(shown, b"\x1b[?1049h\x1b[?25l\x1b[2J\x1b[H");
        assert!(!after(b"\x1b[?1049h\x1b[?1049l").is_other());
    }
}
