//! `shoal stats`: what sandboxes use, beside what they may.

use std::collections::HashMap;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use client::{Client, SandboxId, api};

use crate::args::Stats;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::progress::size;
use crate::output::{amount, print};

/// How long to look before the first table, so that it can tell how busy processors are now and not since the beginning.
const FIRST_LOOK: Duration = Duration::from_millis(500);

/// `shoal stats`
pub async fn stats(arguments: Stats, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let only = match &arguments.sandbox {
        Some(text) => Some(find::sandbox(&client, text).await?.id),
        None => None,
    };
    let mut before = Look::take(&client, only).await?;
    if arguments.json && !arguments.watch {
        match &before.seen {
            Seen::One(one) => print::json(one)?,
            Seen::All(all) => print::json(all)?,
        }
        return Ok(0);
    }
    let interval = arguments.interval;
    let clears = arguments.watch && std::io::stdout().is_terminal();
    let mut pause = FIRST_LOOK.min(interval);
    loop {
        if arguments.json {
            let text = match &before.seen {
                Seen::One(one) => serde_json::to_string(one)?,
                Seen::All(all) => serde_json::to_string(all)?,
            };
            if !print::live(&format!("{text}\n"))? {
                return Ok(0);
            }
            tokio::time::sleep(interval).await;
            before = Look::take(&client, only).await?;
            continue;
        }
        tokio::time::sleep(pause).await;
        let now = Look::take(&client, only).await?;
        let text = now.shown(&before);
        // Home, then clear to the end: a screen that is wiped first would flicker.
        let text = if clears { format!("\x1b[H\x1b[J{text}") } else { text };
        if !print::live(&text)? || !arguments.watch {
            return Ok(0);
        }
        (before, pause) = (now, interval);
    }
}

/// What was seen at one instant.
struct Look {
    at: Instant,
    seen: Seen,
}

enum Seen {
    One(Box<api::SandboxStats>),
    All(Box<api::StatsPage>),
}

impl Look {
    async fn take(client: &Client, only: Option<SandboxId>) -> anyhow::Result<Self> {
        let seen = match only {
            Some(id) => Seen::One(Box::new(client.stats(id).await?)),
            None => Seen::All(Box::new(client.all_stats().await?)),
        };
        Ok(Self { at: Instant::now(), seen })
    }

    fn sandboxes(&self) -> &[api::SandboxStats] {
        match &self.seen {
            Seen::One(one) => std::slice::from_ref(one),
            Seen::All(all) => &all.sandboxes,
        }
    }

    /// For people, with what happened since the look before.
    fn shown(&self, before: &Self) -> String {
        let between = self.at.duration_since(before.at).as_secs_f64();
        let used: HashMap<SandboxId, f64> = before
            .sandboxes()
            .iter()
            .filter_map(|stats| Some((stats.sandbox_id, stats.usage.as_ref()?.cpu_seconds)))
            .collect();
        let rows: Vec<Vec<String>> = self
            .sandboxes()
            .iter()
            .map(|stats| row(stats, used.get(&stats.sandbox_id).copied(), between))
            .collect();
        let mut text = print::columns(&HEADER, &rows);
        if let Seen::All(all) = &self.seen {
            text.push('\n');
            text.push_str(&machine(&all.machine));
        }
        text
    }
}

/// The head of a table of sandboxes.
pub const HEADER: [&str; 9] = ["id", "name", "state", "cpu", "time", "memory", "pids", "disk", "cmds"];

/// What such a table says of one.
pub fn row(stats: &api::SandboxStats, used_before: Option<f64>, between: f64) -> Vec<String> {
    let none = || "-".to_owned();
    let limits = &stats.limits;
    let usage = stats.usage.as_ref();
    let cpu = usage.zip(used_before).filter(|_| between > 0.0).map(|(usage, before)| {
        let busy = (usage.cpu_seconds - before).max(0.0) / between;
        format!("{busy:.2}/{}", processors(limits.cpu_millis.into()))
    });
    vec![
        stats.sandbox_id.to_string(),
        stats.name.clone(),
        print::word(&stats.state),
        cpu.unwrap_or_else(none),
        usage.map_or_else(none, |usage| time(usage.cpu_seconds)),
        usage.map_or_else(none, |usage| of(usage.memory_bytes, limits.memory_bytes)),
        usage.map_or_else(none, |usage| format!("{}/{}", usage.pids, limits.pids)),
        stats.disk.as_ref().map_or_else(none, |disk| {
            let more = if disk.complete { "" } else { ">" };
            let held =
                limits.disk_bytes.map_or_else(|| amount::rounded(disk.bytes), |limit| of(disk.bytes, limit));
            format!("{more}{held}")
        }),
        stats.commands_running.to_string(),
    ]
}

