//! Images come here: from a registry or from an archive.
//!
//! Blobs are fetched side by side and unpacked one above the other, the lowest first, each as soon as it is there. Whoever asks
//! for an image that is on its way joins; when the last who waits leaves, it stops. A layer is held by a pin from before it
//! is looked for until an image's row has it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use image::archive_file::{self, Imported};
use image::blobs::{Holding, Upload};
use image::layer::finish_digest;
use image::{Credentials, Digest, Image, ImageRef, LayerBlob, Platform, Registry, RegistryError};
use runtime::{BackendError, LayerSpec};
use tokio::sync::{SemaphorePermit, watch};
use tokio::task::AbortHandle;
use tracing::{Instrument, info, info_span};
use wire::launch::{Finish, LayerFacts, LayerFault, LayerSource};

use super::{Format, ImageFault, StoredImage, StoredLayer, Transport, collect, familiar};
use crate::Shared;
use crate::db::{ImageRow, LayerOrigin, LayerRow, NameRow};
use crate::error::{EngineError, chain};
use crate::model::{Key, Owner};
use crate::task::Task;

/// The longest path that the kernel takes. What is longer cannot be made.
pub(crate) const WORKING_DIRECTORY_MAX: usize = 4096;

/// What is to be pulled, and how.
#[derive(Debug, Clone)]
pub struct PullSpec {
    /// Which image.
    pub reference: ImageRef,
    /// For which machine.
    pub platform: Platform,
    /// Who asks. Where nobody says so, the operator's are used.
    pub credentials: Credentials,
    /// Whether it may be in the clear.
    pub transport: Transport,
}

impl PullSpec {
    /// With nothing special about it.
    pub fn new(reference: ImageRef) -> Self {
        let (credentials, transport) = (Credentials::Anonymous, Transport::Encrypted);
        Self { reference, platform: Platform::this(), credentials, transport }
    }
}

/// How far it is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PullProgress {
    /// The lowest first. Empty until the registry has said what the image is made of.
    pub layers: Vec<LayerProgress>,
}

/// How far one layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerProgress {
    /// Of its blob.
    pub digest: Digest,
    /// What happens to it.
    pub state: LayerState,
    /// Of the blob: fetched, or read while it is unpacked.
    pub bytes: u64,
    /// How long the blob is.
    pub total: u64,
}

/// What happens to a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerState {
    /// Nothing yet.
    Waiting,
    /// Its bytes arrive.
    Fetching,
    /// Its bytes are here.
    Fetched,
    /// It becomes files.
    Unpacking,
    /// It is here.
    Done,
    /// It was here before.
    Present,
}

type Outcome = Result<Vec<Arc<StoredImage>>, Arc<ImageFault>>;

/// An image on its way. It goes on for as long as anybody holds one of these.
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
    /// How far it is, now and whenever that changes.
    pub fn progress(&self) -> watch::Receiver<PullProgress> {
        self.inner.progress.clone()
    }

    /// Waits until it is here. A registry gives one image, an archive one or more.
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
}

/// The pulls under way.
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
    /// Pulls an image, or joins whoever does so already. Asks the registry also when an image of that name is here: a tag may
    /// mean something else today.
    pub fn pull(&self, key: &Key, spec: PullSpec) -> Pull {
        pull(self.shared(), &key.owner, spec)
    }

    /// Takes the images of an archive that was sent. A name is needed where the archive has none.
    pub fn import(&self, upload: Upload, name: Option<ImageRef>, format: Format) -> Pull {
        let shared = Arc::clone(self.shared());
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
                images.push(add(&shared, image, &mut source, String::new(), names, &progress).await?);
            }
            Ok(images)
        })
    }
}

/// See [`crate::Engine::pull`].
pub(crate) fn pull(shared: &Arc<Shared>, owner: &Owner, spec: PullSpec) -> Pull {
    // What somebody's own credentials opened is theirs alone.
    let owner = if spec.credentials.is_anonymous() { String::new() } else { owner.to_string() };
    let wish = Sameness {
        owner: owner.clone(),
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
        let PullSpec { reference, platform, credentials, transport } = spec;
        let registry = Registry::new(&shared.images.registries, reference.clone(), credentials, transport);
        let image = registry.image(&platform).await?;
        let names = vec![reference.to_string()];
        let mut source = Source::Registry(Arc::new(registry));
        Ok(vec![add(&shared, image, &mut source, owner, names, &progress).await?])
    });
    by_wish.insert(wish, Arc::downgrade(&pull.inner));
    pull
}

