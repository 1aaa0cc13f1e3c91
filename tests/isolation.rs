//! What must not be possible inside a sandbox, and what must be.
//!
//! Each test tries the forbidden thing as the guest's root, and is named after it. The probes are small programs that
//! run inside; the state of the host is checked from the host.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde_json::json;
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Finished, Sandbox};

/// `call(number, ...)` prints the error name of a raw system call, or `OK`.
const CALL: &str = "
import ctypes, errno, os, sys, socket, struct
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
def call(number, *arguments):
    arguments = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_void_p(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *arguments)
    return 'OK' if result != -1 else errno.errorcode.get(ctypes.get_errno(), str(ctypes.get_errno()))
def attempt(what):
    try:
        what()
        return 'OK'
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error.errno))
";

/// Runs a probe that prints one word per line, and checks that each is a denial.
#[track_caller]
fn all_refused(sandbox: &Sandbox, probe: &str) {
    let done = sandbox.python(&format!("{CALL}{probe}")).ok();
    let text = done.text();
    assert!(!text.is_empty(), "the probe tried nothing");
    for line in text.lines() {
        let (what, answer) = line.rsplit_once(' ').unwrap_or_else(|| panic!("not an answer: {line}"));
        let refused = [
            "EPERM",
            "EACCES",
            "ENOENT",
            "ENOSYS",
            "EROFS",
            "EAFNOSUPPORT",
            "EINVAL",
            "ENOSPC",
            "ESRCH",
            "ENODEV",
            "ENXIO",
            "EPROTONOSUPPORT",
            "ESOCKTNOSUPPORT",
            "EIO",
            "ECONNREFUSED",
            "ENETUNREACH",
            "EUSERS",
            "EBUSY",
            "EOPNOTSUPP",
            "EMPTY",
            "ENOTDIR",
            "ETXTBSY",
        ];
        assert!(refused.contains(&answer), "{what} was answered with {answer}:\n{text}\n{}", done.errors());
    }
}

/// World-readable files on the host, removed on drop.
struct Planted(Vec<String>);

impl Planted {
    fn new(directories: &[&str]) -> Self {
        let name = format!(".shoal-test-{}", shoal_tests::daemon::random_hex(6));
        let paths: Vec<String> = directories.iter().map(|directory| format!("{directory}/{name}")).collect();
        for path in &paths {
            fs::write(path, "the host's own").expect("root may write");
            fs::set_permissions(path, fs::Permissions::from_mode(0o644)).expect("root may change it");
        }
        Self(paths)
    }
}

impl Drop for Planted {
    fn drop(&mut self) {
        for path in &self.0 {
            let _ = fs::remove_file(path);
        }
    }
}

fn start() -> (Daemon, Sandbox) {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    (daemon, sandbox)
}

#[test]
fn cannot_read_a_host_file() {
    let (daemon, sandbox) = start();
    let secret = daemon.home.join("secret");
    fs::write(&secret, "the host's own").expect("a file");
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o644)).expect("a file");
    let planted = Planted::new(&["/root", "/opt", "/etc", "/srv", "/var/lib", "/home"]);
    let mut paths = vec![
        secret.display().to_string(),
        daemon.data_dir.display().to_string(),
        daemon.data_dir.join("installation").display().to_string(),
        format!("/../../../../..{}", secret.display()),
    ];
    paths.extend(planted.0.clone());
    for path in paths.clone() {
        paths.extend(
            ["/proc/1/root", "/proc/1/cwd", "/proc/self/root"].map(|before| format!("{before}{path}")),
        );
    }
    let list = serde_json::to_string(&paths).expect("a list of texts");
    all_refused(
        &sandbox,
        &format!("for path in {list}: print('read', path, attempt(lambda: open(path).read()))"),
    );
    // The account files inside are the sandbox's own.
    let shadow = sandbox.sh("cat /etc/shadow").ok().text();
    let host = fs::read_to_string("/etc/shadow").expect("root may read it");
    for line in host.lines().filter(|line| line.split(':').nth(1).is_some_and(|hash| hash.len() > 3)) {
        assert!(!shadow.contains(line), "a password hash of the host is inside");
    }
    let hostname = fs::read_to_string("/proc/sys/kernel/hostname").expect("the host has a name");
    assert_ne!(sandbox.sh("hostname").ok().text(), hostname.trim());
}

#[test]
fn cannot_read_what_an_ordinary_user_cannot_read_outside() {
    // Every file of the host's /usr that is not world-readable, including one made for the test.
    let guard = Planted::new(&["/usr/local/lib"]);
    let planted = guard.0[0].clone();
    fs::set_permissions(&planted, fs::Permissions::from_mode(0o600)).expect("root may change it");
    let (_daemon, sandbox) = start();
    let found = std::process::Command::new("find")
        .args([
            "/usr", "-xdev", "(", "-type", "f", "-not", "-perm", "-004", "-o", "-type", "d", "-not", "-perm",
            "-005", ")",
        ])
        .output()
        .expect("find is there");
    let closed = String::from_utf8_lossy(&found.stdout).into_owned();
    assert!(closed.contains(&planted), "{closed}");
    let list = serde_json::to_string(&closed.lines().collect::<Vec<_>>()).expect("a list of texts");
    let probe = format!(
        "def look(path):\n  if os.path.isdir(path):\n    if os.listdir(path): return\n    raise OSError(errno.ENOENT, path)\n  open(path, 'rb').read()\nfor path in {list}: print('read', path, attempt(lambda: look(path)))"
    );
    all_refused(&sandbox, &probe);
}

#[test]
fn cannot_write_to_the_hosts_usr() {
    let (daemon, sandbox) = start();
    let mark = format!("shoal-test-{}", shoal_tests::daemon::random_hex(6));
    let before = fs::read("/usr/bin/env").expect("it is there");
    sandbox
        .sh(&format!(
            "set -e; echo mine > /usr/lib/{mark}; cat /usr/lib/{mark}; mkdir -p /usr/local/{mark}/deep; \
             cp /bin/true /usr/bin/env; rm /usr/bin/yes; chmod 600 /usr/bin/head; mv /usr/bin/tail /usr/bin/{mark}"
        ))
        .ok();
    assert_eq!(
        sandbox.sh(&format!("cat /usr/lib/{mark}; ls /usr/bin/yes 2>&1 | wc -l")).ok().text(),
        "mine\n1"
    );
    assert!(!Path::new(&format!("/usr/lib/{mark}")).exists());
    assert!(!Path::new(&format!("/usr/local/{mark}")).exists());
    assert!(Path::new("/usr/bin/yes").exists());
    assert!(Path::new("/usr/bin/tail").exists());
    assert_eq!(fs::read("/usr/bin/env").expect("it is there"), before);
    let other = daemon.sandbox();
    assert_eq!(
        other
            .sh(&format!("ls /usr/lib/{mark} /usr/bin/{mark} 2>/dev/null; env true && echo whole"))
            .ok()
            .text(),
        "whole"
    );
}

