//! The request that init gets: the caller's, combined with settings of the image, the template and the sandbox.

use std::collections::BTreeMap;
use std::time::Duration;

use ::image::ImageConfig;
use wire::CommandId;
use wire::guest::{self, Cwd, Handle, Start};

use crate::model::defaults::{ENV, WORKSPACE};
use crate::model::template::TemplateSpec;
use crate::{Argv, COMMAND_BYTES_MAX, CommandEnv, CommandSpec, EngineError, Field, Program};

/// The time between SIGTERM and the kill of a command's whole tree at a timeout: enough to flush a file.
const GRACE: Duration = Duration::from_secs(2);

/// The defaults of a sandbox's commands.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub template: Option<&'a TemplateSpec>,
    pub image: Option<&'a ImageConfig>,
    /// The sandbox's own variables.
    pub env: &'a BTreeMap<String, String>,
    /// Variables that stand for secrets.
    pub placeholders: &'a [(String, String)],
    /// Whether it has files with the roots that programs should trust.
    pub trust: bool,
}

impl Surroundings<'_> {
    /// The template's, or the image's unless that is the root, or [`WORKSPACE`].
    pub fn working_directory(&self) -> String {
        let template = self.template.and_then(|template| template.cwd.as_ref());
        template.map(|path| path.as_str().to_owned()).unwrap_or_else(|| {
            let own = self.image.and_then(|image| image.working_directory.as_deref());
            own.filter(|path| *path != "/").unwrap_or(WORKSPACE).to_owned()
        })
    }
}

/// The request for init, without the handle.
pub(crate) fn start_of(
    around: Surroundings<'_>,
    spec: CommandSpec,
    id: &CommandId,
) -> Result<Start, EngineError> {
    let Surroundings { template, image, env, placeholders, trust } = around;
    let user = spec.user.as_ref().or_else(|| template.and_then(|template| template.user.as_ref()));
    let start = Start {
        handle: Handle(0),
        id: id.to_string(),
        program: program(spec.program, template, image)?,
        env: environment(template, image, spec.terminal.is_some(), (placeholders, env), spec.env, trust),
        cwd: match spec.cwd {
            Some(path) => Cwd::Named(path.into_string()),
            None => Cwd::Default(around.working_directory()),
        },
        user: user
            .map(|user| user.as_str().to_owned())
            .or_else(|| image.and_then(|image| image.user.clone())),
        stdin: spec.stdin,
        terminal: spec.terminal,
        timeout_ms: spec.timeout.and_then(milliseconds),
        idle_timeout_ms: spec.idle_timeout.and_then(milliseconds),
        grace_ms: GRACE.as_millis() as u64,
    };
    match start_size(&start) {
        size if size > COMMAND_BYTES_MAX => {
            let rule = format!("have at most {COMMAND_BYTES_MAX} bytes with its environment, got {size}");
            Err(Field::Command.must(rule))
        }
        _ => Ok(start),
    }
}

/// The program of the request, or the template's command, or the image's.
fn program(
    program: Program,
    template: Option<&TemplateSpec>,
    image: Option<&ImageConfig>,
) -> Result<guest::Program, EngineError> {
    let own = match program {
        Program::Argv(argv) => return Ok(guest::Program::Argv(argv.into_words())),
        Program::Script(script) => return Ok(guest::Program::Shell { script: script.into_string() }),
        Program::Default => template.and_then(|template| template.command.clone()),
    };
    let words = || {
        image.into_iter().flat_map(|image| image.entrypoint.iter().chain(&image.command)).cloned().collect()
    };
    // The image's command was written by a stranger, so it is checked too.
    let argv = own.map_or_else(|| Argv::new(words()), Ok).map_err(|must| must.of(Field::Argv))?;
    Ok(guest::Program::Argv(argv.into_words()))
}

/// The variables of Shoal, the image, the template, the sandbox and the command; later ones win.
fn environment(
    template: Option<&TemplateSpec>,
    config: Option<&ImageConfig>,
    has_terminal: bool,
    (placeholders, of_sandbox): (&[(String, String)], &BTreeMap<String, String>),
    of_command: CommandEnv,
    trust: bool,
) -> Vec<(String, String)> {
    let own = ENV.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut env: BTreeMap<String, String> = own.collect();
    if trust {
        let variables = runtime::storage::trust::trust_variables();
        env.extend(variables.into_iter().map(|(name, value)| (name.to_owned(), value)));
    }
    env.extend(config.into_iter().flat_map(|config| config.env.iter().cloned()));
    env.extend(template.into_iter().flat_map(|template| template.env.pairs().clone()));
    if has_terminal {
        env.insert("TERM".into(), "xterm-256color".into());
    }
    env.extend(placeholders.iter().cloned());
    env.extend(of_sandbox.clone());
    env.extend(of_command.into_pairs());
    env.into_iter().collect()
}

/// Zero means no limit. A nonzero duration stays nonzero: rounding it down would mean no limit.
fn milliseconds(length: Duration) -> Option<u64> {
    (!length.is_zero()).then(|| u64::try_from(length.as_millis()).unwrap_or(u64::MAX).max(1))
}

/// The approximate size of a request in memory.
pub(super) fn start_size(start: &Start) -> usize {
    let program = match &start.program {
        guest::Program::Argv(argv) => argv.iter().map(|argument| argument.len() + 24).sum(),
        guest::Program::Shell { script } => script.len(),
        // File operations are no commands; the length of a path bounds them.
        guest::Program::Files(_) => 0,
    };
    let env: usize = start.env.iter().map(|(name, value)| name.len() + value.len() + 48).sum();
    program + env + 512
}
