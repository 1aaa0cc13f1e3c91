//! What belongs to a sandbox's life and is in tables of its own: labels, lifetime rules, and the times that they count from.
//! A sandbox without them has no rows there, and pays nothing for them.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use rusqlite::{Connection, Row, params};
use wire::SandboxId;

use super::rows::{SandboxRow, id_bytes, sandbox_id, signed, unreadable, unsigned};
use crate::clock::Stamp;
use crate::error::EngineError;
use crate::labels::Labels;
use crate::lifetime::{Action, LastUse, Lifetime, Rule, Since};
use crate::model::SandboxName;
use crate::notes::Notes;

/// What the clocks of a lifetime count from. Rows have them for sandboxes with rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamps {
    pub created: Stamp,
    pub started: Option<Stamp>,
    pub used: Stamp,
    pub last_use: LastUse,
    pub paused: Option<Stamp>,
    /// What it had had of the processors when it was last looked at.
    pub cpu: Option<Duration>,
}

impl Stamps {
    /// Of a sandbox that was just asked for.
    pub fn born(created: Stamp) -> Self {
        Self { created, started: None, used: created, last_use: LastUse::Start, paused: None, cpu: None }
    }
}

/// What changes about a sandbox, in one commit.
#[derive(Debug, Clone, Default)]
pub(crate) struct SandboxChange {
    pub name: Option<SandboxName>,
    pub labels: Option<Labels>,
    pub notes: Option<Notes>,
    /// With rules, the times that they count from.
    pub lifetime: Option<Lifetime>,
    pub stamps: Option<Stamps>,
}

/// Writes all labels of a sandbox that has none.
pub(super) fn insert_labels(db: &Connection, sandbox: SandboxId, labels: &Labels) -> rusqlite::Result<()> {
    for (key, value) in labels.pairs() {
        db.prepare_cached("INSERT INTO labels (sandbox, key, value) VALUES (?1, ?2, ?3)")?
            .execute(params![id_bytes(sandbox), key, value])?;
    }
    Ok(())
}

/// Migration: what a dialect keeps with a sandbox.
pub(super) const NOTES: &str = "
    CREATE TABLE notes (
        sandbox         BLOB NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
        key             TEXT NOT NULL,
        value           TEXT NOT NULL,
        PRIMARY KEY (sandbox, key)
    ) WITHOUT ROWID;
";

/// Writes all notes of a sandbox that has none.
pub(super) fn insert_notes(db: &Connection, sandbox: SandboxId, notes: &Notes) -> rusqlite::Result<()> {
    for (key, value) in notes.pairs() {
        db.prepare_cached("INSERT INTO notes (sandbox, key, value) VALUES (?1, ?2, ?3)")?
            .execute(params![id_bytes(sandbox), key, value])?;
    }
    Ok(())
}

/// Writes all rules of a sandbox that has none.
pub(super) fn insert_rules(db: &Connection, sandbox: SandboxId, lifetime: &Lifetime) -> rusqlite::Result<()> {
    for (position, rule) in lifetime.rules().iter().enumerate() {
        db.prepare_cached(
            "INSERT INTO rules (sandbox, position, since, after_ms, action) VALUES (?1, ?2, ?3, ?4, ?5)",
        )?
        .execute(params![
            id_bytes(sandbox),
            position as i64,
            rule.since.word(),
            signed(rule.after.as_millis() as u64),
            rule.action.word(),
        ])?;
    }
    Ok(())
}

/// Writes what the clocks of a sandbox count from, in place of what was there.
pub(super) fn put_stamps(db: &Connection, sandbox: SandboxId, stamps: &Stamps) -> rusqlite::Result<()> {
    put_stamp(db, sandbox, Since::Creation, &stamps.created)?;
    put_use(db, sandbox, stamps)?;
    for (since, stamp) in [(Since::Start, stamps.started), (Since::Paused, stamps.paused)] {
        if let Some(stamp) = stamp {
            put_stamp(db, sandbox, since, &stamp)?;
        }
    }
    Ok(())
}

pub(super) fn put_stamp(
    db: &Connection,
    sandbox: SandboxId,
    since: Since,
    stamp: &Stamp,
) -> rusqlite::Result<()> {
    put(db, sandbox, since, stamp, None, None)
}

pub(super) fn put_use(db: &Connection, sandbox: SandboxId, stamps: &Stamps) -> rusqlite::Result<()> {
    put(db, sandbox, Since::LastUse, &stamps.used, Some(stamps.last_use), stamps.cpu)
}

