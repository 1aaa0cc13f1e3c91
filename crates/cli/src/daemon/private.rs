//! The client's half of a private daemon: one that `shoal run` starts for itself when there is no other.
//!
//! The daemon's half, and the files that both share, are described in `server::daemon::private`. All runs of one user share one
//! daemon. A run holds a lease for as long as it lives; if the daemon dies under it, the run starts another, which
//! adopts what the dead one left. Without a lease the daemon stays for a while, so that the next run need not start one.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use client::Client;
use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use rustix::io::Errno;
use server::daemon::private::{Grant, Identity, RETIRE};
use tokio::io::AsyncReadExt;

use crate::daemon::FIRST_OWN_DESCRIPTOR;
use crate::daemon::find::read_key;
use crate::output::report::hinted;

/// How long a daemon may take to start; the first start on a cold disk reads much of `/usr`. Also how long another run
/// may hold the lock, for the same reason.
const START_MAX: Duration = Duration::from_secs(120);
/// How long a living daemon may take to give a lease.
const GRANT_MAX: Duration = Duration::from_secs(10);
/// Between two looks.
const STEP: Duration = Duration::from_millis(5);
/// How much of the daemon's log is shown when it does not start.
const LOG_SHOWN_MAX: u64 = 4096;
/// The longest that a daemon says on a lease.
const GRANT_LENGTH_MAX: u64 = 4096;
/// How long a private daemon stays after the last command: as long as a person may think between two.
pub const LINGER_DEFAULT: Duration = Duration::from_secs(600);
/// The file that this process was started from, whatever has become of its name: its daemon is of the same build.
const OWN_PROGRAM: &str = "/proc/self/exe";
/// How often a run starts its daemon again before it gives up.
const RESTARTS_MAX: u32 = 10;

/// A client of a private daemon, which lives at least as long as this does.
pub struct Private {
    /// For calls.
    pub client: Client,
    watch: tokio::task::JoinHandle<()>,
}

impl Drop for Private {
    fn drop(&mut self) {
        // Ends the lease with it.
        self.watch.abort();
    }
}

/// Which private daemon is meant.
#[derive(Debug, Clone)]
pub struct Site {
    /// Its directory.
    pub base: PathBuf,
    /// Sandboxes that it keeps ready, if it is started now.
    pub spares: u32,
    /// How long it stays after its last client, if it is started now.
    pub linger: Duration,
}

/// Joins the private daemon of a site, or starts it.
pub async fn join(site: Site) -> anyhow::Result<Private> {
    if !rustix::process::geteuid().is_root() {
        return Err(hinted(
            "`shoal run` without a daemon needs root",
            "use `sudo shoal run`, or set SHOAL_URL and SHOAL_API_KEY to use a running daemon",
        ));
    }
    let lease = obtain(site.clone()).await?;
    let key = read_key(&site.base.join("data"))?;
    let client = Client::new(&lease.url, &key)?;
    let watch = tokio::spawn(keep(site, lease, client.clone()));
    Ok(Private { client, watch })
}

/// A connection on which a living daemon has said where it listens.
struct Lease {
    stream: UnixStream,
    url: String,
}

impl Lease {
    /// Asks the daemon not to stay after its last lease.
    fn retire(&self) -> anyhow::Result<()> {
        match (&self.stream).write_all(&[RETIRE]) {
            // It is ending already.
            Err(error)
                if matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) =>
            {
                Ok(())
            }
            written => written.context("cannot write to the private daemon"),
        }
    }
}

/// What a daemon that lives already is to this program.
#[derive(Debug, PartialEq, Eq)]
enum Terms {
    /// Of the same build, in the same namespaces.
    Ours,
    /// Of another build, but others use it. Its API is the same, so it is used until they are done.
    Shared,
    /// Of another build or in other namespaces, and nobody uses it.
    Unused,
    /// In use in other namespaces: it runs on other files, and its address leads elsewhere here.
    Elsewhere,
}

fn terms(own: &Identity, grant: &Grant) -> Terms {
    match (own.namespaces == grant.identity.namespaces, grant.others) {
        (true, _) if own.program == grant.identity.program => Terms::Ours,
        (_, 0) => Terms::Unused,
        (true, _) => Terms::Shared,
        (false, _) => Terms::Elsewhere,
    }
}

async fn obtain(site: Site) -> anyhow::Result<Lease> {
    tokio::task::spawn_blocking(move || {
        let deadline = Instant::now() + START_MAX;
        loop {
            // A daemon that was asked to end takes the directory's lock to do so.
            if let Some(lease) = Directory::open(&site)?.lease()? {
                return Ok(lease);
            }
            if Instant::now() > deadline {
                bail!("the private daemon in `{}` does not make room for this program", site.base.display());
            }
            std::thread::sleep(STEP);
        }
    })
    .await?
}

