//! Helpers for several parts of the native API: checks of single fields, and work that outlives its caller.

use std::collections::BTreeMap;
use std::future::Future;

use axum::http::StatusCode;
use engine::{Argv, GuestPath, GuestUser, Resume, SandboxEnv};
use serde::Deserialize;
use tracing::Instrument;
use utoipa::IntoParams;
use wire::api;

use crate::config::quantity::{Bytes, Cpu};
use crate::http::error::ApiError;
use crate::http::params::Params;

/// The longest page.
pub(super) const PAGE_MAX: u32 = 500;

/// Finishes `work` even if the caller disconnects in the middle, so that nothing is left half done.
pub(super) async fn carried_on<T, E>(
    work: impl Future<Output = Result<T, E>> + Send + 'static,
) -> Result<T, ApiError>
where
    T: Send + 'static,
    E: Send + 'static,
    ApiError: From<E>,
{
    match tokio::spawn(work.in_current_span()).await {
        Ok(result) => Ok(result?),
        // The task panicked, which the panic hook has logged: no code aborts it.
        Err(_) => {
            Err(ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the daemon has a bug here"))
        }
    }
}

pub(super) fn check_limit(limit: Option<u32>) -> Result<Option<u32>, ApiError> {
    match limit {
        Some(limit) if !(1..=PAGE_MAX).contains(&limit) => {
            Err(ApiError::must("limit", format!("be between 1 and {PAGE_MAX}, got {limit}")))
        }
        limit => Ok(limit),
    }
}

/// Processors, if given.
pub(super) fn cpu_millis(text: Option<String>) -> Result<Option<u32>, ApiError> {
    let Some(text) = text else { return Ok(None) };
    let cpu = Cpu::parse(&text).map_err(|error| ApiError::invalid("cpu", error))?;
    u32::try_from(cpu.millis).map(Some).map_err(|_| ApiError::invalid("cpu", "it is too large"))
}

/// Memory or storage, if given.
pub(super) fn bytes(field: &'static str, text: Option<String>) -> Result<Option<u64>, ApiError> {
    let Some(text) = text else { return Ok(None) };
    Bytes::parse(&text).map(|amount| Some(amount.bytes)).map_err(|error| ApiError::invalid(field, error))
}

/// The environment of a sandbox or a template.
pub(super) fn sandbox_env(env: BTreeMap<String, String>) -> Result<SandboxEnv, ApiError> {
    SandboxEnv::new(env).map_err(|must| ApiError::must("env", must))
}

/// A working directory, if given.
pub(super) fn guest_path(cwd: Option<String>) -> Result<Option<GuestPath>, ApiError> {
    cwd.map(GuestPath::parse).transpose().map_err(|must| ApiError::must("cwd", must))
}

/// A user of the sandbox, if given.
pub(super) fn guest_user(user: Option<String>) -> Result<Option<GuestUser>, ApiError> {
    user.map(GuestUser::parse).transpose().map_err(|must| ApiError::must("user", must))
}

/// Whether a request resumes a paused sandbox.
#[derive(Debug, Clone, Copy, Default, Deserialize, IntoParams)]
#[serde(default)]
#[into_params(parameter_in = Query)]
pub struct ResumeParams {
    /// `never`: fail if the sandbox is paused, instead of resuming it first.
    #[param(inline)]
    resume: api::ResumeWish,
}

impl ResumeParams {
    pub(super) fn resume(self) -> Resume {
        resume_of(self.resume)
    }
}

pub(super) fn resume_of(wish: api::ResumeWish) -> Resume {
    match wish {
        api::ResumeWish::Auto => Resume::Auto,
        api::ResumeWish::Never => Resume::Never,
    }
}

/// The parameter `resume` of a query that is read by hand.
pub(super) fn resume_param(params: &mut Params) -> Result<Resume, ApiError> {
    match params.text("resume")?.as_deref() {
        None | Some("auto") => Ok(Resume::Auto),
        Some("never") => Ok(Resume::Never),
        Some(other) => {
            let given: String = other.chars().take(64).collect();
            Err(ApiError::must("resume", format!("be `auto` or `never`, got `{given}`")))
        }
    }
}

/// The command of a template. An empty one means the image's.
pub(super) fn template_command(words: Vec<String>) -> Result<Option<Argv>, ApiError> {
    match words.is_empty() {
        true => Ok(None),
        false => Argv::new(words).map(Some).map_err(|must| ApiError::must("command", must)),
    }
}
