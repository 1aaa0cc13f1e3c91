//! A reader who goes through a page from top to bottom and does everything that it says.
//!
//! Each reader has a world of its own (`reader.sh`): a loopback interface with all ports free, an empty
//! `/var/lib/shoal`, a process table, a working directory, and `shoal` of this build on the path. So the examples run
//! word for word, including ports and directories, and pages run side by side. When the first process of that world
//! ends, everything that was started in it ends too.
//!
//! `cargo` is replaced: `cargo run --release --` is the program of this build, and `cargo xtask CHORE` only checks
//! that the chore exists. The tests do not start themselves.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver};

use crate::daemon::{Home, binary};
use crate::page::{Block, Ids, Page, Typed};
use crate::wait::{DEADLINE, until_true};

/// The script that makes the world.
const SCRIPT: &str = include_str!("reader.sh");
/// Replaces `cargo`. `CHORES` is the program of the chores, `ROOT` the repository.
const CARGO: &str = r#"#!/bin/bash
case "$*" in
  "run --release -- "*) shift 3; exec shoal "$@" ;;
  "xtask "*) "$CHORES" --help | grep -q "^  $2 " ;;
  "install --locked --path "*) grep -q '^\[\[bin\]\]' "$ROOT/$4/Cargo.toml" ;;
  *) echo "cargo: the test of the documents has no replacement for: cargo $*" >&2; exit 1 ;;
esac
"#;
/// The command that starts a daemon in the background.
const SERVE: &str = "shoal serve";

/// A reader at work.
pub struct Reader {
    page: PathBuf,
    home: Home,
    child: Child,
    shell: ChildStdin,
    answers: Receiver<String>,
    steps: u32,
    ids: Ids,
    /// All TOML blocks, one after the other.
    settings: String,
}

