//! Adds images: from a registry or from an archive.
//!
//! Blobs are downloaded in parallel and unpacked one above the other, the lowest first, each as soon as it is
//! complete. A caller that asks for an image that is being pulled joins the pull; when the last waiting caller
//! leaves, it stops. A layer is pinned from before it is looked up until an image's row has it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use image::archive_file::{self, Imported};
use image::blobs::{Holding, Upload};
use image::layer::finish_digest;
use image::registry::Reach;
use image::{Credentials, Digest, Image, ImageRef, LayerBlob, Platform, Registry, RegistryError};
use runtime::{BackendError, LayerSpec};
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tracing::{Instrument, info, info_span};
use wire::launch::{Finish, LayerFacts, LayerFault, LayerSource};

use super::collect::BuildCache;
use super::slots::Slot;
use super::{Format, ImageFault, StoredImage, StoredLayer, Transport, collect, familiar};
use crate::Shared;
use crate::db::{ImageRow, LayerOrigin, LayerRow, NameRow};
use crate::error::{EngineError, chain};
use crate::model::{Key, Owner};
use crate::task::Task;

/// The longest path that the kernel allows.
pub(crate) const WORKING_DIRECTORY_MAX: usize = 4096;

/// What to pull, and how.
#[derive(Debug, Clone)]
pub struct PullSpec {
    /// The image.
    pub reference: ImageRef,
    /// The platform.
    pub platform: Platform,
    /// The caller's credentials. By default, the operator's are used.
    pub credentials: Credentials,
    /// Whether plain HTTP is allowed.
    pub transport: Transport,
}

impl PullSpec {
    /// A pull with default settings.
    pub fn new(reference: ImageRef) -> Self {
        let (credentials, transport) = (Credentials::Anonymous, Transport::Encrypted);
        Self { reference, platform: Platform::this(), credentials, transport }
    }
}

/// Progress of a pull.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// The lowest first. Empty until the registry has described the image.
    pub layers: Vec<LayerProgress>,
}

/// Progress of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerProgress {
    /// Digest of its blob.
    pub digest: Digest,
    /// What happens to it.
    pub state: LayerState,
    /// Bytes of the blob that were downloaded, or read while unpacking.
    pub bytes: u64,
    /// Size of the blob.
    pub total: u64,
}

/// What happens to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerState {
    /// Not started.
    Waiting,
    /// Being downloaded.
    Fetching,
    /// Downloaded.
    Fetched,
    /// Being unpacked.
    Unpacking,
    /// Stored.
    Done,
    /// Was stored already.
    Present,
}

type Outcome = Result<Vec<Arc<StoredImage>>, Arc<ImageFault>>;

/// A pull in progress. It continues while any caller holds one of these.
#[derive(Clone)]
pub struct Pull {
    inner: Arc<Inner>,
}

struct Inner {
    doing: &'static str,
    name: String,
    progress: watch::Receiver<PullProgress>,
    outcome: watch::Receiver<Option<Outcome>>,
    task: AbortHandle,
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Pull {
    /// The progress, now and whenever it changes.
    pub fn progress(&self) -> watch::Receiver<PullProgress> {
        self.inner.progress.clone()
    }

    /// Waits for the end. A registry gives one image, an archive one or more.
    pub async fn finished(&self) -> Result<Vec<Arc<StoredImage>>, EngineError> {
        let mut outcome = self.inner.outcome.clone();
        let failed = |source| {
            Err(EngineError::Image { doing: self.inner.doing, name: self.inner.name.clone(), source })
        };
        let outcome = match outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            Err(_) => None, // The engine ended it.
        };
        match outcome {
            Some(Ok(images)) => Ok(images),
            Some(Err(source)) => failed(source),
            None => failed(Arc::new(ImageFault::Stopping)),
        }
    }
}

/// What makes two pulls the same.
#[derive(PartialEq, Eq, Hash)]
struct Sameness {
    owner: String,
    reference: ImageRef,
    platform: Platform,
    credentials: [u8; 32],
    clear: bool,
    reach: Reach,
}

