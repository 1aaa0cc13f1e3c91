//! `shoal cp`: files and directories between this machine and a sandbox.
//!
//! What comes from a sandbox is not trusted: a directory is unpacked without following links or leaving its place, and a file
//! gets its name when all of it has come.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use bytes::Bytes;
use client::{Client, Download, Files, Upload, WriteFile, api};
use serde::Serialize;
use tokio::sync::mpsc;

use crate::args::Copy;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;
use crate::output::progress::Progress;
use crate::output::report::{self, hinted};
use crate::terminal::interrupts::Interrupts;
use crate::terminal::pipes::Pipe;

/// Pieces that wait between the disk and the connection.
pub const PIECES_MAX: usize = 8;
/// What is read or written at once.
const PIECE: usize = 256 * 1024;

/// One end of a copy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// `-`
    Stream,
    Local(PathBuf),
    /// `SANDBOX:/path`
    Remote {
        sandbox: String,
        path: String,
    },
}

impl End {
    /// A path with a slash before its first colon is one of this machine, and so is a file with a colon in its name.
    pub fn parse(text: &str) -> Self {
        match text.split_once(':') {
            _ if text == "-" => Self::Stream,
            Some((sandbox, path))
                if !sandbox.is_empty() && !sandbox.contains('/') && path.starts_with('/') =>
            {
                Self::Remote { sandbox: sandbox.into(), path: path.into() }
            }
            Some(_) | None => Self::Local(text.into()),
        }
    }
}

/// What was copied.
#[derive(Debug, Serialize)]
pub struct Copied {
    entries: u64,
    bytes: u64,
    skipped: u64,
}

impl From<api::FilesMade> for Copied {
    fn from(made: api::FilesMade) -> Self {
        Self { entries: made.entries, bytes: made.bytes, skipped: made.skipped }
    }
}

/// `shoal cp`
pub async fn copy(arguments: Copy, environment: &Environment) -> anyhow::Result<i32> {
    let mut interrupts = Interrupts::catch()?;
    let copied = tokio::select! {
        copied = between(&arguments, environment) => copied?,
        // What was begun is dropped: the sandbox ends its part, and nothing half done has a name.
        code = interrupts.next() => return Ok(code),
    };
    told(&copied, arguments.json, environment)
}

/// Says what was copied, and what was not.
pub fn told(copied: &Copied, json: bool, environment: &Environment) -> anyhow::Result<i32> {
    if copied.skipped > 0 {
        let what =
            format!("skipped {} entries: devices, sockets, or links that point outside", copied.skipped);
        report::warning(&what, environment.colour);
    }
    if json {
        print::json(copied)?;
    }
    Ok(0)
}

pub async fn between(arguments: &Copy, environment: &Environment) -> anyhow::Result<Copied> {
    match (End::parse(&arguments.from), End::parse(&arguments.to)) {
        (End::Remote { sandbox, path }, End::Remote { sandbox: other, path: to }) if sandbox == other => {
            let files = files(&sandbox, arguments, environment).await?;
            let to = remote_target(&files, &to, base(&path)?).await?;
            Ok(files.copy(&path, &to, true).await?.into())
        }
        (End::Remote { .. }, End::Remote { .. }) => Err(hinted(
            "cannot copy directly from one sandbox to another",
            "use `shoal cp ONE:/path - | shoal cp - OTHER:/path`",
        )),
        (End::Remote { sandbox, path }, to) => {
            let files = files(&sandbox, arguments, environment).await?;
            let info = files.stat(&path).await?;
            match (info.kind == api::FileKind::Directory, to) {
                (true, End::Stream) => to_stdout(files.pack(&path).await?).await,
                (false, End::Stream) => to_stdout(files.read(&path).await?).await,
                (true, End::Local(to)) => directory_down(&files, &path, &to).await,
                (false, End::Local(to)) => file_down(&files, &path, &info, &to).await,
                (_, End::Remote { .. }) => unreachable!("both remote was matched above"),
            }
        }
        (from, End::Remote { sandbox, path }) => {
            let files = files(&sandbox, arguments, environment).await?;
            match from {
                End::Stream => stdin_up(&files, &path).await,
                End::Local(from) => local_up(&files, &from, &path).await,
                End::Remote { .. } => unreachable!("both remote was matched above"),
            }
        }
        (End::Stream | End::Local(_), End::Stream | End::Local(_)) => Err(relative(arguments)
            .unwrap_or_else(|| {
                hinted(
                    "one of the two paths must be in a sandbox",
                    "write SANDBOX:/path, for example `shoal cp notes.txt work:/workspace/`",
                )
            })),
    }
}

/// The error for `SANDBOX:path`, where no file of this machine has that name.
fn relative(arguments: &Copy) -> Option<anyhow::Error> {
    [&arguments.from, &arguments.to].into_iter().find_map(|text| {
        let (sandbox, path) = text.split_once(':')?;
        if sandbox.is_empty() || sandbox.contains('/') || Path::new(text).exists() {
            return None;
        }
        Some(hinted(
            format!("the path in sandbox `{sandbox}` must be absolute, got `{path}`"),
            format!("write `{sandbox}:/workspace/{path}`"),
        ))
    })
}

