//! Glob patterns over bytes.
//!
//! `*` and `?` do not match a slash, `[a-z]` and `[!a-z]` are classes, `{a,b}` is an alternative, `**` between
//! slashes is any number of directories, a backslash quotes the next byte. Matching takes time proportional to the
//! length of the name times that of the pattern, for any input.

/// The most patterns that `{a,b}` may expand to.
const ALTERNATIVES_MAX: usize = 256;
/// The most names between slashes: the matcher keeps one bit for each.
const NAMES_MAX: usize = 60;
/// The longest pattern in bytes.
const LENGTH_MAX: usize = 4096;

/// One or more patterns, one of which must match.
#[derive(Debug)]
pub struct Pattern {
    alternatives: Vec<Vec<Name>>,
}

/// One name of a pattern.
#[derive(Debug, PartialEq, Eq)]
enum Name {
    /// `**`
    AnyDirectories,
    Tokens(Vec<Token>),
}

#[derive(Debug, PartialEq, Eq, Clone)]
enum Token {
    Byte(u8),
    /// `?`
    Any,
    /// `*`
    Many,
    Class {
        ranges: Vec<(u8, u8)>,
        negated: bool,
    },
}

/// How a path relates to a pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// It matches.
    pub matches: bool,
    /// Something below it may match.
    pub leads_on: bool,
}

impl Pattern {
    /// Parses a pattern, or returns what is wrong with it.
    pub fn parse(text: &[u8]) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("the pattern is empty");
        }
        if text.len() > LENGTH_MAX {
            return Err("the pattern is too long");
        }
        if text.starts_with(b"/") {
            return Err("the pattern is relative to the root, so it must not begin with a slash");
        }
        let alternatives = expand(text)?.iter().map(|text| parse_one(text)).collect::<Result<_, _>>()?;
        Ok(Self { alternatives })
    }

    /// Matches a path without a leading slash. `hidden`: whether `*` and `**` match names that begin with a dot.
    pub fn look_at(&self, path: &[u8], hidden: bool) -> Standing {
        let mut standing = Standing { matches: false, leads_on: false };
        for names in &self.alternatives {
            // Bit i: the first i names of the pattern match the path so far.
            let mut places = skip_directories(1, names);
            for name in path.split(|byte| *byte == b'/') {
                let mut next = 0u64;
                for (at, wanted) in names.iter().enumerate().filter(|(at, _)| places & (1 << at) != 0) {
                    match wanted {
                        Name::AnyDirectories if hidden || !name.starts_with(b".") => next |= 1 << at,
                        Name::AnyDirectories => {}
                        Name::Tokens(tokens) if name_matches(tokens, name, hidden) => next |= 1 << (at + 1),
                        Name::Tokens(_) => {}
                    }
                }
                places = skip_directories(next, names);
            }
            let end = 1 << names.len();
            standing.matches |= places & end != 0;
            standing.leads_on |= places & !end != 0;
        }
        standing
    }

    /// Whether the pattern contains a slash, and so matches paths and not only names.
    pub fn has_slash(text: &[u8]) -> bool {
        text.contains(&b'/')
    }
}

/// `**` may match nothing, so a position before it is also a position after it.
fn skip_directories(mut places: u64, names: &[Name]) -> u64 {
    for (at, name) in names.iter().enumerate() {
        if *name == Name::AnyDirectories && places & (1 << at) != 0 {
            places |= 1 << (at + 1);
        }
    }
    places
}

fn parse_one(text: &[u8]) -> Result<Vec<Name>, &'static str> {
    let mut names = Vec::new();
    for name in split_names(text) {
        match name {
            b"" | b"." => {}
            b".." => return Err("the pattern leads out of the root"),
            b"**" => names.push(Name::AnyDirectories),
            name => names.push(Name::Tokens(tokens(name)?)),
        }
    }
    // `a/**` is everything below `a`, but not `a`.
    if names.last() == Some(&Name::AnyDirectories) {
        names.push(Name::Tokens(vec![Token::Many]));
    }
    match names.len() {
        0 => Err("the pattern is empty"),
        1..=NAMES_MAX => Ok(names),
        _ => Err("the pattern has too many slashes"),
    }
}

