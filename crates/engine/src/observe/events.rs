//! Events of sandboxes, their commands and templates, for watchers.
//!
//! The last events of each owner are kept in memory, apart from those of others, so that a disconnected watcher can continue where it was; a watcher that comes
//! too late, or after a restart of the daemon, is notified that it missed events, and reads the state itself. Nothing
//! waits for a watcher, and events are not a record: what must not be lost is in rows.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::Notify;
use wire::{CommandId, SandboxId};

use crate::model::names::TemplateName;
use crate::model::random::random_u64;
use crate::model::state::State;
use crate::model::template::Preparation;
use crate::model::{Outcome, Owner, SandboxName};

/// Events to keep of each owner. Each has a few hundred bytes, so all of them take a few MiB at most.
pub const EVENTS_KEPT_MAX: usize = 8192;
/// Owners whose events are kept. Beyond that, those of the owner to whom nothing has happened for longest are dropped.
const OWNERS_KEPT_MAX: usize = 64;
/// How much of the reason of a failure is kept.
const REASON_MAX: usize = 1024;

/// An event's position: what it is counted from, which is another at each start of the daemon and for each owner, and
/// its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EventId {
    start: u64,
    serial: u64,
}

impl fmt::Display for EventId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}-{}", self.start, self.serial)
    }
}

/// The text is not an event's id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("it must be the id of an event")]
pub struct BadEventId;

impl FromStr for EventId {
    type Err = BadEventId;

    fn from_str(text: &str) -> Result<Self, BadEventId> {
        let (start, serial) = text.split_once('-').ok_or(BadEventId)?;
        let start = u64::from_str_radix(start, 16).map_err(|_| BadEventId)?;
        Ok(Self { start, serial: serial.parse().map_err(|_| BadEventId)? })
    }
}

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    /// Its position.
    pub id: EventId,
    /// When.
    pub at: SystemTime,
    /// Whose sandbox or template it is.
    pub owner: Owner,
    /// What happened, and to what.
    pub about: About,
}

/// What something happened to.
#[derive(Debug, Clone)]
pub enum About {
    /// A sandbox.
    Sandbox(SandboxId, Happened),
    /// A template.
    Template(TemplateHappened),
}

/// What happened to a template.
#[derive(Debug, Clone)]
pub struct TemplateHappened {
    /// Its name.
    pub name: TemplateName,
    /// Its newest version.
    pub version: u32,
    /// The state of that version; `None` if the template was deleted.
    pub preparation: Option<Preparation>,
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Happened {
    /// A sandbox has a new state or a new name.
    Sandbox {
        /// Its name.
        name: SandboxName,
        /// Its state.
        state: State,
        /// Why it failed, if it did.
        reason: Option<String>,
    },
    /// A sandbox was deleted completely.
    Deleted {
        /// Its last name.
        name: SandboxName,
    },
    /// A command started.
    CommandStarted {
        /// Which.
        command: CommandId,
        /// Its process id inside the sandbox.
        pid: u32,
    },
    /// A command ended.
    CommandEnded {
        /// Which.
        command: CommandId,
        /// How it ended.
        outcome: Outcome,
    },
}

/// What is remembered of a sandbox that was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deletion {
    /// Why, if no caller asked for it.
    pub reason: Option<String>,
}

/// What a watcher receives.
#[derive(Debug, Clone)]
pub enum Told {
    /// Something happened.
    Event(Arc<Event>),
    /// Events were dropped, or belong to another daemon. Later events come after this position.
    Missed(EventId),
}

/// All events of one engine.
pub(crate) struct Events {
    kept: Mutex<HashMap<Owner, Kept>>,
    /// Notified after each event.
    more: Notify,
}

/// The events of one owner.
struct Kept {
    start: u64,
    /// The serial before the first in `events`.
    before: u64,
    events: VecDeque<Arc<Event>>,
}

impl Kept {
    fn new() -> Self {
        Self { start: random_u64(), before: 0, events: VecDeque::new() }
    }

    /// When something last happened.
    fn newest(&self) -> Option<SystemTime> {
        self.events.back().map(|event| event.at)
    }

    fn last(&self) -> u64 {
        self.before + self.events.len() as u64
    }
}

