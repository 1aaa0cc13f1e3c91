//! What a command runs, as callers give it.

use crate::error::{Must, shown};

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// What the template or the image runs by itself.
    Default,
    /// A program and its arguments, looked up in the command's `PATH` when it has no slash.
    Argv(Argv),
    /// A script for the shell.
    Script(Script),
}

impl Program {
    /// A script.
    pub fn script(text: impl Into<String>) -> Result<Self, Must> {
        Script::parse(text).map(Self::Script)
    }

    /// A program and its arguments.
    pub fn argv(words: Vec<String>) -> Result<Self, Must> {
        Argv::new(words).map(Self::Argv)
    }
}

/// A program and its arguments. The program is not empty, and nothing contains a NUL byte.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Argv(Vec<String>);

impl Argv {
    /// The kernel takes 2 MiB of arguments with the usual limit on a stack, and the shortest useful one takes ten bytes. So many
    /// of them are a mistake, told before they travel.
    pub const ARGUMENTS_MAX: usize = 150_000;

    /// Checks the words.
    pub fn new(words: Vec<String>) -> Result<Self, Must> {
        if words.first().is_none_or(String::is_empty) {
            return Err(Must::new("begin with a program"));
        }
        if words.len() > Self::ARGUMENTS_MAX {
            let rule = format!("have at most {} arguments, got {}", Self::ARGUMENTS_MAX, words.len());
            return Err(Must::new(rule));
        }
        match words.iter().find(|word| word.contains('\0')) {
            Some(word) => Err(Must::new(format!("not contain a NUL byte, got {:?}", shown(word)))),
            None => Ok(Self(words)),
        }
    }

    /// From a row: what was a command once stays one.
    pub(crate) fn kept(words: Vec<String>) -> Self {
        Self(words)
    }

    /// The program, and then its arguments.
    pub fn words(&self) -> &[String] {
        &self.0
    }

    /// The program, and then its arguments.
    pub fn into_words(self) -> Vec<String> {
        self.0
    }
}

/// A script for the shell, without NUL bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script(String);

impl Script {
    /// In bytes. Leaves room for an environment in a message to init.
    pub const BYTES_MAX: usize = 16 << 20;

    /// Checks text.
    pub fn parse(text: impl Into<String>) -> Result<Self, Must> {
        let text = text.into();
        if text.contains('\0') {
            return Err(Must::new("not contain a NUL byte"));
        }
        if text.len() > Self::BYTES_MAX {
            return Err(Must::new(format!("have at most {} bytes, got {}", Self::BYTES_MAX, text.len())));
        }
        Ok(Self(text))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As it was written.
    pub fn into_string(self) -> String {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argv_begins_with_a_program_and_has_no_nul() {
        let words = |words: &[&str]| Argv::new(words.iter().map(|&word| word.into()).collect());
        assert_eq!(words(&["true", ""]).expect("a program").words(), ["true", ""]);
        for bad in [&[][..], &[""], &["", "x"], &["a\0b"], &["true", "\0"]] {
            words(bad).expect_err("it cannot be executed");
        }
        Argv::new(vec!["x".into(); Argv::ARGUMENTS_MAX + 1]).expect_err("it has too many");
    }

    #[test]
    fn a_script_has_no_nul_and_is_bounded() {
        assert_eq!(Script::parse("echo ü").expect("a script").as_str(), "echo ü");
        Script::parse("echo \0").expect_err("a shell would not see the rest");
        Script::parse("x".repeat(Script::BYTES_MAX + 1)).expect_err("it is too long");
    }
}
