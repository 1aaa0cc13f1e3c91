//! The data directory: its owner, the daemon that uses it now, and the few files besides the engine's own.
//!
//! ```text
//! lock           held by the living daemon, with its process id inside
//! installation   16 hexadecimal digits, made once; every name on the host carries them
//! api.key        the daemon's first key, mode 0600, for local clients
//! daemon.json    where the living daemon listens; only true while `lock` is held
//! ```
//!
//! Files that must never be incomplete are written under another name, synced and renamed.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use wire::InstallationId;

/// A client that checks whether the daemon is alive holds the lock for an instant. A daemon that starts at that moment
/// waits.
const LOCK_WAIT_MAX: Duration = Duration::from_millis(500);
/// The time between two checks.
const LOCK_WAIT_STEP: Duration = Duration::from_millis(20);
/// How long a daemon may take to end when another takes over: it gives requests five seconds to finish.
const TAKE_OVER_MAX: Duration = Duration::from_secs(30);
/// Longer than any of the small files.
const SMALL_FILE_MAX: u64 = 4096;

/// A data directory that belongs to this process until it is dropped.
#[derive(Debug)]
pub struct DataDir {
    path: PathBuf,
    installation: InstallationId,
    /// Held, not read. Closed on exec, so that no child keeps the directory locked.
    _lock: File,
}

/// Where the living daemon listens: `daemon.json`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listening {
    /// For clients on this machine.
    pub url: String,
    /// The daemon's process.
    pub pid: u32,
}

impl DataDir {
    /// Creates the directory if it does not exist, and locks it.
    pub fn open(path: &Path) -> Result<Self, DataDirError> {
        let at = |doing, path: &Path| {
            let path = path.to_owned();
            move |source| DataDirError::Io { doing, path, source }
        };
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(at("create", path))?;
        let metadata = fs::metadata(path).map_err(at("look at", path))?;
        if metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(DataDirError::Foreign { path: path.into(), owner: metadata.uid() });
        }
        if metadata.mode() & 0o077 != 0 {
            fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(at("close to others", path))?;
        }
        let lock = take_lock(path)?;
        // A daemon that was killed could not remove it.
        remove_if_there(&path.join("daemon.json")).map_err(at("remove", &path.join("daemon.json")))?;
        let installation = installation(path)?;
        Ok(Self { path: path.into(), installation, _lock: lock })
    }

    /// As [`Self::open`]; but if another daemon has the directory, asks it to end first and waits until it has. Blocks.
    pub fn take_over(path: &Path) -> Result<Self, DataDirError> {
        Self::take_over_within(path, TAKE_OVER_MAX)
    }

    fn take_over_within(path: &Path, patience: Duration) -> Result<Self, DataDirError> {
        let deadline = Instant::now() + patience;
        let mut asked = None;
        loop {
            let (pid, busy) = match Self::open(path) {
                Err(DataDirError::Busy { path, pid }) => (pid, DataDirError::Busy { path, pid }),
                result => return result,
            };
            let late = Instant::now() > deadline;
            match holder(&path.join("lock"), pid) {
                Some(holder) if asked != Some(holder) => {
                    tracing::info!(pid = holder.as_raw_nonzero().get(), "asking the daemon before to end");
                    ask_to_end(holder).map_err(|source| DataDirError::CannotAsk { pid, source })?;
                    asked = Some(holder);
                }
                Some(_) if late => {
                    let seconds = patience.as_secs();
                    return Err(DataDirError::DoesNotEnd { path: path.into(), pid, seconds });
                }
                None if late => return Err(busy),
                // Not yet, or a client that checks whether a daemon is alive, or a daemon that has just ended.
                Some(_) | None => {}
            }
        }
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its id.
    pub fn installation(&self) -> InstallationId {
        self.installation
    }

    /// The key that an earlier start stored.
    pub fn read_key(&self) -> Result<Option<String>, DataDirError> {
        let path = self.path.join("api.key");
        match read_small(&path) {
            Ok(text) => Ok(Some(text.trim().to_owned()).filter(|key| !key.is_empty())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(DataDirError::Io { doing: "read", path, source }),
        }
    }

    /// Stores a key for local clients.
    pub fn write_key(&self, key: &str) -> Result<(), DataDirError> {
        self.write("api.key", format!("{key}\n").as_bytes())
    }

    /// Records where the daemon listens, for local clients.
    pub fn write_listening(&self, listening: &Listening) -> Result<(), DataDirError> {
        let json = serde_json::to_vec(listening).expect("a URL and a number can be written as JSON");
        self.write("daemon.json", &json)
    }

    /// Removes the file that [`Self::write_listening`] wrote.
    pub fn remove_listening(&self) -> Result<(), DataDirError> {
        let path = self.path.join("daemon.json");
        remove_if_there(&path).map_err(|source| DataDirError::Io { doing: "remove", path, source })
    }

    fn write(&self, name: &'static str, bytes: &[u8]) -> Result<(), DataDirError> {
        write_whole(&self.path, name, bytes).map_err(|source| DataDirError::Io {
            doing: "write",
            path: self.path.join(name),
            source,
        })
    }
}

fn take_lock(directory: &Path) -> Result<File, DataDirError> {
    let path = directory.join("lock");
    let fail = |doing| {
        let path = path.clone();
        move |source| DataDirError::Io { doing, path, source }
    };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(fail("open"))?;
    let deadline = Instant::now() + LOCK_WAIT_MAX;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => break,
            Err(Errno::WOULDBLOCK) if Instant::now() < deadline => std::thread::sleep(LOCK_WAIT_STEP),
            Err(Errno::WOULDBLOCK) => {
                let mut text = String::new();
                let read = (&mut file).take(SMALL_FILE_MAX).read_to_string(&mut text);
                let pid = read.ok().and_then(|_| text.trim().parse().ok());
                return Err(DataDirError::Busy { path: directory.into(), pid: Pid(pid) });
            }
            Err(error) => return Err(fail("lock")(error.into())),
        }
    }
    file.set_len(0).map_err(fail("write"))?;
    writeln!(file, "{}", std::process::id()).map_err(fail("write"))?;
    Ok(file)
}

