//! All sandboxes in memory: found by id, name and idempotency key, listed, and admitted within limits.
//!
//! One lock, held only briefly. A create checks for room and reserves it in one step under this lock, so that
//! concurrent creates never exceed a limit. The reservation is released when the sandbox's row is gone.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::Bound;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use wire::SandboxId;
use wire::launch::Limits;

use crate::error::{EngineError, Field, Resource};
use crate::model::check::bad_cursor;
use crate::model::labels::{Labels, Selector};
use crate::model::{Capacity, KeyLimits, Owner, OwnerUse, SandboxName};
use crate::sandbox::claim::Claiming;
use crate::sandbox::lifecycle::{Kept, State};
use crate::sandbox::live::LiveSandbox;
use crate::volume::Holder;
use wire::VolumeId;

/// All sandboxes of this daemon, with indexes and usage per owner.
#[derive(Default)]
pub(crate) struct Registry {
    by_id: HashMap<SandboxId, Arc<LiveSandbox>>,
    owners: HashMap<Owner, Owned>,
    used: Usage,
    /// Sandboxes whose processor and memory limits do not count, because they are paused without processes.
    dormant: HashSet<SandboxId>,
    closed: bool,
}

/// What one owner has.
#[derive(Default)]
struct Owned {
    /// In the order of their requests.
    by_time: BTreeMap<Place, Arc<LiveSandbox>>,
    names: HashMap<SandboxName, Named>,
    idempotency_keys: HashMap<String, SandboxId>,
    labels: LabelIndex,
    /// Claims that are not in the rows yet.
    claims: HashMap<SandboxId, Arc<Claiming>>,
    used: Usage,
}

/// The sandbox that holds a name.
struct Named {
    id: SandboxId,
    /// How often the sandbox holds the name: once for its current name, and once for each rename to it that is under
    /// way.
    holds: u32,
}

/// Which sandboxes have which labels. All rows are in memory, and so is this index.
#[derive(Default)]
struct LabelIndex(HashMap<String, HashMap<String, BTreeSet<Place>>>);

impl LabelIndex {
    fn insert(&mut self, labels: &Labels, place: Place) {
        for (key, value) in labels.pairs() {
            self.0.entry(key.clone()).or_default().entry(value.clone()).or_default().insert(place);
        }
    }

    fn remove(&mut self, labels: &Labels, place: Place) {
        for (key, value) in labels.pairs() {
            let Some(values) = self.0.get_mut(key) else { continue };
            if let Some(places) = values.get_mut(value) {
                places.remove(&place);
                if places.is_empty() {
                    values.remove(value);
                }
            }
            if values.is_empty() {
                self.0.remove(key);
            }
        }
    }

    /// The sandboxes with this label.
    fn get(&self, key: &str, value: &str) -> &BTreeSet<Place> {
        static NOBODY: BTreeSet<Place> = BTreeSet::new();
        self.0.get(key).and_then(|values| values.get(value)).unwrap_or(&NOBODY)
    }
}

/// The position of a sandbox in a list: by time, then by id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place {
    micros: u64,
    id: SandboxId,
}

impl Place {
    fn of(created_at: SystemTime, id: SandboxId) -> Self {
        let micros = created_at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        Self { micros, id }
    }

    pub fn of_home(live: &LiveSandbox) -> Self {
        Self::of(live.identity().created_at, live.id)
    }

    /// As a cursor.
    pub fn to_cursor(self) -> String {
        format!("{:x}.{}", self.micros, self.id)
    }

    pub fn from_cursor(cursor: &str) -> Result<Self, EngineError> {
        let (micros, id) = cursor.split_once('.').ok_or_else(bad_cursor)?;
        let micros = u64::from_str_radix(micros, 16).map_err(|_| bad_cursor())?;
        Ok(Self { micros, id: id.parse().map_err(|_| bad_cursor())? })
    }
}

/// The totals of a set of sandboxes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Usage {
    sandboxes: u64,
    cpu_millis: u64,
    memory_bytes: u64,
    disk_bytes: u64,
}

impl Usage {
    /// Without the processor and memory limits of one of its sandboxes, which has no processes.
    fn with_dormant(self, limits: &Limits) -> Self {
        Self {
            cpu_millis: self.cpu_millis.saturating_sub(u64::from(limits.cpu_millis)),
            memory_bytes: self.memory_bytes.saturating_sub(limits.memory_bytes),
            ..self
        }
    }

    /// Undoes [`Self::with_dormant`].
    fn with_awake(self, limits: &Limits) -> Self {
        Self { sandboxes: self.sandboxes, ..self.with(limits) }
    }

