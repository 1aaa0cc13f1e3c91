//! What the engine's tests share: an engine on a fake host and a directory of its own.

pub mod clock;

use std::path::Path;
use std::sync::Arc;

use engine::{
    Capacity, Command, CommandRef, CommandSpec, CommandState, Engine, EngineConfig, IdempotencyKey, Key,
    KeyLimits, Offsets, Outcome, Output, OutputEvent, Owner, Program, Sandbox, SandboxSpec, Wait,
};
use runtime::fake::FakeHost;
use shoal_engine as engine;
use tempfile::TempDir;
use wire::SandboxId;
use wire::guest::Stream;

pub const KEPT: u64 = 256 * 1024;

/// An engine that can be crashed and started again.
pub struct World {
    pub host: FakeHost,
    pub directory: TempDir,
    pub engine: Engine,
    pub kept_max: u64,
    pub capacity: Capacity,
}

pub fn roomy() -> Capacity {
    Capacity { sandboxes: 10_000, cpu_millis: u64::MAX, memory_bytes: u64::MAX }
}

impl World {
    pub async fn new() -> Self {
        Self::on(FakeHost::new()).await
    }

    /// On a host whose store has no snapshots.
    pub async fn without_snapshots() -> Self {
        let host = FakeHost::new();
        host.lose_snapshots();
        Self::on(host).await
    }

    pub async fn on(host: FakeHost) -> Self {
        Self::with(host, KEPT, roomy()).await
    }

    pub async fn with(host: FakeHost, kept_max: u64, capacity: Capacity) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let engine = start(directory.path(), &host, kept_max, capacity).await;
        Self { host, directory, engine, kept_max, capacity }
    }

    /// An engine on a directory that is there already.
    pub async fn in_directory(host: FakeHost, directory: &Path) -> Engine {
        start(directory, &host, KEPT, roomy()).await
    }

    /// Drops the engine as a crash would, and starts a new one on the same directory and host.
    pub async fn crash(self) -> Self {
        let Self { host, directory, engine, kept_max, capacity } = self;
        drop(engine);
        let engine = start(directory.path(), &host, kept_max, capacity).await;
        Self { host, directory, engine, kept_max, capacity }
    }

    pub async fn create(&self) -> Sandbox {
        self.engine.create(&key(), SandboxSpec::default(), Wait::Ready).await.expect("the sandbox is made")
    }

    pub async fn run(&self, sandbox: SandboxId, script: &str) -> CommandRef {
        self.engine.run(&owner(), sandbox, script_of(script)).await.expect("the command starts")
    }

    pub async fn run_as(&self, sandbox: SandboxId, id: &str, script: &str) -> CommandRef {
        let spec = CommandSpec { id: Some(id.parse().expect("an id")), ..script_of(script) };
        self.engine.run(&owner(), sandbox, spec).await.expect("the command starts")
    }

    pub async fn command(&self, sandbox: SandboxId, id: &str) -> CommandRef {
        self.engine
            .command(&owner(), sandbox, &id.parse().expect("an id"))
            .await
            .expect("the command is known")
    }
}

async fn start(directory: &Path, host: &FakeHost, output_kept_max: u64, capacity: Capacity) -> Engine {
    let config = EngineConfig {
        data_dir: directory.into(),
        capacity,
        output_kept_max,
        images: Default::default(),
        network: Default::default(),
    };
    Engine::start(config, Arc::new(host.clone())).await.expect("the engine starts")
}

pub fn owner() -> Owner {
    Owner::default_owner()
}

pub fn key() -> Key {
    key_of("default", KeyLimits::default())
}

pub fn key_of(owner: &str, limits: KeyLimits) -> Key {
    let owner = Owner::parse(owner).expect("an owner");
    Key {
        id: "test".into(),
        owner,
        admin: false,
        metrics_only: false,
        limits,
        created_at: std::time::SystemTime::UNIX_EPOCH,
    }
}

/// A key under which a request is repeated.
pub fn once() -> IdempotencyKey {
    IdempotencyKey::parse("once").expect("a key")
}

pub fn script_of(script: &str) -> CommandSpec {
    CommandSpec::new(Program::script(script).expect("a script"))
}

#[track_caller]
pub fn outcome(command: &Command) -> Outcome {
    match &command.state {
        CommandState::Ended { outcome, .. } => outcome.clone(),
        CommandState::Starting | CommandState::Running { .. } => panic!("{command:?} is not over"),
    }
}

/// Everything that a reader got.
#[derive(Debug, Default)]
pub struct Read {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub lost: u64,
    pub stalled: bool,
    pub ended: Option<Box<Command>>,
}

/// Reads to the end, and checks that offsets have no gaps but those that were reported.
pub async fn read_all(mut output: Output, from: Offsets) -> Read {
    let mut read = Read::default();
    let mut at = from;
    while let Some(event) = output.next().await {
        match event {
            OutputEvent::Started { .. } | OutputEvent::StdinAck { .. } => {}
            OutputEvent::Bytes { stream, offset, bytes } => {
                let (at, all) = match stream {
                    Stream::Stdout => (&mut at.stdout, &mut read.stdout),
                    Stream::Stderr => (&mut at.stderr, &mut read.stderr),
                    Stream::Stdin => panic!("stdin does not come out"),
                };
                assert_eq!(offset, *at, "bytes come in order");
                *at += bytes.len() as u64;
                all.extend_from_slice(&bytes);
            }
            OutputEvent::Lost { stream, from, to } => {
                let at = match stream {
                    Stream::Stdout => &mut at.stdout,
                    Stream::Stderr => &mut at.stderr,
                    Stream::Stdin => panic!("stdin does not come out"),
                };
                assert_eq!(from, *at);
                read.lost += to - from;
                *at = to;
            }
            OutputEvent::Stalled => read.stalled = true,
            OutputEvent::Ended(command) => read.ended = Some(command),
        }
    }
    read
}

pub fn pattern(from: u64, length: u64) -> Vec<u8> {
    (from..from + length).map(runtime::fake::pattern).collect()
}

/// Looks again whenever anything may have happened. Tests wait for conditions, with a bound for those that never come.
pub async fn eventually(what: &str, mut check: impl AsyncFnMut() -> bool) {
    let patience = std::time::Instant::now() + std::time::Duration::from_secs(20);
    while !check().await {
        assert!(std::time::Instant::now() < patience, "it never came to be that {what}");
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
    }
}
