//! What no safe wrapper offers: the only `unsafe` code of init.
//!
//! Everything here relies on one fact: **init has a single thread**, from its first instruction to its last. So a
//! forked child may use memory, locks and the allocator as its parent could, and no other thread opens or closes
//! descriptors.

use std::ffi::{CStr, CString, c_char, c_int, c_long};
use std::io;
use std::mem::MaybeUninit;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::io::Errno;

/// Takes ownership of a descriptor that the launcher left open under an agreed number.
pub fn adopt(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: fcntl with F_GETFD reads no memory; on a number that is not open it fails with EBADF.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the number is open, as was just checked. It was inherited, so nothing in this process owns it yet; `main` calls
    // this once for each of its three distinct numbers, before it opens anything else.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

/// Marks every descriptor from `first` up close-on-exec, so that commands inherit none of init's. close_range(2),
/// Linux 5.11.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: integers only. Descriptors are marked, not closed, so no `OwnedFd` is left dangling.
    let result =
        unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC as c_int) };
    check(result).map(drop)
}

/// In a forked child: closes every descriptor from `first` to `last`.
pub fn close_in_child(first: RawFd, last: RawFd) {
    // SAFETY: integers only. This closes descriptors behind the back of their `OwnedFd`s, which is sound because the child
    // drops none that it shares with its parent: `fork` never returns in it, it ends in `execute` or in `_exit`. It can only
    // fail on kernels without close_range; what is left open there is close-on-exec.
    unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
}

/// In a forked child: duplicates `from` to the descriptor `to`.
pub fn duplicate_in_child(from: RawFd, to: RawFd, inherited: Inherited) -> Result<(), Errno> {
    let flags = match inherited {
        Inherited::Yes => 0,
        Inherited::No => libc::O_CLOEXEC,
    };
    // SAFETY: integers only. Whatever was open at `to` is closed behind the back of its owner, which is sound because the
    // child drops nothing that it shares with its parent (see `close_in_child`).
    let result = unsafe { libc::dup3(from, to, flags) };
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Whether a descriptor stays open across the exec.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inherited {
    Yes,
    No,
}

/// In a forked child: writes to a descriptor by its number.
pub fn write_in_child(to: RawFd, bytes: &[u8]) -> Result<usize, Errno> {
    // SAFETY: the kernel reads `bytes`, which is borrowed for the call, for exactly its length.
    let result = unsafe { libc::write(to, bytes.as_ptr().cast(), bytes.len()) };
    if result < 0 { Err(last_errno()) } else { Ok(result as usize) }
}

/// Starts a process that runs `child` and then exits with the code it returns. With a cgroup, the process is created
/// in it. `child` learns whether that worked: where clone3(2) is not available, it must enter the cgroup itself.
pub fn fork(group: Option<BorrowedFd<'_>>, child: impl FnOnce(Placed) -> i32) -> io::Result<i32> {
    // SAFETY: clone_args is plain integers, for which all zeroes mean "nothing asked for".
    let mut arguments: libc::clone_args = unsafe { MaybeUninit::zeroed().assume_init() };
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(group) = group {
        arguments.flags = CLONE_INTO_CGROUP;
        arguments.cgroup = group.as_raw_fd() as u64;
    }
    // SAFETY: the kernel reads `arguments`, which lives until the call is over, and gets its true size. Without CLONE_VM the
    // child gets a copy of our memory and returns here on its own copy of this stack. Having one thread, that copy is
    // consistent: no lock is held by anybody who does not exist in the child.
    let mut pid =
        unsafe { libc::syscall(libc::SYS_clone3, &raw mut arguments, size_of::<libc::clone_args>()) };
    let mut placed = Placed::Yes;
    if pid < 0 && last_errno() == Errno::NOSYS {
        // Seccomp filters of other backends return this for clone3, because they cannot inspect its arguments.
        // SAFETY: as above; clone(2) with no flags but the exit signal is fork(2), and a null stack means a copy of ours.
        pid = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD as c_long, 0, 0, 0, 0) };
        placed = if group.is_some() { Placed::No } else { Placed::Yes };
    }
    match check(pid)? {
        0 => {
            let code = child(placed);
            // SAFETY: ends this process at once, running no destructor and no exit handler, which belong to the parent.
            unsafe { libc::_exit(code) }
        }
        pid => Ok(pid as i32),
    }
}

/// From linux/sched.h; the constant in `libc` has too narrow a type.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// Whether a new process is in its group from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placed {
    Yes,
    No,
}

/// Strings in the form of execve(2): an array of pointers that ends with a null.
#[derive(Debug)]
pub struct Strings {
    owned: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    /// Built before the fork, so that the child need not build anything.
    pub fn new(owned: Vec<CString>) -> Self {
        // A CString's bytes live on the heap and do not move with it, so the pointers stay valid as long as `owned`
        // does.
        let pointers = owned.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect();
        Self { owned, pointers }
    }