    fn with(self, limits: &Limits) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_add(1),
            cpu_millis: self.cpu_millis.saturating_add(u64::from(limits.cpu_millis)),
            memory_bytes: self.memory_bytes.saturating_add(limits.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_add(limits.disk_bytes.unwrap_or(0)),
        }
    }

    fn without(self, limits: &Limits) -> Self {
        Self {
            sandboxes: self.sandboxes.saturating_sub(1),
            cpu_millis: self.cpu_millis.saturating_sub(u64::from(limits.cpu_millis)),
            memory_bytes: self.memory_bytes.saturating_sub(limits.memory_bytes),
            disk_bytes: self.disk_bytes.saturating_sub(limits.disk_bytes.unwrap_or(0)),
        }
    }

    fn check_quota(self, limits: &KeyLimits) -> Result<(), EngineError> {
        let over = |used: u64, limit: Option<u64>| limit.filter(|limit| used > *limit);
        if let Some(limit) = over(self.sandboxes, limits.sandboxes.map(u64::from)) {
            return Err(EngineError::Quota { resource: Resource::Sandboxes, limit });
        }
        self.check_compute_quota(limits)
    }

    /// Checks what a sandbox takes that runs again. It counts as a sandbox already.
    fn check_compute_quota(self, limits: &KeyLimits) -> Result<(), EngineError> {
        let over = |used: u64, limit: Option<u64>| limit.filter(|limit| used > *limit);
        if let Some(limit) = over(self.cpu_millis, limits.cpu_millis) {
            return Err(EngineError::Quota { resource: Resource::Cpu, limit });
        }
        if let Some(limit) = over(self.memory_bytes, limits.memory_bytes) {
            return Err(EngineError::Quota { resource: Resource::Memory, limit });
        }
        if let Some(limit) = over(self.disk_bytes, limits.disk_bytes) {
            return Err(EngineError::Quota { resource: Resource::Disk, limit });
        }
        Ok(())
    }

    fn check_capacity(self, capacity: &Capacity) -> Result<(), EngineError> {
        let what = if self.sandboxes > u64::from(capacity.sandboxes) {
            format!("it has {} sandboxes already", capacity.sandboxes)
        } else if self.cpu_millis > capacity.cpu_millis {
            format!("the limits of all sandboxes add up to at most {}", processors(capacity.cpu_millis))
        } else if self.memory_bytes > capacity.memory_bytes {
            format!(
                "the limits of all sandboxes add up to at most {} of memory",
                mebibytes(capacity.memory_bytes)
            )
        } else {
            return Ok(());
        };
        Err(EngineError::Full { what })
    }
}

/// Refuses limits that this machine could not promise even if it were empty: no delete and no wait would help.
fn check_possible(limits: &Limits, capacity: &Capacity) -> Result<(), EngineError> {
    let most = "be at most what all sandboxes of this machine may have together,";
    if u64::from(limits.cpu_millis) > capacity.cpu_millis {
        let (all, got) = (processors(capacity.cpu_millis), processors(limits.cpu_millis.into()));
        return Err(Field::Cpu.must(format!("{most} {all}, got {got}")));
    }
    if limits.memory_bytes > capacity.memory_bytes {
        let (all, got) = (mebibytes(capacity.memory_bytes), mebibytes(limits.memory_bytes));
        return Err(Field::Memory.must(format!("{most} {all}, got {got}")));
    }
    Ok(())
}

/// `2 processors`, for people.
fn processors(millis: u64) -> String {
    match (millis / 1000, millis % 1000) {
        (1, 0) => "1 processor".into(),
        (whole, 0) => format!("{whole} processors"),
        (whole, rest) => format!("{} processors", format!("{whole}.{rest:03}").trim_end_matches('0')),
    }
}

/// `1.5 GiB`, for people. Smaller units are not worth a word here.
fn mebibytes(bytes: u64) -> String {
    const UNITS: [(u64, &str); 2] = [(1 << 40, "TiB"), (1 << 30, "GiB")];
    match UNITS.iter().find(|(size, _)| bytes >= *size) {
        Some((size, unit)) => format!("{:.1} {unit}", bytes as f64 / *size as f64).replace(".0 ", " "),
        None => format!("{} MiB", bytes >> 20),
    }
}

impl Registry {
    /// A sandbox of `owner`. A sandbox of another owner, or a hidden one, is reported as not found.
    pub fn find(&self, owner: &Owner, id: SandboxId) -> Result<Arc<LiveSandbox>, EngineError> {
        match self.by_id.get(&id) {
            _ if self.closed => Err(EngineError::Stopping),
            Some(live) if live.owner == *owner && !live.is_hidden() => Ok(Arc::clone(live)),
            Some(_) | None => Err(EngineError::SandboxNotFound { id: id.to_string() }),
        }
    }