async fn files(sandbox: &str, arguments: &Copy, environment: &Environment) -> anyhow::Result<Files> {
    let client: Client = find::daemon(environment)?;
    let sandbox = find::sandbox(&client, sandbox).await?;
    let files = client.files(sandbox.id);
    Ok(match &arguments.user {
        Some(user) => files.as_user(user),
        None => files,
    })
}

/// The last name of a path in a sandbox.
fn base(path: &str) -> anyhow::Result<&str> {
    path.rsplit('/')
        .find(|name| !name.is_empty() && *name != ".")
        .ok_or_else(|| hinted("cannot copy `/` itself", "copy the files and directories in it"))
}

/// As with cp(1): into a directory that exists, under its own name; else under the name that was given.
async fn remote_target(files: &Files, to: &str, name: &str) -> anyhow::Result<String> {
    let inside = || format!("{}/{name}", to.trim_end_matches('/'));
    if to.ends_with('/') {
        return Ok(inside());
    }
    match files.stat(to).await {
        Ok(info) if info.kind == api::FileKind::Directory => Ok(inside()),
        Ok(_) => Ok(to.to_owned()),
        Err(error) if error.code() == Some("file_not_found") => Ok(to.to_owned()),
        Err(error) => Err(error.into()),
    }
}

async fn local_up(files: &Files, from: &Path, to: &str) -> anyhow::Result<Copied> {
    let cannot = || format!("cannot read `{}`", from.display());
    let about = fs::metadata(from).with_context(cannot)?;
    let full = from.canonicalize().with_context(cannot)?;
    let name = full.file_name().map(|name| name.to_string_lossy().into_owned());
    let name =
        name.ok_or_else(|| hinted("cannot copy `/` itself", "copy the files and directories in it"))?;
    let to = remote_target(files, to, &name).await?;
    if about.is_dir() {
        let progress = Arc::new(Progress::new(None));
        let seen = Arc::clone(&progress);
        return Ok(files.upload_directory(from, &to, move |bytes| seen.add(bytes)).await?.into());
    }
    // A FIFO or a device has no length that means anything.
    let size = about.is_file().then_some(about.len());
    let mode = about.is_file().then(|| std::os::unix::fs::PermissionsExt::mode(&about.permissions()) & 0o777);
    let file = File::open(from).with_context(cannot)?;
    let options = WriteFile { mode, ..WriteFile::default() };
    up(files, file, size, &to, &options).await
}

async fn stdin_up(files: &Files, to: &str) -> anyhow::Result<Copied> {
    up(files, io::stdin(), None, to, &WriteFile::default()).await
}

async fn up(
    files: &Files,
    from: impl Read + Send + 'static,
    size: Option<u64>,
    to: &str,
    options: &WriteFile,
) -> anyhow::Result<Copied> {
    let progress = Arc::new(Progress::new(size));
    let (pieces, body) = mpsc::channel(PIECES_MAX);
    let seen = Arc::clone(&progress);
    // A thread that is left behind when the program ends: stdin may never do so.
    std::thread::spawn(move || feed(from, size, &pieces, &seen));
    files.write(to, Upload::pieces(body, size), options).await?;
    Ok(Copied { entries: 1, bytes: progress.done(), skipped: 0 })
}

/// As many bytes as were announced: a file that grows meanwhile is copied as it was.
pub fn feed(
    mut from: impl Read,
    size: Option<u64>,
    pieces: &mpsc::Sender<io::Result<Bytes>>,
    progress: &Progress,
) {
    let mut buffer = vec![0; PIECE];
    let mut left = size.unwrap_or(u64::MAX);
    while left > 0 {
        let limit = left.min(PIECE as u64) as usize;
        let piece = match from.read(&mut buffer[..limit]) {
            Ok(0) => return,
            Ok(length) => Ok(Bytes::copy_from_slice(&buffer[..length])),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => Err(error),
        };
        let length = piece.as_ref().map_or(0, Bytes::len) as u64;
        let broken = piece.is_err();
        if pieces.blocking_send(piece).is_err() || broken {
            return; // The receiver is gone, and it reports the reason.
        }
        left -= length;
        progress.add(length);
    }
}

pub async fn to_stdout(mut download: Download) -> anyhow::Result<Copied> {
    let progress = Progress::new(download.size);
    let mut stdout = Pipe::stdout();
    while let Some(piece) = download.next().await? {
        progress.add(piece.len() as u64);
        stdout.write(piece).await.context("cannot write to stdout")?;
    }
    stdout.finish().await.context("cannot write to stdout")?;
    Ok(Copied { entries: 1, bytes: progress.done(), skipped: 0 })
}

/// Where something lands on this machine, as with cp(1).
fn local_target(to: &Path, name: &str) -> PathBuf {
    let slash = to.as_os_str().as_bytes().ends_with(b"/");
    if slash || to.is_dir() { to.join(name) } else { to.to_owned() }
}

