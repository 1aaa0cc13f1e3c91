//! Bodies about images.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::ErrorBody;

/// `POST /v1/images/pull`
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PullImage {
    /// Such as `python:3.12`, `registry.local:5000/team/app:1`, `…@sha256:…`.
    pub reference: String,
    /// Such as `linux/arm64`. Default: this machine's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// User name for the registry. Images pulled with credentials are visible to this key's owner only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// Password that belongs to `username`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// Instead of both: a token that the registry exchanges for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_token: Option<String>,
    /// Use plain HTTP with the registry. Needs a key with admin rights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// A stored image.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Digest of its manifest.
    pub digest: String,
    /// Names of the image.
    pub names: Vec<String>,
    /// Aliases that an operator gave to those names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Whether only this key's owner can see it.
    pub private: bool,
    /// Platform that it is made for.
    pub platform: String,
    /// Number of bytes that were downloaded.
    pub size_bytes: u64,
    /// Total size of its files.
    pub unpacked_bytes: u64,
    /// When it was stored.
    pub created_at: String,
    /// Number of the owner's sandboxes that were made from it.
    pub sandboxes: u64,
    /// How its programs run.
    pub config: ImageConfig,
    /// Layers, lowest first.
    pub layers: Vec<ImageLayer>,
}

/// How an image's programs run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageConfig {
    /// Variables for every command.
    pub env: BTreeMap<String, String>,
    /// User that commands run as; root if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Where commands run; `/workspace` if absent or `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<String>,
    /// What runs when a command names no program.
    pub entrypoint: Vec<String>,
    /// Arguments for `entrypoint`, or the program itself.
    pub command: Vec<String>,
    /// Labels of the image.
    pub labels: BTreeMap<String, String>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageLayer {
    /// Digest of the downloaded blob; absent for the layer that Shoal adds on top.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// Number of bytes that were downloaded.
    pub size_bytes: u64,
    /// Total size of its files.
    pub unpacked_bytes: u64,
    /// Number of files, links and directories.
    pub entries: u64,
    /// Number of device nodes that were left out.
    pub devices_skipped: u64,
    /// Number of entries with an owner id beyond 65,535, which now belong to `nobody`.
    pub owners_changed: u64,
    /// Number of extended attributes that were left out.
    pub attributes_dropped: u64,
}

/// `GET /v1/images`, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// All images that this key's owner may use, except `host`.
    pub images: Vec<Image>,
}

/// Progress of a pull or an import.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ImageEvent {
    /// Progress. The first event comes once the registry has described the image.
    Progress {
        /// Layers, lowest first.
        layers: Vec<LayerProgress>,
    },
    /// The image is stored.
    Done {
        /// One image from a registry; one or more from an archive.
        images: Vec<Image>,
    },
    /// The pull or import failed.
    Failed(ErrorBody),
}

/// Progress of a layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LayerProgress {
    /// Digest of the downloaded blob.
    pub digest: String,
    /// What happens to the layer.
    pub state: LayerState,
    /// Bytes of `total_bytes` that were downloaded so far, or read while unpacking.
    pub bytes: u64,
    /// Size of the download.
    pub total_bytes: u64,
}

/// What happens to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerState {
    /// Not started.
    Waiting,
    /// Being downloaded.
    Fetching,
    /// Downloaded.
    Fetched,
    /// Being unpacked.
    Unpacking,
    /// Stored.
    Done,
    /// Was stored already.
    Present,
}

/// What `POST /v1/images/gc` and `DELETE /v1/images/{image}` removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CollectedImages {
    /// Images without a name and without a sandbox.
    pub images: u64,
    /// Layers without an image.
    pub layers: u64,
    /// Total size of their files.
    pub bytes: u64,
}

/// A name that stands for an image.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageAlias {
    /// The alias.
    pub name: String,
    /// A reference, or `host`.
    pub target: String,
    /// When the alias was set.
    pub created_at: String,
}

/// `PUT /v1/image-aliases/{alias}`
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SetImageAlias {
    /// A reference, or `host`.
    pub target: String,
}

/// `GET /v1/image-aliases`, by name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageAliasList {
    /// All of them.
    pub aliases: Vec<ImageAlias>,
}
