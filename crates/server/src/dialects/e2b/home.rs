//! The user that E2B's sandboxes have, and the directories that paths are relative to.
//!
//! Clients expect a user `user` with `/home/user` who may do whatever `root` may: there, by `sudo` and by an agent that
//! writes files as root and gives them away. Here `user` is a second name of root, which `create` adds to the sandbox. An
//! account of that name that the image has keeps its number, and is found by it.

use engine::{Engine, EngineError, Field, Files, GuestPath, GuestUser, Owner};
use wire::SandboxId;
use wire::files::{ByteRange, Condition, FileErrorKind, WriteOptions};

use crate::http::text::join;

/// Who commands run as where the caller does not say.
pub const USER: &str = "user";
/// Where.
const HOME: &str = "/home/user";
const PASSWD: &[u8] = b"/etc/passwd";
/// More than any image has.
const PASSWD_MAX: usize = 1 << 20;

/// Adds the user and its home to a sandbox that lacks them.
pub async fn prepare(engine: &Engine, owner: &Owner, id: SandboxId) -> Result<(), EngineError> {
    let files = engine.files(owner, id, None)?;
    let users = users(&files).await?;
    if let Some(users) = with_user(&users) {
        let options = WriteOptions {
            path: PASSWD.to_vec(),
            mode: None,
            parents: true,
            size: Some(users.len() as u64),
            condition: Condition::None,
        };
        let mut writing = files.write(options).await?;
        writing.write(users.into()).await?;
        writing.finish().await?;
    }
    files.make_directory(HOME.as_bytes(), true, None).await
}

/// A list of accounts with the user as a second name of root, behind root's own line, which is found first by number;
/// `None` if it has that already.
fn with_user(users: &[u8]) -> Option<Vec<u8>> {
    if entry(users, USER).is_some_and(|user| user.is_root) {
        return None;
    }
    let line = format!("{USER}:x:0:0::{HOME}:/bin/bash\n").into_bytes();
    let behind = match users.starts_with(b"root:") {
        true => users.iter().position(|byte| *byte == b'\n').map_or(users.len(), |end| end + 1),
        false => 0,
    };
    let (above, below) = users.split_at(behind);
    let ended: &[u8] = if above.last().is_some_and(|last| *last != b'\n') { b"\n" } else { b"" };
    Some([above, ended, &line, below].concat())
}

/// The user that a caller means.
pub fn user(named: Option<&str>) -> Result<GuestUser, EngineError> {
    GuestUser::parse(named.unwrap_or(USER)).map_err(|must| must.of(Field::User))
}

/// The home of a user. A user that does not exist has none, and whatever runs as that user fails and says so.
pub async fn of(engine: &Engine, owner: &Owner, id: SandboxId, user: &str) -> Result<String, EngineError> {
    if user == USER {
        return Ok(HOME.into());
    }
    let users = users(&engine.files(owner, id, None)?).await?;
    Ok(entry(&users, user).and_then(|entry| entry.home).unwrap_or_else(|| "/".into()))
}

/// An absolute path: `~` and what is relative is below the home.
pub fn absolute(home: &str, path: &str) -> Vec<u8> {
    let below = match path.strip_prefix('~') {
        Some("") => return home.into(),
        Some(rest) if rest.starts_with('/') => rest.trim_start_matches('/'),
        Some(_) | None if path.starts_with('/') => return path.into(),
        Some(_) | None => path,
    };
    if below.is_empty() { home.into() } else { join(home.as_bytes(), below.as_bytes()) }
}

/// As [`absolute`], for a working directory.
pub fn directory(home: &str, path: &str) -> Result<GuestPath, EngineError> {
    let path = String::from_utf8(absolute(home, path)).map_err(|_| Field::Cwd.must("be UTF-8"))?;
    GuestPath::parse(path).map_err(|must| must.of(Field::Cwd))
}

/// The name of a user or a group, by its number.
pub async fn name_of(files: &Files, list: &[u8], number: u32) -> Option<String> {
    if number == 0 {
        return Some("root".into());
    }
    let lines = whole(files, list).await.ok()?;
    let lines = String::from_utf8_lossy(&lines).into_owned();
    lines.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)?.parse() == Ok(number)).then(|| name.to_owned())
    })
}

struct Entry {
    is_root: bool,
    home: Option<String>,
}

fn entry(users: &[u8], name: &str) -> Option<Entry> {
    let line = users.split(|byte| *byte == b'\n').find(|line| {
        let fields = line.strip_prefix(name.as_bytes());
        fields.is_some_and(|rest| rest.starts_with(b":"))
    })?;
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b':').collect();
    let home = fields.get(5).and_then(|home| String::from_utf8(home.to_vec()).ok());
    Some(Entry {
        is_root: fields.get(2) == Some(&&b"0"[..]),
        home: home.filter(|home| home.starts_with('/')),
    })
}

async fn users(files: &Files) -> Result<Vec<u8>, EngineError> {
    match whole(files, PASSWD).await {
        Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

/// A short file.
async fn whole(files: &Files, path: &[u8]) -> Result<Vec<u8>, EngineError> {
    let mut reading = files.read(path, ByteRange::Whole).await?;
    let mut all = Vec::new();
    while let Some(bytes) = reading.next().await? {
        all.extend_from_slice(&bytes);
        if all.len() > PASSWD_MAX {
            return Err(Field::Path.must(format!("lead to at most {PASSWD_MAX} bytes")));
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_relative_to_the_home() {
        for (path, expected) in [
            ("/a", "/a"),
            ("a/b", "/home/user/a/b"),
            ("~", "/home/user"),
            ("~/a", "/home/user/a"),
            ("~x", "/home/user/~x"),
            ("", "/home/user"),
            ("~/", "/home/user"),
        ] {
            assert_eq!(absolute(HOME, path), expected.as_bytes(), "{path}");
        }
    }

    #[test]
    fn a_user_is_found_by_its_whole_name() {
        let users = b"root:x:0:0:root:/root:/bin/bash\nuser2:x:1:1::/two:/bin/sh\nodd\n";
        assert!(entry(users, "user").is_none());
        let added = with_user(users).expect("it was not there");
        let expected = "root:x:0:0:root:/root:/bin/bash\nuser:x:0:0::/home/user:/bin/bash\nuser2:";
        assert!(added.starts_with(expected.as_bytes()), "{}", String::from_utf8_lossy(&added));
        assert_eq!(with_user(&added), None, "once is enough");
        let theirs = with_user(b"user:x:1000:1000::/home/user:/bin/sh").expect("it is not root");
        assert!(theirs.starts_with(b"user:x:0:0::/home/user:/bin/bash\nuser:x:1000:"));
        assert_eq!(entry(users, "user2").and_then(|entry| entry.home).as_deref(), Some("/two"));
        assert_eq!(entry(users, "root").and_then(|entry| entry.home).as_deref(), Some("/root"));
    }
}
