//! The engine on the fake backend, with all its tests in one executable: a module for each file.

mod common;

mod basics;
mod builds;
mod failures;
mod files;
mod images;
mod labels;
mod lifetimes;
mod owner;
mod pools;
mod schemas;
mod snapshots;
mod stats;
mod streams;
mod versions;
