//! What each instruction of a Dockerfile does to a stage.
//!
//! Most change only the configuration; `RUN` (see `run`) and `COPY` (see `copy`) add a layer.

use std::collections::{BTreeMap, HashMap};

use image::dockerfile::{self, CacheMount, DockerfileError, Instruction, Problem, Program, Step};

use super::builder::{Builder, Built, How};
use super::copy::Copy;
use super::rootfs::Rootfs;
use crate::SANDBOX_ENV_BYTES_MAX;
use crate::error::BuildError;
use crate::image::pull;
use crate::model::defaults;

/// A stage while it is built.
pub(super) struct Work {
    pub(super) number: usize,
    pub(super) rootfs: Rootfs,
    /// The build arguments that `ARG` has declared so far.
    pub(super) arguments: BTreeMap<String, String>,
    /// Directories of `WORKDIR` that the next sandbox makes first.
    pub(super) pending: Vec<String>,
    /// Keeps the stage's layers from being collected before an image has them.
    pub(super) pins: Vec<crate::image::Pins>,
    /// The caches of the step that runs.
    pub(super) caches: Vec<CacheMount>,
}

impl Builder {
    /// Does one instruction of a stage.
    pub(super) async fn step(
        &self,
        work: &mut Work,
        step: &Step,
        globals: &BTreeMap<String, String>,
        done: &HashMap<usize, Rootfs>,
    ) -> Built<How> {
        let line = step.line;
        let mut expander = Expander::of(line);
        match &step.instruction {
            Instruction::Env(pairs) => work.set_env(&mut expander, pairs)?,
            Instruction::Label(pairs) => work.set_labels(&mut expander, pairs)?,
            Instruction::Arg(arguments) => self.declare(work, &mut expander, arguments, globals)?,
            Instruction::Workdir(path) => work.change_directory(&mut expander, path)?,
            Instruction::User(user) => work.rootfs.config.user = Some(work.expand(&mut expander, user)?),
            Instruction::Cmd(program) => work.rootfs.config.command = work.argv(program),
            Instruction::Shell(argv) => work.rootfs.config.shell = argv.clone(),
            Instruction::Entrypoint(program) => {
                work.rootfs.config.entrypoint = work.argv(program);
                // The previous `CMD` was meant for another entrypoint.
                work.rootfs.config.command.clear();
            }
            Instruction::Ignored(word) => self.say(&format!("  note: {word} has no effect here\n")),
            Instruction::Run { program, secrets, caches } => {
                work.caches.clone_from(caches);
                let done = self.run_step(work, line, program, secrets).await;
                work.caches.clear();
                return done;
            }
            Instruction::Copy { from, sources, target, chown, chmod, unpack } => {
                if *unpack && sources.iter().any(|source| is_archive(source)) {
                    self.say("  note: archives are copied as they are; unpack them with RUN\n");
                }
                let mut expand = |text: &String| work.expand(&mut expander, text);
                let wish = Copy {
                    sources: sources.iter().map(&mut expand).collect::<Built<Vec<_>>>()?,
                    target: expand(target)?,
                    chown: chown.as_ref().map(&mut expand).transpose()?,
                    mode: chmod.as_deref().and_then(|digits| u32::from_str_radix(digits, 8).ok()),
                    line,
                };
                return match from.as_ref().map(&mut expand).transpose()? {
                    None => self.copy_from_context(work, &wish).await,
                    Some(from) => self.copy_from(work, &wish, &from, done).await,
                };
            }
        }
        Ok(How::Noted)
    }

    /// `ARG`: the caller's value comes first, then the default of the line, then that of an `ARG` before the first `FROM`.
    fn declare(
        &self,
        work: &mut Work,
        expander: &mut Expander,
        arguments: &[(String, Option<String>)],
        globals: &BTreeMap<String, String>,
    ) -> Built<()> {
        for (name, default) in arguments {
            let default = default.as_deref().map(|text| work.expand(expander, text)).transpose()?;
            let given = self.arguments.get(name).cloned();
            if let Some(value) = given.or(default).or_else(|| globals.get(name).cloned()) {
                work.arguments.insert(name.clone(), value);
            }
        }
        check_sum(expander.line, "all build arguments together", &work.arguments)
    }
}

impl Work {
    fn lookup(&self, name: &str) -> Option<&str> {
        let env = self.rootfs.config.env.iter().find(|(known, _)| known == name).map(|(_, value)| value);
        let known = env.or_else(|| self.arguments.get(name)).map(String::as_str);
        // Commands have this `PATH` if the image sets none, so `ENV PATH=/opt/bin:$PATH` must not lose it.
        let default = || defaults::ENV.iter().find(|(known, _)| *known == "PATH" && name == "PATH");
        known.or_else(|| default().map(|(_, value)| *value))
    }