impl Reader {
    /// Starts reading a page. If none of its examples starts a daemon, one runs already.
    #[track_caller]
    pub fn of(page: &Page) -> Self {
        assert!(rustix::process::geteuid().is_root(), "the black-box tests need root");
        let home = Home::new();
        for name in ["data", "var-lib", "var-lib-work", "work", "bin", "steps"] {
            fs::create_dir(home.join(name)).expect("the test's own directory takes directories");
        }
        fs::set_permissions(home.join("data"), fs::Permissions::from_mode(0o700)).expect("it is ours");
        let script = home.join("reader.sh");
        fs::write(&script, SCRIPT).expect("the test's own directory takes files");
        let cargo = home.join("bin/cargo");
        fs::write(&cargo, CARGO).expect("the test's own directory takes files");
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).expect("it is ours");
        let program = binary();
        std::os::unix::fs::symlink(&program, home.join("bin/shoal")).expect("the directory takes links");
        let mut world = world(&home, &script, &program);
        if page.lines.iter().any(|line| line.contains(NEEDS_SNAPSHOTS)) {
            world.env("SHOAL_STORE", "loop").env("SHOAL_STORE_SIZE", "512Mi");
        }
        let mut child = world.spawn().expect("unshare is there: util-linux has it");
        let shell = child.stdin.take().expect("stdin is a pipe");
        let stdout = BufReader::new(child.stdout.take().expect("stdout is a pipe"));
        let (send, answers) = mpsc::channel();
        std::thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let mut reader = Self {
            page: page.path.clone(),
            home,
            child,
            shell,
            answers,
            steps: 0,
            ids: Ids::default(),
            settings: String::new(),
        };
        let starts_one =
            page.blocks().iter().any(|block| block.not_run.is_none() && block.text().contains(SERVE));
        if !starts_one {
            reader.paste(0, "shoal serve &");
        }
        reader
    }

    /// Runs an example, and panics if the result differs.
    #[track_caller]
    pub fn follow(&mut self, block: &Block) {
        if let Some(name) = block.file() {
            fs::write(self.home.join("work").join(name), block.text()).expect("the directory takes files");
            return;
        }
        match block.kind.as_str() {
            "sh" => self.paste(block.line, &block.text()),
            "console" => {
                let typed = block.typed();
                for (index, one) in typed.iter().enumerate() {
                    let next = typed.get(index + 1).map(|typed| typed.command.as_str());
                    self.type_in(block.line, one, next == Some("echo $?"));
                }
            }
            "python" => {
                let file = self.home.join(format!("steps/{}.py", block.line));
                fs::write(&file, block.text()).expect("the test's own directory takes files");
                self.paste(block.line, &format!("python3 '{}'", file.display()));
            }
            "json" => {
                if let Err(error) = serde_json::from_str::<serde_json::Value>(&block.text()) {
                    panic!("{}: not JSON: {error}", self.place(block.line));
                }
            }
            "toml" => self.settings.push_str(&block.text()),
            "text" => {}
            kind => panic!(
                "{}: there is no rule for blocks of kind `{kind}`: see the rules in tests/src/page.rs",
                self.place(block.line)
            ),
        }
    }

    /// Finishes the page, after all examples.
    #[track_caller]
    pub fn finish(mut self) {
        if !self.settings.is_empty() {
            let file = self.home.join("shoal.toml");
            fs::write(&file, &self.settings).expect("the test's own directory takes files");
            self.paste(0, &format!("shoal config show --config '{}'", file.display()));
        }
    }

    #[track_caller]
    fn paste(&mut self, line: usize, text: &str) {
        let file = self.step(text);
        let code = self.run(line, "paste", &file, text);
        assert_eq!(code, 0, "{}", self.story(line, text, &file));
        let starts_one = text.lines().any(|line| line.contains(SERVE) && line.trim_end().ends_with('&'));
        if starts_one {
            until_true("the daemon says that it is ready", || printed(&file).contains("ready"));
        }
    }

    #[track_caller]
    fn type_in(&mut self, line: usize, typed: &Typed, may_fail: bool) {
        let command = self.ids.meant(&typed.command);
        let file = self.step(&command);
        let code = self.run(line, "type", &file, &command);
        let printed = || printed(&file).lines().map(str::to_owned).collect::<Vec<_>>();
        if command.trim_end().ends_with('&') {
            let ids = &mut self.ids;
            until_true(&format!("`{command}` prints what the page says"), || {
                ids.matches(&typed.expected, &printed())
            });
            return;
        }
        let story = self.story(line, &command, &file);
        assert!(may_fail || code == 0, "{story}\nand the exit code {code}");
        let expected = typed.expected.join("\n");
        assert!(self.ids.matches(&typed.expected, &printed()), "{story}\nbut the page says:\n{expected}");
    }

    fn step(&mut self, text: &str) -> PathBuf {
        self.steps += 1;
        let file = self.home.join(format!("steps/{}.sh", self.steps));
        fs::write(&file, format!("{text}\n")).expect("the test's own directory takes files");
        file
    }

    #[track_caller]
    fn run(&mut self, line: usize, how: &str, file: &Path, text: &str) -> i32 {
        let asked = writeln!(self.shell, "{how} {}", file.display());
        match self.answers.recv_timeout(DEADLINE) {
            Ok(code) if asked.is_ok() => code.parse().expect("the shell answers with an exit code"),
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("{}\nand nothing more for {DEADLINE:?}", self.story(line, text, file))
            }
            Ok(_) | Err(_) => panic!("{}\nand the shell has left", self.story(line, text, file)),
        }
    }

    fn place(&self, line: usize) -> String {
        format!("{}:{line}", self.page.display())
    }

    fn story(&self, line: usize, text: &str, file: &Path) -> String {
        format!(
            "{}: this was run:\n{}\nand it printed:\n{}",
            self.place(line),
            text.trim_end(),
            printed(file)
        )
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Its child is the first process of the reader's world, and ends with it.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            return;
        }
        // The pipe ends with the last process that holds it.
        while self.answers.recv_timeout(DEADLINE).is_ok() {}
    }
}

/// A page with these words needs a store of its own.
const NEEDS_SNAPSHOTS: &str = "need a daemon (`shoal serve`) whose store has snapshots";

/// The command that makes a world with a shell in it.
fn world(home: &Home, script: &Path, program: &Path) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash"]);
    command.arg(script).arg(home.path());
    let path = std::env::var("PATH").unwrap_or_default();
    command.env("PATH", format!("{}:{path}", home.join("bin").display()));
    for name in ["SHOAL_URL", "SHOAL_API_KEY", "SHOAL_DATA_DIR", "SHOAL_LOG"] {
        command.env_remove(name);
    }
    command
        .env("HOME", home.join("work"))
        .env("SHOAL_PRIVATE_DIR", home.join("private"))
        .env("SHOAL_PRIVATE_LINGER", "0")
        .env("CHORES", program.with_file_name("xtask"))
        .env("ROOT", crate::page::repository())
        // A store for each page would take a quarter of the disk; the page about stores requests one.
        .env("SHOAL_STORE", "directory")
        .env("LC_ALL", "C.UTF-8")
        .env("TZ", "UTC");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    command
}

/// What a step has printed so far.
fn printed(file: &Path) -> String {
    let bytes = fs::read(format!("{}.out", file.display())).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
