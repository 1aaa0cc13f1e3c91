//! Settings of networks: how they are written, and what the engine gets.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use engine::network::{NetworkSettings, presets};
use engine::{NetworkMode, NetworkPolicy};
use presets::Where;

use crate::config::{ConfigError, Layers};

/// Where the machine names its resolvers.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// The checked settings of networks.
#[derive(Debug, Clone, Default)]
pub struct NetworkConfig {
    /// What sandboxes may reach whose request and template say nothing, if the operator says it.
    pub default: Option<NetworkMode>,
    /// Hosts that `registries` opens beside those that were found.
    pub hosts: Vec<presets::Name>,
    /// Resolvers in place of the machine's.
    pub resolvers: Vec<SocketAddr>,
    /// A resolver that is asked over TLS, with its name.
    pub tls_resolver: Option<(SocketAddr, String)>,
    /// The proxy that all connections go through.
    pub proxy: Option<presets::Proxy>,
    /// Blocks of addresses that count as public.
    pub open: Vec<presets::Cidr>,
    /// Blocks of addresses that stay closed.
    pub closed: Vec<presets::Cidr>,
    /// PEM files with further roots.
    pub roots: Vec<PathBuf>,
}

impl NetworkConfig {
    pub(super) fn check(layers: &Layers) -> Result<Self, ConfigError> {
        let bad = |key: &'static str, expected: &'static str, text: &str| ConfigError::Network {
            key,
            expected,
            text: text.into(),
        };
        let default = layers.value(|s| s.network_default.clone()).map(|text| {
            let words = "`none`, `registries`, `names` or `open`";
            NetworkMode::parse(&text).ok_or_else(|| bad("network_default", words, &text))
        });
        let blocks = |key, texts: Option<Vec<String>>| -> Result<Vec<presets::Cidr>, ConfigError> {
            let parse =
                |text: String| text.parse().map_err(|_| bad(key, "blocks such as 10.9.0.0/16", &text));
            texts.unwrap_or_default().into_iter().map(parse).collect()
        };
        let (mut resolvers, mut tls_resolver) = (Vec::new(), None);
        for text in layers.value(|s| s.network_resolvers.clone()).unwrap_or_default() {
            let wrong = || {
                bad(
                    "network_resolvers",
                    "addresses such as 192.0.2.53 or tls://192.0.2.53#dns.example",
                    &text,
                )
            };
            match text.strip_prefix("tls://") {
                Some(rest) => {
                    let (address, name) = rest.split_once('#').ok_or_else(wrong)?;
                    tls_resolver = Some((socket_address(address, 853).ok_or_else(wrong)?, name.to_owned()));
                }
                None => resolvers.push(socket_address(&text, 53).ok_or_else(wrong)?),
            }
        }
        let proxy = match layers.value(|s| s.network_proxy.clone()) {
            None => None,
            Some(text) => Some(proxy(&text).ok_or_else(|| {
                bad(
                    "network_proxy",
                    "a URL such as http://192.0.2.8:3128 or socks5://user:word@192.0.2.8:1080",
                    "",
                )
            })?),
        };
        let hosts = layers.value(|s| s.network_hosts.clone()).unwrap_or_default().into_iter().map(|text| {
            presets::Name::parse(&text).map_err(|_| bad("network_hosts", "hosts such as pypi.corp", &text))
        });
        Ok(Self {
            default: default.transpose()?,
            hosts: hosts.collect::<Result<_, _>>()?,
            resolvers,
            tls_resolver,
            proxy,
            open: blocks("network_open", layers.value(|s| s.network_open.clone()))?,
            closed: blocks("network_closed", layers.value(|s| s.network_closed.clone()))?,
            roots: layers
                .value(|s| s.network_roots.clone())
                .unwrap_or_default()
                .into_iter()
                .map(Into::into)
                .collect(),
        })
    }

