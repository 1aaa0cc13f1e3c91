//! The description of the native API, generated from the routes and the types they carry.

use utoipa::openapi::security::{ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityScheme};
use utoipa::{Modify, OpenApi};

use crate::native::{
    self, builds, commands, files, images, keys, metrics, pools, sandboxes, stats, system, templates, volumes,
};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Shoal",
        description = "Sandboxes for AI agents. Every route needs an api key; every failure answers with an `ErrorBody`, \
            also 401 (no valid key), 403 and 421 (a foreign Origin or Host), 405, 413 and 415, which are not repeated below.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    paths(
        sandboxes::create,
        sandboxes::list,
        sandboxes::get,
        sandboxes::update,
        sandboxes::delete,
        sandboxes::touch,
        sandboxes::explain,
        native::events::watch,
        commands::run,
        commands::list,
        commands::stream::start,
        commands::get,
        commands::events::events,
        commands::stream::attach,
        commands::write_stdin,
        commands::end_stdin,
        commands::signal,
        commands::kill,
        commands::resize,
        files::read,
        files::head,
        files::write,
        files::remove,
        files::stat,
        files::list,
        files::make_directory,
        files::rename,
        files::copy,
        files::edit,
        files::glob,
        files::grep,
        files::watch,
        files::pack,
        files::unpack,
        images::pull,
        images::import,
        images::list,
        images::get,
        images::remove,
        images::collect,
        images::aliases,
        images::set_alias,
        images::delete_alias,
        templates::create,
        templates::list,
        templates::get,
        templates::apply,
        templates::update,
        templates::delete,
        templates::prepare,
        templates::watch,
        volumes::create,
        volumes::list,
        volumes::get,
        volumes::update,
        volumes::delete,
        volumes::export,
        volumes::import,
        pools::create,
        pools::list,
        pools::get,
        pools::update,
        pools::delete,
        builds::create,
        builds::list,
        builds::get,
        builds::delete,
        builds::log,
        stats::one,
        stats::all,
        metrics::metrics,
        keys::create,
        keys::list,
        keys::delete,
        system::health,
        system::ready,
        system::version,
        system::openapi,
    ),
    components(schemas(
        wire::api::CommandWish,
        wire::api::CommandEvent,
        wire::api::FileEvent,
        wire::api::ImageEvent,
        wire::api::SandboxEvent,
        wire::api::StartBuild,
        wire::api::TemplateEvent
    )),
    security(("bearer" = []), ("api_key" = [])),
    modifiers(&KeySpellings),
)]
struct Description;

struct KeySpellings;

impl Modify for KeySpellings {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        let components = description.components.get_or_insert_default();
        let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).build();
        components.add_security_scheme("bearer", SecurityScheme::Http(bearer));
        let header = ApiKey::Header(ApiKeyValue::new("X-Api-Key"));
        components.add_security_scheme("api_key", SecurityScheme::ApiKey(header));
    }
}

/// OpenAPI 3.1, as readable JSON that ends with a line break.
pub fn json() -> String {
    let mut text = Description::openapi().to_pretty_json().expect("the description is made of plain data");
    text.push('\n');
    text
}
