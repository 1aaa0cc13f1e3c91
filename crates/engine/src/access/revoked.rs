//! Keys that were deleted while their rows could not be: a small file whose blocks are allocated ahead, so that a full
//! disk takes the mark.
//!
//! A marked key opens nothing, also after a restart. The engine deletes the row as soon as it can, and the mark with
//! it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The name of the file in the data directory.
const FILE: &str = "revoked";
/// Room for one id: 12 digits, or a word.
const ID_BYTES: usize = 16;
/// How many keys can be marked at once. Marks are rare and short-lived.
const IDS_MAX: usize = 256;

/// The marks.
pub(crate) struct Revoked {
    file: File,
    ids: Mutex<Vec<Option<String>>>,
}

impl Revoked {
    /// Opens the file, and creates it in full if there is none. Blocks.
    pub fn open(directory: &Path) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(directory.join(FILE))?;
        let mut records = vec![0; ID_BYTES * IDS_MAX];
        if file.metadata()?.len() < records.len() as u64 {
            file.write_all_at(&records, 0)?;
        }
        file.read_exact_at(&mut records, 0)?;
        let id = |record: &[u8]| {
            let text = String::from_utf8_lossy(record);
            Some(text.trim_end_matches('\0').to_owned()).filter(|id| !id.is_empty())
        };
        let ids = records.chunks(ID_BYTES).map(id).collect();
        Ok(Self { file, ids: Mutex::new(ids) })
    }

    fn ids(&self) -> MutexGuard<'_, Vec<Option<String>>> {
        self.ids.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The marked keys.
    pub fn marked(&self) -> Vec<String> {
        self.ids().iter().flatten().cloned().collect()
    }

    /// Whether a key is marked.
    pub fn is_marked(&self, id: &str) -> bool {
        self.ids().iter().flatten().any(|marked| marked == id)
    }

    /// Marks a key. Blocks.
    pub fn mark(&self, id: &str) -> io::Result<()> {
        let mut ids = self.ids();
        if id.len() > ID_BYTES {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        if ids.iter().flatten().any(|marked| marked == id) {
            return Ok(());
        }
        let free = ids.iter().position(Option::is_none).ok_or(io::ErrorKind::StorageFull)?;
        self.write(free, id)?;
        ids[free] = Some(id.to_owned());
        Ok(())
    }

    /// Removes a mark. Blocks.
    pub fn unmark(&self, id: &str) -> io::Result<()> {
        let mut ids = self.ids();
        if let Some(at) = ids.iter().position(|marked| marked.as_deref() == Some(id)) {
            self.write(at, "")?;
            ids[at] = None;
        }
        Ok(())
    }

    fn write(&self, at: usize, id: &str) -> io::Result<()> {
        let mut record = [0; ID_BYTES];
        record[..id.len()].copy_from_slice(id.as_bytes());
        self.file.write_all_at(&record, (at * ID_BYTES) as u64)?;
        self.file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_outlive_a_restart_until_they_are_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let open = || Revoked::open(directory.path()).expect("it opens");
        for id in ["0123456789ab", "bootstrap", "0123456789ab"] {
            open().mark(id).expect("there is room");
        }
        assert_eq!(open().marked(), ["0123456789ab", "bootstrap"]);
        open().unmark("0123456789ab").expect("it is written");
        assert_eq!(open().marked(), ["bootstrap"]);
        assert!(open().is_marked("bootstrap") && !open().is_marked("0123456789ab"));
        let revoked = open();
        for number in 1..IDS_MAX {
            revoked.mark(&format!("{number:012x}")).expect("there is room");
        }
        revoked.mark("one-more").expect_err("the file does not grow");
    }
}
