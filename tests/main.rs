//! All black-box tests, in one executable: a module for each file.
//!
//! The runner starts each test in its own process, so tests share only compiled code. The library beside them has the
//! common parts.

mod auth;
mod builds;
mod cli;
mod commands;
mod copy;
mod disk;
mod distribution;
mod documents;
mod events;
mod export;
mod files;
mod fork;
mod harness;
mod hostile_bytes;
mod images;
mod isolation;
mod labels;
mod lifecycle;
mod lifetimes;
mod limits;
mod model;
mod network;
mod observe;
mod oneshot;
mod owners;
mod pause;
mod pools;
mod ports;
mod recovery;
mod scope;
mod secrets;
mod snapshots;
mod spares;
mod stuck;
mod templates;
mod terminal;
mod tls;
mod upgrade;
mod volumes;
