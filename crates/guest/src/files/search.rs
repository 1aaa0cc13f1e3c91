//! Finding files by name, and lines by what is in them.
//!
//! All work is limited, and the result says which limit ended it. The search does not enter virtual file systems
//! (`/proc`, `/sys`) from outside: they have no end, and reading some of their files blocks.

use std::ffi::CStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use regex_automata::Input;
use regex_automata::meta::Regex;
use regex_automata::util::syntax;
use rustix::fs::{FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use wire::files::{
    Cut, FileDone, FileEntry, FileError, FileErrorKind, Grep, GrepMatch, GrepWith, MATCH_TEXT_MAX,
    SearchLimits,
};

use super::list::target_of;
use super::pattern::Pattern;
use super::place::open_directory;
use super::transfer::open_regular;
use super::walk::{Found, Next, walk};
use super::{At, Records, failure, stat_of};

/// Size of the read buffer. A longer line is searched in pieces.
const BLOCK: usize = 256 * 1024;
/// Entries between two checks of the clock.
const CLOCK_EVERY: u64 = 64;
/// The longest regular expression in bytes.
const REGEX_MAX: usize = 4096;
/// Memory limits for a compiled regular expression and for searching with it.
const REGEX_SIZE_MAX: usize = 1024 * 1024;
/// A NUL within this many bytes makes a file binary; a later NUL ends the search of the file.
const BINARY_LOOK: usize = 8 * 1024;
/// How much of a long line before the match is returned.
const BEFORE_MATCH_MAX: usize = 256;

/// Progress of a search.
struct Budget {
    limits: SearchLimits,
    until: Instant,
    entries: u64,
    bytes: u64,
    matches: u32,
    skipped: u64,
    /// Of those, the files that had been searched in part.
    mixed: u64,
    cut: Option<Cut>,
}

impl Budget {
    fn new(limits: &SearchLimits) -> Self {
        // If the deadline overflows, there is none.
        let now = Instant::now();
        let until = now.checked_add(Duration::from_millis(limits.milliseconds));
        let until = until.unwrap_or(now + Duration::from_secs(86_400));
        Self { limits: *limits, until, entries: 0, bytes: 0, matches: 0, skipped: 0, mixed: 0, cut: None }
    }

    /// Counts an entry. Returns whether to continue.
    fn entry(&mut self) -> bool {
        if self.entries >= self.limits.entries {
            self.cut = Some(Cut::Entries);
        } else if self.entries.is_multiple_of(CLOCK_EVERY) && Instant::now() >= self.until {
            self.cut = Some(Cut::Time);
        } else {
            self.entries += 1;
        }
        self.cut.is_none()
    }

    /// Counts a match. Returns whether it may be returned.
    fn found(&mut self) -> bool {
        if self.matches >= self.limits.matches {
            self.cut = Some(Cut::Matches);
        } else {
            self.matches += 1;
        }
        self.cut.is_none()
    }

    fn done(self) -> FileDone {
        FileDone::Searched { entries: self.entries, bytes: self.bytes, skipped: self.skipped, cut: self.cut }
    }
}

/// Paths that match.
pub fn glob(root: &[u8], pattern: &[u8], limits: &SearchLimits) -> Result<FileDone, FileError> {
    let pattern = Pattern::parse(pattern).map_err(|why| failure(FileErrorKind::InvalidPattern, root, why))?;
    let top = open_directory(root)?;
    let device = rustix::fs::fstat(&top).at(root)?.st_dev;
    let mut budget = Budget::new(limits);
    let mut records = Records::default();
    let walked = walk(top, &mut |found| {
        if !budget.entry() {
            return Ok(Next::Stop);
        }
        let standing = pattern.look_at(found.path, limits.hidden);
        if standing.matches {
            if !budget.found() {
                return Ok(Next::Stop);
            }
            let target = target_of(found.parent, found.name, found.stat);
            records.put(&FileEntry { name: found.path.to_vec(), stat: stat_of(found.stat, target) })?;
        }
        Ok(if standing.leads_on && !is_made_up(&found, device) { Next::Enter } else { Next::Pass })
    })?;
    budget.skipped += walked.skipped;
    records.flush()?;
    Ok(budget.done())
}

/// Whether it is the root of a virtual file system.
fn is_made_up(found: &Found<'_>, device: u64) -> bool {
    const MADE_UP: [u32; 6] = [
        0x9fa0,      // proc
        0x6265_6572, // sysfs
        0x0027_e0eb, // cgroup
        0x6367_7270, // cgroup2
        0x6462_6720, // debugfs
        0x7472_6163, // tracefs
    ];
    if found.stat.st_dev == device || FileType::from_raw_mode(found.stat.st_mode) != FileType::Directory {
        return false;
    }
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let kind = rustix::fs::openat(found.parent, found.name, flags, Mode::empty())
        .and_then(rustix::fs::fstatfs)
        .map(|stat| stat.f_type as u32);
    kind.is_ok_and(|kind| MADE_UP.contains(&kind))
}

/// Lines that match.
pub fn grep(root: &[u8], grep: &Grep) -> Result<FileDone, FileError> {
    Ok(find_lines(root, grep, &[], CarriageReturns::Drop)?.done())
}

/// Lines that match, with more options.
pub fn grep_with(root: &[u8], with: &GrepWith) -> Result<FileDone, FileError> {
    let returns = if with.carriage_returns { CarriageReturns::Keep } else { CarriageReturns::Drop };
    let budget = find_lines(root, &with.grep, &with.exclude_directories, returns)?;
    let Budget { entries, bytes, skipped, cut, mixed, .. } = budget;
    Ok(FileDone::Grepped { entries, bytes, skipped, cut, mixed })
}

/// Whether to return the CR at the end of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CarriageReturns {
    Keep,
    Drop,
}

