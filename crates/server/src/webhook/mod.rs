//! Delivers events to webhooks. `engine::webhook` owns the rows; the caller that starts the deliveries passes the function
//! that writes an event as JSON.
//!
//! Each webhook has a task that delivers one event at a time, in order, and retries with growing pauses until the receiver
//! accepts it. If a receiver accepts nothing for [`RETRY_FOR`], the task stores the event as a dead letter and goes on with
//! the next one. A receiver may get an event twice, if the daemon dies before it has stored that the event was delivered.

mod deliver;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use engine::webhook::{DeadLetter, Webhook};
use engine::{Engine, Event, EventId, Told};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;
use tracing::{info, warn};
use wire::WebhookId;

pub use deliver::{BadUrl, Delivery, Target, deliver};

/// How long a webhook may fail before its events are given up. A receiver that is down for an hour misses nothing.
const RETRY_FOR: Duration = Duration::from_secs(6 * 3600);
/// The pause after the first failure. It doubles with each failure in a row.
const PAUSE_MIN: Duration = Duration::from_secs(1);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(300);
/// How many deliveries may be under way at once.
const DELIVERIES_MAX: usize = 32;

/// How an event is written, and of which type it is.
pub type Write = fn(EventId, Option<&Event>) -> (&'static str, String);

/// Delivers events until the daemon ends.
pub async fn tend(engine: Engine, write: Write) {
    let places = Arc::new(Semaphore::new(DELIVERIES_MAX));
    let mut changed = engine.webhooks_changed();
    let mut tasks: HashMap<WebhookId, AbortHandle> = HashMap::new();
    let mut running = Running(Vec::new());
    loop {
        changed.borrow_and_update();
        let all = engine.all_webhooks();
        tasks.retain(|id, task| {
            let stays = all.iter().any(|webhook| webhook.id == *id);
            if !stays {
                task.abort();
            }
            stays
        });
        for webhook in all {
            tasks.entry(webhook.id).or_insert_with(|| {
                let follower =
                    Follower { engine: engine.clone(), write, places: Arc::clone(&places), webhook };
                tokio::spawn(follower.run()).abort_handle()
            });
        }
        running.0 = tasks.values().cloned().collect();
        if changed.changed().await.is_err() {
            return;
        }
    }
}

/// Ends the tasks when it is dropped.
struct Running(Vec<AbortHandle>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}

/// What to do after a failed attempt.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Try the same event again after this pause.
    Again(Duration),
    /// Give the event up, and go on with the next one after this pause.
    GiveUp(Duration),
}

/// Decides what follows the latest of `attempts` failures in a row, the first of which was `failing` ago.
fn after_failure(attempts: u32, failing: Duration) -> Next {
    let pause = PAUSE_MIN.saturating_mul(1 << attempts.saturating_sub(1).min(16)).min(PAUSE_MAX);
    if failing >= RETRY_FOR { Next::GiveUp(pause) } else { Next::Again(pause) }
}

/// Delivers the events of one webhook.
struct Follower {
    engine: Engine,
    write: Write,
    places: Arc<Semaphore>,
    webhook: Webhook,
}

impl Follower {
    async fn run(mut self) {
        let target = match Target::parse(&self.webhook.url, self.webhook.anywhere) {
            Ok(target) => target,
            Err(error) => return warn!(webhook = %self.webhook.id, %error, "a webhook has no usable address"),
        };
        let mut watcher = match self.engine.watch(&self.webhook.owner, None, Some(self.webhook.position)) {
            Ok(watcher) => watcher,
            Err(error) => {
                return warn!(webhook = %self.webhook.id, %error, "cannot watch events for a webhook");
            }
        };
        loop {
            let (id, (kind, body)) = match watcher.next().await {
                Told::Event(event) => (event.id, (self.write)(event.id, Some(&event))),
                Told::Missed(id) => (id, (self.write)(id, None)),
            };
            if self.webhook.kinds.is_empty() || self.webhook.kinds.iter().any(|wanted| wanted == kind) {
                self.deliver(&target, id, body).await;
            } else {
                // Written with the next delivery: who starts from before looks at it once more.
                self.webhook.position = id;
            }
        }
    }

    /// Delivers an event, or gives it up.
    async fn deliver(&mut self, target: &Target, id: EventId, body: String) {
        loop {
            let delivered = {
                let _place = self.places.acquire().await;
                deliver(target, &self.webhook, &id.to_string(), body.clone()).await
            };
            let now = SystemTime::now();
            let Err(reason) = delivered else {
                self.webhook.position = id;
                (self.webhook.attempts, self.webhook.failing_since) = (0, None);
                (self.webhook.last_error, self.webhook.delivered_at) = (None, Some(now));
                return self.note(None).await;
            };
            let since = *self.webhook.failing_since.get_or_insert(now);
            self.webhook.attempts = self.webhook.attempts.saturating_add(1);
            self.webhook.last_error = Some(reason.clone());
            let failing = now.duration_since(since).unwrap_or_default();
            match after_failure(self.webhook.attempts, failing) {
                Next::Again(pause) => {
                    info!(webhook = %self.webhook.id, reason, ?pause, "cannot deliver an event; trying again");
                    self.note(None).await;
                    tokio::time::sleep(pause).await;
                }
                Next::GiveUp(pause) => {
                    warn!(webhook = %self.webhook.id, reason, event = %id, "giving up an event");
                    self.webhook.position = id;
                    let attempts = self.webhook.attempts;
                    let (event, serial) = (id.to_string(), id.serial());
                    self.note(Some(DeadLetter { event, serial, given_up_at: now, attempts, reason, body }))
                        .await;
                    return tokio::time::sleep(pause).await;
                }
            }
        }
    }

    async fn note(&self, dead: Option<DeadLetter>) {
        if let Err(error) = self.engine.note_webhook(&self.webhook, dead).await {
            warn!(webhook = %self.webhook.id, %error, "cannot write how far a webhook has come; events may come twice");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_an_event_is_given_up_only_after_hours() {
        assert_eq!(after_failure(1, Duration::ZERO), Next::Again(PAUSE_MIN));
        assert_eq!(after_failure(2, Duration::from_secs(1)), Next::Again(PAUSE_MIN * 2));
        assert_eq!(after_failure(100, Duration::from_secs(3600)), Next::Again(PAUSE_MAX));
        assert_eq!(after_failure(100, RETRY_FOR), Next::GiveUp(PAUSE_MAX));
    }

    #[test]
    fn a_receiver_that_is_down_for_an_hour_is_tried_until_it_is_back() {
        let (mut failing, mut attempts) = (Duration::ZERO, 0);
        while failing < Duration::from_secs(3600) {
            attempts += 1;
            match after_failure(attempts, failing) {
                Next::Again(pause) => failing += pause,
                Next::GiveUp(_) => panic!("given up after {failing:?}"),
            }
        }
        assert!(attempts < 30, "{attempts} attempts in an hour");
    }
}
