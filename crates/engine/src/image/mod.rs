//! Which images are stored, their names, and who uses them.
//!
//! The crate `image` handles bytes and the backend handles files; this module ties them together: names and aliases,
//! one pull for all callers that want the same image, references, and the collection of unused images. Read in this
//! order: this file has the images and their names, `pull` adds them, `collect` removes them.
//!
//! Images are visible to all owners of the machine, except those that were pulled with a caller's own credentials:
//! these are visible to that caller's owner alone. The same holds for layers: an owner gets a layer that is stored
//! only if that owner, or somebody without credentials, has downloaded it before; anybody else downloads it again.

mod collect;
pub(crate) mod made;
pub(crate) mod pull;
pub(crate) mod slots;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use image::{Blobs, Digest, ImageConfig, Registries};
use wire::SandboxId;
use wire::launch::{LayerFacts, Rootfs};

pub use crate::error::{BuildError, ImageFault};
pub use crate::model::template::HOST;
pub use image::archive_file::{ArchiveError, Format};
pub use image::blobs::Upload;
pub use image::credentials::BadDockerConfig;
pub use image::dockerfile::DockerfileError;
pub use image::registry::{Mirror, RegistrySettings, Transport, is_registry};
pub use image::{BadImage, BadReference, Credentials, DockerConfig, ImageRef, Platform, RegistryError};
pub use pull::{LayerProgress, LayerState, Pull, PullProgress, PullSpec};

use self::collect::BuildCache;
use self::slots::Slots;
use crate::Shared;
use crate::db::{AliasRow, ImageRow, LayerRow, LoadedImages, NameRow};
use crate::error::{DbError, EngineError, Field};
use crate::model::{Key, Owner};

pub(crate) use collect::keep_collected;
pub(crate) use pull::{Pulls, pull};

/// Layers that are downloaded at the same time, over all pulls, and for one owner: enough to use the bandwidth, few
/// enough that registries accept them.
const DOWNLOADS_MAX: usize = 24;
const DOWNLOADS_OWNER_MAX: usize = 6;
/// Layers that are unpacked at the same time, and for one owner.
const UNPACKS_MAX: usize = 4;
const UNPACKS_OWNER_MAX: usize = 2;
/// Archives of snapshots that exist at the same time, and for one owner: each takes as much of the disk as the files in it.
const EXPORTS_MAX: usize = 8;
const EXPORTS_OWNER_MAX: usize = 2;
/// Pulls of one owner that ask registries at the same time, and of all.
const PULLS_MAX: usize = 64;
const PULLS_OWNER_MAX: usize = 8;
/// Most layers that are kept for later builds: a hundred builds with as many steps.
const RECENT_MAX: usize = 10_000;
/// Most aliases.
const ALIASES_MAX: usize = 10_000;

/// How images are pulled.
#[derive(Debug, Clone, Default)]
pub struct ImageSettings {
    /// Configuration of registries.
    pub registries: RegistrySettings,
}

/// What a caller may name as an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageName {
    /// The machine itself.
    Host,
    /// An image that is pulled or imported.
    Reference(ImageRef),
}

impl ImageName {
    /// `host`, or a reference.
    pub fn parse(text: &str) -> Result<Self, EngineError> {
        if text == HOST {
            return Ok(Self::Host);
        }
        let bad = |error: BadReference| Field::Image.must(format!("be `host` or a reference: {error}"));
        ImageRef::parse(text).map(Self::Reference).map_err(bad)
    }

    /// The form that rows store.
    pub fn canonical(&self) -> String {
        match self {
            Self::Host => HOST.into(),
            Self::Reference(reference) => reference.to_string(),
        }
    }

    /// The form for people.
    pub fn familiar(&self) -> String {
        match self {
            Self::Host => HOST.into(),
            Self::Reference(reference) => reference.familiar(),
        }
    }
}

/// The form for people, of a name from a row.
pub fn familiar(canonical: &str) -> String {
    ImageName::parse(canonical).map_or_else(|_| canonical.to_owned(), |name| name.familiar())
}

/// A name as it was given, and the image that it resolves to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub name: ImageName,
    /// The requested name, if that is an alias.
    pub alias: Option<String>,
}

