//! The process that packs all files of a snapshot as a tar stream. It reads what guests wrote, so it can reach nothing else.
//!
//! A walker clones it, with the same confinement as the process that compares snapshots (`differ`): it sees the layers read-only,
//! has no network and no descriptor but the pipe that it writes into. The daemon stores the stream without reading it.
//!
//! The stream is one layer of an OCI image, without whiteouts: it has the files as a sandbox sees them. `/run/shoal`, with
//! the certificates that programs trust while egress reads their requests, belongs to the host and is left out. So are
//! sockets and devices.

use std::collections::HashMap;
use std::ffi::CString;
use std::fs::File;
use std::io::{self, BufWriter, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::AssertUnwindSafe;

use archive::{BLOCK, DEPTH_MAX, Entry, EntryKind, attributes_header, entry_header};
use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Mode, OFlags, Stat, fgetxattr, flistxattr, fstat, openat, readlinkat, statat,
};
use rustix::io::Errno;
use rustix::thread::{CapabilitySet, LinkNameSpaceType, move_into_link_name_space};
use wire::network::HOST_DIRECTORY;

use crate::storage::stage::{STAGE_EMPTY_DIRECTORY, STAGE_ROOT, layer_name};
use crate::storage::unpacker::{confine, joined};
use crate::sys;
use crate::sys::mounts::attach;

/// Reading files of every owner, within the ids of the process.
const KEPT: CapabilitySet = CapabilitySet::DAC_READ_SEARCH;
/// Most files with several names that are remembered, so that they stay one file. Beyond that, each name becomes a file.
const LINKED_MAX: usize = 262_144;
/// Names and values of a file's attributes in all; the kernel's own limit for each.
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;
/// Size of the write buffer.
const BUFFER: usize = 256 << 10;
/// Names that an image archive gives a meaning of its own.
const WHITEOUT: &[u8] = b".wh.";
/// Number of the descriptor that it keeps.
const OUT: i32 = 4;

const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// What the process needs, opened by the walker.
pub struct Materials<'a> {
    /// The parts of the tree: the root, and what is a union of its own in it.
    pub parts: Vec<ExportPart>,
    /// The user namespace.
    pub user: OwnedFd,
    /// A network namespace with nothing in it.
    pub net: OwnedFd,
    /// Drops all capabilities but these for good, and filters system calls.
    pub give_up_privileges: &'a dyn Fn(CapabilitySet) -> io::Result<()>,
    /// Where the stream goes.
    pub out: OwnedFd,
}

/// A part of the tree, read-only and through idmapped mounts.
pub struct ExportPart {
    /// Path in the tree; `""` is the root.
    pub at: &'static str,
    /// Its layers, the uppermost first.
    pub layers: Vec<OwnedFd>,
}

/// Why files cannot be packed, as the exit code of the process. 1 is everything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unfit {
    /// A name that means something else in an archive.
    Name = 2,
    /// Directories nested too deep.
    Depth = 3,
}

enum Failed {
    Unfit(Unfit),
    Io,
}

impl From<io::Error> for Failed {
    fn from(_: io::Error) -> Self {
        // The process has nowhere to report it: the walker sees its exit code.
        Self::Io
    }
}

impl From<Errno> for Failed {
    fn from(_: Errno) -> Self {
        Self::Io
    }
}

/// In the new process: confines itself, packs, exits.
pub fn run(materials: Materials<'_>) -> ! {
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| lock_in_and_pack(materials)));
    sys::exit_now(match result {
        Ok(Ok(())) => 0,
        Ok(Err(Failed::Unfit(why))) => why as i32,
        Ok(Err(Failed::Io)) | Err(_) => 1,
    })
}

