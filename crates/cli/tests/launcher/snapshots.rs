//! Snapshots that a real launcher takes, and sandboxes that lie over them.

use runtime::ns::NsBackend;
use runtime::{BackendError, Isolation, Spec, Storage, StoreConfig};
use wire::SnapshotId;
use wire::launch::{
    DiffSide, Difference, DifferenceKind, Motion, Over, Rootfs, SNAPSHOT_LAYERS_MAX, STORE_BYTES_MIN,
    StoreKind, StoreWish,
};

use super::{Host, random, spec};

fn snapshot_id() -> SnapshotId {
    SnapshotId::from_random(u128::from(random()) << 64 | u128::from(random()))
}

async fn start(host: &Host) -> NsBackend {
    let size_bytes = Some(STORE_BYTES_MIN);
    host.start_on(StoreConfig { wish: StoreWish::Just(StoreKind::Loop), size_bytes }).await
}

async fn launch(backend: &NsBackend, over: Over) -> Spec {
    let spec = Spec { over, ..spec() };
    backend.launch(&spec).await.expect("it is made");
    spec
}

/// Takes a snapshot as the engine does, and returns what a sandbox over it begins with.
async fn take(backend: &NsBackend, source: &Spec) -> (SnapshotId, Over) {
    let id = snapshot_id();
    backend.settle_files(source.sandbox).await.expect("it is written");
    backend.freeze(source.sandbox, Motion::Still).await.expect("it is frozen");
    backend.take_snapshot(source.sandbox, id).await.expect("it is taken");
    backend.freeze(source.sandbox, Motion::Going).await.expect("it goes on");
    (id, source.over.with(id))
}

const CHANGE: &str = "
import os, shutil
os.makedirs('/workspace/tree/inner', exist_ok=True)
open('/workspace/tree/inner/file', 'w').write('one')
open('/workspace/gone', 'w').write('here')
os.link('/workspace/gone', '/workspace/linked')
os.remove('/usr/share/common-licenses/BSD') if os.path.exists('/usr/share/common-licenses/BSD') else None
open('/usr/bin/of-mine', 'w').write('x')
os.chmod('/usr/bin/of-mine', 0o4750)
os.chown('/usr/bin/of-mine', 1000, 1000)
os.mkfifo('/workspace/pipe')
";

const LATER: &str = "
import os, shutil
os.rename('/workspace/tree', '/workspace/moved')
os.remove('/workspace/gone')
shutil.rmtree('/workspace/moved/inner')
os.makedirs('/workspace/moved/inner')
open('/workspace/moved/inner/other', 'w').write('two')
open('/usr/bin/of-mine', 'w').write('yy')
";

const LOOK: &str = "
import os
out = []
for top in ('/workspace', '/usr/bin/of-mine', '/usr/share/common-licenses'):
    walk = [(top, [], [])] if os.path.isfile(top) else os.walk(top)
    for at, dirs, files in walk:
        for path in sorted([at] + [os.path.join(at, name) for name in dirs + files]):
            s = os.lstat(path)
            text = open(path).read() if os.path.isfile(path) and s.st_size < 4096 else ''
            out.append((path, oct(s.st_mode), s.st_uid, s.st_gid, len(text) if len(text) > 64 else text))
