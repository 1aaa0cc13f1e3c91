//! The arguments of all subcommands.

mod build;
mod image;
mod lifetime;
mod pool;
mod template;
mod top;
mod volume;

use std::path::PathBuf;

use clap::{Args, Parser};

use crate::detach::{self, DetachKeys};
use crate::environment::Color;

pub use build::Build;
pub use image::{AliasAction, Image, ImageAction, ImportImage, PullImage};
pub use lifetime::{Explain, Label, Lifetime, Rules, Touch};
pub use pool::{Pool, PoolAction};
pub use template::{
    ApplyTemplates, CreateTemplate, PrepareTemplate, Template, TemplateAction, UpdateTemplate,
};
pub use top::{Top, TopSort};
pub use volume::{CopyVolume, CreateVolume, ExportVolume, ImportVolume, Volume, VolumeAction};

/// Sandboxes for AI agents, on this machine.
#[derive(Debug, Parser)]
#[command(name = "shoal", version = server::version(), max_term_width = 100)]
#[command(after_help = "\
Examples:
  shoal run -- python3 -c 'print(2 + 2)'     run one command in a sandbox of its own
  shoal serve                                start a daemon
  shoal create --name work                   make a sandbox that stays
  shoal run --sandbox work -- ls -l          run in it
  shoal shell work                           work in it

Environment:
  SHOAL_URL        the daemon to talk to, with
  SHOAL_API_KEY    its key; without both, the daemon of
  SHOAL_DATA_DIR   this data directory is used, if one runs there; without it, that of the configuration
                   file (/etc/shoal/config.toml), or /var/lib/shoal
  SHOAL_REGISTRY_USERNAME, SHOAL_REGISTRY_PASSWORD
                   for registries, where no flag gives them; else those of Docker's config.json
  NO_COLOR         no colours; CLICOLOR=0 and CLICOLOR_FORCE=1 are known too

Exit codes:
  0      it went well
  1      it failed; what happened, why and what to do is on stderr
  2      the command line is wrong
  125    `run`, `shell` and `attach`: it is Shoal that failed; their other codes are those of what they ran
  128+n  signal n ended it")]
pub struct Arguments {
    /// When to use colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
    #[command(subcommand)]
    pub subcommand: Subcommand,
}

#[derive(Debug, clap::Subcommand)]
pub enum Subcommand {
    Serve(Box<Serve>),
    Run(Box<Run>),
    Shell(Box<Shell>),
    Attach(Attach),
    Create(Box<Create>),
    Ls(List),
    Inspect(Inspect),
    Label(Label),
    Lifetime(Lifetime),
    Touch(Touch),
    Explain(Explain),
    Rm(Remove),
    Cp(Copy),
    Logs(Logs),
    Watch(Watch),
    Stats(Stats),
    Top(Top),
    Image(Image),
    Template(Template),
    Volume(Volume),
    Pool(Pool),
    Build(Box<Build>),
    Key(Key),
    Config(Config),
    Doctor(Doctor),
    Bench(Bench),
    Completions(Completions),
    #[command(hide = true)]
    BenchFloor(BenchFloor),
    #[command(hide = true)]
    Launcher(Launcher),
}

/// Start the daemon. It says `ready` once it accepts requests; SIGTERM ends it and leaves sandboxes alone.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal serve
  shoal serve --listen 127.0.0.1:9000 --data-dir /srv/shoal
  shoal serve --listen 0.0.0.0:7878 --tls-cert cert.pem --tls-key key.pem --public-url https://shoal.example.com

The key is made at the first start and kept in `api.key` in the data directory; SHOAL_API_KEY sets another.
A flag goes before an environment variable (SHOAL_LISTEN and so on), that before the configuration file;
`shoal config show` prints what is in force. SHOAL_LOG says what is logged, as `info,shoal_engine=debug`.")]
pub struct Serve {
    #[command(flatten)]
    pub flags: DaemonFlags,
    /// If another daemon holds the data directory, ask it to end and start in its place: an upgrade. Sandboxes go on
    #[arg(long, conflicts_with = "private")]
    pub take_over: bool,
    /// The daemon of `shoal run`: lives in this directory while a client holds a lease, and removes it at its end
    #[arg(long, value_name = "DIR", hide = true, conflicts_with_all = ["data_dir", "listen", "config", "public_url"])]
    pub private: Option<PathBuf>,
}