/// The process that is named in a lock, if the kernel confirms that it holds the lock: the number alone may belong to
/// another process by now.
fn holder(lock: &Path, named: Pid) -> Option<rustix::process::Pid> {
    let named = rustix::process::Pid::from_raw(i32::try_from(named.0?).ok()?)?;
    let number = fs::metadata(lock).ok()?.ino();
    // proc_locks(5): `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`. Some file systems report another device there
    // than stat(2), so the file is identified by its inode number.
    let (process, suffix) = (named.as_raw_nonzero().to_string(), format!(":{number}"));
    let locks = fs::read_to_string("/proc/locks").ok()?;
    let holds = locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|words| {
        matches!(*words, [_, "FLOCK", _, "WRITE", pid, place, ..] if pid == process && place.ends_with(&suffix))
    });
    holds.then_some(named)
}

/// Through a descriptor, which keeps referring to the process even if it ends and its number is reused.
fn ask_to_end(process: rustix::process::Pid) -> io::Result<()> {
    use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
    let sent = pidfd_open(process, PidfdFlags::empty())
        .and_then(|process| pidfd_send_signal(&process, Signal::TERM));
    match sent {
        // It has ended by itself.
        Ok(()) | Err(Errno::SRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

fn installation(directory: &Path) -> Result<InstallationId, DataDirError> {
    let path = directory.join("installation");
    match read_small(&path) {
        Ok(text) => text.trim().parse().map_err(|_| DataDirError::BadInstallation { path }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let bits = getrandom::u64().map_err(|source| DataDirError::NoRandomness { source })?;
            let id = InstallationId::from_random(bits);
            write_whole(directory, "installation", format!("{id}\n").as_bytes())
                .map_err(|source| DataDirError::Io { doing: "write", path, source })?;
            Ok(id)
        }
        Err(source) => Err(DataDirError::Io { doing: "read", path, source }),
    }
}

fn read_small(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    File::open(path)?.take(SMALL_FILE_MAX).read_to_string(&mut text)?;
    Ok(text)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Writes a file atomically, readable by its owner alone.
fn write_whole(directory: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let temporary = directory.join(format!(".{name}.new"));
    remove_if_there(&temporary)?;
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, directory.join(name))?;
    File::open(directory)?.sync_all()
}

/// A process id for a message, if known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pid(pub Option<u32>);

impl std::fmt::Display for Pid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Some(pid) => write!(f, "process {pid}"),
            None => f.write_str("another process"),
        }
    }
}

