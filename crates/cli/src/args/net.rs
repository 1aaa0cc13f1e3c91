//! The arguments of `shoal net`, and `--net`.

use clap::Args;

/// Show and change what a sandbox may reach.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal net show work
  shoal net explain work https://example.com
  shoal net allow work example.com
  shoal net requests work          what was refused, and how to open it
  shoal net watch work             every decision, as it happens
  shoal net set work registries")]
pub struct Net {
    #[command(subcommand)]
    pub action: NetAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum NetAction {
    Show(NetShow),
    Explain(NetExplain),
    Allow(NetAllow),
    Set(NetSet),
    Requests(NetRequests),
    Log(NetLog),
    Watch(NetWatch),
    Presets(NetPresets),
}

/// Show what a sandbox may reach, and what it has used.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal net show work\n  shoal net show --json work | jq .totals")]
pub struct NetShow {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print the network as JSON
    #[arg(long)]
    pub json: bool,
}

/// Explain which rule decides about a destination, and which command would open it.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal net explain work https://example.com
  shoal net explain work tcp://db.example.com:5432

The exit code is 0 if the connection passes, and 1 if it is refused.")]
pub struct NetExplain {
    /// The sandbox's id or name
    pub sandbox: String,
    /// https://HOST, http://HOST, ssh://HOST or tcp://HOST:PORT
    #[arg(value_name = "DESTINATION")]
    pub to: String,
    /// Print the explanation as JSON
    #[arg(long)]
    pub json: bool,
}

/// Open a destination for a running sandbox.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal net allow work example.com
  shoal net allow work '*.example.com' --port 443
  shoal net allow work db.example.com --port 5432 --protocol tcp")]
pub struct NetAllow {
    /// The sandbox's id or name
    pub sandbox: String,
    /// A host, *.SUFFIX, or a block of addresses
    #[arg(value_name = "DESTINATION")]
    pub to: String,
    /// Open only this port or range, for example 443 or 8000-8999; repeatable
    #[arg(short, long = "port", value_name = "PORT")]
    pub ports: Vec<String>,
    /// Open only this protocol: tls, http, ssh or tcp
    #[arg(long)]
    pub protocol: Option<String>,
    /// Let the host have private addresses
    #[arg(long)]
    pub private: bool,
    /// Print the policy as JSON
    #[arg(long)]
    pub json: bool,
}

/// Replace what a running sandbox may reach.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal net set work registries
  shoal net set work none                cuts open connections
  shoal net set work policy.toml")]
pub struct NetSet {
    /// The sandbox's id or name
    pub sandbox: String,
    /// none, registries, open, or a file with a policy in TOML or JSON
    #[arg(value_name = "MODE|FILE")]
    pub network: String,
    /// Print the policy as JSON
    #[arg(long)]
    pub json: bool,
}

/// List what was refused, with the command that would open it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal net requests work")]
pub struct NetRequests {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// List the latest decisions about connections and names.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal net log work\n  shoal net log -n 500 --json work")]
pub struct NetLog {
    /// The sandbox's id or name
    pub sandbox: String,
    /// How many, 1 to 500
    #[arg(short = 'n', long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=500))]
    pub limit: u32,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Print decisions about connections and names as they happen, until Ctrl-C.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal net watch work\n  shoal net watch --refused work")]
pub struct NetWatch {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Print only what is refused
    #[arg(long)]
    pub refused: bool,
    /// Print a JSON object per line
    #[arg(long)]
    pub json: bool,
}

/// List the hosts that the mode `registries` opens, and where each was found.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal net presets")]
pub struct NetPresets {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}
