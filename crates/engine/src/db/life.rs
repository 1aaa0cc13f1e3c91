//! The parts of a sandbox that have separate tables: labels, notes, lifetime rules, and the times that the rules
//! count from. A sandbox without them has no rows there.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use rusqlite::{Connection, Row, params};
use wire::SandboxId;

use super::rows::{id_bytes, sandbox_id, signed, unknown, unreadable, unsigned};
use super::sandboxes::SandboxRow;
use crate::error::EngineError;
use crate::model::SandboxName;
use crate::model::dialect_notes::Notes;
use crate::model::labels::Labels;
use crate::model::lifetime::{Action, LastUse, Lifetime, Rule, Since};
use crate::model::network::NetworkPolicy;
use crate::observe::clock::Stamp;

/// The word for [`Stamps::acting`], which is no clock of a rule.
const ACTING: &str = "acting";

/// The times that lifetime rules count from. Only sandboxes with rules have rows for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamps {
    pub created: Stamp,
    pub started: Option<Stamp>,
    pub used: Stamp,
    pub last_use: LastUse,
    pub paused: Option<Stamp>,
    /// When the rules to pause began to count, if an earlier version kept them without acting on them.
    pub acting: Option<Stamp>,
    /// The processor time that the sandbox had used when the driver last read it.
    pub cpu: Option<Duration>,
}

impl Stamps {
    /// The times of a new sandbox.
    pub fn born(created: Stamp) -> Self {
        Self {
            created,
            started: None,
            used: created,
            last_use: LastUse::Start,
            paused: None,
            acting: None,
            cpu: None,
        }
    }
}

/// A change of a sandbox, written in one commit.
#[derive(Debug, Clone, Default)]
pub(crate) struct SandboxChange {
    pub name: Option<SandboxName>,
    pub labels: Option<Labels>,
    pub notes: Option<Notes>,
    /// A change of the rules comes with `stamps`, the times that they count from.
    pub lifetime: Option<Lifetime>,
    pub stamps: Option<Stamps>,
    pub network: Option<NetworkPolicy>,
}

/// Inserts the labels of a sandbox, which must have none in the table.
pub(super) fn insert_labels(db: &Connection, sandbox: SandboxId, labels: &Labels) -> rusqlite::Result<()> {
    for (key, value) in labels.pairs() {
        db.prepare_cached("INSERT INTO labels (sandbox, key, value) VALUES (?1, ?2, ?3)")?
            .execute(params![id_bytes(sandbox), key, value])?;
    }
    Ok(())
}

/// Inserts the notes of a sandbox, which must have none in the table.
pub(super) fn insert_notes(db: &Connection, sandbox: SandboxId, notes: &Notes) -> rusqlite::Result<()> {
    for (key, value) in notes.pairs() {
        db.prepare_cached("INSERT INTO notes (sandbox, key, value) VALUES (?1, ?2, ?3)")?
            .execute(params![id_bytes(sandbox), key, value])?;
    }
    Ok(())
}

/// Inserts the rules of a sandbox, which must have none in the table.
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

/// Writes the times of a sandbox over those in the table.
pub(super) fn put_stamps(db: &Connection, sandbox: SandboxId, stamps: &Stamps) -> rusqlite::Result<()> {
    put_stamp(db, sandbox, Since::Creation, &stamps.created)?;
    put_use(db, sandbox, stamps)?;
    Ok(())
}

fn put_stamp(db: &Connection, sandbox: SandboxId, since: Since, stamp: &Stamp) -> rusqlite::Result<()> {
    put(db, sandbox, since.word(), stamp, None, None)
}

/// Writes all times that change during the life of a sandbox.
pub(super) fn put_use(db: &Connection, sandbox: SandboxId, stamps: &Stamps) -> rusqlite::Result<()> {
    let last_use = Since::LastUse.word();
    put(db, sandbox, last_use, &stamps.used, Some(stamps.last_use), stamps.cpu)?;
    let others = [
        (Since::Start.word(), stamps.started),
        (Since::Paused.word(), stamps.paused),
        (ACTING, stamps.acting),
    ];
    for (since, stamp) in others {
        if let Some(stamp) = stamp {
            put(db, sandbox, since, &stamp, None, None)?;
        }
    }
    Ok(())
}

