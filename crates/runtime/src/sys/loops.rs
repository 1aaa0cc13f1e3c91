//! Loop devices: files as disks (linux/loop.h).

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd};

use libc::c_long;

use super::check;

const SET_CAPACITY: u64 = 0x4C07;
const GET_STATUS: u64 = 0x4C05;
const CONFIGURE: u64 = 0x4C0A;
const GET_FREE: u64 = 0x4C82;
/// The kernel detaches the file once the device is neither open nor mounted.
const AUTOCLEAR: u32 = 4;
/// Direct I/O: the file system on the device has its own page cache.
const DIRECT_IO: u32 = 16;
/// The block size of btrfs, which direct access to a file supports on any disk.
const BLOCK_BYTES: u32 = 4096;

/// `struct loop_info64`
#[repr(C)]
#[derive(Clone, Copy)]
struct Status {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

/// `struct loop_config`
#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Status,
    reserved: [u64; 8],
}

const _: () = assert!(size_of::<Status>() == 232 && size_of::<Config>() == 304);

const EMPTY: Status = Status {
    device: 0,
    inode: 0,
    rdevice: 0,
    offset: 0,
    size_limit: 0,
    number: 0,
    encrypt_type: 0,
    encrypt_key_size: 0,
    flags: 0,
    file_name: [0; 64],
    crypt_name: [0; 64],
    encrypt_key: [0; 32],
    init: [0; 2],
};

/// The number of a free device. Another process may take it first.
pub fn free_number(control: BorrowedFd<'_>) -> io::Result<u32> {
    // SAFETY: no memory is passed.
    let number = unsafe { libc::ioctl(control.as_raw_fd(), GET_FREE) };
    u32::try_from(number).map_err(|_| io::Error::last_os_error())
}

/// Attaches a file to a device. The device keeps this descriptor, with any lock on it, until the kernel detaches the file with its
/// last user. LOOP_CONFIGURE, Linux 5.8.
pub fn attach(device: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<()> {
    let mut config = Config {
        fd: file.as_raw_fd() as u32,
        block_size: BLOCK_BYTES,
        info: Status { flags: AUTOCLEAR | DIRECT_IO, ..EMPTY },
        reserved: [0; 8],
    };
    // SAFETY: `Config` is a whole loop_config, which the kernel reads; `file` is open for all of the call, and the kernel takes a
    // reference of its own.
    check(c_long::from(unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw mut config) }))
}

/// The device number and the inode of the file behind a device; `None` if there is none.
pub fn file_behind(device: BorrowedFd<'_>) -> io::Result<Option<(u64, u64)>> {
    let mut status = EMPTY;
    // SAFETY: `Status` is a whole loop_info64, which the kernel fills.
    match check(c_long::from(unsafe { libc::ioctl(device.as_raw_fd(), GET_STATUS, &raw mut status) })) {
        Ok(()) => Ok(Some((status.device, status.inode))),
        Err(e) if e.raw_os_error() == Some(libc::ENXIO) => Ok(None),
        Err(e) => Err(e),
    }
}

/// Makes the device adopt the new size of its file.
pub fn take_new_size(device: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: no memory is passed.
    check(c_long::from(unsafe { libc::ioctl(device.as_raw_fd(), SET_CAPACITY, 0) }))
}