/// At slashes that are not in a class.
fn split_names(text: &[u8]) -> Vec<&[u8]> {
    let mut names = Vec::new();
    let (mut start, mut at) = (0, 0);
    while at < text.len() {
        match text[at] {
            b'\\' => at += 1,
            b'[' => at = class_end(text, at).unwrap_or(at),
            b'/' => {
                names.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
        at += 1;
    }
    names.push(&text[start.min(text.len())..]);
    names
}

/// The end of the class that begins at `at`, if it is a class.
fn class_end(text: &[u8], at: usize) -> Option<usize> {
    let mut end = at + 1;
    if matches!(text.get(end), Some(b'!' | b'^')) {
        end += 1;
    }
    // A bracket directly after the opening one is a member.
    if text.get(end) == Some(&b']') {
        end += 1;
    }
    while let Some(byte) = text.get(end) {
        match byte {
            b']' => return Some(end),
            b'\\' => end += 2,
            _ => end += 1,
        }
    }
    None
}

fn tokens(name: &[u8]) -> Result<Vec<Token>, &'static str> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < name.len() {
        match name[at] {
            b'*' => {
                if tokens.last() != Some(&Token::Many) {
                    tokens.push(Token::Many);
                }
            }
            b'?' => tokens.push(Token::Any),
            b'\\' => {
                at += 1;
                tokens.push(Token::Byte(*name.get(at).ok_or("the pattern ends in a backslash")?));
            }
            b'[' => {
                let end = class_end(name, at).ok_or("the pattern has a `[` without its `]`")?;
                tokens.push(class(&name[at + 1..end])?);
                at = end;
            }
            byte => tokens.push(Token::Byte(byte)),
        }
        at += 1;
    }
    Ok(tokens)
}

fn class(text: &[u8]) -> Result<Token, &'static str> {
    let (negated, text) = match text {
        [b'!' | b'^', rest @ ..] => (true, rest),
        text => (false, text),
    };
    let mut members = Vec::new();
    let mut at = 0;
    while at < text.len() {
        let escaped = text[at] == b'\\';
        at += usize::from(escaped);
        let byte = *text.get(at).ok_or("the pattern has a class that ends in a backslash")?;
        members.push((byte, escaped));
        at += 1;
    }
    let mut ranges = Vec::new();
    let mut rest = members.as_slice();
    while let Some((first, tail)) = rest.split_first() {
        match tail {
            [(b'-', false), (last, _), tail @ ..] => {
                ranges.push((first.0, *last));
                rest = tail;
            }
            tail => {
                ranges.push((first.0, first.0));
                rest = tail;
            }
        }
    }
    if ranges.is_empty() {
        Err("the pattern has an empty class")
    } else {
        Ok(Token::Class { ranges, negated })
    }
}

fn name_matches(tokens: &[Token], name: &[u8], hidden: bool) -> bool {
    let named_dot = tokens.first() == Some(&Token::Byte(b'.'));
    if name.starts_with(b".") && !hidden && !named_dot {
        return false;
    }
    let (mut token, mut at) = (0, 0);
    // Where to continue after a mismatch: after the last `*`, one byte later than before.
    let mut retry: Option<(usize, usize)> = None;
    while at < name.len() {
        match tokens.get(token) {
            Some(Token::Many) => {
                retry = Some((token + 1, at + 1));
                token += 1;
            }
            Some(wanted) if byte_matches(wanted, name[at]) => {
                token += 1;
                at += 1;
            }
            Some(_) | None => match retry {
                None => return false,
                Some((behind, from)) => {
                    (token, at) = (behind, from);
                    retry = Some((behind, from + 1));
                }
            },
        }
    }
    tokens[token..].iter().all(|token| *token == Token::Many)
}

fn byte_matches(token: &Token, byte: u8) -> bool {
    match token {
        Token::Byte(wanted) => *wanted == byte,
        Token::Any => true,
        Token::Many => false,
        Token::Class { ranges, negated } => {
            ranges.iter().any(|(first, last)| (*first..=*last).contains(&byte)) != *negated
        }
    }
}

/// Expands `{a,b}`, one group with a comma at a time.
fn expand(text: &[u8]) -> Result<Vec<Vec<u8>>, &'static str> {
    let mut done = Vec::new();
    let mut left = vec![text.to_vec()];
    while let Some(text) = left.pop() {
        match first_braces(&text) {
            None => done.push(text),
            Some((open, commas, close)) => {
                let mut from = open + 1;
                for end in commas.into_iter().chain([close]) {
                    left.push([&text[..open], &text[from..end], &text[close + 1..]].concat());
                    from = end + 1;
                }
            }
        }
        if done.len() + left.len() > ALTERNATIVES_MAX {
            return Err("the pattern has too many alternatives");
        }
    }
    Ok(done)
}