/// A stored image.
#[derive(Debug)]
pub struct StoredImage {
    /// Digest of its manifest.
    pub digest: Digest,
    /// How its programs run.
    pub config: ImageConfig,
    /// The configuration as it was written.
    pub config_text: String,
    /// Whether its layers are over the machine's own files, as in the image `host`.
    pub over_host: bool,
    /// The lowest first; the last is Shoal's own.
    pub layers: Vec<StoredLayer>,
    /// When it was stored.
    pub created_at: SystemTime,
}

/// A stored layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredLayer {
    /// Its name on disk.
    pub layer: Digest,
    /// Digest of the downloaded blob; none if Shoal made the layer.
    pub blob: Option<Digest>,
    /// Size of the blob.
    pub size: u64,
    /// Statistics of unpacking it.
    pub facts: LayerFacts,
}

impl StoredImage {
    /// What a backend mounts for it.
    pub(crate) fn rootfs(&self) -> Rootfs {
        let layers = self.layers.iter().rev().map(|layer| layer.layer).collect();
        match self.over_host {
            false => Rootfs::Layers(layers),
            true if layers.is_empty() => Rootfs::Host,
            true => Rootfs::OverHost(layers),
        }
    }

    /// Number of downloaded bytes.
    pub fn size(&self) -> u64 {
        self.layers.iter().map(|layer| layer.size).sum()
    }

    /// Total size of its files.
    pub fn unpacked(&self) -> u64 {
        self.layers.iter().map(|layer| layer.facts.bytes).sum()
    }
}

/// An image as it is shown.
#[derive(Debug, Clone)]
pub struct ImageInfo {
    /// The image.
    pub image: Arc<StoredImage>,
    /// Its names, as far as the owner who asks may see them.
    pub names: Vec<String>,
    /// Aliases that an operator gave to those names.
    pub aliases: Vec<String>,
    /// Its owner, if it is private.
    pub owner: Option<Owner>,
    /// How many sandboxes were made from it and still exist.
    pub sandboxes: usize,
}

/// An alias.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alias {
    /// The alias.
    pub name: String,
    /// What it stands for.
    pub target: String,
    /// When it was set.
    pub created_at: SystemTime,
}

/// What to do with the name of an image that sandboxes were made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InUse {
    /// Keep the last name, and return an error.
    Refuse,
    /// Remove it. The sandboxes keep what they need, and the rest is removed with the last of them.
    Release,
}

/// What a collection removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Images without a name and without a sandbox.
    pub images: usize,
    /// Layers without an image.
    pub layers: usize,
    /// Total size of the files of those layers.
    pub bytes: u64,
}

/// All images of one data directory.
pub(crate) struct Images {
    registries: Arc<Registries>,
    pub(crate) blobs: Arc<Blobs>,
    stock: Mutex<Stock>,
    pulls: Pulls,
    /// Layers that are in use before an image has them.
    pins: Arc<Mutex<HashMap<Digest, usize>>>,
    /// Layers of recent build steps, and when a build last used each: the cache of builds.
    recent: Arc<Mutex<HashMap<Digest, SystemTime>>>,
    locks: Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>,
    /// Held from a change of the rows of images, names and aliases until memory shows the same: changes in another
    /// order would leave memory wrong until the next start.
    naming: tokio::sync::Mutex<()>,
    asking: Slots,
    downloads: Slots,
    unpacks: Slots,
    /// Archives of snapshots that are stored while a client reads them.
    pub(crate) exports: Slots,
}

/// The contents of the rows, in memory.
#[derive(Default)]
pub(crate) struct Stock {
    images: HashMap<Digest, Arc<StoredImage>>,
    /// By name and owner; the empty owner means everyone.
    pub names: BTreeMap<(String, String), NameRow>,
    aliases: BTreeMap<String, Alias>,
}

