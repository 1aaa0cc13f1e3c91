//! The hosts that `registries` means: those that the package managers of this machine are configured for, or use by
//! default.
//!
//! The hosts are detected, not configured: a company's mirror works by itself, and replaces the public registry that it
//! mirrors. Configuration is read as data; no program is run. [`find`] reads the files, the rest is pure.

mod defaults;
mod parse;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use crate::policy::{Name, Preset, PresetHost};

pub use defaults::Tool;
pub use parse::{Site, site};

/// The longest configuration file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// The most files of one directory that are read.
const FILES_MAX: usize = 200;
/// The ports of registries and code hosts, whatever port an index has.
const WEB_PORTS: [u16; 2] = [80, 443];

/// One host, and where it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// What uses it.
    pub tool: Tool,
    /// The host.
    pub host: Name,
    /// The ports that its use needs.
    pub ports: Vec<u16>,
    /// The file or variable that names it; `None` for a tool's default.
    pub source: Option<String>,
    /// The host is not in the public tree, or is the operator's: shown to admins only, and its addresses may be
    /// private.
    pub private: bool,
}

/// The text of a tool's configuration: read by [`find`], or given by a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// Which tool it belongs to.
    pub tool: Tool,
    /// Which file or variable.
    pub origin: String,
    /// Its text.
    pub text: String,
    reader: Reader,
}

type ReadFn = fn(&str) -> Vec<String>;

/// The parser for a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reader {
    Pip,
    Uv,
    Npm,
    Yarn,
    Cargo,
    Go,
    Apt,
    Apk,
    Maven,
    Gem,
    Conda,
    /// A variable: addresses separated by spaces or commas.
    Addresses,
}

impl Reader {
    fn read(self, text: &str) -> Vec<String> {
        let read: ReadFn = match self {
            Self::Pip => parse::pip,
            Self::Uv => parse::uv,
            Self::Npm => parse::npm,
            Self::Yarn => parse::yarn,
            Self::Cargo => parse::cargo,
            Self::Go => parse::go,
            Self::Apt => parse::apt,
            Self::Apk | Self::Addresses => parse::apk,
            Self::Maven => parse::maven,
            Self::Gem => parse::gem,
            Self::Conda => parse::conda,
        };
        read(text)
    }
}

/// The files below the root that package managers read for all users.
const SYSTEM_FILES: &[(Tool, Reader, &str)] = &[
    (Tool::Python, Reader::Pip, "etc/pip.conf"),
    (Tool::Python, Reader::Pip, "etc/xdg/pip/pip.conf"),
    (Tool::Python, Reader::Uv, "etc/uv/uv.toml"),
    (Tool::Node, Reader::Npm, "etc/npmrc"),
    (Tool::Node, Reader::Npm, "usr/etc/npmrc"),
    (Tool::Node, Reader::Npm, "usr/local/etc/npmrc"),
    (Tool::Debian, Reader::Apt, "etc/apt/sources.list"),
    (Tool::Alpine, Reader::Apk, "etc/apk/repositories"),
    (Tool::Java, Reader::Maven, "etc/maven/settings.xml"),
    (Tool::Java, Reader::Maven, "usr/share/maven/conf/settings.xml"),
    (Tool::Ruby, Reader::Gem, "etc/gemrc"),
    (Tool::Conda, Reader::Conda, "etc/conda/.condarc"),
];

/// Directories of such files.
const SYSTEM_DIRECTORIES: &[(Tool, Reader, &str)] = &[(Tool::Debian, Reader::Apt, "etc/apt/sources.list.d")];

/// The files below a home directory.
const HOME_FILES: &[(Tool, Reader, &str)] = &[
    (Tool::Python, Reader::Pip, ".config/pip/pip.conf"),
    (Tool::Python, Reader::Pip, ".pip/pip.conf"),
    (Tool::Python, Reader::Uv, ".config/uv/uv.toml"),
    (Tool::Node, Reader::Npm, ".npmrc"),
    (Tool::Node, Reader::Yarn, ".yarnrc.yml"),
    (Tool::Rust, Reader::Cargo, ".cargo/config.toml"),
    (Tool::Rust, Reader::Cargo, ".cargo/config"),
    (Tool::Go, Reader::Go, ".config/go/env"),
    (Tool::Java, Reader::Maven, ".m2/settings.xml"),
    (Tool::Ruby, Reader::Gem, ".gemrc"),
    (Tool::Conda, Reader::Conda, ".condarc"),
];

/// Variables that hold addresses.
const VARIABLES: &[(Tool, &str)] = &[
    (Tool::Python, "PIP_INDEX_URL"),
    (Tool::Python, "PIP_EXTRA_INDEX_URL"),
    (Tool::Python, "UV_INDEX_URL"),
    (Tool::Python, "UV_DEFAULT_INDEX"),
    (Tool::Python, "UV_INDEX"),
    (Tool::Node, "npm_config_registry"),
    (Tool::Node, "NPM_CONFIG_REGISTRY"),
    (Tool::Node, "YARN_NPM_REGISTRY_SERVER"),
    (Tool::Rust, "CARGO_REGISTRIES_CRATES_IO_INDEX"),
    (Tool::Go, "GOPROXY"),
];

