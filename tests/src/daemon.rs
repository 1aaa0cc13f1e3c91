//! A real daemon with its own data directory, port and key, which can be killed and started again.
//!
//! When it is dropped, also by a panic, everything of its installation is ended and removed.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::audit::{Audit, Scope};
use crate::http::{Request, Response};
use crate::sandbox::Sandbox;
use crate::wait::{DEADLINE, until, until_true};

/// How to start a daemon.
#[derive(Debug, Clone, Default)]
pub struct Spawn {
    /// More arguments for `serve`.
    pub arguments: Vec<String>,
    /// More environment.
    pub environment: Vec<(String, String)>,
    /// A program with arguments that executes the daemon, such as `unshare`; none if empty.
    pub through: Vec<String>,
    /// Lines for a config file; no file if empty.
    pub config: String,
    /// Number of spares. Usually none, so that an audit separates what the test made from leftovers.
    pub spares: usize,
    /// Puts the data directory on a disk of its own, of this many bytes.
    pub tmpfs_bytes: Option<u64>,
    /// A program other than that of this build.
    pub program: Option<PathBuf>,
}

impl Spawn {
    /// Starts it.
    #[track_caller]
    pub fn start(self) -> Daemon {
        assert!(rustix::process::geteuid().is_root(), "the black-box tests need root");
        let home = Home::new();
        let data_dir = home.join("data");
        if let Some(bytes) = self.tmpfs_bytes {
            fs::create_dir(&data_dir).expect("the test's own directory takes directories");
            let options = CString::new(format!("size={bytes},mode=0700")).expect("digits have no NUL");
            let flags = rustix::mount::MountFlags::empty();
            rustix::mount::mount("tmpfs", &data_dir, "tmpfs", flags, Some(options.as_c_str()))
                .expect("the tests run as root");
        }
        let (id, secret) = (random_hex(8), random_hex(32));
        let mut daemon = Daemon {
            spawn: self,
            listen: "127.0.0.1:0".into(),
            key: format!("shoal_{id}_{secret}"),
            address: SocketAddr::from(([127, 0, 0, 1], 0)),
            child: None,
            starts: 0,
            data_dir,
            home,
        };
        daemon.start_again();
        daemon
    }
}

/// A daemon.
pub struct Daemon {
    /// Where everything of this test is.
    pub home: Home,
    /// Its data directory.
    pub data_dir: PathBuf,
    /// Where it listens.
    pub address: SocketAddr,
    /// A key with admin rights.
    pub key: String,
    /// How it is started, also the next time.
    pub spawn: Spawn,
    listen: String,
    child: Option<Child>,
    starts: u32,
}

impl Daemon {
    /// Starts one with default settings.
    #[track_caller]
    pub fn start() -> Self {
        Spawn::default().start()
    }

    /// Starts it on its data directory, again or for the first time.
    #[track_caller]
    pub fn start_again(&mut self) {
        assert!(self.child.is_none(), "the daemon runs already");
        self.starts += 1;
        let (child, address) = self.try_start(&self.log(self.starts)).unwrap_or_else(|said| {
            panic!("the daemon did not become ready; its output:\n{said}");
        });
        self.address = address;
        self.child = Some(child);
    }

    /// As [`Self::start_again`], with another program.
    #[track_caller]
    pub fn start_again_through(&mut self, through: &[&str]) {
        self.spawn.through = through.iter().map(|word| (*word).to_owned()).collect();
        self.start_again();
    }

    /// Lets another program take over while this one runs, at the same address. The old one must exit cleanly.
    #[track_caller]
    pub fn upgrade(&mut self, program: &Path) {
        let mut before = self.child.take().expect("the daemon runs");
        self.spawn.program = Some(program.into());
        if !self.spawn.arguments.iter().any(|argument| argument == "--take-over") {
            self.spawn.arguments.push("--take-over".into());
        }
        self.listen = self.address.to_string();
        self.start_again();
        let ended = before.wait().expect("a child can be waited for");
        assert!(ended.success(), "the daemon before ended with {ended}");
    }

    /// The command that starts a daemon on the data directory.
    pub fn command(&self, log: &Path) -> Command {
        let stderr = File::create(log).expect("the test's own directory takes files");
        let daemon = self.spawn.program.clone().unwrap_or_else(binary);
        let mut command = match self.spawn.through.split_first() {
            Some((program, arguments)) => {
                let mut command = Command::new(program);
                command.args(arguments).arg(daemon);
                command
            }
            None => Command::new(daemon),
        };
        command.args(["serve", "--listen", &self.listen, "--data-dir"]).arg(&self.data_dir);
        command.args(["--spares", &self.spawn.spares.to_string()]);
        if !self.spawn.config.is_empty() {
            let file = self.home.join("shoal.toml");
            fs::write(&file, &self.spawn.config).expect("the test's own directory takes files");
            command.arg("--config").arg(file);
        }
        command.args(&self.spawn.arguments);
        // A clean environment, so that a developer's settings do not reach the tests.
        for name in ["SHOAL_URL", "SHOAL_DATA_DIR", "SHOAL_PRIVATE_DIR"] {
            command.env_remove(name);
        }
        // Nor does the machine's configuration file.
        command.env("SHOAL_CONFIG", "");
        // A store for each of hundreds of daemons would fill the disk; tests about stores request one.
        command.env("SHOAL_STORE", "directory");
        command.env("SHOAL_API_KEY", &self.key).envs(self.spawn.environment.iter().cloned());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(stderr);
        command
    }

