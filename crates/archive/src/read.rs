//! Reads the entries of a stream one by one, and merges the extra headers that formats put before them.

use std::io::{self, Read};

use crate::ENTRIES_MAX;
use crate::error::UnpackError;
use crate::header::{BLOCK, Header};

/// The longest extra header before an entry: a long name, a long link, pax records. Longer ones are rejected.
const EXTENSION_MAX: u64 = 64 * 1024;
/// The prefix of an extended attribute's key, in the usual spelling.
const ATTRIBUTE: &[u8] = b"SCHILY.xattr.";
/// The size of one read when skipping contents.
const SKIP: usize = 64 * 1024;

/// One entry, without its contents.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name from the stream. Checked only for NUL bytes.
    pub path: Vec<u8>,
    /// What it is.
    pub kind: EntryKind,
    /// Permissions, with setuid, setgid and sticky.
    pub mode: u32,
    /// How many bytes of contents follow.
    pub size: u64,
    /// In seconds since 1970.
    pub modified: i64,
    /// The target of a link, from the stream.
    pub link: Vec<u8>,
    /// The numeric user id.
    pub uid: u64,
    /// The numeric group id.
    pub gid: u64,
    /// Extended attributes, as unchecked names and values.
    pub attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl Entry {
    /// A plain directory.
    pub(crate) fn directory(path: Vec<u8>) -> Self {
        let (uid, gid, size, modified) = (0, 0, 0, 0);
        let (link, attributes) = (Vec::new(), Vec::new());
        Self { path, kind: EntryKind::Directory, mode: 0o755, size, modified, link, uid, gid, attributes }
    }
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    /// A regular file.
    File,
    /// A directory.
    Directory,
    /// A symbolic link.
    Symlink,
    /// Another name for an entry that came before.
    HardLink,
    /// A FIFO.
    Fifo,
    /// A device, or an unknown type.
    Other,
}

/// Reads a stream.
#[derive(Debug)]
pub struct Entries<R> {
    from: R,
    /// Contents of the current entry that were not read, and their padding.
    left: u64,
    padding: u64,
    count: u64,
    count_max: u64,
    over: bool,
}

/// The extra headers before an entry.
#[derive(Default)]
struct Front {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    modified: Option<i64>,
    uid: Option<u64>,
    gid: Option<u64>,
    attributes: Vec<(Vec<u8>, Vec<u8>)>,
}

impl<R: Read> Entries<R> {
    /// Reads a stream from its beginning.
    pub fn new(from: R) -> Self {
        Self::with_limit(from, ENTRIES_MAX)
    }

    /// The same, with another limit than [`ENTRIES_MAX`]. Extra headers count too.
    pub fn with_limit(from: R, count_max: u64) -> Self {
        Self { from, left: 0, padding: 0, count: 0, count_max, over: false }
    }

    /// The source of the stream. Bytes that are read from it directly are missing here.
    pub fn get_mut(&mut self) -> &mut R {
        &mut self.from
    }

    /// Returns the source after the whole stream was read.
    pub fn into_inner(self) -> R {
        self.from
    }

    /// Returns the next entry, and skips the rest of the previous one; `None` at the end of the stream.
    pub fn next_entry(&mut self) -> Result<Option<Entry>, UnpackError> {
        let mut front = Front::default();
        while !self.over {
            self.skip_rest()?;
            let mut block = [0; BLOCK];
            let Some(()) = self.read_block(&mut block)? else {
                // Some tools omit the end mark. An empty input is not a stream.
                if self.count == 0 {
                    return Err(UnpackError::Truncated);
                }
                self.over = true;
                break;
            };
            let Some(header) = Header::parse(&block).map_err(|why| UnpackError::Header { why })? else {
                self.drain()?;
                break;
            };
            self.count += 1;
            if self.count > self.count_max {
                return Err(UnpackError::TooMany { limit: self.count_max });
            }
            self.left = header.size;
            self.padding = (BLOCK as u64 - header.size % BLOCK as u64) % BLOCK as u64;
            match header.kind {
                b'L' => front.path = Some(without_nul(self.extension()?)),
                b'K' => front.link = Some(without_nul(self.extension()?)),
                b'x' => front.add_pax(&self.extension()?)?,
                b'g' => {} // Global headers, which are not needed here.
                b'S' => return Err(UnpackError::Unsupported { what: "a sparse file" }),
                _ => return self.entry(header, front).map(Some),
            }
        }
        Ok(None)
    }

