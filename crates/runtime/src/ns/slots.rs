//! What can be made ahead of a sandbox, for one range of host ids: its user namespace and its network namespace.
//!
//! Both are made and owned by the launcher's side. Were the guest to own its network namespace, it could change the rules
//! in it; a guest that owned its mount namespace could remount with `dev`. The user
//! namespace is created *under the base id of the range*: created by root, its inotify instances and other
//! per-user counts would be charged to root, and one sandbox could use up what all others need.

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::mount::MountAttrFlags;
use rustix::process::{Pid, WaitOptions, waitpid};
use rustix::thread::{UnshareFlags, set_thread_groups, set_thread_res_gid, set_thread_res_uid};

use crate::ns::enter;
use crate::sys::{self, Cloned, mounts};

/// How many ids a sandbox has, from 0 up, as on a machine of its own.
pub const IDS: u32 = 65_536;

/// Namespaces that are ready to be entered.
pub struct Slot {
    /// Maps 0 to 65,535 onto the range.
    pub user: OwnedFd,
    /// Loopback only.
    pub net: OwnedFd,
}

/// Limits of zero inside the user namespace: no process in it can create another namespace of these kinds, with any
/// call.
const NAMESPACE_LIMITS: [&str; 7] = [
    "max_user_namespaces",
    "max_mnt_namespaces",
    "max_pid_namespaces",
    "max_net_namespaces",
    "max_ipc_namespaces",
    "max_uts_namespaces",
    "max_cgroup_namespaces",
];

/// Makes both namespaces. Changes the network namespace of the caller, so it is called in a child of the launcher.
pub fn make(base: u32) -> Result<Slot, SlotError> {
    sys::unshare(UnshareFlags::NEWNET).map_err(|e| error("make a network namespace", e))?;
    sys::loopback_up().map_err(|e| error("bring loopback up", e))?;
    let settings = Settings::open().map_err(|e| error("see the kernel's settings", e))?;
    // Guest root does not own the namespace, so it has no right to low ports there; give them to everyone in it. The ping
    // sockets stay closed: the kernel charges what waits in them to no cgroup, and there is nobody to ping.
    settings
        .write("net/ipv4/ip_unprivileged_port_start", "0")
        .map_err(|e| error("open low ports in the network namespace", e))?;
    let net = open("/proc/self/ns/net").map_err(|e| error("open the network namespace", e))?;
    Ok(Slot { user: make_user_namespace(base, &settings)?, net })
}

/// The user namespace alone.
pub(crate) fn user_namespace(base: u32) -> Result<OwnedFd, SlotError> {
    let settings = Settings::open().map_err(|e| error("see the kernel's settings", e))?;
    make_user_namespace(base, &settings)
}

fn make_user_namespace(base: u32, settings: &Settings) -> Result<OwnedFd, SlotError> {
    let (mut ready_in, mut ready_out) = io::pipe().map_err(|e| error("make a pipe", e))?;
    let (mut mapped_in, mut mapped_out) = io::pipe().map_err(|e| error("make a pipe", e))?;
    let holder = match sys::fork_process().map_err(|e| error("fork", e))? {
        Cloned::Parent { pid } => Pid::from_raw(pid as i32).expect("a child has a positive pid"),
        Cloned::Child => {
            drop((ready_in, mapped_out));
            sys::exit_now(match hold(base, settings, &mut ready_out, &mut mapped_in) {
                Ok(()) => 0,
                Err(e) => e.raw_os_error().unwrap_or(libc::EIO),
            })
        }
    };
    drop((ready_out, mapped_in));
    // An early end of the child shows as the end of its pipe, here or as its exit code below.
    let made = ready_in.read_exact(&mut [0]).map_err(|e| error("make a user namespace", e)).and_then(|()| {
        let proc = format!("/proc/{}", holder.as_raw_nonzero());
        let map = format!("0 {base} {IDS}");
        let user = open(&format!("{proc}/ns/user")).map_err(|e| error("open the user namespace", e))?;
        for file in ["uid_map", "gid_map"] {
            std::fs::write(format!("{proc}/{file}"), &map).map_err(|e| error("map ids", e))?;
        }
        mapped_out.write_all(&[1]).map_err(|e| error("tell that ids are mapped", e))?;
        Ok(user)
    });
    drop(mapped_out);
    let status = waitpid(Some(holder), WaitOptions::empty()).map_err(|e| error("wait", e))?;
    let code = status.and_then(|(_, status)| status.exit_status()).unwrap_or(libc::EIO);
    match (made, code) {
        (made, 0) => made,
        (_, errno) => Err(error("limit the user namespace", io::Error::from_raw_os_error(errno))),
    }
}

/// In the child: becomes the range's first id, makes the namespace, and sets its limits once ids are mapped.
fn hold(base: u32, settings: &Settings, ready: &mut impl Write, mapped: &mut impl Read) -> io::Result<()> {
    let (uid, gid) = (rustix::process::Uid::from_raw(base), rustix::process::Gid::from_raw(base));
    set_thread_groups(&[])?;
    set_thread_res_gid(gid, gid, gid)?;
    set_thread_res_uid(uid, uid, uid)?;
    sys::unshare(UnshareFlags::NEWUSER)?;
    ready.write_all(&[1])?;
    mapped.read_exact(&mut [0])?;
    for limit in NAMESPACE_LIMITS {
        settings.write(&format!("user/{limit}"), "0")?;
    }
    Ok(())
}

/// The kernel's settings, seen through a `/proc` of their own. In one that is shared, the settings of all namespaces hang in one
/// list for each name, and every look-up would walk past those of all other sandboxes.
struct Settings {
    proc: OwnedFd,
}

impl Settings {
    fn open() -> io::Result<Self> {
        Ok(Self { proc: mounts::mount("proc", &[], MountAttrFlags::MOUNT_ATTR_NOSUID)? })
    }

    /// Changes a setting of the namespaces that the caller is in.
    fn write(&self, name: &str, value: &str) -> io::Result<()> {
        enter::write_setting(&self.proc, name, value)
    }
}

fn open(path: &str) -> io::Result<OwnedFd> {
    Ok(openat(CWD, path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A slot that could not be made.
#[derive(Debug, thiserror::Error)]
#[error("cannot {doing}")]
pub struct SlotError {
    /// As it reads after "cannot".
    pub doing: &'static str,
    /// What the kernel said.
    pub source: io::Error,
}

fn error(doing: &'static str, source: impl Into<io::Error>) -> SlotError {
    SlotError { doing, source: source.into() }
}
