//! The daemon's configuration: the settings as written, where each came from, and the checked [`Config`].
//!
//! All layering is here: a flag goes before the environment, the environment before the file, the file before the
//! default. A [`Config`] is checked already, so nothing below checks it again. What each setting is called, and how the file and the
//! environment are read, is in [`crate::config::settings`].

pub mod network;
pub mod quantity;
pub mod settings;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use engine::Capacity;
use engine::image::{BadDockerConfig, DockerConfig, ImageSettings, Mirror, RegistrySettings, is_registry};
use serde::Deserialize;
use wire::launch::{STORE_BYTES_MAX, STORE_BYTES_MIN, StoreWish};

use crate::config::network::NetworkConfig;
use crate::config::quantity::{BadQuantity, Bytes, Cpu};
use crate::config::settings::File;
use crate::http::origin::{Host, Origin};
use crate::http::port_names::PortDomain;
use crate::observe::traces::Endpoint;

/// Loopback only, on a port that nothing well known uses.
pub const LISTEN_DEFAULT: &str = "127.0.0.1:7878";
/// Where a daemon of the whole machine keeps its things.
pub const DATA_DIR_DEFAULT: &str = "/var/lib/shoal";
/// Connections at once. Each costs a descriptor, of which a process may have some 20,000 while sandboxes need ten each.
pub const CONNECTIONS_MAX_DEFAULT: u32 = 4096;
/// Sandboxes at once: at ten descriptors each, what one daemon can hold open.
pub const SANDBOXES_MAX_DEFAULT: u32 = 1900;
/// A limit is a ceiling and not a reservation, and most sandboxes idle; so their sum may be far beyond the machine.
pub const CPU_OVERCOMMIT: u64 = 1000;
/// As with cpu. An idle sandbox costs about a thousandth of its ceiling.
pub const MEMORY_OVERCOMMIT: u64 = 100;
/// How much of each stream of a command is kept.
pub const OUTPUT_KEPT_DEFAULT: u64 = 64 << 20;

/// Sandboxes that stand ready before anybody has asked: at a quarter of a mebibyte each, the usual create costs a claim.
pub const SPARES_DEFAULT: u32 = 8;
/// More than this would hold memory for a burst that pools are meant for.
pub const SPARES_MAX: u32 = 64;

/// The settings as written, in a file, in the environment or on the command line. Unknown keys are refused.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Address and port to listen on.
    pub listen: Option<String>,
    /// Where rows, logs and sandboxes are kept.
    pub data_dir: Option<PathBuf>,
    /// How clients reach this daemon, if not at the address it listens on.
    pub public_url: Option<String>,
    /// Where ports of sandboxes are reached by host name, as `https://ports.example.com`.
    pub ports_url: Option<String>,
    /// Ports may be opened to everybody.
    pub public_ports: Option<bool>,
    /// Names beside the public URL's that a `Host` header may carry.
    pub allowed_hosts: Option<Vec<String>>,
    /// Origins beside the public URL's from which browsers may call.
    pub allowed_origins: Option<Vec<String>>,
    /// Listen beyond loopback without TLS all the same.
    pub insecure_http: Option<bool>,
    /// Certificate chain, as a PEM file.
    pub tls_cert: Option<PathBuf>,
    /// Its private key, as a PEM file.
    pub tls_key: Option<PathBuf>,
    /// Logs as JSON.
    pub log_json: Option<bool>,
    /// Connections at once.
    pub connections_max: Option<u32>,
    /// Sandboxes at once.
    pub sandboxes_max: Option<u32>,
    /// The sum of all sandboxes' cpu limits, as `"64"`.
    pub cpu_max: Option<String>,
    /// The sum of all sandboxes' memory limits, as `"64Gi"`.
    pub memory_max: Option<String>,
    /// How much of each stream of a command is kept, as `"64Mi"`.
    pub output_kept: Option<String>,
    /// Sandboxes that stand ready before anybody has asked for them.
    pub spares: Option<u32>,
    /// Where writable files are kept: `auto`, `btrfs`, `loop` or `directory`.
    pub store: Option<String>,
    /// How large a store of kind `loop` is, as `"20Gi"`.
    pub store_size: Option<String>,
    /// The OpenTelemetry collector that traces go to, as `http://127.0.0.1:4318`.
    pub otlp_endpoint: Option<String>,
    /// Registries that are spoken to in the clear, as `host` or `host:port`.
    pub insecure_registries: Option<Vec<String>>,
    /// Who is asked before a registry, as `docker.io=https://mirror.local`.
    pub registry_mirrors: Option<Vec<String>>,
    /// A Docker `config.json` with credentials for registries.
    pub docker_config: Option<PathBuf>,
    /// Whether the pulls of all owners use those credentials.
    pub docker_config_shared: Option<bool>,
    /// The registries that keys without admin rights may name.
    pub image_registries_allowed: Option<Vec<String>>,
    /// What sandboxes may reach whose request and template say nothing: `none`, `registries` or `open`.
    pub network_default: Option<String>,
    /// Hosts that `registries` opens beside those that are found on the machine.
    pub network_hosts: Option<Vec<String>>,
    /// Resolvers in place of the machine's.
    pub network_resolvers: Option<Vec<String>>,
    /// The proxy that connections of sandboxes go through.
    pub network_proxy: Option<String>,
    /// Blocks of addresses that count as public.
    pub network_open: Option<Vec<String>>,
    /// Blocks of addresses that stay closed.
    pub network_closed: Option<Vec<String>>,
    /// PEM files with roots beside the system's.
    pub network_roots: Option<Vec<String>>,
}

