//! The process that compares the files of two snapshots. It reads what guests wrote, so it can reach nothing else.
//!
//! A walker clones it, as it does the process that creates layers (`unpacker`), with the same confinement: it sees the layers
//! of both sides read-only, has no network and no descriptor but the pipe into which it writes what it found. The daemon
//! reads that like bytes from a stranger.

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::panic::AssertUnwindSafe;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, openat, readlinkat, statat};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, move_into_link_name_space};
use wire::launch::{Difference, DifferenceKind, FileSort, to_packet};

use crate::storage::stage::{STAGE_EMPTY_DIRECTORY, STAGE_ROOT, STAGE_WRITABLE, layer_name};
use crate::storage::unpacker::{confine, joined};
use crate::sys;
use crate::sys::mounts::attach;

/// Reading files of every owner, within the ids of the process.
const KEPT: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;
/// Directories inside each other that are followed. Each level costs a descriptor for each layer.
const DEPTH_MAX: usize = 80;
/// Files with more bytes are compared, and their contents are not shown.
const CONTENT_BYTES_MAX: u64 = 256 << 10;
/// Files are compared in pieces of this size.
const PIECE_BYTES: usize = 64 << 10;
/// Number of the descriptor that it keeps.
const OUT: i32 = 4;

/// What the process needs, opened by the walker.
pub struct Materials<'a> {
    /// The parts of the tree: the root, and what is a union of its own in it.
    pub parts: Vec<DiffPart>,
    /// The user namespace.
    pub user: OwnedFd,
    /// A network namespace with nothing in it.
    pub net: OwnedFd,
    /// Drops all capabilities but these for good, and filters system calls.
    pub give_up_privileges: &'a dyn Fn(CapabilitySet) -> io::Result<()>,
    /// Where differences go.
    pub out: OwnedFd,
    /// Whether the contents of text files are wanted.
    pub contents: bool,
}

/// A part of both trees, read-only and through idmapped mounts, the uppermost layer first.
pub struct DiffPart {
    /// Path in the tree; `""` is the root.
    pub at: &'static str,
    /// Layers that only the first side has.
    pub before: Vec<OwnedFd>,
    /// Layers that only the second side has.
    pub after: Vec<OwnedFd>,
    /// Layers below, which both have.
    pub shared: Vec<OwnedFd>,
}

/// In the new process: confines itself, compares, exits.
pub fn run(materials: Materials<'_>) -> ! {
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| lock_in_and_compare(materials)));
    sys::exit_now(if matches!(result, Ok(Ok(()))) { 0 } else { 1 })
}

struct Shown {
    at: &'static str,
    before: String,
    after: String,
    own: Vec<String>,
}

