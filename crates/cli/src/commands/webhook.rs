//! `shoal webhook`: add, list, test and remove webhooks, and show what they could not deliver.

use client::api;

use crate::args::{Webhook, WebhookAction};
use crate::commands::delete_each;
use crate::daemon::find;
use crate::environment::Environment;
use crate::output::print::{self, plain};
use crate::output::report::hinted;
use crate::output::{age, progress::Waiting};

/// `shoal webhook`
pub async fn webhook(arguments: Webhook, environment: &Environment) -> anyhow::Result<i32> {
    let client = find::daemon(environment)?;
    match arguments.action {
        WebhookAction::Add(arguments) => {
            let wish = api::CreateWebhook { url: arguments.url, events: arguments.events };
            let made = client.create_webhook(&wish).await?;
            if arguments.json {
                print::json(&made)?;
            } else {
                print::line(&made.id.to_string())?;
                print::line(&made.secret.unwrap_or_default())?;
            }
            Ok(0)
        }
        WebhookAction::Ls(arguments) => {
            let all = client.webhooks().await?;
            if arguments.json {
                print::json(&all)?;
                return Ok(0);
            }
            let rows = all.into_iter().map(|webhook| {
                vec![
                    webhook.id.to_string(),
                    webhook.url,
                    if webhook.events.is_empty() { "all".into() } else { webhook.events.join(",") },
                    webhook.delivered_at.as_deref().map_or_else(|| "never".into(), age::ago),
                    webhook.failed_attempts.to_string(),
                    webhook.last_error.unwrap_or_default(),
                ]
            });
            let rows: Vec<Vec<String>> = rows.collect();
            print::table(&["ID", "URL", "EVENTS", "DELIVERED", "FAILED", "ERROR"], &rows)?;
            Ok(0)
        }
        WebhookAction::Rm(arguments) => {
            let delete = async |id: &str| {
                client.delete_webhook(id).await?;
                anyhow::Ok(id.to_owned())
            };
            Ok(delete_each("webhook", &arguments.ids, environment, delete).await)
        }
        WebhookAction::Test(arguments) => {
            let waiting = Waiting::new("testing the webhook");
            let test = client.test_webhook(&arguments.id).await?;
            drop(waiting);
            if arguments.json {
                print::json(&test)?;
                return Ok(i32::from(!test.delivered));
            }
            match test.error {
                None => {
                    print::line(&format!("delivered in {:.0} ms", test.took_ms))?;
                    Ok(0)
                }
                Some(error) => Err(hinted(
                    format!("the webhook was not delivered: {error}"),
                    "`shoal webhook ls` shows its address",
                )),
            }
        }
        WebhookAction::Dead(arguments) => {
            let dead = client.dead_letters(&arguments.id).await?;
            if arguments.json {
                print::json(&dead)?;
                return Ok(0);
            }
            let rows = dead.into_iter().map(|letter| {
                let given_up = age::ago(&letter.given_up_at);
                vec![letter.id, given_up, letter.attempts.to_string(), plain(&letter.reason)]
            });
            let rows: Vec<Vec<String>> = rows.collect();
            print::table(&["EVENT", "GIVEN UP", "ATTEMPTS", "REASON"], &rows)?;
            Ok(0)
        }
    }
}
