//! The engine on the fake backend, with all its tests in one executable: a module for each file.

mod common;

mod basics;
mod builds;
mod dockerfiles;
mod events;
mod failures;
mod files;
mod forks;
mod hooks;
mod images;
mod labels;
mod lifetimes;
mod networks;
mod owner;
mod pause;
mod pools;
mod ports;
mod schemas;
mod snapshots;
mod stats;
mod streams;
mod versions;
mod volumes;
