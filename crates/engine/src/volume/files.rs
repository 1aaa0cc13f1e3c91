//! Reads and writes a volume's files for callers who have no sandbox that mounts it.

use std::time::Duration;

use tracing::warn;
use wire::SandboxId;
use wire::launch::Access;

use crate::error::{EngineError, Field, chain};
use crate::files::Files;
use crate::model::labels::Labels;
use crate::model::lifetime::{Action, Lifetime, Rule, Since};
use crate::model::{Key, Owner, SandboxSpec, Wait};
use crate::volume::VolumeMount;

/// Where the sandbox that reads or writes a volume's files mounts it.
const HELPER_PATH: &str = "/mnt/volume";
/// The label of such a sandbox; the value is the volume's name.
const HELPER_LABEL: &str = "shoal.volume";
/// How long such a sandbox stays after its last use if the daemon was killed and could not delete it.
const HELPER_IDLE_MAX: Duration = Duration::from_secs(300);

/// A volume's files, through a sandbox that mounts the volume and does nothing else, so that nothing on the host follows a link that
/// a guest put there. Dropping this deletes the sandbox; if the daemon is killed, the sandbox's lifetime does.
pub struct VolumeFiles {
    /// The files of that sandbox.
    pub files: Files,
    helper: SandboxId,
    engine: crate::Engine,
    owner: Owner,
}

impl crate::Engine {
    /// Opens a volume's files. While they are open, the helper counts as a sandbox of the key's owner.
    pub async fn volume_files(
        &self,
        key: &Key,
        name: &str,
        access: Access,
    ) -> Result<VolumeFiles, EngineError> {
        let rule = Rule { since: Since::LastUse, after: HELPER_IDLE_MAX, action: Action::Delete };
        let labels = [(HELPER_LABEL.to_owned(), name.to_owned())].into();
        let spec = SandboxSpec {
            mounts: vec![VolumeMount { volume: name.into(), path: HELPER_PATH.into(), access }],
            labels: Labels::new(labels).unwrap_or_default(),
            lifetime: Lifetime::new(vec![rule])?,
            ..SandboxSpec::default()
        };
        // A task of its own: if the caller disconnects, the result is dropped, which deletes the sandbox.
        let (engine, key) = (self.clone(), key.clone());
        let opening = tokio::spawn(async move {
            let helper = engine.create(&key, spec, Wait::Ready).await?.id;
            let files = engine.files(&key.owner, helper, None)?;
            Ok(VolumeFiles { files, helper, engine, owner: key.owner })
        });
        opening.await.map_err(|_| EngineError::Stopping)?
    }
}

impl VolumeFiles {
    /// Converts a path in the volume to a path in the sandbox.
    pub fn path(&self, in_volume: &[u8]) -> Result<Vec<u8>, EngineError> {
        if !in_volume.starts_with(b"/") || in_volume.split(|byte| *byte == b'/').any(|part| part == b"..") {
            return Err(Field::Path.must("be an absolute path in the volume, without `..`"));
        }
        let mut path = HELPER_PATH.as_bytes().to_vec();
        path.extend_from_slice(in_volume);
        Ok(path)
    }

    /// Deletes the sandbox, and returns when it is gone: the volume can be deleted then.
    pub async fn close(self) -> Result<(), EngineError> {
        // `drop` deletes the sandbox again, which is harmless.
        self.engine.delete(&self.owner, self.helper).await
    }
}

impl Drop for VolumeFiles {
    fn drop(&mut self) {
        let (engine, owner, helper) = (self.engine.clone(), self.owner.clone(), self.helper);
        let runtime = engine.shared().runtime.clone();
        runtime.spawn(async move {
            match engine.delete(&owner, helper).await {
                Ok(()) | Err(EngineError::SandboxNotFound { .. } | EngineError::Stopping) => {}
                // The sandbox's lifetime deletes it later.
                Err(error) => {
                    warn!(sandbox = %helper, error = chain(&error), "cannot delete a volume's sandbox")
                }
            }
        });
    }
}
