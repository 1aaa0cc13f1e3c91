//! Parses a Dockerfile into stages and steps.
//!
//! The supported instructions are those in [`WORDS`]; a few more are accepted and reported as having no effect
//! ([`Instruction::Ignored`]), and all others are rejected with the line and a suggestion. This module looks nothing
//! up and runs nothing: variables stay unexpanded until the build runs a step and knows their values ([`expand`]),
//! since a base image may set them too.

use std::fmt;

/// Longest Dockerfile.
pub const LENGTH_MAX: usize = 1024 * 1024;
/// Most steps in all stages together. Each may become a layer, and an overlay takes some hundred of those.
pub const STEPS_MAX: usize = 500;
/// Longest value with its variables expanded: the longest argument or variable that the kernel accepts
/// (`MAX_ARG_STRLEN`).
pub const VALUE_BYTES_MAX: usize = 128 * 1024;
/// Deepest nesting of `${A:-${B:-...}}`. People write two levels.
const NESTING_MAX: usize = 16;

/// The supported instructions.
pub const WORDS: [&str; 12] =
    ["FROM", "RUN", "COPY", "ADD", "ENV", "ARG", "WORKDIR", "USER", "CMD", "ENTRYPOINT", "LABEL", "SHELL"];
/// Instructions about how an image runs elsewhere, which have no effect here.
const IGNORED: [&str; 5] = ["EXPOSE", "STOPSIGNAL", "HEALTHCHECK", "MAINTAINER", "VOLUME"];

/// How many characters of an unknown instruction are compared and shown.
const WORD_SHOWN_MAX: usize = 40;

/// A parsed Dockerfile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dockerfile {
    /// `ARG` before the first `FROM`: only for the names of images.
    pub arguments: Vec<(String, Option<String>)>,
    /// In the order they were written; the last is built by default.
    pub stages: Vec<Stage>,
}

/// From one `FROM` to the next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stage {
    /// Its name in lower case, if it has one.
    pub name: Option<String>,
    /// Its base image. May contain variables of [`Dockerfile::arguments`].
    pub from: String,
    /// The line of its `FROM`.
    pub line: usize,
    /// In order.
    pub steps: Vec<Step>,
}

/// One instruction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Its first line.
    pub line: usize,
    /// As written, on one line, for people.
    pub text: String,
    /// What it does.
    pub instruction: Instruction,
}

/// What a step does. Texts still contain their variables and quotes, unless noted otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Instruction {
    /// Runs a program.
    Run {
        /// The program.
        program: Program,
        /// Secrets that only this step can see.
        secrets: Vec<Secret>,
        /// Directories that outlive the build.
        caches: Vec<CacheMount>,
    },
    /// Adds files.
    Copy {
        /// Another stage or an image instead of the context.
        from: Option<String>,
        /// Sources.
        sources: Vec<String>,
        /// Target. A directory if it ends with a slash or there are several sources.
        target: String,
        /// Owner of the copied files.
        chown: Option<String>,
        /// Their mode, in octal digits.
        chmod: Option<String>,
        /// `ADD`: archives are unpacked.
        unpack: bool,
    },
    /// Sets variables, for later steps and for sandboxes.
    Env(Vec<(String, String)>),
    /// Declares a build argument, with its default.
    Arg(Vec<(String, Option<String>)>),
    /// Sets the directory.
    Workdir(String),
    /// Sets the user.
    User(String),
    /// The default command, or arguments for the entrypoint.
    Cmd(Program),
    /// The entrypoint.
    Entrypoint(Program),
    /// Sets the program, with its first arguments, that runs later commands that are for a shell.
    Shell(Vec<String>),
    /// Adds a label.
    Label(Vec<(String, String)>),
    /// An instruction without effect here.
    Ignored(&'static str),
}

/// What to run. The shell expands variables in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Program {
    /// By a shell.
    Shell(String),
    /// Directly.
    Argv(Vec<String>),
}

/// A secret that is mounted for one step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secret {
    /// Its id.
    pub id: String,
    /// Path of the file; `/run/secrets/<id>` by default.
    pub target: String,
    /// Whether the step fails without it.
    pub required: bool,
}

/// A directory that later builds of the owner find as this step leaves it. It is in no layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheMount {
    /// Steps with the same id see the same directory; the target by default.
    pub id: String,
    /// Where it is mounted.
    pub target: String,
    /// Whether several steps may use it at the same time.
    pub sharing: Sharing,
}

/// Whether several steps may use a cache at the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// They may.
    Shared,
    /// A step waits until no other uses it.
    Locked,
}

/// What is wrong with a Dockerfile, and where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct DockerfileError {
    /// Line number, from 1.
    pub line: usize,
    /// The problem.
    pub problem: Problem,
}

