//! The daemon: config, HTTP and WebSocket, authentication, translation between `wire` and `engine`.
//!
//! Knows no kernel and no SQL: it asks the engine, and is handed a backend. It reads no environment either; `main` does.
//! Read in this order: [`daemon`] is the daemon from start to end, [`http`] what every request passes, [`native`] our own API,
//! [`dialects`] the protocols of others, [`ports`] the way to servers in sandboxes. [`config`] is what the operator says, [`observe`] what the operator sees.

#![forbid(unsafe_code)]

pub mod config;
pub mod daemon;
pub mod dialects;
pub mod http;
pub mod native;
pub mod observe;
pub mod ports;
pub mod webhook;

pub use config::{Config, ConfigError, Layers, Machine, Settings};
pub use daemon::data_dir::{DataDir, DataDirError, Listening};
pub use daemon::listen::Listener;
pub use daemon::private::PrivateDir;
pub use daemon::serve::{Daemon, Ended, ServeError, Start, check, choose_key};
pub use engine::network::presets::Where;

/// The version after its label, as a text that lies in the executable. Nothing but tests ever changes it, in a copy of the
/// program, to have an upgrade without a second build.
#[used]
static VERSION: &str = concat!("shoal version ", env!("CARGO_PKG_VERSION"));

/// The version of this program.
pub fn version() -> &'static str {
    let text: &'static str = std::hint::black_box(VERSION);
    text.rsplit(' ').next().unwrap_or(text)
}
