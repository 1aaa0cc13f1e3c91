//! Sandboxes that use all they can get: they may suffer, other sandboxes do not.

use serde_json::{Value, json};
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Sandbox, Spawn};

#[track_caller]
fn is_well(sandbox: &Sandbox) {
    assert_eq!(sandbox.sh("echo well").ok().text(), "well");
}

#[test]
fn a_command_over_the_memory_limit_ends_out_of_memory_and_the_sandbox_lives() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    let done = sandbox.python(
        "print('start', flush=True)\nhold = []\nwhile True: hold.append(bytearray(b'x' * (8 << 20)))",
    );
    assert_eq!(done.outcome(), "out_of_memory", "{}", done.body);
    assert_eq!(done.stdout, b"start\n");
    for _ in 0..3 {
        is_well(&sandbox);
    }
    assert_eq!(sandbox.get()["state"], "running");
    let later = sandbox.sh("kill -9 $$");
    assert_eq!(later.outcome(), "signaled", "an old shortage is not blamed for a later end");
}

#[test]
fn a_child_that_runs_out_of_memory_does_not_make_its_command_do_so() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    let done = sandbox.sh("python3 -c 'b = bytearray(b\"x\" * (400 << 20))'; echo child $?");
    assert_eq!(done.text(), "child 137");
    assert_eq!((done.outcome(), done.exit_code()), ("exited", Some(0)), "{}", done.body);
}

#[test]
fn a_shortage_that_a_shell_swallowed_is_not_blamed_on_a_later_command() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    sandbox.sh("python3 -c 'b = bytearray(b\"x\" * (400 << 20))'; echo child $?").ok();
    let later = sandbox.sh("exit 137");
    assert_eq!((later.outcome(), later.exit_code()), ("exited", Some(137)), "{}", later.body);
    let later = sandbox.sh("kill -9 $$");
    assert_eq!(later.outcome(), "signaled", "{}", later.body);
    let hungry = sandbox.sh("python3 -c 'b = bytearray(b\"x\" * (400 << 20))'");
    assert_eq!(hungry.outcome(), "out_of_memory", "{}", hungry.body);
}

#[test]
fn memory_in_files_of_memory_counts() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    let done = sandbox.sh("head -c 400000000 /dev/zero > /dev/shm/big");
    assert!(done.outcome() == "out_of_memory" || done.exit_code() != Some(0), "{}", done.body);
    is_well(&sandbox);
    sandbox.sh("rm -f /dev/shm/big").ok();
    let done = sandbox.python("import os\nfd = os.memfd_create('m')\nfor _ in range(400): os.write(fd, b'x' * (1 << 20))\nprint('held it all')");
    assert!(!done.text().contains("held it all"), "400 MiB in a memfd within 128 MiB");
}

/// Memory that survives its creator: without a limit below the sandbox's own, only init would be left to kill.
#[test]
fn memory_that_outlives_its_process_does_not_end_the_sandbox() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    // Small, so that hardly any memory is freed when it is killed.
    let program = "#include <sys/shm.h>\n#include <string.h>\nint main() { for (int n = 0; n < 400; n++) { int id = shmget(IPC_PRIVATE, 1 << 20, 0600 | IPC_CREAT); if (id < 0) return 0; char *at = shmat(id, 0, 0); if (at == (void *)-1) return 0; memset(at, 1, 1 << 20); shmdt(at); } }";
    sandbox.run(json!({"script": "printf '%s' \"$PROGRAM\" > /tmp/a.c; cc -static -o /tmp/a /tmp/a.c", "env": {"PROGRAM": program}})).ok();
    sandbox.run(json!({"argv": ["/tmp/a"]}));
    for _ in 0..3 {
        is_well(&sandbox);
    }
    assert_eq!(sandbox.get()["state"], "running");
}

#[test]
fn one_sandbox_out_of_memory_disturbs_no_other() {
    let daemon = Daemon::start();
    let (greedy, other) =
        (daemon.sandbox_with(json!({"memory": "64Mi"})), daemon.sandbox_with(json!({"memory": "64Mi"})));
    let steady = other.spawn(json!({"argv": ["sleep", "1000"]}));
    for _ in 0..3 {
        greedy.python("hold = []\nwhile True: hold.append(bytearray(b'x' * (8 << 20)))");
    }
    assert_eq!(other.command(&steady)["state"], "running");
    is_well(&other);
    is_well(&greedy);
}