/// What is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Problem {
    /// Not an instruction, or not a supported one.
    #[error("`{word}` is not a supported instruction")]
    UnknownWord {
        /// As it was written.
        word: String,
        /// A similar instruction.
        meant: Option<&'static str>,
    },
    /// An instruction before the first `FROM`.
    #[error("`{word}` comes before the first FROM")]
    BeforeFrom {
        /// Which.
        word: &'static str,
    },
    /// Nothing to build.
    #[error("there is no FROM")]
    NoFrom,
    /// Two stages with one name.
    #[error("there are two stages named `{name}`")]
    StageTwice {
        /// Which.
        name: String,
    },
    /// A missing argument.
    #[error("{word} needs {what}")]
    Missing {
        /// Which word.
        word: &'static str,
        /// What.
        what: &'static str,
    },
    /// An unknown flag.
    #[error("{word} does not support `{flag}`")]
    UnknownFlag {
        /// Which word.
        word: &'static str,
        /// As it was written.
        flag: String,
    },
    /// A path that leads out of the context.
    #[error("`{path}` leads out of the context")]
    OutsideContext {
        /// As it was written.
        path: String,
    },
    /// `ADD` of something that is not a local file.
    #[error("`{source_text}` is not a local file")]
    Remote {
        /// As it was written.
        source_text: String,
    },
    /// An invalid value.
    #[error("{what}")]
    Malformed {
        /// What is wrong with it.
        what: String,
    },
    /// Too many of something.
    #[error("there are more than {limit} {what}")]
    TooMany {
        /// Of what.
        what: &'static str,
        /// How many are allowed.
        limit: usize,
    },
    /// An expanded value is too long.
    #[error("with its variables expanded, {what} may have at most {limit} bytes")]
    TooLarge {
        /// Of what.
        what: &'static str,
        /// In bytes.
        limit: usize,
    },
}

impl DockerfileError {
    /// What to do about it.
    pub fn hint(&self) -> String {
        match &self.problem {
            Problem::UnknownWord { meant: Some(meant), .. } => format!("did you mean {meant}?"),
            Problem::UnknownWord { meant: None, .. } => {
                let (words, ignored) = (WORDS.join(", "), IGNORED.join(", "));
                format!("the supported instructions are {words}; {ignored} are accepted and have no effect")
            }
            Problem::BeforeFrom { .. } => "only ARG may come before it".into(),
            Problem::NoFrom => "begin with FROM and the name of an image".into(),
            Problem::StageTwice { .. } => "give one of them another name".into(),
            Problem::Missing { .. } => "write it after the instruction, on the same line".into(),
            Problem::UnknownFlag { word, .. } => match *word {
                "RUN" => {
                    "RUN supports --mount=type=secret,id=NAME and --mount=type=cache,target=PATH[,id=NAME][,sharing=locked]"
                        .into()
                }
                "FROM" => "FROM supports no flags; images are for this machine's platform".into(),
                _ => "COPY and ADD support --from (COPY only), --chown and --chmod".into(),
            },
            Problem::OutsideContext { .. } => {
                "paths are relative to the context; build with a context that has the file in it".into()
            }
            Problem::Remote { .. } => "download the file first and put it into the context; builds have no network".into(),
            Problem::Malformed { .. } => "check quotes and brackets".into(),
            Problem::TooMany { .. } => "join some of them".into(),
            Problem::TooLarge { .. } => {
                "look for a variable that grows with each line, as in A=$A$A; put large values into files"
                    .into()
            }
        }
    }
}

/// Reads a Dockerfile.
pub fn parse(text: &str) -> Result<Dockerfile, DockerfileError> {
    if text.len() > LENGTH_MAX {
        return Err(at(1, Problem::TooMany { what: "bytes", limit: LENGTH_MAX }));
    }
    let mut file = Dockerfile { arguments: Vec::new(), stages: Vec::new() };
    let mut count = 0;
    for Line { line, text, scripts } in logical_lines(text)? {
        let (word, rest) = match text.split_once(char::is_whitespace) {
            Some((word, rest)) => (word, rest.trim()),
            None => (text.as_str(), ""),
        };
        let known = known_word(word).ok_or_else(|| {
            let meant = closest(&word.to_ascii_uppercase());
            at(line, Problem::UnknownWord { word: word.chars().take(WORD_SHOWN_MAX).collect(), meant })
        })?;
        count += 1;
        if count > STEPS_MAX {
            return Err(at(line, Problem::TooMany { what: "steps", limit: STEPS_MAX }));
        }
        let failed = |problem| at(line, problem);
        if known == "FROM" {
            let stage = stage(rest, line).map_err(failed)?;
            let taken = |other: &Stage| other.name.is_some() && other.name == stage.name;
            if let Some(other) = file.stages.iter().find(|other| taken(other)) {
                let name = other.name.clone().unwrap_or_default();
                return Err(at(line, Problem::StageTwice { name }));
            }
            file.stages.push(stage);
            continue;
        }
        let instruction = instruction(known, rest, scripts).map_err(failed)?;
        match (file.stages.last_mut(), instruction) {
            (Some(stage), instruction) => stage.steps.push(Step { line, text, instruction }),
            (None, Instruction::Arg(arguments)) => file.arguments.extend(arguments),
            (None, _) => return Err(at(line, Problem::BeforeFrom { word: known })),
        }
    }
    if file.stages.is_empty() {
        return Err(at(1, Problem::NoFrom));
    }
    Ok(file)
}

fn at(line: usize, problem: Problem) -> DockerfileError {
    DockerfileError { line, problem }
}

/// A line with its continuations.
struct Line {
    line: usize,
    text: String,
    /// Its here-documents, in order.
    scripts: Vec<String>,
}

