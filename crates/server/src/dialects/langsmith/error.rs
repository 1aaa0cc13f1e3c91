//! Every failure as LangSmith's clients read it, so that they raise the exception that the situation has in their documents.
//!
//! ```text
//! {"detail": {"error": "ImagePull", "message": "..."}}                             most of them
//! {"detail": [{"loc": ["body", "size"], "msg": "...", "type": "value_error"}]}     a field that is wrong, on the control plane
//! ```
//!
//! The status decides which exception it is, then `error`. 429, 502, 503 and 504 are repeated by clients up to three times, POST
//! included, so they are used only where nothing was done.

use std::borrow::Cow;

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ErrorClass, Noun, Resource};
use serde_json::{Value, json};
use wire::files::FileErrorKind;

use crate::dialects::common::error::{self, Trail};
use crate::http::error::{ApiError, Chain};
use crate::observe::log::chain_of;

/// What a failed request answers with.
#[derive(Debug)]
pub struct Refusal(Box<Parts>);

#[derive(Debug)]
struct Parts {
    status: StatusCode,
    error: Cow<'static, str>,
    message: String,
    /// A field that is wrong: told as a list, which clients read as a validation error.
    field: Option<String>,
    retry_after_seconds: Option<u64>,
    /// The size behind a range that cannot be satisfied.
    size: Option<u64>,
    trail: Trail,
}

/// What the data plane was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doing {
    /// Reading, listing or searching files.
    Read,
    /// Writing a file.
    Write,
    /// Running a command.
    Command,
}

impl Doing {
    /// The word for its failure.
    pub fn error(self) -> &'static str {
        match self {
            Self::Read => "ReadError",
            Self::Write => "WriteError",
            Self::Command => "CommandError",
        }
    }
}

impl Refusal {
    /// A refusal without causes.
    pub fn new(status: StatusCode, error: impl Into<Cow<'static, str>>, message: impl Into<String>) -> Self {
        let error = error.into();
        Self(Box::new(Parts {
            status,
            trail: Trail::new(error.clone()),
            error,
            message: message.into(),
            field: None,
            retry_after_seconds: None,
            size: None,
        }))
    }

    fn field(mut self, field: &str) -> Self {
        self.0.field = Some(field.to_owned());
        self
    }

    fn retry_after(mut self, seconds: u64) -> Self {
        self.0.retry_after_seconds = Some(seconds);
        self
    }

    fn native(mut self, code: String, chain: Option<Chain>) -> Self {
        self.0.trail = Trail { code, chain };
        self
    }

