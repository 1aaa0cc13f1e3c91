//! The home directory of a sandbox's user.

use engine::{CommandSpec, EngineError, Field, GuestUser, Key, Program, Sandbox};

use crate::http::app::App;

/// What `HOME` is for a user of a sandbox, which only the sandbox knows. `/` if it is not set.
pub async fn home(
    app: &App,
    key: &Key,
    sandbox: &Sandbox,
    user: Option<GuestUser>,
) -> Result<String, EngineError> {
    let program = Program::script("printf %s \"$HOME\"").map_err(|must| must.of(Field::Command))?;
    let spec = CommandSpec { user, ..CommandSpec::new(program) };
    let command = app.engine.run(&key.owner, sandbox.id, spec).await?;
    command.ended().await;
    let output = command.output(wire::files::PATH_MAX).await?;
    let home = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(if home.starts_with('/') { home } else { "/".into() })
}
