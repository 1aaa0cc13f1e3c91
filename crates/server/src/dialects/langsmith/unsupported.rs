//! What this server cannot do, said in words that clients turn into their own exceptions.

use axum::Json;
use serde_json::{Value, json};

use super::error::Refusal;

/// Registries are the operator's business.
pub async fn registry() -> Refusal {
    Refusal::unsupported(
        "this server keeps no registries; credentials are in the Docker configuration that the operator names",
    )
}

/// There are none.
pub async fn registries() -> Json<Value> {
    Json(json!({"items": [], "registries": [], "next_cursor": null}))
}

/// Nobody pays.
pub async fn costs() -> Refusal {
    Refusal::unsupported("this server counts no costs")
}