    /// A field of a request on the control plane that cannot be taken as it is.
    pub fn invalid(field: &str, why: impl std::fmt::Display) -> Self {
        let message = format!("`{field}` is not valid: {why}");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "ValidationError", message).field(field)
    }

    /// A field of a request that breaks a rule. `rule` reads on after "must".
    pub fn must(field: &str, rule: impl std::fmt::Display) -> Self {
        let message = format!("`{field}` must {rule}");
        Self::new(StatusCode::UNPROCESSABLE_ENTITY, "ValidationError", message).field(field)
    }

    /// What this server cannot do.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_IMPLEMENTED, "NotSupported", message)
    }

    /// Something here panicked.
    pub fn bug() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "InternalError", "the daemon has a bug here")
    }

    /// Nothing there.
    pub fn no_route() -> Self {
        Self::new(StatusCode::NOT_FOUND, "NotFound", "there is nothing at this path")
    }

    /// Something there, for another method.
    pub fn wrong_method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "MethodNotAllowed", "this path does not take this method")
    }

    /// A sandbox that takes nothing yet, before anything was begun. Clients that open a WebSocket come again.
    pub fn not_yet(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "ServiceUnavailable", message).retry_after(1)
    }

    /// For the log, and the `error` of a stream that has no status.
    pub fn error(&self) -> &str {
        &self.0.error
    }

    /// What kind of refusal it is.
    pub fn status(&self) -> StatusCode {
        self.0.status
    }

    /// With the name that a field has in this request, where the engine calls it otherwise.
    pub fn renamed(mut self, engine: &str, here: &str) -> Self {
        if self.0.field.as_deref() == Some(engine) {
            self.0.field = Some(here.to_owned());
        }
        self
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What it says of itself in the body.
    fn detail(&self) -> Value {
        match &self.0.field {
            None => json!({"error": self.0.error, "message": self.0.message}),
            Some(field) => {
                let path = field.split('.').map(Value::from);
                let path: Vec<Value> = std::iter::once(Value::from("body")).chain(path).collect();
                json!([{"loc": path, "msg": self.0.message, "type": "value_error"}])
            }
        }
    }

    fn with(mut self, error: &EngineError) -> Self {
        self.0.trail.caused_by(error);
        self
    }

    /// What the engine refused on the control plane: the class decides, but for what clients know by another name.
    fn control(error: EngineError) -> Self {
        use EngineError as E;
        let message = error.to_string();
        let say = |status, word: &'static str| Self::new(status, word, message.as_str());
        let refusal = match &error {
            E::CommandExpired { .. } => say(StatusCode::GONE, "SessionExpired"),
            E::PoolGoing { .. } | E::TemplateBuiltIn => say(StatusCode::CONFLICT, "ResourceInUse"),
            E::TemplateFailed { .. } | E::ImageNotFound { .. } => {
                say(StatusCode::UNPROCESSABLE_ENTITY, "ImagePull")
            }
            E::Image { source, .. } => {
                let told = format!("{message}: {}", chain_of(source));
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "ImagePull", told)
            }
            E::VolumeTooSmall { .. } => say(StatusCode::BAD_REQUEST, "VolumeResize"),
            // Nothing was done, so clients may ask again.
            E::Volume { source, .. } => {
                let told = format!("{message}: {source}");
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "VolumeProvisioning", told)
            }
            E::PoolVolumes { .. } => say(StatusCode::BAD_REQUEST, "ValidationError"),
            E::DiskLimitsUnsupported => {
                say(StatusCode::UNPROCESSABLE_ENTITY, "ValidationError").field("fs_capacity_bytes")
            }
            E::Invalid { field, .. } => {
                say(StatusCode::UNPROCESSABLE_ENTITY, "ValidationError").field(field.word())
            }
            E::Quota { resource, limit } => {
                // Clients look for the words that say which limit it was.
                let told = match resource {
                    Resource::Sandboxes => format!("the sandbox count limit of {limit} is reached"),
                    other => format!("the key's limit of {limit} {other} is reached"),
                };
                Self::new(StatusCode::TOO_MANY_REQUESTS, "QuotaExceeded", told).retry_after(0)
            }
            E::Create { source, .. } if error.class() != ErrorClass::Full => {
                Self::new(StatusCode::UNPROCESSABLE_ENTITY, "CrashLoop", format!("{message}: {source}"))
            }
            E::Delete { .. } | E::Pause { .. } | E::Resume { .. } | E::Usage { .. } => {
                say(StatusCode::INTERNAL_SERVER_ERROR, "InternalError")
            }
            E::Unresponsive { .. } => say(StatusCode::BAD_GATEWAY, "ConnectionError"),
            E::Stopping => Self::not_yet(message.as_str()),
            other => Self::usual(other.class(), other.noun(), message),
        };
        refusal.with(&error)
    }

    /// What a class of failures is called here.
    fn usual(class: ErrorClass, noun: Noun, message: String) -> Self {
        let (status, word) = match (noun, class) {
            (Noun::File, _) => (StatusCode::CONFLICT, "ReadError"),
            (Noun::Command, ErrorClass::WrongState | ErrorClass::Unavailable) => {
                (StatusCode::CONFLICT, "CommandError")
            }
            (Noun::Build, ErrorClass::Invalid) => (StatusCode::UNPROCESSABLE_ENTITY, "SandboxConfig"),
            (_, class) => (error::status(class), word(class, noun)),
        };
        Self::new(status, word, message)
    }

    /// What the engine refused on the data plane.
    pub fn data(doing: Doing, error: EngineError) -> Self {
        let message = error.to_string();
        let say = |status, word: &'static str| Self::new(status, word, message.as_str());
        let refusal = match (&error, error.noun(), error.class()) {
            (EngineError::File { source }, ..) => match source.kind {
                FileErrorKind::NotFound => say(StatusCode::NOT_FOUND, "FileNotFound"),
                FileErrorKind::PermissionDenied => say(StatusCode::FORBIDDEN, "PermissionDenied"),
                FileErrorKind::RangeNotSatisfiable { size } => {
                    let mut refusal = say(StatusCode::RANGE_NOT_SATISFIABLE, doing.error());
                    refusal.0.size = Some(size);
                    refusal
                }
                _ => say(StatusCode::BAD_REQUEST, doing.error()),
            },
            (_, Noun::Sandbox, ErrorClass::WrongState) => say(StatusCode::BAD_REQUEST, "NotReady"),
            (_, Noun::File, _) | (_, _, ErrorClass::Invalid) | (_, Noun::Command, ErrorClass::Exists) => {
                say(StatusCode::BAD_REQUEST, doing.error())
            }
            (_, Noun::Daemon, ErrorClass::Full) => Self::not_yet(message.as_str()),
            _ => return Self::control(error),
        };
        refusal.with(&error)
    }

    /// An error that was already in the native shape, on the data plane.
    pub fn data_api(doing: Doing, error: ApiError) -> Self {
        let (status, body, chain) = error.into_parts();
        let word = match status {
            StatusCode::SERVICE_UNAVAILABLE => "ServiceUnavailable",
            _ => doing.error(),
        };
        let status = if status == StatusCode::CONFLICT { StatusCode::BAD_REQUEST } else { status };
        Self::new(status, word, body.message).native(body.code, chain)
    }
}

