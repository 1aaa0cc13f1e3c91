//! Events of sandboxes, their commands, snapshots, templates, volumes and pools, for watchers.
//!
//! The last events of each owner are kept in memory and in rows, apart from those of others, so that a disconnected watcher
//! can continue where it was, also after a restart of the daemon. A watcher that comes too late is notified that it missed
//! events, and reads the state itself. Nothing waits for a watcher, nor for the row of an event: a daemon that is killed may
//! not have written the last ones, and the next one tells again what became of sandboxes ([`Events::last_told`]). If a row
//! cannot be written, positions start again from the beginning, so that every watcher learns that something may be missing.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tokio::sync::Notify;
use wire::{CommandId, SandboxId};

use crate::error::DbError;
pub use crate::model::event::{BadEventId, EventId};
use crate::model::hook::HookPoint;
use crate::model::names::TemplateName;
use crate::model::progress::SnapshotState;
use crate::model::random::random_u64;
use crate::model::state::State;
use crate::model::template::Preparation;
use crate::model::{Outcome, Owner, SandboxName};

/// Events to keep of each owner, in memory and in rows. Each has a few hundred bytes, so all of them take a few MiB at most.
pub const EVENTS_KEPT_MAX: usize = 8192;
/// Owners whose events are kept. Beyond that, those of the owner to whom nothing has happened for longest are dropped.
const OWNERS_KEPT_MAX: usize = 64;
/// How much of the reason of a failure is kept.
const REASON_MAX: usize = 1024;
/// Numbers that a starting daemon leaves out: more than its predecessor can have given to events whose rows it did not
/// write before it died. So no number ever stands for two events.
const SERIALS_SKIPPED: u64 = 1 << 20;

/// Something that happened.
#[derive(Debug, Clone)]
pub struct Event {
    /// Its position.
    pub id: EventId,
    /// When.
    pub at: SystemTime,
    /// Whose it is.
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
    /// A snapshot.
    Snapshot(SnapshotHappened),
    /// A volume.
    Volume(VolumeHappened),
    /// A pool.
    Pool(PoolHappened),
}

/// What happened to a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotHappened {
    /// Its id.
    pub id: String,
    /// Its name.
    pub name: String,
    /// The sandbox that it was taken of.
    pub sandbox: Option<SandboxId>,
    /// Its state; `None` if it was deleted.
    pub state: Option<SnapshotState>,
}

/// What happened to a volume.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeHappened {
    /// Its name.
    pub name: String,
    /// Its size; `None` if it was deleted.
    pub size_bytes: Option<u64>,
}

/// What happened to a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolHappened {
    /// Its name.
    pub name: String,
    /// How many sandboxes it keeps ready; `None` if it was deleted.
    pub replicas: Option<u32>,
    /// Why it cannot be filled, if it cannot.
    pub trouble: Option<String>,
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
    /// A hook failed.
    HookFailed {
        /// Which.
        hook: HookPoint,
        /// How.
        reason: String,
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

/// Writes events to rows. Calls return at once.
pub(crate) trait Keeper: Send + Sync {
    /// Writes an event, after which an owner keeps [`EVENTS_KEPT_MAX`]. `counted_anew`: earlier rows have another start.
    fn keep(&self, event: Arc<Event>, counted_anew: bool, done: Box<dyn FnOnce(Result<(), DbError>) + Send>);

    /// Deletes the rows of an owner's events.
    fn forget(&self, owner: &Owner);
}

/// The events of one owner that a daemon finds in rows.
#[derive(Debug)]
pub(crate) struct KeptEvents {
    pub owner: Owner,
    pub start: u64,
    /// Oldest first.
    pub events: Vec<Event>,
}

/// All events of one engine.
pub(crate) struct Events {
    kept: Mutex<HashMap<Owner, Kept>>,
    /// Notified after each event.
    more: Notify,
    /// `None` in tests of this file alone.
    keeper: Option<Arc<dyn Keeper>>,
}

/// The events of one owner.
struct Kept {
    start: u64,
    /// Whether rows have the start.
    start_written: bool,
    /// No event up to this number is kept any more.
    before: u64,
    /// The number of the newest event, or one that no event has.
    last: u64,
    events: VecDeque<Arc<Event>>,
}

impl Kept {
    fn new() -> Self {
        Self { start: random_u64(), start_written: false, before: 0, last: 0, events: VecDeque::new() }
    }

    /// When something last happened.
    fn newest(&self) -> Option<SystemTime> {
        self.events.back().map(|event| event.at)
    }

    /// The first event after a number.
    fn after(&self, serial: u64) -> Option<&Arc<Event>> {
        self.events.get(self.events.partition_point(|event| event.id.serial <= serial))
    }
}

/// What events say of a sandbox that has another state by now, or is gone.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct LastTold {
    pub owner: Owner,
    pub name: SandboxName,
    pub state: State,
}

