//! `shoal doctor`: what this machine has of what Shoal needs, and what to do about the rest.
//!
//! What the machine has is found out by `runtime::doctor`, before this program has a second thread; whether a daemon can be
//! reached is found out here. Both are one list.

use client::Client;
use runtime::doctor::{Finding, Verdict};
use serde::Serialize;

use crate::args::Doctor;
use crate::daemon::{find, settings};
use crate::environment::Environment;
use crate::output::print::{self, Paint};

/// Something is missing, and Shoal does not work without it.
const MISSING: i32 = 1;
/// Columns that explanations are indented by.
const INDENT: usize = 9;
/// Text is broken here even on a wider terminal.
const WIDTH_MAX: usize = 110;

/// A finding for programs.
#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    verdict: &'static str,
    found: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    cost: &'a str,
    #[serde(skip_serializing_if = "str::is_empty")]
    remedy: &'a str,
}

/// `shoal doctor`, with what was found of the machine.
pub async fn doctor(arguments: Doctor, environment: &Environment) -> anyhow::Result<i32> {
    let mut findings = arguments.findings;
    findings.extend(daemon(environment).await);
    if arguments.json {
        let lines: Vec<Line<'_>> = findings.iter().map(line).collect();
        print::json(&lines)?;
    } else {
        print::text(&shown(&findings, print::width().unwrap_or(WIDTH_MAX).min(WIDTH_MAX)))?;
    }
    let missing = findings.iter().any(|finding| finding.verdict == Verdict::Missing);
    Ok(if missing { MISSING } else { 0 })
}

/// Whether there is a daemon, whether it answers, and whether it is of our own version.
async fn daemon(environment: &Environment) -> Vec<Finding> {
    const NAME: &str = "daemon";
    let client = match find::named_or_living(environment) {
        Ok(Some(client)) => client,
        Ok(None) => {
            if let Some(error) = find::unreadable(&settings::data_dir(environment)) {
                let remedy = "run `sudo shoal doctor`, or set SHOAL_URL and SHOAL_API_KEY";
                return vec![Finding::limited(
                    NAME,
                    error.to_string(),
                    "commands that need a daemon fail",
                    remedy,
                )];
            }
            return vec![Finding::limited(
                NAME,
                "not running",
                "`shoal run` and `shoal shell` start a private daemon; all other commands need one",
                "start it with `systemctl start shoal` or `shoal serve`, or set SHOAL_URL and SHOAL_API_KEY",
            )];
        }
        Err(error) => {
            let remedy = "see `shoal --help` for how `shoal` finds a daemon and its key";
            return vec![Finding::limited(
                NAME,
                format!("{error:#}"),
                "commands that need a daemon fail",
                remedy,
            )];
        }
    };
    answers(&client).await
}

async fn answers(client: &Client) -> Vec<Finding> {
    let url = client.url();
    let version = match client.version().await {
        Ok(version) => version.version,
        Err(error) if error.code() == Some("unauthorized") => {
            return vec![Finding::limited(
                "api_key",
                format!("the daemon at {url} rejects it"),
                "every request fails",
                "set SHOAL_API_KEY to its key; the daemon keeps its first key in `api.key` in its data directory",
            )];
        }
        Err(error) => {
            let remedy = "check its log; `systemctl restart shoal` leaves sandboxes running";
            let what = format!("{url}: {:#}", anyhow::Error::new(error));
            return vec![Finding::limited("daemon", what, "commands that need a daemon fail", remedy)];
        }
    };
    let ours = env!("CARGO_PKG_VERSION");
    let mut findings = vec![Finding::found("daemon", format!("{url}, version {version}"))];
    if version != ours {
        findings.push(Finding::limited(
            "daemon_version",
            format!("the daemon is {version}, this program is {ours}"),
            "the daemon may not support newer commands",
            "restart it; sandboxes keep running",
        ));
    }
    findings.push(Finding::found("api_key", "the daemon accepts it"));
    findings
}

fn line(finding: &Finding) -> Line<'_> {
    let Finding { name, verdict, found, cost, remedy } = finding;
    Line { name, verdict: word(*verdict), found, cost, remedy }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Found => "ok",
        Verdict::Unknown => "unknown",
        Verdict::Limited => "limited",
        Verdict::Missing => "missing",
    }
}

fn paint(verdict: Verdict) -> Paint {
    match verdict {
        Verdict::Found => Paint::Green,
        Verdict::Unknown => Paint::Dim,
        Verdict::Limited => Paint::Yellow,
        Verdict::Missing => Paint::Red,
    }
}

/// For people: one line each, and for what is limited or missing what it costs and how to get it.
fn shown(findings: &[Finding], width: usize) -> String {
    let names = findings.iter().map(|finding| finding.name.len()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let word = word(finding.verdict);
        let padding = " ".repeat(INDENT - word.len());
        let name = format!("{:names$}", finding.name);
        let found = wrapped(&print::harmless(&finding.found), width, INDENT + names + 2);
        text.push_str(&format!("{}{padding}{name}  {found}\n", print::painted(word, paint(finding.verdict))));
        for (title, what) in [("cost: ", &finding.cost), ("do:   ", &finding.remedy)] {
            if !what.is_empty() {
                let what = wrapped(what, width, INDENT + title.len());
                text.push_str(&format!(
                    "{}{}{what}\n",
                    " ".repeat(INDENT),
                    print::painted(title, Paint::Dim)
                ));
            }
        }
    }
    text.push('\n');
    text.push_str(&summary(findings));
    text
}

fn summary(findings: &[Finding]) -> String {
    let count = |verdict| findings.iter().filter(|finding| finding.verdict == verdict).count();
    let (missing, limited, unknown) =
        (count(Verdict::Missing), count(Verdict::Limited), count(Verdict::Unknown));
    if missing > 0 {
        return format!("{missing} missing: Shoal does not work here\n");
    }
    let unknown = if unknown > 0 { format!(", {unknown} could not be checked") } else { String::new() };
    match limited {
        0 => format!("Shoal works here{unknown}\n"),
        _ => format!(
            "Shoal works here, with {limited} {}{unknown}\n",
            if limited == 1 { "limitation" } else { "limitations" }
        ),
    }
}

/// Breaks a text between words; lines after the first begin at `indent`.
fn wrapped(text: &str, width: usize, indent: usize) -> String {
    let room = width.saturating_sub(indent).max(20);
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is one from the start");
        let needed = line.chars().count() + 1 + word.chars().count();
        if line.is_empty() {
            line.push_str(word);
        } else if needed <= room {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines.join(&format!("\n{}", " ".repeat(indent)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limitation_comes_with_its_cost_and_its_remedy() {
        let findings = [
            Finding::found("kernel", "Linux 6.1"),
            Finding::limited("process_ids", "pid_max is 32768", "few", "raise it"),
        ];
        assert_eq!(
            shown(&findings, 80),
            "ok       kernel       Linux 6.1\n\
             limited  process_ids  pid_max is 32768\n\
             \u{20}        cost: few\n\
             \u{20}        do:   raise it\n\
             \n\
             Shoal works here, with 1 limitation\n"
        );
        let missing = [Finding::missing("kernel", "Linux 2.6", "all", "install another")];
        assert!(shown(&missing, 80).ends_with("\n1 missing: Shoal does not work here\n"));
    }

    #[test]
    fn long_text_is_broken_between_words() {
        assert_eq!(wrapped("one two three four five six", 25, 4), "one two three four\n    five six");
        assert_eq!(
            wrapped("unbreakable-however-long-it-may-be", 10, 4),
            "unbreakable-however-long-it-may-be"
        );
    }
}