impl Events {
    pub fn new() -> Self {
        Self { kept: Mutex::default(), more: Notify::new() }
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<Owner, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event of a sandbox.
    pub fn publish(&self, owner: &Owner, sandbox: SandboxId, mut what: Happened) {
        if let Happened::Sandbox { reason: Some(reason), .. } = &mut what {
            cut(reason);
        }
        self.keep(owner, About::Sandbox(sandbox, what));
    }

    /// How a sandbox was deleted, as far back as events are kept.
    pub fn deletion(&self, owner: &Owner, sandbox: SandboxId) -> Option<Deletion> {
        let all = self.kept();
        let mut newest = all.get(owner)?.events.iter().rev().filter_map(|event| match &event.about {
            About::Sandbox(id, what) if *id == sandbox => Some(what),
            About::Sandbox(..) | About::Template(_) => None,
        });
        newest.find(|what| matches!(what, Happened::Deleted { .. }))?;
        let deleting = newest.find_map(|what| match what {
            Happened::Sandbox { state: State::Deleting, reason, .. } => Some(reason.clone()),
            _ => None,
        });
        Some(Deletion { reason: deleting.flatten() })
    }

    /// Records an event of a template.
    pub fn publish_template(&self, owner: &Owner, mut what: TemplateHappened) {
        if let Some(Preparation::Failed { reason }) = &mut what.preparation {
            cut(reason);
        }
        self.keep(owner, About::Template(what));
    }

    fn keep(&self, owner: &Owner, about: About) {
        let (at, owner) = (crate::observe::clock::now(), owner.clone());
        let mut all = self.kept();
        let kept = of_owner(&mut all, &owner);
        let id = EventId { start: kept.start, serial: kept.last() + 1 };
        kept.events.push_back(Arc::new(Event { id, at, owner, about }));
        if kept.events.len() > EVENTS_KEPT_MAX {
            kept.events.pop_front();
            kept.before += 1;
        }
        drop(all);
        self.more.notify_waiters();
    }
}

/// The events of an owner. Makes room for them if there are none.
fn of_owner<'a>(all: &'a mut HashMap<Owner, Kept>, owner: &Owner) -> &'a mut Kept {
    if !all.contains_key(owner) && all.len() >= OWNERS_KEPT_MAX {
        let quietest = all.iter().min_by_key(|(_, kept)| kept.newest()).map(|(owner, _)| owner.clone());
        if let Some(quietest) = quietest {
            all.remove(&quietest);
        }
    }
    all.entry(owner.clone()).or_insert_with(Kept::new)
}

fn cut(reason: &mut String) {
    let end = (0..=reason.len().min(REASON_MAX)).rev().find(|at| reason.is_char_boundary(*at));
    reason.truncate(end.unwrap_or(0));
}

/// A watcher.
pub struct Watcher {
    events: Arc<Events>,
    owner: Owner,
    only: Option<SandboxId>,
    /// What the positions are counted from.
    start: u64,
    /// The last event that was examined.
    at: u64,
    /// Something before `at` was missed, and that was not reported yet.
    missed: bool,
}

impl Watcher {
    pub(crate) fn new(
        events: Arc<Events>,
        owner: Owner,
        only: Option<SandboxId>,
        after: Option<EventId>,
    ) -> Self {
        let (start, last) = {
            let mut all = events.kept();
            let kept = of_owner(&mut all, &owner);
            (kept.start, kept.last())
        };
        let (at, missed) = match after {
            None => (last, false),
            Some(id) if id.start == start && id.serial <= last => (id.serial, false),
            Some(_) => (last, true),
        };
        Self { events, owner, only, start, at, missed }
    }

    /// The watcher's position: the next event comes after it.
    pub fn place(&self) -> EventId {
        EventId { start: self.start, serial: self.at }
    }

    /// The next event. Cancel-safe.
    pub async fn next(&mut self) -> Told {
        loop {
            let events = Arc::clone(&self.events);
            let mut more = std::pin::pin!(events.more.notified());
            // From here on no event is missed; an earlier one is found by the search below.
            more.as_mut().enable();
            if let Some(told) = self.look() {
                return told;
            }
            more.await;
        }
    }

