//! What operators see: what sandboxes use, metrics, traces, warnings.

use std::io::Write;
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use shoal_tests::daemon::binary;
use shoal_tests::{Daemon, until};

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
    assert!(held >= f64::from(20 << 20), "files in memory count: {after}");
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
    assert_eq!(theirs["sandboxes"], json!([]), "sandboxes of others are not told");
    assert_eq!(theirs["machine"]["all_sandboxes"], Value::Null, "and not how many there are");
}

#[test]
fn the_command_line_shows_stats_to_people_and_programs() {
    let daemon = Daemon::start();
    let sandbox = daemon.sandbox_with(json!({"name": "work"}));
    let table = shoal(&daemon, &["stats"]);
    let lines: Vec<&str> = table.lines().collect();
    let words: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(words, ["ID", "NAME", "STATE", "CPU", "CPU", "TIME", "MEMORY", "PIDS", "DISK", "COMMANDS"]);
    assert!(lines[1].starts_with(&sandbox.id) && lines[1].contains("1 / 1024"), "{table}");
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

/// Reads text as Prometheus would, with the parser of its own Python client, and tells how many samples there are.
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
    assert!(!text.contains(&sandbox.id), "no label tells of a sandbox");

    let series = |text: &str| text.lines().filter(|line| !line.starts_with('#')).count();
    // Names of those who ask make no new series, however many they are; routes that do not exist share one.
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
