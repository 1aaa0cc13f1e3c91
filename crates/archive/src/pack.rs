//! Packs a tree into a stream. The tree may change during that: links are not followed, and the stream contains what
//! was opened.

use std::ffi::{CStr, CString};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;

use crate::DEPTH_MAX;
use crate::header::{BLOCK, Header};
use crate::read::{Entry, EntryKind};

/// The size of one read.
const BUFFER: usize = 256 * 1024;
/// The longest name that fits into a header.
const NAME_MAX: usize = 99;
/// The name in headers of long names, as in GNU tar.
const LONG_NAME: &[u8] = b"././@LongLink";

/// Why a stream is incomplete. What was written of it is useless.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// A part of the tree could not be read.
    #[error("cannot read `{}`", String::from_utf8_lossy(path))]
    Read {
        /// Below the top.
        path: Vec<u8>,
        /// The kernel's error.
        source: Errno,
    },
    /// A file shrank while it was read, after its length had been written.
    #[error("`{}` became shorter while it was read", String::from_utf8_lossy(path))]
    Shrank {
        /// Below the top.
        path: Vec<u8>,
    },
    /// The tree is nested too deeply.
    #[error("`{}` is nested too deep", String::from_utf8_lossy(path))]
    TooDeep {
        /// Below the top.
        path: Vec<u8>,
    },
    /// The stream could not be written.
    #[error("cannot write the archive")]
    Write {
        /// Why.
        #[from]
        source: io::Error,
    },
}

/// Statistics of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Packed {
    /// Files, links and directories.
    pub entries: u64,
    /// The stream's own length.
    pub bytes: u64,
    /// Sockets, FIFOs and devices, which are skipped.
    pub skipped: u64,
}

/// Packs everything in a directory, under names relative to it.
pub fn pack_directory(top: OwnedFd, to: &mut dyn Write) -> Result<Packed, PackError> {
    pack_directory_if(top, to, &|_| true)
}

/// Packs the part of a directory that the filter accepts, by path. Skips everything in a directory that it rejects.
pub fn pack_directory_if(
    top: OwnedFd,
    to: &mut dyn Write,
    wanted: &dyn Fn(&[u8]) -> bool,
) -> Result<Packed, PackError> {
    let mut packing = Packing::new(to);
    packing.directory(top, wanted)?;
    packing.finish()
}

/// The bytes before an entry's contents. After the contents come zeroes up to a multiple of [`crate::BLOCK`].
pub fn entry_header(entry: &Entry) -> Vec<u8> {
    let kind = match entry.kind {
        EntryKind::File => b'0',
        EntryKind::HardLink => b'1',
        EntryKind::Symlink => b'2',
        EntryKind::Directory => b'5',
        EntryKind::Fifo | EntryKind::Other => b'6',
    };
    let mut out = Vec::new();
    let mut packing = Packing::new(&mut out);
    // Writing to a vector cannot fail.
    let name = packing.fitting(entry.path.clone(), b'L').unwrap_or_default();
    let link = packing.fitting(entry.link.clone(), b'K').unwrap_or_default();
    let Entry { mode, uid, gid, size, modified, .. } = *entry;
    let header = Header { name, mode: mode & 0o7777, uid, gid, size, modified, kind, link };
    out.extend_from_slice(&header.to_block());
    out
}

/// The bytes before the header of an entry with extended attributes: pax records, which every tool reads.
pub fn attributes_header(attributes: &[(Vec<u8>, Vec<u8>)]) -> Vec<u8> {
    let mut records = Vec::new();
    for (name, value) in attributes {
        let rest = [b" SCHILY.xattr.", name.as_slice(), b"=", value, b"\n"].concat();
        // The length of a record counts its own digits.
        let mut length = rest.len() + 1;
        while length != rest.len() + length.to_string().len() {
            length = rest.len() + length.to_string().len();
        }
        records.extend_from_slice(length.to_string().as_bytes());
        records.extend_from_slice(&rest);
    }
    let header = Header {
        name: b"PaxHeaders/attributes".to_vec(),
        mode: 0o644,
        uid: 0,
        gid: 0,
        size: records.len() as u64,
        modified: 0,
        kind: b'x',
        link: Vec::new(),
    };
    let mut out = header.to_block().to_vec();
    out.extend_from_slice(&records);
    out.resize(out.len().next_multiple_of(BLOCK), 0);
    out
}

/// Packs one file, under a name.
pub fn pack_file(file: OwnedFd, name: &[u8], to: &mut dyn Write) -> Result<Packed, PackError> {
    let mut packing = Packing::new(to);
    let read = |source| PackError::Read { path: name.to_vec(), source };
    let stat = rustix::fs::fstat(&file).map_err(read)?;
    packing.file(file.as_fd(), name, &stat)?;
    packing.finish()
}

struct Packing<'a> {
    to: &'a mut dyn Write,
    buffer: Vec<u8>,
    packed: Packed,
}

impl<'a> Packing<'a> {
    fn new(to: &'a mut dyn Write) -> Self {
        Self { to, buffer: vec![0; BUFFER], packed: Packed::default() }
    }

