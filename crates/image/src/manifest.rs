//! The documents of an image, as registries and archives write them: indexes, manifests and configurations.
//!
//! All of it is untrusted: sizes, counts and digests are checked here, once.

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use wire::Digest;
use wire::launch::LAYERS_MAX;

use crate::hash::chain;

/// Largest index, manifest or configuration. Registries reject longer ones.
pub const DOCUMENT_MAX: usize = 4 << 20;
/// Largest blob.
pub const BLOB_MAX: u64 = 64 << 30;
/// Most layers of an image: one more is for Shoal's own layer on top.
pub const IMAGE_LAYERS_MAX: usize = LAYERS_MAX - 1;
/// Most entries of an index: platforms, and whatever else people put there.
const INDEX_MAX: usize = 1000;
/// Most nested indexes.
pub const INDEX_DEPTH_MAX: usize = 3;

/// The `Accept` header.
pub const ACCEPT: &str = "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, \
     application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json";

/// Why a document cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadImage {
    /// Not JSON of the right form.
    #[error("its {what} cannot be parsed")]
    Parse {
        /// The document.
        what: &'static str,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// Invalid contents.
    #[error("its {what} is not valid: {why}")]
    Nonsense {
        /// The document.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
    /// An artifact without a file system: a chart, a signature, a program for another machine.
    #[error("it is not a container image: {why}")]
    NotAnImage {
        /// What it is.
        why: String,
    },
    /// For another platform.
    #[error("it is made for {found}, but {wanted} is needed")]
    WrongPlatform {
        /// The image's platform.
        found: String,
        /// The requested platform.
        wanted: Platform,
    },
}

fn nonsense(what: &'static str, why: impl Into<String>) -> BadImage {
    BadImage::Nonsense { what, why: why.into() }
}

/// What a program runs on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v8`, if it matters.
    pub variant: Option<String>,
}

impl Platform {
    /// This machine.
    pub fn this() -> Self {
        let (architecture, variant) = match std::env::consts::ARCH {
            "x86_64" => ("amd64", None),
            "aarch64" => ("arm64", None),
            "x86" => ("386", None),
            "arm" => ("arm", Some("v7")),
            "powerpc64" => ("ppc64le", None),
            other => (other, None),
        };
        Self { os: "linux".into(), architecture: architecture.into(), variant: variant.map(str::to_owned) }
    }

    /// `linux/arm64` or `linux/arm64/v8`.
    pub fn parse(text: &str) -> Option<Self> {
        let plain = |part: &&str| {
            (1..=32).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        let parts: Vec<&str> = text.split('/').collect();
        let (os, architecture, variant) = match parts.as_slice() {
            [os, architecture] => (*os, *architecture, None),
            [os, architecture, variant] => (*os, *architecture, Some(*variant)),
            _ => return None,
        };
        let good = parts.iter().all(plain);
        good.then(|| Self {
            os: os.into(),
            architecture: architecture.into(),
            variant: variant.map(str::to_owned),
        })
    }

    /// How well something made for `other` fits: higher is better, `None` is not at all.
    fn fit(&self, other: &Self) -> Option<u8> {
        if (&self.os, &self.architecture) != (&other.os, &other.architecture) {
            return None;
        }
        match (&self.variant, &other.variant) {
            (wanted, found) if wanted == found => Some(3),
            // All 64-bit ARM is v8 so far, with or without saying so.
            (None, Some(found)) | (Some(found), None) if found == "v8" => Some(3),
            (_, None) => Some(2),
            // Without a variant, the caller wants one that runs anywhere.
            (None, Some(_)) => Some(1),
            (Some(_), Some(_)) => None,
        }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(variant) => write!(f, "/{variant}"),
            None => Ok(()),
        }
    }
}

/// A reference to a blob by digest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Digest of the bytes.
    pub digest: Digest,
    /// Number of bytes.
    pub size: u64,
    /// Its media type, as claimed.
    pub media_type: String,
    /// Its name in an archive.
    pub name: Option<String>,
}