/// The pulls in progress.
#[derive(Default)]
pub(crate) struct Pulls {
    by_wish: Mutex<HashMap<Sameness, Weak<Inner>>>,
    all: Mutex<Vec<AbortHandle>>,
}

impl Pulls {
    pub fn halt(&self) {
        for task in self.all.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            task.abort();
        }
    }

    fn remember(&self, task: AbortHandle) {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|task| !task.is_finished());
        all.push(task);
    }
}

impl crate::Engine {
    /// Pulls an image, or joins a pull of the same. Asks the registry even if an image of that name is stored, since
    /// a tag may have moved.
    pub fn pull(&self, key: &Key, spec: PullSpec) -> Pull {
        pull(self.shared(), &key.owner, spec)
    }

    /// Imports the images of an uploaded archive. A name is required if the archive has none.
    pub fn import(&self, key: &Key, upload: Upload, name: Option<ImageRef>, format: Format) -> Pull {
        self.import_for(key, upload, name, format, String::new())
    }

    /// Imports the only image of an archive, visible to the key's owner alone.
    pub(crate) fn import_private(&self, key: &Key, upload: Upload, name: ImageRef) -> Pull {
        self.import_for(key, upload, Some(name), Format::Oci, key.owner.to_string())
    }

    fn import_for(
        &self,
        key: &Key,
        upload: Upload,
        name: Option<ImageRef>,
        format: Format,
        visible_to: String,
    ) -> Pull {
        let shared = Arc::clone(self.shared());
        let by = key.owner.clone();
        let shown = name.as_ref().map_or_else(|| "from an archive".to_owned(), ImageRef::familiar);
        start(self.shared(), "import", shown, move |progress| async move {
            let blobs = Arc::clone(&shared.images.blobs);
            let read = tokio::task::spawn_blocking(move || {
                archive_file::import(upload, &blobs, name, format, &Platform::this())
            });
            let imported = read.await.map_err(|_| ImageFault::Stopping)??;
            let mut images = Vec::new();
            for Imported { image, names, blobs } in imported {
                let mut source = Source::Here(blobs);
                let names = names.iter().map(ImageRef::to_string).collect();
                let who = Who { by: by.clone(), visible_to: visible_to.clone() };
                images.push(add(&shared, image, &mut source, who, names, &progress).await?);
            }
            Ok(images)
        })
    }
}

/// See [`crate::Engine::pull`].
pub(crate) fn pull(shared: &Arc<Shared>, owner: &Owner, spec: PullSpec) -> Pull {
    let by = owner.clone();
    let reach = if shared.keys.has_admin(owner) { Reach::Anywhere } else { Reach::Public };
    let PullSpec { reference, credentials, transport, .. } = spec.clone();
    let registry = Registry::new(&shared.images.registries, reference, credentials, transport, reach);
    // What credentials gave access to is private, unless all share them.
    let is_for_all = spec.credentials.is_anonymous() && registry.is_for_all();
    let visible_to = if is_for_all { String::new() } else { owner.to_string() };
    let wish = Sameness {
        owner: visible_to.clone(),
        reach,
        reference: spec.reference.clone(),
        platform: spec.platform.clone(),
        credentials: secret_digest(&spec.credentials),
        clear: spec.transport == Transport::Clear,
    };
    let pulls = &shared.images.pulls;
    let mut by_wish = pulls.by_wish.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(inner) = by_wish.get(&wish).and_then(Weak::upgrade)
        && inner.outcome.borrow().is_none()
    {
        return Pull { inner };
    }
    by_wish.retain(|_, inner| inner.strong_count() > 0);
    let name = spec.reference.familiar();
    let task_shared = Arc::clone(shared);
    let pull = start(shared, "pull", name, move |progress| async move {
        let shared = task_shared;
        let slot = shared.images.asking.take(&by).await;
        let image = registry.image(&spec.platform).await?;
        drop(slot);
        let names = vec![spec.reference.to_string()];
        let mut source = Source::Registry(Arc::new(registry));
        Ok(vec![add(&shared, image, &mut source, Who { by, visible_to }, names, &progress).await?])
    });
    by_wish.insert(wish, Arc::downgrade(&pull.inner));
    pull
}