impl Images {
    /// Loads the stored images. Blocks while it opens a directory.
    pub fn open(config: &crate::EngineConfig, loaded: &LoadedImages) -> Result<Self, EngineError> {
        let directory = config.data_dir.join("images/blobs");
        let blobs = Blobs::open(directory.clone()).map_err(|source| EngineError::Store {
            doing: "open the directory of blobs",
            source: DbError::Create { path: directory, source },
        })?;
        let mut stock = Stock::default();
        let layers: HashMap<Digest, &LayerRow> = loaded.layers.iter().map(|row| (row.layer, row)).collect();
        for row in &loaded.images {
            match stored(row, &layers) {
                Ok(image) => drop(stock.images.insert(row.digest, Arc::new(image))),
                Err(error) => {
                    tracing::error!(image = %row.digest, %error, "an image's configuration cannot be read any more");
                }
            }
        }
        for row in &loaded.names {
            stock.names.insert((row.name.clone(), row.owner.clone()), row.clone());
        }
        for AliasRow { name, target, created_at } in loaded.aliases.iter().cloned() {
            stock.aliases.insert(name.clone(), Alias { name, target, created_at });
        }
        Ok(Self {
            registries: Arc::new(Registries::new(config.images.registries.clone())),
            blobs,
            stock: Mutex::new(stock),
            pulls: Pulls::default(),
            pins: Arc::default(),
            recent: Arc::default(),
            locks: Mutex::default(),
            naming: tokio::sync::Mutex::default(),
            asking: Slots::new(PULLS_MAX, PULLS_OWNER_MAX),
            downloads: Slots::new(DOWNLOADS_MAX, DOWNLOADS_OWNER_MAX),
            unpacks: Slots::new(UNPACKS_MAX, UNPACKS_OWNER_MAX),
            exports: Slots::new(EXPORTS_MAX, EXPORTS_OWNER_MAX),
        })
    }

    pub(crate) fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all pulls.
    pub fn halt(&self) {
        self.pulls.halt();
    }

    /// Resolves a caller's name for an image.
    pub fn choose(&self, text: &str) -> Result<Choice, EngineError> {
        let asked = ImageName::parse(text)?;
        let target = self.stock().aliases.get(&asked.canonical()).map(|alias| alias.target.clone());
        match target {
            None => Ok(Choice { name: asked, alias: None }),
            Some(target) => Ok(Choice { name: ImageName::parse(&target)?, alias: Some(asked.familiar()) }),
        }
    }

    /// The image that an owner's name refers to.
    pub fn find(&self, owner: &Owner, name: &str) -> Option<Arc<StoredImage>> {
        let stock = self.stock();
        let of = |owner: &str| stock.names.get(&(name.to_owned(), owner.to_owned()));
        let row = of(owner.as_str()).or_else(|| of(""))?;
        stock.images.get(&row.image).cloned()
    }

    /// What a backend would mount for an image, if it is stored.
    pub fn rootfs(&self, owner: &Owner, name: &ImageName) -> Option<Rootfs> {
        match name {
            ImageName::Host => Some(Rootfs::Host),
            ImageName::Reference(reference) => Some(self.find(owner, &reference.to_string())?.rootfs()),
        }
    }

    /// An image by digest.
    pub fn get(&self, digest: Digest) -> Option<Arc<StoredImage>> {
        self.stock().images.get(&digest).cloned()
    }

