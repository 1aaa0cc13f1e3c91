//! The life of a private daemon: it lives while a client holds a lease, and removes everything at its end. If it holds
//! nothing that must be removed, it may stay for a while, so that the next client need not start another.
//!
//! ```text
//! <base>/lock          held exclusively by the process that changes the files below
//! <base>/daemon.log    what the daemon prints
//! <base>/data/         its data directory
//! <base>/data/lease.sock
//! ```
//!
//! A lease is a connection to `lease.sock` on which the daemon has sent its address. A client takes the lock, connects
//! (or starts a daemon and connects), gets its lease and releases the lock. When the last lease is gone, the daemon
//! takes the lock and checks again: a client that came in between has a lease by then, or waits for the lock and will
//! find no daemon and start a new one. So a client never gets a daemon that is shutting down.
//!
//! A daemon stays only while it holds nothing that a client made: anything that a client left behind is removed with
//! its lease. A lease states which program the daemon runs and its namespaces, so that a client of another build, or in
//! another network, does not mistake it for its own; such a client asks it to [retire](RETIRE).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use runtime::storage::remove::remove_tree;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
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
/// The byte that a client writes on its lease so that the daemon does not stay once the last lease is gone.
pub const RETIRE: u8 = b'r';
/// Namespaces that a client must share with its daemon: then it sees the same files, and reaches the daemon's address.
const NAMESPACES: [&str; 2] = ["mnt", "net"];
/// How often a daemon that stays checks whether it still may.
const STAY_STEP: Duration = Duration::from_secs(60);
/// The name of the data directory inside the private directory.
const DATA: &str = "data";

/// The directory of a private daemon.
#[derive(Debug, Clone)]
pub struct PrivateDir {
    base: PathBuf,
}

impl PrivateDir {
    /// The directory that holds everything of one user's private daemon.
    pub fn new(base: &Path) -> Self {
        Self { base: base.into() }
    }

    /// The whole directory.
    pub fn base(&self) -> &Path {
        &self.base
    }

    /// Held by the process that starts or ends the daemon.
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

    /// Where clients get leases.
    pub fn socket(&self) -> PathBuf {
        self.data().join("lease.sock")
    }
}

/// The properties of a process that a client and its private daemon must agree on.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The file that it was started from, even if its name now refers to another: an upgrade puts another file in its
    /// place.
    pub program: String,
    /// The namespaces that it is in.
    pub namespaces: String,
}

impl Identity {
    /// The identity of this process.
    pub fn own() -> io::Result<Self> {
        let program = std::fs::metadata("/proc/self/exe")?;
        let mut namespaces = String::new();
        for name in NAMESPACES {
            let namespace = std::fs::metadata(format!("/proc/self/ns/{name}"))?;
            namespaces += &format!("{name}:{} ", namespace.ino());
        }
        let (device, inode, size) = (program.dev(), program.ino(), program.size());
        let program = format!("{device}:{inode}:{size}:{}.{:09}", program.mtime(), program.mtime_nsec());
        Ok(Self { program, namespaces: namespaces.trim_end().to_owned() })
    }
}

/// The daemon's message on a lease, as a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Where it listens.
    #[serde(flatten)]
    pub listening: Listening,
    /// The daemon's identity. Older daemons do not send it; the default matches no process.
    #[serde(default)]
    pub identity: Identity,
    /// Leases of other clients.
    #[serde(default)]
    pub others: usize,
}

/// Gives leases and counts them.
pub struct Leases {
    directory: PrivateDir,
    listener: UnixListener,
    identity: Identity,
    idle: Idle,
}

/// The number of leases, and whether the daemon stays without one.
#[derive(Debug, Clone)]
pub struct Idle {
    count: watch::Sender<usize>,
    retired: watch::Sender<bool>,
}

impl Idle {
    /// Ends a daemon that stays without a lease. `false` if there is a lease, or if the daemon is ending already.
    pub fn retire(&self) -> bool {
        *self.count.borrow() == 0 && !self.retired.send_replace(true)
    }
}

/// The end of a private daemon: there is no lease, and no client can get one while this lives.
#[derive(Debug)]
pub struct LastOut {
    directory: PrivateDir,
    lock: File,
}

