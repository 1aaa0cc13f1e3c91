//! The chores of this repository. `cargo xtask test` is exactly what CI runs.
//!
//! Owns the order of the steps and how their results are reported. The tools that it starts, `clients` and the other
//! modules do the checks.

#![forbid(unsafe_code)]

mod btrfs_seed;
mod clients;
mod dialects;
mod dist;
mod fuzz;
mod licences;
mod nextest;
mod packages;
mod rooms;
mod test_files;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

const HELP: &str = "\
Chores of the Shoal repository.

Usage: cargo xtask <chore>

Chores:
  test [ARGS...]   Install what the tests need, check format, lints, licences and documents, run every test.
                   Needs root. Passes ARGS to the test runner, and then skips the suites of `clients`.
  check            Same as `test`: what CI runs.
  clients [SUITE [ARGS...]]
                   Run only the suites in other languages, on the debug program: `python`, `openapi`,
                   `langsmith`, `e2b`, `daytona`, `runloop`, `modal`,
                   `sandbox0`.
                   Pass ARGS to the suite: `clients python --only sdk` runs one environment of it.
  dialects         Write the table of docs/dialects/README.md from the results of `clients`.
  lint             Run the checks of `test` without the tests and without root.
  lint rooms       Check only that no two folders of a crate depend on each other, and print the graph.
  dist [--out DIR] [--program FILE] [--no-wheel] [--quick]
                   Make what people install, in target/dist: a .deb, a tarball with install.sh, a Python wheel and
                   SHA256SUMS. Builds a release first, or packs FILE. --quick compresses little.
  fuzz [TARGET] [SECONDS]
                   Run the fuzz targets with the stable compiler, each for 60 seconds unless SECONDS says otherwise.
  licences         Check only the licences, and print the list.
  btrfs-seed       Make the data file again that storage pools are created from. Needs mkfs.btrfs.
  --help           Print this text.
";

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let chore = arguments.next();
    let rest: Vec<String> = arguments.collect();
    let outcome = match chore.as_deref() {
        Some("test") => test(&rest),
        Some("check") if rest.is_empty() => test(&[]),
        Some("clients") => only_clients(&rest),
        Some("lint") if rest.is_empty() => lint(),
        Some("lint") if rest == ["rooms"] => rooms::check(rooms::Report::All),
        Some("dialects") if rest.is_empty() => dialects::write(),
        Some("dist") => dist::make(&rest),
        Some("fuzz") => fuzz::run(&rest),
        Some("btrfs-seed") if rest.is_empty() => btrfs_seed::make(),
        Some("licences") if rest.is_empty() => licences::check(licences::Report::All),
        None | Some("--help" | "-h" | "help") => {
            print!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Some(_) => {
            eprint!(
                "xtask: unknown chore: {}\n\n{HELP}",
                std::env::args().skip(1).collect::<Vec<_>>().join(" ")
            );
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            // The runner's own exit code distinguishes failed tests (100) from a runner that could not start.
            let code = error.downcast_ref::<Failed>().and_then(|failed| failed.status.code());
            ExitCode::from(
                code.and_then(|code| u8::try_from(code).ok()).filter(|code| *code != 0).unwrap_or(1),
            )
        }
    }
}

/// Runs everything. Quick steps come first, and the tests last, so that the last lines are the runner's summary.
fn test(runner_arguments: &[String]) -> Result<()> {
    packages::install_missing()?;
    let nextest = nextest::find_or_install()?;
    lint_sources()?;
    // The black-box tests start the programs themselves.
    build("the programs and the tests", "--all-targets")?;
    step("remove leftovers of earlier tests", sweep()?)?;
    // With a filter, only the filtered tests run. The suites mostly wait for downloads and daemons, so they run in
    // parallel with compilers, but never with the tests, some of which compare times.
    let suites = runner_arguments.is_empty().then(clients::start);
    let linted = lint_compiled();
    let of_clients = suites.map_or(Ok(()), clients::Suites::finish);
    linted?;
    let mut runner = cargo();
    match nextest {
        Some(nextest) => {
            nextest.add_to(&mut runner);
            runner.args(["nextest", "run", "--workspace", "--no-fail-fast"]).args(runner_arguments);
        }
        None => {
            println!(
                "xtask: without cargo-nextest, `cargo test` runs the tests, one by one and without deadlines"
            );
            runner.args(["test", "--workspace", "--no-fail-fast"]).args(runner_arguments);
            if !runner_arguments.iter().any(|argument| argument == "--") {
                // Nothing separates the heavy tests here, so they run one by one.
                runner.args(["--", "--test-threads=1"]);
            }
        }
    }
    let outcome = step("run the tests", runner);
    // Quietly: the last lines belong to the runner's summary.
    let swept = answers(&mut sweep()?);
    outcome?;
    if !swept {
        bail!("cannot remove leftovers of the tests");
    }
    of_clients
}