    /// One lock per layer, held while it is unpacked or removed.
    pub(crate) fn lock_of(&self, layer: Digest) -> Arc<tokio::sync::Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = locks.get(&layer).and_then(Weak::upgrade) {
            return lock;
        }
        locks.retain(|_, lock| lock.strong_count() > 0);
        let lock = Arc::new(tokio::sync::Mutex::new(()));
        locks.insert(layer, Arc::downgrade(&lock));
        lock
    }

    /// Keeps layers from being removed until an image has them.
    pub(crate) fn pin(&self, layers: impl IntoIterator<Item = Digest>) -> Pins {
        let layers: Vec<Digest> = layers.into_iter().collect();
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        for layer in &layers {
            *pins.entry(*layer).or_default() += 1;
        }
        Pins { pins: Arc::clone(&self.pins), layers }
    }

    /// Records that a build has used the layer of a step, so that the next builds find it.
    pub(crate) fn keep_recent(&self, layer: Digest) {
        let now = crate::observe::clock::now();
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.retain(|_, used| collect::is_recent(*used, now));
        if recent.len() >= RECENT_MAX
            && let Some(oldest) = recent.iter().min_by_key(|(_, used)| **used).map(|(layer, _)| *layer)
        {
            recent.remove(&oldest);
        }
        recent.insert(layer, now);
    }

    /// Removes those of `images` that nothing refers to any more.
    pub(crate) async fn drop_unused(shared: &Shared, images: Vec<Digest>) -> Result<(), EngineError> {
        let _naming = shared.images.naming.lock().await;
        let removed = shared.db.remove_unused_images(images).await?;
        let mut stock = shared.images.stock();
        for image in removed {
            stock.images.remove(&image);
        }
        Ok(())
    }

    fn info(&self, image: &Arc<StoredImage>, owner: &Owner, sandboxes: usize) -> Option<ImageInfo> {
        let stock = self.stock();
        let visible = |row: &&NameRow| {
            row.image == image.digest && (row.owner.is_empty() || row.owner == owner.as_str())
        };
        let rows: Vec<&NameRow> = stock.names.values().filter(visible).collect();
        let aliases = stock.aliases.values().filter(|alias| rows.iter().any(|row| row.name == alias.target));
        let private = rows.iter().all(|row| !row.owner.is_empty());
        // An image that only sandboxes hold is shown to the owners of those sandboxes, which is what was counted.
        (!rows.is_empty() || sandboxes > 0).then(|| ImageInfo {
            image: Arc::clone(image),
            aliases: aliases.map(|alias| familiar(&alias.name)).collect(),
            owner: (private && !rows.is_empty()).then(|| owner.clone()),
            names: rows.iter().map(|row| familiar(&row.name)).collect::<BTreeSet<_>>().into_iter().collect(),
            sandboxes,
        })
    }
}

/// Makes the sandbox hold the image that its owner's name refers to, if it is stored.
pub(crate) async fn take(
    shared: &Shared,
    sandbox: SandboxId,
    owner: &Owner,
    image: &str,
) -> Result<Option<Arc<StoredImage>>, EngineError> {
    // So that rows and memory agree.
    let _naming = shared.images.naming.lock().await;
    let taken = shared.db.take_image(sandbox, owner.to_string(), image.to_owned()).await?;
    Ok(taken.and_then(|digest| shared.images.get(digest)))
}

/// Removes a name again: a template holds the image now.
pub(crate) async fn unname(shared: &Shared, name: &str) -> Result<(), EngineError> {
    let owners: Vec<String> = {
        let stock = shared.images.stock();
        stock.names.keys().filter(|(known, _)| known == name).map(|(_, owner)| owner.clone()).collect()
    };
    let _naming = shared.images.naming.lock().await;
    for owner in owners {
        shared.db.remove_image_name(owner.clone(), name.to_owned()).await?;
        shared.images.stock().names.remove(&(name.to_owned(), owner));
    }
    Ok(())
}

/// Removes every name that begins with this, for all owners.
pub(crate) async fn unname_all(shared: &Shared, prefix: &str) -> Result<(), EngineError> {
    let names: BTreeSet<String> = {
        let stock = shared.images.stock();
        stock.names.keys().map(|(name, _)| name).filter(|name| name.starts_with(prefix)).cloned().collect()
    };
    for name in names {
        unname(shared, &name).await?;
    }
    Ok(())
}

/// See [`Images::pin`].
pub(crate) struct Pins {
    pins: Arc<Mutex<HashMap<Digest, usize>>>,
    layers: Vec<Digest>,
}

impl Drop for Pins {
    fn drop(&mut self) {
        let mut pins = self.pins.lock().unwrap_or_else(PoisonError::into_inner);
        for layer in &self.layers {
            if let Some(count) = pins.get_mut(layer) {
                *count -= 1;
                if *count == 0 {
                    pins.remove(layer);
                }
            }
        }
    }
}

