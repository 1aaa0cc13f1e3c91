//! Services: a port of a sandbox under a URL of its own, with a token that expires. Each is a link of ours.
//!
//! With `ports_url` a service has a host name. Without, its URL is below the API, since programs do not find names below
//! `localhost`; a browser does, and gets such a name.

use std::time::Duration;

use axum::Json;
use axum::extract::{RawPathParams, Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use engine::{LinkSpec, Port};
use serde::Deserialize;
use serde_json::{Value, json};

use super::error::Refusal;
use super::read::{Body, Meant};
use super::{PREFIX, SERVICES};
use crate::http::app::{App, Arrival};
use crate::http::body::Query;
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::port_names::Named;
use crate::ports::{self, ByPath, Grant, SERVICE_TOKEN, TOKEN_PARAMETER, Token};

/// How long a token works if nothing else is asked for, and at most.
const EXPIRY_SECONDS_DEFAULT: u64 = 600;
const EXPIRY_SECONDS_MAX: u64 = 86_400;
/// How the links of services are recognized in lists.
const LABEL: &str = "langsmith service";

/// `POST /boxes/{sandbox}/service-url`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    port: Option<u16>,
    expires_in_seconds: Option<u64>,
    access: Option<String>,
    embed_origins: Option<Vec<String>>,
}

/// Makes a service.
pub async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Create>,
) -> Result<Json<Value>, Refusal> {
    if body.access.as_deref().is_some_and(|access| access != "off")
        || body.embed_origins.is_some_and(|origins| !origins.is_empty())
    {
        return Err(Refusal::unsupported(
            "this server knows no logins: leave `access` and `embed_origins` out for a service with a token",
        ));
    }
    let port = body.port.ok_or_else(|| Refusal::invalid("port", "it is missing"))?;
    let port = Port::new(port)?;
    let seconds = body.expires_in_seconds.unwrap_or(EXPIRY_SECONDS_DEFAULT);
    if !(1..=EXPIRY_SECONDS_MAX).contains(&seconds) {
        let rule = format!("be between 1 and {EXPIRY_SECONDS_MAX}, got {seconds}");
        return Err(Refusal::must("expires_in_seconds", rule));
    }
    let spec = LinkSpec {
        port,
        label: Some(LABEL.into()),
        methods: Vec::new(),
        ttl: Duration::from_secs(seconds),
        public: false,
    };
    let (link, token) = app.engine.create_link(&key, sandbox.id, spec).await?;
    let token = Token::of(&token.unwrap_or_default()).0;
    let named = Named { sandbox: sandbox.id, port };
    let by_name = app.ports().url(named, app.scheme(), &headers);
    let by_path = format!("{}{SERVICES}{}/{port}", app.origin(&headers), sandbox.id);
    let service_url = match (&app.ports().set, &by_name) {
        (Some(_), Some(by_name)) => by_name.clone(),
        _ => by_path.clone(),
    };
    let browser_url = match by_name {
        Some(by_name) => format!("{by_name}/?{TOKEN_PARAMETER}={token}"),
        None => service_url.clone(),
    };
    Ok(Json(json!({
        "browser_url": browser_url,
        "service_url": service_url,
        "token": token,
        "expires_at": rfc3339(link.expires_at),
        "access": "token",
        "embed_origins": [],
    })))
}

/// `GET /boxes/{sandbox}/service-urls`
pub async fn list(State(app): State<App>, Meant { key, sandbox }: Meant) -> Result<Json<Value>, Refusal> {
    let items =
        app.engine.links(&key.owner, sandbox.id)?.into_iter().filter(|link| !link.public).map(|link| {
            json!({
                "port": link.port.number(),
                "access": "token",
                "created_at": rfc3339(link.created_at),
                "expires_at": rfc3339(link.expires_at),
            })
        });
    Ok(Json(json!({"items": items.collect::<Vec<_>>(), "next_cursor": null})))
}

/// Which services to end.
#[derive(Debug, Deserialize)]
pub struct Which {
    port: u16,
}

/// `DELETE /boxes/{sandbox}/service-urls?port=`
pub async fn delete(
    State(app): State<App>,
    Meant { key, sandbox }: Meant,
    which: Result<Query<Which>, ApiError>,
) -> Result<StatusCode, Refusal> {
    let Query(Which { port }) = which?;
    for link in app.engine.links(&key.owner, sandbox.id)? {
        if link.port.number() == port && !link.public {
            app.engine.revoke_link(&key.owner, sandbox.id, link.id).await?;
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// A request to a service below the API. Its token is in a header; a key is not needed.
pub async fn forward(
    State(app): State<App>,
    params: RawPathParams,
    mut request: Request,
) -> Result<Response, Refusal> {
    let refused =
        || Refusal::new(StatusCode::UNAUTHORIZED, "Unauthorized", "the token of this service is not valid");
    let param = |name: &str| params.iter().find(|(key, _)| *key == name).map_or("", |(_, value)| value);
    let (sandbox, port) = (param("sandbox").parse().ok(), Port::parse(param("port")).ok());
    let (Some(sandbox), Some(port)) = (sandbox, port) else { return Err(refused()) };
    let mut tokens = request.headers().get_all(SERVICE_TOKEN).iter().filter_map(|value| value.to_str().ok());
    let grant = tokens.find_map(|token| Token::follow(&app, token));
    let grant = grant.filter(|grant| grant.link.sandbox == sandbox && grant.link.port == port);
    let grant = grant.filter(|grant| grant.link.allows(request.method().as_str())).ok_or_else(refused)?;
    if let Some(arrival) = request.extensions().get::<Arrival>() {
        arrival.place.keep();
    }
    let prefix = format!("{SERVICES}{sandbox}/{port}");
    let named = Named { sandbox, port };
    // The router has removed the prefix of the dialect from the path.
    let below = prefix.strip_prefix(PREFIX).unwrap_or(&prefix);
    if !ports::strip_prefix(&mut request, below) {
        return Err(refused());
    }
    Ok(ports::by_path(&app, named, Grant::of_link(grant), ByPath { prefix }, request).await?)
}
