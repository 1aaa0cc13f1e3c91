//! Decides what a pool does next. Pure: no memory, no clock, no effects.

use std::time::Duration;

use wire::SandboxId;

use crate::pool::Standing;

/// The first pause between two attempts.
pub(super) const RETRY_MIN: Duration = Duration::from_secs(1);
/// The longest pause between two attempts.
const RETRY_MAX: Duration = Duration::from_secs(60);

/// A member of the pool, as `decide` sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) id: SandboxId,
    pub(super) standing: Standing,
    /// Made from the newest version of the template.
    pub(super) current: bool,
}

/// What the pool should have, and how much it may do at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    pub(super) replicas: usize,
    /// Creates that were started and have no row yet.
    pub(super) begun: usize,
    /// How many sandboxes may be in the making at once.
    pub(super) making_max: usize,
}

/// What the pool does next.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Steps {
    pub(super) remove: Vec<SandboxId>,
    pub(super) make: usize,
}

/// Compares what the pool has with what it should have. Removes broken and outdated members first, then surplus ones:
/// those still being made before ready ones, and the newest first. `seen` lists the ready ones in claim order.
pub(super) fn decide(wanted: Wanted, seen: &[Seen]) -> Steps {
    let is_good = |seen: &&Seen| seen.current && matches!(seen.standing, Standing::Making | Standing::Ready);
    let bad = seen.iter().filter(|seen| seen.standing != Standing::Going && !is_good(seen));
    let mut remove: Vec<SandboxId> = bad.map(|seen| seen.id).collect();
    let good: Vec<&Seen> = seen.iter().filter(is_good).collect();
    let being_made = good.iter().filter(|seen| seen.standing == Standing::Making).count();
    let have = good.len() + wanted.begun;
    let excess = good.len().saturating_sub(wanted.replicas);
    let last_first = |standing| good.iter().rev().filter(move |seen| seen.standing == standing);
    let unneeded = last_first(Standing::Making).chain(last_first(Standing::Ready)).take(excess);
    remove.extend(unneeded.map(|seen| seen.id));
    let missing = wanted.replicas.saturating_sub(have);
    Steps { remove, make: missing.min(wanted.making_max.saturating_sub(being_made + wanted.begun)) }
}

/// The pause after this many failures in a row. It doubles with each failure.
pub(super) fn retry_pause(failures: u32) -> Duration {
    RETRY_MIN.saturating_mul(1 << failures.saturating_sub(1).min(16)).min(RETRY_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_between_attempts_doubles_up_to_a_minute() {
        let pauses = [1, 2, 3, 6, 7, 1000].map(|failures| retry_pause(failures).as_secs());
        assert_eq!(pauses, [1, 2, 4, 32, 60, 60]);
    }

    /// `R` ready, `M` being made, `B` broken, `G` being removed; lower case means made from an older version.
    #[track_caller]
    fn check(replicas: usize, begun: usize, members: &str, remove: &str, make: usize) {
        let seen: Vec<Seen> = members
            .chars()
            .enumerate()
            .map(|(at, letter)| Seen {
                id: SandboxId::from_random(at as u128),
                standing: match letter.to_ascii_uppercase() {
                    'R' => Standing::Ready,
                    'M' => Standing::Making,
                    'B' => Standing::Broken,
                    _ => Standing::Going,
                },
                current: letter.is_ascii_uppercase(),
            })
            .collect();
        let steps = decide(Wanted { replicas, begun, making_max: 4 }, &seen);
        let removed: String = members
            .chars()
            .enumerate()
            .map(|(at, _)| if steps.remove.contains(&SandboxId::from_random(at as u128)) { 'x' } else { '.' })
            .collect();
        assert_eq!((removed.as_str(), steps.make), (remove, make), "{replicas} of {members:?}");
    }

    #[test]
    fn what_is_missing_is_made_a_few_at_a_time() {
        check(0, 0, "", "", 0);
        check(3, 0, "", "", 3);
        check(100, 0, "", "", 4);
        check(100, 3, "M", ".", 0);
        check(100, 1, "RRM", "...", 2);
        check(3, 1, "RM", "..", 0);
        check(3, 0, "RRG", "...", 1);
    }

    #[test]
    fn what_is_broken_or_old_goes_and_is_replaced() {
        check(3, 0, "RRR", "...", 0);
        check(3, 0, "RRB", "..x", 1);
        check(3, 0, "rrm", "xxx", 3);
        check(2, 0, "rRg", "x..", 1);
    }

    #[test]
    fn what_is_too_much_goes_beginning_with_what_is_not_ready() {
        check(1, 0, "RRR", ".xx", 0);
        check(2, 0, "RRM", "..x", 0);
        check(0, 0, "RMBG", "xxx.", 0);
        check(1, 0, "RRMM", ".xxx", 0);
    }
}