fn find_lines(
    root: &[u8],
    grep: &Grep,
    exclude: &[Vec<u8>],
    carriage_returns: CarriageReturns,
) -> Result<Budget, FileError> {
    let invalid = |why: &str| failure(FileErrorKind::InvalidPattern, root, why);
    let mut searcher = Searcher {
        regex: compile(grep).map_err(|why| invalid(&why))?,
        by_line: grep.regex && (grep.pattern.contains("\\A") || grep.pattern.contains("\\z")),
        buffer: vec![0; BLOCK],
        records: Records::default(),
        budget: Budget::new(&grep.limits),
        carriage_returns,
    };
    let exclude =
        exclude.iter().map(|text| Pattern::parse(text)).collect::<Result<Vec<_>, &str>>().map_err(invalid)?;
    let include = grep
        .include
        .iter()
        .map(|text| Ok((Pattern::parse(text)?, Pattern::has_slash(text))))
        .collect::<Result<Vec<_>, &str>>()
        .map_err(invalid)?;
    let stat = rustix::fs::stat(root).at(root)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        let (file, _) = open_regular(root)?;
        searcher.budget.entry();
        searcher.search(file.as_fd(), root)?;
        searcher.records.flush()?;
        return Ok(searcher.budget);
    }
    let top = open_directory(root)?;
    let hidden = grep.limits.hidden;
    let walked = walk(top, &mut |found| {
        if !searcher.budget.entry() {
            return Ok(Next::Stop);
        }
        let name = found.name.to_bytes();
        if !hidden && name.starts_with(b".") {
            return Ok(Next::Pass);
        }
        match FileType::from_raw_mode(found.stat.st_mode) {
            FileType::Directory if is_made_up(&found, stat.st_dev) => return Ok(Next::Pass),
            FileType::Directory if exclude.iter().any(|pattern| pattern.look_at(name, true).matches) => {
                return Ok(Next::Pass);
            }
            FileType::Directory => return Ok(Next::Enter),
            FileType::RegularFile => {}
            _ => return Ok(Next::Pass),
        }
        let wanted = include.is_empty()
            || include.iter().any(|(pattern, by_path)| {
                pattern.look_at(if *by_path { found.path } else { name }, true).matches
            });
        if wanted {
            searcher.search_entry(&found, root)?;
        }
        Ok(if searcher.budget.cut.is_some() { Next::Stop } else { Next::Pass })
    })?;
    searcher.budget.skipped += walked.skipped;
    searcher.records.flush()?;
    Ok(searcher.budget)
}

