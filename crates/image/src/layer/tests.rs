//! Layers made by hand, valid and hostile, over a directory in the role of the layers below.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use proptest::prelude::*;
use wire::launch::{Finish, LayerFacts, LayerFault};

use super::{Limits, finish, unpack};
use crate::hash::digest_of;

/// A tar stream under construction.
#[derive(Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn header(&mut self, path: &[u8], kind: u8, mode: u32, size: u64, link: &[u8]) {
        let mut block = [0u8; 512];
        block[..path.len()].copy_from_slice(path);
        let own = own_ids();
        for (range, number) in [
            (100..107, u64::from(mode)),
            (108..115, own.0),
            (116..123, own.1),
            (124..135, size),
            (136..147, 1_000_000),
        ] {
            let width = range.len();
            block[range].copy_from_slice(format!("{number:0width$o}").as_bytes());
        }
        block[156] = kind;
        block[157..157 + link.len()].copy_from_slice(link);
        block[257..263].copy_from_slice(b"ustar\0");
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        self.0.extend_from_slice(&block);
    }

    fn data(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
    }

    fn file(mut self, path: &str, contents: &str) -> Self {
        self.header(path.as_bytes(), b'0', 0o644, contents.len() as u64, b"");
        self.data(contents.as_bytes());
        self
    }

    fn directory(mut self, path: &str, mode: u32) -> Self {
        self.header(path.as_bytes(), b'5', mode, 0, b"");
        self
    }

    fn link(mut self, path: &str, target: &str) -> Self {
        self.header(path.as_bytes(), b'2', 0o777, 0, target.as_bytes());
        self
    }

    fn hard_link(mut self, path: &str, target: &str) -> Self {
        self.header(path.as_bytes(), b'1', 0o644, 0, target.as_bytes());
        self
    }

    fn other(mut self, path: &str, kind: u8) -> Self {
        self.header(path.as_bytes(), kind, 0o666, 0, b"");
        self
    }

    fn pax(mut self, records: &[(&str, &str)]) -> Self {
        let mut text = String::new();
        for (key, value) in records {
            let rest = format!(" {key}={value}\n");
            let mut length = rest.len() + 1;
            while length != rest.len() + length.to_string().len() {
                length += 1;
            }
            text += &format!("{length}{rest}");
        }
        self.header(b"pax", b'x', 0o644, text.len() as u64, b"");
        self.data(text.as_bytes());
        self
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// The ids of this process, so that tests need no privilege to change owners.
fn own_ids() -> (u64, u64) {
    let own = fs::metadata("/proc/self").expect("a process has a directory");
    (own.uid().into(), own.gid().into())
}

struct Ground {
    dir: tempfile::TempDir,
}

impl Ground {
    /// An empty layer over what `build` creates.
    fn over(build: impl FnOnce(&Path)) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        for name in ["top", "below", "outside"] {
            fs::create_dir(dir.path().join(name)).expect("it can be made");
        }
        fs::write(dir.path().join("outside/secret"), "secret").expect("it can be written");
        build(&dir.path().join("below"));
        Self { dir }
    }

    fn try_unpack(&self, tar: Vec<u8>, limits: &Limits) -> Result<LayerFacts, LayerFault> {
        let open = |name: &str| fs::File::open(self.dir.path().join(name)).expect("it opens");
        let (top, below) = (open("top"), open("below"));
        let length = tar.len() as u64;
        let contents = digest_of(&tar);
        unpack(&mut tar.as_slice(), length, contents, top.as_fd(), Some(below.as_fd()), limits)
    }

    #[track_caller]
    fn unpack(&self, tar: Tar) -> BTreeMap<String, String> {
        self.try_unpack(tar.end(), &Limits::default()).expect("it can be unpacked");
        self.tree()
    }

    #[track_caller]
    fn refuse(&self, tar: Tar) -> LayerFault {
        let fault = self.try_unpack(tar.end(), &Limits::default()).expect_err("it is refused");
        let outside: Vec<_> = fs::read_dir(self.dir.path().join("outside")).expect("it is there").collect();
        assert_eq!(outside.len(), 1, "nothing was made outside");
        fault
    }

    /// Everything in the layer: directories by mode, files by contents, links by target, whiteouts.
    fn tree(&self) -> BTreeMap<String, String> {
        let mut tree = BTreeMap::new();
        walk(&self.dir.path().join("top"), "", &mut tree);
        tree
    }
}

