//! The daemon: config, HTTP and WebSocket, authentication, translation between `wire` and `engine`.
//!
//! Knows no kernel and no SQL: it asks the engine, and is handed a backend. It reads no environment either; `main` does.
//! Read in this order: [`serve`] is the daemon from start to end, [`app`] what every request passes, [`routes`] what
//! it can ask, [`stream`] and [`events`] how output leaves, [`convert`] and [`error`] the translations.

#![forbid(unsafe_code)]

pub mod config;
pub mod data_dir;
pub mod lease;
pub mod listen;
pub mod log;
pub mod refusal;
pub mod serve;
pub mod settings;

pub mod app;
pub mod auth;
pub mod body;
pub mod clock;
pub mod conditions;
pub mod convert;
pub mod dialects;
pub mod error;
pub mod events;
pub mod metrics;
pub mod openapi;
pub mod origin;
pub mod params;
pub mod quantity;
pub mod routes;
pub mod stream;
pub mod traces;
pub mod unread;

pub use config::{Config, ConfigError, Layers, Machine, Settings};
pub use data_dir::{DataDir, DataDirError, Listening};
pub use lease::PrivateDir;
pub use listen::Listener;
pub use serve::{Daemon, Ended, ServeError, Start, check, choose_key};

/// The version after its label, as a text that lies in the executable. Nothing but tests ever changes it, in a copy of the
/// program, to have an upgrade without a second build.
#[used]
static VERSION: &str = concat!("shoal version ", env!("CARGO_PKG_VERSION"));

/// The version of this program.
pub fn version() -> &'static str {
    let text: &'static str = std::hint::black_box(VERSION);
    text.rsplit(' ').next().unwrap_or(text)
}
