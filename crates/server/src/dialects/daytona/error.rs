//! Every failure as Daytona's client reads it, so that it raises the exception that the situation has in its documents.
//!
//! ```text
//! {"statusCode": 404, "error": "Not Found", "message": "...", "code": "FILE_NOT_FOUND", "source": "DAYTONA_DAEMON", ...}
//! ```
//!
//! The client looks at `source` and `code` first, which name failures inside of a sandbox, and then at the status. It repeats no
//! request by itself, unless a connection ends without an answer.

use std::borrow::Cow;
use std::time::SystemTime;

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ErrorClass, Noun};
use serde_json::{Value, json};
use wire::files::FileErrorKind;

use crate::dialects::common::error::{self, Trail};
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;
use crate::observe::log::chain_of;

/// Where a failure comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Source {
    /// The control plane.
    Api,
    /// The toolbox of a sandbox.
    Daemon,
}

impl Source {
    fn word(self) -> &'static str {
        match self {
            Self::Api => "DAYTONA_API",
            Self::Daemon => "DAYTONA_DAEMON",
        }
    }
}

/// What a failed request answers with.
#[derive(Debug)]
pub struct Refusal(Box<Parts>);

#[derive(Debug)]
struct Parts {
    status: StatusCode,
    source: Source,
    code: Cow<'static, str>,
    message: String,
    trail: Trail,
}

impl Refusal {
    fn made(
        status: StatusCode,
        source: Source,
        code: impl Into<Cow<'static, str>>,
        message: impl Into<String>,
    ) -> Self {
        let code = code.into();
        let trail = Trail::new(code.clone());
        Self(Box::new(Parts { status, source, code, message: message.into(), trail }))
    }

    /// On the control plane.
    pub fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::made(status, Source::Api, code, message)
    }

    /// In the toolbox.
    pub fn daemon(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self::made(status, Source::Daemon, code, message)
    }

    /// A field of a request that breaks a rule. `rule` reads on after "must".
    pub fn must(field: &str, rule: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "BAD_REQUEST", format!("`{field}` must {rule}"))
    }

    /// What this server cannot do.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "NOT_IMPLEMENTED", message)
    }

    /// Something here panicked.
    pub fn bug() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "INTERNAL", "the daemon has a bug here")
    }

    /// Nothing there.
    pub fn no_route(path: &str) -> Self {
        let message = match path.contains("//") {
            true => "there is nothing at this path; write DAYTONA_API_URL without a slash at its end",
            false => "there is nothing at this path",
        };
        Self::new(StatusCode::NOT_FOUND, "NOT_FOUND", message)
    }

    /// Something there, for another method.
    pub fn wrong_method() -> Self {
        let message = "this path does not take this method";
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "METHOD_NOT_ALLOWED", message)
    }

    /// A session that does not exist.
    pub fn no_session(id: &str) -> Self {
        let message = format!("session `{}` does not exist", engine::shown(id));
        Self::daemon(StatusCode::NOT_FOUND, "SESSION_NOT_FOUND", message)
    }

    /// A session whose shell has ended.
    pub fn session_ended(id: &str) -> Self {
        let message = format!("the shell of session `{}` has ended", engine::shown(id));
        Self::daemon(StatusCode::GONE, "SESSION_ENDED", message)
    }

    /// A command that a session does not have.
    pub fn no_command(id: &str) -> Self {
        let message = format!("command `{}` does not exist in this session", engine::shown(id));
        Self::daemon(StatusCode::NOT_FOUND, "COMMAND_NOT_FOUND", message)
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    fn with(mut self, error: &EngineError) -> Self {
        self.0.trail.caused_by(error);
        self
    }

    /// What the engine refused in the toolbox.
    pub fn toolbox(error: EngineError) -> Self {
        let message = error.to_string();
        let refusal = match &error {
            EngineError::File { source } => {
                let (status, code) = file(source.kind);
                Self::daemon(status, code, message)
            }
            EngineError::StdinClosed { .. } | EngineError::CommandEnded { .. } => {
                Self::daemon(StatusCode::GONE, "COMMAND_ALREADY_COMPLETED", message)
            }
            _ => {
                let mut refusal = Self::from(error);
                refusal.0.source = Source::Daemon;
                return refusal;
            }
        };
        refusal.with(&error)
    }

    /// What the layers of the toolbox refuse.
    pub fn toolbox_api(error: ApiError) -> Self {
        let mut refusal = Self::from(error);
        refusal.0.source = Source::Daemon;
        refusal
    }

    /// What it says of itself.
    pub fn body(&self) -> Value {
        let Parts { status, source, code, message, .. } = &*self.0;
        json!({
            "statusCode": status.as_u16(),
            "error": status.canonical_reason().unwrap_or("Error"),
            "message": message,
            "code": code,
            "source": source.word(),
            "timestamp": rfc3339(SystemTime::now()),
        })
    }
}

