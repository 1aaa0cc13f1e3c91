//! Successes as clients read them: `{"success": true, "data": ...}` with the one status that belongs to the route.

use axum::Json;
use axum::http::StatusCode;
use serde_json::{Value, json};

/// What a handler answers with.
pub type Answer = (StatusCode, Json<Value>);

/// A success with 200.
pub fn done(data: Value) -> Answer {
    with(StatusCode::OK, data)
}

/// A success with another status.
pub fn with(status: StatusCode, data: Value) -> Answer {
    (status, Json(json!({"success": true, "data": data})))
}
