//! Images from a file: an OCI or Docker archive (`docker save`, `podman save`, `skopeo copy`), or a bare root file
//! system as a tar stream. Each may be compressed.
//!
//! The file is on disk and is read at most twice: once to find out what it is, and then by offset. No name in it
//! reaches the file system: its contents become blobs, which are named by digest. Everything here blocks.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::sync::Arc;

use archive::{Entries, EntryKind, UnpackError};
use serde::Deserialize;
use wire::Digest;
use wire::launch::LayerFault;

use crate::blobs::{Blobs, FREE_MIN, Holding, Upload};
use crate::hash::{Hashing, digest_of};
use crate::layer::{Compression, decompressed};
use crate::manifest::{
    BadImage, DOCUMENT_MAX, Descriptor, Document, INDEX_DEPTH_MAX, Image, ImageConfig, Platform, choose,
};
use crate::reference::ImageRef;

/// Most headers in one stream, as for layers.
const HEADERS_MAX: u64 = 8_000_000;
/// Most files in an archive of images: layers, configurations and manifests. A root file system may have more.
const MEMBERS_MAX: usize = 20_000;
/// Most images in one archive.
const IMAGES_MAX: usize = 100;
/// Most links to follow from one member to another.
const LINKS_MAX: usize = 8;
/// Size of the read buffer.
const BUFFER: usize = 256 * 1024;

/// The format of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Detect it.
    #[default]
    Auto,
    /// An OCI layout as a tar stream.
    Oci,
    /// What `docker save` writes.
    Docker,
    /// A root file system as a tar stream.
    Rootfs,
}

/// An image whose blobs are all stored.
#[derive(Debug)]
pub struct Imported {
    /// The image.
    pub image: Image,
    /// Its name in the archive, or the caller's.
    pub names: Vec<ImageRef>,
    /// Its blobs, pinned.
    pub blobs: HashMap<Digest, Holding>,
}

/// Why a file cannot be imported.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// An error of the daemon's own disk.
    #[error("cannot {doing}")]
    Io {
        /// What was being done; reads after "cannot".
        doing: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// Not a tar stream, or a truncated one.
    #[error("the archive is damaged: {why}")]
    Damaged {
        /// What is wrong.
        why: String,
    },
    /// A feature that is not supported, by rule.
    #[error("the archive contains {what}, which is not supported")]
    Unsupported {
        /// The feature.
        what: String,
    },
    /// The file does not have the given format.
    #[error("the file is not {what}")]
    OtherFormat {
        /// The given format.
        what: &'static str,
    },
    /// A missing member.
    #[error("the archive refers to `{name}`, which it does not contain")]
    Missing {
        /// The member.
        name: String,
    },
    /// Invalid documents.
    #[error("an image in the archive cannot be used")]
    BadImage {
        /// Why.
        source: Box<BadImage>,
    },
    /// A member does not match its digest.
    #[error("`{name}` in the archive must have the digest in its name, got {found}")]
    Corrupt {
        /// The member.
        name: String,
        /// The digest of its bytes.
        found: Digest,
    },
    /// The disk has no room.
    #[error("the archive needs more than the {free} bytes that are free")]
    DiskFull {
        /// On the disk.
        free: u64,
    },
    /// Neither the archive nor the caller names the image.
    #[error("the archive does not name its image")]
    NoName,
    /// One name for several images.
    #[error("the archive contains {count} images, which cannot share one name")]
    ManyImages {
        /// Number of images.
        count: usize,
    },
}

fn read_failed(source: io::Error) -> ArchiveError {
    ArchiveError::Io { doing: "read the archive", source }
}

fn bad_image(source: BadImage) -> ArchiveError {
    ArchiveError::BadImage { source: Box::new(source) }
}

fn nonsense(what: &'static str, why: impl Into<String>) -> ArchiveError {
    bad_image(BadImage::Nonsense { what, why: why.into() })
}