/// Fails if the overlay came up read-only, which happens silently if it is mounted with the wrong ids.
#[test]
fn everything_that_should_be_writable_is() {
    let (_daemon, sandbox) = start();
    for place in [
        "/",
        "/tmp",
        "/workspace",
        "/root",
        "/etc",
        "/usr",
        "/usr/bin",
        "/var/lib",
        "/opt",
        "/home",
        "/dev/shm",
        "/run",
    ] {
        sandbox.sh(&format!("set -e; cd {place}; echo text > .probe; [ \"$(cat .probe)\" = text ]; mkdir .d; mv .probe .d/; rm -r .d")).ok();
    }
    sandbox.sh("set -e; echo 'new line' >> /etc/hosts; grep -q 'new line' /etc/hosts; chown 1000:1000 /etc/hosts; [ $(stat -c %u /etc/hosts) = 1000 ]").ok();
}

#[test]
fn files_of_other_users_keep_their_owners() {
    let (_daemon, sandbox) = start();
    let done = sandbox
        .sh("set -e; touch /tmp/f; chown 1000:65535 /tmp/f; stat -c '%u %g' /tmp/f; stat -c '%u %g' /usr/bin/env /etc/passwd; touch /tmp/g; chown 65534 /tmp/g; stat -c %u /tmp/g")
        .ok();
    assert_eq!(done.text(), "1000 65535\n0 0\n0 0\n65534");
}

#[test]
fn files_on_disk_carry_guest_ids() {
    use std::os::unix::fs::MetadataExt;
    let (daemon, sandbox) = start();
    sandbox.sh("touch /workspace/by-root /workspace/by-user; chown 1000:1001 /workspace/by-user").ok();
    let mut found = Vec::new();
    let mut open = vec![daemon.data_dir.join("sandboxes").join(&sandbox.id)];
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(&directory).expect("root may read").map(|entry| entry.expect("readable")) {
            let meta = fs::symlink_metadata(entry.path()).expect("readable");
            if meta.is_dir() {
                open.push(entry.path());
            }
            let name = entry.file_name().to_string_lossy().into_owned();
            if name.starts_with("by-") {
                found.push((name, meta.uid(), meta.gid()));
            }
        }
    }
    found.sort();
    assert_eq!(found, [("by-root".into(), 0, 0), ("by-user".into(), 1000, 1001)]);
}

/// Nothing on disk depends on a sandbox's id range, so a fork and an export need no chown.
#[test]
fn a_writable_directory_moves_between_id_ranges_without_a_chown() {
    let (daemon, one) = start();
    let two = daemon.sandbox();
    one.sh("mkdir -p /workspace/tree/deep; echo text > /workspace/tree/deep/file; chown -R 1000:1001 /workspace/tree/deep").ok();
    two.sh("mkdir /workspace/place").ok();
    let upper =
        |sandbox: &Sandbox| daemon.data_dir.join("sandboxes").join(&sandbox.id).join("fs/root/workspace");
    fs::rename(upper(&one).join("tree"), upper(&two).join("place/tree"))
        .expect("both are on one file system");
    let done = two.sh("cd /workspace/place/tree; stat -c '%u:%g' . deep deep/file; cat deep/file; echo more >> deep/file; cat deep/file");
    assert_eq!(done.ok().text(), "0:0\n1000:1001\n1000:1001\ntext\ntext\nmore");
}

#[test]
fn cannot_see_host_processes() {
    let (daemon, sandbox) = start();
    let done = sandbox.sh("ls /proc | grep -c '^[0-9]'; ps -e -o comm= | sort -u").ok();
    let count: u32 = done.text().lines().next().and_then(|line| line.parse().ok()).expect("a count");
    assert!(count < 12, "{}", done.text());
    let probe = format!(
        "for pid in [{}, {}]:\n  print('kill', pid, attempt(lambda: os.kill(pid, 0)))\n  print('look', pid, attempt(lambda: os.stat(f'/proc/{{pid}}')))",
        daemon.pid(),
        std::process::id()
    );
    all_refused(&sandbox, &probe);
}

#[test]
fn cannot_mount_or_remount_anything() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
os.makedirs('/tmp/m', exist_ok=True)
MS_REMOUNT, MS_BIND, MS_REC, MS_SHARED, MS_MOVE = 32, 4096, 16384, 1 << 20, 8192
for kind in [b'tmpfs', b'proc', b'sysfs', b'cgroup', b'cgroup2', b'devpts', b'overlay', b'bpf', b'debugfs', b'tracefs', b'securityfs', b'mqueue', b'fuse', b'ext4', b'nfs', b'9p', b'devtmpfs']:
    print('mount', kind.decode(), call(165, b'none', b'/tmp/m', kind, 0, b''))
    print('fsopen', kind.decode(), call(430, kind, 0))
for flags in [MS_BIND, MS_BIND | MS_REC, MS_MOVE]:
    print('bind', flags, call(165, b'/', b'/tmp/m', b'', flags, 0))
for place in [b'/', b'/usr', b'/proc', b'/proc/sys', b'/dev', b'/sys']:
    print('remount', place.decode(), call(165, b'none', place, b'', MS_REMOUNT, 0))
    print('remount bind', place.decode(), call(165, b'none', place, b'', MS_REMOUNT | MS_BIND, 0))
    print('share', place.decode(), call(165, b'none', place, b'', MS_SHARED, 0))
    print('umount', place.decode(), call(166, place, 2))
    print('open_tree clone', place.decode(), call(428, -100, place, 1))
    print('mount_setattr', place.decode(), call(442, -100, place, 0, b'\\0' * 32, 32))
print('pivot_root', call(155, b'/tmp', b'/tmp/m'))
print('fspick', call(433, -100, b'/', 0))
print('move_mount', call(429, -100, b'/usr', -100, b'/tmp/m', 0))
",
    );
    assert!(
        !sandbox
            .sh("umount /proc/sys || umount -l /proc/kcore || mount -o remount,rw /proc/sys")
            .text()
            .contains("OK")
    );
}

#[test]
fn cannot_make_a_namespace() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
flags = dict(NEWNS=0x20000, NEWUTS=0x4000000, NEWIPC=0x8000000, NEWUSER=0x10000000, NEWPID=0x20000000, NEWNET=0x40000000, NEWCGROUP=0x2000000)
for name, flag in flags.items():
    print('unshare', name, call(272, flag))
    # clone3 hides its flags from filters: struct clone_args of 88 bytes, flags first, exit signal in the fifth.
    arguments = struct.pack('11Q', flag, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0)
    answer = call(435, arguments, 88)
    if answer == 'OK' and os.getpid() == 1: os._exit(0)
    print('clone3', name, answer)
    pid = os.getpid()
    answer = call(56, flag | 17, 0, 0, 0, 0)
    if os.getpid() != pid: os._exit(0)
    print('clone', name, answer)