fn compile(grep: &Grep) -> Result<Regex, String> {
    if grep.pattern.is_empty() {
        return Err("the pattern is empty".into());
    }
    if grep.pattern.len() > REGEX_MAX {
        return Err(format!("the pattern is longer than {REGEX_MAX} bytes"));
    }
    let text = if grep.regex { grep.pattern.clone() } else { escaped(&grep.pattern) };
    let syntax = syntax::Config::new()
        .unicode(false)
        .utf8(false)
        .multi_line(true)
        .case_insensitive(grep.ignore_case)
        .nest_limit(50);
    let config = Regex::config()
        .utf8_empty(false)
        .nfa_size_limit(Some(REGEX_SIZE_MAX))
        .hybrid_cache_capacity(REGEX_SIZE_MAX);
    Regex::builder().syntax(syntax).configure(config).build(&text).map_err(|error| {
        match error.syntax_error() {
            Some(error) => error.to_string(),
            None => error.to_string(),
        }
    })
}

/// The text as a pattern, with every special character escaped.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len() + 8);
    for character in text.chars() {
        if character.is_ascii_punctuation() {
            escaped.push('\\');
        }
        escaped.push(character);
    }
    escaped
}

struct Searcher {
    regex: Regex,
    /// The expression refers to the ends of the text, which for a line are its own ends.
    by_line: bool,
    buffer: Vec<u8>,
    records: Records,
    budget: Budget,
    carriage_returns: CarriageReturns,
}

/// Position of the start of the buffer in the file.
#[derive(Default)]
struct Position {
    /// Lines that ended before it.
    lines: u64,
    /// Bytes of the current line before it: the line is longer than the buffer.
    column: u64,
    /// The line in which the buffer begins was returned already.
    told: bool,
}

impl Searcher {
    fn search_entry(&mut self, found: &Found<'_>, root: &[u8]) -> Result<(), FileError> {
        let Some(file) = open_file(found.parent, found.name) else {
            self.budget.skipped += 1;
            return Ok(());
        };
        let path = join(root, found.path);
        self.search(file.as_fd(), &path)
    }

    /// Searches one file. A file that cannot be read counts as skipped, as a binary one does.
    fn search(&mut self, file: BorrowedFd<'_>, path: &[u8]) -> Result<(), FileError> {
        let mut position = Position::default();
        let (mut held, mut seen) = (0, 0);
        loop {
            if Instant::now() >= self.budget.until {
                self.budget.cut = Some(Cut::Time);
                return Ok(());
            }
            let left = self.budget.limits.bytes.saturating_sub(self.budget.bytes);
            if left == 0 {
                self.budget.cut = Some(Cut::Bytes);
                return Ok(());
            }
            let room = (self.buffer.len() - held).min(usize::try_from(left).unwrap_or(usize::MAX));
            let length = match rustix::io::read(file, &mut self.buffer[held..held + room]) {
                Ok(length) => length,
                Err(Errno::INTR) => continue,
                Err(_) => {
                    self.budget.skipped += 1;
                    return Ok(());
                }
            };
            self.budget.bytes += length as u64;
            let end = held + length;
            if let Some(at) = memchr::memchr(0, &self.buffer[held..end]) {
                self.budget.skipped += 1;
                self.budget.mixed += u64::from(seen + at >= BINARY_LOOK);
                return Ok(());
            }
            seen = seen.saturating_add(length);
            let over = length == 0;
            // Whole lines, unless the file or the buffer ends.
            let newline = self.buffer[..end].iter().rposition(|byte| *byte == b'\n');
            let ready = match newline {
                Some(at) if !over => at + 1,
                None if !over && end < self.buffer.len() => 0,
                Some(_) | None => end,
            };
            self.search_block(ready, &mut position, path)?;
            if self.budget.cut.is_some() || over {
                return Ok(());
            }
            self.buffer.copy_within(ready..end, 0);
            held = end - ready;
        }
    }

