//! Modal's sandboxes: the two gRPC services that its Python client calls, at the root, where the client puts them.
//!
//! ```text
//! /modal.client.ModalClient/...                         apps, images, sandboxes; with the key as the token's secret
//! /modal.task_command_router.TaskCommandRouter/...      the commands of one sandbox; with a token of that sandbox
//! ```
//!
//! Clients up to 1.5 make the older calls for sandboxes, later ones the newer (`...V2`); the answers are the same but for
//! ids. A *task* is the sandbox itself. What the engine has no word for is in the sandbox's notes, under [`NOTES`], or in
//! the ids ([`names`]).

mod commands;
mod descriptors;
mod grpc;
mod images;
pub mod locate;
mod messages;
mod names;
mod sandboxes;
mod tools;

pub use grpc::Status;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use engine::Key;

use crate::http::app::{App, Arrival};

/// Apps, images and sandboxes.
pub const CONTROL: &str = "/modal.client.ModalClient";
/// The commands of a sandbox.
pub const COMMANDS: &str = "/modal.task_command_router.TaskCommandRouter";
/// The key of this dialect's notes.
const NOTES: &str = "modal";
/// The header with the key.
const SECRET: &str = "x-modal-token-secret";

/// Everything below [`CONTROL`].
pub fn control_plane() -> Router<App> {
    Router::new().route("/{method}", any(control))
}

/// Everything below [`COMMANDS`].
pub fn command_router() -> Router<App> {
    Router::new().route("/{method}", any(command))
}

/// The last part of the path.
fn method(request: &Request) -> String {
    request.uri().path().rsplit('/').next().unwrap_or_default().to_owned()
}

/// Keeps the connection's place, and counts the body against the owner of the key.
fn admit(request: &mut Request, key: &Key) {
    if let Some(arrival) = request.extensions().get::<Arrival>() {
        arrival.place.keep();
    }
    request.extensions_mut().insert(key.clone());
}

/// The key in the headers of a call.
fn key_in(app: &App, headers: &HeaderMap) -> Result<Key, Status> {
    let secret = headers.get(SECRET).and_then(|secret| secret.to_str().ok());
    let key = secret.and_then(|secret| app.engine.authenticate(secret)).filter(|key| !key.metrics_only);
    key.ok_or_else(|| {
        Status::new(
            grpc::Code::Unauthenticated,
            "a valid api key is needed: set MODAL_TOKEN_SECRET to a key of this server",
        )
    })
}

async fn control(State(app): State<App>, mut request: Request) -> Response {
    let key = match key_in(&app, request.headers()) {
        Ok(key) => key,
        Err(status) => return status.into_response(),
    };
    admit(&mut request, &key);
    let call = Call { headers: request.headers().clone(), app, key };
    let method = method(&request);
    let answered = match method.as_str() {
        "SandboxGetLogs" => sandboxes::logs(call, request).await,
        "ContainerFilesystemExecGetOutput" => descriptors::output(call, request).await,
        _ => call.answer(&method, request).await,
    };
    answered.unwrap_or_else(IntoResponse::into_response)
}

async fn command(State(app): State<App>, mut request: Request) -> Response {
    let bearer = request.headers().get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let token = bearer.and_then(|value| value.split_once(' ')).map(|(_, token)| token.trim());
    let Some((key, id)) = token.and_then(|token| names::key_of(&app.engine, token)) else {
        return Status::new(grpc::Code::Unauthenticated, "the token does not open a sandbox").into_response();
    };
    admit(&mut request, &key);
    let target = commands::Target { app, key, id };
    let method = method(&request);
    target.answer(&method, request).await.unwrap_or_else(IntoResponse::into_response)
}

/// One call of the control plane.
pub struct Call {
    app: App,
    key: Key,
    headers: HeaderMap,
}

impl Call {
    /// Answers the calls with one message and one answer.
    async fn answer(self, method: &str, request: Request) -> Result<Response, Status> {
        macro_rules! calls {
            ($($name:pat => $function:path,)*) => {
                match method {
                    $($name => {
                        let message = grpc::read(request, &self.app).await?;
                        // A task of its own, so that nothing is left half done when the caller leaves.
                        let span = tracing::Span::current();
                        let working = tokio::spawn(tracing::Instrument::instrument(
                            async move { $function(&self, message).await },
                            span,
                        ));
                        Ok(grpc::one(&working.await.map_err(|_| Status::bug())??))
                    })*
                    _ => Err(unknown(method)),
                }
            };
        }
        calls! {
            "ClientHello" => images::hello,
            "AppGetOrCreate" => images::app,
            "EnvironmentGetOrCreate" => images::environment,
            "AuthTokenGet" => images::auth_token,
            "ImageGetOrCreate" => images::image,
            "ImageFromId" => images::image_from_id,
            "SecretGetOrCreate" => images::secret,
            "SandboxCreate" => sandboxes::create,
            "SandboxCreateV2" => sandboxes::create_newer,
            "SandboxGetTaskId" | "SandboxGetTaskIdV2" => sandboxes::task,
            "TaskGetCommandRouterAccess" => sandboxes::access_by_task,
            "SandboxGetCommandRouterAccess" => sandboxes::access,
            "SandboxWait" | "SandboxWaitV2" => sandboxes::wait,
            "SandboxTerminate" | "SandboxTerminateV2" => sandboxes::terminate,
            "SandboxList" => sandboxes::list,
            "SandboxListV2" => sandboxes::list_newer,
            "SandboxTagsGet" | "SandboxTagsGetV2" => sandboxes::tags,
            "SandboxTagsSet" | "SandboxTagsSetV2" => sandboxes::set_tags,
            "SandboxGetFromName" => sandboxes::from_name,
            "SandboxGetFromNameV2" => sandboxes::from_name_newer,
            "SandboxStdinWrite" => sandboxes::write_stdin,
            "ContainerFilesystemExec" => descriptors::exec,
        }
    }
}

/// A call that this server does not have, with a word on those that people ask about.
fn unknown(method: &str) -> Status {
    let why = match method {
        "TokenFlowCreate" | "TokenFlowWait" | "WorkspaceNameLookup" => {
            "this server has no login page: set MODAL_TOKEN_SECRET to a key of this server in place of `modal setup`"
        }
        "SandboxGetTunnels"
        | "SandboxGetTunnelsV2"
        | "SandboxCreateConnectToken"
        | "SandboxCreateConnectTokenV2" => "this server does not give access to the ports of a sandbox",
        "VolumeGetOrCreate" | "VolumeList" => {
            "this server does not mount volumes for this client; mount them through a template"
        }
        "MountGetOrCreate" | "MountPutFile" | "MountBatchedCheckExistence" | "BlobCreate" => {
            "this server does not add local files to images; write them into the sandbox"
        }
        _ => "",
    };
    match why {
        "" => Status::unsupported(format!("this server does not have the call `{}`", names::shown(method))),
        why => Status::unsupported(why),
    }
}

/// A refusal of the layers around all routes.
pub fn refuse(error: crate::http::error::ApiError) -> Response {
    Status::from(error).into_response()
}
