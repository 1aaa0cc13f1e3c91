//! Whose each route of this dialect is: the sandbox is in the message or in its token, never in the path.

use axum::http::Method;

use super::{COMMANDS, CONTROL};
use crate::http::locate::{self, Place, Row, Whose};

/// Every route, below [`CONTROL`] and [`COMMANDS`] alike.
const ROUTES: &[Row] = &[("/{method}", &[], Whose::InBody)];

/// Where a request goes; `None` if it is none of this dialect.
pub fn locate<'a>(method: &Method, path: &'a str) -> Option<Place<'a>> {
    let rest = path.strip_prefix(CONTROL).or_else(|| path.strip_prefix(COMMANDS))?;
    locate::locate(ROUTES, method, rest)
}

/// Whether a path is a call, which opens with a header of its own.
pub fn is_call(path: &str) -> bool {
    path.strip_prefix(CONTROL)
        .or_else(|| path.strip_prefix(COMMANDS))
        .is_some_and(|rest| rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_told_by_their_messages() {
        for path in [
            "/modal.client.ModalClient/SandboxWait",
            "/modal.task_command_router.TaskCommandRouter/TaskExecWait",
        ] {
            assert_eq!(locate(&Method::POST, path), Some(Place::Body), "{path}");
        }
        assert_eq!(locate(&Method::POST, "/modal.client.Other/X"), None);
    }
}
