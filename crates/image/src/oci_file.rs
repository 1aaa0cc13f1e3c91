//! Writes an image with one layer as an OCI archive: everything around the layer's bytes, which are sent as they are.
//!
//! Pure. The archive is a tar stream of an OCI image layout, as `skopeo`, `umoci` and `podman` read it, and `archive_file` too.

use archive::{BLOCK, Entry, EntryKind, entry_header};
use serde_json::{Value, json};
use wire::Digest;

use crate::hash::digest_of;
use crate::manifest::{BadImage, Platform};

/// The tag of the only image, for tools that ask for one.
const TAG: &str = "latest";
const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";

/// The bytes before and after the layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// The documents, and the header of the layer.
    pub front: Vec<u8>,
    /// What fills the layer's last block, and the end.
    pub back: Vec<u8>,
    /// The length of the archive, with the layer.
    pub length: u64,
}

/// The frame of an archive. `config` is the configuration of the image that the files began with: how programs run is taken
/// from it. The layer is not compressed, so `layer` is the digest of its contents too.
pub fn frame(title: &str, config: &str, layer: Digest, layer_bytes: u64) -> Result<Frame, BadImage> {
    let parsed: Value =
        serde_json::from_str(config).map_err(|source| BadImage::Parse { what: "configuration", source })?;
    let platform = Platform::this();
    let text = |name: &str, default: &str| parsed[name].as_str().unwrap_or(default).to_owned();
    let (architecture, os) = (text("architecture", &platform.architecture), text("os", &platform.os));
    let mut config = json!({
        "architecture": architecture,
        "os": os,
        "config": parsed["config"].as_object().cloned().unwrap_or_default(),
        "rootfs": {"type": "layers", "diff_ids": [layer.to_string()]},
        "history": [{"created_by": "shoal snapshot export"}],
    });
    if let Some(variant) = parsed["variant"].as_str() {
        config["variant"] = variant.into();
    }
    let config = config.to_string();
    let manifest = json!({
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "config": descriptor("application/vnd.oci.image.config.v1+json", digest_of(config.as_bytes()), config.len() as u64),
        "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", layer, layer_bytes)],
        "annotations": {"org.opencontainers.image.title": title},
    })
    .to_string();
    let mut listed = descriptor(MANIFEST_TYPE, digest_of(manifest.as_bytes()), manifest.len() as u64);
    listed["annotations"] = json!({"org.opencontainers.image.ref.name": TAG});
    listed["platform"] = json!({"architecture": architecture, "os": os});
    let index = json!({"schemaVersion": 2, "mediaType": "application/vnd.oci.image.index.v1+json", "manifests": [listed]});

    let mut front = Vec::new();
    for directory in ["blobs/", "blobs/sha256/"] {
        front.extend(entry_header(&entry(directory.into(), EntryKind::Directory, 0)));
    }
    put(&mut front, "oci-layout".into(), br#"{"imageLayoutVersion":"1.0.0"}"#);
    put(&mut front, "index.json".into(), index.to_string().as_bytes());
    put(&mut front, blob(digest_of(manifest.as_bytes())), manifest.as_bytes());
    put(&mut front, blob(digest_of(config.as_bytes())), config.as_bytes());
    front.extend(entry_header(&entry(blob(layer), EntryKind::File, layer_bytes)));
    let padding = layer_bytes.next_multiple_of(BLOCK as u64) - layer_bytes;
    let back = vec![0; padding as usize + 2 * BLOCK];
    let length = front.len() as u64 + layer_bytes + back.len() as u64;
    Ok(Frame { front, back, length })
}

fn descriptor(media_type: &str, digest: Digest, size: u64) -> Value {
    json!({"mediaType": media_type, "digest": digest.to_string(), "size": size})
}

fn blob(digest: Digest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

fn entry(path: String, kind: EntryKind, size: u64) -> Entry {
    let mode = if kind == EntryKind::Directory { 0o755 } else { 0o644 };
    let (link, attributes) = (Vec::new(), Vec::new());
    Entry { path: path.into_bytes(), kind, mode, size, modified: 0, link, uid: 0, gid: 0, attributes }
}

fn put(to: &mut Vec<u8>, path: String, bytes: &[u8]) {
    to.extend(entry_header(&entry(path, EntryKind::File, bytes.len() as u64)));
    to.extend_from_slice(bytes);
    to.resize(to.len().next_multiple_of(BLOCK), 0);
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::archive_file::{Format, import};
    use crate::blobs::Blobs;

    #[test]
    fn what_is_written_is_read_back() {
        let layer = vec![0; 2 * BLOCK];
        let config = r#"{"architecture":"amd64","os":"linux","config":{"Env":["A=1"],"WorkingDir":"/srv"},"rootfs":{"diff_ids":[]}}"#;
        let digest = digest_of(&layer);
        let frame = frame("clean", config, digest, layer.len() as u64).expect("it is a configuration");
        let whole = [frame.front.as_slice(), &layer, &frame.back].concat();
        assert_eq!(whole.len() as u64, frame.length);
        let directory = tempfile::tempdir().expect("a directory");
        let blobs = Blobs::open(directory.path().to_owned()).expect("opened");
        let mut upload = blobs.upload().expect("a file");
        upload.file.write_all(&whole).expect("written");
        let platform = Platform { os: "linux".into(), architecture: "amd64".into(), variant: None };
        let name = crate::ImageRef::parse("localhost/x:1").expect("a name");
        let imported = import(upload, &blobs, Some(name), Format::Oci, &platform).expect("it is an archive");
        let [one] = imported.as_slice() else { panic!("one image: {imported:?}") };
        assert_eq!(one.image.config.working_directory.as_deref(), Some("/srv"));
        assert_eq!(one.image.layers.iter().map(|layer| layer.blob).collect::<Vec<_>>(), [digest]);
    }
}
