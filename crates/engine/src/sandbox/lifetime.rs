//! How long a sandbox lives: the rules, and how they apply at one moment. Pure: no effects, no clock.
//!
//! A lifetime is a list of rules. Each rule has a clock, a length and an action; the rule that strikes first wins.
//! Without rules, a sandbox lives until it is deleted. The driver keeps the times that the clocks count from
//! (`deadlines`).
//!
//! ```text
//! since        counts from                            restarted by
//! last_use     the end of the last use                a use, a touch, a change of the lifetime
//! start        when it began to run                   a touch, a change of the lifetime
//! paused       when it was paused                     a pause
//! creation     when it was asked for                  nothing
//! ```
//!
//! While a sandbox is in use, no `last_use` rule strikes, however long the use takes. The other clocks keep running
//! during a use. The rules do not end a sandbox that is being created. They do end one that has failed.

use std::fmt::Write;
use std::time::{Duration, SystemTime};

use crate::model::lifetime::words;
pub use crate::model::lifetime::{
    Action, End, Explanation, LENGTH_MAX, LENGTH_MIN, LastUse, Lifetime, RULES_MAX, Renewal, Rule, RuleNow,
    Since,
};
use crate::model::state::{Kept, State};
use crate::observe::clock::Age;

/// After the daemon starts, no `last_use` rule strikes for this long (or for the length of the rule, if that is
/// shorter), so that clients have time to reconnect.
pub const RECONNECT: Duration = Duration::from_secs(60);

/// What is known about a sandbox at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Life {
    /// The state of the sandbox.
    pub state: State,
    /// How many uses are under way.
    pub uses: u32,
    /// Time since the last use ended.
    pub unused: Age,
    /// The kind of the last use. `None`: the daemon has restarted and no record of the last use exists.
    pub last_use: Option<LastUse>,
    /// How much later than recorded the last use may have been.
    pub slack: Duration,
    /// Time since the start or the last touch.
    pub started: Age,
    /// Time since the sandbox was paused.
    pub paused: Option<Age>,
    /// Time since the sandbox was requested.
    pub created: Age,
    /// Time since the rules to pause began to act, if an earlier version kept them without acting on them.
    pub acting: Option<Age>,
    /// How long this daemon has managed the sandbox.
    pub watched: Duration,
}

/// When a rule strikes, if nothing happens before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Strike {
    /// The index of the rule in the list.
    pub rule: usize,
    /// What the rule does.
    pub action: Action,
    /// The time until the rule strikes. Zero: now.
    pub left: Duration,
}

/// What the driver does when a rule strikes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Deed {
    /// Pauses the sandbox and keeps this much.
    Pause(Kept),
    /// Deletes the sandbox.
    Delete,
}

/// What the driver does when a rule with this action strikes.
pub fn deed(action: Action) -> Deed {
    match action {
        Action::PauseKeepMemory => Deed::Pause(Kept::Frozen),
        Action::PauseDropMemory => Deed::Pause(Kept::Dropped),
        Action::Delete => Deed::Delete,
    }
}

/// The time until a rule strikes. `None`: the rule does not apply now.
pub fn left(rule: &Rule, life: &Life) -> Option<Duration> {
    match life.state {
        State::Creating | State::Deleting => return None,
        // A frozen sandbox can still give its memory up.
        State::Paused(Kept::Frozen) if rule.action == Action::PauseDropMemory => {}
        State::Paused(_) if rule.action != Action::Delete => return None,
        State::Failed { .. } if rule.action != Action::Delete => return None,
        State::Running | State::Paused(_) | State::Failed { .. } => {}
    }
    let age = match rule.since {
        Since::LastUse if life.uses > 0 => return Some(rule.after),
        Since::LastUse => {
            Age { elapsed: life.unused.elapsed.saturating_sub(life.slack), doubt: life.unused.doubt }
        }
        Since::Start => life.started,
        Since::Paused => life.paused?,
        // Otherwise a sandbox that such a rule has paused could never run again.
        Since::Creation if rule.action != Action::Delete && life.started.elapsed < life.created.elapsed => {
            life.started
        }
        Since::Creation => life.created,
    };
    let age = match (rule.action, life.acting) {
        (Action::PauseKeepMemory | Action::PauseDropMemory, Some(acting)) => {
            Age { elapsed: age.elapsed.min(acting.elapsed), doubt: age.doubt.max(acting.doubt) }
        }
        (Action::PauseKeepMemory | Action::PauseDropMemory | Action::Delete, _) => age,
    };
    let mut left = rule.after.saturating_sub(age.elapsed).max(age.doubt);
    if rule.since == Since::LastUse {
        left = left.max(rule.after.min(RECONNECT).saturating_sub(life.watched));
    }
    Some(left)
}

