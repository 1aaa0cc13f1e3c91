//! The environment variables that `shoal` knows, read once.

use std::io::IsTerminal;
use std::path::PathBuf;

/// Where a private daemon lives if nothing else is said; the user's id follows. Not `/tmp`, which may be memory.
const PRIVATE_DIR_PREFIX: &str = "/var/tmp/shoal-private-";

/// What was set.
#[derive(Debug)]
pub struct Environment {
    /// `SHOAL_URL`: the daemon to talk to.
    pub url: Option<String>,
    /// `SHOAL_API_KEY`: its key; for `serve`, the key to set.
    pub api_key: Option<String>,
    /// `SHOAL_DATA_DIR`: the daemon of this data directory.
    pub data_dir: Option<PathBuf>,
    /// `SHOAL_LISTEN`, for `serve`.
    pub listen: Option<String>,
    /// `SHOAL_PUBLIC_URL`, for `serve`.
    pub public_url: Option<String>,
    /// `SHOAL_LOG`: what `serve` logs.
    pub log: Option<String>,
    /// `SHOAL_PRIVATE_DIR`: where `run` keeps its own daemon.
    pub private_dir: PathBuf,
    /// `TERM` and `COLORTERM`: what terminal we are at, for programs that run at it.
    pub terminal: Vec<(String, String)>,
    /// Whether stderr may be coloured: it is a terminal, and `NO_COLOR` is not set.
    pub colour: bool,
}

impl Environment {
    /// Reads all of them.
    pub fn read() -> Self {
        let text = |name: &str| std::env::var(name).ok();
        let given = |name: &str| text(name).filter(|value| !value.is_empty());
        let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let own_private =
            || PathBuf::from(format!("{PRIVATE_DIR_PREFIX}{}", rustix::process::geteuid().as_raw()));
        Self {
            url: given("SHOAL_URL"),
            // An empty key is not the same as none: a daemon must not fall back to another key in silence.
            api_key: text("SHOAL_API_KEY"),
            data_dir: path("SHOAL_DATA_DIR"),
            listen: given("SHOAL_LISTEN"),
            public_url: given("SHOAL_PUBLIC_URL"),
            log: given("SHOAL_LOG"),
            private_dir: path("SHOAL_PRIVATE_DIR").unwrap_or_else(own_private),
            terminal: ["TERM", "COLORTERM"]
                .into_iter()
                .filter_map(|name| Some((name.to_owned(), given(name)?)))
                .collect(),
            colour: std::io::stderr().is_terminal()
                && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
        }
    }
}
