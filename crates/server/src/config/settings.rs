//! Every setting by its name: what it means, where it may be said, and who has said it.
//!
//! One table, from which the configuration file is checked, the environment is read, `shoal config show` is printed and
//! the reference is written. What the values must be is for [`crate::config`].

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::config::{Config, ConfigError, Layers, Settings, Source};

/// Where the configuration file of a machine is.
pub const FILE_DEFAULT: &str = "/etc/shoal/config.toml";
/// Names that are less alike than this are not taken for each other's misspelling.
const LIKENESS_MIN: f64 = 0.7;

/// One setting.
pub struct Key {
    /// As it is written in the file. The environment variable is `SHOAL_` and this in capitals.
    pub name: &'static str,
    /// What it means, in a sentence or two.
    pub about: &'static str,
    /// What holds when nobody says anything, for people.
    pub default: &'static str,
    /// A line of a configuration file.
    pub example: &'static str,
    /// The flag of `shoal serve`, where there is one.
    pub flag: Option<&'static str>,
    said: fn(&Settings) -> Option<Value>,
    unsaid: fn(&Config) -> Value,
    set: fn(&mut Settings, &str) -> Result<(), &'static str>,
}

impl Key {
    /// The environment variable that sets it.
    pub fn variable(&self) -> String {
        format!("SHOAL_{}", self.name.to_uppercase())
    }

    /// The setting of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        KEYS.iter().find(|key| key.name == name)
    }
}

