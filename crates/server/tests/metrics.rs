//! What `/metrics` tells, on an engine whose backend is the fake one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use engine::{Engine, EngineConfig, KeySecret};
use http_body_util::BodyExt;
use runtime::fake::FakeHost;
use serde_json::{Value, json};
use shoal_server::daemon::compose;
use shoal_server::{Config, Layers, Machine, Settings};
use tower::ServiceExt;

/// A count that takes longer than this never comes.
const COUNTED_MAX: Duration = Duration::from_secs(20);

const KEY: &str = "a-key-for-the-tests-of-metrics";

struct World {
    router: Router,
    _home: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        let home = tempfile::tempdir().expect("a temporary directory");
        let flags = Settings { data_dir: Some(home.path().into()), ..Settings::default() };
        let machine = Machine { cpus: 2, memory_bytes: 8 << 30 };
        let config = Config::check(&Layers { flags, ..Layers::default() }, machine).expect("it is valid");
        let engine_config = EngineConfig {
            data_dir: home.path().into(),
            capacity: config.capacity,
            output_kept_max: config.output_kept_max,
            images: config.images.clone(),
            network: Default::default(),
        };
        let engine =
            Engine::start(engine_config, Arc::new(FakeHost::new())).await.expect("the engine starts");
        let secret = KeySecret::parse(KEY).expect("it is long enough");
        engine.set_bootstrap_key(&secret).await.expect("it can be set");
        Self { router: compose::router(&compose::app(engine, &config)), _home: home }
    }

    async fn ask(&self, key: &str, method: Method, path: &str, body: Option<Value>) -> (StatusCode, String) {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::AUTHORIZATION, format!("Bearer {key}"));
        if body.is_some() {
            request = request.header(header::CONTENT_TYPE, "application/json");
        }
        let body = body.map_or_else(Body::empty, |body| Body::from(body.to_string()));
        let request = request.body(body).expect("a request");
        let response = self.router.clone().oneshot(request).await.expect("the router never fails");
        let (parts, body) = response.into_parts();
        let bytes = body.collect().await.expect("the body comes").to_bytes();
        (parts.status, String::from_utf8(bytes.to_vec()).expect("it is text"))
    }

    async fn figures(&self) -> BTreeMap<String, f64> {
        let (status, text) = self.ask(KEY, Method::GET, "/metrics", None).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        assert!(text.ends_with("# EOF\n"));
        let samples = text.lines().filter(|line| !line.starts_with('#'));
        samples
            .map(|line| {
                let (name, value) = line.rsplit_once(' ').expect("a name and a value");
                (name.to_owned(), value.parse().expect("a number"))
            })
            .collect()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_happened_is_counted_by_verb_and_outcome() {
    let world = World::new().await;
    let (status, made) = world.ask(KEY, Method::POST, "/v1/sandboxes", Some(json!({}))).await;
    assert_eq!(status, StatusCode::CREATED, "{made}");
    let id =
        serde_json::from_str::<Value>(&made).expect("it is JSON")["id"].as_str().expect("an id").to_owned();
    let run = format!("/v1/sandboxes/{id}/commands");
    for script in ["echo hello", "err oops; exit 3"] {
        let (status, said) = world.ask(KEY, Method::POST, &run, Some(json!({"script": script}))).await;
        assert_eq!(status, StatusCode::OK, "{said}");
    }
    let read = format!("/v1/sandboxes/{id}/files?path=/flood/100");
    assert_eq!(world.ask(KEY, Method::GET, &read, None).await.1.len(), 100);
    world.ask(KEY, Method::GET, "/v1/sandboxes/nobody", None).await;
    world.ask(KEY, Method::GET, "/no/such/route", None).await;

    // A read is counted when its stream is dropped, and a command when its result is stored: both can be after the answer.
    const EXITED: &str = r#"shoal_command_duration_seconds_count{outcome="exited"}"#;
    const READ: &str = r#"shoal_operation_duration_seconds_count{verb="file_read",outcome="ok"}"#;
    let counted = async {
        loop {
            let figures = world.figures().await;
            if figures.contains_key(READ) && figures.get(EXITED) == Some(&2.0) {
                return figures;
            }
            tokio::task::yield_now().await;
        }
    };
    let figures =
        tokio::time::timeout(COUNTED_MAX, counted).await.expect("the read and both commands are counted");
    let value =
        |name: &str| figures.get(name).copied().unwrap_or_else(|| panic!("no {name} in {figures:#?}"));
    assert_eq!(value(r#"shoal_operation_duration_seconds_count{verb="create",outcome="ok"}"#), 1.0);
    assert_eq!(value(r#"shoal_operation_duration_seconds_count{verb="run",outcome="ok"}"#), 2.0);
    assert_eq!(value(READ), 1.0);
    assert_eq!(value(r#"shoal_sandboxes{state="running"}"#), 1.0);
    assert_eq!(value(r#"shoal_sandboxes{state="failed"}"#), 0.0);
    assert_eq!(value("shoal_commands_running"), 0.0);
    assert_eq!(value(r#"shoal_output_bytes_total{stream="stdout"}"#), 6.0);
    assert_eq!(value(r#"shoal_output_bytes_total{stream="stderr"}"#), 5.0);
    assert!(value(r#"shoal_file_bytes_total{direction="out"}"#) >= 100.0);
    assert!(value("shoal_store_commit_duration_seconds_count") >= 3.0);
    assert_eq!(value(r#"shoal_backend_request_duration_seconds_count{request="launch",outcome="ok"}"#), 1.0);
    let commands = r#"route="/v1/sandboxes/{sandbox}/commands",method="POST""#;
    assert_eq!(value(&format!("shoal_http_requests_total{{{commands},status=\"2xx\"}}")), 2.0);
    assert_eq!(value(&format!("shoal_http_request_duration_seconds_count{{{commands}}}")), 2.0);
    assert_eq!(value(r#"shoal_http_requests_total{route="none",method="GET",status="4xx"}"#), 1.0);
    assert_eq!(value(r#"shoal_errors_total{code="route_not_found"}"#), 1.0);
    assert!(value("process_resident_memory_bytes") > 1e6);
    assert!(value("process_cpu_seconds_total") > 0.0);
    assert!(figures.keys().all(|name| !name.contains(&id)), "no label tells of a sandbox");

    world.ask(KEY, Method::DELETE, &format!("/v1/sandboxes/{id}"), None).await;
    let figures = world.figures().await;
    assert_eq!(figures[r#"shoal_operation_duration_seconds_count{verb="delete",outcome="ok"}"#], 1.0);
    assert_eq!(figures[r#"shoal_sandboxes{state="running"}"#], 0.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_are_for_those_who_run_the_daemon_and_for_keys_that_open_nothing_else() {
    let world = World::new().await;
    let make = async |body: Value| {
        let (status, text) = world.ask(KEY, Method::POST, "/v1/keys", Some(body)).await;
        assert_eq!(status, StatusCode::CREATED, "{text}");
        let key: Value = serde_json::from_str(&text).expect("it is JSON");
        key["secret"].as_str().expect("it is shown once").to_owned()
    };
    let code = |text: &str| serde_json::from_str::<Value>(text).expect("it is JSON")["code"].clone();
    let owner = make(json!({"owner": "alice"})).await;
    let (status, text) = world.ask(&owner, Method::GET, "/metrics", None).await;
    assert_eq!((status, code(&text)), (StatusCode::FORBIDDEN, json!("metrics_not_allowed")));

    let scraper = make(json!({"owner": "prometheus", "metrics_only": true})).await;
    let (status, text) = world.ask(&scraper, Method::GET, "/metrics", None).await;
    assert_eq!(status, StatusCode::OK, "{text}");
    for (method, path) in [
        (Method::GET, "/v1/sandboxes"),
        (Method::POST, "/v1/sandboxes"),
        (Method::GET, "/v1/version"),
        (Method::GET, "/v1/stats"),
        (Method::GET, "/v1/keys"),
        (Method::GET, "/metrics/"),
        (Method::GET, "/nothing"),
    ] {
        let (status, text) = world.ask(&scraper, method, path, None).await;
        assert_eq!((status, code(&text)), (StatusCode::FORBIDDEN, json!("metrics_only")), "{path}");
    }
    let (status, _) = world.ask("not-a-key-at-all", Method::GET, "/metrics", None).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
}
