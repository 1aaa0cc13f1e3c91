//! Which daemon a command talks to.
//!
//! The one of `SHOAL_URL` and `SHOAL_API_KEY`; else the one that lives in `SHOAL_DATA_DIR`, in the directory that the
//! machine's configuration file names, or in `/var/lib/shoal`. A daemon is alive if it holds the lock of its data directory.
//! After a daemon was killed, another program may listen at the address in `daemon.json`, and must not get the key.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use client::{Client, SandboxId, api};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Deserialize;

use crate::daemon::settings;
use crate::environment::Environment;
use crate::output::hints;
use crate::output::print::short_id;
use crate::output::report::{hinted, hinted_by};

/// How many of the things that a prefix matches are named.
const MATCHES_SHOWN: usize = 4;
/// So much of an id is enough to delete by: fewer characters are too easily those of a name that was mistyped.
const SURE_ID_MIN: usize = 4;
/// Between two looks at where the daemon listens.
const FOLLOW_STEP: Duration = Duration::from_millis(500);

/// A daemon that is there, or an error that says how to have one.
pub fn daemon(environment: &Environment) -> anyhow::Result<Client> {
    if let Some(client) = named_or_living(environment)? {
        return Ok(client);
    }
    let directory = settings::data_dir(environment);
    if let Some(error) = unreadable(&directory) {
        return Err(error);
    }
    Err(hinted(
        format!("no daemon is running in `{}`", directory.display()),
        "start one with `shoal serve`, or set SHOAL_URL and SHOAL_API_KEY",
    ))
}

/// The error for a data directory that this user may not read: nobody can say whether a daemon is running there.
pub fn unreadable(directory: &Path) -> Option<anyhow::Error> {
    let denied = |path: &Path| match File::open(path) {
        Err(error) => error.kind() == io::ErrorKind::PermissionDenied,
        Ok(_) => false,
    };
    (denied(directory) || denied(&directory.join("lock"))).then(|| {
        hinted(
            format!("cannot read `{}` as this user", directory.display()),
            "run `shoal` as root (sudo), or set SHOAL_URL and SHOAL_API_KEY",
        )
    })
}

/// A daemon that was named or that lives, if there is one.
pub fn named_or_living(environment: &Environment) -> anyhow::Result<Option<Client>> {
    let directory = settings::data_dir(environment);
    let key = environment.api_key.as_deref().filter(|key| !key.is_empty());
    if let Some(url) = &environment.url {
        let Some(key) = key else {
            return Err(hinted(
                "SHOAL_URL is set, but SHOAL_API_KEY is not",
                "set SHOAL_API_KEY to the daemon's key; the daemon keeps its first key in `api.key` in its data directory",
            ));
        };
        return Ok(Some(Client::new(url, key)?));
    }
    let Some(url) = living(&directory)? else { return Ok(None) };
    let key = match key {
        Some(key) => key.to_owned(),
        None => read_key(&directory)?,
    };
    let client = Client::new(&url, &key)?;
    tokio::spawn(follow(directory, url, client.clone()));
    Ok(Some(client))
}

/// A daemon that is started again may listen elsewhere; the client goes with it. Ends with the program.
async fn follow(directory: PathBuf, mut url: String, client: Client) {
    loop {
        tokio::time::sleep(FOLLOW_STEP).await;
        let looked = directory.clone();
        let now = tokio::task::spawn_blocking(move || living(&looked)).await;
        // While it is away or on its way there is nothing to follow.
        if let Ok(Ok(Some(now))) = now
            && now != url
            && client.move_to(&now).is_ok()
        {
            url = now;
        }
    }
}

/// The key that a daemon keeps for local clients.
pub fn read_key(directory: &Path) -> anyhow::Result<String> {
    let path = directory.join("api.key");
    let key = std::fs::read_to_string(&path).with_context(|| format!("cannot read `{}`", path.display()))?;
    Ok(key.trim().to_owned())
}

/// What a daemon says of itself, in `daemon.json`.
#[derive(Debug, Deserialize)]
pub struct Listening {
    /// Where it listens.
    pub url: String,
}