fn put(
    db: &Connection,
    sandbox: SandboxId,
    since: &str,
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
        since,
        stamp.wall_micros,
        stamp.boot.to_be_bytes(),
        stamp.since_boot_micros,
        kind.map(LastUse::word),
        cpu.map(|cpu| signed(cpu.as_micros() as u64)),
    ])?;
    Ok(())
}

/// Adds labels, notes, rules and times to sandboxes. Skips rows of sandboxes that are not in the list.
pub(super) fn add_life(db: &Connection, sandboxes: &mut [SandboxRow]) -> rusqlite::Result<()> {
    let at: HashMap<SandboxId, usize> =
        sandboxes.iter().enumerate().map(|(at, sandbox)| (sandbox.id, at)).collect();
    let mut labels: HashMap<usize, BTreeMap<String, String>> = HashMap::new();
    let mut notes: HashMap<usize, BTreeMap<String, String>> = HashMap::new();
    let mut rules: HashMap<usize, Vec<Rule>> = HashMap::new();
    let mut read = db.prepare("SELECT sandbox, key, value FROM labels")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(at) = at.get(&sandbox_id(row, "sandbox")?) {
            labels.entry(*at).or_default().insert(row.get("key")?, row.get("value")?);
        }
    }
    let mut read = db.prepare("SELECT sandbox, key, value FROM notes")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(at) = at.get(&sandbox_id(row, "sandbox")?) {
            notes.entry(*at).or_default().insert(row.get("key")?, row.get("value")?);
        }
    }
    let mut read =
        db.prepare("SELECT sandbox, since, after_ms, action FROM rules ORDER BY sandbox, position")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        if let Some(at) = at.get(&sandbox_id(row, "sandbox")?) {
            let after = Duration::from_millis(unsigned(row, "after_ms")?);
            rules.entry(*at).or_default().push(Rule {
                since: since(row, "since")?,
                after,
                action: action(row, "action")?,
            });
        }
    }
    let mut read = db.prepare("SELECT sandbox, since, wall_at, boot, since_boot, kind, cpu FROM stamps")?;
    let mut rows = read.query([])?;
    while let Some(row) = rows.next()? {
        let Some(at) = at.get(&sandbox_id(row, "sandbox")?) else { continue };
        let boot = u128::from_be_bytes(row.get("boot")?);
        let stamp =
            Stamp { wall_micros: row.get("wall_at")?, boot, since_boot_micros: row.get("since_boot")? };
        let stamps = &mut sandboxes[*at].stamps;
        if row.get_ref("since")?.as_str()? == ACTING {
            stamps.acting = Some(stamp);
            continue;
        }
        match since(row, "since")? {
            Since::Creation => stamps.created = stamp,
            Since::Start => stamps.started = Some(stamp),
            Since::Paused => stamps.paused = Some(stamp),
            Since::LastUse => {
                stamps.used = stamp;
                stamps.last_use = last_use(row, "kind")?;
                stamps.cpu = row.get::<_, Option<i64>>("cpu")?.map(|cpu| Duration::from_micros(cpu as u64));
            }
        }
    }
    let unreadable = |_: EngineError| unknown(0, "set of labels, notes or rules");
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

fn since(row: &Row<'_>, column: &str) -> rusqlite::Result<Since> {
    let word = row.get_ref(column)?.as_str()?;
    let all = [Since::LastUse, Since::Start, Since::Paused, Since::Creation];
    all.into_iter().find(|since| since.word() == word).ok_or_else(|| unreadable(row, column, "clock"))
}

fn last_use(row: &Row<'_>, column: &str) -> rusqlite::Result<LastUse> {
    let Some(word) = row.get_ref(column)?.as_str_or_null()? else { return Ok(LastUse::Request) };
    let all = [LastUse::Start, LastUse::Request, LastUse::Touch, LastUse::Processor];
    all.into_iter()
        .find(|last_use| last_use.word() == word)
        .ok_or_else(|| unreadable(row, column, "kind of use"))
}

fn action(row: &Row<'_>, column: &str) -> rusqlite::Result<Action> {
    let word = row.get_ref(column)?.as_str()?;
    let all = [Action::PauseKeepMemory, Action::PauseDropMemory, Action::Delete];
    all.into_iter().find(|action| action.word() == word).ok_or_else(|| unreadable(row, column, "action"))
}