fn logical_lines(text: &str) -> Result<Vec<Line>, DockerfileError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let escape = escape_character(text)?;
    let mut all = Vec::new();
    let mut lines = text.lines().zip(1..).peekable();
    while let Some((first, line)) = lines.next() {
        let first = first.trim();
        if first.is_empty() || first.starts_with('#') {
            continue;
        }
        let mut joined = String::new();
        let mut part = first;
        loop {
            match part.trim_end().strip_suffix(escape) {
                Some(before) => {
                    joined.push_str(before.trim_end());
                    joined.push(' ');
                    // Comments and empty lines may appear within a continuation.
                    let next = lines.find(|(next, _)| {
                        let next = next.trim();
                        !next.is_empty() && !next.starts_with('#')
                    });
                    match next {
                        Some((next, _)) => part = next.trim(),
                        None => break,
                    }
                }
                None => {
                    joined.push_str(part.trim_end());
                    break;
                }
            }
        }
        let joined = joined.trim().to_owned();
        let mut scripts = Vec::new();
        for (name, strip) in here_documents(&joined) {
            let mut script = String::new();
            loop {
                let Some((next, _)) = lines.next() else {
                    let what = format!("the here-document `{name}` has no end");
                    return Err(at(line, Problem::Malformed { what }));
                };
                let shown = if strip { next.trim_start_matches('\t') } else { next };
                if shown == name {
                    break;
                }
                script.push_str(shown);
                script.push('\n');
            }
            scripts.push(script);
        }
        all.push(Line { line, text: joined, scripts });
    }
    Ok(all)
}

/// `# escape=` in the comments at the top of the file.
fn escape_character(text: &str) -> Result<char, DockerfileError> {
    for (line, number) in text.lines().zip(1..) {
        let Some(comment) = line.trim().strip_prefix('#') else { break };
        let Some((name, value)) = comment.split_once('=') else { break };
        match (name.trim().to_ascii_lowercase().as_str(), value.trim()) {
            ("escape", "\\") => return Ok('\\'),
            ("escape", "`") => return Ok('`'),
            ("escape", other) => {
                let what = format!("`{other}` cannot be the escape character");
                return Err(at(number, Problem::Malformed { what }));
            }
            _ => {}
        }
    }
    Ok('\\')
}

/// The names of `<<NAME` in a RUN, and whether leading tabs are stripped.
fn here_documents(text: &str) -> Vec<(String, bool)> {
    let Some((word, rest)) = text.split_once(char::is_whitespace) else { return Vec::new() };
    if !word.eq_ignore_ascii_case("RUN") && !word.eq_ignore_ascii_case("COPY") {
        return Vec::new();
    }
    rest.split_whitespace()
        .filter_map(|part| {
            let name = part.strip_prefix("<<")?;
            let (name, strip) = name.strip_prefix('-').map_or((name, false), |name| (name, true));
            let name = name.trim_matches(['"', '\'']);
            let plain = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
            plain.then(|| (name.to_owned(), strip))
        })
        .collect()
}

fn known_word(word: &str) -> Option<&'static str> {
    WORDS.into_iter().chain(IGNORED).find(|known| known.eq_ignore_ascii_case(word))
}

/// The instruction that differs by one or two letters. Two letters in the wrong order count as one.
fn closest(word: &str) -> Option<&'static str> {
    let word: String = word.chars().take(WORD_SHOWN_MAX).collect();
    let near = WORDS.into_iter().chain(IGNORED);
    let near = near.map(|known| (strsim::damerau_levenshtein(&word, known), known));
    near.filter(|(distance, _)| *distance <= 2).min().map(|(_, known)| known)
}

fn stage(rest: &str, line: usize) -> Result<Stage, Problem> {
    let (flags, rest) = flags(rest);
    if let Some(flag) = flags.first() {
        return Err(Problem::UnknownFlag { word: "FROM", flag: (*flag).to_owned() });
    }
    let parts: Vec<&str> = rest.split_whitespace().collect();
    let (from, name) = match parts.as_slice() {
        [from] => (*from, None),
        [from, as_word, name] if as_word.eq_ignore_ascii_case("as") => (*from, Some(*name)),
        [] => return Err(Problem::Missing { word: "FROM", what: "the name of an image" }),
        _ => {
            return Err(Problem::Malformed {
                what: "FROM must be written as FROM IMAGE, or FROM IMAGE AS NAME".into(),
            });
        }
    };
    let name = match name {
        None => None,
        Some(name) => {
            let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
                && name.starts_with(|first: char| first.is_ascii_alphabetic());
            if !plain {
                let what = format!("`{name}` cannot be the name of a stage");
                return Err(Problem::Malformed { what });
            }
            Some(name.to_ascii_lowercase())
        }
    };
    Ok(Stage { name, from: from.to_owned(), line, steps: Vec::new() })
}

/// Splits off the flags that begin with `--`.
fn flags(mut rest: &str) -> (Vec<&str>, &str) {
    let mut flags = Vec::new();
    while rest.starts_with("--") {
        let (flag, after) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        flags.push(flag);
        rest = after.trim_start();
    }
    (flags, rest)
}

