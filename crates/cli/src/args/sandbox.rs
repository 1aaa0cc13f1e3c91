//! The arguments of `shoal create`, `ls`, `inspect`, `rename` and `rm`.

use std::path::PathBuf;

use clap::Args;

use super::lifetime::Rules;
use super::value::{pair, variable};
use super::volume;

/// What a new sandbox is made from, and its limits.
#[derive(Debug, Default, Args)]
pub struct Spec {
    /// Create the sandbox from this template [default: default]
    #[arg(long)]
    pub template: Option<String>,
    /// Claim a ready sandbox from this pool, or create one like it if none is ready
    #[arg(long, conflicts_with_all = ["template", "image", "cpu", "memory"])]
    pub pool: Option<String>,
    /// Use this image, for example python:3.12, and pull it if it is missing [default: the template's]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Limit the processors, for example 2, 1.5 or 500m
    #[arg(long, visible_alias = "cpus")]
    pub cpu: Option<String>,
    /// Limit the memory, for example 512Mi or 2Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// Limit the disk space of its files, for example 5Gi
    #[arg(long)]
    pub disk: Option<String>,
    /// Mount a volume, read-only with `:ro`; repeatable
    #[arg(long = "mount", value_name = "VOLUME:/PATH", value_parser = volume::mount)]
    pub mounts: Vec<client::api::VolumeMount>,
    /// Open a network: registries (for package installs), open, none, or a file with a policy [default: the template's]
    #[arg(long, value_name = "MODE|FILE")]
    pub net: Option<String>,
    /// Let requests carry this secret, which the sandbox never holds: github, openai, ... or one that you named; repeatable
    #[arg(long = "inject", value_name = "SECRET")]
    pub inject: Vec<String>,
}

/// Create a sandbox and print its id.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal create
  shoal create --name work --cpu 500m --memory 512Mi -e LANG=C
  shoal create --image python:3.12
  shoal create --net registries             for package installs
  shoal create --pool warm                  claim a ready sandbox, if any
  shoal create --ttl 30m --hard-ttl 7d      pause it if unused, delete it later
  shoal create --hook before_pause=/srv/save   run a script before each pause
  shoal create --get-or-create -l thread=42    the one sandbox of this thread")]
pub struct Create {
    /// Name the sandbox
    #[arg(short, long)]
    pub name: Option<String>,
    /// Set an environment variable for every command; repeatable
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Read environment variables from a file with lines NAME=VALUE; repeatable
    #[arg(long = "env-file", value_name = "FILE")]
    pub env_files: Vec<PathBuf>,
    #[command(flatten)]
    pub spec: Spec,
    /// Set a label; repeatable
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = pair)]
    pub labels: Vec<(String, String)>,
    /// If a sandbox with all of these labels exists, return that one
    #[arg(long, requires = "labels")]
    pub get_or_create: bool,
    #[command(flatten)]
    pub rules: Rules,
    /// Keep this many snapshots of those that are taken before commands, for `shoal undo`
    #[arg(long, value_name = "STEPS")]
    pub history: Option<u32>,
    /// Run a script in it at a point of its life: after_create, before_pause, after_resume, before_delete, after_fork, after_claim or after_rollback; repeatable
    #[arg(long = "hook", value_name = "POINT=SCRIPT", value_parser = pair)]
    pub hooks: Vec<(String, String)>,
    /// If a hook fails, let what it belongs to fail
    #[arg(long, requires = "hooks")]
    pub require_hooks: bool,
    /// Do not wait until it is running
    #[arg(long)]
    pub no_wait: bool,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// List sandboxes, newest first.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal ls
  shoal ls -l app=chat -l thread      with label app=chat and any label `thread`
  shoal ls -q                         only the ids")]
pub struct List {
    /// List the sandboxes of all owners, with those in pools and builds; needs an admin key
    #[arg(long, conflicts_with = "labels")]
    pub all_owners: bool,
    /// List only sandboxes that match KEY=VALUE, KEY!=VALUE, KEY or !KEY; repeatable, all must match
    #[arg(short, long = "label", value_name = "SELECTOR")]
    pub labels: Vec<String>,
    /// Print only the ids
    #[arg(short, long, conflicts_with = "json")]
    pub quiet: bool,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Show a sandbox and its commands.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal inspect work\n  shoal inspect --json work | jq .state")]
pub struct Inspect {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// Rename a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal rename work done")]
pub struct Rename {
    /// The sandbox's id or name
    pub sandbox: String,
    /// The new name
    #[arg(value_name = "NEW")]
    pub new: String,
    /// Print the sandbox as JSON
    #[arg(long)]
    pub json: bool,
}

/// Delete sandboxes and everything in them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal rm work
  shoal rm -l app=chat          all sandboxes with this label
  shoal rm --all")]
pub struct Remove {
    /// Ids or names of the sandboxes
    #[arg(required_unless_present_any = ["all", "labels"], value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
    /// Delete sandboxes of any owner, given by their whole ids; needs an admin key
    #[arg(long, requires = "sandboxes", conflicts_with_all = ["all", "labels"])]
    pub all_owners: bool,
    /// Delete all sandboxes of this API key's owner
    #[arg(short, long, conflicts_with_all = ["sandboxes", "labels"])]
    pub all: bool,
    /// Delete the sandboxes that match KEY=VALUE, KEY!=VALUE, KEY or !KEY; repeatable, all must match
    #[arg(short, long = "label", value_name = "SELECTOR", conflicts_with = "sandboxes")]
    pub labels: Vec<String>,
    /// Delete the sandboxes that were forked from it too, and theirs
    #[arg(long, conflicts_with_all = ["all", "labels", "all_owners"])]
    pub tree: bool,
    /// Do not fail if a sandbox does not exist
    #[arg(short, long)]
    pub force: bool,
    /// Do not print the names of the deleted sandboxes
    #[arg(short, long)]
    pub quiet: bool,
    /// Print the deleted sandboxes as JSON
    #[arg(long)]
    pub json: bool,
}