fn machine(machine: &api::MachineStats) -> String {
    let free =
        |what: &str, available: u64, all: u64| format!("{what} {} free of {}", size(available), size(all));
    let mut text = format!(
        "machine: {} processors, {}, {}\n",
        machine.cpus,
        free("memory", machine.memory_available_bytes, machine.memory_bytes),
        free("disk", machine.disk_available_bytes, machine.disk_bytes),
    );
    if let Some(all) = &machine.all_sandboxes {
        let states: Vec<String> =
            all.states.iter().map(|(state, count)| format!("{count} {state}")).collect();
        let states = if states.is_empty() { "none".to_owned() } else { states.join(", ") };
        text.push_str(&format!(
            "sandboxes of all owners: {states}; they use {} of memory with {} processes\n\
             limits of all sandboxes add up to {} of at most {} processors and {} of at most {} of memory\n",
            size(all.usage.memory_bytes),
            all.usage.pids,
            processors(all.promised.cpu_millis),
            processors(all.capacity.cpu_millis),
            size(all.promised.memory_bytes),
            size(all.capacity.memory_bytes),
        ));
    }
    text
}

fn of(used: u64, limit: u64) -> String {
    format!("{}/{}", amount::rounded(used), amount::memory(limit))
}

/// Thousandths of a processor, as short as they can be said.
fn processors(millis: u64) -> String {
    match (millis / 1000, millis % 1000) {
        (whole, 0) => whole.to_string(),
        (whole, rest) => format!("{whole}.{rest:03}").trim_end_matches('0').to_owned(),
    }
}

/// A length of time, in the unit that tells most.
fn time(seconds: f64) -> String {
    match seconds {
        s if s < 1.0 => format!("{:.0}ms", s * 1000.0),
        s if s < 60.0 => format!("{s:.1}s"),
        s if s < 3600.0 => format!("{}m{:02}s", s as u64 / 60, s as u64 % 60),
        s => format!("{}h{:02}m", s as u64 / 3600, s as u64 / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_sandbox(cpu_seconds: f64, complete: bool) -> api::SandboxStats {
        let json = serde_json::json!({
            "sandbox_id": SandboxId::from_random(1), "name": "work", "state": "running",
            "limits": {"cpu_millis": 1500, "memory_bytes": 2_u64 << 30, "pids": 512},
            "usage": {"cpu_seconds": cpu_seconds, "cpu_throttled_seconds": 0.0, "memory_bytes": 34 << 20,
                "memory_reclaimable_bytes": 0, "pids": 4},
            "disk": {"bytes": 12 << 20, "complete": complete, "counted_at": "2026-01-31T09:05:00.250Z"},
            "commands_running": 1, "at": "2026-01-31T09:05:00.250Z",
        });
        serde_json::from_value(json).expect("it is what the API answers")
    }

    #[test]
    fn a_row_says_what_is_used_and_what_may_be() {
        let row = row(&of_sandbox(10.5, true), Some(10.0), 2.0);
        assert_eq!(row[2..], ["running", "0.25/1.5", "10.5s", "34Mi/2Gi", "4/512", "12Mi", "1"]);
    }

    #[test]
    fn what_is_not_known_is_not_made_up() {
        let mut stats = of_sandbox(1.0, false);
        assert_eq!(row(&stats, None, 1.0)[3], "-", "one look tells no rate");
        assert_eq!(row(&stats, None, 1.0)[7], ">12Mi");
        (stats.usage, stats.disk) = (None, None);
        assert_eq!(row(&stats, Some(1.0), 1.0)[3..8], ["-", "-", "-", "-", "-"]);
    }

    #[test]
    fn lengths_are_short() {
        for (seconds, text) in
            [(0.0, "0ms"), (0.25, "250ms"), (59.94, "59.9s"), (61.0, "1m01s"), (7260.0, "2h01m")]
        {
            assert_eq!(time(seconds), text);
        }
        for (millis, text) in [(2000, "2"), (1500, "1.5"), (50, "0.05"), (2_000_000, "2000")] {
            assert_eq!(processors(millis), text);
        }
    }
}