impl Leases {
    /// Opens the socket. An older socket is a leftover, since this process holds the data directory's lock.
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
        // The directory is closed to others already; this is a second safeguard.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(fail("close"))?;
        let own = Path::new("/proc/self");
        let identity =
            Identity::own().map_err(|source| LeaseError { doing: "look at", path: own.into(), source })?;
        let idle = Idle { count: watch::Sender::new(0), retired: watch::Sender::new(false) };
        Ok(Self { directory, listener, identity, idle })
    }

    /// A handle to end a daemon that stays.
    pub fn idle(&self) -> Idle {
        self.idle.clone()
    }

    /// Gives leases until the last one is gone, and up to `linger` longer while `may_stay` holds, which is checked
    /// repeatedly. Never returns while there is a lease.
    pub async fn until_last<S: Future<Output = bool>>(
        self,
        listening: &Listening,
        linger: Duration,
        may_stay: impl Fn() -> S,
    ) -> Result<LastOut, LeaseError> {
        let grant = Grant { listening: listening.clone(), identity: self.identity.clone(), others: 0 };
        let (mut first, mut had_client) = (true, false);
        loop {
            let mut count = self.idle.count.subscribe();
            let idle = async {
                if first {
                    // No client has connected yet: give the client that started this daemon time to do so.
                    let came = count.wait_for(|count| *count > 0);
                    had_client = tokio::time::timeout(FIRST_LEASE_MAX, came).await.is_ok();
                }
                let _ = count.wait_for(|count| *count == 0).await;
            };
            tokio::select! {
                never = self.give(&grant) => match never {},
                () = idle => {}
            }
            first = false;
            if had_client && self.comes_back(&grant, linger, &may_stay).await {
                continue;
            }
            let lock = self.directory.lock();
            let fail = |source| LeaseError { doing: "lock", path: lock.clone(), source };
            // Leases are still given in the meantime: a client that has the lock waits for one.
            let lock = tokio::select! {
                never = self.give(&grant) => match never {},
                lock = take_lock(lock.clone()) => lock.map_err(fail)?,
            };
            if *self.idle.count.borrow() == 0 {
                return Ok(LastOut { directory: self.directory, lock });
            }
        }
    }

    /// Whether a client connects within `linger`, before a client asks the daemon to end and before the daemon may no
    /// longer stay.
    async fn comes_back<S: Future<Output = bool>>(
        &self,
        grant: &Grant,
        linger: Duration,
        may_stay: impl Fn() -> S,
    ) -> bool {
        let until = tokio::time::Instant::now() + linger;
        while tokio::time::Instant::now() < until && may_stay().await {
            let (mut count, mut retired) = (self.idle.count.subscribe(), self.idle.retired.subscribe());
            tokio::select! {
                // A request to retire takes precedence: the client that sends it holds a lease for a moment.
                biased;
                _ = retired.wait_for(|retired| *retired) => return false,
                never = self.give(grant) => match never {},
                _ = count.wait_for(|count| *count > 0) => return true,
                () = tokio::time::sleep_until(until.min(tokio::time::Instant::now() + STAY_STEP)) => {}
            }
        }
        false
    }

    /// Accepts for ever. Cancel-safe: a lease is counted before the first wait.
    async fn give(&self, grant: &Grant) -> std::convert::Infallible {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) => {
                    let others = *self.idle.count.borrow();
                    let held = Held::new(self.idle.clone());
                    tokio::spawn(hold(stream, Grant { others, ..grant.clone() }, held));
                }
                Err(source) if source.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    // The process may be out of descriptors for a moment. Giving up would leave everything behind.
                    tracing::warn!(%error, "cannot accept a lease");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Counts one lease for as long as it lives.
struct Held(Idle);

impl Held {
    fn new(idle: Idle) -> Self {
        idle.count.send_modify(|count| *count += 1);
        Self(idle)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.count.send_modify(|count| *count -= 1);
    }
}

async fn hold(mut stream: UnixStream, grant: Grant, held: Held) {
    let line = serde_json::to_string(&grant).expect("texts and numbers can be written as JSON") + "\n";
    let granted = tokio::time::timeout(GRANT_MAX, stream.write_all(line.as_bytes())).await;
    if matches!(granted, Ok(Ok(()))) {
        // A client sends nothing else on a lease. However the connection ends, the lease ends with it.
        let mut byte = [0];
        while matches!(stream.read(&mut byte).await, Ok(1)) {
            if byte == [RETIRE] {
                held.0.retired.send_replace(true);
            }
        }
    }
    drop(held);
}

/// Locks the file that is at `path` at that moment: a file that was removed in the meantime locks nothing.
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