/// What a daemon can be told on the command line.
#[derive(Debug, Args)]
pub struct DaemonFlags {
    /// Address and port [default: 127.0.0.1:7878]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Where everything is kept [default: /var/lib/shoal]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// How clients reach the daemon, if not at the address it listens on
    #[arg(long, value_name = "URL")]
    pub public_url: Option<String>,
    /// A TOML file with settings [default: /etc/shoal/config.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Certificate chain in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// Private key in PEM
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Listen beyond loopback without TLS: something in front of the daemon encrypts
    #[arg(long)]
    pub insecure_http: bool,
    /// Log as JSON
    #[arg(long)]
    pub log_json: bool,
    /// Sandboxes to keep ready before anybody asks, so that creating one takes a claim; 0 for none [default: 8]
    #[arg(long, value_name = "NUMBER")]
    pub spares: Option<u32>,
    /// Where writable files are kept: auto, btrfs, loop or directory [default: auto]
    #[arg(long, value_name = "KIND")]
    pub store: Option<String>,
    /// How large a store of kind loop is, as 20Gi [default: a quarter of what is free, from 2Gi to 64Gi]
    #[arg(long, value_name = "SIZE")]
    pub store_size: Option<String>,
    /// Send traces to this OpenTelemetry collector, by OTLP over HTTP, as http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}

/// Run a command, in a new sandbox that is deleted afterwards, or in one that exists.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal run -- python3 -c 'print(2 + 2)'
  echo hello | shoal run -- tr a-z A-Z
  shoal run -e WORD=hi --timeout 10 -- sh -c 'echo $WORD'
  shoal run --sandbox 3f2b8c1e-90ab-4def-8123-456789abcdef -- ls -l
  shoal run -t -- python3
  shoal run --image python:3.12 -- python3 -V

Without a daemon to talk to, one is started for the time of the run. Stdin is piped through unless it is a terminal.
Ctrl-C ends the command; a second one leaves at once. With -t every key goes to the command, Ctrl-C too, and
Ctrl-P Ctrl-Q leaves it running, for `shoal attach`.

The exit code is the command's own, 128 + n if signal n ended it, 124 after a timeout, 126 if the program cannot be
executed, 127 if it was not found, and 125 if it is Shoal that failed.")]
pub struct Run {
    /// The id or name of a sandbox that exists
    #[arg(long, value_name = "SANDBOX", conflicts_with_all = ["template", "pool", "image", "cpu", "memory", "disk", "mounts"])]
    pub sandbox: Option<String>,
    /// Set an environment variable; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Run in this directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// Run as this user of the sandbox, optionally with `:group`
    #[arg(short, long)]
    pub user: Option<String>,
    /// Run it at a terminal, as a program that people use
    #[arg(short, long, conflicts_with = "json")]
    pub terminal: bool,
    #[command(flatten)]
    pub detach: Detach,
    /// End the command after so many seconds
    #[arg(long, value_name = "SECONDS")]
    pub timeout: Option<f64>,
    #[command(flatten)]
    pub spec: Spec,
    /// Print the result and the output as JSON, at the end
    #[arg(long)]
    pub json: bool,
    /// Say where one is and how to leave; for `shoal shell`
    #[arg(skip)]
    pub greeting: bool,
    /// The program and its arguments; without them, what the template or the image says
    #[arg(required_unless_present_any = ["image", "sandbox", "template", "pool"], trailing_var_arg = true, value_name = "COMMAND")]
    pub command: Vec<String>,
}

/// How a terminal is left.
#[derive(Debug, Args)]
pub struct Detach {
    /// The keys that leave a terminal and let the command go on; `none`: no keys do
    #[arg(long, value_name = "KEYS", default_value = detach::DEFAULT)]
    pub detach_keys: DetachKeys,
}

/// Work in a sandbox: a login shell at a terminal, in a new sandbox or in one that exists.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal shell                      in a new sandbox, which is deleted afterwards
  shoal shell work                 in one that exists
  shoal shell -u nobody work
  echo 'id; pwd' | shoal shell work

Every key goes to the shell, Ctrl-C too. Ctrl-P Ctrl-Q leaves it running; `shoal attach work` comes back to it. If the daemon is
restarted meanwhile, the shell goes on. Without a terminal on stdin, the shell reads its commands from there.

The exit code is the shell's own, 128 + n if signal n ended it or us, and 125 if it is Shoal that failed. Leaving is 0.")]
pub struct Shell {
    /// The id or name of a sandbox that exists; without it, a new one is made
    #[arg(conflicts_with_all = ["template", "pool", "cpu", "memory", "disk", "mounts"])]
    pub sandbox: Option<String>,
    /// Set an environment variable; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    /// Begin in this directory
    #[arg(short, long, value_name = "DIR")]
    pub workdir: Option<String>,
    /// As this user of the sandbox, optionally with `:group` [default: root]
    #[arg(short, long)]
    pub user: Option<String>,
    #[command(flatten)]
    pub detach: Detach,
    #[command(flatten)]
    pub spec: Spec,
}

/// Come back to a command at a terminal that was left running.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal attach work                the newest terminal of the sandbox
  shoal attach work cmd-7          one by its command's id; `shoal inspect work` lists them

Several people may be at one terminal; all see the same, and all may type. The exit codes are those of `shoal shell`.")]
pub struct Attach {
    /// The sandbox's id or name
    pub sandbox: String,
    /// The command's id; the newest that runs at a terminal if left out
    pub command: Option<String>,
    #[command(flatten)]
    pub detach: Detach,
}

/// What a new sandbox is.
#[derive(Debug, Default, Args)]
pub struct Spec {
    /// What it is made from [default: default]
    #[arg(long)]
    pub template: Option<String>,
    /// Claim one that stands ready in this pool; if none does, make one like it
    #[arg(long, conflicts_with_all = ["template", "image", "cpu", "memory"])]
    pub pool: Option<String>,
    /// An image such as python:3.12, pulled if it is not here [default: the template's]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Processors, as 2, 1.5 or 500m
    #[arg(long)]
    pub cpu: Option<String>,
    /// Memory, as 512Mi or 2Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// What its files may take, as 5Gi
    #[arg(long)]
    pub disk: Option<String>,
    /// Mount a volume, `:ro` to look only; may be repeated
    #[arg(long = "mount", value_name = "VOLUME:/PATH", value_parser = volume::mount)]
    pub mounts: Vec<client::api::VolumeMount>,
}

/// Create a sandbox, and print its id.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal create
  shoal create --name work --cpu 500m --memory 512Mi -e LANG=C
  shoal create --image python:3.12
  shoal create --pool warm                                one that stands ready, if there is one
  shoal create --idle 30m --hard-ttl 1d                   deleted when unused for 30 minutes, or after a day
  shoal create --get-or-create --label thread=42          the sandbox of this thread, whoever asks first")]
pub struct Create {
    /// A name of your own
    #[arg(long)]
    pub name: Option<String>,
    /// Set an environment variable for every command; may be repeated
    #[arg(short, long = "env", value_name = "NAME=VALUE", value_parser = variable)]
    pub env: Vec<(String, String)>,
    #[command(flatten)]
    pub spec: Spec,
    /// Set a label to find it by; may be repeated
    #[arg(short, long = "label", value_name = "KEY=VALUE", value_parser = lifetime::pair)]
    pub labels: Vec<(String, String)>,
    /// If a sandbox with all of these labels exists, take that one
    #[arg(long, requires = "labels")]
    pub get_or_create: bool,
    #[command(flatten)]
    pub rules: Rules,
    /// Do not wait until it runs
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
  shoal ls -l app=chat -l thread      with the label app=chat, and with a label `thread`
  shoal ls --json | jq -r '.[].id'")]
pub struct List {
    /// Only with this label: KEY=VALUE, KEY!=VALUE, KEY or !KEY; may be repeated, and all must hold
    #[arg(short, long = "label", value_name = "SELECTOR")]
    pub labels: Vec<String>,
    /// Print an array of objects
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

/// Delete sandboxes with all that is in them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal rm work\n  shoal rm $(shoal ls --json | jq -r '.[].id')")]
pub struct Remove {
    /// Their ids or names
    #[arg(required = true, value_name = "SANDBOX")]
    pub sandboxes: Vec<String>,
    /// Print what was deleted as JSON
    #[arg(long)]
    pub json: bool,
}

/// Copy files and directories between this machine and a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal cp notes.txt work:/workspace/          a file, into a directory
  shoal cp src work:/workspace/                a directory with everything in it
  shoal cp work:/workspace/out.csv .           and back
  shoal cp work:/workspace/logs - | tar t      a directory as a tar stream, on stdout
  pg_dump | shoal cp - work:/tmp/dump.sql      stdin, into a file

As with cp, what is copied into a directory that exists keeps its name. Missing directories are made. Files get their name
when all of them has arrived. Owners are not copied. What comes from a sandbox is not trusted: links that lead out of the
directory it is copied to are left out, and devices and sockets are left out both ways.")]
pub struct Copy {
    /// A path here, SANDBOX:/path, or `-` for stdin
    pub from: String,
    /// A path here, SANDBOX:/path, or `-` for stdout
    pub to: String,
    /// As this user of the sandbox, optionally with `:group` [default: root]
    #[arg(short, long)]
    pub user: Option<String>,
    /// Print what was copied as JSON
    #[arg(long)]
    pub json: bool,
}

/// Watch what happens to sandboxes and their commands, as it happens.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal watch                      all sandboxes, until Ctrl-C
  shoal watch work                 one, until it is deleted
  shoal watch --json | jq -r 'select(.type == \"command_ended\") | .result.exit_code'

How things are comes first, then what changes. A restart of the daemon does not end it.")]
pub struct Watch {
    /// The id or name of the one sandbox to watch; all if left out
    pub sandbox: Option<String>,
    /// Print one JSON object per event
    #[arg(long)]
    pub json: bool,
}

/// Print what a command has written.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal logs work                  the newest command of the sandbox
  shoal logs -f work build:42      a command by its id, until it ends")]
pub struct Logs {
    /// Go on until the command ends
    #[arg(short, long)]
    pub follow: bool,
    /// The sandbox's id or name
    pub sandbox: String,
    /// The command's id; the newest if left out
    pub command: Option<String>,
    /// Print one JSON object per piece of output
    #[arg(long)]
    pub json: bool,
}

/// Show what sandboxes use, beside what they may.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal stats                      all sandboxes, and the machine
  shoal stats work                 one of them
  shoal stats --watch              again and again, until Ctrl-C
  shoal stats --json | jq '.sandboxes[] | {name, pids: .usage.pids}'

CPU is what was used during a short look, in processors, of those it may use; CPU TIME is what was used in all.
MEMORY counts the page cache and tmpfs too, as the limit does. DISK is counted behind the scenes and may be some seconds
old; `>` before it means that there is more than could be counted.")]
pub struct Stats {
    /// The sandbox's id or name; all sandboxes if left out
    pub sandbox: Option<String>,
    /// Look again and again, until Ctrl-C
    #[arg(short, long)]
    pub watch: bool,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value_t = 2.0, value_parser = interval)]
    pub interval: f64,
    /// Print one JSON object; with --watch, one on a line of its own for each look
    #[arg(long)]
    pub json: bool,
}

/// Manage api keys.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal key create --owner alice\n  shoal key ls")]
pub struct Key {
    #[command(subcommand)]
    pub action: KeyAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum KeyAction {
    Create(CreateKey),
    Ls(ListKeys),
    Rm(RemoveKey),
}

/// Create a key, and print its secret: it is shown this once.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  shoal key create --owner alice\n  shoal key create --owner ci --sandboxes 20 --memory 16Gi\n  shoal key create --owner prometheus --metrics-only"
)]
pub struct CreateKey {
    /// Whose sandboxes it opens
    #[arg(long)]
    pub owner: String,
    /// It opens /metrics and nothing else: for Prometheus
    #[arg(long, conflicts_with_all = ["sandboxes", "cpu", "memory"])]
    pub metrics_only: bool,
    /// At most so many sandboxes at once
    #[arg(long, value_name = "COUNT")]
    pub sandboxes: Option<u32>,
    /// At most so much cpu in all, as 4
    #[arg(long)]
    pub cpu: Option<String>,
    /// At most so much memory in all, as 8Gi
    #[arg(long)]
    pub memory: Option<String>,
    /// Print the key as JSON
    #[arg(long)]
    pub json: bool,
}