/// All settings, in the order in which they are shown.
pub const KEYS: &[Key] = &[
    Key {
        name: "listen",
        about: "Address and port to listen on. Beyond loopback it needs TLS or `insecure_http`.",
        default: "127.0.0.1:7878",
        example: "listen = \"127.0.0.1:7878\"",
        flag: Some("--listen"),
        said: |s| s.listen.clone().map(Value::from),
        unsaid: |c| json!(c.listen.to_string()),
        set: |s, text| set(&mut s.listen, text.to_owned()),
    },
    Key {
        name: "data_dir",
        about: "Where rows, logs and sandboxes are kept. An absolute path on a file system that `shoal doctor` approves of.",
        default: "/var/lib/shoal",
        example: "data_dir = \"/srv/shoal\"",
        flag: Some("--data-dir"),
        said: |s| s.data_dir.as_deref().map(path_value),
        unsaid: |c| path_value(&c.data_dir),
        set: |s, text| set(&mut s.data_dir, text.into()),
    },
    Key {
        name: "public_url",
        about: "How clients reach the daemon, if not at the address it listens on. Its host may be in a `Host` header.",
        default: "none",
        example: "public_url = \"https://shoal.example.com\"",
        flag: Some("--public-url"),
        said: |s| s.public_url.clone().map(Value::from),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.public_url, text.to_owned()),
    },
    Key {
        name: "ports_url",
        about: "Where browsers reach ports of sandboxes: a port is at `PORT-SANDBOX` below this URL's host. Needs a wildcard DNS record, and a wildcard certificate for https. Use a domain that serves nothing else.",
        default: "none: PORT-SANDBOX.localhost, on this machine only",
        example: "ports_url = \"https://ports.example.com\"",
        flag: None,
        said: |s| s.ports_url.clone().map(Value::from),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.ports_url, text.to_owned()),
    },
    Key {
        name: "public_ports",
        about: "Whether callers may open a port to everybody, without a key or a token.",
        default: "false",
        example: "public_ports = true",
        flag: None,
        said: |s| s.public_ports.map(Value::from),
        unsaid: |c| json!(c.public_ports),
        set: |s, text| set(&mut s.public_ports, truth(text)?),
    },
    Key {
        name: "allowed_hosts",
        about: "Names beside the public URL's that a `Host` header may carry. In the environment, separated by commas.",
        default: "none",
        example: "allowed_hosts = [\"shoal.internal\"]",
        flag: None,
        said: |s| s.allowed_hosts.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.allowed_hosts, list(text)),
    },
    Key {
        name: "allowed_origins",
        about: "Origins beside the public URL's from which browsers may call. In the environment, separated by commas.",
        default: "none",
        example: "allowed_origins = [\"https://app.example.com\"]",
        flag: None,
        said: |s| s.allowed_origins.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.allowed_origins, list(text)),
    },
    Key {
        name: "tls_cert",
        about: "Certificate chain, as a PEM file. Needs `tls_key`.",
        default: "none",
        example: "tls_cert = \"/etc/shoal/cert.pem\"",
        flag: Some("--tls-cert"),
        said: |s| s.tls_cert.as_deref().map(path_value),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.tls_cert, text.into()),
    },
    Key {
        name: "tls_key",
        about: "The certificate's private key, as a PEM file. Needs `tls_cert`.",
        default: "none",
        example: "tls_key = \"/etc/shoal/key.pem\"",
        flag: Some("--tls-key"),
        said: |s| s.tls_key.as_deref().map(path_value),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.tls_key, text.into()),
    },
    Key {
        name: "insecure_http",
        about: "Listen beyond loopback without TLS: something in front of the daemon encrypts.",
        default: "false",
        example: "insecure_http = true",
        flag: Some("--insecure-http"),
        said: |s| s.insecure_http.map(Value::from),
        unsaid: |_| json!(false),
        set: |s, text| set(&mut s.insecure_http, truth(text)?),
    },
    Key {
        name: "log_json",
        about: "Log as JSON. What is logged is said by the environment variable SHOAL_LOG, as `info,shoal_engine=debug`.",
        default: "false",
        example: "log_json = true",
        flag: Some("--log-json"),
        said: |s| s.log_json.map(Value::from),
        unsaid: |c| json!(c.log_json),
        set: |s, text| set(&mut s.log_json, truth(text)?),
    },
    Key {
        name: "connections_max",
        about: "Connections at once. Each costs a descriptor.",
        default: "4096",
        example: "connections_max = 1000",
        flag: None,
        said: |s| s.connections_max.map(Value::from),
        unsaid: |c| json!(c.connections_max),
        set: |s, text| set(&mut s.connections_max, number(text)?),
    },
    Key {
        name: "sandboxes_max",
        about: "Sandboxes at once, of all owners together. Each costs ten descriptors.",
        default: "1900",
        example: "sandboxes_max = 200",
        flag: None,
        said: |s| s.sandboxes_max.map(Value::from),
        unsaid: |c| json!(c.capacity.sandboxes),
        set: |s, text| set(&mut s.sandboxes_max, number(text)?),
    },
    Key {
        name: "cpu_max",
        about: "The sum of all sandboxes' cpu limits. Limits are ceilings and most sandboxes idle, so it may be far beyond the machine.",
        default: "1000 times the machine's processors",
        example: "cpu_max = \"64\"",
        flag: None,
        said: |s| s.cpu_max.clone().map(Value::from),
        unsaid: |c| cpu_value(c.capacity.cpu_millis),
        set: |s, text| set(&mut s.cpu_max, text.to_owned()),
    },
    Key {
        name: "memory_max",
        about: "The sum of all sandboxes' memory limits, as with `cpu_max`.",
        default: "100 times the machine's memory",
        example: "memory_max = \"64Gi\"",
        flag: None,
        said: |s| s.memory_max.clone().map(Value::from),
        unsaid: |c| bytes_value(c.capacity.memory_bytes),
        set: |s, text| set(&mut s.memory_max, text.to_owned()),
    },
    Key {
        name: "output_kept",
        about: "How much of each stream of a command is kept. What is older falls off, and is said to have.",
        default: "64Mi",
        example: "output_kept = \"16Mi\"",
        flag: None,
        said: |s| s.output_kept.clone().map(Value::from),
        unsaid: |c| bytes_value(c.output_kept_max),
        set: |s, text| set(&mut s.output_kept, text.to_owned()),
    },
    Key {
        name: "spares",
        about: "Sandboxes that stand ready before anybody has asked for them. Each costs about a quarter of a mebibyte.",
        default: "8",
        example: "spares = 16",
        flag: Some("--spares"),
        said: |s| s.spares.map(Value::from),
        unsaid: |c| json!(c.spares),
        set: |s, text| set(&mut s.spares, number(text)?),
    },
    Key {
        name: "store",
        about: "Where the writable files of sandboxes and volumes are kept. `btrfs`: in subvolumes of the data directory, which is on btrfs, with quotas. `loop`: in a btrfs of Shoal's own, in a file that is allocated in full. `directory`: in plain directories, without disk limits. `auto`: the store that is there; else `btrfs` where the data directory is on one, whose quotas are used if they are on; else `loop`, if there is room and the kernel has btrfs and loop devices; else `directory`.",
        default: "auto",
        example: "store = \"loop\"",
        flag: Some("--store"),
        said: |s| s.store.clone().map(Value::from),
        unsaid: |c| json!(c.store.word()),
        set: |s, text| set(&mut s.store, text.to_owned()),
    },
    Key {
        name: "store_size",
        about: "How large a store of kind `loop` is: 256Mi to 64Ti. One that exists grows to it at the next start, and does not shrink.",
        default: "a quarter of what is free where the data directory is, from 2Gi to 64Gi",
        example: "store_size = \"20Gi\"",
        flag: Some("--store-size"),
        said: |s| s.store_size.clone().map(Value::from),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.store_size, text.to_owned()),
    },
    Key {
        name: "otlp_endpoint",
        about: "An OpenTelemetry collector that traces are sent to, by OTLP over HTTP.",
        default: "none",
        example: "otlp_endpoint = \"http://127.0.0.1:4318\"",
        flag: Some("--otlp-endpoint"),
        said: |s| s.otlp_endpoint.clone().map(Value::from),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.otlp_endpoint, text.to_owned()),
    },
    Key {
        name: "insecure_registries",
        about: "Registries of images that are spoken to without TLS. In the environment, separated by commas.",
        default: "none",
        example: "insecure_registries = [\"registry.local:5000\"]",
        flag: None,
        said: |s| s.insecure_registries.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.insecure_registries, list(text)),
    },
    Key {
        name: "registry_mirrors",
        about: "Who is asked for an image before its registry is, each after the registry; several for one are asked in order. In the environment, separated by commas.",
        default: "none",
        example: "registry_mirrors = [\"docker.io=https://mirror.local\"]",
        flag: None,
        said: |s| s.registry_mirrors.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.registry_mirrors, list(text)),
    },
    Key {
        name: "docker_config",
        about: "A `config.json` of Docker or Podman, whose credentials are used for pulls with an admin key that bring none. What they open is private to the key's owner.",
        default: "none",
        example: "docker_config = \"/root/.docker/config.json\"",
        flag: None,
        said: |s| s.docker_config.as_deref().map(path_value),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.docker_config, text.into()),
    },
    Key {
        name: "docker_config_shared",
        about: "Use the credentials of `docker_config` for the pulls of all keys, and show what they open to all owners.",
        default: "false",
        example: "docker_config_shared = true",
        flag: None,
        said: |s| s.docker_config_shared.map(Value::from),
        unsaid: |_| json!(false),
        set: |s, text| set(&mut s.docker_config_shared, truth(text)?),
    },
    Key {
        name: "image_registries_allowed",
        about: "The registries that keys without admin rights may name; these may have any address. Without this setting, they may name every registry with a public address, and those in `insecure_registries` and `registry_mirrors`. In the environment, separated by commas.",
        default: "all with a public address",
        example: "image_registries_allowed = [\"docker.io\", \"registry.local:5000\"]",
        flag: None,
        said: |s| s.image_registries_allowed.clone().map(Value::from),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.image_registries_allowed, list(text)),
    },
    Key {
        name: "network_default",
        about: "What sandboxes may reach whose request and template say nothing: `none`, `registries`, `names` or `open`. Without this setting it is `none` for our own API, and the default of its vendor for a dialect: `names` for LangSmith, `open` for the others.",
        default: "none, or the vendor's",
        example: "network_default = \"registries\"",
        flag: None,
        said: |s| s.network_default.clone().map(Value::from),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.network_default, text.to_owned()),
    },
    Key {
        name: "network_hosts",
        about: "Hosts that `registries` opens beside those that are found on the machine. In the environment, separated by commas.",
        default: "none",
        example: "network_hosts = [\"packages.example.com\"]",
        flag: None,
        said: |s| s.network_hosts.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.network_hosts, list(text)),
    },
    Key {
        name: "network_resolvers",
        about: "Name servers for sandboxes, as addresses; one of them may be `tls://ADDRESS#NAME`. In the environment, separated by commas.",
        default: "those of the machine",
        example: "network_resolvers = [\"192.0.2.53\"]",
        flag: None,
        said: |s| s.network_resolvers.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.network_resolvers, list(text)),
    },
    Key {
        name: "network_proxy",
        about: "The proxy that connections of sandboxes go through, by HTTP CONNECT or SOCKS5.",
        default: "none",
        example: "network_proxy = \"http://192.0.2.8:3128\"",
        flag: None,
        // It may hold a password.
        said: |s| s.network_proxy.as_ref().map(|_| json!("(set)")),
        unsaid: |_| Value::Null,
        set: |s, text| set(&mut s.network_proxy, text.to_owned()),
    },
    Key {
        name: "network_open",
        about: "Blocks of addresses that count as public although they are private, for example a company's own range. In the environment, separated by commas.",
        default: "none",
        example: "network_open = [\"10.9.0.0/16\"]",
        flag: None,
        said: |s| s.network_open.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.network_open, list(text)),
    },
    Key {
        name: "network_closed",
        about: "Blocks of addresses that stay closed, beside private ones and those of the machine. In the environment, separated by commas.",
        default: "none",
        example: "network_closed = [\"203.0.113.0/24\"]",
        flag: None,
        said: |s| s.network_closed.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.network_closed, list(text)),
    },
    Key {
        name: "network_roots",
        about: "PEM files with authorities that sandboxes and resolvers over TLS trust beside the system's. In the environment, separated by commas.",
        default: "none",
        example: "network_roots = [\"/etc/shoal/roots.pem\"]",
        flag: None,
        said: |s| s.network_roots.clone().map(Value::from),
        unsaid: |_| json!([]),
        set: |s, text| set(&mut s.network_roots, list(text)),
    },
];

