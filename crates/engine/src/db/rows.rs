//! How values are converted to columns and back, for all tables.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rusqlite::Row;
use wire::SandboxId;

use crate::model::Owner;

pub(super) type DigestBytes = [u8; 32];

pub(super) fn id_bytes(id: SandboxId) -> [u8; 16] {
    id.bits().to_be_bytes()
}

pub(super) fn sandbox_id(row: &Row<'_>, column: &str) -> rusqlite::Result<SandboxId> {
    Ok(SandboxId::from_bits(u128::from_be_bytes(row.get(column)?)))
}

/// SQLite's integers are signed. Lengths and counts never reach the sign bit; if one did, reading it back would still
/// give the same value.
pub(super) fn signed(value: u64) -> i64 {
    value as i64
}

pub(super) fn unsigned(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(column)? as u64)
}

pub(super) fn optional_unsigned(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<u64>> {
    Ok(row.get::<_, Option<i64>>(column)?.map(|value| value as u64))
}

pub(super) fn micros(time: SystemTime) -> i64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
}

pub(super) fn bytes(row: &Row<'_>, column: &str) -> rusqlite::Result<Option<Bytes>> {
    Ok(row.get::<_, Option<Vec<u8>>>(column)?.map(Bytes::from))
}

pub(super) fn time(row: &Row<'_>, column: &str) -> rusqlite::Result<SystemTime> {
    Ok(UNIX_EPOCH + Duration::from_micros(unsigned(row, column)?))
}

pub(super) fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string(value).expect("rows are made of types that JSON can write")
}

pub(super) fn from_json<T: serde::de::DeserializeOwned>(row: &Row<'_>, column: &str) -> rusqlite::Result<T> {
    let at = row.as_ref().column_index(column)?;
    let text = row.get_ref(at)?.as_str()?;
    serde_json::from_str(text).map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(at, rusqlite::types::Type::Text, Box::new(error))
    })
}

/// The owner of a row. Every table with owners calls the column `owner`.
pub(super) fn owner_from(row: &Row<'_>) -> rusqlite::Result<Owner> {
    Owner::parse(row.get_ref("owner")?.as_str()?).map_err(|_| unreadable(row, "owner", "owner"))
}

/// The error for a value that this version does not know.
pub(super) fn unreadable(row: &Row<'_>, column: &str, what: &'static str) -> rusqlite::Error {
    row.as_ref().column_index(column).map_or_else(|missing| missing, |at| unknown(at, what))
}

/// The same error for code that has no row at hand.
pub(super) fn unknown(at: usize, what: &'static str) -> rusqlite::Error {
    let problem = format!("a {what} that this version does not know");
    rusqlite::Error::FromSqlConversionFailure(at, rusqlite::types::Type::Text, problem.into())
}
