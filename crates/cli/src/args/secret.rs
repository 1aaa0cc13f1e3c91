//! The arguments of `shoal secret` and `shoal ledger`.

use std::path::PathBuf;

use clap::Args;

/// Manage secrets: keys that sandboxes use without holding them.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  printf %s \"$TOKEN\" | shoal secret set github
  shoal run --inject github -- git clone https://github.com/acme/private
  printf %s \"$KEY\" | shoal secret set billing --host api.example.com --header X-Api-Key
  shoal secret ls
  shoal secret rm billing")]
pub struct Secret {
    #[command(subcommand)]
    pub action: SecretAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum SecretAction {
    Set(Box<SetSecret>),
    Rotate(RotateSecret),
    #[command(visible_alias = "list")]
    Ls(ListSecrets),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveSecret),
}

/// Keep a secret and say which requests get it. Reads the value from stdin unless a file or a variable is named.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  printf %s \"$TOKEN\" | shoal secret set github
  printf %s \"$KEY\" | shoal secret set mine --preset openai
  printf %s \"$KEY\" | shoal secret set pay --host pay.example.com --header X-Key
  shoal secret set deploy --from-file /etc/token --host deploy.example.com

Presets: anthropic, gcp, github, huggingface, npm, openai, pypi. A secret with the name of a preset has its rules.")]
pub struct SetSecret {
    /// Name of the secret
    pub name: String,
    /// Read the value from this file on the daemon's machine, again and again (for admins)
    #[arg(long, value_name = "PATH")]
    pub from_file: Option<PathBuf>,
    /// Read the value from this variable of the daemon (for admins)
    #[arg(long, value_name = "NAME", conflicts_with = "from_file")]
    pub from_env: Option<String>,
    /// Use the hosts, the shape and the variables of this service
    #[arg(long, value_name = "SERVICE")]
    pub preset: Option<String>,
    /// Send it to this host, for example api.example.com or *.example.com; repeatable
    #[arg(long = "host", value_name = "HOST")]
    pub hosts: Vec<String>,
    /// Send it to this port [default: 443]
    #[arg(long, value_name = "PORT", requires = "hosts")]
    pub port: Vec<String>,
    /// Send it with this method only; repeatable
    #[arg(long = "method", value_name = "METHOD", requires = "hosts")]
    pub methods: Vec<String>,
    /// Send it to this path and what is below it only; repeatable
    #[arg(long = "path", value_name = "PATH", requires = "hosts")]
    pub paths: Vec<String>,
    /// Send it as `Authorization: Bearer`, which is the default
    #[arg(long, requires = "hosts", group = "shape")]
    pub bearer: bool,
    /// Send it as the password of this user
    #[arg(long, value_name = "USER", requires = "hosts", group = "shape")]
    pub basic: Option<String>,
    /// Send it as this header
    #[arg(long, value_name = "NAME", requires = "hosts", group = "shape")]
    pub header: Option<String>,
    /// Send it as this parameter of the query
    #[arg(long, value_name = "NAME", requires = "hosts", group = "shape")]
    pub query: Option<String>,
    /// Put it wherever the program wrote the placeholder: header, query, body; separated by commas
    #[arg(long, value_name = "WHERE", value_delimiter = ',', requires = "hosts", group = "shape")]
    pub placeholder: Vec<String>,
    /// Set this variable in sandboxes to the placeholder; repeatable
    #[arg(long = "variable", value_name = "NAME")]
    pub variables: Vec<String>,
    /// Print the secret as JSON, without its value
    #[arg(long)]
    pub json: bool,
}

/// Give a secret another value, read from stdin. Its rules and placeholders stay.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  printf %s \"$TOKEN\" | shoal secret rotate github")]
pub struct RotateSecret {
    /// Name of the secret
    pub name: String,
    /// Print the secret as JSON, without its value
    #[arg(long)]
    pub json: bool,
}

/// List secrets by name. No command shows a value.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal secret ls\n  shoal secret ls --json | jq -r '.[].name'")]
pub struct ListSecrets {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Delete secrets. No request of any sandbox carries them any more when this returns.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal secret rm billing")]
pub struct RemoveSecret {
    /// Names of the secrets
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<String>,
}

/// Show which sandbox used which secret, and where.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal ledger
  shoal ledger --json | jq 'map(select(.status >= 400))'
  shoal ledger verify")]
pub struct Ledger {
    #[command(subcommand)]
    pub action: Option<LedgerAction>,
    /// Show only lines after this number
    #[arg(long, value_name = "NUMBER")]
    pub after: Option<u64>,
    /// Show at most this many lines
    #[arg(long, value_name = "COUNT", default_value_t = 100)]
    pub limit: u32,
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, clap::Subcommand)]
pub enum LedgerAction {
    Verify(VerifyLedger),
}

/// Check whether a line was changed or removed. Exits with 1 if so.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal ledger verify")]
pub struct VerifyLedger {
    /// Print the result as JSON
    #[arg(long)]
    pub json: bool,
}