for name in ['user', 'mnt', 'pid', 'net', 'ipc', 'uts', 'cgroup', 'time']:
    fd = None
    try: fd = os.open(f'/proc/self/ns/{name}', os.O_RDONLY)
    except OSError: print('open', name, 'EACCES')
    if fd is not None: print('setns', name, call(308, fd, 0))
",
    );
    for flag in ["-U", "-Ur", "-m", "-n", "-p --fork", "-C", "-i", "-u"] {
        let done = sandbox.sh(&format!("unshare {flag} true"));
        assert_ne!(done.exit_code(), Some(0), "unshare {flag}");
    }
}

#[test]
fn nobody_inside_can_make_a_namespace_either() {
    let (_daemon, sandbox) = start();
    for user in ["user", "nobody"] {
        let done = sandbox
            .run(json!({"script": "unshare -Ur true || bwrap --ro-bind / / true", "user": user, "cwd": "/"}));
        assert_ne!(done.exit_code(), Some(0), "{user}");
    }
}

#[test]
fn cannot_make_or_open_device_nodes() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
import stat
for place in ['/tmp', '/dev', '/dev/shm', '/usr', '/root']:
    for kind, name in [(stat.S_IFBLK, 'block'), (stat.S_IFCHR, 'char')]:
        for major, minor in [(1, 1), (1, 3), (8, 0), (254, 0), (10, 229), (10, 232)]:
            path = f'{place}/node-{name}-{major}-{minor}'
            def make():
                os.mknod(path, kind | 0o666, os.makedev(major, minor))
                os.open(path, os.O_RDWR)
            print('mknod', path, attempt(make))
for name in ['kmsg', 'mem', 'kmem', 'port', 'fuse', 'kvm', 'vda', 'sda', 'nvme0n1', 'loop0', 'loop-control', 'mapper/control', 'net/tun', 'vhost-net', 'vhost-vsock', 'vsock', 'hpet', 'rtc0', 'uinput', 'btrfs-control', 'userfaultfd', 'cpu_dma_latency', 'autofs', 'snapshot', 'nvram', 'console', 'tty0', 'ttyS0', 'hwrng']:
    print('open', name, attempt(lambda: os.open('/dev/' + name, os.O_RDONLY | os.O_NONBLOCK)))
",
    );
    let devices = sandbox.sh("ls /dev | tr '\\n' ' '").ok().text();
    let allowed = [
        "full", "null", "ptmx", "pts", "random", "shm", "tty", "urandom", "zero", "fd", "stdin", "stdout",
        "stderr", "core", "mqueue",
    ];
    for name in devices.split_whitespace() {
        assert!(allowed.contains(&name), "/dev/{name} is inside");
    }
    sandbox.sh("set -e; echo x > /dev/null; [ $(head -c 4 /dev/zero | wc -c) = 4 ]; head -c 4 /dev/urandom > /dev/null; ! echo x > /dev/full").ok();
}

#[test]
fn the_devices_cannot_be_changed_for_others() {
    let (daemon, sandbox) = start();
    sandbox.sh("rm -f /dev/null; chmod 000 /dev/zero; mv /dev/random /dev/gone; ln -sf /etc/passwd /dev/urandom; mknod /dev/null p; true");
    let other = daemon.sandbox();
    other.sh("set -e; echo x > /dev/null; test -c /dev/null; head -c 1 /dev/zero | wc -c; test -c /dev/random; test -c /dev/urandom; ! test -L /dev/urandom").ok();
    assert!(fs::metadata("/dev/null").is_ok());
}

#[test]
fn cannot_reach_into_init() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
PTRACE_ATTACH, PTRACE_SEIZE = 16, 0x4206
print('ptrace attach', call(101, PTRACE_ATTACH, 1, 0, 0))
print('ptrace seize', call(101, PTRACE_SEIZE, 1, 0, 0))
buffer = ctypes.create_string_buffer(8)
local = struct.pack('QQ', ctypes.addressof(buffer), 8)
remote = struct.pack('QQ', 0x400000, 8)
print('process_vm_readv', call(310, 1, local, 1, remote, 1, 0))
print('process_vm_writev', call(311, 1, local, 1, remote, 1, 0))
print('mem read', attempt(lambda: open('/proc/1/mem', 'rb')))
print('mem write', attempt(lambda: open('/proc/1/mem', 'r+b')))
print('maps', attempt(lambda: open('/proc/1/maps').read()))
print('environ', attempt(lambda: open('/proc/1/environ').read()))
print('exe', attempt(lambda: os.readlink('/proc/1/exe')))
print('exe open', attempt(lambda: open('/proc/1/exe', 'rb')))
print('root', attempt(lambda: os.listdir('/proc/1/root')))
print('cwd', attempt(lambda: os.listdir('/proc/1/cwd')))
print('fd list', attempt(lambda: os.listdir('/proc/1/fd')))
for fd in range(8): print('fd', fd, attempt(lambda: os.open(f'/proc/1/fd/{fd}', os.O_RDONLY)))
print('ns', attempt(lambda: os.open('/proc/1/ns/mnt', os.O_RDONLY)))
print('map_files', attempt(lambda: os.listdir('/proc/1/map_files')))
def write(path, text):
    fd = os.open(path, os.O_WRONLY)
    try: os.write(fd, text)
    finally: os.close(fd)
print('attr', attempt(lambda: write('/proc/1/attr/current', b'x')))
print('oom', attempt(lambda: write('/proc/1/oom_score_adj', b'1000')))
print('coredump', attempt(lambda: write('/proc/1/coredump_filter', b'0xff')))
print('clear_refs', attempt(lambda: write('/proc/1/clear_refs', b'1')))
print('setattr timerslack', attempt(lambda: write('/proc/1/timerslack_ns', b'1000000')))
fd = os.pidfd_open(1)
for n in range(8): print('pidfd_getfd', n, call(438, fd, n, 0))
",
    );
    assert_eq!(sandbox.sh("echo fine").ok().text(), "fine");
}

#[test]
fn cannot_overwrite_init_through_its_executable() {
    let (daemon, sandbox) = start();
    // CVE-2019-5736: a program in the guest makes the runtime execute it and then writes to the executable.
    sandbox.sh("printf '#!/proc/self/exe\\n' > /tmp/again; chmod +x /tmp/again").ok();
    let done = sandbox.run(json!({"argv": ["/tmp/again"], "timeout_seconds": 20}));
    assert_ne!(done.outcome(), "timed_out", "{}", done.body);
    all_refused(
        &sandbox,
        "
import glob
seen = set()
for _ in range(50):
    for exe in glob.glob('/proc/[0-9]*/exe'):
        if os.path.dirname(exe) in ('/proc/self', f'/proc/{os.getpid()}'): continue
        try: target = os.readlink(exe)
        except OSError: continue
        if 'python' in target or target in seen: continue
        seen.add(target)
        print('write', target, attempt(lambda: open(exe, 'r+b')))
print('end EPERM')
",
    );
    let other = daemon.sandbox();
    assert_eq!(other.sh("echo clean").ok().text(), "clean");
}

