//! Records that the daemon must store: names, events, totals. They are kept until the daemon has acknowledged them;
//! while no daemon is connected, on disk, within a limit.
//!
//! A name counts as stored when the daemon has acknowledged it or when it is synced to the spool, whichever is possible
//! first. When the spool is full, new names fail temporarily, and events are counted instead of kept.

mod spool;

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::timeout;
use wire::SandboxId;

use crate::control::{Event, Record, Totals, Used, to_bytes};
use crate::policy::Name;

use spool::Spool;

/// The most bytes of events in memory or on disk. Beyond this, events are counted and dropped.
pub const EVENT_BYTES_MAX: u64 = 8 << 20;
/// The most bytes of all records. The part above [`EVENT_BYTES_MAX`] is reserved for names.
pub const SPOOL_BYTES_MAX: u64 = 12 << 20;
/// How long the daemon may take to store a name before the lookup fails temporarily.
const NAME_DEADLINE: Duration = Duration::from_secs(3);

/// Whether bytes must be on the disk before continuing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    /// For names: their addresses are returned next.
    Now,
    /// For events: with the next name, or when the kernel writes them back.
    Later,
}

/// Why a name was not stored.
#[derive(Debug, thiserror::Error)]
pub enum NotStored {
    /// The spool is full.
    #[error("the spool is full")]
    Full,
    /// A disk error.
    #[error("cannot write the spool: {0}")]
    Disk(#[from] io::Error),
    /// The daemon is connected but slow.
    #[error("the daemon did not store the name in time")]
    Late,
}

/// All records that wait for the daemon.
#[derive(Debug)]
pub struct Outbox {
    inner: Mutex<Inner>,
    /// Increases with every change of the queue, the acknowledgements or the connection.
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    queue: VecDeque<(u64, Arc<Record>)>,
    next: u64,
    bytes: u64,
    acknowledged: u64,
    /// Everything up to this sequence number is on disk.
    spooled: u64,
    online: bool,
    spool: Spool,
    lost: u64,
    lost_ever: u64,
    bounds: Bounds,
}

/// See [`EVENT_BYTES_MAX`] and [`SPOOL_BYTES_MAX`].
#[derive(Debug, Clone, Copy)]
struct Bounds {
    events: u64,
    all: u64,
}

impl Outbox {
    /// Opens the outbox whose spool is in `directory`, with the records that an earlier process left there.
    pub fn open(directory: &Path) -> io::Result<Self> {
        Self::open_with(directory, Bounds { events: EVENT_BYTES_MAX, all: SPOOL_BYTES_MAX })
    }

    fn open_with(directory: &Path, bounds: Bounds) -> io::Result<Self> {
        let (spool, records) = Spool::open(directory)?;
        let mut inner = Inner {
            queue: VecDeque::new(),
            next: 1,
            bytes: 0,
            acknowledged: 0,
            spooled: 0,
            online: false,
            spool,
            lost: 0,
            lost_ever: 0,
            bounds,
        };
        for record in records {
            inner.push(record);
        }
        inner.spooled = inner.next - 1;
        Ok(Self { inner: Mutex::new(inner), changed: watch::Sender::new(0) })
    }

    fn change<T>(&self, with: impl FnOnce(&mut Inner) -> T) -> T {
        let result = with(&mut self.inner.lock().expect("nobody panics while holding it"));
        self.changed.send_modify(|count| *count += 1);
        result
    }

    /// Stores the place of a name; returns when it is safe to return its address.
    pub async fn store_name(&self, sandbox: SandboxId, place: u32, name: Name) -> Result<(), NotStored> {
        let mut changed = self.changed.subscribe();
        let sequence = self.change(|inner| {
            if inner.bytes >= inner.bounds.all {
                return Err(NotStored::Full);
            }
            let sequence = inner.push(Record::Name { sandbox, place, name });
            if !inner.online
                && let Err(e) = inner.spool_all(inner.bounds.all, Sync::Now)
            {
                inner.take_back(sequence);
                return Err(e);
            }
            Ok(sequence)
        });
        let sequence = sequence?;
        let stored = async {
            loop {
                changed.borrow_and_update();
                {
                    let inner = self.inner.lock().expect("nobody panics while holding it");
                    if inner.acknowledged >= sequence || inner.spooled >= sequence {
                        return;
                    }
                }
                if changed.changed().await.is_err() {
                    return;
                }
            }
        };
        timeout(NAME_DEADLINE, stored).await.map_err(|_| NotStored::Late)
    }

