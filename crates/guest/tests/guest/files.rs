//! File operations on the real kernel: what they do, what they reject, and that none of them hangs or leaves anything
//! behind.

use std::ffi::OsStr;
use std::fs;
use std::io::Write as _;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;

use wire::files::{
    ByteRange, COMMIT, Change, Condition, Cut, EDIT_FILE_MAX, Edit, FileDone, FileEntry, FileError,
    FileErrorKind, FileKind, FileOp, FileStat, Grep, GrepMatch, GrepWith, LineEnds, Links, Opened, Relocate,
    SearchLimits, WatchEvent, WriteOptions, result_from_bytes, take_record,
};
use wire::guest::{FromInit, Handle, Program, Start, StartError, Stream, ToInit};

use crate::support::{Client, Event, Guest, Mode, is_root, kib_of, shell};

type Result_ = Result<FileDone, FileError>;

fn start(handle: u32, op: FileOp) -> Start {
    Start { stdin: op.takes_input(), program: Program::Files(Box::new(op)), ..shell(handle, "") }
}

/// Operations one after the other on one connection.
struct Files {
    guest: Guest,
    client: Client,
    handle: u32,
    user: Option<String>,
}

impl Files {
    fn new() -> Self {
        let guest = Guest::start(Mode::Walk);
        let client = guest.connect();
        Self { guest, client, handle: 0, user: None }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.guest.path(name)
    }

    fn path(&self, name: &str) -> Vec<u8> {
        self.at(name).into_os_string().into_vec()
    }

    fn next(&mut self, op: FileOp) -> Start {
        self.handle += 1;
        Start { user: self.user.clone(), ..start(self.handle, op) }
    }

    #[track_caller]
    fn run(&mut self, op: FileOp) -> (Vec<u8>, Result_) {
        self.run_with(op, b"")
    }

    /// Sends `input` unchanged, with or without its mark.
    #[track_caller]
    fn run_with(&mut self, op: FileOp, input: &[u8]) -> (Vec<u8>, Result_) {
        let start = self.next(op);
        let (handle, takes) = (start.handle.0, start.stdin);
        self.client.start(start);
        if takes {
            self.client.send_stdin(handle, 0, input);
            self.client.send(&ToInit::StdinEnd { handle: Handle(handle), offset: input.len() as u64 });
        }
        let outcome = self.client.finish(handle);
        let result = result_from_bytes(&outcome.stderr);
        (outcome.stdout.clone(), result.unwrap_or_else(|| panic!("a result at the end: {outcome:?}")))
    }

    #[track_caller]
    fn done(&mut self, op: FileOp) -> FileDone {
        self.run(op).1.expect("it is done")
    }

    #[track_caller]
    fn refused(&mut self, op: FileOp) -> FileErrorKind {
        self.run(op).1.expect_err("it is refused").kind
    }

    #[track_caller]
    fn read(&mut self, name: &str, range: ByteRange) -> (Opened, Vec<u8>) {
        let path = self.path(name);
        let (stdout, result) = self.run(FileOp::Read { path, range });
        let (opened, length) = take_record::<Opened>(&stdout).expect("it parses").expect("it is whole");
        let bytes = stdout[length..].to_vec();
        assert_eq!(result, Ok(FileDone::Sent { bytes: bytes.len() as u64, skipped: 0 }));
        (opened, bytes)
    }

    fn options(&self, name: &str) -> WriteOptions {
        let path = self.path(name);
        WriteOptions { path, mode: None, parents: true, size: None, condition: Condition::None }
    }

    #[track_caller]
    fn write(&mut self, options: WriteOptions, bytes: &[u8]) -> Result_ {
        self.run_with(FileOp::Write(options), &[bytes, &[COMMIT]].concat()).1
    }

