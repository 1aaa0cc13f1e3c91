//! All processes of one command, including those that left its process group or session.
//!
//! With a cgroup, the kernel keeps track: one child cgroup per command, which no fork, new session or orphaning
//! leaves. Without one (other backends), init searches `/proc` when needed: descendants by parent, and processes that
//! carry the command's id in their initial environment. That search is only a good guess: a process that cleans its
//! environment and loses its parents is missed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;
use wire::guest::Handle;

use crate::sys;

/// How often the search of `/proc` is repeated before it gives up on a tree that grows faster than it is stopped.
const WALKS_MAX: usize = 64;
/// How much is read of one process's environment or of a list of processes.
const FILE_MAX: u64 = 4 * 1024 * 1024;
/// The variable that says which command a process belongs to.
pub const COMMAND_ID_VARIABLE: &str = "SHOAL_COMMAND_ID";

/// How processes are kept apart.
#[derive(Debug)]
pub enum Tree {
    /// A child group for each command.
    Groups(Groups),
    /// No cgroup.
    Walk,
}

/// The sandbox's own cgroup.
#[derive(Debug)]
pub struct Groups {
    directory: OwnedFd,
    /// The cgroup of the command that is likely to come next, created while no caller waited for it.
    ahead: RefCell<Option<(Handle, OwnedFd)>>,
}

impl Groups {
    /// In this directory.
    pub fn new(directory: OwnedFd) -> Self {
        Self { directory, ahead: RefCell::new(None) }
    }

    fn make(&self, handle: Handle) -> Result<OwnedFd, Errno> {
        let name = handle.group_name();
        rustix::fs::mkdirat(&self.directory, &name, Mode::from_raw_mode(0o755))?;
        let flags = OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat(&self.directory, &name, flags, Mode::empty()).inspect_err(|_| {
            self.remove(handle);
        })
    }

    fn remove(&self, handle: Handle) -> bool {
        match rustix::fs::unlinkat(&self.directory, handle.group_name(), AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => true,
            Err(_) => false,
        }
    }
}

/// What this module needs to know of a command.
#[derive(Debug, Clone, Copy)]
pub struct Root<'a> {
    pub handle: Handle,
    /// The caller's id for it.
    pub id: &'a str,
    /// The main process, until it is reaped: afterwards the number may belong to another process.
    pub main: Option<i32>,
}

impl Tree {
    /// Creates the cgroup that a command will start in.
    pub fn prepare(&self, handle: Handle) -> Result<Option<OwnedFd>, Errno> {
        let Self::Groups(groups) = self else { return Ok(None) };
        match groups.ahead.take() {
            Some((ready, group)) if ready == handle => return Ok(Some(group)),
            Some((other, _)) => drop(groups.remove(other)),
            None => {}
        }
        groups.make(handle).map(Some)
    }

    /// Creates the cgroup of the next command ahead of time, unless it exists already. This costs as much as a tenth
    /// of a short command, so it is done while no caller waits.
    pub fn prepare_ahead(&self, handle: Handle) {
        if let Self::Groups(groups) = self {
            let ahead = groups.ahead.take().or_else(|| Some((handle, groups.make(handle).ok()?)));
            groups.ahead.replace(ahead);
        }
    }

