//! A command through the LangSmith dialect, with its real client, beside the native route.
//!
//! The client is a Python package that this program does not carry: whoever has it names the interpreter that finds it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::report::{Figure, Row, median};
use crate::find::read_key;

/// Prints the seconds of each round, in lines.
const PROGRAM: &str = r#"
import sys, time, warnings
warnings.simplefilter("ignore")
from langsmith.sandbox import SandboxClient
client = SandboxClient()
known = {"template_name": "default"} if hasattr(client, "create_template") else {}
with client.sandbox(**known) as sandbox:
    for number in range(int(sys.argv[1]) + 10):
        began = time.perf_counter()
        assert sandbox.run("true").exit_code == 0
        if number >= 10:
            print(time.perf_counter() - began)
"#;

/// `sb.run("true")`, with `native` beside it. `python` has the package `langsmith`.
pub async fn row(
    python: &Path,
    url: &str,
    data_dir: &Path,
    rounds: usize,
    native: Duration,
) -> anyhow::Result<Row> {
    let output = tokio::process::Command::new(python)
        .args(["-c", PROGRAM, &rounds.to_string()])
        .env("LANGSMITH_ENDPOINT", url)
        .env("LANGSMITH_API_KEY", read_key(data_dir)?)
        .env("LANGSMITH_TRACING", "false")
        .env("NO_PROXY", "127.0.0.1")
        .output()
        .await
        .with_context(|| format!("cannot run {}", python.display()))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "the client of LangSmith failed: {}", said.trim());
    let text = String::from_utf8_lossy(&output.stdout);
    let times: Option<Vec<Duration>> =
        text.lines().map(|line| line.trim().parse().ok().map(Duration::from_secs_f64)).collect();
    let times = times.filter(|times| !times.is_empty()).context("the client of LangSmith said no times")?;
    let mut row = Row::new("`sb.run(\"true\")`, LangSmith's Python client", Figure::Time(median(times)));
    row.compare("through bash, native", Some(native));
    Ok(row)
}
