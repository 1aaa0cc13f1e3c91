//! Rows about networks: the policy of each sandbox, the names that it looked up, events and totals.
//!
//! Egress delivers a record again until it is acknowledged, so storing one twice changes nothing. A record about a sandbox
//! that is gone is dropped.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, UNIX_EPOCH};

use egress::control::{Event, Record, Totals, What};
use egress::policy::{Action, Mode, Name, RuleSpec, Spec};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::{Deserialize, Serialize};
use wire::SandboxId;

use super::rows::{from_json, id_bytes, json, sandbox_id, signed, unreadable, unsigned};
use super::{Db, credentials};
use crate::error::EngineError;
use crate::model::network::{NetworkEvent, NetworkPolicy, NetworkTotals};

/// How many events of one sandbox are kept.
pub(crate) const EVENTS_PER_SANDBOX_MAX: u64 = 1000;
/// How many events of all sandboxes together are kept.
pub(crate) const EVENTS_MAX: u64 = 100_000;

/// A policy as it is stored in a row.
#[derive(Serialize, Deserialize)]
pub(super) struct PolicyText {
    mode: String,
    rules: Vec<RuleText>,
    audit: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    inject: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    family: Option<SandboxId>,
}

#[derive(Serialize, Deserialize)]
struct RuleText {
    allow: bool,
    to: String,
    ports: Vec<String>,
    protocol: Option<String>,
    private: bool,
}

impl From<&NetworkPolicy> for PolicyText {
    fn from(policy: &NetworkPolicy) -> Self {
        let Spec { mode, rules, audit } = policy.spec().clone();
        let rules = rules.into_iter().map(|RuleSpec { action, to, ports, protocol, private }| RuleText {
            allow: action == Action::Allow,
            to,
            ports,
            protocol,
            private,
        });
        let (inject, family) = (policy.inject().to_vec(), policy.family_given());
        Self { mode: mode.word().into(), rules: rules.collect(), audit, inject, family }
    }
}

impl PolicyText {
    /// `None` if this version does not know the mode.
    pub(super) fn policy(self) -> Option<NetworkPolicy> {
        let rules = self.rules.into_iter().map(|RuleText { allow, to, ports, protocol, private }| RuleSpec {
            action: if allow { Action::Allow } else { Action::Deny },
            to,
            ports,
            protocol,
            private,
        });
        let (rules, mode) = (rules.collect(), Mode::parse(&self.mode)?);
        let policy = NetworkPolicy::kept(Spec { mode, rules, audit: self.audit });
        let policy = policy.with_inject(&self.inject).ok()?;
        Some(match self.family {
            Some(family) => policy.of_family(family),
            None => policy,
        })
    }
}

/// The policies of all sandboxes that have one.
pub(super) fn policies(db: &Connection) -> rusqlite::Result<HashMap<SandboxId, NetworkPolicy>> {
    db.prepare("SELECT sandbox, policy FROM network_policies")?
        .query_map([], |row| {
            let text: PolicyText = from_json(row, "policy")?;
            let policy = text.policy().ok_or_else(|| unreadable(row, "policy", "policy"))?;
            Ok((sandbox_id(row, "sandbox")?, policy))
        })?
        .collect()
}

/// Writes a policy, in the change that inserts or changes the sandbox.
pub(super) fn put_policy(db: &Connection, id: SandboxId, policy: &NetworkPolicy) -> rusqlite::Result<()> {
    if policy.is_none() && policy.family_given().is_none() {
        db.prepare_cached("DELETE FROM network_policies WHERE sandbox = ?1")?
            .execute(params![id_bytes(id)])?;
        return Ok(());
    }
    db.prepare_cached(
        "INSERT INTO network_policies (sandbox, policy) VALUES (?1, ?2)
         ON CONFLICT (sandbox) DO UPDATE SET policy = excluded.policy",
    )?
    .execute(params![id_bytes(id), json(&PolicyText::from(policy))])?;
    Ok(())
}

