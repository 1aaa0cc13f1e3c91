//! One build from start to end: finds the stages that are needed, builds them in order, and makes a template from the
//! last one.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use image::Digest;
use image::dockerfile::{Dockerfile, Instruction, Stage};
use tracing::{info, warn};

use super::context::Context;
use super::log::LogFile;
use super::recovery::{NAMES, delete_sandboxes, remove_names};
use super::rootfs::Rootfs;
use super::steps::{Expander, Work};
use super::{Build, BuildState};
use crate::Engine;
use crate::db::BuildRow;
use crate::error::{BuildError, chain};
use crate::image::Images;
use crate::model::Key;
use crate::model::NetworkPolicy;
use crate::template::{Prepared, TemplateName, TemplateSpec};

/// A build that runs. One task owns it.
pub(super) struct Builder {
    pub(super) engine: Engine,
    pub(super) key: Key,
    pub(super) build: Arc<Build>,
    pub(super) context: Arc<Context>,
    pub(super) file: Dockerfile,
    pub(super) arguments: BTreeMap<String, String>,
    pub(super) secrets: BTreeMap<String, Vec<u8>>,
    /// What `RUN` steps may reach.
    pub(super) network: NetworkPolicy,
    pub(super) spec: TemplateSpec,
    pub(super) template: TemplateName,
    pub(super) log: Mutex<LogFile>,
    /// The images of its stages so far.
    pub(super) images: Mutex<HashSet<Digest>>,
}

pub(super) type Built<T> = Result<T, BuildError>;

/// How a step was done.
pub(super) enum How {
    /// The step changed only the configuration.
    Noted,
    /// The step's layer exists from an earlier build.
    Cached,
    /// The step ran in a sandbox.
    Done,
}

