//! The Rust SDK of Shoal: typed calls, streams, reconnects. Knows nothing about the engine.
//!
//! ```no_run
//! # async fn example() -> Result<(), shoal_client::ClientError> {
//! use shoal_client::{Client, api};
//!
//! let client = Client::new("http://127.0.0.1:7878", "the API key")?;
//! let sandbox = client.create_sandbox(&api::CreateSandbox::default()).await?;
//! let command = api::RunCommand { script: Some("echo hi".into()), ..Default::default() };
//! let finished = client.run(sandbox.id, command).await?;
//! assert_eq!(finished.stdout_text.as_deref(), Some("hi\n"));
//! client.delete_sandbox(sandbox.id).await?;
//! # Ok(())
//! # }
//! ```
//!
//! The client repeats idempotent calls while a daemon that has answered before is away, so callers do not notice a
//! restart of the daemon. Creating a sandbox and starting a command are idempotent too: both carry an id.

#![forbid(unsafe_code)]

mod builds;
mod error;
mod files;
mod images;
mod network;
mod pools;
mod ports;
mod secrets;
mod snapshots;
mod sse;
mod stream;
mod templates;
mod transport;
mod volumes;
mod watch;
mod webhooks;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header::HeaderName;
use http::{HeaderValue, Method};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use builds::{BuildLog, one_file};
pub use error::{Cause, ClientError};
pub use files::{Download, FileWatch, Files, GrepFiles, Upload, WriteFile};
pub use images::{ImageEvents, InUse};
pub use ports::Tunnel;
pub use stream::{CommandStream, Input, InputClosed, Offsets, StreamEvent};
pub use templates::TemplateEvents;
use transport::{Call, Transport, Wait};
pub use watch::SandboxWatch;
pub use wire::api;
pub use wire::{CommandId, LinkId, SandboxId};

/// How long the daemon may take to answer a call that does not wait for a command.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(120);
/// How long a daemon that has answered before may be away.
const PATIENCE_DEFAULT: Duration = Duration::from_secs(60);
/// The first and the longest pause between two attempts.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The page size for listing all sandboxes or commands.
const PAGE: u32 = 200;

/// A daemon's address and an API key. Cheap to clone.
#[derive(Clone)]
pub struct Client {
    transport: Arc<Transport>,
    patience: Duration,
}

/// Whether a call may be repeated if its outcome is unknown.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Repeat {
    Harmless,
    Never,
}

impl Client {
    /// Creates a client of the daemon at `url`, with an API key. Sends nothing yet.
    pub fn new(url: &str, key: &str) -> Result<Self, ClientError> {
        Ok(Self { transport: Arc::new(Transport::new(url, key)?), patience: PATIENCE_DEFAULT })
    }

    /// Changes how long the daemon may be away.
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets a new address of the daemon, for all clones, and for streams at their next reconnect.
    pub fn move_to(&self, url: &str) -> Result<(), ClientError> {
        self.transport.move_to(url)
    }

    /// The daemon's URL.
    pub fn url(&self) -> String {
        self.transport.url()
    }

    /// Returns the daemon's version.
    pub async fn version(&self) -> Result<api::Version, ClientError> {
        self.read("/v1/version".into()).await
    }

    /// Checks that the daemon runs.
    pub async fn health(&self) -> Result<api::Health, ClientError> {
        self.read("/v1/health".into()).await
    }

    /// Checks that the daemon accepts work.
    pub async fn ready(&self) -> Result<api::Health, ClientError> {
        self.read("/v1/ready".into()).await
    }

    /// Creates one sandbox, even if the request has to be repeated.
    pub async fn create_sandbox(&self, wish: &api::CreateSandbox) -> Result<api::Sandbox, ClientError> {
        self.create_sandbox_once(wish, &random_id().to_string()).await
    }

    /// Creates a sandbox, or returns the one that was created with this idempotency key before.
    pub async fn create_sandbox_once(
        &self,
        wish: &api::CreateSandbox,
        idempotency_key: &str,
    ) -> Result<api::Sandbox, ClientError> {
        self.send_create(wish, idempotency_key).await.map(|created| created.sandbox)
    }