/// Holds the lease. When the daemon dies, starts it again and tells the client where it is.
async fn keep(site: Site, mut lease: Lease, client: Client) {
    for _ in 0..RESTARTS_MAX {
        let stream =
            lease.stream.set_nonblocking(true).and_then(|()| tokio::net::UnixStream::from_std(lease.stream));
        let Ok(mut stream) = stream else { return };
        // The daemon says nothing more on a lease, so anything that comes is its end.
        let mut byte = [0];
        while matches!(stream.read(&mut byte).await, Ok(1)) {}
        // If this fails, calls fail too, and say that the daemon cannot be reached.
        let Ok(next) = obtain(site.clone()).await else { return };
        if client.move_to(&next.url).is_err() {
            return;
        }
        lease = next;
    }
}

/// The private directory, locked.
struct Directory {
    base: PathBuf,
    spares: u32,
    linger: Duration,
    /// Made by us, just now: nothing of an earlier daemon can be in it.
    fresh: bool,
    _lock: File,
}

impl Directory {
    /// Makes the directory if need be, and takes its lock.
    fn open(Site { base, spares, linger }: &Site) -> anyhow::Result<Self> {
        let deadline = Instant::now() + START_MAX;
        loop {
            let fresh = make(base)?;
            if let Some(lock) = try_lock(base)? {
                let (base, spares, linger) = (base.into(), *spares, *linger);
                return Ok(Self { base, spares, linger, fresh, _lock: lock });
            }
            if Instant::now() > deadline {
                bail!("another `shoal run` has held `{}` for too long", base.join("lock").display());
            }
            std::thread::sleep(STEP);
        }
    }

    fn data(&self) -> PathBuf {
        self.base.join("data")
    }

    fn log(&self) -> PathBuf {
        self.base.join("daemon.log")
    }

    /// A lease of the daemon that lives here, or of a new one. `None` if the one that lives here was asked to end.
    fn lease(&self) -> anyhow::Result<Option<Lease>> {
        let own = Identity::own().context("cannot look at this process")?;
        if let Some((lease, grant)) = self.ask()? {
            return match terms(&own, &grant) {
                Terms::Ours => Ok(Some(lease)),
                Terms::Shared => lease.retire().map(|()| Some(lease)),
                Terms::Unused => lease.retire().map(|()| None),
                Terms::Elsewhere => Err(hinted(
                    format!(
                        "the private daemon in `{}` is in use in another network or mount namespace",
                        self.base.display()
                    ),
                    "set SHOAL_PRIVATE_DIR to another place",
                )),
            };
        }
        let mut daemon = self.start()?;
        let deadline = Instant::now() + START_MAX;
        loop {
            if let Some((lease, _)) = self.ask()? {
                return Ok(Some(lease));
            }
            if let Some(status) = daemon.try_wait().context("cannot wait for the daemon")? {
                return Err(self.not_started(&format!("it exited with {status}")));
            }
            if Instant::now() > deadline {
                // Dropping its handle leaves it alone: it ends by itself when no lease is taken.
                return Err(self.not_started(&format!("it was not ready within {} s", START_MAX.as_secs())));
            }
            std::thread::sleep(STEP);
        }
    }

    /// Connects; `None` if nobody listens.
    fn ask(&self) -> anyhow::Result<Option<(Lease, Grant)>> {
        let path = self.data().join("lease.sock");
        let stream = match UnixStream::connect(&path) {
            Ok(stream) => stream,
            Err(error)
                if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                return Ok(None);
            }
            Err(error) => {
                return Err(error).with_context(|| format!("cannot connect to `{}`", path.display()));
            }
        };
        stream.set_read_timeout(Some(GRANT_MAX)).context("cannot prepare a socket")?;
        let mut line = String::new();
        match BufReader::new((&stream).take(GRANT_LENGTH_MAX)).read_line(&mut line) {
            // It ended before it could answer.
            Ok(0) => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Ok(_) => {}
            Err(error) => return Err(error).context("the private daemon did not answer"),
        }
        let grant: Grant =
            serde_json::from_str(&line).context("cannot parse the answer of the private daemon")?;
        Ok(Some((Lease { stream, url: grant.listening.url.clone() }, grant)))
    }

    /// Starts a daemon with a session of its own, so that Ctrl-C on our terminal does not reach it.
    fn start(&self) -> anyhow::Result<Child> {
        let log = OpenOptions::new()
            .append(true)
            .create(true)
            .mode(0o600)
            .open(self.log())
            .with_context(|| format!("cannot open `{}`", self.log().display()))?;
        let errors = log.try_clone().context("cannot share the daemon's log")?;
        let mut command = Command::new(OWN_PROGRAM);
        command.arg0("shoal").args(["serve", "--private"]).arg(&self.base);
        command.args(["--spares", &self.spares.to_string()]);
        command.arg("--linger").arg(format!("{}s", self.linger.as_secs_f64()));
        // Nothing of the caller's environment is a daemon's business, other than where programs are.
        command.env_clear().envs(std::env::var_os("PATH").map(|path| ("PATH", path)));
        command.envs(std::env::var_os("SHOAL_LOG").map(|filter| ("SHOAL_LOG", filter)));
        command.current_dir("/").stdin(Stdio::null()).stdout(log).stderr(errors);
        // Nor are descriptors: the daemon outlives this process, and who waits for the end of a pipe would wait for it.
        runtime::sys::close_on_exec_from(FIRST_OWN_DESCRIPTOR).context("cannot mark descriptors")?;
        command.spawn().context("cannot start a daemon")
    }

    fn not_started(&self, why: &str) -> anyhow::Error {
        let log = tail(&self.log()).unwrap_or_default();
        if self.fresh {
            // What an earlier daemon left is for the next one to adopt; what this one left is nothing. If it cannot
            // be removed, that is less than what there is to say already.
            let _ = std::fs::remove_dir_all(&self.base);
        }
        let what = format!("the private daemon did not start: {why}");
        if log.trim().is_empty() {
            return anyhow::Error::msg(what);
        }
        hinted(format!("{what}\n{}", log.trim_end()), "`shoal run` needs root and Linux 5.14 or newer")
    }
}