impl Builder {
    /// Builds, cleans up, and records how the build ended.
    pub(super) async fn run(self, last: usize) {
        let began = Instant::now();
        let outcome = self.stages(last).await;
        let state = match outcome {
            Ok(version) => {
                self.say(&format!(
                    "template {} version {version} is ready ({:.1} s)\n",
                    self.template,
                    began.elapsed().as_secs_f64()
                ));
                info!(template = %self.template, version, "built");
                BuildState::Done { version }
            }
            Err(error) => {
                let reason = chain(&error);
                self.say(&format!("error: {reason}\n"));
                if let BuildError::Dockerfile { source } = &error {
                    self.say(&format!("hint: {}\n", source.hint()));
                }
                info!(template = %self.template, reason, "build failed");
                BuildState::Failed { reason }
            }
        };
        delete_sandboxes(self.engine.shared(), self.build.id).await;
        if let Err(error) = remove_names(self.engine.shared(), self.build.id).await {
            warn!(
                error = chain(&error),
                "cannot remove the image names of a build; the next start of the daemon removes them"
            );
        }
        let images = std::mem::take(&mut *self.images.lock().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = Images::drop_unused(self.engine.shared(), images.into_iter().collect()).await {
            warn!(
                error = chain(&error),
                "cannot remove the images of a build; a collection removes them later"
            );
        }
        let row = BuildRow {
            state: state.clone(),
            ended_at: Some(crate::observe::clock::now()),
            ..self.build.row()
        };
        if let Err(error) = self.engine.shared().db.put_build(row.clone()).await {
            warn!(error = chain(&error), "cannot record how a build ended");
        }
        self.build.view.send_modify(|view| (view.state, view.ended_at) = (state, row.ended_at));
    }

    /// Builds the last stage and the stages that it needs, and makes a template from it. Returns the version of the
    /// template.
    async fn stages(&self, last: usize) -> Built<u32> {
        let needed = self.needed(last)?;
        let mut done: HashMap<usize, Rootfs> = HashMap::new();
        let steps: usize = needed.iter().map(|number| self.file.stages[*number].steps.len() + 1).sum();
        let mut at = 0;
        for number in needed {
            let stage = &self.file.stages[number];
            let rootfs = self.stage(number, stage, &done, &mut at, steps).await?;
            done.insert(number, rootfs);
        }
        let rootfs = done.remove(&last).expect("the last stage is always needed");
        let line = self.file.stages[last].line;
        let failed = |error: &dyn std::error::Error| BuildError::Step { line, why: chain(error) };
        let image = self.store_stage(last, &rootfs).await.map_err(|error| failed(&error))?;
        // The name contains the digest, so that building the same image again makes no new version of the template.
        let resolved = format!("{NAMES}{}", &image.digest.hex()[..16]);
        let spec = TemplateSpec { image: resolved.clone(), ..self.spec.clone() };
        let prepared = Prepared { resolved, image: Some(image.digest) };
        let applied =
            self.engine.apply_template(&self.key.owner, self.template.clone(), spec, Some(prepared));
        Ok(applied.await.map_err(|error| failed(&error))?.version)
    }

    /// The numbers of a stage and of all stages that it is made from, in order.
    fn needed(&self, last: usize) -> Built<Vec<usize>> {
        let mut needed = vec![last];
        let mut at = 0;
        while let Some(number) = needed.get(at).copied() {
            let stage = &self.file.stages[number];
            let mut others: Vec<usize> =
                self.stage_named(&self.base_name(stage)?, number).into_iter().collect();
            for step in &stage.steps {
                if let Instruction::Copy { from: Some(from), .. } = &step.instruction {
                    others.extend(self.stage_named(from, number));
                }
            }
            for other in others {
                if !needed.contains(&other) {
                    needed.push(other);
                }
            }
            at += 1;
        }
        needed.sort_unstable();
        Ok(needed)
    }

    /// What a stage is made from: `FROM` with its variables expanded.
    fn base_name(&self, stage: &Stage) -> Built<String> {
        let globals = self.globals();
        Expander::of(stage.line).expand(&stage.from, &|name| globals.get(name).map(String::as_str))
    }

    /// The number of a stage before the stage `before`, by its name or number.
    pub(super) fn stage_named(&self, name: &str, before: usize) -> Option<usize> {
        let lower = name.to_ascii_lowercase();
        let named = self.file.stages[..before].iter().position(|stage| stage.name.as_deref() == Some(&lower));
        named.or_else(|| name.parse().ok().filter(|number| *number < before))
    }

    /// Builds one stage. `at` counts the steps of the whole build, of which there are `steps`.
    async fn stage(
        &self,
        number: usize,
        stage: &Stage,
        done: &HashMap<usize, Rootfs>,
        at: &mut usize,
        steps: usize,
    ) -> Built<Rootfs> {
        *at += 1;
        self.say(&format!("[{at}/{steps}] FROM {}\n", stage.from));
        let globals = self.globals();
        let from = self.base_name(stage)?;
        let rootfs = match self.stage_named(&from, number) {
            Some(other) => done.get(&other).cloned().expect("`needed` expands the same name"),
            None => self.base_image(&from, stage.line).await?,
        };
        let mut work = Work {
            number,
            rootfs,
            arguments: BTreeMap::new(),
            pending: Vec::new(),
            pins: Vec::new(),
            caches: Vec::new(),
        };
        let layers = work.rootfs.layers.iter().map(|layer| layer.layer);
        work.pins.push(self.engine.shared().images.pin(layers));
        for step in &stage.steps {
            *at += 1;
            self.say(&format!("[{at}/{steps}] {}\n", step.text));
            let began = Instant::now();
            let how = self.step(&mut work, step, &globals, done).await?;
            match how {
                How::Noted => {}
                How::Cached => self.say("  cached\n"),
                How::Done => self.say(&format!("  done in {:.1} s\n", began.elapsed().as_secs_f64())),
            }
        }
        if !work.pending.is_empty() {
            let line = stage.steps.last().map_or(stage.line, |step| step.line);
            self.layer(&mut work, line, "WORKDIR", &[], async |_, _| Ok(())).await?;
        }
        Ok(work.rootfs)
    }

    /// The values of `ARG` before the first `FROM`: the caller's, or the default.
    fn globals(&self) -> BTreeMap<String, String> {
        let given = |(name, default): &(String, Option<String>)| {
            let value = self.arguments.get(name).cloned().or_else(|| default.clone())?;
            Some((name.clone(), value))
        };
        self.file.arguments.iter().filter_map(given).collect()
    }
}

/// The number of the stage with this name, or of the last stage.
pub(super) fn stage_number(file: &Dockerfile, target: Option<&str>) -> Result<usize, BuildError> {
    match target {
        None => Ok(file.stages.len() - 1),
        Some(name) => {
            let name = name.to_ascii_lowercase();
            file.stages.iter().position(|stage| stage.name.as_deref() == Some(&name)).ok_or_else(|| {
                BuildError::Context { why: format!("the Dockerfile has no stage named `{name}`") }
            })
        }
    }
}
