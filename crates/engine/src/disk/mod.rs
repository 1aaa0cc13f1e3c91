//! The disk under the data directory: how much of it is free, and a reserve for the writes that free room.
//!
//! Output and uploads stop at the *floor*, so that rows can still be written. If something else fills the disk, the
//! rows of deletes and revocations are written from the *reserve*, a file that is allocated at the start and removed
//! when such a write fails. The reserve is allocated again as soon as there is room for it; until then, nothing that
//! needs new rows is accepted.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tracing::{info, warn};

/// The file of the reserve.
const RESERVE: &str = "reserve";
/// The size of the reserve: thousands of deletes. A small disk has a smaller one.
const RESERVE_BYTES: u64 = 16 << 20;
/// The free space that output and uploads leave. A small disk has a lower floor.
const FLOOR_BYTES: u64 = 64 << 20;
/// The smallest part of a disk that is the floor, and the smallest part that is the reserve.
const FLOOR_PART: u64 = 16;
const RESERVE_PART: u64 = 64;

/// See the head of this file.
pub(crate) struct HostDisk {
    directory: PathBuf,
    bytes: u64,
    state: Mutex<Reserve>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserve {
    Held,
    /// Deletes are being written from it.
    Released,
}

impl HostDisk {
    /// Allocates the reserve, if there is room. Blocks.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let stat = statvfs(directory)?;
        let bytes = stat.f_blocks.saturating_mul(stat.f_frsize);
        let disk = Self { directory: directory.into(), bytes, state: Mutex::new(Reserve::Released) };
        if !disk.is_whole() {
            warn!("the disk is too full to reserve room for deletes");
        }
        Ok(disk)
    }

    fn state(&self) -> MutexGuard<'_, Reserve> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reserve_bytes(&self) -> u64 {
        RESERVE_BYTES.min(self.bytes / RESERVE_PART)
    }

    fn floor_bytes(&self) -> u64 {
        FLOOR_BYTES.min(self.bytes / FLOOR_PART)
    }

    /// The size of the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether this many bytes of output or of an upload may be written. A disk that cannot be asked has room: the
    /// write itself will tell.
    pub fn has_room_for(&self, bytes: u64) -> bool {
        self.free().map_or(true, |free| free >= self.floor_bytes().saturating_add(bytes))
    }

    fn free(&self) -> io::Result<u64> {
        let stat = statvfs(&self.directory)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    /// Frees the reserve, for a write that makes room. Blocks for a moment.
    pub fn release(&self) {
        let mut state = self.state();
        if *state == Reserve::Released {
            return;
        }
        *state = Reserve::Released;
        match fs::remove_file(self.directory.join(RESERVE)) {
            Ok(()) => {
                warn!("the disk is full: deletes are written from the reserve, nothing new is accepted")
            }
            Err(error) => warn!(%error, "cannot free the room that is reserved for deletes"),
        }
    }

    /// Whether the reserve is allocated. Allocates it if it is not and there is room now. Blocks for a moment.
    pub fn is_whole(&self) -> bool {
        let mut state = self.state();
        if *state == Reserve::Held {
            return true;
        }
        let (path, bytes) = (self.directory.join(RESERVE), self.reserve_bytes());
        let existing = fs::metadata(&path).map_or(0, |found| found.len());
        let free = self.free().unwrap_or(0);
        if existing < bytes && free < bytes.saturating_mul(2) {
            return false;
        }
        match allocate(&path, bytes) {
            Ok(()) => {
                *state = Reserve::Held;
                info!(bytes, "reserved room on the disk for deletes");
                true
            }
            Err(error) => {
                warn!(%error, "cannot reserve room on the disk for deletes");
                let _ = fs::remove_file(&path); // What was allocated of it is room again.
                false
            }
        }
    }
}

/// Makes a file of this size whose blocks are all allocated.
fn allocate(path: &Path, bytes: u64) -> io::Result<()> {
    let mut options = OpenOptions::new();
    let mut file = options.write(true).create(true).truncate(false).mode(0o600).open(path)?;
    match fallocate(&file, FallocateFlags::empty(), 0, bytes) {
        Err(rustix::io::Errno::OPNOTSUPP) => fill(&mut file, bytes),
        allocated => allocated.map_err(io::Error::from),
    }
}

/// Writes zeros, where the file system cannot allocate.
fn fill(file: &mut File, bytes: u64) -> io::Result<()> {
    static BLOCK: [u8; 1 << 16] = [0; 1 << 16];
    let mut rest = bytes;
    while rest > 0 {
        let length = rest.min(BLOCK.len() as u64);
        file.write_all(&BLOCK[..length as usize])?;
        rest -= length;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_is_allocated_released_and_allocated_again() {
        let directory = tempfile::tempdir().expect("a directory");
        let disk = HostDisk::open(directory.path()).expect("the disk can be asked");
        let file = directory.path().join(RESERVE);
        assert!(disk.is_whole());
        assert_eq!(fs::metadata(&file).expect("it is there").len(), disk.reserve_bytes());
        disk.release();
        assert!(!file.exists());
        assert!(disk.is_whole(), "there is room");
        assert!(file.exists());
        // The next start finds it.
        assert!(HostDisk::open(directory.path()).expect("the disk can be asked").is_whole());
        assert!(!disk.has_room_for(u64::MAX));
    }
}
