//! What operators and callers can see: metrics, timings, events, usage, and the clock that all of them read.

pub mod clock;
pub(crate) mod events;
pub(crate) mod measured;
pub(crate) mod metrics;
pub mod stats;
pub(crate) mod timing;
