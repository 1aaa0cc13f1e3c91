//! The arguments of `shoal webhook`.

use clap::Args;

/// Send events to other programs: one signed HTTP request for each.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal webhook add https://example.com/hook
  shoal webhook add https://example.com/hook --event sandbox --event deleted
  shoal webhook test 4f6c0f3e-7f1b-4e25-9d6c-0d9f3e6c2a11
  shoal webhook dead 4f6c0f3e-7f1b-4e25-9d6c-0d9f3e6c2a11")]
pub struct Webhook {
    #[command(subcommand)]
    pub action: WebhookAction,
}

#[derive(Debug, clap::Subcommand)]
pub enum WebhookAction {
    #[command(visible_alias = "create")]
    Add(AddWebhook),
    #[command(visible_alias = "list")]
    Ls(ListWebhooks),
    #[command(visible_alias = "delete", alias = "remove")]
    Rm(RemoveWebhooks),
    Test(TestWebhook),
    Dead(DeadLetters),
}

/// Add a webhook, and print its id and the secret that requests are signed with, which is shown only once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  shoal webhook add https://example.com/hook
  shoal webhook add https://example.com/hook --event hook_failed")]
pub struct AddWebhook {
    /// Where to send events
    pub url: String,
    /// Send only events of this type, for example sandbox; repeatable
    #[arg(long = "event", value_name = "TYPE")]
    pub events: Vec<String>,
    /// Print the webhook as JSON
    #[arg(long)]
    pub json: bool,
}

/// List webhooks, oldest first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal webhook ls\n  shoal webhook ls --json")]
pub struct ListWebhooks {
    /// Print a JSON array
    #[arg(long)]
    pub json: bool,
}

/// Delete webhooks. Nothing more is sent to them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal webhook rm 4f6c0f3e-7f1b-4e25-9d6c-0d9f3e6c2a11")]
pub struct RemoveWebhooks {
    /// Ids of the webhooks
    #[arg(required = true, value_name = "WEBHOOK")]
    pub ids: Vec<String>,
}

/// Send a webhook a test now. Fails if the receiver does not accept it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal webhook test 4f6c0f3e-7f1b-4e25-9d6c-0d9f3e6c2a11")]
pub struct TestWebhook {
    /// Id of the webhook
    #[arg(value_name = "WEBHOOK")]
    pub id: String,
    /// Print what came of it as JSON
    #[arg(long)]
    pub json: bool,
}

/// List the events that a webhook could not deliver.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  shoal webhook dead 4f6c0f3e-7f1b-4e25-9d6c-0d9f3e6c2a11")]
pub struct DeadLetters {
    /// Id of the webhook
    #[arg(value_name = "WEBHOOK")]
    pub id: String,
    /// Print a JSON array, with what would have been sent
    #[arg(long)]
    pub json: bool,
}