/// Takes all images of a file that was sent.
pub fn import(
    upload: Upload,
    blobs: &Arc<Blobs>,
    name: Option<ImageRef>,
    format: Format,
    platform: &Platform,
) -> Result<Vec<Imported>, ArchiveError> {
    let seen = look_through(&upload.file)?;
    let is_oci = seen.members.contains_key("oci-layout") && seen.members.contains_key("index.json");
    let is_docker = seen.members.contains_key("manifest.json");
    let format = match format {
        // An archive of a newer Docker is both; the index tells more.
        Format::Auto if is_oci => Format::Oci,
        Format::Auto if is_docker => Format::Docker,
        Format::Auto => Format::Rootfs,
        Format::Oci if !is_oci => return Err(ArchiveError::OtherFormat { what: "an OCI archive" }),
        Format::Docker if !is_docker => return Err(ArchiveError::OtherFormat { what: "a Docker archive" }),
        named => named,
    };
    if format == Format::Rootfs {
        let name = name.ok_or(ArchiveError::NoName)?;
        return Ok(vec![rootfs(upload, &seen, name, platform)?]);
    }
    let file = match seen.compression {
        Compression::None => upload,
        Compression::Gzip | Compression::Zstd => expand(&upload, blobs, seen.length)?,
    };
    let mut parts = Parts { file: &file.file, members: &seen.members, blobs, held: HashMap::new() };
    let imported = match format {
        Format::Oci => parts.oci(platform, is_docker)?,
        Format::Docker => parts.docker(platform)?,
        Format::Auto | Format::Rootfs => unreachable!("it was decided above"),
    };
    named(imported, name)
}

/// Names the images as the caller wants, or checks that they have names.
fn named(mut imported: Vec<Imported>, name: Option<ImageRef>) -> Result<Vec<Imported>, ArchiveError> {
    match name {
        Some(name) => match imported.as_mut_slice() {
            [one] => one.names = vec![name],
            many => return Err(ArchiveError::ManyImages { count: many.len() }),
        },
        None if imported.iter().any(|one| one.names.is_empty()) => return Err(ArchiveError::NoName),
        None => {}
    }
    match imported.len() {
        0 => Err(nonsense("index", "it lists no image")),
        _ => Ok(imported),
    }
}