    /// What the engine gets: the settings, with what is found on the machine. Reads files.
    pub fn settings(
        &self,
        installation: wire::InstallationId,
        machine: &Where,
    ) -> Result<NetworkSettings, ConfigError> {
        let read = |path: &Path| {
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.into(), source })
        };
        let mut settings = NetworkSettings { installation, ..NetworkSettings::default() };
        settings.default = self.default.map(NetworkPolicy::of_mode);
        settings.builds = NetworkPolicy::of_mode(NetworkMode::Registries);
        settings.egress.upstream = match self.resolvers.is_empty() && self.tls_resolver.is_none() {
            true => match read(Path::new(RESOLV_CONF)) {
                Ok(text) => presets::Upstream::from_resolv_conf(&text),
                Err(ConfigError::Read { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                    Default::default()
                }
                Err(error) => return Err(error),
            },
            false => presets::Upstream { servers: self.resolvers.clone(), tls: self.tls_resolver.clone() },
        };
        settings.egress.proxy = self.proxy.clone();
        settings.egress.addresses.opened = self.open.clone();
        settings.egress.addresses.closed = self.closed.clone();
        settings.egress.extra_roots = self.roots.iter().map(|path| read(path)).collect::<Result<_, _>>()?;
        let (sources, unreadable) = presets::find(machine);
        for (path, error) in unreadable {
            tracing::warn!(path = %path.display(), %error, "cannot read the configuration of a package manager");
        }
        settings.registries = presets::hosts(&sources, &self.hosts);
        Ok(settings)
    }
}

/// An address, with a port or without.
fn socket_address(text: &str, port: u16) -> Option<SocketAddr> {
    let bare = |text: &str| Some(SocketAddr::new(text.parse().ok()?, port));
    text.parse().ok().or_else(|| bare(text))
}

fn proxy(text: &str) -> Option<presets::Proxy> {
    let (scheme, rest) = text.trim_end_matches('/').split_once("://")?;
    let kind = match scheme {
        "http" => presets::ProxyKind::Http,
        "socks5" => presets::ProxyKind::Socks5,
        _ => return None,
    };
    let (login, address) = match rest.rsplit_once('@') {
        Some((login, address)) => {
            let (user, word) = login.split_once(':')?;
            (Some((user.to_owned(), word.to_owned())), address)
        }
        None => (None, rest),
    };
    Some(presets::Proxy { kind, address: address.parse().ok()?, login })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    fn checked(settings: Settings) -> Result<NetworkConfig, ConfigError> {
        NetworkConfig::check(&Layers { file: settings, ..Layers::default() })
    }

    #[test]
    fn settings_of_networks_are_checked() {
        let list = |items: &[&str]| Some(items.iter().map(|item| (*item).to_owned()).collect::<Vec<_>>());
        let good = Settings {
            network_default: Some("registries".into()),
            network_resolvers: list(&["192.0.2.1", "[2001:db8::1]:5353", "tls://192.0.2.2#dns.example"]),
            network_proxy: Some("http://ada:word@192.0.2.3:3128/".into()),
            network_open: list(&["10.9.0.0/16"]),
            ..Settings::default()
        };
        let config = checked(good).expect("it is valid");
        assert_eq!(config.default, Some(NetworkMode::Registries));
        assert_eq!(config.resolvers[0].port(), 53);
        assert_eq!(config.tls_resolver.map(|(address, _)| address.port()), Some(853));
        assert_eq!(config.proxy.and_then(|proxy| proxy.login), Some(("ada".into(), "word".into())));
        for wrong in [
            Settings { network_default: Some("all".into()), ..Settings::default() },
            Settings { network_resolvers: list(&["dns.example"]), ..Settings::default() },
            Settings { network_proxy: Some("ftp://x:1".into()), ..Settings::default() },
            Settings { network_open: list(&["10.9.0.1/16"]), ..Settings::default() },
            Settings { network_hosts: list(&["*.corp"]), ..Settings::default() },
        ] {
            assert!(matches!(checked(wrong), Err(ConfigError::Network { .. })));
        }
    }
}
