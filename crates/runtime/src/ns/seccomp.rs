//! Which system calls a guest may make.
//!
//! This is a list of denied calls, not of allowed ones: builds, debuggers and language runtimes use nearly all of the
//! kernel, and the namespaces are the walls. The list closes what the walls do not cover (subsystems that are not
//! namespaced, or that had the most holes) and returns the errors that libraries can handle. Calls newer than
//! `NEWEST_KNOWN` do not exist for a guest, so a new kernel opens nothing by itself.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
    TargetArch, sock_filter,
};

/// file_setattr(2), Linux 6.17: the last call that was reviewed for this list.
const NEWEST_KNOWN: u32 = 469;
/// Linux 6.15, newer than libc's list.
const OPEN_TREE_ATTR: c_long = 467;
/// Calls of the x32 ABI have this bit, and the same architecture as ours: a filter that forgets it can be bypassed.
const X32_BIT: u32 = 0x4000_0000;

/// Namespaces that a guest may not create. (clone3 hides its flags from filters; there the user namespace's own
/// limits of zero deny it, see `slot`.)
const NAMESPACE_FLAGS: [i32; 7] = [
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWNS,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWCGROUP,
];

/// Denied with EPERM, as for a process without the privilege.
const FORBIDDEN: &[c_long] = &[
    // Mounts and namespaces. The guest owns neither, so this is a second defence.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    OPEN_TREE_ATTR,
    libc::SYS_setns,
    // The kernel itself.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_vhangup,
    // The machine's clock.
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_adjtimex,
    libc::SYS_clock_adjtime,
    // Not namespaced: one sandbox could find what another puts there.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    // Large attack surfaces with a history, which agents do not need.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_fanotify_init,
    libc::SYS_open_by_handle_at,
    libc::SYS_kcmp,
];

/// Denied with ENOSYS: libraries try these first and fall back.
const MISSING: &[c_long] = &[
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_uselib,
    libc::SYS_ustat,
    libc::SYS_sysfs,
    libc::SYS__sysctl,
    libc::SYS_nfsservctl,
    libc::SYS_lookup_dcookie,
    libc::SYS_memfd_secret,
    // The kernel has one limit on contexts for the whole machine; databases fall back where there are none.
    libc::SYS_io_setup,
    // As the requests in `flag_rules`.
    FILE_SETATTR,
];

/// file_setattr(2), Linux 6.17.
const FILE_SETATTR: i64 = 469;

/// The filters, compiled. Made once; every sandbox gets the same.
pub struct Filters(Vec<BpfProgram>);

impl Filters {
    /// Compiles the lists above.
    pub fn compile() -> Result<Self, seccompiler::BackendError> {
        let mut forbidden: BTreeMap<i64, Vec<SeccompRule>> =
            FORBIDDEN.iter().map(|call| (*call, vec![])).collect();
        forbidden.insert(libc::SYS_unshare, namespace_rules(0)?);
        forbidden.insert(libc::SYS_clone, namespace_rules(0)?);
        forbidden.insert(libc::SYS_socket, socket_rules()?);
        // The kernel creates both sockets of a pair before the family can refuse to pair them.
        forbidden.insert(libc::SYS_socketpair, socket_rules()?);
        forbidden.insert(libc::SYS_ioctl, btrfs_rules()?);
        let unsupported = BTreeMap::from([(libc::SYS_socket, vec![netlink_rule()?])]);
        let not_had = BTreeMap::from([(libc::SYS_ioctl, flag_rules()?)]);
        let kept = BTreeMap::from([
            (libc::SYS_setrlimit, vec![SeccompRule::new(vec![equals(0, RESOURCE_CORE)?])?]),
            (libc::SYS_prlimit64, vec![SeccompRule::new(vec![equals(1, RESOURCE_CORE)?, not_null(2)?])?]),
            (libc::SYS_setsockopt, buffer_rules()?),
        ]);
        let none_free = BTreeMap::from([
            (libc::SYS_memfd_create, vec![has_flag(1, libc::MFD_HUGETLB as u64)?]),
            (libc::SYS_mmap, vec![has_flag(3, libc::MAP_HUGETLB as u64)?]),
            (libc::SYS_shmget, vec![has_flag(2, libc::SHM_HUGETLB as u64)?]),
        ]);
        let missing = MISSING.iter().map(|call| (*call, vec![])).collect();
        Ok(Self(vec![
            unknown_calls(),
            filter(missing, libc::ENOSYS)?,
            filter(forbidden, libc::EPERM)?,
            filter(unsupported, libc::EPROTONOSUPPORT)?,
            filter(not_had, libc::ENOTTY)?,
            // Huge pages that the host reserved are the machine's, and no memory limit counts them. The error is that
            // of a machine without a free one, after which programs take ordinary pages.
            filter(none_free, libc::ENOMEM)?,
            // Reported as success and not done: programs that hold secrets exit when they cannot lower their core
            // dump limit, and servers exit when they cannot set their buffer sizes.
            filter(kept, 0)?,
        ]))
    }

    /// Installs the filters for this process and everything it starts. Also sets no_new_privs.
    pub fn apply(&self) -> Result<(), seccompiler::Error> {
        self.0.iter().try_for_each(|program| seccompiler::apply_filter(program))
    }
}

fn filter(
    rules: BTreeMap<i64, Vec<SeccompRule>>,
    errno: i32,
) -> Result<BpfProgram, seccompiler::BackendError> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(rules, SeccompAction::Allow, SeccompAction::Errno(errno as u32), arch)?.try_into()
}

