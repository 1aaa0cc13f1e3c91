//! The router with all its layers, on an engine whose backend is the fake one.

use std::path::Path;
use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use engine::{Engine, EngineConfig, KeySecret};
use http_body_util::BodyExt;
use runtime::fake::FakeHost;
use serde_json::{Value, json};
use shoal_server::daemon::compose;
use shoal_server::http::app::App;
use shoal_server::http::body::BODY_TIME_MAX;
use shoal_server::{Config, Layers, Machine, Settings};
use tower::ServiceExt;

const KEY: &str = "a-key-for-the-tests-of-routes";
const NOBODY: &str = "00000000-0000-4000-8000-000000000000";

struct World {
    app: App,
    router: Router,
    host: FakeHost,
    _home: tempfile::TempDir,
}

struct Answer {
    status: StatusCode,
    headers: axum::http::HeaderMap,
    body: Value,
}

impl Answer {
    #[track_caller]
    fn refused(&self, status: u16, code: &str) {
        assert_eq!((self.status.as_u16(), &self.body["code"]), (status, &json!(code)), "{}", self.body);
        assert!(self.body["message"].is_string());
        assert_eq!(self.headers[header::CONTENT_TYPE], "application/json");
        assert!(self.headers.contains_key("x-request-id"));
    }
}

impl World {
    async fn new() -> Self {
        let home = tempfile::tempdir().expect("a temporary directory");
        let flags = Settings {
            data_dir: Some(home.path().into()),
            public_url: Some("https://shoal.example.com".into()),
            ..Settings::default()
        };
        let machine = Machine { cpus: 2, memory_bytes: 8 << 30 };
        let config = Config::check(&Layers { flags, ..Layers::default() }, machine).expect("it is valid");
        let host = FakeHost::new();
        let engine = Engine::start(
            EngineConfig {
                data_dir: home.path().into(),
                capacity: config.capacity,
                output_kept_max: config.output_kept_max,
                images: Default::default(),
                network: Default::default(),
            },
            Arc::new(host.clone()),
        )
        .await
        .expect("the engine starts");
        let secret = KeySecret::parse(KEY).expect("it is long enough");
        engine.set_bootstrap_key(&secret).await.expect("it can be set");
        let app = compose::app(engine, &config);
        Self { router: compose::router(&app), app, host, _home: home }
    }

    async fn send(&self, request: Request<Body>) -> Answer {
        let response = self.router.clone().oneshot(request).await.expect("the router never fails");
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("the body comes").to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Answer { status: parts.status, headers: parts.headers, body }
    }

    async fn ask(&self, method: Method, path: &str, body: Option<Value>) -> Answer {
        let mut request = with_key(method, path);
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        self.send(request.body(body).expect("a request")).await
    }

    async fn sandbox(&self) -> String {
        let answer = self.ask(Method::POST, "/v1/sandboxes", Some(json!({}))).await;
        assert_eq!(answer.status, StatusCode::CREATED, "{}", answer.body);
        answer.body["id"].as_str().expect("an id").to_owned()
    }
}

fn plain(method: Method, path: &str) -> axum::http::request::Builder {
    Request::builder().method(method).uri(path).header(header::HOST, "localhost")
}

fn with_key(method: Method, path: &str) -> axum::http::request::Builder {
    plain(method, path).header(header::AUTHORIZATION, format!("Bearer {KEY}"))
}

/// Every method of every path that the committed description knows, with ids of nobody.
fn described() -> Vec<(Method, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/reference/openapi.json");
    let text = std::fs::read_to_string(path).expect("the description is committed");
    let description: Value = serde_json::from_str(&text).expect("it is JSON");
    let mut all = Vec::new();
    for (path, methods) in description["paths"].as_object().expect("paths") {
        let path = path.replace("{sandbox}", NOBODY).replace("{command}", "c").replace("{key}", "k");
        for method in methods.as_object().expect("methods").keys() {
            all.push((method.to_uppercase().parse().expect("a method"), path.clone()));
        }
    }
    all
}

