//! What the operator sees of the daemon: the log, metrics and traces.

pub mod log;
pub mod metrics;
pub mod traces;