impl Events {
    pub fn new(found: Vec<KeptEvents>, keeper: Option<Arc<dyn Keeper>>) -> Arc<Self> {
        let kept = found.into_iter().map(|found| {
            let events: VecDeque<_> = found.events.into_iter().map(Arc::new).collect();
            let before = events.front().map_or(0, |event| event.id.serial - 1);
            let last = events.back().map_or(0, |event| event.id.serial) + SERIALS_SKIPPED;
            (found.owner, Kept { start: found.start, start_written: true, before, last, events })
        });
        Arc::new(Self { kept: Mutex::new(kept.collect()), more: Notify::new(), keeper })
    }

    fn kept(&self) -> MutexGuard<'_, HashMap<Owner, Kept>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records an event of a sandbox.
    pub fn publish(self: &Arc<Self>, owner: &Owner, sandbox: SandboxId, mut what: Happened) {
        match &mut what {
            Happened::Sandbox { reason: Some(reason), .. } | Happened::HookFailed { reason, .. } => {
                cut(reason)
            }
            _ => {}
        }
        self.keep(owner, About::Sandbox(sandbox, what));
    }

    /// How a sandbox was deleted, as far back as events are kept.
    pub fn deletion(&self, owner: &Owner, sandbox: SandboxId) -> Option<Deletion> {
        let all = self.kept();
        let mut newest = all.get(owner)?.events.iter().rev().filter_map(|event| match &event.about {
            About::Sandbox(id, what) if *id == sandbox => Some(what),
            _ => None,
        });
        newest.find(|what| matches!(what, Happened::Deleted { .. }))?;
        let deleting = newest.find_map(|what| match what {
            Happened::Sandbox { state: State::Deleting, reason, .. } => Some(reason.clone()),
            _ => None,
        });
        Some(Deletion { reason: deleting.flatten() })
    }

    /// The last that events say of each sandbox that they do not call deleted. A daemon that was killed may not have told
    /// what came after it.
    pub fn last_told(&self) -> BTreeMap<SandboxId, LastTold> {
        let mut last = BTreeMap::new();
        for (owner, kept) in self.kept().iter() {
            for event in &kept.events {
                match &event.about {
                    About::Sandbox(id, Happened::Sandbox { name, state, .. }) => {
                        let told = LastTold { owner: owner.clone(), name: name.clone(), state: *state };
                        last.insert(*id, told);
                    }
                    About::Sandbox(id, Happened::Deleted { .. }) => drop(last.remove(id)),
                    _ => {}
                }
            }
        }
        last
    }

    /// Records an event of a template.
    pub fn publish_template(self: &Arc<Self>, owner: &Owner, mut what: TemplateHappened) {
        if let Some(Preparation::Failed { reason }) = &mut what.preparation {
            cut(reason);
        }
        self.keep(owner, About::Template(what));
    }

    /// Records an event of a snapshot.
    pub fn publish_snapshot(self: &Arc<Self>, owner: &Owner, mut what: SnapshotHappened) {
        if let Some(SnapshotState::Failed { reason }) = &mut what.state {
            cut(reason);
        }
        self.keep(owner, About::Snapshot(what));
    }