#[tokio::test]
async fn every_described_route_exists_and_needs_a_key() {
    let world = World::new().await;
    let all = described();
    assert!(all.len() >= 23, "{}", all.len());
    for (method, path) in all {
        let request = plain(method.clone(), &path).body(Body::empty()).expect("a request");
        let refused = world.send(request).await;
        if ["/v1/health", "/v1/ready"].contains(&path.as_str()) {
            assert_eq!(refused.status, StatusCode::OK, "probes have no key: {path}");
        } else if method == Method::HEAD {
            assert_eq!(refused.status, StatusCode::UNAUTHORIZED); // Such an answer has no body to say more in.
        } else {
            refused.refused(401, "unauthorized");
        }
        // What never ends is asked for a sandbox that does not exist.
        let target = if path == "/v1/events" { format!("{path}?sandbox=x") } else { path.clone() };
        let answer = world.ask(method.clone(), &target, None).await;
        assert_ne!(answer.body["code"], "route_not_found", "{method} {path}");
        assert_ne!(answer.body["code"], "method_not_allowed", "{method} {path}");
        assert!(!answer.status.is_server_error(), "{method} {path}: {}", answer.body);
    }
}

#[tokio::test]
async fn without_a_key_unknown_paths_and_methods_look_like_any_other() {
    let world = World::new().await;
    for (method, path) in [
        (Method::GET, "/v1/nothing"),
        (Method::DELETE, "/v1/images"),
        (Method::OPTIONS, "/v1/sandboxes"),
        (Method::GET, "/v1/sandboxes/%ff"),
    ] {
        let request = plain(method, path).body(Body::empty()).expect("a request");
        let answer = world.send(request).await;
        answer.refused(401, "unauthorized");
        assert_eq!(answer.headers[header::WWW_AUTHENTICATE], "Bearer");
    }
}

#[tokio::test]
async fn foreign_hosts_and_pages_are_refused_before_the_key_is_looked_at() {
    let world = World::new().await;
    let ask = async |host: &str, origin: Option<&str>| {
        let mut request = Request::builder().uri("/v1/health").header(header::HOST, host);
        request = request.header("x-api-key", KEY);
        if let Some(origin) = origin {
            request = request.header(header::ORIGIN, origin);
        }
        world.send(request.body(Body::empty()).expect("a request")).await
    };
    assert_eq!(ask("localhost:7878", None).await.status, StatusCode::OK);
    assert_eq!(ask("shoal.example.com", Some("https://shoal.example.com")).await.status, StatusCode::OK);
    ask("evil.example", None).await.refused(421, "host_not_allowed");
    ask("localhost", Some("https://evil.example")).await.refused(403, "origin_not_allowed");
    ask("localhost", Some("null")).await.refused(403, "origin_not_allowed");
    let without = Request::builder().uri("/v1/health").header("x-api-key", KEY);
    world.send(without.body(Body::empty()).expect("a request")).await.refused(400, "invalid_host");
}

#[tokio::test]
async fn bad_requests_are_never_our_failure() {
    let world = World::new().await;
    let commands = format!("/v1/sandboxes/{NOBODY}/commands");
    world.ask(Method::GET, "/v1/nothing", None).await.refused(404, "route_not_found");
    let wrong = world.ask(Method::DELETE, "/v1/health", None).await;
    wrong.refused(405, "method_not_allowed");
    assert!(wrong.headers.contains_key(header::ALLOW));
    world.ask(Method::GET, "/v1/sandboxes/UPPER", None).await.refused(400, "invalid_id");
    world.ask(Method::GET, "/v1/sandboxes/%ff%fe", None).await.refused(400, "invalid_id");
    world.ask(Method::GET, &format!("{commands}/a%2Fb"), None).await.refused(400, "invalid_id");
    world.ask(Method::GET, "/v1/sandboxes?limit=0", None).await.refused(400, "invalid_request");
    world.ask(Method::GET, "/v1/sandboxes?limit=many", None).await.refused(400, "invalid_request");
    world.ask(Method::GET, "/v1/sandboxes?lmit=1", None).await.refused(400, "invalid_query");
    world.ask(Method::GET, &format!("/v1/sandboxes/{NOBODY}"), None).await.refused(404, "sandbox_not_found");
    world.ask(Method::GET, &format!("{commands}/stream"), None).await.refused(426, "upgrade_required");
    world
        .ask(Method::POST, "/v1/sandboxes", Some(json!({"memory": "lots"})))
        .await
        .refused(400, "invalid_request");
    let form = with_key(Method::POST, "/v1/sandboxes").header(header::CONTENT_TYPE, "text/plain");
    world.send(form.body(Body::from("{}")).expect("a request")).await.refused(415, "unsupported_media_type");
    let nameless = with_key(Method::POST, "/v1/sandboxes").body(Body::from("{}")).expect("a request");
    world.send(nameless).await.refused(415, "unsupported_media_type");
}

