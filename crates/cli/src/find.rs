//! Which daemon a command talks to.
//!
//! The one of `SHOAL_URL` and `SHOAL_API_KEY`; else the one that lives in `SHOAL_DATA_DIR`, in the directory that the
//! machine's configuration file names, or in `/var/lib/shoal`. That
//! it lives is told by its lock: the address in `daemon.json` of a daemon that was killed may be someone else's by now,
//! and the key is not for them.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use client::{Client, SandboxId, api};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Deserialize;

use crate::config;
use crate::environment::Environment;
use crate::report::hinted;

/// Between two looks at where the daemon listens.
const FOLLOW_STEP: Duration = Duration::from_millis(500);

/// A daemon that is there, or an error that says how to have one.
pub fn daemon(environment: &Environment) -> anyhow::Result<Client> {
    if let Some(client) = named_or_living(environment)? {
        return Ok(client);
    }
    let directory = config::data_dir(environment);
    Err(hinted(
        format!("no daemon is running on `{}`", directory.display()),
        "start one with `shoal serve`, or set SHOAL_URL and SHOAL_API_KEY",
    ))
}

/// A daemon that was named or that lives, if there is one.
pub fn named_or_living(environment: &Environment) -> anyhow::Result<Option<Client>> {
    let directory = config::data_dir(environment);
    let key = environment.api_key.as_deref().filter(|key| !key.is_empty());
    if let Some(url) = &environment.url {
        let Some(key) = key else {
            return Err(hinted(
                "SHOAL_URL is set and SHOAL_API_KEY is not",
                "set it to the daemon's key; the daemon keeps its first one in `api.key` in its data directory",
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

/// What a daemon says of itself, in `daemon.json` and on a lease.
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
                .with_context(|| format!("`{}` is not what a daemon writes", path.display()))?;
            Ok(Some(listening.url))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Err(hinted(
            format!("the daemon on `{}` is starting or stopping", directory.display()),
            "try again in a moment",
        )),
        Err(error) => Err(error).with_context(|| format!("cannot read `{}`", path.display())),
    }
}

/// The sandbox that a person means: by its id, else by its name.
pub async fn sandbox(client: &Client, text: &str) -> anyhow::Result<api::Sandbox> {
    if let Ok(id) = text.parse::<SandboxId>() {
        return Ok(client.sandbox(id).await?);
    }
    match client.sandbox_named(text).await? {
        Some(sandbox) => Ok(sandbox),
        None => Err(hinted(format!("sandbox `{text}` does not exist"), "`shoal ls` lists all sandboxes")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
