//! Rust source as words and signs, with line numbers: just enough to find paths.
//!
//! Comments, strings, characters and lifetimes are dropped here, so that no path is found in them.

/// A token of a source file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Token {
    /// A keyword or a name.
    Word(String),
    /// `::`
    PathSep,
    /// Any other sign, one character each.
    Sign(char),
}

impl Token {
    pub fn is_word(&self, expected: &str) -> bool {
        matches!(self, Self::Word(word) if word == expected)
    }

    pub fn is_sign(&self, expected: char) -> bool {
        *self == Self::Sign(expected)
    }
}

/// A token, and the line it is in, counted from 1.
#[derive(Debug, Clone)]
pub struct Placed {
    pub token: Token,
    pub line: usize,
}

pub fn tokens(source: &str) -> Vec<Placed> {
    let mut lexer = Lexer { rest: source, line: 1, found: Vec::new() };
    while lexer.step() {}
    lexer.found
}

struct Lexer<'a> {
    rest: &'a str,
    line: usize,
    found: Vec<Placed>,
}

impl Lexer<'_> {
    fn step(&mut self) -> bool {
        let Some(first) = self.rest.chars().next() else { return false };
        if self.rest.starts_with("//") {
            self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
        } else if self.rest.starts_with("/*") {
            self.take(block_comment(self.rest));
        } else if let Some(length) = text(self.rest) {
            self.take(length);
        } else if first == '\'' {
            self.take(character_or_lifetime(self.rest));
        } else if self.rest.starts_with("::") {
            self.push(Token::PathSep, 2);
        } else if is_start_of_word(first) {
            // `r#type` is the name `type`.
            let raw = if self.rest.starts_with("r#") { 2 } else { 0 };
            let length = raw + word(&self.rest[raw..]);
            self.push(Token::Word(self.rest[raw..length].to_owned()), length);
        } else if first.is_ascii_digit() {
            self.take(word(self.rest));
        } else if first.is_whitespace() {
            self.take(first.len_utf8());
        } else {
            self.push(Token::Sign(first), first.len_utf8());
        }
        true
    }

    fn push(&mut self, token: Token, length: usize) {
        self.found.push(Placed { token, line: self.line });
        self.take(length);
    }

    fn take(&mut self, length: usize) {
        let (taken, rest) = self.rest.split_at(length);
        self.line += taken.matches('\n').count();
        self.rest = rest;
    }
}

fn is_start_of_word(character: char) -> bool {
    character.is_alphabetic() || character == '_'
}

/// The length of the name or number at the start.
fn word(rest: &str) -> usize {
    rest.find(|character: char| !character.is_alphanumeric() && character != '_').unwrap_or(rest.len())
}

/// The length of a block comment, which may hold others.
fn block_comment(rest: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < rest.len() {
        if rest[at..].starts_with("/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with("*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                return at;
            }
        } else {
            at += rest[at..].chars().next().map_or(1, char::len_utf8);
        }
    }
    rest.len()
}

/// The length of the string at the start, if one is there: plain, raw, of bytes or for C.
fn text(rest: &str) -> Option<usize> {
    let prefix = ["br", "cr", "b", "c", "r", ""].into_iter().find(|prefix| {
        rest.strip_prefix(prefix).is_some_and(|after| {
            let after = if prefix.ends_with('r') { after.trim_start_matches('#') } else { after };
            after.starts_with('"')
        })
    })?;
    let after = &rest[prefix.len()..];
    if prefix.ends_with('r') {
        let hashes = after.len() - after.trim_start_matches('#').len();
        let end = format!("\"{}", "#".repeat(hashes));
        let body = &after[hashes + 1..];
        let length = body.find(&end).map_or(body.len(), |at| at + end.len());
        return Some(prefix.len() + hashes + 1 + length);
    }
    Some(prefix.len() + quoted(after, '"'))
}

/// The length of what is between two quotes, with both.
fn quoted(rest: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        match character {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if character == quote => return at + character.len_utf8(),
            _ => {}
        }
    }
    rest.len()
}

/// `'a'` and `'\n'` are characters; `'a` without a second quote is a lifetime.
fn character_or_lifetime(rest: &str) -> usize {
    let mut after = rest.chars().skip(1);
    match (after.next(), after.next()) {
        (Some('\\'), _) | (Some(_), Some('\'')) => quoted(rest, '\''),
        _ => 1 + word(&rest[1..]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(source: &str, expected: &[&str]) {
        let found: Vec<String> = tokens(source)
            .into_iter()
            .map(|placed| match placed.token {
                Token::Word(word) => word,
                Token::PathSep => "::".into(),
                Token::Sign(sign) => sign.into(),
            })
            .collect();
        assert_eq!(found, expected, "{source}");
    }

    #[test]
    fn words_and_signs_are_kept() {
        check("use crate::a;", &["use", "crate", "::", "a", ";"]);
        check("fn r#type(x: u8) {}", &["fn", "type", "(", "x", ":", "u8", ")", "{", "}"]);
        check("1_000 + 0x2f", &["+"]);
    }

    #[test]
    fn comments_and_texts_hold_no_paths() {
        check("a // crate::b\nc", &["a", "c"]);
        check("a /* crate::b /* */ crate::c */ d", &["a", "d"]);
        check(r##"a "crate::\"b" r#"cra"te::c"# b"crate" br"crate::d\" e"##, &["a", "e"]);
        check("b == 'x' && c == '\\'' && d", &["b", "=", "=", "&", "&", "c", "=", "=", "&", "&", "d"]);
        check("fn f<'a>(x: &'a str)", &["fn", "f", "<", ">", "(", "x", ":", "&", "str", ")"]);
    }

    #[test]
    fn lines_are_counted_over_comments_and_texts() {
        let lines: Vec<usize> =
            tokens("a\n/* \n */ b\n\"\n\"\nc").into_iter().map(|placed| placed.line).collect();
        assert_eq!(lines, [1, 3, 6]);
    }
}