/// The rule that strikes first. If two strike at once, the one that comes first in the list wins.
pub fn first_strike(lifetime: &Lifetime, life: &Life) -> Option<Strike> {
    let strikes = lifetime.rules().iter().enumerate().filter_map(|(at, rule)| {
        let (action, left) = (rule.action, left(rule, life)?);
        Some(Strike { rule: at, action, left })
    });
    strikes.min_by_key(|strike| strike.left)
}

/// Explains why a sandbox lives, and when and how it ends.
pub fn explain(lifetime: &Lifetime, life: &Life, reason: Option<&str>, wall: SystemTime) -> Explanation {
    let rules = lifetime.rules().iter().map(|rule| {
        let left = left(rule, life);
        RuleNow { rule: *rule, left, at: left.map(|left| wall + left) }
    });
    let end = first_strike(lifetime, life).map(|strike| {
        let rule = lifetime.rules()[strike.rule];
        let (action, renewal) = (strike.action, rule.since.renewal());
        End { rule: strike.rule, action, at: wall + strike.left, left: strike.left, renewal }
    });
    let last_use = match life.uses {
        0 => life.last_use.map(|last_use| (wall.checked_sub(life.unused.elapsed).unwrap_or(wall), last_use)),
        1.. => Some((wall, LastUse::Request)),
    };
    Explanation {
        sentence: sentence(lifetime, life, end.as_ref(), reason),
        state: life.state,
        uses: life.uses,
        last_use,
        rules: rules.collect(),
        end,
    }
}

fn sentence(lifetime: &Lifetime, life: &Life, end: Option<&End>, reason: Option<&str>) -> String {
    let mut text = match life.state {
        State::Creating => return "It is being made; its lifetime rules act once it runs.".into(),
        State::Deleting => return "It is being deleted.".into(),
        State::Failed { .. } => {
            format!("It has failed ({})", reason.unwrap_or("the reason was not recorded"))
        }
        State::Paused(kept) => {
            let with = match kept {
                Kept::Frozen | Kept::Saved => "with its memory",
                Kept::Dropped => "without its memory",
            };
            match reason {
                Some(reason) => format!("It is paused {with} ({reason})"),
                None => format!("It is paused {with}"),
            }
        }
        State::Running if life.uses == 1 => "It is in use (1 request or stream is open)".into(),
        State::Running if life.uses > 1 => {
            format!("It is in use ({} requests or streams are open)", life.uses)
        }
        State::Running if end.is_none() => "It runs".into(),
        State::Running => {
            let ago = ago(life.unused.elapsed);
            match life.last_use {
                None => "It runs".into(),
                Some(LastUse::Start) => format!("It runs and has not been used since its start {ago}"),
                Some(LastUse::Request) => format!("It runs and was last used {ago}"),
                Some(LastUse::Touch) => format!("It runs and was last touched {ago}"),
                Some(LastUse::Processor) => {
                    format!("It runs and was last used {ago}, by a command that works by itself")
                }
            }
        }
    };
    // Writing to a `String` cannot fail.
    let _ = match end {
        None if lifetime.rules().is_empty() => {
            write!(text, " and has no lifetime rules, so it lives until it is deleted.")
        }
        None => write!(text, " and no rule of its lifetime ends it now, so it lives until it is deleted."),
        Some(end) => {
            let rule = lifetime.rules()[end.rule];
            let (after, happens) = (words(rule.after), happens(end.action));
            match rule.since {
                Since::LastUse if life.uses > 0 => {
                    write!(text, "; it {happens} once nobody has used it for {after}.")
                }
                Since::LastUse => write!(
                    text,
                    "; it {happens} in {}, when nobody has used it for {after}, unless someone uses or touches it.",
                    words(end.left)
                ),
                Since::Start => write!(
                    text,
                    "; it {happens} in {}, {after} after its start or last touch, unless someone touches it.",
                    words(end.left)
                ),
                Since::Paused => {
                    write!(text, "; it {happens} in {}, {after} after it was paused.", words(end.left))
                }
                Since::Creation => write!(
                    text,
                    "; it {happens} in {}, {after} after it was created, whatever happens.",
                    words(end.left)
                ),
            }
        }
    };
    text
}

/// What happens to the sandbox, as text to follow "it".
fn happens(action: Action) -> &'static str {
    match action {
        Action::PauseKeepMemory => "is paused, with its memory kept,",
        Action::PauseDropMemory => "is paused, with only its files kept,",
        Action::Delete => "is deleted",
    }
}

