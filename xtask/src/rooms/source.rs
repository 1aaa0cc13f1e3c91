//! The paths in one source file that start at the crate's root: what the file uses from other rooms.
//!
//! Test-only code is left out: a test may use anything.

use super::tokens::{Placed, Token, tokens};

/// What one file contains.
#[derive(Debug, Default)]
pub struct Source {
    pub references: Vec<Reference>,
    /// Test-only modules: `#[cfg(test)] mod tests;`.
    pub test_modules: Vec<String>,
}

/// A path from the crate's root, without its prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// `["a", "B"]` for `crate::a::B`. The last part is `*` for everything.
    pub path: Vec<String>,
    /// Its alias in a `use`, if it has one.
    pub alias: Option<String>,
    /// The line of the file, counted from 1.
    pub line: usize,
}

impl Reference {
    /// The name under which the file knows it.
    pub fn name(&self) -> Option<&str> {
        self.alias.as_deref().or(self.path.last().map(String::as_str))
    }
}

/// Parses the source of the module at `module`: `["a", "b"]` for `src/a/b.rs`, empty for the crate's root.
pub fn read(source: &str, module: &[String]) -> Source {
    let tokens = tokens(source);
    let mut reader =
        Reader { tokens: &tokens, at: 0, module, inline: Vec::new(), braces: 0, found: Source::default() };
    reader.read();
    reader.found
}

/// Modules, functions and similar. `#[cfg(test)]` before one of these leaves out all of it.
const ITEMS: &[&str] = &[
    "async",
    "const",
    "enum",
    "extern",
    "fn",
    "impl",
    "macro_rules",
    "mod",
    "pub",
    "static",
    "struct",
    "trait",
    "type",
    "union",
    "unsafe",
    "use",
];
/// Items that end with a semicolon, whatever braces are in them.
const STATEMENTS: &[&str] = &["const", "let", "static", "type", "use"];

struct Reader<'a> {
    tokens: &'a [Placed],
    at: usize,
    module: &'a [String],
    /// For each `mod name {` that is open: how many braces were open around it.
    inline: Vec<usize>,
    braces: usize,
    found: Source,
}

