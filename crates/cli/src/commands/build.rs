//! `shoal build`: a Dockerfile and what it copies become a template.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use client::{Client, Upload, api};
use image::ignore::Ignore;

use crate::args::Build;
use crate::commands::net;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;
use crate::output::progress::Progress;
use crate::output::report::{self, hinted};

/// How much of the end of a log is searched for the reason of a failure.
const LOG_END_MAX: usize = 8 * 1024;
/// A secret that is longer is a mistake.
const SECRET_MAX: u64 = 64 * 1024;

/// `shoal build`
pub async fn build(arguments: Build, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    if let Some(id) = &arguments.cancel {
        client.delete_build(id).await?;
        report::done(&format!("cancelled build {id}"));
        return Ok(0);
    }
    if !arguments.context.is_dir() {
        return Err(hinted(
            format!("the context `{}` is not a directory", arguments.context.display()),
            "name the directory with the Dockerfile and the files that it copies",
        ));
    }
    let dockerfile = match &arguments.file {
        None => "Dockerfile".to_owned(),
        Some(file) => inside(&arguments.context, file)?,
    };
    let wish = api::StartBuild {
        template: arguments.template.unwrap_or_default(),
        spec: api::TemplateSpec { cpu: arguments.cpu, memory: arguments.memory, ..Default::default() },
        dockerfile: Some(dockerfile.clone()),
        target: arguments.target,
        args: arguments.build_args.into_iter().collect(),
        secrets: secrets(&arguments.secrets, environment)?,
        network: net::network(arguments.net.as_deref())?,
    };
    let build = built(&client, &wish, context(&arguments.context, &dockerfile)?).await?;
    if arguments.json {
        print::json(&build)?;
    } else {
        print::line(&format!(
            "{}  version {}  ready",
            print::plain(&build.template),
            build.version.unwrap_or_default()
        ))?;
    }
    Ok(0)
}

/// Begins a build and shows its log until it is over. One that failed is an error.
pub async fn built(client: &Client, wish: &api::StartBuild, context: Upload) -> anyhow::Result<api::Build> {
    let started = client.start_build(wish, context).await?;
    let (mut offset, mut build) = (0, started);
    // The end of the log, which says why a build failed.
    let mut end = Vec::new();
    while build.state == api::BuildState::Running {
        let mut log = client.follow_build(&build.id, offset).await?;
        loop {
            match log.next().await {
                Ok(Some(bytes)) => {
                    offset += bytes.len() as u64;
                    show(&bytes);
                    end.extend_from_slice(&bytes);
                    end.drain(..end.len().saturating_sub(LOG_END_MAX));
                }
                Ok(None) => break,
                // The daemon may be back in a moment; if not, the next question says so.
                Err(_) => break,
            }
        }
        build = client.build(&build.id).await?;
    }
    match &build.reason {
        Some(reason) => {
            // Once is enough.
            let known = String::from_utf8_lossy(&end).contains(reason.as_str());
            let why = if known { String::new() } else { format!(": {reason}") };
            Err(hinted(
                format!("template `{}` could not be built{why}", build.template),
                "fix the cause and build again; finished steps are cached",
            ))
        }
        None => Ok(build),
    }
}

/// What steps write is the work of strangers: at a terminal it moves no cursor.
fn show(bytes: &[u8]) {
    let mut out = std::io::stderr().lock();
    // If it cannot be shown, the build goes on all the same.
    let _ = if out.is_terminal() {
        let text = String::from_utf8_lossy(bytes);
        // Lines may end as on other systems.
        out.write_all(print::harmless_lines(&text.replace('\r', "")).as_bytes())
    } else {
        out.write_all(bytes)
    };
}

/// The path of the Dockerfile as the daemon finds it.
fn inside(context: &Path, file: &Path) -> anyhow::Result<String> {
    let real = |path: &Path| path.canonicalize().with_context(|| format!("cannot find `{}`", path.display()));
    // As it was typed, else as a path in the context.
    let within = context.join(file);
    let file = if file.exists() || !within.exists() { file } else { within.as_path() };
    let (top, whole) = (real(context)?, real(file)?);
    match whole.strip_prefix(&top).ok().and_then(Path::to_str) {
        Some(path) => Ok(path.to_owned()),
        None => Err(hinted(
            format!("`{}` is not in the context `{}`", file.display(), context.display()),
            "move it into the context, or build with another context",
        )),
    }
}

/// The context, without what `.dockerignore` names.
pub fn context(directory: &Path, dockerfile: &str) -> anyhow::Result<Upload> {
    let rules = directory.join(".dockerignore");
    let ignore = match std::fs::read_to_string(&rules) {
        Ok(text) => Ignore::parse(&text),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ignore::default(),
        Err(error) => return Err(error).with_context(|| format!("cannot read `{}`", rules.display())),
    };
    let (dockerfile, top) = (dockerfile.to_owned(), directory.to_owned());
    let wanted = move |path: &[u8]| {
        let path = String::from_utf8_lossy(path);
        // The Dockerfile is always sent, and so are the directories that lead to it.
        if *path == dockerfile || dockerfile.starts_with(&format!("{path}/")) {
            return true;
        }
        !ignore.ignores(&path) || (ignore.takes_back() && top.join(&*path).is_dir())
    };
    let progress = Arc::new(Progress::new(None));
    Ok(Upload::directory_if(directory, wanted, move |bytes| progress.add(bytes))?)
}

/// A context that is nothing but a script to run over an image.
pub fn script_context(image: &str, script: &str) -> Vec<u8> {
    // A word that the script does not have on a line of its own.
    let mut end = "SHOAL_SETUP".to_owned();
    while script.lines().any(|line| line == end) {
        end.push('_');
    }
    let text = format!("FROM {image}\nRUN <<{end}\n{}\n{end}\n", script.trim_end_matches('\n'));
    client::one_file("Dockerfile", text.as_bytes())
}

/// `id=NAME,src=FILE` or `id=NAME,env=VARIABLE`.
fn secrets(texts: &[String], environment: &Environment) -> anyhow::Result<BTreeMap<String, String>> {
    let mut secrets = BTreeMap::new();
    for text in texts {
        let wrong =
            || hinted(format!("`{text}` is not a secret"), "write id=NAME,src=FILE or id=NAME,env=VARIABLE");
        let (mut id, mut value) = (None, None);
        for part in text.split(',') {
            match part.split_once('=').ok_or_else(wrong)? {
                ("id", name) => id = Some(name.to_owned()),
                ("src" | "source", path) => {
                    let meta = std::fs::metadata(path).with_context(|| format!("cannot read `{path}`"))?;
                    if meta.len() > SECRET_MAX {
                        return Err(hinted(
                            format!("`{path}` is longer than {SECRET_MAX} bytes"),
                            "is it the right file?",
                        ));
                    }
                    value = Some(std::fs::read(path).with_context(|| format!("cannot read `{path}`"))?);
                }
                ("env", name) => {
                    let found = environment.variable(name).ok_or_else(|| {
                        hinted(
                            format!("the environment variable `{name}` is not set"),
                            "set it, or use src=FILE",
                        )
                    })?;
                    value = Some(found.into_encoded_bytes());
                }
                _ => return Err(wrong()),
            }
        }
        let (id, value) = (id.ok_or_else(wrong)?, value.ok_or_else(wrong)?);
        secrets.insert(id, BASE64.encode(value));
    }
    Ok(secrets)
}
