//! The arguments of `shoal build`.

use std::path::PathBuf;

use clap::Args;

use super::value::variable;

/// Build a template from a Dockerfile.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal build -t app .                      the Dockerfile in this directory
  shoal build -t app -f env/Dockerfile --build-arg VERSION=3 .
  shoal build -t app --secret id=token,env=TOKEN .
  shoal run --template app

Supported instructions: FROM, RUN, COPY, ADD of local files, ENV, ARG, WORKDIR, USER, CMD, ENTRYPOINT, SHELL and LABEL. Files \
that .dockerignore excludes are not sent. Steps run in sandboxes with the template's limits; RUN may reach package registries and code hosts. A step \
whose result is cached is not run again.

A secret is visible to steps with RUN --mount=type=secret,id=token, and is stored in no layer. Ctrl-C leaves the build \
running; `shoal build --cancel ID` ends it.")]
pub struct Build {
    /// The template to create or update
    #[arg(short = 't', long = "tag", value_name = "NAME", required_unless_present = "cancel")]
    pub template: Option<String>,
    /// Path of the Dockerfile, which must be inside CONTEXT [default: CONTEXT/Dockerfile]
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Build up to this stage [default: the last]
    #[arg(long, value_name = "STAGE")]
    pub target: Option<String>,
    /// Set an ARG; repeatable
    #[arg(long = "build-arg", value_name = "NAME=VALUE", value_parser = variable)]
    pub build_args: Vec<(String, String)>,
    /// Pass a secret: id=NAME,src=FILE or id=NAME,env=VARIABLE; repeatable
    #[arg(long = "secret", value_name = "SECRET")]
    pub secrets: Vec<String>,
    /// Give RUN steps a network: registries, open, none, or a file with a policy [default: registries]
    #[arg(long, value_name = "MODE|FILE")]
    pub net: Option<String>,
    /// Limit the processors of the build and the template, for example 2, 1.5 or 500m
    #[arg(long, visible_alias = "cpus")]
    pub cpu: Option<String>,
    /// Limit the memory of the build and the template, for example 512Mi or 2Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// Cancel the running build with this id
    #[arg(long, value_name = "ID", conflicts_with_all = ["template", "file", "target"])]
    pub cancel: Option<String>,
    /// Print the build as JSON when it ends
    #[arg(long)]
    pub json: bool,
    /// The directory to send to the daemon
    #[arg(value_name = "CONTEXT", default_value = ".")]
    pub context: PathBuf,
}
