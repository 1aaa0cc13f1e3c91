//! What an image needs so that the programs in it trust a CA of ours beside those that they trust already. Pure.
//!
//! Files and variables, always both: variables are lost under `sudo` and `env -i`, and some programs read no file of the system's.
//! A bundle that a variable names replaces the program's own, so every bundle has the image's roots and ours together.

/// Where systems keep all roots in one file, the most common first.
const BUNDLES: [&str; 6] = [
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
    "etc/pki/tls/cert.pem",
];
/// Where systems look for additional roots when they rebuild such a file.
const ANCHORS: [&str; 4] = [
    "usr/local/share/ca-certificates",
    "etc/pki/ca-trust/source/anchors",
    "etc/pki/trust/anchors",
    "etc/ca-certificates/trust-source/anchors",
];
/// Ours alone.
const OURS: &str = "usr/local/share/ca-certificates/shoal.crt";
/// Settings for programs that take a file of settings and no bundle.
const WGET: &str = "etc/ssl/shoal/wgetrc";
const APT: &str = "etc/ssl/shoal/apt.conf";

/// A file to write.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustFile {
    /// Relative to the root.
    pub path: String,
    /// What it holds.
    pub contents: String,
}

/// What an image has, as far as it matters here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageRoots {
    /// The bundles of [`bundles`] that are there, with what they hold.
    pub bundles: Vec<(String, String)>,
    /// The directories of [`anchors`] that are there.
    pub anchors: Vec<String>,
}

/// The names of bundles to look for in an image.
pub fn bundles() -> impl Iterator<Item = &'static str> {
    BUNDLES.into_iter()
}

/// The names of directories to look for in an image.
pub fn anchors() -> impl Iterator<Item = &'static str> {
    ANCHORS.into_iter()
}

/// The files of a layer that makes an image trust `ca` and the operator's `extra` roots, all of them PEM. `fallback` are the roots
/// for an image that has none.
pub fn trust_layer(image: &ImageRoots, ca: &str, extra: &str, fallback: &str) -> Vec<TrustFile> {
    let added = [extra, ca].map(certificates).concat();
    let mut files = Vec::new();
    let mut add = |path: &str, contents: String| files.push(TrustFile { path: path.into(), contents });
    let standard = BUNDLES[0];
    let largest = image.bundles.iter().map(|(_, text)| text.as_str()).max_by_key(|text| text.len());
    let roots = largest.unwrap_or(fallback);
    if !image.bundles.iter().any(|(path, _)| path == standard) {
        add(standard, joined(roots, &added));
    }
    for (path, text) in &image.bundles {
        add(path, joined(text, &added));
    }
    add(OURS, certificates(ca).concat());
    for anchor in image.anchors.iter().filter(|anchor| anchor.as_str() != ANCHORS[0]) {
        add(&format!("{anchor}/shoal.crt"), certificates(ca).concat());
    }
    add(WGET, format!("ca_certificate=/{standard}\n"));
    add(APT, format!("Acquire::https::CaInfo \"/{standard}\";\n"));
    files
}

