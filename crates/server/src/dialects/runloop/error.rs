//! Every failure as Runloop's client reads it: the status decides which exception it raises, the body is `{"message": ...}`.
//!
//! The client repeats 408, 409, 429 and everything from 500 on by itself, for half a minute. What another try would not change says so
//! in a header.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use engine::{EngineError, ErrorClass};
use serde_json::json;
use wire::files::FileErrorKind;

use crate::dialects::common::error::{self, Trail};
use crate::http::error::ApiError;
use crate::observe::log::chain_of;

/// Says whether the client should try again.
const SHOULD_RETRY: HeaderName = HeaderName::from_static("x-should-retry");

/// What a failed request answers with.
#[derive(Debug)]
pub struct Refusal(Box<Parts>);

#[derive(Debug)]
struct Parts {
    status: StatusCode,
    code: String,
    message: String,
    again: Again,
    trail: Trail,
}

/// Whether another try could end otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Again {
    Yes,
    No,
}

impl Refusal {
    /// A refusal that another try would not change.
    pub fn new(status: StatusCode, code: &str, message: impl Into<String>) -> Self {
        let (code, message) = (code.to_owned(), message.into());
        let trail = Trail::new(code.clone());
        Self(Box::new(Parts { status, code, message, again: Again::No, trail }))
    }

    fn again(mut self) -> Self {
        self.0.again = Again::Yes;
        self
    }

    /// A field of a request that breaks a rule. `rule` reads on after "must".
    pub fn must(field: &str, rule: impl std::fmt::Display) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request", format!("`{field}` must {rule}"))
    }

    /// What this server cannot do. As a bad request, which is what the client takes it for.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "not_supported", message)
    }

    /// What was waited for has not come about yet.
    pub fn not_yet(message: impl Into<String>) -> Self {
        Self::new(StatusCode::REQUEST_TIMEOUT, "timeout", message).again()
    }

    /// Something here panicked.
    pub fn bug() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the daemon has a bug here")
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

    /// The status.
    #[cfg(test)]
    pub fn status(&self) -> StatusCode {
        self.0.status
    }
}

impl From<EngineError> for Refusal {
    /// The class decides, but for what the client would repeat in vain.
    fn from(error: EngineError) -> Self {
        use EngineError as E;
        let message = error.to_string();
        let class = error.class();
        let bad = |message: String| Self::new(StatusCode::BAD_REQUEST, "bad_request", message);
        let mut refusal = match &error {
            E::File { source } => match source.kind {
                FileErrorKind::NotFound => Self::new(StatusCode::NOT_FOUND, "file_not_found", message),
                FileErrorKind::PermissionDenied => {
                    Self::new(StatusCode::FORBIDDEN, "permission_denied", message)
                }
                _ => bad(message),
            },
            E::Image { source, .. } => bad(format!("{message}: {}", chain_of(source))),
            E::Build { source, .. } => bad(format!("{message}: {source}")),
            E::Create { source, .. } if class != ErrorClass::Full => bad(format!("{message}: {source}")),
            _ => match class {
                ErrorClass::Invalid
                | ErrorClass::WrongState
                | ErrorClass::Incompatible
                | ErrorClass::InUse
                | ErrorClass::Unsupported => bad(message),
                ErrorClass::Unavailable | ErrorClass::Full => {
                    Self::new(error::status(class), "unavailable", message).again()
                }
                ErrorClass::NotFound
                | ErrorClass::Exists
                | ErrorClass::Forbidden
                | ErrorClass::Quota
                | ErrorClass::DiskFull
                | ErrorClass::Internal => Self::new(error::status(class), word(class), message),
            },
        };
        refusal.0.trail.caused_by(&error);
        refusal
    }
}

fn word(class: ErrorClass) -> &'static str {
    match class {
        ErrorClass::NotFound => "not_found",
        ErrorClass::Exists => "already_exists",
        ErrorClass::Forbidden => "forbidden",
        ErrorClass::Quota => "quota_exceeded",
        ErrorClass::DiskFull | ErrorClass::Internal => "internal",
        ErrorClass::InUse
        | ErrorClass::Invalid
        | ErrorClass::WrongState
        | ErrorClass::Incompatible
        | ErrorClass::Unsupported
        | ErrorClass::Full
        | ErrorClass::Unavailable => "bad_request",
    }
}

/// What the layers around all routes refuse, and what is wrong with a request as such.
impl From<ApiError> for Refusal {
    fn from(error: ApiError) -> Self {
        let (status, body, chain) = error.into_parts();
        let mut refusal = Self::new(status, &body.code, body.message);
        if status == StatusCode::SERVICE_UNAVAILABLE {
            refusal = refusal.again();
        }
        refusal.0.trail = Trail { code: body.code, chain };
        refusal
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Parts { status, code, message, again, trail } = *self.0;
        let mut response = (status, Json(json!({"message": message, "code": code}))).into_response();
        if again == Again::No {
            response.headers_mut().insert(SHOULD_RETRY, HeaderValue::from_static("false"));
        }
        trail.mark(&mut response);
        response
    }
}

#[cfg(test)]
mod tests {
    use engine::Field;
    use wire::SandboxId;

    use super::*;

    #[track_caller]
    fn check(error: EngineError, status: u16, again: bool) {
        let response = Refusal::from(error).into_response();
        let repeated = !response.headers().contains_key(SHOULD_RETRY);
        assert_eq!((response.status().as_u16(), repeated), (status, again));
    }

    #[test]
    fn clients_repeat_only_what_could_end_otherwise() {
        let id = SandboxId::from_random(1);
        check(EngineError::SandboxNotFound { id: "x".into() }, 404, false);
        check(EngineError::NameTaken { name: "x".into() }, 409, false);
        check(Field::Name.must("x"), 400, false);
        check(EngineError::WrongState { id, state: "paused" }, 400, false);
        check(EngineError::Quota { resource: engine::Resource::Sandboxes, limit: 1 }, 429, false);
        check(EngineError::Full { what: "x".into() }, 503, true);
        check(EngineError::Stopping, 503, true);
        assert_eq!(Refusal::not_yet("x").status(), StatusCode::REQUEST_TIMEOUT);
    }
}
