//! System calls that no safe crate wraps: one function per call, checked types in, `io::Result` or an owned descriptor out.
//!
//! All `unsafe` code of this crate is here. Functions that fork are called only in the launcher, which has one thread; in such a
//! process the child may use everything that the parent may, including the allocator.

pub mod btrfs;
pub mod loops;
pub mod mounts;
pub mod sockets;

use std::ffi::CStr;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use libc::{c_int, c_long, c_uint};
use rustix::thread::UnshareFlags;
use tokio::io::unix::AsyncFd;

/// linux/sched.h; libc's own constant is too narrow for it.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which side of a clone this is.
pub enum Cloned {
    /// The old process.
    Parent {
        /// The new process's id, in the old one's pid namespace.
        pid: u32,
    },
    /// The new process.
    Child,
}

/// How a new process differs from a plain fork.
pub struct CloneOptions<'a> {
    /// CLONE_NEW* and CLONE_PARENT.
    pub flags: c_int,
    /// Start it in this cgroup of the v2 tree.
    pub cgroup: Option<BorrowedFd<'a>>,
}

/// Clones this process, with its own memory. clone3(2), Linux 5.7 for the cgroup.
pub fn clone_process(options: &CloneOptions<'_>) -> io::Result<Cloned> {
    let parent = options.flags & libc::CLONE_PARENT != 0;
    let mut args = libc::clone_args {
        flags: options.flags as u64,
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        // With CLONE_PARENT the signal is that of the parent, and the kernel rejects one here.
        exit_signal: if parent { 0 } else { libc::SIGCHLD as u64 },
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    if let Some(cgroup) = options.cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: `args` is a whole clone_args of the size that is passed. CLONE_VM is not among the flags that callers
    // use, so the child has a copy of memory and of this stack, and continues here like the child of fork(2). glibc's
    // own bookkeeping (thread id, atfork handlers) is not updated; the process is single-threaded and calls nothing
    // that depends on it.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Cloned::Child),
        pid => Ok(Cloned::Parent { pid: pid as u32 }),
    }
}

/// A plain fork, through the same system call.
pub fn fork_process() -> io::Result<Cloned> {
    clone_process(&CloneOptions { flags: 0, cgroup: None })
}

/// Ends a forked child without running the parent's exit handlers.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: _exit(2) ends the process; nothing of it is used afterwards.
    unsafe { libc::_exit(code) }
}

/// Leaves the namespaces that `flags` name for new ones.
pub fn unshare(flags: UnshareFlags) -> io::Result<()> {
    assert!(!flags.contains(UnshareFlags::FILES), "descriptors stay shared");
    // SAFETY: the call is unsafe for CLONE_FILES alone, which was excluded.
    Ok(unsafe { rustix::thread::unshare_unsafe(flags) }?)
}

/// Changes a mount tree that is not attached yet, or its root only. mount_setattr(2), Linux 5.12.
pub fn set_mount_attributes(
    tree: BorrowedFd<'_>,
    set: u64,
    idmap: Option<BorrowedFd<'_>>,
    recursive: bool,
) -> io::Result<()> {
    #[repr(C)]
    struct MountAttr {
        set: u64,
        clear: u64,
        propagation: u64,
        userns: u64,
    }
    let attributes = MountAttr {
        set: set | if idmap.is_some() { libc::MOUNT_ATTR_IDMAP } else { 0 },
        clear: 0,
        propagation: 0,
        userns: idmap.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is a NUL-terminated literal, the structure is laid out as the kernel's mount_attr and its size
    // is passed; the kernel only reads both.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            flags as c_uint,
            &raw const attributes,
            size_of::<MountAttr>(),
        )
    };
    check(result)
}

/// Does file system work as `uid` and `gid`, until the next call. Capabilities stay as they are.
pub fn set_file_ids(uid: u32, gid: u32) {
    // SAFETY: integers only. The calls cannot fail for a process with CAP_SETUID, and return the old id, never an
    // error; callers that need the effect check it (a wrong id makes an overlay read-only, which is checked).
    unsafe {
        libc::setfsgid(gid);
        libc::setfsuid(uid);
    }
}

/// Returns memory that the allocator keeps free to the kernel. Locks each of its arenas in turn.
pub fn trim_memory() {
    // SAFETY: takes an integer; only touches memory that the allocator itself knows to be free.
    unsafe { libc::malloc_trim(0) };
}

/// Replaces this process by the program in `file`. Returns only if that fails.
pub fn execute(file: BorrowedFd<'_>, argv: &[&CStr], env: &[&CStr]) -> io::Error {
    let pointers = |list: &[&CStr]| -> Vec<*const libc::c_char> {
        list.iter().map(|s| s.as_ptr()).chain([std::ptr::null()]).collect()
    };
    let (argv, env) = (pointers(argv), pointers(env));
    // SAFETY: both lists end with a null pointer and their strings outlive the call; on success nothing returns.
    unsafe {
        libc::syscall(
            libc::SYS_execveat,
            file.as_raw_fd(),
            c"".as_ptr(),
            argv.as_ptr(),
            env.as_ptr(),
            libc::AT_EMPTY_PATH,
        );
    }
    io::Error::last_os_error()
}