/// The word for a class of failures.
fn word(class: ErrorClass, noun: Noun) -> &'static str {
    match class {
        ErrorClass::NotFound => match noun {
            Noun::Command => "CommandNotFound",
            Noun::Template => "TemplateNotFound",
            Noun::Snapshot => "SnapshotNotFound",
            Noun::Volume => "VolumeNotFound",
            Noun::Pool => "PoolNotFound",
            Noun::Sandbox | Noun::File | Noun::Image | Noun::Build | Noun::Key | Noun::Daemon => "NotFound",
        },
        ErrorClass::Exists => "AlreadyExists",
        ErrorClass::InUse => "ResourceInUse",
        ErrorClass::Invalid => "ValidationError",
        ErrorClass::WrongState | ErrorClass::Incompatible => "Conflict",
        ErrorClass::Forbidden => "Forbidden",
        ErrorClass::Unsupported => "NotSupported",
        ErrorClass::Quota => "QuotaExceeded",
        ErrorClass::Full => "Unschedulable",
        ErrorClass::Unavailable => "ServiceUnavailable",
        ErrorClass::DiskFull | ErrorClass::Internal => "InternalError",
    }
}

impl From<EngineError> for Refusal {
    fn from(error: EngineError) -> Self {
        Self::control(error)
    }
}

