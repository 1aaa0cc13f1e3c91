//! Failures as people read them: what happened, why, and what to do.

use std::fmt;

use client::ClientError;

use crate::serve;

/// An error of the command line itself, with what to do about it.
#[derive(Debug)]
pub struct Hinted {
    what: String,
    hint: String,
    cause: Option<anyhow::Error>,
}

/// An error with a hint.
pub fn hinted(what: impl Into<String>, hint: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Hinted { what: what.into(), hint: hint.into(), cause: None })
}

/// An error with a cause and a hint.
pub fn hinted_by(cause: anyhow::Error, what: impl Into<String>, hint: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(Hinted { what: what.into(), hint: hint.into(), cause: Some(cause) })
}

impl fmt::Display for Hinted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)
    }
}

impl std::error::Error for Hinted {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.cause.as_ref().map(|cause| cause.as_ref() as _)
    }
}

/// Prints a failure to stderr.
pub fn failure(error: &anyhow::Error, colour: bool) {
    eprint!("{}", written(error, colour));
}

/// Prints something that is no failure but should be known.
pub fn warning(what: &str, colour: bool) {
    eprintln!("{}: {what}", painted("warning", "33", colour));
}

fn written(error: &anyhow::Error, colour: bool) -> String {
    let mut text = format!("{}: {error}\n", painted("error", "31", colour));
    let mut before = error.to_string();
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        // Transparent errors repeat the text of what they carry.
        if cause != before {
            text.push_str(&format!("  Caused by: {cause}\n"));
        }
        before = cause;
    }
    if let Some(hint) = hint(error) {
        text.push_str(&format!("{}: {hint}\n", painted("hint", "36", colour)));
    }
    text
}

fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        let hint = None
            .or_else(|| cause.downcast_ref::<Hinted>().map(|hinted| hinted.hint.as_str()))
            .or_else(|| cause.downcast_ref::<ClientError>().and_then(ClientError::hint))
            .or_else(|| serve::hint(cause));
        hint.map(str::to_owned)
    })
}

fn painted(word: &str, code: &str, colour: bool) -> String {
    if colour { format!("\x1b[1;{code}m{word}\x1b[0m") } else { word.to_owned() }
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn a_failure_says_what_why_and_what_to_do() {
        let error = Err::<(), _>(hinted("nobody listens", "start it")).context("cannot list").unwrap_err();
        assert_eq!(
            written(&error, false),
            "error: cannot list\n  Caused by: nobody listens\nhint: start it\n"
        );
        assert!(written(&error, true).starts_with("\x1b[1;31merror\x1b[0m: cannot list"));
    }
}
