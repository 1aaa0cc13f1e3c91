//! Hostile streams, streams of other programs, and round trips of trees.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Stdio};

use proptest::prelude::*;
use shoal_archive::{Links, PackError, Packed, UnpackError, Unpacked, pack_directory, unpack};
use tempfile::TempDir;

fn directory(path: &Path) -> OwnedFd {
    fs::File::open(path).expect("the directory opens").into()
}

fn unpack_into(stream: &[u8], top: &Path, links: Links) -> Result<Unpacked, UnpackError> {
    unpack(&mut &stream[..], &directory(top), links)
}

fn pack(top: &Path) -> (Vec<u8>, Packed) {
    let mut stream = Vec::new();
    let packed = pack_directory(directory(top), &mut stream).expect("it is packed");
    assert_eq!(packed.bytes, stream.len() as u64);
    (stream, packed)
}

/// Builds a stream by hand, so that it can contain anything.
#[derive(Default)]
struct Stream(Vec<u8>);

impl Stream {
    fn entry(self, kind: u8, name: &str, mode: u32, link: &str, contents: &[u8]) -> Self {
        self.sized(kind, name, mode, link, contents.len() as u64, contents)
    }

    fn sized(mut self, kind: u8, name: &str, mode: u32, link: &str, size: u64, contents: &[u8]) -> Self {
        let mut block = [0u8; 512];
        block[..name.len()].copy_from_slice(name.as_bytes());
        let mut put =
            |from: usize, text: String| block[from..from + text.len()].copy_from_slice(text.as_bytes());
        put(100, format!("{mode:07o}\0"));
        put(108, "0000000\0".into());
        put(116, "0000000\0".into());
        put(124, format!("{size:011o}\0"));
        put(136, "00000000000\0".into());
        put(148, " ".repeat(8));
        put(157, link.into());
        put(257, "ustar\x0000".into());
        block[156] = kind;
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend(block);
        self.0.extend(contents);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &str, contents: &str) -> Self {
        self.entry(b'0', name, 0o644, "", contents.as_bytes())
    }

