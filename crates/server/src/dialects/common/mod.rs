//! What every dialect needs and none would do otherwise: usual statuses, and what an answer tells the log.

pub mod error;
