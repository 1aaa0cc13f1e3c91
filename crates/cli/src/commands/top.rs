//! `shoal top`: sandboxes, pools and the machine, live on a terminal, or once as a table.
//!
//! What is shown is made by one function from two looks and a size, so that it can be tested without a terminal; around it are
//! a loop over looks, keys and signals, and the alternate screen, which is left on every way out.

use std::collections::HashMap;
use std::io::{self, IsTerminal, Read, Write};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use client::{Client, SandboxId, api};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use crate::args::{Top, TopSort};
use crate::commands::{pool, stats};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print;
use crate::output::progress::size;
use crate::terminal::interrupts::Interrupts;
use crate::terminal::{self, Raw};

/// How long to look before the first table, so that it can tell how busy processors are now.
const FIRST_LOOK: Duration = Duration::from_millis(500);
/// Keys that wait to be heard: more than a person types between two of them.
const KEYS_MAX: usize = 64;
/// What is read from the keyboard at once; a key is a few bytes.
const KEY_BYTES_MAX: usize = 64;
/// What the keys do, in one line of a common terminal.
const KEYS_SHOWN: &str = "q quit  c/m/d/n sort by cpu, memory, disk or name  space pause  up/down scroll";
/// Of the screen, at least so many rows are for sandboxes.
const SANDBOX_ROWS_MIN: usize = 3;

/// `shoal top`
pub async fn top(arguments: Top, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let first = Look::take(&client).await?;
    if arguments.json {
        print::json(&first.seen)?;
        return Ok(0);
    }
    let interval = arguments.interval;
    let view = View { sort: arguments.sort, ..View::default() };
    if arguments.once || !io::stdout().is_terminal() || !terminal::is_typed_on() {
        tokio::time::sleep(FIRST_LOOK.min(interval)).await;
        let now = Look::take(&client).await?;
        print::text(&shown(&first, &now, &view, None))?;
        return Ok(0);
    }
    live(&client, first, view, interval).await
}

/// What was seen at one instant.
struct Look {
    at: Instant,
    seen: Seen,
}

#[derive(Serialize)]
struct Seen {
    sandboxes: Vec<api::SandboxStats>,
    pools: Vec<api::Pool>,
    machine: api::MachineStats,
}

impl Look {
    async fn take(client: &Client) -> anyhow::Result<Self> {
        let (all, pools) = tokio::try_join!(client.all_stats(), client.pools())?;
        let api::StatsPage { sandboxes, machine, .. } = all;
        Ok(Self { at: Instant::now(), seen: Seen { sandboxes, pools, machine } })
    }
}

/// How the table is shown.
#[derive(Debug, Clone, Copy)]
struct View {
    sort: TopSort,
    /// How many sandboxes are above the screen.
    skipped: usize,
    /// Nothing new is looked up.
    still: bool,
}

impl Default for View {
    fn default() -> Self {
        Self { sort: TopSort::Cpu, skipped: 0, still: false }
    }
}

/// What a key means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Leave,
    Sort(TopSort),
    /// By so many rows.
    Move(isize),
    /// By so many screens.
    Page(isize),
    StandStill,
}

/// What a person typed, as a terminal in raw mode says it.
fn keys(mut typed: &[u8]) -> Vec<Key> {
    const SEQUENCES: [(&[u8], Key); 15] = [
        (b"\x1b[A", Key::Move(-1)),
        (b"\x1bOA", Key::Move(-1)),
        (b"k", Key::Move(-1)),
        (b"\x1b[B", Key::Move(1)),
        (b"\x1bOB", Key::Move(1)),
        (b"j", Key::Move(1)),
        (b"\x1b[5~", Key::Page(-1)),
        (b"\x1b[6~", Key::Page(1)),
        (b"c", Key::Sort(TopSort::Cpu)),
        (b"m", Key::Sort(TopSort::Memory)),
        (b"d", Key::Sort(TopSort::Disk)),
        (b"n", Key::Sort(TopSort::Name)),
        (b" ", Key::StandStill),
        (b"q", Key::Leave),
        (b"\x03", Key::Leave),
    ];
    let mut keys = Vec::new();
    while !typed.is_empty() {
        match SEQUENCES.iter().find(|(sequence, _)| typed.starts_with(sequence)) {
            Some((sequence, key)) => {
                keys.push(*key);
                typed = &typed[sequence.len()..];
            }
            // An escape alone leaves, as in other programs; one with something behind it is a key that means nothing here.
            None if typed == b"\x1b" => return [keys, vec![Key::Leave]].concat(),
            None if typed.starts_with(b"\x1b") => return keys,
            None => typed = &typed[1..],
        }
    }
    keys
}