    fn link(self, name: &str, target: &str) -> Self {
        self.entry(b'2', name, 0o777, target, b"")
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// A directory to unpack into, beside one that must not change.
struct World {
    base: TempDir,
}

impl World {
    fn new() -> Self {
        let base = tempfile::tempdir().expect("a directory");
        fs::create_dir(base.path().join("top")).expect("it is new");
        fs::create_dir(base.path().join("outside")).expect("it is new");
        fs::write(base.path().join("outside/secret"), "kept").expect("it is written");
        Self { base }
    }

    fn top(&self) -> std::path::PathBuf {
        self.base.path().join("top")
    }

    fn outside(&self) -> std::path::PathBuf {
        self.base.path().join("outside")
    }

    #[track_caller]
    fn assert_untouched(&self) {
        let names: Vec<_> = fs::read_dir(self.outside()).expect("it is there").flatten().collect();
        assert_eq!(names.len(), 1, "{names:?}");
        assert_eq!(fs::read_to_string(self.outside().join("secret")).expect("it is there"), "kept");
        let beside: Vec<_> = fs::read_dir(self.base.path()).expect("it is there").flatten().collect();
        assert_eq!(beside.len(), 2, "{beside:?}");
    }
}

#[test]
fn names_that_lead_out_are_refused() {
    let world = World::new();
    let absolute = world.outside().join("x").to_string_lossy().into_owned();
    for name in ["../x", "a/../../x", "..", "../outside/secret", absolute.as_str(), "/"] {
        let stream = Stream::default().file(name, "evil").end();
        let refused = unpack_into(&stream, &world.top(), Links::Any);
        assert!(matches!(refused, Err(UnpackError::Name { .. })), "{name}: {refused:?}");
        world.assert_untouched();
    }
}

#[test]
fn nothing_is_written_through_a_link_of_the_stream() {
    let world = World::new();
    let outside = world.outside().to_string_lossy().into_owned();
    for target in [outside.as_str(), "../outside"] {
        let stream = Stream::default().link("door", target).file("door/secret", "evil").end();
        let refused = unpack_into(&stream, &world.top(), Links::Any);
        assert!(matches!(refused, Err(UnpackError::ThroughLink { .. })), "{refused:?}");
        world.assert_untouched();
        let stream = Stream::default().link("door", target).entry(b'5', "door/", 0o777, "", b"").end();
        assert!(unpack_into(&stream, &world.top(), Links::Any).is_err());
        world.assert_untouched();
    }
}

#[test]
fn nothing_is_written_through_a_link_that_was_there() {
    let world = World::new();
    symlink(world.outside(), world.top().join("door")).expect("it is new");
    symlink(world.outside().join("secret"), world.top().join("file")).expect("it is new");
    let refused = unpack_into(&Stream::default().file("door/x", "evil").end(), &world.top(), Links::Any);
    assert!(matches!(refused, Err(UnpackError::ThroughLink { .. })), "{refused:?}");
    // A file replaces a link, and the target of the link stays as it was.
    unpack_into(&Stream::default().file("file", "mine").end(), &world.top(), Links::Any)
        .expect("it is unpacked");
    assert!(!world.top().join("file").is_symlink());
    world.assert_untouched();
}

#[test]
fn a_file_takes_the_place_of_a_link_of_the_same_stream() {
    let world = World::new();
    let target = world.outside().join("secret").to_string_lossy().into_owned();
    let stream = Stream::default().link("x", &target).file("x", "mine").end();
    unpack_into(&stream, &world.top(), Links::Any).expect("it is unpacked");
    assert_eq!(fs::read_to_string(world.top().join("x")).expect("it is there"), "mine");
    world.assert_untouched();
}

#[test]
fn hard_links_stay_inside_and_lead_to_files() {
    let world = World::new();
    for target in ["../outside/secret", "/etc/passwd", "missing", "."] {
        let stream = Stream::default().entry(b'1', "x", 0o644, target, b"").end();
        assert!(unpack_into(&stream, &world.top(), Links::Any).is_err(), "{target}");
    }
    let outside = world.outside().to_string_lossy().into_owned();
    let stream = Stream::default().link("door", &outside).entry(b'1', "x", 0o644, "door/secret", b"").end();
    assert!(unpack_into(&stream, &world.top(), Links::Any).is_err());
    let secret = world.outside().join("secret").to_string_lossy().into_owned();
    let stream = Stream::default().link("l", &secret).entry(b'1', "x", 0o644, "l", b"").end();
    assert!(unpack_into(&stream, &world.top(), Links::Any).is_err());
    let stream = Stream::default().file("a", "one").entry(b'1', "b", 0o644, "a", b"").end();
    unpack_into(&stream, &world.top(), Links::Any).expect("it is unpacked");
    assert_eq!(fs::read_to_string(world.top().join("b")).expect("it is there"), "one");
    world.assert_untouched();
}

#[test]
fn later_entries_of_one_name_win_but_a_directory_does_not_give_way() {
    let world = World::new();
    let stream = Stream::default().file("a", "one").file("a", "two").file("./a", "three").end();
    unpack_into(&stream, &world.top(), Links::Any).expect("it is unpacked");
    assert_eq!(fs::read_to_string(world.top().join("a")).expect("it is there"), "three");
    let stream = Stream::default().file("d/x", "1").file("d", "2").end();
    assert!(matches!(unpack_into(&stream, &world.top(), Links::Any), Err(UnpackError::InTheWay { .. })));
    let stream = Stream::default().file("a/x", "1").end();
    assert!(matches!(unpack_into(&stream, &world.top(), Links::Any), Err(UnpackError::InTheWay { .. })));
}

#[test]
fn setuid_is_taken_away_and_devices_are_left_out() {
    let world = World::new();
    let stream = Stream::default()
        .entry(b'0', "su", 0o6755, "", b"x")
        .entry(b'5', "dir/", 0o7777, "", b"")
        .entry(b'3', "null", 0o666, "", b"")
        .entry(b'4', "disk", 0o666, "", b"")
        .entry(b'6', "fifo", 0o666, "", b"")
        .entry(b'?', "odd", 0o666, "", b"12345")
        .file("after", "still read")
        .end();
    let unpacked = unpack_into(&stream, &world.top(), Links::Any).expect("it is unpacked");
    assert_eq!(unpacked, Unpacked { entries: 3, bytes: 11, skipped: 4 });
    let mode =
        |name: &str| fs::metadata(world.top().join(name)).expect("it is there").permissions().mode() & 0o7777;
    assert_eq!((mode("su"), mode("dir")), (0o755, 0o777));
    for name in ["null", "disk", "fifo", "odd"] {
        assert!(!world.top().join(name).exists(), "{name}");
    }
}

#[test]
fn bombs_are_refused_before_anything_is_taken_for_them() {
    let world = World::new();
    let sparse = Stream::default().entry(b'S', "hole", 0o644, "", b"").end();
    assert!(matches!(unpack_into(&sparse, &world.top(), Links::Any), Err(UnpackError::Unsupported { .. })));
    let pax = b"22 GNU.sparse.major=1\n";
    let sparse = Stream::default().entry(b'x', "pax", 0o644, "", pax).file("hole", "x").end();
    assert!(matches!(unpack_into(&sparse, &world.top(), Links::Any), Err(UnpackError::Unsupported { .. })));
    // It claims a size that it does not have.
    let huge = Stream::default().sized(b'0', "huge", 0o644, "", 0o77777777777, b"x").end();
    assert!(matches!(unpack_into(&huge, &world.top(), Links::Any), Err(UnpackError::Truncated)));
    let name = Stream::default().sized(b'L', "long", 0o644, "", 0o77777777777, b"x").end();
    assert!(matches!(unpack_into(&name, &world.top(), Links::Any), Err(UnpackError::Header { .. })));
    let deep = "d/".repeat(40);
    let pax_path = format!("{}x", "d/".repeat(300));
    let record = format!(" path={pax_path}\n");
    let record = format!("{}{record}", record.len() + 3);
    let stream = Stream::default().entry(b'x', "pax", 0, "", record.as_bytes()).file("x", "x").end();
    let refused = unpack_into(&stream, &world.top(), Links::Any);
    assert!(matches!(refused, Err(UnpackError::Name { .. })), "{refused:?}");
    unpack_into(&Stream::default().file(&format!("{deep}x"), "x").end(), &world.top(), Links::Any)
        .expect("this is not too deep");
}

#[test]
fn a_million_entries_and_one_are_too_many() {
    let world = World::new();
    let block = Stream::default().entry(b'6', "f", 0o644, "", b"").0;
    struct Endless(Vec<u8>, usize);
    impl Read for Endless {
        fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
            let length = into.len().min(self.0.len() - self.1);
            into[..length].copy_from_slice(&self.0[self.1..self.1 + length]);
            self.1 = (self.1 + length) % self.0.len();
            Ok(length)
        }
    }
    let refused = unpack(&mut Endless(block, 0), &directory(&world.top()), Links::Any);
    assert!(matches!(refused, Err(UnpackError::TooMany { .. })), "{refused:?}");
}

#[test]
fn on_a_host_links_that_lead_out_are_left_out() {
    let world = World::new();
    let stream = Stream::default()
        .link("a", "/etc/passwd")
        .link("b", "../outside/secret")
        .link("c/d/up", "../..")
        .link("c/d/out", "../../..")
        .link("trick", "c/d/up/..")
        .link("fine", "c/d")
        .end();
    let unpacked = unpack_into(&stream, &world.top(), Links::Inside).expect("it is unpacked");
    assert_eq!((unpacked.entries, unpacked.skipped), (2, 4));
    assert!(world.top().join("fine").is_symlink() && world.top().join("c/d/up").is_symlink());
}

#[test]
fn streams_that_break_off_or_are_none_are_refused() {
    let world = World::new();
    let whole = Stream::default().file("a", &"x".repeat(3000)).end();
    for length in [0, 1, 511, 513, 1000, 3500] {
        assert!(unpack_into(&whole[..length], &world.top(), Links::Any).is_err(), "{length} bytes");
    }
    assert!(matches!(unpack_into(&[b'x'; 2000], &world.top(), Links::Any), Err(UnpackError::Header { .. })));
}

#[test]
fn a_tree_comes_back_as_it_was() {
    let from = tempfile::tempdir().expect("a directory");
    let at = |name: &str| from.path().join(name);
    fs::create_dir_all(at("deep/er/est")).expect("they are new");
    fs::write(at("deep/er/file"), vec![7; 100_000]).expect("it is written");
    fs::write(at("empty"), "").expect("it is written");
    fs::set_permissions(at("empty"), fs::Permissions::from_mode(0o4711)).expect("it is ours");
    let long = "n".repeat(250);
    fs::write(at(&long), "long").expect("it is written");
    fs::create_dir(at(&format!("{}/", "d".repeat(200)))).expect("it is new");
    symlink("t".repeat(300), at("link")).expect("it is new");
    fs::write(from.path().join(OsStr::from_bytes(b"\xff\xfe\n")), "odd").expect("it is written");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        at("fifo"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::from_raw_mode(0o600),
        0,
    )
    .expect("anybody may");
    let (stream, packed) = pack(from.path());
    assert_eq!((packed.entries, packed.skipped), (9, 1));
    let to = tempfile::tempdir().expect("a directory");
    let unpacked = unpack_into(&stream, to.path(), Links::Any).expect("it is unpacked");
    assert_eq!((unpacked.entries, unpacked.skipped), (9, 0));
    assert_eq!(fs::read(to.path().join("deep/er/file")).expect("it is there"), vec![7; 100_000]);
    assert_eq!(fs::read(to.path().join(&long)).expect("it is there"), b"long");
    assert_eq!(fs::read_link(to.path().join("link")).expect("it is there").as_os_str().len(), 300);
    assert_eq!(fs::read(to.path().join(OsStr::from_bytes(b"\xff\xfe\n"))).expect("it is there"), b"odd");
    let mode = fs::metadata(to.path().join("empty")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o7777, 0o711);
}

#[test]
fn gnu_tar_reads_what_we_write_and_we_read_what_it_writes() {
    let from = tempfile::tempdir().expect("a directory");
    fs::create_dir_all(from.path().join("a").join("b".repeat(150))).expect("they are new");
    fs::write(from.path().join("a").join("b".repeat(150)).join("c"), "contents").expect("it is written");
    let (stream, _) = pack(from.path());
    let archive = from.path().with_extension("tar");
    fs::write(&archive, &stream).expect("it is written");
    let to = tempfile::tempdir().expect("a directory");
    let read = Command::new("tar").arg("xf").arg(&archive).arg("-C").arg(to.path()).status();
    assert!(read.expect("tar is part of every system").success());
    assert!(to.path().join("a").join("b".repeat(150)).join("c").exists());
    for format in ["gnu", "pax", "ustar"] {
        let name = if format == "ustar" { "short" } else { "." };
        fs::write(from.path().join("short"), "x").expect("it is written");
        let mut tar = Command::new("tar")
            .args(["cf", "-", &format!("--format={format}"), "-C"])
            .arg(from.path())
            .arg(name)
            .stdout(Stdio::piped())
            .spawn()
            .expect("tar is part of every system");
        let into = tempfile::tempdir().expect("a directory");
        let mut stdout = tar.stdout.take().expect("it is a pipe");
        unpack(&mut stdout, &directory(into.path()), Links::Inside).expect("it is unpacked");
        assert!(tar.wait().expect("it ends").success());
        assert_eq!(fs::read(into.path().join("short")).expect("it is there"), b"x", "{format}");
    }
    fs::remove_file(archive).expect("it is ours");
}

#[test]
fn a_directory_without_the_right_to_write_gets_its_files_first() {
    let world = World::new();
    let stream = Stream::default().entry(b'5', "ro/", 0o555, "", b"").file("ro/x", "in it").end();
    unpack_into(&stream, &world.top(), Links::Any).expect("it is unpacked");
    let mode = fs::metadata(world.top().join("ro")).expect("it is there").permissions().mode();
    assert_eq!(mode & 0o777, 0o555);
    assert_eq!(fs::read(world.top().join("ro/x")).expect("it is there"), b"in it");
}

#[test]
fn a_tree_too_deep_to_walk_is_refused() {
    let base = tempfile::tempdir().expect("a directory");
    let mut at: OwnedFd = directory(base.path());
    for _ in 0..300 {
        rustix::fs::mkdirat(&at, "d", rustix::fs::Mode::from_raw_mode(0o755)).expect("it is new");
        let flags = rustix::fs::OFlags::DIRECTORY | rustix::fs::OFlags::CLOEXEC;
        at = rustix::fs::openat(&at, "d", flags, rustix::fs::Mode::empty()).expect("it is there");
    }
    let refused = pack_directory(directory(base.path()), &mut Vec::new());
    assert!(matches!(refused, Err(PackError::TooDeep { .. })), "{refused:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_stream_does_harm(
        kinds in proptest::collection::vec(
            (prop::sample::select(vec![b'0', b'1', b'2', b'5', b'6', b'x', b'L', b'K', b'g']),
             "[a./]{1,6}", "[a./]{0,6}", "[a-z ./=0-9\n]{0,40}"), 0..12),
        cut in 0usize..2000,
    ) {
        let world = World::new();
        let mut stream = Stream::default();
        for (kind, name, link, contents) in &kinds {
            stream = stream.entry(*kind, name, 0o644, link, contents.as_bytes());
        }
        let mut stream = stream.end();
        stream.truncate(stream.len().saturating_sub(cut));
        let _ = unpack_into(&stream, &world.top(), Links::Any);
        world.assert_untouched();
    }
}