/// For telling pulls apart; a digest, so that no secret lies around for longer than it is used.
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
                && let Err(error) = collect::collect(&shared, Duration::ZERO).await
            {
                tracing::warn!(error = chain(&error), "cannot give back what a full disk could not take");
            }
            tell.send_replace(Some(outcome.map_err(Arc::new)));
        }
        .instrument(span),
    );
    let task = task.abort_handle();
    pulls.images.pulls.remember(task.clone());
    Pull { inner: Arc::new(Inner { doing, name, progress: hear_progress, outcome, task }) }
}

/// Where blobs come from.
enum Source {
    Registry(Arc<Registry>),
    /// They are here, and held.
    Here(HashMap<Digest, Holding>),
}

/// Makes sure that all layers of an image are here, and gives it its names.
async fn add(
    shared: &Arc<Shared>,
    image: Image,
    source: &mut Source,
    owner: String,
    names: Vec<String>,
    progress: &Arc<watch::Sender<PullProgress>>,
) -> Result<Arc<StoredImage>, ImageFault> {
    let images = &shared.images;
    let working_directory = image.config.working_directory.clone();
    let last = Finish {
        open_workspace: image.config.has_plain_user(),
        working_directory: working_directory.filter(|path| path.len() <= WORKING_DIRECTORY_MAX),
    };
    let finish = finish_digest(image.layers.last().map(|layer| layer.layer), &last);
    let _pins = images.pin(image.layers.iter().map(|layer| layer.layer).chain([finish]));
    let waiting = |layer: &LayerBlob| LayerProgress {
        digest: layer.blob,
        state: LayerState::Waiting,
        bytes: 0,
        total: layer.size,
    };
    progress.send_replace(PullProgress { layers: image.layers.iter().map(waiting).collect() });

    let mut fetches = Vec::new();
    for (number, layer) in image.layers.iter().enumerate() {
        // Held from before the question: whoever unpacks it just now writes its row before they let go of the blob, so that it is
        // never fetched twice.
        let _held = images.blobs.hold(layer.blob);
        let fetch = match is_fetched(shared, layer.layer, number, image.layers.len()).await? {
            true => {
                step(progress, number, LayerState::Present, layer.size);
                None
            }
            false => Some(fetch(shared, source, *layer, number, progress)),
        };
        fetches.push(fetch);
    }
    let count = image.layers.len();
    let mut stored: Vec<StoredLayer> = Vec::new();
    for (number, (layer, fetch)) in image.layers.iter().zip(fetches).enumerate() {
        let below: Vec<Digest> = stored.iter().rev().map(|layer| layer.layer).collect();
        let failed = |source| ImageFault::Layer { number: number + 1, count, source };
        let lock = images.lock_of(layer.layer);
        let _alone = lock.lock().await;
        let here = fetch.is_none() || is_fetched(shared, layer.layer, number, count).await?;
        if !here && let Some(fetch) = fetch {
            let holding = fetch.await.map_err(|_| ImageFault::Stopping)??;
            let from = LayerSource::Blob { blob: layer.blob, contents: layer.contents };
            let spec = LayerSpec { layer: layer.layer, below, over_host: false, from };
            let read = |bytes: u64| step(progress, number, LayerState::Unpacking, bytes);
            read(0);
            let written = match unpack(shared, &spec, &read).await {
                Ok(facts) => {
                    let row = layer_row(layer.layer, Some(layer), facts);
                    shared.db.put_layer(row).await.map_err(Into::into)
                }
                Err(error) => Err(failed(error)),
            };
            // Whatever came of it: the layer is here, or this blob will never be one.
            let_go(holding).await;
            written?;
            step(progress, number, LayerState::Done, layer.size);
        } else {
            // Somebody else was faster; what has arrived here is not needed.
            let_go(images.blobs.hold(layer.blob)).await;
            step(progress, number, LayerState::Present, layer.size);
        }
        stored.push(StoredLayer {
            layer: layer.layer,
            blob: Some(layer.blob),
            size: layer.size,
            facts: LayerFacts::default(),
        });
    }
    {
        let lock = images.lock_of(finish);
        let _alone = lock.lock().await;
        if !shared.db.has_layer(finish).await? {
            let below = stored.iter().rev().map(|layer| layer.layer).collect();
            let spec = LayerSpec { layer: finish, below, over_host: false, from: LayerSource::Finish(last) };
            let failed = |source| ImageFault::Layer { number: count, count, source };
            let facts = unpack(shared, &spec, &|_| ()).await.map_err(failed)?;
            shared.db.put_layer(layer_row(finish, None, facts)).await?;
        }
        stored.push(StoredLayer { layer: finish, blob: None, size: 0, facts: LayerFacts::default() });
    }
    name(shared, image, false, stored, owner, names).await
}

