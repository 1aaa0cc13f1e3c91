//! Builds: a Dockerfile and its context become a template.

use std::collections::BTreeMap;

use axum::Json;
use axum::body::Body;
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use engine::NetworkPolicy;
use engine::build::{BuildInfo, BuildLog, BuildSpec, BuildState};
use engine::image::Upload;
use engine::template::{TemplateName, TemplateSpec};
use futures_util::stream;
use serde::Deserialize;
use utoipa::IntoParams;
use wire::{BuildId, api};

use super::common::carried_on;
use super::network::policy_of;
use super::templates::template_spec;
use crate::http::app::{App, Caller, Stopping};
use crate::http::body::{Query, text_in_path};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::http::upload::received;

/// The header that describes the build.
const HEADER: &str = "shoal-build";
/// The largest context.
const CONTEXT_BYTES_MAX: u64 = 8 << 30;

/// A build's id in a path.
pub struct BuildPath(pub BuildId);

impl<S: Send + Sync> FromRequestParts<S> for BuildPath {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        let text = text_in_path(parts, state, "build").await?;
        let id = text.parse().map_err(|_| engine::EngineError::BuildNotFound { id: text })?;
        Ok(Self(id))
    }
}

fn wish(headers: &HeaderMap) -> Result<api::StartBuild, ApiError> {
    let missing = || ApiError::must("Shoal-Build", "be a header with a `StartBuild` as JSON in ASCII");
    let value = headers.get(HEADER).ok_or_else(missing)?;
    let text = value.to_str().map_err(|_| missing())?;
    serde_json::from_str(text).map_err(|error| ApiError::invalid("Shoal-Build", error))
}

/// Builds a template from a context: a tar stream with a Dockerfile and what it copies.
///
/// The header `Shoal-Build` is a `StartBuild`. Answers when the context is here and the Dockerfile was read; the log tells the rest.
#[utoipa::path(post, path = "/v1/builds", tag = "builds",
    params(("Shoal-Build" = String, Header, description = "A `StartBuild` as JSON in ASCII.")),
    request_body(content = Vec<u8>, content_type = "application/x-tar"), responses(
    (status = 202, body = api::Build),
    (status = 400, description = "The Dockerfile or the context cannot be used; `details.line` says where.", body = api::ErrorBody),
    (status = 503, description = "As many builds as may run do so.", body = api::ErrorBody),
    (status = 507, description = "The disk is full.", body = api::ErrorBody),
))]
pub async fn create(
    State(app): State<App>,
    Caller(key): Caller,
    request: Request,
) -> Result<Response, ApiError> {
    let (head, body) = request.into_parts();
    let wish = wish(&head.headers)?;
    let checked = build_wish(wish)?;
    app.engine.check_build(&key)?;
    let context = received(&app, &key, &head, body, CONTEXT_BYTES_MAX).await?;
    let build = carried_on(async move { app.engine.build(&key, checked.with(context)).await }).await?;
    Ok((StatusCode::ACCEPTED, Json(to_api(build))).into_response())
}

/// The builds of the key's owner, newest first.
#[utoipa::path(get, path = "/v1/builds", tag = "builds", responses((status = 200, body = api::BuildList)))]
pub async fn list(State(app): State<App>, Caller(key): Caller) -> Json<api::BuildList> {
    Json(api::BuildList { builds: app.engine.builds(&key.owner).into_iter().map(to_api).collect() })
}

/// A build.
#[utoipa::path(get, path = "/v1/builds/{build}", tag = "builds",
    params(("build" = String, Path, description = "Its id.")), responses(
    (status = 200, body = api::Build),
    (status = 404, body = api::ErrorBody),
))]
pub async fn get(
    State(app): State<App>,
    Caller(key): Caller,
    BuildPath(id): BuildPath,
) -> Result<Json<api::Build>, ApiError> {
    Ok(Json(to_api(app.engine.build_info(&key.owner, id)?)))
}

