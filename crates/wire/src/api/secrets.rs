//! Bodies about secrets that sandboxes use without holding them, and about the ledger of their use.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `PUT /v1/secrets/{secret}`. Exactly one of `value`, `file` and `environment` must be given.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SetSecret {
    /// The value, at most 64 KiB on one line. Kept encrypted; nothing returns it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// An absolute path on the daemon's machine, read again after `cache_seconds`. For admins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// A variable of the daemon. For admins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub environment: Option<String>,
    /// Reserved: this version refuses to run commands for a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<Vec<String>>,
    /// `anthropic`, `gcp`, `github`, `huggingface`, `npm`, `openai` or `pypi`: the rules and variables of that service.
    /// Default: the secret's name, if that is a preset and `rules` is empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Which requests get it, at most 64. Without any, those of the preset, or those that the secret has.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<SecretRule>,
    /// Variables that hold a placeholder inside sandboxes, at most 8. Without any, as for `rules`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub variables: Vec<String>,
    /// How long what was read of a file is used, 1 to 86,400. Default: 300.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache_seconds: Option<u64>,
}

/// Which requests get a secret, and how.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SecretRule {
    /// `api.example.com`, or `*.example.com`, which includes `example.com`. Never a public suffix.
    pub domain: String,
    /// Ports and ranges. Default: 443.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ports: Vec<String>,
    /// Only these methods. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub methods: Vec<String>,
    /// Only these paths and what is below them. Default: all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub paths: Vec<String>,
    /// How.
    pub inject: SecretInject,
}

/// How a secret gets into a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum SecretInject {
    /// As `Authorization: Bearer VALUE`.
    Bearer,
    /// As `Authorization: Basic`, with the value as the password.
    Basic {
        /// The user.
        user: String,
    },
    /// As a header.
    Header {
        /// The header.
        name: String,
        /// What comes before the value, for example `Token `.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        prefix: String,
    },
    /// As a parameter of the query.
    Query {
        /// The parameter.
        name: String,
    },
    /// Wherever the program wrote the placeholder.
    Placeholder {
        /// In headers, also inside `Authorization: Basic`.
        #[serde(default)]
        header: bool,
        /// In the query.
        #[serde(default)]
        query: bool,
        /// In the body, if it is not compressed.
        #[serde(default)]
        body: bool,
    },
}

/// A secret, without its value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Secret {
    /// Its name.
    pub name: String,
    /// `value`, `file` or `environment`.
    pub source: String,
    /// The path or the variable; shown to admins only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Which requests get it.
    pub rules: Vec<SecretRule>,
    /// Variables that hold a placeholder inside sandboxes.
    pub variables: Vec<String>,
    /// How often its value was set.
    pub version: u32,
    /// How many sandboxes may use it.
    pub sandboxes: u64,
    /// When it was made.
    pub created_at: String,
    /// When its value was last set.
    pub updated_at: String,
}

/// `GET /v1/secrets`, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SecretList {
    /// The secrets.
    pub secrets: Vec<Secret>,
}

/// `GET /v1/ledger`, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LedgerPage {
    /// The lines.
    pub lines: Vec<LedgerLine>,
}

/// A request that carried a secret.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LedgerLine {
    /// Increases from line to line; pass it as `after` to get later ones.
    pub number: u64,
    /// When the request began.
    pub at: String,
    /// The sandbox, which may be gone.
    #[schema(value_type = String)]
    pub sandbox_id: crate::SandboxId,
    /// The name that the secret had.
    pub secret: String,
    /// The host.
    pub host: String,
    /// The port.
    pub port: u16,
    /// The method.
    pub method: String,
    /// The path, without the query.
    pub path: String,
    /// The status of the answer; absent if there was none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Bytes of the request's body.
    pub sent_bytes: u64,
    /// Bytes of the answer's body.
    pub received_bytes: u64,
    /// The hash of this line and all before it, in hexadecimal.
    pub hash: String,
}

/// `GET /v1/ledger/verify`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LedgerCheck {
    /// Whether no line was changed or removed.
    pub whole: bool,
    /// How many lines are valid, from the first that is kept.
    pub lines: u64,
    /// The first line that was changed, or that is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub broken_at: Option<u64>,
}