fn lock_in_and_compare(materials: Materials<'_>) -> io::Result<()> {
    let Materials { parts, user, net, give_up_privileges, out, contents } = materials;
    move_into_link_name_space(net.as_fd(), Some(LinkNameSpaceType::Network))?;
    let mut unions: Vec<String> =
        [STAGE_WRITABLE, STAGE_EMPTY_DIRECTORY, STAGE_ROOT].map(String::from).into();
    let mut next = 0u8;
    let mut number = || {
        next += 1;
        next - 1
    };
    let mut shown = Vec::new();
    for part in &parts {
        let mut put = |trees: &[OwnedFd]| {
            let put = |tree: &OwnedFd| -> io::Result<u8> {
                let number = number();
                attach(tree, CWD, layer_name(number))?;
                Ok(number)
            };
            trees.iter().map(put).collect::<io::Result<Vec<u8>>>()
        };
        let (before, after, shared) = (put(&part.before)?, put(&part.after)?, put(&part.shared)?);
        let mut join = |own: &[u8]| -> io::Result<String> {
            let all: Vec<u8> = own.iter().chain(&shared).copied().collect();
            let name = unions.pop().unwrap_or_else(|| layer_name(number()));
            match all.as_slice() {
                [only] => Ok(layer_name(*only)),
                _ => attach(&joined(&all)?, CWD, &name).map(|()| name),
            }
        };
        let (merged_before, merged_after) = (join(&before)?, join(&after)?);
        let own = before.iter().chain(&after).map(|number| layer_name(*number)).collect();
        shown.push(Shown { at: part.at, before: merged_before, after: merged_after, own });
    }
    drop(parts);
    confine(user, give_up_privileges, KEPT)?;
    let keep = |fd: BorrowedFd<'_>| sys::duplicate_above(fd, OUT + 1);
    let (first, second) = (keep(out.as_fd())?, keep(out.as_fd())?);
    let null = keep(
        openat(CWD, "dev/null", OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?.as_fd(),
    )?;
    // Nothing that is closed below may have an owner, who would close it once more.
    drop((net, out));
    let (_, out) = sys::close_all_but(null, first, second, OUT - 1, OUT)?;

    let directory = |name: &str| openat(CWD, name, DIRECTORY, Mode::empty());
    let others: Vec<&'static str> = shown.iter().map(|part| part.at).filter(|at| !at.is_empty()).collect();
    let mut walk = Walk { out, contents, complete: true, depth: 0, skipped: others };
    for part in &shown {
        let own = part.own.iter().map(|name| directory(name)).collect::<Result<Vec<_>, _>>()?;
        let level =
            Level { before: Some(directory(&part.before)?), after: Some(directory(&part.after)?), own };
        let path = if part.at.is_empty() { Vec::new() } else { format!("/{}", part.at).into_bytes() };
        walk.compare(&level, &path)?;
    }
    let complete = walk.complete;
    walk.tell(&Difference::End { complete })
}

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// One directory, on both sides and in the layers that they do not share.
struct Level {
    before: Option<OwnedFd>,
    after: Option<OwnedFd>,
    own: Vec<OwnedFd>,
}

impl Level {
    fn below(&self, name: &OsStr) -> io::Result<Self> {
        let open = |dir: &OwnedFd| match openat(dir, name, DIRECTORY, Mode::empty()) {
            Ok(dir) => Ok(Some(dir)),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(e) => Err(io::Error::from(e)),
        };
        let side = |dir: &Option<OwnedFd>| dir.as_ref().map_or(Ok(None), open);
        let own = self.own.iter().map(open).collect::<io::Result<Vec<_>>>()?;
        Ok(Self {
            before: side(&self.before)?,
            after: side(&self.after)?,
            own: own.into_iter().flatten().collect(),
        })
    }

    /// Whether a layer that is not shared has this name.
    fn touches(&self, name: &OsStr) -> bool {
        self.own.iter().any(|dir| statat(dir, name, AtFlags::SYMLINK_NOFOLLOW).is_ok())
    }
}

struct Walk {
    out: File,
    contents: bool,
    complete: bool,
    depth: usize,
    /// Directories of the root that are parts of their own.
    skipped: Vec<&'static str>,
}

impl Walk {
    fn compare(&mut self, level: &Level, path: &[u8]) -> io::Result<()> {
        if self.depth >= DEPTH_MAX {
            self.complete = false;
            return Ok(());
        }
        let mut names = BTreeSet::new();
        for dir in [&level.before, &level.after].into_iter().flatten() {
            for entry in Dir::read_from(dir)? {
                let entry = entry?;
                if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                    names.insert(CString::from(entry.file_name()));
                }
            }
        }
        for name in names {
            let name = OsStr::from_bytes(name.to_bytes());
            let at_root = path.is_empty();
            if at_root && self.skipped.iter().any(|skipped| name == *skipped) {
                continue;
            }
            // The root of a part is never renamed, so what no layer of one side alone has is the same in both. Further below
            // a directory may have been renamed, and then it is found under its old name in the layers below.
            if self.depth == 0 && !level.touches(name) {
                continue;
            }
            let path = [path, b"/", name.as_bytes()].concat();
            self.compare_one(level, name, &path)?;
        }
        Ok(())
    }

    fn compare_one(&mut self, level: &Level, name: &OsStr, path: &[u8]) -> io::Result<()> {
        let stat = |dir: &Option<OwnedFd>| match dir {
            None => Ok(None),
            Some(dir) => match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => Ok(Some(stat)),
                Err(Errno::NOENT) => Ok(None),
                Err(e) => Err(io::Error::from(e)),
            },
        };
        let (before, after) = (stat(&level.before)?, stat(&level.after)?);
        let kind = match (&before, &after) {
            (None, None) => return Ok(()),
            (None, Some(_)) => Some(DifferenceKind::Added),
            (Some(_), None) => Some(DifferenceKind::Removed),
            (Some(before), Some(after)) => {
                self.differ(level, name, before, after)?.then_some(DifferenceKind::Changed)
            }
        };
        if let Some(kind) = kind {
            let size = |stat: &Option<Stat>| stat.as_ref().map(|stat| stat.st_size as u64);
            let sort = after.as_ref().or(before.as_ref()).map_or(FileSort::Other, sort_of);
            let (before_text, after_text) = match self.contents && sort == FileSort::File {
                true => (text(&level.before, name, &before)?, text(&level.after, name, &after)?),
                false => (None, None),
            };
            self.tell(&Difference::Entry {
                path: path.to_vec(),
                kind,
                sort,
                size_before: size(&before),
                size_after: size(&after),
                before: before_text,
                after: after_text,
            })?;
        }
        let is_directory =
            |stat: &Option<Stat>| stat.as_ref().is_some_and(|stat| sort_of(stat) == FileSort::Directory);
        if is_directory(&before) || is_directory(&after) {
            let below = level.below(name)?;
            self.depth += 1;
            let compared = self.compare(&below, path);
            self.depth -= 1;
            compared?;
        }
        Ok(())
    }

    fn differ(&self, level: &Level, name: &OsStr, before: &Stat, after: &Stat) -> io::Result<bool> {
        if (before.st_mode, before.st_uid, before.st_gid) != (after.st_mode, after.st_uid, after.st_gid) {
            return Ok(true);
        }
        let (Some(old), Some(new)) = (&level.before, &level.after) else { return Ok(true) };
        Ok(match FileType::from_raw_mode(before.st_mode) {
            FileType::Directory => false,
            FileType::Symlink => readlinkat(old, name, Vec::new())? != readlinkat(new, name, Vec::new())?,
            FileType::RegularFile => {
                let time = |stat: &Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec, stat.st_ino);
                if before.st_size != after.st_size {
                    return Ok(true);
                }
                if time(before) == time(after) && !level.touches(name) {
                    return Ok(false);
                }
                !same_bytes(&open(old, name)?, &open(new, name)?)?
            }
            _ => before.st_rdev != after.st_rdev,
        })
    }

    fn tell(&mut self, difference: &Difference) -> io::Result<()> {
        let packet = to_packet(difference);
        self.out.write_all(&(packet.len() as u32).to_le_bytes())?;
        self.out.write_all(&packet)
    }
}

