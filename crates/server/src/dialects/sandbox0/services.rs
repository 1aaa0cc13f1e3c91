//! Services and previews: ports of a sandbox under URLs of their own. Each is a link of ours.
//!
//! A service is a server that its caller starts (`manual`). A public one is a public link, if the operator allows those.

use std::time::Duration;

use axum::extract::{FromRequestParts, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use engine::{EngineError, Key, Link, LinkSpec, NoteChanges, Port, Sandbox, SandboxUpdate};
use serde::Deserialize;
use serde_json::{Value, json};

use super::answer::{Answer, done, with};
use super::error::Refusal;
use super::notes::{self, SERVICES};
use super::read::{Awake, Body, Meant};
use super::{names, sandboxes};
use crate::http::app::App;
use crate::http::body::text_in_path;
use crate::http::clock::rfc3339;
use crate::http::port_names::Named;
use crate::ports::{TOKEN_PARAMETER, Token};

/// How the links of services and previews are recognized in lists.
const SERVICE_LABEL: &str = "sandbox0 service";
const PREVIEW_LABEL: &str = "sandbox0 preview";
/// How long a preview works if nothing else is asked for, and at most.
const PREVIEW_SECONDS_DEFAULT: i64 = 900;
const PREVIEW_SECONDS_MAX: u64 = 86_400;
/// Services of one sandbox.
const SERVICES_MAX: usize = 32;
/// The longest name of a service, as of a label of a host name.
const NAME_MAX: usize = 63;

/// What is read of a service.
#[derive(Debug, Deserialize)]
struct Service {
    id: String,
    #[serde(default)]
    port: Option<u16>,
    #[serde(default)]
    runtime: Option<Runtime>,
    ingress: Ingress,
}

#[derive(Debug, Deserialize)]
struct Runtime {
    #[serde(rename = "type")]
    kind: String,
}

#[derive(Debug, Deserialize)]
struct Ingress {
    public: bool,
    #[serde(default)]
    routes: Option<Vec<Route>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Route {
    resume: bool,
    path_prefix: Option<String>,
    methods: Option<Vec<String>>,
    rewrite_prefix: Option<String>,
    auth: Option<Auth>,
    cors: Option<Value>,
    rate_limit: Option<Value>,
    timeout_seconds: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Auth {
    mode: String,
}

impl Service {
    fn read(text: &Value) -> Result<Self, Refusal> {
        let service = Self::deserialize(text);
        let service = service.map_err(|error| Refusal::bad(format!("a service is not valid: {error}")))?;
        service.check()?;
        Ok(service)
    }

    fn check(&self) -> Result<Port, Refusal> {
        let plain = |id: &str| {
            (1..=NAME_MAX).contains(&id.len())
                && id.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
                && !id.starts_with('-')
                && !id.ends_with('-')
        };
        if !plain(&self.id) {
            return Err(Refusal::must("id", "be the label of a host name"));
        }
        if self.runtime.as_ref().is_some_and(|runtime| runtime.kind != "manual") {
            let message = "this server starts no services by itself: start the server in a context, with the runtime `manual`";
            return Err(Refusal::unsupported(message));
        }
        for route in self.ingress.routes.iter().flatten() {
            let plain = route.path_prefix.as_deref().is_none_or(|prefix| matches!(prefix, "" | "/"))
                && route.methods.as_ref().is_none_or(Vec::is_empty)
                && route.rewrite_prefix.is_none()
                && route.auth.as_ref().is_none_or(|auth| auth.mode == "none")
                && route.cors.is_none()
                && route.rate_limit.is_none()
                && route.timeout_seconds.is_none()
                && !route.resume;
            if !plain {
                let message = "a route of a service has the path `/` and nothing else on this server: put a proxy in front";
                return Err(Refusal::unsupported(message));
            }
        }
        let port = self.port.ok_or_else(|| Refusal::must("port", "be given"))?;
        Ok(Port::new(port)?)
    }
}

/// Checks services as a client writes them.
pub fn check(services: &[Value]) -> Result<(), Refusal> {
    if services.len() > SERVICES_MAX {
        return Err(Refusal::must("services", format!("be at most {SERVICES_MAX}, got {}", services.len())));
    }
    let read: Vec<Service> = services.iter().map(Service::read).collect::<Result<_, _>>()?;
    for (at, service) in read.iter().enumerate() {
        if read[..at].iter().any(|before| before.id == service.id) {
            return Err(Refusal::must(
                "services",
                format!("have names of their own, got `{}` twice", service.id),
            ));
        }
    }
    Ok(())
}

/// The services of a sandbox, as its client wrote them.
pub fn written(sandbox: &Sandbox) -> Vec<Value> {
    sandbox.notes.get(SERVICES).and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default()
}

/// Replaces the services of a sandbox, which were checked.
pub async fn publish(app: &App, key: &Key, sandbox: &Sandbox, services: Vec<Value>) -> Result<(), Refusal> {
    if services.is_empty() && written(sandbox).is_empty() {
        return Ok(());
    }
    for link in app.engine.links(&key.owner, sandbox.id)? {
        if link.label.as_deref() == Some(SERVICE_LABEL) {
            app.engine.revoke_link(&key.owner, sandbox.id, link.id).await?;
        }
    }
    for text in &services {
        let service = Service::read(text)?;
        if service.ingress.public && app.ports().public {
            let spec = LinkSpec {
                port: service.check()?,
                label: Some(SERVICE_LABEL.into()),
                methods: Vec::new(),
                ttl: LinkSpec::TTL_MAX,
                public: true,
            };
            app.engine.create_link(key, sandbox.id, spec).await?;
        }
    }
    let text = Value::from(services).to_string();
    let update = SandboxUpdate { notes: NoteChanges::set(SERVICES, text), ..SandboxUpdate::default() };
    app.engine.update(&key.owner, sandbox.id, update).await?;
    Ok(())
}

/// The services of a sandbox, with their URLs.
fn view(app: &App, sandbox: &Sandbox, headers: &HeaderMap) -> Value {
    let services: Vec<Value> = written(sandbox)
        .into_iter()
        .map(|mut view| {
            let read = Service::read(&view).ok();
            let port = read.as_ref().and_then(|service| service.check().ok());
            let public = read.is_some_and(|service| service.ingress.public);
            let url = port
                .and_then(|port| app.ports().url(Named { sandbox: sandbox.id, port }, app.scheme(), headers));
            let blockers: &[&str] = match (public, app.ports().public) {
                (false, _) => &["the service is not public"],
                (true, false) => &["the operator does not allow public ports: make a link with `shoal url`"],
                (true, true) => &[],
            };
            view["publishable"] = blockers.is_empty().into();
            view["publish_blockers"] = json!(blockers);
            if let Some(url) = url.filter(|_| blockers.is_empty()) {
                view["public_url"] = url.into();
            }
            view
        })
        .collect();
    json!({"sandbox_id": names::sandbox(sandbox.id), "services": services})
}

/// The services of a sandbox.
pub async fn get(State(app): State<App>, headers: HeaderMap, Meant { sandbox, .. }: Meant) -> Answer {
    done(view(&app, &sandbox, &headers))
}

/// `PUT .../services`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Update {
    services: Vec<Value>,
}

/// Replaces them.
pub async fn update(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Update>,
) -> Result<Answer, Refusal> {
    check(&body.services)?;
    publish(&app, &key, &sandbox, body.services).await?;
    let sandbox = app.engine.get(&key.owner, sandbox.id).await?;
    Ok(done(view(&app, &sandbox, &headers)))
}

/// `POST .../previews`, and with `ttl_seconds` alone `PUT .../previews/{preview}`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Preview {
    port: Option<u16>,
    protocol: Option<String>,
    path: Option<String>,
    ttl_seconds: Option<i64>,
}

impl Preview {
    fn ttl(&self) -> Result<Duration, Refusal> {
        let seconds =
            sandboxes::seconds("ttl_seconds", Some(self.ttl_seconds.unwrap_or(PREVIEW_SECONDS_DEFAULT)))?;
        match seconds {
            Some(seconds @ 1..=PREVIEW_SECONDS_MAX) => Ok(Duration::from_secs(seconds)),
            _ => Err(Refusal::must("ttl_seconds", format!("be between 1 and {PREVIEW_SECONDS_MAX}"))),
        }
    }
}

/// Makes a URL with a token in it that opens a port for a while.
pub async fn preview(
    State(app): State<App>,
    headers: HeaderMap,
    Awake { key, sandbox }: Awake,
    Body(body): Body<Preview>,
) -> Result<Answer, Refusal> {
    if body.protocol.as_deref().is_some_and(|protocol| protocol != "http") {
        return Err(Refusal::unsupported("servers in sandboxes are reached by HTTP: leave `protocol` out"));
    }
    let port = Port::new(body.port.ok_or_else(|| Refusal::must("port", "be given"))?)?;
    let path = body.path.clone().unwrap_or_default();
    let answer = linked(&app, &headers, (&key, &sandbox), port, (&path, body.ttl()?)).await?;
    Ok(with(StatusCode::CREATED, answer))
}

async fn linked(
    app: &App,
    headers: &HeaderMap,
    (key, sandbox): (&Key, &Sandbox),
    port: Port,
    (path, ttl): (&str, Duration),
) -> Result<Value, Refusal> {
    let named = Named { sandbox: sandbox.id, port };
    let origin = app.ports().url(named, app.scheme(), headers);
    let origin = origin.ok_or_else(|| {
        Refusal::unsupported(
            "ports have host names for this machine alone: the operator must set `ports_url`",
        )
    })?;
    let spec = LinkSpec { port, label: Some(PREVIEW_LABEL.into()), methods: Vec::new(), ttl, public: false };
    let (link, token) = app.engine.create_link(key, sandbox.id, spec).await?;
    let token = Token::of(&token.unwrap_or_default()).0;
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let joint = if path.contains('?') { '&' } else { '?' };
    Ok(json!({
        "id": link.id.to_string(),
        "sandbox_id": names::sandbox(sandbox.id),
        "port": port.number(),
        "protocol": "http",
        "url": format!("{origin}{path}{joint}{TOKEN_PARAMETER}={token}"),
        "target_url": format!("http://127.0.0.1:{port}{path}"),
        "expires_at": rfc3339(link.expires_at),
        "runtime_generation": notes::generation(sandbox),
    }))
}

/// The preview that a path names.
pub struct Shown {
    meant: Meant,
    link: Link,
}

impl FromRequestParts<App> for Shown {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Refusal> {
        let meant = Meant::from_request_parts(parts, app).await?;
        let text = text_in_path(parts, app, "preview").await?;
        let links = app.engine.links(&meant.key.owner, meant.sandbox.id)?;
        let found = links
            .into_iter()
            .find(|link| link.id.to_string() == text && link.label.as_deref() == Some(PREVIEW_LABEL));
        let link = found.ok_or_else(|| EngineError::LinkNotFound { id: engine::shown(&text) })?;
        Ok(Self { meant, link })
    }
}

/// Renews the URL of a preview.
pub async fn renew(
    State(app): State<App>,
    headers: HeaderMap,
    Shown { meant: Meant { key, sandbox }, link }: Shown,
    Body(body): Body<Preview>,
) -> Result<Answer, Refusal> {
    let ttl = body.ttl()?;
    let answer = linked(&app, &headers, (&key, &sandbox), link.port, ("/", ttl)).await?;
    app.engine.revoke_link(&key.owner, sandbox.id, link.id).await?;
    Ok(done(answer))
}

/// Ends a preview at once.
pub async fn end(State(app): State<App>, shown: Shown) -> Result<Answer, Refusal> {
    let Shown { meant: Meant { key, sandbox }, link } = shown;
    app.engine.revoke_link(&key.owner, sandbox.id, link.id).await?;
    Ok(done(json!({"deleted": true})))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn services_are_checked_as_a_list() {
        let service = |id: &str| json!({"id": id, "port": 8080, "ingress": {"public": true}});
        check(&[service("a"), service("b")]).expect("they are services");
        check(&[service("a"), service("a")]).expect_err("both have one name");
        for wrong in [
            json!({"id": "A b", "port": 1, "ingress": {"public": false}}),
            json!({"id": "a", "ingress": {"public": false}}),
            json!({"id": "a", "port": 0, "ingress": {"public": false}}),
            json!({"id": "a", "port": 1, "runtime": {"type": "cmd"}, "ingress": {"public": false}}),
            json!({"id": "a", "port": 1, "ingress": {"public": true, "routes": [{"id": "r", "resume": true}]}}),
            json!({"id": "a", "port": 1}),
        ] {
            check(std::slice::from_ref(&wrong)).expect_err(&wrong.to_string());
        }
    }
}
