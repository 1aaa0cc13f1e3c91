//! The terminal that a person sits at, and the three streams that every program has. Knows no other folder.

pub mod detach;
pub mod interrupts;
mod mode;
pub mod pipes;
pub mod screen;
pub mod session;

pub use mode::{Raw, is_typed_on, size};