/// List all keys, without their secrets.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal key ls\n  shoal key ls --json | jq -r '.[].owner'")]
pub struct ListKeys {
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Delete keys. They open nothing from then on.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal key rm 4f9d2c10a7e3b5d8")]
pub struct RemoveKey {
    /// Their ids, not their secrets
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<String>,
    /// Print what was deleted as JSON
    #[arg(long)]
    pub json: bool,
}

/// Look at what a daemon is told.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal config show\n  shoal config show --config new.toml")]
pub struct Config {
    #[command(subcommand)]
    pub action: ConfigAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum ConfigAction {
    Show(Box<ShowConfig>),
}

/// Print every setting that `shoal serve` would have with the same flags, and where each value comes from.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal config show
  shoal config show --config new.toml       look before a restart whether a file is valid
  shoal config show --json | jq '.[] | select(.source != \"default\")'

It fails, and says why, where `shoal serve` would.")]
pub struct ShowConfig {
    #[command(flatten)]
    pub flags: DaemonFlags,
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
}

/// Look whether this machine has what Shoal needs: each thing, what it costs to lack it, and how to get it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  sudo shoal doctor
  shoal doctor --data-dir /srv/shoal
  shoal doctor --json | jq '.[] | select(.verdict != \"ok\")'

It needs no daemon, changes nothing, and finds out the most as root.

The exit code is 0 if Shoal works here, also where something is lacking at a cost, and 1 if something is missing.")]
pub struct Doctor {
    /// Where a daemon would keep everything [default: /var/lib/shoal]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Print an array of objects
    #[arg(long)]
    pub json: bool,
    /// What was found of the machine, before there were threads
    #[arg(skip)]
    pub findings: Vec<runtime::doctor::Finding>,
}

/// Print a script that completes commands and options in a shell.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal completions bash > /etc/bash_completion.d/shoal
  shoal completions zsh > \"${fpath[1]}/_shoal\"
  shoal completions fish > ~/.config/fish/completions/shoal.fish")]
pub struct Completions {
    /// For which shell
    pub shell: clap_complete::Shell,
}

/// Measure what sandboxes cost here, beside what the bare kernel and other tools need, in one run.
#[derive(Debug, Args)]
#[command(after_help = "\
A private daemon with a data directory of its own does the work, and is gone afterwards.
bubblewrap, runc and runsc are measured where they are installed. Needs root.

Examples:
  shoal bench
  shoal bench --only create,command
  shoal bench --rounds 30 --idle 100 --restart 20 --json
  shoal bench --write docs")]
pub struct Bench {
    /// What to measure, separated by commas; left out: everything
    #[arg(long, value_name = "WHAT", value_delimiter = ',', conflicts_with = "write")]
    pub only: Vec<BenchPart>,
    /// How often each thing is measured; medians are shown
    #[arg(long, default_value_t = 100)]
    pub rounds: usize,
    /// How many idle sandboxes are made at once
    #[arg(long, default_value_t = 1000)]
    pub idle: usize,
    /// How many sandboxes the daemon is killed beside, each with five commands that write
    #[arg(long, value_name = "SANDBOXES", default_value_t = 200)]
    pub restart: usize,
    /// Write a page and a chart into this directory, `benchmarks.md` and `benchmarks.svg`
    #[arg(long, value_name = "DIR")]
    pub write: Option<PathBuf>,
    /// A Python with the package `langsmith[sandbox]`, to measure a command with that client
    #[arg(long, value_name = "PROGRAM")]
    pub langsmith_python: Option<PathBuf>,
    /// Measure only ourselves and the floor
    #[arg(long)]
    pub without_comparators: bool,
    /// Print an array of rows
    #[arg(long)]
    pub json: bool,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchPart {
    /// From the wish for a sandbox to the result of its first command.
    Create,
    /// A command in a running sandbox.
    Command,
    /// Claims from a pool, one after the other and 20 at once.
    Pools,
    /// 100 creates at once.
    AtOnce,
    /// Output of commands and files, up and down.
    Bytes,
    /// Freezing and thawing.
    Freeze,
    /// The store: sandboxes and volumes in it, with and without a btrfs.
    Store,
    /// Images: pulled, unpacked, and the first create from one.
    Images,
    /// A daemon that is killed beside many writing commands.
    Restart,
    /// What an idle sandbox costs, and the last create of many.
    Idle,
}

/// The benchmark's floor, in a process of its own.
#[derive(Debug, Args)]
pub struct BenchFloor {
    /// What to measure
    #[arg(long)]
    pub kind: FloorKind,
    /// A generation of the image `host`
    #[arg(long)]
    pub image: PathBuf,
    /// Where directories may be made
    #[arg(long)]
    pub scratch: PathBuf,
}

/// What the floor measures.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum FloorKind {
    /// A bare create.
    Create,
    /// Bare creates, all begun at once.
    CreateMany,
    /// A bare command.
    Command,
}

/// What the daemon starts to have something done to the kernel.
#[derive(Debug, Args)]
pub struct Launcher {
    /// The daemon's data directory
    #[arg(long)]
    pub data_dir: PathBuf,
    /// Whose sandboxes it makes
    #[arg(long)]
    pub installation: wire::InstallationId,
    /// Where writable files are kept
    #[arg(long, value_parser = store_wish)]
    pub store: wire::launch::StoreWish,
    /// How large a store of kind loop is, in bytes
    #[arg(long)]
    pub store_size: Option<u64>,
}

fn store_wish(text: &str) -> Result<wire::launch::StoreWish, String> {
    wire::launch::StoreWish::parse(text).ok_or_else(|| "it is auto, btrfs, loop or directory".into())
}

/// Seconds between two looks: often enough to be of use, seldom enough to cost nothing.
fn interval(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.1..=3600.0).contains(&seconds) => Ok(seconds),
        Ok(_) | Err(_) => Err("it is 0.1 to 3600 seconds".into()),
    }
}

fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        Some(_) | None => Err("write it as NAME=VALUE".into()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(words: &[&str]) -> Result<Subcommand, clap::Error> {
        let words = std::iter::once("shoal").chain(words.iter().copied());
        Arguments::try_parse_from(words).map(|arguments| arguments.subcommand)
    }

    fn run(words: &[&str]) -> Run {
        match parse(words).expect("it is valid") {
            Subcommand::Run(run) => *run,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn what_follows_the_program_belongs_to_it() {
        for words in [&["run", "--", "ls", "-l", "--json"][..], &["run", "ls", "-l", "--json"]] {
            let run = run(words);
            assert_eq!(run.command, ["ls", "-l", "--json"]);
            assert!(!run.json);
        }
        assert_eq!(run(&["run", "--json", "--", "--", "x"]).command, ["--", "x"]);
    }

    #[test]
    fn variables_keep_their_equals_signs() {
        let run = run(&["run", "-e", "A=b=c", "--env", "B=", "-w", "/x", "-u", "nobody", "--", "true"]);
        assert_eq!(run.env, [("A".into(), "b=c".into()), ("B".into(), String::new())]);
        assert_eq!((run.workdir.as_deref(), run.user.as_deref()), (Some("/x"), Some("nobody")));
    }

    #[test]
    fn mistakes_are_refused() {
        for words in [
            &["run"][..],
            &["run", "-e", "NOVALUE", "--", "true"],
            &["run", "-e", "=x", "--", "true"],
            &["run", "--timeout", "soon", "--", "true"],
            &["run", "--sandbox", "x", "--cpu", "1", "--", "true"],
            &["rm"],
            &["create", "--get-or-create"],
            &["create", "--label", "novalue"],
            &["create", "--idle", "soon"],
            &["lifetime", "x"],
            &["lifetime", "x", "--none", "--idle", "5m"],
            &["label", "x", "y"],
            &["key", "create"],
            &["serve", "--private", "/x", "--data-dir", "/y"],
            &["launcher", "--data-dir", "/x", "--installation", "../.."],
            &["frobnicate"],
        ] {
            assert!(parse(words).is_err(), "{words:?}");
        }
    }

    #[test]
    fn every_subcommand_has_examples() {
        fn look(command: &clap::Command) {
            for below in command.get_subcommands() {
                if below.is_hide_set() || below.get_name() == "help" {
                    continue;
                }
                let after = below.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(after.contains("Examples:\n"), "`{}` has no examples", below.get_name());
                assert!(below.get_about().is_some(), "`{}` does not say what it does", below.get_name());
                look(below);
            }
        }
        look(&Arguments::command());
    }

    /// The words of a line as a shell would read them, up to a pipe, a redirection or the next command.
    fn words(line: &str) -> Vec<String> {
        let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None);
        for character in line.chars() {
            match (quote, character) {
                (Some(open), close) if open == close => quote = None,
                (None, open @ ('\'' | '"')) => {
                    quote = Some(open);
                    word.get_or_insert_default();
                }
                (None, '|' | '>' | '<' | ';' | '&' | '#') => break,
                (None, space) if space.is_whitespace() => words.extend(word.take()),
                (_, character) => word.get_or_insert_default().push(character),
            }
        }
        words.extend(word);
        words
    }

    #[test]
    fn every_command_in_the_documents_is_one() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut documents = vec![root.join("README.md")];
        let mut directories = vec![root.join("docs")];
        while let Some(directory) = directories.pop() {
            for entry in std::fs::read_dir(directory).expect("it is there") {
                let path = entry.expect("readable").path();
                if path.is_dir() {
                    directories.push(path);
                } else if path.extension().is_some_and(|extension| extension == "md") {
                    documents.push(path);
                }
            }
        }
        let mut count = 0;
        for path in documents {
            let text = std::fs::read_to_string(&path).expect("text");
            // Every second piece between fences is a block.
            for block in text.split("```").skip(1).step_by(2) {
                let (kind, block) = block.split_once('\n').unwrap_or_default();
                for line in block.replace("\\\n", " ").lines() {
                    let line = match kind {
                        "sh" => line.trim(),
                        "console" => line.strip_prefix("$ ").unwrap_or_default(),
                        _ => "",
                    };
                    let words = words(line);
                    let Some((program, arguments)) = words.split_first() else { continue };
                    if program == "shoal" {
                        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
                        // Help and versions are told by way of an error.
                        if let Err(error) = parse(&arguments) {
                            assert_eq!(error.exit_code(), 0, "{}: `{line}`: {error}", path.display());
                        }
                        count += 1;
                    }
                }
            }
        }
        assert!(count > 10, "the documents have commands: {count}");
    }

    #[test]
    fn completions_know_every_subcommand() {
        for shell in [clap_complete::Shell::Bash, clap_complete::Shell::Zsh, clap_complete::Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "shoal", &mut script);
            let script = String::from_utf8(script).expect("a script is text");
            for word in ["shell", "doctor", "detach-keys", "inspect"] {
                assert!(script.contains(word), "{shell} does not know {word}");
            }
        }
    }

    #[test]
    fn the_help_of_every_subcommand_has_not_drifted() {
        let mut all = String::new();
        let mut command = Arguments::command().term_width(100);
        command.build();
        write_help(&mut command, &mut all);
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/cli.txt");
        if std::env::var_os("UPDATE_CLI_REFERENCE").is_some() {
            std::fs::write(&path, &all).expect("the reference can be written");
        }
        assert!(
            std::fs::read_to_string(&path).unwrap_or_default() == all,
            "docs/reference/cli.txt is not what the program says; look at what changed and update it with\n    \
             UPDATE_CLI_REFERENCE=1 cargo test -p shoal"
        );
    }

    fn write_help(command: &mut clap::Command, to: &mut String) {
        let help = command.render_long_help();
        to.push_str(&format!("## {}\n\n{help}\n", command.get_bin_name().unwrap_or("shoal")));
        for below in command.get_subcommands_mut() {
            if !below.is_hide_set() && below.get_name() != "help" {
                write_help(below, to);
            }
        }
    }
}
