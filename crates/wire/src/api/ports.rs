//! Ports of sandboxes, and links to them.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::{LinkId, SandboxId};

/// `GET /v1/sandboxes/{id}/ports`, sorted by number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortList {
    /// The ports that programs listen on.
    pub ports: Vec<PortInfo>,
}

/// A port that a program in a sandbox listens on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortInfo {
    /// The port.
    pub port: u16,
    /// The addresses that the program listens on.
    #[schema(value_type = Vec<String>)]
    pub addresses: Vec<IpAddr>,
    /// Whether it can be reached from outside: the program listens on 127.0.0.1, on ::1 or on all addresses.
    pub reachable: bool,
    /// The process that listens, if it could be found.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub process: Option<PortProcess>,
    /// Where a browser finds it; absent if the daemon has no host name for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

/// A process that listens on a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortProcess {
    /// Its id inside the sandbox.
    pub pid: u32,
    /// Its name, as the program chose it.
    pub name: String,
}

/// `POST /v1/sandboxes/{id}/links`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateLink {
    /// The port that the link opens. No program need listen there yet.
    pub port: u16,
    /// How long the link works, 1 second to 366 days; an hour by default.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub ttl_seconds: Option<f64>,
    /// The only methods that the link allows, such as `["GET", "HEAD"]`; all by default. A link with methods opens no
    /// WebSocket.
    #[serde(skip_serializing_if = "Vec::is_empty", default)]
    pub methods: Vec<String>,
    /// What the link is for, at most 200 bytes.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub label: Option<String>,
    /// Whether the port is open to everybody, without a token. Only if the operator allows it.
    #[serde(default)]
    pub public: bool,
}

/// A link that opens one port of one sandbox without a key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PortLink {
    /// Its id; not secret.
    #[schema(value_type = String)]
    pub id: LinkId,
    /// The sandbox.
    #[schema(value_type = String)]
    pub sandbox_id: SandboxId,
    /// The port.
    pub port: u16,
    /// What it is for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// The only methods that it allows; all if empty.
    pub methods: Vec<String>,
    /// Whether it opens the port to everybody.
    pub public: bool,
    /// When it was made.
    pub created_at: String,
    /// When it ends.
    pub expires_at: String,
}

/// The answer to `POST /v1/sandboxes/{id}/links`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CreatedLink {
    /// The link.
    #[serde(flatten)]
    pub link: PortLink,
    /// Opens the port in a browser. Contains the token.
    pub url: String,
    /// For programs, in the header `X-Shoal-Token`. Shown only here; absent if the port is public.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
}

/// `GET /v1/sandboxes/{id}/links`, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LinkList {
    /// The links that still work.
    pub links: Vec<PortLink>,
}
