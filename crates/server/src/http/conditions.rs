//! Conditional requests and ranges (RFC 9110), based on the metadata that a guest reports for a file. Pure.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, header};
use wire::files::{ByteRange, Condition, FileStat, FileVersion, Timestamp};

use crate::http::error::ApiError;

/// The last second of the year 9999: dates in headers cannot be later.
const DATE_MAX: i64 = 253_402_300_799;

/// The entity tag of a version.
pub fn etag(version: &FileVersion) -> String {
    let FileVersion { inode, modified: Timestamp { seconds, nanoseconds }, size } = version;
    format!("\"{inode:x}-{seconds:x}-{nanoseconds:x}-{size:x}\"")
}

/// The version of an entity tag, if it is one of ours.
fn version(tag: &str) -> Option<FileVersion> {
    let inside = tag.strip_prefix('"')?.strip_suffix('"')?;
    let mut parts = inside.split('-');
    let inode = u64::from_str_radix(parts.next()?, 16).ok()?;
    // Written as the bits of a signed number.
    let seconds = u64::from_str_radix(parts.next()?, 16).ok()? as i64;
    let nanoseconds = u32::from_str_radix(parts.next()?, 16).ok()?;
    let size = u64::from_str_radix(parts.next()?, 16).ok()?;
    let version = FileVersion { inode, modified: Timestamp { seconds, nanoseconds }, size };
    // Only one spelling per version, since tags are compared as text.
    (parts.next().is_none() && etag(&version) == tag).then_some(version)
}

/// A time in the format of headers; `None` for a time that the format cannot express.
pub fn http_date(time: &Timestamp) -> Option<String> {
    let seconds = u64::try_from(time.seconds).ok().filter(|_| time.seconds <= DATE_MAX)?;
    Some(httpdate::fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds)))
}

/// Tags in a header.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Tags {
    Any,
    /// Weak tags without their prefix, for the comparison that allows them.
    These {
        strong: Vec<String>,
        weak: Vec<String>,
    },
}

impl Tags {
    fn read(headers: &HeaderMap, name: header::HeaderName) -> Option<Self> {
        let mut values = headers.get_all(name).iter().peekable();
        values.peek()?;
        let (mut strong, mut weak) = (Vec::new(), Vec::new());
        // Our tags contain no comma; a foreign tag that is split matches nothing, as it would whole.
        for tag in values.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')) {
            match tag.trim() {
                "*" => return Some(Self::Any),
                tag => match tag.strip_prefix("W/") {
                    Some(tag) => weak.push(tag.to_owned()),
                    None => strong.push(tag.to_owned()),
                },
            }
        }
        Some(Self::These { strong, weak })
    }

    fn holds_strongly(&self, tag: &str) -> bool {
        match self {
            Self::Any => true,
            Self::These { strong, .. } => strong.iter().any(|known| known == tag),
        }
    }

    fn holds_weakly(&self, tag: &str) -> bool {
        match self {
            Self::Any => true,
            Self::These { strong, weak } => strong.iter().chain(weak).any(|known| known == tag),
        }
    }
}

/// The conditions of a request.
#[derive(Debug)]
pub struct Conditions {
    matches: Option<Tags>,
    none_matches: Option<Tags>,
    modified_since: Option<SystemTime>,
    unmodified_since: Option<SystemTime>,
    range: Option<String>,
}

/// The result of checking the conditions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Proceed.
    GoOn,
    /// The caller has the current version.
    NotModified,
    /// A condition does not hold.
    Failed,
}

impl Conditions {
    /// Reads the headers. Headers that do not parse are ignored.
    pub fn read(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let date = |name| text(name).and_then(|value| httpdate::parse_http_date(value).ok());
        Self {
            matches: Tags::read(headers, header::IF_MATCH),
            none_matches: Tags::read(headers, header::IF_NONE_MATCH),
            modified_since: date(header::IF_MODIFIED_SINCE),
            unmodified_since: date(header::IF_UNMODIFIED_SINCE),
            range: text(header::IF_RANGE).map(str::to_owned),
        }
    }

    /// Whether the response may be that the caller has the current version.
    pub fn may_be_fresh(&self) -> bool {
        self.none_matches.is_some() || self.modified_since.is_some()
    }

