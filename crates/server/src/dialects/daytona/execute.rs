//! One-shot commands: `POST {toolbox}/process/execute`.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::{
    CommandEnv, CommandSpec, CommandState, EngineError, Field, GuestPath, Offsets, Outcome, Program,
};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::guest::ExitStatus;

use super::error::Refusal;
use super::read::{Target, ToolboxBody};
use super::sandboxes::user_of;
use crate::http::app::App;

/// Output in one answer. Who expects more writes it to a file.
pub const ANSWER_OUTPUT_MAX: usize = 32 << 20;
/// What a killed command exits with, where the kernel does not say otherwise.
const KILLED: i32 = 137;
/// What a command exits with that did not start.
const NOT_STARTED: i32 = -1;
/// Longer is as good as forever.
const LENGTH_MAX: Duration = Duration::from_secs(10 * 365 * 86_400);
/// How long a result is kept. Nobody can ask for it again.
const KEPT: Duration = Duration::from_secs(60);

/// What to run.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Execute {
    command: String,
    cwd: Option<String>,
    #[serde(alias = "env")]
    envs: Option<BTreeMap<String, String>>,
    timeout: Option<f64>,
}

impl Execute {
    fn spec(self) -> Result<CommandSpec, Refusal> {
        if self.command.trim().is_empty() {
            return Err(Refusal::toolbox(Field::Command.must("not be empty")));
        }
        // Both streams in one pipe, so that they come in the order in which they were written.
        let script = format!("exec 2>&1\n{}", self.command);
        let program = Program::script(script).map_err(|must| Refusal::toolbox(must.of(Field::Command)))?;
        let timeout = match self.timeout {
            None | Some(0.0) => None,
            Some(seconds) => {
                let length = Duration::try_from_secs_f64(seconds);
                Some(length.map_err(|_| Refusal::must("timeout", "be a number of seconds"))?.min(LENGTH_MAX))
            }
        };
        let cwd = self.cwd.filter(|cwd| !cwd.is_empty()).map(GuestPath::parse).transpose();
        let mut spec = CommandSpec::new(program);
        spec.cwd = cwd.map_err(|must| Refusal::toolbox(must.of(Field::Cwd)))?;
        let env = CommandEnv::new(self.envs.unwrap_or_default());
        spec.env = env.map_err(|must| Refusal::toolbox(must.of(Field::Env)))?;
        spec.timeout = timeout;
        spec.attendance.kept = Some(KEPT);
        Ok(spec)
    }
}

/// The exit code of a command that is over.
pub fn exit_code(outcome: &Outcome) -> i32 {
    let code = |status: &ExitStatus| match status {
        ExitStatus::Code(0) => KILLED,
        ExitStatus::Code(code) => *code,
        ExitStatus::Signal(signal) => 128 + signal,
    };
    match outcome {
        Outcome::Exited(code) => *code,
        Outcome::Signaled(signal) => 128 + signal,
        Outcome::Killed(status)
        | Outcome::OutOfMemory(status)
        | Outcome::TimedOut(status)
        | Outcome::IdleTimedOut(status) => code(status),
        Outcome::TimedOutUnheard | Outcome::SandboxGone => KILLED,
        Outcome::FailedToStart(_) => NOT_STARTED,
    }
}

/// Runs a command, and answers with its output when it is over.
pub async fn execute(
    State(app): State<App>,
    target: Target,
    ToolboxBody(body): ToolboxBody<Execute>,
) -> Result<Json<Value>, Refusal> {
    let mut stopping = app.stopping(&target.key);
    let timeout = body.timeout;
    let mut spec = body.spec()?;
    spec.user = user_of(&target.sandbox).map_err(Refusal::toolbox)?;
    let command = app.engine.run(&target.key.owner, target.sandbox.id, spec).await;
    let command = command.map_err(Refusal::toolbox)?;
    // Held for as long as the caller waits: output that it has not read is not dropped.
    let watching = command.attach(Offsets { stdout: u64::MAX, stderr: u64::MAX });
    let ended = tokio::select! {
        ended = command.ended() => ended,
        _ = stopping.wait() => return Err(Refusal::toolbox(EngineError::Stopping)),
    };
    drop(watching);
    let CommandState::Ended { outcome, .. } = &ended.state else {
        return Err(Refusal::toolbox(EngineError::Stopping));
    };
    match outcome {
        Outcome::TimedOut(_) | Outcome::TimedOutUnheard => {
            let message = format!("the command did not end within {} s", timeout.unwrap_or_default());
            Err(Refusal::daemon(StatusCode::REQUEST_TIMEOUT, "PROCESS_EXECUTION_TIMEOUT", message))
        }
        Outcome::FailedToStart(error) => {
            Ok(Json(json!({"exitCode": NOT_STARTED, "result": format!("the command cannot start: {error}")})))
        }
        outcome => {
            let output = command.output(ANSWER_OUTPUT_MAX).await.map_err(Refusal::toolbox)?;
            let code = exit_code(outcome);
            if output.stdout_cut {
                let message = format!(
                    "the command wrote more than {ANSWER_OUTPUT_MAX} bytes, and exited with {code}; write to a file instead"
                );
                return Err(Refusal::daemon(StatusCode::PAYLOAD_TOO_LARGE, "OUTPUT_TOO_LARGE", message));
            }
            Ok(Json(json!({"exitCode": code, "result": String::from_utf8_lossy(&output.stdout)})))
        }
    }
}
