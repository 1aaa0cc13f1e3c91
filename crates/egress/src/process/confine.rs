//! What egress gives up before it reads the first byte from a sandbox: root, capabilities, new privileges, core dumps
//! and tracing, and every system call that it does not need.

use std::collections::BTreeMap;
use std::io;

use libc::c_long;
use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, set_dumpable_behavior, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, Gid, Uid, set_capabilities, set_no_new_privs, set_thread_groups,
    set_thread_res_gid, set_thread_res_uid,
};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch,
};

use crate::control::Identity;

/// The calls that the runtime, TLS, DNS and the spool use. All others fail with EPERM: no program can be executed, no
/// process created, nothing traced or mounted.
const ALLOWED: &[c_long] = &[
    // Files: the spool and the authority.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_lseek,
    libc::SYS_openat,
    libc::SYS_close,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_getdents64,
    libc::SYS_unlinkat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_ftruncate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_flock,
    libc::SYS_fcntl,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_memfd_create,
    libc::SYS_readlinkat,
    // Memory and threads.
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mprotect,
    libc::SYS_mremap,
    libc::SYS_madvise,
    libc::SYS_membarrier,
    libc::SYS_futex,
    libc::SYS_clone3,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_prctl,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_tgkill,
    libc::SYS_prlimit64,
    libc::SYS_getrandom,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    // Signals and time.
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    // Waiting.
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
    libc::SYS_eventfd2,
    libc::SYS_ppoll,
    libc::SYS_pipe2,
    // Sockets; for the allowed families, see below.
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_setsockopt,
    libc::SYS_sendto,
    libc::SYS_recvfrom,
    libc::SYS_sendmsg,
    libc::SYS_recvmsg,
    libc::SYS_shutdown,
];

/// Calls that only this architecture has besides their newer forms.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[c_long] = &[
    libc::SYS_epoll_wait,
    libc::SYS_poll,
    libc::SYS_unlink,
    libc::SYS_rename,
    libc::SYS_readlink,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_time,
];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[c_long] = &[];

/// FIONBIO and FIOCLEX: the only allowed uses of `ioctl`.
const IOCTLS: [u64; 2] = [0x5421, 0x5451];

/// Why egress could not be confined. It does not start then.
#[derive(Debug, thiserror::Error)]
pub enum ConfineError {
    /// A system call.
    #[error("cannot {doing}")]
    Call {
        /// What for.
        doing: &'static str,
        /// Why.
        source: io::Error,
    },
    /// The filter does not compile.
    #[error("cannot build the filter of system calls")]
    Filter(#[from] seccompiler::BackendError),
    /// The kernel rejects the filter.
    #[error("cannot install the filter of system calls")]
    Install(#[from] seccompiler::Error),
}

fn cannot(doing: &'static str) -> impl FnOnce(rustix::io::Errno) -> ConfineError {
    move |e| ConfineError::Call { doing, source: e.into() }
}

/// Switches to another user permanently. Call while there is one thread.
pub fn become_identity(identity: Identity) -> Result<(), ConfineError> {
    let (uid, gid) = (Uid::from_raw(identity.uid), Gid::from_raw(identity.gid));
    set_thread_groups(&[]).map_err(cannot("leave all groups"))?;
    set_thread_res_gid(gid, gid, gid).map_err(cannot("change the group"))?;
    set_thread_res_uid(uid, uid, uid).map_err(cannot("change the user"))
}

/// Gives up everything else. Call while there is one thread; threads that are created later inherit it.
pub fn confine() -> Result<(), ConfineError> {
    let nothing = CapabilitySets {
        effective: CapabilitySet::empty(),
        permitted: CapabilitySet::empty(),
        inheritable: CapabilitySet::empty(),
    };
    set_capabilities(None, nothing).map_err(cannot("give up capabilities"))?;
    set_no_new_privs(true).map_err(cannot("give up new privileges"))?;
    // Other processes of the same user cannot read the authority's key from memory.
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(cannot("forbid core dumps and tracing"))?;
    seccompiler::apply_filter(&no_clone3()?)?;
    seccompiler::apply_filter(&allow_list()?)?;
    Ok(())
}

/// Raises the limit of descriptors to the system's maximum: a connection needs two.
pub fn raise_descriptor_limit() -> Result<(), ConfineError> {
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum })
        .map_err(cannot("raise the limit on descriptors"))
}

fn arch() -> Result<TargetArch, seccompiler::BackendError> {
    TargetArch::try_from(std::env::consts::ARCH)
}

/// A filter cannot check the flags of clone3. Without it libc uses clone, whose flags can be checked.
fn no_clone3() -> Result<BpfProgram, seccompiler::BackendError> {
    let rules = BTreeMap::from([(libc::SYS_clone3, vec![])]);
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(libc::ENOSYS as u32), arch()?)?
        .try_into()
}

fn allow_list() -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        ALLOWED.iter().chain(ALLOWED_HERE).map(|call| (*call, vec![])).collect();
    let only = |argument, operator, value| {
        SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value)?])
    };
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![only(0, SeccompCmpOp::MaskedEq(thread), thread)?]);
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    let sockets =
        families.iter().map(|family| only(0, SeccompCmpOp::Eq, *family as u64)).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_socket, sockets);
    rules.insert(libc::SYS_socketpair, vec![only(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?]);
    let ioctls =
        IOCTLS.iter().map(|request| only(1, SeccompCmpOp::Eq, *request)).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_ioctl, ioctls);
    SeccompFilter::new(rules, SeccompAction::Errno(libc::EPERM as u32), SeccompAction::Allow, arch()?)?
        .try_into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_filters_compile() {
        no_clone3().expect("a filter");
        allow_list().expect("a filter");
    }
}
