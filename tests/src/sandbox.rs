//! What tests do with a sandbox. The path of every route is here, once.

use std::net::SocketAddr;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};

use crate::audit::Scope;
use crate::http::{Request, Response};
use crate::socket::{Collected, Socket};
use crate::wait::until;

/// A sandbox that a test created. It lives until it is deleted or its daemon is dropped.
#[derive(Debug, Clone)]
pub struct Sandbox {
    /// Where its daemon listens.
    pub address: SocketAddr,
    /// Its owner's key.
    pub key: String,
    /// Its id.
    pub id: String,
    /// Where to find it on the machine.
    pub scope: Scope,
}

/// An ended command, with its output.
#[derive(Clone)]
pub struct Finished {
    /// The whole response.
    pub body: Value,
    /// Exact bytes.
    pub stdout: Vec<u8>,
    /// Exact bytes.
    pub stderr: Vec<u8>,
}

impl std::fmt::Debug for Finished {
    /// A description of a command that did not end as expected.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let first = |text: String| text.chars().take(4_000).collect::<String>();
        write!(
            f,
            "{}\nstdout:\n{}\nstderr:\n{}",
            self.body["result"],
            first(self.text()),
            first(self.errors())
        )
    }
}

impl Finished {
    #[track_caller]
    fn read(body: Value) -> Self {
        let bytes =
            |stream: &str| match (body[format!("{stream}_text")].as_str(), &body[format!("{stream}_base64")])
            {
                (Some(text), Value::Null) => text.as_bytes().to_vec(),
                (None, Value::String(text)) => BASE64_STANDARD.decode(text).expect("base64 is base64"),
                (None, Value::Null) => Vec::new(),
                (text, base64) => panic!("both {text:?} and {base64:?} for {stream}"),
            };
        Self { stdout: bytes("stdout"), stderr: bytes("stderr"), body }
    }

    /// `exited`, `timed_out`, ...
    pub fn outcome(&self) -> &str {
        self.body["result"]["outcome"].as_str().unwrap_or("none")
    }

    /// The exit code, if there is one.
    pub fn exit_code(&self) -> Option<i64> {
        self.body["result"]["exit_code"].as_i64()
    }

    /// Its id.
    pub fn id(&self) -> &str {
        self.body["id"].as_str().expect("a command has an id")
    }

    /// Standard output as text, without the last newline.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).trim_end().to_owned()
    }

    /// Standard error as text.
    pub fn errors(&self) -> String {
        String::from_utf8_lossy(&self.stderr).trim_end().to_owned()
    }

    /// Asserts that it exited with 0.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!((self.outcome(), self.exit_code()), ("exited", Some(0)), "{self:?}");
        self
    }
}

impl Sandbox {
    /// Its own route, with a suffix.
    pub fn path(&self, more: &str) -> String {
        format!("/v1/sandboxes/{}{more}", self.id)
    }

    /// A request about it, with the key.
    pub fn request(&self, method: &str, more: &str) -> Request {
        Request::new(method, &self.path(more)).key(&self.key)
    }

    /// Its current state.
    #[track_caller]
    pub fn get(&self) -> Value {
        self.request("GET", "").send(self.address).expect(200)
    }

    /// Deletes it and waits until it is gone.
    #[track_caller]
    pub fn delete(&self) {
        self.request("DELETE", "").send(self.address).expect(204);
    }

    /// Posts a command and returns the response, whatever it is.
    #[track_caller]
    pub fn post_command(&self, body: &Value) -> Response {
        self.request("POST", "/commands").json(body).send(self.address)
    }

    /// Runs a command to its end.
    #[track_caller]
    pub fn run(&self, body: Value) -> Finished {
        let answer = self.post_command(&body).expect(200);
        assert_eq!(answer["state"], "ended", "{answer}");
        Finished::read(answer)
    }

    /// Runs a script to its end.
    #[track_caller]
    pub fn sh(&self, script: &str) -> Finished {
        self.run(json!({"script": script}))
    }

    /// Runs a Python program to its end.
    #[track_caller]
    pub fn python(&self, program: &str) -> Finished {
        self.run(json!({"argv": ["python3", "-c", program]}))
    }