    #[track_caller]
    fn written(&mut self, options: WriteOptions, bytes: &[u8]) -> (FileStat, bool) {
        match self.write(options, bytes) {
            Ok(FileDone::Written { stat, created }) => (stat, created),
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn stat(&mut self, name: &str, links: Links) -> Result<FileStat, FileErrorKind> {
        let path = self.path(name);
        match self.run(FileOp::Stat { path, links }).1 {
            Ok(FileDone::Stat(stat)) => Ok(stat),
            Err(error) => Err(error.kind),
            other => panic!("{other:?}"),
        }
    }

    fn edit(&self, name: &str, old: &str, new: &str) -> Edit {
        let (path, old, new) = (self.path(name), old.into(), new.into());
        Edit { path, old, new, all: false, line_ends: LineEnds::Exact, condition: Condition::None }
    }

    #[track_caller]
    fn edited(&mut self, wish: Edit) -> (FileStat, u64) {
        match self.done(FileOp::Edit(wish)) {
            FileDone::Edited { stat, replaced } => (stat, replaced),
            other => panic!("{other:?}"),
        }
    }

    fn relocate(&self, from: &str, to: &str) -> Relocate {
        let (from, to) = (self.path(from), self.path(to));
        Relocate { from, to, overwrite: false, parents: true, recursive: true }
    }

    fn fifo(&self, name: &str) {
        let made = Command::new("mkfifo").arg(self.at(name)).status().expect("mkfifo");
        assert!(made.success());
    }
}

fn records<T: serde::de::DeserializeOwned>(mut bytes: &[u8]) -> Vec<T> {
    let mut all = Vec::new();
    while let Some((record, length)) = take_record(bytes).expect("it parses") {
        bytes = &bytes[length..];
        all.push(record);
    }
    assert!(bytes.is_empty(), "records are whole");
    all
}

const LIMITS: SearchLimits =
    SearchLimits { matches: 1000, entries: 100_000, bytes: 1 << 30, milliseconds: 30_000, hidden: false };

#[test]
fn a_file_is_read_whole_and_in_part() {
    let mut files = Files::new();
    let bytes: Vec<u8> = (0..300_000u32).map(|at| (at % 251) as u8).collect();
    fs::write(files.at("f"), &bytes).expect("it is written");
    let (opened, read) = files.read("f", ByteRange::Whole);
    assert_eq!((opened.start, opened.length, read.len()), (0, Some(300_000), 300_000));
    assert!(read == bytes);
    assert_eq!(opened.stat.inode, fs::metadata(files.at("f")).expect("it is there").ino());
    for (range, from, to) in [
        (ByteRange::Span { start: 10, end: Some(20) }, 10, 20),
        (ByteRange::Span { start: 299_999, end: None }, 299_999, 300_000),
        (ByteRange::Span { start: 5, end: Some(u64::MAX) }, 5, 300_000),
        (ByteRange::Last(70_000), 230_000, 300_000),
        (ByteRange::Last(u64::MAX), 0, 300_000),
    ] {
        let (opened, read) = files.read("f", range);
        assert_eq!(opened.start, from as u64, "{range:?}");
        assert!(read == bytes[from..to], "{range:?}");
    }
    let path = files.path("f");
    for start in [300_000, 300_001, u64::MAX] {
        let range = ByteRange::Span { start, end: None };
        let kind = files.refused(FileOp::Read { path: path.clone(), range });
        assert_eq!(kind, FileErrorKind::RangeNotSatisfiable { size: 300_000 });
    }
}

#[test]
fn a_file_whose_length_is_not_told_is_read_to_its_end() {
    let mut files = Files::new();
    let (stdout, result) =
        files.run(FileOp::Read { path: b"/proc/self/status".to_vec(), range: ByteRange::Whole });
    let (opened, length) = take_record::<Opened>(&stdout).expect("it parses").expect("it is whole");
    assert_eq!(opened.length, None);
    assert!(String::from_utf8_lossy(&stdout[length..]).contains("VmRSS"));
    assert!(result.is_ok());
    fs::write(files.at("empty"), "").expect("it is written");
    assert_eq!(files.read("empty", ByteRange::Whole).1, b"");
}

#[test]
fn what_is_no_regular_file_is_refused_at_once() {
    let mut files = Files::new();
    files.fifo("fifo");
    let _socket = UnixListener::bind(files.at("socket")).expect("it is new");
    fs::create_dir(files.at("dir")).expect("it is new");
    symlink("loop", files.at("loop")).expect("it is new");
    symlink("fifo", files.at("to-fifo")).expect("it is new");
    let device = b"/dev/zero".to_vec();
    let cases = [
        (files.path("fifo"), FileErrorKind::NotARegularFile),
        (files.path("to-fifo"), FileErrorKind::NotARegularFile),
        (files.path("socket"), FileErrorKind::NotARegularFile),
        (device, FileErrorKind::NotARegularFile),
        (files.path("dir"), FileErrorKind::IsDirectory),
        (files.path("loop"), FileErrorKind::TooManyLinks),
        (files.path("missing"), FileErrorKind::NotFound),
        (files.path("missing/x"), FileErrorKind::NotFound),
        (files.path("fifo/x"), FileErrorKind::NotADirectory),
        (files.path(&"n".repeat(300)), FileErrorKind::InvalidPath),
        (b"relative".to_vec(), FileErrorKind::InvalidPath),
        (b"/nul\0".to_vec(), FileErrorKind::InvalidPath),
        (vec![b'/'; 5000], FileErrorKind::InvalidPath),
    ];
    for (path, expected) in cases {
        let shown = String::from_utf8_lossy(&path).into_owned();
        let kind = files.refused(FileOp::Read { path: path.clone(), range: ByteRange::Whole });
        assert_eq!(kind, expected, "read {shown}");
        if matches!(expected, FileErrorKind::NotFound) {
            continue;
        }
        let options = WriteOptions { path, ..files.options("x") };
        let error = files.write(options, b"x").expect_err("it is refused");
        assert_eq!(error.kind, expected, "write {shown}");
    }
    assert!(fs::metadata(files.at("fifo")).expect("it is there").file_type().is_file().eq(&false));
}

#[test]
fn a_file_that_grows_is_read_as_it_was_and_one_that_shrinks_is_reported() {
    let mut files = Files::new();
    let size = 8 * 1024 * 1024;
    for (name, to) in [("grows", size * 2), ("shrinks", 1000)] {
        fs::write(files.at(name), vec![b'x'; size]).expect("it is written");
        let path = files.path(name);
        let start = files.next(FileOp::Read { path, range: ByteRange::Whole });
        let handle = start.handle.0;
        files.client.start(start);
        // Nothing is acknowledged, so most of the file waits to be read; then the file changes.
        let mut came = Vec::new();
        while came.len() < 512 * 1024 {
            if let Event::Data { bytes, .. } = files.client.next() {
                came.extend(bytes);
            }
        }
        let file = fs::File::options().write(true).open(files.at(name)).expect("it is there");
        file.set_len(to as u64).expect("it changes");
        let offset = came.len() as u64;
        files.client.send(&ToInit::Ack { handle: Handle(handle), stream: Stream::Stdout, offset });
        let mut outcomes = std::collections::BTreeMap::new();
        outcomes.entry(Handle(handle)).or_insert_with(crate::support::Outcome::default).stdout = came;
        while files.client.take_next(&mut outcomes) != Some(Handle(handle)) {}
        let outcome = &outcomes[&Handle(handle)];
        let result = result_from_bytes(&outcome.stderr).expect("a result");
        if name == "grows" {
            assert_eq!(result, Ok(FileDone::Sent { bytes: size as u64, skipped: 0 }));
        } else {
            assert_eq!(result.expect_err("it is reported").kind, FileErrorKind::Changed);
        }
    }
}

#[test]
fn a_file_is_written_whole_and_keeps_what_it_was() {
    let mut files = Files::new();
    let (stat, created) = files.written(files.options("a/b/c"), b"one");
    assert!(created && stat.size == 3 && stat.mode == 0o644);
    fs::set_permissions(files.at("a/b/c"), fs::Permissions::from_mode(0o4751)).expect("it is ours");
    let (stat, created) = files.written(files.options("a/b/c"), b"three");
    assert_eq!((created, stat.mode, stat.size), (false, 0o751, 5));
    assert_eq!(fs::read(files.at("a/b/c")).expect("it is there"), b"three");
    let options = WriteOptions { mode: Some(0o600), ..files.options("a/b/c") };
    assert_eq!(files.written(options, b"").0.mode, 0o600);
    let options = WriteOptions { parents: false, ..files.options("x/y") };
    assert_eq!(files.write(options, b"x").expect_err("no parents").kind, FileErrorKind::NotFound);
    assert_eq!(fs::read_dir(files.at("a/b")).expect("it is there").count(), 1, "nothing is left beside it");
    if is_root() {
        std::os::unix::fs::chown(files.at("a/b/c"), Some(1234), Some(4321)).expect("root may");
        let (stat, _) = files.written(files.options("a/b/c"), b"four");
        assert_eq!((stat.uid, stat.gid), (1234, 4321));
    }
}

#[test]
fn a_link_at_the_end_is_written_through_also_to_what_is_not_there() {
    let mut files = Files::new();
    fs::create_dir(files.at("d")).expect("it is new");
    symlink("../target", files.at("d/link")).expect("it is new");
    let (_, created) = files.written(files.options("d/link"), b"1");
    assert!(created && files.at("d/link").is_symlink());
    assert_eq!(fs::read(files.at("target")).expect("it is there"), b"1");
    symlink(files.at("d/link"), files.at("absolute")).expect("it is new");
    assert!(!files.written(files.options("absolute"), b"2").1);
    assert_eq!(fs::read(files.at("target")).expect("it is there"), b"2");
    symlink("d", files.at("through")).expect("it is new");
    files.written(files.options("through/new"), b"3");
    assert_eq!(fs::read(files.at("d/new")).expect("it is there"), b"3");
}

#[test]
fn an_upload_that_breaks_off_leaves_nothing() {
    let mut files = Files::new();
    fs::create_dir(files.at("d")).expect("it is new");
    fs::write(files.at("d/f"), "before").expect("it is written");
    let op = FileOp::Write(files.options("d/f"));
    let (_, result) = files.run_with(op, b"half");
    assert_eq!(result.expect_err("it is not whole").kind, FileErrorKind::Incomplete);
    let options = WriteOptions { size: Some(3), ..files.options("d/f") };
    assert_eq!(files.write(options.clone(), b"1234").expect_err("too long").kind, FileErrorKind::TooLarge);
    assert_eq!(files.write(options, b"12").expect_err("too short").kind, FileErrorKind::Incomplete);
    // Killed in the middle, as when the caller disconnects.
    let start = files.next(FileOp::Write(files.options("d/f")));
    let handle = start.handle.0;
    files.client.start(start);
    files.client.send_stdin(handle, 0, &vec![b'x'; 100_000]);
    loop {
        if let Event::Message(FromInit::StdinAck { offset: 1.., .. }) = files.client.next() {
            break;
        }
    }
    files.client.send(&ToInit::Kill { handle: Handle(handle) });
    files.client.finish(handle);
    assert_eq!(fs::read(files.at("d/f")).expect("it is there"), b"before");
    assert_eq!(fs::read_dir(files.at("d")).expect("it is there").count(), 1, "nothing is left beside it");
}

#[test]
fn conditions_hold_when_the_file_gets_its_name() {
    let mut files = Files::new();
    let absent = WriteOptions { condition: Condition::Absent, ..files.options("f") };
    let (first, _) = files.written(absent.clone(), b"1");
    assert_eq!(files.write(absent, b"2").expect_err("it is there").kind, FileErrorKind::ConditionFailed);
    let same = WriteOptions { condition: Condition::Is(vec![first.version()]), ..files.options("f") };
    let (second, _) = files.written(same.clone(), b"22");
    assert_eq!(files.write(same, b"3").expect_err("it changed").kind, FileErrorKind::ConditionFailed);
    let present = WriteOptions { condition: Condition::Present, ..files.options("missing") };
    assert_eq!(files.write(present, b"3").expect_err("none").kind, FileErrorKind::ConditionFailed);
    let path = files.path("f");
    let remove = |condition| FileOp::Remove { path: path.clone(), recursive: false, condition };
    assert_eq!(files.refused(remove(Condition::Is(vec![first.version()]))), FileErrorKind::ConditionFailed);
    files.done(remove(Condition::Is(vec![second.version()])));
    assert!(!files.at("f").exists());
}

#[test]
fn a_full_disk_is_said_and_what_was_there_stays() {
    if !is_root() {
        println!("skipped: only root may mount");
        return;
    }
    let mut files = Files::new();
    fs::create_dir(files.at("small")).expect("it is new");
    let mount = "mount -t tmpfs -o size=64k,nr_inodes=20 none";
    // In init's own mount namespace, which ends with it.
    let at = files.at("small").to_string_lossy().into_owned();
    let outcome = {
        let start = shell(9000, &format!("{mount} {at} && echo before > {at}/f"));
        files.client.run(start)
    };
    assert_eq!(outcome.stderr, b"");
    let error = files.write(files.options("small/f"), &vec![b'x'; 200_000]).expect_err("it is full");
    assert_eq!(error.kind, FileErrorKind::NoSpace);
    assert!(error.path.ends_with(b"small/f"));
    let outcome = files.client.run(shell(9001, &format!("cat {at}/f; ls -A {at} | wc -l")));
    outcome.assert_printed("before\n1\n");
}

#[test]
fn a_file_is_edited_whole_and_keeps_what_it_was() {
    let mut files = Files::new();
    fs::create_dir(files.at("d")).expect("it is new");
    fs::write(files.at("d/f"), "one two two").expect("it is written");
    fs::set_permissions(files.at("d/f"), fs::Permissions::from_mode(0o751)).expect("it is ours");
    if is_root() {
        std::os::unix::fs::chown(files.at("d/f"), Some(1234), Some(4321)).expect("root may");
    }
    let before = fs::metadata(files.at("d/f")).expect("it is there");
    let (stat, replaced) = files.edited(files.edit("d/f", "one", "1"));
    assert_eq!((replaced, stat.size, stat.mode), (1, 9, 0o751));
    assert_eq!((stat.uid, stat.gid), (before.uid(), before.gid()));
    assert_ne!(stat.inode, before.ino(), "a new file replaced it, so that no reader saw half of it");
    let kind = files.refused(FileOp::Edit(files.edit("d/f", "two", "2")));
    assert_eq!(kind, FileErrorKind::SeveralMatches { count: 2 });
    let condition = Condition::Is(vec![stat.version()]);
    let all = Edit { all: true, condition, ..files.edit("d/f", "two", "2") };
    assert_eq!(files.edited(all.clone()).1, 2);
    assert_eq!(fs::read(files.at("d/f")).expect("it is there"), b"1 2 2");
    assert_eq!(files.refused(FileOp::Edit(all)), FileErrorKind::ConditionFailed);
    assert_eq!(files.refused(FileOp::Edit(files.edit("d/f", "3", ""))), FileErrorKind::NoMatch);
    assert_eq!(files.refused(FileOp::Edit(files.edit("d/f", "", "3"))), FileErrorKind::InvalidPattern);
    assert_eq!(fs::read(files.at("d/f")).expect("it is there"), b"1 2 2");
    assert_eq!(fs::read_dir(files.at("d")).expect("it is there").count(), 1, "nothing is left beside it");
}

#[test]
fn a_file_with_other_names_keeps_them_and_a_link_is_edited_through() {
    let mut files = Files::new();
    fs::write(files.at("f"), "a long text\n").expect("it is written");
    fs::hard_link(files.at("f"), files.at("second")).expect("it is new");
    symlink("f", files.at("link")).expect("it is new");
    let before = fs::metadata(files.at("f")).expect("it is there");
    for (name, old, new, expected) in [
        ("f", "long", "short", "a short text\n"),
        ("second", "short text", "word", "a word\n"),
        ("link", "word", "longer sentence", "a longer sentence\n"),
    ] {
        let (stat, _) = files.edited(files.edit(name, old, new));
        assert_eq!((stat.inode, stat.links), (before.ino(), 2), "{name}");
        assert_eq!(fs::read_to_string(files.at("second")).expect("it is there"), expected);
    }
    assert!(files.at("link").is_symlink());
    fs::remove_file(files.at("second")).expect("it is ours");
    files.edited(files.edit("link", "sentence", "one"));
    assert!(files.at("link").is_symlink());
    assert_eq!(fs::read_to_string(files.at("f")).expect("it is there"), "a longer one\n");
}

#[test]
fn what_cannot_be_edited_is_told_apart_and_stays() {
    let mut files = Files::new();
    fs::create_dir(files.at("d")).expect("it is new");
    fs::write(files.at("binary"), b"a\xff").expect("it is written");
    fs::write(files.at("f"), "a").expect("it is written");
    fs::File::create(files.at("large")).expect("new").set_len(EDIT_FILE_MAX + 1).expect("holes cost nothing");
    fs::File::create(files.at("fits")).expect("new").set_len(EDIT_FILE_MAX).expect("holes cost nothing");
    files.fifo("fifo");
    symlink("circle", files.at("circle")).expect("it is new");
    symlink("nowhere", files.at("broken")).expect("it is new");
    for (name, kind) in [
        ("d", FileErrorKind::IsDirectory),
        ("binary", FileErrorKind::NotText),
        ("large", FileErrorKind::TooLarge),
        ("fits", FileErrorKind::NoMatch),
        ("fifo", FileErrorKind::NotARegularFile),
        ("circle", FileErrorKind::TooManyLinks),
        ("broken", FileErrorKind::NotFound),
        ("missing", FileErrorKind::NotFound),
        ("missing/f", FileErrorKind::NotFound),
        ("f/below", FileErrorKind::NotADirectory),
    ] {
        assert_eq!(files.refused(FileOp::Edit(files.edit(name, "a", "b"))), kind, "{name}");
    }
    assert_eq!(fs::read(files.at("binary")).expect("it is there"), b"a\xff");
    assert!(!files.at("nowhere").exists() && !files.at("missing").exists());
}

#[test]
fn an_edit_that_may_not_replace_a_file_writes_into_it_and_keeps_its_owner() {
    if !is_root() {
        println!("skipped: only root has users to choose from");
        return;
    }
    let mut files = Files::new();
    fs::create_dir(files.at("theirs")).expect("it is new");
    for (name, mode) in [("theirs/open", 0o666), ("theirs/closed", 0o644), ("shared", 0o666)] {
        fs::write(files.at(name), "one").expect("it is written");
        fs::set_permissions(files.at(name), fs::Permissions::from_mode(mode)).expect("it is ours");
    }
    fs::set_permissions(files.at(""), fs::Permissions::from_mode(0o777)).expect("it is ours");
    files.user = Some("65534".into());
    for name in ["theirs/open", "shared"] {
        let before = fs::metadata(files.at(name)).expect("it is there");
        let (stat, _) = files.edited(files.edit(name, "one", "another"));
        assert_eq!((stat.inode, stat.uid, stat.mode), (before.ino(), 0, 0o666), "{name}");
        assert_eq!(fs::read(files.at(name)).expect("it is there"), b"another");
    }
    let kind = files.refused(FileOp::Edit(files.edit("theirs/closed", "one", "two")));
    assert_eq!(kind, FileErrorKind::PermissionDenied);
}

#[test]
fn edits_at_once_are_all_done() {
    const EDITS: u32 = 24;
    for names in [1, 2] {
        let mut files = Files::new();
        let text: String = (0..EDITS).map(|number| format!("<{number}>\n")).collect();
        fs::write(files.at("f"), text).expect("it is written");
        if names == 2 {
            fs::hard_link(files.at("f"), files.at("second")).expect("it is new");
        }
        let mut handles = Vec::new();
        for number in 0..EDITS {
            let wish = files.edit("f", &format!("<{number}>"), &format!("[{number}]"));
            let start = files.next(FileOp::Edit(wish));
            handles.push(start.handle.0);
            files.client.start(start);
        }
        for (handle, outcome) in files.client.finish_all(&handles) {
            let result = result_from_bytes(&outcome.stderr).expect("a result");
            assert!(matches!(result, Ok(FileDone::Edited { replaced: 1, .. })), "{handle:?}: {result:?}");
        }
        let expected: String = (0..EDITS).map(|number| format!("[{number}]\n")).collect();
        assert_eq!(fs::read_to_string(files.at("f")).expect("it is there"), expected);
    }
}

#[test]
fn a_directory_is_listed_by_name_in_pages() {
    let mut files = Files::new();
    fs::create_dir(files.at("d")).expect("it is new");
    for number in 0..25 {
        fs::write(files.at(&format!("d/{number:02}")), "x").expect("it is written");
    }
    symlink("nowhere", files.at("d/link")).expect("it is new");
    fs::write(files.at("d").join(OsStr::from_bytes(b"\xff")), "odd").expect("it is written");
    let path = files.path("d");
    let (mut all, mut after) = (Vec::new(), Vec::new());
    loop {
        let op = FileOp::List { path: path.clone(), after: after.clone(), limit: 10 };
        let (stdout, result) = files.run(op);
        let page: Vec<FileEntry> = records(&stdout);
        after = page.last().expect("a page is not empty").name.clone();
        all.extend(page);
        match result.expect("it is listed") {
            FileDone::Listed { more: true } => {}
            FileDone::Listed { more: false } => break,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(all.len(), 27);
    assert!(all.is_sorted_by(|one, other| one.name < other.name));
    let link = &all[25];
    assert_eq!((link.stat.kind, link.stat.target.as_deref()), (FileKind::Symlink, Some(&b"nowhere"[..])));
    assert_eq!(all[26].name, b"\xff");
    let list = |path| FileOp::List { path, after: Vec::new(), limit: 10 };
    let (file, missing) = (files.path("d/00"), files.path("x"));
    assert_eq!(files.refused(list(file)), FileErrorKind::NotADirectory);
    assert_eq!(files.refused(list(missing)), FileErrorKind::NotFound);
}

#[test]
fn a_stat_follows_a_link_or_does_not() {
    let mut files = Files::new();
    fs::write(files.at("f"), "12345").expect("it is written");
    symlink("f", files.at("l")).expect("it is new");
    symlink("nowhere", files.at("dangling")).expect("it is new");
    assert_eq!(files.stat("l", Links::Follow).expect("it is there").size, 5);
    let link = files.stat("l", Links::Keep).expect("it is there");
    assert_eq!((link.kind, link.target), (FileKind::Symlink, Some(b"f".to_vec())));
    assert_eq!(files.stat("dangling", Links::Follow), Err(FileErrorKind::NotFound));
    assert!(files.stat("dangling", Links::Keep).is_ok());
}

#[test]
fn directories_are_made_as_asked() {
    let mut files = Files::new();
    let make = |path: &Path, parents, mode| {
        let path = path.as_os_str().as_bytes().to_vec();
        FileOp::MakeDirectory { path, parents, mode }
    };
    let (deep, file) = (files.at("a/b/c"), files.at("f"));
    assert_eq!(files.refused(make(&deep, false, None)), FileErrorKind::NotFound);
    files.done(make(&deep, true, Some(0o1777)));
    files.done(make(&deep, true, None));
    assert_eq!(fs::metadata(&deep).expect("it is there").permissions().mode() & 0o7777, 0o1777);
    assert_eq!(files.refused(make(&deep, false, None)), FileErrorKind::AlreadyExists);
    fs::write(&file, "").expect("it is written");
    assert_eq!(files.refused(make(&file, true, None)), FileErrorKind::AlreadyExists);
    assert_eq!(files.refused(make(&file.join("x"), true, None)), FileErrorKind::NotADirectory);
    files.done(make(Path::new("/"), true, None));
    files.done(make(&files.at("slash/"), true, None));
}

#[test]
fn things_move_and_do_not_run_over_others_unasked() {
    let mut files = Files::new();
    fs::write(files.at("a"), "a").expect("it is written");
    fs::write(files.at("b"), "b").expect("it is written");
    let wish = files.relocate("a", "b");
    let error = files.run(FileOp::Move(wish.clone())).1.expect_err("the target exists");
    assert_eq!((error.kind, error.path.ends_with(b"/b")), (FileErrorKind::AlreadyExists, true));
    files.done(FileOp::Move(Relocate { overwrite: true, ..wish }));
    assert_eq!(fs::read(files.at("b")).expect("it is there"), b"a");
    files.done(FileOp::Move(files.relocate("b", "new/place/b")));
    assert!(files.at("new/place/b").exists() && !files.at("b").exists());
    let wish = files.relocate("missing", "x");
    assert_eq!(files.refused(FileOp::Move(wish)), FileErrorKind::NotFound);
    let wish = files.relocate("new", "new/place/inside");
    assert_eq!(files.refused(FileOp::Move(wish)), FileErrorKind::IntoItself);
    fs::create_dir(files.at("full")).expect("it is new");
    fs::write(files.at("full/x"), "").expect("it is written");
    let wish = Relocate { overwrite: true, ..files.relocate("new", "full") };
    assert_eq!(files.refused(FileOp::Move(wish)), FileErrorKind::DirectoryNotEmpty);
}

#[test]
fn things_move_between_file_systems() {
    let mut files = Files::new();
    let elsewhere = Path::new("/dev/shm").join(files.guest.directory.path().file_name().expect("a name"));
    if fs::create_dir(&elsewhere).is_err() {
        println!("skipped: there is no second file system to write to");
        return;
    }
    fs::create_dir_all(files.at("d/e")).expect("they are new");
    fs::write(files.at("d/e/f"), "contents").expect("it is written");
    symlink("f", files.at("d/e/l")).expect("it is new");
    fs::set_permissions(files.at("d/e/f"), fs::Permissions::from_mode(0o640)).expect("it is ours");
    let to = elsewhere.join("d").into_os_string().into_vec();
    files.done(FileOp::Move(Relocate { to, ..files.relocate("d", "x") }));
    let moved = fs::metadata(elsewhere.join("d/e/f")).expect("it is there");
    assert_eq!(moved.permissions().mode() & 0o777, 0o640);
    assert!(elsewhere.join("d/e/l").is_symlink() && !files.at("d").exists());
    fs::remove_dir_all(&elsewhere).expect("it is ours");
}

#[test]
fn copies_are_whole_and_never_into_themselves() {
    let mut files = Files::new();
    fs::create_dir_all(files.at("d/e")).expect("they are new");
    fs::write(files.at("d/e/f"), vec![b'x'; 500_000]).expect("it is written");
    symlink("/nowhere", files.at("d/l")).expect("it is new");
    files.fifo("d/fifo");
    let done = files.done(FileOp::Copy(files.relocate("d", "copy")));
    assert_eq!(done, FileDone::Made { entries: 4, bytes: 500_000, skipped: 1 });
    assert_eq!(fs::read(files.at("copy/e/f")).expect("it is there").len(), 500_000);
    assert!(files.at("copy/l").is_symlink());
    let flat = Relocate { recursive: false, ..files.relocate("d", "other") };
    assert_eq!(files.refused(FileOp::Copy(flat)), FileErrorKind::IsDirectory);
    let inside = files.relocate("d", "d/e/inside");
    assert_eq!(files.refused(FileOp::Copy(inside)), FileErrorKind::IntoItself);
    let same = Relocate { overwrite: true, ..files.relocate("d/e/f", "d/e/f") };
    assert_eq!(files.refused(FileOp::Copy(same)), FileErrorKind::IntoItself);
    let wish = files.relocate("d/e/f", "copy/e/f");
    assert_eq!(files.refused(FileOp::Copy(wish)), FileErrorKind::AlreadyExists);
    let wish = files.relocate("d/fifo", "x");
    assert_eq!(files.refused(FileOp::Copy(wish)), FileErrorKind::NotARegularFile);
    let wish = Relocate { overwrite: true, ..files.relocate("d/e/f", "copy") };
    assert_eq!(files.refused(FileOp::Copy(wish)), FileErrorKind::IsDirectory);
}

#[test]
fn trees_are_removed_however_deep_and_links_are_not_followed() {
    let mut files = Files::new();
    fs::create_dir(files.at("outside")).expect("it is new");
    fs::write(files.at("outside/kept"), "").expect("it is written");
    fs::create_dir(files.at("d")).expect("it is new");
    symlink(files.at("outside"), files.at("d/link")).expect("it is new");
    fs::write(files.at("d").join(OsStr::from_bytes(b"\xff\n ")), "").expect("it is written");
    for number in 0..2500 {
        fs::write(files.at(&format!("d/{number}")), "").expect("it is written");
    }
    let path = files.path("d");
    // Deeper than any path can name, and than there are descriptors.
    let dig = "import os\nos.chdir(os.environ['TOP'])\nfor _ in range(3000):\n  os.mkdir('d'); os.chdir('d')";
    let dug = Command::new("python3").args(["-c", dig]).env("TOP", files.at("d")).status();
    assert!(dug.expect("python3 is part of this system").success());
    let remove = |path: Vec<u8>, recursive| FileOp::Remove { path, recursive, condition: Condition::None };
    assert_eq!(files.refused(remove(path.clone(), false)), FileErrorKind::DirectoryNotEmpty);
    files.done(remove(path.clone(), true));
    assert!(!files.at("d").exists() && files.at("outside/kept").exists());
    assert_eq!(files.refused(remove(path, true)), FileErrorKind::NotFound);
    symlink("outside", files.at("l")).expect("it is new");
    files.done(remove(files.path("l"), true));
    assert!(files.at("outside/kept").exists() && !files.at("l").is_symlink());
}

#[test]
fn globs_find_what_a_shell_would() {
    let mut files = Files::new();
    for name in ["a.py", "src/b.py", "src/deep/c.py", "src/deep/d.txt", ".git/e.py", "src/.hidden.py"] {
        let path = files.at(name);
        fs::create_dir_all(path.parent().expect("it has one")).expect("it can be made");
        fs::write(path, "").expect("it is written");
    }
    symlink(".", files.at("src/loop")).expect("it is new");
    let mut find = |pattern: &str, limits: SearchLimits| {
        let root = files.path("");
        let (stdout, result) = files.run(FileOp::Glob { root, pattern: pattern.into(), limits });
        let mut names: Vec<String> = records::<FileEntry>(&stdout)
            .into_iter()
            .map(|entry| String::from_utf8(entry.name).expect("text"))
            .collect();
        names.sort();
        (names.join(" "), result)
    };
    assert_eq!(find("*.py", LIMITS).0, "a.py");
    assert_eq!(find("**/*.py", LIMITS).0, "a.py src/b.py src/deep/c.py");
    assert_eq!(find("src/*", LIMITS).0, "src/b.py src/deep src/loop");
    assert_eq!(find(".git/*", LIMITS).0, ".git/e.py");
    assert_eq!(
        find("**/*.{py,txt}", SearchLimits { hidden: true, ..LIMITS }).0,
        ".git/e.py a.py src/.hidden.py src/b.py src/deep/c.py src/deep/d.txt"
    );
    let cut = |result: Result_| match result {
        Ok(FileDone::Searched { cut, .. }) => cut,
        other => panic!("{other:?}"),
    };
    assert_eq!(cut(find("**/*", SearchLimits { matches: 2, ..LIMITS }).1), Some(Cut::Matches));
    assert_eq!(cut(find("**/*", SearchLimits { entries: 2, ..LIMITS }).1), Some(Cut::Entries));
    assert_eq!(cut(find("**/*", SearchLimits { milliseconds: 0, ..LIMITS }).1), Some(Cut::Time));
    assert_eq!(cut(find("**/*", LIMITS).1), None);
    assert_eq!(find("[", LIMITS).1.expect_err("it is none").kind, FileErrorKind::InvalidPattern);
}

#[test]
fn grep_finds_lines_and_passes_over_what_would_block() {
    let mut files = Files::new();
    fs::create_dir_all(files.at("src")).expect("they are new");
    fs::write(files.at("src/a.rs"), "fn main() {\n    needle();\n}\n").expect("it is written");
    fs::write(files.at("src/b.txt"), b"Needle here\nno\n\xc3\xa9 needle\n").expect("it is written");
    fs::write(files.at("src/bin"), b"needle\0").expect("it is written");
    files.fifo("src/fifo");
    symlink("/", files.at("src/root")).expect("it is new");
    let root = files.path("");
    let wish = Grep {
        root: root.clone(),
        pattern: "needle".into(),
        regex: false,
        ignore_case: false,
        include: Vec::new(),
        limits: LIMITS,
    };
    let mut find = |grep: Grep| {
        let (stdout, result) = files.run(FileOp::Grep(grep));
        let mut found: Vec<(String, u64)> = records::<GrepMatch>(&stdout)
            .into_iter()
            .map(|found| (String::from_utf8(found.path).expect("text"), found.line))
            .map(|(path, line)| (path.rsplit('/').next().expect("a name").to_owned(), line))
            .collect();
        found.sort();
        (found, result)
    };
    let (found, result) = find(wish.clone());
    assert_eq!(found, [("a.rs".into(), 2), ("b.txt".into(), 3)]);
    assert!(matches!(result, Ok(FileDone::Searched { skipped: 1, cut: None, .. })), "{result:?}");
    let (found, _) = find(Grep { ignore_case: true, include: vec![b"*.txt".to_vec()], ..wish.clone() });
    assert_eq!(found, [("b.txt".into(), 1), ("b.txt".into(), 3)]);
    let (found, _) = find(Grep { regex: true, pattern: r"^\s*needle\(".into(), ..wish.clone() });
    assert_eq!(found, [("a.rs".into(), 2)]);
    let (_, result) = find(Grep { regex: true, pattern: "(".into(), ..wish.clone() });
    assert_eq!(result.expect_err("it is none").kind, FileErrorKind::InvalidPattern);
    let limits = SearchLimits { bytes: 10, ..LIMITS };
    let (_, result) = find(Grep { limits, ..wish });
    assert!(matches!(result, Ok(FileDone::Searched { cut: Some(Cut::Bytes), .. })), "{result:?}");
}

#[test]
fn grep_leaves_out_directories_and_tells_lines_as_they_are() {
    let mut files = Files::new();
    fs::create_dir_all(files.at("sub/.git/deep")).expect("they are new");
    fs::write(files.at("sub/.git/deep/f"), "needle").expect("it is written");
    fs::create_dir(files.at("tmp1")).expect("it is new");
    fs::write(files.at("tmp1/f"), "needle").expect("it is written");
    fs::write(files.at("sub/crlf"), "needle\r\n").expect("it is written");
    // A file with that name is not a directory to skip.
    fs::write(files.at(".git"), "needle").expect("it is written");
    let mixed = [&b"needle\n"[..], &vec![b'x'; 300_000], b"\n\0\nneedle\n"].concat();
    fs::write(files.at("mixed"), mixed).expect("it is written");
    let grep = Grep {
        root: files.path(""),
        pattern: "needle".into(),
        regex: false,
        ignore_case: false,
        include: Vec::new(),
        limits: SearchLimits { hidden: true, ..LIMITS },
    };
    let exclude_directories = vec![b".git".to_vec(), b"tmp*".to_vec()];
    let with = GrepWith { grep, exclude_directories, carriage_returns: true };
    let (stdout, result) = files.run(FileOp::GrepWith(with.clone()));
    let mut found: Vec<(String, Vec<u8>)> = records::<GrepMatch>(&stdout)
        .into_iter()
        .map(|found| (String::from_utf8(found.path).expect("text"), found.text))
        .map(|(path, text)| (path.rsplit('/').next().expect("a name").to_owned(), text))
        .collect();
    found.sort();
    let told = |name: &str, text: &[u8]| (name.to_owned(), text.to_vec());
    assert_eq!(found, [told(".git", b"needle"), told("crlf", b"needle\r"), told("mixed", b"needle")]);
    assert!(matches!(result, Ok(FileDone::Grepped { skipped: 1, mixed: 1, cut: None, .. })), "{result:?}");
    let wrong = GrepWith { exclude_directories: vec![b"[".to_vec()], ..with };
    assert_eq!(files.refused(FileOp::GrepWith(wrong)), FileErrorKind::InvalidPattern);
}

#[test]
fn a_watch_tells_what_happens_below() {
    let mut files = Files::new();
    fs::create_dir(files.at("w")).expect("it is new");
    let path = files.path("w");
    let start = files.next(FileOp::Watch { path, recursive: true });
    let handle = start.handle;
    files.client.start(start);
    let mut came = Vec::new();
    let mut seen: Vec<WatchEvent> = Vec::new();
    let mut until = |client: &mut Client, wanted: &dyn Fn(&WatchEvent) -> bool| {
        while !seen.iter().any(wanted) {
            if let Event::Data { stream: Stream::Stdout, bytes, .. } = client.next() {
                came.extend(bytes);
                while let Some((event, length)) = take_record(&came).expect("it parses") {
                    came.drain(..length);
                    seen.push(event);
                }
            }
        }
    };
    until(&mut files.client, &|event| *event == WatchEvent::Ready);
    let top = files.at("w");
    let is = |change: Change, path: PathBuf| {
        move |event: &WatchEvent| {
            matches!(event, WatchEvent::Changed { change: was, path: at, .. }
                if *was == change && *at == path.as_os_str().as_bytes())
        }
    };
    fs::write(top.join("f"), "x").expect("it is written");
    until(&mut files.client, &is(Change::Created, top.join("f")));
    until(&mut files.client, &is(Change::Written, top.join("f")));
    fs::create_dir_all(top.join("a/b/c")).expect("they are new");
    until(&mut files.client, &is(Change::Created, top.join("a/b/c")));
    fs::write(top.join("a/b/c/deep"), "x").expect("it is written");
    until(&mut files.client, &is(Change::Created, top.join("a/b/c/deep")));
    fs::rename(top.join("f"), top.join("g")).expect("it moves");
    until(&mut files.client, &is(Change::MovedTo, top.join("g")));
    fs::rename(top.join("a"), top.join("z")).expect("it moves");
    until(&mut files.client, &is(Change::MovedTo, top.join("z")));
    fs::write(top.join("z/b/c/later"), "x").expect("it is written");
    until(&mut files.client, &is(Change::Created, top.join("z/b/c/later")));
    fs::remove_file(top.join("g")).expect("it is there");
    until(&mut files.client, &is(Change::Removed, top.join("g")));
    fs::remove_dir_all(&top).expect("it is ours");
    until(&mut files.client, &|event| *event == WatchEvent::Gone);
    while !matches!(files.client.next(), Event::Message(FromInit::Ended { handle: ended, .. }) if ended == handle)
    {
    }
}

#[test]
fn a_watch_of_one_file_outlives_what_takes_its_place() {
    let mut files = Files::new();
    fs::write(files.at("f"), "1").expect("it is written");
    fs::write(files.at("other"), "1").expect("it is written");
    let path = files.path("f");
    let start = files.next(FileOp::Watch { path, recursive: false });
    let watch = start.handle;
    files.client.start(start);
    let mut came = Vec::new();
    let mut next = |client: &mut Client| loop {
        if let Some((event, length)) = take_record::<WatchEvent>(&came).expect("it parses") {
            came.drain(..length);
            return event;
        }
        if let Event::Data { handle, stream: Stream::Stdout, bytes, .. } = client.next()
            && handle == watch
        {
            came.extend(bytes);
        }
    };
    assert_eq!(next(&mut files.client), WatchEvent::Ready);
    fs::write(files.at("other"), "2").expect("it is written");
    fs::write(files.at("new"), "2").expect("it is written");
    fs::rename(files.at("new"), files.at("f")).expect("it moves");
    let event = next(&mut files.client);
    assert!(
        matches!(&event, WatchEvent::Changed { change: Change::MovedTo, path, .. } if path.ends_with(b"/f")),
        "{event:?}"
    );
    fs::File::options()
        .append(true)
        .open(files.at("f"))
        .expect("it is there")
        .write_all(b"x")
        .expect("it takes it");
    let event = next(&mut files.client);
    assert!(matches!(&event, WatchEvent::Changed { change: Change::Modified, .. }), "{event:?}");
    files.client.send(&ToInit::Kill { handle: watch });
}

#[test]
fn a_directory_goes_out_and_comes_in_as_a_tar_stream() {
    let mut files = Files::new();
    fs::create_dir_all(files.at("d/e")).expect("they are new");
    fs::write(files.at("d/e/f"), vec![9; 200_000]).expect("it is written");
    fs::write(files.at("d").join(OsStr::from_bytes(b"\xff")), "odd").expect("it is written");
    let path = files.path("d");
    let (stream, result) = files.run(FileOp::Pack { path });
    assert_eq!(result, Ok(FileDone::Sent { bytes: stream.len() as u64, skipped: 0 }));
    let path = files.path("new/place");
    let (_, result) = files.run_with(FileOp::Unpack { path }, &[&stream[..], &[COMMIT]].concat());
    assert_eq!(result, Ok(FileDone::Made { entries: 3, bytes: 200_003, skipped: 0 }));
    assert_eq!(fs::read(files.at("new/place/e/f")).expect("it is there"), vec![9; 200_000]);
    let path = files.path("d/e/f");
    let (stream, _) = files.run(FileOp::Pack { path });
    let path = files.path("one");
    files.run_with(FileOp::Unpack { path }, &[&stream[..], &[COMMIT]].concat()).1.expect("it is unpacked");
    assert!(files.at("one/f").exists());
    let path = files.path("broken");
    let (_, result) = files.run_with(FileOp::Unpack { path: path.clone() }, &stream[..1000]);
    assert_eq!(result.expect_err("it broke off").kind, FileErrorKind::Incomplete);
    let (_, result) = files.run_with(FileOp::Unpack { path }, &[&[b'x'; 2000][..], &[COMMIT]].concat());
    assert_eq!(result.expect_err("it is none").kind, FileErrorKind::InvalidArchive);
}

#[test]
fn operations_have_the_rights_of_their_user() {
    if !is_root() {
        println!("skipped: only root has users to choose from");
        return;
    }
    let mut files = Files::new();
    fs::write(files.at("secret"), "x").expect("it is written");
    fs::set_permissions(files.at("secret"), fs::Permissions::from_mode(0o600)).expect("it is ours");
    fs::write(files.at("readonly"), "x").expect("it is written");
    files.user = Some("65534".into());
    let path = files.path("secret");
    let kind = files.refused(FileOp::Read { path, range: ByteRange::Whole });
    assert_eq!(kind, FileErrorKind::PermissionDenied);
    // The directory would allow replacing the file; the file itself does not.
    let error = files.write(files.options("readonly"), b"y").expect_err("it is not theirs");
    assert_eq!(error.kind, FileErrorKind::PermissionDenied);
    let (stat, _) = files.written(files.options("own"), b"y");
    assert_eq!(stat.uid, 65534);
    files.user = Some("nobody-at-all".into());
    let path = files.path("own");
    let start = files.next(FileOp::Stat { path, links: Links::Keep });
    let outcome = files.client.run(start);
    assert!(matches!(outcome.error, Some(StartError::UnknownUser { .. })), "{outcome:?}");
}

#[test]
fn an_operation_has_nothing_of_inits() {
    let mut files = Files::new();
    // Its own descriptors, as it sees them.
    let (stdout, result) =
        files.run(FileOp::List { path: b"/proc/self/fd".to_vec(), after: Vec::new(), limit: 100 });
    result.expect("it is listed");
    let names: Vec<Vec<u8>> = records::<FileEntry>(&stdout).into_iter().map(|entry| entry.name).collect();
    // The three streams, and the directory that is being listed, which is closed by the time its entry is read.
    assert!(names.len() <= 5, "{names:?}");
}

#[test]
fn memory_of_init_and_operation_does_not_grow_with_the_file() {
    let mut files = Files::new();
    let size = 256u64 << 20;
    fs::File::create(files.at("big")).expect("it is new").set_len(size).expect("it grows");
    let path = files.path("big");
    let start = files.next(FileOp::Read { path, range: ByteRange::Whole });
    let handle = start.handle;
    files.client.start(start);
    let mut total = 0;
    let mut most = 0;
    let mut pid = None;
    loop {
        match files.client.next() {
            Event::Message(FromInit::Started { pid: started, .. }) => pid = Some(started),
            Event::Data { stream, offset, bytes, .. } => {
                let offset = offset + bytes.len() as u64;
                if stream == Stream::Stdout {
                    total = offset;
                }
                files.client.send(&ToInit::Ack { handle, stream, offset });
                if total % (32 << 20) < 65_536 {
                    most = most.max(files.guest.status_kib("VmHWM:"));
                }
            }
            Event::Message(FromInit::Ended { .. }) => break,
            _ => {}
        }
    }
    assert!(total > size && pid.is_some());
    assert!(most < 12 * 1024, "init held {most} KiB");
    // The operation itself, while it waits in the middle of an upload.
    let start = files.next(FileOp::Write(files.options("up")));
    let handle = start.handle;
    files.client.start(start);
    let chunk = vec![7; 65_536];
    let mut sent = 0u64;
    let mut given = 0;
    let mut child = 0;
    while sent < 64 << 20 {
        while sent - given < 192 * 1024 {
            files.client.send_stdin(handle.0, sent, &chunk);
            sent += chunk.len() as u64;
        }
        match files.client.next() {
            Event::Message(FromInit::Started { pid, .. }) => child = pid,
            Event::Message(FromInit::StdinAck { offset, .. }) => given = offset,
            other => panic!("{other:?}"),
        }
    }
    // Its process id inside the guest; on the host it is the newest child of init.
    let children = format!("/proc/{0}/task/{0}/children", files.guest.pid());
    let children = fs::read_to_string(children).expect("init lives");
    let child_outside = children.split_whitespace().last().expect("one child");
    let status = fs::read_to_string(format!("/proc/{child_outside}/status")).expect("it lives");
    assert!(kib_of(&status, "VmHWM:") < 12 * 1024, "the operation {child} holds too much: {status}");
    files.client.send(&ToInit::Kill { handle });
}
