//! Lifetime rules as callers give them, each a clock, a length and an action. `sandbox::lifetime` computes what the
//! rules mean at one moment.

use std::time::{Duration, SystemTime};

use crate::State;
use crate::error::{EngineError, Field};

/// Most rules of one sandbox.
pub const RULES_MAX: usize = 8;

/// The shortest length; less is a mistake in units.
pub const LENGTH_MIN: Duration = Duration::from_millis(100);

/// The longest length, ten years; more is a mistake in units.
pub const LENGTH_MAX: Duration = Duration::from_secs(3660 * 86_400);

/// The event that starts a rule's clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Since {
    /// The end of the last use.
    LastUse,
    /// The start, or the last refresh after it.
    Start,
    /// The last pause, while it lasts.
    Paused,
    /// The create request.
    Creation,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// Pause it and keep its memory.
    PauseKeepMemory,
    /// Pause it, end its processes and keep its files.
    PauseDropMemory,
    /// Delete it with everything in it.
    Delete,
}

impl Action {
    /// Its name in rows and errors.
    pub fn word(self) -> &'static str {
        match self {
            Self::PauseKeepMemory => "pause_keep_memory",
            Self::PauseDropMemory => "pause_drop_memory",
            Self::Delete => "delete",
        }
    }
}

impl Since {
    /// Its name in rows and errors.
    pub fn word(self) -> &'static str {
        match self {
            Self::LastUse => "last_use",
            Self::Start => "start",
            Self::Paused => "paused",
            Self::Creation => "creation",
        }
    }

    /// What restarts it.
    pub fn renewal(self) -> Renewal {
        match self {
            Self::LastUse => Renewal::UseOrTouch,
            Self::Start => Renewal::Touch,
            Self::Paused | Self::Creation => Renewal::Nothing,
        }
    }
}

/// What restarts a clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// Any use, and a touch.
    UseOrTouch,
    /// A touch.
    Touch,
    /// Nothing that a caller does.
    Nothing,
}

/// One rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rule {
    /// Its clock.
    pub since: Since,
    /// Its length.
    pub after: Duration,
    /// What it does.
    pub action: Action,
}

impl Rule {
    /// Why it ends or pauses a sandbox; reads after "because".
    pub fn reason(&self) -> String {
        let after = words(self.after);
        match self.since {
            Since::LastUse => format!("nobody has used it for {after}"),
            Since::Start => format!("its start or last touch was {after} ago"),
            Since::Paused => format!("it was paused for {after}"),
            Since::Creation => format!("its creation was {after} ago"),
        }
    }
}

/// A list of rules, checked.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lifetime(Vec<Rule>);

impl Lifetime {
    /// Checked rules. Rows store whole milliseconds.
    pub fn new(rules: Vec<Rule>) -> Result<Self, EngineError> {
        if rules.len() > RULES_MAX {
            return Err(Field::Lifetime.must(format!("have at most {RULES_MAX} rules, got {}", rules.len())));
        }
        if let Some(rule) = rules.iter().find(|rule| !(LENGTH_MIN..=LENGTH_MAX).contains(&rule.after)) {
            let (least, most) = (LENGTH_MIN.as_secs_f64(), LENGTH_MAX.as_secs());
            let given = rule.after.as_secs_f64();
            let rule = format!("have rules of {least} to {most} seconds, got {given}");
            return Err(Field::Lifetime.must(rule));
        }
        let whole = |rule: Rule| Rule { after: Duration::from_millis(rule.after.as_millis() as u64), ..rule };
        Ok(Self(rules.into_iter().map(whole).collect()))
    }

    /// In the order they were given.
    pub fn rules(&self) -> &[Rule] {
        &self.0
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The shortest time without use that any of them acts upon.
    pub fn idle_min(&self) -> Option<Duration> {
        let idle = |rule: &&Rule| rule.since == Since::LastUse;
        self.0.iter().filter(idle).map(|rule| rule.after).min()
    }
}

/// What the last use was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LastUse {
    /// It started, or was requested.
    Start,
    /// A request or a stream.
    Request,
    /// A touch, or a change of the lifetime.
    Touch,
    /// A command that uses the processor.
    Processor,
}

impl LastUse {
    /// Its name in rows.
    pub fn word(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Request => "request",
            Self::Touch => "touch",
            Self::Processor => "processor",
        }
    }
}

/// Why a sandbox is alive, and when and how it ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Explanation {
    /// For people.
    pub sentence: String,
    /// Its state.
    pub state: State,
    /// Uses in progress: requests, open streams, commands that a caller waits for.
    pub uses: u32,
    /// When the last use ended, and its kind; now, while it is in use. `None`: unknown.
    pub last_use: Option<(SystemTime, LastUse)>,
    /// How it ends, if nothing happens before.
    pub end: Option<End>,
    /// All rules, in their order.
    pub rules: Vec<RuleNow>,
}

/// How a sandbox ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    /// The index of the rule that causes it.
    pub rule: usize,
    /// What the rule does.
    pub action: Action,
    /// When.
    pub at: SystemTime,
    /// The time left.
    pub left: Duration,
    /// What would postpone it.
    pub renewal: Renewal,
}

/// A rule at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RuleNow {
    /// The rule.
    pub rule: Rule,
    /// The time until it acts, if nothing happens before. `None` if it does not apply now, or its clock is not running.
    pub left: Option<Duration>,
    /// When that is.
    pub at: Option<SystemTime>,
}

/// A length for people: the largest unit, and the next one if it matters.
pub(crate) fn words(length: Duration) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    if length < Duration::from_secs(1) {
        return format!("{} ms", length.as_millis());
    }
    let seconds = length.as_secs();
    let at = UNITS.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(UNITS.len() - 1);
    let (unit, name) = UNITS[at];
    let whole = format!("{} {name}", seconds / unit);
    match UNITS.get(at + 1) {
        Some((smaller, name)) if seconds % unit >= *smaller => {
            format!("{whole} {} {name}", seconds % unit / smaller)
        }
        Some(_) | None => whole,
    }
}
