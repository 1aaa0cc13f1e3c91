//! Requests to servers in sandboxes: who may send them, what is changed on the way, and how bytes are passed on.
//!
//! There are two ways. By host name, `{port}-{sandbox}.DOMAIN`, every port is an origin of its own: browsers use this
//! way, with a cookie that a link gives them. By path, below a route of the API, a port shares the API's origin: only
//! programs with a key use it, and answers are marked so that a browser runs none of them.
//!
//! Nothing here is buffered: memory does not depend on how long a body is.

mod forward;
mod grant;
mod headers;
mod page;
mod relay;

use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;

pub use forward::{ByPath, by_path, strip_prefix};
pub use grant::{End, Grant, SERVICE_TOKEN, TOKEN_PARAMETER, Token};
pub use relay::{CHUNK, copy};

use crate::http::app::App;
use crate::http::error::ApiError;
use forward::Form;
use grant::Admitted;

/// Answers a request whose host name is that of a port.
pub fn by_host(app: App, request: Request) -> BoxFuture<'static, Response> {
    serve(app, request).boxed()
}

async fn serve(app: App, mut request: Request) -> Response {
    let Some(named) = app.ports().meant(&request) else {
        return ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_host",
            "the request needs exactly one `Host` header",
        )
        .into_response();
    };
    let wants_page = page::is_wanted(request.method(), request.headers());
    let refuse = |error: ApiError| page::refuse(error, wants_page);
    let Some(host) = forward::host_of(&request) else { return refuse(ApiError::no_route()) };
    let grant = match grant::admit(&app, named, &host, &mut request) {
        Ok(Admitted::Granted(grant)) => grant,
        Ok(Admitted::Redirect(response)) => return *response,
        Err(error) => return refuse(error),
    };
    match forward::forward(&app, named, grant, Form::Host { host }, request).await {
        Ok(response) => response,
        Err(error) => refuse(error),
    }
}
