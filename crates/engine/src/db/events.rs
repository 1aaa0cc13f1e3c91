//! Rows of events.

use std::sync::Arc;

use rusqlite::{Connection, Row, params};
use serde::{Deserialize, Serialize};

use super::Db;
use super::commands::{OutcomeText, outcome_of, outcome_text};
use super::rows::{
    from_json, id_bytes, json, micros, owner_from, sandbox_id, signed, time, unreadable, unsigned,
};
use super::sandboxes::{state_from_words, state_words};
use crate::error::{DbError, EngineError};
use crate::model::hook::HookPoint;
use crate::model::names::TemplateName;
use crate::model::progress::SnapshotState;
use crate::model::template::{Preparation, Prepared};
use crate::model::{Owner, SandboxName};
use crate::observe::events::{
    About, EVENTS_KEPT_MAX, Event, EventId, Happened, Keeper, KeptEvents, PoolHappened, SnapshotHappened,
    TemplateHappened, VolumeHappened,
};

/// How often rows beyond the last [`EVENTS_KEPT_MAX`] are deleted, in events.
const TRIM_EVERY: u64 = 256;

/// An event as it is stored in a row. Its sandbox has a column.
#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum What {
    Sandbox {
        name: String,
        state: String,
        detail: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    Deleted {
        name: String,
    },
    CommandStarted {
        command: String,
        pid: u32,
    },
    CommandEnded {
        command: String,
        outcome: OutcomeText,
    },
    HookFailed {
        hook: String,
        reason: String,
    },
    Template {
        name: String,
        version: u32,
        /// Absent if it was deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        state: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resolved: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        image: Option<String>,
    },
    Snapshot {
        id: String,
        name: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<String>,
        /// Absent if it was deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        state: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    Volume {
        name: String,
        /// Absent if it was deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size_bytes: Option<u64>,
    },
    Pool {
        name: String,
        /// Absent if it was deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        replicas: Option<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        trouble: Option<String>,
    },
}

impl Db {
    /// The events of all owners.
    pub async fn load_events(&self) -> Result<Vec<KeptEvents>, EngineError> {
        self.question("read the events", |db| {
            let mut logs = db
                .prepare("SELECT owner, start FROM event_logs ORDER BY owner")?
                .query_map([], |row| {
                    let (owner, start) = (owner_from(row)?, unsigned(row, "start")?);
                    Ok(KeptEvents { owner, start, events: Vec::new() })
                })?
                .collect::<Result<Vec<_>, _>>()?;
            for log in &mut logs {
                // Rows are deleted at intervals, so there may be some more than are kept.
                let mut newest = db
                    .prepare_cached(
                        "SELECT owner, serial, at, sandbox, what FROM events WHERE owner = ?1
                         ORDER BY serial DESC LIMIT ?2",
                    )?
                    .query_map(params![log.owner.as_str(), EVENTS_KEPT_MAX as i64], |row| {
                        event_from(row, log.start)
                    })?
                    .collect::<Result<Vec<_>, _>>()?;
                newest.reverse();
                log.events = newest;
            }
            Ok(logs)
        })
        .await
    }
}

impl Keeper for Db {
    fn keep(&self, event: Arc<Event>, counted_anew: bool, done: Box<dyn FnOnce(Result<(), DbError>) + Send>) {
        self.submit(move |db| insert(db, &event, counted_anew), done);
    }

    fn forget(&self, owner: &Owner) {
        let owner = owner.clone();
        self.submit(
            move |db| {
                db.prepare_cached("DELETE FROM events WHERE owner = ?1")?.execute([owner.as_str()])?;
                db.prepare_cached("DELETE FROM event_logs WHERE owner = ?1")?.execute([owner.as_str()])?;
                Ok(())
            },
            |forgotten: Result<(), DbError>| {
                if let Err(error) = forgotten {
                    tracing::warn!(
                        error = crate::error::chain(&error),
                        "cannot delete the rows of an owner's events"
                    );
                }
            },
        );
    }
}

fn insert(db: &Connection, event: &Event, counted_anew: bool) -> rusqlite::Result<()> {
    let (owner, serial) = (event.owner.as_str(), event.id.serial);
    if counted_anew {
        db.prepare_cached(
            "INSERT INTO event_logs (owner, start) VALUES (?1, ?2)
             ON CONFLICT (owner) DO UPDATE SET start = excluded.start",
        )?
        .execute(params![owner, signed(event.id.start)])?;
    }
    let sandbox = match &event.about {
        About::Sandbox(sandbox, _) => Some(id_bytes(*sandbox)),
        About::Template(_) | About::Snapshot(_) | About::Volume(_) | About::Pool(_) => None,
    };
    db.prepare_cached("INSERT INTO events (owner, serial, at, sandbox, what) VALUES (?1, ?2, ?3, ?4, ?5)")?
        .execute(params![owner, signed(serial), micros(event.at), sandbox, json(&what_of(&event.about))])?;
    if serial % TRIM_EVERY == 0 {
        db.prepare_cached(
            "DELETE FROM events WHERE owner = ?1 AND serial <= (
                 SELECT serial FROM events WHERE owner = ?1 ORDER BY serial DESC LIMIT 1 OFFSET ?2)",
        )?
        .execute(params![owner, EVENTS_KEPT_MAX as i64])?;
    }
    Ok(())
}