/// Runs only the suites in other languages.
fn only_clients(arguments: &[String]) -> Result<()> {
    clients::check(arguments)?;
    packages::install_missing()?;
    build("the programs", "--bins")?;
    clients::run(arguments)
}

/// Builds everything that later steps run at once, so that nothing is compiled twice with other features.
fn build(what: &str, targets: &str) -> Result<()> {
    let mut build = cargo();
    build.args(["build", "--workspace", targets]);
    step(&format!("build {what}"), build)
}

/// Ends and removes leftovers of tests that were killed. Built beside this program.
fn sweep() -> Result<Command> {
    let own = std::env::current_exe().context("cannot find this program's own executable")?;
    let mut sweep = Command::new(own.with_file_name("sweep"));
    sweep.stdin(Stdio::null());
    Ok(sweep)
}

/// Checks that run none of our programs.
fn lint() -> Result<()> {
    lint_sources()?;
    lint_compiled()
}

/// Checks that take seconds: nothing is compiled.
fn lint_sources() -> Result<()> {
    let mut format = cargo();
    format.args(["fmt", "--all", "--check"]);
    step("check the format", format)?;
    println!("xtask: check the licences");
    licences::check(licences::Report::Count)?;
    println!("xtask: check that the rooms of each crate depend on each other one way");
    rooms::check(rooms::Report::Faults)?;
    println!("xtask: check that every file of tests is compiled");
    test_files::check()
}

/// Checks by the compiler.
fn lint_compiled() -> Result<()> {
    let mut clippy = cargo();
    clippy.args(["clippy", "--workspace", "--all-targets", "--", "-D", "warnings"]);
    step("check the lints", clippy)?;
    let mut documents = cargo();
    // By `--config` and not by RUSTDOCFLAGS: a variable would override the machine's own configuration. Private items
    // are documented, so that links to them work.
    let flags = "build.rustdocflags=['-D', 'warnings', '-A', 'rustdoc::private_intra_doc_links']";
    documents.args(["--config", flags]);
    documents.args(["doc", "--workspace", "--no-deps", "--document-private-items"]);
    step("check the documents in the code", documents)
}

/// The cargo that runs this program, at the root of the repository, without stdin.
fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).stdin(Stdio::null());
    command
}

/// The root of the repository: the parent of this package.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this package is in a folder of the root").into()
}

/// A program that ran and failed.
#[derive(Debug)]
struct Failed {
    what: String,
    status: ExitStatus,
}

impl std::fmt::Display for Failed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "cannot {}: {}", self.what, self.status)
    }
}

impl std::error::Error for Failed {}

/// Runs one step and shows its output.
fn step(what: &str, mut command: Command) -> Result<()> {
    println!("xtask: {what}");
    let started = Instant::now();
    let status = command
        .status()
        .with_context(|| format!("cannot {what}: cannot start {}", command.get_program().display()))?;
    if !status.success() {
        bail!(Failed { what: what.into(), status });
    }
    println!("xtask: {what}: done in {} s", started.elapsed().as_secs());
    Ok(())
}

/// Whether a program exists and runs.
fn answers(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// The output of a program, or an error with its stderr.
fn printed(command: &mut Command) -> Result<Vec<u8>> {
    let name = command.get_program().to_owned();
    let name = OsStr::display(&name);
    let output = command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!(Failed { what: format!("run {name}"), status: output.status });
    }
    Ok(output.stdout)
}