/// An index or a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Document {
    /// One image for many platforms.
    Index(Vec<(Descriptor, Option<Platform>)>),
    /// One image.
    Manifest {
        /// Its configuration.
        config: Descriptor,
        /// Its layers, the lowest first.
        layers: Vec<Descriptor>,
    },
}

#[derive(Deserialize)]
struct WrittenDocument {
    #[serde(default, rename = "schemaVersion")]
    schema: u32,
    manifests: Option<Vec<WrittenDescriptor>>,
    config: Option<WrittenDescriptor>,
    layers: Option<Vec<WrittenDescriptor>>,
    #[serde(default, rename = "artifactType")]
    artifact: Option<String>,
}

#[derive(Deserialize)]
struct WrittenDescriptor {
    #[serde(default, rename = "mediaType")]
    media_type: String,
    digest: String,
    size: i64,
    platform: Option<WrittenPlatform>,
    #[serde(default)]
    annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    urls: Option<Vec<String>>,
}

#[derive(Deserialize)]
struct WrittenPlatform {
    #[serde(default)]
    os: String,
    #[serde(default)]
    architecture: String,
    #[serde(default)]
    variant: String,
}

impl WrittenPlatform {
    fn platform(self) -> Platform {
        let variant = Some(self.variant).filter(|variant| !variant.is_empty());
        Platform { os: self.os, architecture: self.architecture, variant }
    }
}

impl WrittenDescriptor {
    fn check(self, what: &'static str) -> Result<(Descriptor, Option<Platform>), BadImage> {
        let digest = self
            .digest
            .parse()
            .map_err(|_| nonsense(what, format!("`{:.100}` is not a supported digest", self.digest)))?;
        let size = u64::try_from(self.size).ok().filter(|size| *size <= BLOB_MAX);
        let size =
            size.ok_or_else(|| nonsense(what, format!("{} is not a valid size of {digest}", self.size)))?;
        if self.urls.is_some_and(|urls| !urls.is_empty()) {
            let why = "one of its layers is foreign (to be fetched from another URL), which is not supported"
                .into();
            return Err(BadImage::NotAnImage { why });
        }
        let names = self.annotations.unwrap_or_default();
        let name = ["io.containerd.image.name", "org.opencontainers.image.ref.name"]
            .iter()
            .find_map(|key| names.get(*key).cloned());
        let descriptor = Descriptor { digest, size, media_type: self.media_type, name };
        Ok((descriptor, self.platform.map(WrittenPlatform::platform)))
    }
}

impl Document {
    /// Parses an index or a manifest. The document's own fields decide which one it is: a document that could be both
    /// is rejected, since two readers could see different images under the same digest (CVE-2021-41190).
    pub fn parse(bytes: &[u8]) -> Result<Self, BadImage> {
        let what = "manifest";
        let written: WrittenDocument =
            serde_json::from_slice(bytes).map_err(|source| BadImage::Parse { what, source })?;
        match written {
            WrittenDocument { schema: 1, .. } => Err(BadImage::NotAnImage {
                why: "its manifest uses schema 1, which was retired in 2017".into(),
            }),
            WrittenDocument { manifests: Some(list), config: None, layers: None, .. } => {
                if list.len() > INDEX_MAX {
                    return Err(nonsense("index", format!("it has {} entries", list.len())));
                }
                let list = list.into_iter().map(|entry| entry.check("index"));
                Ok(Self::Index(list.collect::<Result<_, _>>()?))
            }
            WrittenDocument {
                manifests: None, config: Some(config), layers: Some(layers), artifact, ..
            } => {
                if let Some(kind) = artifact {
                    return Err(BadImage::NotAnImage {
                        why: format!("it is an artifact of type `{kind:.100}`"),
                    });
                }
                let (config, _) = config.check(what)?;
                if !is_config(&config.media_type) {
                    let why = format!("its configuration has the type `{:.100}`", config.media_type);
                    return Err(BadImage::NotAnImage { why });
                }
                if layers.len() > IMAGE_LAYERS_MAX {
                    let why = format!("it must have at most {IMAGE_LAYERS_MAX} layers, got {}", layers.len());
                    return Err(nonsense(what, why));
                }
                let layers = layers.into_iter().map(|layer| Ok(layer.check(what)?.0));
                let layers: Vec<Descriptor> = layers.collect::<Result<_, BadImage>>()?;
                if let Some(layer) = layers.iter().find(|layer| !is_layer(&layer.media_type)) {
                    let why = format!("one of its layers has the type `{:.100}`", layer.media_type);
                    return Err(BadImage::NotAnImage { why });
                }
                Ok(Self::Manifest { config, layers })
            }
            WrittenDocument { .. } => Err(nonsense(what, "it must be either an index or a manifest")),
        }
    }
}