/// Tells pulls apart; a digest, so that no secret is kept longer than it is used.
fn secret_digest(credentials: &Credentials) -> [u8; 32] {
    let parts: [&str; 3] = match credentials {
        Credentials::Anonymous => ["", "", ""],
        Credentials::Basic { username, password } => ["basic", username, password],
        Credentials::Identity { token } => ["identity", token, ""],
        Credentials::Bearer { token } => ["bearer", token, ""],
    };
    crate::model::check::digest(&parts)
}

fn start<F>(
    shared: &Arc<Shared>,
    doing: &'static str,
    name: String,
    work: impl FnOnce(Arc<watch::Sender<PullProgress>>) -> F,
) -> Pull
where
    F: Future<Output = Result<Vec<Arc<StoredImage>>, ImageFault>> + Send + 'static,
{
    let (progress, hear_progress) = watch::channel(PullProgress::default());
    let (tell, outcome) = watch::channel(None);
    let span = info_span!("image", name, doing);
    let work = work(Arc::new(progress));
    let (runtime, pulls) = (shared.runtime.clone(), Arc::clone(shared));
    let shared = Arc::clone(shared);
    let task = runtime.spawn(
        async move {
            let outcome = work.await;
            if let Err(fault) = &outcome
                && fault.is_disk_full()
                && let Err(error) = collect::collect(&shared, Duration::ZERO, BuildCache::Discard).await
            {
                tracing::warn!(error = chain(&error), "cannot remove what a full disk could not store");
            }
            tell.send_replace(Some(outcome.map_err(Arc::new)));
        }
        .instrument(span),
    );
    let task = task.abort_handle();
    pulls.images.pulls.remember(task.clone());
    Pull { inner: Arc::new(Inner { doing, name, progress: hear_progress, outcome, task }) }
}

/// For whom an image is added.
struct Who {
    /// Whose places it takes.
    by: Owner,
    /// Who may see it; empty for everyone.
    visible_to: String,
}

/// Source of blobs.
enum Source {
    Registry(Arc<Registry>),
    /// They are stored, and pinned.
    Here(HashMap<Digest, Holding>),
}

/// Ensures that all layers of an image are stored, and gives it its names.
async fn add(
    shared: &Arc<Shared>,
    image: Image,
    source: &mut Source,
    who: Who,
    names: Vec<String>,
    progress: &Arc<watch::Sender<PullProgress>>,
) -> Result<Arc<StoredImage>, ImageFault> {
    let finish = finish_of(&image);
    let finish_name = finish_digest(image.layers.last().map(|layer| layer.layer), &finish);
    let layers = image.layers.iter().map(|layer| layer.layer);
    let _pins = shared.images.pin(layers.chain([finish_name]));
    let waiting = |layer: &LayerBlob| LayerProgress {
        digest: layer.blob,
        state: LayerState::Waiting,
        bytes: 0,
        total: layer.size,
    };
    progress.send_replace(PullProgress { layers: image.layers.iter().map(waiting).collect() });

    let adding = Adding { shared, count: image.layers.len(), who: &who, progress };
    let mut fetches = Vec::new();
    for (number, layer) in image.layers.iter().enumerate() {
        fetches.push(adding.begin(source, number, layer).await?);
    }
    let mut stored = Vec::new();
    for (number, (layer, fetch)) in image.layers.iter().zip(fetches).enumerate() {
        let below = top_first(&stored);
        stored.push(adding.store(number, layer, fetch, below).await?);
    }
    let below = top_first(&stored);
    stored.push(adding.finish(finish_name, finish, below).await?);
    name(shared, image, false, stored, who.visible_to, names).await
}