print(sorted(set(map(str, out))))
";

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_over_a_snapshot_has_its_files_and_does_not_change_them() {
    let host = Host::new();
    let backend = start(&host).await;
    let source = launch(&backend, Over::default()).await;
    host.says(source.sandbox, CHANGE);
    let before = host.says(source.sandbox, LOOK);
    let (id, over) = take(&backend, &source).await;
    host.says(source.sandbox, LATER);
    let look = |spec: &Spec| host.says(spec.sandbox, LOOK);
    let (child, other) = (launch(&backend, over.clone()).await, launch(&backend, over.clone()).await);
    assert_eq!(look(&child), before, "the child has what was there then");
    host.says(child.sandbox, LATER);
    assert!(look(&child).contains("/workspace/moved/inner/other"), "{}", look(&child));
    assert!(
        !look(&child).contains("inner/file"),
        "a directory that was replaced shows nothing of the old one"
    );
    assert!(look(&other).contains("/workspace/tree/inner/file"), "a sibling sees none of it");
    // A snapshot of the child, and a grandchild over both: renamed and removed files are right through two layers.
    let (second, over) = take(&backend, &child).await;
    assert_eq!(over.layers, [second, id]);
    let grandchild = launch(&backend, over).await;
    assert_eq!(look(&grandchild), look(&child));
    for spec in [source, child, other, grandchild] {
        backend.teardown(spec.sandbox).await.expect("it goes");
    }
    let mut left = backend.snapshots().await.expect("a list");
    let mut expected = vec![id, second];
    left.sort();
    expected.sort();
    assert_eq!(left, expected, "snapshots outlive sandboxes");
    for id in expected {
        for _ in 0..2 {
            backend.remove_snapshot(id).await.expect("removing twice is harmless");
        }
    }
    assert_eq!(backend.snapshots().await.expect("a list"), []);
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chain_of_snapshots_beyond_the_bound_goes_on_with_copies() {
    let host = Host::new();
    let backend = start(&host).await;
    let mut at = launch(&backend, Over::default()).await;
    for round in 0..SNAPSHOT_LAYERS_MAX + 3 {
        host.says(at.sandbox, &format!("open('/workspace/{round}', 'w').write('{round}')"));
        let (_, over) = take(&backend, &at).await;
        assert_eq!(over.copy.is_some(), round >= SNAPSHOT_LAYERS_MAX, "{round}: {over:?}");
        backend.teardown(at.sandbox).await.expect("it goes");
        at = launch(&backend, over).await;
    }
    let count = host.says(at.sandbox, "import os; print(len(os.listdir('/workspace')))");
    assert_eq!(count, (SNAPSHOT_LAYERS_MAX + 3).to_string());
    let missing = Spec { over: Over { layers: vec![snapshot_id()], copy: None }, ..spec() };
    assert!(backend.launch(&missing).await.is_err(), "a snapshot that does not exist");
    backend.teardown(missing.sandbox).await.expect("nothing is left");
    backend.teardown(at.sandbox).await.expect("it goes");
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_mark_moves_with_changes_and_only_with_them() {
    let host = Host::new();
    let backend = start(&host).await;
    let source = launch(&backend, Over::default()).await;
    // Python writes its caches at its first start.
    host.says(source.sandbox, "open('/workspace/a', 'w').write('a')");
    host.says(source.sandbox, "print(open('/workspace/a').read())");
    take(&backend, &source).await;
    let mark =
        async || backend.files_mark(source.sandbox).await.expect("it can be asked").expect("it counts");
    let before = mark().await;
    host.says(source.sandbox, "import os; print(open('/workspace/a').read(), os.listdir('/usr/bin'))");
    assert_eq!(mark().await, before, "reading changes nothing");
    for change in [
        "open('/workspace/a', 'a').write('b')",
        "import os; os.chmod('/workspace/a', 0o600)",
        "import os; os.rename('/workspace/a', '/workspace/b')",
        "import os; os.remove('/workspace/b')",
    ] {
        let before = mark().await;
        host.says(source.sandbox, change);
        take(&backend, &source).await;
        assert_ne!(mark().await, before, "{change}");
    }
    backend.teardown(source.sandbox).await.expect("it goes");
    backend.end().await.expect("the launcher ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn plain_directories_have_no_snapshots() {
    let host = Host::new();
    let backend = host.start().await;
    let source = launch(&backend, Over::default()).await;
    assert_eq!(backend.files_mark(source.sandbox).await.expect("it can be asked"), None);
    let refused = backend.take_snapshot(source.sandbox, snapshot_id()).await;
    assert!(matches!(refused, Err(BackendError::Refused { .. })), "{refused:?}");
    backend.settle_files(source.sandbox).await.expect("there is nothing to do");
    assert_eq!(backend.snapshots().await.expect("a list"), []);
    backend.teardown(source.sandbox).await.expect("it goes");
    backend.end().await.expect("the launcher ends");
}

/// Two directories change places, which the kernel records as renames; a file keeps its size and its time.
const SWAP: &str = "
import os
os.rename('/workspace/one', '/workspace/other')
os.rename('/workspace/two', '/workspace/one')
os.rename('/workspace/other', '/workspace/two')
times = os.stat('/workspace/same/x')
open('/workspace/same/x', 'w').write('B')
os.utime('/workspace/same/x', ns=(times.st_atime_ns, times.st_mtime_ns))
os.chmod('/workspace/same/mode', 0o600)
os.remove('/workspace/same/gone')
os.symlink('x', '/workspace/same/link')
open('/usr/bin/of-mine', 'w').write('mine')
";

#[tokio::test(flavor = "multi_thread")]
async fn a_comparison_finds_what_was_added_changed_removed_and_moved() {
    let host = Host::new();
    let backend = start(&host).await;
    let source = launch(&backend, Over::default()).await;
    host.says(
        source.sandbox,
        "
import os
for name in ('one', 'two'):
    os.makedirs(f'/workspace/{name}/sub')
    open(f'/workspace/{name}/sub/f', 'w').write(name[0])
    os.utime(f'/workspace/{name}/sub/f', (0, 0))
os.makedirs('/workspace/same')
for name in ('x', 'mode', 'gone', 'kept'):
    open(f'/workspace/same/{name}', 'w').write('A')
",
    );
    let (first, over) = take(&backend, &source).await;
    let child = launch(&backend, over.clone()).await;
    host.says(child.sandbox, SWAP);
    let (second, after) = take(&backend, &child).await;
    let side = |over: &Over| DiffSide { layers: over.layers.clone(), rootfs: Rootfs::Host };
    let found = backend.diff(&side(&over), &side(&after), true).await.expect("they are compared");
    assert!(found.complete);
    let mut changes: Vec<(String, DifferenceKind)> = Vec::new();
    for entry in &found.entries {
        let Difference::Entry { path, kind, before, after, .. } = entry else { panic!("{entry:?}") };
        let path = String::from_utf8_lossy(path).into_owned();
        if path == "/workspace/same/x" {
            assert_eq!((before.as_deref(), after.as_deref()), (Some("A"), Some("B")));
        }
        changes.push((path, *kind));
    }
    changes.retain(|(path, _)| path.starts_with("/workspace/") || path.starts_with("/usr/bin/"));
    changes.sort_by(|a, b| a.0.cmp(&b.0));
    use DifferenceKind::{Added, Changed, Removed};
    let expected = [
        ("/usr/bin/of-mine", Added),
        ("/workspace/one/sub/f", Changed),
        ("/workspace/same/gone", Removed),
        ("/workspace/same/link", Added),
        ("/workspace/same/mode", Changed),
        ("/workspace/same/x", Changed),
        ("/workspace/two/sub/f", Changed),
    ];
    assert_eq!(changes, expected.map(|(path, kind)| (path.to_owned(), kind)));
    let none = backend.diff(&side(&after), &side(&after), false).await.expect("they are compared");
    assert_eq!((none.entries, none.complete), (Vec::new(), true));
    let missing = DiffSide { layers: vec![snapshot_id()], rootfs: Rootfs::Host };
    assert!(backend.diff(&missing, &side(&after), false).await.is_err(), "a snapshot that does not exist");
    for spec in [source, child] {
        backend.teardown(spec.sandbox).await.expect("it goes");
    }
    for id in [first, second] {
        backend.remove_snapshot(id).await.expect("it goes");
    }
    backend.end().await.expect("the launcher ends");
}