    /// Starts a process on the data directory. Returns its output if it ends before it is ready.
    pub fn try_start(&self, log: &Path) -> Result<(Child, SocketAddr), String> {
        let mut child = self.command(log).spawn().expect("the program can be started");
        let stdout = child.stdout.take().expect("stdout is a pipe");
        let (send, receive) = mpsc::channel();
        // Reads to the end, so that a daemon that prints more never blocks.
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(address) = address_in(&line) {
                    let _ = send.send(address);
                }
            }
        });
        match receive.recv_timeout(DEADLINE) {
            Ok(address) => Ok((child, address)),
            Err(_) => {
                let _ = child.kill();
                let status = child.wait().expect("a child can be waited for");
                let said = fs::read_to_string(log).unwrap_or_default();
                Err(format!("{status}\n{said}"))
            }
        }
    }

    /// The log of the nth start.
    pub fn log(&self, start: u32) -> PathBuf {
        self.home.join(format!("serve-{start}.log"))
    }

    /// Everything that all starts have logged.
    pub fn logs(&self) -> String {
        (1..=self.starts).map(|start| fs::read_to_string(self.log(start)).unwrap_or_default()).collect()
    }

    /// The daemon's process.
    pub fn pid(&self) -> i32 {
        self.child.as_ref().expect("the daemon runs").id() as i32
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        let mut child = self.child.take().expect("the daemon runs");
        child.kill().expect("a child can be killed");
        child.wait().expect("a child can be waited for");
    }

    /// Ends it as an operator would, and returns whether it exited cleanly.
    pub fn stop(&mut self) -> bool {
        let mut child = self.child.take().expect("the daemon runs");
        send_signal(child.id() as i32, Signal::TERM);
        until("the daemon has ended after SIGTERM", || child.try_wait().expect("a child can be asked"))
            .success()
    }

    /// From now on, it listens at the same address again.
    pub fn keep_address(&mut self) {
        self.listen = self.address.to_string();
    }

    /// `kill -9`, then a new start.
    #[track_caller]
    pub fn crash(&mut self) {
        self.kill();
        self.start_again();
    }

    /// The processes outside sandboxes that belong to this daemon: the launcher, once it runs.
    pub fn launchers(&self) -> Vec<i32> {
        let scope = self.scope();
        let inside = scope.inside();
        let own = self.child.as_ref().map(|child| child.id() as i32);
        scope
            .processes()
            .into_iter()
            .filter(|process| Some(*process) != own && !inside.contains(process))
            .collect()
    }

    /// Its scope for audits.
    pub fn scope(&self) -> Scope {
        Scope { installation: installation(&self.data_dir), data_dir: self.data_dir.clone() }
    }

    /// What it has on the machine now.
    pub fn audit(&self) -> Audit {
        Audit::of(&self.scope())
    }

    /// Asserts that nothing is left beyond `before`. Waits for removal in the background.
    #[track_caller]
    pub fn expect_nothing_beyond(&self, before: &Audit) {
        let mut left = Vec::new();
        let give_up = std::time::Instant::now() + DEADLINE;
        while std::time::Instant::now() < give_up {
            left = self.audit().beyond(before);
            if left.is_empty() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("left behind:\n  {}", left.join("\n  "));
    }

    /// A request with the key.
    pub fn request(&self, method: &str, target: &str) -> Request {
        Request::new(method, target).key(&self.key)
    }

    /// Sends a GET.
    #[track_caller]
    pub fn get(&self, target: &str) -> Response {
        self.request("GET", target).send(self.address)
    }

    /// Sends JSON.
    #[track_caller]
    pub fn post(&self, target: &str, body: &Value) -> Response {
        self.request("POST", target).json(body).send(self.address)
    }

    /// Sends a DELETE.
    #[track_caller]
    pub fn delete(&self, target: &str) -> Response {
        self.request("DELETE", target).send(self.address)
    }

    /// Creates a sandbox with default settings.
    #[track_caller]
    pub fn sandbox(&self) -> Sandbox {
        self.sandbox_with(json!({}))
    }

    /// Creates a sandbox with this body.
    #[track_caller]
    pub fn sandbox_with(&self, body: Value) -> Sandbox {
        let made = self.post("/v1/sandboxes", &body).expect(201);
        assert_eq!(made["state"], "running", "{made}");
        self.sandbox_of(made["id"].as_str().expect("a sandbox has an id"))
    }

    /// An existing sandbox.
    pub fn sandbox_of(&self, id: &str) -> Sandbox {
        Sandbox { address: self.address, key: self.key.clone(), id: id.into(), scope: self.scope() }
    }

    /// Every sandbox of the owner, over all pages.
    #[track_caller]
    pub fn list(&self) -> Vec<Value> {
        let (mut all, mut cursor) = (Vec::new(), None::<String>);
        loop {
            let target = match &cursor {
                Some(cursor) => format!("/v1/sandboxes?cursor={cursor}"),
                None => "/v1/sandboxes".into(),
            };
            let page = self.get(&target).expect(200);
            all.extend(page["sandboxes"].as_array().expect("a page has sandboxes").iter().cloned());
            match page["next_cursor"].as_str() {
                Some(next) => cursor = Some(next.into()),
                None => return all,
            }
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let logs = self.logs();
            let lines: Vec<&str> = logs.lines().collect();
            let from = lines.len().saturating_sub(40);
            eprintln!("the daemon's last words:\n{}", lines[from..].join("\n"));
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The program of this build, which is beside the folder of this test's executable.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("SHOAL_TEST_BINARY") {
        return path.into();
    }
    let own = std::env::current_exe().expect("a process knows its executable");
    let path = own.ancestors().nth(2).expect("tests are in target/<profile>/deps").join("shoal");
    assert!(
        path.exists(),
        "{} is missing: run `cargo xtask test`, or `cargo build --workspace --bins` first",
        path.display()
    );
    path
}

/// Sends a signal to a process that may be gone.
pub fn send_signal(process: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(process) {
        let _ = kill_process(pid, signal);
    }
}

/// Ends a process that is not our child, and returns when it is dead.
pub fn kill_hard(process: i32) {
    until_true("a killed process is dead", || {
        send_signal(process, Signal::KILL);
        crate::audit::is_dead(process)
    });
}

/// Random digits.
pub fn random_hex(bytes: usize) -> String {
    let mut random = vec![0; bytes];
    let mut source = File::open("/dev/urandom").expect("the machine has randomness");
    std::io::Read::read_exact(&mut source, &mut random).expect("the machine has randomness");
    random.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Where tests have their directories: `/tmp` may be in memory, without what overlays need.
const DIRECTORIES: &str = "/var/tmp";
/// Prefix of their names; the process id of the test follows.
const PREFIX: &str = "shoal-test-";

/// A directory for one test. Dropping it also removes everything of daemons with their data in it.
#[derive(Debug)]
pub struct Home(PathBuf);

impl Home {
    /// Makes one.
    #[allow(clippy::new_without_default)] // A default that makes directories would surprise.
    pub fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{count}-{}", std::process::id(), random_hex(4));
        let path = Path::new(DIRECTORIES).join(name);
        fs::create_dir(&path).expect("the directory of temporary files takes directories");
        Self(path)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Something in it.
    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        remove_home(&self.0);
    }
}

/// Ends and removes everything of daemons with their data in a test's directory, then the directory itself.
fn remove_home(home: &Path) {
    // A daemon that a test started has `data`, a private one that `shoal run` started has `private/data`.
    for data_dir in [home.join("data"), home.join("private/data")] {
        Scope { installation: installation(&data_dir), data_dir: data_dir.clone() }.remove();
        // In case it was a disk of its own; otherwise the kernel refuses.
        let _ = rustix::mount::unmount(&data_dir, rustix::mount::UnmountFlags::DETACH);
    }
    if std::env::var_os("SHOAL_TEST_KEEP").is_none() {
        let _ = fs::remove_dir_all(home);
    }
}

/// Removes everything of tests whose process is gone, and returns the directories.
pub fn remove_abandoned() -> Vec<PathBuf> {
    let mut removed = Vec::new();
    for entry in fs::read_dir(DIRECTORIES).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let process = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<i32>().ok());
        if process.is_some_and(crate::audit::is_dead) {
            remove_home(&entry.path());
            removed.push(entry.path());
        }
    }
    removed
}

/// The id in a data directory.
pub fn installation(data_dir: &Path) -> Option<String> {
    let text = fs::read_to_string(data_dir.join("installation")).ok()?;
    Some(text.trim().to_owned())
}

/// The address in the `ready` line.
fn address_in(line: &str) -> Option<SocketAddr> {
    if !line.contains("ready") {
        return None;
    }
    line.split(|c: char| c.is_whitespace() || matches!(c, '"' | '/' | ',' | '(' | ')' | '='))
        .find_map(|word| word.parse().ok())
}
