//! What this server does not have, said in words that name what to use instead.

use super::error::Refusal;
use super::read::Meant;
use axum::http::StatusCode;

/// Files over another base.
pub async fn rebase(_: Meant) -> Refusal {
    Refusal::unsupported(
        "this server does not put a sandbox's files over another image: claim one from another template, and copy files",
    )
}

/// Processes that are started again by themselves.
pub async fn sessions(_: Meant) -> Refusal {
    Refusal::not_here(
        "this server has no supervised sessions: start a context without `wait_until_done`, and read it with its stream",
    )
}

/// Events, logs and metrics. With the status that clients know for it.
pub async fn observability(_: Meant) -> Refusal {
    let message = "this server keeps no observability data for this client: use `GET /v1/events`, `GET /v1/sandboxes/{id}/stats` and `/metrics`";
    Refusal::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", message)
}

/// Secrets that are added on the way out.
pub async fn credentials() -> Refusal {
    Refusal::not_here("this server does not keep credential sources for this client")
}

/// Files and snapshots of volumes.
pub async fn volumes() -> Refusal {
    Refusal::not_here(
        "this server does not show files and snapshots of volumes to this client: mount the volume, or use `shoal volume`",
    )
}

/// Bills.
pub async fn usage() -> Refusal {
    Refusal::not_here("this server counts no usage by time: use `GET /v1/stats` and `/metrics`")
}

/// Registries.
pub async fn registry() -> Refusal {
    Refusal::not_here("this server has no registry: push to your own, or use `shoal build` and `shoal image`")
}

/// Keys.
pub async fn keys() -> Refusal {
    Refusal::not_here("this server does not manage keys for this client: use `shoal key`")
}

/// Logins, teams and regions.
pub async fn accounts() -> Refusal {
    Refusal::not_here(
        "this server has no logins, teams and regions: a key of `shoal key` is all that is needed",
    )
}
