//! The table of a benchmark: on a terminal, as JSON, and as a page with a chart.

use std::path::Path;
use std::time::Duration;

use anyhow::Context;

use super::chart::{self, Bar, Group};
use crate::output::print;

/// The middle one.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The one that so many of a hundred are no longer than.
pub fn percentile(mut times: Vec<Duration>, percent: usize) -> Duration {
    times.sort_unstable();
    times.get((times.len() * percent).div_ceil(100).saturating_sub(1)).copied().unwrap_or_default()
}

/// What was measured.
#[derive(Clone, Copy)]
pub enum Figure {
    /// A time.
    Time(Duration),
    /// An amount of memory.
    Bytes(u64),
    /// So many bytes in such a time.
    Throughput(u64, Duration),
}

impl Figure {
    /// The time in it, by which it is compared.
    fn time(self) -> Option<Duration> {
        match self {
            Self::Time(time) | Self::Throughput(_, time) => Some(time),
            Self::Bytes(_) => None,
        }
    }

    /// A comparator's time, said as this figure is.
    fn like(self, time: Duration) -> Self {
        match self {
            Self::Throughput(bytes, _) => Self::Throughput(bytes, time),
            Self::Time(_) | Self::Bytes(_) => Self::Time(time),
        }
    }
}

/// One thing measured, with what it is compared to.
pub struct Row {
    name: String,
    ours: Figure,
    /// `None` where the comparator is not installed.
    comparators: Vec<(String, Option<Duration>)>,
    budgets: Vec<Budget>,
}

struct Budget {
    text: String,
    met: bool,
}

impl Row {
    /// A row without comparators.
    pub fn new(name: &str, ours: Figure) -> Self {
        Self { name: name.into(), ours, comparators: Vec::new(), budgets: Vec::new() }
    }

    /// Puts a comparator beside it.
    pub fn compare(&mut self, name: &str, time: Option<Duration>) {
        self.comparators.push((name.into(), time));
    }

    /// At most so many times a comparator.
    pub fn budget(&mut self, words: &str, comparator: &str, most: f64) {
        if let Some(ratio) = self.ratio(comparator) {
            self.budgets.push(Budget { text: format!("{words} {comparator}"), met: ratio <= most });
        }
    }

    /// At least so many times faster than a comparator.
    pub fn budget_faster(&mut self, words: &str, comparator: &str, least: f64) {
        if let Some(ratio) = self.ratio(comparator) {
            self.budgets.push(Budget { text: format!("{words} {comparator}"), met: ratio <= 1.0 / least });
        }
    }

    /// At most so many bytes.
    pub fn budget_bytes(&mut self, words: &str, most: u64) {
        if let Figure::Bytes(bytes) = self.ours {
            self.budgets.push(Budget { text: words.into(), met: bytes <= most });
        }
    }

    /// At most this long, whatever the machine.
    pub fn budget_time(&mut self, words: &str, most: Duration) {
        if let Some(time) = self.ours.time() {
            self.budgets.push(Budget { text: words.into(), met: time <= most });
        }
    }

    /// Ours over the comparator's.
    fn ratio(&self, comparator: &str) -> Option<f64> {
        let ours = self.ours.time()?;
        let (_, theirs) = self.comparators.iter().find(|(name, _)| name == comparator)?;
        Some(ours.as_secs_f64() / (*theirs)?.as_secs_f64())
    }
}

const HEADER: [&str; 4] = ["WHAT", "MEDIAN", "OURS IS", "BUDGET"];

/// How the page begins.
const PAGE_HEAD: &str = "\
# Benchmarks

