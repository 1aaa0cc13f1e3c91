//! Every failure as E2B's clients read it, so that they raise the exception that the situation has in their documents.
//!
//! ```text
//! {"code": 404, "message": "..."}                                       the control plane, files over plain HTTP
//! {"code": "not_found", "message": "..."}                               a call of the agent
//! {"sandboxId": "...", "message": "The sandbox was not found", "code": 502}    the agent of a sandbox that is gone
//! ```
//!
//! Clients repeat 429, 502, 503 and 504 on the control plane up to three times unless `Should-Retry` is `false`.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ErrorClass, Noun};
use serde_json::{Value, json};
use wire::SandboxId;
use wire::files::FileErrorKind;
use wire::guest::StartError;

use super::names;
use crate::dialects::common::error::Trail;
use crate::http::error::ApiError;

/// What clients look for in a message to know that a sandbox is gone.
const GONE: &str = "The sandbox was not found";

/// What a failed request answers with.
#[derive(Debug)]
pub struct Refusal(Box<Parts>);

#[derive(Debug)]
struct Parts {
    status: StatusCode,
    message: String,
    plane: Plane,
    /// A sandbox that is gone.
    gone: Option<String>,
    /// Whether clients should ask again, where the status alone would have them do so.
    retry: bool,
    /// The size behind a range that cannot be satisfied.
    size: Option<u64>,
    trail: Trail,
}

/// Who asks, and so how the code is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Plane {
    /// A number.
    Http,
    /// A word of the Connect protocol.
    Rpc,
}

impl Refusal {
    /// A refusal without causes.
    pub fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self(Box::new(Parts {
            status,
            message: message.into(),
            plane: Plane::Http,
            gone: None,
            retry: true,
            size: None,
            trail: Trail::new(word(status)),
        }))
    }

    /// A part of a request that cannot be taken as it is.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// What this server cannot do.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, message)
    }

    /// Something here panicked.
    pub fn bug() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the daemon has a bug here")
    }

    /// No sandbox has this id.
    pub fn no_sandbox(id: &str) -> Self {
        const SHOWN_MAX: usize = 64;
        let id: String = id.chars().take(SHOWN_MAX).collect();
        Self::new(StatusCode::NOT_FOUND, format!("sandbox \"{id}\" does not exist"))
    }

    /// The agent of a sandbox that is gone.
    pub fn gone(id: SandboxId) -> Self {
        let mut refusal = Self::new(StatusCode::BAD_GATEWAY, GONE);
        refusal.0.gone = Some(names::id(id));
        refusal
    }

    /// The caller has no key, or no token, that opens what it asks for.
    pub fn unauthorized(message: impl Into<String>) -> Self {
        Self::new(StatusCode::UNAUTHORIZED, message)
    }

    /// In the spelling of calls of the agent.
    pub fn rpc(mut self) -> Self {
        self.0.plane = Plane::Rpc;
        self
    }

    /// What kind of refusal it is.
    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    /// The error as a stream says it.
    pub fn in_stream(&self) -> Value {
        json!({"code": word(self.0.status), "message": self.0.message})
    }

    fn once(mut self) -> Self {
        self.0.retry = false;
        self
    }

    /// What the engine refused on the control plane.
    pub fn control(error: EngineError) -> Self {
        let message = error.to_string();
        let refusal = match (error.class(), error.noun()) {
            (ErrorClass::Quota, _) => Self::new(StatusCode::TOO_MANY_REQUESTS, message).once(),
            (ErrorClass::Invalid, _) => Self::invalid(message),
            (class, _) => Self::new(crate::dialects::common::error::status(class), message),
        };
        refusal.with(&error)
    }

    /// What the engine refused to the agent of a sandbox.
    pub fn agent(id: SandboxId, error: EngineError) -> Self {
        let message = error.to_string();
        let say = |status| Self::new(status, message.as_str());
        let refusal = match (&error, error.noun(), error.class()) {
            (EngineError::File { source }, ..) => match source.kind {
                FileErrorKind::NotFound => say(StatusCode::NOT_FOUND),
                FileErrorKind::PermissionDenied | FileErrorKind::ReadOnly => say(StatusCode::FORBIDDEN),
                FileErrorKind::AlreadyExists => say(StatusCode::CONFLICT),
                FileErrorKind::NoSpace => say(StatusCode::INSUFFICIENT_STORAGE),
                FileErrorKind::RangeNotSatisfiable { size } => {
                    let mut refusal = say(StatusCode::RANGE_NOT_SATISFIABLE);
                    refusal.0.size = Some(size);
                    refusal
                }
                _ => say(StatusCode::BAD_REQUEST),
            },
            (EngineError::FileNotStarted { why }, ..) => Self::not_started(why),
            (EngineError::CommandEnded { .. }, ..) => say(StatusCode::NOT_FOUND),
            // The vendor's word for input that a process does not take.
            (EngineError::StdinClosed { .. } | EngineError::NoTerminal { .. }, ..) => {
                say(StatusCode::BAD_REQUEST)
            }
            (_, Noun::Sandbox, ErrorClass::NotFound | ErrorClass::WrongState) => Self::gone(id),
            (_, _, ErrorClass::Invalid | ErrorClass::WrongState) => say(StatusCode::BAD_REQUEST),
            (_, _, ErrorClass::Full | ErrorClass::Quota) => say(StatusCode::TOO_MANY_REQUESTS),
            (_, _, ErrorClass::DiskFull) => say(StatusCode::INSUFFICIENT_STORAGE),
            (_, _, class) => say(crate::dialects::common::error::status(class)),
        };
        refusal.with(&error)
    }

    /// Why init did not start a process.
    pub fn not_started(why: &StartError) -> Self {
        let status = match why {
            StartError::UnknownUser { .. } => StatusCode::UNAUTHORIZED,
            StartError::NoRoom { .. } => StatusCode::TOO_MANY_REQUESTS,
            StartError::ProgramNotFound { .. }
            | StartError::NotExecutable { .. }
            | StartError::ArgumentsTooLong
            | StartError::BadCwd { .. }
            | StartError::NulByte { .. } => StatusCode::BAD_REQUEST,
        };
        Self::new(status, why.to_string())
    }

    fn with(mut self, error: &EngineError) -> Self {
        self.0.trail.caused_by(error);
        self
    }
}