fn stored(row: &ImageRow, layers: &HashMap<Digest, &LayerRow>) -> Result<StoredImage, BadImage> {
    let layer = |layer: &Digest| {
        let row = layers.get(layer);
        StoredLayer {
            layer: *layer,
            blob: row.and_then(|row| row.blob),
            size: row.map_or(0, |row| row.size),
            facts: row.map(|row| row.facts).unwrap_or_default(),
        }
    };
    Ok(StoredImage {
        digest: row.digest,
        config: ImageConfig::parse(row.config.as_bytes())?,
        config_text: row.config.clone(),
        over_host: row.over_host,
        layers: row.layers.iter().map(layer).collect(),
        created_at: row.created_at,
    })
}

/// Calls about images.
impl crate::Engine {
    /// The images that an owner may use, the newest first.
    pub fn images(&self, owner: &Owner) -> Vec<ImageInfo> {
        let shared = self.shared();
        let counts = sandboxes_by_image(shared, owner);
        let images: Vec<_> = shared.images.stock().images.values().cloned().collect();
        let mut list: Vec<ImageInfo> = images
            .iter()
            .filter_map(|image| {
                let sandboxes = counts.get(&image.digest).copied().unwrap_or(0);
                shared.images.info(image, owner, sandboxes)
            })
            .collect();
        list.sort_by(|a, b| b.image.created_at.cmp(&a.image.created_at).then(a.names.cmp(&b.names)));
        list
    }

    /// One image: by name, alias, digest, or the beginning of its digest.
    pub fn image(&self, owner: &Owner, text: &str) -> Result<ImageInfo, EngineError> {
        let not_found = || EngineError::ImageNotFound { name: text.to_owned() };
        let digits = text.strip_prefix("sha256:").unwrap_or(text);
        let is_digits =
            (8..=64).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let visible = self.images(owner);
        if is_digits {
            let mut found = visible.iter().filter(|info| info.image.digest.hex().starts_with(digits));
            if let (Some(found), None) = (found.next(), found.next()) {
                return Ok(found.clone());
            }
        }
        let choice = self.shared().images.choose(text)?;
        let image = match &choice.name {
            ImageName::Host => {
                return Err(Field::Image.must("not be `host`, which is the machine itself and is not kept"));
            }
            ImageName::Reference(reference) => {
                self.shared().images.find(owner, &reference.to_string()).ok_or_else(not_found)?
            }
        };
        visible.into_iter().find(|info| info.image.digest == image.digest).ok_or_else(not_found)
    }

    /// Removes an image's name, and then what is no longer used. Sandboxes made from it keep what they need.
    pub async fn remove_image(&self, key: &Key, text: &str, in_use: InUse) -> Result<Collected, EngineError> {
        let shared = self.shared();
        let not_found = || EngineError::ImageNotFound { name: text.to_owned() };
        let naming = shared.images.naming.lock().await;
        let info = self.image(&key.owner, text)?;
        // An alias stands for its target.
        let named = shared.images.choose(text).ok().map(|choice| choice.name.canonical());
        // A name removes itself; a digest removes all names.
        let (rows, names) = {
            let stock = shared.images.stock();
            let of = || stock.names.values().filter(|row| row.image == info.image.digest);
            let mine =
                of().filter(|row| row.owner == key.owner.as_str() || (row.owner.is_empty() && key.admin));
            let mine: Vec<NameRow> = mine.cloned().collect();
            let rows = match named.filter(|name| mine.iter().any(|row| row.name == *name)) {
                Some(name) => mine.into_iter().filter(|row| row.name == name).collect(),
                None => mine,
            };
            (rows, of().count())
        };
        if rows.is_empty() && !key.admin {
            return Err(EngineError::AdminOnly { doing: "remove an image that others use" });
        }
        if rows.is_empty() && info.sandboxes == 0 {
            return Err(not_found());
        }
        let sandboxes = sandboxes_of(shared, info.image.digest);
        let templates = shared.templates.holding(info.image.digest);
        if in_use == InUse::Refuse && rows.len() == names && (sandboxes > 0 || templates > 0) {
            return Err(EngineError::ImageInUse { name: text.to_owned(), sandboxes, templates });
        }
        for row in rows {
            shared.db.remove_image_name(row.owner.clone(), row.name.clone()).await?;
            shared.images.stock().names.remove(&(row.name, row.owner));
        }
        drop(naming);
        collect::collect(shared, Duration::ZERO, BuildCache::Keep).await
    }