/// The contents of a file.
struct Seen {
    compression: Compression,
    /// Digest of the file itself.
    digest: Digest,
    size: u64,
    /// Digest of the tar stream in it.
    contents: Digest,
    length: u64,
    /// Members by name, unless there are too many.
    members: HashMap<String, Member>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Member {
    /// Offset in the tar stream.
    File { offset: u64, size: u64 },
    /// A link to another member.
    Link(String),
}

/// Reads a file once.
fn look_through(mut file: &File) -> Result<Seen, ArchiveError> {
    file.seek(SeekFrom::Start(0)).map_err(read_failed)?;
    let mut beginning = [0; 16];
    let length = read_up_to(&mut file, &mut beginning).map_err(read_failed)?;
    let compression = Compression::of(&beginning[..length]).map_err(fault)?;
    file.seek(SeekFrom::Start(0)).map_err(read_failed)?;

    let mut raw = Hashing::new(file);
    let mut members = HashMap::new();
    let (length, contents) = {
        let stream = decompressed(BufReader::with_capacity(BUFFER, &mut raw)).map_err(fault)?;
        let mut entries = Entries::with_limit(Hashing::new(stream), HEADERS_MAX);
        while let Some(entry) = entries.next_entry().map_err(damaged)? {
            let offset = entries.get_mut().bytes;
            let member = match entry.kind {
                EntryKind::File => Member::File { offset, size: entry.size },
                EntryKind::Symlink => Member::Link(beside(&entry.path, &entry.link)),
                EntryKind::HardLink => Member::Link(plain(&entry.link)),
                EntryKind::Directory | EntryKind::Fifo | EntryKind::Other => continue,
            };
            if members.len() < MEMBERS_MAX {
                members.insert(plain(&entry.path), member);
            }
        }
        let hashing = entries.into_inner();
        (hashing.bytes, hashing.finish())
    };
    // Bytes after a compressed stream are not part of it, but count for the file's digest.
    io::copy(&mut raw, &mut io::sink()).map_err(read_failed)?;
    let size = raw.bytes;
    Ok(Seen { compression, digest: raw.finish(), size, contents, length, members })
}

fn read_up_to(from: &mut impl Read, into: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    while filled < into.len() {
        match from.read(&mut into[filled..])? {
            0 => break,
            length => filled += length,
        }
    }
    Ok(filled)
}

/// A name without a meaningless prefix.
fn plain(path: &[u8]) -> String {
    let text = String::from_utf8_lossy(path);
    text.split('/').filter(|part| !matches!(*part, "" | ".")).collect::<Vec<_>>().join("/")
}

/// Target of a link within the archive.
fn beside(path: &[u8], target: &[u8]) -> String {
    let (path, target) = (plain(path), String::from_utf8_lossy(target).into_owned());
    let mut parts: Vec<&str> = path.split('/').collect();
    parts.pop();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// Decompresses the tar stream to a file of its own, so that it can be read by offset.
fn expand(upload: &Upload, blobs: &Arc<Blobs>, length: u64) -> Result<Upload, ArchiveError> {
    let free = blobs.free().map_err(read_failed)?;
    if free < length.saturating_add(FREE_MIN) {
        return Err(ArchiveError::DiskFull { free });
    }
    let mut file = &upload.file;
    file.seek(SeekFrom::Start(0)).map_err(read_failed)?;
    let mut stream = decompressed(BufReader::with_capacity(BUFFER, file)).map_err(fault)?;
    let mut expanded = blobs.upload().map_err(read_failed)?;
    io::copy(&mut stream, &mut expanded.file)
        .map_err(|source| ArchiveError::Io { doing: "decompress the archive", source })?;
    Ok(expanded)
}

/// The whole file becomes the only layer of an image.
fn rootfs(
    upload: Upload,
    seen: &Seen,
    name: ImageRef,
    platform: &Platform,
) -> Result<Imported, ArchiveError> {
    let config = serde_json::json!({
        "os": platform.os, "architecture": platform.architecture, "config": {},
        "rootfs": {"type": "layers", "diff_ids": [seen.contents.to_string()]},
    });
    let layer = Descriptor { digest: seen.digest, size: seen.size, media_type: String::new(), name: None };
    let image = made_up(&config.to_string(), vec![layer], platform)?;
    let keep = |source| ArchiveError::Io { doing: "store the archive", source };
    let holding = upload.keep(seen.digest).map_err(keep)?;
    Ok(Imported { image, names: vec![name], blobs: HashMap::from([(seen.digest, holding)]) })
}

/// An image without a manifest. The generated manifest lists the same parts in the same way each time, so it has one
/// digest.
fn made_up(config: &str, layers: Vec<Descriptor>, platform: &Platform) -> Result<Image, ArchiveError> {
    let named = layers.iter().map(|layer| {
        let media_type = "application/vnd.oci.image.layer.v1.tar";
        serde_json::json!({"mediaType": media_type, "digest": layer.digest.to_string(), "size": layer.size})
    });
    let manifest = serde_json::json!({
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {
            "mediaType": "application/vnd.oci.image.config.v1+json",
            "digest": digest_of(config.as_bytes()).to_string(),
            "size": config.len(),
        },
        "layers": named.collect::<Vec<_>>(),
    });
    let digest = digest_of(manifest.to_string().as_bytes());
    Image::new(digest, &layers, config.as_bytes(), platform).map_err(bad_image)
}

/// An archive of images, read by offset.
struct Parts<'a> {
    file: &'a File,
    members: &'a HashMap<String, Member>,
    blobs: &'a Arc<Blobs>,
    /// Stored members by name, with their lengths.
    held: HashMap<String, (Digest, u64)>,
}

#[derive(Deserialize)]
struct DockerManifest {
    #[serde(rename = "Config")]
    config: String,
    #[serde(default, rename = "RepoTags")]
    tags: Option<Vec<String>>,
    #[serde(default, rename = "Layers")]
    layers: Option<Vec<String>>,
}

impl Parts<'_> {
    fn member(&self, name: &str) -> Result<(u64, u64), ArchiveError> {
        let missing = || ArchiveError::Missing { name: name.chars().take(200).collect() };
        let mut at = name;
        for _ in 0..LINKS_MAX {
            match self.members.get(at).ok_or_else(missing)? {
                Member::File { offset, size } => return Ok((*offset, *size)),
                Member::Link(to) => at = to,
            }
        }
        Err(missing())
    }

