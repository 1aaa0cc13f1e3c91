//! The btrfs requests that no safe crate offers: subvolumes, snapshots, quotas (linux/btrfs.h).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use super::check;

const MAGIC: u64 = 0x94;
/// linux/ioctl.h: the kernel reads what is passed.
const WRITE: u64 = 1;
/// linux/ioctl.h: the kernel fills what is passed.
const READ: u64 = 2;
/// The root directory of every subvolume.
const FIRST_FREE_OBJECT: u64 = 256;
/// Marks that `max_rfer` of a limit is set.
const LIMIT_REFERENCED: u64 = 1;
/// Makes a snapshot read-only.
const READ_ONLY: u64 = 2;
/// This value means no limit.
const NO_LIMIT: u64 = u64::MAX;

const fn request<T>(direction: u64, number: u64) -> u64 {
    direction << 30 | (size_of::<T>() as u64) << 16 | MAGIC << 8 | number
}

/// `struct btrfs_ioctl_vol_args`
#[repr(C)]
struct Named {
    fd: i64,
    name: [u8; 4088],
}

/// `struct btrfs_ioctl_vol_args_v2`
#[repr(C)]
struct NamedMore {
    fd: i64,
    transaction: u64,
    flags: u64,
    unused: [u64; 4],
    name: [u8; 4040],
}

/// `struct btrfs_ioctl_ino_lookup_args`
#[repr(C)]
struct Lookup {
    tree: u64,
    object: u64,
    name: [u8; 4080],
}

/// `struct btrfs_ioctl_fs_info_args`
#[repr(C)]
struct Info {
    devices_max: u64,
    devices: u64,
    id: [u8; 16],
    rest: [u8; 992],
}

/// `struct btrfs_ioctl_get_subvol_info_args`
#[repr(C)]
struct SubvolumeInfo {
    tree: u64,
    name: [u8; 256],
    parent: u64,
    directory: u64,
    generation: u64,
    flags: u64,
    ids: [[u8; 16]; 3],
    changed: u64,
    transactions: [u64; 3],
    times: [u64; 8],
    reserved: [u64; 8],
}

/// `struct btrfs_ioctl_quota_ctl_args`
#[repr(C)]
struct QuotaControl {
    command: u64,
    status: u64,
}

/// `struct btrfs_ioctl_qgroup_limit_args`
#[repr(C)]
struct QuotaLimit {
    group: u64,
    flags: u64,
    referenced_max: u64,
    exclusive_max: u64,
    referenced_reserved: u64,
    exclusive_reserved: u64,
}

const _: () = assert!(size_of::<Named>() == 4096 && size_of::<NamedMore>() == 4096);
const _: () = assert!(size_of::<Lookup>() == 4096 && size_of::<Info>() == 1024);
const _: () = assert!(size_of::<SubvolumeInfo>() == 504);
const _: () = assert!(size_of::<QuotaControl>() == 16 && size_of::<QuotaLimit>() == 48);

const RESIZE: u64 = request::<Named>(WRITE, 3);
const SUBVOLUME_CREATE: u64 = request::<Named>(WRITE, 14);
const SUBVOLUME_DESTROY: u64 = request::<Named>(WRITE, 15);
const LOOKUP: u64 = request::<Lookup>(READ | WRITE, 18);
const START_SYNC: u64 = request::<u64>(READ, 24);
const SNAPSHOT_CREATE: u64 = request::<NamedMore>(WRITE, 23);
const INFO: u64 = request::<Info>(READ, 31);
const SUBVOLUME_INFO: u64 = request::<SubvolumeInfo>(READ, 60);
const QUOTA_CONTROL: u64 = request::<QuotaControl>(READ | WRITE, 40);
const QUOTA_LIMIT: u64 = request::<QuotaLimit>(READ, 43);

/// A kind of quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quota {
    /// An extent counts for the subvolume that first wrote it. Costs almost nothing. Linux 6.7.
    Simple,
    /// A shared extent counts for every subvolume that shares it. Costs more with every snapshot.
    Full,
}

/// # Safety
///
/// `T` must be laid out as the kernel's structure of this request; `request` carries its size.
unsafe fn ask<T>(file: BorrowedFd<'_>, request: u64, argument: &mut T) -> io::Result<()> {
    // SAFETY: by the contract of this function; the kernel reads and writes within the structure, which outlives the call.
    check(unsafe { libc::c_long::from(libc::ioctl(file.as_raw_fd(), request, &raw mut *argument)) })
}

fn named<const N: usize>(name: &str) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    // One byte stays zero, which ends the name.
    if name.len() >= N || name.contains(['\0', '/']) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    Ok(bytes)
}

/// Makes an empty subvolume in a directory.
pub fn create_subvolume(parent: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut argument = Named { fd: 0, name: named(name)? };
    // SAFETY: `Named` is btrfs_ioctl_vol_args, as BTRFS_IOC_SUBVOL_CREATE takes it; the name ends with a zero.
    unsafe { ask(parent, SUBVOLUME_CREATE, &mut argument) }
}

/// Whether files of a snapshot can change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Snapshot {
    /// They can.
    Writable,
    /// They cannot, by anyone.
    ReadOnly,
}