/// What the layers around all routes refuse, and what is wrong with a request as such.
impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        let (status, body, chain) = error.into_parts();
        let field = body.details.get("field").and_then(Value::as_str).map(str::to_owned);
        let (status, word) = match (status, body.code.as_str()) {
            (
                _,
                "invalid_request"
                | "invalid_query"
                | "invalid_path"
                | "invalid_json"
                | "unsupported_media_type",
            ) => (StatusCode::UNPROCESSABLE_ENTITY, "ValidationError"),
            (StatusCode::UNAUTHORIZED, _) => (status, "Unauthorized"),
            (StatusCode::FORBIDDEN, _) => (status, "Forbidden"),
            (StatusCode::NOT_FOUND, _) => (status, "NotFound"),
            (StatusCode::METHOD_NOT_ALLOWED, _) => (status, "MethodNotAllowed"),
            (StatusCode::SERVICE_UNAVAILABLE, _) => (status, "ServiceUnavailable"),
            (status, _) if status.is_server_error() => (status, "InternalError"),
            (status, _) => (status, "BadRequest"),
        };
        let refusal = Self::new(status, word, body.message).native(body.code, chain);
        match status {
            StatusCode::UNPROCESSABLE_ENTITY => refusal.field(field.as_deref().unwrap_or("body")),
            _ => refusal,
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let detail = self.detail();
        let parts = *self.0;
        let mut response = (parts.status, Json(json!({"detail": detail}))).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = parts.retry_after_seconds {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if let Some(size) = parts.size
            && let Ok(range) = HeaderValue::from_str(&format!("bytes */{size}"))
        {
            headers.insert(header::CONTENT_RANGE, range);
        }
        parts.trail.mark(&mut response);
        response
    }
}

#[cfg(test)]
mod tests {
    use engine::Field;
    use runtime::BackendError;
    use wire::SandboxId;

    use super::*;

    #[track_caller]
    fn check(error: EngineError, status: u16, word: &str) {
        let refusal = Refusal::from(error);
        assert_eq!((refusal.status().as_u16(), refusal.error()), (status, word), "{}", refusal.message());
    }

    #[test]
    fn clients_get_the_status_and_the_word_that_they_know() {
        let id = SandboxId::from_random(1);
        let name = || "x".to_owned();
        check(EngineError::SandboxNotFound { id: name() }, 404, "NotFound");
        check(EngineError::VolumeNotFound { name: name() }, 404, "VolumeNotFound");
        check(EngineError::NameTaken { name: name() }, 409, "AlreadyExists");
        check(EngineError::TemplateInUse { name: name(), sandboxes: 1, pools: 0 }, 409, "ResourceInUse");
        check(EngineError::TemplateBuiltIn, 409, "ResourceInUse");
        check(EngineError::ImageNotFound { name: name() }, 422, "ImagePull");
        check(EngineError::Quota { resource: Resource::Sandboxes, limit: 1 }, 429, "QuotaExceeded");
        check(EngineError::Full { what: name() }, 503, "Unschedulable");
        check(EngineError::WrongState { id, state: "deleting" }, 409, "Conflict");
        check(EngineError::Unresponsive { id }, 502, "ConnectionError");
        check(EngineError::AdminOnly { doing: "x" }, 403, "Forbidden");
        check(EngineError::CopiesUnsupported, 501, "NotSupported");
        check(EngineError::Stopping, 503, "ServiceUnavailable");
        check(EngineError::FileStalled, 409, "ReadError");
        let create = |source| EngineError::Create { id, source };
        check(create(BackendError::Full { what: "ranges" }), 503, "Unschedulable");
        check(create(BackendError::Gone), 422, "CrashLoop");
        check(EngineError::Delete { id, source: BackendError::Gone }, 500, "InternalError");
    }

    #[test]
    fn the_data_plane_says_what_was_being_done() {
        let id = SandboxId::from_random(1);
        for (error, status, word) in [
            (EngineError::WrongState { id, state: "deleting" }, 400, "NotReady"),
            (EngineError::FileKilled { id }, 400, "WriteError"),
            (Field::Path.must("x"), 400, "WriteError"),
            (EngineError::Full { what: "x".into() }, 503, "ServiceUnavailable"),
            (EngineError::SandboxNotFound { id: "x".into() }, 404, "NotFound"),
        ] {
            let refusal = Refusal::data(Doing::Write, error);
            assert_eq!((refusal.status().as_u16(), refusal.error()), (status, word));
        }
    }
}