/// A daemon with this oom_score_adj of its own.
fn daemon_at(score: i32) -> Daemon {
    Spawn { through: ["choom", "-n", &score.to_string(), "--"].map(String::from).into(), ..Spawn::default() }
        .start()
}

#[test]
fn commands_are_oom_victims_before_init_whatever_the_score_of_the_daemon() {
    for score in [0, 150, 300, 1000] {
        let daemon = daemon_at(score);
        let of = |pid: i32| {
            let path = format!("/proc/{pid}/oom_score_adj");
            std::fs::read_to_string(path).expect("it lives").trim().parse::<i32>().expect("a number")
        };
        assert_eq!(of(daemon.pid()), score);
        let sandbox = daemon.sandbox();
        let command = sandbox.spawn(json!({"script": "sleep 1000 & sleep 1000"}));
        sandbox.running(&command);
        let init = sandbox.init();
        until_true("the command and its child run", || sandbox.processes().len() >= 3);
        let (at_init, inside) =
            (of(init), sandbox.sh("cat /proc/self/oom_score_adj /proc/1/oom_score_adj").ok());
        assert_eq!((at_init, inside.text().as_str()), (200, "1000\n200"), "below a daemon at {score}");
        for pid in sandbox.processes().into_iter().filter(|pid| *pid != init) {
            assert_eq!(of(pid), 1000, "below a daemon at {score}");
        }
    }
}

#[test]
fn a_shortage_that_init_meets_takes_a_command_and_init_lives() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "64Mi"}));
    // With the script, which init receives and passes on, it is more than the limit; without this command, even with
    // the file that survives it, there is room enough for init.
    let hold = "import time\nkeep = bytearray(b'x' * (16 << 20))\nwith open('/dev/shm/big', 'wb') as file:\n    for _ in range(8): file.write(bytes(1 << 20))\nprint('held', flush=True)\ntime.sleep(1000)";
    let hold = sandbox.spawn(json!({"argv": ["python3", "-c", hold]}));
    sandbox.wrote(&hold, 5);
    let script = format!("true {}", "x".repeat(15 << 20));
    let big = sandbox.post_command(&json!({"script": script}));
    assert!(big.status == 200 || big.status >= 400, "{}", big.describe());
    assert_eq!(sandbox.get()["state"], "running", "init was killed");
    // The kernel kills the larger of the two commands: the one that holds, unless the shell with the script has
    // started by then.
    let refused = big.status >= 400 || big.json()["result"]["outcome"] == "out_of_memory";
    if !refused {
        assert_eq!(sandbox.ended(&hold)["result"]["outcome"], "out_of_memory");
    }
    sandbox.sh("rm /dev/shm/big").ok();
    is_well(&sandbox);
}

/// Queues what `fill` sends on loopback, and prints how many MiB were accepted.
const QUEUED: &str = "
import errno, resource, socket, struct, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]; resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
hold, queued = [], 0
def buffers(s):
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF): s.setsockopt(socket.SOL_SOCKET, option, 64 << 20)
def taken(s):
    # SO_MEMINFO: what waits to be read, its limit, what waits to be sent.
    now = struct.unpack('9I', s.getsockopt(1, 55, 36))
    return now[0] + now[2]
try:
    for n in range(COUNT):
        FILL
except OSError as error:
    if error.errno not in (errno.ENOMEM, errno.ENOBUFS, errno.EMFILE): raise
print(sum(taken(s) for s in hold) >> 20)
";
const FILL_TCP: &str = "
        if n == 0: listener = socket.create_server(('127.0.0.1', 0), backlog=COUNT)
        a = socket.socket(); buffers(a); a.connect(listener.getsockname()); b = listener.accept()[0]; buffers(b)
        hold += [a, b]; a.setblocking(False)
        try:
            while True: a.send(bytes(1 << 16))
        except BlockingIOError: pass";
const FILL_UDP: &str = "
        s = socket.socket(type=socket.SOCK_DGRAM); buffers(s); s.bind(('127.0.0.1', 0)); s.connect(s.getsockname())
        hold.append(s); s.setblocking(False); before = -1
        while taken(s) > before: before = taken(s); s.send(bytes(60000))";