    fn directory(&mut self, top: OwnedFd, wanted: &dyn Fn(&[u8]) -> bool) -> Result<(), PackError> {
        let mut path: Vec<u8> = Vec::new();
        let read = |path: &[u8], source| PackError::Read { path: path.to_vec(), source };
        let first = Dir::new(top).map_err(|errno| read(b"", errno))?;
        let mut open = vec![(first, 0)];
        while let Some((directory, length)) = open.last_mut() {
            path.truncate(*length);
            let entry = match directory.read() {
                None => {
                    open.pop();
                    continue;
                }
                Some(entry) => entry.map_err(|errno| read(&path, errno))?,
            };
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.to_bytes());
            if !wanted(&path) {
                continue;
            }
            let parent = directory.fd().map_err(|errno| read(&path, errno))?;
            match self.entry(parent, name, &path) {
                Ok(None) => {}
                Ok(Some(child)) => {
                    if open.len() >= DEPTH_MAX {
                        return Err(PackError::TooDeep { path });
                    }
                    let child = Dir::new(child).map_err(|errno| read(&path, errno))?;
                    let length = path.len();
                    open.push((child, length));
                }
                // It was deleted after the directory was read.
                Err(PackError::Read { source: Errno::NOENT, .. }) => self.packed.skipped += 1,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Writes one entry. Returns a directory, so that the caller can enter it.
    fn entry(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &CStr,
        path: &[u8],
    ) -> Result<Option<OwnedFd>, PackError> {
        let read = |source| PackError::Read { path: path.to_vec(), source };
        let open = |flags: OFlags| {
            let flags = flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            rustix::fs::openat(parent, name, flags, Mode::empty()).map_err(read)
        };
        let stat = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(read)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let child = open(OFlags::DIRECTORY)?;
                self.header([path, b"/"].concat(), &stat, b'5', 0, Vec::new())?;
                Ok(Some(child))
            }
            FileType::Symlink => {
                let target = rustix::fs::readlinkat(parent, name, Vec::new()).map_err(read)?;
                self.header(path.to_vec(), &stat, b'2', 0, CString::into_bytes(target))?;
                Ok(None)
            }
            FileType::RegularFile => {
                let file = open(OFlags::NONBLOCK | OFlags::NOCTTY)?;
                // It may have been replaced since.
                let stat = rustix::fs::fstat(&file).map_err(read)?;
                if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                    self.file(file.as_fd(), path, &stat)?;
                } else {
                    self.packed.skipped += 1;
                }
                Ok(None)
            }
            _ => {
                self.packed.skipped += 1;
                Ok(None)
            }
        }
    }

    /// Writes as many bytes as the file had when it was opened.
    fn file(&mut self, file: BorrowedFd<'_>, path: &[u8], stat: &Stat) -> Result<(), PackError> {
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.header(path.to_vec(), stat, b'0', size, Vec::new())?;
        let mut left = size;
        while left > 0 {
            let limit = left.min(BUFFER as u64) as usize;
            match rustix::io::read(file, &mut self.buffer[..limit]) {
                Ok(0) => return Err(PackError::Shrank { path: path.to_vec() }),
                Ok(length) => {
                    self.to.write_all(&self.buffer[..length])?;
                    left -= length as u64;
                }
                Err(Errno::INTR) => {}
                Err(source) => return Err(PackError::Read { path: path.to_vec(), source }),
            }
        }
        self.packed.bytes += size;
        self.pad(size)
    }

    fn header(
        &mut self,
        name: Vec<u8>,
        stat: &Stat,
        kind: u8,
        size: u64,
        link: Vec<u8>,
    ) -> Result<(), PackError> {
        let name = self.fitting(name, b'L')?;
        let link = self.fitting(link, b'K')?;
        let header = Header {
            name,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid.into(),
            gid: stat.st_gid.into(),
            size,
            modified: stat.st_mtime,
            kind,
            link,
        };
        self.packed.entries += 1;
        self.block(&header.to_block())
    }

    /// Writes a name as far as it fits into a header; a longer one first goes into blocks of its own.
    fn fitting(&mut self, mut name: Vec<u8>, kind: u8) -> Result<Vec<u8>, PackError> {
        if name.len() <= NAME_MAX {
            return Ok(name);
        }
        let size = name.len() as u64 + 1;
        let header = Header {
            name: LONG_NAME.to_vec(),
            mode: 0,
            uid: 0,
            gid: 0,
            size,
            modified: 0,
            kind,
            link: Vec::new(),
        };
        self.block(&header.to_block())?;
        self.to.write_all(&name)?;
        self.to.write_all(&[0])?;
        self.packed.bytes += size;
        self.pad(size)?;
        name.truncate(NAME_MAX);
        Ok(name)
    }

    fn block(&mut self, block: &[u8; BLOCK]) -> Result<(), PackError> {
        self.to.write_all(block)?;
        self.packed.bytes += BLOCK as u64;
        Ok(())
    }

    fn pad(&mut self, size: u64) -> Result<(), PackError> {
        let padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        self.to.write_all(&[0; BLOCK][..padding as usize])?;
        self.packed.bytes += padding;
        Ok(())
    }

    /// Two empty blocks mark the end.
    fn finish(mut self) -> Result<Packed, PackError> {
        self.block(&[0; BLOCK])?;
        self.block(&[0; BLOCK])?;
        self.to.flush()?;
        Ok(self.packed)
    }
}