    /// For reading, in the order of RFC 9110, 13.2.2.
    pub fn verdict(&self, stat: &FileStat) -> Verdict {
        let tag = etag(&stat.version());
        let modified = whole_seconds(&stat.modified);
        match (&self.matches, self.unmodified_since) {
            (Some(tags), _) if !tags.holds_strongly(&tag) => return Verdict::Failed,
            (None, Some(since)) if modified > since => return Verdict::Failed,
            (Some(_) | None, _) => {}
        }
        match (&self.none_matches, self.modified_since) {
            (Some(tags), _) if tags.holds_weakly(&tag) => Verdict::NotModified,
            (None, Some(since)) if modified <= since => Verdict::NotModified,
            (Some(_) | None, _) => Verdict::GoOn,
        }
    }

    /// Whether a range may be sent: the caller's part belongs to this version of the file.
    pub fn range_holds(&self, stat: &FileStat) -> bool {
        match &self.range {
            None => true,
            Some(tag) if tag.starts_with('"') => *tag == etag(&stat.version()),
            // A date cannot distinguish versions from the same second; a weak tag never counts.
            Some(_) => false,
        }
    }

    /// For writing: the condition that the guest checks when it replaces the file.
    pub fn for_write(&self) -> Result<Condition, ApiError> {
        let refuse = |field, why| Err(ApiError::invalid(field, why));
        if self.unmodified_since.is_some() {
            return refuse("If-Unmodified-Since", "a time is too coarse to write by: use If-Match");
        }
        match (&self.matches, &self.none_matches) {
            (None, None) => Ok(Condition::None),
            (None, Some(Tags::Any)) => Ok(Condition::Absent),
            (Some(Tags::Any), None) => Ok(Condition::Present),
            (Some(Tags::These { strong, .. }), None) => {
                Ok(Condition::Is(strong.iter().filter_map(|tag| version(tag)).collect()))
            }
            (_, Some(_)) => refuse("If-None-Match", "a write takes `*`, and not together with If-Match"),
        }
    }
}

/// Rounded down to seconds, as in headers.
fn whole_seconds(time: &Timestamp) -> SystemTime {
    let since = Duration::from_secs(time.seconds.clamp(0, DATE_MAX) as u64);
    UNIX_EPOCH + since
}

/// One range of bytes. `None`: the header does not parse or has several ranges, and is ignored.
pub fn parse_range(text: &str) -> Option<ByteRange> {
    let (unit, ranges) = text.split_once('=')?;
    if !unit.trim().eq_ignore_ascii_case("bytes") || ranges.contains(',') {
        return None;
    }
    let (first, last) = ranges.trim().split_once('-')?;
    match (number(first)?, number(last)?) {
        (None, None) => None,
        (None, Some(count)) => Some(ByteRange::Last(count)),
        (Some(start), None) => Some(ByteRange::Span { start, end: None }),
        (Some(start), Some(last)) if start > last => None,
        (Some(start), Some(last)) => Some(ByteRange::Span { start, end: Some(last.saturating_add(1)) }),
    }
}