#[test]
fn memory_in_socket_buffers_counts() {
    let daemon = Daemon::start();
    for (fill, count) in [(FILL_TCP, "60"), (FILL_UDP, "1500")] {
        let sandbox = daemon.sandbox_with(json!({"memory": "64Mi"}));
        let program = QUEUED.replace("FILL", fill.trim_start()).replace("COUNT", count);
        let held = sandbox.python(&program);
        if held.outcome() == "out_of_memory" {
            continue;
        }
        let held: u64 = held.ok().text().parse().expect("a number");
        // Every socket may hold a page beyond the limit, so that no connection stalls for ever.
        assert!(held <= 80, "{held} MiB wait in sockets within 64 MiB");
    }
}

/// Opens netlink sockets in many threads at once and fills them with answers that nobody reads. Prints how many were
/// opened, the errors of the others, and how many KiB wait.
const FILL_NETLINK: &str = "
import errno, socket, struct, subprocess, sys, threading
hold, errors = [], set()
def open_many():
    for _ in range(40):
        try: hold.append(socket.socket(16, 3, 0))
        except OSError as error: errors.add(errno.errorcode[error.errno])
threads = [threading.Thread(target=open_many) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
def taken(s): return struct.unpack('9I', s.getsockopt(1, 55, 36))[0]
# The answer to a request of no known type carries the request.
request = struct.pack('IHHII', 16 + 30000, 0x7ffe, 5, 1, 0) + bytes(30000)
for s in hold:
    s.setblocking(False); before = -1
    while taken(s) > before:
        before = taken(s)
        try: s.send(request)
        except OSError: pass
child = subprocess.run([sys.executable, '-c', 'import socket; socket.socket(16, 3, 0)'], stderr=subprocess.PIPE, text=True)
print(len(hold), sorted(errors), sum(map(taken, hold)) >> 10, 'ENOBUFS' if 'Errno 105' in child.stderr else child.returncode)
for s in hold: s.close()
while True:
    try: socket.if_nameindex(); break
    except OSError as error: assert error.errno == errno.ENOBUFS, error
";

#[test]
fn data_that_waits_in_netlink_sockets_has_a_bound() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"memory": "128Mi"}));
    for user in ["root", "nobody"] {
        let done = sandbox.run(json!({"argv": ["python3", "-c", FILL_NETLINK], "user": user})).ok().text();
        let parts: Vec<&str> = done.split(' ').collect();
        let [open, errors, held_kib, child] = parts[..] else { panic!("{done}") };
        let (open, held_kib): (u64, u64) = (open.parse().expect(&done), held_kib.parse().expect(&done));
        assert_eq!((errors, child), ("['ENOBUFS']", "ENOBUFS"), "{done}");
        assert!((64..=128).contains(&open), "{done}");
        // The probe fills them: at the usual size each holds some 200 KiB.
        assert!(held_kib >= open * 64, "{done}");
        let size = std::fs::read_to_string("/proc/sys/net/core/rmem_default").expect("every Linux has it");
        let size_kib = size.trim().parse::<u64>().expect("a number") >> 10;
        assert!(held_kib <= 128 * (size_kib + 64), "{done}");
    }
    // Another sandbox has its own count.
    is_well(&daemon.sandbox());
    is_well(&sandbox);
}

#[test]
fn huge_pages_of_the_host_are_not_a_guests() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let probe = "
import ctypes, errno, mmap, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (4, 4 | 1, 4 | (21 << 26), 4 | (30 << 26)):
    print('memfd', libc.memfd_create(b'm', flags), errno.errorcode[ctypes.get_errno()])
libc.mmap.restype = ctypes.c_long
for flags in (0x22 | 0x40000, 0x21 | 0x40000, 0x22 | 0x40000 | (30 << 26)):
    print('mmap', libc.mmap(None, ctypes.c_long(1 << 21), 3, flags, -1, ctypes.c_long(0)), errno.errorcode[ctypes.get_errno()])
print('shmget', libc.shmget(0, ctypes.c_long(1 << 21), 0o1600 | 0o4000), errno.errorcode[ctypes.get_errno()])
os.close(os.memfd_create('m')); mmap.mmap(-1, 1 << 21).close()
";
    let text = sandbox.python(probe).ok().text();
    // Without the filter, this kernel would answer a memfd with success whether it has huge pages or not.
    assert_eq!(text.lines().filter(|line| line.ends_with(" -1 ENOMEM")).count(), 8, "{text}");
    assert_eq!(text.lines().count(), 8, "{text}");
}

