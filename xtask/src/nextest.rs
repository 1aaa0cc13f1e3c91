//! The test runner: the machine's own cargo-nextest, or one that is installed below `target`.
//!
//! `cargo test` would do, but it has no deadlines, runs a whole file of tests in one process, and cannot keep the heavy
//! tests apart from the others.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Result;

/// The version to install if there is none: the one that `.config/nextest.toml` was tested with.
const VERSION: &str = "0.9.143";

/// Where `cargo nextest` is.
pub struct Nextest {
    /// The folder of the one below `target`; `None` for the machine's own.
    folder: Option<PathBuf>,
}

impl Nextest {
    /// Adds it to the path of a cargo command.
    pub fn add_to(&self, cargo: &mut Command) {
        let Some(folder) = &self.folder else { return };
        let mut path = OsString::from(folder);
        if let Some(rest) = std::env::var_os("PATH") {
            path.push(":");
            path.push(rest);
        }
        cargo.env("PATH", path);
    }

    fn answers(&self) -> bool {
        let mut cargo = super::cargo();
        self.add_to(&mut cargo);
        super::answers(cargo.args(["nextest", "--version"]))
    }
}

/// `None` if there is none and it cannot be installed, for instance without a network.
pub fn find_or_install() -> Result<Option<Nextest>> {
    let own = Nextest { folder: None };
    if own.answers() {
        return Ok(Some(own));
    }
    let root = super::root().join("target/tools");
    let installed = Nextest { folder: Some(root.join("bin")) };
    if !installed.answers() {
        let mut install = super::cargo();
        // The debug profile: it compiles in a third of the time, and a runner mostly waits.
        install.args(["install", "--locked", "--debug", "--quiet", "cargo-nextest", "--version", VERSION]);
        install.arg("--root").arg(&root);
        if let Err(error) =
            super::step(&format!("install cargo-nextest {VERSION} below target/tools"), install)
        {
            eprintln!("xtask: {error:#}");
            return Ok(None);
        }
    }
    Ok(Some(installed))
}
