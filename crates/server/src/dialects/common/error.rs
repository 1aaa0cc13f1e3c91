//! Failures, as far as they are the same in every dialect.
//!
//! A dialect begins with [`status`] of an error's class and overrides what its clients know by another status or word. [`Trail`] is
//! what goes beside the answer, to the log and the counters, whatever the answer looks like.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use engine::{EngineError, ErrorClass};

use crate::http::error::{Chain, Code};
use crate::observe::log::chain_of;

/// The status that a class of failures usually has.
pub fn status(class: ErrorClass) -> StatusCode {
    match class {
        ErrorClass::NotFound => StatusCode::NOT_FOUND,
        ErrorClass::Exists | ErrorClass::InUse | ErrorClass::WrongState | ErrorClass::Incompatible => {
            StatusCode::CONFLICT
        }
        ErrorClass::Invalid => StatusCode::UNPROCESSABLE_ENTITY,
        ErrorClass::Forbidden => StatusCode::FORBIDDEN,
        ErrorClass::Unsupported => StatusCode::NOT_IMPLEMENTED,
        ErrorClass::Quota => StatusCode::TOO_MANY_REQUESTS,
        ErrorClass::Full | ErrorClass::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        ErrorClass::DiskFull | ErrorClass::Internal => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// What goes beside an answer that is a failure.
#[derive(Debug, Clone)]
pub struct Trail {
    /// For the counters.
    pub code: String,
    /// For the log.
    pub chain: Option<Chain>,
}

impl Trail {
    /// Of a failure that has no causes.
    pub fn new(code: impl Into<String>) -> Self {
        Self { code: code.into(), chain: None }
    }

    /// With the causes of an error.
    pub fn caused_by(&mut self, error: &EngineError) {
        self.chain = Some(Chain(chain_of(error)));
    }

    /// Puts it beside the answer, with the headers that a failure of this status has in every protocol.
    pub fn mark(self, response: &mut Response) {
        if response.status() == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response.extensions_mut().insert(Code(self.code));
        if let Some(chain) = self.chain {
            response.extensions_mut().insert(chain);
        }
    }
}