fn open(dir: &OwnedFd, name: &OsStr) -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(openat(dir, name, flags, Mode::empty())?.into())
}

fn same_bytes(mut one: &File, mut other: &File) -> io::Result<bool> {
    let (mut a, mut b) = (vec![0; PIECE_BYTES], vec![0; PIECE_BYTES]);
    loop {
        let (length, second) = (fill(&mut one, &mut a)?, fill(&mut other, &mut b)?);
        if a[..length] != b[..second] {
            return Ok(false);
        }
        if length == 0 {
            return Ok(true);
        }
    }
}

fn fill(file: &mut &File, into: &mut [u8]) -> io::Result<usize> {
    let mut at = 0;
    while at < into.len() {
        match file.read(&mut into[at..])? {
            0 => break,
            length => at += length,
        }
    }
    Ok(at)
}

/// The contents of a small file, if they are text.
fn text(dir: &Option<OwnedFd>, name: &OsStr, stat: &Option<Stat>) -> io::Result<Option<String>> {
    let (Some(dir), Some(stat)) = (dir, stat) else { return Ok(None) };
    if sort_of(stat) != FileSort::File || stat.st_size as u64 > CONTENT_BYTES_MAX {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    open(dir, name)?.take(CONTENT_BYTES_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8(bytes).ok().filter(|text| !text.contains('\0')))
}

fn sort_of(stat: &Stat) -> FileSort {
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => FileSort::File,
        FileType::Directory => FileSort::Directory,
        FileType::Symlink => FileSort::Symlink,
        _ => FileSort::Other,
    }
}