    /// A document, read completely.
    fn document(&self, name: &str) -> Result<Vec<u8>, ArchiveError> {
        let (offset, size) = self.member(name)?;
        if size > DOCUMENT_MAX as u64 {
            return Err(nonsense("archive", format!("`{name:.200}` has {size} bytes")));
        }
        let mut file = self.file;
        file.seek(SeekFrom::Start(offset)).map_err(read_failed)?;
        let mut bytes = vec![0; size as usize];
        file.read_exact(&mut bytes).map_err(read_failed)?;
        Ok(bytes)
    }

    /// A document of an OCI layout, named by its digest.
    fn blob_document(&self, digest: Digest) -> Result<Vec<u8>, ArchiveError> {
        let name = blob_name(digest);
        let bytes = self.document(&name)?;
        match digest_of(&bytes) {
            found if found == digest => Ok(bytes),
            found => Err(ArchiveError::Corrupt { name, found }),
        }
    }

    /// Stores a layer as a blob.
    fn keep(
        &mut self,
        name: &str,
        expected: Option<Digest>,
        holdings: &mut HashMap<Digest, Holding>,
    ) -> Result<(Digest, u64), ArchiveError> {
        if let Some((digest, size)) = self.held.get(name) {
            holdings.entry(*digest).or_insert_with(|| self.blobs.hold(*digest));
            return Ok((*digest, *size));
        }
        let (offset, size) = self.member(name)?;
        let mut file = self.file;
        file.seek(SeekFrom::Start(offset)).map_err(read_failed)?;
        let mut bytes = BufReader::with_capacity(BUFFER, file).take(size);
        let put = self.blobs.put(&mut bytes, expected);
        match put.map_err(|source| ArchiveError::Io { doing: "store a layer", source })? {
            Ok((holding, size)) => {
                let digest = holding.digest();
                holdings.insert(digest, holding);
                self.held.insert(name.to_owned(), (digest, size));
                Ok((digest, size))
            }
            Err(found) => Err(ArchiveError::Corrupt { name: name.chars().take(200).collect(), found }),
        }
    }

    fn oci(&mut self, platform: &Platform, has_docker: bool) -> Result<Vec<Imported>, ArchiveError> {
        let Document::Index(index) = Document::parse(&self.document("index.json")?).map_err(bad_image)?
        else {
            return Err(nonsense("index", "it is a manifest, not an index"));
        };
        if index.len() > IMAGES_MAX {
            return Err(nonsense("index", format!("it has {} entries", index.len())));
        }
        // Different names are different images; one name, or none, is one image for several platforms.
        let mut names: Vec<Option<String>> = Vec::new();
        for (descriptor, _) in &index {
            if !names.contains(&descriptor.name) {
                names.push(descriptor.name.clone());
            }
        }
        // Docker writes the full name only into its own manifest.
        let docker_tags = if has_docker { self.docker_tags()? } else { Vec::new() };
        let mut imported = Vec::new();
        for name in names {
            let mut entries: Vec<_> =
                index.iter().filter(|(descriptor, _)| descriptor.name == name).cloned().collect();
            let mut found = None;
            for _ in 0..=INDEX_DEPTH_MAX {
                let chosen = choose(&entries, platform).map_err(bad_image)?.digest;
                let bytes = self.blob_document(chosen)?;
                match Document::parse(&bytes).map_err(bad_image)? {
                    Document::Index(inner) => entries = inner,
                    Document::Manifest { config, layers } => {
                        found = Some((chosen, config, layers));
                        break;
                    }
                }
            }
            let Some((digest, config, layers)) = found else {
                return Err(nonsense("index", "its indexes are nested too deep"));
            };
            let config = self.blob_document(config.digest)?;
            let image = Image::new(digest, &layers, &config, platform).map_err(bad_image)?;
            let mut blobs = HashMap::new();
            for layer in &layers {
                let (_, size) = self.keep(&blob_name(layer.digest), Some(layer.digest), &mut blobs)?;
                if size != layer.size {
                    let why = format!("{} has {size} bytes instead of {}", layer.digest, layer.size);
                    return Err(nonsense("manifest", why));
                }
            }
            let mut names: Vec<ImageRef> = name.iter().filter_map(|name| whole_name(name)).collect();
            if names.is_empty() && index.len() == 1 {
                names = docker_tags.clone();
            }
            imported.push(Imported { image, names, blobs });
        }
        Ok(imported)
    }

