//! Which images there are, what they are called, and who uses them.
//!
//! The bytes are `image`'s business and the files the backend's; here is what ties them together: names and aliases, one pull for
//! all who want the same, references, and the collection of what nobody wants any more. Read in this order: this file is the
//! stock and its names, `pull` fills it, `collect` empties it.
//!
//! Images belong to everyone on the machine, save for those that were pulled with credentials of a caller: these are seen by that
//! caller's owner alone.

mod collect;
pub(crate) mod made;
pub(crate) mod pull;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use image::{Blobs, Digest, ImageConfig, Registries};
use tokio::sync::Semaphore;
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

use crate::Shared;
use crate::db::{AliasRow, ImageRow, LayerRow, LoadedImages, NameRow};
use crate::error::{DbError, EngineError, Field};
use crate::model::{Key, Owner};

pub(crate) use collect::keep_collected;
pub(crate) use pull::{Pulls, pull};

/// Layers that are fetched at the same time, of all pulls together: enough to fill a line, few enough not to be turned away.
const DOWNLOADS_MAX: usize = 6;
/// Layers that are unpacked at the same time.
const UNPACKS_MAX: usize = 4;
/// Aliases in all.
const ALIASES_MAX: usize = 10_000;

/// How images come here.
#[derive(Debug, Clone, Default)]
pub struct ImageSettings {
    /// What the operator says of registries.
    pub registries: RegistrySettings,
}

/// What a caller may name as an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageName {
    /// The machine itself.
    Host,
    /// Something that is pulled or imported.
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

    /// The spelling that rows keep.
    pub fn canonical(&self) -> String {
        match self {
            Self::Host => HOST.into(),
            Self::Reference(reference) => reference.to_string(),
        }
    }

    /// The spelling that people read.
    pub fn familiar(&self) -> String {
        match self {
            Self::Host => HOST.into(),
            Self::Reference(reference) => reference.familiar(),
        }
    }
}

/// The spelling that people read, of a name from a row.
pub fn familiar(canonical: &str) -> String {
    ImageName::parse(canonical).map_or_else(|_| canonical.to_owned(), |name| name.familiar())
}

/// A name as it was given and what it means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub name: ImageName,
    /// What was asked for, where that is an alias.
    pub alias: Option<String>,
}

/// An image that is here.
#[derive(Debug)]
pub struct StoredImage {
    /// Of its manifest.
    pub digest: Digest,
    /// How its programs run.
    pub config: ImageConfig,
    /// The configuration as it was written.
    pub config_text: String,
    /// Whether its layers lie over the machine's own files, as in the image `host`.
    pub over_host: bool,
    /// The lowest first; the last is our own.
    pub layers: Vec<StoredLayer>,
    /// When it came here.
    pub created_at: SystemTime,
}

/// A layer that is here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredLayer {
    /// What it is called on disk.
    pub layer: Digest,
    /// What was fetched for it; none where it is our own.
    pub blob: Option<Digest>,
    /// How much that was.
    pub size: u64,
    /// What came of unpacking it.
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

    /// What was fetched for it.
    pub fn size(&self) -> u64 {
        self.layers.iter().map(|layer| layer.size).sum()
    }

    /// What its files hold.
    pub fn unpacked(&self) -> u64 {
        self.layers.iter().map(|layer| layer.facts.bytes).sum()
    }
}

/// An image as it is shown.
#[derive(Debug, Clone)]
pub struct ImageInfo {
    /// What it is.
    pub image: Arc<StoredImage>,
    /// What it is called, as far as the owner who asks may know.
    pub names: Vec<String>,
    /// Names that an operator gave to those.
    pub aliases: Vec<String>,
    /// Whose it is, if not everyone's.
    pub owner: Option<Owner>,
    /// How many sandboxes were made from it and still exist.
    pub sandboxes: usize,
}

/// A name for another name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Alias {
    /// What people ask for.
    pub name: String,
    /// What they get.
    pub target: String,
    /// Since when.
    pub created_at: SystemTime,
}

/// What becomes of the name of an image that sandboxes were made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InUse {
    /// The last name stays, and whoever wants to take it is told.
    Refuse,
    /// It goes. The sandboxes keep what they need, and the rest follows the last of them.
    Release,
}

/// What a collection removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Collected {
    /// Images without a name and a sandbox.
    pub images: usize,
    /// Layers without an image.
    pub layers: usize,
    /// What the files of those layers held.
    pub bytes: u64,
}

/// All images of one data directory.
pub(crate) struct Images {
    registries: Arc<Registries>,
    blobs: Arc<Blobs>,
    stock: Mutex<Stock>,
    pulls: Pulls,
    /// Layers that somebody counts on before an image has them.
    pins: Arc<Mutex<HashMap<Digest, usize>>>,
    locks: Mutex<HashMap<Digest, Weak<tokio::sync::Mutex<()>>>>,
    /// Held from a change of the rows of images, names and aliases until the stock says the same: changes that overtook each other
    /// on the way there would leave it wrong until the next start.
    naming: tokio::sync::Mutex<()>,
    downloads: Semaphore,
    unpacks: Semaphore,
}

/// What rows say, at hand.
#[derive(Default)]
pub(crate) struct Stock {
    images: HashMap<Digest, Arc<StoredImage>>,
    /// By name and owner, the empty one being everyone.
    pub names: BTreeMap<(String, String), NameRow>,
    aliases: BTreeMap<String, Alias>,
}