/// Ends a build that runs, and forgets it with its log. What it made stays.
#[utoipa::path(delete, path = "/v1/builds/{build}", tag = "builds",
    params(("build" = String, Path, description = "Its id.")), responses(
    (status = 204, description = "It is gone."),
    (status = 404, body = api::ErrorBody),
))]
pub async fn delete(
    State(app): State<App>,
    Caller(key): Caller,
    BuildPath(id): BuildPath,
) -> Result<StatusCode, ApiError> {
    carried_on(async move { app.engine.delete_build(&key.owner, id).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// What to read of a log.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields, default)]
#[into_params(parameter_in = Query)]
pub struct LogParams {
    /// How much of it the client has already.
    offset: u64,
    /// Go on until the build is over.
    follow: bool,
}

/// A build's log as text, from an offset on.
#[utoipa::path(get, path = "/v1/builds/{build}/log", tag = "builds",
    params(("build" = String, Path, description = "Its id."), LogParams), responses(
    (status = 200, body = String, content_type = "text/plain"),
    (status = 404, body = api::ErrorBody),
))]
pub async fn log(
    State(app): State<App>,
    Caller(key): Caller,
    BuildPath(id): BuildPath,
    Query(params): Query<LogParams>,
) -> Result<Response, ApiError> {
    struct Session {
        log: BuildLog,
        stopping: Stopping,
        follow: bool,
    }
    let log = app.engine.build_log(&key.owner, id, params.offset)?;
    let session = Session { log, stopping: app.stopping(&key), follow: params.follow };
    let pieces = stream::unfold(session, async |mut session| {
        let piece = tokio::select! {
            piece = session.log.next(session.follow) => piece,
            _ = session.stopping.wait() => return None,
        };
        match piece {
            Ok(Some(bytes)) => Some((Ok::<_, std::io::Error>(bytes), session)),
            Ok(None) => None,
            Err(error) => Some((Err(std::io::Error::other(error)), session)),
        }
    });
    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    Ok((kind, Body::from_stream(pieces)).into_response())
}

/// A build that was checked and waits for its context.
pub struct BuildWish {
    template: TemplateName,
    spec: TemplateSpec,
    dockerfile: String,
    target: Option<String>,
    arguments: BTreeMap<String, String>,
    secrets: BTreeMap<String, Vec<u8>>,
    network: Option<NetworkPolicy>,
}

impl BuildWish {
    /// Adds the context.
    pub fn with(self, context: Upload) -> BuildSpec {
        let Self { template, spec, dockerfile, target, arguments, secrets, network } = self;
        BuildSpec { template, spec, context, dockerfile, target, arguments, secrets, network }
    }
}

/// `POST /v1/builds`
pub fn build_wish(body: api::StartBuild) -> Result<BuildWish, ApiError> {
    let api::StartBuild { template, spec, dockerfile, target, args, secrets, network } = body;
    if spec.image.is_some() {
        return Err(ApiError::invalid(
            "spec.image",
            "what is built is the image: say FROM in the Dockerfile",
        ));
    }
    let secret = |(id, text): (String, String)| match BASE64.decode(text) {
        Ok(value) => Ok((id, value)),
        Err(_) => Err(ApiError::invalid("secrets", format!("the value of `{id}` is not base64"))),
    };
    Ok(BuildWish {
        template: TemplateName::parse(&template)?,
        spec: template_spec(spec)?,
        dockerfile: dockerfile.unwrap_or_else(|| "Dockerfile".into()),
        target,
        arguments: args,
        secrets: secrets.into_iter().map(secret).collect::<Result<_, _>>()?,
        network: network.map(policy_of).transpose()?,
    })
}

/// A build as clients see it.
pub fn to_api(build: BuildInfo) -> api::Build {
    let (state, reason, version) = match build.state {
        BuildState::Running => (api::BuildState::Running, None, None),
        BuildState::Done { version } => (api::BuildState::Done, None, Some(version)),
        BuildState::Failed { reason } => (api::BuildState::Failed, Some(reason), None),
    };
    api::Build {
        id: build.id.to_string(),
        template: build.template,
        state,
        reason,
        version,
        log_bytes: build.log_bytes,
        created_at: rfc3339(build.created_at),
        ended_at: build.ended_at.map(rfc3339),
    }
}
