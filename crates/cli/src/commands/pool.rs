//! `shoal pool`: sandboxes that stand ready.

use client::{Client, api};

use crate::args::{Pool, PoolAction};
use crate::commands::delete_each;
use crate::daemon::find::{self, Sure};
use crate::environment::Environment;
use crate::output::print::Paint;
use crate::output::progress::Waiting;
use crate::output::report::hinted;
use crate::output::{age, print};

/// How long one request waits for a pool; it is asked again then.
const WAIT_SECONDS: u32 = 60;

/// `shoal pool`
pub async fn pool(arguments: Pool, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        PoolAction::Create(arguments) => {
            let (template, replicas) = (arguments.template, arguments.replicas);
            let wish = api::CreatePool { name: arguments.name, template, replicas };
            let pool = client.create_pool(&wish).await?;
            finish(&client, pool, arguments.wait, arguments.json).await
        }
        PoolAction::Ls(arguments) => list(&client, arguments.json).await,
        PoolAction::Get(arguments) => {
            let name = find::pool(&client, &arguments.name, Sure::Unique).await?;
            let mut pool = client.pool(&name).await?;
            if arguments.wait {
                pool = full(&client, pool).await?;
            }
            match arguments.json {
                true => print::json(&pool)?,
                false => show(&pool)?,
            }
            Ok(0)
        }
        PoolAction::Scale(arguments) => {
            let update = api::UpdatePool { replicas: Some(arguments.replicas), ..Default::default() };
            let pool = client
                .update_pool(&find::pool(&client, &arguments.name, Sure::Unique).await?, &update)
                .await?;
            finish(&client, pool, arguments.wait, arguments.json).await
        }
        PoolAction::Rename(arguments) => {
            let update = api::UpdatePool { name: Some(arguments.new), ..Default::default() };
            let pool = client
                .update_pool(&find::pool(&client, &arguments.name, Sure::Unique).await?, &update)
                .await?;
            finish(&client, pool, false, arguments.json).await
        }
        PoolAction::Rm(arguments) => {
            let delete = async |name: &str| {
                let _waiting = Waiting::new("deleting the pool");
                let name = find::pool(&client, name, Sure::Whole).await?;
                client.delete_pool(&name).await?;
                anyhow::Ok(name)
            };
            Ok(delete_each("pool", &arguments.names, environment, delete).await)
        }
    }
}

/// Waits, if that was asked for, and says how it is.
async fn finish(client: &Client, mut pool: api::Pool, wait: bool, json: bool) -> anyhow::Result<i32> {
    if wait {
        pool = full(client, pool).await?;
    }
    match json {
        true => print::json(&pool)?,
        false => {
            let (word, paint) = word(pool.state);
            let (name, state) = (print::plain(&pool.name), print::painted(word, paint));
            print::line(&format!("{name}  {} of {} ready  {state}", pool.ready, pool.replicas))?
        }
    }
    Ok(0)
}

/// The pool once it is full. One that cannot be filled is an error.
async fn full(client: &Client, mut pool: api::Pool) -> anyhow::Result<api::Pool> {
    let _waiting = Waiting::new("filling the pool");
    loop {
        match (pool.state, &pool.reason) {
            (api::PoolState::Ready, _) => return Ok(pool),
            (api::PoolState::Failing, reason) => {
                let reason = reason.as_deref().unwrap_or("no reason given");
                return Err(hinted(
                    format!("pool `{}` cannot be filled: {reason}", pool.name),
                    format!("the daemon retries by itself; `shoal pool get {}` shows the state", pool.name),
                ));
            }
            (api::PoolState::Filling | api::PoolState::Deleting, _) => {
                pool = client.settled_pool(&pool.name, WAIT_SECONDS).await?;
            }
        }
    }
}

/// How a pool is, and how that looks.
pub fn word(state: api::PoolState) -> (&'static str, Paint) {
    match state {
        api::PoolState::Ready => ("ready", Paint::Green),
        api::PoolState::Filling => ("filling", Paint::Yellow),
        api::PoolState::Failing => ("failing", Paint::Red),
        api::PoolState::Deleting => ("deleting", Paint::Yellow),
    }
}

/// What a table says of a pool.
pub fn row(pool: &api::Pool) -> Vec<String> {
    vec![
        pool.name.clone(),
        pool.template.clone(),
        word(pool.state).0.to_owned(),
        format!("{} / {}", pool.ready, pool.replicas),
        pool.making.to_string(),
        pool.claims.to_string(),
        pool.misses.to_string(),
        pool.reason.clone().unwrap_or_default(),
    ]
}

/// The head of such a table.
pub const HEADER: [&str; 8] = ["pool", "template", "state", "ready", "making", "claims", "misses", "reason"];

async fn list(client: &Client, json: bool) -> anyhow::Result<i32> {
    let pools = client.pools().await?;
    match json {
        true => print::json(&pools)?,
        false => print::table(&HEADER, &pools.iter().map(row).collect::<Vec<_>>())?,
    }
    Ok(0)
}

/// A pool for people.
fn show(pool: &api::Pool) -> anyhow::Result<()> {
    let mut text = String::new();
    let mut line = |name: &str, value: &str| text += &format!("{name:<10} {value}\n");
    let plain = |value: &str| print::plain(value).to_string();
    let (state, paint) = word(pool.state);
    line("name", &plain(&pool.name));
    line("template", &format!("{}, version {}", plain(&pool.template), pool.template_version));
    line("state", &print::painted(state, paint));
    pool.reason.iter().for_each(|reason| line("reason", &plain(reason)));
    pool.retry_at.iter().for_each(|at| line("retry", at));
    line("ready", &format!("{} of {}", pool.ready, pool.replicas));
    line("claims", &format!("{}, and {} requests found no ready sandbox", pool.claims, pool.misses));
    line("id", &pool.id);
    line("created", &age::ago_and_when(&pool.created_at));
    line("updated", &age::ago_and_when(&pool.updated_at));
    print::text(&text)?;
    let members = pool.members.as_deref().unwrap_or_default();
    if members.is_empty() {
        return Ok(());
    }
    print::line("")?;
    let rows: Vec<Vec<String>> = members
        .iter()
        .map(|member| {
            vec![
                member.id.to_string(),
                member.name.clone(),
                print::word(&member.state),
                member.template_version.to_string(),
                age::ago(&member.created_at),
            ]
        })
        .collect();
    print::table(&["member", "name", "state", "version", "created"], &rows)
}