impl Db {
    /// The names that a sandbox looked up, each at its place.
    pub async fn network_names(&self, id: SandboxId) -> Result<Vec<String>, EngineError> {
        self.question("read the names that a sandbox looked up", move |db| {
            let mut names: Vec<String> = Vec::new();
            let mut rows =
                db.prepare_cached("SELECT place, name FROM network_names WHERE sandbox = ?1 ORDER BY place")?;
            let mut rows = rows.query(params![id_bytes(id)])?;
            while let Some(row) = rows.next()? {
                let place: u32 = row.get("place")?;
                // A place is never given to another name, even if the name that had it is lost.
                while names.len() < place as usize {
                    names.push(format!("lost-{}.invalid", names.len()));
                }
                names.push(row.get("name")?);
            }
            Ok(names)
        })
        .await
    }

    /// Stores records of egress.
    pub async fn store_network_records(&self, records: Vec<Record>) -> Result<(), EngineError> {
        self.change("store the records of egress", move |db| {
            let mut events_of = Vec::new();
            for record in &records {
                match record {
                    Record::Name { sandbox, place, name } => put_name(db, *sandbox, *place, name)?,
                    Record::Event(event) => {
                        put_event(db, event)?;
                        events_of.push(event.sandbox);
                    }
                    Record::Totals(totals) => put_totals(db, totals)?,
                    // Of no single sandbox, so there is no row for it.
                    Record::Lost { events } => {
                        tracing::warn!(events, "egress had no room for some network events and dropped them");
                    }
                    Record::Used(used) => credentials::put_used(db, used)?,
                }
            }
            events_of.sort_unstable();
            events_of.dedup();
            for sandbox in &events_of {
                db.prepare_cached(
                    "DELETE FROM network_events WHERE sandbox = ?1 AND id <=
                         (SELECT id FROM network_events WHERE sandbox = ?1 ORDER BY id DESC LIMIT 1 OFFSET ?2)",
                )?
                .execute(params![id_bytes(*sandbox), signed(EVENTS_PER_SANDBOX_MAX)])?;
            }
            if !events_of.is_empty() {
                db.prepare_cached(
                    "DELETE FROM network_events WHERE id <=
                         (SELECT id FROM network_events ORDER BY id DESC LIMIT 1 OFFSET ?1)",
                )?
                .execute(params![signed(EVENTS_MAX)])?;
            }
            Ok(())
        })
        .await
    }

    /// Events of a sandbox, oldest first: the first ones after an id, or the newest.
    pub async fn network_events(
        &self,
        id: SandboxId,
        after: Option<u64>,
        limit: usize,
        refused: bool,
    ) -> Result<Vec<NetworkEvent>, EngineError> {
        self.question("read network events", move |db| {
            let refused = match refused {
                true => "AND what IN ('refused', 'name_refused', 'audited')",
                false => "",
            };
            let order = if after.is_some() { "ASC" } else { "DESC" };
            let mut events = db
                .prepare_cached(&format!(
                    "SELECT * FROM network_events WHERE sandbox = ?1 AND id > ?2 {refused} ORDER BY id {order} LIMIT ?3"
                ))?
                .query_map(params![id_bytes(id), signed(after.unwrap_or(0)), signed(limit as u64)], event_from)?
                .collect::<Result<Vec<_>, _>>()?;
            if after.is_none() {
                events.reverse();
            }
            Ok(events)
        })
        .await
    }

    /// What a sandbox has used.
    pub async fn network_totals(&self, id: SandboxId) -> Result<NetworkTotals, EngineError> {
        self.question("read what a sandbox has sent", move |db| {
            db.prepare_cached(&format!("SELECT {SUMS} FROM network_totals WHERE sandbox = ?1"))?
                .query_row(params![id_bytes(id)], totals_from)
                .optional()
                .map(Option::unwrap_or_default)
        })
        .await
    }
}

const SUMS: &str = "sent + sent_now AS sent, received + received_now AS received,
    connections + connections_now AS connections, refused + refused_now AS refused";

fn totals_from(row: &Row<'_>) -> rusqlite::Result<NetworkTotals> {
    Ok(NetworkTotals {
        sent: unsigned(row, "sent")?,
        received: unsigned(row, "received")?,
        connections: unsigned(row, "connections")?,
        refused: unsigned(row, "refused")?,
    })
}