`shoal bench --write docs` wrote this page from a single run.
All tools ran on the same machine within the same minutes; the floor, `cat` and plain HTTP alternate with Shoal, round by round.
Compare the ratios: the times depend on the machine.
*Floor* is the bare kernel work: the same namespaces, overlays and pivot, then `/bin/true`; for commands, a plain fork, exec and wait.
The first row uses [spares](../ARCHITECTURE.md#the-life-of-a-sandbox), which the daemon makes ahead of time; in the row with 100 creates at once, all but eight are made on demand.

";

/// All rows.
pub struct Report(Vec<Row>);

impl Report {
    /// An empty one.
    pub fn new() -> Self {
        Self(Vec::new())
    }

    /// Adds a row.
    pub fn add(&mut self, row: Row) {
        self.0.push(row);
    }

    /// Adds rows.
    pub fn add_all(&mut self, rows: Vec<Row>) {
        self.0.extend(rows);
    }

    /// For people.
    pub fn print(&self) -> anyhow::Result<()> {
        print::table(&HEADER, &self.lines())
    }

    fn lines(&self) -> Vec<Vec<String>> {
        let mut lines = Vec::new();
        for row in &self.0 {
            let budget =
                |budget: &Budget| format!("{} ({})", budget.text, if budget.met { "met" } else { "missed" });
            let budgets = row.budgets.iter().map(budget).collect::<Vec<_>>().join(", ");
            lines.push(vec![row.name.clone(), figure(row.ours), String::new(), budgets]);
            for (name, time) in &row.comparators {
                let (theirs, ratio) = match time {
                    Some(time) => (figure(row.ours.like(*time)), row.ratio(name).map(|r| format!("{r:.2}x"))),
                    None => ("not installed".into(), None),
                };
                lines.push(vec![format!("  {name}"), theirs, ratio.unwrap_or_default(), String::new()]);
            }
        }
        lines
    }

    /// As a page and a chart beside it, `benchmarks.md` and `benchmarks.svg`.
    pub fn write(&self, directory: &Path, machine: &str) -> anyhow::Result<()> {
        let mut page =
            format!("{PAGE_HEAD}{machine}\n![Times beside those of other tools](benchmarks.svg)\n\n");
        let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
        page.push_str(&line(&HEADER.map(str::to_lowercase)));
        page.push_str("| --- | --- | --- | --- |\n");
        for cells in self.lines() {
            // Comparators are indented in the table, which a page would swallow.
            let cells: Vec<String> = cells.iter().map(|cell| cell.replace("  ", "&nbsp;&nbsp;")).collect();
            page.push_str(&line(&cells));
        }
        let put = |name: &str, text: &str| {
            let path = directory.join(name);
            std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
        };
        put("benchmarks.md", &page)?;
        put("benchmarks.svg", &chart::draw(&self.groups()))
    }

    /// What the chart shows: times, each beside its comparators.
    fn groups(&self) -> Vec<Group> {
        let compared = self.0.iter().filter(|row| row.comparators.iter().any(|(_, time)| time.is_some()));
        let group = |row: &Row| {
            let ours = row.ours.time().map(|time| Bar { name: "shoal".into(), time, text: figure(row.ours) });
            let theirs = row.comparators.iter().filter_map(|(name, time)| {
                time.map(|time| Bar { name: name.clone(), time, text: figure(row.ours.like(time)) })
            });
            Group { name: row.name.clone(), bars: ours.into_iter().chain(theirs).collect() }
        };
        compared.map(group).collect()
    }

    /// For programs.
    pub fn print_json(&self) -> anyhow::Result<()> {
        let rows: Vec<serde_json::Value> = self.0.iter().map(row_json).collect();
        print::json(&rows)
    }
}

fn row_json(row: &Row) -> serde_json::Value {
    let comparators = row.comparators.iter().map(|(name, time)| {
        serde_json::json!({ "name": name, "seconds": time.map(|t| t.as_secs_f64()), "ratio": row.ratio(name) })
    });
    let budgets = row.budgets.iter().map(|b| serde_json::json!({ "budget": b.text, "met": b.met }));
    let mut json = serde_json::json!({
        "name": row.name,
        "comparators": comparators.collect::<Vec<_>>(),
        "budgets": budgets.collect::<Vec<_>>(),
    });
    match row.ours {
        Figure::Time(time) => json["seconds"] = time.as_secs_f64().into(),
        Figure::Bytes(bytes) => json["bytes"] = bytes.into(),
        Figure::Throughput(bytes, time) => {
            json["seconds"] = time.as_secs_f64().into();
            json["bytes_per_second"] = (bytes as f64 / time.as_secs_f64()).into();
        }
    }
    json
}

fn figure(figure: Figure) -> String {
    match figure {
        Figure::Time(time) => format!("{:.2} ms", time.as_secs_f64() * 1000.0),
        Figure::Bytes(bytes) => format!("{:.0} KiB", bytes as f64 / 1024.0),
        Figure::Throughput(bytes, time) => {
            format!("{:.0} MiB/s", bytes as f64 / f64::from(1 << 20) / time.as_secs_f64())
        }
    }
}