/// Creates a snapshot of `of`. The kernel first writes back what is pending in `of`.
pub fn create_snapshot(
    parent: BorrowedFd<'_>,
    name: &str,
    of: BorrowedFd<'_>,
    kind: Snapshot,
) -> io::Result<()> {
    let fd = i64::from(of.as_raw_fd());
    let flags = match kind {
        Snapshot::Writable => 0,
        Snapshot::ReadOnly => READ_ONLY,
    };
    let mut argument = NamedMore { fd, transaction: 0, flags, unused: [0; 4], name: named(name)? };
    // SAFETY: `NamedMore` is btrfs_ioctl_vol_args_v2, as BTRFS_IOC_SNAP_CREATE_V2 takes it, without flags that would make the
    // kernel read a pointer from it; the name ends with a zero, and `of` is open for all of the call.
    unsafe { ask(parent, SNAPSHOT_CREATE, &mut argument) }
}

/// Removes a subvolume with everything in it. The kernel frees its space in the background.
pub fn destroy_subvolume(parent: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut argument = Named { fd: 0, name: named(name)? };
    // SAFETY: `Named` is btrfs_ioctl_vol_args, as BTRFS_IOC_SNAP_DESTROY takes it; the name ends with a zero.
    unsafe { ask(parent, SUBVOLUME_DESTROY, &mut argument) }
}

/// Starts a commit and does not wait for it. The commit frees subvolumes that were removed; otherwise the kernel would do so only at
/// its next regular commit, up to half a minute later.
pub fn begin_sync(file: BorrowedFd<'_>) -> io::Result<()> {
    let mut transaction = 0u64;
    // SAFETY: BTRFS_IOC_START_SYNC fills one integer of 64 bits.
    unsafe { ask(file, START_SYNC, &mut transaction) }
}

/// The number of the subvolume that a file or directory is in. Fails on other file systems.
pub fn subvolume_number(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut argument = Lookup { tree: 0, object: FIRST_FREE_OBJECT, name: [0; 4080] };
    // SAFETY: `Lookup` is btrfs_ioctl_ino_lookup_args, as BTRFS_IOC_INO_LOOKUP takes and fills it.
    unsafe { ask(file, LOOKUP, &mut argument)? };
    Ok(argument.tree)
}

/// The number of the transaction that last changed the subvolume that a file or directory is in. It grows with the change
/// itself, before the change is on disk. Fails on other file systems.
pub fn last_change(file: BorrowedFd<'_>) -> io::Result<u64> {
    let mut argument = SubvolumeInfo {
        tree: 0,
        name: [0; 256],
        parent: 0,
        directory: 0,
        generation: 0,
        flags: 0,
        ids: [[0; 16]; 3],
        changed: 0,
        transactions: [0; 3],
        times: [0; 8],
        reserved: [0; 8],
    };
    // SAFETY: `SubvolumeInfo` is btrfs_ioctl_get_subvol_info_args, as BTRFS_IOC_GET_SUBVOL_INFO fills it.
    unsafe { ask(file, SUBVOLUME_INFO, &mut argument)? };
    Ok(argument.changed)
}

/// The id of the file system, as sysfs writes it. Fails on other file systems.
pub fn file_system_id(file: BorrowedFd<'_>) -> io::Result<String> {
    let mut argument = Info { devices_max: 0, devices: 0, id: [0; 16], rest: [0; 992] };
    // SAFETY: `Info` is btrfs_ioctl_fs_info_args in its size, as BTRFS_IOC_FS_INFO fills it; without flags in `rest`, it asks for
    // nothing beyond the fields that were always there.
    unsafe { ask(file, INFO, &mut argument)? };
    let hex: String = argument.id.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

/// Grows the file system to the size of its device.
pub fn resize_to_device(file: BorrowedFd<'_>) -> io::Result<()> {
    let mut argument = Named { fd: 0, name: named("max")? };
    // SAFETY: `Named` is btrfs_ioctl_vol_args, as BTRFS_IOC_RESIZE takes it; the text ends with a zero.
    unsafe { ask(file, RESIZE, &mut argument) }
}

/// Enables quotas. No effect if they are enabled already.
pub fn enable_quota(file: BorrowedFd<'_>, quota: Quota) -> io::Result<()> {
    let command = match quota {
        Quota::Full => 1,
        Quota::Simple => 4,
    };
    let mut argument = QuotaControl { command, status: 0 };
    // SAFETY: `QuotaControl` is btrfs_ioctl_quota_ctl_args, as BTRFS_IOC_QUOTA_CTL takes and fills it.
    unsafe { ask(file, QUOTA_CONTROL, &mut argument) }
}

/// Limits the size of a subvolume. Writes beyond it fail with EDQUOT.
pub fn limit_subvolume(file: BorrowedFd<'_>, number: u64, bytes: Option<u64>) -> io::Result<()> {
    let mut argument = QuotaLimit {
        group: number,
        flags: LIMIT_REFERENCED,
        referenced_max: bytes.unwrap_or(NO_LIMIT),
        exclusive_max: 0,
        referenced_reserved: 0,
        exclusive_reserved: 0,
    };
    // SAFETY: `QuotaLimit` is btrfs_ioctl_qgroup_limit_args, as BTRFS_IOC_QGROUP_LIMIT takes it.
    unsafe { ask(file, QUOTA_LIMIT, &mut argument) }
}