#[test]
fn all_sandboxes_together_leave_memory_to_the_host() {
    let daemon = Daemon::start();
    let groups = daemon.scope().cgroups();
    let limits = groups.iter().flat_map(|group| {
        ["memory.limit_in_bytes", "memory.max"].map(|file| std::fs::read_to_string(group.join(file)))
    });
    let limits: Vec<u64> = limits.filter_map(|text| text.ok()?.trim().parse().ok()).collect();
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("every Linux has it");
    let total = meminfo.split_whitespace().nth(1).expect("MemTotal comes first");
    let total = total.parse::<u64>().expect("a number") << 10;
    let [limit] = limits[..] else { panic!("one group has a limit: {limits:?} in {groups:?}") };
    assert!(limit >= total / 2 && total - limit >= 256 << 20, "{limit} of {total}");
}

#[test]
fn a_fork_bomb_stays_at_home() {
    let daemon = Daemon::start();
    let (bomb, other) = (daemon.sandbox(), daemon.sandbox());
    let id = bomb.spawn(json!({"script": "f() { f | f & }; f; while :; do sleep 1; done"}));
    let limit = bomb.get()["limits"]["pids"].as_u64().expect("a limit") as usize;
    until_true("the bomb has gone off", || bomb.processes().len() > limit / 2);
    assert!(bomb.processes().len() <= limit + 8, "{} processes", bomb.processes().len());
    is_well(&other);
    is_well(&daemon.sandbox());
    // Killing the command ends the whole bomb, faster than any signal.
    bomb.kill(&id).expect(204);
    assert_eq!(bomb.ended(&id)["result"]["outcome"], "killed");
    until_true("the bomb is gone", || bomb.processes().len() <= 2);
    is_well(&bomb);
}

#[test]
fn a_fork_bomb_dies_of_its_timeout_and_of_a_delete() {
    let daemon = Daemon::start();
    let bomb = daemon.sandbox();
    let script = "import os\nwhile True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass";
    let done = bomb.run(json!({"argv": ["python3", "-c", script], "timeout_seconds": 3}));
    assert_eq!(done.outcome(), "timed_out", "{}", done.body);
    until_true("the bomb is gone", || bomb.processes().len() <= 2);
    let again = bomb.spawn(json!({"argv": ["python3", "-c", script]}));
    until_true("the bomb has gone off", || bomb.processes().len() > 100);
    let _ = again;
    bomb.delete();
    assert_eq!(bomb.processes(), [] as [i32; 0]);
}

#[test]
fn a_sandbox_without_processes_left_says_so() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let id = sandbox.spawn(json!({"argv": ["python3", "-c", "import os, time\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(1000)\nexcept OSError: pass\nprint('full', flush=True)\ntime.sleep(1000)"]}));
    sandbox.wrote(&id, 5);
    let done = sandbox.run(json!({"argv": ["true"]}));
    assert!(matches!(done.outcome(), "failed_to_start" | "exited"), "{}", done.body);
    if done.outcome() == "failed_to_start" {
        assert!(done.body["result"]["message"].as_str().is_some_and(|text| !text.is_empty()));
    }
    sandbox.kill(&id).expect(204);
    sandbox.ended(&id);
    is_well(&sandbox);
}

#[test]
fn threads_count_as_processes() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let limit = sandbox.get()["limits"]["pids"].as_u64().expect("a limit");
    let done = sandbox.python(
        "import threading, time\nthreading.stack_size(65536)\nn = 0\ntry:\n  while n < 100000:\n    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start(); n += 1\nexcept RuntimeError: pass\nprint(n, flush=True)\nimport os; os._exit(0)",
    );
    let count: u64 = done.ok().text().parse().expect("a count");
    assert!(count <= limit, "{count} threads within {limit}");
    is_well(&sandbox);
}

#[test]
fn a_descriptor_bomb_stays_at_home() {
    let daemon = Daemon::start();
    let (bomb, other) = (daemon.sandbox(), daemon.sandbox());
    let id = bomb.spawn(json!({"argv": ["python3", "-c", "import os, socket, time, resource\nsoft, hard = resource.getrlimit(resource.RLIMIT_NOFILE); resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\nfor _ in range(20):\n  if os.fork() == 0: break\nhold = []\ntry:\n  while True: hold.append(socket.socketpair())\nexcept OSError: pass\nos.write(1, b'.')\ntime.sleep(1000)"]}));
    bomb.wrote(&id, 21);
    is_well(&other);
    is_well(&daemon.sandbox());
    is_well(&bomb);
    bomb.kill(&id).expect(204);
}