/// Where a setting came from, the strongest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    Flag,
    /// An environment variable.
    Environment,
    /// The configuration file.
    File,
    /// Nobody said anything.
    Default,
}

/// All that was said, by source.
#[derive(Debug, Clone, Default)]
pub struct Layers {
    /// The command line.
    pub flags: Settings,
    /// Environment variables.
    pub environment: Settings,
    /// The configuration file.
    pub file: Settings,
    /// Where that file is.
    pub path: PathBuf,
    /// The line of each of its keys.
    pub lines: BTreeMap<String, usize>,
}

impl Layers {
    /// What was said, the strongest first.
    pub fn new(flags: Settings, environment: Settings, file: Option<File>) -> Self {
        let File { path, settings, lines } = file.unwrap_or_default();
        Self { flags, environment, file: settings, path, lines }
    }

    /// The strongest word on one setting, and whose it is.
    pub fn pick<T>(&self, of: impl Fn(&Settings) -> Option<T>) -> Option<(T, Source)> {
        [(&self.flags, Source::Flag), (&self.environment, Source::Environment), (&self.file, Source::File)]
            .into_iter()
            .find_map(|(settings, source)| of(settings).map(|value| (value, source)))
    }

    fn value<T>(&self, of: impl Fn(&Settings) -> Option<T>) -> Option<T> {
        self.pick(of).map(|(value, _)| value)
    }
}

/// The checked configuration, built once.
#[derive(Debug, Clone)]
pub struct Config {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Where rows, logs and sandboxes are kept.
    pub data_dir: PathBuf,
    /// How clients reach this daemon, without a slash at its end.
    pub public_url: Option<PublicUrl>,
    /// Where ports of sandboxes are reached by host name, beside `localhost`.
    pub ports_url: Option<PortDomain>,
    /// Ports may be opened to everybody.
    pub public_ports: bool,
    /// Names that a `Host` header may carry, beside loopback's and the listener's own.
    pub allowed_hosts: Vec<Host>,
    /// Origins from which browsers may call.
    pub allowed_origins: Vec<Origin>,
    /// Certificate chain and private key.
    pub tls: Option<TlsFiles>,
    /// Connections at once.
    pub connections_max: u32,
    /// What all sandboxes together may promise themselves.
    pub capacity: Capacity,
    /// How many bytes of each stream are kept.
    pub output_kept_max: u64,
    /// Sandboxes that stand ready before anybody has asked for them.
    pub spares: u32,
    /// Where writable files are kept.
    pub store: StoreWish,
    /// How large a store of kind `loop` is; a part of what is free where nobody says.
    pub store_bytes: Option<u64>,
    /// Where traces go.
    pub otlp_endpoint: Option<Endpoint>,
    /// Logs as JSON.
    pub log_json: bool,
    /// How images come here, without what is in `docker_config` until [`Self::read_files`].
    pub images: ImageSettings,
    /// A file of Docker's with credentials for registries.
    pub docker_config: Option<PathBuf>,
    /// What sandboxes may reach, and how.
    pub network: NetworkConfig,
}

/// PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate chain.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// The URL under which clients reach the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicUrl {
    /// As it was given, without a slash at its end.
    pub text: String,
    /// Its host.
    pub host: Host,
    /// Its origin.
    pub origin: Origin,
}

impl PublicUrl {
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim_end_matches('/');
        let (scheme, rest) = text.split_once("://")?;
        let (authority, path) = rest.split_once('/').unwrap_or((rest, ""));
        if path.contains(['?', '#']) {
            return None;
        }
        let origin = Origin::parse(&format!("{scheme}://{authority}"))?;
        Some(Self { text: text.into(), host: Host::parse(authority)?, origin })
    }
}

/// The machine that the daemon runs on, as far as defaults depend on it.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    /// Processors.
    pub cpus: u64,
    /// Memory.
    pub memory_bytes: u64,
}

impl Machine {
    /// This one.
    pub fn this() -> Self {
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u64);
        let info = rustix::system::sysinfo();
        #[allow(clippy::unnecessary_cast)] // The width of the kernel's field differs between machines.
        let memory_bytes = (info.totalram as u64).saturating_mul(u64::from(info.mem_unit));
        Self { cpus, memory_bytes }
    }
}

impl Config {
    /// Checks what was said and fills in what was not.
    pub fn check(layers: &Layers, machine: Machine) -> Result<Self, ConfigError> {
        let listen = layers.value(|s| s.listen.clone()).unwrap_or_else(|| LISTEN_DEFAULT.into());
        let listen = listen.parse::<SocketAddr>().map_err(|_| ConfigError::Listen { text: listen })?;
        let data_dir = layers.value(|s| s.data_dir.clone()).unwrap_or_else(|| DATA_DIR_DEFAULT.into());
        if !data_dir.is_absolute() {
            return Err(ConfigError::RelativeDataDir { path: data_dir });
        }
        let tls = match (layers.value(|s| s.tls_cert.clone()), layers.value(|s| s.tls_key.clone())) {
            (Some(cert), Some(key)) => Some(TlsFiles { cert, key }),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => return Err(ConfigError::HalfTls),
        };
        let insecure = layers.value(|s| s.insecure_http).unwrap_or(false);
        if tls.is_none() && !insecure && !is_loopback(listen.ip()) {
            return Err(ConfigError::Insecure { listen });
        }
        let public_url = match layers.value(|s| s.public_url.clone()) {
            Some(text) => Some(PublicUrl::parse(&text).ok_or(ConfigError::PublicUrl { text })?),
            None => None,
        };
        let ports_url = match layers.value(|s| s.ports_url.clone()) {
            Some(text) => Some(PortDomain::parse(&text).ok_or(ConfigError::PortsUrl { text })?),
            None => None,
        };
        let public_ports = layers.value(|s| s.public_ports).unwrap_or(false);
        let allowed_hosts = layers
            .value(|s| s.allowed_hosts.clone())
            .unwrap_or_default()
            .into_iter()
            .map(|text| Host::parse(&text).ok_or(ConfigError::AllowedHost { text }))
            .collect::<Result<_, _>>()?;
        let allowed_origins = layers
            .value(|s| s.allowed_origins.clone())
            .unwrap_or_default()
            .into_iter()
            .map(|text| Origin::parse(&text).ok_or(ConfigError::AllowedOrigin { text }))
            .collect::<Result<_, _>>()?;
        let capacity = Capacity {
            sandboxes: layers.value(|s| s.sandboxes_max).unwrap_or(SANDBOXES_MAX_DEFAULT),
            cpu_millis: match layers.value(|s| s.cpu_max.clone()) {
                Some(text) => quantity("cpu_max", Cpu::parse(&text))?.millis,
                None => machine.cpus.saturating_mul(1000).saturating_mul(CPU_OVERCOMMIT),
            },
            memory_bytes: match layers.value(|s| s.memory_max.clone()) {
                Some(text) => quantity("memory_max", Bytes::parse(&text))?.bytes,
                None => machine.memory_bytes.saturating_mul(MEMORY_OVERCOMMIT),
            },
        };
        let output_kept_max = match layers.value(|s| s.output_kept.clone()) {
            Some(text) => quantity("output_kept", Bytes::parse(&text))?.bytes,
            None => OUTPUT_KEPT_DEFAULT,
        };
        let connections_max = layers.value(|s| s.connections_max).unwrap_or(CONNECTIONS_MAX_DEFAULT);
        if connections_max == 0 {
            return Err(ConfigError::NoConnections);
        }
        let otlp_endpoint = match layers.value(|s| s.otlp_endpoint.clone()) {
            Some(text) => Some(Endpoint::parse(&text).ok_or(ConfigError::OtlpEndpoint { text })?),
            None => None,
        };
        let spares = layers.value(|s| s.spares).unwrap_or(SPARES_DEFAULT);
        if spares > SPARES_MAX {
            return Err(ConfigError::Spares { number: spares });
        }
        let store = match layers.value(|s| s.store.clone()) {
            Some(text) => StoreWish::parse(&text).ok_or(ConfigError::Store { text })?,
            None => StoreWish::Auto,
        };
        let store_bytes = match layers.value(|s| s.store_size.clone()) {
            Some(text) => Some(quantity("store_size", Bytes::parse(&text))?.bytes),
            None => None,
        };
        if let Some(bytes) = store_bytes.filter(|size| !(STORE_BYTES_MIN..=STORE_BYTES_MAX).contains(size)) {
            return Err(ConfigError::StoreSize { bytes });
        }
        let log_json = layers.value(|s| s.log_json).unwrap_or(false);
        let images = ImageSettings { registries: registries(layers)? };
        let docker_config = layers.value(|s| s.docker_config.clone());
        Ok(Self {
            listen,
            data_dir,
            public_url,
            ports_url,
            public_ports,
            allowed_hosts,
            allowed_origins,
            tls,
            connections_max,
            capacity,
            output_kept_max,
            spares,
            store,
            store_bytes,
            otlp_endpoint,
            log_json,
            images,
            docker_config,
            network: NetworkConfig::check(layers)?,
        })
    }