/// What the finishing layer of an image must contain.
fn finish_of(image: &Image) -> Finish {
    let working_directory = image.config.working_directory.clone();
    Finish {
        open_workspace: image.config.has_plain_user(),
        working_directory: working_directory.filter(|path| path.len() <= WORKING_DIRECTORY_MAX),
    }
}

/// The layers below the next one, in the order in which they are mounted.
fn top_first(stored: &[StoredLayer]) -> Vec<Digest> {
    stored.iter().rev().map(|layer| layer.layer).collect()
}

/// A download in progress. `None`: the layer is stored already.
type Fetch = Option<Task<Result<Holding, RegistryError>>>;

/// What every layer of one image needs.
struct Adding<'a> {
    shared: &'a Arc<Shared>,
    /// The number of layers.
    count: usize,
    who: &'a Who,
    progress: &'a Arc<watch::Sender<PullProgress>>,
}

impl Adding<'_> {
    /// Starts to download a layer, unless it is stored.
    async fn begin(
        &self,
        source: &mut Source,
        number: usize,
        layer: &LayerBlob,
    ) -> Result<Fetch, ImageFault> {
        // Pinned before the look-up: a pull that is unpacking it writes its row before it releases the blob, so that
        // a blob is never downloaded twice.
        let _held = self.shared.images.blobs.hold(layer.blob);
        if self.is_ready(number, layer).await? {
            self.reached(number, LayerState::Present, layer.size);
            return Ok(None);
        }
        Ok(Some(fetch(self.shared, &self.who.by, source, *layer, number, self.progress)))
    }

    /// Waits for the download of a layer and unpacks it, unless another pull was faster.
    async fn store(
        &self,
        number: usize,
        layer: &LayerBlob,
        fetch: Fetch,
        below: Vec<Digest>,
    ) -> Result<StoredLayer, ImageFault> {
        let images = &self.shared.images;
        let lock = images.lock_of(layer.layer);
        let _alone = lock.lock().await;
        match fetch {
            Some(fetch) if !self.is_ready(number, layer).await? => {
                // The bytes that arrive have the digest that the image names: the sender had them.
                let holding = fetch.await.map_err(|_| ImageFault::Stopping)??;
                let written = match is_fetched(self.shared, layer.layer, number, self.count).await? {
                    true => self.prove(number, layer, below).await,
                    false => self.unpack_blob(number, layer, below).await,
                };
                // In any case: the layer is stored, or this blob will never become one.
                remove_blob(holding).await;
                written?;
                self.shared.db.allow_layer(layer.layer, self.who.visible_to.clone()).await?;
                self.reached(number, LayerState::Done, layer.size);
            }
            Some(_) | None => {
                // This download is not needed.
                remove_blob(images.blobs.hold(layer.blob)).await;
                self.reached(number, LayerState::Present, layer.size);
            }
        }
        let facts = LayerFacts::default();
        Ok(StoredLayer { layer: layer.layer, blob: Some(layer.blob), size: layer.size, facts })
    }

    /// Whether a layer is stored, and this caller or everyone has downloaded it before.
    async fn is_ready(&self, number: usize, layer: &LayerBlob) -> Result<bool, ImageFault> {
        Ok(is_fetched(self.shared, layer.layer, number, self.count).await?
            && self.shared.db.may_use_layer(layer.layer, self.who.visible_to.clone()).await?)
    }

    /// Checks that a downloaded blob has the contents of a layer that is stored. Another blob than the stored layer's
    /// may be the same layer, compressed otherwise; only unpacking it tells.
    async fn prove(&self, number: usize, layer: &LayerBlob, below: Vec<Digest>) -> Result<(), ImageFault> {
        if self.shared.db.layer_blob(layer.layer).await? == Some(layer.blob) {
            return Ok(());
        }
        let from = LayerSource::Blob { blob: layer.blob, contents: layer.contents };
        let proof = Digest::from_bytes(crate::model::random::random());
        let spec = LayerSpec { layer: proof, below, over_host: false, from };
        let read = |bytes: u64| self.reached(number, LayerState::Unpacking, bytes);
        let unpacked = unpack(self.shared, &self.who.by, &spec, &read).await;
        // No image has this layer, so the collection would remove it too.
        if let Err(error) = self.shared.backend.remove_layer(proof).await {
            tracing::warn!(error = chain(&error), "cannot remove a layer that was unpacked as a proof");
        }
        unpacked.map(drop).map_err(|source| self.broken(number, source))
    }

    /// Unpacks a downloaded layer and writes its row.
    async fn unpack_blob(
        &self,
        number: usize,
        layer: &LayerBlob,
        below: Vec<Digest>,
    ) -> Result<(), ImageFault> {
        let from = LayerSource::Blob { blob: layer.blob, contents: layer.contents };
        let spec = LayerSpec { layer: layer.layer, below, over_host: false, from };
        let read = |bytes: u64| self.reached(number, LayerState::Unpacking, bytes);
        read(0);
        let facts = unpack(self.shared, &self.who.by, &spec, &read)
            .await
            .map_err(|source| self.broken(number, source))?;
        Ok(self.shared.db.put_layer(layer_row(layer.layer, Some(layer), facts)).await?)
    }

    /// Creates the layer on top that makes an image fit for a sandbox, unless it is stored.
    async fn finish(
        &self,
        layer: Digest,
        finish: Finish,
        below: Vec<Digest>,
    ) -> Result<StoredLayer, ImageFault> {
        let lock = self.shared.images.lock_of(layer);
        let _alone = lock.lock().await;
        if !self.shared.db.has_layer(layer).await? {
            let spec = LayerSpec { layer, below, over_host: false, from: LayerSource::Finish(finish) };
            let last = self.count.saturating_sub(1);
            let facts = unpack(self.shared, &self.who.by, &spec, &|_| ())
                .await
                .map_err(|source| self.broken(last, source))?;
            self.shared.db.put_layer(layer_row(layer, None, facts)).await?;
        }
        Ok(StoredLayer { layer, blob: None, size: 0, facts: LayerFacts::default() })
    }

    fn reached(&self, number: usize, state: LayerState, bytes: u64) {
        step(self.progress, number, state, bytes);
    }

    fn broken(&self, number: usize, source: BackendError) -> ImageFault {
        ImageFault::Layer { number: number + 1, count: self.count, source }
    }
}

