//! The test suites of clients that are not written in Rust. Each is a Python program built on
//! `tests/clients/environments.py`, which makes virtual environments with pinned versions.
//!
//! Owns the list of suites and the program that they test.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::Instant;

use anyhow::{Context, Result, anyhow, bail};

struct Suite {
    /// Its name on the command line.
    word: &'static str,
    /// Its full name.
    name: &'static str,
    program: &'static str,
    /// The system that it shows to work, if it is someone else's.
    system: Option<System>,
}

/// A row of the table in `docs/dialects/README.md`.
#[derive(Clone, Copy)]
pub struct System {
    pub title: &'static str,
    /// Its page, seen from the table.
    pub page: &'static str,
    /// How the names of its environments begin, if the suite has others too.
    pub of: &'static [&'static str],
}

const fn other(title: &'static str, page: &'static str) -> Option<System> {
    Some(System { title, page, of: &[] })
}

const DEEP_AGENTS: Option<System> =
    Some(System { title: "Deep Agents", page: "../deepagents.md", of: &["deepagents", "dcode"] });

const SUITES: &[Suite] = &[
    Suite { word: "python", name: "the Python SDK", program: "sdk/python/run_tests.py", system: DEEP_AGENTS },
    Suite {
        word: "openapi",
        name: "the description of the API",
        program: "tests/openapi/run_tests.py",
        system: None,
    },
    Suite {
        word: "langsmith",
        name: "LangSmith's clients",
        program: "tests/langsmith/run_tests.py",
        system: other("LangSmith", "langsmith.md"),
    },
    Suite {
        word: "e2b",
        name: "E2B's clients",
        program: "tests/e2b/run_tests.py",
        system: other("E2B", "e2b.md"),
    },
    Suite {
        word: "daytona",
        name: "Daytona's client",
        program: "tests/daytona/run_tests.py",
        system: other("Daytona", "daytona.md"),
    },
    Suite {
        word: "runloop",
        name: "Runloop's client",
        program: "tests/runloop/run_tests.py",
        system: other("Runloop", "runloop.md"),
    },
    Suite {
        word: "modal",
        name: "Modal's client",
        program: "tests/modal/run_tests.py",
        system: other("Modal", "modal.md"),
    },
    Suite {
        word: "sandbox0",
        name: "Sandbox0's client",
        program: "tests/sandbox0/run_tests.py",
        system: other("Sandbox0", "sandbox0.md"),
    },
];

/// Checks that the first argument, if there is one, names a suite.
pub fn check(arguments: &[String]) -> Result<()> {
    if let Some(word) = arguments.first()
        && SUITES.iter().all(|suite| suite.word != word)
    {
        let words: Vec<&str> = SUITES.iter().map(|suite| suite.word).collect();
        bail!("`{word}` is not a suite; there are: {}", words.join(", "));
    }
    Ok(())
}

/// Runs all suites against the debug program, or the one that the first argument names, with the arguments after
/// that. Returns the first failure once all have run.
pub fn run(arguments: &[String]) -> Result<()> {
    let mut outcome = Ok(());
    for suite in chosen(arguments) {
        outcome = outcome.and(super::step(&suite.what(), suite.command(arguments)?));
    }
    outcome
}

/// The systems that have a suite, with its program and the environments that passed when all of them ran last.
pub fn systems() -> Result<Vec<(System, &'static str, Vec<String>)>> {
    let of_systems = SUITES.iter().filter_map(|suite| suite.system.map(|system| (system, suite)));
    of_systems
        .map(|(system, suite)| {
            let path = suite.results();
            let what = || format!("cannot read {}: run `cargo xtask clients {}`", path.display(), suite.word);
            let passed = serde_json::from_slice(&fs::read(&path).with_context(what)?).with_context(what)?;
            Ok((system, suite.program, passed))
        })
        .collect()
}

/// Free memory from which on suites run in parallel with compilers: two compilers of the largest crates need less
/// than half of it, and so do two daemons with the sandboxes of their tests.
const BESIDE_MEMORY_MIN: u64 = 8 << 30;

