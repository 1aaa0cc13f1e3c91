//! Which daemon a subcommand talks to, how a private or a detached one is started, and what configures one.

pub mod detached;
pub mod find;
pub mod notify;
pub mod private;
pub mod settings;

/// The first descriptor beyond stdin, stdout and stderr.
pub const FIRST_OWN_DESCRIPTOR: i32 = 3;