    /// Starts a command and returns its id at once.
    #[track_caller]
    pub fn spawn(&self, mut body: Value) -> String {
        body["wait"] = false.into();
        let answer = self.post_command(&body);
        assert!(matches!(answer.status, 200..=202), "{}", answer.describe());
        answer.json()["id"].as_str().expect("a command has an id").into()
    }

    /// The current state of a command.
    #[track_caller]
    pub fn command(&self, id: &str) -> Value {
        self.request("GET", &format!("/commands/{id}")).send(self.address).expect(200)
    }

    /// Waits until a command has ended, and returns it.
    #[track_caller]
    pub fn ended(&self, id: &str) -> Value {
        until("the command is over", || Some(self.command(id)).filter(|command| command["state"] == "ended"))
    }

    /// Waits until a command has a process id, and returns it.
    #[track_caller]
    pub fn running(&self, id: &str) -> Value {
        until("the command runs", || Some(self.command(id)).filter(|command| command["pid"].is_u64()))
    }

    /// Waits until a command has written this many bytes to stdout.
    #[track_caller]
    pub fn wrote(&self, id: &str, bytes: u64) {
        until("the command has written", || {
            self.command(id)["stdout"]["end"].as_u64().filter(|length| *length >= bytes)
        });
    }

    /// Waits for a command's end and fetches all its output over a WebSocket.
    #[track_caller]
    pub fn output(&self, id: &str) -> Collected {
        self.attach(id, &Collected::default()).collect(Collected::default())
    }

    /// Opens the stream of a new command.
    #[track_caller]
    pub fn stream(&self, mut start: Value) -> Socket {
        start["type"] = "start".into();
        let mut socket = self.open_socket("/commands/stream").expect("the stream opens");
        socket.say(&start);
        socket
    }

    /// Continues the stream of a command where an earlier one stopped.
    #[track_caller]
    pub fn attach(&self, id: &str, from: &Collected) -> Socket {
        self.open_socket(&format!("/commands/{id}/stream?{}", from.offsets())).expect("the stream opens")
    }

    /// Opens a WebSocket, or returns the status of the error.
    pub fn open_socket(&self, more: &str) -> Result<Socket, u16> {
        Socket::open(self.address, &self.path(more), &[("authorization", &format!("Bearer {}", self.key))])
    }

    /// Opens a command's server-sent events.
    pub fn events(&self, id: &str, query: &str) -> Request {
        self.request("GET", &format!("/commands/{id}/events{query}")).header("accept", "text/event-stream")
    }

    /// Writes to a command's stdin.
    #[track_caller]
    pub fn write(&self, id: &str, bytes: &[u8]) -> Response {
        self.request("POST", &format!("/commands/{id}/stdin"))
            .header("content-type", "application/octet-stream")
            .body(bytes)
            .send(self.address)
    }

    /// Ends a command's stdin.
    #[track_caller]
    pub fn end_stdin(&self, id: &str) -> Response {
        self.request("POST", &format!("/commands/{id}/stdin/end")).send(self.address)
    }

    /// Signals a command.
    #[track_caller]
    pub fn signal(&self, id: &str, signal: &str) -> Response {
        self.request("POST", &format!("/commands/{id}/signal"))
            .json(&json!({"signal": signal}))
            .send(self.address)
    }

    /// Ends a command's tree.
    #[track_caller]
    pub fn kill(&self, id: &str) -> Response {
        self.request("POST", &format!("/commands/{id}/kill")).send(self.address)
    }

    /// Its processes on the host, including init, found by its cgroup.
    pub fn processes(&self) -> Vec<i32> {
        let groups = self.scope.cgroups();
        let own = groups.iter().filter(|group| group.to_string_lossy().contains(&self.id));
        let mut found: Vec<i32> = own.flat_map(|group| crate::audit::members(group)).collect();
        found.sort_unstable();
        found.dedup();
        found
    }

    /// Its init on the host: the process that is number 1 inside.
    #[track_caller]
    pub fn init(&self) -> i32 {
        let processes = self.processes();
        let is_first = |process: &i32| {
            let status = std::fs::read_to_string(format!("/proc/{process}/status")).unwrap_or_default();
            let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:")).unwrap_or_default();
            numbers.split_whitespace().next_back() == Some("1")
        };
        processes.into_iter().find(is_first).expect("a running sandbox has an init")
    }
}