    pub fn get(&self, id: SandboxId) -> Option<Arc<LiveSandbox>> {
        self.by_id.get(&id).cloned()
    }

    /// Whether this daemon has no sandbox with this id. Once the registry is closed this cannot be known, so nothing
    /// counts as a stray.
    pub fn is_stray(&self, id: SandboxId) -> bool {
        !self.closed && !self.by_id.contains_key(&id)
    }

    /// The sum of the limits of all sandboxes.
    pub fn promised(&self) -> Capacity {
        Capacity {
            sandboxes: u32::try_from(self.used.sandboxes).unwrap_or(u32::MAX),
            cpu_millis: self.used.cpu_millis,
            memory_bytes: self.used.memory_bytes,
        }
    }

    /// What the sandboxes of an owner use of what keys limit.
    pub fn use_of(&self, owner: &Owner) -> OwnerUse {
        let used = self.owners.get(owner).map_or_else(Usage::default, |owned| owned.used);
        let Usage { sandboxes, cpu_millis, memory_bytes, disk_bytes } = used;
        OwnerUse { sandboxes, cpu_millis, memory_bytes, disk_bytes, ..OwnerUse::default() }
    }

    pub fn all(&self) -> Vec<Arc<LiveSandbox>> {
        self.by_id.values().cloned().collect()
    }

    /// The sandboxes that mount a volume, by name.
    pub fn holders(&self, volume: VolumeId) -> Vec<Holder> {
        let mut holders: Vec<Holder> = Vec::new();
        for live in self.by_id.values() {
            for mount in live.mounts.iter().filter(|mount| mount.volume.id == volume) {
                let (path, access) = (mount.path.clone(), mount.access);
                holders.push(Holder { sandbox: live.id, name: live.view().name.to_string(), path, access });
            }
        }
        holders.sort_by(|a, b| (&a.name, &a.path).cmp(&(&b.name, &b.path)));
        holders
    }

    /// The sandbox that was requested with this idempotency key.
    pub fn by_idempotency_key(&self, owner: &Owner, key: &str) -> Option<Arc<LiveSandbox>> {
        let id = self.owners.get(owner)?.idempotency_keys.get(key)?;
        self.get(*id)
    }

    pub fn name_is_free(&self, owner: &Owner, name: &SandboxName) -> bool {
        self.owners.get(owner).is_none_or(|owned| !owned.names.contains_key(name))
    }

    /// Checks that one more sandbox with these limits fits.
    pub fn check_room(
        &self,
        owner: &Owner,
        limits: &Limits,
        key: &KeyLimits,
        capacity: &Capacity,
    ) -> Result<(), EngineError> {
        if self.closed {
            return Err(EngineError::Stopping);
        }
        check_possible(limits, capacity)?;
        let owned = self.owners.get(owner).map_or_else(Usage::default, |owned| owned.used);
        owned.with(limits).check_quota(key)?;
        self.used.with(limits).check_capacity(capacity)
    }

    /// Checks that the owner of a sandbox that waits in a pool may claim it. The sandbox already counts against the
    /// quota.
    pub fn check_claim(&self, owner: &Owner, key: &KeyLimits) -> Result<(), EngineError> {
        if self.closed {
            return Err(EngineError::Stopping);
        }
        self.owners.get(owner).map_or_else(Usage::default, |owned| owned.used).check_quota(key)
    }

    /// Checks that the key's quota allows an owner this many more sandboxes with these limits.
    pub fn check_quota(
        &self,
        owner: &Owner,
        limits: &Limits,
        more: usize,
        key: &KeyLimits,
    ) -> Result<(), EngineError> {
        let owned = self.owners.get(owner).map_or_else(Usage::default, |owned| owned.used);
        (0..more).fold(owned, |used, _| used.with(limits)).check_quota(key)
    }

    /// Adds a sandbox, which counts from now on. Callers cannot find a hidden one.
    pub fn insert(&mut self, live: &Arc<LiveSandbox>) {
        self.used = self.used.with(&live.limits);
        self.by_id.insert(live.id, Arc::clone(live));
        let owned = self.owners.entry(live.owner.clone()).or_default();
        owned.used = owned.used.with(&live.limits);
        owned.names.insert(live.view().name.clone(), Named { id: live.id, holds: 1 });
        self.release_compute(live);
        if !live.is_hidden() {
            self.show(live);
        }
    }

