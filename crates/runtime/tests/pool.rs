//! Storage pools of kind `loop`, made without any program of the host. Needs root, btrfs in the kernel and loop devices.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags, flock, openat};
use shoal_runtime::StoreConfig;
use shoal_runtime::storage::pool::{IMAGE, StoragePool};
use shoal_runtime::sys::btrfs;
use wire::launch::{STORE_BYTES_MIN, StoreKind, StoreWish};
use wire::{SandboxId, VolumeId};

/// The kernel needs milliseconds to unmount a pool.
const DEADLINE: Duration = Duration::from_secs(20);
/// The checker of btrfs-progs, which `cargo xtask test` installs.
const CHECKER: &str = "/usr/bin/btrfs";

fn random() -> u128 {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).expect("the kernel has random bits");
    u128::from_le_bytes(bits)
}

fn open(data: &Path) -> StoragePool {
    let config = StoreConfig { wish: StoreWish::Just(StoreKind::Loop), size_bytes: Some(STORE_BYTES_MIN) };
    StoragePool::open(data, &config).expect("a pool can be opened, and the test runs as root")
}

fn write(dir: &OwnedFd, name: &str, bytes: &[u8]) -> std::io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::CLOEXEC;
    let mut file = File::from(openat(dir, name, flags, Mode::from_raw_mode(0o600))?);
    file.write_all(bytes)?;
    file.sync_all()
}

fn read(dir: &OwnedFd, name: &str) -> Vec<u8> {
    let file = openat(dir, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).expect("it is there");
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut File::from(file), &mut bytes).expect("it can be read");
    bytes
}

/// Closes a pool, and waits until the kernel has unmounted it and detached its device, which holds the lock on the file.
fn close(pool: StoragePool, data: &Path) {
    drop(pool);
    let file = File::open(data.join(IMAGE)).expect("the file is there");
    let deadline = Instant::now() + DEADLINE;
    while flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        assert!(Instant::now() < deadline, "the pool is still mounted");
        std::thread::yield_now();
    }
}

/// The id that sysfs knows the file system by, and a directory of the pool.
fn id_of(files: &OwnedFd) -> String {
    btrfs::file_system_id(files.as_fd()).expect("it is a btrfs")
}

#[test]
fn two_pools_are_mounted_at_once_and_hold_limits_and_snapshots() {
    // On a disk: a loop device with direct access cannot be had on every tmpfs.
    let home = tempfile::tempdir_in("/var/tmp").expect("a temporary directory");
    let places = ["one", "other"].map(|name| home.path().join(name));
    let sandbox = SandboxId::from_random(random());
    let (volume, copy) = (VolumeId::from_random(random()), VolumeId::from_random(random()));
    let pools = places.each_ref().map(|data| {
        fs::create_dir(data).expect("a directory");
        open(data)
    });
    let mut ids = Vec::new();
    for (number, pool) in pools.iter().enumerate() {
        assert_eq!(pool.made_bytes, Some(STORE_BYTES_MIN));
        assert!(pool.facts.limits, "disk limits hold");
        let (bytes, free) = pool.space().expect("it can be asked").expect("a space of its own");
        assert_eq!(bytes, STORE_BYTES_MIN, "it has grown from the seed to its size");
        assert!(free > STORE_BYTES_MIN / 2, "{free} bytes are free");

        let text = format!("of pool {number}");
        let files =
            pool.make_sandbox(sandbox, Some(8 << 20), None).expect("it is made").expect("a subvolume");
        write(&files, "text", text.as_bytes()).expect("there is room");
        let full = write(&files, "large", &vec![7; 16 << 20]).expect_err("it is over the limit");
        assert_eq!(full.raw_os_error(), Some(libc::EDQUOT));
        pool.make_volume(volume, 64 << 20, None).expect("it is made");
        let files = pool.volume(volume).expect("it can be asked").expect("it is there");
        write(&files, "text", text.as_bytes()).expect("there is room");
        pool.make_volume(copy, 64 << 20, Some(volume)).expect("a snapshot is taken");
        write(&files, "text", b"later, as long as the text that was").expect("there is room");
        ids.push(id_of(&files));
    }
    assert_ne!(ids[0], ids[1], "each file system has its own id");
    for (pool, data) in pools.into_iter().zip(&places) {
        close(pool, data);
    }
    for id in &ids {
        assert!(!Path::new(&format!("/sys/fs/btrfs/{id}")).exists(), "it is unmounted");
    }
    for (number, data) in places.iter().enumerate() {
        let pool = open(data);
        assert_eq!(pool.made_bytes, None, "it is the same pool");
        let text = format!("of pool {number}");
        let kept = pool.sandbox(sandbox).expect("it can be asked").expect("it is there");
        assert_eq!(read(&kept, "text"), text.as_bytes());
        let copied = pool.volume(copy).expect("it can be asked").expect("it is there");
        assert_eq!(read(&copied, "text"), text.as_bytes(), "the snapshot has what was there then");
        // An open file keeps the pool mounted.
        drop((kept, copied));
        close(pool, data);
        check(&data.join(IMAGE));
    }
}