fn set<T>(field: &mut Option<T>, value: T) -> Result<(), &'static str> {
    *field = Some(value);
    Ok(())
}

fn path_value(path: &Path) -> Value {
    json!(path.display().to_string())
}

/// As it would be written in a file.
fn cpu_value(millis: u64) -> Value {
    json!(if millis.is_multiple_of(1000) { format!("{}", millis / 1000) } else { format!("{millis}m") })
}

/// As it would be written in a file: in the largest unit that is exact.
fn bytes_value(bytes: u64) -> Value {
    let units = [(40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")];
    let exact = units.into_iter().find(|(bits, _)| bytes > 0 && bytes.trailing_zeros() >= *bits);
    json!(exact.map_or_else(|| bytes.to_string(), |(bits, unit)| format!("{}{unit}", bytes >> bits)))
}

fn list(text: &str) -> Vec<String> {
    text.split(',').map(|item| item.trim().to_owned()).filter(|item| !item.is_empty()).collect()
}

fn truth(text: &str) -> Result<bool, &'static str> {
    match text.to_ascii_lowercase().as_str() {
        "1" | "true" | "yes" | "on" => Ok(true),
        "0" | "false" | "no" | "off" => Ok(false),
        _ => Err("it is true or false"),
    }
}

fn number(text: &str) -> Result<u32, &'static str> {
    text.parse().map_err(|_| "it is a whole number")
}

