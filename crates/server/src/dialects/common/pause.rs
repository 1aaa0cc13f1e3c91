//! Stopping and starting a sandbox as other systems mean it: its processes end, its files stay.

use engine::{EngineError, Kept, Key, PauseSpec, Sandbox};

use crate::http::app::App;

/// Ends the processes of a sandbox and keeps its files. Has no effect on one that is stopped.
pub async fn stop(app: &App, key: &Key, sandbox: &Sandbox) -> Result<Sandbox, EngineError> {
    let spec = PauseSpec { kept: Kept::Dropped, ..PauseSpec::default() };
    app.engine.pause(&key.owner, sandbox.id, spec).await
}

/// Lets a stopped sandbox run again. Has no effect on one that runs.
pub async fn start(app: &App, key: &Key, sandbox: &Sandbox) -> Result<Sandbox, EngineError> {
    app.engine.resume(key, sandbox.id).await
}