    /// Reads the file that is a part of the configuration. A daemon needs it; a command that only shows settings does not.
    pub fn read_files(mut self) -> Result<Self, ConfigError> {
        if let Some(path) = self.docker_config.clone() {
            let unread = |source| ConfigError::DockerConfigUnread { path: path.clone(), source };
            let text = std::fs::read(&path).map_err(unread)?;
            self.images.registries.docker_config =
                DockerConfig::parse(&text).map_err(|source| ConfigError::DockerConfig { path, source })?;
        }
        Ok(self)
    }
}

fn registries(layers: &Layers) -> Result<RegistrySettings, ConfigError> {
    let insecure = layers.value(|s| s.insecure_registries.clone()).unwrap_or_default();
    if let Some(text) = insecure.iter().find(|text| !is_registry(text)) {
        return Err(ConfigError::Registry { text: text.clone() });
    }
    let mut mirrors: BTreeMap<String, Vec<Mirror>> = BTreeMap::new();
    for text in layers.value(|s| s.registry_mirrors.clone()).unwrap_or_default() {
        let parsed = text.split_once('=').and_then(|(registry, url)| {
            is_registry(registry).then_some((registry.to_owned(), Mirror::parse(url)?))
        });
        let (registry, mirror) = parsed.ok_or(ConfigError::Mirror { text })?;
        mirrors.entry(registry).or_default().push(mirror);
    }
    let allowed = layers.value(|s| s.image_registries_allowed.clone());
    if let Some(text) = allowed.iter().flatten().find(|text| !is_registry(text)) {
        return Err(ConfigError::AllowedRegistry { text: text.clone() });
    }
    let docker_config_shared = layers.value(|s| s.docker_config_shared).unwrap_or(false);
    let docker_config = DockerConfig::default();
    Ok(RegistrySettings { insecure, mirrors, docker_config, docker_config_shared, allowed })
}

