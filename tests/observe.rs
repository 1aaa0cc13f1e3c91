//! What operators see: resource usage, metrics, traces, warnings.

use std::io::Write;
use std::net::{SocketAddr, TcpListener};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use shoal_tests::collector::{Collector, TraceSpan};
use shoal_tests::daemon::{binary, send_signal};
use shoal_tests::{Daemon, Spawn, until};

/// What `shoal stats` and others print, for the daemon's own data directory.
#[track_caller]
fn shoal(daemon: &Daemon, words: &[&str]) -> String {
    let mut command = Command::new(binary());
    command.args(words).env("SHOAL_DATA_DIR", &daemon.data_dir).env("SHOAL_API_KEY", &daemon.key);
    let output = command.env_remove("SHOAL_URL").output().expect("the program can be started");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{words:?}: {text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

#[test]
fn stats_tell_what_a_sandbox_uses_beside_what_it_may() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"cpu": "1500m", "memory": "256Mi"}));
    let stats = || sandbox.request("GET", "/stats").send(daemon.address).expect(200);
    let idle = stats();
    assert_eq!(idle["limits"], json!({"cpu_millis": 1500, "memory_bytes": 256 << 20, "pids": 1024}));
    assert_eq!(idle["usage"]["pids"], 1, "init alone: {idle}");
    assert_eq!(idle["commands_running"], 0);
    let number = |value: &Value| value.as_f64().expect("it is a number");

    let busy = sandbox.spawn(json!({"script": "head -c 20M /dev/zero > /dev/shm/held; while :; do :; done"}));
    let after = until("the loop has burnt a second of processor time", || {
        Some(stats()).filter(|now| number(&now["usage"]["cpu_seconds"]) > 1.0)
    });
    assert_eq!(after["commands_running"], 1);
    assert!(number(&after["usage"]["pids"]) >= 2.0, "{after}");
    let held = number(&after["usage"]["memory_bytes"]) - number(&idle["usage"]["memory_bytes"]);
    // The kernel counts memory in batches per processor, so a difference of two readings is not exact.
    assert!(held >= f64::from(18 << 20), "files in memory count: {after}");
    sandbox.kill(&busy).expect(204);
}

#[test]
fn stats_tell_what_files_take_once_they_are_counted() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("head -c 30M /dev/urandom > /workspace/kept; truncate -s 10G /workspace/holes").ok();
    let disk = until("the files were counted", || {
        let stats = sandbox.request("GET", "/stats").send(daemon.address).expect(200);
        Some(stats["disk"].clone()).filter(Value::is_object)
    });
    let bytes = disk["bytes"].as_u64().expect("it is a number");
    assert!(disk["complete"] == true && (30 << 20..60 << 20).contains(&bytes), "{disk}");
}

#[test]
fn stats_of_all_sandboxes_come_in_pages_with_the_machine() {
    let daemon = Daemon::start();
    let made: Vec<_> = (0..3).map(|_| daemon.sandbox()).collect();
    let first = daemon.get("/v1/stats?limit=2").expect(200);
    assert_eq!(first["sandboxes"].as_array().expect("a list").len(), 2);
    let cursor = first["next_cursor"].as_str().expect("there is more");
    let last = daemon.get(&format!("/v1/stats?limit=2&cursor={cursor}")).expect(200);
    assert_eq!(last["sandboxes"][0]["sandbox_id"], made[0].id, "newest first");
    assert_eq!(last["next_cursor"], Value::Null);
    let machine = &last["machine"];
    for figure in ["cpus", "memory_bytes", "memory_available_bytes", "disk_bytes", "disk_available_bytes"] {
        assert!(machine[figure].as_u64().is_some_and(|value| value > 0), "{figure}: {machine}");
    }
    assert_eq!(machine["all_sandboxes"]["states"], json!({"running": 3}));

    let other = daemon.post("/v1/keys", &json!({"owner": "other"})).expect(201);
    let theirs = shoal_tests::Request::new("GET", "/v1/stats")
        .key(other["secret"].as_str().expect("it is shown"))
        .send(daemon.address)
        .expect(200);
    assert_eq!(theirs["sandboxes"], json!([]), "sandboxes of other owners are not shown");
    assert_eq!(theirs["machine"]["all_sandboxes"], Value::Null, "nor their number");
}

