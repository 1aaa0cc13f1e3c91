//! Hooks, between `wire::api` and the engine.

use std::collections::BTreeMap;
use std::time::Duration;

use engine::{Argv, GuestUser, Hook, HookPoint, HookRun, Hooks, Program, shown};
use wire::api;

use super::common::guest_user;
use crate::http::clock::rfc3339;
use crate::http::error::ApiError;

/// Reads hooks.
pub fn hooks_of(hooks: BTreeMap<String, api::Hook>) -> Result<Hooks, ApiError> {
    let read = |(point, hook): (String, api::Hook)| {
        let Some(at) = HookPoint::parse(&point) else {
            let points = HookPoint::ALL.map(HookPoint::word).join(", ");
            return Err(ApiError::must("hooks", format!("be for one of {points}, got `{}`", shown(&point))));
        };
        let api::Hook { script, argv, user, timeout_seconds, required } = hook;
        let program = match (script, argv) {
            (Some(script), None) => Program::script(script),
            (None, Some(argv)) => Program::argv(argv),
            _ => {
                return Err(ApiError::must(
                    "hooks",
                    format!("have a script or an argv, and `{at}` has not one"),
                ));
            }
        };
        let program = program.map_err(|must| ApiError::must("hooks", must))?;
        let timeout = match timeout_seconds {
            Some(seconds) => Duration::try_from_secs_f64(seconds)
                .map_err(|_| ApiError::must("hooks", "give each time limit as a number of seconds"))?,
            None => Hooks::TIMEOUT_DEFAULT,
        };
        Ok((at, Hook { program, user: guest_user(user)?, timeout, required }))
    };
    Ok(Hooks::new(hooks.into_iter().map(read).collect::<Result<_, ApiError>>()?)?)
}

/// Hooks as clients see them.
pub fn hooks(hooks: &Hooks) -> BTreeMap<String, api::Hook> {
    let show = |(point, hook): (&HookPoint, &Hook)| {
        let (script, argv) = match &hook.program {
            Program::Script(script) => (Some(script.as_str().to_owned()), None),
            Program::Argv(argv) => (None, Some(Argv::words(argv).to_vec())),
            Program::Default => (None, None),
        };
        let shown = api::Hook {
            script,
            argv,
            user: hook.user.clone().map(GuestUser::into_string),
            timeout_seconds: Some(hook.timeout.as_secs_f64()),
            required: hook.required,
        };
        (point.word().to_owned(), shown)
    };
    hooks.all().iter().map(show).collect()
}

/// How hooks went, as clients see it.
pub fn hook_runs(runs: BTreeMap<HookPoint, HookRun>) -> BTreeMap<String, api::HookRun> {
    let show = |(point, run): (HookPoint, HookRun)| {
        let shown = api::HookRun {
            at: rfc3339(run.at),
            took_ms: run.took.as_secs_f64() * 1000.0,
            command_id: run.command.map(|id| id.to_string()),
            failure: run.failure,
        };
        (point.word().to_owned(), shown)
    };
    runs.into_iter().map(show).collect()
}
