//! Links to one file of a sandbox that need no key: `POST {base}/boxes/{sandbox}/download-url` makes one, anybody may follow it.
//!
//! A link is pinned to the sandbox, the path and the headers of the answer, and to the key that made it: with that key it ends. What it
//! says is signed, and nothing is kept of it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Extension;
use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use base64::Engine as _;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use engine::Key;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use wire::SandboxId;

use super::LINKS;
use super::error::{Doing, Refusal};
use super::files::{absolute, unsent};
use super::read::{Body, InPath, Meant};
use crate::http::app::{App, Arrival};
use crate::http::clock::rfc3339;
use crate::http::download;

/// The longest life of a link that ends: ten years. More is a mistake in units.
const EXPIRY_SECONDS_MAX: u64 = 3660 * 86_400;
/// What a header may be.
const CONTENT_TYPE_MAX: usize = 255;

/// `POST /boxes/{sandbox}/download-url`
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Create {
    path: Option<String>,
    expires_in_seconds: Option<u64>,
    content_type: Option<String>,
    content_disposition: Option<String>,
}

/// What a link says.
#[derive(Debug, Serialize, Deserialize)]
struct Link {
    sandbox: String,
    path: String,
    key: String,
    expires_at: Option<u64>,
    content_type: Option<String>,
    disposition: Option<String>,
}

/// Makes a link.
pub async fn create(
    State(app): State<App>,
    headers: HeaderMap,
    Meant { key, sandbox }: Meant,
    Body(body): Body<Create>,
) -> Result<(StatusCode, Json<Value>), Refusal> {
    let path = body.path.ok_or_else(|| Refusal::invalid("path", "it is missing"))?;
    let path = absolute(&app, &key, &sandbox, path.into_bytes())?;
    let path = String::from_utf8(path).map_err(|_| Refusal::invalid("path", "it is not UTF-8"))?;
    let expires_at = match body.expires_in_seconds {
        None => None,
        Some(seconds @ 1..=EXPIRY_SECONDS_MAX) => Some(SystemTime::now() + Duration::from_secs(seconds)),
        Some(_) => return Err(Refusal::invalid("expires_in_seconds", "it is 1 second to ten years")),
    };
    match body.content_disposition.as_deref() {
        None | Some("attachment" | "inline") => {}
        Some(_) => return Err(Refusal::invalid("content_disposition", "it is `attachment` or `inline`")),
    }
    let writable = |text: &String| text.len() <= CONTENT_TYPE_MAX && HeaderValue::from_str(text).is_ok();
    if body.content_type.as_ref().is_some_and(|text| !writable(text)) {
        return Err(Refusal::invalid("content_type", "it cannot be a header"));
    }
    let link = Link {
        sandbox: sandbox.id.to_string(),
        path,
        key: key.id.clone(),
        expires_at: expires_at.map(seconds),
        content_type: body.content_type,
        disposition: body.content_disposition,
    };
    let said = serde_json::to_vec(&link).expect("a link is made of types that JSON can write");
    let encode = |bytes: &[u8]| BASE64_URL_SAFE_NO_PAD.encode(bytes);
    let token = format!("{}.{}", encode(&said), encode(&app.engine.sign(&said)));
    let body = json!({
        "download_url": format!("{}{LINKS}{token}", app.origin(&headers)),
        "token": token,
        "expires_at": expires_at.map(|at| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds(at)))),
    });
    Ok((StatusCode::CREATED, Json(body)))
}

fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// What a token says, if it was said here.
async fn read(app: &App, token: &str) -> Result<(Link, Key, SandboxId), Refusal> {
    let refused = || Refusal::new(StatusCode::FORBIDDEN, "Forbidden", "this link is not valid");
    let (said, tag) = token.split_once('.').ok_or_else(refused)?;
    let decode = |text: &str| BASE64_URL_SAFE_NO_PAD.decode(text).map_err(|_| refused());
    let (said, tag) = (decode(said)?, decode(tag)?);
    if !app.engine.has_signed(&said, &tag) {
        return Err(refused());
    }
    let link: Link = serde_json::from_slice(&said).map_err(|_| refused())?;
    if link.expires_at.is_some_and(|at| at <= seconds(SystemTime::now())) {
        return Err(Refusal::new(StatusCode::FORBIDDEN, "Expired", "this link has expired"));
    }
    let key = app.engine.keys().await?.into_iter().find(|key| key.id == link.key).ok_or_else(refused)?;
    let sandbox = link.sandbox.parse().map_err(|_| refused())?;
    Ok((link, key, sandbox))
}

/// `GET` and `HEAD` of a link.
pub async fn follow(
    State(app): State<App>,
    InPath(token): InPath,
    method: Method,
    arrival: Option<Extension<Arrival>>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let (link, key, sandbox) = read(&app, &token).await?;
    if let Some(Extension(arrival)) = arrival {
        // As good as a key.
        arrival.place.keep();
    }
    let files =
        app.engine.files(&key.owner, sandbox, None).map_err(|error| Refusal::data(Doing::Read, error))?;
    let path = link.path.as_bytes();
    let mut answer = match method {
        Method::HEAD => download::describe_file(&files, path, &headers).await,
        _ => download::download(&app, &key, &files, path, &headers).await,
    }
    .map_err(unsent)?;
    if let Some(Ok(kind)) = link.content_type.as_deref().map(HeaderValue::from_str)
        && answer.headers().contains_key(header::CONTENT_TYPE)
    {
        answer.headers_mut().insert(header::CONTENT_TYPE, kind);
    }
    if let Some(disposition) = link.disposition {
        let name = link.path.rsplit('/').next().unwrap_or_default();
        let plain: String = name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' })
            .collect();
        if let Ok(value) = HeaderValue::from_str(&format!("{disposition}; filename=\"{plain}\"")) {
            answer.headers_mut().insert(header::CONTENT_DISPOSITION, value);
        }
    }
    Ok(answer)
}