/// The alternate screen without a cursor, until it is dropped.
struct Screen {
    _raw: Raw,
}

impl Screen {
    fn enter() -> anyhow::Result<Self> {
        let raw = Raw::enter()?;
        let screen = Self { _raw: raw };
        // Lines that are too long end at the edge, and do not push others off the screen.
        print::live("\x1b[?1049h\x1b[?25l\x1b[?7l")?;
        Ok(screen)
    }

    /// Draws over what is there: a screen that is wiped first would flicker.
    fn draw(&self, text: &str) -> anyhow::Result<bool> {
        let mut drawn = String::from("\x1b[H");
        for line in text.lines() {
            drawn.push_str(line);
            drawn.push_str("\x1b[K\r\n");
        }
        // The last break would scroll a full screen.
        drawn.truncate(drawn.len().saturating_sub(2));
        drawn.push_str("\x1b[J");
        print::live(&drawn)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let mut stdout = io::stdout().lock();
        // A terminal that is gone needs nothing.
        let _ = stdout.write_all(b"\x1b[?7h\x1b[?25h\x1b[?1049l").and_then(|()| stdout.flush());
    }
}

async fn live(client: &Client, first: Look, mut view: View, interval: Duration) -> anyhow::Result<i32> {
    let mut interrupts = Interrupts::catch()?;
    let mut resized = signal(SignalKind::window_change()).context("cannot catch signals")?;
    let screen = Screen::enter()?;
    let mut typed = keyboard();
    // Until there is a second one, nothing is known of how busy processors are.
    let mut now = Arc::new(first);
    let mut before = Arc::clone(&now);
    let mut failure: Option<String> = None;
    // Beside keys and signals: a daemon that does not answer must not keep anybody from leaving.
    let mut looking: Option<Pin<Box<dyn Future<Output = anyhow::Result<Look>> + '_>>> = None;
    let mut next = Instant::now() + FIRST_LOOK.min(interval);
    loop {
        let (rows, columns) = (terminal::size().rows, terminal::size().columns);
        let text = screenful(&before, &now, &view, failure.as_deref(), (rows.into(), columns.into()));
        if !screen.draw(&text)? {
            return Ok(0);
        }
        tokio::select! {
            code = interrupts.next() => return Ok(code),
            _ = resized.recv() => {}
            pressed = typed.recv() => {
                let Some(pressed) = pressed else { return Ok(0) };
                for key in keys(&pressed) {
                    match key {
                        Key::Leave => return Ok(0),
                        Key::Sort(sort) => (view.sort, view.skipped) = (sort, 0),
                        Key::Move(by) => view.skipped = view.skipped.saturating_add_signed(by),
                        Key::Page(by) => {
                            let half = isize::try_from(rows / 2).unwrap_or(1).max(1);
                            view.skipped = view.skipped.saturating_add_signed(by * half);
                        }
                        Key::StandStill => view.still = !view.still,
                    }
                }
                view.skipped = view.skipped.min(now.seen.sandboxes.len().saturating_sub(1));
                if view.still {
                    looking = None;
                }
            }
            () = tokio::time::sleep_until(next.into()), if looking.is_none() && !view.still => {
                looking = Some(Box::pin(Look::take(client)));
            }
            looked = async { looking.as_mut().expect("the branch is taken only then").await }, if looking.is_some() => {
                // A daemon that is away for a moment comes back; what was seen last stays until then.
                match looked {
                    Ok(look) => {
                        (before, failure) = (std::mem::replace(&mut now, Arc::new(look)), None);
                    }
                    Err(error) => failure = Some(format!("{error:#}")),
                }
                (looking, next) = (None, Instant::now() + interval);
            }
        }
    }
}

/// What is typed, as it comes. The thread is left behind when the program ends.
fn keyboard() -> mpsc::Receiver<Vec<u8>> {
    let (tell, typed) = mpsc::channel(KEYS_MAX);
    std::thread::spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = [0; KEY_BYTES_MAX];
        // A keyboard that is gone leaves, as the key does.
        while let Ok(count @ 1..) = stdin.read(&mut buffer) {
            if tell.blocking_send(buffer[..count].to_vec()).is_err() {
                return;
            }
        }
    });
    typed
}