fn quantity<T>(key: &'static str, parsed: Result<T, BadQuantity>) -> Result<T, ConfigError> {
    parsed.map_err(|source| ConfigError::Quantity { key, source })
}

/// Loopback in either family, also when an IPv4 address is written as IPv6.
fn is_loopback(ip: IpAddr) -> bool {
    ip.to_canonical().is_loopback()
}

/// Why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration file `{}`", path.display())]
    Read {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The file is not what it should be.
    #[error("configuration file `{}` is not valid", path.display())]
    Parse {
        /// Which file.
        path: PathBuf,
        /// Where, and what was expected there.
        source: Box<toml::de::Error>,
    },
    /// The file says something that means nothing.
    #[error("configuration file `{}` has an unknown key `{key}` in line {line}", path.display())]
    UnknownKey {
        /// Which file.
        path: PathBuf,
        /// From 1.
        line: usize,
        /// The key.
        key: String,
        /// The key that was meant, if one is like it.
        meant: Option<&'static str>,
    },
    /// An environment variable is not what it should be.
    #[error("the environment variable {name} is not valid: {why}")]
    Variable {
        /// Its name.
        name: String,
        /// What it should be.
        why: &'static str,
    },
    /// Not an address and a port.
    #[error("`listen` is an address and a port such as {LISTEN_DEFAULT}, not `{text}`")]
    Listen {
        /// As it was given.
        text: String,
    },
    /// It would mean another place for each directory that the daemon is started in.
    #[error("`data_dir` must be an absolute path, not `{}`", path.display())]
    RelativeDataDir {
        /// As it was given.
        path: PathBuf,
    },
    /// Not a URL with a name.
    #[error(
        "`ports_url` must be a URL with a name and no path, such as https://ports.example.com, got `{text}`"
    )]
    PortsUrl {
        /// As it was given.
        text: String,
    },
    /// Only one of the two files.
    #[error("TLS needs both `tls_cert` and `tls_key`")]
    HalfTls,
    /// Not a host, or not one in lower case.
    #[error("`insecure_registries` holds hosts such as registry.local:5000, not `{text}`")]
    Registry {
        /// As it was given.
        text: String,
    },
    /// Not a registry.
    #[error("`image_registries_allowed` holds hosts such as registry.local:5000, not `{text}`")]
    AllowedRegistry {
        /// As it was given.
        text: String,
    },
    /// Not a registry and the URL of another.
    #[error(
        "`registry_mirrors` holds a registry and a URL each, such as docker.io=https://mirror.local, not `{text}`"
    )]
    Mirror {
        /// As it was given.
        text: String,
    },
    /// A setting of networks.
    #[error("`{key}` must be {expected}, got `{text}`")]
    Network {
        /// Which one.
        key: &'static str,
        /// What it must be.
        expected: &'static str,
        /// As it was given.
        text: String,
    },
    /// Docker's configuration cannot be read.
    #[error("cannot read Docker's configuration `{}`", path.display())]
    DockerConfigUnread {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Not a Docker configuration.
    #[error("Docker's configuration `{}` cannot be used", path.display())]
    DockerConfig {
        /// Which file.
        path: PathBuf,
        /// Why.
        source: BadDockerConfig,
    },
    /// Keys would cross the network in the clear.
    #[error(
        "refusing to listen on {listen} without TLS: api keys and output would cross the network in the clear"
    )]
    Insecure {
        /// The address.
        listen: SocketAddr,
    },
    /// Not a URL with a host.
    #[error("`public_url` is a URL such as https://shoal.example.com, not `{text}`")]
    PublicUrl {
        /// As it was given.
        text: String,
    },
    /// Not a URL that a collector could have.
    #[error("`otlp_endpoint` is a URL such as http://127.0.0.1:4318, not `{text}`")]
    OtlpEndpoint {
        /// As it was given.
        text: String,
    },
    /// Not a host name.
    #[error("`allowed_hosts` holds host names such as shoal.example.com, not `{text}`")]
    AllowedHost {
        /// As it was given.
        text: String,
    },
    /// Not an origin.
    #[error("`allowed_origins` holds origins such as https://shoal.example.com, not `{text}`")]
    AllowedOrigin {
        /// As it was given.
        text: String,
    },
    /// Not a quantity.
    #[error("`{key}` is not valid")]
    Quantity {
        /// Which setting.
        key: &'static str,
        /// Why.
        source: BadQuantity,
    },
    /// Nobody could connect.
    #[error("`connections_max` must be more than zero")]
    NoConnections,
    /// Not a kind of store.
    #[error("`store` is `auto`, `btrfs`, `loop` or `directory`, not `{text}`")]
    Store {
        /// As it was given.
        text: String,
    },
    /// Too small to be of use, or larger than anybody means.
    #[error("`store_size` is 256Mi to 64Ti, not {bytes} bytes")]
    StoreSize {
        /// As it was given.
        bytes: u64,
    },
    /// They would hold memory that nobody asked for.
    #[error("`spares` is at most {SPARES_MAX}, not {number}")]
    Spares {
        /// As it was given.
        number: u32,
    },
}

