//! The way from the engine to a sandbox's files.

use std::sync::Arc;

use wire::SandboxId;

use crate::{Engine, EngineError, Files, GuestUser, Owner};

impl Engine {
    /// A sandbox's files, as a user of the sandbox sees them: a name or a number, optionally with `:group`; root by
    /// default.
    pub fn files(&self, owner: &Owner, id: SandboxId, user: Option<GuestUser>) -> Result<Files, EngineError> {
        Ok(Files::new(Arc::clone(&self.live(owner, id)?.transfers), user))
    }
}