#[test]
fn the_command_line_shows_stats_to_people_and_programs() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    let table = shoal(&daemon, &["stats"]);
    let lines: Vec<&str> = table.lines().collect();
    let words: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(words, ["ID", "NAME", "STATE", "CPU", "TIME", "MEMORY", "PIDS", "DISK", "CMDS"]);
    assert!(lines[1].starts_with(&sandbox.id) && lines[1].contains("1/1024"), "{table}");
    assert!(table.contains("machine: "), "{table}");
    let one: Value = serde_json::from_str(&shoal(&daemon, &["stats", "--json", "work"])).expect("it is JSON");
    assert_eq!(one["sandbox_id"], sandbox.id);
    let refused = Command::new(binary())
        .args(["stats", "nobody"])
        .env("SHOAL_DATA_DIR", &daemon.data_dir)
        .env("SHOAL_API_KEY", &daemon.key)
        .output()
        .expect("the program can be started");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && said.contains("sandbox `nobody` does not exist"), "{said}");
}

/// Parses text with the parser of Prometheus's own Python client, and returns the number of samples.
#[track_caller]
fn samples(text: &[u8]) -> u64 {
    const PROGRAM: &str = "
import sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
print(sum(len(family.samples) for family in text_string_to_metric_families(sys.stdin.read())))
";
    let mut python = Command::new("/usr/bin/python3")
        .args(["-c", PROGRAM])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python can be started");
    python.stdin.take().expect("a pipe").write_all(text).expect("it reads");
    let output = python.wait_with_output().expect("it ends");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number")
}