/// The first `{` that has a comma of its own and a `}`: its position, those of its commas, and its end.
fn first_braces(text: &[u8]) -> Option<(usize, Vec<usize>, usize)> {
    // Open braces, outermost first, with their commas.
    let mut open: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut at = 0;
    while at < text.len() {
        match text[at] {
            b'\\' => at += 1,
            b'[' => at = class_end(text, at).unwrap_or(at),
            b'{' => open.push((at, Vec::new())),
            b',' => {
                if let Some((_, commas)) = open.last_mut() {
                    commas.push(at);
                }
            }
            b'}' => {
                if let Some((start, commas)) = open.pop()
                    && !commas.is_empty()
                {
                    return Some((start, commas, at));
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[track_caller]
    fn check(pattern: &str, path: &str, expected: bool) {
        let parsed = Pattern::parse(pattern.as_bytes()).expect("it is a pattern");
        assert_eq!(parsed.look_at(path.as_bytes(), false).matches, expected, "`{pattern}` and `{path}`");
    }

    #[test]
    fn names_are_matched_as_a_shell_does() {
        for (pattern, path, expected) in [
            ("*.py", "a.py", true),
            ("*.py", "a/b.py", false),
            ("**/*.py", "a/b.py", true),
            ("**/*.py", "a.py", true),
            ("**/*.py", "a/b/c/d.py", true),
            ("a/**/z", "a/z", true),
            ("a/**/z", "a/b/c/z", true),
            ("a/**", "a/b/c", true),
            ("a/**", "a", false),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[]]x", "]x", true),
            ("[a\\-c]", "-", true),
            ("{a,b}.txt", "b.txt", true),
            ("{a,b{c,d}}.txt", "bd.txt", true),
            ("{a}.txt", "{a}.txt", true),
            ("src/{x,y}/*.rs", "src/y/a.rs", true),
            ("\\*", "*", true),
            ("\\*", "a", false),
            ("*", ".hidden", false),
            (".*", ".hidden", true),
            ("**/x", ".git/x", false),
            (".git/**", ".git/x", true),
            ("a*b*c*d", "aXbXbXcXd", true),
            ("./a//b", "a/b", true),
            ("a[/]b", "a/b", false),
        ] {
            check(pattern, path, expected);
        }
    }

    #[test]
    fn what_cannot_lead_to_a_match_is_not_entered() {
        let pattern = Pattern::parse(b"src/**/*.rs").expect("it is a pattern");
        assert!(pattern.look_at(b"src", false).leads_on);
        assert!(pattern.look_at(b"src/a/b", false).leads_on);
        assert!(!pattern.look_at(b"target", false).leads_on);
        assert!(!Pattern::parse(b"*.rs").expect("a pattern").look_at(b"a", false).leads_on);
    }

    #[test]
    fn mistakes_are_refused() {
        for wrong in ["", "/a", "[a", "a\\", "../a", "a/../b", "[]", "/"] {
            assert!(Pattern::parse(wrong.as_bytes()).is_err(), "{wrong}");
        }
        assert!(Pattern::parse("{a,b}".repeat(20).as_bytes()).is_err());
        assert!(Pattern::parse("a/".repeat(100).as_bytes()).is_err());
        assert!(Pattern::parse(&[b'a'; LENGTH_MAX + 1]).is_err());
    }

    #[test]
    fn a_pattern_made_to_take_for_ever_does_not() {
        let pattern = Pattern::parse("*a".repeat(1000).as_bytes()).expect("it is a pattern");
        assert!(!pattern.look_at(&[b'a'; 255], false).matches);
    }

    proptest! {
        #[test]
        fn no_pattern_and_no_path_panics(
            pattern in "[ab*?\\[\\]{},/.!\\\\-]{0,40}", path in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            if let Ok(pattern) = Pattern::parse(pattern.as_bytes()) {
                let _ = pattern.look_at(&path, false);
                let _ = pattern.look_at(&path, true);
            }
        }

        #[test]
        fn a_path_without_special_bytes_matches_itself(path in "[a-c]{1,5}(/[a-c]{1,5}){0,4}") {
            let pattern = Pattern::parse(path.as_bytes()).expect("it is a pattern");
            prop_assert!(pattern.look_at(path.as_bytes(), false).matches);
        }
    }
}
