//! The clock side of a sandbox's life, in the hands of its driver.
//!
//! Owns the times that lifetime rules count from, and when to look at them next; what they come to is `lifetime`'s business, and
//! who uses the sandbox right now `uses`'. A sandbox may outlive its time by one look. It never ends before it.
//!
//! A command that nobody waits for keeps its sandbox alive while it uses the processor, so the time that a sandbox has had of
//! it is read at every look; less than [`BUSY_PER_MILLE`] is what a sleeping program needs to stay asleep.
//!
//! The last use is written to the row at a look and not at its end, so that commands pay nothing for it. After a crash the row
//! may be behind by about a look, and the sandbox is given that much.

use std::time::Duration;

use crate::db::Stamps;
use crate::guest::UsesNow;
use crate::observe::clock::{Moment, Stamp};
use crate::sandbox::lifecycle::State;
use crate::sandbox::lifetime::{Explanation, LastUse, Life, Lifetime, Strike, explain, first_strike};

/// The longest time between two looks: how late a rule may strike after the machine was suspended, since timers stand still then.
const LOOK_MAX: Duration = Duration::from_secs(60);
/// The shortest time between two looks at what a sandbox does.
const LOOK_MIN: Duration = Duration::from_millis(250);
/// Looks in the shortest time without use that matters.
const LOOKS_PER_LENGTH: u32 = 8;
/// How much of one processor a sandbox takes at least when a command in it works.
const BUSY_PER_MILLE: u32 = 10;
/// Looks in a row that may fail before a sandbox is taken for idle: what cannot be looked at must not live for ever.
const FAILED_LOOKS_MAX: u32 = 5;
/// How long after an end that could not be recorded it is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// See the head of this file.
#[derive(Debug)]
pub(crate) struct Deadlines {
    lifetime: Lifetime,
    stamps: Stamps,
    /// Whether that tells of the last use. It does not where no rule asked for it, and the daemon started since.
    knows_use: bool,
    /// By how much the last use may be later than is known.
    slack: Duration,
    /// What the row says of the last use, and whether it says what the sandbox had had of the processors then.
    stored_use: Stamp,
    stored_cpu: bool,
    /// Since when this daemon looks after it, since the boot.
    began: Duration,
    /// The last look at the processor time.
    look: Option<Look>,
    failed_looks: u32,
    /// When to look next, since the boot.
    wake: Option<Duration>,
}

/// What a sandbox has had of the processors, at one time since the boot.
#[derive(Debug, Clone, Copy)]
struct Look {
    cpu: Duration,
    at: Duration,
}

impl Deadlines {
    /// Of a sandbox that was just asked for.
    pub fn newborn(lifetime: Lifetime, now: Moment) -> Self {
        Self::new(lifetime, Stamps::born(Stamp::of(now)), now)
    }

    /// Of a sandbox that rows tell of.
    pub fn recovered(lifetime: Lifetime, stamps: Stamps, state: State, now: Moment) -> Self {
        let at = (stamps.used.boot == now.boot)
            .then(|| u64::try_from(stamps.used.since_boot_micros).ok())
            .flatten();
        let look = stamps.cpu.zip(at).map(|(cpu, at)| Look { cpu, at: Duration::from_micros(at) });
        let mut deadlines = Self::new(lifetime, stamps, now);
        deadlines.look = look;
        deadlines.knows_use = deadlines.lifetime.acts();
        // The row may be behind by a look, and that look may have been late.
        deadlines.slack = 2 * deadlines.pace();
        if state == State::Running {
            // The daemon died between the start and the row that tells when it was.
            deadlines.stamps.started.get_or_insert(Stamp::of(now));
        }
        deadlines.settle(now);
        deadlines
    }

    fn new(lifetime: Lifetime, stamps: Stamps, now: Moment) -> Self {
        Self {
            lifetime,
            stored_use: stamps.used,
            stored_cpu: stamps.cpu.is_some(),
            stamps,
            knows_use: true,
            slack: Duration::ZERO,
            began: now.since_boot,
            look: None,
            failed_looks: 0,
            wake: None,
        }
    }

    pub fn stamps(&self) -> Stamps {
        self.stamps
    }

    pub fn lifetime(&self) -> &Lifetime {
        &self.lifetime
    }

    /// It began to run.
    pub fn started(&mut self, now: Moment) {
        self.stamps.started = Some(Stamp::of(now));
        self.renew_use(LastUse::Start, now);
    }

    /// It is paused now.
    pub fn paused(&mut self, now: Moment) {
        self.stamps.paused = Some(Stamp::of(now));
    }

    /// Someone wants it to live on.
    pub fn touched(&mut self, now: Moment) {
        self.stamps.started = Some(Stamp::of(now));
        self.renew_use(LastUse::Touch, now);
    }

    /// What the times will be after a touch.
    pub fn stamps_touched(&self, now: Moment) -> Stamps {
        let now = Stamp::of(now);
        Stamps { started: Some(now), used: now, last_use: LastUse::Touch, ..self.stamps }
    }

    /// Other rules hold from now on. That counts as a touch: a new rule must not find that its time is over already.
    pub fn change(&mut self, lifetime: Lifetime, now: Moment) {
        self.lifetime = lifetime;
        self.touched(now);
    }

    /// The last use is on its way to the row.
    pub fn stored(&mut self) {
        (self.stored_use, self.stored_cpu) = (self.stamps.used, self.stamps.cpu.is_some());
    }

