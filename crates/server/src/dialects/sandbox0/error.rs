//! Every failure as Sandbox0's client reads it.
//!
//! ```text
//! {"success": false, "error": {"code": "not_found", "message": "..."}}
//! ```
//!
//! For the statuses that a route lists, the client reads `code` and `message`; for others, its exception has the status and the whole
//! body as text. It repeats nothing by itself.

use axum::Json;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ErrorClass, Noun};
use serde_json::{Value, json};
use wire::files::FileErrorKind;

use crate::dialects::common::error::{self, Trail};
use crate::http::error::ApiError;
use crate::observe::log::chain_of;

/// After how many seconds a client that met a limit may try again.
const RETRY_SECONDS: u64 = 1;

/// What a failed request answers with.
#[derive(Debug)]
pub struct Refusal(Box<Parts>);

#[derive(Debug)]
struct Parts {
    status: StatusCode,
    code: String,
    message: String,
    trail: Trail,
}

impl Refusal {
    /// A refusal without causes.
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        let trail = Trail::new(code.clone());
        Self(Box::new(Parts { status, code, message, trail }))
    }

    /// A field of a request that breaks a rule. `rule` reads on after "must".
    pub fn must(field: &str, rule: impl std::fmt::Display) -> Self {
        Self::bad(format!("`{field}` must {rule}"))
    }

    /// A request that cannot be taken as it is.
    pub fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request", message)
    }

    /// A part of a request that this server cannot do. With 400, which most routes list.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "not_supported", message)
    }

    /// A whole route that this server does not have.
    pub fn not_here(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "not_supported", message)
    }

    /// The state forbids it.
    pub fn conflict(message: impl Into<String>) -> Self {
        Self::new(StatusCode::CONFLICT, "conflict", message)
    }

    /// Something here panicked.
    pub fn bug() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "the daemon has a bug here")
    }

    /// Nothing there.
    pub fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path")
    }

    /// Something there, for another method.
    pub fn wrong_method() -> Self {
        let message = "this path does not take this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// A context that does not exist.
    pub fn no_context(id: &str) -> Self {
        let message = format!("context `{}` does not exist", engine::shown(id));
        Self::new(StatusCode::NOT_FOUND, "context_not_found", message)
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// With another status, where the route lists that one.
    pub fn status(mut self, status: StatusCode, code: &str) -> Self {
        (self.0.status, self.0.code) = (status, code.to_owned());
        self
    }

    /// What it says of itself.
    fn body(&self) -> Value {
        json!({"success": false, "error": {"code": self.0.code, "message": self.0.message}})
    }
}

/// Status and code of a file that cannot be worked on.
fn file(kind: FileErrorKind) -> (StatusCode, &'static str) {
    match kind {
        FileErrorKind::NotFound => (StatusCode::NOT_FOUND, "file_not_found"),
        FileErrorKind::PermissionDenied | FileErrorKind::ReadOnly => {
            (StatusCode::FORBIDDEN, "permission_denied")
        }
        FileErrorKind::IsDirectory | FileErrorKind::NotARegularFile => {
            (StatusCode::CONFLICT, "path_not_file")
        }
        FileErrorKind::NotADirectory => (StatusCode::CONFLICT, "path_not_directory"),
        FileErrorKind::AlreadyExists | FileErrorKind::DirectoryNotEmpty => {
            (StatusCode::CONFLICT, "path_exists")
        }
        FileErrorKind::InvalidPath => (StatusCode::BAD_REQUEST, "invalid_request"),
        FileErrorKind::TooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "file_too_large"),
        FileErrorKind::NoSpace => (StatusCode::INSUFFICIENT_STORAGE, "operation_failed"),
        _ => (StatusCode::UNPROCESSABLE_ENTITY, "operation_failed"),
    }
}

impl From<EngineError> for Refusal {
    /// The class decides, but for what clients know by another status.
    fn from(error: EngineError) -> Self {
        use EngineError as E;
        let message = error.to_string();
        let class = error.class();
        let mut refusal = match &error {
            E::File { source } => {
                let (status, code) = file(source.kind);
                Self::new(status, code, message)
            }
            E::CommandEnded { .. } => Self::new(StatusCode::GONE, "process_finished", message),
            E::StdinClosed { .. } => Self::new(StatusCode::CONFLICT, "process_not_running", message),
            E::StdinStalled { .. } => Self::new(StatusCode::CONFLICT, "input_buffer_full", message),
            E::NoTerminal { .. } => Self::new(StatusCode::CONFLICT, "pty_unavailable", message),
            // The cause is what a caller can act on.
            E::Image { source, .. } => Self::bad(format!("{message}: {}", chain_of(source))),
            E::Build { source, .. } => Self::bad(format!("{message}: {source}")),
            E::Create { source, .. } if class != ErrorClass::Full => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", format!("{message}: {source}"))
            }
            other => {
                let status = match (other.noun(), class) {
                    (_, ErrorClass::Invalid) => StatusCode::BAD_REQUEST,
                    // Of the statuses that routes about snapshots list, the one that says that it is not the request's fault.
                    (_, ErrorClass::Unsupported) => StatusCode::CONFLICT,
                    (_, class) => error::status(class),
                };
                Self::new(status, word(class, other.noun()), message)
            }
        };
        refusal.0.trail.caused_by(&error);
        refusal
    }
}

