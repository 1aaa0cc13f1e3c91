//! `filesystem.Filesystem`: what is where, and changes of names. `files` has the contents, `watch` the events.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use engine::{EngineError, Files};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::files::{Condition, FileErrorKind, FileKind, FileStat, LIST_MAX, Links, Relocate};

use super::error::Refusal;
use super::home;
use super::read::{Target, Unary};
use crate::http::app::App;
use crate::http::clock::guest_time;
use crate::http::text::join;

/// The most entries of one list.
const ENTRIES_MAX: usize = 50_000;

/// A call that says no more than a path.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct At {
    path: String,
}

/// `ListDir`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ListDir {
    path: String,
    depth: u32,
}

/// `Move`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Move {
    source: String,
    destination: String,
}

/// The files of a sandbox as one user, with that user's home.
pub struct Place {
    pub files: Files,
    pub home: String,
    id: wire::SandboxId,
}

impl Place {
    /// As the user that the call names, or the one in `named`.
    pub async fn of(app: &App, target: &Target, named: Option<&str>) -> Result<Self, Refusal> {
        let refused = |error: EngineError| Refusal::agent(target.id, error);
        let owner = &target.key.owner;
        let user = home::user(named.or(target.user.as_deref())).map_err(refused)?;
        let home = home::of(&app.engine, owner, target.id, user.as_str()).await.map_err(refused)?;
        let files = app.engine.files(owner, target.id, Some(user)).map_err(refused)?;
        Ok(Self { files, home, id: target.id })
    }

    /// As above, for a call of the agent.
    async fn called(app: &App, target: &Target) -> Result<Self, Refusal> {
        Self::of(app, target, None).await.map_err(Refusal::rpc)
    }

    /// An absolute path.
    pub fn path(&self, path: &str) -> Vec<u8> {
        home::absolute(&self.home, path)
    }

    /// What the engine refused, for a call of the agent.
    pub fn refused(&self, error: EngineError) -> Refusal {
        Refusal::agent(self.id, error).rpc()
    }

    /// What is at a path, without following a link at its end.
    async fn entry(&self, path: &[u8]) -> Result<Value, Refusal> {
        let stat = self.files.stat(path, Links::Keep).await.map_err(|error| self.refused(error))?;
        Ok(self.shown(path, &stat).await)
    }

    /// An entry as clients read it. The type of a link is that of what it leads to.
    async fn shown(&self, path: &[u8], stat: &FileStat) -> Value {
        let leads_to = match stat.kind {
            FileKind::Symlink => self.files.stat(path, Links::Follow).await.ok().map(|stat| stat.kind),
            kind => Some(kind),
        };
        let kind = match leads_to {
            Some(FileKind::Directory) => "FILE_TYPE_DIRECTORY",
            // Clients leave out what has no type, and a device can be read like a file.
            _ => "FILE_TYPE_FILE",
        };
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let owner = home::name_of(&self.files, b"/etc/passwd", stat.uid).await;
        let group = home::name_of(&self.files, b"/etc/group", stat.gid).await;
        let mut entry = json!({
            "name": String::from_utf8_lossy(name),
            "type": kind,
            "path": String::from_utf8_lossy(path),
            "size": stat.size.to_string(),
            "mode": stat.mode & 0o7777,
            "permissions": permissions(stat),
            "owner": owner.unwrap_or_else(|| stat.uid.to_string()),
            "group": group.unwrap_or_else(|| stat.gid.to_string()),
            "modifiedTime": guest_time(&stat.modified),
        });
        if let Some(target) = &stat.target {
            let parent = &path[..path.len() - name.len()];
            let target = if target.starts_with(b"/") { target.clone() } else { join(parent, target) };
            entry["symlinkTarget"] = String::from_utf8_lossy(&target).into();
            entry["isSymlink"] = true.into();
        }
        entry
    }
}

/// As `ls -l` writes them.
fn permissions(stat: &FileStat) -> String {
    let kind = match stat.kind {
        FileKind::Directory => 'd',
        FileKind::Symlink => 'L',
        FileKind::Fifo => 'p',
        FileKind::Socket => 'S',
        FileKind::Device => 'D',
        FileKind::File | FileKind::Unknown => '-',
    };
    let bits = "rwxrwxrwx".char_indices();
    let bits = bits.map(|(at, letter)| if stat.mode & (0o400 >> at) != 0 { letter } else { '-' });
    std::iter::once(kind).chain(bits).collect()
}

