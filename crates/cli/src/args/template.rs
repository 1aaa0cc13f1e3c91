//! The arguments of `shoal template`.

use std::path::PathBuf;

use clap::Args;

use super::value::{pair, variable};
use super::volume::mount;

/// Manage templates: what sandboxes are made from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template create small --cpu 500m --memory 512Mi
  shoal template ls
  shoal template apply -f shoal.toml")]
pub struct Template {
    #[command(subcommand)]
    pub action: TemplateAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum TemplateAction {
    Create(Box<CreateTemplate>),
    #[command(visible_alias = "inspect", alias = "show")]
    Get(GetTemplate),
    #[command(visible_alias = "list")]
    Ls(ListTemplates),
    Update(Box<UpdateTemplate>),
    Prepare(PrepareTemplate),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveTemplate),
    Apply(ApplyTemplates),
}

/// Create a template.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template create small --cpu 500m --memory 512Mi
  shoal template create python --image python:3.12 --user app --wait
  shoal template create web --workdir /srv -- python3 -m http.server
  shoal create --template small

The image is pulled in the background; --wait shows the progress, and fails if the pull fails.")]
pub struct CreateTemplate {
    /// Name of the template
    pub name: String,
    /// Use this image, for example python:3.12 [default: host]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Limit the processors, for example 2, 1.5 or 500m [default: 1]
    #[arg(long, visible_alias = "cpus")]
    pub cpu: Option<String>,
    /// Limit the memory, for example 512Mi or 2Gi [default: 1Gi]
    #[arg(long)]
    pub memory: Option<String>,
    /// Limit the disk space of a sandbox's files, for example 5Gi [default: 10Gi]
    #[arg(long)]
    pub disk: Option<String>,
    /// Set an environment variable for every command; repeatable
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Run commands in this directory [default: the image's]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Run commands as this user [default: the image's]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Mount a volume in every sandbox, read-only with `:ro`; repeatable
    #[arg(long = "mount", value_name = "VOLUME:/PATH", value_parser = mount)]
    pub mounts: Vec<client::api::VolumeMount>,
    /// Give sandboxes a network: registries, open, none, or a file with a policy [default: the daemon's]
    #[arg(long, value_name = "MODE|FILE")]
    pub net: Option<String>,
    /// Keep this many snapshots of those that are taken before commands in its sandboxes
    #[arg(long, value_name = "STEPS")]
    pub history: Option<u32>,
    /// Run a script in its sandboxes at a point of their life, as in `shoal create`; repeatable
    #[arg(long = "hook", value_name = "POINT=SCRIPT", value_parser = pair)]
    pub hooks: Vec<(String, String)>,
    /// If a hook fails, let what it belongs to fail
    #[arg(long, requires = "hooks")]
    pub require_hooks: bool,
    /// Set a label on every sandbox made from the template; repeatable
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Wait until the template is ready
    #[arg(long)]
    pub wait: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
    /// The default program and its arguments [default: the image's]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Show a template.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal template get python\n  shoal template get --json python | jq .version"
)]
pub struct GetTemplate {
    /// Name of the template
    pub name: String,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

/// List templates by name, the built-in one first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal template ls\n  shoal template ls --json | jq -r '.[].name'")]
pub struct ListTemplates {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Change a template. Existing sandboxes keep the version they were made from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template update python --memory 2Gi
  shoal template update python --image python:3.13 --wait
  shoal template update python --name python-old

Settings without a flag stay as they are. --env and --label set single entries; --no-env and --no-labels remove all \
earlier ones first. A change of the name alone makes no new version.")]
pub struct UpdateTemplate {
    /// Name of the template
    #[arg(value_name = "NAME")]
    pub template: String,
    /// Rename the template
    #[arg(long = "name", value_name = "NEW")]
    pub name: Option<String>,
    /// Use this image
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Limit the processors, for example 2, 1.5 or 500m
    #[arg(long, visible_alias = "cpus")]
    pub cpu: Option<String>,
    /// Limit the memory, for example 512Mi or 2Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// Limit the disk space of a sandbox's files, for example 5Gi; empty for the default of 10Gi
    #[arg(long)]
    pub disk: Option<String>,
    /// Set an environment variable; repeatable
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Remove all variables first
    #[arg(long)]
    pub no_env: bool,
    /// Run commands in this directory; empty for the image's
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Run commands as this user; empty for the image's
    #[arg(short, long)]
    pub user: Option<String>,
    /// Mount a volume, replacing any mount at the same path; repeatable
    #[arg(long = "mount", value_name = "VOLUME:/PATH", value_parser = mount)]
    pub mounts: Vec<client::api::VolumeMount>,
    /// Remove all mounts first
    #[arg(long)]
    pub no_mounts: bool,
    /// Give sandboxes a network: registries, open, none, or a file with a policy
    #[arg(long, value_name = "MODE|FILE")]
    pub net: Option<String>,
    /// Set a label; repeatable
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Remove all labels first
    #[arg(long)]
    pub no_labels: bool,
    /// Wait until the template is ready
    #[arg(long)]
    pub wait: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
    /// The default program and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Retry the preparation of a template that failed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal template prepare --wait python")]
pub struct PrepareTemplate {
    /// Name of the template
    pub name: String,
    /// Wait until the template is ready
    #[arg(long)]
    pub wait: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete templates. Fails while sandboxes made from them exist.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal template rm python")]
pub struct RemoveTemplate {
    /// Names of the templates
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// Create or update the templates that a file describes.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template apply                       the templates in ./shoal.toml
  shoal template apply -f env/shoal.toml --wait

The file:
  [templates.python]
  image = \"python:3.12\"
  cpu = \"500m\"
  memory = \"512Mi\"
  disk = \"5Gi\"
  cwd = \"/workspace\"
  user = \"app\"
  command = [\"python3\"]
  env = { PYTHONUNBUFFERED = \"1\" }
  labels = { team = \"ml\" }
  mounts = [{ volume = \"data\", path = \"/data\", read_only = true }]

  [templates.tools]
  image = \"debian:12\"
  build.script = \"mkdir -p /opt/tools && touch /opt/tools/ready\"

  [templates.app]
  build = { context = \".\", dockerfile = \"Dockerfile\", args = { VERSION = \"3\" } }

A setting that the file omits gets its default. Templates that the file does not name stay as they are. A template that \
already matches gets no new version.")]
pub struct ApplyTemplates {
    /// The file to read
    #[arg(short, long, value_name = "FILE", default_value = "shoal.toml")]
    pub file: PathBuf,
    /// Wait until all templates are ready
    #[arg(long)]
    pub wait: bool,
    /// Print the templates as JSON
    #[arg(long)]
    pub json: bool,
}