    /// Records an event of a volume.
    pub fn publish_volume(self: &Arc<Self>, owner: &Owner, what: VolumeHappened) {
        self.keep(owner, About::Volume(what));
    }

    /// Records an event of a pool.
    pub fn publish_pool(self: &Arc<Self>, owner: &Owner, mut what: PoolHappened) {
        if let Some(trouble) = &mut what.trouble {
            cut(trouble);
        }
        self.keep(owner, About::Pool(what));
    }

    fn keep(self: &Arc<Self>, owner: &Owner, about: About) {
        let (at, owner) = (crate::observe::clock::now(), owner.clone());
        let mut all = self.kept();
        let kept = self.of_owner(&mut all, &owner);
        kept.last += 1;
        let id = EventId { start: kept.start, serial: kept.last };
        let event = Arc::new(Event { id, at, owner, about });
        kept.events.push_back(Arc::clone(&event));
        if kept.events.len() > EVENTS_KEPT_MAX
            && let Some(dropped) = kept.events.pop_front()
        {
            kept.before = dropped.id.serial;
        }
        if let Some(keeper) = &self.keeper {
            let counted_anew = !std::mem::replace(&mut kept.start_written, true);
            let (events, owner) = (Arc::downgrade(self), event.owner.clone());
            // Under the lock, so that rows are written in the order of their numbers.
            keeper.keep(
                event,
                counted_anew,
                Box::new(move |written| match (written, events.upgrade()) {
                    (Ok(()) | Err(DbError::Closed), _) | (_, None) => {}
                    (Err(error), Some(events)) => {
                        tracing::warn!(
                            error = crate::error::chain(&error),
                            "cannot write the row of an event"
                        );
                        events.count_anew(&owner);
                    }
                }),
            );
        }
        drop(all);
        self.more.notify_waiters();
    }

    /// The row of an event could not be written, so positions are counted from something else from now on.
    fn count_anew(&self, owner: &Owner) {
        if let Some(kept) = self.kept().get_mut(owner) {
            (kept.start, kept.start_written) = (random_u64(), false);
        }
        self.more.notify_waiters();
    }

    /// The events of an owner. Makes room for them if there are none.
    fn of_owner<'a>(&self, all: &'a mut HashMap<Owner, Kept>, owner: &Owner) -> &'a mut Kept {
        if !all.contains_key(owner) && all.len() >= OWNERS_KEPT_MAX {
            let quietest = all.iter().min_by_key(|(_, kept)| kept.newest()).map(|(owner, _)| owner.clone());
            if let Some(quietest) = quietest {
                all.remove(&quietest);
                if let Some(keeper) = &self.keeper {
                    keeper.forget(&quietest);
                }
            }
        }
        all.entry(owner.clone()).or_insert_with(Kept::new)
    }
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
        let (start, before, last) = {
            let mut all = events.kept();
            let kept = events.of_owner(&mut all, &owner);
            (kept.start, kept.before, kept.last)
        };
        let (at, missed) = match after {
            None => (last, false),
            Some(id) if id.start == start && id.serial <= last => (id.serial, false),
            Some(id) if id.start == start => (last, true),
            // The watcher may have seen nothing of what is kept, so it gets all of it.
            Some(_) => (before, true),
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
        let kept = events.of_owner(&mut all, &self.owner);
        if self.start != kept.start {
            // The events were dropped, because too many owners had some, or a row could not be written.
            (self.start, self.at, self.missed) = (kept.start, kept.last, true);
        }
        if self.at < kept.before {
            (self.at, self.missed) = (kept.before, true);
        }
        if std::mem::take(&mut self.missed) {
            return Some(Told::Missed(self.place()));
        }
        while let Some(event) = kept.after(self.at) {
            self.at = event.id.serial;
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
        let events = Events::new(Vec::new(), None);
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
        let events = Events::new(Vec::new(), None);
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
        let events = Events::new(Vec::new(), None);
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
        assert_eq!(pid(&mut late).await, Some(10), "all that is kept, since it may have seen none of it");
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
