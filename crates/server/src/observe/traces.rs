//! Traces, sent to an OpenTelemetry collector when the operator names one.
//!
//! Spans that are meant for traces have a target of their own ([`engine::TRACE_TARGET`]) and are made by nobody else's filter:
//! without a collector they cost a look at a flag. A trace begins with a request, or goes on from the caller's own when the
//! request carries `traceparent`; below it are the steps that the request waited for. Names and attributes are templates,
//! verbs and sandbox ids, never what a caller wrote.
//!
//! Sent as protobuf over HTTP, in batches, from a thread of the OpenTelemetry library; what cannot be delivered is dropped and
//! said once. The library reads the `OTEL_*` variables that its specification names, such as those for headers and sampling.

use axum::http::HeaderMap;
use tracing::Span;

/// Where a collector takes traces: the whole URL.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint(String);

/// What a collector serves traces at, by the specification.
const TRACES_PATH: &str = "/v1/traces";

impl Endpoint {
    /// A URL with `http` or `https`. One without a path means the usual one.
    pub fn parse(text: &str) -> Option<Self> {
        let uri: axum::http::Uri = text.parse().ok()?;
        let known = matches!(uri.scheme_str(), Some("http" | "https"));
        if !known || uri.host().is_none_or(str::is_empty) || uri.query().is_some() {
            return None;
        }
        let text = text.trim_end_matches('/');
        Some(Self(if uri.path() == "/" { format!("{text}{TRACES_PATH}") } else { text.into() }))
    }
}

/// The span of one request, as OpenTelemetry's conventions have it. Disabled without a collector.
pub fn request_span(method: &str, route: Option<&str>, headers: &HeaderMap) -> Span {
    let route = route.unwrap_or("none");
    let span = tracing::debug_span!(
        target: engine::TRACE_TARGET,
        "request",
        otel.name = tracing::field::Empty,
        otel.kind = "server",
        otel.status_code = tracing::field::Empty,
        http.request.method = method,
        http.route = route,
        http.response.status_code = tracing::field::Empty,
    );
    if !span.is_disabled() {
        span.record("otel.name", format!("{method} {route}"));
        inner::go_on_from(&span, headers);
    }
    span
}

/// What came of a request.
pub fn answered(span: &Span, status: axum::http::StatusCode) {
    span.record("http.response.status_code", status.as_u16());
    if status.is_server_error() {
        span.record("otel.status_code", "ERROR");
    }
}

pub use inner::{Traces, TracesError};