/// Whether a layer that an image names was downloaded before. An image that names a layer made here is rejected: no
/// bytes have that digest, so the image's author must have learnt the name elsewhere, to get files of another owner.
async fn is_fetched(shared: &Shared, layer: Digest, number: usize, count: usize) -> Result<bool, ImageFault> {
    match shared.db.layer_origin(layer).await? {
        None => Ok(false),
        Some(LayerOrigin::Fetched) => Ok(true),
        Some(LayerOrigin::Made) => {
            let why = "its digest is not that of a layer that can be downloaded".into();
            let source = Box::new(LayerFault::Damaged { why });
            Err(ImageFault::Layer {
                number: number + 1,
                count,
                source: BackendError::Layer { layer, source },
            })
        }
    }
}

/// Removes a blob that is no longer needed, which blocks on the disk.
async fn remove_blob(holding: Holding) {
    // It does not panic, and if the engine ends before it, the sweep removes the blob.
    let _ = tokio::task::spawn_blocking(move || holding.remove()).await;
}

/// Writes the image and its names, and adds it in memory.
pub(crate) async fn name(
    shared: &Arc<Shared>,
    image: Image,
    over_host: bool,
    layers: Vec<StoredLayer>,
    owner: String,
    names: Vec<String>,
) -> Result<Arc<StoredImage>, ImageFault> {
    let now = crate::observe::clock::now();
    let row = ImageRow {
        digest: image.digest,
        config: image.config_text.clone(),
        over_host,
        layers: layers.iter().map(|layer| layer.layer).collect(),
        created_at: now,
    };
    let rows: Vec<NameRow> = names
        .into_iter()
        .map(|name| NameRow { owner: owner.clone(), name, image: image.digest, named_at: now })
        .collect();
    let _naming = shared.images.naming.lock().await;
    let Some(facts) = shared.db.put_image(row, rows.clone()).await? else {
        return Err(ImageFault::Removed);
    };
    let with_facts = |(layer, facts): (StoredLayer, LayerFacts)| StoredLayer { facts, ..layer };
    let mut stock = shared.images.stock();
    let stored = stock.images.entry(image.digest).or_insert_with(|| {
        Arc::new(StoredImage {
            digest: image.digest,
            config: image.config,
            config_text: image.config_text,
            over_host,
            layers: layers.into_iter().zip(facts).map(with_facts).collect(),
            created_at: now,
        })
    });
    let stored = Arc::clone(stored);
    for row in rows {
        info!(image = %row.image, name = familiar(&row.name), "image is stored");
        stock.names.insert((row.name.clone(), row.owner.clone()), row);
    }
    Ok(stored)
}

