//! What this server cannot do, said in words that the client puts into its own exceptions.

use super::error::Refusal;
use super::read::Target;

/// Snapshots, tunnels, terminals, logs and usage of a devbox.
pub async fn devbox(_: Target) -> Refusal {
    Refusal::unsupported("this server does not offer this operation on a devbox yet")
}

/// Snapshots, secrets, objects and network policies.
pub async fn daemon() -> Refusal {
    Refusal::unsupported(
        "this server does not offer snapshots, secrets, objects and network policies to Runloop's client yet",
    )
}