    /// Whether the row should hear of the last use.
    pub fn is_unstored(&self) -> bool {
        let news = self.stored_use != self.stamps.used || self.stored_cpu != self.stamps.cpu.is_some();
        self.lifetime.acts() && news
    }

    fn renew_use(&mut self, last_use: LastUse, now: Moment) {
        self.set_use(last_use, Stamp::of(now));
    }

    fn set_use(&mut self, last_use: LastUse, used: Stamp) {
        (self.stamps.used, self.stamps.last_use) = (used, last_use);
        (self.knows_use, self.slack) = (true, Duration::ZERO);
    }

    fn settle(&mut self, now: Moment) {
        let stamps = &mut self.stamps;
        stamps.created = stamps.created.settled(now);
        stamps.used = stamps.used.settled(now);
        stamps.started = stamps.started.map(|stamp| stamp.settled(now));
        stamps.paused = stamps.paused.map(|stamp| stamp.settled(now));
    }

    /// Takes in what happened since the last time.
    fn hear(&mut self, uses: UsesNow, now: Moment) {
        self.settle(now);
        if uses.open > 0 {
            self.renew_use(LastUse::Request, now);
            return;
        }
        let Some(last) = uses.last else { return };
        let used = Stamp::in_this_boot(last.min(now.since_boot), now);
        let newer =
            used.boot != self.stamps.used.boot || used.since_boot_micros > self.stamps.used.since_boot_micros;
        if newer {
            self.set_use(LastUse::Request, used);
        }
    }

    /// All that matters, as it is now.
    fn life(&self, state: State, uses: UsesNow, now: Moment) -> Life {
        let created = self.stamps.created.age(now);
        Life {
            state,
            uses: uses.open,
            unused: self.stamps.used.age(now),
            last_use: self.knows_use.then_some(self.stamps.last_use),
            slack: self.slack,
            // What never started counts from its creation.
            started: self.stamps.started.map_or(created, |stamp| stamp.age(now)),
            // The time of an earlier pause stays in the row.
            paused: matches!(state, State::Paused(_))
                .then(|| self.stamps.paused.map(|stamp| stamp.age(now)))
                .flatten(),
            created,
            watched: now.since_boot.saturating_sub(self.began),
        }
    }

    /// What the rules come to, with the uses as they are.
    pub fn strike(&mut self, state: State, uses: UsesNow, now: Moment) -> Option<Strike> {
        self.hear(uses, now);
        first_strike(&self.lifetime, &self.life(state, uses, now))
    }

    pub fn explain(&mut self, state: State, uses: UsesNow, reason: Option<&str>, now: Moment) -> Explanation {
        self.hear(uses, now);
        explain(&self.lifetime, &self.life(state, uses, now), reason, now.wall)
    }

    // Looks.

    /// Between two looks at what it does.
    fn pace(&self) -> Duration {
        match self.lifetime.idle_min() {
            Some(idle) => (idle / LOOKS_PER_LENGTH).clamp(LOOK_MIN, LOOK_MAX),
            None => LOOK_MAX,
        }
    }

    /// How long to wait for the next look. `None`: there is nothing to look at.
    pub fn nap(&self, now: Moment) -> Option<Duration> {
        self.wake.map(|wake| wake.saturating_sub(now.since_boot))
    }

    /// Sets when to look next, `left` before the first rule strikes.
    pub fn plan(&mut self, state: State, left: Option<Duration>, now: Moment) {
        self.wake = match state {
            State::Creating | State::Deleting => None,
            State::Running | State::Paused(_) | State::Failed { .. } if !self.lifetime.acts() => None,
            State::Running | State::Paused(_) | State::Failed { .. } => {
                Some(now.since_boot + left.unwrap_or(LOOK_MAX).min(self.pace()))
            }
        };
    }

    /// A look is under way; the next one is planned when it has come back.
    pub fn pause_looking(&mut self) {
        self.wake = None;
    }

    /// An end could not be recorded.
    pub fn retry_later(&mut self, now: Moment) {
        self.wake = Some(now.since_boot + RETRY);
    }

    /// Whether it matters what the sandbox has had of the processors.
    pub fn asks_for_cpu(&self, state: State, uses: UsesNow) -> bool {
        state == State::Running && uses.open == 0 && self.lifetime.idle_min().is_some()
    }

    /// What it has had of the processors. What was used in the time of a request is the request's.
    pub fn saw_cpu(&mut self, cpu: Duration, uses: UsesNow, now: Moment) {
        self.failed_looks = 0;
        self.stamps.cpu = Some(cpu);
        let before = self.look.replace(Look { cpu, at: now.since_boot });
        let Some(before) = before else { return };
        if uses.open > 0 || uses.last.is_some_and(|last| last >= before.at) {
            return;
        }
        let passed = now.since_boot.saturating_sub(before.at);
        // After a failure and a new start it counts from zero.
        let grown = cpu.saturating_sub(before.cpu);
        if grown * 1000 >= passed * BUSY_PER_MILLE && !grown.is_zero() {
            self.renew_use(LastUse::Processor, now);
        }
    }

    /// It could not be told. For a while, that is taken for work.
    pub fn saw_nothing(&mut self, now: Moment) {
        self.failed_looks += 1;
        if self.failed_looks < FAILED_LOOKS_MAX {
            self.renew_use(self.stamps.last_use, now);
        }
    }
}
