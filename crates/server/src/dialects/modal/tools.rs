//! The vendor's helper for files, which clients run as a command: `modal-sandbox-fs-tools '{"ReadFile": {"path": ...}}'`.
//!
//! There is no such program in a sandbox. The engine looks at the files, and what the client then runs under the id that it
//! has chosen is a plain program with the same streams and exit code: `cat`, or a shell that prints an error. So nothing is
//! kept, and the client waits, reads and writes as with any command.

use bytes::Bytes;
use engine::{CommandSpec, EngineError, Field, Files, Program};
use serde::Deserialize;
use serde_json::{Value, json};
use wire::CommandId;
use wire::files::{Condition, FileErrorKind, FileKind, FileStat, LIST_MAX, Links};

use super::commands::{Target, give};
use super::grpc::Status;
use crate::http::text::join;

/// Where the vendor's sandboxes have it.
const TOOLS: &str = "/__modal/.bin/modal-sandbox-fs-tools";
/// The most entries of one list.
const ENTRIES_MAX: usize = 50_000;

/// What a client asks of the helper.
#[derive(Debug, PartialEq, Eq, Deserialize)]
pub enum Ask {
    ReadFile {
        path: String,
    },
    WriteFile {
        path: String,
    },
    ListFiles {
        path: String,
    },
    Stat {
        path: String,
    },
    MakeDirectory {
        path: String,
        #[serde(default)]
        parents: bool,
    },
    Remove {
        path: String,
        #[serde(default)]
        recursive: bool,
    },
    Watch {},
}

/// What a command asks of the helper, if it runs the helper.
pub fn asked(words: &[String]) -> Option<Result<Ask, Status>> {
    match words {
        [program, rest @ ..] if program == TOOLS => {
            let text = rest.first().map(String::as_str).unwrap_or_default();
            Some(
                serde_json::from_str(text)
                    .map_err(|error| Status::invalid(format!("the request cannot be read: {error}"))),
            )
        }
        _ => None,
    }
}

/// How an operation failed, in the helper's words.
struct Failed {
    kind: &'static str,
    message: String,
}

impl From<EngineError> for Failed {
    fn from(error: EngineError) -> Self {
        let kind = match &error {
            EngineError::File { source } => match source.kind {
                FileErrorKind::NotFound => "NotFound",
                FileErrorKind::NotADirectory => "NotDirectory",
                FileErrorKind::IsDirectory => "IsDirectory",
                FileErrorKind::PermissionDenied | FileErrorKind::ReadOnly => "PermissionDenied",
                FileErrorKind::DirectoryNotEmpty => "DirectoryNotEmpty",
                FileErrorKind::AlreadyExists => "PathAlreadyExists",
                FileErrorKind::TooLarge => "FileTooLarge",
                _ => "Other",
            },
            _ => "Other",
        };
        Self { kind, message: error.to_string() }
    }
}

/// What to run in the helper's place.
enum Play {
    /// The contents of a file, or what is written to it: a program of the guest does it.
    Run(Vec<String>),
    /// This text.
    Say(String),
}