/// Everything, and above it why there is nothing newer, if so: both within a screen of so many rows and columns.
fn screenful(
    before: &Look,
    now: &Look,
    view: &View,
    failure: Option<&str>,
    (rows, columns): (usize, usize),
) -> String {
    let Some(failure) = failure else { return shown(before, now, view, Some((rows, columns))) };
    let line = print::cut(&print::harmless(failure), columns);
    let rest = shown(before, now, view, Some((rows.saturating_sub(1), columns)));
    format!("{}\n{rest}", print::painted(&line, print::Paint::Red))
}

/// Everything, for a screen of so many rows and columns, or for a pipe.
fn shown(before: &Look, now: &Look, view: &View, room: Option<(usize, usize)>) -> String {
    let between = now.at.duration_since(before.at).as_secs_f64();
    let used: HashMap<SandboxId, f64> = before
        .seen
        .sandboxes
        .iter()
        .filter_map(|stats| Some((stats.sandbox_id, stats.usage.as_ref()?.cpu_seconds)))
        .collect();
    let mut busy: Vec<(f64, &api::SandboxStats)> = now
        .seen
        .sandboxes
        .iter()
        .map(|stats| {
            let seconds = stats.usage.as_ref().zip(used.get(&stats.sandbox_id));
            let rate = seconds
                .map_or(0.0, |(usage, before)| (usage.cpu_seconds - before).max(0.0) / between.max(0.001));
            (rate, stats)
        })
        .collect();
    sort(&mut busy, view.sort);
    let all: f64 = busy.iter().map(|(rate, _)| rate).sum();
    let mut text = head(now, all, view);
    if let Some((_, columns)) = room {
        text.push_str(&print::painted(&print::cut(KEYS_SHOWN, columns), print::Paint::Dim));
        text.push('\n');
    }
    if !now.seen.pools.is_empty() {
        // Pools have at most a third of the screen.
        let most = room.map_or(usize::MAX, |(rows, _)| (rows / 3).max(2));
        let rows: Vec<Vec<String>> = now.seen.pools.iter().take(most).map(pool::row).collect();
        text.push('\n');
        text.push_str(&print::columns(&pool::HEADER, &rows));
        if now.seen.pools.len() > most {
            text.push_str(&format!("and {} more pools\n", now.seen.pools.len() - most));
        }
    }
    text.push('\n');
    let left = room
        .map_or(usize::MAX, |(rows, _)| rows.saturating_sub(text.lines().count() + 1).max(SANDBOX_ROWS_MIN));
    let rows: Vec<Vec<String>> = busy
        .iter()
        .skip(view.skipped)
        .take(left)
        .map(|(_, stats)| stats::row(stats, used.get(&stats.sandbox_id).copied(), between))
        .collect();
    text.push_str(&print::columns(&stats::HEADER, &rows));
    match room {
        Some((rows, _)) => text.lines().take(rows).collect::<Vec<_>>().join("\n"),
        None => text,
    }
}

