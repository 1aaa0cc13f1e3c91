//! Addresses in the configuration files of package managers. Each parser takes the text of a file and returns the
//! addresses in it as written; [`site`] turns one into a host, without the user names and tokens that people put there.

use crate::policy::Name;

/// A host and its port.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Site {
    /// The host.
    pub host: Name,
    /// The port, stated or by scheme.
    pub port: u16,
}

/// The host in an address such as `sparse+https://user:token@host:8443/path`. `None` for files, commands and invalid
/// addresses.
pub fn site(address: &str) -> Option<Site> {
    let address = address.trim().trim_matches(['"', '\'']);
    let (scheme, rest) = address.split_once("://")?;
    let scheme = scheme.rsplit('+').next()?.to_ascii_lowercase();
    let default = match scheme.as_str() {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let authority = rest.split(['/', '?', '#']).next()?;
    let authority = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let (host, port) = match authority.rsplit_once(':') {
        Some((host, port)) => (host, port.parse().ok().filter(|port| *port != 0)?),
        None => (authority, default),
    };
    Some(Site { host: Name::parse(host).ok()?, port })
}

/// The values of keys in a file of `key = value` lines, as pip, npm, cargo, uv and conda write them. Sections are ignored.
fn values<'a>(text: &'a str, wanted: impl Fn(&str) -> bool + 'a) -> impl Iterator<Item = &'a str> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.starts_with(['#', ';']))
        .filter_map(|line| line.split_once('='))
        .filter(move |(key, _)| wanted(key.trim().trim_matches(['"', '\''])))
        .map(|(_, value)| value.trim())
}

/// Every address in a text, one per word.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split([' ', '\t', ',', '[', ']', '"', '\'', '|', '<', '>', '\n', '\r'])
        .filter(|word| word.contains("://"))
}

/// `pip.conf`: `index-url`, and `extra-index-url` with one address per line.
pub fn pip(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut in_key = false;
    for line in text.lines() {
        let bare = line.trim();
        if bare.starts_with(['#', ';', '[']) {
            in_key = false;
            continue;
        }
        let continues = line.starts_with([' ', '\t']) && in_key;
        match bare.split_once('=') {
            Some((key, value)) if !continues => {
                in_key = matches!(
                    key.trim(),
                    "index-url" | "extra-index-url" | "index_url" | "extra_index_url" | "find-links"
                );
                if in_key {
                    found.extend(words(value).map(str::to_owned));
                }
            }
            _ if continues => found.extend(words(bare).map(str::to_owned)),
            _ => in_key = false,
        }
    }
    found
}

