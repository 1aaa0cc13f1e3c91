//! The names of layers, computed from everything that a step depends on. They are the keys of the cache.

use archive::EntryKind;
use image::Digest;
use image::hash::Hasher;
use serde_json::json;

use super::builder::Builder;
use super::context::Context;
use super::copy::{Copy, user_of};
use super::steps::Work;
use crate::image::made;

/// Increased when steps change how they work, so that older layers are not reused.
const VERSION: u32 = 2;

impl Builder {
    /// The name of a step's layer: `word` is the instruction, `parts` what the step depends on besides the stage so
    /// far.
    pub(super) fn layer_name(&self, work: &Work, word: &str, parts: &[&[u8]]) -> Digest {
        let config = &work.rootfs.config;
        let context =
            json!([VERSION, word, config.env, config.user, config.cwd, work.pending, work.rootfs.over_host])
                .to_string();
        let below = work.rootfs.layers.last().map(|layer| layer.layer);
        let parts = [&[b"build", context.as_bytes()], parts].concat();
        made::name(&self.engine.shared().layer_names, &self.key.owner, below, &parts)
    }
}

impl Copy {
    /// What the layer depends on beside the files that are copied.
    pub(super) fn key(&self) -> Vec<u8> {
        match self.chown.as_deref().map(user_of) {
            None => json!([self.target, null, self.mode]),
            Some(user) => json!([self.target, "as", user, self.mode]),
        }
        .to_string()
        .into_bytes()
    }
}

/// Hashes the names, modes and contents of a file or directory. Times are left out, since they differ in every checkout.
pub(super) fn hash_part(context: &Context, path: &str, hasher: &mut Hasher) {
    let inside = format!("{path}/");
    for (name, found) in &context.entries {
        if path.is_empty() || name == path || name.starts_with(&inside) {
            let entry = &found.entry;
            let kind = match entry.kind {
                EntryKind::File => 'f',
                EntryKind::Directory => 'd',
                _ => 'l',
            };
            let link = String::from_utf8_lossy(&entry.link);
            let text = json!([path, name, kind.to_string(), entry.mode, link, found.contents.to_string()])
                .to_string();
            hasher.update(text.as_bytes());
        }
    }
}