/// The word of the Connect protocol for a status.
fn word(status: StatusCode) -> &'static str {
    match status.as_u16() {
        401 => "unauthenticated",
        403 => "permission_denied",
        404 => "not_found",
        408 | 504 => "deadline_exceeded",
        409 => "already_exists",
        413 | 429 | 507 => "resource_exhausted",
        416 => "out_of_range",
        501 => "unimplemented",
        502 | 503 => "unavailable",
        400..=499 => "invalid_argument",
        _ => "internal",
    }
}

/// What the layers around all routes refuse, and what is wrong with a request as such.
impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        let (status, body, chain) = error.into_parts();
        let status = match status {
            StatusCode::UNSUPPORTED_MEDIA_TYPE | StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        let mut refusal = Self::new(status, body.message);
        refusal.0.trail = Trail { code: body.code, chain };
        refusal
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Parts { status, message, plane, gone, retry, size, trail } = *self.0;
        let body = match (&gone, plane) {
            (Some(id), _) => json!({"sandboxId": id, "message": message, "code": status.as_u16()}),
            (None, Plane::Http) => json!({"code": status.as_u16(), "message": message}),
            (None, Plane::Rpc) => json!({"code": word(status), "message": message}),
        };
        let mut response = (status, Json(body)).into_response();
        let headers = response.headers_mut();
        if !retry {
            headers.insert("should-retry", HeaderValue::from_static("false"));
        }
        if let Some(size) = size
            && let Ok(range) = HeaderValue::from_str(&format!("bytes */{size}"))
        {
            headers.insert(header::CONTENT_RANGE, range);
        }
        trail.mark(&mut response);
        response
    }
}

#[cfg(test)]
mod tests {
    use wire::files::FileError;

    use super::*;

    #[test]
    fn clients_get_the_status_and_the_word_that_they_know() {
        let id = SandboxId::from_random(1);
        let file = |kind| EngineError::File {
            source: FileError { kind, path: b"/x".to_vec(), detail: String::new() },
        };
        for (error, status, code) in [
            (file(FileErrorKind::NotFound), 404, "not_found"),
            (file(FileErrorKind::IsDirectory), 400, "invalid_argument"),
            (file(FileErrorKind::NoSpace), 507, "resource_exhausted"),
            (EngineError::SandboxNotFound { id: "x".into() }, 502, "unavailable"),
            (EngineError::WrongState { id, state: "deleting" }, 502, "unavailable"),
            (EngineError::Stopping, 503, "unavailable"),
            (
                EngineError::FileNotStarted { why: StartError::UnknownUser { user: "x".into() } },
                401,
                "unauthenticated",
            ),
        ] {
            let refusal = Refusal::agent(id, error);
            assert_eq!((refusal.status().as_u16(), word(refusal.status())), (status, code));
        }
        let taken = Refusal::control(EngineError::SandboxNotFound { id: "x".into() });
        assert_eq!(taken.status(), StatusCode::NOT_FOUND);
    }
}
