//! `--all-owners` of `shoal ls` and `shoal rm`: the sandboxes of every owner, for an operator.

use crate::daemon::find;
use crate::environment::Environment;
use crate::output::{age, amount, print, report};

/// `shoal ls --all-owners`
pub async fn list(quiet: bool, json: bool, environment: &Environment) -> anyhow::Result<i32> {
    let sandboxes = find::daemon(environment)?.sandboxes_of_all_owners().await?;
    if json {
        print::json(&sandboxes)?;
        return Ok(0);
    }
    if quiet {
        for sandbox in &sandboxes {
            print::line(&sandbox.id.to_string())?;
        }
        return Ok(0);
    }
    let rows: Vec<Vec<String>> = sandboxes
        .into_iter()
        .map(|sandbox| {
            vec![
                sandbox.id.to_string(),
                sandbox.owner,
                sandbox.name,
                print::word(&sandbox.state),
                sandbox.role,
                amount::rounded(sandbox.output_bytes),
                age::ago(&sandbox.created_at),
            ]
        })
        .collect();
    print::table(&["id", "owner", "name", "state", "role", "output", "created"], &rows)?;
    Ok(0)
}

/// `shoal rm --all-owners`: each one, whatever becomes of the others. A name may be that of several owners, so only ids
/// are taken.
pub async fn remove(ids: &[String], environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    let mut failed = false;
    for text in ids {
        let removed = async {
            let id =
                text.parse().map_err(|_| anyhow::anyhow!("`{text}` must be a whole id with --all-owners"))?;
            anyhow::Ok(client.delete_sandbox_of_any_owner(id).await?)
        };
        match removed.await {
            Ok(()) => report::done(&format!("deleted sandbox `{text}`")),
            Err(error) => {
                failed = true;
                report::failure(&error, environment.colour);
            }
        }
    }
    Ok(i32::from(failed))
}
