//! Makes an image of an existing sandbox: the files that the sandbox has written over its own image become one more
//! layer.
//!
//! The capture holds the sandbox while the layer is made, so that the sandbox's files do not change meanwhile
//! (`sandbox::hold`). A running sandbox runs on afterwards, and a paused one stays paused. If the daemon dies in the
//! middle, the next one ends the hold.

use std::sync::Arc;

use image::hash::Hasher;
use image::{Image, ImageConfig};
use runtime::{BackendError, LayerSpec};
use wire::launch::{HOST_LAYERS_MAX, LAYERS_MAX, LayerFacts};

use crate::image::{HOST, ImageFault, StoredImage, StoredLayer, made, pull};
use crate::sandbox::hold::hold;
use crate::sandbox::live::LiveSandbox;

/// Makes an image of a running or paused sandbox, under a name of its owner. `serial` identifies this capture.
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
    let alone = live.capturing.lock().await;
    // The capture waits for its turn before it freezes the sandbox: other unpacking work may take a long time.
    let place = pull::place(shared, &live.owner).await;
    let held = hold(live).await?;
    let made: Result<LayerFacts, _> = pull::unpack_in(shared, &place, &spec, &|_| ()).await;
    let lasted = held.release().await;
    drop((place, alone));
    let facts = made.map_err(failed)?;
    lasted.map_err(|broken| {
        failed(BackendError::Refused {
            doing: "read the files of a frozen sandbox".into(),
            source: std::io::Error::other(broken),
        })
    })?;
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
