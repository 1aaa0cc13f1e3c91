//! Failures: what happened, why, and what to do; in words for people, as JSON where `--json` was asked for.

use std::fmt;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicBool, Ordering};

use client::ClientError;
use serde::Serialize;
use server::{ConfigError, DataDirError, ServeError};

use crate::output::hints;
use crate::output::print::harmless_lines;

/// What rustls says of bytes that are no TLS.
const NOT_TLS: &str = "InvalidContentType";

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

/// Whether failures are for programs, as `main` has found out.
static JSON: AtomicBool = AtomicBool::new(false);

/// From now on failures and warnings are JSON, one object per line.
pub fn set_json() {
    JSON.store(true, Ordering::Relaxed);
}

/// A failure for programs.
#[derive(Serialize)]
struct Failure {
    error: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<String>,
    /// The daemon's stable code, where it was the daemon that refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    code: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hint: Option<String>,
}

/// Prints a failure to stderr.
pub fn failure(error: &anyhow::Error, colour: bool) {
    if JSON.load(Ordering::Relaxed) {
        eprintln!("{}", serde_json::to_string(&for_programs(error)).expect("it is made of texts"));
    } else {
        eprint!("{}", written(error, colour));
    }
}

/// Tells a person at a terminal that something was done. Programs see it in the exit code.
pub fn done(what: &str) {
    if !JSON.load(Ordering::Relaxed) && std::io::stderr().is_terminal() {
        eprintln!("{}", harmless_lines(what));
    }
}

/// Prints something that is no failure but should be known.
pub fn warning(what: &str, colour: bool) {
    if JSON.load(Ordering::Relaxed) {
        eprintln!("{}", serde_json::json!({ "warning": what }));
    } else {
        eprint!("{}", warned(what, colour));
    }
}

fn for_programs(error: &anyhow::Error) -> Failure {
    let code = error.chain().find_map(|cause| cause.downcast_ref::<ClientError>()?.code().map(str::to_owned));
    Failure { error: error.to_string(), causes: causes(error), code, hint: hint(error) }
}

/// What lies beneath, without what only repeats: transparent errors have the text of what they carry.
fn causes(error: &anyhow::Error) -> Vec<String> {
    let mut texts: Vec<String> = error.chain().map(ToString::to_string).collect();
    texts.dedup();
    texts.split_off(1)
}

fn warned(what: &str, colour: bool) -> String {
    format!("{}: {}\n", painted("warning", "33", colour), harmless_lines(what))
}

/// Names in it may have been chosen by guests: none of them moves the cursor.
fn written(error: &anyhow::Error, colour: bool) -> String {
    let what = harmless_lines(&error.to_string());
    let mut text = format!("{}: {what}\n", painted("error", "31", colour));
    for cause in causes(error) {
        // Some show the line of a file that they are about.
        let cause = harmless_lines(cause.trim_end()).replace('\n', "\n    ");
        text.push_str(&format!("  Caused by: {cause}\n"));
    }
    if let Some(hint) = hint(error) {
        text.push_str(&format!("{}: {}\n", painted("hint", "36", colour), harmless_lines(&hint)));
    }
    text
}

fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        None.or_else(|| cause.downcast_ref::<Hinted>().map(|hinted| hinted.hint.clone()))
            .or_else(|| cause.downcast_ref::<ClientError>().and_then(client_hint))
            .or_else(|| daemon_hint(cause))
    })
}

/// What to do about an error of the client: in words of the command line first, else in the daemon's.
fn client_hint(error: &ClientError) -> Option<String> {
    let of_code = error.code().and_then(hints::of_code);
    // What a TLS client reads where the other side speaks plain HTTP.
    let plain_http = matches!(error, ClientError::Insecure { source, .. } if chain(source.as_ref()).any(|text| text.contains(NOT_TLS)));
    let plain_http = plain_http.then_some("the daemon may serve plain HTTP: try http:// in SHOAL_URL");
    let own = error.hint().filter(|hint| !hints::speaks_http(hint));
    plain_http.or(own).or(of_code).map(str::to_owned)
}

/// The texts of an error and of its causes.
fn chain<'a>(error: &'a (dyn std::error::Error + 'static)) -> impl Iterator<Item = String> + 'a {
    std::iter::successors(Some(error), |error| error.source()).map(ToString::to_string)
}

/// What to do about a failure of the daemon, where there is something.
fn daemon_hint(cause: &(dyn std::error::Error + 'static)) -> Option<String> {
    let config = cause.downcast_ref::<ConfigError>().and_then(ConfigError::hint);
    let data_dir = cause.downcast_ref::<DataDirError>().and_then(DataDirError::hint).map(str::to_owned);
    let serve = || cause.downcast_ref::<ServeError>().and_then(ServeError::hint).map(str::to_owned);
    config.or(data_dir).or_else(serve)
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
        let json = serde_json::to_string(&for_programs(&error)).expect("JSON");
        assert_eq!(json, r#"{"error":"cannot list","causes":["nobody listens"],"hint":"start it"}"#);
        assert!(written(&error, true).starts_with("\x1b[1;31merror\x1b[0m: cannot list"));
    }

    #[test]
    fn plain_http_on_the_other_side_is_recognised() {
        let cause = std::io::Error::other("received corrupt message of type InvalidContentType");
        let url = "https://127.0.0.1:1".to_owned();
        let hint = |source: client::Cause| client_hint(&ClientError::Insecure { url: url.clone(), source });
        assert!(hint(Box::new(cause)).expect("a hint").contains("http://"));
        assert!(hint("unknown issuer".into()).expect("a hint").contains("certificate"));
    }

    #[test]
    fn what_guests_call_things_moves_no_cursor() {
        let error = hinted_by(anyhow::anyhow!("`a\x1b[2J\u{9b}1A`\n\tb"), "cannot copy `\rc`", "fix `\x07`");
        assert_eq!(
            written(&error, false),
            "error: cannot copy `\u{fffd}c`\n  Caused by: `a\u{fffd}[2J\u{fffd}1A`\n    \tb\nhint: fix `\u{fffd}`\n"
        );
        assert_eq!(warned("pool: \x1b]0;x\x07", false), "warning: pool: \u{fffd}]0;x\u{fffd}\n");
    }
}