/// Whether a layer that an image names was fetched before. An image that names a layer made here is refused: no bytes have that
/// digest, so whoever claims it has read the name somewhere and wants files that are not theirs.
async fn is_fetched(shared: &Shared, layer: Digest, number: usize, count: usize) -> Result<bool, ImageFault> {
    match shared.db.layer_origin(layer).await? {
        None => Ok(false),
        Some(LayerOrigin::Fetched) => Ok(true),
        Some(LayerOrigin::Made) => {
            let why = "its digest is not that of a layer which can be fetched".into();
            let source = Box::new(LayerFault::Damaged { why });
            Err(ImageFault::Layer {
                number: number + 1,
                count,
                source: BackendError::Layer { layer, source },
            })
        }
    }
}

/// A blob that is not needed any more. Removing it is work for the disk.
async fn let_go(holding: Holding) {
    // It does not panic, and if the engine ends before it, the sweep finds the blob.
    let _ = tokio::task::spawn_blocking(move || holding.remove()).await;
}

/// Writes the image and its names, and takes it into the stock.
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
        info!(image = %row.image, name = familiar(&row.name), "image is here");
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

/// Begins to get a blob, beside the others.
fn fetch(
    shared: &Arc<Shared>,
    source: &mut Source,
    layer: LayerBlob,
    number: usize,
    progress: &Arc<watch::Sender<PullProgress>>,
) -> Task<Result<Holding, RegistryError>> {
    let (shared, progress) = (Arc::clone(shared), Arc::clone(progress));
    match source {
        // The same blob may be two layers, and is held for each.
        Source::Here(held) => {
            let holding = held.remove(&layer.blob).unwrap_or_else(|| shared.images.blobs.hold(layer.blob));
            Task::spawn(async move { Ok(holding) })
        }
        Source::Registry(registry) => {
            let registry = Arc::clone(registry);
            Task::spawn(async move {
                // Nobody closes it.
                let _permit = shared.images.downloads.acquire().await;
                let arrived = |bytes: u64| step(&progress, number, LayerState::Fetching, bytes);
                let blobs = &shared.images.blobs;
                let holding = blobs.fetch(&registry, layer.blob, layer.size, &arrived).await?;
                step(&progress, number, LayerState::Fetched, layer.size);
                Ok(holding)
            })
        }
    }
}

/// Unpacks a layer. A launcher that died in the middle is asked again, once.
pub(crate) async fn unpack(
    shared: &Arc<Shared>,
    spec: &LayerSpec,
    read: &(dyn Fn(u64) + Send + Sync),
) -> Result<LayerFacts, BackendError> {
    unpack_in(shared, &place(shared).await, spec, read).await
}

/// One of the places for those who unpack at the same time.
pub(crate) struct Place<'a> {
    _permit: Option<SemaphorePermit<'a>>,
}

/// Waits for a place. There are few, and some are held for long.
pub(crate) async fn place(shared: &Shared) -> Place<'_> {
    // Nobody closes it.
    Place { _permit: shared.images.unpacks.acquire().await.ok() }
}

/// Unpacks a layer where a place was taken before.
pub(crate) async fn unpack_in(
    shared: &Arc<Shared>,
    _place: &Place<'_>,
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