impl Reader<'_> {
    fn read(&mut self) {
        while let Some(token) = self.token(0) {
            if token.is_sign('#') && self.is_for_tests() {
                self.skip_item();
            } else if token.is_word("pub") && self.is_sign(1, '(') && self.is_word(2, "in") {
                // `pub(in crate::a)` is a visibility and uses nothing.
                self.skip_to(')');
            } else if token.is_word("use") && self.is_root() {
                self.at += 1;
                let prefix = self.start().unwrap_or_default();
                self.tree(prefix);
            } else if self.starts_path() {
                match self.start() {
                    Some(prefix) => self.tree(prefix),
                    None => self.at += 1,
                }
            } else {
                self.count_braces();
                self.at += 1;
            }
        }
    }

    fn token(&self, ahead: usize) -> Option<&Token> {
        self.tokens.get(self.at + ahead).map(|placed| &placed.token)
    }

    fn is_word(&self, ahead: usize, expected: &str) -> bool {
        self.token(ahead).is_some_and(|token| token.is_word(expected))
    }

    fn is_sign(&self, ahead: usize, expected: char) -> bool {
        self.token(ahead).is_some_and(|token| token.is_sign(expected))
    }

    fn is_path_sep(&self, ahead: usize) -> bool {
        self.token(ahead) == Some(&Token::PathSep)
    }

    /// In the root itself, a path of a `use` may start with the name of a module.
    fn is_root(&self) -> bool {
        self.module.is_empty() && self.inline.is_empty()
    }

    fn starts_path(&self) -> bool {
        let after_path = self.at > 0 && self.tokens[self.at - 1].token == Token::PathSep;
        let leads = self.is_word(0, "crate") || self.is_word(0, "super") || self.is_word(0, "self");
        leads && !after_path && self.is_path_sep(1)
    }

    /// Skips `crate::`, `self::` and `super::super::`. Returns `None` if that does not lead to the root; the reader
    /// is then at the last of these words.
    fn start(&mut self) -> Option<Vec<String>> {
        let mut depth = self.module.len() + self.inline.len();
        let mut beyond = self.at;
        while let Some(Placed { token: Token::Word(word), .. }) = self.tokens.get(beyond) {
            match word.as_str() {
                "crate" => depth = 0,
                "super" => depth = depth.saturating_sub(1),
                "self" => {}
                _ => break,
            }
            if self.tokens.get(beyond + 1).map(|placed| &placed.token) != Some(&Token::PathSep) {
                break;
            }
            self.at = beyond;
            beyond += 2;
        }
        if depth > 0 {
            return None;
        }
        self.at = beyond;
        Some(Vec::new())
    }

    /// Parses the rest of a path, or of a tree of paths: `a::{b, c::*}`.
    fn tree(&mut self, mut path: Vec<String>) {
        let line = self.tokens.get(self.at).map_or(0, |placed| placed.line);
        loop {
            match self.token(0) {
                Some(Token::Word(word)) => path.push(word.clone()),
                Some(Token::Sign('*')) => path.push("*".into()),
                Some(Token::Sign('{')) => return self.branches(&path),
                _ => return,
            }
            self.at += 1;
            if self.is_path_sep(0) {
                self.at += 1;
                // `crate::a::f::<T>()`
                if self.is_sign(0, '<') {
                    break;
                }
            } else {
                break;
            }
        }
        if path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let alias = match (self.is_word(0, "as"), self.token(1)) {
            (true, Some(Token::Word(alias))) => Some(alias.clone()),
            _ => None,
        };
        if alias.is_some() {
            self.at += 2;
        }
        self.found.references.push(Reference { path, alias, line });
    }

    fn branches(&mut self, path: &[String]) {
        self.at += 1;
        while let Some(token) = self.token(0) {
            if token.is_sign('}') {
                self.at += 1;
                return;
            }
            if token.is_sign(',') {
                self.at += 1;
                continue;
            }
            let before = self.at;
            self.tree(path.to_vec());
            if self.at == before {
                // Not a tree of paths.
                return;
            }
        }
    }

    fn count_braces(&mut self) {
        if self.is_word(0, "mod") && self.is_sign(2, '{') {
            self.inline.push(self.braces);
        } else if self.is_sign(0, '{') {
            self.braces += 1;
        } else if self.is_sign(0, '}') {
            self.braces = self.braces.saturating_sub(1);
            if self.inline.last() == Some(&self.braces) {
                self.inline.pop();
            }
        }
    }

    /// Whether `#[cfg(test)]` or `#[cfg(all(test, ...))]` is here.
    fn is_for_tests(&self) -> bool {
        let is_cfg = self.is_sign(1, '[') && self.is_word(2, "cfg") && self.is_sign(3, '(');
        let all = self.is_word(4, "all") && self.is_sign(5, '(') && self.is_word(6, "test");
        is_cfg && (self.is_word(4, "test") || all)
    }

    fn skip_to(&mut self, end: char) {
        while let Some(token) = self.token(0) {
            let is_end = token.is_sign(end);
            self.at += 1;
            if is_end {
                return;
            }
        }
    }

    /// Skips attributes and the item that they belong to.
    fn skip_item(&mut self) {
        while self.is_sign(0, '#') {
            self.at += 1;
            self.skip_group();
        }
        let words: Vec<&str> = (0..6)
            .map_while(|ahead| match self.token(ahead) {
                Some(Token::Word(word)) => Some(word.as_str()),
                Some(Token::Sign('(' | ')')) => Some(""),
                _ => None,
            })
            .collect();
        let is_item = words.first().is_some_and(|first| ITEMS.contains(first));
        let keyword = words.iter().find(|word| !["pub", "crate", "super", "in", ""].contains(word));
        let is_statement = keyword.is_some_and(|word| STATEMENTS.contains(word)) && !words.contains(&"fn");
        if let Some(at) = words.iter().position(|word| *word == "mod")
            && let (Some(Token::Word(name)), true) = (self.token(at + 1), self.is_sign(at + 2, ';'))
        {
            let name = name.clone();
            self.found.test_modules.push(name);
        }
        while let Some(token) = self.token(0) {
            match token {
                Token::Sign(';') => {
                    self.at += 1;
                    return;
                }
                // A field or an arm ends here, or with its container.
                Token::Sign(',') if !is_item => {
                    self.at += 1;
                    return;
                }
                Token::Sign('}') => return,
                Token::Sign('{') => {
                    self.skip_group();
                    if !is_statement {
                        return;
                    }
                }
                Token::Sign('(' | '[') => self.skip_group(),
                _ => self.at += 1,
            }
        }
    }

    /// Skips a pair of brackets with everything between them.
    fn skip_group(&mut self) {
        let mut depth = 0_usize;
        while let Some(token) = self.token(0) {
            match token {
                Token::Sign('(' | '[' | '{') => depth += 1,
                Token::Sign(')' | ']' | '}') => depth = depth.saturating_sub(1),
                _ => {}
            }
            self.at += 1;
            if depth == 0 {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(module: &[&str], source: &str, expected: &[&str]) {
        let module: Vec<String> = module.iter().map(|part| (*part).to_owned()).collect();
        let found: Vec<String> =
            read(source, &module).references.iter().map(|one| one.path.join("::")).collect();
        assert_eq!(found, expected, "{source}");
    }

    #[test]
    fn paths_from_the_root_are_found_in_uses_and_in_code() {
        check(&["a"], "use crate::b::C;", &["b::C"]);
        check(
            &["a"],
            "use crate::{b, c::{D, e::*}, f::{self, G as H}};",
            &["b", "c::D", "c::e::*", "f", "f::G"],
        );
        check(&["a"], "fn f() { crate::b::g::<u8>(1, crate::C { x: 1 }) }", &["b::g", "C"]);
        check(&["a"], "use std::fmt; use other::b::C; fn crate_() {}", &[]);
        check(&["a"], "macro_rules! m { () => { $crate::b::f() } }", &["b::f"]);
    }

    #[test]
    fn super_counts_where_it_leads_to_the_root() {
        check(&["a"], "use super::b::C;", &["b::C"]);
        check(&["a", "b"], "use super::c::D;", &[]);
        check(&["a", "b"], "use super::super::c::{D, E};", &["c::D", "c::E"]);
        check(&["a"], "mod inner { use super::b; use super::super::c; } use super::d;", &["c", "d"]);
        check(&["a"], "fn f() { if x { } } use super::d;", &["d"]);
    }

    #[test]
    fn the_root_names_its_modules_without_a_prefix() {
        check(&[], "pub use a::B; use self::c::D; mod c;", &["a::B", "c::D"]);
        check(&["a"], "use b::C; use self::c::D;", &[]);
    }

    #[test]
    fn what_is_for_tests_alone_is_left_out() {
        check(&["a"], "#[cfg(test)] mod tests { use crate::b; } use crate::c;", &["c"]);
        check(&["a"], "#[cfg(test)] #[allow(x)] use crate::{b, d}; use crate::c;", &["c"]);
        check(&["a"], "#[cfg(test)] pub(crate) fn f(x: crate::b::X) { } use crate::c;", &["c"]);
        check(&["a"], "#[cfg(test)] const X: B = crate::b::B { x: 1 }; use crate::c;", &["c"]);
        check(&["a"], "struct S { #[cfg(test)] x: crate::b::B, y: crate::c::C }", &["c::C"]);
        check(&["a"], "#[cfg(all(test, unix))] mod t { use crate::b; } use crate::c;", &["c"]);
        check(&["a"], "#[cfg(not(test))] use crate::c;", &["c"]);
        let source = read("#[cfg(test)] mod tests; #[cfg(test)] pub(crate) mod support;", &["a".to_owned()]);
        assert_eq!(source.test_modules, ["tests", "support"]);
    }

    #[test]
    fn who_may_use_something_is_not_what_it_uses() {
        check(&["a"], "pub(in crate::b) fn f() {} pub(crate) struct S(crate::c::C);", &["c::C"]);
    }

    #[test]
    fn a_reference_knows_its_line_and_its_name() {
        let found = read("\n\nuse crate::{\n  b::C as D,\n};", &["a".to_owned()]).references;
        assert_eq!((found[0].line, found[0].name()), (4, Some("D")));
    }
}