fn word(class: ErrorClass, noun: Noun) -> &'static str {
    match (class, noun) {
        (ErrorClass::NotFound, Noun::Command) => "context_not_found",
        (ErrorClass::NotFound, Noun::File) => "file_not_found",
        (ErrorClass::NotFound, _) => "not_found",
        (ErrorClass::Invalid, Noun::File | Noun::Command) => "invalid_request",
        (ErrorClass::Invalid, _) => "bad_request",
        (
            ErrorClass::Exists
            | ErrorClass::InUse
            | ErrorClass::WrongState
            | ErrorClass::Incompatible
            | ErrorClass::Unsupported,
            _,
        ) => "conflict",
        (ErrorClass::Forbidden, _) => "forbidden",
        (ErrorClass::Quota, _) => "quota_exceeded",
        (ErrorClass::Full | ErrorClass::Unavailable, _) => "unavailable",
        (ErrorClass::DiskFull | ErrorClass::Internal, _) => "internal_error",
    }
}

/// What the layers around all routes refuse, and what is wrong with a request as such.
impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        let (status, body, chain) = error.into_parts();
        let code = match status {
            StatusCode::UNAUTHORIZED => "unauthorized",
            StatusCode::FORBIDDEN => "forbidden",
            StatusCode::NOT_FOUND => "not_found",
            StatusCode::SERVICE_UNAVAILABLE => "unavailable",
            StatusCode::INTERNAL_SERVER_ERROR => "internal_error",
            status if status.is_client_error() => "bad_request",
            _ => "operation_failed",
        };
        let mut refusal = Self::new(status, code, body.message);
        refusal.0.trail = Trail { code: body.code, chain };
        refusal
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.0.status, Json(self.body())).into_response();
        if matches!(self.0.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_SECONDS.into());
        }
        self.0.trail.mark(&mut response);
        response
    }
}

#[cfg(test)]
mod tests {
    use engine::{Field, Resource};
    use runtime::BackendError;
    use wire::SandboxId;
    use wire::files::FileError;

    use super::*;

    #[track_caller]
    fn check(error: EngineError, status: u16, code: &str) {
        let refusal = Refusal::from(error);
        let body = refusal.body();
        assert_eq!(body["error"]["code"], code, "{body}");
        assert_eq!(body["success"], false);
        assert_eq!(refusal.into_response().status(), status, "{body}");
    }

    #[test]
    fn clients_get_the_status_and_the_code_that_they_know() {
        let id = SandboxId::from_random(1);
        check(EngineError::SandboxNotFound { id: "x".into() }, 404, "not_found");
        check(EngineError::CommandNotFound { id: "x".into() }, 404, "context_not_found");
        check(EngineError::NameTaken { name: "x".into() }, 409, "conflict");
        check(EngineError::WrongState { id, state: "paused" }, 409, "conflict");
        check(Field::Name.must("x"), 400, "bad_request");
        check(EngineError::Quota { resource: Resource::Sandboxes, limit: 1 }, 429, "quota_exceeded");
        check(EngineError::Full { what: "x".into() }, 503, "unavailable");
        check(EngineError::Create { id, source: BackendError::Gone }, 503, "unavailable");
        check(EngineError::AdminOnly { doing: "x" }, 403, "forbidden");
        for (kind, status, code) in [
            (FileErrorKind::NotFound, 404, "file_not_found"),
            (FileErrorKind::PermissionDenied, 403, "permission_denied"),
            (FileErrorKind::IsDirectory, 409, "path_not_file"),
            (FileErrorKind::NotADirectory, 409, "path_not_directory"),
        ] {
            let source = FileError { kind, path: b"/x".to_vec(), detail: String::new() };
            check(EngineError::File { source }, status, code);
        }
    }

    #[test]
    fn a_limit_says_when_to_come_again() {
        let refusal = Refusal::from(EngineError::Quota { resource: Resource::Sandboxes, limit: 1 });
        assert!(refusal.into_response().headers().contains_key(header::RETRY_AFTER));
    }
}
