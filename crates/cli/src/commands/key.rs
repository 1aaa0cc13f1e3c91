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
    let limit = |limit: Option<String>| limit.unwrap_or_else(|| "-".into());
    let rows: Vec<Vec<String>> = keys
        .into_iter()
        .map(|key| {
            let access = access(&key).to_owned();
            vec![
                key.id,
                key.owner,
                access,
                limit(key.sandboxes_max.map(|count| count.to_string())),
                limit(key.cpu_millis_max.map(amount::cpu)),
                limit(key.memory_bytes_max.map(amount::memory)),
                age::ago(&key.created_at),
            ]
        })
        .collect();
    print::table(&["id", "owner", "access", "sandboxes", "cpu", "memory", "created"], &rows)?;
    Ok(0)
}

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