    fn docker_manifests(&self) -> Result<Vec<DockerManifest>, ArchiveError> {
        let what = "manifest";
        let list: Vec<DockerManifest> = serde_json::from_slice(&self.document("manifest.json")?)
            .map_err(|source| bad_image(BadImage::Parse { what, source }))?;
        match list.len() {
            0..=IMAGES_MAX => Ok(list),
            count => Err(nonsense(what, format!("it has {count} entries"))),
        }
    }

    fn docker_tags(&self) -> Result<Vec<ImageRef>, ArchiveError> {
        let manifests = self.docker_manifests()?;
        let tags = manifests.iter().flat_map(|manifest| manifest.tags.iter().flatten());
        Ok(tags.filter_map(|tag| ImageRef::parse(tag).ok()).collect())
    }

    fn docker(&mut self, platform: &Platform) -> Result<Vec<Imported>, ArchiveError> {
        let mut imported = Vec::new();
        for manifest in self.docker_manifests()? {
            let config = self.document(&plain(manifest.config.as_bytes()))?;
            let checked = ImageConfig::parse(&config).map_err(bad_image)?;
            let paths = manifest.layers.unwrap_or_default();
            // Before anything is stored: a list of a million layers is short.
            if paths.len() != checked.contents.len() {
                let why = format!(
                    "it lists {} layers, but the manifest lists {}",
                    checked.contents.len(),
                    paths.len()
                );
                return Err(nonsense("configuration", why));
            }
            let mut blobs = HashMap::new();
            let mut layers = Vec::new();
            for path in paths {
                let (digest, size) = self.keep(&plain(path.as_bytes()), None, &mut blobs)?;
                layers.push(Descriptor { digest, size, media_type: String::new(), name: None });
            }
            let config =
                String::from_utf8(config).map_err(|_| nonsense("configuration", "it is not UTF-8"))?;
            let image = made_up(&config, layers, platform)?;
            let names = manifest.tags.unwrap_or_default();
            let names = names.iter().filter_map(|tag| ImageRef::parse(tag).ok()).collect();
            imported.push(Imported { image, names, blobs });
        }
        Ok(imported)
    }
}

fn blob_name(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

/// A name that is more than a tag.
fn whole_name(name: &str) -> Option<ImageRef> {
    name.contains(['/', ':']).then(|| ImageRef::parse(name).ok()).flatten()
}

fn fault(fault: LayerFault) -> ArchiveError {
    match fault {
        LayerFault::Unsupported { what } => ArchiveError::Unsupported { what },
        other => ArchiveError::Damaged { why: other.to_string() },
    }
}

fn damaged(error: UnpackError) -> ArchiveError {
    match error {
        UnpackError::Read { source } if source.raw_os_error().is_some() => read_failed(source),
        UnpackError::Read { source } => ArchiveError::Damaged { why: source.to_string() },
        UnpackError::Unsupported { what } => ArchiveError::Unsupported { what: what.into() },
        other => ArchiveError::Damaged { why: other.to_string() },
    }
}