fn walk(at: &Path, below: &str, tree: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(at).expect("it is a directory") {
        let entry = entry.expect("it can be read");
        let path = format!("{below}{}", entry.file_name().to_string_lossy());
        let meta = entry.path().symlink_metadata().expect("it is there");
        let kind = meta.file_type();
        let text = if kind.is_dir() {
            walk(&entry.path(), &format!("{path}/"), tree);
            format!("{:o}", meta.mode() & 0o7777)
        } else if kind.is_symlink() {
            let target = fs::read_link(entry.path()).expect("a link leads somewhere");
            format!("-> {}", String::from_utf8_lossy(target.as_os_str().as_bytes()))
        } else if kind.is_file() {
            fs::read_to_string(entry.path()).expect("it can be read")
        } else if meta.rdev() == 0 && kind.is_char_device() {
            "hidden".into()
        } else {
            "special".into()
        };
        tree.insert(path, text);
    }
}

#[track_caller]
fn check(tree: &BTreeMap<String, String>, expected: &[(&str, &str)]) {
    let found: Vec<(&str, &str)> = tree.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    assert_eq!(found, expected);
}

fn nothing(_: &Path) {}

#[test]
fn files_directories_and_links_are_what_the_stream_says() {
    let ground = Ground::over(nothing);
    let tar = Tar::default()
        .directory("./", 0o700)
        .directory("etc/", 0o750)
        .file("./etc/file", "text")
        .file("/absolute", "inside")
        .link("etc/link", "/etc/file")
        .hard_link("etc/hard", "./etc/file")
        .file("implied/parent/file", "x")
        .other("etc/fifo", b'6');
    check(
        &ground.unpack(tar),
        &[
            ("absolute", "inside"),
            ("etc", "750"),
            ("etc/fifo", "special"),
            ("etc/file", "text"),
            ("etc/hard", "text"),
            ("etc/link", "-> /etc/file"),
            ("implied", "755"),
            ("implied/parent", "755"),
            ("implied/parent/file", "x"),
        ],
    );
    let meta = |path: &str| fs::metadata(ground.dir.path().join("top").join(path)).expect("it is there");
    assert_eq!(meta("etc/file").ino(), meta("etc/hard").ino());
    assert_eq!((meta("etc/file").mtime(), meta("etc").mtime()), (1_000_000, 1_000_000));
}

#[test]
fn an_implied_directory_looks_like_the_one_below() {
    let ground = Ground::over(|below| {
        fs::create_dir_all(below.join("tmp/inner")).expect("made");
        fs::set_permissions(below.join("tmp"), fs::Permissions::from_mode(0o1777)).expect("set");
        fs::set_permissions(below.join("tmp/inner"), fs::Permissions::from_mode(0o2710)).expect("set");
    });
    check(
        &ground.unpack(Tar::default().file("tmp/inner/file", "x")),
        &[("tmp", "1777"), ("tmp/inner", "2710"), ("tmp/inner/file", "x")],
    );
}

#[test]
fn a_linked_parent_leads_where_it_leads_in_the_image() {
    let ground = Ground::over(|below| {
        fs::create_dir_all(below.join("usr/lib")).expect("made");
        symlink("usr/lib", below.join("lib")).expect("linked");
        symlink("/usr", below.join("absolute")).expect("linked");
        symlink("../../../../../../usr", below.join("up")).expect("linked");
    });
    let tar = Tar::default()
        .file("lib/a", "a")
        .file("absolute/b", "b")
        .file("up/c", "c")
        .link("own", "usr/lib")
        .file("own/d", "d");
    let tree = ground.unpack(tar);
    check(
        &tree,
        &[
            ("own", "-> usr/lib"),
            ("usr", "755"),
            ("usr/b", "b"),
            ("usr/c", "c"),
            ("usr/lib", "755"),
            ("usr/lib/a", "a"),
            ("usr/lib/d", "d"),
        ],
    );
}

