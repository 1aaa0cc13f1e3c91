//! `shoal key`: who may use the daemon.

use client::api;

use crate::args::{CreateKey, ListKeys, RemoveKey};
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::{age, amount, print, report};

/// `shoal key create`
pub async fn create(arguments: CreateKey, environment: &Environment) -> anyhow::Result<i32> {
    let wish = api::CreateKey {
        owner: arguments.owner,
        metrics_only: arguments.metrics_only,
        sandboxes_max: arguments.sandboxes,
        cpu_max: arguments.cpu,
        memory_max: arguments.memory,
        disk_max: arguments.disk,
        volumes_max: arguments.volumes,
        output_max: arguments.output,
        snapshots_max: arguments.snapshots,
        builds_max: arguments.builds,
        connections_max: arguments.connections,
    };
    let created = find::daemon(environment)?.create_key(&wish).await?;
    if arguments.json {
        print::json(&created)?
    } else {
        print::line(&created.secret)?
    }
    Ok(0)
}

/// `shoal key ls`
pub async fn list(arguments: ListKeys, environment: &Environment) -> anyhow::Result<i32> {
    let keys = find::daemon(environment)?.keys().await?;
    if arguments.json {
        print::json(&keys)?;
        return Ok(0);
    }
    // Sandboxes, processors and memory always; the rest if a key limits it.
    let shown: Vec<&Column> = COLUMNS
        .iter()
        .enumerate()
        .filter(|(at, column)| *at < COLUMNS_ALWAYS || keys.iter().any(|key| (column.limit)(key).is_some()))
        .map(|(_, column)| column)
        .collect();
    let mut rows = Vec::new();
    for key in &keys {
        let mut row = vec![key.id.clone(), key.owner.clone(), access(key).to_owned()];
        row.extend(shown.iter().map(|column| column.cell(key)));
        row.push(age::ago(&key.created_at));
        rows.push(row);
    }
    let mut header = vec!["id", "owner", "access"];
    header.extend(shown.iter().map(|column| column.name));
    header.push("created");
    print::table(&header, &rows)?;
    Ok(0)
}

/// How many of [`COLUMNS`] are shown even if no key limits them.
const COLUMNS_ALWAYS: usize = 3;

/// What a key limits, and what its owner uses of it.
struct Column {
    name: &'static str,
    limit: fn(&api::Key) -> Option<u64>,
    used: fn(&api::OwnerUse) -> u64,
    text: fn(u64) -> String,
    /// What is in use, which need not be a round number.
    rounded: fn(u64) -> String,
}

impl Column {
    /// The use beside the limit, or a dash where there is none.
    fn cell(&self, key: &api::Key) -> String {
        match ((self.limit)(key), &key.used) {
            (None, _) => "-".into(),
            (Some(limit), None) => (self.text)(limit),
            (Some(limit), Some(used)) => {
                format!("{}/{}", (self.rounded)((self.used)(used)), (self.text)(limit))
            }
        }
    }
}

fn count(number: u64) -> String {
    number.to_string()
}

const COLUMNS: [Column; 8] = [
    Column {
        name: "sandboxes",
        limit: |key| key.sandboxes_max.map(u64::from),
        used: |used| used.sandboxes,
        text: count,
        rounded: count,
    },
    Column {
        name: "cpu",
        limit: |key| key.cpu_millis_max,
        used: |used| used.cpu_millis,
        text: amount::cpu,
        rounded: amount::cpu,
    },
    Column {
        name: "memory",
        limit: |key| key.memory_bytes_max,
        used: |used| used.memory_bytes,
        text: amount::memory,
        rounded: amount::rounded,
    },
    Column {
        name: "disk",
        limit: |key| key.disk_bytes_max,
        used: |used| used.disk_bytes,
        text: amount::memory,
        rounded: amount::rounded,
    },
    Column {
        name: "volumes",
        limit: |key| key.volume_bytes_max,
        used: |used| used.volume_bytes,
        text: amount::memory,
        rounded: amount::rounded,
    },
    Column {
        name: "output",
        limit: |key| key.output_bytes_max,
        used: |used| used.output_bytes,
        text: amount::memory,
        rounded: amount::rounded,
    },
    Column {
        name: "snapshots",
        limit: |key| key.snapshots_max.map(u64::from),
        used: |used| used.snapshots,
        text: count,
        rounded: count,
    },
    Column {
        name: "builds",
        limit: |key| key.builds_max.map(u64::from),
        used: |used| used.builds,
        text: count,
        rounded: count,
    },
];

/// What a key gives access to.
fn access(key: &api::Key) -> &'static str {
    match (key.admin, key.metrics_only) {
        (true, _) => "everything",
        (false, true) => "metrics",
        (false, false) => "sandboxes",
    }
}

/// `shoal key rm`: each one, whatever becomes of the others.
pub async fn remove(arguments: RemoveKey, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let mut removed = Vec::new();
    for id in &arguments.keys {
        let deleted = async {
            let id = find::key(&client, id).await?;
            client.delete_key(&id).await?;
            anyhow::Ok(id)
        };
        match deleted.await {
            Ok(id) => {
                report::done(&format!("deleted key {id}"));
                removed.push(id);
            }
            Err(error) => report::failure(&error, environment.colour),
        }
    }
    if arguments.json {
        print::json(&removed)?;
    }
    Ok(i32::from(removed.len() < arguments.keys.len()))
}