    /// Replaces the first string, if there is one.
    pub fn replace_first(&mut self, first: &CStr) {
        if let Some(place) = self.owned.first_mut() {
            *place = first.into();
            self.pointers[0] = place.as_ptr();
        }
    }
}

/// Executes the program at `path`. Returns only if that fails.
pub fn execute(path: &CStr, arguments: &Strings, environment: &Strings) -> Errno {
    // SAFETY: `path` ends in a NUL, both arrays end in a null and point to strings that end in a NUL and are borrowed, with
    // their owners, for the length of the call.
    unsafe { libc::execve(path.as_ptr(), arguments.pointers.as_ptr(), environment.pointers.as_ptr()) };
    last_errno()
}

/// The signals that init ignores and a command must receive.
#[derive(Debug)]
pub struct Ignored(RangeInclusive<c_int>);

impl Ignored {
    /// In a forked child: resets every signal to its default and blocks none, as a new process expects.
    pub fn reset_in_child(&self) {
        self.0.clone().for_each(|signal| set_disposition(signal, libc::SIG_DFL));
        let none = signal_set(&[]);
        // SAFETY: `none` is an initialised set that outlives the call.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) };
    }
}

/// Makes init ignore every signal but SIGCHLD, which can be read from the descriptor that this returns.
///
/// Signals are not blocked: blocked signals queue up, and a guest could fill the queue. The kernel drops signals
/// without a handler in the first process of a namespace; elsewhere all of them must be ignored, at the price of as
/// many calls per command.
pub fn listen_for_children() -> io::Result<(OwnedFd, Ignored)> {
    let first = std::process::id() == 1;
    let ignored = if first { libc::SIGPIPE..=libc::SIGPIPE } else { 1..=SIGNAL_MAX };
    for signal in 1..=SIGNAL_MAX {
        let ignore = ignored.contains(&signal) && signal != libc::SIGCHLD;
        set_disposition(signal, if ignore { libc::SIG_IGN } else { libc::SIG_DFL });
    }
    let set = signal_set(&[libc::SIGCHLD]);
    // SAFETY: `set` is an initialised set that outlives the calls; the old mask is not asked for.
    if unsafe { libc::sigprocmask(libc::SIG_SETMASK, &raw const set, std::ptr::null_mut()) } < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above; -1 asks for a new descriptor.
    let number = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
    check(number as c_long)?;
    // SAFETY: the kernel just made this descriptor for us, and nobody else knows it.
    Ok((unsafe { OwnedFd::from_raw_fd(number) }, Ignored(ignored)))
}

/// The highest signal number.
pub const SIGNAL_MAX: c_int = 64;

/// Sends a signal to a process, or to a process group if the number is negative. kill(2)
pub fn kill(pid: i32, signal: c_int) -> Result<(), Errno> {
    // SAFETY: integers only.
    let result = unsafe { libc::kill(pid, signal) };
    if result < 0 { Err(last_errno()) } else { Ok(()) }
}

/// Reads at most `limit` bytes onto the end of `bytes`, within the capacity it has.
pub fn read_onto(from: BorrowedFd<'_>, bytes: &mut Vec<u8>, limit: usize) -> Result<usize, Errno> {
    let spare = bytes.spare_capacity_mut();
    let room = spare.len().min(limit);
    let (read, _) = rustix::io::read(from, &mut spare[..room])?;
    let length = read.len();
    // SAFETY: the kernel has initialised the first `length` bytes of the spare capacity; `length` is at most `room`.
    unsafe { bytes.set_len(bytes.len() + length) };
    Ok(length)
}

/// A call that waits for [`answer_call`].
pub struct HeldCall {
    id: u64,
    /// The thread that calls, by its number in init's namespace.
    pub thread: i32,
}

/// What becomes of a call that waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Allow,
    /// It fails with ENOBUFS.
    Refuse,
}

