//! A backend for tests: sandboxes in memory, each with an init that speaks the real protocol.
//!
//! A test can make every step fail, break connections at any byte, make an init silent, kill it or let it break the
//! rules, and count what is left behind. The fake isolates nothing and runs no program: a command is a script of the
//! words below, one per line or separated by `;`.
//!
//! ```text
//! echo TEXT   err TEXT        a line on stdout, on stderr
//! flood N     flooderr N      N bytes of `pattern`, as fast as they are taken
//! cat                         stdin to stdout, to its end
//! sleep MS    gate NAME       waits for a time; for `FakeHost::open_gate`
//! exit N      signal N        ends so
//! oom                         ends as the kernel ends what took too much memory
//! oomchild                    the kernel ends a child so, which the command swallows
//! hang                        waits to be killed
//! missing                     (alone) does not start
//! ```
//!
//! These files exist:
//!
//! ```text
//! /flood/N    N bytes of `pattern`; a write to it must be just that
//! /hang       waits to be killed, read or written
//! ```
//!
//! Others can be created, moved, packed, unpacked and removed, and become part of captured layers; see `files`.

mod faults;
mod files;
mod host;
mod init;
mod network;
mod script;

pub use faults::{FakeFailure, FakeStep};
pub use files::{FakeFile, FakeFiles};
pub use host::{FakeHost, FakeThing};
pub use init::Violation;
pub use network::FakeNetworkCall;
pub use script::pattern;