#[cfg(feature = "otlp")]
mod inner {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use axum::body::Bytes;
    use axum::http::{HeaderMap, Request, Response};
    use http_body_util::{BodyExt, Full, Limited};
    use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
    use hyper_util::client::legacy::Client;
    use hyper_util::client::legacy::connect::HttpConnector;
    use hyper_util::rt::TokioExecutor;
    use opentelemetry::KeyValue;
    use opentelemetry::propagation::TextMapPropagator;
    use opentelemetry::trace::{TraceContextExt, TracerProvider};
    use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
    use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig, WithHttpConfig};
    use opentelemetry_sdk::Resource;
    use opentelemetry_sdk::propagation::TraceContextPropagator;
    use opentelemetry_sdk::trace::SdkTracerProvider;
    use tokio::runtime::Handle;
    use tracing::Span;
    use tracing_opentelemetry::OpenTelemetrySpanExt;
    use tracing_subscriber::Layer;
    use tracing_subscriber::filter::filter_fn;
    use tracing_subscriber::registry::LookupSpan;

    use super::Endpoint;

    /// How long one delivery may take.
    const DELIVERY_MAX: Duration = Duration::from_secs(10);
    /// How long the last delivery may hold up the end of the daemon.
    const STOP_MAX: Duration = Duration::from_secs(3);
    /// A collector has little to say.
    const ANSWER_MAX: usize = 64 * 1024;

    /// Why there are no traces.
    #[derive(Debug, thiserror::Error)]
    pub enum TracesError {
        /// The library refused what it was given, or found in `OTEL_*` variables.
        #[error("cannot prepare the delivery of traces")]
        Exporter(#[source] ExporterBuildError),
    }

    /// Traces on their way to a collector.
    pub struct Traces {
        provider: SdkTracerProvider,
    }

    impl Traces {
        /// Prepares the delivery. Nothing is sent yet, so a collector may come later.
        pub fn start(endpoint: &Endpoint) -> Result<Self, TracesError> {
            let courier = Courier::new(endpoint);
            let exporter = SpanExporter::builder()
                .with_http()
                .with_http_client(courier)
                .with_endpoint(&endpoint.0)
                .with_timeout(DELIVERY_MAX)
                .build()
                .map_err(TracesError::Exporter)?;
            let version = KeyValue::new("service.version", crate::version());
            let resource = Resource::builder().with_service_name("shoal").with_attribute(version).build();
            let provider =
                SdkTracerProvider::builder().with_resource(resource).with_batch_exporter(exporter).build();
            Ok(Self { provider })
        }

        /// What turns spans into traces.
        pub fn layer<S>(&self) -> impl Layer<S> + use<S>
        where
            S: tracing::Subscriber + for<'a> LookupSpan<'a> + Send + Sync,
        {
            tracing_opentelemetry::layer()
                .with_tracer(self.provider.tracer("shoal"))
                .with_location(false)
                .with_threads(false)
                .with_tracked_inactivity(false)
                .with_filter(filter_fn(|metadata| metadata.target() == engine::TRACE_TARGET))
        }

        /// Delivers what there is, and ends. The runtime must still run: it carries the delivery.
        pub async fn stop(self) {
            let stopped =
                tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(STOP_MAX)).await;
            match stopped {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::warn!(%error, "the last traces were not delivered"),
                Err(_) => tracing::error!("the end of the traces panicked"),
            }
        }
    }

    /// Takes over the caller's trace, if the request carries one.
    pub fn go_on_from(span: &Span, headers: &HeaderMap) {
        let context = TraceContextPropagator::new().extract(&HeaderExtractor(headers));
        if context.span().span_context().is_valid()
            && let Err(error) = span.set_parent(context)
        {
            tracing::debug!(%error, "a caller's trace could not be taken over");
        }
    }

    /// Carries batches to the collector, on the daemon's runtime: the library's thread has none.
    #[derive(Debug)]
    struct Courier {
        endpoint: String,
        client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
        runtime: Handle,
        /// Whether the last delivery failed: said when it changes, and not for each.
        failing: Arc<AtomicBool>,
    }

    impl Courier {
        fn new(endpoint: &Endpoint) -> Self {
            let mut roots = rustls::RootCertStore::empty();
            // A machine without any can still reach a collector in the clear; TLS says what is wrong when it is tried.
            roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
            let tls = rustls::ClientConfig::builder_with_provider(Arc::new(
                rustls::crypto::ring::default_provider(),
            ))
            .with_safe_default_protocol_versions()
            .expect("ring has ciphers for all versions that rustls knows")
            .with_root_certificates(roots)
            .with_no_client_auth();
            let connector =
                HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
            Self {
                endpoint: endpoint.0.clone(),
                client: Client::builder(TokioExecutor::new()).build(connector),
                runtime: Handle::current(),
                failing: Arc::default(),
            }
        }

        fn note(&self, failure: Option<String>) {
            let was_failing = self.failing.swap(failure.is_some(), Ordering::Relaxed);
            match failure {
                Some(error) if !was_failing => {
                    tracing::warn!(
                        endpoint = self.endpoint,
                        error,
                        "traces cannot be delivered and are dropped"
                    );
                }
                None if was_failing => tracing::info!(endpoint = self.endpoint, "traces are delivered again"),
                Some(_) | None => {}
            }
        }
    }

    #[async_trait::async_trait]
    impl HttpClient for Courier {
        async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
            let client = self.client.clone();
            let delivery = self.runtime.spawn(async move {
                let exchange = async {
                    let answer = client.request(request.map(Full::new)).await?;
                    let (parts, body) = answer.into_parts();
                    let body = Limited::new(body, ANSWER_MAX).collect().await?;
                    Ok::<_, HttpError>(Response::from_parts(parts, body.to_bytes()))
                };
                tokio::time::timeout(DELIVERY_MAX, exchange).await?
            });
            let answer = delivery.await.map_err(HttpError::from).flatten();
            self.note(match &answer {
                Ok(answer) if answer.status().is_success() => None,
                Ok(answer) => Some(format!("it answered {}", answer.status())),
                Err(error) => Some(crate::observe::log::chain_of(error.as_ref())),
            });
            answer
        }
    }
}

#[cfg(not(feature = "otlp"))]
mod inner {
    use axum::http::HeaderMap;
    use tracing::Span;

    use super::Endpoint;

    /// Why there are no traces.
    #[derive(Debug, thiserror::Error)]
    pub enum TracesError {
        /// The feature `otlp` was left out of the build.
        #[error("this program was built without traces")]
        NotBuilt,
    }

    /// There are none.
    pub enum Traces {}

    impl Traces {
        /// Refuses.
        pub fn start(_: &Endpoint) -> Result<Self, TracesError> {
            Err(TracesError::NotBuilt)
        }

        /// Nothing.
        pub fn layer<S: tracing::Subscriber>(&self) -> impl tracing_subscriber::Layer<S> + use<S> {
            tracing_subscriber::layer::Identity::new()
        }

        /// Nothing.
        pub async fn stop(self) {}
    }

    /// Nothing.
    pub fn go_on_from(_: &Span, _: &HeaderMap) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endpoint_without_a_path_means_the_usual_one() {
        for (text, expected) in [
            ("http://127.0.0.1:4318", Some("http://127.0.0.1:4318/v1/traces")),
            ("https://otel.example.com/", Some("https://otel.example.com/v1/traces")),
            ("https://otel.example.com/custom/v1/traces", Some("https://otel.example.com/custom/v1/traces")),
            ("127.0.0.1:4318", None),
            ("grpc://otel.example.com", None),
            ("http://", None),
            ("http://otel.example.com/?a=b", None),
            ("", None),
        ] {
            assert_eq!(Endpoint::parse(text).map(|endpoint| endpoint.0).as_deref(), expected, "{text}");
        }
    }
}
