//! What the store costs: sandboxes in plain directories and in subvolumes, and what can be done to volumes.
//!
//! Asked of the backend itself, without spares, so that nothing stands between the figure and the kernel but the launcher.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;
use runtime::ns::{NsBackend, NsConfig, forget_installation};
use runtime::{Isolation, Spec, Storage, StoreConfig};
use wire::launch::{Access, Limits, Mount, Rootfs, StoreKind, StoreWish};
use wire::{InstallationId, SandboxId, VolumeId};

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
        ]);
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
    if backend.store().kind == StoreKind::Directory {
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
    Ok(costs)
}

async fn launches(
    backend: &NsBackend,
    limits: Limits,
    mounts: Vec<Mount>,
    rounds: usize,
) -> anyhow::Result<Duration> {
    let mut times = Vec::new();
    for _ in 0..rounds {
        let sandbox = SandboxId::from_random(random()?);
        let spec = Spec { sandbox, rootfs: Rootfs::Host, limits, mounts: mounts.clone() };
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