#[tokio::test]
async fn a_body_beyond_its_limit_is_refused_with_and_without_an_announcement() {
    let world = World::new().await;
    let json = |method, path: &str| with_key(method, path).header(header::CONTENT_TYPE, "application/json");
    // Announced: nothing of it is read.
    let announced = json(Method::POST, "/v1/sandboxes").header(header::CONTENT_LENGTH, 1u64 << 40);
    world.send(announced.body(Body::empty()).expect("a request")).await.refused(413, "body_too_large");
    let large = vec![b' '; (1 << 20) + 1];
    let quiet = json(Method::POST, "/v1/sandboxes").body(Body::from(large.clone())).expect("a request");
    world.send(quiet).await.refused(413, "body_too_large");
    // A command may be longer, up to its own limit.
    let path = format!("/v1/sandboxes/{}/commands", world.sandbox().await);
    let command = json(Method::POST, &path).body(Body::from(large)).expect("a request");
    world.send(command).await.refused(400, "invalid_json");
    let huge = json(Method::POST, &path).body(Body::from(vec![b' '; (24 << 20) + 1])).expect("a request");
    world.send(huge).await.refused(413, "body_too_large");
}

#[tokio::test]
async fn a_command_runs_and_answers_with_its_output() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let commands = format!("/v1/sandboxes/{sandbox}/commands");
    let wish = json!({"script": "echo hi; err no; exit 3", "id": "mine"});
    let answer = world.ask(Method::POST, &commands, Some(wish)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(answer.body["stdout_text"], "hi\n");
    assert_eq!(answer.body["stderr_text"], "no\n");
    assert_eq!(answer.body["result"], json!({"outcome": "exited", "exit_code": 3}));
    assert_eq!(world.ask(Method::GET, &format!("{commands}/mine"), None).await.body["state"], "ended");
    let missing = world.ask(Method::POST, &commands, Some(json!({"script": "missing"}))).await;
    assert_eq!(missing.body["result"]["outcome"], "failed_to_start", "{}", missing.body);
    let long = world.ask(Method::POST, &commands, Some(json!({"script": "flood 3000000"}))).await;
    assert_eq!(long.body["stdout_cut"], true);
    assert_eq!(long.body["stdout"]["end"], 3_000_000);
}

#[tokio::test]
async fn a_request_that_waits_is_told_when_the_daemon_stops() {
    let world = World::new().await;
    let sandbox = world.sandbox().await;
    let commands = format!("/v1/sandboxes/{sandbox}/commands");
    let wish = json!({"script": "hang", "id": "endless"});
    let waiting = world.ask(Method::POST, &commands, Some(wish));
    let stop = async {
        // Once it can be found, it is being waited for.
        while world.ask(Method::GET, &format!("{commands}/endless"), None).await.status != StatusCode::OK {
            tokio::task::yield_now().await;
        }
        world.app.stop();
    };
    let (answer, ()) = tokio::join!(waiting, stop);
    answer.refused(503, "stopping");
    assert_eq!(answer.body["details"]["command_id"], "endless");
    assert!(answer.headers.contains_key(header::RETRY_AFTER));
    world.ask(Method::GET, "/v1/ready", None).await.refused(503, "stopping");
}

#[tokio::test]
async fn keys_are_for_those_who_may_manage_them() {
    let world = World::new().await;
    let made = world.ask(Method::POST, "/v1/keys", Some(json!({"owner": "alice", "sandboxes_max": 1}))).await;
    assert_eq!(made.status, StatusCode::CREATED, "{}", made.body);
    let secret = made.body["secret"].as_str().expect("the secret is shown once").to_owned();
    let alice = async |method: Method, path: &str| {
        let request = plain(method, path).header("x-api-key", &secret).body(Body::empty());
        world.send(request.expect("a request")).await
    };
    alice(Method::GET, "/v1/keys").await.refused(403, "admin_required");
    let sandbox = world.sandbox().await;
    let (theirs, nobodys) = (
        alice(Method::GET, &format!("/v1/sandboxes/{sandbox}")).await,
        alice(Method::GET, &format!("/v1/sandboxes/{NOBODY}")).await,
    );
    theirs.refused(404, "sandbox_not_found");
    assert_eq!(theirs.body.to_string().replace(&sandbox, NOBODY), nobodys.body.to_string());
    assert_eq!(alice(Method::POST, "/v1/sandboxes").await.status, StatusCode::CREATED);
    alice(Method::POST, "/v1/sandboxes").await.refused(429, "quota_exceeded");
    let list = world.ask(Method::GET, "/v1/keys", None).await;
    assert!(!list.body.to_string().contains(&secret));
    let own = list.body["keys"].as_array().expect("keys").iter().find(|key| key["admin"] == true);
    let own = own.expect("our own").clone();
    let path = format!("/v1/keys/{}", own["id"].as_str().expect("an id"));
    world.ask(Method::DELETE, &path, None).await.refused(409, "key_in_use");
}