/// Marks every descriptor from `first` up close-on-exec, so that none of the host's reach the sandbox.
/// close_range(2), Linux 5.11.
pub fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    let (first, last) = (first as c_uint, c_uint::MAX);
    // SAFETY: integers only, no memory is read or written. Descriptors are marked, not closed, so no `OwnedFd` alive in
    // this process is left dangling.
    let result = unsafe { libc::syscall(libc::SYS_close_range, first, last, libc::CLOSE_RANGE_CLOEXEC) };
    check(result)
}

/// Closes every descriptor but three: `null` becomes 0, 1 and 2, the others get the numbers `first_at` and
/// `second_at`, which must be 3 and 4. For a process that continues without an exec and must hold nothing that it
/// inherited.
pub fn close_all_but(
    null: OwnedFd,
    first: OwnedFd,
    second: OwnedFd,
    first_at: RawFd,
    second_at: RawFd,
) -> io::Result<(OwnedFd, std::fs::File)> {
    assert_eq!((first_at, second_at), (3, 4), "the two must follow the standard descriptors");
    let given = [&null, &first, &second];
    assert!(given.iter().all(|fd| fd.as_raw_fd() > second_at), "none is overwritten before it is copied");
    for standard in 0..=2 {
        inherit_as(null.as_fd(), standard)?;
    }
    inherit_as(first.as_fd(), first_at)?;
    inherit_as(second.as_fd(), second_at)?;
    // Closed below; their owners must not do so again.
    for fd in [null, first, second] {
        std::mem::forget(fd);
    }
    // SAFETY: integers only. Every `OwnedFd` of this process whose number is 5 or more dangles after this: the caller ends by
    // `exit_now`, which drops none of them, and uses none but the two that are returned here, which nobody else owns.
    unsafe {
        let last = c_uint::MAX;
        check(libc::syscall(libc::SYS_close_range, (second_at + 1) as c_uint, last, 0 as c_uint))?;
        Ok((OwnedFd::from_raw_fd(first_at), OwnedFd::from_raw_fd(second_at).into()))
    }
}

/// Duplicates `from` to the descriptor `to`, which the program after exec inherits.
pub fn inherit_as(from: BorrowedFd<'_>, to: RawFd) -> io::Result<()> {
    // SAFETY: integers only. Called just before exec on the low numbers that the new program expects: whatever `OwnedFd` had
    // one of them is not used again, and everything that is still needed was duplicated above them first.
    let result = unsafe { libc::dup2(from.as_raw_fd(), to) };
    check(c_long::from(result))
}

/// A duplicate of `fd` with a number of at least `least`, close-on-exec.
pub fn duplicate_above(fd: BorrowedFd<'_>, least: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: integers only; the new descriptor is owned by nobody else.
    unsafe {
        let new = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least);
        if new == -1 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(new)) }
    }
}

/// The descriptor that the parent of this program passed under this number.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: called once per number at the very start of the launcher, before anything else owns a descriptor; that it is
    // open is checked first.
    unsafe {
        if libc::fcntl(number, libc::F_GETFD) == -1 {
            return Err(io::Error::last_os_error());
        }
        Ok(OwnedFd::from_raw_fd(number))
    }
}

/// Blocks the signals and returns a descriptor on which they arrive, non-blocking.
pub fn signals_as_descriptor(signals: &[c_int]) -> io::Result<OwnedFd> {
    // SAFETY: the set is initialised by sigemptyset before use, and lives through both calls.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        for &signal in signals {
            libc::sigaddset(&raw mut set, signal);
        }
        check(c_long::from(libc::sigprocmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut())))?;
        let fd = libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK);
        if fd == -1 { Err(io::Error::last_os_error()) } else { Ok(OwnedFd::from_raw_fd(fd)) }
    }
}

/// Unblocks every signal and resets each to its default, as a fresh program expects.
pub fn reset_signals() {
    // SAFETY: sets are initialised before use; SIG_DFL is a valid disposition. Signals that cannot be changed refuse,
    // which is fine.
    unsafe {
        for signal in 1..=64 {
            libc::signal(signal, libc::SIG_DFL);
        }
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut());
    }
}

/// Brings up the loopback interface of the current network namespace.
///
/// Two ioctls on a throw-away socket: a netlink library would bring an async runtime into a forked child.
pub fn loopback_up() -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
    let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    // SAFETY: `request` is a zeroed ifreq, which is plain data, with a NUL-terminated name; the kernel reads and writes it
    // within its size. The union field that is used is the one that both requests are about.
    unsafe {
        let mut request: libc::ifreq = std::mem::zeroed();
        for (to, from) in request.ifr_name.iter_mut().zip(b"lo\0") {
            *to = *from as libc::c_char;
        }
        let raw = socket.as_fd().as_raw_fd();
        check(c_long::from(libc::ioctl(raw, libc::SIOCGIFFLAGS, &raw mut request)))?;
        request.ifr_ifru.ifru_flags |= (libc::IFF_UP | libc::IFF_RUNNING) as i16;
        check(c_long::from(libc::ioctl(raw, libc::SIOCSIFFLAGS, &raw const request)))
    }
}

/// A descriptor whose readiness tokio watches.
pub fn watch_descriptor(fd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: an `OwnedFd` names one descriptor for all of its life and closes it only when it is dropped, which the
    // `AsyncFd` that owns it does after it has stopped watching.
    unsafe { AsyncFd::register(fd) }.map_err(io::Error::from)
}

fn check(result: c_long) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