/// Makes the directory; `false` if it was there.
fn make(base: &Path) -> anyhow::Result<bool> {
    match DirBuilder::new().mode(0o700).create(base) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error).with_context(|| format!("cannot create `{}`", base.display())),
    }
}

/// One try to have the directory's lock. `None`: someone holds it, or has just removed it.
fn try_lock(base: &Path) -> anyhow::Result<Option<File>> {
    match std::fs::symlink_metadata(base) {
        Ok(metadata) => check_ours(base, &metadata)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot look at `{}`", base.display())),
    }
    let path = base.join("lock");
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = match rustix::fs::open(&path, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(Errno::NOENT) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot open `{}`", path.display())),
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot lock `{}`", path.display())),
    }
    // The last one out removes the file while it holds the lock; then this one locks nothing.
    let ours = file.metadata().with_context(|| format!("cannot look at `{}`", path.display()))?;
    match std::fs::symlink_metadata(&path) {
        Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => Ok(Some(file)),
        Ok(_) => Ok(None),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot look at `{}`", path.display())),
    }
}

/// In a directory that all may write to, someone else may have been first, and would own all that we put there.
fn check_ours(base: &Path, metadata: &std::fs::Metadata) -> anyhow::Result<()> {
    let ours = metadata.is_dir()
        && metadata.uid() == rustix::process::geteuid().as_raw()
        && metadata.mode() & 0o077 == 0;
    if ours {
        return Ok(());
    }
    Err(hinted(
        format!("`{}` is not a directory of this user alone", base.display()),
        "remove it, or set SHOAL_PRIVATE_DIR to another place",
    ))
}

fn tail(path: &Path) -> io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(LOG_SHOWN_MAX)))?;
    let mut bytes = Vec::new();
    file.take(LOG_SHOWN_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn a_planted_directory_is_refused() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let base = home.path().join("private");
        symlink("/var", &base).expect("a link");
        assert!(try_lock(&base).is_err(), "a link");
        std::fs::remove_file(&base).expect("it is there");
        std::fs::write(&base, "").expect("a file");
        assert!(try_lock(&base).is_err(), "a file");
        std::fs::remove_file(&base).expect("it is there");
        std::fs::create_dir(&base).expect("a directory");
        std::fs::set_permissions(&base, std::fs::Permissions::from_mode(0o777)).expect("open to all");
        assert!(try_lock(&base).is_err(), "open to others");
    }

    #[test]
    fn a_daemon_of_another_build_or_network_is_used_only_while_it_must_be() {
        let identity = |program: &str, namespaces: &str| Identity {
            program: program.into(),
            namespaces: namespaces.into(),
        };
        let own = identity("new", "here");
        let terms = |program, namespaces, others| {
            let listening = server::Listening { url: "http://127.0.0.1:1".into(), pid: 1 };
            terms(&own, &Grant { listening, identity: identity(program, namespaces), others })
        };
        assert_eq!(terms("new", "here", 0), Terms::Ours);
        assert_eq!(terms("new", "here", 3), Terms::Ours);
        assert_eq!(terms("old", "here", 0), Terms::Unused);
        assert_eq!(terms("old", "here", 1), Terms::Shared);
        for program in ["old", "new", ""] {
            assert_eq!(terms(program, "there", 0), Terms::Unused, "{program}");
            assert_eq!(terms(program, "there", 1), Terms::Elsewhere, "{program}");
        }
    }

    #[test]
    fn the_lock_is_held_by_one_at_a_time() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let base = home.path().join("private");
        assert!(make(&base).expect("it can be made"));
        let held = try_lock(&base).expect("it can be made").expect("it is free");
        assert!(try_lock(&base).expect("it can be tried").is_none());
        drop(held);
        assert!(try_lock(&base).expect("it can be tried").is_some());
    }
}