    fn entry(&mut self, header: Header, front: Front) -> Result<Entry, UnpackError> {
        let path = front.path.unwrap_or(header.name);
        let link = front.link.unwrap_or(header.link);
        let kind = match header.kind {
            // From before the format had a type for directories.
            b'0' | 0 | b'7' if path.ends_with(b"/") => EntryKind::Directory,
            b'0' | 0 | b'7' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            _ => EntryKind::Other,
        };
        let size = front.size.unwrap_or(header.size);
        self.left = size;
        self.padding = (BLOCK as u64 - size % BLOCK as u64) % BLOCK as u64;
        if path.contains(&0) || link.contains(&0) {
            return Err(UnpackError::Header { why: "a name in it contains a NUL byte" });
        }
        let modified = front.modified.unwrap_or(header.modified);
        let (uid, gid) = (front.uid.unwrap_or(header.uid), front.gid.unwrap_or(header.gid));
        let attributes = front.attributes;
        Ok(Entry { path, kind, mode: header.mode, size, modified, link, uid, gid, attributes })
    }

    /// Reads contents of the current entry. Returns 0 at their end.
    pub fn read_contents(&mut self, into: &mut [u8]) -> Result<usize, UnpackError> {
        let limit = usize::try_from(self.left).unwrap_or(usize::MAX).min(into.len());
        if limit == 0 {
            return Ok(0);
        }
        match self.read_some(&mut into[..limit])? {
            0 => Err(UnpackError::Truncated),
            length => {
                self.left -= length as u64;
                Ok(length)
            }
        }
    }

    /// Reads all contents of the current entry, which is an extra header.
    fn extension(&mut self) -> Result<Vec<u8>, UnpackError> {
        if self.left > EXTENSION_MAX {
            return Err(UnpackError::Header { why: "an extra header before an entry is too long" });
        }
        let mut all = vec![0; self.left as usize];
        let mut filled = 0;
        while filled < all.len() {
            filled += self.read_contents(&mut all[filled..])?;
        }
        Ok(all)
    }

    fn skip_rest(&mut self) -> Result<(), UnpackError> {
        let mut left = u128::from(self.left) + u128::from(self.padding);
        let mut scratch = if left == 0 { Vec::new() } else { vec![0; SKIP] };
        while left > 0 {
            let limit = left.min(SKIP as u128) as usize;
            match self.read_some(&mut scratch[..limit])? {
                0 => return Err(UnpackError::Truncated),
                length => left -= length as u128,
            }
        }
        (self.left, self.padding) = (0, 0);
        Ok(())
    }

    /// Skips the padding after the end mark.
    fn drain(&mut self) -> Result<(), UnpackError> {
        self.over = true;
        let mut scratch = vec![0; SKIP];
        while self.read_some(&mut scratch)? > 0 {}
        Ok(())
    }

    /// Reads a whole block, or `None` at the end of the stream.
    fn read_block(&mut self, block: &mut [u8; BLOCK]) -> Result<Option<()>, UnpackError> {
        let mut filled = 0;
        while filled < BLOCK {
            match self.read_some(&mut block[filled..])? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(UnpackError::Truncated),
                length => filled += length,
            }
        }
        Ok(Some(()))
    }

    fn read_some(&mut self, into: &mut [u8]) -> Result<usize, UnpackError> {
        loop {
            match self.from.read(into) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map_err(|source| UnpackError::Read { source }),
            }
        }
    }
}

impl Front {
    /// Records as `LENGTH KEY=VALUE\n`, the length being that of the whole record.
    fn add_pax(&mut self, mut records: &[u8]) -> Result<(), UnpackError> {
        let wrong = || UnpackError::Header { why: "its pax records cannot be parsed" };
        while !records.is_empty() {
            let space = records.iter().position(|byte| *byte == b' ').ok_or_else(wrong)?;
            let length: usize = text_number(&records[..space]).ok_or_else(wrong)?;
            let record = records.get(space + 1..length).ok_or_else(wrong)?;
            let record = record.strip_suffix(b"\n").ok_or_else(wrong)?;
            let equals = record.iter().position(|byte| *byte == b'=').ok_or_else(wrong)?;
            let (key, value) = (&record[..equals], &record[equals + 1..]);
            match key {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(text_number(value).ok_or_else(wrong)?),
                b"mtime" => {
                    let whole = value.split(|byte| *byte == b'.').next().unwrap_or_default();
                    self.modified = text_number(whole);
                }
                b"uid" => self.uid = text_number(value),
                b"gid" => self.gid = text_number(value),
                key if key.starts_with(ATTRIBUTE) => {
                    self.attributes.push((key[ATTRIBUTE.len()..].to_vec(), value.to_vec()));
                }
                key if key.starts_with(b"GNU.sparse.") => {
                    return Err(UnpackError::Unsupported { what: "a sparse file" });
                }
                _ => {}
            }
            records = &records[length..];
        }
        Ok(())
    }
}

fn text_number<T: std::str::FromStr>(text: &[u8]) -> Option<T> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

fn without_nul(mut text: Vec<u8>) -> Vec<u8> {
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    text.truncate(end);
    text
}