    /// Gives back the processor and memory that a sandbox has reserved, if it is paused without processes.
    pub fn release_compute(&mut self, live: &LiveSandbox) {
        let rests = matches!(live.state(), State::Paused(Kept::Saved | Kept::Dropped));
        if !rests || !self.by_id.contains_key(&live.id) || !self.dormant.insert(live.id) {
            return;
        }
        self.used = self.used.with_dormant(&live.limits);
        if let Some(owned) = self.owners.get_mut(&live.owner) {
            owned.used = owned.used.with_dormant(&live.limits);
        }
    }

    /// Reserves processor and memory for a sandbox that is to run again. Has no effect if the sandbox has reserved them.
    pub fn take_compute(
        &mut self,
        live: &LiveSandbox,
        key: &KeyLimits,
        capacity: &Capacity,
    ) -> Result<(), EngineError> {
        if self.closed {
            return Err(EngineError::Stopping);
        }
        if !self.dormant.contains(&live.id) {
            return Ok(());
        }
        let owned = self.owners.entry(live.owner.clone()).or_default();
        let (owned_then, all_then) =
            (owned.used.with_awake(&live.limits), self.used.with_awake(&live.limits));
        owned_then.check_compute_quota(key)?;
        all_then.check_capacity(capacity)?;
        (owned.used, self.used) = (owned_then, all_then);
        self.dormant.remove(&live.id);
        Ok(())
    }

    /// Records that a sandbox was taken from its pool for a caller; the driver writes the claim to the row. Until
    /// then, requests with the same idempotency key or the same labels find the claim.
    pub fn begin_claim(&mut self, live: &LiveSandbox, claim: Arc<Claiming>) {
        self.owners.entry(live.owner.clone()).or_default().claims.insert(live.id, claim);
    }

    /// The claim is in the row: the owner can find the sandbox from now on. `name_before` is the sandbox's previous
    /// name, if the caller chose another.
    pub fn finish_claim(&mut self, live: &Arc<LiveSandbox>, name_before: Option<&SandboxName>) {
        // A sandbox that was removed from the registry must not come back.
        if !self.by_id.contains_key(&live.id) {
            return;
        }
        self.show(live);
        self.abandon_claim(live, name_before);
    }

    /// The claim is over. Frees a name that is no longer the sandbox's, or that did not become its name.
    pub fn abandon_claim(&mut self, live: &LiveSandbox, name: Option<&SandboxName>) {
        if let Some(owned) = self.owners.get_mut(&live.owner) {
            owned.claims.remove(&live.id);
        }
        if let Some(name) = name {
            self.free_name(live, name);
        }
    }

    /// The claim under way that was requested with this idempotency key.
    pub fn claim_by_idempotency_key(&self, owner: &Owner, key: &str) -> Option<Arc<Claiming>> {
        let mut claims = self.owners.get(owner)?.claims.values();
        claims.find(|claim| claim.idempotency_key.as_deref() == Some(key)).cloned()
    }

    /// A claim under way whose sandbox will have all of these labels.
    pub fn claim_by_labels(&self, owner: &Owner, labels: &Labels) -> Option<Arc<Claiming>> {
        self.owners.get(owner)?.claims.values().find(|claim| claim.labels.include(labels)).cloned()
    }

    /// Makes a sandbox findable after its create or claim.
    fn show(&mut self, live: &Arc<LiveSandbox>) {
        let (place, face) = (Place::of_home(live), live.view().clone());
        let owned = self.owners.entry(live.owner.clone()).or_default();
        owned.by_time.insert(place, Arc::clone(live));
        owned.labels.insert(&face.labels, place);
        if let Some(key) = &face.identity.idempotency_key {
            owned.idempotency_keys.insert(key.clone(), live.id);
        }
    }

    /// Makes a sandbox unfindable.
    fn hide(&mut self, live: &LiveSandbox) {
        let (place, face) = (Place::of_home(live), live.view().clone());
        let Some(owned) = self.owners.get_mut(&live.owner) else { return };
        owned.by_time.remove(&place);
        owned.labels.remove(&face.labels, place);
        if let Some(key) = &face.identity.idempotency_key
            && owned.idempotency_keys.get(key) == Some(&live.id)
        {
            owned.idempotency_keys.remove(key);
        }
    }

    /// Removes a sandbox and releases what it reserved. Has no effect if the sandbox is not in the registry.
    pub fn remove(&mut self, id: SandboxId) {
        let Some(live) = self.by_id.remove(&id) else { return };
        let dormant = self.dormant.remove(&id);
        let without = |used: Usage| match dormant {
            true => used.with_awake(&live.limits).without(&live.limits),
            false => used.without(&live.limits),
        };
        self.used = without(self.used);
        self.hide(&live);
        let Some(owned) = self.owners.get_mut(&live.owner) else { return };
        owned.used = without(owned.used);
        owned.names.retain(|_, named| named.id != id);
        owned.claims.remove(&id);
        if owned.used.sandboxes == 0 {
            self.owners.remove(&live.owner);
        }
    }

