//! Checks of requests that several calls share.

use sha2::{Digest as _, Sha256};

use crate::{EngineError, Field, PAGE_DEFAULT, PAGE_MAX};

pub(crate) fn digest(request: &impl serde::Serialize) -> [u8; 32] {
    let text = serde_json::to_vec(request).expect("requests are made of types that JSON can write");
    Sha256::digest(&text).into()
}

pub(crate) fn page_limit(limit: Option<u32>) -> Result<usize, EngineError> {
    match limit.unwrap_or(PAGE_DEFAULT) {
        limit @ 1..=PAGE_MAX => Ok(limit as usize),
        limit => Err(Field::Limit.must(format!("be between 1 and {PAGE_MAX}, got {limit}"))),
    }
}

/// A cursor that no page has given.
pub(crate) fn bad_cursor() -> EngineError {
    Field::Cursor.must("be the `next_cursor` of a page")
}

/// The most snapshots that a history keeps.
pub const HISTORY_MAX: u32 = 100;

/// Checks how much history a caller asks for.
pub(crate) fn check_history(kept: u32) -> Result<u32, EngineError> {
    match kept {
        0..=HISTORY_MAX => Ok(kept),
        kept => Err(Field::History.must(format!("be at most {HISTORY_MAX}, got {kept}"))),
    }
}
