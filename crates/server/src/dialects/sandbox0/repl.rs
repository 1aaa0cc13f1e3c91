//! Interpreters that take one request after the other.
//!
//! An interpreter is a command that runs a short program of ours in its language. It reads lines from stdin, each with a number that the
//! daemon has chosen and the text to run in base64, runs them in one scope, and writes marks around what each has written:
//!
//! ```text
//! RS b : NUMBER US   output   RS e : NUMBER US            (RS and US are the ASCII separators 1E and 1F)
//! ```
//!
//! So a request may have many lines, and its end is known whatever it writes. Marks never reach clients. A program that writes marks
//! itself deceives nobody but its own reader.

use base64::Engine as _;
use base64::prelude::{BASE64_STANDARD, BASE64_URL_SAFE_NO_PAD};

/// Begins and ends a mark.
const OPEN: char = '\u{1e}';
const CLOSE: char = '\u{1f}';
/// More than any mark has: a request id of 256 bytes in base64.
const MARK_MAX: usize = 400;
/// The longest request id.
pub const REQUEST_ID_MAX: usize = 256;

const PYTHON: &str = r#"
import ast, base64, os, sys, traceback
lines = os.fdopen(os.dup(0), "rb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
scope = {"__name__": "__main__", "__builtins__": __builtins__}
def mark(kind, number):
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(1, b"\x1e" + kind + b":" + number + b"\x1f")
def answer(text):
    try:
        for statement in ast.parse(text, "<stdin>").body:
            exec(compile(ast.Interactive([statement]), "<stdin>", "single"), scope)
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exc()
while True:
    try:
        line = lines.readline()
        if not line:
            break
        number, text = line.split(b" ", 1)
        mark(b"b", number)
        answer(base64.b64decode(text).decode())
        mark(b"e", number)
    except KeyboardInterrupt:
        pass
"#;

/// For every shell of the Bourne family.
const SHELL: &str = r#"
exec 9<&0 </dev/null
trap : INT
while IFS=' ' read -r number text <&9; do
    printf '\036b:%s\037' "$number"
    eval "$(printf %s "$text" | base64 -d)" 9<&-
    printf '\036e:%s\037' "$number"
done
"#;

const NODE: &str = r#"
const vm = require("vm"), fs = require("fs"), util = require("util"), readline = require("readline");
globalThis.require = require;
const mark = (kind, number) => fs.writeSync(1, "\x1e" + kind + ":" + number + "\x1f");
readline.createInterface({ input: process.stdin }).on("line", (line) => {
  const [number, text] = line.split(" ");
  mark("b", number);
  try {
    const value = vm.runInThisContext(Buffer.from(text || "", "base64").toString());
    if (value !== undefined) console.log(util.inspect(value));
  } catch (error) {
    console.log((error && error.stack) || String(error));
  }
  mark("e", number);
});
"#;

/// The program of an interpreter, without a terminal. `None` if this server does not know it.
pub fn program(alias: &str) -> Option<Vec<String>> {
    let words: &[&str] = match alias {
        "python" | "python3" => &["python3", "-u", "-c", PYTHON],
        "bash" | "zsh" | "sh" => &[alias, "-c", SHELL],
        "node" | "javascript" => &["node", "-e", NODE],
        _ => return None,
    };
    // One stream, so that the marks are in their place.
    let front = ["/bin/sh", "-c", "exec \"$@\" 2>&1", "sh"];
    Some(front.iter().chain(words).map(|word| (*word).to_owned()).collect())
}

/// The program of an interpreter on a terminal, as people use it.
pub fn program_on_terminal(alias: &str) -> Option<Vec<String>> {
    let words: &[&str] = match alias {
        "python" | "python3" => &["python3"],
        "bash" | "zsh" | "sh" => &[alias, "-i"],
        "node" | "javascript" => &["node"],
        _ => return None,
    };
    Some(words.iter().map(|word| (*word).to_owned()).collect())
}

/// What this server has, for messages.
pub const KNOWN: &str = "python, node, bash, zsh and sh";

/// A request as its interpreter reads it.
pub fn line(request: &str, text: &str) -> String {
    format!("{} {}\n", number(request), BASE64_STANDARD.encode(text))
}

/// A request's id in the letters of a mark.
pub fn number(request: &str) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(request)
}

