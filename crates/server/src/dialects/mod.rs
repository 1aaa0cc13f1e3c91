//! Other systems' wire protocols that this server also speaks: a folder each, each a translation and no more.
//!
//! A dialect reads its shape, asks the engine, and writes its shape. It keeps no state: what its clients want to find again is in the
//! engine's rows, and what it needs and the engine lacks is added to the engine, where the others get it too. Every error
//! under its paths has its own shape, including unknown routes, wrong methods and refused keys, since some clients crash on anything else.
//!
//! Every dialect lives under a prefix of its own. The paths at the root that foreign clients force on us are listed in [`ROOT_PATHS`],
//! and nowhere else.

pub mod common;
pub mod daytona;
pub mod e2b;
pub mod langsmith;
pub mod modal;
pub mod runloop;
pub mod sandbox0;
pub mod systems;

use axum::Router;
use axum::response::{IntoResponse, Response};

use crate::http::app::App;
use crate::http::error::ApiError;

/// A protocol that is not ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// LangSmith's sandboxes.
    Langsmith,
    /// E2B's sandboxes.
    E2b,
    /// Daytona's sandboxes.
    Daytona,
    /// Runloop's devboxes.
    Runloop,
    /// Modal's sandboxes.
    Modal,
    /// Sandbox0's sandboxes.
    Sandbox0,
}

/// What lives under a prefix of its own.
const PREFIXES: &[(&str, Dialect)] = &[
    (langsmith::PREFIX, Dialect::Langsmith),
    (daytona::PREFIX, Dialect::Daytona),
    (e2b::PREFIX, Dialect::E2b),
    (runloop::PREFIX, Dialect::Runloop),
    (sandbox0::PREFIX, Dialect::Sandbox0),
];

/// Paths at the root, without a prefix, that foreign clients force on us.
pub const ROOT_PATHS: &[(&str, Dialect)] = &[
    // Its documents show the endpoint without a path. Clients before 0.14.7, and those in JavaScript, add the first, later ones the
    // second.
    ("/v2/sandboxes", Dialect::Langsmith),
    ("/api/v2/sandboxes", Dialect::Langsmith),
    // Calls of gRPC are named by their service, and its client keeps no path of the address that it is given.
    (modal::CONTROL, Dialect::Modal),
    (modal::COMMANDS, Dialect::Modal),
];

/// The native routes with all dialects beside them.
pub fn mount(native: Router<App>) -> Router<App> {
    let mut router = native
        .nest(langsmith::PREFIX, langsmith::under_prefix())
        .nest(daytona::PREFIX, daytona::under_prefix())
        .nest(e2b::PREFIX, e2b::under_prefix())
        .nest(runloop::PREFIX, runloop::under_prefix())
        .nest(sandbox0::PREFIX, sandbox0::under_prefix());
    for (path, dialect) in ROOT_PATHS {
        router = router.nest(
            path,
            match dialect {
                Dialect::Langsmith => langsmith::control_plane(),
                Dialect::E2b => e2b::under_prefix(),
                Dialect::Daytona => daytona::under_prefix(),
                Dialect::Runloop => runloop::under_prefix(),
                Dialect::Sandbox0 => sandbox0::under_prefix(),
                Dialect::Modal if *path == modal::COMMANDS => modal::command_router(),
                Dialect::Modal => modal::control_plane(),
            },
        );
    }
    router
}

/// Which dialect a path belongs to, if not to the native API.
fn of(path: &str) -> Option<Dialect> {
    let below =
        |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    PREFIXES.iter().chain(ROOT_PATHS).find(|(prefix, _)| below(prefix)).map(|(_, dialect)| *dialect)
}

/// A refusal in the shape that belongs to a path.
pub fn refuse(path: &str, error: ApiError) -> Response {
    match of(path) {
        None => error.into_response(),
        Some(Dialect::Langsmith) => langsmith::Refusal::from(error).into_response(),
        Some(Dialect::E2b) => e2b::refuse(path, error),
        Some(Dialect::Daytona) => daytona::Refusal::from(error).into_response(),
        Some(Dialect::Runloop) => runloop::Refusal::from(error).into_response(),
        Some(Dialect::Modal) => modal::refuse(error),
        Some(Dialect::Sandbox0) => sandbox0::Refusal::from(error).into_response(),
    }
}

/// Whether a path proves by itself that it may be read: a link that was signed here.
pub fn needs_no_key(path: &str) -> bool {
    [langsmith::LINKS, langsmith::SERVICES].iter().any(|prefix| path.starts_with(prefix))
        || e2b::locate::is_agent(path)
        || modal::locate::is_call(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_belongs_to_the_dialect_whose_prefix_it_has() {
        for path in ["/langsmith", "/langsmith/x", "/v2/sandboxes", "/api/v2/sandboxes/boxes/a%2Fb"] {
            assert_eq!(of(path), Some(Dialect::Langsmith), "{path}");
        }
        for path in ["/", "/v1/sandboxes", "/v2", "/v2/sandboxesx", "/langsmithx"] {
            assert_eq!(of(path), None, "{path}");
        }
    }
}