#[test]
fn an_inotify_bomb_leaves_others_able() {
    let daemon = Daemon::start();
    let (bomb, other) = (daemon.sandbox(), daemon.sandbox());
    let take = "import ctypes, os, time\nlibc = ctypes.CDLL(None, use_errno=True)\nn = 0\nwhile n < 4096 and libc.inotify_init1(0) >= 0: n += 1\nprint(n, flush=True)\ntime.sleep(float(os.environ.get('HOLD', '0')))";
    let id = bomb.spawn(json!({"argv": ["python3", "-c", take], "env": {"HOLD": "1000"}}));
    bomb.wrote(&id, 2);
    let count: u32 = other.python(take).ok().text().parse().expect("a count");
    assert!(count > 16, "another sandbox got {count} inotify instances");
    // The host too.
    let output =
        std::process::Command::new("/usr/bin/python3").args(["-c", take]).output().expect("python3 is there");
    let count: u32 = String::from_utf8_lossy(&output.stdout).trim().parse().expect("a count");
    assert!(count > 16, "the host got {count} inotify instances");
    bomb.kill(&id).expect(204);
}

#[test]
fn a_log_flood_stays_within_what_is_kept() {
    let spawn = Spawn { config: "output_kept = \"4Mi\"\n".into(), ..Spawn::default() };
    let daemon = spawn.start();
    let (flood, other) = (daemon.sandbox(), daemon.sandbox());
    let ids: Vec<String> = (0..4).map(|_| flood.spawn(json!({"script": "yes & yes >&2"}))).collect();
    for id in &ids {
        flood.wrote(id, 64 << 20);
    }
    is_well(&other);
    let size = disk_bytes(&daemon.data_dir);
    assert!(size < 200 << 20, "{} MiB on disk", size >> 20);
    for id in &ids {
        flood.kill(id).expect(204);
        assert_eq!(flood.ended(id)["result"]["outcome"], "killed");
    }
    is_well(&flood);
}

/// Disk usage of a tree. Files that vanish meanwhile do not count.
fn disk_bytes(path: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let Ok(meta) = std::fs::symlink_metadata(path) else { return 0 };
    let below = match std::fs::read_dir(path) {
        Ok(list) if meta.is_dir() => list.filter_map(|entry| Some(disk_bytes(&entry.ok()?.path()))).sum(),
        _ => 0,
    };
    meta.blocks() * 512 + below
}

#[test]
fn alone_a_cpu_limit_roughly_holds() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"cpu": "100m"}));
    // The share of a processor that it got. A busy machine makes it smaller, never larger, so neighbours cannot break
    // this test.
    let share = sandbox.python(
        "import time\nn, began = 0, time.perf_counter()\nfor i in range(6000000): n += i\n\
         print(time.process_time() / (time.perf_counter() - began))",
    );
    let share: f64 = share.ok().text().parse().expect("a number");
    // A tenth in theory; a start within one period adds noise.
    assert!(share < 0.25, "a sandbox with a tenth of a processor got {share:.2} of one");
}

/// A key with limits, and its secret.
fn key_with(daemon: &Daemon, mut limits: Value) -> String {
    limits["owner"] = "limited".into();
    daemon.post("/v1/keys", &limits).expect(201)["secret"].as_str().expect("a secret").into()
}

#[track_caller]
fn create_as(daemon: &Daemon, key: &str, body: Value) -> shoal_tests::Response {
    shoal_tests::Request::new("POST", "/v1/sandboxes").key(key).json(&body).send(daemon.address)
}

#[test]
fn a_key_is_held_to_its_number_of_sandboxes() {
    let daemon = Daemon::start();
    let key = key_with(&daemon, json!({"sandboxes_max": 2}));
    let first = create_as(&daemon, &key, json!({})).expect(201)["id"].as_str().expect("an id").to_owned();
    create_as(&daemon, &key, json!({})).expect(201);
    let refused = create_as(&daemon, &key, json!({})).expect_refusal(429, "quota_exceeded");
    assert_eq!(refused["details"]["limit"], 2, "{refused}");
    daemon.sandbox();
    shoal_tests::Request::new("DELETE", &format!("/v1/sandboxes/{first}"))
        .key(&key)
        .send(daemon.address)
        .expect(204);
    create_as(&daemon, &key, json!({})).expect(201);
}

