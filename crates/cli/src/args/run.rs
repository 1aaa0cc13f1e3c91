//! The arguments of `shoal run` and `shoal exec`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::forward::{Mapping, mapping};
use super::sandbox::Spec;
use super::shell::Detach;
use super::value::{duration, variable};

/// Run a command in a new sandbox that is deleted afterwards, or in an existing one.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal run -- python3 -c 'print(2 + 2)'
  echo hello | shoal run -- tr a-z A-Z
  shoal run -e WORD=hi --timeout 10s -- sh -c 'echo $WORD'
  shoal run --sandbox work -- ls -l
  shoal run -it -- python3
  shoal run -p 8080:80 -- python3 -m http.server 80
  shoal run -d --name web -- python3 -m http.server    in the background
  shoal run --image python:3.12 -- python3 -V
  shoal run --net registries -- pip install requests

If no daemon is running, `shoal run` starts a private one. It stays for ten minutes after the last command, so that the next starts at once; SHOAL_PRIVATE_LINGER=0 ends it with the command. Stdin goes to the command \
unless it is a terminal. Ctrl-C kills the command; a second Ctrl-C exits at once. With -t every key goes to the command, \
including Ctrl-C, and Ctrl-P Ctrl-Q leaves it running for `shoal attach`.

The exit code is the command's own, 128 + n if signal n ended it, 124 after a timeout, 126 if the program cannot be \
executed, 127 if it was not found, and 125 if Shoal failed.")]
pub struct Run {
    /// Run in this existing sandbox (id or name)
    #[arg(long, value_name = "SANDBOX", conflicts_with_all = ["template", "pool", "image", "cpu", "memory", "disk", "mounts", "net"])]
    pub sandbox: Option<String>,
    #[command(flatten)]
    pub process: Process,
    #[command(flatten)]
    pub manner: Manner,
    /// Accepted for habit: a sandbox made for the command is always deleted, except with --detach
    #[arg(long, conflicts_with = "background")]
    pub rm: bool,
    /// Name the new sandbox
    #[arg(long, conflicts_with = "sandbox")]
    pub name: Option<String>,
    #[command(flatten)]
    pub spec: Spec,
    /// Forward a local port to the sandbox while the command runs; repeatable
    #[arg(short = 'p', long = "publish", value_name = "[[ADDRESS:]LOCAL:]PORT", value_parser = mapping, conflicts_with = "background")]
    pub ports: Vec<Mapping>,
    /// Print the sandbox and the detach keys first; for `shoal shell`
    #[arg(skip)]
    pub greeting: bool,
    /// The program and its arguments [default: those of the template or the image]
    #[arg(required_unless_present_any = ["image", "sandbox", "template", "pool"], trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// What the command finds around it.
#[derive(Debug, Args)]
pub struct Process {
    /// Set an environment variable; repeatable
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Read environment variables from a file with lines NAME=VALUE; repeatable
    #[arg(long = "env-file", value_name = "FILE")]
    pub env_files: Vec<PathBuf>,
    /// Run in this directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Run as this user of the sandbox, optionally with `:group`
    #[arg(short, long)]
    pub user: Option<String>,
}

/// How the command is run and its output shown.
#[derive(Debug, Args)]
pub struct Manner {
    /// Give the command a terminal, for interactive programs
    #[arg(short, long, visible_alias = "tty", conflicts_with = "json")]
    pub terminal: bool,
    /// Accepted for habit: stdin always goes to the command
    #[arg(short, long)]
    pub interactive: bool,
    #[command(flatten)]
    pub detach: Detach,
    /// Run in the background, and print the id of the new sandbox, or of the command in an existing one
    #[arg(short = 'd', long = "detach", conflicts_with_all = ["terminal", "json"])]
    pub background: bool,
    /// Kill the command after this long, for example 30s or 5m
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub timeout: Option<Duration>,
    /// Print the result and the output as JSON when the command ends
    #[arg(long)]
    pub json: bool,
}

/// Run a command in an existing sandbox; the same as `shoal run --sandbox`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal exec work ls -l
  shoal exec -it work bash
  shoal exec -d work python3 -m http.server     in the background

Everything after the sandbox is the program and its arguments. Exit codes are those of `shoal run`.")]
pub struct Exec {
    #[command(flatten)]
    pub process: Process,
    #[command(flatten)]
    pub manner: Manner,
    /// The sandbox's id or name
    pub sandbox: String,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

impl From<Exec> for Run {
    fn from(Exec { process, manner, sandbox, command }: Exec) -> Self {
        Self {
            sandbox: Some(sandbox),
            process,
            manner,
            rm: false,
            name: None,
            spec: Spec::default(),
            ports: Vec::new(),
            greeting: false,
            command,
        }
    }
}