/// Variables that name a file.
const FILE_VARIABLES: &[(Tool, Reader, &str)] = &[
    (Tool::Python, Reader::Pip, "PIP_CONFIG_FILE"),
    (Tool::Node, Reader::Npm, "NPM_CONFIG_GLOBALCONFIG"),
    (Tool::Node, Reader::Npm, "npm_config_globalconfig"),
    (Tool::Node, Reader::Npm, "NPM_CONFIG_USERCONFIG"),
    (Tool::Node, Reader::Npm, "npm_config_userconfig"),
    (Tool::Go, Reader::Go, "GOENV"),
];

/// Where to look.
#[derive(Debug, Clone)]
pub struct Where {
    /// `/`, or a test's.
    pub root: PathBuf,
    /// Home directories whose configuration counts: the operator's. Those of others are not read.
    pub homes: Vec<PathBuf>,
    /// Directories that are used in place of `~/.cargo`.
    pub cargo_homes: Vec<PathBuf>,
    /// The environment.
    pub variables: BTreeMap<String, String>,
}

/// Reads the configuration of the package managers of a machine. Skips files that do not exist or cannot be read; the
/// second value lists those that exist and cannot be read.
pub fn find(place: &Where) -> (Vec<Source>, Vec<(PathBuf, io::Error)>) {
    let mut files: Vec<(Tool, Reader, PathBuf)> = Vec::new();
    files.extend(SYSTEM_FILES.iter().map(|(tool, reader, path)| (*tool, *reader, place.root.join(path))));
    let (mut sources, mut unreadable) = (Vec::new(), Vec::new());
    for (tool, reader, path) in SYSTEM_DIRECTORIES {
        let path = place.root.join(path);
        match std::fs::read_dir(&path) {
            Ok(entries) => {
                // apt itself reads no file with another ending.
                let is_read = |path: &PathBuf| {
                    path.extension().is_some_and(|ending| ending == "list" || ending == "sources")
                };
                let paths = entries.filter_map(|entry| Some(entry.ok()?.path())).filter(is_read);
                let mut paths: Vec<PathBuf> = paths.take(FILES_MAX).collect();
                paths.sort();
                files.extend(paths.into_iter().map(|path| (*tool, *reader, path)));
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => unreadable.push((path, e)),
        }
    }
    for home in &place.homes {
        files.extend(HOME_FILES.iter().map(|(tool, reader, path)| (*tool, *reader, home.join(path))));
    }
    for home in &place.cargo_homes {
        files.extend(["config.toml", "config"].map(|file| (Tool::Rust, Reader::Cargo, home.join(file))));
    }
    for (tool, reader, variable) in FILE_VARIABLES {
        if let Some(path) = place.variables.get(*variable) {
            files.push((*tool, *reader, PathBuf::from(path)));
        }
    }
    for (tool, reader, path) in files {
        match read_bounded(&path) {
            Ok(text) => sources.push(Source { tool, origin: path.display().to_string(), text, reader }),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(e) => unreadable.push((path, e)),
        }
    }
    for (tool, variable) in VARIABLES {
        if let Some(text) = place.variables.get(*variable) {
            let (origin, text) = (format!("${variable}"), text.clone());
            sources.push(Source { tool: *tool, origin, text, reader: Reader::Addresses });
        }
    }
    (sources, unreadable)
}

fn read_bounded(path: &Path) -> io::Result<String> {
    use std::io::Read;
    let file = std::fs::File::open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::NotFound.into());
    }
    let mut bytes = Vec::new();
    file.take(FILE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The hosts that sources name, and the defaults of the tools that have no hosts in the sources.
pub fn hosts(sources: &[Source], operator: &[Name]) -> Vec<Found> {
    let mut found: Vec<Found> = Vec::new();
    let mut seen = BTreeSet::new();
    let mut add = |found: &mut Vec<Found>, entry: Found| {
        if seen.insert((entry.tool, entry.host.clone(), entry.ports.clone())) {
            found.push(entry);
        }
    };
    for source in sources {
        for site in source.reader.read(&source.text).iter().filter_map(|address| site(address)) {
            let source_name = Some(source.origin.clone());
            for beside in defaults::beside(site.host.as_str()) {
                if let Ok(host) = Name::parse(beside) {
                    add(&mut found, entry(source.tool, host, None, source_name.clone()));
                }
            }
            add(&mut found, entry(source.tool, site.host, Some(site.port), source_name));
        }
    }
    let configured: BTreeSet<Tool> = found.iter().map(|found| found.tool).collect();
    for tool in Tool::ALL.into_iter().filter(|tool| !configured.contains(tool)) {
        for host in defaults::hosts(tool).iter().filter_map(|host| Name::parse(host).ok()) {
            add(&mut found, entry(tool, host, None, None));
        }
    }
    for host in operator {
        add(
            &mut found,
            entry(Tool::Operator, host.clone(), None, Some("the operator's configuration".to_owned())),
        );
    }
    found
}

fn entry(tool: Tool, host: Name, port: Option<u16>, source: Option<String>) -> Found {
    let mut ports = match port {
        Some(port) => vec![port],
        None if defaults::uses_plain_http(tool) => WEB_PORTS.to_vec(),
        None => vec![443],
    };
    // Mirrors of signed packages switch between the two.
    if defaults::uses_plain_http(tool) && ports.iter().all(|port| WEB_PORTS.contains(port)) {
        ports = WEB_PORTS.to_vec();
    }
    let private = source.is_some() && (host.is_local_only() || !is_default(&host));
    Found { tool, host, ports, source, private }
}

/// Whether a host is in the table of defaults: then it is well known, and its addresses are public.
fn is_default(host: &Name) -> bool {
    Tool::ALL.iter().any(|tool| defaults::hosts(*tool).contains(&host.as_str()))
}

/// The preset that `registries` stands for.
pub fn preset(found: &[Found]) -> Preset {
    let mut hosts: Vec<PresetHost> = found
        .iter()
        .map(|found| PresetHost {
            host: found.host.clone(),
            ports: found.ports.clone(),
            ssh: false,
            private: found.private,
        })
        .collect();
    // Git over SSH: for code hosts only, and only for SSH.
    hosts.extend(found.iter().filter(|found| found.tool == Tool::Git).map(|found| PresetHost {
        host: found.host.clone(),
        ports: vec![22],
        ssh: true,
        private: false,
    }));
    hosts.sort();
    hosts.dedup();
    Preset { hosts }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(files: &[(&str, &str)], variables: &[(&str, &str)]) -> (tempfile::TempDir, Where) {
        let root = tempfile::tempdir().expect("a directory");
        for (path, text) in files {
            let path = root.path().join(path);
            std::fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        let variables =
            variables.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let homes = vec![root.path().join("root")];
        let place = Where { root: root.path().to_owned(), homes, cargo_homes: Vec::new(), variables };
        (root, place)
    }

    fn named(found: &[Found], tool: Tool) -> Vec<(&str, &[u16], bool)> {
        found
            .iter()
            .filter(|found| found.tool == tool)
            .map(|found| (found.host.as_str(), found.ports.as_slice(), found.private))
            .collect()
    }

    #[test]
    fn a_machine_without_configuration_has_the_defaults() {
        let (_root, place) = place(&[], &[]);
        let (sources, unreadable) = find(&place);
        assert!(sources.is_empty() && unreadable.is_empty());
        let found = hosts(&sources, &[]);
        assert_eq!(
            named(&found, Tool::Python),
            [("pypi.org", &[443][..], false), ("files.pythonhosted.org", &[443], false)]
        );
        assert!(named(&found, Tool::Debian).contains(&("deb.debian.org", &[80, 443], false)));
        assert!(found.iter().all(|found| found.source.is_none()));
    }

    #[test]
    fn a_mirror_takes_the_place_of_the_public_registry_and_its_token_is_dropped() {
        let files = [
            ("etc/pip.conf", "[global]\nindex-url = https://user:secret@mirror.corp.example:8443/simple\n"),
            ("root/.npmrc", "registry=https://npm.corp.example/\n//npm.corp.example/:_authToken=secret\n"),
            ("etc/apt/sources.list.d/debian.sources", "Types: deb\nURIs: http://apt.corp.example/debian\n"),
        ];
        let (_root, place) = place(&files, &[("GOPROXY", "https://go.corp.example,direct")]);
        let (sources, _) = find(&place);
        let found = hosts(&sources, &[Name::parse("models.corp.example").expect("a name")]);
        assert_eq!(named(&found, Tool::Python), [("mirror.corp.example", &[8443][..], true)]);
        assert_eq!(named(&found, Tool::Node), [("npm.corp.example", &[443][..], true)]);
        assert_eq!(named(&found, Tool::Debian), [("apt.corp.example", &[80, 443][..], true)]);
        assert_eq!(named(&found, Tool::Go), [("go.corp.example", &[443][..], true)]);
        assert_eq!(named(&found, Tool::Operator), [("models.corp.example", &[443][..], true)]);
        assert!(!named(&found, Tool::Git).is_empty(), "code hosts stay");
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
    }

    #[test]
    fn an_index_that_is_the_default_keeps_its_second_host() {
        let (_root, place) = place(&[], &[("PIP_INDEX_URL", "https://pypi.org/simple")]);
        let found = hosts(&find(&place).0, &[]);
        let expected = [("files.pythonhosted.org", &[443][..], false), ("pypi.org", &[443], false)];
        assert_eq!(named(&found, Tool::Python), expected);
    }

    #[test]
    fn the_preset_opens_ssh_for_code_hosts_only() {
        let preset = preset(&hosts(&[], &[]));
        assert!(preset.hosts.iter().filter(|host| host.ssh).all(|host| host.ports == [22]));
        assert!(preset.hosts.iter().any(|host| host.ssh && host.host.as_str() == "github.com"));
        assert!(!preset.hosts.iter().any(|host| host.ssh && host.host.as_str() == "pypi.org"));
    }
}