/// `uv.toml` and the tables of `pyproject.toml`: `url` and `index-url`.
pub fn uv(text: &str) -> Vec<String> {
    values(text, |key| matches!(key, "url" | "index-url" | "extra-index-url" | "default-index"))
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

/// `.npmrc`: `registry` and `@scope:registry`. Tokens are under other keys, which are not read.
pub fn npm(text: &str) -> Vec<String> {
    values(text, |key| key == "registry" || (key.starts_with('@') && key.ends_with(":registry")))
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

/// `.yarnrc.yml`: `npmRegistryServer`.
pub fn yarn(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.trim().split_once(':'))
        .filter(|(key, _)| matches!(key.trim(), "npmRegistryServer" | "registry"))
        .flat_map(|(_, value)| words(value))
        .map(str::to_owned)
        .collect()
}

/// `config.toml` of cargo: `registry`, `index` and, in `config.json` of an index, `dl`.
pub fn cargo(text: &str) -> Vec<String> {
    values(text, |key| matches!(key, "registry" | "index" | "dl"))
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

/// `go env`: `GOPROXY` and `GOSUMDB`, lists separated by commas and bars.
pub fn go(text: &str) -> Vec<String> {
    let mut found: Vec<String> =
        values(text, |key| key == "GOPROXY").flat_map(words).map(str::to_owned).collect();
    for value in values(text, |key| key == "GOSUMDB") {
        let value = value.trim_matches(['"', '\'']);
        found.extend(words(value).map(str::to_owned));
    }
    found
}

/// `sources.list` (one line each) and `*.sources` (`URIs:`).
pub fn apt(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| {
            line.starts_with("deb ")
                || line.starts_with("deb-src ")
                || line.starts_with("deb\t")
                || line.starts_with("URIs:")
        })
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

/// `/etc/apk/repositories`: an address per line, optionally after a tag.
pub fn apk(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

/// `settings.xml` of Maven: the contents of `<url>`. Credentials are in `<servers>`, which has no `<url>`.
pub fn maven(text: &str) -> Vec<String> {
    // The file that comes with Maven has examples in comments.
    let mut parts = text.split("<!--");
    let first = parts.next().unwrap_or_default();
    let rest = parts.filter_map(|part| part.split_once("-->").map(|(_, after)| after));
    let text: String = std::iter::once(first).chain(rest).collect();
    text.split("<url>")
        .skip(1)
        .filter_map(|rest| rest.split("</url>").next())
        .map(|url| url.trim().to_owned())
        .collect()
}

/// `.gemrc`: the list under `:sources:`.
pub fn gem(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| line.starts_with('-'))
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

/// `.condarc`: channels and aliases that are addresses.
pub fn conda(text: &str) -> Vec<String> {
    text.lines()
        .map(str::trim)
        .filter(|line| !line.starts_with('#'))
        .flat_map(words)
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(found: Vec<String>, expected: &[&str]) {
        let hosts: Vec<String> = found
            .iter()
            .filter_map(|url| site(url))
            .map(|site| format!("{}:{}", site.host, site.port))
            .collect();
        assert_eq!(hosts, expected);
    }

    #[test]
    fn addresses_lose_their_users_and_tokens() {
        let of = |text: &str| site(text).map(|site| format!("{}:{}", site.host, site.port));
        assert_eq!(
            of("https://user:to%40ken@Mirror.Example:8443/simple/").as_deref(),
            Some("mirror.example:8443")
        );
        assert_eq!(of("sparse+https://index.example/").as_deref(), Some("index.example:443"));
        assert_eq!(of("https://evil.example@good.example/").as_deref(), Some("good.example:443"));
        assert_eq!(of("'http://deb.example'").as_deref(), Some("deb.example:80"));
        for text in [
            "file:///x",
            "off",
            "direct",
            "git+ssh://git@host/x",
            "https://",
            "https://:80",
            "https://127.1/",
            "https://h:0",
        ] {
            assert_eq!(of(text), None, "{text}");
        }
    }

    #[test]
    fn pip_files_are_read() {
        let text = "[global]\nindex-url = https://u:secret@a.example/simple\nextra-index-url =\n    https://b.example/simple\n    https://c.example\ntrusted-host = d.example\n# index-url = https://e.example\ntimeout = 60\n";
        check(pip(text), &["a.example:443", "b.example:443", "c.example:443"]);
        check(uv("[[index]]\nurl = \"https://a.example/simple\"\ndefault = true\n"), &["a.example:443"]);
    }

    #[test]
    fn npm_and_yarn_files_are_read() {
        let text = "registry=https://a.example/npm/\n@corp:registry = https://b.example\n//b.example/:_authToken=secret\n; registry=https://c.example\ncafile=/x\n";
        check(npm(text), &["a.example:443", "b.example:443"]);
        check(yarn("npmRegistryServer: \"https://a.example\"\n"), &["a.example:443"]);
    }

    #[test]
    fn cargo_and_go_files_are_read() {
        let text = "[source.crates-io]\nreplace-with = \"mirror\"\n[source.mirror]\nregistry = \"sparse+https://a.example/index/\"\n[registries.corp]\nindex = \"https://b.example/git\"\ntoken = \"secret\"\n";
        check(cargo(text), &["a.example:443", "b.example:443"]);
        check(
            go(
                "GOPROXY='https://a.example,https://b.example|direct'\nGOSUMDB=\"sum.golang.org\"\nGOFLAGS=\"\"\n",
            ),
            &["a.example:443", "b.example:443"],
        );
    }

    #[test]
    fn system_package_managers_are_read() {
        let text = "# deb http://c.example x\ndeb [arch=amd64 signed-by=/x] http://a.example/debian bookworm main\ndeb-src https://b.example/debian bookworm main\nTypes: deb\nURIs: http://d.example/debian http://e.example:8080\n";
        check(apt(text), &["a.example:80", "b.example:443", "d.example:80", "e.example:8080"]);
        check(
            apk("https://a.example/alpine/v3.20/main\n@edge http://b.example/x\n#http://c.example\n"),
            &["a.example:443", "b.example:80"],
        );
    }

    #[test]
    fn maven_gem_and_conda_files_are_read() {
        let text = "<settings><servers><server><password>secret</password></server></servers><mirrors><mirror><url> https://a.example/maven </url></mirror></mirrors></settings>";
        check(maven(text), &["a.example:443"]);
        check(
            maven(
                "<!-- <url>http://x.example</url> --><url>http://b.example</url><!-- <url>http://y.example",
            ),
            &["b.example:80"],
        );
        check(gem("---\n:sources:\n- https://a.example\n:update_sources: true\n"), &["a.example:443"]);
        check(
            conda(
                "channels:\n  - https://a.example/t/tk-secret/main\n  - conda-forge\nchannel_alias: https://b.example\n",
            ),
            &["a.example:443", "b.example:443"],
        );
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_read_without_a_panic(text in "\\PC{0,200}") {
            for reader in [pip, uv, npm, yarn, cargo, go, apt, apk, maven, gem, conda] {
                for address in reader(&text) {
                    let _ = site(&address);
                }
            }
        }
    }
}