impl Images {
    /// Reads what is here. Blocks for the moment that a directory takes.
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
            locks: Mutex::default(),
            naming: tokio::sync::Mutex::default(),
            downloads: Semaphore::new(DOWNLOADS_MAX),
            unpacks: Semaphore::new(UNPACKS_MAX),
        })
    }

    pub(crate) fn stock(&self) -> MutexGuard<'_, Stock> {
        self.stock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends all pulls.
    pub fn halt(&self) {
        self.pulls.halt();
    }

    /// What a caller's word for an image means.
    pub fn choose(&self, text: &str) -> Result<Choice, EngineError> {
        let asked = ImageName::parse(text)?;
        let target = self.stock().aliases.get(&asked.canonical()).map(|alias| alias.target.clone());
        match target {
            None => Ok(Choice { name: asked, alias: None }),
            Some(target) => Ok(Choice { name: ImageName::parse(&target)?, alias: Some(asked.familiar()) }),
        }
    }

    /// The image that an owner means by a name.
    pub fn find(&self, owner: &Owner, name: &str) -> Option<Arc<StoredImage>> {
        let stock = self.stock();
        let of = |owner: &str| stock.names.get(&(name.to_owned(), owner.to_owned()));
        let row = of(owner.as_str()).or_else(|| of(""))?;
        stock.images.get(&row.image).cloned()
    }

    /// What a backend would mount for an image, if it is here.
    pub fn rootfs(&self, owner: &Owner, name: &ImageName) -> Option<Rootfs> {
        match name {
            ImageName::Host => Some(Rootfs::Host),
            ImageName::Reference(reference) => Some(self.find(owner, &reference.to_string())?.rootfs()),
        }
    }

    /// An image by what it is.
    pub fn get(&self, digest: Digest) -> Option<Arc<StoredImage>> {
        self.stock().images.get(&digest).cloned()
    }

    /// One lock per layer: who holds it unpacks it or removes it.
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

    fn info(&self, image: &Arc<StoredImage>, owner: &Owner, sandboxes: usize) -> Option<ImageInfo> {
        let stock = self.stock();
        let visible = |row: &&NameRow| {
            row.image == image.digest && (row.owner.is_empty() || row.owner == owner.as_str())
        };
        let rows: Vec<&NameRow> = stock.names.values().filter(visible).collect();
        let aliases = stock.aliases.values().filter(|alias| rows.iter().any(|row| row.name == alias.target));
        let private = rows.iter().all(|row| !row.owner.is_empty());
        // An image that only sandboxes hold is shown to whoever has one of them, which is what was counted.
        (!rows.is_empty() || sandboxes > 0).then(|| ImageInfo {
            image: Arc::clone(image),
            aliases: aliases.map(|alias| familiar(&alias.name)).collect(),
            owner: (private && !rows.is_empty()).then(|| owner.clone()),
            names: rows.iter().map(|row| familiar(&row.name)).collect::<BTreeSet<_>>().into_iter().collect(),
            sandboxes,
        })
    }
}

/// Takes the image that a sandbox's owner means by its name for the sandbox, if it is here.
pub(crate) async fn take(
    shared: &Shared,
    sandbox: SandboxId,
    owner: &Owner,
    image: &str,
) -> Result<Option<Arc<StoredImage>>, EngineError> {
    // So that what rows say now is what the stock says.
    let _naming = shared.images.naming.lock().await;
    let taken = shared.db.take_image(sandbox, owner.to_string(), image.to_owned()).await?;
    Ok(taken.and_then(|digest| shared.images.get(digest)))
}

/// Takes a name away again: a template holds the image now.
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

/// What callers ask about images.
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

    /// Takes an image's name away, and removes what nobody wants any more. Sandboxes made from it keep what they need.
    pub async fn remove_image(&self, key: &Key, text: &str, in_use: InUse) -> Result<Collected, EngineError> {
        let shared = self.shared();
        let not_found = || EngineError::ImageNotFound { name: text.to_owned() };
        let naming = shared.images.naming.lock().await;
        let info = self.image(&key.owner, text)?;
        // An alias stands for the name that it stands for.
        let named = shared.images.choose(text).ok().map(|choice| choice.name.canonical());
        // A name takes away itself; a digest takes away all names.
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
        collect::collect(shared, Duration::ZERO).await
    }

    /// Removes images without a name and a sandbox, layers without an image, and blobs that nobody waits for.
    pub async fn collect_images(&self) -> Result<Collected, EngineError> {
        collect::collect(self.shared(), Duration::ZERO).await
    }

    /// All aliases, by name.
    pub fn aliases(&self) -> Vec<Alias> {
        let aliases = self.shared().images.stock().aliases.values().cloned().collect::<Vec<_>>();
        let shown =
            |alias: Alias| Alias { name: familiar(&alias.name), target: familiar(&alias.target), ..alias };
        aliases.into_iter().map(shown).collect()
    }

    /// From now on, whoever asks for `name` gets `target`. Sandboxes that exist keep what they have.
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

    /// Ends an alias.
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

    /// A file for an archive that somebody sends, and how much may go into it.
    pub fn upload(&self) -> Result<(Upload, u64), EngineError> {
        let refused = |source| EngineError::Image {
            doing: "receive",
            name: "an archive".into(),
            source: Arc::new(ImageFault::Keep { doing: "make a file", source }),
        };
        let blobs = &self.shared().images.blobs;
        let free = blobs.free().map_err(refused)?;
        Ok((blobs.upload().map_err(refused)?, free.saturating_sub(image::blobs::FREE_MIN)))
    }
}

/// How many sandboxes were made from an image, whosever they are.
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