/// Makes calls that open netlink sockets wait until they are answered, in init (which makes none) and in everything
/// it starts from now on. Each call can be read from the descriptor that this returns. `None` if another filter
/// already holds calls (EBUSY): such calls fail then.
pub fn hold_netlink_calls() -> io::Result<Option<OwnedFd>> {
    let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
    match filter_netlink(libc::SECCOMP_RET_USER_NOTIF, flags) {
        // SAFETY: the kernel just made this descriptor for us, close-on-exec, and nobody else knows it.
        Ok(number) => Ok(Some(unsafe { OwnedFd::from_raw_fd(number as RawFd) })),
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            filter_netlink(libc::SECCOMP_RET_ERRNO | libc::EPROTONOSUPPORT as u32, 0)?;
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// Installs a filter that answers `socket(AF_NETLINK, …)` with `action`.
fn filter_netlink(action: u32, flags: libc::c_ulong) -> io::Result<c_long> {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    /// Of `seccomp_data`: the call's number, and the low half of its first argument, of which the kernel uses no more.
    const NUMBER: u32 = 0;
    const FAMILY: u32 = if cfg!(target_endian = "little") { 16 } else { 20 };
    let step = |code, jt, jf, k| libc::sock_filter { code, jt, jf, k };
    let mut program = [
        step(LOAD, 0, 0, NUMBER),
        step(JUMP_IF_EQUAL, 0, 3, libc::SYS_socket as u32),
        step(LOAD, 0, 0, FAMILY),
        step(JUMP_IF_EQUAL, 0, 1, libc::AF_NETLINK as u32),
        step(RETURN, 0, 0, action),
        step(RETURN, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: the kernel copies the program during the call; pointer and length describe the array above, which lives until then.
    let result =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, &raw const program) };
    check(result)
}

/// The next call that waits. Blocks if there is none; fails if its caller has gone.
pub fn next_call(calls: BorrowedFd<'_>) -> io::Result<HeldCall> {
    // SAFETY: plain integers, and the kernel wants them zero.
    let mut call: libc::seccomp_notif = unsafe { MaybeUninit::zeroed().assume_init() };
    // SAFETY: the kernel writes one structure of the size that the request's number carries, into a place of that type.
    let result =
        unsafe { libc::ioctl(calls.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_RECV as _, &raw mut call) };
    check(c_long::from(result))?;
    Ok(HeldCall { id: call.id, thread: call.pid as i32 })
}

/// Lets a call go on, or fail. An error means that its caller has gone.
pub fn answer_call(calls: BorrowedFd<'_>, call: &HeldCall, verdict: Verdict) -> io::Result<()> {
    let (error, flags) = match verdict {
        // The arguments that the filter saw are in registers, which nobody can change before the call is made.
        Verdict::Allow => (0, libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as u32),
        Verdict::Refuse => (-libc::ENOBUFS, 0),
    };
    let mut answer = libc::seccomp_notif_resp { id: call.id, val: 0, error, flags };
    // SAFETY: the kernel reads one structure of the size that the request's number carries, from a place of that type.
    let result =
        unsafe { libc::ioctl(calls.as_raw_fd(), libc::SECCOMP_IOCTL_NOTIF_SEND as _, &raw mut answer) };
    check(c_long::from(result)).map(drop)
}

/// Makes the allocator return memory instead of keeping it: buffers are mapped separately and unmapped when freed.
pub fn prefer_small_memory() {
    /// Just below a stream's chunk with the allocator's own header. Setting it also stops glibc from raising it.
    const MAP_FROM: c_int = 32 * 1024;
    // SAFETY: integers only; called before there is any other thread, as there never is.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAP_FROM);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAP_FROM);
    }
}

/// Returns the allocator's free memory to the kernel.
pub fn trim_memory() {
    // SAFETY: takes an integer; only touches memory that the allocator itself knows to be free.
    unsafe { libc::malloc_trim(0) };
}

/// Calls the kernel and not the C library, which refuses to change the two signals that it reserves for itself: they
/// may have been inherited as ignored, and a command expects the default.
fn set_disposition(signal: c_int, disposition: libc::sighandler_t) {
    /// The kernel's structure on x86-64 and aarch64: a handler, flags, a restorer and a mask.
    #[repr(C)]
    struct Action {
        handler: libc::sighandler_t,
        flags: u64,
        restorer: usize,
        mask: u64,
    }
    let action = Action { handler: disposition, flags: 0, restorer: 0, mask: 0 };
    let nothing = std::ptr::null_mut::<Action>();
    // SAFETY: the kernel reads `action`, which lives until the call is over, and gets the size of its mask. SIG_IGN and SIG_DFL
    // are the only dispositions given, so no code is ever called from a signal and no restorer is needed. For SIGKILL and
    // SIGSTOP it fails, which is what we want of it.
    unsafe { libc::syscall(libc::SYS_rt_sigaction, signal, &raw const action, nothing, size_of::<u64>()) };
}

fn signal_set(signals: &[c_int]) -> libc::sigset_t {
    let mut set = MaybeUninit::uninit();
    // SAFETY: sigemptyset initialises the set; sigaddset is given valid signal numbers and that set.
    unsafe {
        libc::sigemptyset(set.as_mut_ptr());
        for signal in signals {
            libc::sigaddset(set.as_mut_ptr(), *signal);
        }
        set.assume_init()
    }
}

fn check(result: c_long) -> io::Result<c_long> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

fn last_errno() -> Errno {
    // SAFETY: the address of this thread's errno, which lives as long as the thread.
    Errno::from_raw_os_error(unsafe { *libc::__errno_location() })
}
