//! What the store costs: sandboxes in plain directories and in subvolumes, and what can be done to volumes.
//!
//! Asked of the backend itself, without spares, so that nothing stands between the figure and the kernel but the launcher.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use runtime::{Isolation, Spec, Storage, StoreConfig};
use wire::launch::{Access, Limits, Motion, Mount, Over, Rootfs, StoreKind, StoreWish};
use wire::{InstallationId, SandboxId, SnapshotId, VolumeId};

use super::report::{Figure, Row, median};

/// Enough for what is written here, and quick to make.
const STORE_BYTES: u64 = 1 << 30;
/// Where the kernel gives out loop devices.
const LOOP_CONTROL: &str = "/dev/loop-control";
/// What a volume may hold.
const VOLUME_BYTES: u64 = 64 << 20;

/// All of it. Without loop devices, what plain directories cost.
pub async fn rows(scratch: &Path, rounds: usize) -> anyhow::Result<Vec<Row>> {
    let plain = in_store(scratch, StoreKind::Directory, rounds).await?;
    let mut rows = vec![Row::new("launch and teardown, store directory", Figure::Time(plain.launch))];
    if Path::new(LOOP_CONTROL).exists() {
        let ours = in_store(scratch, StoreKind::Loop, rounds).await?;
        let mut row = Row::new("launch and teardown, store loop", Figure::Time(ours.launch));
        row.compare("store directory", Some(plain.launch));
        rows.push(row);
        let mut row = Row::new("launch and teardown with a volume", Figure::Time(ours.mounted));
        row.compare("without", Some(ours.launch));
        rows.push(row);
        rows.extend([
            Row::new("volume: create", Figure::Time(ours.create)),
            Row::new("volume: resize", Figure::Time(ours.resize)),
            Row::new("volume: copy, by snapshot", Figure::Time(ours.copy)),
            Row::new("volume: delete", Figure::Time(ours.remove)),
            Row::new("snapshot, settled", Figure::Time(ours.snapshot)),
        ]);
        let mut row = Row::new("rollback: teardown, and launch over a snapshot", Figure::Time(ours.rollback));
        row.compare("launch and teardown", Some(ours.launch));
        rows.push(row);
        let mut row = Row::new("fork of 16, over one snapshot", Figure::Time(ours.fork));
        row.compare("16 launches", Some(ours.sixteen));
        rows.push(row);
    }
    Ok(rows)
}

#[derive(Default)]
struct Costs {
    launch: Duration,
    mounted: Duration,
    create: Duration,
    resize: Duration,
    copy: Duration,
    remove: Duration,
    snapshot: Duration,
    rollback: Duration,
    fork: Duration,
    sixteen: Duration,
}

fn random() -> anyhow::Result<u128> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits).map_err(|error| anyhow::anyhow!("no random bits: {error}"))?;
    Ok(u128::from_le_bytes(bits))
}

async fn in_store(scratch: &Path, kind: StoreKind, rounds: usize) -> anyhow::Result<Costs> {
    let data_dir = scratch.join(format!("store-{}", kind.word()));
    std::fs::create_dir(&data_dir).context("cannot make a directory")?;
    let installation = InstallationId::from_random(random()? as u64);
    let size_bytes = (kind == StoreKind::Loop).then_some(STORE_BYTES);
    let store = StoreConfig { wish: StoreWish::Just(kind), size_bytes };
    let config = NsConfig { data_dir, installation, launcher: std::env::current_exe()?, spares: 0, store };
    let measured = async {
        let backend = NsBackend::start(config).await?;
        let measured = measure(&backend, rounds).await;
        let ended = backend.end().await;
        let costs = measured?;
        ended?;
        Ok(costs)
    };
    let measured: anyhow::Result<Costs> = measured.await;
    // Whatever failed, nothing stays on the machine; the first failure is the one that tells.
    let forgotten = forget_installation(installation);
    let costs = measured?;
    forgotten?;
    Ok(costs)
}