#[test]
fn cannot_write_the_kernels_settings() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
def write(path, text=b'1'):
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text)
for path in ['/proc/sys/kernel/core_pattern', '/proc/sys/kernel/modprobe', '/proc/sys/kernel/hostname', '/proc/sys/vm/drop_caches',
             '/proc/sys/vm/overcommit_memory', '/proc/sys/net/ipv4/ip_forward', '/proc/sys/kernel/sysrq', '/proc/sys/fs/binfmt_misc/register',
             '/proc/sys/kernel/ns_last_pid', '/proc/sys/user/max_user_namespaces', '/proc/sys/kernel/randomize_va_space', '/proc/sys/fs/file-max',
             '/proc/sysrq-trigger', '/proc/kcore', '/proc/keys', '/proc/key-users', '/proc/timer_list', '/proc/kallsyms', '/proc/kmsg', '/proc/irq/0/smp_affinity', '/proc/bus/pci/00/00.0', '/proc/scsi/scsi', '/proc/acpi/wakeup',
             '/proc/self/uid_map', '/proc/self/gid_map', '/proc/self/setgroups',
             '/sys/kernel/uevent_helper', '/sys/power/state', '/sys/kernel/mm/transparent_hugepage/enabled', '/sys/module/kernel/parameters/panic',
             '/sys/fs/cgroup/release_agent', '/sys/fs/cgroup/cgroup.procs', '/sys/fs/cgroup/memory/memory.limit_in_bytes', '/sys/firmware/efi/vars']:
    print('write', path, attempt(lambda: write(path)))
",
    );
}

#[test]
fn cannot_read_the_kernels_secrets() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
def some(path):
    data = open(path, 'rb').read(64)
    if not data: raise OSError(errno.ENOENT, path)
for path in ['/proc/kcore', '/proc/kmsg', '/proc/keys', '/proc/key-users', '/proc/timer_list', '/proc/sched_debug', '/proc/kallsyms',
             '/proc/latency_stats', '/proc/config.gz', '/sys/firmware/acpi/tables/DSDT', '/sys/kernel/debug/sched/debug', '/sys/kernel/tracing/trace',
             '/sys/kernel/notes', '/sys/class/dmi/id/product_uuid', '/sys/class/dmi/id/product_serial', '/proc/1/stack', '/proc/self/pagemap2']:
    if path == '/proc/kallsyms' and os.path.exists(path):
        lines = open(path).read(4096).split()
        print('addresses', path, 'ENOENT' if all(set(word) == {'0'} for word in lines[::3]) else 'SHOWN')
        continue
    if path == '/proc/config.gz': continue
    print('read', path, attempt(lambda: some(path)))
print('syslog', call(103, 3, b'\\0' * 64, 64))
",
    );
}

#[test]
fn cannot_use_the_dangerous_system_calls() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
calls = dict(add_key=248, request_key=249, keyctl=250, bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425, io_uring_enter=426,
    io_uring_register=427, kexec_load=246, kexec_file_load=320, init_module=175, finit_module=313, delete_module=176, reboot=169,
    swapon=167, swapoff=168, acct=163, settimeofday=164, clock_settime=227, adjtimex=159, quotactl=179, iopl=172, ioperm=173,
    open_by_handle_at=304, fanotify_init=300, syslog=103, vhangup=153, sethostname=170, setdomainname=171, lookup_dcookie=212,
    nfsservctl=180, uselib=134, ustat=136, sysfs=139, kcmp=312, mount=165, chroot_x32=0x40000000 + 161, unknown_future=600)
for name, number in calls.items():
    a = {'reboot': (0xfee1dead, 672274793, 0), 'keyctl': (0, -3, 1), 'add_key': (b'user', b'name', b'x', 1, -3), 'sethostname': (b'other', 5), 'setdomainname': (b'other', 5), 'syslog': (2, b'\\0' * 64, 64)}.get(name, (0, 0, 0, 0, 0))
    print(name, call(number, *a))
",
    );
}

#[test]
fn cannot_open_sockets_that_lead_out() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
families = dict(AX25=3, PACKET=17, ALG=38, VSOCK=40, XDP=44, CAN=29, BLUETOOTH=31, TIPC=30, RDS=21, KCM=41, QIPCRTR=42, SMC=43, NFC=39, APPLETALK=5, X25=9, KEY=15, LLC=26, PPPOX=24, MCTP=45)
for name, family in families.items():
    for kind in (1, 2, 3, 5):
        print('socket', name, kind, call(41, family, kind, 0))
print('raw', call(41, 2, 3, 1)); print('raw', call(41, 2, 3, 255)); print('raw6', call(41, 10, 3, 58))
",
    );
}

/// Checks that every line of a probe ends with this result, and that there are at least this many.
#[track_caller]
fn all_answered(sandbox: &Sandbox, probe: &str, answer: &str, lines_min: usize) {
    let text = sandbox.python(&format!("{CALL}{probe}")).ok().text();
    let others: Vec<&str> = text.lines().filter(|line| !line.ends_with(&format!(" {answer}"))).collect();
    assert!(others.is_empty(), "not answered with {answer}: {others:?}");
    assert!(text.lines().count() >= lines_min, "the probe tried too little: {text}");
}

#[test]
fn cannot_open_socket_pairs_of_other_families() {
    let (_daemon, sandbox) = start();
    // EPERM comes from the filter; any other error comes from the family's own code, which must not run.
    all_answered(
        &sandbox,
        "
pair = ctypes.create_string_buffer(8)
for family in list(range(3, 10)) + list(range(11, 16)) + list(range(17, 50)):
    for kind in (1, 2, 3, 5):
        print('socketpair', family, kind, call(53, family, kind, 0, ctypes.addressof(pair)))
",
        "EPERM",
        45 * 4,
    );
    sandbox.python("import socket; a, b = socket.socketpair(); a.send(b'x'); assert b.recv(1) == b'x'").ok();
}

#[test]
fn cannot_open_sockets_whose_memory_nobody_counts() {
    let (_daemon, sandbox) = start();
    all_answered(
        &sandbox,
        "
for protocol in range(1, 32):
    for kind in (2, 3): print('netlink', protocol, kind, call(41, 16, kind, protocol))
",
        "EPROTONOSUPPORT",
        62,
    );
    all_refused(&sandbox, "print('ping', call(41, 2, 2, 1)); print('ping6', call(41, 10, 2, 58))");
    // What programs need of it works: the list of interfaces, and tools that try to write an audit log.
    sandbox
        .python("import socket; assert socket.if_nameindex() == [(1, 'lo')]; socket.socket(16, 3, 0)")
        .ok();
    sandbox.sh("useradd --no-create-home probe && id probe && userdel probe").ok();
}