    /// Keeps an event if there is room, and counts it otherwise.
    pub fn event(&self, event: Event) {
        self.change(|inner| {
            if inner.bytes >= inner.bounds.events {
                inner.lost += 1;
                inner.lost_ever += 1;
                return;
            }
            if inner.lost > 0 {
                let events = std::mem::take(&mut inner.lost);
                inner.push(Record::Lost { events });
            }
            inner.push(Record::Event(event));
            inner.spool_quietly();
        });
    }

    /// Whether the use of a credential can be recorded. If not, no request may carry one.
    pub fn has_room_for_use(&self) -> bool {
        let inner = self.inner.lock().expect("nobody panics while holding it");
        inner.bytes < inner.bounds.events
    }

    /// Keeps the record of a request that carried a credential. Requests that began while there was room are kept even
    /// if there is none left, up to the limit of all records. Without a daemon, the record is synced to disk.
    pub fn used(&self, used: Used) {
        self.change(|inner| {
            inner.push(Record::Used(Box::new(used)));
            if !inner.online
                && let Err(error) = inner.spool_all(inner.bounds.all, Sync::Now)
            {
                tracing::error!(%error, "cannot spool the use of a credential");
            }
        });
    }

    /// Keeps totals if there is room. They are absolute, so the next ones make up for those that are dropped.
    pub fn totals(&self, totals: Totals) {
        self.change(|inner| {
            if inner.bytes < inner.bounds.events {
                inner.push(Record::Totals(totals));
                inner.spool_quietly();
            }
        });
    }

    /// A daemon is connected.
    pub fn online(&self) {
        self.change(|inner| inner.online = true);
    }

    /// The daemon is gone: unacknowledged records go to disk.
    pub fn offline(&self) {
        let spooled = self.change(|inner| {
            inner.online = false;
            inner.spool_all(inner.bounds.all, Sync::Now)
        });
        if let Err(error) = spooled {
            tracing::error!(%error, "cannot spool what the daemon has not stored");
        }
    }

    /// The daemon has stored everything up to `through`.
    pub fn acknowledge(&self, through: u64) {
        self.change(|inner| {
            let through = through.min(inner.next - 1);
            while let Some((sequence, record)) = inner.queue.front()
                && *sequence <= through
            {
                inner.bytes = inner.bytes.saturating_sub(size(record));
                inner.queue.pop_front();
            }
            inner.acknowledged = inner.acknowledged.max(through);
            if inner.queue.is_empty()
                && let Err(error) = inner.spool.clear()
            {
                tracing::error!(%error, "cannot clear the spool");
            }
        });
    }

