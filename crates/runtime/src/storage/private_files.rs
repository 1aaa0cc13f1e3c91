//! Finds the files in a tree that not everyone may read.
//!
//! The image `host` shows the machine's `/usr`, and hides these. Every daemon looks at each file at its start, since a `chmod` leaves no
//! trace but in the file itself: no directory and no package list changes with it. So the search must be quick: each name is asked for
//! once, by descriptor, and several threads share the tree.

use std::ffi::{CStr, CString, OsStr};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::fs::{AtFlags, FileType, Mode, RawDir, fstat, open, openat, statat};
use rustix::io::Errno;

use crate::storage::directories::DIRECTORY;

/// More threads than this only wait for each other.
const THREADS_MAX: usize = 4;
/// While this many directories wait for a thread, no more are handed over.
const WAITING_MAX: usize = 64;
/// What one call reads of a directory.
const BUFFER_BYTES: usize = 32 << 10;

/// A place that could not be looked at.
#[derive(Debug, thiserror::Error)]
#[error("cannot look at `{}`", path.display())]
pub struct SearchError {
    /// Which one.
    pub path: PathBuf,
    /// What the kernel said.
    pub source: io::Error,
}

/// Names below `top`, in their order, that not everyone may read, or that are neither a file nor a directory nor a link. What is below
/// a directory that is among them is not named. Names that change during the search may be missing.
pub fn find(top: &Path) -> Result<Vec<PathBuf>, SearchError> {
    let failed = |path: PathBuf, source: Errno| SearchError { path, source: source.into() };
    let search = Search {
        top: open(top, DIRECTORY, Mode::empty()).map_err(|source| failed(top.to_owned(), source))?,
        state: Mutex::new(State { waiting: vec![PathBuf::new()], ..State::default() }),
        changed: Condvar::new(),
        idle: AtomicUsize::new(0),
    };
    let threads = thread::available_parallelism().map_or(1, |count| count.get().min(THREADS_MAX));
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| search.work());
        }
        search.work();
    });
    let mut state = search.state.into_inner().unwrap_or_else(PoisonError::into_inner);
    if let Some((below, source)) = state.failed {
        return Err(failed(top.join(below), source));
    }
    state.found.sort();
    Ok(state.found)
}

struct Search {
    top: OwnedFd,
    state: Mutex<State>,
    /// A directory was added, or the search is over.
    changed: Condvar,
    /// Threads that wait for a directory.
    idle: AtomicUsize,
}

/// All paths are relative to the top.
#[derive(Default)]
struct State {
    waiting: Vec<PathBuf>,
    /// Threads that look at a directory, and may add others.
    working: usize,
    found: Vec<PathBuf>,
    failed: Option<(PathBuf, Errno)>,
}

impl Search {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at directories until no thread has one.
    fn work(&self) {
        let mut buffer = Box::new_uninit_slice(BUFFER_BYTES);
        while let Some(below) = self.next() {
            let mut found = Vec::new();
            // The top itself has an empty name.
            let looked = match openat(&self.top, Path::new(".").join(&below), DIRECTORY, Mode::empty()) {
                Ok(dir) => self.look(dir.as_fd(), &below, &mut buffer, &mut found),
                Err(errno) => changed_meanwhile(errno).map_err(|errno| (below, errno)),
            };
            let mut state = self.state();
            state.working -= 1;
            state.found.append(&mut found);
            if let Err(failed) = looked {
                state.failed = Some(failed);
            }
            if state.failed.is_some() || (state.working == 0 && state.waiting.is_empty()) {
                self.changed.notify_all();
            }
        }
    }

