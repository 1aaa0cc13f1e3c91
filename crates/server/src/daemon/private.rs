//! The life of a private daemon: it lives while a client holds a lease, and takes everything with it at its end.
//!
//! ```text
//! <base>/lock          held exclusively by whoever changes what follows
//! <base>/daemon.log    what the daemon prints
//! <base>/data/         its data directory
//! <base>/data/lease.sock
//! ```
//!
//! A lease is a connection to `lease.sock` on which the daemon has sent its address. A client takes the lock, connects (or
//! starts a daemon and connects), has its lease and lets the lock go. The daemon, when the last lease is gone, takes the
//! lock and looks again: whoever came in between has a lease by then, or waits for the lock and will find nothing
//! and start anew. So nobody is ever given a daemon that is on its way out.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use runtime::storage::remove::remove_tree;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;

use crate::daemon::data_dir::Listening;

/// A daemon that was started for a client that then died ends after this long.
const FIRST_LEASE_MAX: Duration = Duration::from_secs(30);
/// How long a client may take to read its lease, a few dozen bytes that fit any socket's buffer.
const GRANT_MAX: Duration = Duration::from_secs(5);
/// How long to wait when the process has no descriptor left for another lease.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// The name of the data directory in the private one.
const DATA: &str = "data";

/// Where a private daemon's things are.
#[derive(Debug, Clone)]
pub struct PrivateDir {
    base: PathBuf,
}

impl PrivateDir {
    /// The directory that holds everything of one user's private daemon.
    pub fn new(base: &Path) -> Self {
        Self { base: base.into() }
    }

    /// All of it.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// Held by whoever starts or ends the daemon.
    pub fn lock(&self) -> PathBuf {
        self.base.join("lock")
    }

    /// What the daemon prints.
    pub fn log(&self) -> PathBuf {
        self.base.join("daemon.log")
    }

    /// The daemon's data directory.
    pub fn data(&self) -> PathBuf {
        self.base.join(DATA)
    }

    /// Where leases are had.
    pub fn socket(&self) -> PathBuf {
        self.data().join("lease.sock")
    }
}

/// Gives leases and counts them.
pub struct Leases {
    directory: PrivateDir,
    listener: UnixListener,
    count: watch::Sender<usize>,
}

/// The end of a private daemon: nobody holds a lease, and nobody can get one while this lives.
#[derive(Debug)]
pub struct LastOut {
    directory: PrivateDir,
    lock: File,
}

impl Leases {
    /// Opens the socket. An older one is a leftover: the data directory's lock is held by now.
    pub fn open(directory: PrivateDir) -> Result<Self, LeaseError> {
        let path = directory.socket();
        let fail = |doing| {
            let path = path.clone();
            move |source| LeaseError { doing, path, source }
        };
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail("remove")(error)),
            Ok(()) | Err(_) => {}
        }
        let listener = UnixListener::bind(&path).map_err(fail("listen on"))?;
        // The directory is closed to others already; this says so once more.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(fail("close"))?;
        Ok(Self { directory, listener, count: watch::Sender::new(0) })
    }

    /// Gives leases until the last one is gone. Never returns while someone holds one.
    pub async fn until_last(self, listening: &Listening) -> Result<LastOut, LeaseError> {
        let grant =
            serde_json::to_string(listening).expect("a URL and a number can be written as JSON") + "\n";
        let mut first = true;
        loop {
            let mut count = self.count.subscribe();
            let idle = async {
                if first {
                    // Nobody has come yet: give the client that started this daemon time to.
                    let came = count.wait_for(|count| *count > 0);
                    let _ = tokio::time::timeout(FIRST_LEASE_MAX, came).await;
                }
                let _ = count.wait_for(|count| *count == 0).await;
            };
            tokio::select! {
                never = self.give(&grant) => match never {},
                () = idle => {}
            }
            first = false;
            let lock = self.directory.lock();
            let fail = |source| LeaseError { doing: "lock", path: lock.clone(), source };
            // Leases go on being given meanwhile: a client that has the lock waits for one.
            let lock = tokio::select! {
                never = self.give(&grant) => match never {},
                lock = take_lock(lock.clone()) => lock.map_err(fail)?,
            };
            if *self.count.borrow() == 0 {
                return Ok(LastOut { directory: self.directory, lock });
            }
        }
    }

    /// Accepts for ever. Cancel-safe: a lease that was given is counted before anything is waited for.
    async fn give(&self, grant: &str) -> std::convert::Infallible {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let held = Held::new(self.count.clone());
                    tokio::spawn(hold(stream, grant.to_owned(), held));
                }
                Err(source) if source.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // Descriptors may be short for a moment. To give up would leave everything behind.
                    tracing::warn!(%error, "cannot accept a lease");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Counts one lease for as long as it lives.