/// The core dump limit cannot be changed: at 1 the kernel neither writes a file nor starts the host's handler, at 0
/// it would start the handler, outside of every limit of the sandbox (core(5)).
const RESOURCE_CORE: u64 = libc::RLIMIT_CORE as u64;

fn equals(argument: u8, value: u64) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value)
}

fn not_null(argument: u8) -> Result<SeccompCondition, seccompiler::BackendError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Ne, 0)
}

/// Any call whose argument `argument` has this flag.
fn has_flag(argument: u8, flag: u64) -> Result<SeccompRule, seccompiler::BackendError> {
    let has = SeccompCmpOp::MaskedEq(flag);
    SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, has, flag)?])
}

/// One rule per namespace: any of the flags in argument `argument` matches.
fn namespace_rules(argument: u8) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    NAMESPACE_FLAGS
        .iter()
        .map(|flag| {
            let flag = *flag as u32 as u64;
            let has = SeccompCmpOp::MaskedEq(flag);
            SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Qword, has, flag)?])
        })
        .collect()
}

/// Every address family but Unix, IPv4, IPv6 and netlink, which glibc uses to list interfaces. AF_VSOCK would lead to
/// the hypervisor; AF_PACKET, AF_ALG and the rest are attack surface without use here.
fn socket_rules() -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let between = |low: i32, high: i32| {
        let at_least = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Ge, low as u64)?;
        let at_most = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Le, high as u64)?;
        SeccompRule::new(vec![at_least, at_most])
    };
    let above = SeccompCondition::new(0, SeccompCmpArgLen::Dword, SeccompCmpOp::Gt, libc::AF_NETLINK as u64)?;
    Ok(vec![
        between(libc::AF_INET + 1, libc::AF_INET6 - 1)?,
        between(libc::AF_INET6 + 1, libc::AF_NETLINK - 1)?,
        SeccompRule::new(vec![above])?,
    ])
}

/// Every netlink protocol but NETLINK_ROUTE. The kernel charges data that waits in netlink sockets to no cgroup, and
/// the other protocols are useless without a network to administer. The error is that of a kernel without the
/// protocol: `useradd`, `su` and `sudo` exit on any other error from the audit system.
fn netlink_rule() -> Result<SeccompRule, seccompiler::BackendError> {
    let not_route =
        SeccompCondition::new(2, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, libc::NETLINK_ROUTE as u64)?;
    SeccompRule::new(vec![equals(0, libc::AF_NETLINK as u64)?, not_route])
}

/// Sizes of socket buffers. The kernel charges data that waits in netlink sockets to no cgroup, so every socket keeps
/// the default size, which is a small part of the largest one; TCP adjusts its own sizes. The variants that may
/// exceed the largest size need CAP_NET_ADMIN in the network namespace, which no guest has.
fn buffer_rules() -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let rule =
        |option: i32| SeccompRule::new(vec![equals(1, libc::SOL_SOCKET as u64)?, equals(2, option as u64)?]);
    Ok(vec![rule(libc::SO_SNDBUF)?, rule(libc::SO_RCVBUF)?])
}

/// FS_IOC_SETFLAGS, its 32-bit form and FS_IOC_FSSETXATTR (linux/fs.h), which set the flags of a file. One of them makes
/// btrfs compress the file, in threads of the kernel that no cgroup limits. The error is that of a file system without
/// flags.
fn flag_rules() -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    [0x4008_6602, 0x4004_6602, 0x401c_5820]
        .into_iter()
        .map(|request| SeccompRule::new(vec![equals(1, request)?]))
        .collect()
}

/// Every request of btrfs but those for sharing blocks between files, which other file systems have too. A volume may
/// be on btrfs, where any user may create subvolumes, which would escape the volume's size and could not be removed
/// like directories.
fn btrfs_rules() -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    const OF_BTRFS: u64 = 0x94 << 8;
    // FICLONE, FICLONERANGE and FIDEDUPERANGE (linux/fs.h).
    const SHARING: [u64; 3] = [0x4004_9409, 0x4020_940d, 0xc018_9436];
    let kind = SeccompCmpOp::MaskedEq(0xff00);
    let mut conditions = vec![SeccompCondition::new(1, SeccompCmpArgLen::Dword, kind, OF_BTRFS)?];
    for request in SHARING {
        conditions.push(SeccompCondition::new(1, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, request)?);
    }
    Ok(vec![SeccompRule::new(conditions)?])
}

/// ENOSYS for calls that this build does not know and for the x32 ABI. Written by hand, since seccompiler compares
/// arguments by size but call numbers only for equality.
fn unknown_calls() -> BpfProgram {
    const LOAD_CALL_NUMBER: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_GREATER: u16 = (libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    const { assert!(X32_BIT > NEWEST_KNOWN, "one comparison covers both") };
    vec![
        sock_filter { code: LOAD_CALL_NUMBER, jt: 0, jf: 0, k: 0 },
        sock_filter { code: JUMP_IF_GREATER, jt: 0, jf: 1, k: NEWEST_KNOWN },
        sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32 },
        sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lists_compile_and_do_not_overlap() {
        assert!(Filters::compile().is_ok());
        for call in FORBIDDEN {
            assert!(!MISSING.contains(call), "call {call} has two errors");
        }
    }
}