    /// Searches the first `ready` bytes of the buffer, and advances the position past them.
    fn search_block(&mut self, ready: usize, position: &mut Position, path: &[u8]) -> Result<(), FileError> {
        let mut counted = 0;
        let mut at = 0;
        while at < ready {
            let block = &self.buffer[..ready];
            if position.told && position.column > 0 {
                // The rest of a long line that was returned already.
                at = line_end(block, 0) + 1;
                position.told = false;
                if at > ready {
                    position.told = true;
                    break;
                }
                continue;
            }
            let found = if self.by_line {
                let end = line_end(block, at);
                self.regex.find(&block[at..end]).map(|found| (at + found.start(), at, end))
            } else {
                match self.regex.find(Input::new(block).range(at..)) {
                    None => break,
                    Some(found) => {
                        // A match may span lines; only matches within one line count.
                        let (start, end) = (line_start(block, found.start()), line_end(block, found.start()));
                        let start = start.max(at);
                        self.regex
                            .find(&block[start..end])
                            .map(|found| (start + found.start(), start, end))
                            .or(Some((usize::MAX, start, end)))
                    }
                }
            };
            let (hit, start, end) = found.unwrap_or_else(|| (usize::MAX, at, line_end(block, at)));
            if hit != usize::MAX && !(start == end && start == ready) {
                position.lines += count(&block[counted..start]);
                counted = start;
                if !self.budget.found() {
                    return Ok(());
                }
                let front = if start == 0 { position.column } else { 0 };
                let line = match self.carriage_returns {
                    CarriageReturns::Keep => &block[start..end],
                    CarriageReturns::Drop => {
                        block[start..end].strip_suffix(b"\r").unwrap_or(&block[start..end])
                    }
                };
                let record = told(path, position.lines + 1, front, line, hit - start);
                self.records.put(&record)?;
                position.told = end == ready;
            }
            at = end + 1;
        }
        let block = &self.buffer[..ready];
        let newline = block.iter().rposition(|byte| *byte == b'\n');
        position.lines += count(&block[counted..]);
        match newline {
            Some(last) => {
                position.column = (ready - last - 1) as u64;
                position.told &= position.column > 0;
            }
            None => position.column += ready as u64,
        }
        Ok(())
    }
}

/// The record of a match. `front` bytes of its line came before `line`.
fn told(path: &[u8], number: u64, front: u64, line: &[u8], hit: usize) -> GrepMatch {
    let hit = hit.min(line.len());
    let from = if line.len() > MATCH_TEXT_MAX { hit.saturating_sub(BEFORE_MATCH_MAX) } else { 0 };
    let to = line.len().min(from + MATCH_TEXT_MAX);
    GrepMatch {
        path: path.to_vec(),
        line: number,
        column: front + hit as u64,
        text: line[from..to].to_vec(),
        text_start: front + from as u64,
        text_cut: to < line.len(),
    }
}

fn line_start(block: &[u8], at: usize) -> usize {
    block[..at].iter().rposition(|byte| *byte == b'\n').map_or(0, |newline| newline + 1)
}

fn line_end(block: &[u8], at: usize) -> usize {
    block[at..].iter().position(|byte| *byte == b'\n').map_or(block.len(), |newline| at + newline)
}