fn instruction(word: &'static str, rest: &str, scripts: Vec<String>) -> Result<Instruction, Problem> {
    let needs = |what| if rest.is_empty() { Err(Problem::Missing { word, what }) } else { Ok(()) };
    Ok(match word {
        "RUN" => {
            needs("a command")?;
            run(rest, scripts)?
        }
        "COPY" | "ADD" => copy(word, rest)?,
        "ENV" => {
            needs("a variable and its value")?;
            Instruction::Env(pairs(word, rest)?)
        }
        "LABEL" => {
            needs("a label and its value")?;
            Instruction::Label(pairs(word, rest)?)
        }
        "ARG" => {
            needs("the name of a variable")?;
            let argument = |text: String| match text.split_once('=') {
                Some((name, value)) => variable(name).map(|name| (name, Some(value.to_owned()))),
                None => variable(&text).map(|name| (name, None)),
            };
            Instruction::Arg(words(rest)?.into_iter().map(argument).collect::<Result<_, _>>()?)
        }
        "WORKDIR" => {
            needs("a path")?;
            Instruction::Workdir(rest.to_owned())
        }
        "USER" => {
            needs("a name or a number")?;
            Instruction::User(rest.to_owned())
        }
        "CMD" => Instruction::Cmd(program(rest)?),
        "ENTRYPOINT" => Instruction::Entrypoint(program(rest)?),
        "SHELL" => match json_list(rest) {
            Some(list) if list.as_ref().is_ok_and(|list| !list.is_empty()) => Instruction::Shell(list?),
            Some(Err(problem)) => return Err(problem),
            _ => return Err(Problem::Missing { word, what: "a list such as [\"/bin/bash\", \"-c\"]" }),
        },
        ignored => Instruction::Ignored(ignored),
    })
}

fn run(rest: &str, scripts: Vec<String>) -> Result<Instruction, Problem> {
    let (flags, rest) = flags(rest);
    let (mut secrets, mut caches) = (Vec::new(), Vec::new());
    for flag in flags {
        match mount(flag)? {
            Mount::Secret(secret) => secrets.push(secret),
            Mount::Cache(cache) => caches.push(cache),
        }
    }
    let program = match scripts.as_slice() {
        [] if rest.is_empty() => return Err(Problem::Missing { word: "RUN", what: "a command" }),
        [] => program(rest)?,
        // `RUN <<EOF`: the document is the script. With words before it, it is their input, as in a shell.
        [script] if rest.starts_with("<<") => Program::Shell(script.clone()),
        scripts => {
            let mut script = format!("{rest}\n");
            for (text, (name, _)) in scripts.iter().zip(here_documents(&format!("RUN {rest}"))) {
                script.push_str(text);
                script.push_str(&name);
                script.push('\n');
            }
            Program::Shell(script)
        }
    };
    Ok(Instruction::Run { program, secrets, caches })
}

/// What `--mount` of a `RUN` asks for.
enum Mount {
    Secret(Secret),
    Cache(CacheMount),
}

/// `--mount=type=secret,id=name[,target=path][,required=true]` or `--mount=type=cache,target=path[,id=name][,sharing=locked]`
fn mount(flag: &str) -> Result<Mount, Problem> {
    let unknown = || Problem::UnknownFlag { word: "RUN", flag: flag.to_owned() };
    let options = flag.strip_prefix("--mount=").ok_or_else(unknown)?;
    let (mut kind, mut id, mut target, mut required, mut sharing) = (None, None, None, None, None);
    for option in options.split(',') {
        let (name, value) = option.split_once('=').unwrap_or((option, "true"));
        match name {
            "type" => kind = Some(value),
            "id" => id = Some(value),
            "target" | "dst" | "destination" => target = Some(value),
            "required" => required = Some(value.eq_ignore_ascii_case("true") || value == "1"),
            "sharing" => sharing = Some(value),
            _ => return Err(unknown()),
        }
    }
    match (kind, required, sharing) {
        (Some("secret"), required, None) => secret(id, target, required.unwrap_or(false)).map(Mount::Secret),
        (Some("cache"), None, sharing) => {
            let sharing = match sharing {
                None | Some("shared") => Sharing::Shared,
                Some("locked") => Sharing::Locked,
                Some(_) => return Err(unknown()),
            };
            cache(id, target, sharing).map(Mount::Cache)
        }
        _ => Err(unknown()),
    }
}

fn cache(id: Option<&str>, target: Option<&str>, sharing: Sharing) -> Result<CacheMount, Problem> {
    let target =
        target.ok_or(Problem::Missing { word: "RUN", what: "the target of the cache: target=PATH" })?;
    let plain = target.trim_end_matches('/');
    if !plain.starts_with('/') || plain.split('/').any(|part| part == ".." || part == ".") {
        return Err(Problem::Malformed {
            what: format!("the target of a cache must be an absolute path below `/`, got `{target}`"),
        });
    }
    let id = id.filter(|id| !id.is_empty()).unwrap_or(plain).to_owned();
    Ok(CacheMount { id, target: plain.to_owned(), sharing })
}

fn secret(id: Option<&str>, target: Option<&str>, required: bool) -> Result<Secret, Problem> {
    let id = match (id, target) {
        (Some(id), _) => id.to_owned(),
        (None, Some(target)) => target.rsplit('/').next().unwrap_or_default().to_owned(),
        (None, None) => return Err(Problem::Missing { word: "RUN", what: "the id of the secret: id=NAME" }),
    };
    let plain = !id.is_empty()
        && id.len() <= 128
        && !id.starts_with('.')
        && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    if !plain {
        return Err(Problem::Malformed { what: format!("`{id}` cannot be the id of a secret") });
    }
    let target = target.map_or_else(|| format!("/run/secrets/{id}"), str::to_owned);
    if !target.starts_with('/') || target.split('/').any(|part| part == "..") {
        return Err(Problem::Malformed {
            what: format!("the target of a secret must be an absolute path, got `{target}`"),
        });
    }
    Ok(Secret { id, target, required })
}