/// A part of what an interpreter has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// What somebody should see.
    Text(String),
    /// A request begins.
    Begun(String),
    /// A request is over.
    Over(String),
}

/// Takes the marks out of a text that comes in parts.
#[derive(Debug, Default)]
pub struct Filter {
    /// The beginning of what may become a mark.
    waiting: String,
}

impl Filter {
    /// More of the text.
    pub fn take(&mut self, text: &str) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let whole = std::mem::take(&mut self.waiting) + text;
        let mut rest = whole.as_str();
        while let Some(at) = rest.find(OPEN) {
            say(&mut pieces, &rest[..at]);
            let mark = &rest[at..];
            match mark[1..].find([OPEN, CLOSE]) {
                Some(end) if mark[1 + end..].starts_with(CLOSE) => {
                    match read(&mark[1..=end]) {
                        Some(piece) => pieces.push(piece),
                        None => say(&mut pieces, &mark[..end + 2]),
                    }
                    rest = &mark[end + 2..];
                }
                Some(end) => {
                    say(&mut pieces, &mark[..=end]);
                    rest = &mark[end + 1..];
                }
                None if mark.len() > MARK_MAX => {
                    say(&mut pieces, mark);
                    rest = "";
                }
                None => {
                    self.waiting = mark.to_owned();
                    rest = "";
                }
            }
        }
        say(&mut pieces, rest);
        pieces
    }

    /// There is no more.
    pub fn end(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        say(&mut pieces, &std::mem::take(&mut self.waiting));
        pieces
    }
}

fn say(pieces: &mut Vec<Piece>, text: &str) {
    if !text.is_empty() {
        pieces.push(Piece::Text(text.to_owned()));
    }
}

/// What is between the ends of a mark.
fn read(mark: &str) -> Option<Piece> {
    let (kind, number) = mark.split_once(':')?;
    let request = String::from_utf8(BASE64_URL_SAFE_NO_PAD.decode(number).ok()?).ok()?;
    match kind {
        "b" => Some(Piece::Begun(request)),
        "e" => Some(Piece::Over(request)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(parts: &[&str]) -> Vec<Piece> {
        let mut filter = Filter::default();
        let mut pieces: Vec<Piece> = parts.iter().flat_map(|part| filter.take(part)).collect();
        pieces.extend(filter.end());
        // However it came, it is the same text.
        let mut joined: Vec<Piece> = Vec::new();
        for piece in pieces {
            match (joined.last_mut(), piece) {
                (Some(Piece::Text(before)), Piece::Text(text)) => before.push_str(&text),
                (_, piece) => joined.push(piece),
            }
        }
        joined
    }

    #[test]
    fn marks_are_found_however_they_come() {
        let text = format!("x\u{1e}b:{0}\u{1f}é\n\u{1e}e:{0}\u{1f}y", number("req-1"));
        let expected = vec![
            Piece::Text("x".into()),
            Piece::Begun("req-1".into()),
            Piece::Text("é\n".into()),
            Piece::Over("req-1".into()),
            Piece::Text("y".into()),
        ];
        assert_eq!(all(&[&text]), expected);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(all(&letters.iter().map(String::as_str).collect::<Vec<_>>()), expected);
    }

    #[test]
    fn what_is_no_mark_is_text() {
        for text in ["\u{1e}", "a\u{1e}b", "\u{1e}\u{1e}", "\u{1e}x:!!\u{1f}z", "\u{1f}", "\u{1e}b:é\u{1f}"]
        {
            assert_eq!(all(&[text]), [Piece::Text(text.into())], "{text:?}");
        }
        let long = format!("\u{1e}{}", "x".repeat(2 * MARK_MAX));
        let mut filter = Filter::default();
        assert_eq!(filter.take(&long), [Piece::Text(long.clone())], "it does not wait for ever");
        assert!(number(&"x".repeat(REQUEST_ID_MAX)).len() + 4 < MARK_MAX);
    }

    #[test]
    fn a_request_is_one_line() {
        let line = line("a b", "print(1)\nprint(2)\n");
        assert_eq!(line.matches('\n').count(), 1);
        assert_eq!(line.trim_end().split(' ').count(), 2);
    }
}
