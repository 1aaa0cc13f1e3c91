//! A page of the documents: its examples, its headings, its links, and how an expected output is compared.
//!
//! Parses only the Markdown that this repository uses: fenced blocks, `#` headings, inline links, tables.
//! [`crate::reader`] runs the examples.
//!
//! Rules for examples:
//!
//! - `console`: lines that begin with `$ ` are typed, one after the other, and what is below each is what it prints, on
//!   both streams. A line that ends with `\` goes on in the next. `…` stands for anything in its line, and alone on a
//!   line for any number of lines. A UUID stands for another, the same one for the same on the whole page, also in
//!   commands. Any run of spaces stands for any other, since columns move. A command that is not followed by `$ echo $?` ends with 0. What a command with `&` at its end prints is
//!   waited for.
//! - `sh`: pasted as a whole into the same shell, and every line of it must succeed.
//! - `python`: a program of its own, run with `python3`, and it must succeed.
//! - `json`: must be JSON.
//! - `toml`: all blocks of a page together are a configuration that `shoal config show` takes.
//! - A first line that is a comment with a file name and no more, as `# fetch.py`, makes any block a file of that name,
//!   for later examples to use.
//! - `text` is a picture.
//! - `<!-- not run: REASON -->` in the line above keeps an example from being run. These are counted.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// The prefix of the reason why an example is not run.
const NOT_RUN: &str = "<!-- not run: ";
/// Matches anything in the expected output.
const ANYTHING: &str = "…";

/// The folder of the repository.
pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("this package is in a folder of the repository")
        .into()
}

/// A page of the repository.
#[derive(Debug)]
pub struct Page {
    /// Path, relative to the repository.
    pub path: PathBuf,
    /// Its lines.
    pub lines: Vec<String>,
}

/// A fenced block.
#[derive(Debug, Clone)]
pub struct Block {
    /// Line number of its first fence, from 1.
    pub line: usize,
    /// Its kind, from the fence.
    pub kind: String,
    /// What is in it.
    pub lines: Vec<String>,
    /// Why it is not run, if there is a reason.
    pub not_run: Option<String>,
}

/// Something typed, and the expected result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Typed {
    /// In how many lines it may be.
    pub command: String,
    /// What it prints.
    pub expected: Vec<String>,
}

/// Target of a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    /// Line number, from 1.
    pub line: usize,
    /// As written.
    pub target: String,
}

impl Page {
    /// Reads one.
    #[track_caller]
    pub fn read(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        let text = fs::read_to_string(repository().join(&path))
            .unwrap_or_else(|error| panic!("cannot read {}: {error}", path.display()));
        Self { path, lines: text.lines().map(str::to_owned).collect() }
    }

    /// Every page of the repository: those beside the README, and all below `docs`, in order.
    pub fn all() -> Vec<Self> {
        let root = repository();
        let mut found = Vec::new();
        collect(&root.join("docs"), &mut found);
        for entry in fs::read_dir(&root).expect("the repository can be read").flatten() {
            if is_page(&entry.path()) {
                found.push(entry.path());
            }
        }
        found.sort();
        let own = |path: &PathBuf| path.strip_prefix(&root).expect("it was found there").to_owned();
        found.iter().map(|path| Self::read(own(path))).collect()
    }

    /// Its fenced blocks, in order.
    #[track_caller]
    pub fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut open: Option<(Block, usize)> = None;
        for (index, line) in self.lines.iter().enumerate() {
            let fence = line.trim_start().strip_prefix("```");
            match (&mut open, fence) {
                (Some((block, indent)), None) => {
                    block.lines.push(line.get(*indent..).unwrap_or("").to_owned())
                }
                (Some(_), Some(rest)) => {
                    assert_eq!(rest, "", "{}:{}: a fence inside a block", self.path.display(), index + 1);
                    blocks.extend(open.take().map(|(block, _)| block));
                }
                (None, Some(kind)) => {
                    let above = self.lines[..index].last();
                    let not_run =
                        above.and_then(|line| line.trim().strip_prefix(NOT_RUN)?.strip_suffix(" -->"));
                    let block = Block {
                        line: index + 1,
                        kind: kind.to_owned(),
                        lines: Vec::new(),
                        not_run: not_run.map(str::to_owned),
                    };
                    open = Some((block, line.len() - line.trim_start().len()));
                }
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{}: a block does not end", self.path.display());
        blocks
    }

    /// Lines of prose with their numbers, from 1: everything outside of blocks.
    pub fn prose(&self) -> Vec<(usize, &str)> {
        let mut inside = false;
        let mut prose = Vec::new();
        for (index, line) in self.lines.iter().enumerate() {
            if line.trim_start().starts_with("```") {
                inside = !inside;
            } else if !inside {
                prose.push((index + 1, line.as_str()));
            }
        }
        prose
    }

    /// The anchors of its headings, as common viewers generate them.
    pub fn anchors(&self) -> Vec<String> {
        let mut anchors: Vec<String> = Vec::new();
        for (_, line) in self.prose() {
            let Some(heading) = line.strip_prefix('#') else { continue };
            let anchor = anchor(heading.trim_start_matches('#').trim());
            let again = anchors.iter().filter(|other| **other == anchor).count();
            anchors.push(if again == 0 { anchor } else { format!("{anchor}-{again}") });
        }
        anchors
    }

    /// The targets of its links.
    pub fn links(&self) -> Vec<Link> {
        let mut links = Vec::new();
        for (line, text) in self.prose() {
            // Text between backticks is not a link.
            let text: String = text.split('`').step_by(2).collect::<Vec<_>>().join("x");
            for part in text.split("](").skip(1) {
                if let Some((target, _)) = part.split_once(')') {
                    links.push(Link { line, target: target.to_owned() });
                }
            }
        }
        links
    }

    /// The words in backticks in the last column of tables whose last column is called `title`, with their lines.
    pub fn last_column(&self, title: &str) -> Vec<(usize, String)> {
        let mut inside = false;
        let mut found = Vec::new();
        for (line, text) in self.prose() {
            let Some(row) = text.trim().strip_prefix('|').and_then(|row| row.strip_suffix('|')) else {
                inside = false;
                continue;
            };
            let last = row.rsplit(" |").next().unwrap_or("").rsplit("| ").next().unwrap_or("").trim();
            if inside {
                found.extend(last.split('`').skip(1).step_by(2).map(|word| (line, word.to_owned())));
            } else {
                inside = last == title;
            }
        }
        found
    }
}

impl Block {
    /// The name of the file that it becomes, if its first line gives one.
    pub fn file(&self) -> Option<&str> {
        let name = self.lines.first()?.strip_prefix("# ")?;
        let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
        (name.contains('.') && name.chars().all(is_name)).then_some(name)
    }