/// What is at a path.
pub async fn stat(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<At>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::called(&app, &target).await?;
    Ok(Json(json!({"entry": place.entry(&place.path(&wish.path)).await?})))
}

/// What is in a directory, and in those below it as deep as the caller asks.
pub async fn list_dir(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<ListDir>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::called(&app, &target).await?;
    let mut entries = Vec::new();
    let mut ahead = vec![(place.path(&wish.path), wish.depth.max(1))];
    let mut asked = true;
    while let Some((directory, depth)) = ahead.pop() {
        let mut after = Vec::new();
        loop {
            let listing = match place.files.list(&directory, &after, LIST_MAX).await {
                Ok(listing) => listing,
                // It was removed, or is closed to this user; the caller asked for the one above it.
                Err(EngineError::File { .. }) if !asked => break,
                Err(error) => return Err(place.refused(error)),
            };
            asked = false;
            for entry in &listing.entries {
                let path = join(&directory, &entry.name);
                entries.push(place.shown(&path, &entry.stat).await);
                if entry.stat.kind == FileKind::Directory && depth > 1 {
                    ahead.push((path, depth - 1));
                }
            }
            if entries.len() > ENTRIES_MAX {
                let message = format!("the list has more than {ENTRIES_MAX} entries; ask for less depth");
                return Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, message).rpc());
            }
            match listing.entries.into_iter().next_back() {
                Some(last) if listing.more => after = last.name,
                _ => break,
            }
        }
    }
    Ok(Json(json!({"entries": entries})))
}

/// Makes a directory with those above it. One that is there is an error, which clients turn into `False`.
pub async fn make_dir(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<At>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::called(&app, &target).await?;
    let path = place.path(&wish.path);
    match place.files.stat(&path, Links::Follow).await {
        Ok(FileStat { kind: FileKind::Directory, .. }) => {
            let message = format!("directory already exists: {}", String::from_utf8_lossy(&path));
            return Err(Refusal::new(StatusCode::CONFLICT, message).rpc());
        }
        Ok(_) => {
            let message = format!("path is not a directory: {}", String::from_utf8_lossy(&path));
            return Err(Refusal::invalid(message).rpc());
        }
        Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {}
        Err(error) => return Err(place.refused(error)),
    }
    place.files.make_directory(&path, true, None).await.map_err(|error| place.refused(error))?;
    Ok(Json(json!({"entry": place.entry(&path).await?})))
}

/// Gives something another path. Directories above that path are made.
pub async fn rename(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<Move>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::called(&app, &target).await?;
    let (from, to) = (place.path(&wish.source), place.path(&wish.destination));
    let wish = Relocate { from, to: to.clone(), overwrite: true, parents: true, recursive: true };
    place.files.rename(wish).await.map_err(|error| place.refused(error))?;
    Ok(Json(json!({"entry": place.entry(&to).await?})))
}

/// Removes something with all that is in it. Nothing there is as good.
pub async fn remove(
    State(app): State<App>,
    target: Target,
    Unary(wish): Unary<At>,
) -> Result<Json<Value>, Refusal> {
    let place = Place::called(&app, &target).await?;
    match place.files.remove(&place.path(&wish.path), true, Condition::None).await {
        Ok(()) => {}
        Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {}
        Err(error) => return Err(place.refused(error)),
    }
    Ok(Json(json!({})))
}

#[cfg(test)]
mod tests {
    use wire::files::Timestamp;

    use super::*;

    #[test]
    fn permissions_are_written_as_people_know_them() {
        let stat = |kind, mode| FileStat {
            kind,
            size: 0,
            mode,
            uid: 0,
            gid: 0,
            inode: 1,
            links: 1,
            modified: Timestamp { seconds: 0, nanoseconds: 0 },
            target: None,
        };
        assert_eq!(permissions(&stat(FileKind::File, 0o644)), "-rw-r--r--");
        assert_eq!(permissions(&stat(FileKind::Directory, 0o1755)), "drwxr-xr-x");
    }
}