struct Held(watch::Sender<usize>);

impl Held {
    fn new(count: watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

async fn hold(mut stream: UnixStream, grant: String, held: Held) {
    let granted = tokio::time::timeout(GRANT_MAX, stream.write_all(grant.as_bytes())).await;
    if matches!(granted, Ok(Ok(()))) {
        // A client says nothing on a lease. Its end, however it comes, is the end of the lease.
        let mut byte = [0];
        while matches!(stream.read(&mut byte).await, Ok(1)) {}
    }
    drop(held);
}

/// Takes the lock that is at `path` when it is taken: a file that was removed meanwhile locks nothing.
async fn take_lock(path: PathBuf) -> io::Result<File> {
    let took = tokio::task::spawn_blocking(move || {
        loop {
            let file = open_lock(&path)?;
            flock(&file, FlockOperation::LockExclusive)?;
            if is_at(&file, &path)? {
                return Ok(file);
            }
        }
    });
    took.await.map_err(io::Error::other)?
}

/// Opens or makes a lock file, and follows no link to do so.
fn open_lock(path: &Path) -> io::Result<File> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    Ok(File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?))
}

/// Whether an open file is still the one at `path`.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match std::fs::symlink_metadata(path) {
        Ok(there) => Ok((ours.dev(), ours.ino()) == (there.dev(), there.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

impl LastOut {
    /// Removes all there is of the private daemon. A client that waits for the lock starts anew.
    pub fn remove(self) -> Result<(), LeaseError> {
        let Self { directory, lock } = self;
        let fail = |path: PathBuf| move |source: io::Error| LeaseError { doing: "remove", path, source };
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        rustix::fs::open(directory.base(), flags, Mode::empty())
            .map_err(io::Error::from)
            .and_then(|base| remove_tree(base.as_fd(), DATA))
            .map_err(fail(directory.data()))?;
        for path in [directory.log(), directory.lock()] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(fail(path)(error)),
                Ok(()) | Err(_) => {}
            }
        }
        let removed = match rustix::fs::rmdir(directory.base()) {
            // Someone new has come in between and is making the lock again.
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT) | Ok(()) => Ok(()),
            Err(error) => Err(fail(directory.base().into())(error.into())),
        };
        drop(lock);
        removed
    }
}

/// Something with a private daemon's files went wrong.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing} `{}`", path.display())]
pub struct LeaseError {
    doing: &'static str,
    path: PathBuf,
    source: io::Error,
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncBufReadExt;

    use super::*;

    fn listening() -> Listening {
        Listening { url: "http://127.0.0.1:1".into(), pid: 1 }
    }

    fn private() -> (tempfile::TempDir, PrivateDir) {
        let home = tempfile::tempdir().expect("a temporary directory");
        let directory = PrivateDir::new(&home.path().join("private"));
        std::fs::create_dir_all(directory.data()).expect("a directory");
        (home, directory)
    }

    async fn lease(directory: &PrivateDir) -> tokio::io::BufReader<UnixStream> {
        let stream = UnixStream::connect(directory.socket()).await.expect("the socket is there");
        let mut stream = tokio::io::BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.expect("a lease is given");
        assert_eq!(serde_json::from_str::<Listening>(&line).expect("it is JSON"), listening());
        stream
    }

    #[tokio::test]
    async fn the_last_one_out_removes_everything() {
        let (home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = tokio::spawn(async move { leases.until_last(&listening()).await });
        let (first, second) = (lease(&directory).await, lease(&directory).await);
        drop(first);
        drop(second);
        let last = end.await.expect("no panic").expect("no error");
        last.remove().expect("all can be removed");
        assert_eq!(std::fs::read_dir(home.path()).expect("it is there").count(), 0);
    }

    #[tokio::test]
    async fn a_client_that_holds_the_lock_still_gets_its_lease() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = tokio::spawn(async move { leases.until_last(&listening()).await });
        let first = lease(&directory).await;
        let lock = take_lock(directory.lock()).await.expect("it is free");
        drop(first);
        // The daemon now waits for the lock, and gives a lease all the same.
        let second = lease(&directory).await;
        drop(lock);
        let third = lease(&directory).await;
        drop(second);
        assert!(!end.is_finished(), "someone holds a lease");
        drop(third);
        end.await.expect("no panic").expect("no error");
    }

    #[tokio::test]
    async fn a_lock_that_was_removed_locks_nothing() {
        let (_home, directory) = private();
        let held = take_lock(directory.lock()).await.expect("it is free");
        let waiting = tokio::spawn(take_lock(directory.lock()));
        std::fs::remove_file(directory.lock()).expect("it is there");
        drop(held);
        let file = waiting.await.expect("no panic").expect("it is taken in the end");
        assert!(is_at(&file, &directory.lock()).expect("it can be looked at"));
    }
}