    /// All of it.
    pub fn text(&self) -> String {
        self.lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
    }

    /// What is typed in it, if it is a `console`.
    #[track_caller]
    pub fn typed(&self) -> Vec<Typed> {
        let mut typed: Vec<Typed> = Vec::new();
        let mut goes_on = false;
        for line in &self.lines {
            match line.strip_prefix("$ ") {
                Some(command) if !goes_on => {
                    typed.push(Typed { command: command.to_owned(), expected: Vec::new() });
                }
                _ => {
                    let last = typed.last_mut().expect("a console begins with a command");
                    if goes_on {
                        last.command.push('\n');
                        last.command.push_str(line);
                    } else {
                        last.expected.push(line.clone());
                    }
                }
            }
            let last = typed.last().expect("a console begins with a command");
            goes_on = last.expected.is_empty() && last.command.ends_with('\\');
        }
        typed
    }
}

/// The ids in a page's examples, and their counterparts in this run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ids(BTreeMap<String, String>);

impl Ids {
    /// Whether `found` matches `expected`, with placeholders. Remembers ids that appear for the first time.
    pub fn matches(&mut self, expected: &[String], found: &[String]) -> bool {
        let expected: Vec<String> = expected.iter().map(|line| plain(line)).collect();
        let found: Vec<String> = found.iter().map(|line| plain(line)).collect();
        match self.clone().lines(&expected, &found) {
            Some(after) => {
                *self = after;
                true
            }
            None => false,
        }
    }

    /// A command with its ids replaced by those of this run.
    pub fn meant(&self, command: &str) -> String {
        self.0.iter().fold(command.to_owned(), |text, (written, meant)| text.replace(written, meant))
    }

    fn lines(self, expected: &[String], found: &[String]) -> Option<Self> {
        let Some((first, rest)) = expected.split_first() else { return found.is_empty().then_some(self) };
        if first == ANYTHING {
            return (0..=found.len()).find_map(|skipped| self.clone().lines(rest, &found[skipped..]));
        }
        let (line, more) = found.split_first()?;
        self.line(first, line)?.lines(rest, more)
    }

    /// One line, with [`ANYTHING`] in it.
    fn line(self, expected: &str, found: &str) -> Option<Self> {
        if let Some(after) = expected.strip_prefix(ANYTHING) {
            let mut ends = found.char_indices().map(|(index, _)| index).chain([found.len()]);
            return ends.find_map(|index| self.clone().line(after, &found[index..]));
        }
        if let (Some((written, expected)), Some((met, found))) = (leading_uuid(expected), leading_uuid(found))
        {
            return self.bind(written, met)?.line(expected, found);
        }
        match (expected.chars().next(), found.chars().next()) {
            (None, None) => Some(self),
            (Some(one), Some(other)) if one == other => {
                self.line(&expected[one.len_utf8()..], &found[one.len_utf8()..])
            }
            _ => None,
        }
    }

    /// The same id always maps to the same id, and different ids to different ones.
    fn bind(mut self, written: &str, met: &str) -> Option<Self> {
        let known = self.0.get(written).map(String::as_str);
        let taken = self.0.values().any(|value| value == met);
        match known {
            Some(known) => (known == met).then_some(self),
            None if taken => None,
            None => {
                self.0.insert(written.to_owned(), met.to_owned());
                Some(self)
            }
        }
    }
}

/// A line with runs of spaces collapsed.
fn plain(line: &str) -> String {
    line.split(' ').filter(|word| !word.is_empty()).collect::<Vec<_>>().join(" ")
}

fn leading_uuid(text: &str) -> Option<(&str, &str)> {
    text.split_at_checked(UUID.len()).filter(|(start, _)| is_uuid(start.as_bytes()))
}

/// The shape of a UUID.
const UUID: &[u8] = b"xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx";

fn is_uuid(text: &[u8]) -> bool {
    text.iter().zip(UUID).all(|(byte, shape)| match shape {
        b'x' => byte.is_ascii_hexdigit(),
        _ => byte == shape,
    })
}

fn is_page(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "md")
}

