//! The arguments of `shoal image`.

use std::path::PathBuf;

use clap::Args;

/// Pull, import, list and remove images.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal image pull python:3.12
  shoal image ls
  shoal run --image python:3.12 -- python3 -V
  shoal image rm python:3.12")]
pub struct Image {
    #[command(subcommand)]
    pub action: ImageAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum ImageAction {
    Pull(PullImage),
    Import(ImportImage),
    #[command(visible_alias = "list")]
    Ls(ListImages),
    #[command(visible_alias = "get", alias = "show")]
    Inspect(InspectImage),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveImage),
    Gc(CollectImages),
    Alias(Alias),
}

/// Pull an image from a registry.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal image pull python:3.12
  shoal image pull registry.example.com/team/app:1
  echo $TOKEN | shoal image pull --username me --password-stdin example.com/app:1

Credentials come from these flags, else from SHOAL_REGISTRY_USERNAME and SHOAL_REGISTRY_PASSWORD, else from Docker's \
config.json (in $DOCKER_CONFIG or ~/.docker). Credential helpers (credHelpers, credsStore) are not run. An image pulled \
with credentials is visible only to the owner of the API key.")]
pub struct PullImage {
    /// The image, for example python:3.12
    #[arg(value_name = "IMAGE")]
    pub reference: String,
    /// Pull the image for this platform, for example linux/arm64
    #[arg(long)]
    pub platform: Option<String>,
    /// Log in to the registry with this name
    #[arg(long, value_name = "NAME", requires = "password_stdin")]
    pub username: Option<String>,
    /// Read the password from stdin
    #[arg(long, requires = "username")]
    pub password_stdin: bool,
    /// Use no credentials
    #[arg(long, conflicts_with = "username")]
    pub anonymous: bool,
    /// Use plain HTTP to talk to the registry
    #[arg(long)]
    pub insecure: bool,
    /// Print the image as JSON
    #[arg(long)]
    pub json: bool,
}

/// Import images from a file or a directory.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  docker save app:1 | shoal image import -
  shoal image import app.tar
  shoal image import --name base:1 rootfs.tar.gz
  shoal image import --name base:2 ./rootfs

A file is an OCI or Docker archive, or a tar archive of a root file system, optionally compressed with gzip or zstd. A \
directory is an OCI layout or a root file system.

From a directory, numeric owners are kept, hard links become files, and sockets, devices and extended attributes are \
skipped. To keep extended attributes, use `tar --xattrs -C DIR -c . | shoal image import -`.")]
pub struct ImportImage {
    /// A file, a directory, or - for stdin
    #[arg(value_name = "PATH")]
    pub from: PathBuf,
    /// Name the image; required if the archive has no name
    #[arg(long, value_name = "IMAGE")]
    pub name: Option<String>,
    /// The format, if the contents are ambiguous
    #[arg(long, value_parser = ["oci", "docker", "rootfs"])]
    pub format: Option<String>,
    /// Print the images as JSON
    #[arg(long)]
    pub json: bool,
}

/// List images, newest first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image ls\n  shoal image ls --json | jq -r '.[].names[]'")]
pub struct ListImages {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Show the configuration and the layers of an image.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image inspect python:3.12\n  shoal image inspect --json 4f53cda1 | jq .config.env"
)]
pub struct InspectImage {
    /// A name, an alias, or a prefix of a digest
    #[arg(value_name = "IMAGE")]
    pub image: String,
    /// Print the image as JSON
    #[arg(long)]
    pub json: bool,
}

/// Remove names of images, and every image and layer that is no longer used.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image rm python:3.12\n  shoal image rm 4f53cda1          all names of this digest"
)]
pub struct RemoveImage {
    /// Names, or prefixes of digests
    #[arg(value_name = "IMAGE", required = true)]
    pub images: Vec<String>,
    /// Remove the last name even while sandboxes use the image; they keep running
    #[arg(long, short)]
    pub force: bool,
    /// Print the number of removed images, layers and bytes as JSON
    #[arg(long)]
    pub json: bool,
}

/// Remove images that have no name and no sandbox, and layers that have no image.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image gc")]
pub struct CollectImages {
    /// Print the number of removed images, layers and bytes as JSON
    #[arg(long)]
    pub json: bool,
}

/// Manage aliases: names that stand for another image.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image alias set ubuntu:24.04 host\n  shoal image alias ls")]
pub struct Alias {
    #[command(subcommand)]
    pub action: AliasAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum AliasAction {
    Set(SetAlias),
    #[command(visible_alias = "list")]
    Ls(ListAliases),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveAlias),
}

/// Make NAME an alias of TARGET.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image alias set python:3 registry.local/python:3.12\n  shoal image alias set ubuntu:24.04 host"
)]
pub struct SetAlias {
    /// The alias
    pub name: String,
    /// An image, or `host`
    pub target: String,
}

/// List aliases by name.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image alias ls\n  shoal image alias ls --json | jq -r '.[].target'"
)]
pub struct ListAliases {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Remove aliases.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image alias rm ubuntu:24.04")]
pub struct RemoveAlias {
    /// The aliases
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}
