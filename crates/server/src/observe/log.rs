//! Logs: for people on a terminal, as JSON for machines. Secrets never get this far: no header is ever logged.

use std::error::Error;
use std::io::IsTerminal;

use tracing_subscriber::filter::ParseError;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

use crate::observe::traces::Traces;

/// What is logged when nobody says otherwise.
pub const FILTER_DEFAULT: &str = "info";
/// What is logged to a person by default: trouble, and how much disk the daemon has taken.
pub const FILTER_QUIET: &str = "warn,shoal_runtime::ns::link=info";

/// How logs are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Lines for people.
    Human {
        /// Whether to use colour, if stderr is a terminal.
        colour: bool,
    },
    /// One object per line.
    Json,
}

/// Sends logs to stderr from now on, and traces to where they go. `filter` is in the manner of `info,shoal_engine=debug`.
pub fn start(format: Format, filter: &str, traces: Option<&Traces>) -> Result<(), ParseError> {
    // Spans for traces are not for logs, whatever the filter says.
    let untraced = format!("{}=off", engine::TRACE_TARGET);
    let untraced = untraced.parse().expect("a target and a level are a directive");
    let filter = EnvFilter::builder().parse(filter)?.add_directive(untraced);
    let logs = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let logs = match format {
        Format::Human { colour } => logs.with_ansi(colour && std::io::stderr().is_terminal()).boxed(),
        Format::Json => logs.json().flatten_event(true).with_current_span(false).boxed(),
    };
    match traces {
        // One filter for all, which is quicker than one for each.
        None => tracing_subscriber::registry().with(logs).with(filter).init(),
        Some(traces) => {
            tracing_subscriber::registry().with(logs.with_filter(filter)).with(traces.layer()).init();
        }
    }
    Ok(())
}

/// `what: why: why that`, in one line.
pub fn chain_of(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}
