//! Locks on files, with a deadline.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

/// Between two tries.
const STEP: Duration = Duration::from_millis(1);

/// Locks a file, which is created if it is missing. Waits at most `patience` for another process. Dropping the file unlocks it.
pub(super) fn lock_file(path: &Path, patience: Duration) -> io::Result<File> {
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    let deadline = Instant::now() + patience;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(STEP),
            Err(e) => return Err(e.into()),
        }
    }
}
