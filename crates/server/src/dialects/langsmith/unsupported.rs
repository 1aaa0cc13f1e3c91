//! What this server cannot do, said in words that clients turn into their own exceptions.

use axum::Json;
use serde_json::{Value, json};

use super::error::Refusal;
use super::read::{Meant, Target};

/// Ports of a sandbox cannot be reached from outside.
pub async fn service(_: Meant) -> Refusal {
    Refusal::unsupported("this server does not give access to the ports of a sandbox")
}

/// There are none.
pub async fn services(_: Meant) -> Json<Value> {
    Json(json!({"items": [], "next_cursor": null}))
}

/// As with [`service`].
pub async fn tunnel(_: Target) -> Refusal {
    Refusal::unsupported("this server does not give access to the ports of a sandbox")
}

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