fn lock_in_and_pack(materials: Materials<'_>) -> Result<(), Failed> {
    let Materials { parts, user, net, give_up_privileges, out } = materials;
    move_into_link_name_space(net.as_fd(), Some(LinkNameSpaceType::Network))?;
    let mut unions = vec![STAGE_EMPTY_DIRECTORY, STAGE_ROOT];
    let mut next = 0u8;
    let mut shown: Vec<(&'static str, String)> = Vec::new();
    for part in &parts {
        let mut numbers = Vec::new();
        for tree in &part.layers {
            attach(tree, CWD, layer_name(next))?;
            numbers.push(next);
            next += 1;
        }
        let name = match numbers.as_slice() {
            [only] => layer_name(*only),
            _ => {
                let name = unions.pop().ok_or(Failed::Io)?.to_owned();
                attach(&joined(&numbers)?, CWD, &name)?;
                name
            }
        };
        shown.push((part.at, name));
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

    let mut parts = Vec::new();
    for (at, name) in shown {
        parts.push((at, openat(CWD, name, DIRECTORY, Mode::empty())?));
    }
    pack(&parts, out)
}

/// Packs the parts into a stream.
fn pack(parts: &[(&'static str, OwnedFd)], out: impl Write) -> Result<(), Failed> {
    let covered: Vec<&[u8]> = parts.iter().map(|(at, _)| at.as_bytes()).filter(|at| !at.is_empty()).collect();
    let mut packing =
        Packing { out: BufWriter::with_capacity(BUFFER, out), linked: HashMap::new(), covered, depth: 0 };
    for (at, directory) in parts {
        if !at.is_empty() {
            let stat = fstat(directory)?;
            packing.header(at.as_bytes(), EntryKind::Directory, &stat, 0, &[], &[])?;
        }
        packing.directory(directory.as_fd(), at.as_bytes())?;
    }
    // Two empty blocks mark the end.
    packing.out.write_all(&[0; 2 * BLOCK])?;
    Ok(packing.out.flush()?)
}

/// Identifies a file with several names. Layers may use the same numbers for different files, so the times belong to it.
type Identity = (u64, u64, i64, (i64, i64), (i64, i64));

struct Packing<'a, W: Write> {
    out: BufWriter<W>,
    /// The first name of each file with several.
    linked: HashMap<Identity, Vec<u8>>,
    /// Directories of the root that are parts of their own.
    covered: Vec<&'a [u8]>,
    depth: usize,
}

impl<W: Write> Packing<'_, W> {
    fn directory(&mut self, directory: BorrowedFd<'_>, path: &[u8]) -> Result<(), Failed> {
        if self.depth >= DEPTH_MAX {
            return Err(Failed::Unfit(Unfit::Depth));
        }
        let mut names: Vec<CString> = Vec::new();
        for entry in Dir::read_from(directory)? {
            let entry = entry?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        names.sort_unstable();
        for name in names {
            let inner = match path {
                b"" => name.to_bytes().to_vec(),
                path => [path, b"/", name.to_bytes()].concat(),
            };
            if self.covered.contains(&inner.as_slice()) || inner == HOST_DIRECTORY.as_bytes()[1..] {
                continue;
            }
            if name.to_bytes().starts_with(WHITEOUT) {
                return Err(Failed::Unfit(Unfit::Name));
            }
            self.entry(directory, &name, &inner)?;
        }
        Ok(())
    }

    fn entry(&mut self, directory: BorrowedFd<'_>, name: &CString, path: &[u8]) -> Result<(), Failed> {
        let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let inner = openat(directory, name, DIRECTORY, Mode::empty())?;
                self.header(path, EntryKind::Directory, &stat, 0, &[], &attributes(&inner))?;
                self.depth += 1;
                let packed = self.directory(inner.as_fd(), path);
                self.depth -= 1;
                packed
            }
            FileType::Symlink => {
                let target = readlinkat(directory, name, Vec::new())?;
                self.header(path, EntryKind::Symlink, &stat, 0, target.to_bytes(), &[])
            }
            FileType::Fifo => self.header(path, EntryKind::Fifo, &stat, 0, &[], &[]),
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                self.file(openat(directory, name, flags, Mode::empty())?.into(), path)
            }
            // A socket is useless without its listener, and a sandbox has no devices.
            _ => Ok(()),
        }
    }

    fn file(&mut self, file: File, path: &[u8]) -> Result<(), Failed> {
        let stat = fstat(&file)?;
        if stat.st_nlink > 1 {
            let times =
                ((stat.st_mtime, stat.st_mtime_nsec as i64), (stat.st_ctime, stat.st_ctime_nsec as i64));
            let identity = (stat.st_dev, stat.st_ino, stat.st_size, times.0, times.1);
            if let Some(first) = self.linked.get(&identity).cloned() {
                return self.header(path, EntryKind::HardLink, &stat, 0, &first, &[]);
            }
            if self.linked.len() < LINKED_MAX {
                self.linked.insert(identity, path.to_vec());
            }
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.header(path, EntryKind::File, &stat, size, &[], &attributes(&file))?;
        // A snapshot does not change. If a file is shorter than its header says, the stream is useless.
        match io::copy(&mut file.take(size), &mut self.out)? {
            copied if copied == size => {}
            _ => return Err(Failed::Io),
        }
        let padding = size.next_multiple_of(BLOCK as u64) - size;
        Ok(self.out.write_all(&[0; BLOCK][..padding as usize])?)
    }

    fn header(
        &mut self,
        path: &[u8],
        kind: EntryKind,
        stat: &Stat,
        size: u64,
        link: &[u8],
        attributes: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<(), Failed> {
        let mut path = path.to_vec();
        if kind == EntryKind::Directory {
            path.push(b'/');
        }
        let entry = Entry {
            path,
            kind,
            mode: stat.st_mode & 0o7777,
            size,
            modified: stat.st_mtime,
            link: link.to_vec(),
            uid: stat.st_uid.into(),
            gid: stat.st_gid.into(),
            attributes: Vec::new(),
        };
        if !attributes.is_empty() {
            self.out.write_all(&attributes_header(attributes))?;
        }
        Ok(self.out.write_all(&entry_header(&entry))?)
    }
}

/// The attributes that an image can have: capabilities of programs, and what users set.
fn attributes(file: impl AsFd) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut names = vec![0; ATTRIBUTE_BYTES_MAX];
    // Few files have any, and not every file system supports them: a file without its attributes is worth more than none.
    let length = flistxattr(&file, names.as_mut_slice()).unwrap_or(0);
    let kept = |name: &&[u8]| *name == b"security.capability" || name.starts_with(b"user.");
    let mut all = Vec::new();
    let mut value = vec![0; if length == 0 { 0 } else { ATTRIBUTE_BYTES_MAX }];
    for name in names[..length].split(|byte| *byte == 0).filter(kept) {
        if let Ok(length) = fgetxattr(&file, name, value.as_mut_slice()) {
            all.push((name.to_vec(), value[..length].to_vec()));
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn packed(parts: &[(&'static str, OwnedFd)]) -> Result<Vec<Entry>, Unfit> {
        let mut stream = Vec::new();
        match pack(parts, &mut stream) {
            Ok(()) => {}
            Err(Failed::Unfit(why)) => return Err(why),
            Err(Failed::Io) => panic!("the test's own directory can be read"),
        }
        let mut entries = archive::Entries::with_limit(stream.as_slice(), 1000);
        let mut all = Vec::new();
        while let Some(entry) = entries.next_entry().expect("it is a stream") {
            all.push(entry);
        }
        Ok(all)
    }

    fn opened(path: &std::path::Path) -> OwnedFd {
        openat(CWD, path, DIRECTORY, Mode::empty()).expect("it is a directory")
    }

    #[test]
    fn a_tree_is_packed_whole_and_without_what_belongs_to_the_host() {
        let (root, usr) =
            (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let at = |path: &str| root.path().join(path);
        for path in ["usr/hidden", "run/shoal/inner", "run/other"] {
            std::fs::create_dir_all(at(path)).expect("made");
        }
        std::fs::write(at("run/shoal/ca.crt"), "secret").expect("written");
        std::fs::write(at("one"), "same").expect("written");
        std::fs::hard_link(at("one"), at("two")).expect("linked");
        symlink("/nowhere", at("link")).expect("linked");
        let long = "n".repeat(200);
        std::fs::write(at(&long), vec![7; 1000]).expect("written");
        std::fs::write(usr.path().join("program"), "x").expect("written");
        let entries = packed(&[("", opened(root.path())), ("usr", opened(usr.path()))]).expect("it fits");
        let told: Vec<(String, EntryKind, u64)> = entries
            .iter()
            .map(|entry| (String::from_utf8_lossy(&entry.path).into_owned(), entry.kind, entry.size))
            .collect();
        let expected = [
            ("link", EntryKind::Symlink, 0),
            (&long, EntryKind::File, 1000),
            ("one", EntryKind::File, 4),
            ("run/", EntryKind::Directory, 0),
            ("run/other/", EntryKind::Directory, 0),
            ("two", EntryKind::HardLink, 0),
            ("usr/", EntryKind::Directory, 0),
            ("usr/program", EntryKind::File, 1),
        ]
        .map(|(path, kind, size)| (path.to_owned(), kind, size));
        assert_eq!(told, expected);
    }

    #[test]
    fn a_name_that_archives_reserve_is_refused() {
        let root = tempfile::tempdir().expect("a directory");
        std::fs::write(root.path().join(".wh.etc"), "").expect("written");
        assert_eq!(packed(&[("", opened(root.path()))]), Err(Unfit::Name));
    }
}