fn put_name(db: &Connection, id: SandboxId, place: u32, name: &Name) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT OR IGNORE INTO network_names (sandbox, place, name)
         SELECT id, ?2, ?3 FROM sandboxes WHERE id = ?1",
    )?
    .execute(params![id_bytes(id), place, name.as_str()])?;
    Ok(())
}

/// Gives a sandbox the names of another one, each at its place: copied files may hold the addresses.
pub(super) fn copy_names(db: &Connection, from: SandboxId, to: SandboxId) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT INTO network_names (sandbox, place, name)
         SELECT ?2, place, name FROM network_names WHERE sandbox = ?1",
    )?
    .execute(params![id_bytes(from), id_bytes(to)])?;
    Ok(())
}

fn put_event(db: &Connection, event: &Event) -> rusqlite::Result<()> {
    db.prepare_cached(
        "INSERT OR IGNORE INTO network_events (sandbox, at_ms, what, name, address, port, protocol, rule, why, opens,
             sent, received)
         SELECT id, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12 FROM sandboxes WHERE id = ?1",
    )?
    .execute(params![
        id_bytes(event.sandbox),
        signed(event.at_ms),
        what_word(event.what),
        event.name.as_ref().map_or("", Name::as_str),
        event.address.map(|address| address.to_string()).unwrap_or_default(),
        event.port.unwrap_or(0),
        event.protocol.map_or("", |protocol| protocol.word()),
        event.rule,
        event.why.as_deref().unwrap_or(""),
        event.opens.as_deref().unwrap_or(""),
        signed(event.sent),
        signed(event.received),
    ])?;
    Ok(())
}

/// The counters of one egress only grow. A smaller one means that another egress serves the sandbox now: what the former
/// counted is added to the sums.
fn put_totals(db: &Connection, totals: &Totals) -> rusqlite::Result<()> {
    db.prepare_cached(
        "UPDATE network_totals SET sent = sent + sent_now, received = received + received_now,
             connections = connections + connections_now, refused = refused + refused_now,
             sent_now = 0, received_now = 0, connections_now = 0, refused_now = 0
         WHERE sandbox = ?1 AND (sent_now > ?2 OR received_now > ?3 OR connections_now > ?4 OR refused_now > ?5)",
    )?
    .execute(params![
        id_bytes(totals.sandbox),
        signed(totals.sent),
        signed(totals.received),
        signed(totals.connections),
        signed(totals.refused)
    ])?;
    db.prepare_cached(
        "INSERT INTO network_totals (sandbox, sent, received, connections, refused, sent_now, received_now,
             connections_now, refused_now)
         SELECT id, 0, 0, 0, 0, ?2, ?3, ?4, ?5 FROM sandboxes WHERE id = ?1
         ON CONFLICT (sandbox) DO UPDATE SET sent_now = excluded.sent_now, received_now = excluded.received_now,
             connections_now = excluded.connections_now, refused_now = excluded.refused_now",
    )?
    .execute(params![
        id_bytes(totals.sandbox),
        signed(totals.sent),
        signed(totals.received),
        signed(totals.connections),
        signed(totals.refused)
    ])?;
    Ok(())
}

fn event_from(row: &Row<'_>) -> rusqlite::Result<NetworkEvent> {
    let text = |column: &str| -> rusqlite::Result<Option<String>> {
        Ok(Some(row.get::<_, String>(column)?).filter(|text| !text.is_empty()))
    };
    let port: u16 = row.get("port")?;
    Ok(NetworkEvent {
        id: unsigned(row, "id")?,
        at: UNIX_EPOCH + Duration::from_millis(unsigned(row, "at_ms")?),
        what: row.get("what")?,
        name: text("name")?,
        address: text("address")?.and_then(|text| text.parse::<IpAddr>().ok()),
        port: Some(port).filter(|port| *port > 0),
        protocol: text("protocol")?,
        rule: row.get("rule")?,
        why: text("why")?,
        opens: text("opens")?,
        sent: unsigned(row, "sent")?,
        received: unsigned(row, "received")?,
    })
}

fn what_word(what: What) -> &'static str {
    match what {
        What::Opened => "opened",
        What::Audited => "audited",
        What::Refused => "refused",
        What::NameRefused => "name_refused",
        What::Unreachable => "unreachable",
        What::Closed => "closed",
        What::Cut => "cut",
    }
}