fn ago(length: Duration) -> String {
    if length < Duration::from_secs(1) { "a moment ago".into() } else { format!("{} ago", words(length)) }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::sandbox::lifecycle::Disk;

    const HOUR: u64 = 3600;

    fn age(seconds: u64) -> Age {
        Age { elapsed: Duration::from_secs(seconds), doubt: Duration::ZERO }
    }

    /// A sandbox that was created an hour ago, started 50 minutes ago and last used 5 minutes ago.
    fn life() -> Life {
        Life {
            state: State::Running,
            uses: 0,
            unused: age(300),
            last_use: Some(LastUse::Request),
            slack: Duration::ZERO,
            started: age(3000),
            paused: None,
            created: age(HOUR),
            acting: None,
            watched: Duration::from_secs(HOUR),
        }
    }

    fn rule(since: Since, seconds: u64, action: Action) -> Rule {
        Rule { since, after: Duration::from_secs(seconds), action }
    }

    fn delete(since: Since, seconds: u64) -> Rule {
        rule(since, seconds, Action::Delete)
    }

    fn lifetime(rules: &[Rule]) -> Lifetime {
        Lifetime::new(rules.to_vec()).expect("they are rules")
    }

    #[track_caller]
    fn check(rules: &[Rule], life: Life, expected: Option<(usize, u64)>) {
        let strike = first_strike(&lifetime(rules), &life);
        let expected = expected.map(|(rule, left)| {
            let (action, left) = (rules[rule].action, Duration::from_secs(left));
            Strike { rule, action, left }
        });
        assert_eq!(strike, expected, "{rules:?} with {life:?}");
    }

    #[test]
    fn each_clock_counts_from_its_own_time() {
        use Since::*;
        check(&[], life(), None);
        check(&[delete(LastUse, 600)], life(), Some((0, 300)));
        check(&[delete(Start, 3600)], life(), Some((0, 600)));
        check(&[delete(Creation, 2 * HOUR)], life(), Some((0, HOUR)));
        check(&[delete(Paused, 1)], life(), None);
        let paused = Life { state: State::Paused(Kept::Frozen), paused: Some(age(10)), ..life() };
        check(&[delete(Paused, 60)], paused, Some((0, 50)));
    }

    #[test]
    fn what_is_over_is_over_now() {
        use Since::*;
        for since in [LastUse, Start, Creation] {
            check(&[delete(since, 60)], life(), Some((0, 0)));
            check(&[delete(since, 300)], life(), Some((0, 0)));
        }
        check(&[delete(LastUse, 301)], life(), Some((0, 1)));
    }

    #[test]
    fn the_first_to_strike_wins() {
        use Since::*;
        check(&[delete(Creation, 2 * HOUR), delete(LastUse, 600)], life(), Some((1, 300)));
        check(&[delete(LastUse, 600), delete(Start, 3300)], life(), Some((0, 300)));
    }

    #[test]
    fn a_use_stops_the_clock_of_use_and_no_other() {
        use Since::*;
        let used = Life { uses: 1, unused: age(10 * HOUR), ..life() };
        check(&[delete(LastUse, 600)], used, Some((0, 600)));
        check(&[delete(Start, 60)], used, Some((0, 0)));
        check(&[delete(Creation, 60)], used, Some((0, 0)));
    }

    #[test]
    fn rules_act_on_what_has_failed_and_not_on_what_is_being_made_or_goes() {
        use Since::*;
        for (state, expected) in [
            (State::Creating, None),
            (State::Running, Some((0, 0))),
            (State::Paused(Kept::Dropped), Some((0, 0))),
            (State::Failed { disk: Disk::Lost }, Some((0, 0))),
            (State::Failed { disk: Disk::Whole }, Some((0, 0))),
            (State::Deleting, None),
        ] {
            check(&[delete(Creation, 60)], Life { state, ..life() }, expected);
        }
    }

    #[test]
    fn a_paused_sandbox_is_deleted_or_gives_its_memory_up_and_is_not_paused_again() {
        use Action::*;
        use Since::*;
        let paused = |kept| Life { state: State::Paused(kept), paused: Some(age(10)), ..life() };
        for action in [PauseKeepMemory, PauseDropMemory] {
            check(&[rule(LastUse, 600, action)], life(), Some((0, 300)));
            check(&[rule(LastUse, 1, action)], paused(Kept::Dropped), None);
            check(
                &[rule(LastUse, 1, action)],
                Life { state: State::Failed { disk: Disk::Whole }, ..life() },
                None,
            );
        }
        check(&[rule(LastUse, 1, PauseKeepMemory)], paused(Kept::Frozen), None);
        check(&[rule(Paused, 60, PauseDropMemory)], paused(Kept::Frozen), Some((0, 50)));
        check(&[delete(Creation, 60)], paused(Kept::Dropped), Some((0, 0)));
        let both = [rule(LastUse, 60, PauseKeepMemory), rule(LastUse, 3600, PauseDropMemory)];
        check(&both, life(), Some((0, 0)));
        check(&both, paused(Kept::Frozen), Some((1, 3300)));
    }

    /// Rules that earlier versions kept without acting on them.
    #[test]
    fn a_rule_to_pause_counts_from_the_first_start_that_can_pause() {
        use Since::*;
        let upgraded = Life { acting: Some(age(40)), ..life() };
        for since in [LastUse, Start, Creation] {
            check(&[rule(since, 60, Action::PauseDropMemory)], upgraded, Some((0, 20)));
            check(&[delete(since, 60)], upgraded, Some((0, 0)));
        }
        let late = Life { acting: Some(age(10 * HOUR)), ..life() };
        check(&[rule(LastUse, 600, Action::PauseDropMemory)], late, Some((0, 300)));
    }

    #[test]
    fn a_daemon_that_has_just_started_waits_for_those_who_come_back() {
        use Since::*;
        let fresh = Life { watched: Duration::from_secs(10), unused: age(10 * HOUR), ..life() };
        check(&[delete(LastUse, 600)], fresh, Some((0, 50)));
        check(&[delete(LastUse, 20)], fresh, Some((0, 10)));
        check(&[delete(LastUse, 5)], fresh, Some((0, 0)));
        check(&[delete(Creation, 60)], fresh, Some((0, 0)));
    }

    #[test]
    fn a_use_that_may_have_been_later_is_taken_for_later() {
        let slack = Duration::from_secs(120);
        check(&[delete(Since::LastUse, 600)], Life { slack, ..life() }, Some((0, 420)));
        check(&[delete(Since::Creation, 2 * HOUR)], Life { slack, ..life() }, Some((0, HOUR)));
        let fresh = Life { slack: Duration::from_secs(HOUR), ..life() };
        check(&[delete(Since::LastUse, 600)], fresh, Some((0, 600)));
    }

    #[test]
    fn nothing_is_done_upon_a_clock_that_is_in_doubt() {
        use Since::*;
        let doubt = |seconds| Age { elapsed: Duration::from_secs(HOUR), doubt: Duration::from_secs(seconds) };
        let rebooted = Life { created: doubt(400), unused: doubt(400), ..life() };
        check(&[delete(Creation, 60)], rebooted, Some((0, 400)));
        check(&[delete(LastUse, 60)], rebooted, Some((0, 400)));
        check(&[delete(Creation, 2 * HOUR)], rebooted, Some((0, HOUR)));
    }

    #[test]
    fn rules_are_bounded() {
        let of = |after| Lifetime::new(vec![Rule { since: Since::Start, after, action: Action::Delete }]);
        of(Duration::ZERO).expect_err("too short");
        of(LENGTH_MIN - Duration::from_nanos(1)).expect_err("too short");
        of(LENGTH_MAX + Duration::from_secs(1)).expect_err("too long");
        of(LENGTH_MAX).expect("just right");
        let whole = of(Duration::from_micros(1_500_999)).expect("a length");
        assert_eq!(whole.rules()[0].after, Duration::from_millis(1500));
        Lifetime::new(vec![delete(Since::Start, 1); RULES_MAX + 1]).expect_err("too many");
    }

    #[track_caller]
    fn says(rules: &[Rule], life: Life, expected: &str) {
        let explanation = explain(&lifetime(rules), &life, Some("its init ended"), UNIX_EPOCH);
        assert_eq!(explanation.sentence, expected);
    }

    #[test]
    fn one_sentence_says_why_it_lives_and_when_it_ends() {
        use Since::*;
        says(&[], life(), "It runs and has no lifetime rules, so it lives until it is deleted.");
        says(
            &[delete(LastUse, 600)],
            Life { last_use: Some(super::LastUse::Processor), ..life() },
            "It runs and was last used 5 min ago, by a command that works by itself; it is deleted in 5 min, when \
             nobody has used it for 10 min, unless someone uses or touches it.",
        );
        says(
            &[delete(LastUse, 600), delete(Creation, 86_400)],
            life(),
            "It runs and was last used 5 min ago; it is deleted in 5 min, when nobody has used it for 10 min, \
             unless someone uses or touches it.",
        );
        says(
            &[delete(LastUse, 600)],
            Life { uses: 2, ..life() },
            "It is in use (2 requests or streams are open); it is deleted once nobody has used it for 10 min.",
        );
        says(
            &[delete(Start, 4000)],
            life(),
            "It runs and was last used 5 min ago; it is deleted in 16 min 40 s, 1 h 6 min after its start or last \
             touch, unless someone touches it.",
        );
        says(
            &[delete(Creation, 86_400)],
            Life { uses: 1, ..life() },
            "It is in use (1 request or stream is open); it is deleted in 23 h, 1 d after it was created, whatever \
             happens.",
        );
        says(
            &[delete(Creation, 86_400)],
            Life { state: State::Failed { disk: Disk::Whole }, ..life() },
            "It has failed (its init ended); it is deleted in 23 h, 1 d after it was created, whatever happens.",
        );
        says(
            &[rule(LastUse, 600, Action::PauseKeepMemory), delete(Creation, 86_400)],
            life(),
            "It runs and was last used 5 min ago; it is paused, with its memory kept, in 5 min, when nobody has used it \
             for 10 min, unless someone uses or touches it.",
        );
        says(
            &[rule(LastUse, 600, Action::PauseDropMemory), delete(Creation, 86_400)],
            Life { state: State::Paused(Kept::Dropped), paused: Some(age(10)), ..life() },
            "It is paused without its memory (its init ended); it is deleted in 23 h, 1 d after it was created, whatever \
             happens.",
        );
        says(
            &[delete(Creation, 86_400)],
            Life { last_use: None, ..life() },
            "It runs; it is deleted in 23 h, 1 d after it was created, whatever happens.",
        );
        says(
            &[delete(LastUse, 600)],
            Life { unused: age(0), last_use: Some(super::LastUse::Touch), ..life() },
            "It runs and was last touched a moment ago; it is deleted in 10 min, when nobody has used it for 10 min, \
             unless someone uses or touches it.",
        );
        says(
            &[],
            Life { state: State::Creating, ..life() },
            "It is being made; its lifetime rules act once it runs.",
        );
        says(&[], Life { state: State::Deleting, ..life() }, "It is being deleted.");
    }

    /// A pause rule must never delete a sandbox, nor be described as if it did.
    #[test]
    fn what_happens_follows_the_action_of_the_rule_and_not_only_its_clock() {
        use Action::*;
        for (action, done, text) in [
            (Delete, Deed::Delete, "it is deleted in"),
            (PauseKeepMemory, Deed::Pause(Kept::Frozen), "it is paused, with its memory kept, in"),
            (PauseDropMemory, Deed::Pause(Kept::Dropped), "it is paused, with only its files kept, in"),
        ] {
            assert_eq!(deed(action), done);
            for since in [Since::LastUse, Since::Start, Since::Paused, Since::Creation] {
                let rules = lifetime(&[rule(since, 600, action)]);
                let left = Duration::from_secs(60);
                let end = End { rule: 0, action, at: UNIX_EPOCH, left, renewal: since.renewal() };
                let sentence = sentence(&rules, &life(), Some(&end), None);
                assert!(sentence.contains(text), "{action:?} since {since:?}: {sentence}");
            }
        }
    }

    #[test]
    fn what_programs_read_agrees_with_the_sentence() {
        let rules = [delete(Since::Paused, 60), delete(Since::LastUse, 600)];
        let explanation = explain(&lifetime(&rules), &life(), None, UNIX_EPOCH + Duration::from_secs(10_000));
        let end = explanation.end.expect("it ends");
        assert_eq!((end.rule, end.left, end.renewal), (1, Duration::from_secs(300), Renewal::UseOrTouch));
        assert_eq!(end.at, UNIX_EPOCH + Duration::from_secs(10_300));
        let last_use = Some((UNIX_EPOCH + Duration::from_secs(9700), LastUse::Request));
        assert_eq!(explanation.last_use, last_use);
        assert_eq!(explanation.rules[0].left, None);
        assert_eq!(explanation.rules[1].left, Some(Duration::from_secs(300)));
    }

    #[test]
    fn lengths_are_said_in_the_units_that_matter() {
        for (millis, text) in [
            (0, "0 ms"),
            (250, "250 ms"),
            (1000, "1 s"),
            (59_999, "59 s"),
            (60_000, "1 min"),
            (61_000, "1 min 1 s"),
            (3_600_000, "1 h"),
            (3_659_000, "1 h"),
            (3_660_000, "1 h 1 min"),
            (90_000_000, "1 d 1 h"),
        ] {
            assert_eq!(words(Duration::from_millis(millis)), text);
        }
    }
}