    fn look(&mut self) -> Option<Told> {
        let events = Arc::clone(&self.events);
        let mut all = events.kept();
        let kept = of_owner(&mut all, &self.owner);
        if self.start != kept.start {
            // The events were dropped, because too many owners had some.
            (self.start, self.at, self.missed) = (kept.start, kept.last(), true);
        }
        if self.at < kept.before {
            (self.at, self.missed) = (kept.before, true);
        }
        if std::mem::take(&mut self.missed) {
            return Some(Told::Missed(self.place()));
        }
        while self.at < kept.last() {
            let event = &kept.events[(self.at - kept.before) as usize];
            self.at += 1;
            let meant = |only| matches!(event.about, About::Sandbox(sandbox, _) if sandbox == only);
            if self.only.is_none_or(meant) {
                return Some(Told::Event(Arc::clone(event)));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn owner(name: &str) -> Owner {
        Owner::parse(name).expect("it is valid")
    }

    fn started(number: u32) -> Happened {
        let command = format!("c{number}").parse().expect("an id");
        Happened::CommandStarted { command, pid: number }
    }

    async fn pid(watcher: &mut Watcher) -> Option<u32> {
        match tokio::time::timeout(Duration::from_secs(1), watcher.next()).await {
            Ok(Told::Event(event)) => match &event.about {
                About::Sandbox(_, Happened::CommandStarted { pid, .. }) => Some(*pid),
                other => panic!("{other:?}"),
            },
            Ok(Told::Missed(_)) => panic!("nothing was missed"),
            Err(_) => None,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn no_owner_pushes_out_the_events_of_another() {
        let events = Arc::new(Events::new());
        let mut watcher = Watcher::new(Arc::clone(&events), owner("me"), None, None);
        let began = watcher.place();
        events.publish(&owner("me"), SandboxId::from_random(1), started(1));
        for number in 0..EVENTS_KEPT_MAX as u32 + 10 {
            events.publish(&owner("you"), SandboxId::from_random(2), started(number));
        }
        assert_eq!(pid(&mut watcher).await, Some(1));
        assert_eq!(watcher.place().serial, began.serial + 1, "the numbers tell nothing of others");
        let mut again = Watcher::new(Arc::clone(&events), owner("me"), None, Some(began));
        assert_eq!(pid(&mut again).await, Some(1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_watcher_sees_its_own_and_goes_on_where_it_was() {
        let events = Arc::new(Events::new());
        let (mine, other) = (SandboxId::from_random(1), SandboxId::from_random(2));
        let watch = |after| Watcher::new(Arc::clone(&events), owner("me"), None, after);
        let mut watcher = watch(None);
        let began = watcher.place();
        events.publish(&owner("me"), mine, started(1));
        events.publish(&owner("you"), other, started(2));
        events.publish(&owner("me"), other, started(3));
        assert_eq!((pid(&mut watcher).await, pid(&mut watcher).await), (Some(1), Some(3)));
        assert_eq!(pid(&mut watcher).await, None);
        let mut again = watch(Some(began.to_string().parse().expect("it came from here")));
        assert_eq!(pid(&mut again).await, Some(1));
        let mut one = Watcher::new(Arc::clone(&events), owner("me"), Some(other), Some(began));
        assert_eq!((pid(&mut one).await, pid(&mut one).await), (Some(3), None));
    }

    #[tokio::test(start_paused = true)]
    async fn what_was_missed_is_told() {
        let events = Arc::new(Events::new());
        let sandbox = SandboxId::from_random(1);
        let mut slow = Watcher::new(Arc::clone(&events), owner("me"), None, None);
        for number in 0..EVENTS_KEPT_MAX as u32 + 10 {
            events.publish(&owner("me"), sandbox, started(number));
        }
        assert!(matches!(slow.next().await, Told::Missed(_)));
        assert_eq!(pid(&mut slow).await, Some(10), "then it continues with the oldest event that is kept");
        let foreign = EventId { start: slow.place().start ^ 1, serial: 3 };
        let mut late = Watcher::new(Arc::clone(&events), owner("me"), None, Some(foreign));
        assert!(matches!(late.next().await, Told::Missed(_)));
        assert_eq!(pid(&mut late).await, None);
        let future = EventId { start: slow.place().start, serial: u64::MAX };
        let mut odd = Watcher::new(Arc::clone(&events), owner("me"), None, Some(future));
        assert!(matches!(odd.next().await, Told::Missed(_)));
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        let id = EventId { start: 0xab, serial: 7 };
        assert_eq!(id.to_string(), "00000000000000ab-7");
        assert_eq!(id.to_string().parse(), Ok(id));
        for wrong in ["", "7", "-", "x-1", "1-", "1-x", "11111111111111111-1", "1--1"] {
            assert_eq!(wrong.parse::<EventId>(), Err(BadEventId), "{wrong}");
        }
    }
}