fn sort(busy: &mut [(f64, &api::SandboxStats)], by: TopSort) {
    let memory = |stats: &api::SandboxStats| stats.usage.as_ref().map_or(0, |usage| usage.memory_bytes);
    let disk = |stats: &api::SandboxStats| stats.disk.as_ref().map_or(0, |disk| disk.bytes);
    busy.sort_by(|(a_rate, a), (b_rate, b)| {
        let order = match by {
            TopSort::Cpu => b_rate.total_cmp(a_rate),
            TopSort::Memory => memory(b).cmp(&memory(a)),
            TopSort::Disk => disk(b).cmp(&disk(a)),
            TopSort::Name => std::cmp::Ordering::Equal,
        };
        order.then_with(|| a.name.cmp(&b.name))
    });
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// The machine, in a few lines.
fn head(now: &Look, busy: f64, view: &View) -> String {
    let Seen { sandboxes, pools, machine } = &now.seen;
    let sorted = match view.sort {
        TopSort::Cpu => "cpu",
        TopSort::Memory => "memory",
        TopSort::Disk => "disk",
        TopSort::Name => "name",
    };
    let ready: u32 = pools.iter().map(|pool| pool.ready).sum();
    let wanted: u32 = pools.iter().map(|pool| pool.replicas).sum();
    let free = |available: u64, all: u64| format!("{} free of {}", size(available), size(all));
    let pools = match pools.len() {
        0 => String::new(),
        count => format!(", {} with {ready} of {wanted} ready", counted(count, "pool", "pools")),
    };
    let mut text = format!(
        "{}{pools}, sorted by {sorted}{}\n",
        counted(sandboxes.len(), "sandbox", "sandboxes"),
        if view.still { ", paused" } else { "" },
    );
    text.push_str(&format!(
        "{busy:.2} of {} processors used by them, memory {}, disk {}\n",
        machine.cpus,
        free(machine.memory_available_bytes, machine.memory_bytes),
        free(machine.disk_available_bytes, machine.disk_bytes),
    ));
    if let Some(all) = &machine.all_sandboxes {
        text.push_str(&format!(
            "all owners: {} of at most {} sandboxes use {} of memory; their limits add up to {}\n",
            all.promised.sandboxes,
            all.capacity.sandboxes,
            size(all.usage.memory_bytes),
            size(all.promised.memory_bytes),
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_and_others_mean_nothing() {
        assert_eq!(keys(b"q"), [Key::Leave]);
        assert_eq!(keys(b"\x1b"), [Key::Leave]);
        assert_eq!(keys(b"jmk"), [Key::Move(1), Key::Sort(TopSort::Memory), Key::Move(-1)]);
        assert_eq!(keys(b"\x1b[A\x1b[6~ "), [Key::Move(-1), Key::Page(1), Key::StandStill]);
        assert_eq!(keys(b"xyz\x1b[15~q"), [], "a key of a function is no letters");
    }

    fn look(names: &[(&str, f64, u64)]) -> Look {
        let sandboxes = names
            .iter()
            .enumerate()
            .map(|(at, (name, cpu, memory))| {
                let json = serde_json::json!({
                    "sandbox_id": SandboxId::from_random(at as u128), "name": name, "state": "running",
                    "limits": {"cpu_millis": 1000, "memory_bytes": 1_u64 << 30, "pids": 512},
                    "usage": {"cpu_seconds": cpu, "cpu_throttled_seconds": 0.0, "memory_bytes": memory,
                        "memory_reclaimable_bytes": 0, "pids": 4},
                    "commands_running": 0, "at": "2026-01-31T09:05:00.250Z",
                });
                serde_json::from_value(json).expect("it is what the API answers")
            })
            .collect();
        let machine = serde_json::json!({"cpus": 2, "memory_bytes": 1_u64 << 34, "memory_available_bytes": 1_u64 << 33,
            "disk_bytes": 1_u64 << 40, "disk_available_bytes": 1_u64 << 39});
        let machine = serde_json::from_value(machine).expect("it is what the API answers");
        Look { at: Instant::now(), seen: Seen { sandboxes, pools: Vec::new(), machine } }
    }

    #[test]
    fn the_busiest_comes_first_unless_another_order_is_wanted() {
        let before = look(&[("idle", 5.0, 300), ("busy", 1.0, 100), ("big", 0.0, 900)]);
        let mut now = look(&[("idle", 5.0, 300), ("busy", 2.0, 100), ("big", 0.0, 900)]);
        now.at = before.at + Duration::from_secs(1);
        let order = |view: &View| {
            let text = shown(&before, &now, view, None);
            let mut names = vec!["idle", "busy", "big"];
            names.sort_by_key(|name| text.find(&format!("  {name} ")));
            names
        };
        assert_eq!(order(&View::default())[0], "busy");
        assert_eq!(order(&View { sort: TopSort::Memory, ..View::default() }), ["big", "idle", "busy"]);
        assert_eq!(order(&View { sort: TopSort::Name, ..View::default() }), ["big", "busy", "idle"]);
    }

    #[test]
    fn it_fits_the_screen() {
        let many: Vec<(String, f64, u64)> = (0..200).map(|at| (format!("s{at}"), 0.0, 1)).collect();
        let many: Vec<(&str, f64, u64)> =
            many.iter().map(|(name, cpu, memory)| (name.as_str(), *cpu, *memory)).collect();
        let (before, now) = (look(&many), look(&many));
        for rows in [1, 5, 24, 80] {
            let text = shown(&before, &now, &View::default(), Some((rows, 80)));
            assert!(text.lines().count() <= rows, "{rows}");
            assert!(rows < 5 || text.contains("q quit"), "{rows}: the keys are on the screen");
            let text = screenful(&before, &now, &View::default(), Some("it is\naway"), (rows, 80));
            assert!(text.lines().count() <= rows && text.contains("it is\u{fffd}away"), "{rows}: {text}");
        }
    }
}
