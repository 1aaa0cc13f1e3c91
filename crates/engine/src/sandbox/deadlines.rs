//! The lifetime clocks of one sandbox, owned by its driver.
//!
//! Keeps the times that the lifetime rules count from, and decides when to check the rules next. `lifetime` evaluates
//! the rules, and `uses` counts the uses under way. A sandbox may outlive its time by one check interval, but never
//! ends early.
//!
//! A command that no caller waits for keeps its sandbox alive while the command uses the processor, so every check
//! reads the sandbox's processor time. Less than [`BUSY_PER_MILLE`] counts as idle, because a sleeping program needs
//! that much.
//!
//! The time of the last use is written to the row at a check and not at the end of the use, so that commands do not
//! pay for the write. After a crash the row may be behind by about one check interval, and the sandbox gets that much
//! extra time.

use std::time::Duration;

use crate::db::Stamps;
use crate::guest::UsesNow;
use crate::observe::clock::{Moment, Stamp};
use crate::sandbox::lifecycle::State;
use crate::sandbox::lifetime::{Explanation, LastUse, Life, Lifetime, Strike, explain, first_strike};

/// The longest time between two checks. Timers stop while the machine is suspended, so a rule may strike this late
/// afterwards.
const LOOK_MAX: Duration = Duration::from_secs(60);
/// The shortest time between two checks of a sandbox's activity.
const LOOK_MIN: Duration = Duration::from_millis(250);
/// How many checks fit into the shortest idle time of any rule.
const LOOKS_PER_LENGTH: u32 = 8;
/// A sandbox that uses at least this much of one processor counts as busy.
const BUSY_PER_MILLE: u32 = 10;
/// After this many failed checks in a row the sandbox counts as idle: a sandbox that cannot be checked must not live
/// forever.
const FAILED_LOOKS_MAX: u32 = 5;
/// The pause before the driver retries an end that it could not record.
const RETRY: Duration = Duration::from_secs(10);

/// The lifetime rules of one sandbox and the times that they count from.
#[derive(Debug)]
pub(crate) struct Deadlines {
    lifetime: Lifetime,
    stamps: Stamps,
    /// Whether `stamps` holds the last use. It does not if no rule needs it and the daemon has restarted.
    knows_use: bool,
    /// How much later than recorded the last use may have been.
    slack: Duration,
    /// The last use as the row has it, and whether the row has the processor time of that moment.
    stored_use: Stamp,
    stored_cpu: bool,
    stored_acting: Option<Stamp>,
    /// When this daemon took over the sandbox, as time since boot.
    began: Duration,
    /// The last reading of the processor time.
    look: Option<Look>,
    failed_looks: u32,
    /// When to check next, as time since boot.
    wake: Option<Duration>,
}

/// The processor time that a sandbox had used at a given time since boot.
#[derive(Debug, Clone, Copy)]
struct Look {
    cpu: Duration,
    at: Duration,
}

impl Deadlines {
    /// The deadlines of a new sandbox.
    pub fn newborn(lifetime: Lifetime, now: Moment) -> Self {
        Self::new(lifetime, Stamps::born(Stamp::of(now)), now)
    }

    /// The deadlines of a sandbox from its row.
    pub fn recovered(lifetime: Lifetime, stamps: Stamps, state: State, now: Moment) -> Self {
        let at = (stamps.used.boot == now.boot)
            .then(|| u64::try_from(stamps.used.since_boot_micros).ok())
            .flatten();
        let look = stamps.cpu.zip(at).map(|(cpu, at)| Look { cpu, at: Duration::from_micros(at) });
        let mut deadlines = Self::new(lifetime, stamps, now);
        deadlines.look = look;
        deadlines.knows_use = !deadlines.lifetime.is_empty();
        deadlines.begin_acting(now);
        // The row may be behind by one check, and that check may have been late.
        deadlines.slack = 2 * deadlines.pace();
        if state == State::Running {
            // The daemon died after the start and before it wrote the time of the start to the row.
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
            stored_acting: stamps.acting,
            stamps,
            knows_use: true,
            slack: Duration::ZERO,
            began: now.since_boot,
            look: None,
            failed_looks: 0,
            wake: None,
        }
    }

    /// The rules to pause act from now on, if no daemon before this one could pause. The migration has written a stamp without a time.
    fn begin_acting(&mut self, now: Moment) {
        if self.stamps.acting.is_some_and(|stamp| stamp.wall_micros == 0) {
            self.stamps.acting = Some(Stamp::of(now));
        }
    }

    pub fn stamps(&self) -> Stamps {
        self.stamps
    }

    pub fn lifetime(&self) -> &Lifetime {
        &self.lifetime
    }

    /// The sandbox has started.
    pub fn started(&mut self, now: Moment) {
        self.stamps.started = Some(Stamp::of(now));
        self.renew_use(LastUse::Start, now);
    }

    /// The sandbox is now paused.
    pub fn paused(&mut self, now: Moment) {
        self.stamps.paused = Some(Stamp::of(now));
    }

    /// A caller wants to keep the sandbox alive.
    pub fn touched(&mut self, now: Moment) {
        self.stamps.started = Some(Stamp::of(now));
        self.renew_use(LastUse::Touch, now);
    }