fn what_of(about: &About) -> What {
    match about {
        About::Sandbox(_, Happened::Sandbox { name, state, reason }) => {
            let (state, detail) = state_words(*state);
            let (name, state, detail) = (name.as_str().to_owned(), state.to_owned(), detail.to_owned());
            What::Sandbox { name, state, detail, reason: reason.clone() }
        }
        About::Sandbox(_, Happened::Deleted { name }) => What::Deleted { name: name.as_str().to_owned() },
        About::Sandbox(_, Happened::CommandStarted { command, pid }) => {
            What::CommandStarted { command: command.to_string(), pid: *pid }
        }
        About::Sandbox(_, Happened::CommandEnded { command, outcome }) => {
            What::CommandEnded { command: command.to_string(), outcome: outcome_text(outcome) }
        }
        About::Sandbox(_, Happened::HookFailed { hook, reason }) => {
            What::HookFailed { hook: hook.word().into(), reason: reason.clone() }
        }
        About::Template(TemplateHappened { name, version, preparation }) => {
            let (name, version) = (name.to_string(), *version);
            let state = preparation.as_ref().map(|preparation| preparation.word().to_owned());
            let (mut reason, mut resolved, mut image) = (None, None, None);
            match preparation {
                Some(Preparation::Failed { reason: why }) => reason = Some(why.clone()),
                Some(Preparation::Ready(prepared)) => {
                    resolved = Some(prepared.resolved.clone());
                    image = prepared.image.map(|digest| digest.to_string());
                }
                Some(Preparation::Preparing | Preparation::Replaced) | None => {}
            }
            What::Template { name, version, state, reason, resolved, image }
        }
        About::Snapshot(SnapshotHappened { id, name, sandbox, state }) => {
            let (word, reason) = match state {
                None => (None, None),
                Some(SnapshotState::Building) => (Some("building"), None),
                Some(SnapshotState::Ready) => (Some("ready"), None),
                Some(SnapshotState::Failed { reason }) => (Some("failed"), Some(reason.clone())),
                Some(SnapshotState::Deleting) => (Some("deleting"), None),
            };
            let (id, name, of) = (id.clone(), name.clone(), sandbox.map(|sandbox| sandbox.to_string()));
            What::Snapshot { id, name, of, state: word.map(str::to_owned), reason }
        }
        About::Volume(VolumeHappened { name, size_bytes }) => {
            What::Volume { name: name.clone(), size_bytes: *size_bytes }
        }
        About::Pool(PoolHappened { name, replicas, trouble }) => {
            What::Pool { name: name.clone(), replicas: *replicas, trouble: trouble.clone() }
        }
    }
}

fn event_from(row: &Row<'_>, start: u64) -> rusqlite::Result<Event> {
    let id = EventId { start, serial: unsigned(row, "serial")? };
    let bad = || unreadable(row, "what", "event");
    let sandbox = || sandbox_id(row, "sandbox");
    let about = match from_json::<What>(row, "what")? {
        What::Sandbox { name, state, detail, reason } => {
            let state = state_from_words(&state, &detail).ok_or_else(bad)?;
            About::Sandbox(sandbox()?, Happened::Sandbox { name: SandboxName::kept(&name), state, reason })
        }
        What::Deleted { name } => {
            About::Sandbox(sandbox()?, Happened::Deleted { name: SandboxName::kept(&name) })
        }
        What::CommandStarted { command, pid } => {
            let command = command.parse().map_err(|_| bad())?;
            About::Sandbox(sandbox()?, Happened::CommandStarted { command, pid })
        }
        What::CommandEnded { command, outcome } => {
            let command = command.parse().map_err(|_| bad())?;
            let outcome = outcome_of(outcome).ok_or_else(bad)?;
            About::Sandbox(sandbox()?, Happened::CommandEnded { command, outcome })
        }
        What::HookFailed { hook, reason } => {
            let hook = HookPoint::parse(&hook).ok_or_else(bad)?;
            About::Sandbox(sandbox()?, Happened::HookFailed { hook, reason })
        }
        What::Template { name, version, state, reason, resolved, image } => {
            let preparation = match state.as_deref() {
                None => None,
                Some("preparing") => Some(Preparation::Preparing),
                Some("ready") => {
                    let image = image.map(|digest| digest.parse().map_err(|_| bad())).transpose()?;
                    Some(Preparation::Ready(Prepared { resolved: resolved.unwrap_or_default(), image }))
                }
                Some("failed") => Some(Preparation::Failed { reason: reason.unwrap_or_default() }),
                Some("replaced") => Some(Preparation::Replaced),
                Some(_) => return Err(bad()),
            };
            About::Template(TemplateHappened { name: TemplateName::kept(&name), version, preparation })
        }
        What::Snapshot { id, name, of, state, reason } => {
            let state = match state.as_deref() {
                None => None,
                Some("building") => Some(SnapshotState::Building),
                Some("ready") => Some(SnapshotState::Ready),
                Some("failed") => Some(SnapshotState::Failed { reason: reason.unwrap_or_default() }),
                Some("deleting") => Some(SnapshotState::Deleting),
                Some(_) => return Err(bad()),
            };
            let sandbox = of.map(|of| of.parse().map_err(|_| bad())).transpose()?;
            About::Snapshot(SnapshotHappened { id, name, sandbox, state })
        }
        What::Volume { name, size_bytes } => About::Volume(VolumeHappened { name, size_bytes }),
        What::Pool { name, replicas, trouble } => About::Pool(PoolHappened { name, replicas, trouble }),
    };
    Ok(Event { id, at: time(row, "at")?, owner: owner_from(row)?, about })
}