fn copy(word: &'static str, rest: &str) -> Result<Instruction, Problem> {
    let (flags, rest) = flags(rest);
    let (mut from, mut chown, mut chmod) = (None, None, None);
    for flag in flags {
        let unknown = || Problem::UnknownFlag { word, flag: flag.to_owned() };
        match flag.split_once('=').ok_or_else(unknown)? {
            ("--from", value) if word == "COPY" => from = Some(value.to_owned()),
            ("--chown", value) => chown = Some(value.to_owned()),
            ("--chmod", value) => {
                let octal =
                    (3..=4).contains(&value.len()) && value.bytes().all(|b| (b'0'..=b'7').contains(&b));
                if !octal {
                    let what = format!("the mode must be octal digits such as 755, got `{value}`");
                    return Err(Problem::Malformed { what });
                }
                chmod = Some(value.to_owned());
            }
            _ => return Err(unknown()),
        }
    }
    let mut paths = match json_list(rest) {
        Some(list) => list?,
        None => words(rest)?,
    };
    if paths.iter().any(|path| path.starts_with("<<")) {
        let what = "here-documents are for RUN; put the file into the context".into();
        return Err(Problem::Malformed { what });
    }
    let target = match paths.len() {
        0 | 1 => return Err(Problem::Missing { word, what: "a source and a target" }),
        _ => paths.pop().expect("there are two at least"),
    };
    if paths.len() > 1 && !target.ends_with('/') && !target.contains('$') {
        let what = format!(
            "with several sources, the target must be a directory that ends with a slash, got `{target}`"
        );
        return Err(Problem::Malformed { what });
    }
    for path in &paths {
        let remote = ["http://", "https://", "git@", "git://"].iter().any(|scheme| path.starts_with(scheme));
        if remote {
            return Err(Problem::Remote { source_text: path.clone() });
        }
        if from.is_none() && !path.contains('$') {
            context_path(path)?;
        }
    }
    Ok(Instruction::Copy { from, sources: paths, target, chown, chmod, unpack: word == "ADD" })
}

/// A path in the context: relative to its root, whatever it begins with, and never above it.
pub fn context_path(path: &str) -> Result<String, Problem> {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                if parts.pop().is_none() {
                    return Err(Problem::OutsideContext { path: path.to_owned() });
                }
            }
            part => parts.push(part),
        }
    }
    Ok(parts.join("/"))
}

fn program(rest: &str) -> Result<Program, Problem> {
    match json_list(rest) {
        Some(list) => Ok(Program::Argv(list?)),
        None => Ok(Program::Shell(rest.to_owned())),
    }
}

/// Parses `["a", "b"]`. A text that begins like a list and is not one is left to the shell, unless it was clearly
/// meant as a list.
fn json_list(rest: &str) -> Option<Result<Vec<String>, Problem>> {
    if !rest.starts_with('[') {
        return None;
    }
    match serde_json::from_str::<Vec<String>>(rest) {
        Ok(list) => Some(Ok(list)),
        Err(_) if rest.starts_with("[\"") && rest.ends_with(']') => {
            Some(Err(Problem::Malformed { what: "the list in brackets is not JSON".into() }))
        }
        Err(_) => None,
    }
}

/// `a=b c="d e"`, or the old `name the rest is the value`.
fn pairs(word: &'static str, rest: &str) -> Result<Vec<(String, String)>, Problem> {
    let split = words(rest)?;
    let first = split.first().map(String::as_str).unwrap_or_default();
    let check = |name: &str| match word {
        "ENV" => variable(name),
        _ if name.is_empty() => Err(Problem::Malformed { what: "a label must have a name".into() }),
        _ => Ok(name.to_owned()),
    };
    if !first.contains('=') {
        let Some((name, value)) = rest.split_once(char::is_whitespace) else {
            return Err(Problem::Missing { word, what: "a value: NAME=VALUE" });
        };
        return Ok(vec![(check(name)?, value.trim().to_owned())]);
    }
    let pair = |text: String| match text.split_once('=') {
        Some((name, value)) => check(name).map(|name| (name, value.to_owned())),
        None => Err(Problem::Malformed { what: format!("it must be written as NAME=VALUE, got `{text}`") }),
    };
    split.into_iter().map(pair).collect()
}

fn variable(name: &str) -> Result<String, Problem> {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && name.bytes().next().is_some_and(|first| !first.is_ascii_digit());
    match plain {
        true => Ok(name.to_owned()),
        false => Err(Problem::Malformed { what: format!("`{name:.64}` cannot be the name of a variable") }),
    }
}

/// Words between unquoted spaces. Quotes stay, for [`expand`].
fn words(text: &str) -> Result<Vec<String>, Problem> {
    let mut words = Vec::new();
    let mut word = String::new();
    let mut quote = None;
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        match (quote, character) {
            (None | Some('"'), '\\') => {
                word.push('\\');
                word.extend(characters.next());
            }
            (None, '"' | '\'') => {
                quote = Some(character);
                word.push(character);
            }
            (Some(open), closing) if open == closing => {
                quote = None;
                word.push(closing);
            }
            (None, space) if space.is_whitespace() => {
                if !word.is_empty() {
                    words.push(std::mem::take(&mut word));
                }
            }
            (_, other) => word.push(other),
        }
    }
    if let Some(open) = quote {
        return Err(Problem::Malformed { what: format!("a quote {open} is not closed") });
    }
    if !word.is_empty() {
        words.push(word);
    }
    Ok(words)
}

