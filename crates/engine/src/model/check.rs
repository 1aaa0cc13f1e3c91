//! Checks of requests that several calls share.

use std::collections::BTreeMap;

use sha2::{Digest as _, Sha256};

use crate::{EngineError, PAGE_DEFAULT, PAGE_MAX};

pub(crate) fn digest(request: &impl serde::Serialize) -> [u8; 32] {
    let text = serde_json::to_vec(request).expect("requests are made of types that JSON can write");
    Sha256::digest(&text).into()
}

pub(crate) fn page_limit(limit: Option<u32>) -> Result<usize, EngineError> {
    match limit.unwrap_or(PAGE_DEFAULT) {
        limit @ 1..=PAGE_MAX => Ok(limit as usize),
        limit => {
            let why = format!("it must be between 1 and {PAGE_MAX}, got {limit}");
            Err(EngineError::Invalid { what: "limit", why })
        }
    }
}

pub(crate) fn check_env(env: &BTreeMap<String, String>, bytes_max: usize) -> Result<(), EngineError> {
    let invalid = |why: String| Err(EngineError::Invalid { what: "env", why });
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) {
            return invalid(format!(
                "the name of a variable must not be empty or contain `=` or NUL, got {name:.64?}"
            ));
        }
        if value.contains('\0') {
            return invalid(format!("the value of `{name:.64}` must not contain a NUL byte"));
        }
    }
    let size: usize = env.iter().map(|(name, value)| name.len() + value.len() + 2).sum();
    if size > bytes_max {
        return invalid(format!("it must have at most {bytes_max} bytes, got {size}"));
    }
    Ok(())
}

/// A user of a sandbox, as callers name it.
pub(crate) fn check_user(user: Option<&str>) -> Result<(), EngineError> {
    match user {
        Some(user) if user.is_empty() || user.contains('\0') => {
            let why = "it must be a name or a number, optionally with `:group`".into();
            Err(EngineError::Invalid { what: "user", why })
        }
        Some(_) | None => Ok(()),
    }
}