    /// In a new process: enters the cgroup.
    pub fn enter(group: BorrowedFd<'_>) -> Result<(), Errno> {
        let procs =
            rustix::fs::openat(group, "cgroup.procs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
        rustix::io::write(procs, b"0").map(drop)
    }

    /// Removes the cgroup. Returns whether nothing is left: a cgroup with processes in it stays.
    pub fn remove(&self, handle: Handle) -> bool {
        match self {
            Self::Groups(groups) => groups.remove(handle),
            Self::Walk => true,
        }
    }

    /// Kills every process of the command.
    pub fn kill(&self, root: Root<'_>) {
        let done = match self {
            Self::Groups(groups) => kill_group(&groups.directory, root.handle),
            Self::Walk => Err(Errno::OPNOTSUPP),
        };
        if done.is_err() {
            self.stop_and_kill(root);
        }
        if let Some(main) = root.main {
            // A process that was not created in its cgroup may not have entered it yet. It is an unreaped child of
            // init, so its number is still its own.
            let _ = sys::kill(main, libc::SIGKILL);
        }
    }

    /// Asks every process of the command to end. Stopped processes are continued, so that they receive the signal.
    pub fn terminate(&self, root: Root<'_>) {
        for pid in self.members(root) {
            // It may have ended in the meantime, which is fine.
            let _ = sys::kill(pid, libc::SIGTERM);
            let _ = sys::kill(pid, libc::SIGCONT);
        }
    }

    /// Stops every process it finds until it finds no more, so that nothing forks any more, then kills them all.
    fn stop_and_kill(&self, root: Root<'_>) {
        let mut stopped: Vec<i32> = Vec::new();
        for _ in 0..WALKS_MAX {
            let fresh: Vec<i32> =
                self.members(root).into_iter().filter(|pid| !stopped.contains(pid)).collect();
            if fresh.is_empty() {
                break;
            }
            for pid in fresh {
                let _ = sys::kill(pid, libc::SIGSTOP);
                stopped.push(pid);
            }
        }
        for pid in stopped {
            let _ = sys::kill(pid, libc::SIGKILL);
        }
    }

    fn members(&self, root: Root<'_>) -> Vec<i32> {
        if let Self::Groups(groups) = self
            && let Ok(listed) =
                read_at(&groups.directory, &format!("{}/cgroup.procs", root.handle.group_name()))
        {
            return listed.split(|byte| *byte == b'\n').filter_map(parse_pid).collect();
        }
        walk(root)
    }
}

/// Write `cgroup.kill` rather than signal each process: a process that forks can outrun signals, but not its cgroup (Linux 5.14).
fn kill_group(directory: &OwnedFd, handle: Handle) -> Result<(), Errno> {
    let path = format!("{}/cgroup.kill", handle.group_name());
    match rustix::fs::openat(directory, path, OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(file) => rustix::io::write(file, b"1").map(drop),
        // The cgroup is gone, and everything in it.
        Err(Errno::NOENT)
            if rustix::fs::statat(directory, handle.group_name(), AtFlags::empty()).is_err() =>
        {
            Ok(())
        }
        Err(error) => Err(error),
    }
}

fn read_at(directory: &OwnedFd, path: &str) -> io::Result<Vec<u8>> {
    let file = rustix::fs::openat(directory, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = Vec::new();
    std::fs::File::from(file).take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn parse_pid(text: &[u8]) -> Option<i32> {
    std::str::from_utf8(text).ok()?.trim().parse().ok().filter(|pid| *pid > 1)
}

/// What `/proc` reports about one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Relations {
    parent: i32,
    session: i32,
    dead: bool,
}

/// Every living process that descends from the command, shares its session, or carries its id.
fn walk(root: Root<'_>) -> Vec<i32> {
    let mut all = BTreeMap::new();
    let Ok(entries) = std::fs::read_dir("/proc") else { return root.main.into_iter().collect() };
    for entry in entries.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| parse_pid(name.as_bytes())) else {
            continue;
        };
        if let Some(relations) =
            std::fs::read(format!("/proc/{pid}/stat")).ok().and_then(|stat| parse_stat(&stat))
        {
            all.insert(pid, relations);
        }
    }
    let own = std::process::id() as i32;
    let marker = format!("{COMMAND_ID_VARIABLE}={}", root.id);
    let mut members: Vec<i32> = Vec::new();
    for (pid, relations) in &all {
        let in_session = root.main.is_some_and(|main| relations.session == main || *pid == main);
        if *pid != own && !relations.dead && (in_session || carries(*pid, &marker)) {
            members.push(*pid);
        }
    }
    // Children of members are members; each pass finds one more generation.
    loop {
        let before = members.len();
        for (pid, relations) in &all {
            if *pid != own && !relations.dead && members.contains(&relations.parent) && !members.contains(pid)
            {
                members.push(*pid);
            }
        }
        if members.len() == before {
            return members;
        }
    }
}

/// The fields after the name, which may itself contain spaces and parentheses. proc_pid_stat(5)
fn parse_stat(stat: &[u8]) -> Option<Relations> {
    let behind_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&stat[behind_name..]).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(Relations { parent, session, dead: matches!(state, "Z" | "X") })
}

fn carries(pid: i32, marker: &str) -> bool {
    let Ok(file) = std::fs::File::open(format!("/proc/{pid}/environ")) else { return false };
    let mut environment = Vec::new();
    if file.take(FILE_MAX).read_to_end(&mut environment).is_err() {
        return false;
    }
    environment.split(|byte| *byte == 0).any(|entry| entry == marker.as_bytes())
}

/// The order in which the kernel kills processes when memory runs out.
///
/// Commands must be killed before init. Init may not lower its own score below where it began, but it may raise it
/// and return; so init takes the score of commands during a fork, and the child inherits it. That is two writes to a
/// file that the launcher opened and passed on: init and its forks are not dumpable, so they may not open their own
/// file in `/proc`.
#[derive(Debug)]
pub struct OomScore {
    file: std::fs::File,
    own: String,
}

impl OomScore {
    /// The end of the scale. The kernel adds a thousandth of the memory limit for each point and compares sums, so
    /// the distance is how much more than a small command init may hold (twice the largest message) without being
    /// killed first. A guest may lower the scores of its own processes to order them.
    const OF_COMMANDS: &str = "1000";

    /// Takes ownership of this process's file.
    pub fn new(mut file: std::fs::File) -> io::Result<Self> {
        let mut own = String::new();
        file.read_to_string(&mut own)?;
        let score = Self { file, own: own.trim().to_owned() };
        // Try it once, so that a failure shows before there is a sandbox.
        score.as_command(|| ())?;
        Ok(score)
    }

    /// Runs `work`, a fork, with the score of commands.
    pub fn as_command<T>(&self, fork: impl FnOnce() -> T) -> io::Result<T> {
        // The file has no positions: every write is a new value.
        rustix::io::write(&self.file, Self::OF_COMMANDS.as_bytes())?;
        let result = fork();
        // The kernel never refuses to return to the first score. If it did, the child would live all the same, and
        // init would keep the score of commands until the next start.
        let _ = rustix::io::write(&self.file, self.own.as_bytes());
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_fields() {
        let stat = b"42 (a) S 1 (b)) R 7 8 9 0 -1 4194560 0";
        assert_eq!(parse_stat(stat), Some(Relations { parent: 7, session: 9, dead: false }));
        assert_eq!(parse_stat(b"1 (z) Z 3 4 5"), Some(Relations { parent: 3, session: 5, dead: true }));
        assert_eq!(parse_stat(b"1 (z"), None);
        assert_eq!(parse_stat(b""), None);
    }

    #[test]
    fn only_whole_positive_numbers_beyond_init_are_processes() {
        assert_eq!(parse_pid(b"12"), Some(12));
        for other in [&b"1"[..], b"0", b"-5", b"self", b"", b"99999999999"] {
            assert_eq!(parse_pid(other), None);
        }
    }
}