#[test]
fn a_link_to_the_outside_leads_nowhere_outside() {
    let ground = Ground::over(nothing);
    let outside = ground.dir.path().join("outside");
    let outside = outside.to_str().expect("text");
    let climb = format!("{}{}", "../".repeat(20), outside.trim_start_matches('/'));
    if outside.len() > 99 || climb.len() > 99 {
        return; // The directory for temporary files is too deep for the short names of this stream.
    }
    let tar = Tar::default()
        .link("a", outside)
        .file("a/secret", "changed")
        .link("b", &climb)
        .file("b/new", "new")
        .link("file", &format!("{outside}/secret"))
        .file("file", "replaced");
    let tree = ground.unpack(tar);
    assert_eq!(fs::read_to_string(format!("{outside}/secret")).expect("it is there"), "secret");
    assert!(!Path::new(outside).join("new").exists());
    assert_eq!(tree["file"], "replaced");
    assert_eq!(tree[&format!("{}/secret", outside.trim_start_matches('/'))], "changed");
}

#[test]
fn links_in_a_circle_are_refused() {
    let ground = Ground::over(nothing);
    let fault = ground.refuse(Tar::default().link("a", "b").link("b", "a").file("a/x", "x"));
    assert!(matches!(fault, LayerFault::Name { .. }), "{fault}");
}

#[test]
fn names_that_lead_up_are_refused() {
    for name in ["../evil", "a/../../evil", "a/..", "..", "/../evil"] {
        let fault = Ground::over(nothing).refuse(Tar::default().file(name, "x"));
        assert!(matches!(fault, LayerFault::Name { .. }), "{name}: {fault}");
        let fault = Ground::over(nothing).refuse(Tar::default().hard_link("x", name));
        assert!(matches!(fault, LayerFault::Name { .. }), "{name}: {fault}");
    }
}

#[test]
fn hard_links_lead_to_files_of_the_image_alone() {
    let ground = Ground::over(|below| {
        fs::write(below.join("old"), "old").expect("written");
        fs::set_permissions(below.join("old"), fs::Permissions::from_mode(0o600)).expect("set");
        symlink("old", below.join("oldlink")).expect("linked");
        fs::create_dir(below.join("dir")).expect("made");
    });
    let tree = ground.unpack(Tar::default().hard_link("new", "old").hard_link("newlink", "oldlink"));
    check(&tree, &[("new", "old"), ("newlink", "-> old"), ("old", "old"), ("oldlink", "-> old")]);
    let mode = fs::metadata(ground.dir.path().join("top/new")).expect("it is there").mode();
    assert_eq!(mode & 0o7777, 0o600);
    for target in ["missing", "dir", "/", "/etc/passwd", "old/x"] {
        let fault = ground.refuse(Tar::default().hard_link("y", target));
        assert!(matches!(fault, LayerFault::Name { .. }), "{target}: {fault}");
    }
    check(
        &ground.unpack(Tar::default().file("self", "s").hard_link("self", "self")),
        &[("new", "old"), ("newlink", "-> old"), ("old", "old"), ("oldlink", "-> old"), ("self", "s")],
    );
}