/// The entry of an index that fits a platform best; the first of equals.
pub fn choose<'a>(
    index: &'a [(Descriptor, Option<Platform>)],
    wanted: &Platform,
) -> Result<&'a Descriptor, BadImage> {
    let mut best: Option<(u8, &Descriptor)> = None;
    for (descriptor, platform) in index {
        // An index of one image may leave the platform to that image's configuration, which is checked later.
        let fit = match platform {
            Some(platform) => wanted.fit(platform),
            None => Some(0),
        };
        if let Some(fit) = fit
            && best.is_none_or(|(before, _)| fit > before)
        {
            best = Some((fit, descriptor));
        }
    }
    best.map(|(_, descriptor)| descriptor).ok_or_else(|| {
        let found: Vec<String> = index
            .iter()
            .filter_map(|(_, platform)| platform.as_ref())
            // Attestations use this platform.
            .filter(|platform| platform.os != "unknown")
            .map(Platform::to_string)
            .take(20)
            .collect();
        let found = if found.is_empty() { "nothing".to_owned() } else { found.join(", ") };
        BadImage::WrongPlatform { found, wanted: wanted.clone() }
    })
}

fn is_config(media_type: &str) -> bool {
    matches!(
        media_type,
        "application/vnd.oci.image.config.v1+json" | "application/vnd.docker.container.image.v1+json"
    )
}

/// Media types of layers. The layer's own first bytes say how it is compressed.
fn is_layer(media_type: &str) -> bool {
    const KINDS: [&str; 4] = [
        "application/vnd.oci.image.layer.v1.tar",
        "application/vnd.oci.image.layer.nondistributable.v1.tar",
        "application/vnd.docker.image.rootfs.diff.tar",
        "application/vnd.docker.image.rootfs.foreign.diff.tar",
    ];
    KINDS.iter().any(|kind| {
        let rest = media_type.strip_prefix(kind);
        rest.is_some_and(|rest| matches!(rest, "" | "+gzip" | "+zstd" | ".gzip" | ".zstd"))
    })
}

/// The configuration of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageConfig {
    /// Operating system; empty if not given.
    pub os: String,
    /// Architecture; empty if not given.
    pub architecture: String,
    /// Variant; empty if not given.
    pub variant: Option<String>,
    /// When it was made, as its maker wrote it.
    pub created: Option<String>,
    /// Variables for every command, in order.
    pub env: Vec<(String, String)>,
    /// User that commands run as: a name or number, optionally with `:group`.
    pub user: Option<String>,
    /// Where they run.
    pub working_directory: Option<String>,
    /// What runs by default.
    pub entrypoint: Vec<String>,
    /// Arguments for that, or the program itself.
    pub command: Vec<String>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// The digest of each layer's contents, the lowest first.
    pub contents: Vec<Digest>,
}