/// Removes quotes and expands variables: `$NAME`, `${NAME}`, `${NAME:-word}`, `${NAME:+word}`. The result has at most
/// `most` bytes: since a variable may be set from itself, a few lines could otherwise fill any memory.
pub fn expand<'v>(
    text: &str,
    most: usize,
    lookup: &dyn Fn(&str) -> Option<&'v str>,
) -> Result<String, Problem> {
    let mut expansion = Expansion { out: String::new(), most, lookup };
    expansion.expand(text, 0)?;
    Ok(expansion.out)
}

struct Expansion<'a, 'v> {
    out: String,
    most: usize,
    lookup: &'a dyn Fn(&str) -> Option<&'v str>,
}

impl Expansion<'_, '_> {
    /// Rejects a text that would become too long, before copying it.
    fn push(&mut self, text: &str) -> Result<(), Problem> {
        if text.len() > self.most - self.out.len() {
            return Err(Problem::TooLarge { what: "a value", limit: self.most });
        }
        self.out.push_str(text);
        Ok(())
    }

    fn push_character(&mut self, character: char) -> Result<(), Problem> {
        self.push(character.encode_utf8(&mut [0; 4]))
    }

    fn expand(&mut self, text: &str, depth: usize) -> Result<(), Problem> {
        if depth > NESTING_MAX {
            let what = format!("variables are nested more than {NESTING_MAX} deep");
            return Err(Problem::Malformed { what });
        }
        let mut rest = text;
        let mut quote: Option<char> = None;
        while let Some(character) = rest.chars().next() {
            rest = &rest[character.len_utf8()..];
            match (quote, character) {
                (Some('\''), '\'') | (Some('"'), '"') => quote = None,
                (Some('\''), other) => self.push_character(other)?,
                (None, '\'' | '"') => quote = Some(character),
                (_, '\\') => {
                    let Some(next) = rest.chars().next() else {
                        self.push("\\")?;
                        break;
                    };
                    // In double quotes a backslash is literal, except before a character that it can escape.
                    if quote == Some('"') && !matches!(next, '"' | '\\' | '$') {
                        self.push("\\")?;
                    }
                    self.push_character(next)?;
                    rest = &rest[next.len_utf8()..];
                }
                (_, '$') => rest = self.reference(rest, depth)?,
                (_, other) => self.push_character(other)?,
            }
        }
        match quote {
            Some(open) => Err(Problem::Malformed { what: format!("a quote {open} is not closed") }),
            None => Ok(()),
        }
    }

    /// Expands the variable after a `$`, and returns the rest.
    fn reference<'t>(&mut self, rest: &'t str, depth: usize) -> Result<&'t str, Problem> {
        let name_of = |text: &'t str| {
            let end = text.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(text.len());
            text.split_at(end)
        };
        let lookup = self.lookup;
        let Some(braced) = rest.strip_prefix('{') else {
            let (name, after) = name_of(rest);
            // A lone `$` is literal.
            self.push(if name.is_empty() { "$" } else { lookup(name).unwrap_or_default() })?;
            return Ok(after);
        };
        let (name, after) = name_of(braced);
        let malformed = || Problem::Malformed { what: format!("`${{{}` is not a variable", cut(braced)) };
        if name.is_empty() {
            return Err(malformed());
        }
        if let Some(after) = after.strip_prefix('}') {
            self.push(lookup(name).unwrap_or_default())?;
            return Ok(after);
        }
        let end = closing(after).ok_or_else(malformed)?;
        let (inner, after) = (&after[..end], &after[end + 1..]);
        let set = lookup(name).filter(|value| !value.is_empty());
        if let Some(word) = inner.strip_prefix(":-") {
            match set {
                Some(value) => self.push(value)?,
                None => self.expand(word, depth + 1)?,
            }
        } else if let Some(word) = inner.strip_prefix(":+") {
            if set.is_some() {
                self.expand(word, depth + 1)?;
            }
        } else {
            return Err(malformed());
        }
        Ok(after)
    }
}

/// The position of the closing brace.
fn closing(text: &str) -> Option<usize> {
    let mut open = 0usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => open += 1,
            b'}' if open == 0 => return Some(at),
            b'}' => open -= 1,
            _ => {}
        }
    }
    None
}