async fn directory_down(files: &Files, from: &str, to: &Path) -> anyhow::Result<Copied> {
    let to = local_target(to, base(from)?);
    let progress = Progress::new(None);
    Ok(files.download_directory(from, &to, |bytes| progress.add(bytes)).await?.into())
}

async fn file_down(files: &Files, from: &str, info: &api::FileInfo, to: &Path) -> anyhow::Result<Copied> {
    let to = local_target(to, base(from)?);
    let mut download = files.read(from).await?;
    let progress = Progress::new(download.size);
    let mode = u32::from_str_radix(&info.mode, 8).unwrap_or(0o644) & 0o777;
    let mut landing = Landing::open(&to, mode)?;
    while let Some(piece) = download.next().await? {
        progress.add(piece.len() as u64);
        // Pieces are small, and a disk that is slow slows the sandbox down, as it should.
        landing.file.write_all(&piece).with_context(|| format!("cannot write `{}`", to.display()))?;
    }
    landing.keep().with_context(|| format!("cannot write `{}`", to.display()))?;
    Ok(Copied { entries: 1, bytes: progress.done(), skipped: 0 })
}

/// A file on its way to its name. Dropped before that, it is removed.
pub struct Landing {
    pub file: File,
    to: PathBuf,
    temporary: Option<PathBuf>,
}

impl Landing {
    pub fn open(to: &Path, mode: u32) -> anyhow::Result<Self> {
        let cannot = || format!("cannot write `{}`", to.display());
        let special = fs::metadata(to)
            .is_ok_and(|about| about.file_type().is_char_device() || about.file_type().is_fifo());
        if special {
            let file = File::options().write(true).open(to).with_context(cannot)?;
            return Ok(Self { file, to: to.to_owned(), temporary: None });
        }
        // Through links, as with any program that writes a file.
        let to = to.canonicalize().unwrap_or_else(|_| to.to_owned());
        let name = to.file_name().ok_or_else(|| anyhow::Error::msg(cannot()))?;
        let random = getrandom::u64().map_err(|error| anyhow::Error::msg(error.to_string()))?;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(".{random:016x}"));
        let temporary = to.with_file_name(temporary);
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(mode).open(&temporary).with_context(cannot)?;
        Ok(Self { file, to, temporary: Some(temporary) })
    }

    pub fn keep(mut self) -> io::Result<()> {
        self.file.flush()?;
        if let Some(temporary) = &self.temporary {
            fs::rename(temporary, &self.to)?;
        }
        self.temporary = None;
        Ok(())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            // There is nothing to be done about it if that fails too.
            let _ = fs::remove_file(temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_two_ends_are_told_apart() {
        let remote = |sandbox: &str, path: &str| End::Remote { sandbox: sandbox.into(), path: path.into() };
        for (text, expected) in [
            ("work:/a/b", remote("work", "/a/b")),
            ("my box:/", remote("my box", "/")),
            ("-", End::Stream),
            ("a", End::Local("a".into())),
            ("./a:/b", End::Local("./a:/b".into())),
            ("/a:/b", End::Local("/a:/b".into())),
            ("work:relative", End::Local("work:relative".into())),
            (":/a", End::Local(":/a".into())),
        ] {
            assert_eq!(End::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn a_relative_path_in_a_sandbox_is_named_as_the_mistake() {
        let copy = |from: &str, to: &str| Copy { from: from.into(), to: to.into(), user: None, json: false };
        let error = relative(&copy("mine:note", ".")).expect("it is the mistake");
        assert_eq!(error.to_string(), "the path in sandbox `mine` must be absolute, got `note`");
        for (from, to) in [("a", "b"), ("./a:b", "c"), (":a", "b")] {
            assert!(relative(&copy(from, to)).is_none(), "{from} {to}");
        }
    }

    #[test]
    fn a_name_is_the_last_that_is_one() {
        assert_eq!(base("/a/b").expect("a name"), "b");
        assert_eq!(base("/a/b/").expect("a name"), "b");
        assert_eq!(base("/a/.").expect("a name"), "a");
        assert!(base("/").is_err());
    }

    #[test]
    fn a_file_that_does_not_come_whole_leaves_nothing() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let to = home.path().join("f");
        fs::write(&to, "before").expect("it is written");
        let mut landing = Landing::open(&to, 0o600).expect("it opens");
        landing.file.write_all(b"half").expect("it takes bytes");
        drop(landing);
        assert_eq!(fs::read_to_string(&to).expect("it is there"), "before");
        let mut landing = Landing::open(&to, 0o600).expect("it opens");
        landing.file.write_all(b"whole").expect("it takes bytes");
        landing.keep().expect("it gets its name");
        assert_eq!(fs::read_to_string(&to).expect("it is there"), "whole");
        assert_eq!(fs::read_dir(home.path()).expect("it is there").count(), 1);
    }
}