/// The address of the daemon that lives in a directory, if one does.
fn living(directory: &Path) -> anyhow::Result<Option<String>> {
    let path = directory.join("lock");
    let lock = match File::open(&path) {
        Ok(lock) => lock,
        // No daemon has ever been there, or it is none that this user could talk to.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) => {
            return Ok(None);
        }
        Err(error) => return Err(error).with_context(|| format!("cannot open `{}`", path.display())),
    };
    match flock(&lock, FlockOperation::NonBlockingLockShared) {
        Ok(()) => return Ok(None),
        Err(Errno::WOULDBLOCK) => {}
        Err(error) => return Err(error).with_context(|| format!("cannot lock `{}`", path.display())),
    }
    let path = directory.join("daemon.json");
    match std::fs::read(&path) {
        Ok(json) => {
            let listening: Listening = serde_json::from_slice(&json)
                .with_context(|| format!("cannot parse `{}`", path.display()))?;
            Ok(Some(listening.url))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(hinted(
            format!("the daemon in `{}` is starting or stopping", directory.display()),
            "try again in a moment",
        )),
        Err(error) => Err(error).with_context(|| format!("cannot read `{}`", path.display())),
    }
}

/// What a thing is called.
struct Handles {
    id: String,
    name: String,
}

/// How sure it must be that a person meant this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sure {
    /// The beginning of an id or a name is enough, if only one thing begins so.
    Unique,
    /// For deletions: `rm work` after `work` is gone must not delete `worker`. A whole name, or enough of an id.
    Whole,
}

/// The sandbox that a person means: by its id or name, or by the beginning of either.
pub async fn sandbox(client: &Client, text: &str) -> anyhow::Result<api::Sandbox> {
    sandbox_surely(client, text, Sure::Unique).await
}

/// The same, as sure as is asked for.
pub async fn sandbox_surely(client: &Client, text: &str, sure: Sure) -> anyhow::Result<api::Sandbox> {
    if let Ok(id) = text.parse::<SandboxId>() {
        return Ok(client.sandbox(id).await?);
    }
    if let Some(sandbox) = client.sandbox_named(text).await? {
        return Ok(sandbox);
    }
    let handles = |sandbox: &api::Sandbox| Handles { id: sandbox.id.to_string(), name: sandbox.name.clone() };
    pick("sandbox", text, sure, client.sandboxes().await?, handles)
}

/// The command of a sandbox that a person means: by its id, or by the beginning of it.
pub async fn command(client: &Client, sandbox: SandboxId, text: &str) -> anyhow::Result<api::Command> {
    let handles = |command: &api::Command| Handles { id: command.id.to_string(), name: String::new() };
    pick("command", text, Sure::Unique, client.commands(sandbox).await?, handles)
}

/// The name of the template that a person means: by its name or id, or by the beginning of either.
pub async fn template(client: &Client, text: &str, sure: Sure) -> anyhow::Result<String> {
    let handles = |template: &api::Template| Handles {
        id: template.id.clone().unwrap_or_default(),
        name: template.name.clone(),
    };
    Ok(pick("template", text, sure, client.templates().await?, handles)?.name)
}

/// The name of the volume that a person means: by its name or id, or by the beginning of either.
pub async fn volume(client: &Client, text: &str, sure: Sure) -> anyhow::Result<String> {
    let handles = |volume: &api::Volume| Handles { id: volume.id.clone(), name: volume.name.clone() };
    Ok(pick("volume", text, sure, client.volumes().await?, handles)?.name)
}

/// The name of the pool that a person means: by its name or id, or by the beginning of either.
pub async fn pool(client: &Client, text: &str, sure: Sure) -> anyhow::Result<String> {
    let handles = |pool: &api::Pool| Handles { id: pool.id.clone(), name: pool.name.clone() };
    Ok(pick("pool", text, sure, client.pools().await?, handles)?.name)
}

/// The id of the key that a person wants to delete: by enough of its beginning.
pub async fn key(client: &Client, text: &str) -> anyhow::Result<String> {
    let handles = |key: &api::Key| Handles { id: key.id.clone(), name: String::new() };
    Ok(pick("key", text, Sure::Whole, client.keys().await?, handles)?.id)
}