pub(crate) fn layer_row(layer: Digest, from: Option<&LayerBlob>, facts: LayerFacts) -> LayerRow {
    LayerRow {
        layer,
        blob: from.map(|from| from.blob),
        contents: from.map(|from| from.contents),
        size: from.map_or(0, |from| from.size),
        facts,
        created_at: crate::observe::clock::now(),
    }
}

/// Starts to download a blob, in parallel with others.
fn fetch(
    shared: &Arc<Shared>,
    by: &Owner,
    source: &mut Source,
    layer: LayerBlob,
    number: usize,
    progress: &Arc<watch::Sender<PullProgress>>,
) -> Task<Result<Holding, RegistryError>> {
    let (shared, progress) = (Arc::clone(shared), Arc::clone(progress));
    match source {
        // The same blob may be two layers, and is pinned for each.
        Source::Here(held) => {
            let holding = held.remove(&layer.blob).unwrap_or_else(|| shared.images.blobs.hold(layer.blob));
            Task::spawn(async move { Ok(holding) })
        }
        Source::Registry(registry) => {
            let (registry, by) = (Arc::clone(registry), by.clone());
            Task::spawn(async move {
                let _slot = shared.images.downloads.take(&by).await;
                let arrived = |bytes: u64| step(&progress, number, LayerState::Fetching, bytes);
                let blobs = &shared.images.blobs;
                let holding = blobs.fetch(&registry, layer.blob, layer.size, &arrived).await?;
                step(&progress, number, LayerState::Fetched, layer.size);
                Ok(holding)
            })
        }
    }
}

/// Unpacks a layer. Retries once if the launcher died.
pub(crate) async fn unpack(
    shared: &Arc<Shared>,
    owner: &Owner,
    spec: &LayerSpec,
    read: &(dyn Fn(u64) + Send + Sync),
) -> Result<LayerFacts, BackendError> {
    unpack_in(shared, &place(shared, owner).await, spec, read).await
}

/// A permit to unpack; few run at the same time.
pub(crate) struct Place(#[expect(dead_code, reason = "it is held")] Slot);

/// Waits for a permit. There are few, and some are held for long.
pub(crate) async fn place(shared: &Shared, owner: &Owner) -> Place {
    Place(shared.images.unpacks.take(owner).await)
}

/// Unpacks a layer with a permit.
pub(crate) async fn unpack_in(
    shared: &Arc<Shared>,
    _place: &Place,
    spec: &LayerSpec,
    read: &(dyn Fn(u64) + Send + Sync),
) -> Result<LayerFacts, BackendError> {
    match shared.backend.unpack_layer(spec, read).await {
        Err(BackendError::LauncherGone { .. }) => shared.backend.unpack_layer(spec, read).await,
        result => result,
    }
}

fn step(progress: &watch::Sender<PullProgress>, number: usize, state: LayerState, bytes: u64) {
    progress.send_modify(|progress| {
        if let Some(layer) = progress.layers.get_mut(number) {
            (layer.state, layer.bytes) = (state, bytes);
        }
    });
}