    /// A directory to look at. `None` when the search is over.
    fn next(&self) -> Option<PathBuf> {
        let mut state = self.state();
        loop {
            if state.failed.is_some() {
                return None;
            }
            if let Some(below) = state.waiting.pop() {
                state.working += 1;
                return Some(below);
            }
            if state.working == 0 {
                return None;
            }
            self.idle.fetch_add(1, Ordering::Relaxed);
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            self.idle.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Leaves half of these directories to a thread that has nothing to do, if there is one. Half, and not one by one: handing over
    /// costs more than looking at a small directory.
    fn share(&self, below: &Path, directories: &mut Vec<CString>) {
        if directories.len() < 2 || self.idle.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut state = self.state();
        if state.waiting.len() < WAITING_MAX {
            let theirs = directories.split_off(directories.len() / 2);
            state.waiting.extend(theirs.iter().map(|name| joined(below, name)));
            self.changed.notify_all();
        }
    }

    /// Looks at a directory, at every name in it, and then into the directories in it.
    fn look(
        &self,
        dir: BorrowedFd<'_>,
        below: &Path,
        buffer: &mut [MaybeUninit<u8>],
        found: &mut Vec<PathBuf>,
    ) -> Result<(), (PathBuf, Errno)> {
        let stat = fstat(dir).map_err(|errno| (below.to_owned(), errno))?;
        // The top directory is shown exactly as the image says.
        if stat.st_mode & 0o005 != 0o005 && !below.as_os_str().is_empty() {
            found.push(below.to_owned());
            return Ok(());
        }
        let mut directories: Vec<CString> = Vec::new();
        let mut entries = RawDir::new(dir, &mut *buffer);
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(|errno| (below.to_owned(), errno))?;
            let name = entry.file_name();
            // Most names need one question: directories are asked when they are open, and a link is what it leads to.
            match entry.file_type() {
                _ if name == c"." || name == c".." => {}
                FileType::Symlink => {}
                FileType::Directory => directories.push(name.to_owned()),
                _ => match statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(stat) => match FileType::from_raw_mode(stat.st_mode) {
                        FileType::Symlink => {}
                        FileType::Directory => directories.push(name.to_owned()),
                        FileType::RegularFile if stat.st_mode & 0o004 != 0 => {}
                        _ => found.push(joined(below, name)),
                    },
                    Err(errno) => changed_meanwhile(errno).map_err(|errno| (joined(below, name), errno))?,
                },
            }
        }
        loop {
            self.share(below, &mut directories);
            let Some(name) = directories.pop() else { break };
            let child = match openat(dir, &name, DIRECTORY, Mode::empty()) {
                Ok(child) => child,
                Err(errno) => {
                    changed_meanwhile(errno).map_err(|errno| (joined(below, &name), errno))?;
                    continue;
                }
            };
            self.look(child.as_fd(), &joined(below, &name), buffer, found)?;
        }
        Ok(())
    }
}

/// A name that was removed or replaced is no error.
fn changed_meanwhile(errno: Errno) -> Result<(), Errno> {
    match errno {
        Errno::NOENT | Errno::NOTDIR | Errno::LOOP => Ok(()),
        other => Err(other),
    }
}

fn joined(below: &Path, name: &CStr) -> PathBuf {
    below.join(OsStr::from_bytes(name.to_bytes()))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn set_mode(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("its mode can be set");
    }

    #[test]
    fn what_not_everyone_may_read_is_found() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for (name, mode) in [("open", 0o755), ("closed", 0o750), ("open/inner", 0o711)] {
            fs::create_dir(dir.path().join(name)).expect("it can be made");
            set_mode(&dir.path().join(name), mode);
        }
        for (name, mode) in [("open/file", 0o644), ("open/root-only", 0o600), ("closed/file", 0o644)] {
            fs::write(dir.path().join(name), "").expect("it can be written");
            set_mode(&dir.path().join(name), mode);
        }
        symlink("closed", dir.path().join("link")).expect("it can be made");
        rustix::fs::mkfifoat(rustix::fs::CWD, dir.path().join("open/pipe"), Mode::from_raw_mode(0o666))
            .expect("it can be made");
        let expected = ["closed", "open/inner", "open/pipe", "open/root-only"].map(PathBuf::from);
        assert_eq!(find(dir.path()).expect("it can be read"), expected);
    }

    #[test]
    fn a_large_tree_is_searched_to_its_end_by_all_threads() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let mut expected = Vec::new();
        for outer in 0..40 {
            for inner in 0..40 {
                let below = PathBuf::from(format!("{outer:02}/{inner:02}"));
                fs::create_dir_all(dir.path().join(&below)).expect("it can be made");
                let file = below.join("file");
                fs::write(dir.path().join(&file), "").expect("it can be written");
                let private = (outer * 40 + inner) % 7 == 0;
                set_mode(&dir.path().join(&file), if private { 0o640 } else { 0o644 });
                expected.extend(private.then_some(file));
            }
        }
        for _ in 0..10 {
            assert_eq!(find(dir.path()).expect("it can be read"), expected);
        }
    }

    #[test]
    fn a_tree_that_is_not_there_is_an_error() {
        let error = find(Path::new("/nonexistent/tree")).expect_err("nothing is there");
        assert_eq!(error.to_string(), "cannot look at `/nonexistent/tree`");
    }
}