/// All suites: running, or still to be run.
pub enum Suites {
    /// With their output in files.
    Beside(JoinHandle<Vec<Result<Ran>>>),
    /// There is not enough memory.
    Later,
}

/// A suite that runs in parallel with other steps.
pub struct Ran {
    what: String,
    log: PathBuf,
    status: ExitStatus,
    seconds: u64,
}

/// Starts all suites, one after the other, in parallel with the next steps, if there is enough memory.
pub fn start() -> Suites {
    let free = fs::read_to_string("/proc/meminfo").ok().and_then(|text| memory_available(&text));
    if free.is_none_or(|free| free < BESIDE_MEMORY_MIN) {
        return Suites::Later;
    }
    println!(
        "xtask: run the client suites in parallel with the next steps; results follow when they are done"
    );
    Suites::Beside(std::thread::spawn(|| chosen(&[]).map(Suite::run_aside).collect()))
}

impl Suites {
    /// Waits for them, or runs them now. Reports how each ended, with its whole output if it failed.
    pub fn finish(self) -> Result<()> {
        let all = match self {
            Self::Later => return run(&[]).and_then(|()| super::dialects::check()),
            Self::Beside(thread) => {
                thread.join().map_err(|_| anyhow!("the thread of the client suites panicked"))?
            }
        };
        let mut outcome = Ok(());
        for ran in all {
            outcome = outcome.and(ran.and_then(|ran| ran.report()));
        }
        outcome.and_then(|()| super::dialects::check())
    }
}

impl Ran {
    fn report(self) -> Result<()> {
        let Self { what, log, status, seconds } = self;
        let said = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
        let said = String::from_utf8_lossy(&said);
        if status.success() {
            // The summary; the rest of the output is in the file.
            println!("{}", said.lines().last().unwrap_or_default());
            println!(
                "xtask: {what}: done in {seconds} s in parallel with other steps, see {}",
                log.display()
            );
            return Ok(());
        }
        println!("{said}");
        eprintln!("xtask: cannot {what}: {status}");
        bail!(super::Failed { what, status })
    }
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn memory_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

fn chosen(arguments: &[String]) -> impl Iterator<Item = &'static Suite> {
    let word = arguments.first().cloned();
    SUITES.iter().filter(move |suite| word.as_ref().is_none_or(|word| suite.word == word))
}

impl Suite {
    fn what(&self) -> String {
        format!("run the tests of {}", self.name)
    }

    /// Where it leaves the names of the environments that passed.
    fn results(&self) -> PathBuf {
        super::root().join(format!("target/clients/{}.json", self.word))
    }

    fn command(&self, arguments: &[String]) -> Result<Command> {
        let shoal = std::env::current_exe()?.with_file_name("shoal");
        let mut command = Command::new("/usr/bin/python3");
        // Environments are created once and kept below `target`. A change of versions creates new ones.
        command.arg(self.program).arg("--shoal").arg(&shoal).args(["--environments", "target/python"]);
        command.arg("--results").arg(self.results());
        command.args(arguments.iter().skip(1)).current_dir(super::root()).stdin(Stdio::null());
        Ok(command)
    }

    /// Runs it with its output in a file.
    fn run_aside(&'static self) -> Result<Ran> {
        let folder = super::root().join("target/clients");
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let log = folder.join(format!("{}.log", self.word));
        let file = File::create(&log).with_context(|| format!("cannot make {}", log.display()))?;
        let mut command = self.command(&[])?;
        command.stdout(file.try_clone()?).stderr(file);
        let started = Instant::now();
        let what = self.what();
        let status = command.status().with_context(|| format!("cannot {what}: cannot start python3"))?;
        Ok(Ran { what, log, status, seconds: started.elapsed().as_secs() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       24608948 kB\nMemFree:          512 kB\nMemAvailable:       2048 kB\n";
        assert_eq!(memory_available(text), Some(2 << 20));
        assert_eq!(memory_available("MemTotal: 1 kB\n"), None);
    }
}
