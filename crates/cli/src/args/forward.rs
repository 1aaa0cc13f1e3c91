//! The arguments of `shoal forward`.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use clap::Args;

/// Forward local ports to a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal forward work 8080:80               127.0.0.1:8080 is port 80 there
  shoal forward work 5432 6379             the same numbers here as there
  shoal forward work 0:80                  any free local port
  shoal forward work 0.0.0.0:8080:80       for other machines too
  shoal forward work --all                 whatever begins to listen

The server in the sandbox may listen on 127.0.0.1 only. Runs until Ctrl-C, also while the daemon is restarted: new \
connections wait for it.")]
pub struct Forward {
    /// The sandbox's id or name
    pub sandbox: String,
    /// What to forward
    #[arg(value_name = "[[ADDRESS:]LOCAL:]PORT", value_parser = mapping, required_unless_present = "all")]
    pub ports: Vec<Mapping>,
    /// Forward every port that a program in the sandbox listens on, and say so
    #[arg(long)]
    pub all: bool,
}

/// A local address, and the port of the sandbox that it leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    pub local: SocketAddr,
    pub port: u16,
}

/// `PORT`, `LOCAL:PORT` or `ADDRESS:LOCAL:PORT`.
pub fn mapping(text: &str) -> Result<Mapping, String> {
    let wrong = || "write PORT, LOCAL:PORT or ADDRESS:LOCAL:PORT, for example 8080:80".to_owned();
    let number = |text: &str| text.parse::<u16>().map_err(|_| wrong());
    let (rest, port) = text.rsplit_once(':').map_or((None, text), |(rest, port)| (Some(rest), port));
    let port = number(port)?;
    if port == 0 {
        return Err("the port of the sandbox must be between 1 and 65535".into());
    }
    let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
    let local = match rest {
        None => SocketAddr::from((loopback, port)),
        Some(rest) => match rest.rsplit_once(':') {
            None => SocketAddr::from((loopback, number(rest)?)),
            Some((address, local)) => {
                let address =
                    address.strip_prefix('[').and_then(|inner| inner.strip_suffix(']')).unwrap_or(address);
                SocketAddr::from((address.parse::<IpAddr>().map_err(|_| wrong())?, number(local)?))
            }
        },
    };
    Ok(Mapping { local, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_has_three_spellings() {
        for (text, local, port) in [
            ("80", "127.0.0.1:80", 80),
            ("8080:80", "127.0.0.1:8080", 80),
            ("0:80", "127.0.0.1:0", 80),
            ("0.0.0.0:8080:80", "0.0.0.0:8080", 80),
            ("[::1]:8080:80", "[::1]:8080", 80),
        ] {
            let expected = Mapping { local: local.parse().expect("an address"), port };
            assert_eq!(mapping(text), Ok(expected), "{text}");
        }
        for text in ["", "0", "8080:0", "x:80", "80:x", "host:8080:80", "70000", "1:2:3:4x"] {
            assert!(mapping(text).is_err(), "{text}");
        }
    }
}
