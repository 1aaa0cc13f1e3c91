//! What needs a real kernel, in one executable: a module for each file.

mod freeze;
mod idmap;
mod pool;
mod remove;
mod skew;
