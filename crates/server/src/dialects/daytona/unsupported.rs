//! What this server cannot do, said in words that the client puts into its own exceptions.

use super::error::Refusal;
use super::read::{Meant, Target};

/// There is no storage that is slower and cheaper than that of a stopped sandbox.
pub async fn archive(_: Meant) -> Refusal {
    Refusal::unsupported("this server does not archive sandboxes; stop the sandbox, which keeps its files")
}

/// Everything else about a sandbox.
pub async fn sandbox(_: Meant) -> Refusal {
    Refusal::unsupported("this server does not offer this operation on a sandbox yet")
}

/// Ports.
pub async fn ports(_: Meant) -> Refusal {
    Refusal::unsupported(
        "this server does not offer the ports of a sandbox to Daytona's client yet; use `shoal url` or `shoal forward`",
    )
}

/// Snapshots and volumes.
pub async fn daemon() -> Refusal {
    Refusal::unsupported(
        "this server does not offer snapshots and volumes to Daytona's client yet; make templates and volumes with `shoal`",
    )
}

/// Terminals, interpreters, permissions.
pub async fn toolbox(_: Target) -> Refusal {
    Refusal::unsupported("this server does not offer this operation inside of a sandbox yet; use a command")
}