    fn expand(&self, expander: &mut Expander, text: &str) -> Built<String> {
        expander.expand(text, &|name| self.lookup(name))
    }

    /// `ENV`: every value is expanded with the variables from before the line.
    fn set_env(&mut self, expander: &mut Expander, pairs: &[(String, String)]) -> Built<()> {
        let expanded = pairs.iter().map(|(name, value)| Ok((name.clone(), self.expand(expander, value)?)));
        for (name, value) in expanded.collect::<Built<Vec<_>>>()? {
            self.rootfs.config.set(name, value);
        }
        let env = self.rootfs.config.env.iter().map(|(name, value)| (name, value));
        check_sum(expander.line, "the environment", env)
    }

    fn set_labels(&mut self, expander: &mut Expander, pairs: &[(String, String)]) -> Built<()> {
        for (name, value) in pairs {
            let (name, value) = (self.expand(expander, name)?, self.expand(expander, value)?);
            self.rootfs.config.labels.insert(name, value);
        }
        check_sum(expander.line, "all labels together", &self.rootfs.config.labels)
    }

    fn change_directory(&mut self, expander: &mut Expander, path: &str) -> Built<()> {
        let path = self.resolve(&self.expand(expander, path)?);
        // A relative path is appended to the current directory, so the path can grow with each line.
        if path.len() > pull::WORKING_DIRECTORY_MAX {
            return Err(too_large(expander.line, "a working directory", pull::WORKING_DIRECTORY_MAX));
        }
        if path != "/" && !self.pending.contains(&path) {
            self.pending.push(path.clone());
        }
        self.rootfs.config.cwd = Some(path);
        Ok(())
    }

    /// What `CMD` and `ENTRYPOINT` set. Without a program, they remove the base image's.
    fn argv(&self, program: &Program) -> Vec<String> {
        match program {
            Program::Shell(script) if script.is_empty() => Vec::new(),
            program => self.rootfs.config.argv(program),
        }
    }

    /// The working directory of the next step.
    pub(super) fn cwd(&self) -> String {
        self.rootfs.config.cwd.clone().unwrap_or_else(|| "/".into())
    }

    /// A path as an absolute one, without `.` and `..`.
    pub(super) fn resolve(&self, path: &str) -> String {
        let mut parts: Vec<String> = Vec::new();
        let whole = if path.starts_with('/') { path.to_owned() } else { format!("{}/{path}", self.cwd()) };
        for part in whole.split('/') {
            match part {
                "" | "." => {}
                ".." => drop(parts.pop()),
                part => parts.push(part.to_owned()),
            }
        }
        format!("/{}", parts.join("/"))
    }
}

/// Expands variables in the values of one instruction. Each value is bounded, and so are all values of the instruction together.
pub(super) struct Expander {
    line: usize,
    /// How many bytes the values that are still to come may have.
    left: usize,
}

impl Expander {
    pub(super) fn of(line: usize) -> Self {
        Self { line, left: SANDBOX_ENV_BYTES_MAX }
    }

    pub(super) fn expand<'v>(
        &mut self,
        text: &str,
        lookup: &dyn Fn(&str) -> Option<&'v str>,
    ) -> Built<String> {
        let most = self.left.min(dockerfile::VALUE_BYTES_MAX);
        let value = dockerfile::expand(text, most, lookup).map_err(|problem| match problem {
            Problem::TooLarge { limit, .. } if limit < dockerfile::VALUE_BYTES_MAX => {
                too_large(self.line, "one instruction", SANDBOX_ENV_BYTES_MAX)
            }
            problem => BuildError::Dockerfile { source: DockerfileError { line: self.line, problem } },
        })?;
        self.left -= value.len();
        Ok(value)
    }
}

/// Checks the total size of all pairs of one kind, no matter how many lines they are spread over.
fn check_sum<'a>(
    line: usize,
    what: &'static str,
    pairs: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Built<()> {
    match pairs.into_iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>() {
        size if size > SANDBOX_ENV_BYTES_MAX => Err(too_large(line, what, SANDBOX_ENV_BYTES_MAX)),
        _ => Ok(()),
    }
}

fn too_large(line: usize, what: &'static str, limit: usize) -> BuildError {
    BuildError::Dockerfile { source: DockerfileError { line, problem: Problem::TooLarge { what, limit } } }
}

/// Whether the name is that of an archive. `ADD` of other builders unpacks archives.
fn is_archive(source: &str) -> bool {
    [".tar", ".tgz", ".tar.gz", ".tar.xz"].iter().any(|end| source.ends_with(end))
}
