//! What is left out of a build context: a `.dockerignore`.
//!
//! One pattern per line; `!` makes an exception from earlier patterns. `*`, `?` and `[...]` match anything but a
//! slash, `**` any number of directories. A pattern that matches a directory matches everything in it, and the last
//! match decides.

/// The rules of one file.
#[derive(Debug, Clone, Default)]
pub struct Ignore {
    /// Whether it is an exception, and the parts of the pattern.
    rules: Vec<(bool, Vec<String>)>,
}

impl Ignore {
    /// Parses a file. Every text is valid.
    pub fn parse(text: &str) -> Self {
        let mut rules = Vec::new();
        for line in text.strip_prefix('\u{feff}').unwrap_or(text).lines() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (back, pattern) = line.strip_prefix('!').map_or((false, line), |rest| (true, rest.trim()));
            let parts: Vec<String> =
                pattern.split('/').filter(|part| !matches!(*part, "" | ".")).map(str::to_owned).collect();
            if !parts.is_empty() {
                rules.push((back, parts));
            }
        }
        Self { rules }
    }

    /// Whether a path is left out.
    pub fn ignores(&self, path: &str) -> bool {
        let names: Vec<&str> = path.split('/').collect();
        let mut ignored = false;
        for (back, pattern) in &self.rules {
            if (1..=names.len()).any(|end| parts_fit(pattern, &names[..end])) {
                ignored = !back;
            }
        }
        ignored
    }

    /// Whether something in an excluded directory may be an exception.
    pub fn takes_back(&self) -> bool {
        self.rules.iter().any(|(back, _)| *back)
    }
}

fn parts_fit(pattern: &[String], names: &[&str]) -> bool {
    match pattern.split_first() {
        None => names.is_empty(),
        Some((first, rest)) if first == "**" => (0..=names.len()).any(|skip| parts_fit(rest, &names[skip..])),
        Some((first, rest)) => names.split_first().is_some_and(|(name, more)| {
            name_fits(first.as_bytes(), name.as_bytes()) && parts_fit(rest, more)
        }),
    }
}

/// Whether a path matches a pattern with `*`, `?` and `[...]`, none of which matches a slash.
pub fn fits(pattern: &str, path: &str) -> bool {
    let (pattern, path): (Vec<&str>, Vec<&str>) = (pattern.split('/').collect(), path.split('/').collect());
    pattern.len() == path.len()
        && pattern.iter().zip(&path).all(|(pattern, name)| name_fits(pattern.as_bytes(), name.as_bytes()))
}

fn name_fits(pattern: &[u8], name: &[u8]) -> bool {
    // Where to continue after a mismatch: the last star may match one more byte.
    let (mut at, mut here, mut star) = (0, 0, None);
    while here < name.len() {
        let step = match pattern.get(at) {
            Some(b'*') => {
                star = Some((at + 1, here));
                at += 1;
                continue;
            }
            Some(b'?') => Some(at + 1),
            Some(b'[') => class(&pattern[at..], name[here]).map(|length| at + length),
            Some(b'\\') if pattern.get(at + 1) == Some(&name[here]) => Some(at + 2),
            Some(byte) if *byte == name[here] => Some(at + 1),
            Some(_) | None => None,
        };
        match (step, star) {
            (Some(next), _) => (at, here) = (next, here + 1),
            (None, Some((after, from))) => {
                (at, here) = (after, from + 1);
                star = Some((after, from + 1));
            }
            (None, None) => return false,
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// Length of the class if it contains the byte; `None` if it does not.
fn class(pattern: &[u8], byte: u8) -> Option<usize> {
    let end = pattern.iter().skip(1).position(|other| *other == b']')? + 1;
    let inside = &pattern[1..end];
    let (inside, negated) = match inside.first() {
        Some(b'^' | b'!') => (&inside[1..], true),
        _ => (inside, false),
    };
    let mut found = false;
    let mut at = 0;
    while at < inside.len() {
        if at + 2 < inside.len() && inside[at + 1] == b'-' {
            found |= (inside[at]..=inside[at + 2]).contains(&byte);
            at += 3;
        } else {
            found |= inside[at] == byte;
            at += 1;
        }
    }
    (found != negated).then_some(end + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_rule_that_fits_decides() {
        let ignore =
            Ignore::parse("# no\n*.log\ntarget/\n**/node_modules\n/docs/*\n!docs/keep.md\n!important.log\n");
        for (path, expected) in [
            ("a.log", true),
            ("deep/a.log", false),
            ("important.log", false),
            ("target", true),
            ("target/debug/x", true),
            ("web/node_modules/y", true),
            ("node_modules", true),
            ("docs", false),
            ("docs/a.md", true),
            ("docs/keep.md", false),
            ("src/main.rs", false),
        ] {
            assert_eq!(ignore.ignores(path), expected, "{path}");
        }
        assert!(ignore.takes_back());
        assert!(!Ignore::parse("*").takes_back() && Ignore::parse("*").ignores("a/b"));
    }

    #[test]
    fn patterns_fit_names_and_no_slashes() {
        for (pattern, path, expected) in [
            ("*.txt", "a.txt", true),
            ("*.txt", "a/b.txt", false),
            ("a/*", "a/b", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("*a*b*", "xxaxxbxx", true),
            ("*a*b", "xxaxxbxx", false),
            ("*", "", true),
        ] {
            assert_eq!(fits(pattern, path), expected, "{pattern} {path}");
        }
    }
}
