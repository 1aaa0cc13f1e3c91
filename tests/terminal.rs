//! `shoal shell`, `run -t`, `attach` and `top`, as a person at a terminal uses them. The terminal is a real one: tmux's.

use std::path::PathBuf;
use std::process::{Command, Output};

use rustix::process::Signal;
use serde_json::json;
use shoal_tests::audit::Scope;
use shoal_tests::daemon::{Home, binary, installation, send_signal};
use shoal_tests::wait::until_true;
use shoal_tests::{Audit, Daemon, Sandbox, until};

/// A terminal with a shell in it, and a person who types.
struct Desk {
    home: Home,
    environment: Vec<(&'static str, String)>,
}

impl Desk {
    /// At a daemon.
    fn at(daemon: &Daemon) -> Self {
        Self::new(vec![("SHOAL_DATA_DIR", daemon.data_dir.display().to_string())])
    }

    fn new(mut environment: Vec<(&'static str, String)>) -> Self {
        let home = Home::new();
        environment.push(("SHOAL_PRIVATE_DIR", home.join("private").display().to_string()));
        environment.push(("SHOAL_PRIVATE_LINGER", "0".into()));
        let desk = Self { home, environment };
        // Odd sizes on purpose: no default has them.
        desk.tmux(&["new-session", "-d", "-x", "101", "-y", "33", "/bin/sh"]);
        desk.type_line("PS1='here> '; export LC_ALL=C.UTF-8; echo rea''dy");
        desk.sees("ready\nhere>");
        desk
    }

    fn tmux(&self, arguments: &[&str]) -> Output {
        let mut command = Command::new("tmux");
        command.arg("-S").arg(self.socket()).args(["-f", "/dev/null"]).args(arguments);
        for name in ["TMUX", "SHOAL_URL", "SHOAL_API_KEY", "SHOAL_DATA_DIR"] {
            command.env_remove(name);
        }
        let directory = binary().parent().expect("it is in a directory").display().to_string();
        let path = format!("{directory}:{}", std::env::var("PATH").unwrap_or_default());
        command.env("PATH", path).env("HOME", self.home.path()).envs(self.environment.iter().cloned());
        command.output().expect("tmux is installed: `cargo xtask test` does that")
    }

    fn socket(&self) -> PathBuf {
        self.home.join("tmux")
    }

    fn type_keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"], keys].concat());
    }

    fn type_line(&self, line: &str) {
        self.tmux(&["send-keys", "-l", line]);
        self.type_keys(&["Enter"]);
    }

    /// All lines, including those that have scrolled away.
    fn screen(&self) -> String {
        let shown = self.tmux(&["capture-pane", "-p", "-S", "-"]);
        String::from_utf8_lossy(&shown.stdout).lines().map(|line| format!("\n{}", line.trim_end())).collect()
    }