fn collect(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).expect("the documents can be read").flatten() {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, found);
        } else if is_page(&path) {
            found.push(path);
        }
    }
}

fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.flat_map(char::to_lowercase).map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    fn page(text: &str) -> Page {
        Page { path: "page.md".into(), lines: lines(text) }
    }

    #[track_caller]
    fn check(expected: &str, found: &str, holds: bool) {
        assert_eq!(
            Ids::default().matches(&lines(expected), &lines(found)),
            holds,
            "{expected:?} and {found:?}"
        );
    }

    #[test]
    fn an_output_is_compared_line_by_line() {
        check("one\ntwo", "one\ntwo", true);
        check("one\ntwo", "one", false);
        check("one", "one\ntwo", false);
        check("", "", true);
        check("", "one", false);
    }

    #[test]
    fn an_ellipsis_stands_for_anything_in_its_line_or_for_any_lines() {
        check("took … ms", "took 12 ms", true);
        check("took … ms", "took 12 s", false);
        check("… and …", "a and b and c", true);
        check("one\n…\nfour", "one\ntwo\nthree\nfour", true);
        check("one\n…", "one", true);
        check("…\nfour", "one\nfive", false);
    }

    #[test]
    fn ids_and_columns_may_differ() {
        check(
            "ID  3f2b8c1e-90ab-4def-8123-456789abcdef     x",
            "ID 00000000-0000-4000-8000-000000000000  x",
            true,
        );
        check("3f2b8c1e-90ab-4def-8123-456789abcdef", "none", false);
        let (one, two) = ("00000000-0000-4000-8000-000000000001", "00000000-0000-4000-8000-000000000002");
        check(
            "3f2b8c1e-90ab-4def-8123-456789abcdef\n3f2b8c1e-90ab-4def-8123-456789abcdef",
            &format!("{one}\n{one}"),
            true,
        );
        check(
            "3f2b8c1e-90ab-4def-8123-456789abcdef\n3f2b8c1e-90ab-4def-8123-456789abcdef",
            &format!("{one}\n{two}"),
            false,
        );
        check(
            "3f2b8c1e-90ab-4def-8123-456789abcdef\n4f2b8c1e-90ab-4def-8123-456789abcdef",
            &format!("{one}\n{one}"),
            false,
        );
        let mut ids = Ids::default();
        assert!(
            ids.matches(&lines("…: 3f2b8c1e-90ab-4def-8123-456789abcdef"), &lines(&format!("made: {one}")))
        );
        assert_eq!(ids.meant("rm 3f2b8c1e-90ab-4def-8123-456789abcdef"), format!("rm {one}"));
        check("a b", "ab", false);
    }

    #[test]
    fn blocks_have_a_kind_a_line_and_a_reason_not_to_run() {
        let page = page(
            "# A\n\n```sh\none\n```\n\n- list\n\n  <!-- not run: slow -->\n  ```console\n  $ two \\\n    more\n  out\n  ```",
        );
        let blocks = page.blocks();
        assert_eq!(blocks.len(), 2);
        assert_eq!((blocks[0].line, blocks[0].kind.as_str(), blocks[0].text().as_str()), (3, "sh", "one\n"));
        assert_eq!(blocks[0].not_run, None);
        assert_eq!(blocks[1].not_run.as_deref(), Some("slow"));
        assert_eq!(
            blocks[1].typed(),
            [Typed { command: "two \\\n  more".into(), expected: vec!["out".into()] }]
        );
    }

    #[test]
    fn links_anchors_and_columns_are_found() {
        let page = page(
            "# What it is, and `is` not\n## Again\n## Again\nsee [a](b.md#c) and `[x](y)` and [d](e)\n\n\
             | threat | test |\n| --- | --- |\n| a `no` | `yes`, `too` |\n",
        );
        assert_eq!(page.anchors(), ["what-it-is-and-is-not", "again", "again-1"]);
        let targets: Vec<_> = page.links().into_iter().map(|link| link.target).collect();
        assert_eq!(targets, ["b.md#c", "e"]);
        let words: Vec<_> = page.last_column("test").into_iter().map(|(_, word)| word).collect();
        assert_eq!(words, ["yes", "too"]);
    }

    #[test]
    fn a_block_may_be_a_file() {
        let block =
            |first: &str| Block { line: 1, kind: "python".into(), lines: lines(first), not_run: None };
        assert_eq!(block("# fetch.py\nprint()").file(), Some("fetch.py"));
        assert_eq!(block("# Reads it.\nprint()").file(), None);
        assert_eq!(block("print()").file(), None);
    }
}