impl ConfigError {
    /// What to do about it, where there is something.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Insecure { .. } => Some(
                "give a certificate with --tls-cert and --tls-key, listen on 127.0.0.1, or say --insecure-http if \
                 something in front of the daemon encrypts"
                    .into(),
            ),
            Self::UnknownKey { meant: Some(meant), .. } => Some(format!("did you mean `{meant}`?")),
            Self::UnknownKey { meant: None, .. } => {
                Some("`shoal config show` lists all settings, docs/reference/config.md explains them".into())
            }
            _ => None,
        }
    }

    /// The setting that is to blame, where it is one.
    pub fn key(&self) -> Option<&'static str> {
        match self {
            Self::Listen { .. } | Self::Insecure { .. } => Some("listen"),
            Self::RelativeDataDir { .. } => Some("data_dir"),
            Self::PublicUrl { .. } => Some("public_url"),
            Self::PortsUrl { .. } => Some("ports_url"),
            Self::AllowedHost { .. } => Some("allowed_hosts"),
            Self::AllowedOrigin { .. } => Some("allowed_origins"),
            Self::Quantity { key, .. } | Self::Network { key, .. } => Some(key),
            Self::NoConnections => Some("connections_max"),
            Self::Spares { .. } => Some("spares"),
            Self::Store { .. } => Some("store"),
            Self::StoreSize { .. } => Some("store_size"),
            Self::OtlpEndpoint { .. } => Some("otlp_endpoint"),
            Self::Registry { .. } => Some("insecure_registries"),
            Self::AllowedRegistry { .. } => Some("image_registries_allowed"),
            Self::Mirror { .. } => Some("registry_mirrors"),
            Self::DockerConfigUnread { .. } | Self::DockerConfig { .. } => Some("docker_config"),
            Self::Read { .. }
            | Self::Parse { .. }
            | Self::UnknownKey { .. }
            | Self::Variable { .. }
            | Self::HalfTls => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    const MACHINE: Machine = Machine { cpus: 2, memory_bytes: 1 << 30 };

    fn flags(flags: Settings) -> Result<Config, ConfigError> {
        Config::check(&Layers { flags, ..Layers::default() }, MACHINE)
    }

    fn listening_on(address: &str) -> Settings {
        Settings { listen: Some(address.into()), ..Settings::default() }
    }

    #[test]
    fn without_a_word_the_defaults_hold() {
        let config = flags(Settings::default()).expect("the defaults are valid");
        assert_eq!(config.listen.to_string(), LISTEN_DEFAULT);
        assert_eq!(config.data_dir, Path::new(DATA_DIR_DEFAULT));
        assert_eq!(config.capacity.memory_bytes, 100 << 30);
    }

    #[test]
    fn a_flag_goes_before_the_environment_and_that_before_the_file() {
        let mut layers = Layers { file: listening_on("127.0.0.1:1"), ..Layers::default() };
        assert_eq!(layers.pick(|s| s.listen.clone()), Some(("127.0.0.1:1".into(), Source::File)));
        layers.environment = listening_on("127.0.0.1:2");
        assert_eq!(layers.pick(|s| s.listen.clone()), Some(("127.0.0.1:2".into(), Source::Environment)));
        layers.flags = listening_on("127.0.0.1:3");
        assert_eq!(layers.pick(|s| s.listen.clone()), Some(("127.0.0.1:3".into(), Source::Flag)));
        assert_eq!(layers.pick(|s| s.public_url.clone()), None);
    }

    #[test]
    fn beyond_loopback_needs_tls_or_an_explicit_word() {
        for address in ["0.0.0.0:7878", "[::]:7878", "192.0.2.1:80", "[::ffff:192.0.2.1]:80"] {
            let error = flags(listening_on(address)).expect_err(address);
            assert!(matches!(error, ConfigError::Insecure { .. }), "{address}: {error}");
            assert!(error.hint().is_some());
            let insecure = Settings { insecure_http: Some(true), ..listening_on(address) };
            assert!(flags(insecure).is_ok(), "{address}");
            let tls =
                Settings { tls_cert: Some("/c".into()), tls_key: Some("/k".into()), ..listening_on(address) };
            assert!(flags(tls).is_ok(), "{address}");
        }
        for address in ["127.0.0.1:0", "127.8.9.1:7878", "[::1]:7878", "[::ffff:127.0.0.1]:1"] {
            assert!(flags(listening_on(address)).is_ok(), "{address}");
        }
    }

    #[test]
    fn wrong_values_are_refused_by_name() {
        let wrong = |settings| flags(settings).expect_err("it is wrong").to_string();
        assert!(wrong(listening_on("localhost")).contains("`listen`"));
        assert!(
            wrong(Settings { data_dir: Some("here".into()), ..Settings::default() }).contains("`data_dir`")
        );
        assert!(
            wrong(Settings { public_url: Some("shoal.example".into()), ..Settings::default() })
                .contains("`public_url`")
        );
        assert!(
            wrong(Settings { memory_max: Some("lots".into()), ..Settings::default() })
                .contains("`memory_max`")
        );
        assert!(wrong(Settings { tls_cert: Some("/c".into()), ..Settings::default() }).contains("`tls_key`"));
        assert!(
            wrong(Settings { allowed_hosts: Some(vec!["a/b".into()]), ..Settings::default() })
                .contains("`allowed_hosts`")
        );
    }

    #[test]
    fn registries_and_mirrors_are_checked_and_a_docker_configuration_is_read() {
        let settings = |insecure: &[&str], mirrors: &[&str], docker: Option<&Path>| Settings {
            insecure_registries: Some(insecure.iter().map(|text| text.to_string()).collect()),
            registry_mirrors: Some(mirrors.iter().map(|text| text.to_string()).collect()),
            docker_config: docker.map(Into::into),
            ..Settings::default()
        };
        let mirrors = ["docker.io=https://one.local", "docker.io=http://two.local:5000"];
        let config = flags(settings(&["registry.local:5000"], &mirrors, None)).expect("it is valid");
        let registries = config.images.registries;
        assert_eq!(registries.insecure, ["registry.local:5000"]);
        assert_eq!(registries.mirrors["docker.io"].len(), 2);
        for text in ["http://x", "UPPER", "", "a/b"] {
            let error = flags(settings(&[text], &[], None)).expect_err("no registry");
            assert_eq!(error.key(), Some("insecure_registries"), "{text}");
        }
        for text in
            ["docker.io", "docker.io=", "docker.io=mirror", "=https://x", "docker.io=ftp://x", "A=https://x"]
        {
            let error = flags(settings(&[], &[text], None)).expect_err("no mirror");
            assert_eq!(error.key(), Some("registry_mirrors"), "{text}");
        }
        let home = tempfile::tempdir().expect("a directory");
        let file = home.path().join("config.json");
        let error =
            flags(settings(&[], &[], Some(&file))).and_then(Config::read_files).expect_err("it is not there");
        assert!(matches!(error, ConfigError::DockerConfigUnread { .. }), "{error}");
        std::fs::write(&file, r#"{"auths": 5}"#).expect("it can be written");
        let error = flags(settings(&[], &[], Some(&file)))
            .and_then(Config::read_files)
            .expect_err("it is something else");
        assert_eq!(error.key(), Some("docker_config"));
        std::fs::write(&file, r#"{"auths": {}}"#).expect("it can be written");
        flags(settings(&[], &[], Some(&file))).and_then(Config::read_files).expect("it is one");
    }
}