/// A configuration file as it was read.
#[derive(Debug, Clone, Default)]
pub struct File {
    /// Where it is.
    pub path: PathBuf,
    /// What it says.
    pub settings: Settings,
    /// The line of each key, from 1.
    pub lines: BTreeMap<String, usize>,
}

impl File {
    /// Reads a TOML file. A key that does not exist is refused with its line, and with the key that was meant.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, ConfigError> {
        let invalid = |source| ConfigError::Parse { path: path.into(), source: Box::new(source) };
        let table = toml::de::DeTable::parse(text).map_err(invalid)?;
        let mut lines = BTreeMap::new();
        for key in table.get_ref().keys() {
            let line = 1 + text[..key.span().start].matches('\n').count();
            let name = key.get_ref().to_string();
            if Key::named(&name).is_none() {
                return Err(ConfigError::UnknownKey {
                    path: path.into(),
                    line,
                    meant: meant(&name),
                    key: name,
                });
            }
            lines.insert(name, line);
        }
        let settings = toml::from_str(text).map_err(invalid)?;
        Ok(Self { path: path.into(), settings, lines })
    }
}

/// The setting whose name is most like this one, if any is.
fn meant(name: &str) -> Option<&'static str> {
    let name = name.to_lowercase().replace('-', "_");
    let likeness = |key: &&Key| strsim::normalized_damerau_levenshtein(&name, key.name);
    KEYS.iter()
        .map(|key| (key.name, likeness(&key)))
        .filter(|(_, likeness)| *likeness >= LIKENESS_MIN)
        .max_by(|(_, one), (_, other)| one.total_cmp(other))
        .map(|(name, _)| name)
}