#[tokio::test]
async fn a_machine_that_fails_is_told_apart_from_one_that_is_full() {
    use runtime::fake::{FakeFailure, FakeStep};
    let world = World::new().await;
    let answer = world.ask(Method::POST, "/v1/sandboxes", Some(json!({"memory": "100000Gi"}))).await;
    // No wait and no delete would help.
    answer.refused(400, "invalid_request");
    let message = answer.body["message"].as_str().expect("a text").to_owned();
    assert!(
        message.starts_with("`memory` must be at most") && message.ends_with("got 97.7 TiB"),
        "{message}"
    );
    let answer = world.ask(Method::POST, "/v1/sandboxes", Some(json!({"cpu": "9999"}))).await;
    answer.refused(400, "invalid_request");
    let message = answer.body["message"].as_str().expect("a text").to_owned();
    assert!(
        message.starts_with("`cpu` must be at most") && message.contains(" processors, got 9999"),
        "{message}"
    );
    // The machine may promise 800 GiB.
    let much = || Some(json!({"memory": "500Gi"}));
    assert_eq!(world.ask(Method::POST, "/v1/sandboxes", much()).await.status, StatusCode::CREATED);
    let answer = world.ask(Method::POST, "/v1/sandboxes", much()).await;
    answer.refused(503, "no_capacity");
    let message = answer.body["message"].as_str().expect("a text");
    assert!(message.ends_with("at most 800 GiB of memory"), "{message}");
    world.host.fail(FakeStep::Process, FakeFailure::Refused, 1);
    world.ask(Method::POST, "/v1/sandboxes", Some(json!({}))).await.refused(500, "create_failed");
    // More often than the engine tries again.
    world.host.fail(FakeStep::Process, FakeFailure::LauncherGone, 100);
    world.ask(Method::POST, "/v1/sandboxes", Some(json!({}))).await.refused(503, "create_failed");
}

#[tokio::test]
async fn a_body_for_what_does_not_exist_is_not_read() {
    let world = World::new().await;
    for (method, path) in [
        (Method::POST, format!("/v1/sandboxes/{NOBODY}/commands")),
        (Method::PATCH, format!("/v1/sandboxes/{NOBODY}")),
        (Method::POST, format!("/v1/sandboxes/{NOBODY}/files/edit?path=/a")),
        (Method::POST, format!("/v1/sandboxes/{NOBODY}/commands/none/stdin")),
        (Method::POST, format!("/v1/sandboxes/{NOBODY}/commands/none/signal")),
        (Method::POST, format!("/langsmith/dp/{NOBODY}/execute")),
    ] {
        let never = futures_util::stream::pending::<Result<bytes::Bytes, std::io::Error>>();
        let request = Request::builder()
            .method(method)
            .uri(&path)
            .header(header::HOST, "localhost")
            .header("x-api-key", KEY)
            .header(header::CONTENT_TYPE, "application/json")
            // So that the layer around the routes does not wait for it either.
            .header(header::EXPECT, "100-continue")
            .body(Body::from_stream(never))
            .expect("a request");
        let answer = tokio::time::timeout(BODY_TIME_MAX / 2, world.router.clone().oneshot(request));
        let answer = answer.await.expect("it does not wait for the body").expect("it answers");
        assert_eq!(answer.status(), StatusCode::NOT_FOUND, "{path}");
    }
}

#[tokio::test]
async fn a_head_that_is_longer_than_anyone_needs_is_refused_with_words() {
    let world = World::new().await;
    let refused = async |path: String, headers: usize, status, code| {
        let mut request = Request::get(path).header(header::HOST, "localhost");
        for at in 0..headers {
            request = request.header(format!("x-{at}"), "y");
        }
        let request = request.body(Body::empty()).expect("a request");
        let answer = world.router.clone().oneshot(request).await.expect("it answers");
        assert_eq!(answer.status().as_u16(), status);
        let body = answer.into_body().collect().await.expect("a body").to_bytes();
        let body: Value = serde_json::from_slice(&body).expect("it is JSON");
        assert_eq!(body["code"], code);
    };
    refused("/v1/health".into(), 64, 431, "headers_too_large").await;
    refused(format!("/v1/{}", "a".repeat(32 << 10)), 0, 414, "uri_too_long").await;
}