#[derive(Deserialize)]
struct WrittenImage {
    #[serde(default)]
    os: Option<String>,
    #[serde(default)]
    architecture: Option<String>,
    #[serde(default)]
    variant: Option<String>,
    #[serde(default)]
    created: Option<String>,
    #[serde(default)]
    config: Option<WrittenConfig>,
    rootfs: WrittenRootfs,
}

#[derive(Deserialize, Default)]
struct WrittenConfig {
    #[serde(default, rename = "Env")]
    env: Option<Vec<String>>,
    #[serde(default, rename = "User")]
    user: Option<String>,
    #[serde(default, rename = "WorkingDir")]
    working_directory: Option<String>,
    #[serde(default, rename = "Entrypoint")]
    entrypoint: Option<Vec<String>>,
    #[serde(default, rename = "Cmd")]
    command: Option<Vec<String>>,
    #[serde(default, rename = "Labels")]
    labels: Option<BTreeMap<String, String>>,
}

#[derive(Deserialize)]
struct WrittenRootfs {
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    diff_ids: Option<Vec<String>>,
}

impl ImageConfig {
    /// Parses a configuration.
    pub fn parse(bytes: &[u8]) -> Result<Self, BadImage> {
        let what = "configuration";
        let written: WrittenImage =
            serde_json::from_slice(bytes).map_err(|source| BadImage::Parse { what, source })?;
        if !matches!(written.rootfs.kind.as_str(), "" | "layers") {
            return Err(nonsense(what, format!("a root file system of type `{:.100}`", written.rootfs.kind)));
        }
        let contents = written.rootfs.diff_ids.unwrap_or_default();
        if contents.len() > IMAGE_LAYERS_MAX {
            return Err(nonsense(
                what,
                format!("it must have at most {IMAGE_LAYERS_MAX} layers, got {}", contents.len()),
            ));
        }
        let contents = contents
            .iter()
            .map(|text| text.parse().map_err(|_| nonsense(what, format!("`{text:.100}` is not a digest"))))
            .collect::<Result<_, _>>()?;
        let config = written.config.unwrap_or_default();
        let env: Vec<(String, String)> = config
            .env
            .unwrap_or_default()
            .iter()
            .filter_map(|pair| pair.split_once('='))
            .filter(|(name, _)| !name.is_empty())
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        let (entrypoint, command) =
            (config.entrypoint.unwrap_or_default(), config.command.unwrap_or_default());
        let texts = env.iter().flat_map(|(name, value)| [name, value]);
        let texts =
            texts.chain(&entrypoint).chain(&command).chain(&config.user).chain(&config.working_directory);
        if texts.into_iter().any(|text| text.contains('\0')) {
            return Err(nonsense(what, "a string in it contains a NUL byte"));
        }
        let given = |text: Option<String>| text.filter(|text| !text.is_empty());
        Ok(Self {
            os: written.os.unwrap_or_default(),
            architecture: written.architecture.unwrap_or_default(),
            variant: given(written.variant),
            created: given(written.created),
            env,
            user: given(config.user),
            working_directory: given(config.working_directory).filter(|path| path.starts_with('/')),
            entrypoint,
            command,
            labels: config.labels.unwrap_or_default(),
            contents,
        })
    }

    /// Its platform, if given.
    pub fn platform(&self) -> Option<Platform> {
        (!self.os.is_empty() && !self.architecture.is_empty()).then(|| Platform {
            os: self.os.clone(),
            architecture: self.architecture.clone(),
            variant: self.variant.clone(),
        })
    }

    /// Whether commands run as another user than root by default.
    pub fn has_plain_user(&self) -> bool {
        let name = self.user.as_deref().unwrap_or_default();
        !matches!(name.split(':').next().unwrap_or_default(), "" | "0" | "root")
    }
}

/// One layer: the blob and its contents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerBlob {
    /// Digest of the blob.
    pub blob: Digest,
    /// Size of the blob.
    pub size: u64,
    /// Digest of the tar stream in it.
    pub contents: Digest,
    /// Name of the layer on disk: it identifies the layer and everything below it.
    pub layer: Digest,
}