#[test]
fn a_key_is_held_to_its_number_also_when_all_ask_at_once() {
    let daemon = Daemon::start();
    let key = key_with(&daemon, json!({"sandboxes_max": 3}));
    let answers: Vec<u16> = std::thread::scope(|scope| {
        let asking: Vec<_> =
            (0..12).map(|_| scope.spawn(|| create_as(&daemon, &key, json!({})).status)).collect();
        asking.into_iter().map(|one| one.join().expect("no thread panics")).collect()
    });
    assert_eq!(answers.iter().filter(|status| **status == 201).count(), 3, "{answers:?}");
    assert_eq!(answers.iter().filter(|status| **status == 429).count(), 9, "{answers:?}");
}

#[test]
fn a_key_is_held_to_its_cpu_and_memory() {
    let daemon = Daemon::start();
    let key = key_with(&daemon, json!({"cpu_max": "1", "memory_max": "1Gi"}));
    create_as(&daemon, &key, json!({"cpu": "700m", "memory": "256Mi"})).expect(201);
    create_as(&daemon, &key, json!({"cpu": "400m", "memory": "256Mi"})).expect_refusal(429, "quota_exceeded");
    create_as(&daemon, &key, json!({"cpu": "100m", "memory": "900Mi"})).expect_refusal(429, "quota_exceeded");
    create_as(&daemon, &key, json!({"cpu": "300m", "memory": "768Mi"})).expect(201);
}

#[test]
fn a_key_is_held_to_its_limits_over_a_restart() {
    let mut daemon = Daemon::start();
    let key = key_with(&daemon, json!({"sandboxes_max": 1}));
    create_as(&daemon, &key, json!({})).expect(201);
    daemon.crash();
    create_as(&daemon, &key, json!({})).expect_refusal(429, "quota_exceeded");
}

#[test]
fn a_full_machine_refuses_and_says_so() {
    let spawn = Spawn { config: "sandboxes_max = 2\nmemory_max = \"8Gi\"\n".into(), ..Spawn::default() };
    let daemon = spawn.start();
    let first = daemon.sandbox_with(json!({"memory": "256Mi"}));
    daemon.sandbox_with(json!({"memory": "256Mi"}));
    let refused =
        daemon.post("/v1/sandboxes", &json!({"memory": "256Mi"})).expect_refusal(503, "no_capacity");
    assert!(refused["hint"].is_string(), "{refused}");
    first.delete();
    // Never possible, so the request is at fault and not the moment.
    daemon.post("/v1/sandboxes", &json!({"memory": "9Gi"})).expect_refusal(400, "invalid_request");
    daemon.post("/v1/sandboxes", &json!({"memory": "8000Mi"})).expect_refusal(503, "no_capacity");
    daemon.sandbox_with(json!({"memory": "256Mi"}));
}

#[test]
fn more_commands_than_a_sandbox_can_know_are_refused_and_the_rest_work() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let limit = sandbox.get()["limits"]["pids"].as_u64().expect("a limit");
    let mut started = 0;
    for _ in 0..limit + 50 {
        let answer = sandbox.post_command(&json!({"argv": ["sleep", "1000"], "wait": false}));
        assert!(answer.status < 500 || answer.status == 503, "{}", answer.describe());
        if answer.status >= 400 {
            break;
        }
        started += 1;
        if started > 4_000 {
            break;
        }
    }
    let list = daemon.get(&sandbox.path("/commands?limit=1")).expect(200);
    assert_eq!(list["commands"].as_array().map(Vec::len), Some(1));
    is_well(&daemon.sandbox());
    sandbox.delete();
    assert_eq!(sandbox.processes(), [] as [i32; 0]);
}

/// Small strings, which the allocator keeps when they are freed. Large buffers go back to the kernel by themselves.
#[test]
fn memory_that_a_burst_of_requests_needed_goes_back_to_the_machine() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    let figure = |name: &str| -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).expect("it lives");
        let line = status.lines().find(|line| line.starts_with(name)).expect("the kernel reports it");
        line.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
    };
    let before = figure("VmRSS:");
    // More than enough for the assertion below even if the daemon reads one body after the other.
    let body = json!({"argv": vec!["x"; 2 << 20]});
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| sandbox.post_command(&body).expect(400));
        }
    });
    let grown = figure("VmHWM:") - before;
    assert!(grown > 64 << 10, "the burst must need memory: {grown} KiB");
    until_true("most of it is returned", || figure("VmRSS:") < before + grown / 4);
}