#[test]
fn cannot_make_socket_buffers_larger() {
    let (_daemon, sandbox) = start();
    let program = "
import socket
kinds = [(socket.AF_INET, 1, 0), (socket.AF_INET, 2, 0), (socket.AF_INET6, 1, 0), (socket.AF_UNIX, 1, 0), (socket.AF_UNIX, 2, 0), (16, 3, 0)]
for kind in kinds:
    s = socket.socket(*kind)
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        before = s.getsockopt(socket.SOL_SOCKET, option)
        # Reported as done: programs exit when they are refused.
        s.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
        assert s.getsockopt(socket.SOL_SOCKET, option) == before, (kind, option, before)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED if kind[0] == socket.AF_UNIX else socket.SO_REUSEADDR, 1)
";
    sandbox.python(program).ok();
    // SO_SNDBUFFORCE and SO_RCVBUFFORCE, which have no largest size.
    all_refused(
        &sandbox,
        "
for family in (1, 2, 16):
    for option in (32, 33):
        s = socket.socket(family, 2, 0)
        print('force', family, option, attempt(lambda: s.setsockopt(1, option, 64 << 20)))
",
    );
}

#[test]
fn cannot_watch_the_pressure_of_the_machine() {
    let (_daemon, sandbox) = start();
    assert!(Path::new("/proc/pressure").is_dir(), "this kernel has no pressure to watch");
    all_refused(
        &sandbox,
        "
def trigger(name):
    fd = os.open(f'/proc/pressure/{name}', os.O_RDWR)
    os.write(fd, b'some 500000 2000000')
for name in ('cpu', 'memory', 'io', 'irq'):
    print('trigger', name, attempt(lambda: trigger(name)))
    print('read', name, attempt(lambda: open(f'/proc/pressure/{name}').read()))
print('make', attempt(lambda: open('/proc/pressure/x', 'w')))
",
    );
    assert_eq!(sandbox.sh("ls -A /proc/pressure").ok().text(), "");
}

#[test]
fn has_no_network_but_loopback() {
    let (daemon, sandbox) = start();
    let interfaces = sandbox.sh("cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '").ok().text();
    assert_eq!(interfaces, "lo");
    assert_eq!(sandbox.sh("tail -n +2 /proc/net/route | wc -l").ok().text(), "0");
    all_refused(
        &sandbox,
        &format!(
            "
def reach(family, address):
    s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(5)
    s.connect(address)
def send(family, address):
    s = socket.socket(family, socket.SOCK_DGRAM)
    s.sendto(b'x', address)
    s.settimeout(0.2)
for host in ['1.1.1.1', '8.8.8.8', '169.254.169.254', '10.0.0.1', '192.168.0.1', '172.17.0.1', '100.64.0.1', '224.0.0.1', '255.255.255.255']:
    print('tcp', host, attempt(lambda: reach(socket.AF_INET, (host, 80))))
    print('udp', host, attempt(lambda: send(socket.AF_INET, (host, 53))))
for host in ['2606:4700:4700::1111', 'fd00:ec2::254', 'fe80::1%lo', '::ffff:1.1.1.1', 'ff02::1']:
    print('tcp6', host, attempt(lambda: reach(socket.AF_INET6, (host, 80, 0, 0))))
# The daemon's own port on the host's loopback is not the sandbox's loopback.
print('daemon', attempt(lambda: reach(socket.AF_INET, ('127.0.0.1', {}))))
print('zero', attempt(lambda: reach(socket.AF_INET, ('0.0.0.0', {}))))
",
            daemon.address.port(),
            daemon.address.port()
        ),
    );
}

#[test]
fn loopback_works_inside_also_on_low_ports() {
    let (_daemon, sandbox) = start();
    let done = sandbox.python(
        "import socket\nfor family, host in ((socket.AF_INET, '127.0.0.1'), (socket.AF_INET6, '::1')):\n  s = socket.socket(family); s.bind((host, 80)); s.listen()\n  c = socket.create_connection((host, 80)); p, _ = s.accept(); p.sendall(b'hi'); p.close(); print(c.recv(9).decode())",
    );
    assert_eq!(done.ok().text(), "hi\nhi");
}

#[test]
fn cannot_reach_the_hosts_abstract_sockets() {
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener};
    let name = format!("shoal-test-{}", shoal_tests::daemon::random_hex(6));
    let address = SocketAddr::from_abstract_name(name.as_bytes()).expect("a name");
    let _listener = UnixListener::bind_addr(&address).expect("it can be bound");
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        &format!(
            "s = socket.socket(socket.AF_UNIX)\nprint('connect', attempt(lambda: s.connect('\\0{name}')))"
        ),
    );
}