/// Does what a client asks, and starts what plays the helper.
pub async fn run(target: &Target, id: CommandId, ask: Ask, workdir: Option<String>) -> Result<(), Status> {
    let files = target.app.engine.files(&target.key.owner, target.id, None)?;
    let base = workdir.unwrap_or_else(|| "/".into());
    let play = match play(&files, ask, &base).await {
        Ok(play) => play,
        Err(Failed { kind, message }) => {
            let said = json!({"error_kind": kind, "message": message, "detail": ""}).to_string();
            Play::Run(words(&["/bin/sh", "-c", "printf %s \"$1\" >&2; exit 1", "sh", &said]))
        }
    };
    let (argv, said) = match play {
        Play::Run(argv) => (argv, None),
        Play::Say(text) => (words(&["cat"]), Some(text)),
    };
    let program = Program::argv(argv).map_err(|must| must.of(Field::Argv))?;
    target.run(CommandSpec { id: Some(id.clone()), stdin: true, ..CommandSpec::new(program) }).await?;
    if let Some(text) = said {
        let command = target.app.engine.command(&target.key.owner, target.id, &id).await?;
        give(&command, Some(0), Bytes::from(text), true).await?;
    }
    Ok(())
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

async fn play(files: &Files, ask: Ask, base: &str) -> Result<Play, Failed> {
    let absolute = |path: &str| join_text(base, path);
    Ok(match ask {
        Ask::ReadFile { path } => {
            let path = absolute(&path);
            let stat = files.stat(path.as_bytes(), Links::Follow).await?;
            if stat.kind == FileKind::Directory {
                return Err(Failed { kind: "IsDirectory", message: format!("`{path}` is a directory") });
            }
            Play::Run(words(&["cat", "--", &path]))
        }
        Ask::WriteFile { path } => {
            let path = absolute(&path);
            match files.stat(path.as_bytes(), Links::Follow).await {
                Ok(FileStat { kind: FileKind::Directory, .. }) => {
                    return Err(Failed { kind: "IsDirectory", message: format!("`{path}` is a directory") });
                }
                Ok(_) => {}
                Err(EngineError::File { source }) if source.kind == FileErrorKind::NotFound => {
                    let parent = path.rsplit_once('/').map_or("/", |(parent, _)| parent);
                    files
                        .make_directory(if parent.is_empty() { "/" } else { parent }.as_bytes(), true, None)
                        .await?;
                }
                Err(error) => return Err(error.into()),
            }
            Play::Run(words(&["/bin/sh", "-c", "cat > \"$1\"", "sh", &path]))
        }
        Ask::ListFiles { path } => Play::Say(list(files, &absolute(&path)).await?),
        Ask::Stat { path } => {
            let path = absolute(&path);
            let stat = files.stat(path.as_bytes(), Links::Keep).await?;
            Play::Say(entry(path.as_bytes(), &stat).to_string())
        }
        Ask::MakeDirectory { path, parents } => {
            files.make_directory(absolute(&path).as_bytes(), parents, None).await?;
            Play::Run(words(&["/bin/sh", "-c", ":"]))
        }
        Ask::Remove { path, recursive } => {
            files.remove(absolute(&path).as_bytes(), recursive, Condition::None).await?;
            Play::Run(words(&["/bin/sh", "-c", ":"]))
        }
        Ask::Watch { .. } => {
            return Err(Failed {
                kind: "NotSupported",
                message: "this server does not watch files for this client".into(),
            });
        }
    })
}

fn join_text(base: &str, path: &str) -> String {
    match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("{}/{path}", base.trim_end_matches('/')),
    }
}

async fn list(files: &Files, path: &str) -> Result<String, Failed> {
    let mut entries = Vec::new();
    let mut after = Vec::new();
    loop {
        let listing = files.list(path.as_bytes(), &after, LIST_MAX).await?;
        for found in &listing.entries {
            entries.push(entry(&join(path.as_bytes(), &found.name), &found.stat));
        }
        if entries.len() > ENTRIES_MAX {
            let message = format!("`{path}` has more than {ENTRIES_MAX} entries");
            return Err(Failed { kind: "Other", message });
        }
        match listing.entries.into_iter().next_back() {
            Some(last) if listing.more => after = last.name,
            _ => return Ok(Value::Array(entries).to_string()),
        }
    }
}

/// An entry as clients read it.
fn entry(path: &[u8], stat: &FileStat) -> Value {
    let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
    let kind = match stat.kind {
        FileKind::Directory => "directory",
        FileKind::Symlink => "symlink",
        _ => "file",
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    json!({
        "name": text(name),
        "path": text(path),
        "type": kind,
        "size": stat.size,
        "mode": stat.mode & 0o7777,
        "permissions": permissions(stat),
        "owner": owner(stat.uid),
        "group": owner(stat.gid),
        "modified_time": stat.modified.seconds as f64 + f64::from(stat.modified.nanoseconds) / 1e9,
        "symlink_target": stat.target.as_deref().map(text),
    })
}

fn owner(number: u32) -> String {
    if number == 0 { "root".into() } else { number.to_string() }
}

/// As `ls -l` writes them.
fn permissions(stat: &FileStat) -> String {
    let kind = match stat.kind {
        FileKind::Directory => 'd',
        FileKind::Symlink => 'l',
        _ => '-',
    };
    let bits = "rwxrwxrwx".char_indices();
    let bits = bits.map(|(at, letter)| if stat.mode & (0o400 >> at) != 0 { letter } else { '-' });
    std::iter::once(kind).chain(bits).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_helper_is_known_by_its_path() {
        let ask = |text: &str| asked(&words(&[TOOLS, text]));
        let read =
            ask(r#"{"ReadFile": {"path": "/a"}}"#).expect("it is the helper").expect("it is a request");
        assert_eq!(read, Ask::ReadFile { path: "/a".into() });
        let made = ask(r#"{"MakeDirectory": {"path": "a", "parents": true}}"#);
        assert_eq!(
            made.expect("it is the helper").expect("it is a request"),
            Ask::MakeDirectory { path: "a".into(), parents: true }
        );
        ask("{}").expect("it is the helper").expect_err("it asks for nothing");
        assert!(asked(&words(&["cat", "{}"])).is_none() && asked(&[]).is_none());
        assert_eq!(
            (join_text("/w", "a"), join_text("/", "a"), join_text("/w", "/b")),
            ("/w/a".into(), "/a".into(), "/b".into())
        );
    }
}
