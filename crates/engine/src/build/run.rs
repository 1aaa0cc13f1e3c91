//! `RUN`: a command in the sandbox of a step, with the secrets that it names.

use std::sync::Arc;
use std::time::Duration;

use crate::model::Program as Run;
use archive::{Entry, EntryKind};
use bytes::Bytes;
use image::dockerfile::{Program, Secret};
use serde_json::json;
use wire::files::{Condition, FileErrorKind, Links, WriteOptions};

use super::builder::{Builder, Built, How};
use super::sandbox::{Broken, STEP_SECONDS, end_archive, ended};
use super::steps::Work;
use crate::error::{BuildError, EngineError, Field, Must};
use crate::files::Files;
use crate::model::{CommandEnv, CommandSpec, GuestPath, Outcome};
use crate::sandbox::live::LiveSandbox;

/// A memory file system that every sandbox has.
const MEMORY: &str = "/dev/shm";

impl Builder {
    pub(super) async fn run_step(
        &self,
        work: &mut Work,
        line: usize,
        program: &Program,
        secrets: &[Secret],
    ) -> Built<How> {
        let missing = |secret: &&Secret| secret.required && !self.secrets.contains_key(&secret.id);
        if let Some(secret) = secrets.iter().find(missing) {
            let why = format!("the secret `{}` was not given", secret.id);
            return Err(BuildError::Step { line, why });
        }
        let argv = work.rootfs.config.argv(program);
        let places: Vec<String> =
            secrets.iter().map(|secret| format!("{} {}", secret.id, secret.target)).collect();
        let caches: Vec<&str> = work.caches.iter().map(|cache| cache.target.as_str()).collect();
        // Steps without caches keep the names of their layers.
        let key = match caches.is_empty() {
            true => json!([argv, work.arguments, places]),
            false => json!([argv, work.arguments, places, caches]),
        }
        .to_string();
        // What a step could reach decides what it wrote. Steps without a network keep the names of their layers.
        let network = self.network.words().join("\n");
        let mut parts = vec![key.as_bytes()];
        if !self.network.is_none() {
            parts.extend([b"network".as_slice(), network.as_bytes()]);
        }
        parts.append(&mut self.secret_parts(secrets));
        let wrong = |must: Must, field: Field| BuildError::Step { line, why: must.of(field).to_string() };
        let program = Run::argv(argv).map_err(|must| wrong(must, Field::Argv))?;
        let spec = CommandSpec {
            env: CommandEnv::new(work.arguments.clone()).map_err(|must| wrong(must, Field::Env))?,
            cwd: Some(GuestPath::parse(work.cwd()).map_err(|must| wrong(must, Field::Cwd))?),
            timeout: Some(Duration::from_secs(STEP_SECONDS)),
            ..CommandSpec::new(program)
        };
        self.layer(work, line, "RUN", &parts, async |builder, sandbox| {
            let placed = builder.place_secrets(sandbox, secrets).await?;
            let outcome = builder.command(sandbox, spec).await?;
            // The secrets are removed before anything that the step wrote is kept.
            builder.remove_secrets(sandbox, &placed).await?;
            match outcome {
                Outcome::Exited(0) => Ok(()),
                other => Err(Broken(ended(&other))),
            }
        })
        .await
    }

    /// What the name of a step's layer depends on because of its secrets: their contents, since what the step writes may depend on
    /// them. The name reveals nothing about them, because it is a tag under a secret key.
    fn secret_parts(&self, secrets: &[Secret]) -> Vec<&[u8]> {
        let mut parts = Vec::new();
        for secret in secrets {
            match self.secrets.get(&secret.id) {
                Some(value) => parts.extend([b"given".as_slice(), value]),
                None => parts.push(b"not given"),
            }
        }
        parts
    }

    /// Puts those of the step's secrets that the caller gave where the step wants them. Returns the paths to remove
    /// after the step.
    async fn place_secrets(
        &self,
        sandbox: &Arc<LiveSandbox>,
        secrets: &[Secret],
    ) -> Result<Vec<String>, Broken> {
        let files = Files::new(Arc::clone(&sandbox.transfers), None);
        let given = secrets.iter().filter_map(|secret| Some((secret, self.secrets.get(&secret.id)?)));
        let mut placed = Vec::new();
        for (number, (secret, value)) in given.enumerate() {
            // The step's directories stay as they were: directories that are made for the secret are removed with it.
            let removed = first_missing_directory(&files, &secret.target).await?;
            let kept = format!("{MEMORY}/secret-{number}");
            write_secret(&files, &kept, value).await?;
            link_secret(&files, &secret.target, kept).await?;
            placed.push(removed.unwrap_or_else(|| secret.target.clone()));
        }
        Ok(placed)
    }

    /// Removes what [`Builder::place_secrets`] has made, if the step has not done so.
    async fn remove_secrets(&self, sandbox: &Arc<LiveSandbox>, placed: &[String]) -> Result<(), Broken> {
        let files = Files::new(Arc::clone(&sandbox.transfers), None);
        for path in placed {
            match files.remove(path.as_bytes(), true, Condition::None).await {
                Ok(()) => {}
                Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// The first directory of `target`'s path that does not exist.
async fn first_missing_directory(files: &Files, target: &str) -> Result<Option<String>, Broken> {
    let parts: Vec<&str> = target.split('/').filter(|part| !part.is_empty()).collect();
    let mut path = String::new();
    for part in &parts[..parts.len().saturating_sub(1)] {
        path = format!("{path}/{part}");
        match files.stat(path.as_bytes(), Links::Follow).await {
            Ok(_) => {}
            Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {
                return Ok(Some(path));
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Writes a secret to memory that ends with the sandbox, so that its bytes reach no disk.
async fn write_secret(files: &Files, path: &str, value: &[u8]) -> Result<(), Broken> {
    let options = WriteOptions {
        path: path.as_bytes().to_vec(),
        mode: Some(0o444),
        parents: true,
        size: Some(value.len() as u64),
        condition: Condition::None,
    };
    let mut writing = files.write(options).await?;
    writing.write(Bytes::copy_from_slice(value)).await?;
    writing.finish().await?;
    Ok(())
}

/// Makes a symbolic link from `target` to the secret at `kept`. A step that moves the secret moves only the link.
async fn link_secret(files: &Files, target: &str, kept: String) -> Result<(), Broken> {
    let (directory, name) = target.rsplit_once('/').unwrap_or(("", target));
    if !directory.is_empty() {
        files.make_directory(directory.as_bytes(), true, None).await?;
    }
    let link = Entry {
        path: name.as_bytes().to_vec(),
        kind: EntryKind::Symlink,
        link: kept.into_bytes(),
        size: 0,
        mode: 0o777,
        uid: 0,
        gid: 0,
        modified: 0,
        attributes: Vec::new(),
    };
    let mut unpacking = files.unpack(format!("{directory}/").as_bytes()).await?;
    unpacking.write(archive::entry_header(&link).into()).await?;
    end_archive(unpacking).await
}
