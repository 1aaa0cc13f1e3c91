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
    Ls(ListImages),
    Inspect(InspectImage),
    Rm(RemoveImage),
    Gc(CollectImages),
    Alias(Alias),
}

/// Pull an image from a registry.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal image pull python:3.12
  shoal image pull registry.example.com/team/app@sha256:4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945
  echo $TOKEN | shoal image pull --username robot --password-stdin registry.example.com/team/app:1

Credentials come from these flags, else from SHOAL_REGISTRY_USERNAME and SHOAL_REGISTRY_PASSWORD, else from Docker's
config.json (in $DOCKER_CONFIG or ~/.docker). Programs that it names (credHelpers, credsStore) are not run. What is pulled
with credentials is seen by the key's owner alone.")]
pub struct PullImage {
    /// Such as python:3.12
    #[arg(value_name = "IMAGE")]
    pub reference: String,
    /// For another kind of machine, as linux/arm64
    #[arg(long)]
    pub platform: Option<String>,
    /// For the registry
    #[arg(long, value_name = "NAME", requires = "password_stdin")]
    pub username: Option<String>,
    /// Read the password for it from stdin
    #[arg(long, requires = "username")]
    pub password_stdin: bool,
    /// Use no credentials, wherever there are some
    #[arg(long, conflicts_with = "username")]
    pub anonymous: bool,
    /// Speak plain HTTP with this registry
    #[arg(long)]
    pub insecure: bool,
    /// Print the image as JSON
    #[arg(long)]
    pub json: bool,
}

/// Take images from a file or a directory.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  docker save app:1 | shoal image import -
  shoal image import app.tar
  shoal image import --name base:1 rootfs.tar.gz
  shoal image import --name base:2 ./rootfs

A file is an OCI or Docker archive or the tar stream of a root file system, compressed with gzip or zstd or not at all; a
directory is an OCI layout or a root file system. Of a directory, owners are taken by number; hard links become files, and
sockets, devices and extended attributes are left out: give `tar --xattrs -C DIR -c . | shoal image import -` what matters.")]
pub struct ImportImage {
    /// A file, a directory, or - for stdin
    #[arg(value_name = "PATH")]
    pub from: PathBuf,
    /// What to call it; needed where the archive does not say
    #[arg(long, value_name = "IMAGE")]
    pub name: Option<String>,
    /// What it is, if that cannot be told from its contents
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
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Show an image: how its programs run, and its layers.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image inspect python:3.12\n  shoal image inspect --json 4f53cda1 | jq .config.env"
)]
pub struct InspectImage {
    /// A name, an alias, or the beginning of a digest
    #[arg(value_name = "IMAGE")]
    pub image: String,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// Take names from images, and remove what nobody uses any more.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image rm python:3.12\n  shoal image rm 4f53cda1          by digest: all its names"
)]
pub struct RemoveImage {
    /// Names, or beginnings of digests
    #[arg(value_name = "IMAGE", required = true)]
    pub images: Vec<String>,
    /// Take the last name too while sandboxes use the image; they go on
    #[arg(long, short)]
    pub force: bool,
    /// Print what was removed as JSON
    #[arg(long)]
    pub json: bool,
}

/// Remove images without a name and a sandbox, and layers without an image.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image gc")]
pub struct CollectImages {
    /// Print what was removed as JSON
    #[arg(long)]
    pub json: bool,
}

/// Let one name stand for another.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image alias set ubuntu:24.04 host\n  shoal image alias ls")]
pub struct Alias {
    #[command(subcommand)]
    pub action: AliasAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum AliasAction {
    Set(SetAlias),
    Ls(ListAliases),
    Rm(RemoveAlias),
}

/// From now on, whoever asks for NAME gets TARGET.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image alias set python:3 registry.local/python:3.12\n  shoal image alias set ubuntu:24.04 host"
)]
pub struct SetAlias {
    /// What people ask for
    pub name: String,
    /// An image, or host
    pub target: String,
}

/// List aliases, by name.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal image alias ls\n  shoal image alias ls --json | jq -r '.[].target'"
)]
pub struct ListAliases {
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// End aliases.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal image alias rm ubuntu:24.04")]
pub struct RemoveAlias {
    /// What people ask for
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}
