//! What init is asked to start: the request, joined with what the image, the template and the sandbox say.

use std::collections::BTreeMap;
use std::time::Duration;

use ::image::ImageConfig;
use wire::CommandId;
use wire::guest::{Cwd, Handle, Program, Start};

use crate::model::check::{check_env, check_user};
use crate::model::defaults::{ENV, WORKSPACE};
use crate::model::template::TemplateSpec;
use crate::{COMMAND_BYTES_MAX, CommandSpec, EngineError};

/// Between SIGTERM and the end of a command's whole tree, when a timeout strikes: time to flush a file.
const GRACE: Duration = Duration::from_secs(2);

/// What a sandbox's commands begin with where they name nothing else.
#[derive(Clone, Copy)]
pub(crate) struct Surroundings<'a> {
    pub template: Option<&'a TemplateSpec>,
    pub image: Option<&'a ImageConfig>,
    /// The sandbox's own variables.
    pub env: &'a BTreeMap<String, String>,
}

impl Surroundings<'_> {
    /// The template's, or the image's unless that is the root, or [`WORKSPACE`].
    pub fn working_directory(&self) -> String {
        let template = self.template.and_then(|template| template.cwd.clone());
        template.unwrap_or_else(|| {
            let own = self.image.and_then(|image| image.working_directory.as_deref());
            own.filter(|path| *path != "/").unwrap_or(WORKSPACE).to_owned()
        })
    }
}

/// What init is asked to start, without the handle.
pub(crate) fn start_of(
    around: Surroundings<'_>,
    spec: CommandSpec,
    id: &CommandId,
) -> Result<Start, EngineError> {
    check_env(&spec.env, COMMAND_BYTES_MAX)?;
    check_user(spec.user.as_deref())?;
    let Surroundings { template, image, env } = around;
    let start = Start {
        handle: Handle(0),
        id: id.to_string(),
        program: program(spec.program, template, image)?,
        env: environment(template, image, spec.terminal.is_some(), env, spec.env),
        cwd: match spec.cwd {
            Some(path) => Cwd::Named(checked_cwd(path)?),
            None => Cwd::Default(around.working_directory()),
        },
        user: spec
            .user
            .or_else(|| template.and_then(|template| template.user.clone()))
            .or_else(|| image.and_then(|image| image.user.clone())),
        stdin: spec.stdin,
        terminal: spec.terminal,
        timeout_ms: spec.timeout.and_then(milliseconds),
        idle_timeout_ms: spec.idle_timeout.and_then(milliseconds),
        grace_ms: GRACE.as_millis() as u64,
    };
    match start_size(&start) {
        size if size > COMMAND_BYTES_MAX => {
            let why = format!("it has {size} bytes with its environment, the limit is {COMMAND_BYTES_MAX}");
            Err(EngineError::Invalid { what: "command", why })
        }
        _ => Ok(start),
    }
}

fn invalid(what: &'static str, why: &str) -> EngineError {
    EngineError::Invalid { what, why: why.into() }
}

/// The program of the request. One without arguments is the template's command, or the image's.
fn program(
    mut program: Program,
    template: Option<&TemplateSpec>,
    config: Option<&ImageConfig>,
) -> Result<Program, EngineError> {
    if let Program::Argv(argv) = &mut program
        && argv.is_empty()
    {
        match (template.filter(|template| !template.command.is_empty()), config) {
            (Some(template), _) => argv.extend(template.command.iter().cloned()),
            (None, Some(config)) => argv.extend(config.entrypoint.iter().chain(&config.command).cloned()),
            (None, None) => {}
        }
    }
    match &program {
        Program::Argv(argv) if argv.first().is_none_or(String::is_empty) => {
            Err(invalid("argv", "it names no program"))
        }
        Program::Argv(argv) if argv.iter().any(|argument| argument.contains('\0')) => {
            Err(invalid("argv", "an argument contains a NUL byte"))
        }
        Program::Shell { script } if script.contains('\0') => {
            Err(invalid("script", "it contains a NUL byte"))
        }
        Program::Files(_) => Err(invalid("program", "a file operation is not a command")),
        Program::Argv(_) | Program::Shell { .. } => Ok(program),
    }
}

/// Shoal's own variables, the image's, the template's, the sandbox's, the command's; the later wins.
fn environment(
    template: Option<&TemplateSpec>,
    config: Option<&ImageConfig>,
    has_terminal: bool,
    of_sandbox: &BTreeMap<String, String>,
    of_command: BTreeMap<String, String>,
) -> Vec<(String, String)> {
    let own = ENV.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    let mut env: BTreeMap<String, String> = own.collect();
    env.extend(config.into_iter().flat_map(|config| config.env.iter().cloned()));
    env.extend(template.into_iter().flat_map(|template| template.env.clone()));
    if has_terminal {
        env.insert("TERM".into(), "xterm-256color".into());
    }
    env.extend(of_sandbox.clone());
    env.extend(of_command);
    env.into_iter().collect()
}

fn checked_cwd(path: String) -> Result<String, EngineError> {
    if !path.starts_with('/') {
        return Err(invalid("cwd", "it is not an absolute path"));
    }
    if path.contains('\0') {
        return Err(invalid("cwd", "it contains a NUL byte"));
    }
    Ok(path)
}

/// Zero means none. A length that is not zero stays one: rounding it down would mean none too.
fn milliseconds(length: Duration) -> Option<u64> {
    (!length.is_zero()).then(|| u64::try_from(length.as_millis()).unwrap_or(u64::MAX).max(1))
}

/// About what a request takes in memory.
pub(super) fn start_size(start: &Start) -> usize {
    let program = match &start.program {
        Program::Argv(argv) => argv.iter().map(|argument| argument.len() + 24).sum(),
        Program::Shell { script } => script.len(),
        // Not a command's: bounded by the length of a path.
        Program::Files(_) => 0,
    };
    let env: usize = start.env.iter().map(|(name, value)| name.len() + value.len() + 48).sum();
    program + env + 512
}
