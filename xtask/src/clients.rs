//! The test suites of clients that are not written in Rust. Each is a Python program built on
//! `tests/clients/environments.py`, which makes virtual environments with pinned versions.
//!
//! Owns which suites there are and which program they try. What they test is their own business.

use std::process::{Command, Stdio};

use anyhow::{Result, bail};

/// A suite: the word for it on the command line, what it is called, and its program.
const SUITES: &[(&str, &str, &str)] = &[
    ("python", "the Python SDK", "sdk/python/run_tests.py"),
    ("langsmith", "LangSmith's clients", "tests/langsmith/run_tests.py"),
];

/// Whether the first argument, if there is one, is the word of a suite.
pub fn check(arguments: &[String]) -> Result<()> {
    if let Some(word) = arguments.first()
        && SUITES.iter().all(|(known, ..)| known != word)
    {
        let words: Vec<&str> = SUITES.iter().map(|(known, ..)| *known).collect();
        bail!("`{word}` is not a suite; there are: {}", words.join(", "));
    }
    Ok(())
}

/// Runs all suites against the debug program, or the one whose word comes first, with the arguments after that. The first
/// failure is returned once all ran.
pub fn run(arguments: &[String]) -> Result<()> {
    let shoal = std::env::current_exe()?.with_file_name("shoal");
    let chosen = arguments.first();
    let mut outcome = Ok(());
    for (_, name, program) in SUITES.iter().filter(|(word, ..)| chosen.is_none_or(|chosen| chosen == word)) {
        let mut suite = Command::new("/usr/bin/python3");
        // Environments are made once and then kept beside what cargo builds. A change of versions makes new ones.
        suite.arg(program).arg("--shoal").arg(&shoal).args(["--environments", "target/python"]);
        suite.args(arguments.iter().skip(1)).current_dir(super::root()).stdin(Stdio::null());
        outcome = outcome.and(super::step(&format!("run the tests of {name}"), suite));
    }
    outcome
}
