//! The arguments of `shoal build`.

use std::path::PathBuf;

use clap::Args;

use super::variable;

/// Build a template from a Dockerfile.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal build -t app .                               the Dockerfile of this directory
  shoal build -t app -f env/Dockerfile --build-arg VERSION=3 .
  shoal build -t app --secret id=token,env=TOKEN .   RUN --mount=type=secret,id=token sees it, and no layer does
  shoal run --template app

The words are FROM, RUN, COPY, ADD of local files, ENV, ARG, WORKDIR, USER, CMD, ENTRYPOINT and LABEL. What .dockerignore names is
not sent. Steps run in sandboxes with the template's limits and without a network; a step that was done before is not done again.
Ctrl-C leaves the build running; `shoal build --cancel ID` ends it.")]
pub struct Build {
    /// The template that is made or changed
    #[arg(short = 't', long = "tag", value_name = "NAME", required_unless_present = "cancel")]
    pub template: Option<String>,
    /// The Dockerfile, in the context [default: CONTEXT/Dockerfile]
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
    /// Build this stage [default: the last]
    #[arg(long, value_name = "STAGE")]
    pub target: Option<String>,
    /// A value for ARG; may be repeated
    #[arg(long = "build-arg", value_name = "NAME=VALUE", value_parser = variable)]
    pub build_args: Vec<(String, String)>,
    /// A secret for steps that name it: id=NAME,src=FILE or id=NAME,env=VARIABLE; may be repeated
    #[arg(long = "secret", value_name = "SECRET")]
    pub secrets: Vec<String>,
    /// Processors, for the build and the template, as 2, 1.5 or 500m
    #[arg(long)]
    pub cpu: Option<String>,
    /// Memory, for the build and the template, as 512Mi or 2Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// End a build that runs, by its id
    #[arg(long, value_name = "ID", conflicts_with_all = ["template", "file", "target"])]
    pub cancel: Option<String>,
    /// Print the build as JSON, at the end
    #[arg(long)]
    pub json: bool,
    /// The directory that is sent
    #[arg(value_name = "CONTEXT", default_value = ".")]
    pub context: PathBuf,
}