#[test]
fn cannot_change_the_network_it_is_in() {
    let (_daemon, sandbox) = start();
    all_refused(
        &sandbox,
        "
import fcntl
def netlink(kind, body, protocol=0):
    s = socket.socket(16, 3, protocol)
    s.send(struct.pack('IHHII', 16 + len(body), kind, 5, 1, 0) + body)
    answer = s.recv(4096)
    code = struct.unpack('i', answer[16:20])[0]
    if code < 0: raise OSError(-code, 'netlink')
# A new interface (RTM_NEWLINK), a new address on lo (RTM_NEWADDR), a new route (RTM_NEWROUTE).
print('newlink', attempt(lambda: netlink(16, struct.pack('BxHiII', 0, 0, 0, 0, 0) + struct.pack('HH', 8, 3) + b'd0\\0\\0' + struct.pack('HH', 16, 18) + struct.pack('HH', 10, 1) + b'dummy\\0\\0\\0')))
print('newaddr', attempt(lambda: netlink(20, struct.pack('BBBBI', 2, 32, 0, 0, 1) + struct.pack('HH', 8, 2) + bytes([10, 9, 8, 7]))))
print('newroute', attempt(lambda: netlink(24, struct.pack('BBBBBBBBI', 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack('HHi', 8, 4, 1))))
s = socket.socket()
print('lo down', attempt(lambda: fcntl.ioctl(s, 0x8914, struct.pack('16sH22x', b'lo', 0))))
print('device', attempt(lambda: fcntl.ioctl(s, 0x8927, b'eth0' + b'\\0' * 36)))
# A new table (NFNL_SUBSYS_NFTABLES, NFT_MSG_NEWTABLE) and a new conntrack entry.
print('nftables', attempt(lambda: netlink(10 << 8, struct.pack('BBH', 2, 0, 0), 12)))
print('conntrack', attempt(lambda: netlink(1 << 8, struct.pack('BBH', 2, 0, 0), 12)))
",
    );
}

#[test]
fn kill_everything_inside_leaves_the_sandbox_usable() {
    let (daemon, sandbox) = start();
    let other = daemon.sandbox();
    let neighbour = sandbox.spawn(json!({"argv": ["sleep", "1000"]}));
    sandbox.running(&neighbour);
    let elsewhere = other.spawn(json!({"argv": ["sleep", "1000"]}));
    other.running(&elsewhere);
    let done = sandbox.python("import os; os.kill(-1, 9); print('sent')");
    assert!(matches!(done.outcome(), "exited" | "signaled"), "{}", done.body);
    assert_eq!(sandbox.ended(&neighbour)["result"]["outcome"], "signaled");
    assert_eq!(sandbox.sh("echo usable").ok().text(), "usable");
    for signal in ["KILL", "STOP", "TERM", "SEGV", "ABRT"] {
        sandbox.sh(&format!("kill -{signal} 1; true"));
        assert_eq!(sandbox.sh("echo usable").ok().text(), "usable", "after {signal}");
    }
    assert_eq!(other.command(&elsewhere)["state"], "running");
}

#[test]
fn cannot_use_a_descriptor_as_its_directory() {
    // CVE-2024-21626: a working directory that is a leaked descriptor of the host.
    let (_daemon, sandbox) = start();
    for n in 0..64 {
        let done = sandbox.run(json!({"script": "cat installation ../installation ../../../installation api.key 2>/dev/null; pwd -P; ls", "cwd": format!("/proc/self/fd/{n}")}));
        if done.outcome() == "exited" {
            let text = done.text();
            assert!(text.starts_with('/') && !text.contains("sandboxes"), "through descriptor {n}: {text}");
        } else {
            assert_eq!(done.outcome(), "failed_to_start", "{}", done.body);
        }
    }
    for path in ["/proc/1/root", "/proc/1/cwd", "/proc/self/cwd/..", "/proc/self/root/.."] {
        let done = sandbox.run(json!({"script": "pwd -P; ls -d data 2>/dev/null", "cwd": path}));
        assert!(done.outcome() == "failed_to_start" || done.text().starts_with('/'), "{path}: {}", done.body);
    }
}

#[test]
fn commands_get_three_descriptors_and_no_more() {
    let (_daemon, sandbox) = start();
    for stdin in [false, true] {
        let id = sandbox.spawn(json!({"argv": ["python3", "-c", "import os; print(sorted(int(n) for n in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{n}')))"], "stdin": stdin}));
        if stdin {
            sandbox.end_stdin(&id);
        }
        assert_eq!(String::from_utf8_lossy(&sandbox.output(&id).stdout).trim(), "[0, 1, 2]");
    }
    let shell = sandbox.sh("ls -l /proc/$$/fd").ok().text();
    assert!(!shell.contains("socket:") && !shell.contains("cgroup"), "{shell}");
}

#[test]
fn commands_run_without_new_privileges_and_with_few_capabilities() {
    let (_daemon, sandbox) = start();
    let status = sandbox.sh("cat /proc/self/status").ok().text();
    let value = |name: &str| {
        let line = status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_else(|| panic!("{name} is missing"));
        line.trim_start_matches(':').trim().to_owned()
    };
    assert_eq!(value("NoNewPrivs"), "1");
    assert_eq!(value("Seccomp"), "2");
    // SYS_ADMIN 21, SYS_MODULE 16, SYS_RAWIO 17, SYS_PTRACE 19, SYS_BOOT 22, SYS_TIME 25, MKNOD 27, NET_ADMIN 12, NET_RAW 13,
    // SYS_RESOURCE 24, MAC_ADMIN 33, SYSLOG 34, BPF 39, PERFMON 38, DAC_READ_SEARCH 2, CHECKPOINT_RESTORE 40, SYS_NICE 23
    for set in ["CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb"] {
        let bits = u64::from_str_radix(&value(set), 16).expect("hexadecimal");
        for forbidden in [2, 12, 13, 16, 17, 19, 21, 22, 24, 25, 27, 33, 34, 38, 39, 40] {
            assert_eq!(bits & (1 << forbidden), 0, "capability {forbidden} is in {set}");
        }
    }
    for needed in [0, 1, 3, 5, 6, 7] {
        let bits = u64::from_str_radix(&value("CapEff"), 16).expect("hexadecimal");
        assert_ne!(bits & (1 << needed), 0, "package managers need capability {needed}");
    }
    let user =
        sandbox.run(json!({"script": "cat /proc/self/status", "user": "user", "cwd": "/"})).ok().text();
    assert!(user.contains("CapEff:\t0000000000000000"), "{user}");
}

/// At a limit of 1 the kernel writes no core and starts no handler of the host; at 0 it would start the handler.
/// Changing the limit appears to succeed, since programs that hold secrets exit if it fails.
#[test]
fn cannot_make_the_host_handle_a_core_dump() {
    let (_daemon, sandbox) = start();
    let program = format!(
        "{CALL}
import resource, subprocess
limit = lambda: print(resource.getrlimit(resource.RLIMIT_CORE), flush=True)
limit()
for wish in [(-1, -1), (0, 1), (0, 0), (4096, 4096)]:
    resource.setrlimit(resource.RLIMIT_CORE, wish)
    limit()
call(302, 0, 4, struct.pack('QQ', 0, 0), 0)
call(160, 4, struct.pack('QQ', 0, 0))
limit()
subprocess.run(['prlimit', '--core=unlimited', '--pid', str(os.getpid())])
limit()
"
    );
    let limits = sandbox.python(&program).ok();
    assert_eq!(limits.text().lines().count(), 7);
    assert!(limits.text().lines().all(|line| line == "(1, 1)"), "{limits:?}");
    let done =
        sandbox.sh("cd /workspace; ulimit -c unlimited; python3 -c 'import os; os.abort()'; echo $?; ls -A");
    assert_eq!(done.text(), "134", "no file is left: {done:?}");
    assert_eq!(sandbox.sh("cd /workspace; kill -SEGV $$").outcome(), "signaled");
    assert_eq!(sandbox.sh("ls -A /workspace").ok().text(), "");
}

#[test]
fn the_environment_has_no_secrets_and_is_the_guests_own() {
    let (daemon, sandbox) = start();
    let text = sandbox.sh("env; cat /proc/self/environ | tr '\\0' '\\n'").ok().text();
    assert!(!text.contains(&daemon.key));
    assert!(!text.contains(daemon.data_dir.to_str().expect("a plain path")));
    let names: Vec<&str> =
        text.lines().filter_map(|line| line.split_once('=').map(|(name, _)| name)).collect();
    let known = [
        "PATH",
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "LANG",
        "LC_ALL",
        "TERM",
        "PWD",
        "SHLVL",
        "_",
        "SHOAL_COMMAND_ID",
        "SHOAL_SANDBOX_ID",
        "TMPDIR",
        "DEBIAN_FRONTEND",
        "PIP_ROOT_USER_ACTION",
        "PYTHONUNBUFFERED",
        "OLDPWD",
        "HOSTNAME",
    ];
    for name in names {
        assert!(known.contains(&name), "{name} is in the environment of a command");
    }
    let search = sandbox.sh(&format!(
        "grep -rl --devices=skip '{}' /etc /root /run /tmp /workspace /home /var 2>/dev/null | head",
        daemon.key
    ));
    assert_eq!(search.text(), "");
}

#[test]
fn two_sandboxes_have_nothing_in_common() {
    let (daemon, one) = start();
    let two = daemon.sandbox();
    let map = |sandbox: &Sandbox| {
        let text = fs::read_to_string(format!("/proc/{}/uid_map", sandbox.init())).expect("init lives");
        let numbers: Vec<u32> =
            text.split_whitespace().map(|number| number.parse().expect("a number")).collect();
        (numbers[0], numbers[1], numbers[2])
    };
    let (a, b) = (map(&one), map(&two));
    assert_eq!((a.0, b.0), (0, 0));
    assert!(a.1 + a.2 <= b.1 || b.1 + b.2 <= a.1, "{a:?} and {b:?} overlap");
    assert!(a.1 > 65_536 && b.1 > 65_536);
    for kind in ["user", "mnt", "pid", "net", "ipc", "uts", "cgroup"] {
        let of = |process: i32| fs::read_link(format!("/proc/{process}/ns/{kind}")).expect("init lives");
        let host = fs::read_link(format!("/proc/self/ns/{kind}")).expect("a process has namespaces");
        assert_ne!(of(one.init()), of(two.init()), "{kind}");
        assert_ne!(of(one.init()), host, "{kind}");
    }
    one.sh("echo one > /tmp/mark; echo one > /dev/shm/mark; ipcmk -M 4096 >/dev/null").ok();
    let seen = two.sh("ls /tmp/mark /dev/shm/mark 2>/dev/null; ipcs -m | grep -c 0x || true").ok().text();
    assert_eq!(seen, "0");
    let listener = one.spawn(json!({"argv": ["python3", "-c", "import socket,time\ns = socket.socket(); s.bind(('127.0.0.1', 5555)); s.listen()\nu = socket.socket(socket.AF_UNIX); u.bind('\\0shared'); u.listen()\nprint('up', flush=True); time.sleep(1000)"]}));
    one.wrote(&listener, 3);
    all_refused(
        &two,
        "def reach(f, a):\n  socket.socket(f).connect(a)\nprint('tcp', attempt(lambda: reach(socket.AF_INET, ('127.0.0.1', 5555))))\nprint('unix', attempt(lambda: reach(socket.AF_UNIX, '\\0shared')))",
    );
}

#[test]
fn init_is_called_by_its_name() {
    let daemon = Daemon::start();
    let told = daemon.sandbox().sh("ps -o comm= -p 1; ps -o args= -p 1");
    assert_eq!(told.text(), "shoal-init\nshoal-init");
}

#[test]
fn etc_is_cleaned() {
    let (_daemon, sandbox) = start();
    let people: Vec<String> = fs::read_to_string("/etc/passwd")
        .expect("the host has accounts")
        .lines()
        .filter_map(|line| {
            let mut parts = line.split(':');
            let (name, id) = (parts.next()?, parts.nth(1)?.parse::<u32>().ok()?);
            (1000..60_000).contains(&id).then(|| name.to_owned())
        })
        .collect();
    let passwd = sandbox.sh("cat /etc/passwd").ok().text();
    for name in people.iter().filter(|name| *name != "user") {
        assert!(!passwd.contains(&format!("\n{name}:")), "{name} is a person of the host");
    }
    for secret in [
        "/etc/ssh",
        "/etc/ssl/private",
        "/etc/sudoers",
        "/etc/sudoers.d",
        "/etc/apt/auth.conf",
        "/etc/apt/auth.conf.d",
        "/etc/krb5.keytab",
        "/etc/docker",
        "/etc/wireguard",
        "/etc/NetworkManager",
        "/etc/netplan",
        "/etc/cron.d",
        "/etc/shadow-",
        "/etc/fstab",
        "/etc/crypttab",
        "/etc/hosts.allow",
    ] {
        let done = sandbox.sh(&format!("[ ! -e {secret} ] || [ -z \"$(find {secret} -type f | head -1)\" ]"));
        assert_eq!(done.exit_code(), Some(0), "{secret} is inside");
    }
    // Settings of package managers come along so that the machine's mirrors work, without user names, passwords and tokens.
    let settings = "/etc/pip.conf /etc/npmrc /etc/apt /usr/etc/npmrc /usr/local/etc/npmrc";
    let secrets = sandbox.sh(&format!(
        "grep -rniE '://[^/[:space:]]*@|_auth|token[[:space:]]*=|password[[:space:]]*=' {settings} 2>/dev/null | head"
    ));
    assert_eq!(secrets.text(), "", "a credential of the host is inside");
    assert_eq!(sandbox.sh("cat /etc/machine-id 2>/dev/null").text(), "");
    // What a minimal /etc must contain for programs to work.
    sandbox.sh("set -e; getent passwd root >/dev/null; getent hosts localhost >/dev/null; test -e /etc/os-release; test -e /etc/ssl/certs; test -e /etc/alternatives; locale >/dev/null").ok();
}

#[test]
fn python_is_there_under_both_names() {
    let (_daemon, sandbox) = start();
    for name in ["python", "python3", "/usr/bin/python", "/usr/bin/python3", "/usr/bin/env python"] {
        assert_eq!(sandbox.sh(&format!("{name} -c 'print(6 * 7)'")).ok().text(), "42", "{name}");
    }
    assert_eq!(sandbox.run(json!({"argv": ["python", "-c", "import ssl, sqlite3, ctypes, subprocess; print(subprocess.check_output(['echo', 'sub']).decode())"]})).ok().text(), "sub");
}

#[test]
fn a_login_shell_is_silent() {
    let (_daemon, sandbox) = start();
    let silent = |done: Finished| {
        let done = done.ok();
        assert_eq!((done.text().as_str(), done.errors().as_str()), ("here", ""));
    };
    silent(sandbox.run(json!({"argv": ["bash", "-l", "-c", "echo here"]})));
    silent(without_terminal_noise(
        sandbox.run(json!({"argv": ["bash", "-lic", "echo here"], "user": "user", "cwd": "/home/user"})),
    ));
    silent(sandbox.run(json!({"argv": ["sh", "-l", "-c", "echo here"]})));
    silent(sandbox.run(json!({"argv": ["su", "-", "user", "-c", "echo here"]})));
}

/// An interactive shell without a terminal prints that; the message is bash's own and not the profile's.
fn without_terminal_noise(mut done: Finished) -> Finished {
    let is_bash = |line: &&str| line.contains("job control") || line.contains("terminal process group");
    let kept: Vec<String> = done.errors().lines().filter(|line| !is_bash(line)).map(str::to_owned).collect();
    done.stderr = kept.join("\n").into_bytes();
    done
}

#[test]
fn packages_can_be_installed_for_a_user_and_for_all() {
    let (_daemon, sandbox) = start();
    // A package without a network: an installer writes and imports files.
    sandbox
        .sh("set -e; site=$(python3 -m site --user-site); mkdir -p \"$site\"; echo 'value = 1' > \"$site/mine.py\"; python3 -c 'import mine; assert mine.value == 1'; \
             sys=$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))'); mkdir -p \"$sys\"; echo 'value = 2' > \"$sys/ours.py\"; python3 -c 'import ours; assert ours.value == 2'")
        .ok();
    sandbox.sh("set -e; python3 -m venv --without-pip /tmp/venv; /tmp/venv/bin/python -c 'import sys; assert sys.prefix == \"/tmp/venv\"'").ok();
    sandbox.sh("dpkg -l >/dev/null && dpkg --audit").ok();
    sandbox
        .sh("set -e; cd /tmp; mkdir -p p/DEBIAN p/usr/bin; printf 'Package: probe\\nVersion: 1\\nArchitecture: all\\nMaintainer: x <x@x>\\nDescription: x\\n' > p/DEBIAN/control; \
             printf '#!/bin/sh\\necho installed\\n' > p/usr/bin/probe; chmod 755 p/usr/bin/probe; dpkg-deb -b p >/dev/null; dpkg -i p.deb >/dev/null; probe")
        .ok();
}

#[test]
fn programs_can_be_compiled_and_debugged() {
    let (_daemon, sandbox) = start();
    let done = sandbox.sh("set -e; printf '#include <stdio.h>\\nint main(){puts(\"compiled\");}' > /tmp/a.c; cc -o /tmp/a /tmp/a.c; /tmp/a");
    assert_eq!(done.ok().text(), "compiled");
    // Tracing one's own child is allowed, for debuggers.
    sandbox.python(&format!("{CALL}\npid = os.fork()\nif pid == 0:\n  print(call(101, 0, 0, 0, 0)); sys.stdout.flush(); os._exit(0)\nos.wait()")).ok();
}

#[test]
fn cannot_make_thousands_of_cgroups() {
    let (_daemon, sandbox) = start();
    let done = sandbox.python("import os\nn = 0\ntry:\n  for n in range(20000): os.makedirs(f'/sys/fs/cgroup/g{n}')\nexcept OSError as e: print('stopped', e.errno)\nprint(n)");
    let text = done.ok().text();
    let count: u32 = text.lines().last().and_then(|line| line.parse().ok()).expect("a count");
    assert!(count < 5_000, "{text}");
}

#[test]
fn links_in_the_root_do_not_lead_init_or_the_launcher_astray() {
    let (daemon, sandbox) = start();
    // Mount targets of the launcher, replaced by links; the next start of a command and the teardown must not follow
    // them.
    sandbox.sh("rm -rf /workspace && ln -s /proc/1/root /workspace; ln -sf /etc/shadow /tmp/l; true");
    let done = sandbox.run(json!({"argv": ["true"]}));
    assert!(matches!(done.outcome(), "exited" | "failed_to_start"), "{}", done.body);
    sandbox.delete();
    assert!(fs::read_to_string("/etc/shadow").is_ok());
    until_true("the directory is gone", || !daemon.data_dir.join("sandboxes").join(&sandbox.id).exists());
}

#[test]
fn a_tree_that_is_hard_to_remove_is_removed() {
    let (daemon, sandbox) = start();
    daemon.sandbox().delete();
    sandbox
        .python(
            "import os\nos.chdir('/workspace')\nfor n in range(3000):\n  os.mkdir('d'); os.chdir('d')\n  if n % 500 == 0: open('f', 'w').close()\nos.chdir('/workspace')\nfor n in range(2000): open(b'\\xff\\n' + str(n).encode(), 'w').close()\nos.mkdir('locked'); open('locked/f', 'w').close(); os.chmod('locked', 0)\nos.truncate(os.open('sparse', os.O_CREAT | os.O_WRONLY), 2 << 40) if hasattr(os, 'truncate') else None\nos.symlink('/', 'root')\nfor n in range(100): os.link('sparse', f'link{n}')",
        )
        .ok();
    sandbox.delete();
    assert!(!daemon.data_dir.join("sandboxes").join(&sandbox.id).exists());
}

#[test]
fn setuid_programs_give_nothing() {
    let (_daemon, sandbox) = start();
    sandbox.sh("cp /usr/bin/id /tmp/id; chown root /tmp/id; chmod 4755 /tmp/id").ok();
    let done = sandbox.run(json!({"argv": ["/tmp/id", "-u"], "user": "user", "cwd": "/"})).ok();
    assert_eq!(done.text(), "1000", "no_new_privs makes setuid without effect");
}

/// A process that took over init can send anything. The test takes over init's socket.
#[test]
fn a_sandbox_whose_init_speaks_noise_loses_its_processes_and_keeps_its_files() {
    use std::io::{Read, Write};
    let (mut daemon, sandbox) = start();
    let other = daemon.sandbox();
    sandbox.sh("echo precious > /workspace/file").ok();
    sandbox.spawn(json!({"argv": ["sleep", "1000.375"]}));
    let directory = daemon.data_dir.join("sandboxes").join(&sandbox.id);
    daemon.kill();
    let socket = directory.join("init.sock");
    fs::remove_file(&socket).expect("init's socket is there");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("the path is not too long");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            let _ = stream.write_all(&[0xff; 4096]);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    daemon.start_again();
    let (sandbox, other) = (daemon.sandbox_of(&sandbox.id), daemon.sandbox_of(&other.id));
    until_true("the sandbox has failed", || sandbox.get()["state"] == "failed");
    let reason = sandbox.get()["reason"].as_str().unwrap_or_default().to_owned();
    assert!(reason.contains("protocol"), "{reason}");
    until_true("its processes are gone", || sandbox.processes().is_empty());
    let kept = walk(&directory).into_iter().find(|path| path.ends_with("workspace/file"));
    assert_eq!(fs::read_to_string(kept.expect("its files are kept")).expect("it is text"), "precious\n");
    assert_eq!(other.sh("echo fine").ok().text(), "fine");
    sandbox.delete();
    assert!(!directory.exists());
}

/// Everything below a directory.
fn walk(path: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let below = |entry: fs::DirEntry| {
        let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let mut all = if is_dir { walk(&entry.path()) } else { Vec::new() };
        all.push(entry.path());
        all
    };
    entries.flat_map(below).collect()
}

#[test]
fn a_hostile_init_of_another_version_or_noise_harms_only_its_own_sandbox() {
    // A process that takes over a sandbox can at most corrupt its own stream. Killing init is the crudest form.
    let (daemon, sandbox) = start();
    let other = daemon.sandbox();
    shoal_tests::daemon::kill_hard(sandbox.init());
    until_true("the sandbox has failed", || sandbox.get()["state"] == "failed");
    assert!(sandbox.get()["reason"].as_str().is_some_and(|reason| !reason.is_empty()));
    assert_eq!(other.sh("echo fine").ok().text(), "fine");
    sandbox.delete();
}
