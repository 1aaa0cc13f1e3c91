//! The Sandbox0 dialect: a command with its real client beside the native route.
//!
//! The client is a Python package that Shoal does not ship; a flag names the interpreter that can import it.

use std::path::Path;
use std::time::Duration;

use super::python::{Client, times};
use super::report::{Figure, Row, median};
use crate::daemon::find::read_key;

/// Prints the seconds of each round, in lines.
const PROGRAM: &str = r#"
import os, sys, time
from sandbox0 import Client
client = Client(token=os.environ["SANDBOX0_TOKEN"], base_url=os.environ["SANDBOX0_BASE_URL"])
with client.sandboxes.open("default") as sandbox:
    for number in range(int(sys.argv[1]) + 10):
        began = time.perf_counter()
        assert sandbox.cmd("true").exit_code == 0
        if number >= 10:
            print(time.perf_counter() - began)
"#;

/// `sandbox.cmd("true")`, with `native` beside it. `python` has the package `sandbox0`.
pub async fn row(
    python: &Path,
    url: &str,
    data_dir: &Path,
    rounds: usize,
    native: Duration,
) -> anyhow::Result<Row> {
    let variables = [
        ("SANDBOX0_BASE_URL", format!("{url}/sandbox0")),
        ("SANDBOX0_TOKEN", read_key(data_dir)?),
        ("NO_PROXY", "127.0.0.1".into()),
    ];
    let client = Client { name: "Sandbox0", python, program: PROGRAM, variables: &variables };
    let times = times(client, rounds).await?;
    let mut row = Row::new("`sandbox.cmd(\"true\")`, Sandbox0's Python client", Figure::Time(median(times)));
    row.compare("through bash, native", Some(native));
    Ok(row)
}
