//! A sandbox that goes on running becomes an image: what it has written over its own is kept as one more layer.
//!
//! Its processes stand still while the layer is made, so that nothing changes meanwhile, and go on afterwards as if nothing had
//! happened. Should the daemon die in the middle, whoever recovers has them go on (`snapshots`).

use std::sync::Arc;
use std::time::Duration;

use image::hash::Hasher;
use image::{Image, ImageConfig};
use runtime::{BackendError, LayerSpec};
use tracing::warn;
use wire::launch::{HOST_LAYERS_MAX, LAYERS_MAX, LayerFacts, Motion};

use crate::error::chain;
use crate::image::{HOST, ImageFault, StoredImage, StoredLayer, made, pull};
use crate::sandbox::live::LiveSandbox;

/// Between two attempts to have a sandbox go on.
const GO_ON_PAUSE: Duration = Duration::from_secs(1);

/// Makes an image of a running sandbox, under a name of its owner. `serial` tells this capture from all others.
pub(crate) async fn capture(
    live: &Arc<LiveSandbox>,
    serial: &str,
    name: String,
) -> Result<Arc<StoredImage>, ImageFault> {
    let shared = &live.shared;
    let (over_host, mut layers, config_text) = match live.stored_image() {
        Some(image) => (image.over_host, image.layers.clone(), image.config_text.clone()),
        None => (true, Vec::new(), crate::build::host_config_text()),
    };
    let most = if over_host { HOST_LAYERS_MAX } else { LAYERS_MAX - 1 };
    if layers.len() >= most {
        let doing = "add a layer: there would be too many";
        return Err(ImageFault::Keep {
            doing,
            source: std::io::Error::from(std::io::ErrorKind::InvalidInput),
        });
    }
    let below = layers.last().map(|layer| layer.layer);
    let layer = made::name(&shared.layer_names, &live.owner, below, &[b"snapshot", serial.as_bytes()]);
    let _pins = shared.images.pin(layers.iter().map(|layer| layer.layer).chain([layer]));
    let below = layers.iter().rev().map(|layer| layer.layer).collect();
    let spec = LayerSpec { layer, below, over_host, from: live.written() };
    let failed = |source: BackendError| ImageFault::Layer {
        number: layers.len() + 1,
        count: layers.len() + 1,
        source,
    };
    // Standing still is not counted: the first of two captures to end would have it go on under the other.
    let alone = live.still.lock().await;
    // Its turn comes before it stands still: what others unpack takes as long as it takes.
    let place = pull::place(shared).await;
    let made: Result<LayerFacts, _> = match shared.backend.freeze(live.id, Motion::Still).await {
        Ok(()) => pull::unpack_in(shared, &place, &spec, &|_| ()).await,
        Err(error) => Err(error),
    };
    // Whatever came of it: one that could not be stopped in time may stand still by now.
    go_on(live).await;
    drop((place, alone));
    let facts = made.map_err(failed)?;
    shared.db.put_layer(pull::layer_row(layer, None, facts)).await?;
    layers.push(StoredLayer { layer, blob: None, size: 0, facts });
    let config = ImageConfig::parse(config_text.as_bytes()).map_err(|error| ImageFault::Keep {
        doing: "write the image's configuration",
        source: std::io::Error::other(error),
    })?;
    let mut hasher = Hasher::new();
    hasher.update(config_text.as_bytes());
    if over_host {
        hasher.update(HOST.as_bytes());
    }
    for layer in &layers {
        hasher.update(layer.layer.to_string().as_bytes());
    }
    let image = Image { digest: hasher.finish(), config, config_text, layers: Vec::new() };
    pull::name(shared, image, over_host, layers, live.owner.to_string(), vec![name]).await
}

/// Has a sandbox go on. That may fail where the launcher dies; then it is tried until it works, or the sandbox is no more.
async fn go_on(live: &Arc<LiveSandbox>) {
    while let Err(error) = live.shared.backend.freeze(live.id, Motion::Going).await {
        if !live.state().takes_commands() {
            return;
        }
        warn!(sandbox = %live.id, error = chain(&error), "a sandbox that was captured stands still; trying again");
        tokio::time::sleep(GO_ON_PAUSE).await;
    }
}