    /// Reserves a name for a sandbox that is being renamed.
    pub fn reserve_name(&mut self, live: &LiveSandbox, name: &SandboxName) -> Result<(), EngineError> {
        let owned = self.owners.entry(live.owner.clone()).or_default();
        let named = owned.names.entry(name.clone()).or_insert(Named { id: live.id, holds: 0 });
        if named.id != live.id {
            return Err(EngineError::NameTaken { name: name.to_string() });
        }
        named.holds += 1;
        Ok(())
    }

    /// Frees a name that is no longer the sandbox's, or that did not become its name, unless another rename still
    /// holds it.
    pub fn free_name(&mut self, live: &LiveSandbox, name: &SandboxName) {
        let Some(owned) = self.owners.get_mut(&live.owner) else { return };
        if let Some(named) = owned.names.get_mut(name).filter(|named| named.id == live.id) {
            named.holds -= 1;
            if named.holds == 0 {
                owned.names.remove(name);
            }
        }
    }

    /// Replaces a sandbox's labels. The row already has the new ones.
    pub fn relabel(&mut self, live: &LiveSandbox, labels: Labels) {
        let before = std::mem::replace(&mut live.change_view().labels, labels.clone());
        // A sandbox that was removed from the registry must not come back through its labels.
        if self.by_id.contains_key(&live.id)
            && let Some(owned) = self.owners.get_mut(&live.owner)
        {
            let place = Place::of_home(live);
            owned.labels.remove(&before, place);
            owned.labels.insert(&labels, place);
        }
    }

    /// Calls `take` on the owner's sandboxes that have all of these labels, oldest first, and returns the first
    /// result. Skips sandboxes that have failed or are being deleted.
    pub fn first_labelled<T>(
        &self,
        owner: &Owner,
        labels: &Labels,
        take: impl FnMut(&Arc<LiveSandbox>) -> Option<T>,
    ) -> Option<T> {
        let owned = self.owners.get(owner)?;
        let candidates = labels.pairs().iter().map(|(key, value)| owned.labels.get(key, value));
        let fewest = candidates.min_by_key(|places| places.len())?;
        let sandboxes = fewest.iter().filter_map(|place| owned.by_time.get(place));
        let lives = |live: &&Arc<LiveSandbox>| {
            let face = live.view();
            match face.state {
                State::Creating | State::Running | State::Paused(_) => face.labels.include(labels),
                State::Deleting | State::Failed { .. } => false,
            }
        };
        sandboxes.filter(lives).find_map(take)
    }

    /// An owner's sandboxes before a position, newest first.
    pub fn newest(
        &self,
        owner: &Owner,
        before: Option<Place>,
        name: Option<&str>,
        selectors: &[Selector],
        limit: usize,
    ) -> Result<Vec<Arc<LiveSandbox>>, EngineError> {
        if self.closed {
            return Err(EngineError::Stopping);
        }
        let Some(owned) = self.owners.get(owner) else { return Ok(Vec::new()) };
        let range = (Bound::Unbounded, before.map_or(Bound::Unbounded, Bound::Excluded));
        let meant = |live: &&Arc<LiveSandbox>| {
            let face = live.view();
            name.is_none_or(|name| face.name.as_str() == name)
                && selectors.iter().all(|selector| selector.matches(&face.labels))
        };
        // A selector that names a value leaves few sandboxes to check.
        let fewest = selectors.iter().filter_map(|selector| match selector {
            Selector::Is(key, value) => Some(owned.labels.get(key, value)),
            Selector::IsNot(..) | Selector::Has(_) | Selector::Lacks(_) => None,
        });
        Ok(match fewest.min_by_key(|places| places.len()) {
            Some(places) => {
                let sandboxes = places.range(range).rev().filter_map(|place| owned.by_time.get(place));
                sandboxes.filter(meant).take(limit).cloned().collect()
            }
            None => {
                let sandboxes = owned.by_time.range(range).rev().map(|(_, live)| live);
                sandboxes.filter(meant).take(limit).cloned().collect()
            }
        })
    }

    /// Closes the registry to all requests. Returns all sandboxes.
    pub fn close(&mut self) -> Vec<Arc<LiveSandbox>> {
        self.closed = true;
        self.owners.clear();
        self.by_id.drain().map(|(_, live)| live).collect()
    }
}
