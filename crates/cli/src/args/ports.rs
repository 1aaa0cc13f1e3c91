//! The arguments of `shoal ports` and `shoal url`.

use std::time::Duration;

use clap::Args;

use super::value::duration;

/// List the ports that programs in a sandbox listen on.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal ports work
  shoal ports work --wait 8080             until a program listens there
  shoal ports work --links                 the links that open ports")]
pub struct Ports {
    /// The sandbox's id or name
    pub sandbox: String,
    /// Wait until a program listens on this port
    #[arg(long, value_name = "PORT")]
    pub wait: Option<u16>,
    /// How long to wait
    #[arg(long, value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub timeout: Duration,
    /// List the links to ports instead
    #[arg(long, conflicts_with_all = ["wait"])]
    pub links: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Print a link to a port of a sandbox, for a browser.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal url work 8080                      a link that works for an hour
  shoal url work 8080 --ttl 10m --method GET --method HEAD
  shoal url work 8080 --public             for everybody, where allowed
  shoal url work --revoke ID               end a link

`shoal ports work --links` lists the links that work. Anyone with a link can use the port. Names below `localhost` work in browsers on the daemon's machine; others need \
`ports_url` in the daemon's configuration.")]
pub struct Url {
    /// The sandbox's id or name
    pub sandbox: String,
    /// The port
    #[arg(required_unless_present = "revoke")]
    pub port: Option<u16>,
    /// How long the link works
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration)]
    pub ttl: Duration,
    /// Allow only this method; repeatable
    #[arg(long = "method", value_name = "METHOD")]
    pub methods: Vec<String>,
    /// What the link is for
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Open the port to everybody, without a token
    #[arg(long)]
    pub public: bool,
    /// Revoke the link with this id
    #[arg(long, value_name = "LINK", conflicts_with_all = ["port", "methods", "label", "public"])]
    pub revoke: Option<String>,
    /// Print the link as JSON
    #[arg(long)]
    pub json: bool,
}