/// What environment variables say. An empty one says nothing.
pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Result<Settings, ConfigError> {
    let mut settings = Settings::default();
    for key in KEYS {
        let name = key.variable();
        let Some(value) = variable(&name).filter(|value| !value.is_empty()) else { continue };
        let set = match value.to_str() {
            Some(text) => (key.set)(&mut settings, text),
            None => Err("it is text"),
        };
        set.map_err(|why| ConfigError::Variable { name, why })?;
    }
    Ok(settings)
}

/// Of these variables, those that are no settings but look like a misspelt one, each with what was meant.
pub fn misspelt<'a>(variables: impl IntoIterator<Item = &'a str>) -> Vec<(&'a str, String)> {
    let misspelt = |variable: &'a str| {
        let name = variable.strip_prefix("SHOAL_")?.to_lowercase();
        let key = Key::named(meant(&name)?)?;
        (key.name != name).then(|| (variable, key.variable()))
    };
    variables.into_iter().filter_map(misspelt).collect()
}

/// A setting as it is in force.
#[derive(Debug, Clone, PartialEq)]
pub struct InForce {
    /// Its name.
    pub name: &'static str,
    /// Its value; `null` where there is none.
    pub value: Value,
    /// Who said so.
    pub source: Source,
    /// Where exactly: a flag, a variable, a file with its line. Nothing for a default.
    pub place: Option<String>,
}

/// Every setting as it is in force.
pub fn in_force(layers: &Layers, config: &Config) -> Vec<InForce> {
    let look = |key: &'static Key| {
        let (value, source) =
            layers.pick(key.said).unwrap_or_else(|| ((key.unsaid)(config), Source::Default));
        InForce { name: key.name, value, source, place: place(layers, key, source) }
    };
    KEYS.iter().map(look).collect()
}

/// Where the strongest word on a setting was said. `None`: nobody has said one.
pub fn said_at(layers: &Layers, name: &str) -> Option<String> {
    let key = Key::named(name)?;
    let (_, source) = layers.pick(key.said)?;
    place(layers, key, source)
}

fn place(layers: &Layers, key: &Key, source: Source) -> Option<String> {
    match source {
        Source::Flag => Some(key.flag.map_or_else(|| "the command line".into(), str::to_owned)),
        Source::Environment => Some(key.variable()),
        Source::File => {
            let line = layers.lines.get(key.name).map_or_else(String::new, |line| format!(", line {line}"));
            Some(format!("{}{line}", layers.path.display()))
        }
        Source::Default => None,
    }
}

