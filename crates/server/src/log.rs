//! Logs: for people on a terminal, as JSON for machines. Secrets never get this far: no header is ever logged.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::ParseError;

/// What is logged when nobody says otherwise.
pub const FILTER_DEFAULT: &str = "info";

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

/// Sends logs to stderr from now on. `filter` is in the manner of `info,shoal_engine=debug`.
pub fn start(format: Format, filter: &str) -> Result<(), ParseError> {
    let filter = EnvFilter::builder().parse(filter)?;
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        Format::Human { colour } => logs.with_ansi(colour && std::io::stderr().is_terminal()).init(),
        Format::Json => logs.json().flatten_event(true).with_current_span(false).init(),
    }
    Ok(())
}