#[test]
fn metrics_are_what_prometheus_reads() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("echo hello; echo oops >&2; exit 3");
    sandbox.request("GET", "/files?path=/etc/hostname").send(daemon.address);
    sandbox
        .request("GET", "/files?path=/no/such/file")
        .send(daemon.address)
        .expect_refusal(404, "file_not_found");
    let made = shoal(&daemon, &["key", "create", "--owner", "prometheus", "--metrics-only"]);
    let scraper = made.trim();
    let scrape = || shoal_tests::Request::new("GET", "/metrics").key(scraper).send(daemon.address);
    let answer = scrape();
    assert_eq!(answer.status, 200, "{}", answer.describe());
    assert_eq!(
        answer.header("content-type"),
        Some("application/openmetrics-text; version=1.0.0; charset=utf-8")
    );
    assert!(samples(&answer.body) > 100);
    let text = String::from_utf8(answer.body).expect("it is text");
    let value = |text: &str, name: &str| -> Option<f64> {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    assert_eq!(value(&text, r#"shoal_command_duration_seconds_count{outcome="exited"}"#), Some(1.0));
    assert_eq!(value(&text, r#"shoal_errors_total{code="file_not_found"}"#), Some(1.0));
    assert!(value(&text, "shoal_sandboxes_memory_bytes").is_some_and(|bytes| bytes > 0.0), "{text}");
    assert!(value(&text, "shoal_sandboxes_cpu_seconds_total").is_some_and(|seconds| seconds > 0.0), "{text}");
    assert!(!text.contains(&sandbox.id), "no label may name a sandbox");

    let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    // Names of callers make no new series, however many there are; routes that do not exist share one.
    scrape();
    let before = series(&String::from_utf8(scrape().body).expect("it is text"));
    daemon.get("/no/such/route-0");
    let known = series(&String::from_utf8(scrape().body).expect("it is text"));
    for number in 1..20 {
        daemon.get(&format!("/no/such/route-{number}"));
    }
    let after = series(&String::from_utf8(scrape().body).expect("it is text"));
    assert_eq!(known, after, "{before} before");
}

/// A daemon that sends its traces to a collector.
fn traced(collector: SocketAddr) -> Daemon {
    let arguments = vec!["--otlp-endpoint".into(), format!("http://{collector}")];
    Spawn { arguments, ..Spawn::default() }.start()
}

#[test]
fn a_trace_goes_on_from_the_callers_own_down_to_the_steps() {
    const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
    const CALLER: &str = "00f067aa0ba902b7";
    let collector = Collector::new();
    let mut daemon = traced(collector.address);
    let parent = format!("00-{TRACE}-{CALLER}-01");
    let made = daemon.request("POST", "/v1/sandboxes").json(&json!({})).header("traceparent", &parent);
    let made = made.send(daemon.address).expect(201);
    let sandbox = daemon.sandbox_of(made["id"].as_str().expect("a sandbox has an id"));
    let run = sandbox.request("POST", "/commands").json(&json!({"argv": ["true"]}));
    run.header("traceparent", &parent).send(daemon.address).expect(200);
    let refused = sandbox.request("GET", "/files?path=/no/such").header("traceparent", "00-rubbish-01");
    refused.send(daemon.address).expect_refusal(404, "file_not_found");
    sandbox.delete();
    assert!(daemon.stop(), "remaining spans are delivered at the end");

    let spans = collector.spans();
    let find = |name: &str, within: &dyn Fn(&TraceSpan) -> bool| -> TraceSpan {
        let found = spans.iter().find(|span| span.name == name && within(span));
        found.unwrap_or_else(|| panic!("no `{name}` in {spans:#?}")).clone()
    };
    let ours = |span: &TraceSpan| span.trace == TRACE;
    let below = |parent: &TraceSpan| {
        let (trace, id) = (parent.trace.clone(), parent.id.clone());
        move |span: &TraceSpan| span.trace == trace && span.parent == id
    };
    let request = find("POST /v1/sandboxes", &ours);
    assert_eq!(request.parent, CALLER, "the caller's span is above it");
    assert!(request.attributes.contains(&("http.response.status_code".into(), "201".into())), "{request:?}");
    let create = find("create", &below(&request));
    assert!(create.attributes.contains(&("shoal.sandbox".into(), sandbox.id.clone())), "{create:?}");
    for step in ["row", "launch", "greet"] {
        find(step, &below(&create));
    }
    let run = find("POST /v1/sandboxes/{sandbox}/commands", &ours);
    for step in ["row", "start"] {
        find(step, &below(&run));
    }
    let read = find("GET /v1/sandboxes/{sandbox}/files", &|_| true);
    assert!(read.parent.is_empty() && read.trace != TRACE, "rubbish begins a trace of its own: {read:?}");
    let delete = find("DELETE /v1/sandboxes/{sandbox}", &|_| true);
    let delete = find("delete", &below(&delete));
    find("teardown", &below(&delete));
    assert!(spans.iter().all(|span| !span.name.contains(&sandbox.id)), "names are templates");
}

#[test]
fn a_collector_that_is_not_there_harms_nobody_and_is_said_once() {
    let gone = TcpListener::bind("127.0.0.1:0").and_then(|it| it.local_addr()).expect("a port that was free");
    let mut daemon = traced(gone);
    let sandbox = daemon.sandbox();
    sandbox.sh("echo hello").ok();
    until("the log reports that traces are not delivered", || {
        sandbox.sh("true").ok();
        daemon.logs().contains("traces cannot be delivered").then_some(())
    });
    assert!(daemon.stop());
    assert_eq!(daemon.logs().matches("traces cannot be delivered").count(), 1, "{}", daemon.logs());
}

#[test]
fn what_is_slow_is_in_the_log_with_its_step_and_its_sandbox() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox();
    sandbox.sh("true").ok();
    let quick = format!("sandbox={}", sandbox.id);
    let slow = |daemon: &Daemon| -> Option<String> {
        let logs = daemon.logs();
        let mut lines = logs.lines().filter(|line| line.contains(" slow ") && line.contains(&quick));
        lines.find(|line| line.contains("step=\"start\"")).map(str::to_owned)
    };
    assert_eq!(slow(&daemon), None, "quick steps are not logged");
    let init = sandbox.init();
    send_signal(init, Signal::STOP);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| sandbox.run(json!({"argv": ["true"], "id": "late"})).ok());
        until("the command is asked for", || {
            let asked = sandbox.request("GET", "/commands/late").send(daemon.address);
            (asked.status == 200).then_some(())
        });
        let asked = Instant::now();
        until("that was a while ago", || (asked.elapsed() > Duration::from_millis(700)).then_some(()));
        send_signal(init, Signal::CONT);
        run.join().expect("it runs all the same");
    });
    let line = until("the log has it", || slow(&daemon));
    assert!(line.contains("WARN") && line.contains("threshold=500"), "{line}");
    let metrics = String::from_utf8(daemon.get("/metrics").body).expect("it is text");
    assert!(metrics.contains("shoal_slow_steps_total{step=\"start\"} 1"), "{metrics}");
}