/// btrfs-progs finds nothing wrong. Versions before 6.7 do not know simple quotas, which the pool has turned on by now, and say so.
fn check(image: &Path) {
    let output = Command::new(CHECKER).args(["check", "--readonly", "--check-data-csum"]).arg(image).output();
    let output = output.expect("`btrfs` starts: `cargo xtask test` installs btrfs-progs");
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    let is_fine = output.status.success() && said.contains("no error found");
    assert!(is_fine || said.contains("unsupported option features (10000)"), "{said}");
}

#[test]
fn a_pool_bounds_what_waits_to_be_written() {
    let home = tempfile::tempdir_in("/var/tmp").expect("a temporary directory");
    let pool = open(home.path());
    let id = {
        pool.make_volume(VolumeId::from_random(1), 1 << 20, None).expect("it is made");
        id_of(&pool.volume(VolumeId::from_random(1)).expect("it can be asked").expect("it is there"))
    };
    let told = |file: &str| fs::read_to_string(format!("/sys/fs/btrfs/{id}/bdi/{file}"));
    match told("strict_limit") {
        Ok(strict) => {
            assert_eq!((strict.trim(), pool.notes.as_slice()), ("1", [].as_slice()));
            // The kernel keeps it as a part of the memory that is free, so it comes back as more or less.
            let bytes: u64 = told("max_bytes").expect("it is there").trim().parse().expect("a number");
            assert!((64 << 20..=1 << 30).contains(&bytes), "{bytes}");
        }
        // A kernel before 6.2.
        Err(_) => assert_eq!(pool.notes.len(), 1, "{:?}", pool.notes),
    }
    close(pool, home.path());
}

/// A btrfs of the host's, as a data directory may be on.
struct HostBtrfs(tempfile::TempDir);

impl HostBtrfs {
    fn mount() -> Self {
        let home = tempfile::tempdir_in("/var/tmp").expect("a temporary directory");
        let (image, data) = (home.path().join("image"), home.path().join("data"));
        File::create(&image).and_then(|file| file.set_len(256 << 20)).expect("a file can be made");
        fs::create_dir(&data).expect("a directory");
        run(Command::new("/usr/sbin/mkfs.btrfs").arg("--quiet").arg(&image));
        run(Command::new("/usr/bin/mount").args(["-o", "loop"]).arg(&image).arg(&data));
        Self(home)
    }

    fn data(&self) -> std::path::PathBuf {
        self.0.path().join("data")
    }
}

impl Drop for HostBtrfs {
    fn drop(&mut self) {
        let ended = Command::new("/usr/bin/umount").arg(self.data()).status();
        assert!(std::thread::panicking() || ended.is_ok_and(|ended| ended.success()), "it is unmounted");
    }
}

fn run(command: &mut Command) {
    let status = command.status().expect("`cargo xtask test` installs btrfs-progs and util-linux");
    assert!(status.success(), "{command:?}: {status}");
}

#[test]
fn files_of_a_pool_on_the_hosts_btrfs_cannot_be_compressed() {
    let host = HostBtrfs::mount();
    let config = StoreConfig { wish: StoreWish::Just(StoreKind::Btrfs), size_bytes: None };
    let pool = StoragePool::open(&host.data(), &config).expect("the data directory is on btrfs");
    let (sandbox, volume) = (SandboxId::from_random(random()), VolumeId::from_random(random()));
    let files = pool.make_sandbox(sandbox, None, None).expect("it is made").expect("a subvolume");
    pool.make_volume(volume, 64 << 20, None).expect("it is made");
    let volume = pool.volume(volume).expect("it can be asked").expect("it is there");
    for dir in [&files, &volume] {
        rustix::fs::mkdirat(dir, "below", Mode::from_raw_mode(0o700)).expect("there is room");
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let below = openat(dir, "below", flags, Mode::empty()).expect("it is there");
        write(&below, "file", &[0; 1 << 20]).expect("there is room");
        let file =
            openat(&below, "file", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()).expect("it is there");
        let none = rustix::fs::XattrFlags::empty();
        rustix::fs::fsetxattr(&file, "btrfs.compression", b"zstd", none).expect_err("the kernel refuses");
    }
    drop((files, volume, pool));
}