/// Why a data directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataDirError {
    /// Two daemons would destroy each other's data.
    #[error("data directory `{}` is in use by {pid}", path.display())]
    Busy {
        /// The directory.
        path: PathBuf,
        /// The process that uses it.
        pid: Pid,
    },
    /// The kernel does not allow the signal.
    #[error("cannot ask {pid}, which uses the data directory, to end")]
    CannotAsk {
        /// The process that uses it.
        pid: Pid,
        /// Why not.
        source: io::Error,
    },
    /// The process was asked to end, and still runs.
    #[error("{pid}, which uses data directory `{}`, was asked to end and has not within {seconds} s", path.display())]
    DoesNotEnd {
        /// The directory.
        path: PathBuf,
        /// The process that uses it.
        pid: Pid,
        /// How long it was given.
        seconds: u64,
    },
    /// The owner of the directory could read keys and change programs that run as us.
    #[error("data directory `{}` belongs to user {owner} and not to the user that runs the daemon", path.display())]
    Foreign {
        /// The directory.
        path: PathBuf,
        /// The owner of the directory.
        owner: u32,
    },
    /// Names on the host would be made from garbage.
    #[error("`{}` does not hold 16 hexadecimal digits", path.display())]
    BadInstallation {
        /// The file.
        path: PathBuf,
    },
    /// The kernel gave no random bits.
    #[error("cannot make an installation id")]
    NoRandomness {
        /// Why.
        source: getrandom::Error,
    },
    /// A file operation failed.
    #[error("cannot {doing} `{}`", path.display())]
    Io {
        /// What was being done.
        doing: &'static str,
        /// To what.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

impl DataDirError {
    /// How to fix it, if there is a way.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Busy { .. } => Some(
                "stop the other daemon first, take over from it with --take-over, or give this one another --data-dir",
            ),
            Self::CannotAsk { .. } => Some("stop the other daemon as the user that runs it"),
            Self::DoesNotEnd { .. } => {
                Some("its log says what it waits for; `kill -9` ends it too, and no sandbox is lost by it")
            }
            Self::Foreign { .. } => Some("run the daemon as its owner, or give it another --data-dir"),
            Self::BadInstallation { .. } | Self::NoRandomness { .. } | Self::Io { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_is_told_who_was_first() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let path = home.path().join("a/b");
        let first = DataDir::open(&path).expect("the first gets it");
        match DataDir::open(&path).expect_err("the second does not") {
            DataDirError::Busy { pid, .. } => assert_eq!(pid.0, Some(std::process::id())),
            other => panic!("{other}"),
        }
        let installation = first.installation();
        drop(first);
        let again = DataDir::open(&path).expect("it is free again");
        assert_eq!(again.installation(), installation, "the id is made once");
    }

    #[test]
    fn what_is_in_it_is_for_its_owner_alone() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let path = home.path().join("data");
        fs::create_dir(&path).expect("a directory");
        fs::set_permissions(&path, Permissions::from_mode(0o755)).expect("open to all");
        let directory = DataDir::open(&path).expect("it opens");
        assert_eq!(directory.read_key().expect("it can be read"), None);
        directory.write_key("secret").expect("it can be written");
        assert_eq!(directory.read_key().expect("it can be read").as_deref(), Some("secret"));
        let mode = |name: &str| fs::metadata(path.join(name)).expect("it is there").mode() & 0o777;
        assert_eq!((mode(""), mode("api.key"), mode("lock")), (0o700, 0o600, 0o600));
    }

    #[test]
    fn a_stale_address_does_not_outlive_a_start() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let directory = DataDir::open(home.path()).expect("it opens");
        let listening = Listening { url: "http://127.0.0.1:1".into(), pid: 1 };
        directory.write_listening(&listening).expect("it can be written");
        drop(directory);
        let _again = DataDir::open(home.path()).expect("it opens");
        assert!(!home.path().join("daemon.json").exists());
    }

    /// A process of a test, which ends with the test, also when it fails.
    struct Other(std::process::Child);

    impl Drop for Other {
        fn drop(&mut self) {
            let _ = self.0.kill(); // It may have ended.
            let _ = self.0.wait();
        }
    }

    impl Other {
        fn start(command: &mut std::process::Command) -> Self {
            Self(command.spawn().expect("the program can be started"))
        }

        /// A process that holds the lock of a directory, as a daemon would; `on_term` is what it does when it is asked
        /// to end.
        fn daemon(path: &Path, on_term: &str) -> Self {
            const PROGRAM: &str = "
import fcntl, os, signal, sys
signal.signal(signal.SIGTERM, getattr(signal, sys.argv[2]))
lock = open(sys.argv[1], 'w')
fcntl.flock(lock, fcntl.LOCK_EX)
print(os.getpid(), file=lock, flush=True)
print(flush=True)
signal.pause()
";
            let mut command = std::process::Command::new("python3");
            command.args(["-c", PROGRAM]).arg(path.join("lock")).arg(on_term);
            let mut other = Self::start(command.stdout(std::process::Stdio::piped()));
            let mut ready = [0];
            other.0.stdout.as_mut().expect("a pipe").read_exact(&mut ready).expect("it holds the lock");
            other
        }

        fn lives(&mut self) -> bool {
            self.0.try_wait().expect("it is ours").is_none()
        }
    }

    #[test]
    fn whoever_takes_over_asks_the_other_to_end_and_waits_for_it() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let mut other = Other::daemon(home.path(), "SIG_DFL");
        assert!(matches!(DataDir::open(home.path()), Err(DataDirError::Busy { .. })));
        let taken = DataDir::take_over(home.path()).expect("the other ends");
        assert!(!other.0.wait().expect("it is ours").success(), "it ended by the signal");
        drop(taken);
        DataDir::take_over(home.path()).expect("from nobody it is taken at once");
    }

    #[test]
    fn one_that_does_not_end_keeps_what_it_has() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let mut other = Other::daemon(home.path(), "SIG_IGN");
        let refused = DataDir::take_over_within(home.path(), Duration::from_millis(100));
        assert!(matches!(refused, Err(DataDirError::DoesNotEnd { .. })), "{refused:?}");
        assert!(other.lives(), "it was asked, not killed");
    }

    #[test]
    fn a_number_that_is_not_the_holders_is_not_believed() {
        let home = tempfile::tempdir().expect("a temporary directory");
        let mut other = Other::daemon(home.path(), "SIG_DFL");
        let mut bystander = Other::start(std::process::Command::new("sleep").arg("1000"));
        fs::write(home.path().join("lock"), format!("{}\n", bystander.0.id())).expect("it is ours");
        let refused = DataDir::take_over_within(home.path(), Duration::from_millis(100));
        assert!(matches!(refused, Err(DataDirError::Busy { .. })), "{refused:?}");
        assert!(bystander.lives() && other.lives(), "nobody was asked to end");
    }

    #[test]
    fn a_damaged_installation_id_is_refused() {
        let home = tempfile::tempdir().expect("a temporary directory");
        fs::write(home.path().join("installation"), "../../etc").expect("a file");
        assert!(matches!(DataDir::open(home.path()), Err(DataDirError::BadInstallation { .. })));
    }
}
