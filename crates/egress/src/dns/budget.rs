//! Limits how many names a sandbox may look up below one registered name. Every name that is asked upstream carries a
//! few bytes to the operator of that domain's servers, so without a limit an allowed wildcard would be a slow way out.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use crate::limits::Bucket;
use crate::policy::Name;

/// Different names below one registered name, in a sandbox's life.
pub const NAMES_PER_SUFFIX_MAX: usize = 500;
/// New names below one registered name, per minute.
pub const NEW_NAMES_PER_MINUTE: u64 = 120;
/// Different registered names whose counts are kept. Beyond this, new ones are refused.
pub const SUFFIXES_MAX: usize = 20_000;

/// The counts of one sandbox.
#[derive(Debug, Default)]
pub struct Budget {
    suffixes: HashMap<String, Suffix>,
}

#[derive(Debug)]
struct Suffix {
    names: HashSet<Name>,
    bucket: Bucket,
}

impl Budget {
    /// Whether `name` may be asked upstream. A name that was asked before always may.
    pub fn allows(&mut self, name: &Name, now: Instant) -> bool {
        let suffix = name.registrable();
        if !self.suffixes.contains_key(suffix) {
            if self.suffixes.len() >= SUFFIXES_MAX {
                return false;
            }
            // Tokens are sixtieths of a name, so that a minute's worth is refilled in a minute.
            let bucket = Bucket::new(NEW_NAMES_PER_MINUTE, NEW_NAMES_PER_MINUTE * 60, now);
            self.suffixes.insert(suffix.to_owned(), Suffix { names: HashSet::new(), bucket });
        }
        let Some(entry) = self.suffixes.get_mut(suffix) else { return false };
        if entry.names.contains(name) {
            return true;
        }
        if entry.names.len() >= NAMES_PER_SUFFIX_MAX || !entry.bucket.take(60, now) {
            return false;
        }
        entry.names.insert(name.clone())
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ask(budget: &mut Budget, from: usize, count: usize, suffix: &str, now: Instant) -> usize {
        (from..from + count)
            .filter(|at| budget.allows(&Name::parse(&format!("n{at}.{suffix}")).expect("a name"), now))
            .count()
    }

    #[test]
    fn names_below_one_suffix_are_limited_and_others_are_not_affected() {
        let (mut budget, start) = (Budget::default(), Instant::now());
        assert_eq!(ask(&mut budget, 0, 1000, "example.com", start), NEW_NAMES_PER_MINUTE as usize);
        assert_eq!(ask(&mut budget, 0, 10, "example.org", start), 10);
        assert_eq!(ask(&mut budget, 0, 10, "example.com", start), 10, "known names are free");
        let mut asked = NEW_NAMES_PER_MINUTE as usize;
        for minute in 1..20 {
            asked += ask(
                &mut budget,
                minute * 1000,
                1000,
                "a.b.example.com",
                start + Duration::from_secs(60 * minute as u64),
            );
        }
        assert_eq!(asked, NAMES_PER_SUFFIX_MAX);
    }
}
