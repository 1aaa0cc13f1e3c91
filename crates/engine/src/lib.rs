//! What happens to sandboxes, and when.
//!
//! Knows no HTTP and no kernel: it decides, keeps rows and logs, and asks a [`runtime::Backend`].
//! The public face is [`Engine`]; what goes in and comes out of it is in [`model`].

#![forbid(unsafe_code)]

pub mod model;

use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use runtime::Backend;
use wire::{CommandId, SandboxId};

pub use model::*;

/// What an engine is built with.
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// Where rows and logs are kept. Exists, and belongs to this engine alone (the daemon holds its lock).
    pub data_dir: PathBuf,
    /// What all sandboxes together may promise themselves.
    pub capacity: Capacity,
    /// How many bytes of each stream are kept.
    pub output_kept_max: u64,
}

/// All sandboxes of one data directory. Cheap to clone.
#[derive(Clone)]
pub struct Engine {}

impl Engine {
    /// Opens the store, adopts what runs, finishes or undoes what a crash interrupted.
    pub async fn start(config: EngineConfig, backend: Arc<dyn Backend>) -> Result<Self, EngineError> { todo!() }
    /// Stops all drivers and flushes the store, without harm to any sandbox.
    pub async fn stop(&self) { todo!() }
    /// Deletes every sandbox of every owner: the end of a private daemon.
    pub async fn delete_all(&self) -> Result<(), EngineError> { todo!() }

    pub async fn create(&self, key: &Key, spec: SandboxSpec, wait: Wait) -> Result<Sandbox, EngineError> { todo!() }
    pub async fn get(&self, owner: &Owner, id: SandboxId) -> Result<Sandbox, EngineError> { todo!() }
    pub async fn list(&self, owner: &Owner, query: ListQuery) -> Result<Page<Sandbox>, EngineError> { todo!() }
    pub async fn rename(&self, owner: &Owner, id: SandboxId, name: SandboxName) -> Result<Sandbox, EngineError> { todo!() }
    /// Returns when nothing of it is left.
    pub async fn delete(&self, owner: &Owner, id: SandboxId) -> Result<(), EngineError> { todo!() }

    /// Starts a command, or finds the one that was started under this id before. The answer does not wait for its result.
    pub async fn run(&self, owner: &Owner, id: SandboxId, spec: CommandSpec) -> Result<CommandRef, EngineError> { todo!() }
    /// A command by its id.
    pub async fn command(&self, owner: &Owner, id: SandboxId, command: &CommandId) -> Result<CommandRef, EngineError> { todo!() }
    pub async fn commands(&self, owner: &Owner, id: SandboxId, query: CommandQuery) -> Result<Page<Command>, EngineError> { todo!() }

    pub async fn create_key(&self, spec: KeySpec) -> Result<(Key, KeySecret), EngineError> { todo!() }
    /// Makes `secret` a key of the owner `default` with admin rights, replacing an earlier bootstrap key.
    pub async fn set_bootstrap_key(&self, secret: &KeySecret) -> Result<Key, EngineError> { todo!() }
    pub async fn keys(&self) -> Result<Vec<Key>, EngineError> { todo!() }
    pub async fn delete_key(&self, id: &str) -> Result<(), EngineError> { todo!() }
    /// The key that `presented` is, if it is one. Constant time in the secret; answers from memory, no row is read.
    pub fn authenticate(&self, presented: &str) -> Option<Key> { todo!() }
}

/// A command that can be watched and acted on. Holding it keeps nothing alive but memory.
#[derive(Clone)]
pub struct CommandRef {}

impl CommandRef {
    /// As it is now.
    pub fn now(&self) -> Command { todo!() }
    /// When it is over.
    pub async fn ended(&self) -> Command { todo!() }
    /// Output from these offsets on, live, until the end. While one is attached and makes progress, what it has not yet
    /// read does not fall off the front; the command is made to wait instead.
    pub fn attach(&self, from: Offsets) -> Output { todo!() }
    /// All kept output at once, at most `limit` bytes of each stream.
    pub async fn output(&self, limit: usize) -> Result<Gathered, EngineError> { todo!() }
    /// Hands bytes to stdin; waits while the command's window is full, at most until the deadline inside.
    /// `at`: where they begin, so that a retry writes once; `None` appends.
    pub async fn write_stdin(&self, at: Option<u64>, bytes: Bytes) -> Result<u64, EngineError> { todo!() }
    pub async fn end_stdin(&self) -> Result<(), EngineError> { todo!() }
    pub async fn signal(&self, signal: Signal) -> Result<(), EngineError> { todo!() }
    pub async fn kill(&self) -> Result<(), EngineError> { todo!() }
    pub async fn resize(&self, rows: u16, columns: u16) -> Result<(), EngineError> { todo!() }
}

/// A command's output as it comes.
pub struct Output {}

impl Output {
    /// The next thing. After [`OutputEvent::Ended`] comes nothing more (`None`). Cancel-safe.
    pub async fn next(&mut self) -> Option<OutputEvent> { todo!() }
}