    /// The stamps as they will be after a touch.
    pub fn stamps_touched(&self, now: Moment) -> Stamps {
        let now = Stamp::of(now);
        Stamps { started: Some(now), used: now, last_use: LastUse::Touch, ..self.stamps }
    }

    /// Replaces the rules. This counts as a touch, so that a new rule does not strike at once.
    pub fn change(&mut self, lifetime: Lifetime, now: Moment) {
        self.lifetime = lifetime;
        self.stamps.acting = None;
        self.touched(now);
    }

    /// The last use has been queued for the row.
    pub fn stored(&mut self) {
        (self.stored_use, self.stored_cpu) = (self.stamps.used, self.stamps.cpu.is_some());
        self.stored_acting = self.stamps.acting;
    }

    /// Whether the last use has to be written to the row.
    pub fn is_unstored(&self) -> bool {
        let news = self.stored_use != self.stamps.used
            || self.stored_cpu != self.stamps.cpu.is_some()
            || self.stored_acting != self.stamps.acting;
        !self.lifetime.is_empty() && news
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
        stamps.acting = stamps.acting.map(|stamp| stamp.settled(now));
    }

    /// Updates the last use from the uses that have begun or ended since the last call.
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

    /// Everything that the rules depend on, as of now.
    fn life(&self, state: State, uses: UsesNow, now: Moment) -> Life {
        let created = self.stamps.created.age(now);
        Life {
            state,
            uses: uses.open,
            unused: self.stamps.used.age(now),
            last_use: self.knows_use.then_some(self.stamps.last_use),
            slack: self.slack,
            // A sandbox that never started counts from its creation.
            started: self.stamps.started.map_or(created, |stamp| stamp.age(now)),
            // The row keeps the time of an earlier pause, so the state decides.
            paused: matches!(state, State::Paused(_))
                .then(|| self.stamps.paused.map(|stamp| stamp.age(now)))
                .flatten(),
            created,
            acting: self.stamps.acting.map(|stamp| stamp.age(now)),
            watched: now.since_boot.saturating_sub(self.began),
        }
    }

    /// The rule that strikes first, given the uses under way.
    pub fn strike(&mut self, state: State, uses: UsesNow, now: Moment) -> Option<Strike> {
        self.hear(uses, now);
        first_strike(&self.lifetime, &self.life(state, uses, now))
    }

    pub fn explain(&mut self, state: State, uses: UsesNow, reason: Option<&str>, now: Moment) -> Explanation {
        self.hear(uses, now);
        explain(&self.lifetime, &self.life(state, uses, now), reason, now.wall)
    }

    // Checks.

    /// The time between two checks of the sandbox's activity.
    fn pace(&self) -> Duration {
        match self.lifetime.idle_min() {
            Some(idle) => (idle / LOOKS_PER_LENGTH).clamp(LOOK_MIN, LOOK_MAX),
            None => LOOK_MAX,
        }
    }

    /// How long to wait until the next check. `None`: no check is planned.
    pub fn nap(&self, now: Moment) -> Option<Duration> {
        self.wake.map(|wake| wake.saturating_sub(now.since_boot))
    }

    /// Plans the next check. `left` is the time until the first rule strikes.
    pub fn plan(&mut self, state: State, left: Option<Duration>, now: Moment) {
        self.wake = match state {
            State::Creating | State::Deleting => None,
            State::Running | State::Paused(_) | State::Failed { .. } if self.lifetime.is_empty() => None,
            State::Running | State::Paused(_) | State::Failed { .. } => {
                Some(now.since_boot + left.unwrap_or(LOOK_MAX).min(self.pace()))
            }
        };
    }

    /// A check is under way; the next one is planned when this one has finished.
    pub fn pause_looking(&mut self) {
        self.wake = None;
    }

    /// An end could not be recorded: plans a retry.
    pub fn retry_later(&mut self, now: Moment) {
        self.wake = Some(now.since_boot + RETRY);
    }

    /// Whether the decision depends on the sandbox's processor time.
    pub fn asks_for_cpu(&self, state: State, uses: UsesNow) -> bool {
        state == State::Running && uses.open == 0 && self.lifetime.idle_min().is_some()
    }

    /// Records the sandbox's processor time. Time that was used during a request is attributed to the request.
    pub fn saw_cpu(&mut self, cpu: Duration, uses: UsesNow, now: Moment) {
        self.failed_looks = 0;
        self.stamps.cpu = Some(cpu);
        let before = self.look.replace(Look { cpu, at: now.since_boot });
        let Some(before) = before else { return };
        if uses.open > 0 || uses.last.is_some_and(|last| last >= before.at) {
            return;
        }
        let passed = now.since_boot.saturating_sub(before.at);
        // The counter restarts from zero when a sandbox starts again after a failure.
        let grown = cpu.saturating_sub(before.cpu);
        if grown * 1000 >= passed * BUSY_PER_MILLE && !grown.is_zero() {
            self.renew_use(LastUse::Processor, now);
        }
    }

    /// The processor time could not be read. The first few failures count as activity.
    pub fn saw_nothing(&mut self, now: Moment) {
        self.failed_looks += 1;
        if self.failed_looks < FAILED_LOOKS_MAX {
            self.renew_use(self.stamps.last_use, now);
        }
    }
}