/// The one among `all` that is called `text`, else the only one whose id or name begins with it.
fn pick<T>(
    noun: &str,
    text: &str,
    sure: Sure,
    all: Vec<T>,
    handles: impl Fn(&T) -> Handles,
) -> anyhow::Result<T> {
    if text.is_empty() {
        return Err(missing(noun, text));
    }
    let exact = |one: &T| handles(one).id == text || handles(one).name == text;
    let begins = |one: &T| {
        let Handles { id, name } = handles(one);
        match sure {
            Sure::Unique => id.starts_with(text) || name.starts_with(text),
            Sure::Whole => id.starts_with(text) && text.len() >= SURE_ID_MIN,
        }
    };
    let (mut found, others): (Vec<T>, Vec<T>) = all.into_iter().partition(exact);
    if found.is_empty() {
        found = others.into_iter().filter(begins).collect();
    }
    if found.len() > 1 {
        let shown: Vec<String> = found.iter().take(MATCHES_SHOWN).map(|one| shown(&handles(one))).collect();
        let more = if found.len() > MATCHES_SHOWN { ", …" } else { "" };
        return Err(hinted(
            format!("`{text}` matches {} {}: {}{more}", found.len(), plural(noun), shown.join(", ")),
            "type more characters of the name or the id",
        ));
    }
    found.pop().ok_or_else(|| missing(noun, text))
}

/// How a match is shown: by the beginning of its id, and by its name if it has one.
fn shown(handles: &Handles) -> String {
    let id = short_id(&handles.id);
    if handles.name.is_empty() { id.to_owned() } else { format!("{id} ({})", handles.name) }
}

fn plural(noun: &str) -> String {
    if noun.ends_with('x') { format!("{noun}es") } else { format!("{noun}s") }
}

/// That nothing is called what a person typed.
#[derive(Debug, thiserror::Error)]
#[error("{noun} `{text}` does not exist")]
struct Missing {
    noun: String,
    text: String,
}

/// Whether an error says that what a person named does not exist.
pub fn is_missing(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| cause.is::<Missing>())
}

fn missing(noun: &str, text: &str) -> anyhow::Error {
    let missing = Missing { noun: noun.to_owned(), text: text.to_owned() };
    let hint = hints::of_code(&format!("{noun}_not_found")).unwrap_or_default();
    hinted_by(missing.into(), format!("{noun} `{text}` does not exist"), hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_means_the_only_one_that_it_begins() {
        let all = || vec![["85c2aa", "work"], ["85d0bb", "worker"], ["90aaaa", "85"]];
        let picked = |text: &str, sure| {
            let handles = |one: &[&str; 2]| Handles { id: one[0].to_owned(), name: one[1].to_owned() };
            pick("sandbox", text, sure, all(), handles).map(|one| one[0].to_owned())
        };
        let unique = |text: &str| picked(text, Sure::Unique);
        assert_eq!(unique("85c").expect("an id"), "85c2aa");
        assert_eq!(unique("worke").expect("a name"), "85d0bb");
        assert_eq!(unique("work").expect("a whole name goes before the beginning of one"), "85c2aa");
        assert_eq!(unique("85").expect("a whole name goes before the beginning of an id"), "90aaaa");
        let error = unique("wor").expect_err("two begin so").to_string();
        assert_eq!(error, "`wor` matches 2 sandboxes: 85c2aa (work), 85d0bb (worker)");
        for text in ["x", ""] {
            let error = unique(text).expect_err("none begins so").to_string();
            assert_eq!(error, format!("sandbox `{text}` does not exist"));
        }
        let whole = |text: &str| picked(text, Sure::Whole);
        assert_eq!(whole("85c2").expect("enough of an id"), "85c2aa");
        assert_eq!(whole("worker").expect("a whole name"), "85d0bb");
        for text in ["worke", "85c"] {
            assert!(is_missing(&whole(text).expect_err("too little to delete by")), "{text}");
        }
    }

    #[test]
    fn the_address_of_a_dead_daemon_is_not_used() {
        let home = tempfile::tempdir().expect("a temporary directory");
        assert!(living(home.path()).expect("nothing is there").is_none());
        std::fs::write(home.path().join("lock"), "1\n").expect("a file");
        std::fs::write(home.path().join("daemon.json"), "{\"url\": \"http://127.0.0.1:1\", \"pid\": 1}")
            .expect("a file");
        assert!(living(home.path()).expect("nobody holds the lock").is_none());
        let lock = File::open(home.path().join("lock")).expect("it is there");
        flock(&lock, FlockOperation::LockExclusive).expect("it is free");
        assert_eq!(living(home.path()).expect("it lives").as_deref(), Some("http://127.0.0.1:1"));
    }
}