/// An image with all its parts known, whether they are stored or not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Digest of its manifest.
    pub digest: Digest,
    /// Its configuration.
    pub config: ImageConfig,
    /// The configuration as it was written.
    pub config_text: String,
    /// The lowest first.
    pub layers: Vec<LayerBlob>,
}

impl Image {
    /// Combines a manifest and its configuration, after checking that they belong together.
    pub fn new(
        digest: Digest,
        layers: &[Descriptor],
        config_bytes: &[u8],
        wanted: &Platform,
    ) -> Result<Self, BadImage> {
        let config = ImageConfig::parse(config_bytes)?;
        if let Some(found) = config.platform()
            && wanted.fit(&found).is_none()
        {
            return Err(BadImage::WrongPlatform { found: found.to_string(), wanted: wanted.clone() });
        }
        if config.contents.len() != layers.len() {
            let why =
                format!("it lists {} layers, but the manifest lists {}", config.contents.len(), layers.len());
            return Err(nonsense("configuration", why));
        }
        let config_text = std::str::from_utf8(config_bytes)
            .map_err(|_| nonsense("configuration", "it is not UTF-8"))?
            .to_owned();
        let mut below = None;
        let layers = layers.iter().zip(&config.contents).map(|(blob, contents)| {
            let layer = chain(below, *contents);
            below = Some(layer);
            LayerBlob { blob: blob.digest, size: blob.size, contents: *contents, layer }
        });
        Ok(Self { digest, layers: layers.collect(), config, config_text })
    }

