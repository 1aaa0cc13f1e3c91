//! What people and programs read: results, failures and progress. Knows the terminal, and no subcommand.

pub mod age;
pub mod amount;
pub mod hints;
pub mod layers;
pub mod print;
pub mod progress;
pub mod report;
