//! What a sandbox sees of processors and memory: its own limits, in `/proc/meminfo`, `/proc/cpuinfo` and `/proc/stat`,
//! and in the processors that its processes may run on, which is what `nproc` counts.
//!
//! The files are made once per sandbox and never change: `MemAvailable` is the limit, whatever is in use, and the times in
//! `/proc/stat` are zero. The cgroup enforces the limits; this is only what programs size themselves by.

use std::fmt::Write as _;
use std::fs;
use std::io;
use std::sync::OnceLock;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// What is read of the machine, once: reading it takes longer than making a sandbox.
struct Machine {
    /// The processors that the launcher may use, ascending.
    cpus: Vec<usize>,
    /// The paragraphs of `/proc/cpuinfo`, by processor.
    about: Vec<(usize, String)>,
    /// When the machine started, in seconds since 1970, as in `/proc/stat`.
    started: u64,
}

fn machine() -> &'static Machine {
    static MACHINE: OnceLock<Machine> = OnceLock::new();
    MACHINE.get_or_init(|| {
        let set = sched_getaffinity(None).ok();
        let cpus =
            set.map_or_else(Vec::new, |set| (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect());
        let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
        let started = stat.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok());
        Machine {
            cpus,
            about: paragraphs(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default()),
            started: started.unwrap_or(0),
        }
    })
}

/// Reads the machine, so that the clones of this process need not.
pub(super) fn prepare() {
    machine();
}

/// The paragraphs of `/proc/cpuinfo` that describe a processor.
fn paragraphs(text: &str) -> Vec<(usize, String)> {
    let number = |paragraph: &str| {
        let line = paragraph.lines().find(|line| line.starts_with("processor"))?;
        line.split_once(':')?.1.trim().parse().ok()
    };
    text.split("\n\n")
        .filter_map(|paragraph| Some((number(paragraph)?, paragraph.trim_end().to_owned())))
        .collect()
}

/// The processors of a sandbox: as many as its limit has, rounded up, in turn for each range of ids, so that sandboxes do
/// not share the first ones. `None` if the limit allows all of them.
pub(super) fn processors(cpu_millis: u32, turn: u32) -> Option<Vec<usize>> {
    choose(&machine().cpus, cpu_millis, turn)
}

fn choose(cpus: &[usize], cpu_millis: u32, turn: u32) -> Option<Vec<usize>> {
    let count = cpu_millis.div_ceil(1000).max(1) as usize;
    if count >= cpus.len() {
        return None;
    }
    let first = (turn as usize * count) % cpus.len();
    let mut chosen: Vec<usize> = (0..count).map(|at| cpus[(first + at) % cpus.len()]).collect();
    chosen.sort_unstable();
    Some(chosen)
}

/// Lets this process, and all that it starts, run on these processors.
pub(super) fn run_on(cpus: &[usize]) -> io::Result<()> {
    let mut set = CpuSet::new();
    cpus.iter().for_each(|cpu| set.set(*cpu));
    Ok(sched_setaffinity(None, &set)?)
}

/// The files of `/proc` that show limits, by name. `cpus` are the sandbox's processors, if it has not all.
pub(super) fn files(memory_bytes: u64, cpus: Option<&[usize]>) -> Vec<(&'static str, String)> {
    let mut files = vec![("meminfo", memory(memory_bytes))];
    let machine = machine();
    let cpus = cpus.unwrap_or(&machine.cpus);
    files.push(("stat", statistics(cpus, machine.started)));
    let about: Vec<&str> =
        machine.about.iter().filter(|(cpu, _)| cpus.contains(cpu)).map(|(_, text)| text.as_str()).collect();
    // Where the kernel writes it otherwise, as on some architectures, it stays as it is.
    if about.len() == cpus.len() {
        files.push(("cpuinfo", about.join("\n\n") + "\n\n"));
    }
    files
}

fn memory(bytes: u64) -> String {
    let kib = bytes / 1024;
    let lines = [
        ("MemTotal", kib),
        ("MemFree", kib),
        ("MemAvailable", kib),
        ("Buffers", 0),
        ("Cached", 0),
        ("SwapCached", 0),
        ("Active", 0),
        ("Inactive", 0),
        ("SwapTotal", 0),
        ("SwapFree", 0),
        ("Dirty", 0),
        ("Writeback", 0),
        ("AnonPages", 0),
        ("Mapped", 0),
        ("Shmem", 0),
        ("KReclaimable", 0),
        ("Slab", 0),
        ("SReclaimable", 0),
        ("SUnreclaim", 0),
        ("CommitLimit", kib),
        ("Committed_AS", 0),
    ];
    lines.iter().fold(String::new(), |mut text, (name, kib)| {
        let _ = writeln!(text, "{:<16}{kib:>8} kB", format!("{name}:")); // A string takes everything.
        text
    })
}

fn statistics(cpus: &[usize], started: u64) -> String {
    const TIMES: &str = "0 0 0 0 0 0 0 0 0 0";
    let mut text = format!("cpu  {TIMES}\n");
    for cpu in cpus {
        let _ = writeln!(text, "cpu{cpu} {TIMES}"); // A string takes everything.
    }
    text + &format!(
        "intr 0\nctxt 0\nbtime {started}\nprocesses 0\nprocs_running 1\nprocs_blocked 0\nsoftirq 0\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_as_many_as_the_limit_and_go_round() {
        let all = [0, 1, 2, 3];
        assert_eq!(choose(&all, 500, 0), Some(vec![0]));
        assert_eq!(choose(&all, 1000, 1), Some(vec![1]));
        assert_eq!(choose(&all, 1001, 1), Some(vec![2, 3]));
        assert_eq!(choose(&all, 3000, 1), Some(vec![0, 1, 3]));
        assert_eq!(choose(&all, 4000, 1), None);
        assert_eq!(choose(&[5], 100, 7), None);
    }

    #[test]
    fn the_files_read_as_the_kernels_do() {
        let text = memory(256 << 20);
        assert!(text.starts_with("MemTotal:         262144 kB\n"), "{text}");
        let found = paragraphs("processor\t: 0\nmodel name\t: x\n\nprocessor\t: 1\nmodel name\t: x\n\n");
        assert_eq!(found.iter().map(|(cpu, _)| *cpu).collect::<Vec<_>>(), [0, 1]);
        assert!(statistics(&[1], 7).contains("cpu1 0") && statistics(&[1], 7).contains("btime 7\n"));
    }
}
