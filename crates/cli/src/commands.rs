//! What the subcommands do, a file per noun. The daemon's work is elsewhere: these ask, wait and show.
//!
//! May use every other folder; none of them uses this one.

pub mod admin;
pub mod build;
pub mod command;
pub mod completions;
pub mod config;
pub mod copy;
pub mod dialects;
pub mod doctor;
pub mod forward;
pub mod image;
pub mod key;
pub mod launcher;
pub mod lifetime;
pub mod logs;
pub mod net;
pub mod pause;
pub mod pool;
pub mod ports;
pub mod run;
pub mod sandbox;
pub mod secret;
pub mod serve;
pub mod shell;
pub mod snapshot;
pub mod stats;
pub mod template;
pub mod top;
pub mod variables;
pub mod version;
pub mod volume;
pub mod watch;
pub mod webhook;

use crate::environment::Environment;
use crate::output::report;

/// Deletes each of `names` with `delete`, which returns the whole name, whatever becomes of the others. The exit code.
async fn delete_each(
    noun: &str,
    names: &[String],
    environment: &Environment,
    delete: impl AsyncFn(&str) -> anyhow::Result<String>,
) -> i32 {
    let mut failures = 0;
    for name in names {
        match delete(name).await {
            Ok(name) => report::done(&format!("deleted {noun} `{name}`")),
            Err(error) => {
                failures += 1;
                report::failure(&error, environment.colour);
            }
        }
    }
    i32::from(failures > 0)
}
