//! A file of records, each with its length and a checksum. Records are only appended, and the file is cleared as a
//! whole.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use super::SPOOL_BYTES_MAX;
use crate::control::{Record, from_bytes, to_bytes};

/// Each process has its own file, locked while it lives: an egress that is being replaced still writes to its own.
const FILE_PREFIX: &str = "spool-";
/// Length and checksum.
const HEADER_BYTES: usize = 8;
/// A record is an event or a name.
const RECORD_BYTES_MAX: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Spool {
    file: File,
    bytes: u64,
}

impl Spool {
    /// Creates a spool in a directory, with the records of earlier processes in it. A record that a crash cut off is
    /// dropped.
    pub(super) fn open(directory: &Path) -> io::Result<(Self, Vec<Record>)> {
        let mut random = [0; 8];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let name = format!("{FILE_PREFIX}{:016x}", u64::from_ne_bytes(random));
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create_new(true).mode(0o600).open(directory.join(&name))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        let mut spool = Self { file, bytes: 0 };
        let mut records = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let other = entry.file_name();
            let is_spool =
                other.to_str().is_some_and(|other| other.starts_with(FILE_PREFIX) && other != name);
            if is_spool && let Some(found) = adopt(&entry.path())? {
                for record in &found {
                    spool.append(&to_bytes(record))?;
                }
                spool.sync()?;
                records.extend(found);
                std::fs::remove_file(entry.path())?;
            }
        }
        Ok((spool, records))
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn append(&mut self, record: &[u8]) -> io::Result<()> {
        if record.len() > RECORD_BYTES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut all = Vec::with_capacity(HEADER_BYTES + record.len());
        all.extend_from_slice(&(record.len() as u32).to_le_bytes());
        all.extend_from_slice(&checksum(record));
        all.extend_from_slice(record);
        if let Err(e) = self.file.write_all(&all) {
            // A partly written record must not remain before the next one.
            self.file.set_len(self.bytes)?;
            self.file.seek(SeekFrom::Start(self.bytes))?;
            return Err(e);
        }
        self.bytes += all.len() as u64;
        Ok(())
    }

    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.file.sync_data()
    }

    pub(super) fn clear(&mut self) -> io::Result<()> {
        if self.bytes == 0 {
            return Ok(());
        }
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        self.bytes = 0;
        Ok(())
    }
}

/// The records of an earlier process; `None` if that process is still alive.
fn adopt(path: &Path) -> io::Result<Option<Vec<Record>>> {
    let file = File::open(path)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
        Err(e) => return Err(e.into()),
    }
    let mut contents = Vec::new();
    // Twice the limit, since records that were in memory may be added.
    file.take(2 * SPOOL_BYTES_MAX).read_to_end(&mut contents)?;
    let (mut records, mut rest) = (Vec::new(), contents.as_slice());
    while let Some((record, after)) = read(rest) {
        records.push(record);
        rest = after;
    }
    Ok(Some(records))
}

fn checksum(record: &[u8]) -> [u8; 4] {
    let digest = Sha256::digest(record);
    [digest[0], digest[1], digest[2], digest[3]]
}

fn read(bytes: &[u8]) -> Option<(Record, &[u8])> {
    let (header, rest) = bytes.split_first_chunk::<HEADER_BYTES>()?;
    let length = u32::from_le_bytes([header[0], header[1], header[2], header[3]]) as usize;
    let (record, rest) = rest.split_at_checked(length).filter(|_| length <= RECORD_BYTES_MAX)?;
    if checksum(record) != header[4..] {
        return None;
    }
    Some((from_bytes(record)?, rest))
}

#[cfg(test)]
mod tests {
    use wire::SandboxId;

    use super::*;
    use crate::policy::Name;

    #[test]
    fn what_a_crash_cut_off_is_dropped_and_the_rest_kept() {
        let place = tempfile::tempdir().expect("a directory");
        let record = Record::Name {
            sandbox: SandboxId::from_random(7),
            place: 3,
            name: Name::parse("a.example").expect("a name"),
        };
        let (mut spool, records) = Spool::open(place.path()).expect("a spool");
        assert!(records.is_empty());
        for _ in 0..3 {
            spool.append(&to_bytes(&record)).expect("appended");
        }
        let whole = spool.bytes();
        let (_, records) = Spool::open(place.path()).expect("another spool");
        assert!(records.is_empty(), "the first process still lives");
        spool.file.set_len(whole - 1).expect("cut");
        drop(spool);
        let (spool, records) = Spool::open(place.path()).expect("a spool");
        assert_eq!(records, [record.clone(), record]);
        assert_eq!(spool.bytes(), whole / 3 * 2);
        assert_eq!(
            std::fs::read_dir(place.path()).expect("a directory").count(),
            1,
            "earlier files are gone"
        );
    }
}
