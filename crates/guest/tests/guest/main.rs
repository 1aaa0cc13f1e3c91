//! Init as the daemon sees it: the real program, in a process namespace of its own, over a real socket.

mod support;

mod commands;
mod connection;
mod files;
mod footprint;
mod protocol;
mod streams;
mod terminal;
mod trees;