fn count(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

fn join(root: &[u8], path: &[u8]) -> Vec<u8> {
    let root = root.strip_suffix(b"/").unwrap_or(root);
    [root, b"/", path].concat()
}

/// A regular file, or nothing.
fn open_file(parent: BorrowedFd<'_>, name: &CStr) -> Option<std::os::fd::OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::openat(parent, name, flags, Mode::empty()).ok()?;
    let stat: Stat = rustix::fs::fstat(&file).ok()?;
    (FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile).then_some(file)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use wire::files::take_record;

    use super::*;

    const LIMITS: SearchLimits = SearchLimits {
        matches: u32::MAX,
        entries: u64::MAX,
        bytes: u64::MAX,
        milliseconds: u64::MAX,
        hidden: true,
    };

    fn wish(pattern: &str, regex: bool) -> Grep {
        let pattern = pattern.into();
        Grep { root: b"/".to_vec(), pattern, regex, ignore_case: false, include: Vec::new(), limits: LIMITS }
    }

    /// The matching lines, with their numbers and columns.
    fn found(pattern: &str, text: &[u8], block: usize) -> Vec<(u64, u64, Vec<u8>)> {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(text).expect("it takes bytes");
        std::io::Seek::rewind(&mut file).expect("it goes back");
        let grep = wish(pattern, true);
        let mut searcher = Searcher {
            regex: compile(&grep).expect("it is an expression"),
            by_line: pattern.contains("\\A") || pattern.contains("\\z"),
            buffer: vec![0; block],
            records: Records::default(),
            budget: Budget::new(&LIMITS),
            carriage_returns: CarriageReturns::Drop,
        };
        searcher.search(file.as_fd(), b"/f").expect("it is searched");
        let (mut rest, mut all) = (searcher.records.gathered.as_slice(), Vec::new());
        while let Some((found, length)) = take_record::<GrepMatch>(rest).expect("it parses") {
            rest = &rest[length..];
            all.push((found.line, found.column, found.text));
        }
        all
    }

    #[track_caller]
    fn check(pattern: &str, text: &str, expected: &[(u64, u64, &str)]) {
        for block in [BLOCK, 16] {
            let all = found(pattern, text.as_bytes(), block);
            let all: Vec<_> = all
                .iter()
                .map(|(line, at, text)| (*line, *at, std::str::from_utf8(text).expect("text")))
                .collect();
            assert_eq!(all, expected, "`{pattern}` in {text:?}, {block} bytes at once");
        }
    }

    #[test]
    fn lines_are_found_once_with_their_numbers() {
        check("b", "abc\nxyz\nbb\n", &[(1, 1, "abc"), (3, 0, "bb")]);
        check("b", "abc\nxyz\nbb", &[(1, 1, "abc"), (3, 0, "bb")]);
        check("^x", "ax\nxa\n", &[(2, 0, "xa")]);
        check("c$", "abc\ncb\n", &[(1, 2, "abc")]);
        check("z", "a\r\nz\r\n", &[(2, 0, "z")]);
        check("q", "", &[]);
        check("q", "\n\n\nq", &[(4, 0, "q")]);
    }

    #[test]
    fn a_match_does_not_lead_over_the_end_of_a_line() {
        check("a\\s+b", "a\nb\na b\n", &[(3, 0, "a b")]);
        check("[^x]b", "a\nb\nab\n", &[(3, 0, "ab")]);
        check("\\Aa", "ba\nab\n", &[(2, 0, "ab")]);
        check("a\\z", "ba\nab\n", &[(1, 1, "ba")]);
    }

    #[test]
    fn every_line_matches_an_expression_that_matches_nothing_in_particular() {
        check("x*", "a\n\nb", &[(1, 0, "a"), (2, 0, ""), (3, 0, "b")]);
    }

    #[test]
    fn a_line_longer_than_the_buffer_is_found_in_its_pieces_and_told_once() {
        let line = format!("{}needle{}", "x".repeat(100), "y".repeat(100));
        let text = format!("first\n{line}\nneedle\n");
        let all = found("need", text.as_bytes(), 64);
        assert_eq!(all.iter().map(|(line, _, _)| *line).collect::<Vec<_>>(), [2, 3]);
        assert_eq!(all[0].1, 100);
    }

    #[test]
    fn binary_files_are_passed_over() {
        assert_eq!(found("a", b"a\0b\n", BLOCK), []);
        assert_eq!(found("a", &[&[b'a'; 20][..], b"\n\0\n"].concat(), BLOCK), []);
        let late = [&b"a\n"[..], &[b'x'; 30], b"\n\0\na\n"].concat();
        assert_eq!(found("a", &late, 16), [(1, 0, b"a".to_vec())], "matches before the NUL are returned");
    }

    #[test]
    fn a_literal_is_taken_for_itself() {
        let regex = compile(&wish("a.b*[", false)).expect("it is an expression");
        assert!(regex.is_match("xa.b*[") && !regex.is_match("aXb"));
    }

    #[test]
    fn expressions_that_would_be_too_large_are_refused() {
        for pattern in ["(((a{100}){100}){100}){100}", "[", "(", "a{5,2}", "", &"a".repeat(REGEX_MAX + 1)] {
            assert!(compile(&wish(pattern, true)).is_err(), "{pattern:.20}");
        }
        assert!(compile(&wish(&"(".repeat(200), true)).is_err());
    }

    #[test]
    fn a_long_line_is_told_in_part() {
        let line = [&[b'x'; 5000][..], b"hit", &[b'y'; 5000]].concat();
        let told = told(b"/f", 1, 0, &line, 5000);
        assert_eq!((told.column, told.text_start), (5000, 5000 - BEFORE_MATCH_MAX as u64));
        assert!(told.text_cut && told.text.len() == MATCH_TEXT_MAX);
    }
}