    /// Waits for the record after `after`.
    pub async fn next(&self, after: u64) -> (u64, Arc<Record>) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            {
                let inner = self.inner.lock().expect("nobody panics while holding it");
                // The queue is ordered without gaps.
                if let Some((first, _)) = inner.queue.front() {
                    let place = (after + 1).saturating_sub(*first) as usize;
                    if let Some((sequence, record)) = inner.queue.get(place) {
                        return (*sequence, record.clone());
                    }
                }
            }
            if changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until the daemon has acknowledged everything.
    pub async fn empty(&self) {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if self.inner.lock().expect("nobody panics while holding it").queue.is_empty() {
                return;
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// The number of waiting records, bytes on disk, and events lost since the start.
    pub fn counts(&self) -> (u64, u64, u64) {
        let inner = self.inner.lock().expect("nobody panics while holding it");
        (inner.queue.len() as u64, inner.spool.bytes(), inner.lost_ever)
    }
}

impl Inner {
    fn push(&mut self, record: Record) -> u64 {
        let sequence = self.next;
        self.next += 1;
        self.bytes += size(&record);
        self.queue.push_back((sequence, Arc::new(record)));
        sequence
    }

    /// Removes the record that was pushed last, unless it is on disk.
    fn take_back(&mut self, sequence: u64) {
        if self.spooled < sequence
            && self.queue.back().is_some_and(|(last, _)| *last == sequence)
            && let Some((_, record)) = self.queue.pop_back()
        {
            self.bytes = self.bytes.saturating_sub(size(&record));
            self.next = sequence;
        }
    }

    /// Writes records to disk that are not there yet. Records that do not fit stay in memory.
    fn spool_all(&mut self, room: u64, sync: Sync) -> Result<(), NotStored> {
        let before = self.spooled;
        for (sequence, record) in &self.queue {
            if *sequence <= self.spooled {
                continue;
            }
            if self.spool.bytes() >= room {
                self.sync(before, sync)?;
                return Err(NotStored::Full);
            }
            self.spool.append(&to_bytes(record.as_ref()))?;
            self.spooled = *sequence;
        }
        self.sync(before, sync)
    }

    fn sync(&mut self, before: u64, sync: Sync) -> Result<(), NotStored> {
        if self.spooled > before
            && sync == Sync::Now
            && let Err(e) = self.spool.sync()
        {
            // These must not count as stored.
            self.spooled = before;
            return Err(e.into());
        }
        Ok(())
    }

    fn spool_quietly(&mut self) {
        if !self.online
            && let Err(error) = self.spool_all(self.bounds.events, Sync::Later)
        {
            tracing::debug!(%error, "an event stays in memory");
        }
    }
}

fn size(record: &Record) -> u64 {
    to_bytes(record).len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::What;

    fn name(at: usize) -> Name {
        Name::parse(&format!("n{at}.example")).expect("a name")
    }

    fn event(why: &str) -> Event {
        Event {
            sandbox: SandboxId::from_random(1),
            at_ms: 0,
            what: What::Refused,
            name: None,
            address: None,
            port: None,
            protocol: None,
            rule: String::new(),
            why: Some(why.to_owned()),
            opens: None,
            sent: 0,
            received: 0,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_name_waits_for_the_daemon_and_goes_to_disk_without_one() {
        let place = tempfile::tempdir().expect("a directory");
        let outbox = Arc::new(Outbox::open(place.path()).expect("an outbox"));
        let sandbox = SandboxId::from_random(1);
        outbox.online();
        assert!(matches!(outbox.store_name(sandbox, 0, name(0)).await, Err(NotStored::Late)));
        let storing = tokio::spawn({
            let outbox = outbox.clone();
            async move { outbox.store_name(sandbox, 1, name(1)).await }
        });
        let (sequence, record) = outbox.next(1).await;
        assert!(matches!(record.as_ref(), Record::Name { place: 1, .. }));
        outbox.acknowledge(sequence);
        storing.await.expect("no panic").expect("stored");
        let storing = tokio::spawn({
            let outbox = outbox.clone();
            async move { outbox.store_name(sandbox, 2, name(2)).await }
        });
        outbox.next(sequence).await;
        outbox.offline();
        storing.await.expect("no panic").expect("on disk");
        outbox.store_name(sandbox, 3, name(3)).await.expect("on disk at once");
        drop(outbox);
        let next = Outbox::open(place.path()).expect("an outbox");
        let (first, record) = next.next(0).await;
        assert!(matches!(record.as_ref(), Record::Name { place: 2, .. }), "{record:?}");
        next.acknowledge(first + 1);
        assert_eq!(next.counts(), (0, 0, 0));
    }

    #[tokio::test]
    async fn a_full_spool_refuses_names_and_counts_events() {
        let place = tempfile::tempdir().expect("a directory");
        let bounds = Bounds { events: 4000, all: 5000 };
        let outbox = Outbox::open_with(place.path(), bounds).expect("an outbox");
        let long = "x".repeat(500);
        for _ in 0..20 {
            outbox.event(event(&long));
        }
        let (waiting, on_disk, lost) = outbox.counts();
        assert!(lost > 10 && waiting < 10 && on_disk <= 5000, "{waiting} {on_disk} {lost}");
        let sandbox = SandboxId::from_random(1);
        outbox.store_name(sandbox, 0, name(0)).await.expect("names have room of their own");
        let mut refused = 0;
        for at in 1..100 {
            let result = outbox.store_name(sandbox, at, name(at as usize)).await;
            refused += usize::from(matches!(result, Err(NotStored::Full)));
        }
        let (_, on_disk, _) = outbox.counts();
        assert!(refused > 50 && on_disk < 6000, "{refused} {on_disk}");
        // Once the daemon is back, everything drains and the loss is reported.
        outbox.online();
        outbox.acknowledge(u64::MAX);
        outbox.event(event("after"));
        let (_, record) = outbox.next(0).await;
        assert!(matches!(record.as_ref(), Record::Lost { events } if *events == lost), "{record:?}");
    }
}
