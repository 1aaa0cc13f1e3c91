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
    /// Such as `linux/arm64`; this machine's if left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// For the registry. What is pulled so is seen by this key's owner alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub username: Option<String>,
    /// With `username`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub password: Option<String>,
    /// In the place of both: a token that the registry exchanges for others.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub identity_token: Option<String>,
    /// Speak plain HTTP with the registry. Needs a key with admin rights.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
}

/// An image that is here.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Image {
    /// Of its manifest.
    pub digest: String,
    /// What it is called.
    pub names: Vec<String>,
    /// Names that an operator gave to those.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// Whether only this key's owner sees it.
    pub private: bool,
    /// What it is made for.
    pub platform: String,
    /// What was fetched for it.
    pub size_bytes: u64,
    /// What its files hold.
    pub unpacked_bytes: u64,
    /// When it came here.
    pub created_at: String,
    /// How many of the owner's sandboxes were made from it.
    pub sandboxes: u64,
    /// How its programs run.
    pub config: ImageConfig,
    /// The lowest first.
    pub layers: Vec<ImageLayer>,
}

/// How an image's programs run.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageConfig {
    /// Variables for every command.
    pub env: BTreeMap<String, String>,
    /// Who commands run as; root if it is not there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Where commands run; `/workspace` if it is not there, or `/`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub working_directory: Option<String>,
    /// What runs when a command names no program.
    pub entrypoint: Vec<String>,
    /// Arguments of that, or the program itself.
    pub command: Vec<String>,
    /// Free pairs.
    pub labels: BTreeMap<String, String>,
}

/// One layer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageLayer {
    /// Of what was fetched; not there for the layer that Shoal puts on top.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    /// What was fetched.
    pub size_bytes: u64,
    /// What its files hold.
    pub unpacked_bytes: u64,
    /// Files, links and directories.
    pub entries: u64,
    /// Device nodes that were left out.
    pub devices_skipped: u64,
    /// Entries of owners beyond 65,535, which are `nobody`'s now.
    pub owners_changed: u64,
    /// Extended attributes that were left out.
    pub attributes_dropped: u64,
}

/// `GET /v1/images`, newest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageList {
    /// All that this key's owner may use. `host` is not among them.
    pub images: Vec<Image>,
}

/// What happens while an image is pulled or imported.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ImageEvent {
    /// How far it is. The first comes when the registry has said what the image is made of.
    Progress {
        /// The lowest first.
        layers: Vec<LayerProgress>,
    },
    /// It is here.
    Done {
        /// A registry gives one image, an archive one or more.
        images: Vec<Image>,
    },
    /// It did not come.
    Failed(ErrorBody),
}

/// How far a layer is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LayerProgress {
    /// Of what is fetched.
    pub digest: String,
    /// What happens to it.
    pub state: LayerState,
    /// Of `total_bytes`: fetched so far, or read while it is unpacked.
    pub bytes: u64,
    /// How much is fetched.
    pub total_bytes: u64,
}

/// What happens to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum LayerState {
    /// Nothing yet.
    Waiting,
    /// Its bytes arrive.
    Fetching,
    /// Its bytes are here.
    Fetched,
    /// It becomes files.
    Unpacking,
    /// It is here.
    Done,
    /// It was here before.
    Present,
}

/// What `POST /v1/images/gc` and `DELETE /v1/images/{image}` removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CollectedImages {
    /// Images without a name and a sandbox.
    pub images: u64,
    /// Layers without an image.
    pub layers: u64,
    /// What their files held.
    pub bytes: u64,
}

/// A name that stands for another.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ImageAlias {
    /// What people ask for.
    pub name: String,
    /// What they get: a reference, or `host`.
    pub target: String,
    /// Since when.
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