/// Status and code of a file that cannot be worked on.
fn file(kind: FileErrorKind) -> (StatusCode, &'static str) {
    match kind {
        FileErrorKind::NotFound => (StatusCode::NOT_FOUND, "FILE_NOT_FOUND"),
        FileErrorKind::PermissionDenied | FileErrorKind::ReadOnly => {
            (StatusCode::FORBIDDEN, "FILE_ACCESS_DENIED")
        }
        FileErrorKind::IsDirectory
        | FileErrorKind::NotADirectory
        | FileErrorKind::InvalidPath
        | FileErrorKind::NotARegularFile
        | FileErrorKind::TooManyLinks
        | FileErrorKind::DirectoryNotEmpty => (StatusCode::BAD_REQUEST, "INVALID_FILE_PATH"),
        FileErrorKind::AlreadyExists => (StatusCode::CONFLICT, "FILE_ALREADY_EXISTS"),
        FileErrorKind::NoSpace => (StatusCode::INSUFFICIENT_STORAGE, "FILE_WRITE_FAILED"),
        _ => (StatusCode::UNPROCESSABLE_ENTITY, "FILE_OPERATION_FAILED"),
    }
}

impl From<EngineError> for Refusal {
    /// The class decides, but for what the client knows by another status.
    fn from(error: EngineError) -> Self {
        use EngineError as E;
        let message = error.to_string();
        let class = error.class();
        let refusal = match &error {
            // The cause is what a caller can act on.
            E::Image { source, .. } => {
                Self::new(StatusCode::BAD_REQUEST, "IMAGE", format!("{message}: {}", chain_of(source)))
            }
            E::TemplateFailed { .. } => Self::new(StatusCode::BAD_REQUEST, "BUILD_FAILED", message),
            E::Build { source, .. } => {
                Self::new(StatusCode::BAD_REQUEST, "BUILD_FAILED", format!("{message}: {source}"))
            }
            E::Create { source, .. } if class != ErrorClass::Full => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "START_FAILED", format!("{message}: {source}"))
            }
            other => {
                let status = match (other.noun(), class) {
                    (_, ErrorClass::Invalid) => StatusCode::BAD_REQUEST,
                    (Noun::Sandbox, ErrorClass::Unavailable) => StatusCode::BAD_GATEWAY,
                    (_, class) => error::status(class),
                };
                Self::new(status, word(class), message)
            }
        };
        refusal.with(&error)
    }
}

fn word(class: ErrorClass) -> &'static str {
    match class {
        ErrorClass::NotFound => "NOT_FOUND",
        ErrorClass::Exists => "ALREADY_EXISTS",
        ErrorClass::InUse => "IN_USE",
        ErrorClass::Invalid => "BAD_REQUEST",
        ErrorClass::WrongState => "WRONG_STATE",
        ErrorClass::Incompatible => "INCOMPATIBLE",
        ErrorClass::Forbidden => "FORBIDDEN",
        ErrorClass::Unsupported => "NOT_IMPLEMENTED",
        ErrorClass::Quota => "QUOTA_EXCEEDED",
        ErrorClass::Full => "NO_CAPACITY",
        ErrorClass::Unavailable => "UNAVAILABLE",
        ErrorClass::DiskFull | ErrorClass::Internal => "INTERNAL",
    }
}

/// What the layers around all routes refuse, and what is wrong with a request as such.
impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        let (status, body, chain) = error.into_parts();
        let mut refusal = Self::made(status, Source::Api, body.code.to_uppercase(), body.message);
        refusal.0.trail = Trail { code: body.code, chain };
        refusal
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = (self.0.status, Json(self.body())).into_response();
        self.0.trail.mark(&mut response);
        response
    }
}

#[cfg(test)]
mod tests {
    use engine::Field;
    use runtime::BackendError;
    use wire::SandboxId;
    use wire::files::FileError;

    use super::*;

    #[track_caller]
    fn check(refusal: Refusal, status: u16, source: &str, code: &str) {
        let body = refusal.body();
        assert_eq!(
            (&body["statusCode"], &body["source"], &body["code"]),
            (&json!(status), &json!(source), &json!(code)),
            "{body}"
        );
    }

    #[test]
    fn clients_get_the_status_and_the_code_that_they_know() {
        let id = SandboxId::from_random(1);
        let api = |error: EngineError, status, code| check(error.into(), status, "DAYTONA_API", code);
        api(EngineError::SandboxNotFound { id: "x".into() }, 404, "NOT_FOUND");
        api(EngineError::NameTaken { name: "x".into() }, 409, "ALREADY_EXISTS");
        api(Field::Name.must("x"), 400, "BAD_REQUEST");
        api(EngineError::WrongState { id, state: "paused" }, 409, "WRONG_STATE");
        api(EngineError::Full { what: "x".into() }, 503, "NO_CAPACITY");
        api(EngineError::Create { id, source: BackendError::Gone }, 422, "START_FAILED");
        api(EngineError::Unresponsive { id }, 502, "UNAVAILABLE");
        let file = |kind| {
            let source = FileError { kind, path: b"/x".to_vec(), detail: String::new() };
            Refusal::toolbox(EngineError::File { source })
        };
        check(file(FileErrorKind::NotFound), 404, "DAYTONA_DAEMON", "FILE_NOT_FOUND");
        check(file(FileErrorKind::PermissionDenied), 403, "DAYTONA_DAEMON", "FILE_ACCESS_DENIED");
        check(file(FileErrorKind::IsDirectory), 400, "DAYTONA_DAEMON", "INVALID_FILE_PATH");
        check(
            Refusal::toolbox(EngineError::WrongState { id, state: "paused" }),
            409,
            "DAYTONA_DAEMON",
            "WRONG_STATE",
        );
    }
}
