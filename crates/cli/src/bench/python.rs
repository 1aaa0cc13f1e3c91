//! Runs a program with another system's Python client, which says how long each round took.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};

/// A client and the program that uses it.
pub struct Client<'a> {
    /// Whose client it is, for messages.
    pub name: &'a str,
    /// The interpreter that finds it.
    pub python: &'a Path,
    /// Takes the number of rounds, and prints the seconds of each in lines.
    pub program: &'a str,
    /// What switches it over.
    pub variables: &'a [(&'a str, String)],
}

/// The time of each round.
pub async fn times(client: Client<'_>, rounds: usize) -> anyhow::Result<Vec<Duration>> {
    let Client { name, python, program, variables } = client;
    let output = tokio::process::Command::new(python)
        .args(["-c", program, &rounds.to_string()])
        .envs(variables.iter().map(|(name, value)| (name, value)))
        .output()
        .await
        .with_context(|| format!("cannot run {}", python.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the client of {name} failed: {}", said.trim());
    let text = String::from_utf8_lossy(&output.stdout);
    let times: Option<Vec<Duration>> =
        text.lines().map(|line| line.trim().parse().ok().map(Duration::from_secs_f64)).collect();
    times.filter(|times| !times.is_empty()).with_context(|| format!("the client of {name} said no times"))
}
