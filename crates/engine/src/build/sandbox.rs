//! The sandboxes where steps run, and the commands that run there.

use std::sync::Arc;

use super::builder::Builder;
use crate::command::calls::run_in;
use crate::error::{EngineError, chain};
use crate::files::Unpacking;
use crate::model::template::VolumeMount;
use crate::model::{CommandSpec, CommandState, NetworkPolicy, Offsets, Outcome, OutputEvent, SandboxSpec};
use crate::sandbox::live::LiveSandbox;

/// How long the command of one step may run: builds of large programs take hours.
pub(super) const STEP_SECONDS: u64 = 6 * 3600;

/// Why a step failed, as text for the log.
pub(super) struct Broken(pub(super) String);

impl From<EngineError> for Broken {
    fn from(error: EngineError) -> Self {
        Self(chain(&error))
    }
}

impl Builder {
    /// Creates a sandbox over the image that [`Builder::store_stage`] stored for a stage, with the limits that the template will have.
    pub(super) async fn create_sandbox(
        &self,
        stage: usize,
        mounts: Vec<VolumeMount>,
        network: NetworkPolicy,
    ) -> Result<Arc<LiveSandbox>, Broken> {
        let spec = SandboxSpec {
            image: Some(self.image_name(stage)),
            cpu_millis: Some(self.spec.cpu_millis),
            memory_bytes: Some(self.spec.memory_bytes),
            mounts,
            network: Some(network),
            history: Some(0),
            ..SandboxSpec::default()
        };
        Ok(self.engine.create_for_build(&self.key, self.build.id, spec).await?)
    }

    pub(super) async fn delete_sandbox(&self, sandbox: &Arc<LiveSandbox>) -> Result<(), Broken> {
        Ok(crate::sandbox::calls::delete(sandbox).await?)
    }

    /// Runs a command to its end, and writes its output to the log.
    pub(super) async fn command(
        &self,
        sandbox: &Arc<LiveSandbox>,
        spec: CommandSpec,
    ) -> Result<Outcome, Broken> {
        let command =
            run_in(self.engine.shared(), &sandbox.commands, spec, |spec, id| sandbox.start_of(spec, id))
                .await?;
        let mut output = command.attach(Offsets::default());
        while let Some(event) = output.next().await {
            match event {
                OutputEvent::Bytes { bytes, .. } => self.append(&bytes),
                OutputEvent::Lost { .. } => self.say("[output was lost]\n"),
                OutputEvent::Ended(command) => {
                    if let CommandState::Ended { outcome, .. } = command.state {
                        return Ok(outcome);
                    }
                }
                OutputEvent::Started { .. } | OutputEvent::StdinAck { .. } | OutputEvent::Stalled => {}
            }
        }
        match command.ended().await.state {
            CommandState::Ended { outcome, .. } => Ok(outcome),
            CommandState::Starting | CommandState::Running { .. } => {
                Err(Broken("the sandbox ended before the command".into()))
            }
        }
    }
}

/// How a command ended, as text for the log.
pub(super) fn ended(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Exited(code) => format!("the command exited with {code}"),
        Outcome::Signaled(signal) => format!("the command was ended by signal {signal}"),
        Outcome::TimedOut(_) | Outcome::TimedOutUnheard | Outcome::IdleTimedOut(_) => {
            format!("the command took longer than {STEP_SECONDS} seconds")
        }
        Outcome::Killed(_) => "the command was killed".into(),
        Outcome::OutOfMemory(_) => "the command ran out of memory; give the build more memory".into(),
        Outcome::FailedToStart(error) => format!("the command could not be started: {error}"),
        Outcome::SandboxGone => "the sandbox ended while the command was running".into(),
    }
}

/// Sends the two empty blocks that end an archive, and waits until the sandbox has unpacked it.
pub(super) async fn end_archive(mut unpacking: Unpacking) -> Result<(), Broken> {
    unpacking.write(vec![0; 2 * archive::BLOCK].into()).await?;
    unpacking.finish().await?;
    Ok(())
}
