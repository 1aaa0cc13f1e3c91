//! What a sandbox needs so that its programs trust a CA of ours beside those that they trust already.
//!
//! The files lie in the directory that the host writes and the sandbox reads, outside of snapshots and layers, so nothing of them is
//! in an image that leaves this machine. A bundle that a variable names replaces the program's own, so the bundle has the image's
//! roots and ours together.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::BorrowedFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags, openat2};
use wire::network::HOST_DIRECTORY;

/// Where systems keep all roots in one file, the most common first.
const BUNDLES: [&str; 6] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
    "etc/pki/tls/cert.pem",
];
/// A longer bundle is none.
const BUNDLE_BYTES_MAX: u64 = 8 << 20;

/// All roots.
const BUNDLE: &str = "ca-bundle.crt";
/// Ours alone.
const OURS: &str = "ca.crt";
/// Settings for programs that take a file of settings and no bundle.
const WGET: &str = "wgetrc";
const APT: &str = "apt.conf";

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustFile {
    /// Its name in the host's directory.
    pub name: &'static str,
    /// What it holds.
    pub contents: String,
}

/// The files for a sandbox whose image has `roots`, so that its programs trust `ca` and the operator's `extra` roots too. All PEM. Pure.
pub fn trust_files(roots: &str, ca: &str, extra: &str) -> Vec<TrustFile> {
    let added = [extra, ca].map(certificates).concat();
    let bundle = format!("{HOST_DIRECTORY}/{BUNDLE}");
    vec![
        TrustFile { name: BUNDLE, contents: joined(roots, &added) },
        TrustFile { name: OURS, contents: certificates(ca).concat() },
        TrustFile { name: WGET, contents: format!("ca_certificate={bundle}\n") },
        TrustFile { name: APT, contents: format!("Acquire::https::CaInfo \"{bundle}\";\n") },
    ]
}

/// The variables that go with these files. A caller's own win.
pub fn trust_variables() -> Vec<(&'static str, String)> {
    /// Programs that read this bundle in place of their own.
    const REPLACE: [&str; 14] = [
        "AWS_CA_BUNDLE",
        "BUNDLE_SSL_CA_CERT",
        "CARGO_HTTP_CAINFO",
        "CLOUDSDK_CORE_CUSTOM_CA_CERTS_FILE",
        "CURL_CA_BUNDLE",
        "GIT_SSL_CAINFO",
        "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
        "HTTPLIB2_CA_CERTS",
        "NIX_SSL_CERT_FILE",
        "PIP_CERT",
        "REQUESTS_CA_BUNDLE",
        "SSL_CERT_FILE",
        "YARN_HTTPS_CA_FILE_PATH",
        "npm_config_cafile",
    ];
    /// Programs that add these roots to their own.
    const ADD: [&str; 2] = ["NODE_EXTRA_CA_CERTS", "DENO_CERT"];
    let at = |name: &str| format!("{HOST_DIRECTORY}/{name}");
    let replace = REPLACE.into_iter().map(|name| (name, at(BUNDLE)));
    let add = ADD.into_iter().map(|name| (name, at(OURS)));
    // A switch, for a program that then reads `SSL_CERT_FILE`.
    let switch = [("UV_SYSTEM_CERTS", "1".to_owned())];
    replace.chain(add).chain(switch).chain([("WGETRC", at(WGET)), ("APT_CONFIG", at(APT))]).collect()
}

/// The roots of this machine; empty if it has none.
pub fn machine_roots() -> io::Result<String> {
    for name in BUNDLES {
        match File::open(Path::new("/").join(name)) {
            Ok(file) => return read(file),
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(e),
        }
    }
    Ok(String::new())
}

/// The roots in a layer, if it has some. A stranger wrote the layer: no link in it is followed.
pub fn layer_roots(layer: BorrowedFd<'_>) -> io::Result<Option<String>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    for name in BUNDLES {
        // If it is not there, or not what it should be, the image has no such bundle.
        if let Ok(file) = openat2(layer, name, flags, Mode::empty(), resolve) {
            let file = File::from(file);
            if file.metadata()?.is_file() {
                return read(file).map(Some);
            }
        }
    }
    Ok(None)
}

fn read(file: File) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(BUNDLE_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The certificates in a text, each with its ends, without what people wrote between them.
fn certificates(text: &str) -> Vec<String> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(begin) = rest.find(BEGIN) {
        let Some(end) = rest[begin..].find(END) else { break };
        let end = begin + end + END.len();
        found.push(format!("{}\n", rest[begin..end].replace("\r\n", "\n")));
        rest = &rest[end..];
    }
    found
}

/// A bundle with further certificates at its end, unless it has them.
fn joined(bundle: &str, added: &[String]) -> String {
    let mut text = bundle.trim_end().to_owned();
    if !text.is_empty() {
        text.push('\n');
    }
    for certificate in added.iter().filter(|certificate| !bundle.contains(certificate.trim_end())) {
        text += certificate;
    }
    text
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn pem(name: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----\n")
    }

    fn of<'a>(files: &'a [TrustFile], name: &str) -> &'a str {
        &files.iter().find(|file| file.name == name).unwrap_or_else(|| panic!("{name} is missing")).contents
    }

    #[test]
    fn the_bundle_keeps_the_images_roots_and_has_ours_once() {
        let files = trust_files(&format!("# Debian\n{}", pem("debian")), &pem("ours"), &pem("operator"));
        let expected = ["# Debian\n".to_owned(), pem("debian"), pem("operator"), pem("ours")].concat();
        assert_eq!(of(&files, BUNDLE), expected);
        assert_eq!(of(&files, OURS), pem("ours"));
        assert_eq!(of(&trust_files(&expected, &pem("ours"), &pem("operator")), BUNDLE), expected);
        assert_eq!(of(&trust_files("", &pem("ours"), ""), BUNDLE), pem("ours"));
    }

    #[test]
    fn what_is_no_certificate_is_not_added() {
        let key = "-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n";
        let files = trust_files("", &format!("{key}{}", pem("ours")), "garbage");
        assert!(
            files.iter().all(|file| !file.contents.contains("secret") && !file.contents.contains("garbage"))
        );
        assert_eq!(certificates("-----BEGIN CERTIFICATE-----\ncut off"), Vec::<String>::new());
    }

    #[test]
    fn every_file_that_a_variable_names_is_written() {
        let files = trust_files("", &pem("ours"), "");
        for (name, value) in trust_variables() {
            let written = files.iter().any(|file| format!("{HOST_DIRECTORY}/{}", file.name) == value);
            assert!(written || value == "1", "{name}={value}");
        }
    }

    #[test]
    fn a_link_in_a_layer_leads_nowhere() {
        let layer = tempfile::tempdir().expect("a directory");
        std::fs::create_dir_all(layer.path().join("etc/ssl/certs")).expect("directories");
        let place = layer.path().join(BUNDLES[0]);
        std::os::unix::fs::symlink("/etc/hostname", &place).expect("a link");
        let open = || File::open(layer.path()).expect("a directory");
        assert_eq!(layer_roots(open().as_fd()).expect("it can be looked at"), None);
        std::fs::remove_file(&place).expect("it is ours");
        std::fs::write(&place, pem("image")).expect("it is ours");
        assert_eq!(layer_roots(open().as_fd()).expect("it can be looked at"), Some(pem("image")));
    }
}