async fn measure(backend: &NsBackend, rounds: usize) -> anyhow::Result<Costs> {
    backend.prepare(&Rootfs::Host).await?;
    let limits = Limits { cpu_millis: 1000, memory_bytes: 1 << 30, pids: 64, disk_bytes: Some(1 << 30) };
    let mut costs =
        Costs { launch: launches(backend, limits, Vec::new(), rounds).await?, ..Costs::default() };
    if !backend.store().kind.has_snapshots() {
        return Ok(costs);
    }
    let volume = VolumeId::from_random(random()?);
    backend.create_volume(volume, VOLUME_BYTES, None).await?;
    let mounts = vec![Mount { volume, path: "/data".into(), access: Access::ReadWrite }];
    costs.mounted = launches(backend, limits, mounts, rounds).await?;
    let (mut create, mut resize, mut copy, mut remove) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let (one, other) = (VolumeId::from_random(random()?), VolumeId::from_random(random()?));
        let mut began = Instant::now();
        let mut step = |times: &mut Vec<Duration>| {
            times.push(began.elapsed());
            began = Instant::now();
        };
        backend.create_volume(one, VOLUME_BYTES, None).await?;
        step(&mut create);
        backend.resize_volume(one, VOLUME_BYTES / 2).await?;
        step(&mut resize);
        backend.create_volume(other, VOLUME_BYTES, Some(one)).await?;
        step(&mut copy);
        backend.remove_volume(one).await?;
        step(&mut remove);
        backend.remove_volume(other).await?;
    }
    costs = Costs {
        create: median(create),
        resize: median(resize),
        copy: median(copy),
        remove: median(remove),
        ..costs
    };
    snapshots(backend, limits, rounds, costs).await
}

/// How many children a fork has here.
const CHILDREN: usize = 16;

async fn snapshots(
    backend: &NsBackend,
    limits: Limits,
    rounds: usize,
    costs: Costs,
) -> anyhow::Result<Costs> {
    let (mut snapshot, mut rollback, mut fork, mut sixteen) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let source = spec(limits, Vec::new(), Over::default())?;
        backend.launch(&source).await?;
        let id = SnapshotId::from_random(random()?);
        backend.settle_files(source.sandbox).await?;
        let began = Instant::now();
        backend.freeze(source.sandbox, Motion::Still).await?;
        backend.take_snapshot(source.sandbox, id).await?;
        backend.freeze(source.sandbox, Motion::Going).await?;
        snapshot.push(began.elapsed());
        let over = source.over.with(id);
        let began = Instant::now();
        backend.teardown(source.sandbox).await?;
        let again = Spec { over: over.clone(), ..source };
        backend.launch(&again).await?;
        backend.connect(again.sandbox).await?;
        rollback.push(began.elapsed());
        backend.teardown(again.sandbox).await?;
        sixteen.push(together(backend, limits, Over::default()).await?);
        fork.push(together(backend, limits, over).await?);
        backend.remove_snapshot(id).await?;
    }
    Ok(Costs {
        snapshot: median(snapshot),
        rollback: median(rollback),
        fork: median(fork),
        sixteen: median(sixteen),
        ..costs
    })
}

/// How long it takes until [`CHILDREN`] sandboxes listen that are launched at the same time.
async fn together(backend: &NsBackend, limits: Limits, over: Over) -> anyhow::Result<Duration> {
    let specs = (0..CHILDREN).map(|_| spec(limits, Vec::new(), over.clone()));
    let specs = specs.collect::<anyhow::Result<Vec<Spec>>>()?;
    let began = Instant::now();
    let mut launching = tokio::task::JoinSet::new();
    for spec in specs.clone() {
        let backend = backend.clone();
        launching.spawn(async move {
            backend.launch(&spec).await?;
            backend.connect(spec.sandbox).await.map(drop)
        });
    }
    let mut launched = Ok(());
    while let Some(done) = launching.join_next().await {
        launched = launched.and(done?);
    }
    let took = began.elapsed();
    for spec in specs {
        backend.teardown(spec.sandbox).await?;
    }
    launched?;
    Ok(took)
}

fn spec(limits: Limits, mounts: Vec<Mount>, over: Over) -> anyhow::Result<Spec> {
    let sandbox = SandboxId::from_random(random()?);
    Ok(Spec { sandbox, rootfs: Rootfs::Host, limits, mounts, over, writable: Default::default() })
}

async fn launches(
    backend: &NsBackend,
    limits: Limits,
    mounts: Vec<Mount>,
    rounds: usize,
) -> anyhow::Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let spec = spec(limits, mounts.clone(), Over::default())?;
        let sandbox = spec.sandbox;
        let began = Instant::now();
        let up = async {
            backend.launch(&spec).await?;
            // Init speaks when it is spoken to; that it listens is enough.
            backend.connect(sandbox).await.map(drop)
        };
        let up = up.await;
        // Also what was launched in part; the first failure is the one that tells.
        let down = backend.teardown(sandbox).await;
        up?;
        down?;
        times.push(began.elapsed());
    }
    Ok(median(times))
}
