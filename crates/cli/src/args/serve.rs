//! The arguments of `shoal serve`, and what configures a daemon.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::args::value::duration;

/// Start the daemon. It prints `ready` once it accepts requests; SIGTERM stops it and leaves sandboxes running.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal serve
  shoal serve -d                          in the background
  shoal serve --listen 127.0.0.1:9000 --data-dir /srv/shoal
  shoal serve --listen 0.0.0.0:7878 --tls-cert cert.pem --tls-key key.pem

The first start creates an API key and keeps it in `api.key` in the data directory; SHOAL_API_KEY sets another one.

Flags override environment variables (SHOAL_LISTEN and so on), and these override the configuration file; \
`shoal config show` prints the result. SHOAL_LOG sets the log filter, for example `info,shoal_engine=debug`. At a terminal and with -d the log has only warnings \
and errors by default; SHOAL_LOG=info adds a line for each request.")]
pub struct Serve {
    #[command(flatten)]
    pub flags: DaemonFlags,
    /// Run in the background, and return once the daemon accepts requests; the log goes to `serve.log` in the data directory
    #[arg(short, long, conflicts_with = "private")]
    pub detach: bool,
    /// Run as the daemon that --detach has started
    #[arg(long, hide = true, conflicts_with_all = ["detach", "private"])]
    pub detached: bool,
    /// Upgrade: ask the daemon that holds the data directory to stop, and start in its place. Sandboxes keep running
    #[arg(long, conflicts_with = "private")]
    pub take_over: bool,
    /// Run as the private daemon of `shoal run`, in this directory, for as long as a client holds a lease
    #[arg(long, value_name = "DIR", hide = true, conflicts_with_all = ["data_dir", "listen", "config", "public_url"])]
    pub private: Option<PathBuf>,
    /// Stay this much longer if the last client left nothing behind
    #[arg(long, value_name = "DURATION", hide = true, requires = "private", value_parser = duration, default_value = "0s")]
    pub linger: Duration,
}

/// Settings of a daemon that have a flag.
#[derive(Debug, Args)]
pub struct DaemonFlags {
    /// Listen on this address and port [default: 127.0.0.1:7878]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// Keep all data in this directory [default: /var/lib/shoal]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// The URL at which clients reach the daemon, if it is not the address it listens on
    #[arg(long, value_name = "URL")]
    pub public_url: Option<String>,
    /// Read settings from this TOML file [default: /etc/shoal/config.toml, if it exists]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Serve TLS with this certificate chain (PEM)
    #[arg(long, value_name = "FILE")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of the certificate (PEM)
    #[arg(long, value_name = "FILE")]
    pub tls_key: Option<PathBuf>,
    /// Allow plain HTTP beyond loopback, for a daemon behind a proxy that encrypts
    #[arg(long)]
    pub insecure_http: bool,
    /// Write the log as JSON
    #[arg(long)]
    pub log_json: bool,
    /// Keep this many sandboxes ready, so that a create only has to claim one; 0 for none [default: 8]
    #[arg(long, value_name = "NUMBER")]
    pub spares: Option<u32>,
    /// Kind of storage for writable files: auto, btrfs, loop or directory [default: auto]
    #[arg(long, value_name = "KIND")]
    pub store: Option<String>,
    /// Size of a loop store, for example 20Gi [default: a quarter of the free space, from 2Gi to 64Gi]
    #[arg(long, value_name = "SIZE")]
    pub store_size: Option<String>,
    /// Send traces to this OpenTelemetry collector (OTLP over HTTP), for example http://127.0.0.1:4318
    #[arg(long, value_name = "URL")]
    pub otlp_endpoint: Option<String>,
}