/// A number of any length: one that is too large counts as the largest. `Some(None)`: the text is empty.
#[allow(clippy::option_option)] // "Not a number" and "no number" are different answers.
fn number(text: &str) -> Option<Option<u64>> {
    let text = text.trim();
    if text.is_empty() {
        return Some(None);
    }
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| Some(text.parse().unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use wire::files::FileKind;

    use super::*;

    fn stat(seconds: i64) -> FileStat {
        FileStat {
            kind: FileKind::File,
            size: 10,
            mode: 0o644,
            uid: 0,
            gid: 0,
            inode: 7,
            links: 1,
            modified: Timestamp { seconds, nanoseconds: 5 },
            target: None,
        }
    }

    fn conditions(headers: &[(&str, &str)]) -> Conditions {
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            let name: header::HeaderName = name.parse().expect("a name");
            map.append(name, value.parse().expect("a value"));
        }
        Conditions::read(&map)
    }

    #[test]
    fn tags_of_ours_are_read_back_and_others_are_not() {
        for seconds in [0, 1_700_000_000, -5, i64::MIN] {
            let version_ = stat(seconds).version();
            assert_eq!(version(&etag(&version_)), Some(version_), "{seconds}");
        }
        for other in
            ["", "\"\"", "\"x\"", "\"1-2-3\"", "\"1-2-3-4-5\"", "\"01-2-3-4\"", "1-2-3-4", "\"A-2-3-4\""]
        {
            assert_eq!(version(other), None, "{other}");
        }
    }

    #[track_caller]
    fn check(headers: &[(&str, &str)], expected: Verdict) {
        // 2023-11-14T22:13:20Z
        assert_eq!(conditions(headers).verdict(&stat(1_700_000_000)), expected, "{headers:?}");
    }

    #[test]
    fn conditions_are_weighed_in_their_order() {
        let tag = etag(&stat(1_700_000_000).version());
        let (own, weak, both) = (tag.as_str(), format!("W/{tag}"), format!("\"x\", {tag}"));
        let (same, later, earlier) = (
            "Tue, 14 Nov 2023 22:13:20 GMT",
            "Wed, 15 Nov 2023 22:13:20 GMT",
            "Mon, 13 Nov 2023 22:13:20 GMT",
        );
        check(&[], Verdict::GoOn);
        check(&[("if-none-match", own)], Verdict::NotModified);
        check(&[("if-none-match", &weak)], Verdict::NotModified);
        check(&[("if-none-match", &both)], Verdict::NotModified);
        check(&[("if-none-match", "\"x\""), ("if-none-match", own)], Verdict::NotModified);
        check(&[("if-none-match", "*")], Verdict::NotModified);
        check(&[("if-none-match", "\"x\"")], Verdict::GoOn);
        check(&[("if-match", own)], Verdict::GoOn);
        check(&[("if-match", &weak)], Verdict::Failed);
        check(&[("if-match", "\"x\"")], Verdict::Failed);
        check(&[("if-match", "*")], Verdict::GoOn);
        check(&[("if-modified-since", same)], Verdict::NotModified);
        check(&[("if-modified-since", later)], Verdict::NotModified);
        check(&[("if-modified-since", earlier)], Verdict::GoOn);
        check(&[("if-unmodified-since", same)], Verdict::GoOn);
        check(&[("if-unmodified-since", earlier)], Verdict::Failed);
        // Tags take precedence over dates.
        check(&[("if-none-match", "\"x\""), ("if-modified-since", later)], Verdict::GoOn);
        check(&[("if-match", own), ("if-unmodified-since", earlier)], Verdict::GoOn);
        check(&[("if-modified-since", "yesterday")], Verdict::GoOn);
    }

    #[test]
    fn a_range_is_given_only_of_the_file_that_the_caller_has_a_part_of() {
        let own = etag(&stat(0).version());
        assert!(conditions(&[]).range_holds(&stat(0)));
        assert!(conditions(&[("if-range", &own)]).range_holds(&stat(0)));
        assert!(!conditions(&[("if-range", &own)]).range_holds(&stat(1)));
        assert!(!conditions(&[("if-range", &format!("W/{own}"))]).range_holds(&stat(0)));
    }

    #[test]
    fn ranges_are_read_whatever_their_numbers_are() {
        let span = |start, end| Some(ByteRange::Span { start, end });
        for (text, expected) in [
            ("bytes=0-0", span(0, Some(1))),
            ("bytes=5-", span(5, None)),
            ("BYTES = 5-9", span(5, Some(10))),
            ("bytes=-5", Some(ByteRange::Last(5))),
            ("bytes=0-18446744073709551615", span(0, Some(u64::MAX))),
            ("bytes=99999999999999999999999-", span(u64::MAX, None)),
            ("bytes=0-1,5-6", None),
            ("bytes=9-5", None),
            ("bytes=-", None),
            ("bytes=a-b", None),
            ("bytes=+1-2", None),
            ("bytes=--1", None),
            ("lines=0-1", None),
            ("bytes", None),
        ] {
            assert_eq!(parse_range(text), expected, "{text}");
        }
    }

    #[test]
    fn what_a_write_may_depend_on_is_told_to_the_guest() {
        let own = stat(3).version();
        assert_eq!(conditions(&[]).for_write().expect("it is fine"), Condition::None);
        assert_eq!(conditions(&[("if-none-match", "*")]).for_write().expect("it is fine"), Condition::Absent);
        assert_eq!(conditions(&[("if-match", "*")]).for_write().expect("it is fine"), Condition::Present);
        let is = conditions(&[("if-match", &format!("{}, \"other\"", etag(&own)))]).for_write();
        assert_eq!(is.expect("it is fine"), Condition::Is(vec![own]));
        assert_eq!(
            conditions(&[("if-match", "\"other\"")]).for_write().expect("it is fine"),
            Condition::Is(Vec::new())
        );
        assert!(conditions(&[("if-none-match", "\"x\"")]).for_write().is_err());
        assert!(conditions(&[("if-match", "*"), ("if-none-match", "*")]).for_write().is_err());
    }

    #[test]
    fn dates_that_headers_cannot_have_are_left_out() {
        let date = |seconds| http_date(&Timestamp { seconds, nanoseconds: 0 });
        assert_eq!(date(0).as_deref(), Some("Thu, 01 Jan 1970 00:00:00 GMT"));
        assert_eq!((date(-1), date(i64::MAX)), (None, None));
        assert!(date(DATE_MAX).is_some());
    }
}