fn below_with_trees(below: &Path) {
    for name in ["a/x", "a/y", "b/x", "b/sub/deep", "c/x"] {
        fs::create_dir_all(below.join(name).parent().expect("it has one")).expect("made");
        fs::write(below.join(name), name).expect("written");
    }
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_else() {
    let ground = Ground::over(below_with_trees);
    let tar = Tar::default()
        .file("a/.wh.x", "")
        .file(".wh.c", "")
        .file(".wh.missing", "")
        .file("nowhere/at/all/.wh.x", "")
        .file("own", "own")
        .file(".wh.own", "")
        .file(".wh..wh.plnk", "");
    check(&ground.unpack(tar), &[("a", "755"), ("a/x", "hidden"), ("c", "hidden"), ("own", "own")]);
}

#[test]
fn a_whiteout_and_a_new_directory_of_the_same_name_hide_the_old_contents_in_either_order() {
    for early in [true, false] {
        let ground = Ground::over(below_with_trees);
        let mut tar = Tar::default();
        if early {
            tar = tar.file(".wh.b", "");
        }
        tar = tar.directory("b/", 0o755).file("b/new", "new");
        if !early {
            tar = tar.file(".wh.b", "");
        }
        check(&ground.unpack(tar), &[("b", "755"), ("b/new", "new"), ("b/sub", "hidden"), ("b/x", "hidden")]);
    }
}

#[test]
fn an_opaque_directory_hides_all_that_is_below_it() {
    for early in [true, false] {
        let ground = Ground::over(below_with_trees);
        let mut tar = Tar::default().directory("b/", 0o755);
        if early {
            tar = tar.file("b/.wh..wh..opq", "");
        }
        tar = tar.file("b/x", "new").directory("b/sub/", 0o755).file("b/sub/new", "new");
        if !early {
            tar = tar.file("b/.wh..wh..opq", "");
        }
        check(
            &ground.unpack(tar),
            &[("b", "755"), ("b/sub", "755"), ("b/sub/deep", "hidden"), ("b/sub/new", "new"), ("b/x", "new")],
        );
    }
}

#[test]
fn an_opaque_root_hides_everything() {
    let ground = Ground::over(below_with_trees);
    let tree = ground.unpack(Tar::default().file(".wh..wh..opq", "").file("a/new", "new"));
    check(
        &tree,
        &[
            ("a", "755"),
            ("a/new", "new"),
            ("a/x", "hidden"),
            ("a/y", "hidden"),
            ("b", "hidden"),
            ("c", "hidden"),
        ],
    );
}

#[test]
fn whiteouts_of_nothing_nameable_are_refused() {
    for name in [".wh.", ".wh..", ".wh...", "a/.wh..."] {
        let fault = Ground::over(nothing).refuse(Tar::default().file(name, ""));
        assert!(matches!(fault, LayerFault::Name { .. }), "{name}: {fault}");
    }
}

#[test]
fn whatever_comes_later_takes_the_name() {
    let ground = Ground::over(below_with_trees);
    let tar = Tar::default()
        .directory("a/", 0o700)
        .file("a/x", "x")
        .file("a", "now a file")
        .file("f", "f")
        .directory("f/", 0o711)
        .link("l", "a")
        .directory("l/", 0o755)
        .file("twice", "1")
        .file("twice", "22");
    check(&ground.unpack(tar), &[("a", "now a file"), ("f", "711"), ("l", "755"), ("twice", "22")]);
}

#[test]
fn a_file_on_the_way_is_refused() {
    let ground = Ground::over(|below| fs::write(below.join("file"), "").expect("written"));
    for tar in [Tar::default().file("file/x", "x"), Tar::default().file("f", "f").file("f/x", "x")] {
        let fault = ground.refuse(tar);
        assert!(matches!(fault, LayerFault::Name { .. }), "{fault}");
    }
}

#[test]
fn devices_are_left_out_and_counted() {
    let ground = Ground::over(nothing);
    let tar = Tar::default().other("dev/null", b'3').other("disk", b'4').file("kept", "kept");
    let facts = ground.try_unpack(tar.end(), &Limits::default()).expect("it can be unpacked");
    assert_eq!((facts.devices_skipped, facts.entries), (2, 3));
    check(&ground.tree(), &[("kept", "kept")]);
}

#[test]
fn attributes_of_overlays_are_dropped_and_counted() {
    let ground = Ground::over(nothing);
    let tar = Tar::default()
        .pax(&[
            ("SCHILY.xattr.trusted.overlay.opaque", "y"),
            ("SCHILY.xattr.user.overlay.opaque", "y"),
            ("SCHILY.xattr.security.selinux", "s"),
        ])
        .directory("d/", 0o755);
    let facts = ground.try_unpack(tar.end(), &Limits::default()).expect("it can be unpacked");
    assert_eq!(facts.attributes_dropped, 3);
    let directory = fs::File::open(ground.dir.path().join("top/d")).expect("it opens");
    let mut names = [0; 1024];
    let length = rustix::fs::flistxattr(&directory, &mut names[..]).expect("it can be asked");
    assert!(!String::from_utf8_lossy(&names[..length]).contains("overlay"));
}

#[test]
fn holes_take_no_room_and_read_as_zeroes() {
    let ground = Ground::over(nothing);
    let big = "\0".repeat(1 << 20) + "end";
    let tree = ground.unpack(Tar::default().file("hole", &big).file("zeroes", &"\0".repeat(100_000)));
    assert!(tree["hole"] == big && tree["zeroes"].len() == 100_000);
    let meta = fs::metadata(ground.dir.path().join("top/hole")).expect("it is there");
    assert!(meta.blocks() * 512 < 200_000, "{} blocks", meta.blocks());
}

#[test]
fn bombs_are_refused() {
    let ground = Ground::over(nothing);
    let tar = || Tar::default().file("a", &"x".repeat(5000)).file("b", "").file("c", "").end();
    let few = Limits { entries_max: 2, ..Limits::default() };
    let fault = ground.try_unpack(tar(), &few).expect_err("too many");
    assert!(matches!(&fault, LayerFault::TooLarge { what, limit: 2 } if what == "entries"), "{fault}");
    let small = Limits { bytes_max: 4096, ..Limits::default() };
    let fault = ground.try_unpack(tar(), &small).expect_err("too large");
    assert!(matches!(&fault, LayerFault::TooLarge { what, limit: 4096 } if what == "bytes"), "{fault}");
    let exact = Limits { bytes_max: tar().len() as u64, ..Limits::default() };
    ground.try_unpack(tar(), &exact).expect("just that much");
}

#[test]
fn contents_that_are_not_what_was_promised_are_refused() {
    let ground = Ground::over(nothing);
    let top = fs::File::open(ground.dir.path().join("top")).expect("it opens");
    let tar = Tar::default().file("a", "a").end();
    let other = digest_of(b"something else");
    let fault = unpack(&mut tar.as_slice(), 10, other, top.as_fd(), None, &Limits::default());
    assert_eq!(fault, Err(LayerFault::Digest { expected: other, found: digest_of(&tar) }));
}

#[test]
fn rubbish_and_half_streams_are_refused() {
    let ground = Ground::over(nothing);
    let tar = Tar::default().file("a", &"a".repeat(3000)).end();
    for bytes in [b"".to_vec(), b"rubbish".to_vec(), vec![7; 5000], tar[..1000].to_vec()] {
        let fault = ground.try_unpack(bytes, &Limits::default()).expect_err("it is refused");
        assert!(matches!(fault, LayerFault::Damaged { .. }), "{fault}");
    }
    let fault = ground.try_unpack(b"\xfd7zXZ\0abc".to_vec(), &Limits::default()).expect_err("refused");
    assert!(matches!(fault, LayerFault::Unsupported { .. }), "{fault}");
}

#[test]
fn compressed_streams_are_read_in_all_their_pieces() {
    use std::io::Write;
    let tar = Tar::default().file("a", &"text ".repeat(100_000)).file("b", "b").end();
    let (first, second) = tar.split_at(tar.len() / 2);
    let gzip = |bytes: &[u8]| {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).expect("memory takes it");
        encoder.finish().expect("memory takes it")
    };
    let zstd = |bytes: &[u8]| {
        let mut out = Vec::new();
        ruzstd::encoding::compress(bytes, &mut out, ruzstd::encoding::CompressionLevel::Fastest);
        out
    };
    let skipped = [&[0x51, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"abc"].concat();
    for blob in [
        tar.clone(),
        gzip(&tar),
        [gzip(first), gzip(second)].concat(),
        zstd(&tar),
        [zstd(first), skipped.clone(), zstd(second)].concat(),
        [skipped, zstd(&tar)].concat(),
    ] {
        let ground = Ground::over(nothing);
        let top = fs::File::open(ground.dir.path().join("top")).expect("it opens");
        let length = blob.len() as u64;
        let limits = Limits::default();
        unpack(&mut blob.as_slice(), length, digest_of(&tar), top.as_fd(), None, &limits)
            .expect("it is unpacked");
        assert_eq!(ground.tree()["b"], "b");
        for cut in [blob.len() / 3, blob.len() * 9 / 10] {
            let cut = &blob[..cut];
            let again = Ground::over(nothing);
            let top = fs::File::open(again.dir.path().join("top")).expect("it opens");
            unpack(&mut &*cut, length, digest_of(&tar), top.as_fd(), None, &limits).expect_err("half of it");
        }
    }
}

#[test]
fn finishing_adds_what_is_missing_and_replaces_what_cannot_be_mounted_on() {
    let ground = Ground::over(|below| {
        fs::create_dir(below.join("etc")).expect("made");
        fs::set_permissions(below.join("etc"), fs::Permissions::from_mode(0o750)).expect("set");
        fs::write(below.join("etc/hosts"), "1.2.3.4 evil").expect("written");
        symlink("/outside", below.join("etc/resolv.conf")).expect("linked");
        symlink("/somewhere", below.join("dev")).expect("linked");
        fs::write(below.join("proc"), "").expect("written");
        fs::create_dir(below.join("sys")).expect("made");
        symlink("/var/tmp", below.join("tmp")).expect("linked");
    });
    let open = |name: &str| fs::File::open(ground.dir.path().join(name)).expect("it opens");
    let wanted = Finish { open_workspace: true, working_directory: Some("/tmp/../srv/../tmp/app".into()) };
    finish(open("top").as_fd(), Some(open("below").as_fd()), &wanted)
        .expect("paths that lead up are left out");
    let again = Ground::over(|below| symlink("/srv", below.join("app")).expect("linked"));
    let open_again = |name: &str| fs::File::open(again.dir.path().join(name)).expect("it opens");
    let wanted = Finish { open_workspace: false, working_directory: Some("/app/deep".into()) };
    finish(open_again("top").as_fd(), Some(open_again("below").as_fd()), &wanted).expect("it is finished");
    assert_eq!(
        again.tree().get("srv/deep").map(String::as_str),
        Some("755"),
        "links are resolved inside the image"
    );
    let tree = ground.tree();
    let names: Vec<(&str, &str)> =
        tree.iter().filter(|(path, _)| !path.contains('/')).map(|(a, b)| (a.as_str(), b.as_str())).collect();
    assert_eq!(
        names,
        [
            ("dev", "755"),
            ("etc", "750"),
            ("proc", "555"),
            ("root", "700"),
            ("run", "755"),
            ("workspace", "777")
        ]
    );
    assert!(tree["etc/hosts"].contains("localhost") && !tree["etc/resolv.conf"].starts_with("->"));
}

/// Few names and kinds, so that they collide.
fn some_entries() -> impl Strategy<Value = Vec<(usize, String, String)>> {
    let part = prop_oneof![
        Just("a"),
        Just("b"),
        Just(".."),
        Just("."),
        Just(".wh.a"),
        Just(".wh..wh..opq"),
        Just("link"),
        Just("etc")
    ];
    let path = proptest::collection::vec(part, 1..4).prop_map(|parts| parts.join("/"));
    let target = prop_oneof![path.clone(), path.clone().prop_map(|path| format!("/{path}"))];
    proptest::collection::vec((0usize..6, path, target), 1..30)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// For any entries, nothing outside of the layer changes, and nothing in the layers below.
    #[test]
    fn no_layer_reaches_beyond_itself(entries in some_entries()) {
        let ground = Ground::over(|below| {
            below_with_trees(below);
            symlink("../../outside", below.join("link")).expect("linked");
        });
        let mut tar = Tar::default();
        for (kind, path, target) in &entries {
            tar = match kind {
                0 => tar.file(path, "new"),
                1 => tar.directory(path, 0o755),
                2 => tar.link(path, target),
                3 => tar.hard_link(path, target),
                4 => tar.other(path, b'6'),
                _ => tar.other(path, b'3'),
            };
        }
        let before = tree_of(&ground.dir.path().join("below"));
        let _ = ground.try_unpack(tar.end(), &Limits::default());
        prop_assert_eq!(tree_of(&ground.dir.path().join("below")), before);
        let outside = tree_of(&ground.dir.path().join("outside"));
        prop_assert_eq!(outside, BTreeMap::from([("secret".to_owned(), "secret".to_owned())]));
    }
}

fn tree_of(at: &Path) -> BTreeMap<String, String> {
    let mut tree = BTreeMap::new();
    walk(at, "", &mut tree);
    tree
}