fn put(
    db: &Connection,
    sandbox: SandboxId,
    since: Since,
    stamp: &Stamp,
    kind: Option<LastUse>,
    cpu: Option<Duration>,
) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT INTO stamps (sandbox, since, wall_at, boot, since_boot, kind, cpu) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
         ON CONFLICT (sandbox, since) DO UPDATE
         SET wall_at = excluded.wall_at, boot = excluded.boot, since_boot = excluded.since_boot,
             kind = excluded.kind, cpu = excluded.cpu",
    )?
    .execute(params![
        id_bytes(sandbox),
        since.word(),
        stamp.wall_micros,
        stamp.boot.to_be_bytes(),
        stamp.since_boot_micros,
        kind.map(LastUse::word),
        cpu.map(|cpu| signed(cpu.as_micros() as u64)),
    ])?;
    Ok(())
}

/// Adds to sandboxes what other tables have of them. A row of a sandbox that is not there is skipped; there is none.
pub(super) fn add_life(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let at: HashMap<SandboxId, usize> =
        sandboxes.iter().enumerate().map(|(at, sandbox)| (sandbox.id, at)).collect();
    let mut labels: HashMap<usize, BTreeMap<String, String>> = HashMap::new();
    let mut notes: HashMap<usize, BTreeMap<String, String>> = HashMap::new();
    let mut rules: HashMap<usize, Vec<Rule>> = HashMap::new();
    let mut read = db.prepare("SELECT sandbox, key, value FROM labels")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(at) = at.get(&sandbox_id(row, 0)?) {
            labels.entry(*at).or_default().insert(row.get(1)?, row.get(2)?);
        }
    }
    let mut read = db.prepare("SELECT sandbox, key, value FROM notes")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(at) = at.get(&sandbox_id(row, 0)?) {
            notes.entry(*at).or_default().insert(row.get(1)?, row.get(2)?);
        }
    }
    let mut read =
        db.prepare("SELECT sandbox, since, after_ms, action FROM rules ORDER BY sandbox, position")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(at) = at.get(&sandbox_id(row, 0)?) {
            let after = Duration::from_millis(unsigned(row, 2)?);
            rules.entry(*at).or_default().push(Rule {
                since: since(row, 1)?,
                after,
                action: action(row, 3)?,
            });
        }
    }
    let mut read = db.prepare("SELECT sandbox, since, wall_at, boot, since_boot, kind, cpu FROM stamps")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        let Some(at) = at.get(&sandbox_id(row, 0)?) else { continue };
        let boot = u128::from_be_bytes(row.get(3)?);
        let stamp = Stamp { wall_micros: row.get(2)?, boot, since_boot_micros: row.get(4)? };
        let stamps = &mut sandboxes[*at].stamps;
        match since(row, 1)? {
            Since::Creation => stamps.created = stamp,
            Since::Start => stamps.started = Some(stamp),
            Since::Paused => stamps.paused = Some(stamp),
            Since::LastUse => {
                stamps.used = stamp;
                stamps.last_use = last_use(row, 5)?;
                stamps.cpu = row.get::<_, Option<i64>>(6)?.map(|cpu| Duration::from_micros(cpu as u64));
            }
        }
    }
    let unreadable = |_: EngineError| unreadable(0, "set of labels, notes or rules");
    for (at, labels) in labels {
        sandboxes[at].labels = Labels::new(labels).map_err(unreadable)?;
    }
    for (at, notes) in notes {
        sandboxes[at].notes = Notes::new(notes).map_err(unreadable)?;
    }
    for (at, rules) in rules {
        sandboxes[at].lifetime = Lifetime::new(rules).map_err(unreadable)?;
    }
    Ok(())
}

fn since(row: &Row<'_>, column: usize) -> rusqlite::Result<Since> {
    let word = row.get_ref(column)?.as_str()?;
    let all = [Since::LastUse, Since::Start, Since::Paused, Since::Creation];
    all.into_iter().find(|since| since.word() == word).ok_or_else(|| unreadable(column, "clock"))
}

fn last_use(row: &Row<'_>, column: usize) -> rusqlite::Result<LastUse> {
    let Some(word) = row.get_ref(column)?.as_str_or_null()? else { return Ok(LastUse::Request) };
    let all = [LastUse::Start, LastUse::Request, LastUse::Touch, LastUse::Processor];
    all.into_iter().find(|last_use| last_use.word() == word).ok_or_else(|| unreadable(column, "kind of use"))
}

fn action(row: &Row<'_>, column: usize) -> rusqlite::Result<Action> {
    let word = row.get_ref(column)?.as_str()?;
    let all = [Action::PauseKeepMemory, Action::PauseDropMemory, Action::Delete];
    all.into_iter().find(|action| action.word() == word).ok_or_else(|| unreadable(column, "action"))
}
