//! The fuzz targets of `fuzz/`, built and run with the stable compiler.
//!
//! `cargo fuzz` needs a nightly compiler for its sanitizers. Without those, everything that libFuzzer needs is a
//! stable flag: counters for every edge and for every comparison. The targets are safe Rust that reads bytes, where a
//! sanitizer finds little; errors there are panics.

use std::fs;
use std::process::Command;

use anyhow::{Context, Result, bail};

/// How long each target runs by default.
const SECONDS: u64 = 60;
/// Longer inputs find nothing that shorter ones do not: the largest header that a target reads is a few KiB.
const INPUT_BYTES_MAX: u32 = 16 << 10;
/// Memory limit of a target. Targets read untrusted bytes, so they must not need more.
const MEMORY_MIB_MAX: u32 = 2048;
/// The flags of `cargo fuzz`, except for the sanitizer.
const FLAGS: &[&str] = &[
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
    "-Cdebug-assertions",
];

/// `[TARGET] [SECONDS]`: runs one target, or all of them one after the other. Fails at the first that finds
/// something; the input is then in `fuzz/artifacts`.
pub fn run(arguments: &[String]) -> Result<()> {
    let targets = targets()?;
    let (mut chosen, mut seconds) = (targets.clone(), SECONDS);
    for argument in arguments {
        if let Ok(number) = argument.parse() {
            seconds = number;
        } else if targets.contains(argument) {
            chosen = vec![argument.clone()];
        } else {
            bail!(
                "`{argument}` is neither a number of seconds nor a target; there are: {}",
                targets.join(", ")
            );
        }
    }
    let triple = host_triple()?;
    let mut build = super::cargo();
    // With a target given, the flags reach neither build scripts nor procedural macros.
    build.current_dir(super::root().join("fuzz")).args(["build", "--bins", "--target", &triple]);
    build.args(["--config", "profile.dev.opt-level=2"]).env("CARGO_ENCODED_RUSTFLAGS", FLAGS.join("\x1f"));
    super::step("build the fuzz targets", build)?;
    for target in chosen {
        super::step(&format!("fuzz {target} for {seconds} s"), fuzzer(&target, seconds, &triple)?)?;
    }
    Ok(())
}

fn fuzzer(target: &str, seconds: u64, triple: &str) -> Result<Command> {
    let folder = super::root().join("fuzz");
    let corpus = folder.join("corpus").join(target);
    let artifacts = folder.join("artifacts").join(target);
    for made in [&corpus, &artifacts] {
        fs::create_dir_all(made).with_context(|| format!("cannot make {}", made.display()))?;
    }
    let mut fuzzer = Command::new(folder.join("target").join(triple).join("debug").join(target));
    fuzzer.arg(&corpus).arg(format!("-artifact_prefix={}/", artifacts.display()));
    fuzzer.arg(format!("-max_total_time={seconds}")).arg(format!("-max_len={INPUT_BYTES_MAX}"));
    fuzzer.arg(format!("-rss_limit_mb={MEMORY_MIB_MAX}")).args(["-verbosity=0", "-print_final_stats=1"]);
    Ok(fuzzer)
}

fn targets() -> Result<Vec<String>> {
    let folder = super::root().join("fuzz/fuzz_targets");
    let mut targets = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let name = entry?.file_name();
        targets.extend(name.to_str().and_then(|name| name.strip_suffix(".rs")).map(str::to_owned));
    }
    targets.sort();
    Ok(targets)
}

fn host_triple() -> Result<String> {
    let said = super::printed(Command::new("rustc").arg("-vV"))?;
    let said = String::from_utf8_lossy(&said);
    let host = said.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc -vV names no host")?.to_owned())
}
