//! The app and its router, put together from the configuration, the native API and the dialects.

use axum::Router;
use engine::Engine;

use crate::config::Config;
use crate::http::app::{App, Manners, Reach, Surface};
use crate::http::origin::Allowed;
use crate::http::port_names::PortNames;
use crate::{dialects, native, ports};

/// The state that every handler shares.
pub fn app(engine: Engine, config: &Config) -> App {
    let mut allowed =
        Allowed { hosts: config.allowed_hosts.clone(), origins: config.allowed_origins.clone() };
    if let Some(url) = &config.public_url {
        allowed.hosts.push(url.host.clone());
        allowed.origins.push(url.origin.clone());
    }
    let public_origin = config.public_url.as_ref().map(|url| url.origin.to_string());
    let scheme = if config.tls.is_some() { "https" } else { "http" };
    let ports = PortNames { set: config.ports_url.clone(), public: config.public_ports };
    App::new(engine, Reach { allowed, public_origin, scheme, ports })
}

/// All routes with all layers.
pub fn router(app: &App) -> Router {
    let needs_no_key = |path: &str| native::needs_no_key(path) || dialects::needs_no_key(path);
    let manners = Manners {
        refuse: dialects::refuse,
        needs_no_key,
        metrics: native::METRICS,
        serve_port: ports::by_host,
    };
    app.router(Surface { routes: dialects::mount(native::all()), manners })
}
