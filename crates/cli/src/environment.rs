//! The environment variables that `shoal` knows, read once.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::PathBuf;

use server::Where;

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
    /// `SHOAL_CONFIG`: the configuration file. Empty: none.
    pub config: Option<PathBuf>,
    /// All that begin with `SHOAL_`; settings of a daemon are among them.
    pub variables: BTreeMap<String, OsString>,
    /// `SHOAL_LOG`: what `serve` logs.
    pub log: Option<String>,
    /// `SHOAL_PRIVATE_DIR`: where `run` keeps its own daemon.
    pub private_dir: PathBuf,
    /// `SHOAL_PRIVATE_LINGER`: how long that daemon stays after the last command, as it was written.
    pub private_linger: Option<String>,
    /// `NOTIFY_SOCKET`: where the service manager listens that has started `serve`.
    pub notify_socket: Option<OsString>,
    /// `TERM` and `COLORTERM`: what terminal we are at, for programs that run at it.
    pub terminal: Vec<(String, String)>,
    /// `SHOAL_REGISTRY_USERNAME`, for registries of images.
    pub registry_username: Option<String>,
    /// `SHOAL_REGISTRY_PASSWORD`, with it.
    pub registry_password: Option<String>,
    /// Docker's credentials: in `DOCKER_CONFIG`, or in `.docker` in `HOME`.
    pub docker_config: Option<PathBuf>,
    /// Where a daemon looks for the configuration of package managers: in `HOME`, `CARGO_HOME` and their variables.
    pub package_managers: Where,
    /// Whether stderr may be coloured.
    pub colour: bool,
    /// Whether stdout may be coloured.
    pub colour_stdout: bool,
}

/// When colours are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Color {
    /// On a terminal
    #[default]
    Auto,
    /// Also in files and pipes
    Always,
    /// Never
    Never,
}

/// What is said about colours outside the command line.
#[derive(Debug, Default)]
struct ColourWishes {
    no_color: bool,
    clicolor_force: bool,
    clicolor_off: bool,
    dumb: bool,
}

impl ColourWishes {
    /// The command line goes first, then `NO_COLOR`, `CLICOLOR_FORCE` and `CLICOLOR`, then what the stream is.
    fn resolve(&self, color: Color, is_terminal: bool) -> bool {
        match color {
            Color::Always => true,
            Color::Never => false,
            Color::Auto if self.no_color => false,
            Color::Auto if self.clicolor_force => true,
            Color::Auto => is_terminal && !self.clicolor_off && !self.dumb,
        }
    }
}

impl Environment {
    /// A variable that the command line names.
    pub fn variable(&self, name: &str) -> Option<std::ffi::OsString> {
        std::env::var_os(name)
    }

    /// Reads all of them.
    pub fn read(color: Color) -> Self {
        let text = |name: &str| std::env::var(name).ok();
        let given = |name: &str| text(name).filter(|value| !value.is_empty());
        let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let colours = ColourWishes {
            no_color: given("NO_COLOR").is_some(),
            clicolor_force: given("CLICOLOR_FORCE").is_some_and(|value| value != "0"),
            clicolor_off: given("CLICOLOR").is_some_and(|value| value == "0"),
            dumb: given("TERM").is_some_and(|value| value == "dumb"),
        };
        let own_private =
            || PathBuf::from(format!("{PRIVATE_DIR_PREFIX}{}", rustix::process::geteuid().as_raw()));
        Self {
            url: given("SHOAL_URL"),
            // An empty key is not the same as none: a daemon must not fall back to another key in silence.
            api_key: text("SHOAL_API_KEY"),
            data_dir: path("SHOAL_DATA_DIR"),
            config: std::env::var_os("SHOAL_CONFIG").map(PathBuf::from),
            variables: std::env::vars_os()
                .filter_map(|(name, value)| Some((name.into_string().ok()?, value)))
                .filter(|(name, _)| name.starts_with("SHOAL_"))
                .collect(),
            log: given("SHOAL_LOG"),
            private_dir: path("SHOAL_PRIVATE_DIR").unwrap_or_else(own_private),
            private_linger: given("SHOAL_PRIVATE_LINGER"),
            notify_socket: std::env::var_os("NOTIFY_SOCKET").filter(|value| !value.is_empty()),
            terminal: ["TERM", "COLORTERM"]
                .into_iter()
                .filter_map(|name| Some((name.to_owned(), given(name)?)))
                .collect(),
            registry_username: given("SHOAL_REGISTRY_USERNAME"),
            registry_password: given("SHOAL_REGISTRY_PASSWORD"),
            docker_config: docker_config(path("DOCKER_CONFIG"), path("HOME")),
            package_managers: Where {
                root: "/".into(),
                homes: path("HOME").into_iter().collect(),
                cargo_homes: path("CARGO_HOME").into_iter().collect(),
                variables: std::env::vars_os()
                    .filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)))
                    .collect(),
            },
            colour: colours.resolve(color, std::io::stderr().is_terminal()),
            colour_stdout: colours.resolve(color, std::io::stdout().is_terminal()),
        }
    }
}

/// Where Docker keeps its credentials.
fn docker_config(directory: Option<PathBuf>, home: Option<PathBuf>) -> Option<PathBuf> {
    let directory = directory.or_else(|| Some(home?.join(".docker")))?;
    Some(directory.join("config.json"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_strongest_word_on_colours_holds() {
        let none = ColourWishes::default();
        assert!(none.resolve(Color::Auto, true) && !none.resolve(Color::Auto, false));
        let all = ColourWishes { no_color: true, clicolor_force: true, clicolor_off: true, dumb: true };
        assert!(all.resolve(Color::Always, false), "the command line is the strongest");
        assert!(!all.resolve(Color::Auto, true), "then NO_COLOR");
        let forced = ColourWishes { clicolor_force: true, clicolor_off: true, ..ColourWishes::default() };
        assert!(forced.resolve(Color::Auto, false) && !forced.resolve(Color::Never, true));
        let off = ColourWishes { clicolor_off: true, ..ColourWishes::default() };
        let dumb = ColourWishes { dumb: true, ..ColourWishes::default() };
        assert!(!off.resolve(Color::Auto, true) && !dumb.resolve(Color::Auto, true));
    }
}