    /// Returns the sandbox with all of `wish.match_labels`, or creates it. Simultaneous calls create one sandbox; `created`
    /// is true for one of them.
    pub async fn get_or_create_sandbox(
        &self,
        wish: &api::CreateSandbox,
    ) -> Result<api::CreatedSandbox, ClientError> {
        self.send_create(wish, random_id().as_str()).await
    }

    async fn send_create(
        &self,
        wish: &api::CreateSandbox,
        idempotency_key: &str,
    ) -> Result<api::CreatedSandbox, ClientError> {
        let mut call = json(Method::POST, "/v1/sandboxes".into(), wish);
        let name = HeaderName::from_static("idempotency-key");
        let value = HeaderValue::from_str(idempotency_key).map_err(|_| ClientError::BadKey)?;
        call.headers.push((name, value));
        self.call(call, Repeat::Harmless).await
    }

    /// Returns a sandbox.
    pub async fn sandbox(&self, id: SandboxId) -> Result<api::Sandbox, ClientError> {
        self.read(format!("/v1/sandboxes/{id}")).await
    }

    /// Lists one page of sandboxes, newest first.
    pub async fn sandboxes_page(&self, cursor: Option<&str>) -> Result<api::SandboxPage, ClientError> {
        self.read(paged("/v1/sandboxes", cursor)).await
    }

    /// Lists all sandboxes, newest first.
    pub async fn sandboxes(&self) -> Result<Vec<api::Sandbox>, ClientError> {
        self.sandboxes_labelled::<&str>(&[]).await
    }