/// Opens or creates a lock file, without following links.
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
    /// Removes everything of the private daemon. A client that waits for the lock starts a new one.
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
            // A new client has come in between and is creating the lock again.
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOENT) | Ok(()) => Ok(()),
            Err(error) => Err(fail(directory.base().into())(error.into())),
        };
        drop(lock);
        removed
    }
}

/// An operation on a private daemon's files failed.
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
        let grant: Grant = serde_json::from_str(&line).expect("it is JSON");
        assert_eq!(grant.listening, listening());
        assert_eq!(grant.identity, Identity::own().expect("a process can look at itself"));
        stream
    }

    /// Gives leases in a new task, and stays for `linger` after the last one if nothing is left.
    fn give(leases: Leases, linger: Duration, empty: bool) -> tokio::task::JoinHandle<LastOut> {
        tokio::spawn(async move {
            leases.until_last(&listening(), linger, || std::future::ready(empty)).await.expect("no error")
        })
    }

    /// Longer than any test takes.
    const LONG: Duration = Duration::from_secs(600);

    #[tokio::test]
    async fn the_last_one_out_removes_everything() {
        let (home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = give(leases, Duration::ZERO, true);
        let (first, second) = (lease(&directory).await, lease(&directory).await);
        drop(first);
        drop(second);
        let last = end.await.expect("no panic");
        last.remove().expect("all can be removed");
        assert_eq!(std::fs::read_dir(home.path()).expect("it is there").count(), 0);
    }

    #[tokio::test]
    async fn a_client_that_holds_the_lock_still_gets_its_lease() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = give(leases, Duration::ZERO, true);
        let first = lease(&directory).await;
        let lock = take_lock(directory.lock()).await.expect("it is free");
        drop(first);
        // The daemon now waits for the lock, and still gives a lease.
        let second = lease(&directory).await;
        drop(lock);
        let third = lease(&directory).await;
        drop(second);
        assert!(!end.is_finished(), "someone holds a lease");
        drop(third);
        end.await.expect("no panic");
    }

    #[tokio::test]
    async fn a_daemon_with_nothing_left_stays_for_the_next_client() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let idle = leases.idle();
        let end = give(leases, LONG, true);
        drop(lease(&directory).await);
        let again = lease(&directory).await;
        assert!(!idle.retire(), "someone holds a lease");
        drop(again);
        idle.count.subscribe().wait_for(|count| *count == 0).await.expect("it counts");
        assert!(idle.retire() && !idle.retire(), "it ends once");
        end.await.expect("no panic");
    }

    #[tokio::test]
    async fn a_daemon_with_something_left_ends_with_the_last_lease() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = give(leases, LONG, false);
        drop(lease(&directory).await);
        end.await.expect("no panic");
    }

    #[tokio::test(start_paused = true)]
    async fn a_daemon_that_stays_ends_by_itself() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = give(leases, LONG, true);
        drop(lease(&directory).await);
        // The test clock is paused, and jumps when every task waits.
        end.await.expect("no panic");
    }

    #[tokio::test]
    async fn a_client_can_ask_a_daemon_that_stays_to_end() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let end = give(leases, LONG, true);
        drop(lease(&directory).await);
        let mut other = lease(&directory).await;
        other.write_all(&[RETIRE]).await.expect("the daemon reads");
        drop(other);
        end.await.expect("no panic");
    }

    #[tokio::test]
    async fn a_request_to_end_waits_for_the_other_leases() {
        let (_home, directory) = private();
        let leases = Leases::open(directory.clone()).expect("it opens");
        let idle = leases.idle();
        let end = give(leases, LONG, true);
        let (first, mut other) = (lease(&directory).await, lease(&directory).await);
        other.write_all(&[RETIRE]).await.expect("the daemon reads");
        drop(other);
        idle.retired.subscribe().wait_for(|retired| *retired).await.expect("it was heard");
        idle.count.subscribe().wait_for(|count| *count == 1).await.expect("it counts");
        assert!(!end.is_finished(), "someone holds a lease");
        drop(first);
        end.await.expect("no panic");
    }

    #[test]
    fn what_an_older_daemon_says_is_nobody_that_one_knows() {
        let grant: Grant =
            serde_json::from_str(r#"{"url": "http://127.0.0.1:1", "pid": 1}"#).expect("it is read");
        assert_eq!((grant.identity, grant.others), (Identity::default(), 0));
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
