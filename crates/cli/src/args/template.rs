//! The arguments of `shoal template`.

use std::path::PathBuf;

use clap::Args;

use super::lifetime::pair;
use super::variable;
use super::volume::mount;

/// Make, change and list templates: what sandboxes are made from.
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
    Get(GetTemplate),
    Ls(ListTemplates),
    Update(Box<UpdateTemplate>),
    Prepare(PrepareTemplate),
    Rm(RemoveTemplate),
    Apply(ApplyTemplates),
}

/// Make a template.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template create small --cpu 500m --memory 512Mi
  shoal template create python --image python:3.12 -e PYTHONUNBUFFERED=1 --user app --wait
  shoal template create web --workdir /srv -- python3 -m http.server
  shoal create --template small

Its image is pulled in the background; --wait shows how far it is, and fails if it does not come.")]
pub struct CreateTemplate {
    /// What to call it
    pub name: String,
    /// An image such as python:3.12 [default: host]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Processors, as 2, 1.5 or 500m [default: 1]
    #[arg(long)]
    pub cpu: Option<String>,
    /// Memory, as 512Mi or 2Gi [default: 1Gi]
    #[arg(long)]
    pub memory: Option<String>,
    /// What a sandbox's files may take, as 5Gi [default: 10Gi]
    #[arg(long)]
    pub disk: Option<String>,
    /// Set an environment variable for every command; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Where commands run [default: the image's]
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Who commands run as [default: the image's]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Mount a volume in every sandbox, `:ro` to look only; may be repeated
    #[arg(long = "mount", value_name = "VOLUME:/PATH", value_parser = mount)]
    pub mounts: Vec<client::api::VolumeMount>,
    /// A label for every sandbox made from it; may be repeated
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Wait until it is ready
    #[arg(long)]
    pub wait: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
    /// What runs when a command names no program [default: the image's]
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Show a template.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal template get python\n  shoal template get --json python | jq .version"
)]
pub struct GetTemplate {
    /// Its name
    pub name: String,
    /// Print it as JSON
    #[arg(long)]
    pub json: bool,
}

/// List templates by name, the built-in one first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal template ls\n  shoal template ls --json | jq -r '.[].name'")]
pub struct ListTemplates {
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Change a template. Sandboxes that exist keep the version they were made from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template update python --memory 2Gi
  shoal template update python --image python:3.13 --wait
  shoal template update python --name python-old

What is not named stays as it is. Variables and labels are set one by one; --no-env and --no-labels remove all that were there
before. A name by itself makes no new version.")]
pub struct UpdateTemplate {
    /// Its name
    #[arg(value_name = "NAME")]
    pub template: String,
    /// Another name for it
    #[arg(long = "name", value_name = "NEW")]
    pub name: Option<String>,
    /// Another image
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Processors, as 2, 1.5 or 500m
    #[arg(long)]
    pub cpu: Option<String>,
    /// Memory, as 512Mi or 2Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// What a sandbox's files may take, as 5Gi; empty for the usual 10Gi
    #[arg(long)]
    pub disk: Option<String>,
    /// Set an environment variable; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Remove all variables first
    #[arg(long)]
    pub no_env: bool,
    /// Where commands run; empty for the image's
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Who commands run as; empty for the image's
    #[arg(short, long)]
    pub user: Option<String>,
    /// Mount a volume, in place of what is at that path; may be repeated
    #[arg(long = "mount", value_name = "VOLUME:/PATH", value_parser = mount)]
    pub mounts: Vec<client::api::VolumeMount>,
    /// Remove all mounts first
    #[arg(long)]
    pub no_mounts: bool,
    /// Set a label; may be repeated
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// Remove all labels first
    #[arg(long)]
    pub no_labels: bool,
    /// Wait until it is ready
    #[arg(long)]
    pub wait: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
    /// What runs when a command names no program
    #[arg(last = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// Try again what failed when a template was prepared.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal template prepare --wait python")]
pub struct PrepareTemplate {
    /// Its name
    pub name: String,
    /// Wait until it is ready
    #[arg(long)]
    pub wait: bool,
    /// Print the template as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete templates. Refused while sandboxes were made from them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal template rm python")]
pub struct RemoveTemplate {
    /// Their names
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// Make templates what a file says.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal template apply                       the templates of shoal.toml, here
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

What is left out is as if it never was. Templates that the file does not name stay as they are; one that is so already gets no new
version.")]
pub struct ApplyTemplates {
    /// The file
    #[arg(short, long, value_name = "FILE", default_value = "shoal.toml")]
    pub file: PathBuf,
    /// Wait until all are ready
    #[arg(long)]
    pub wait: bool,
    /// Print the templates as JSON
    #[arg(long)]
    pub json: bool,
}