    /// Lists all sandboxes that match every selector, newest first. A selector is `key=value`, `key!=value`, `key` or `!key`.
    pub async fn sandboxes_labelled<T: AsRef<str>>(
        &self,
        selectors: &[T],
    ) -> Result<Vec<api::Sandbox>, ClientError> {
        let selectors: String =
            selectors.iter().map(|selector| format!("&label={}", in_query(selector.as_ref()))).collect();
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let path = paged("/v1/sandboxes", cursor.as_deref()) + &selectors;
            let page: api::SandboxPage = self.read(path).await?;
            all.extend(page.sandboxes);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Lists the sandboxes of all owners, newest first. Needs an admin key.
    pub async fn sandboxes_of_all_owners(&self) -> Result<Vec<api::AdminSandbox>, ClientError> {
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let page: api::AdminSandboxPage =
                self.read(paged("/v1/admin/sandboxes", cursor.as_deref())).await?;
            all.extend(page.sandboxes);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Deletes a sandbox of any owner. Needs an admin key.
    pub async fn delete_sandbox_of_any_owner(&self, id: SandboxId) -> Result<(), ClientError> {
        self.act(Method::DELETE, format!("/v1/admin/sandboxes/{id}"), Repeat::Harmless).await
    }

    /// Returns the sandbox with this name, if there is one.
    pub async fn sandbox_named(&self, name: &str) -> Result<Option<api::Sandbox>, ClientError> {
        let page: api::SandboxPage = self.read(format!("/v1/sandboxes?name={}", in_query(name))).await?;
        Ok(page.sandboxes.into_iter().find(|sandbox| sandbox.name == name))
    }

    /// Streams events of all sandboxes and their commands, or of one sandbox, from now on.
    pub fn watch(&self, only: Option<SandboxId>) -> SandboxWatch {
        SandboxWatch::new(self.clone(), only)
    }

    /// Changes a sandbox.
    pub async fn update_sandbox(
        &self,
        id: SandboxId,
        wish: &api::UpdateSandbox,
    ) -> Result<api::Sandbox, ClientError> {
        self.call(json(Method::PATCH, format!("/v1/sandboxes/{id}"), wish), Repeat::Harmless).await
    }

    /// Renews a sandbox: all clocks of its lifetime restart, except the one that counts from its creation.
    pub async fn touch_sandbox(&self, id: SandboxId) -> Result<api::Explanation, ClientError> {
        self.call(plain(Method::POST, format!("/v1/sandboxes/{id}/touch")), Repeat::Harmless).await
    }

    /// Explains why a sandbox lives, and when and how it ends.
    pub async fn explain_sandbox(&self, id: SandboxId) -> Result<api::Explanation, ClientError> {
        self.read(format!("/v1/sandboxes/{id}/explain")).await
    }

    /// Pauses a sandbox. Returns when it is paused.
    pub async fn pause_sandbox(
        &self,
        id: SandboxId,
        wish: &api::PauseSandbox,
    ) -> Result<api::Sandbox, ClientError> {
        let mut call = json(Method::POST, format!("/v1/sandboxes/{id}/pause"), wish);
        call.wait = Wait::Forever; // The grace may be long.
        self.call(call, Repeat::Harmless).await
    }

    /// Lets a paused sandbox run again, or one that has failed and has all its files. Returns when it runs.
    pub async fn resume_sandbox(&self, id: SandboxId) -> Result<api::Sandbox, ClientError> {
        self.call(plain(Method::POST, format!("/v1/sandboxes/{id}/resume")), Repeat::Harmless).await
    }

    /// Deletes a sandbox and everything in it. Returns when nothing of it is left.
    pub async fn delete_sandbox(&self, id: SandboxId) -> Result<(), ClientError> {
        self.act(Method::DELETE, format!("/v1/sandboxes/{id}"), Repeat::Harmless).await
    }

    /// Runs a command and waits for its end. The answer has at most 1 MiB of each stream.
    pub async fn run(
        &self,
        sandbox: SandboxId,
        wish: api::RunCommand,
    ) -> Result<api::FinishedCommand, ClientError> {
        let wish = api::RunCommand { wait: Some(true), ..with_id(wish) };
        let mut call = json(Method::POST, format!("/v1/sandboxes/{sandbox}/commands"), &wish);
        call.wait = Wait::Forever;
        self.call(call, Repeat::Harmless).await
    }

    /// Starts a command and does not wait for it.
    pub async fn start(
        &self,
        sandbox: SandboxId,
        wish: api::RunCommand,
    ) -> Result<api::Command, ClientError> {
        let wish = api::RunCommand { wait: Some(false), ..with_id(wish) };
        self.call(json(Method::POST, format!("/v1/sandboxes/{sandbox}/commands"), &wish), Repeat::Harmless)
            .await
    }

    /// Starts a command and streams it.
    pub fn stream(&self, sandbox: SandboxId, wish: api::RunCommand) -> CommandStream {
        let wish = api::RunCommand { wait: None, ..with_id(wish) };
        CommandStream::start(self.clone(), sandbox, wish)
    }

    /// Streams a command that was started before, from the given offsets.
    pub fn attach(&self, sandbox: SandboxId, command: CommandId, from: Offsets) -> CommandStream {
        CommandStream::attach(self.clone(), sandbox, command, from)
    }

    /// Returns a command, without its output.
    pub async fn command(
        &self,
        sandbox: SandboxId,
        command: &CommandId,
    ) -> Result<api::Command, ClientError> {
        self.read(command_path(sandbox, command, "")).await
    }

    /// Lists all commands of a sandbox, oldest first.
    pub async fn commands(&self, sandbox: SandboxId) -> Result<Vec<api::Command>, ClientError> {
        let path = format!("/v1/sandboxes/{sandbox}/commands");
        let mut all = Vec::new();
        let mut cursor: Option<String> = None;
        loop {
            let page: api::CommandPage = self.read(paged(&path, cursor.as_deref())).await?;
            all.extend(page.commands);
            cursor = page.next_cursor;
            if cursor.is_none() {
                return Ok(all);
            }
        }
    }

    /// Writes to a command's stdin at `offset`, so that a repeated write happens once. Returns the total length.
    pub async fn write_stdin(
        &self,
        sandbox: SandboxId,
        command: &CommandId,
        offset: u64,
        bytes: Bytes,
    ) -> Result<u64, ClientError> {
        let mut call =
            plain(Method::POST, command_path(sandbox, command, &format!("/stdin?offset={offset}")));
        call.body = Some(("application/octet-stream", bytes));
        let written: api::StdinWritten = self.call(call, Repeat::Harmless).await?;
        Ok(written.offset)
    }

    /// Closes a command's stdin.
    pub async fn end_stdin(&self, sandbox: SandboxId, command: &CommandId) -> Result<(), ClientError> {
        self.act(Method::POST, command_path(sandbox, command, "/stdin/end"), Repeat::Harmless).await
    }

    /// Sends a signal to a command's process group. Never repeated, because two signals differ from one.
    pub async fn signal(
        &self,
        sandbox: SandboxId,
        command: &CommandId,
        signal: &str,
    ) -> Result<(), ClientError> {
        let wish = api::SignalCommand { signal: signal.to_owned() };
        let call = json(Method::POST, command_path(sandbox, command, "/signal"), &wish);
        self.send(&call, Repeat::Never).await.map(drop)
    }

    /// Kills all processes of a command.
    pub async fn kill(&self, sandbox: SandboxId, command: &CommandId) -> Result<(), ClientError> {
        self.act(Method::POST, command_path(sandbox, command, "/kill"), Repeat::Harmless).await
    }

    /// Changes the size of a command's terminal.
    pub async fn resize(
        &self,
        sandbox: SandboxId,
        command: &CommandId,
        size: api::TerminalSize,
    ) -> Result<(), ClientError> {
        let call = json(Method::POST, command_path(sandbox, command, "/resize"), &size);
        self.send(&call, Repeat::Harmless).await.map(drop)
    }

    /// Returns a sandbox's resource use and limits.
    pub async fn stats(&self, sandbox: SandboxId) -> Result<api::SandboxStats, ClientError> {
        self.read(format!("/v1/sandboxes/{sandbox}/stats")).await
    }

    /// Returns the use and limits of all sandboxes, newest first, and of the machine.
    pub async fn all_stats(&self) -> Result<api::StatsPage, ClientError> {
        let mut all: api::StatsPage = self.read(paged("/v1/stats", None)).await?;
        while let Some(cursor) = all.next_cursor.take() {
            let page: api::StatsPage = self.read(paged("/v1/stats", Some(&cursor))).await?;
            all.sandboxes.extend(page.sandboxes);
            (all.machine, all.next_cursor) = (page.machine, page.next_cursor);
        }
        Ok(all)
    }

    /// Creates a key. Never repeated, because a lost response would leave a second key that no caller has.
    pub async fn create_key(&self, wish: &api::CreateKey) -> Result<api::CreatedKey, ClientError> {
        self.call(json(Method::POST, "/v1/keys".into(), wish), Repeat::Never).await
    }

    /// Lists all keys.
    pub async fn keys(&self) -> Result<Vec<api::Key>, ClientError> {
        let list: api::KeyList = self.read("/v1/keys".into()).await?;
        Ok(list.keys)
    }

    /// Deletes a key.
    pub async fn delete_key(&self, id: &str) -> Result<(), ClientError> {
        self.act(Method::DELETE, format!("/v1/keys/{}", in_query(id)), Repeat::Harmless).await
    }

    async fn read<T: DeserializeOwned>(&self, path: String) -> Result<T, ClientError> {
        self.call(plain(Method::GET, path), Repeat::Harmless).await
    }

    async fn call<T: DeserializeOwned>(&self, call: Call, repeat: Repeat) -> Result<T, ClientError> {
        let body = self.send(&call, repeat).await?;
        serde_json::from_slice(&body)
            .map_err(|error| ClientError::Strange { url: self.url(), what: error.to_string() })
    }

    /// A call without a body in either direction. If a repeated call finds its effect done already, that is success.
    async fn act(&self, method: Method, path: String, repeat: Repeat) -> Result<(), ClientError> {
        let deleting = method == Method::DELETE;
        let call = plain(method, path);
        let mut tries = 0;
        let sent = self.send_counted(&call, repeat, &mut tries).await;
        match sent {
            Err(ClientError::Refused { status: Some(404), .. }) if deleting && tries > 1 => Ok(()),
            sent => sent.map(drop),
        }
    }

    async fn send(&self, call: &Call, repeat: Repeat) -> Result<Bytes, ClientError> {
        self.send_counted(call, repeat, &mut 0).await
    }

    async fn send_counted(&self, call: &Call, repeat: Repeat, tries: &mut u32) -> Result<Bytes, ClientError> {
        let mut patience = Patience::new(self.patience);
        loop {
            *tries += 1;
            let error = match self.transport.send(call).await {
                Ok(body) => return Ok(body),
                Err(error) => error,
            };
            // A daemon that never answered is not likely to come back.
            let again = repeat == Repeat::Harmless && error.is_passing() && self.transport.was_reached();
            if !again || !patience.pause().await {
                return Err(error);
            }
        }
    }
}

/// How long and how often to retry.
pub(crate) struct Patience {
    longest: Duration,
    since: Instant,
    pause: Duration,
}

impl Patience {
    pub(crate) fn new(longest: Duration) -> Self {
        Self { longest, since: Instant::now(), pause: PAUSE_MIN }
    }

    /// Resets the deadline and the pause after a success.
    pub(crate) fn renew(&mut self) {
        *self = Self::new(self.longest);
    }

    /// Waits before the next attempt, or reports that the time is up.
    pub(crate) async fn pause(&mut self) -> bool {
        if self.since.elapsed() + self.pause > self.longest {
            return false;
        }
        tokio::time::sleep(self.pause).await;
        self.pause = (self.pause * 2).min(PAUSE_MAX);
        true
    }

    pub(crate) fn seconds(&self) -> u64 {
        self.longest.as_secs()
    }
}

fn plain(method: Method, path: String) -> Call {
    Call { method, path, body: None, headers: Vec::new(), wait: Wait::AtMost(ANSWER_TIME_MAX) }
}

fn json<T: Serialize>(method: Method, path: String, body: &T) -> Call {
    let body = serde_json::to_vec(body).expect("requests are made of types that JSON can write");
    Call { body: Some(("application/json", body.into())), ..plain(method, path) }
}

pub(crate) fn command_path(sandbox: SandboxId, command: &CommandId, rest: &str) -> String {
    // All characters that an id may have are allowed in a path.
    format!("/v1/sandboxes/{sandbox}/commands/{command}{rest}")
}

fn paged(path: &str, cursor: Option<&str>) -> String {
    match cursor {
        None => format!("{path}?limit={PAGE}"),
        Some(cursor) => format!("{path}?limit={PAGE}&cursor={}", in_query(cursor)),
    }
}

/// Escapes text for use in a URL.
fn in_query(text: &str) -> String {
    escape(text.as_bytes())
}

/// Escapes bytes, which need not be text, for use in a URL.
fn escape(bytes: &[u8]) -> String {
    let mut escaped = String::with_capacity(bytes.len());
    for byte in bytes.iter().copied() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            escaped.push(char::from(byte));
        } else {
            escaped.push_str(&format!("%{byte:02X}"));
        }
    }
    escaped
}

fn with_id(mut wish: api::RunCommand) -> api::RunCommand {
    wish.id.get_or_insert_with(random_id);
    wish
}

fn random_id() -> CommandId {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel gives random bits once it has booted");
    CommandId::from_random(u128::from_ne_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_queries() {
        assert_eq!(in_query("a b&c=ä/\0"), "a%20b%26c%3D%C3%A4%2F%00");
    }

    #[tokio::test]
    async fn a_daemon_that_was_never_there_is_not_waited_for() {
        // Port 1 on loopback: nothing listens there.
        let client = Client::new("http://127.0.0.1:1", "key").expect("the URL is valid");
        let began = Instant::now();
        let error = client.version().await.expect_err("nobody listens");
        assert!(matches!(error, ClientError::Unreachable { .. }), "{error}");
        assert!(began.elapsed() < PATIENCE_DEFAULT / 2);
    }
}
