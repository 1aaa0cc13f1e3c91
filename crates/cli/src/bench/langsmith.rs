//! The LangSmith dialect: a command with its real client beside the native route, and output as it sends it.
//!
//! The client is a Python package that Shoal does not ship; a flag names the interpreter that can import it. A minimal
//! client reads the output, so that the figure measures the daemon and not Python.

use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::Deserialize;
use serde_json::json;
use tungstenite::Message;
use tungstenite::client::IntoClientRequest;
use wire::SandboxId;

use super::python::{Client, times};
use super::report::{Figure, Row, median};
use crate::daemon::find::read_key;

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
    let variables = [
        ("LANGSMITH_ENDPOINT", url.to_owned()),
        ("LANGSMITH_API_KEY", read_key(data_dir)?),
        ("LANGSMITH_TRACING", "false".into()),
        ("NO_PROXY", "127.0.0.1".into()),
    ];
    let client = Client { name: "LangSmith", python, program: PROGRAM, variables: &variables };
    let times = times(client, rounds).await?;
    let mut row = Row::new("`sb.run(\"true\")`, LangSmith's Python client", Figure::Time(median(times)));
    row.compare("through bash, native", Some(native));
    Ok(row)
}

/// What the daemon says on the WebSocket, as far as it is counted.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Said {
    Started,
    Stdout {
        data: String,
        offset: u64,
    },
    Exit {
        exit_code: i32,
    },
    #[serde(other)]
    Other,
}

/// Lines of text, as JSON, until so many bytes have come.
pub fn output(url: &str, key: &str, sandbox: SandboxId, bytes: u64) -> anyhow::Result<Duration> {
    let address = url.strip_prefix("http://").context("the daemon of the benchmark speaks plain HTTP")?;
    let url = format!("ws://{address}/langsmith/dp/{sandbox}/execute/ws");
    let mut request = url.into_client_request().context("an address cannot be asked")?;
    request.headers_mut().insert("x-api-key", key.parse().context("a key that is no header")?);
    let began = Instant::now();
    let connection = TcpStream::connect(address).context("cannot connect")?;
    let (mut socket, _) = tungstenite::client(request, connection).context("no WebSocket was opened")?;
    let line = "x".repeat(79);
    let command = format!("yes {line} | head -c {bytes}");
    let execute = json!({"type": "execute", "command": command, "timeout_seconds": 600, "close_stdin": true})
        .to_string();
    socket.send(Message::Text(execute.into())).context("a command was not sent")?;
    let mut got = 0;
    loop {
        let Message::Text(text) = socket.read().context("the connection broke")? else { continue };
        match serde_json::from_str(&text).context("a message is not what it should be")? {
            Said::Stdout { data, offset } => {
                ensure!(offset == got, "a piece came at {offset} where {got} was next");
                got += data.len() as u64;
            }
            Said::Exit { exit_code: 0 } => break,
            Said::Exit { exit_code } => bail!("the command exited with {exit_code}"),
            Said::Started => {}
            Said::Other => bail!("the daemon said: {text}"),
        }
    }
    ensure!(got == bytes, "{got} bytes came of {bytes}");
    Ok(began.elapsed())
}