    /// Waits until the screen shows a text. Each text must be one that only the awaited event shows.
    #[track_caller]
    fn sees(&self, text: &str) {
        let mut screen = String::new();
        let give_up = std::time::Instant::now() + shoal_tests::DEADLINE;
        while std::time::Instant::now() < give_up {
            screen = self.screen();
            if screen.contains(text) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("waited in vain for {text:?}; the screen shows:{screen}");
    }

    /// Asserts that the local shell has its terminal back.
    #[track_caller]
    fn is_back_with(&self, code: i32, count: &str) {
        // What is typed before belongs to the program that has the terminal then.
        until_true("the shell here waits", || self.screen().trim_end().ends_with("\nhere>"));
        self.type_line(&format!(
            "echo \"back-{count} $?\" $(stty -a | grep -ow -e '-*icanon' -e '-*echo' -e '-*isig')"
        ));
        self.sees(&format!("\nback-{count} {code} isig icanon echo"));
    }

    /// The process of `shoal` at the terminal.
    fn shoal(&self) -> i32 {
        let pane = self.tmux(&["display-message", "-p", "#{pane_pid}"]);
        let pane = String::from_utf8_lossy(&pane.stdout).trim().to_owned();
        until("shoal runs at the terminal", || {
            let children = std::fs::read_to_string(format!("/proc/{pane}/task/{pane}/children")).ok()?;
            let child = children.split_whitespace().next()?.parse().ok()?;
            let name = std::fs::read_to_string(format!("/proc/{child}/comm")).ok()?;
            (name.trim() == "shoal").then_some(child)
        })
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the terminal shows:{}", self.screen());
        }
        self.tmux(&["kill-server"]);
    }
}

fn work(daemon: &Daemon) -> Sandbox {
    daemon.sandbox_with(json!({"name": "work"}))
}

fn lives(sandbox: &Sandbox, word: &str) -> bool {
    sandbox.sh("cat /proc/[0-9]*/cmdline | tr '\\0' ' '").ok().text().contains(word)
}

#[test]
fn a_shell_has_a_prompt_a_size_signals_and_an_exit_code() {
    let daemon = Daemon::start();
    let sandbox = work(&daemon);
    let desk = Desk::at(&daemon);
    desk.type_line("shoal shell work");
    desk.sees("leaves the shell running");
    // The name of the sandbox, and not the host name that comes from its id.
    desk.sees("\nroot@work:/workspace#");
    desk.type_line("tty -s && echo size $(stty size) term $TERM login $(shopt login_shell | cut -f2)");
    desk.sees("\nsize 33 101 term tmux-256color login on");

    desk.tmux(&["resize-window", "-x", "77", "-y", "22"]);
    desk.type_line("until [ \"$(stty size)\" = '22 77' ]; do sleep 0.02; done; echo resi''zed");
    desk.sees("\nresized");

    // A key and not a signal: only the program inside is interrupted.
    desk.type_line("sleep 1000.125; echo code $?");
    until_true("it sleeps", || lives(&sandbox, "1000.125"));
    desk.type_keys(&["C-c"]);
    desk.type_line("echo inter''rupted");
    desk.sees("\ninterrupted");
    assert!(!lives(&sandbox, "1000.125"));

    desk.type_line("seq 1 5000 > /tmp/numbers; less /tmp/numbers");
    desk.sees("\n/tmp/numbers");
    desk.type_keys(&["G"]);
    desk.sees("\n4990\n4991\n4992\n4993\n4994\n4995\n4996\n4997\n4998\n4999\n5000");
    desk.type_keys(&["q"]);
    desk.type_line("echo less is ov''er");
    desk.sees("\nless is over");

    desk.type_line("exit 7");
    desk.is_back_with(7, "one");
    until_true("the shell has ended", || !lives(&sandbox, "bash -l"));
}

#[test]
fn a_daemon_at_a_terminal_tells_of_trouble_and_not_of_requests() {
    let home = Home::new();
    let desk = Desk::new(vec![
        ("SHOAL_DATA_DIR", home.join("data").display().to_string()),
        ("SHOAL_CONFIG", String::new()),
    ]);
    desk.type_line("shoal serve --listen 127.0.0.1:0 --store loop --store-size 256Mi --spares 0 &");
    desk.sees("shoal is ready at http");
    desk.sees("created a store of 0.2 GiB");
    desk.type_line("shoal create -n quiet; shoal run --sandbox quiet -- echo o''k; shoal rm quiet");
    desk.sees("\nok");
    desk.sees("deleted sandbox `quiet`");
    let screen = desk.screen();
    assert!(!screen.contains("answered") && !screen.contains("sandbox runs"), "{screen}");
    desk.type_line("kill %1; wait %1; clear; echo o''ver");
    desk.sees("\nover");
    // Whoever wants every request says so.
    desk.type_line("SHOAL_LOG=info shoal serve --listen 127.0.0.1:0 --spares 0 &");
    desk.sees("shoal is ready at http");
    desk.type_line("shoal create -n loud");
    desk.sees("INFO request{");
    desk.type_line("shoal rm loud; kill %1; wait %1; echo all ov''er");
    desk.sees("all over");
}

#[test]
fn a_terminal_that_was_left_goes_on_and_can_be_come_back_to() {
    let daemon = Daemon::start();
    let sandbox = work(&daemon);
    let desk = Desk::at(&daemon);
    desk.type_line("shoal shell work");
    desk.sees(":/workspace#");
    desk.type_line("mark=kept; echo earl''ier");
    desk.sees("\nearlier");
    // Alone, the first key belongs to the shell: here, the previous line.
    desk.type_keys(&["C-p"]);
    desk.sees("# mark=kept; echo earl''ier\n");
    desk.type_keys(&["C-u", "C-p", "C-q"]);
    desk.sees("\nleft running; return with `shoal attach");
    desk.is_back_with(0, "two");
    assert!(lives(&sandbox, "bash -l"));

    desk.type_line("clear; shoal attach work");
    desk.sees("\nearlier");
    desk.type_line("echo $mark");
    desk.sees("\nkept");
    desk.type_line("less /etc/passwd");
    desk.sees("root:x:0:0");
    desk.type_keys(&["C-p", "C-q"]);
    desk.is_back_with(0, "three");
    // Another size, so that the redrawn screen fits.
    desk.tmux(&["resize-window", "-x", "60", "-y", "20"]);
    desk.type_line("shoal attach work");
    desk.sees("\nroot:x:0:0");
    desk.type_keys(&["q"]);
    desk.type_line("until [ \"$(stty size)\" = '20 60' ]; do sleep 0.02; done; echo fit''ting; exit 3");
    desk.sees("\nfitting");
    desk.is_back_with(3, "four");
    desk.type_line("shoal attach work");
    desk.sees("no command with a terminal is running");
    desk.is_back_with(125, "five");
}

#[test]
fn a_terminal_outlives_its_daemon() {
    let mut daemon = Daemon::start();
    work(&daemon);
    let desk = Desk::at(&daemon);
    desk.type_line("shoal shell work");
    desk.sees(":/workspace#");
    desk.type_line("shown() { echo shown $1; }; shown before");
    desk.sees("\nshown before");
    daemon.kill();
    desk.sees("[shoal] the daemon is away");
    // Keys that are typed meanwhile wait.
    desk.type_line("shown mean''while");
    daemon.start_again();
    desk.sees("\nshown meanwhile");
    desk.type_line("shown after''wards");
    desk.sees("\nshown afterwards");
    assert_eq!(desk.screen().matches("\nshown meanwhile").count(), 1);
    // A graceful restart, during a command that writes.
    desk.type_line("for n in 1 2 3 4 5 6 7 8; do echo line $n; sleep 0.2; done; shown en''d");
    desk.sees("\nline 2");
    assert!(daemon.stop());
    daemon.start_again();
    desk.sees("\nshown end");
    for number in 1..=8 {
        assert_eq!(desk.screen().matches(&format!("\nline {number}")).count(), 1, "line {number}");
    }
    desk.type_line("exit 4");
    desk.is_back_with(4, "six");
}

#[test]
fn a_signal_restores_the_terminal_and_hangs_up() {
    let daemon = Daemon::start();
    let sandbox = work(&daemon);
    let desk = Desk::at(&daemon);
    for (at, signal, code) in [(0, Signal::TERM, 143), (1, Signal::INT, 130)] {
        desk.type_line(&format!("shoal run -t --sandbox work -- less -Ppage-{at} /etc/passwd"));
        desk.sees(&format!("\npage-{at}"));
        send_signal(desk.shoal(), signal);
        desk.is_back_with(code, &format!("signal-{at}"));
        until_true("it was hung up", || !lives(&sandbox, &format!("-Ppage-{at}")));
    }
    // Closing a window does not end the program in it.
    desk.type_line("shoal run -t --sandbox work -- less -Ppage-2 /etc/passwd");
    desk.sees("\npage-2");
    send_signal(desk.shoal(), Signal::HUP);
    desk.is_back_with(129, "signal-2");
    desk.type_line("shoal attach work");
    desk.sees("\npage-2");
    desk.type_keys(&["q"]);
    desk.is_back_with(0, "signal-3");
}

#[test]
fn a_terminal_whose_sandbox_is_deleted_is_restored() {
    let daemon = Daemon::start();
    let sandbox = work(&daemon);
    let desk = Desk::at(&daemon);
    desk.type_line("shoal shell work");
    desk.sees(":/workspace#");
    sandbox.delete();
    desk.sees("\nerror: ");
    desk.is_back_with(125, "seven");
}

#[test]
fn a_program_at_a_terminal_runs_in_a_sandbox_of_its_own() {
    let desk = Desk::new(vec![("SHOAL_DATA_DIR", "/nonexistent/shoal".into())]);
    desk.type_line("shoal run -t -- python3 -q");
    desk.sees("\n>>>");
    desk.type_line("import os, sys; print(os.get_terminal_size(), os.isatty(0))");
    desk.sees("\nos.terminal_size(columns=101, lines=33) True");
    // There is no daemon that would keep it, so there is no way to detach.
    desk.type_keys(&["C-p", "C-q"]);
    desk.type_line("");
    desk.type_line("sys.exit(5)");
    desk.is_back_with(5, "eight");
    let data_dir = desk.home.join("private/data");
    let scope = Scope { installation: installation(&data_dir), data_dir };
    until_true("nothing is left", || {
        Audit::of(&scope).0.is_empty() && !desk.home.join("private/data").exists()
    });

    desk.type_line("echo 'echo from a pipe; exit 6' | shoal shell");
    desk.sees("\nfrom a pipe");
    desk.is_back_with(6, "nine");
    desk.type_line("shoal run -t -- true < /dev/null");
    desk.sees("-t needs a terminal");
    desk.is_back_with(125, "ten");
}

#[test]
fn two_people_at_one_terminal_both_type() {
    let daemon = Daemon::start();
    work(&daemon);
    let (first, second) = (Desk::at(&daemon), Desk::at(&daemon));
    first.type_line("shoal shell work");
    first.sees(":/workspace#");
    first.type_line("echo fir''st");
    first.sees("\nfirst");
    second.type_line("shoal attach work");
    second.sees("\nfirst");
    second.type_line("echo sec''ond");
    for desk in [&first, &second] {
        desk.sees("\nsecond");
    }
    first.type_line("echo thi''rd; a=1");
    for desk in [&first, &second] {
        desk.sees("\nthird");
    }
    second.type_line("echo fou''rth");
    first.sees("\nfourth");
    first.type_line("exit 2");
    first.is_back_with(2, "eleven");
    second.is_back_with(2, "twelve");
}

#[test]
fn who_looks_at_a_daemon_that_does_not_answer_can_leave() {
    let daemon = Daemon::start();
    let desk = Desk::at(&daemon);
    desk.type_line("shoal top --interval 0.2");
    desk.sees("by cpu");
    send_signal(daemon.pid(), Signal::STOP);
    // By the last of these, the next refresh has long begun.
    for (key, sorted) in [("m", "by memory"), ("d", "by disk"), ("n", "by name"), ("c", "by cpu")].repeat(4) {
        desk.type_keys(&[key]);
        desk.sees(sorted);
    }
    desk.type_keys(&["q"]);
    desk.is_back_with(0, "one");
    send_signal(daemon.pid(), Signal::CONT);
}
