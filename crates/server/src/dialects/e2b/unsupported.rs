//! What this server cannot do, said in words that clients turn into their own exceptions.

use super::error::Refusal;
use super::read::{Meant, Target};

/// Captures and copies of sandboxes.
pub async fn snapshot(_: Meant) -> Refusal {
    Refusal::unsupported(
        "this server does not make snapshots or forks for this client; use POST /v1/sandboxes/{id}/snapshots",
    )
}

/// Templates are made by the native API.
pub async fn templates() -> Refusal {
    Refusal::unsupported(
        "this server does not build templates for this client; make one with `shoal template`",
    )
}

/// Volumes are mounted through templates.
pub async fn volumes() -> Refusal {
    Refusal::unsupported("this server does not manage volumes for this client; use `shoal volume`")
}

/// There are no kernels.
pub async fn interpreter(_: Target) -> Refusal {
    Refusal::unsupported("this server has no code interpreter; run a program with `commands.run`")
}
