//! What a stage consists of: layers and a configuration. How a stage begins from a base image, and how it is stored
//! as an image.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError};

use image::dockerfile::Program;
use image::hash::Hasher;
use image::layer::finish_digest;
use image::{Digest, Image, ImageConfig, Platform};
use runtime::LayerSpec;
use serde_json::json;
use wire::launch::{Finish, LayerFacts, LayerSource};

use super::builder::{Builder, Built};
use super::recovery::NAMES;
use crate::error::{BuildError, chain};
use crate::image::pull::{self, PullSpec};
use crate::image::{Choice, ImageFault, ImageName, StoredImage, StoredLayer};

/// A stage so far.
#[derive(Clone)]
pub(super) struct Rootfs {
    /// Whether the layers lie over the files of this machine (the image `host`).
    pub(super) over_host: bool,
    pub(super) layers: Vec<StoredLayer>,
    pub(super) config: Config,
}

/// The configuration that an image has, as far as a build changes or keeps it.
#[derive(Clone, Default)]
pub(super) struct Config {
    os: String,
    architecture: String,
    variant: Option<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) user: Option<String>,
    pub(super) cwd: Option<String>,
    pub(super) entrypoint: Vec<String>,
    pub(super) command: Vec<String>,
    pub(super) labels: BTreeMap<String, String>,
    /// The value of `SHELL`; empty for `/bin/sh -c`. Only this build knows it: an image built on top of the result
    /// starts with the default.
    pub(super) shell: Vec<String>,
}

impl Config {
    fn of(config: &ImageConfig) -> Self {
        Self {
            os: config.os.clone(),
            architecture: config.architecture.clone(),
            variant: config.variant.clone(),
            env: config.env.clone(),
            user: config.user.clone(),
            cwd: config.working_directory.clone(),
            entrypoint: config.entrypoint.clone(),
            command: config.command.clone(),
            labels: config.labels.clone(),
            shell: Vec::new(),
        }
    }

    /// The arguments to run a program with.
    pub(super) fn argv(&self, program: &Program) -> Vec<String> {
        match program {
            Program::Argv(argv) => argv.clone(),
            Program::Shell(script) if self.shell.is_empty() => {
                vec!["/bin/sh".into(), "-c".into(), script.clone()]
            }
            Program::Shell(script) => self.shell.iter().chain([script]).cloned().collect(),
        }
    }

    /// An empty configuration for the platform of this machine.
    fn of_this_machine() -> Self {
        let Platform { os, architecture, .. } = Platform::this();
        Self { os, architecture, ..Self::default() }
    }

    /// The configuration as JSON in the OCI format.
    fn text(&self) -> String {
        let env: Vec<String> = self.env.iter().map(|(name, value)| format!("{name}={value}")).collect();
        json!({
            "os": self.os, "architecture": self.architecture, "variant": self.variant,
            "config": {
                "Env": env, "User": self.user, "WorkingDir": self.cwd, "Entrypoint": self.entrypoint,
                "Cmd": self.command, "Labels": self.labels,
            },
            "rootfs": {"type": "layers", "diff_ids": []},
        })
        .to_string()
    }

    /// Sets an environment variable. An existing one keeps its position.
    pub(super) fn set(&mut self, name: String, value: String) {
        match self.env.iter_mut().find(|(known, _)| *known == name) {
            Some((_, old)) => *old = value,
            None => self.env.push((name, value)),
        }
    }
}

/// The configuration of an image over the files of this machine, as JSON.
pub(crate) fn host_config_text() -> String {
    Config::of_this_machine().text()
}

impl Builder {
    /// The image that a stage begins with.
    pub(super) async fn base_image(&self, from: &str, line: usize) -> Built<Rootfs> {
        let shared = self.engine.shared();
        let failed = |why: String| BuildError::Step { line, why };
        if from == "scratch" {
            let config = Config::of_this_machine();
            let finish = self.finish_layer(None).await.map_err(|error| failed(chain(&error)))?;
            return Ok(Rootfs { over_host: false, layers: vec![finish], config });
        }
        let Choice { name, .. } = shared.images.choose(from).map_err(|error| failed(error.to_string()))?;
        let ImageName::Reference(reference) = &name else {
            return Ok(Rootfs { over_host: true, layers: Vec::new(), config: Config::of_this_machine() });
        };
        let owner = &self.key.owner;
        let image = match shared.images.find(owner, &name.canonical()) {
            Some(image) => image,
            None => {
                let pull = pull::pull(shared, owner, PullSpec::new(reference.clone()));
                let images = pull.finished().await.map_err(|error| failed(chain(&error)))?;
                images.into_iter().next().ok_or_else(|| failed("the pull returned no image".into()))?
            }
        };
        let (over_host, layers) = (image.over_host, image.layers.clone());
        Ok(Rootfs { over_host, layers, config: Config::of(&image.config) })
    }

    /// The layer with the directories and files that every sandbox needs.
    async fn finish_layer(&self, below: Option<Digest>) -> Result<StoredLayer, ImageFault> {
        let layer = finish_digest(below, &Finish::default());
        let spec = LayerSpec {
            layer,
            below: below.into_iter().collect(),
            over_host: false,
            from: LayerSource::Finish(Finish::default()),
        };
        let facts = self.make_layer(&spec).await?;
        Ok(StoredLayer { layer, blob: None, size: 0, facts })
    }

    /// Makes a layer, unless it exists.
    pub(super) async fn make_layer(&self, spec: &LayerSpec) -> Result<LayerFacts, ImageFault> {
        let shared = self.engine.shared();
        let lock = shared.images.lock_of(spec.layer);
        let _alone = lock.lock().await;
        if let Some(facts) = shared.db.layer_facts(spec.layer).await? {
            return Ok(facts);
        }
        let failed =
            |source| ImageFault::Layer { number: spec.below.len() + 1, count: spec.below.len() + 1, source };
        let facts = pull::unpack(shared, &self.key.owner, spec, &|_| ()).await.map_err(failed)?;
        shared.db.put_layer(pull::layer_row(spec.layer, None, facts)).await?;
        Ok(facts)
    }

    /// Stores a stage as an image, under a name that is removed when the build ends.
    pub(super) async fn store_stage(
        &self,
        stage: usize,
        rootfs: &Rootfs,
    ) -> Result<Arc<StoredImage>, ImageFault> {
        let config_text = rootfs.config.text();
        let mut hasher = Hasher::new();
        hasher.update(config_text.as_bytes());
        if rootfs.over_host {
            hasher.update(crate::image::HOST.as_bytes());
        }
        for layer in &rootfs.layers {
            hasher.update(layer.layer.to_string().as_bytes());
        }
        let config = ImageConfig::parse(config_text.as_bytes()).map_err(|error| ImageFault::Keep {
            doing: "write the image's configuration",
            source: io::Error::other(error),
        })?;
        let image = Image { digest: hasher.finish(), config, config_text, layers: Vec::new() };
        self.images.lock().unwrap_or_else(PoisonError::into_inner).insert(image.digest);
        let names = vec![self.image_name(stage)];
        let owner = self.key.owner.to_string();
        let (over_host, layers) = (rootfs.over_host, rootfs.layers.clone());
        pull::name(self.engine.shared(), image, over_host, layers, owner, names).await
    }

    /// The name under which [`Builder::store_stage`] stores a stage.
    pub(super) fn image_name(&self, stage: usize) -> String {
        format!("{NAMES}{}-{stage}", self.build.id)
    }
}