fn cut(text: &str) -> String {
    text.chars().take(32).collect()
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Shell(script) => f.write_str(script),
            Self::Argv(argv) => f.write_str(&argv.join(" ")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(text: &str) -> Vec<Instruction> {
        let file = parse(&format!("FROM base\n{text}")).unwrap_or_else(|error| panic!("{text}: {error}"));
        file.stages
            .into_iter()
            .next()
            .expect("a stage")
            .steps
            .into_iter()
            .map(|step| step.instruction)
            .collect()
    }

    #[track_caller]
    fn check_refused(text: &str, line: usize, part: &str) {
        let error = parse(text).expect_err(text);
        assert_eq!(error.line, line, "{error}");
        assert!(error.to_string().contains(part), "{error}");
        assert!(!error.hint().is_empty());
    }

    fn shell(text: &str) -> Program {
        Program::Shell(text.into())
    }

    #[test]
    fn stages_have_names_and_steps() {
        let text = "# syntax=docker/dockerfile:1\nARG V=3\nFROM python:$V AS Build\nRUN make\n\nfrom scratch\nCOPY --from=build /out /\n";
        let file = parse(text).expect("it is one");
        assert_eq!(file.arguments, [("V".into(), Some("3".into()))]);
        assert_eq!(file.stages.len(), 2);
        let first = &file.stages[0];
        assert_eq!((first.name.as_deref(), first.from.as_str(), first.line), (Some("build"), "python:$V", 3));
        assert_eq!((first.steps[0].line, first.steps[0].text.as_str()), (4, "RUN make"));
        let Instruction::Copy { from, sources, target, unpack: false, .. } =
            &file.stages[1].steps[0].instruction
        else {
            panic!("a copy")
        };
        assert_eq!(
            (from.as_deref(), sources.as_slice(), target.as_str()),
            (Some("build"), &["/out".into()][..], "/")
        );
    }

    #[test]
    fn lines_are_continued_over_comments() {
        let text = "FROM a\nRUN one && \\\n  # why\n\n  two \\\n  three\nRUN four";
        let file = parse(text).expect("it is one");
        let steps = &file.stages[0].steps;
        assert_eq!(steps[0].text, "RUN one && two three");
        assert_eq!((steps[1].line, steps[1].text.as_str()), (7, "RUN four"));
        let windows = "# escape=`\nFROM a\nRUN dir c:\\ `\n  more";
        assert_eq!(parse(windows).expect("it is one").stages[0].steps[0].text, "RUN dir c:\\ more");
    }

    #[test]
    fn programs_are_for_a_shell_or_as_they_are() {
        let run = |program| Instruction::Run { program, secrets: Vec::new(), caches: Vec::new() };
        let argv = |words: &[&str]| Program::Argv(words.iter().map(|word| (*word).to_owned()).collect());
        assert_eq!(steps("RUN echo $A \"b\""), [run(shell("echo $A \"b\""))]);
        assert_eq!(steps("RUN [\"a\", \"b c\"]"), [run(argv(&["a", "b c"]))]);
        assert_eq!(steps("RUN [ -f x ] && y"), [run(shell("[ -f x ] && y"))]);
        let bash = vec!["/bin/bash".to_owned(), "-c".to_owned()];
        assert_eq!(steps("SHELL [\"/bin/bash\", \"-c\"]"), [Instruction::Shell(bash)]);
        assert_eq!(
            steps("CMD [\"a\"]\nENTRYPOINT b c"),
            [Instruction::Cmd(argv(&["a"])), Instruction::Entrypoint(shell("b c")),]
        );
        assert_eq!(
            steps("RUN <<EOF\nset -e\n\techo hi\nEOF\nUSER 5"),
            [run(shell("set -e\n\techo hi\n")), Instruction::User("5".into()),]
        );
        assert_eq!(steps("RUN cat <<-'X' > y\n\tz\n\tX"), [run(shell("cat <<-'X' > y\nz\nX\n"))]);
    }

    #[test]
    fn values_keep_their_quotes_until_they_are_expanded() {
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        assert_eq!(
            steps("ENV A=1 B=\"two words\" C=$A\\ d"),
            [Instruction::Env(vec![pair("A", "1"), pair("B", "\"two words\""), pair("C", "$A\\ d"),])]
        );
        assert_eq!(steps("ENV A the rest = it"), [Instruction::Env(vec![pair("A", "the rest = it")])]);
        assert_eq!(steps("LABEL org.x=\"a b\""), [Instruction::Label(vec![pair("org.x", "\"a b\"")])]);
        let lookup = |name: &str| match name {
            "A" => Some("1"),
            "EMPTY" => Some(""),
            _ => None,
        };
        for (text, expected) in [
            ("$A", "1"),
            ("${A}b$Ab", "1b"),
            ("'$A'", "$A"),
            ("\"$A x\"", "1 x"),
            ("\\$A", "$A"),
            ("\"a\\b\\\"c\"", "a\\b\"c"),
            ("${B:-x$A}", "x1"),
            ("${EMPTY:-y}", "y"),
            ("${A:+set}${B:+set}", "set"),
            ("${B:-${A:-z}}", "1"),
            ("cost: 5$", "cost: 5$"),
            ("a\\", "a\\"),
        ] {
            assert_eq!(expand(text, VALUE_BYTES_MAX, &lookup).as_deref(), Ok(expected), "{text}");
        }
        for text in ["'open", "${", "${A", "${A?b}", "${}", "\"$A"] {
            expand(text, VALUE_BYTES_MAX, &lookup).expect_err(text);
        }
    }

    #[test]
    fn a_value_that_doubles_is_refused_before_it_is_copied() {
        let mut value = "0123456789".to_owned();
        let doubled = (0..40).find_map(|_| {
            let next = expand("$A${A}", VALUE_BYTES_MAX, &|_| Some(value.as_str()));
            next.map(|next| value = next).err()
        });
        assert_eq!(doubled, Some(Problem::TooLarge { what: "a value", limit: VALUE_BYTES_MAX }));
        assert!(value.len() > VALUE_BYTES_MAX / 2 && value.capacity() <= 2 * VALUE_BYTES_MAX);
        let long = "x".repeat(10);
        let lookup = |name: &str| (name == "A").then_some(long.as_str());
        for (text, fits) in [
            ("$A", true),
            ("${A}", true),
            ("${A:-no}", true),
            ("${B:-$A}", true),
            ("${A:+$A}", true),
            ("1234567890", true),
            ("$A.", false),
            (".$A", false),
            ("${A:-no}.", false),
            ("${B:-$A}.", false),
            ("${A:+$A.}", false),
            ("'12345678901'", false),
            ("1234567890\\", false),
            ("1234567890$", false),
            ("123456789é", false),
        ] {
            assert_eq!(expand(text, 10, &lookup).is_ok(), fits, "{text}");
        }
    }

    #[test]
    fn variables_inside_one_another_have_a_bound() {
        let nested = |depth: usize| format!("{}x{}", "${B:-".repeat(depth), "}".repeat(depth));
        assert_eq!(expand(&nested(NESTING_MAX), 10, &|_| None).as_deref(), Ok("x"));
        // As many as fit into a Dockerfile: each would use some of the stack.
        for depth in [NESTING_MAX + 1, LENGTH_MAX / 6] {
            let refused = expand(&nested(depth), 10, &|_| None).expect_err("it is too deep");
            assert!(refused.to_string().contains("16 deep"), "{refused}");
        }
    }

    #[test]
    fn secrets_are_named_and_placed() {
        let Instruction::Run { secrets, program, caches } =
            steps("RUN --mount=type=secret,id=token --mount=type=secret,id=k,target=/x/y,required=true cat")
                .remove(0)
        else {
            panic!("a run")
        };
        assert_eq!(program, shell("cat"));
        let secret =
            |id: &str, target: &str, required| Secret { id: id.into(), target: target.into(), required };
        assert_eq!(secrets, [secret("token", "/run/secrets/token", false), secret("k", "/x/y", true)]);
        assert_eq!(caches, []);
    }

    #[test]
    fn caches_are_named_after_their_target_by_default() {
        let text = "RUN --mount=type=cache,target=/a/ --mount=type=cache,sharing=locked,id=x,dst=/b make";
        let Instruction::Run { secrets, program, caches } = steps(text).remove(0) else { panic!("a run") };
        assert_eq!((secrets, program), (Vec::new(), shell("make")));
        let cache =
            |id: &str, target: &str, sharing| CacheMount { id: id.into(), target: target.into(), sharing };
        assert_eq!(caches, [cache("/a", "/a", Sharing::Shared), cache("x", "/b", Sharing::Locked)]);
    }

    #[test]
    fn mistakes_are_told_with_their_line() {
        check_refused("", 1, "no FROM");
        check_refused("FROM a\n\nRUNN x", 3, "`RUNN` is not a supported instruction");
        for (typo, meant) in
            [("COPPY x y", "COPY"), ("RNU x", "RUN"), ("EVN A=1", "ENV"), ("EXPOES 80", "EXPOSE")]
        {
            let hint = parse(&format!("FROM a\n{typo}")).expect_err("a typo").hint();
            assert_eq!(hint, format!("did you mean {meant}?"));
        }
        check_refused("FROM a\nFROBNICATE x", 2, "`FROBNICATE` is not a supported instruction");
        check_refused("FROM a\nSHELL /bin/bash -c", 2, "SHELL needs a list");
        check_refused("FROM a\nSHELL []", 2, "SHELL needs a list");
        check_refused("FROM a\nSHELL [\"/bin/bash\" -c]", 2, "not JSON");
        check_refused("RUN x\nFROM a", 1, "before the first FROM");
        check_refused("FROM a\nCOPY ../x /", 2, "`../x` leads out of the context");
        check_refused("FROM a\nCOPY a/../../x /", 2, "leads out of the context");
        check_refused("FROM a\nADD https://example.com/x /", 2, "not a local file");
        check_refused("FROM a\nCOPY x", 2, "a source and a target");
        check_refused("FROM a\nCOPY a b c", 2, "ends with a slash");
        check_refused("FROM a\nCOPY --link a b", 2, "does not support `--link`");
        check_refused("FROM a\nCOPY --chmod=rwx a b", 2, "got `rwx`");
        check_refused("FROM a\nRUN", 2, "RUN needs a command");
        check_refused("FROM a\nRUN --mount=type=bind,target=/x y", 2, "does not support");
        check_refused("FROM a\nRUN --mount=type=cache,target=/x,mode=0700 y", 2, "does not support");
        check_refused("FROM a\nRUN --mount=type=cache,target=/x,sharing=private y", 2, "does not support");
        check_refused("FROM a\nRUN --mount=type=cache y", 2, "RUN needs the target of the cache");
        check_refused("FROM a\nRUN --mount=type=cache,target=x y", 2, "got `x`");
        check_refused("FROM a\nRUN --mount=type=cache,target=/a/../b y", 2, "got `/a/../b`");
        check_refused("FROM a\nRUN --mount=type=cache,target=/ y", 2, "got `/`");
        check_refused("FROM a\nRUN --mount=type=secret,id=../x y", 2, "cannot be the id of a secret");
        check_refused("FROM a\nENV A", 2, "a value");
        check_refused("FROM a\nENV A=1 B", 2, "NAME=VALUE, got `B`");
        check_refused("FROM a\nENV 1A=b", 2, "cannot be the name");
        check_refused("FROM a\nLABEL a=\"b", 2, "not closed");
        check_refused("FROM a\nCMD [\"a\", b]", 2, "not JSON");
        check_refused("FROM a b", 1, "FROM IMAGE");
        check_refused("FROM --platform=linux/arm64 a", 1, "--platform");
        check_refused("FROM a AS x\nFROM b AS X", 2, "two stages named `x`");
        check_refused("FROM a\nRUN <<EOF\nx", 2, "has no end");
        check_refused("# escape=x\nFROM a", 1, "escape");
    }

    #[test]
    fn paths_stay_in_the_context() {
        for (path, expected) in
            [("a/b", "a/b"), ("/a//./b/", "a/b"), (".", ""), ("a/../b", "b"), ("...", "...")]
        {
            assert_eq!(context_path(path).as_deref(), Ok(expected));
        }
        context_path("..").expect_err("above");
    }
}