    /// Most bytes to download.
    pub fn size(&self) -> u64 {
        self.layers.iter().map(|layer| layer.size).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hash::digest_of;

    fn amd64() -> Platform {
        Platform::parse("linux/amd64").expect("a platform")
    }

    fn manifest(kind: &str, layer: &str) -> String {
        let digest = digest_of(b"x");
        format!(
            r#"{{"schemaVersion": 2, "config": {{"mediaType": "{kind}", "digest": "{digest}", "size": 7}},
               "layers": [{{"mediaType": "{layer}", "digest": "{digest}", "size": 9}}]}}"#
        )
    }

    #[test]
    fn manifests_of_both_families_are_read() {
        for (config, layer) in [
            ("application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar+zstd"),
            ("application/vnd.oci.image.config.v1+json", "application/vnd.oci.image.layer.v1.tar"),
            (
                "application/vnd.docker.container.image.v1+json",
                "application/vnd.docker.image.rootfs.diff.tar.gzip",
            ),
        ] {
            let document = Document::parse(manifest(config, layer).as_bytes()).expect("it parses");
            assert!(matches!(document, Document::Manifest { layers, .. } if layers[0].size == 9));
        }
    }

    #[test]
    fn what_is_no_image_is_refused_with_its_reason() {
        let oci = "application/vnd.oci.image.config.v1+json";
        for (config, layer) in [
            ("application/vnd.cncf.helm.config.v1+json", "application/vnd.oci.image.layer.v1.tar"),
            (oci, "application/vnd.oci.image.layer.v1.tar+encrypted"),
            (oci, "application/vnd.in-toto+json"),
        ] {
            let refused = Document::parse(manifest(config, layer).as_bytes());
            assert!(matches!(refused, Err(BadImage::NotAnImage { .. })), "{refused:?}");
        }
        let digest = digest_of(b"x");
        for text in [
            "{}".to_owned(),
            "[]".into(),
            r#"{"schemaVersion": 1}"#.into(),
            format!(r#"{{"manifests": [], "layers": [], "config": {{"digest": "{digest}", "size": 1}}}}"#),
            r#"{"manifests": [{"digest": "sha256:12", "size": 1}]}"#.into(),
            format!(r#"{{"manifests": [{{"digest": "{digest}", "size": -1}}]}}"#),
            format!(r#"{{"manifests": [{{"digest": "{digest}", "size": 99999999999999999}}]}}"#),
        ] {
            Document::parse(text.as_bytes()).expect_err(&text);
        }
    }

    #[test]
    fn the_platform_that_fits_best_is_chosen() {
        let index = |platforms: &[&str]| -> Vec<(Descriptor, Option<Platform>)> {
            let entry = |text: &&str| {
                let descriptor = Descriptor {
                    digest: digest_of(text.as_bytes()),
                    size: 1,
                    media_type: String::new(),
                    name: None,
                };
                (descriptor, Platform::parse(text))
            };
            platforms.iter().map(entry).collect()
        };
        #[track_caller]
        fn check(index: &[(Descriptor, Option<Platform>)], wanted: &str, chosen: Option<&str>) {
            let wanted = Platform::parse(wanted).expect("a platform");
            let found = choose(index, &wanted).ok().map(|descriptor| descriptor.digest);
            assert_eq!(found, chosen.map(|text| digest_of(text.as_bytes())));
        }
        let many = index(&[
            "linux/amd64/v3",
            "linux/amd64",
            "linux/arm/v6",
            "linux/arm/v7",
            "linux/arm64/v8",
            "windows/amd64",
            "unknown/unknown",
        ]);
        check(&many, "linux/amd64", Some("linux/amd64"));
        check(&many, "linux/amd64/v3", Some("linux/amd64/v3"));
        check(&many, "linux/arm64", Some("linux/arm64/v8"));
        check(&many, "linux/arm/v7", Some("linux/arm/v7"));
        check(&many, "linux/riscv64", None);
        check(&index(&["none"]), "linux/amd64", Some("none"));
        assert!(
            ["", "linux", "linux/", "a/b/c/d", "linux/../x"]
                .iter()
                .all(|text| Platform::parse(text).is_none())
        );
    }

    #[test]
    fn a_configuration_is_honoured_as_far_as_it_makes_sense() {
        let text = format!(
            r#"{{"os": "linux", "architecture": "amd64", "config": {{"Env": ["A=b=c", "nonsense", "=x", "E="],
               "User": "node", "WorkingDir": "/srv", "Entrypoint": ["/run"], "Cmd": null, "Labels": {{"a": "b"}}}},
               "rootfs": {{"type": "layers", "diff_ids": ["{}"]}}}}"#,
            digest_of(b"x")
        );
        let config = ImageConfig::parse(text.as_bytes()).expect("it parses");
        assert_eq!(config.env, [("A".to_owned(), "b=c".to_owned()), ("E".to_owned(), String::new())]);
        assert!(config.has_plain_user() && config.command.is_empty());
        let blob = Descriptor { digest: digest_of(b"y"), size: 5, media_type: String::new(), name: None };
        let image = Image::new(digest_of(b"m"), std::slice::from_ref(&blob), text.as_bytes(), &amd64())
            .expect("good");
        assert_eq!((image.layers[0].layer, image.size()), (digest_of(b"x"), 5));
        let refused = Image::new(digest_of(b"m"), &[blob.clone(), blob], text.as_bytes(), &amd64());
        assert!(matches!(refused, Err(BadImage::Nonsense { .. })));
        let arm = Platform::parse("linux/arm64").expect("a platform");
        assert!(matches!(
            Image::new(digest_of(b"m"), &[], text.as_bytes(), &arm),
            Err(BadImage::WrongPlatform { .. })
        ));
        for (user, plain) in [("", false), ("0", false), ("root:root", false), ("0:5", false), ("1000", true)]
        {
            let config = ImageConfig { user: Some(user.into()), ..ImageConfig::default() };
            assert_eq!(config.has_plain_user(), plain, "{user}");
        }
    }

    proptest! {
        #[test]
        fn rubbish_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = Document::parse(&bytes);
            let _ = ImageConfig::parse(&bytes);
        }
    }
}