/// The reference of all settings, in Markdown.
pub fn reference() -> String {
    let mut text = format!(
        "# Configuration\n\n\
         What `shoal serve` can be told.\n\
         A flag goes before an environment variable, that before the configuration file, and that before the default.\n\
         `shoal config show` prints what is in force, and where each value came from.\n\n\
         The file is TOML: `--config FILE`, else the one that SHOAL_CONFIG names, else `{FILE_DEFAULT}` if it exists.\n\
         A key that does not exist is refused, with its line and the key that was meant.\n\n\
         | key | default | environment variable | flag |\n\
         | --- | --- | --- | --- |\n"
    );
    for key in KEYS {
        let flag = key.flag.map_or_else(String::new, |flag| format!("`{flag}`"));
        text.push_str(&format!("| `{}` | {} | `{}` | {flag} |\n", key.name, key.default, key.variable()));
    }
    for key in KEYS {
        text.push_str(&format!("\n## `{}`\n\n{}\n\n```toml\n{}\n```\n", key.name, key.about, key.example));
    }
    text.push_str(
        "\n## What is not a setting\n\n\
         Some things are said by the environment alone.\n\n\
         | variable | means |\n\
         | --- | --- |\n\
         | `SHOAL_CONFIG` | the configuration file; empty: none |\n\
         | `SHOAL_LOG` | what the daemon logs, as `info,shoal_engine=debug` |\n\
         | `SHOAL_API_KEY` | for `serve`, the first key; for all other commands, the key to use |\n\
         | `SHOAL_URL` | the daemon that commands talk to |\n\
         | `SHOAL_DATA_DIR` | for commands too: the daemon of this directory |\n\
         | `SHOAL_PRIVATE_DIR` | where `shoal run` keeps a daemon of its own |\n\
         | `SHOAL_PRIVATE_LINGER` | how long that daemon stays after the last command, `10m` by default; `0` ends it with the command |\n",
    );
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Machine;

    const MACHINE: Machine = Machine { cpus: 2, memory_bytes: 1 << 30 };

    fn parse(text: &str) -> Result<File, ConfigError> {
        File::parse(Path::new("/etc/shoal/config.toml"), text)
    }

    #[test]
    fn the_table_and_the_settings_are_the_same() {
        // Serde names every key that a file may have when it meets one that it does not know.
        let error = toml::from_str::<Settings>("no_such_key = 1").expect_err("it is unknown").to_string();
        let (_, expected) = error.split_once("expected one of ").expect("it names what it knows");
        let known: Vec<&str> = expected.split('`').skip(1).step_by(2).collect();
        let mut named: Vec<&str> = KEYS.iter().map(|key| key.name).collect();
        for name in &known {
            assert!(named.contains(name), "`{name}` is not in KEYS: say there what it means");
        }
        named.retain(|name| !known.contains(name));
        assert!(named.is_empty(), "KEYS has {named:?}, which a file may not have");
    }

    #[test]
    fn every_example_is_one_and_sets_its_key() {
        for key in KEYS {
            let file = parse(key.example).unwrap_or_else(|error| panic!("{}: {error}", key.name));
            assert_eq!(file.lines.get(key.name), Some(&1), "{}", key.example);
            let said = (key.said)(&file.settings).expect("the example says something");
            // The same through the environment.
            let text = match &said {
                Value::Array(items) => items.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", "),
                Value::String(text) => text.clone(),
                other => other.to_string(),
            };
            let settings = from_environment(|name| (name == key.variable()).then(|| text.clone().into()))
                .unwrap_or_else(|error| panic!("{}: {error}", key.name));
            assert_eq!((key.said)(&settings), Some(said), "{}", key.name);
        }
    }

    #[test]
    fn an_unknown_key_is_refused_with_its_line_and_what_was_meant() {
        for (text, line, key, meant) in [
            ("listn = \"127.0.0.1:1\"\n", 1, "listn", Some("listen")),
            ("listen = \"127.0.0.1:1\"\n\n# x\nmemory-max = \"4Gi\"\n", 4, "memory-max", Some("memory_max")),
            ("datadir = \"/x\"", 1, "datadir", Some("data_dir")),
            ("zebra = 1", 1, "zebra", None),
            ("[server]\nlisten = \"x\"", 1, "server", None),
        ] {
            match parse(text) {
                Err(ConfigError::UnknownKey { line: at, key: found, meant: hint, .. }) => {
                    assert_eq!((at, found.as_str(), hint), (line, key, meant), "{text}");
                }
                other => panic!("{text}: {other:?}"),
            }
        }
        let error = parse("listen = 5").expect_err("it is no text");
        assert!(matches!(error, ConfigError::Parse { .. }), "{error}");
        assert!(parse("listen = ").is_err());
    }

    #[test]
    fn each_value_says_where_it_came_from() {
        let file = parse("# a comment\nspares = 2\noutput_kept = \"1Mi\"\n").expect("it is valid");
        let environment =
            from_environment(|name| (name == "SHOAL_SPARES").then(|| "3".into())).expect("valid");
        let flags = Settings { listen: Some("127.0.0.1:1".into()), ..Settings::default() };
        let layers = Layers::new(flags, environment, Some(file));
        let config = Config::check(&layers, MACHINE).expect("it is valid");
        let all = in_force(&layers, &config);
        let of = |name: &str| all.iter().find(|one| one.name == name).expect("it is there").clone();
        let said = |name| (of(name).value, of(name).source, of(name).place);
        assert_eq!(said("listen"), (json!("127.0.0.1:1"), Source::Flag, Some("--listen".into())));
        assert_eq!(said("spares"), (json!(3), Source::Environment, Some("SHOAL_SPARES".into())));
        let place = Some("/etc/shoal/config.toml, line 3".into());
        assert_eq!(said("output_kept"), (json!("1Mi"), Source::File, place));
        assert_eq!(said("cpu_max"), (json!("2000"), Source::Default, None));
        assert_eq!(said("memory_max"), (json!("100Gi"), Source::Default, None));
        assert_eq!(
            (bytes_value(0), bytes_value(1 << 20), cpu_value(1500)),
            (json!("0"), json!("1Mi"), json!("1500m"))
        );
        assert_eq!(said_at(&layers, "spares").as_deref(), Some("SHOAL_SPARES"));
        assert_eq!(said_at(&layers, "cpu_max"), None);
    }

    #[test]
    fn wrong_variables_are_refused_by_name_and_misspelt_ones_are_noticed() {
        for (name, value) in [("SHOAL_SPARES", "many"), ("SHOAL_LOG_JSON", "perhaps")] {
            let error = from_environment(|asked| (asked == name).then(|| value.into())).expect_err("wrong");
            assert!(error.to_string().contains(name), "{error}");
        }
        assert!(from_environment(|_| Some(OsString::new())).is_ok(), "what is empty says nothing");
        let found = misspelt(["SHOAL_LISTN", "SHOAL_URL", "SHOAL_LISTEN", "PATH", "SHOAL_PRIVATE_DIR"]);
        assert_eq!(found, [("SHOAL_LISTN", "SHOAL_LISTEN".to_owned())]);
    }

    #[test]
    fn the_reference_has_not_drifted() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/config.md");
        let text = reference();
        if std::env::var_os("UPDATE_CONFIG_REFERENCE").is_some() {
            std::fs::write(&path, &text).expect("the reference can be written");
        }
        assert!(
            std::fs::read_to_string(&path).unwrap_or_default() == text,
            "docs/reference/config.md is not what the program says; look at what changed and update it with\n    \
             UPDATE_CONFIG_REFERENCE=1 cargo test -p shoal-server --lib"
        );
    }
}
