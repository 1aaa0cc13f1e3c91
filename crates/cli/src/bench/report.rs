//! The table of a benchmark, for people and for programs.

use std::time::Duration;

use crate::print;

/// The middle one.
pub fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// What was measured.
#[derive(Clone, Copy)]
pub enum Figure {
    /// A time.
    Time(Duration),
    /// An amount of memory.
    Bytes(u64),
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

    /// Ours over the comparator's.
    fn ratio(&self, comparator: &str) -> Option<f64> {
        let Figure::Time(ours) = self.ours else { return None };
        let (_, theirs) = self.comparators.iter().find(|(name, _)| name == comparator)?;
        Some(ours.as_secs_f64() / (*theirs)?.as_secs_f64())
    }
}

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
        let mut lines = Vec::new();
        for row in &self.0 {
            let budget =
                |budget: &Budget| format!("{} ({})", budget.text, if budget.met { "met" } else { "missed" });
            let budgets = row.budgets.iter().map(budget).collect::<Vec<_>>().join(", ");
            lines.push(vec![row.name.clone(), figure(row.ours), String::new(), budgets]);
            for (name, time) in &row.comparators {
                let (theirs, ratio) = match time {
                    Some(time) => (figure(Figure::Time(*time)), row.ratio(name).map(|r| format!("{r:.2}x"))),
                    None => ("not installed".into(), None),
                };
                lines.push(vec![format!("  {name}"), theirs, ratio.unwrap_or_default(), String::new()]);
            }
        }
        print::table(&["WHAT", "MEDIAN", "OURS IS", "BUDGET"], &lines)
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
    }
    json
}

fn figure(figure: Figure) -> String {
    match figure {
        Figure::Time(time) => format!("{:.2} ms", time.as_secs_f64() * 1000.0),
        Figure::Bytes(bytes) => format!("{:.0} KiB", bytes as f64 / 1024.0),
    }
}