/// The variables that go with such a layer. A caller's own win.
pub fn trust_variables() -> Vec<(&'static str, String)> {
    /// Programs that read this bundle in place of their own.
    const REPLACE: [&str; 15] = [
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
        "UV_SYSTEM_CERTS",
    ];
    /// Programs that add these roots to their own.
    const ADD: [&str; 2] = ["NODE_EXTRA_CA_CERTS", "DENO_CERT"];
    let bundle = || format!("/{}", BUNDLES[0]);
    let replace = REPLACE.into_iter().map(|name| match name {
        // A switch, for a program that then reads the system's file.
        "UV_SYSTEM_CERTS" => (name, "1".to_owned()),
        name => (name, bundle()),
    });
    let add = ADD.into_iter().map(|name| (name, format!("/{OURS}")));
    replace.chain(add).chain([("WGETRC", format!("/{WGET}")), ("APT_CONFIG", format!("/{APT}"))]).collect()
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
    let there = certificates(bundle);
    let mut text = bundle.trim_end().to_owned();
    if !text.is_empty() {
        text.push('\n');
    }
    for certificate in added.iter().filter(|certificate| !there.contains(certificate)) {
        text += certificate;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem(name: &str) -> String {
        format!("-----BEGIN CERTIFICATE-----\n{name}\n-----END CERTIFICATE-----\n")
    }

    fn of<'a>(files: &'a [TrustFile], path: &str) -> &'a str {
        &files.iter().find(|file| file.path == path).unwrap_or_else(|| panic!("{path} is missing")).contents
    }

    #[test]
    fn every_bundle_keeps_its_roots_and_has_ours() {
        let image = ImageRoots {
            bundles: vec![
                (BUNDLES[0].into(), pem("debian")),
                (BUNDLES[1].into(), format!("# Red Hat\n{}", pem("redhat"))),
            ],
            anchors: ANCHORS[..2].iter().map(|&name| name.into()).collect(),
        };
        let files = trust_layer(&image, &pem("ours"), &pem("operator"), &pem("fallback"));
        assert_eq!(of(&files, BUNDLES[0]), [pem("debian"), pem("operator"), pem("ours")].concat());
        assert_eq!(
            of(&files, BUNDLES[1]),
            ["# Red Hat\n".into(), pem("redhat"), pem("operator"), pem("ours")].concat()
        );
        assert_eq!(of(&files, OURS), pem("ours"));
        assert_eq!(of(&files, "etc/pki/ca-trust/source/anchors/shoal.crt"), pem("ours"));
        assert!(!files.iter().any(|file| file.path == BUNDLES[3]), "only where there is one");
        assert!(!files.iter().any(|file| file.contents.contains("fallback")));
        let mut paths: Vec<_> = files.iter().map(|file| &file.path).collect();
        paths.sort();
        paths.dedup();
        assert_eq!(paths.len(), files.len(), "each file is written once");
    }

    #[test]
    fn an_image_without_roots_gets_some_at_the_place_that_variables_name() {
        let files = trust_layer(&ImageRoots::default(), &pem("ours"), "", &pem("fallback"));
        assert_eq!(of(&files, BUNDLES[0]), [pem("fallback"), pem("ours")].concat());
        let red_hat = ImageRoots { bundles: vec![(BUNDLES[1].into(), pem("redhat"))], anchors: vec![] };
        let files = trust_layer(&red_hat, &pem("ours"), "", &pem("fallback"));
        assert_eq!(of(&files, BUNDLES[0]), [pem("redhat"), pem("ours")].concat());
    }

    #[test]
    fn a_layer_over_a_layer_adds_nothing_twice() {
        let image = ImageRoots { bundles: vec![(BUNDLES[0].into(), pem("debian"))], anchors: vec![] };
        let once = trust_layer(&image, &pem("ours"), "", "");
        let again =
            ImageRoots { bundles: vec![(BUNDLES[0].into(), of(&once, BUNDLES[0]).into())], anchors: vec![] };
        assert_eq!(of(&trust_layer(&again, &pem("ours"), "", ""), BUNDLES[0]), of(&once, BUNDLES[0]));
    }

    #[test]
    fn what_is_no_certificate_is_not_added() {
        let key = "-----BEGIN PRIVATE KEY-----\nsecret\n-----END PRIVATE KEY-----\n";
        let files = trust_layer(&ImageRoots::default(), &format!("{key}{}", pem("ours")), "garbage", "");
        assert!(
            files.iter().all(|file| !file.contents.contains("secret") && !file.contents.contains("garbage"))
        );
        assert_eq!(certificates("-----BEGIN CERTIFICATE-----\ncut off"), Vec::<String>::new());
    }

    #[test]
    fn every_file_that_a_variable_names_is_written() {
        let files = trust_layer(&ImageRoots::default(), &pem("ours"), "", "");
        for (name, value) in trust_variables() {
            let written = files.iter().any(|file| format!("/{}", file.path) == value);
            assert!(written || value == "1", "{name}={value}");
        }
    }
}