    /// Removes images without a name and without a sandbox, layers without an image, and blobs that no pull needs. Layers that a
    /// build used within the last hour stay, so that the next build finds them.
    pub async fn collect_images(&self) -> Result<Collected, EngineError> {
        collect::collect(self.shared(), Duration::ZERO, BuildCache::Keep).await
    }

    /// All aliases, by name.
    pub fn aliases(&self) -> Vec<Alias> {
        let aliases = self.shared().images.stock().aliases.values().cloned().collect::<Vec<_>>();
        let shown =
            |alias: Alias| Alias { name: familiar(&alias.name), target: familiar(&alias.target), ..alias };
        aliases.into_iter().map(shown).collect()
    }

    /// Makes `name` stand for `target` from now on. Existing sandboxes keep their image.
    pub async fn set_alias(&self, name: &str, target: &str) -> Result<Alias, EngineError> {
        let (name, target) = (ImageName::parse(name)?, ImageName::parse(target)?);
        let invalid = |rule: &str| Err(Field::Alias.must(rule));
        if name == target {
            return invalid("not stand for itself");
        }
        let images = &self.shared().images;
        let _naming = images.naming.lock().await;
        {
            let stock = images.stock();
            // One step from alias to image: a second one would have to be explained wherever the alias is shown.
            if stock.aliases.contains_key(&target.canonical()) {
                return invalid("have an image as its target, got another alias");
            }
            if stock.aliases.values().any(|alias| alias.target == name.canonical()) {
                return invalid("not be the target of another alias");
            }
            if stock.aliases.len() >= ALIASES_MAX {
                return invalid(&format!("be one of at most {ALIASES_MAX}, and there are as many already"));
            }
        }
        let created_at = crate::observe::clock::now();
        let row = AliasRow { name: name.canonical(), target: target.canonical(), created_at };
        self.shared().db.put_alias(row.clone()).await?;
        let alias = Alias { name: row.name.clone(), target: row.target, created_at };
        images.stock().aliases.insert(row.name, alias);
        Ok(Alias { name: name.familiar(), target: target.familiar(), created_at })
    }

    /// Deletes an alias.
    pub async fn delete_alias(&self, name: &str) -> Result<(), EngineError> {
        let canonical = ImageName::parse(name)?.canonical();
        let _naming = self.shared().images.naming.lock().await;
        match self.shared().db.delete_alias(canonical.clone()).await? {
            true => {
                self.shared().images.stock().aliases.remove(&canonical);
                Ok(())
            }
            false => Err(EngineError::AliasNotFound { name: name.to_owned() }),
        }
    }

    /// A file for an uploaded archive.
    pub fn upload(&self) -> Result<Upload, EngineError> {
        self.shared().images.blobs.upload().map_err(not_received)
    }

    /// How much more may be written to uploaded archives at this moment, all of them together.
    pub fn upload_room(&self) -> Result<u64, EngineError> {
        let free = self.shared().images.blobs.free().map_err(not_received)?;
        Ok(free.saturating_sub(image::blobs::FREE_MIN))
    }
}

fn not_received(source: std::io::Error) -> EngineError {
    let source = Arc::new(ImageFault::Keep { doing: "make a file", source });
    EngineError::Image { doing: "receive", name: "an archive".into(), source }
}

/// How many sandboxes of any owner were made from an image.
fn sandboxes_of(shared: &Shared, image: Digest) -> usize {
    let sandboxes = shared.registry().all();
    sandboxes.iter().filter(|live| live.stored_image().is_some_and(|stored| stored.digest == image)).count()
}

/// How many of an owner's sandboxes were made from each image. Sandboxes of builds are not the owner's to see.
fn sandboxes_by_image(shared: &Shared, owner: &Owner) -> HashMap<Digest, usize> {
    let mut counts = HashMap::new();
    for live in shared.registry().all() {
        if live.owner == *owner
            && live.build().is_none()
            && let Some(image) = live.stored_image()
        {
            *counts.entry(image.digest).or_default() += 1;
        }
    }
    counts
}
