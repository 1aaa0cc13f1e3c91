//! The test suites of clients that are not written in Rust. Each is a Python program built on
//! `tests/clients/environments.py`, which makes virtual environments with pinned versions.
//!
//! Owns which suites there are and which program they try. What they test is their own business.

use std::process::{Command, Stdio};

use anyhow::Result;

/// What a suite is called, and its program.
const SUITES: &[(&str, &str)] =
    &[("the Python SDK", "sdk/python/run_tests.py"), ("LangSmith's clients", "tests/langsmith/run_tests.py")];

/// Runs all suites against the debug program, each with these arguments. The first failure is returned once all ran.
pub fn run(arguments: &[String]) -> Result<()> {
    let shoal = std::env::current_exe()?.with_file_name("shoal");
    let mut outcome = Ok(());
    for (name, program) in SUITES {
        let mut suite = Command::new("/usr/bin/python3");
        // Environments are made once and then kept beside what cargo builds. A change of versions makes new ones.
        suite
            .arg(program)
            .arg("--shoal")
            .arg(&shoal)
            .args(["--environments", "target/python"])
            .args(arguments);
        suite.current_dir(super::root()).stdin(Stdio::null());
        outcome = outcome.and(super::step(&format!("run the tests of {name}"), suite));
    }
    outcome
}
