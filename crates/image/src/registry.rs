//! Pulling images from any registry that speaks the distribution protocol, and from its mirrors.
//!
//! One [`Registry`] handles one image. It asks mirrors first and the registry last; the caller's credentials go to
//! the registry alone, and never to where it redirects. It uses plain HTTP only for registries and mirrors that are
//! configured for that. Every wait, size and number of attempts is bounded, and every blob is checked against its
//! digest.
//!
//! Built on `hyper`, which the workspace has anyway: a client crate would add a second HTTP stack and TLS setup, and
//! supports neither resuming nor mirrors.

use std::collections::BTreeMap;
use std::error::Error;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::{Authority, Scheme};
use http::{Method, Request, Response, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde::Deserialize;
use tokio::time::timeout;
use wire::Digest;

use crate::address::{Resolver, is_public};
use crate::credentials::{Credentials, DockerConfig};
use crate::hash::digest_of;
use crate::manifest::{ACCEPT, BadImage, DOCUMENT_MAX, Document, INDEX_DEPTH_MAX, Image, Platform, choose};
use crate::reference::{ImageRef, REGISTRY_DEFAULT, is_host};

pub use crate::address::Reach;

/// Timeout for connecting.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// Timeout for the first byte of a response.
const ANSWER_SECONDS: u64 = 60;
/// Timeout for silence in the middle of a response.
pub(crate) const SILENCE_SECONDS: u64 = 30;
/// Attempts for one request.
const TRIES_MAX: u32 = 4;
/// Delay before the second attempt; doubled for each further one.
const RETRY_FIRST: Duration = Duration::from_millis(200);
/// Longest delay between two attempts, even if the registry asks for more.
const RETRY_MAX: Duration = Duration::from_secs(10);
/// Most redirects for one response.
const REDIRECTS_MAX: usize = 5;
/// Largest response with a token or an error message.
const SHORT_MAX: usize = 64 * 1024;
/// Idle connections are closed after this long.
const IDLE_MAX: Duration = Duration::from_secs(30);
/// The actual host of the default registry's API.
const DEFAULT_HOST: &str = "registry-1.docker.io";

/// Configuration of registries.
#[derive(Debug, Clone, Default)]
pub struct RegistrySettings {
    /// Registries to use without TLS, as `host` or `host:port`.
    pub insecure: Vec<String>,
    /// Mirrors to ask first, by registry.
    pub mirrors: BTreeMap<String, Vec<Mirror>>,
    /// The daemon's own credentials.
    pub docker_config: DockerConfig,
    /// Whether pulls of all callers use these credentials, and not those of operators alone.
    pub docker_config_shared: bool,
    /// The registries that callers who are not operators may name, as `host` or `host:port`. `None` is all that have a
    /// public address.
    pub allowed: Option<Vec<String>>,
}

/// Another host with a registry's images.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mirror(Base);

impl Mirror {
    /// `https://host:port`, or `http://…` without TLS.
    pub fn parse(text: &str) -> Option<Self> {
        let (scheme, host) = text.trim_end_matches('/').split_once("://")?;
        let scheme = match scheme {
            "https" => Scheme::HTTPS,
            "http" => Scheme::HTTP,
            _ => return None,
        };
        let authority = host.to_ascii_lowercase();
        is_host(&authority).then(|| Some(Self(Base { scheme, authority: authority.parse().ok()? })))?
    }
}

/// Whether a text names a registry.
pub fn is_registry(text: &str) -> bool {
    is_host(text) && text == text.to_ascii_lowercase()
}

/// Where requests are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Base {
    scheme: Scheme,
    authority: Authority,
}

impl Base {
    fn is_clear(&self) -> bool {
        self.scheme == Scheme::HTTP
    }

    fn of(uri: &Uri) -> Option<Self> {
        Some(Self { scheme: uri.scheme()?.clone(), authority: uri.authority()?.clone() })
    }
}

/// Why an image cannot be pulled.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// No connection.
    #[error("registry `{registry}` cannot be reached")]
    Unreachable {
        /// The registry.
        registry: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The connection broke during a response.
    #[error("the connection to registry `{registry}` broke")]
    Broken {
        /// The registry.
        registry: String,
        /// The cause.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The registry, or where it leads, is out of the caller's reach.
    #[error("registry `{registry}` is not open to this key")]
    Forbidden {
        /// The registry.
        registry: String,
    },
    /// The registry is silent.
    #[error("registry `{registry}` did not answer within {seconds} s")]
    Late {
        /// The registry.
        registry: String,
        /// The timeout.
        seconds: u64,
    },
    /// A blob arrives too slowly.
    #[error("registry `{registry}` sends less than {bytes} bytes a minute")]
    TooSlow {
        /// The registry.
        registry: String,
        /// The least that it has to send.
        bytes: u64,
    },
    /// The registry requires credentials, or rejects those it got.
    #[error("registry `{registry}` denies access to `{repository}`")]
    Denied {
        /// The registry.
        registry: String,
        /// The requested repository.
        repository: String,
        /// Whether credentials were sent.
        anonymous: bool,
        /// A credential helper that is configured, and is not run.
        helper: Option<String>,
    },
    /// There is no such image.
    #[error("image `{reference}` does not exist in its registry")]
    NotFound {
        /// As requested.
        reference: ImageRef,
    },
    /// Rate limit.
    #[error("registry `{registry}` limits the rate of requests and asks to retry later")]
    Busy {
        /// The registry.
        registry: String,
    },
    /// An unexpected status.
    #[error("registry `{registry}` answered with status {status}{said}")]
    Strange {
        /// The registry.
        registry: String,
        /// The status.
        status: u16,
        /// The error message in the response, after a colon.
        said: String,
    },
    /// A redirect to plain HTTP.
    #[error("registry `{registry}` redirects to `{to}`, which is not encrypted")]
    Insecure {
        /// The registry.
        registry: String,
        /// Target of the redirect.
        to: String,
    },
    /// A response beyond its limit.
    #[error("registry `{registry}` sent more than {limit} bytes for {what}")]
    TooLong {
        /// The registry.
        registry: String,
        /// What was requested.
        what: String,
        /// The limit.
        limit: u64,
    },
    /// The bytes do not match the digest.
    #[error("the blob {expected} that the registry sent has the digest {found}")]
    Corrupt {
        /// The requested digest.
        expected: Digest,
        /// The digest of the bytes.
        found: Digest,
    },
    /// The length does not match the manifest.
    #[error("{digest} must have {expected} bytes as the image says, got {found}")]
    WrongSize {
        /// The blob.
        digest: Digest,
        /// Length in the manifest.
        expected: u64,
        /// Length of the bytes.
        found: u64,
    },
    /// The documents do not form a valid image.
    #[error("image `{reference}` cannot be used")]
    BadImage {
        /// As requested.
        reference: ImageRef,
        /// Why.
        source: Box<BadImage>,
    },
    /// The disk has no room.
    #[error("{needed} bytes are needed, but only {free} are free")]
    DiskFull {
        /// For this blob.
        needed: u64,
        /// On the disk.
        free: u64,
    },
    /// The blob could not be stored.
    #[error("cannot store {digest}")]
    Keep {
        /// The blob.
        digest: Digest,
        /// The kernel's error.
        source: io::Error,
    },
    /// There are no usable certificates.
    #[error("cannot set up TLS")]
    Tls {
        /// Why.
        source: Box<dyn Error + Send + Sync>,
    },
}

impl RegistryError {
    /// Whether a retry may help.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Broken { .. } | Self::Late { .. } | Self::Busy { .. } => true,
            Self::Strange { status, .. } => *status >= 500,
            Self::Denied { .. }
            | Self::Forbidden { .. }
            | Self::TooSlow { .. }
            | Self::NotFound { .. }
            | Self::Insecure { .. }
            | Self::TooLong { .. }
            | Self::Corrupt { .. }
            | Self::WrongSize { .. }
            | Self::BadImage { .. }
            | Self::DiskFull { .. }
            | Self::Keep { .. }
            | Self::Tls { .. } => false,
        }
    }
}

type Client = legacy::Client<HttpsConnector<HttpConnector<Resolver>>, Full<Bytes>>;

/// All registries with their configuration. Shared by all pulls, so that they share connections.
pub struct Registries {
    settings: RegistrySettings,
    /// For operators, and for hosts that the configuration names.
    open: OnceLock<Client>,
    /// For all else. Connections are not shared between the two, so that each is checked.
    guarded: OnceLock<Client>,
}

impl std::fmt::Debug for Registries {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Registries").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Registries {
    /// Connects to nothing yet, and reads the machine's certificates on first use.
    pub fn new(settings: RegistrySettings) -> Self {
        Self { settings, open: OnceLock::new(), guarded: OnceLock::new() }
    }

    /// Whether the configuration names a host, so that every caller may reach it.
    fn names(&self, authority: &Authority) -> bool {
        let name = if authority.as_str() == DEFAULT_HOST { REGISTRY_DEFAULT } else { authority.as_str() };
        let allowed = self.settings.allowed.iter().flatten();
        let mirrors = self.settings.mirrors.values().flatten();
        allowed.chain(&self.settings.insecure).any(|named| named == name)
            || mirrors.into_iter().any(|Mirror(base)| base.authority == *authority)
    }

    fn client(&self, reach: Reach) -> Result<&Client, RegistryError> {
        let place = match reach {
            Reach::Anywhere => &self.open,
            Reach::Public => &self.guarded,
        };
        if let Some(client) = place.get() {
            return Ok(client);
        }
        let tls = |source: Box<dyn Error + Send + Sync>| RegistryError::Tls { source };
        let mut roots = rustls::RootCertStore::empty();
        // Certificates that cannot be read are skipped: the rest may be enough, and if not, connecting fails with the
        // reason.
        let _ = roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let config =
            rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
                .with_safe_default_protocol_versions()
                .map_err(|error| tls(error.into()))?
                .with_root_certificates(roots)
                .with_no_client_auth();
        let mut tcp = HttpConnector::new_with_resolver(Resolver(reach));
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_MAX));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(config)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = legacy::Client::builder(TokioExecutor::new())
            .pool_idle_timeout(IDLE_MAX)
            .pool_timer(TokioTimer::new())
            .build(connector);
        Ok(place.get_or_init(|| client))
    }
}

/// Whether a registry that is not configured for it may be used without TLS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transport {
    /// TLS, unless the configuration names the registry.
    Encrypted,
    /// Plain HTTP: the caller requested it.
    Clear,
}

/// Pulling one image.
#[derive(Debug)]
pub struct Registry {
    shared: Arc<Registries>,
    reference: ImageRef,
    /// Mirrors, then the registry itself.
    endpoints: Vec<Endpoint>,
    reach: Reach,
}

#[derive(Debug)]
struct Endpoint {
    base: Base,
    /// As people write it.
    name: String,
    credentials: Credentials,
    helper: Option<String>,
    /// The `Authorization` header that the registry wants. Behind an async lock, so that many layers request one
    /// token.
    authorization: tokio::sync::Mutex<Option<HeaderValue>>,
}

/// A blob that is being downloaded.
pub(crate) struct BlobStream {
    pub body: Incoming,
    /// Offset of the first byte: the requested one, or 0 if the registry does not support ranges.
    pub from: u64,
    pub registry: String,
}

/// A request of the protocol.
struct Question<'a> {
    /// After `/v2/<repository>/`.
    path: &'a str,
    headers: HeaderMap,
}

impl Registry {
    /// Prepares to pull. Nothing is sent yet. Credentials that are not given are looked up.
    pub fn new(
        shared: &Arc<Registries>,
        reference: ImageRef,
        credentials: Credentials,
        transport: Transport,
        reach: Reach,
    ) -> Self {
        let settings = &shared.settings;
        let found = |registry: &str| {
            // The operator's credentials open what is the operator's.
            if reach == Reach::Public && !settings.docker_config_shared {
                return (Credentials::Anonymous, None);
            }
            let helper = settings.docker_config.helper_for(registry).map(str::to_owned);
            (settings.docker_config.find(registry), helper)
        };
        let endpoint = |base: Base, name: &str, credentials: Credentials, helper: Option<String>| Endpoint {
            base,
            name: name.to_owned(),
            credentials,
            helper,
            authorization: tokio::sync::Mutex::new(None),
        };
        let registry = reference.registry();
        let mut endpoints = Vec::new();
        for Mirror(base) in settings.mirrors.get(registry).into_iter().flatten() {
            let (credentials, helper) = found(base.authority.as_str());
            endpoints.push(endpoint(base.clone(), base.authority.as_str(), credentials, helper));
        }
        let clear = transport == Transport::Clear || settings.insecure.iter().any(|named| named == registry);
        let host = if registry == REGISTRY_DEFAULT { DEFAULT_HOST } else { registry };
        let authority: Authority = host.parse().expect("a reference names a host");
        let scheme = if clear { Scheme::HTTP } else { Scheme::HTTPS };
        let (credentials, helper) = match credentials {
            Credentials::Anonymous => found(registry),
            given => (given, None),
        };
        endpoints.push(endpoint(Base { scheme, authority }, registry, credentials, helper));
        Self { shared: Arc::clone(shared), reference, endpoints, reach }
    }

    /// Whether what is fetched may be seen by all owners: no credentials are used, or credentials that all share.
    pub fn is_for_all(&self) -> bool {
        self.is_anonymous() || self.shared.settings.docker_config_shared
    }

    /// An error if the caller may not name this registry.
    fn check_reach(&self) -> Result<(), RegistryError> {
        let registry = self.reference.registry();
        let refused = self.reach == Reach::Public
            && self
                .shared
                .settings
                .allowed
                .as_ref()
                .is_some_and(|allowed| !allowed.iter().any(|named| named == registry));
        if refused { Err(RegistryError::Forbidden { registry: registry.to_owned() }) } else { Ok(()) }
    }

    /// The image.
    pub fn reference(&self) -> &ImageRef {
        &self.reference
    }

    /// Whether credentials are sent to the registry itself.
    pub fn is_anonymous(&self) -> bool {
        self.endpoints.last().is_none_or(|origin| origin.credentials.is_anonymous())
    }

    /// Resolves the image for a platform: through indexes, to its manifest and its configuration.
    pub async fn image(&self, platform: &Platform) -> Result<Image, RegistryError> {
        let bad = |source| {
            let source = Box::new(source);
            RegistryError::BadImage { reference: self.reference.clone(), source }
        };
        self.check_reach()?;
        let mut wanted = self.reference.wanted();
        for _ in 0..=INDEX_DEPTH_MAX {
            let bytes = self.document(&wanted).await?;
            match Document::parse(&bytes).map_err(bad)? {
                Document::Index(index) => {
                    wanted = choose(&index, platform).map_err(bad)?.digest.to_string();
                }
                Document::Manifest { config, layers } => {
                    let config = self.short_blob(config.digest, config.size).await?;
                    return Image::new(digest_of(&bytes), &layers, &config, platform).map_err(bad);
                }
            }
        }
        let why = "its indexes are nested too deep".into();
        Err(bad(BadImage::Nonsense { what: "index", why }))
    }

    /// A manifest or an index, by tag or digest.
    async fn document(&self, wanted: &str) -> Result<Bytes, RegistryError> {
        let path = format!("manifests/{wanted}");
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT, HeaderValue::from_static(ACCEPT));
        let question = Question { path: &path, headers };
        let bytes = self.ask_all(&question, async |endpoint, response| {
            short_body(&endpoint.name, response, DOCUMENT_MAX, "a manifest").await
        });
        let bytes = bytes.await?;
        match wanted.parse::<Digest>() {
            Ok(expected) if expected != digest_of(&bytes) => {
                Err(RegistryError::Corrupt { expected, found: digest_of(&bytes) })
            }
            Ok(_) | Err(_) => Ok(bytes),
        }
    }

    /// A small blob, read completely.
    async fn short_blob(&self, digest: Digest, size: u64) -> Result<Bytes, RegistryError> {
        let path = format!("blobs/{digest}");
        let question = Question { path: &path, headers: HeaderMap::new() };
        let bytes = self.ask_all(&question, async |endpoint, response| {
            short_body(&endpoint.name, response, DOCUMENT_MAX, "a configuration").await
        });
        let bytes = bytes.await?;
        if bytes.len() as u64 != size {
            let found = bytes.len() as u64;
            return Err(RegistryError::WrongSize { digest, expected: size, found });
        }
        match digest_of(&bytes) {
            found if found == digest => Ok(bytes),
            found => Err(RegistryError::Corrupt { expected: digest, found }),
        }
    }

    /// Starts to download a blob, from an offset if the registry supports that. Tries once; the reader of the stream
    /// retries when it breaks.
    pub(crate) async fn blob(&self, digest: Digest, from: u64) -> Result<BlobStream, RegistryError> {
        let path = format!("blobs/{digest}");
        let mut headers = HeaderMap::new();
        if from > 0 {
            let range = format!("bytes={from}-");
            headers
                .insert(header::RANGE, HeaderValue::from_str(&range).expect("digits are fit for a header"));
        }
        let question = Question { path: &path, headers };
        let mut last = None;
        for endpoint in &self.endpoints {
            match self.ask(endpoint, &question).await {
                Ok(response) => {
                    let from = match response.status() {
                        StatusCode::PARTIAL_CONTENT => range_start(response.headers()).unwrap_or(u64::MAX),
                        _ => 0,
                    };
                    return Ok(BlobStream {
                        body: response.into_body(),
                        from,
                        registry: endpoint.name.clone(),
                    });
                }
                Err(error) => last = Some(self.passed_over(endpoint, error)),
            }
        }
        Err(last.unwrap_or_else(|| self.not_found()))
    }

    fn not_found(&self) -> RegistryError {
        RegistryError::NotFound { reference: self.reference.clone() }
    }

    fn passed_over(&self, endpoint: &Endpoint, error: RegistryError) -> RegistryError {
        tracing::debug!(endpoint = endpoint.name, image = %self.reference, %error, "a registry or mirror failed; the next one is tried");
        error
    }

    /// Asks mirrors and the registry until one answers; retries each as long as that makes sense.
    async fn ask_all<T>(
        &self,
        question: &Question<'_>,
        read: impl AsyncFn(&Endpoint, Response<Incoming>) -> Result<T, RegistryError>,
    ) -> Result<T, RegistryError> {
        let mut last = None;
        for (number, endpoint) in self.endpoints.iter().enumerate() {
            let tries = if number + 1 == self.endpoints.len() { TRIES_MAX } else { 1 };
            let mut wait = RETRY_FIRST;
            for attempt in 1..=tries {
                let result = match self.ask(endpoint, question).await {
                    Ok(response) => read(endpoint, response).await,
                    Err(error) => Err(error),
                };
                match result {
                    Ok(answer) => return Ok(answer),
                    Err(error) if error.may_pass() && attempt < tries => {
                        self.passed_over(endpoint, error);
                        tokio::time::sleep(wait).await;
                        wait = (wait * 2).min(RETRY_MAX);
                    }
                    Err(error) => {
                        last = Some(self.passed_over(endpoint, error));
                        break;
                    }
                }
            }
        }
        Err(last.unwrap_or_else(|| self.not_found()))
    }

    /// Asks one endpoint once, authenticates if required, and follows redirects. Returns only successful responses.
    async fn ask(
        &self,
        endpoint: &Endpoint,
        question: &Question<'_>,
    ) -> Result<Response<Incoming>, RegistryError> {
        let target = format!("/v2/{}/{}", self.reference.repository(), question.path);
        let mut authorization = endpoint.authorization.lock().await.clone();
        for attempt in 0..2 {
            let response = self.follow(endpoint, &target, &question.headers, authorization.as_ref()).await?;
            match response.status() {
                StatusCode::OK | StatusCode::PARTIAL_CONTENT => return Ok(response),
                StatusCode::UNAUTHORIZED if attempt == 0 => {
                    let renewed = self.authorize(endpoint, response.headers(), authorization).await?;
                    authorization = Some(renewed);
                }
                StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(self.denied(endpoint)),
                StatusCode::NOT_FOUND => return Err(self.not_found()),
                StatusCode::TOO_MANY_REQUESTS => {
                    return Err(RegistryError::Busy { registry: endpoint.name.clone() });
                }
                status => return Err(strange(endpoint, status, response).await),
            }
        }
        Err(self.denied(endpoint))
    }

    fn denied(&self, endpoint: &Endpoint) -> RegistryError {
        RegistryError::Denied {
            registry: endpoint.name.clone(),
            repository: self.reference.repository().to_owned(),
            anonymous: endpoint.credentials.is_anonymous(),
            helper: endpoint.helper.clone(),
        }
    }

    async fn follow(
        &self,
        endpoint: &Endpoint,
        target: &str,
        headers: &HeaderMap,
        authorization: Option<&HeaderValue>,
    ) -> Result<Response<Incoming>, RegistryError> {
        let mut base = endpoint.base.clone();
        let mut target = target.to_owned();
        for _ in 0..=REDIRECTS_MAX {
            let mut headers = headers.clone();
            // Redirect targets are signed links that need no credentials.
            if base == endpoint.base
                && let Some(authorization) = authorization
            {
                headers.insert(header::AUTHORIZATION, authorization.clone());
            }
            let response = self.send(endpoint, &base, &target, Method::GET, headers, Bytes::new()).await?;
            if !response.status().is_redirection() {
                return Ok(response);
            }
            let (next, path) = location(&response, &base).ok_or_else(|| RegistryError::Strange {
                registry: endpoint.name.clone(),
                status: response.status().as_u16(),
                said: ": the redirect has no usable target".into(),
            })?;
            if next.is_clear() && !endpoint.base.is_clear() {
                let to = next.authority.to_string();
                return Err(RegistryError::Insecure { registry: endpoint.name.clone(), to });
            }
            (base, target) = (next, path);
        }
        let said = ": there are too many redirects".into();
        Err(RegistryError::Strange { registry: endpoint.name.clone(), status: 302, said })
    }

    async fn send(
        &self,
        endpoint: &Endpoint,
        base: &Base,
        target: &str,
        method: Method,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, RegistryError> {
        let registry = || endpoint.name.clone();
        let broken =
            |source: Box<dyn Error + Send + Sync>| RegistryError::Broken { registry: registry(), source };
        let uri = Uri::builder()
            .scheme(base.scheme.clone())
            .authority(base.authority.clone())
            .path_and_query(target)
            .build()
            .map_err(|error| broken(error.into()))?;
        let mut request = Request::builder().method(method).uri(uri);
        if let Some(all) = request.headers_mut() {
            *all = headers;
            let agent = HeaderValue::from_static(concat!("shoal/", env!("CARGO_PKG_VERSION")));
            all.insert(header::USER_AGENT, agent);
        }
        let request = request.body(Full::new(body)).map_err(|error| broken(error.into()))?;
        let reach = if self.shared.names(&base.authority) { Reach::Anywhere } else { self.reach };
        // The connector does not resolve a host that is an address.
        let address = base.authority.host().trim_start_matches('[').trim_end_matches(']').parse();
        if reach == Reach::Public && address.is_ok_and(|address| !is_public(address)) {
            return Err(RegistryError::Forbidden { registry: registry() });
        }
        let answer =
            timeout(Duration::from_secs(ANSWER_SECONDS), self.shared.client(reach)?.request(request));
        match answer.await {
            Ok(Err(error)) if reach == Reach::Public && is_forbidden(&error) => {
                Err(RegistryError::Forbidden { registry: registry() })
            }
            // One error for all failures of a connection: the caller learns nothing about hosts and ports.
            Err(_) | Ok(Err(_)) if reach == Reach::Public => {
                let source = "the connection failed".into();
                Err(RegistryError::Unreachable { registry: registry(), source })
            }
            Err(_) => Err(RegistryError::Late { registry: registry(), seconds: ANSWER_SECONDS }),
            Ok(Ok(response)) => Ok(response),
            Ok(Err(error)) if error.is_connect() => {
                Err(RegistryError::Unreachable { registry: registry(), source: error.into() })
            }
            Ok(Err(error)) => Err(broken(error.into())),
        }
    }

    /// Gets the authorization that the registry's challenge requires. `before` is the one it just rejected.
    async fn authorize(
        &self,
        endpoint: &Endpoint,
        headers: &HeaderMap,
        before: Option<HeaderValue>,
    ) -> Result<HeaderValue, RegistryError> {
        let mut kept = endpoint.authorization.lock().await;
        // Another layer renewed it while this one waited.
        if let Some(newer) = kept.as_ref().filter(|newer| Some(*newer) != before.as_ref()) {
            return Ok(newer.clone());
        }
        let challenges = headers.get_all(header::WWW_AUTHENTICATE);
        let challenges: Vec<Challenge> =
            challenges.iter().filter_map(|value| value.to_str().ok()).flat_map(challenges_in).collect();
        let of = |scheme: &str| challenges.iter().find(|challenge| challenge.scheme == scheme);
        let text = match (of("bearer"), of("basic"), &endpoint.credentials) {
            (Some(_), _, Credentials::Bearer { token }) => format!("Bearer {token}"),
            (Some(bearer), ..) => format!("Bearer {}", self.token(endpoint, bearer).await?),
            (None, Some(_), Credentials::Basic { username, password }) => basic(username, password),
            (None, _, _) => return Err(self.denied(endpoint)),
        };
        let mut value = HeaderValue::from_str(&text).map_err(|_| self.denied(endpoint))?;
        value.set_sensitive(true);
        *kept = Some(value.clone());
        Ok(value)
    }

    /// Fetches a token for reading the repository, from the realm of the challenge.
    async fn token(&self, endpoint: &Endpoint, challenge: &Challenge) -> Result<String, RegistryError> {
        let strange = |said: &str| RegistryError::Strange {
            registry: endpoint.name.clone(),
            status: 401,
            said: format!(": {said}"),
        };
        let realm = challenge.parameter("realm").ok_or_else(|| strange("its challenge has no realm"))?;
        let realm: Uri = realm.parse().map_err(|_| strange("the realm of its challenge is not a URL"))?;
        let base = Base::of(&realm).ok_or_else(|| strange("the realm of its challenge is not a URL"))?;
        if base.is_clear() && !endpoint.base.is_clear() {
            let to = base.authority.to_string();
            return Err(RegistryError::Insecure { registry: endpoint.name.clone(), to });
        }
        let scope = format!("repository:{}:pull", self.reference.repository());
        let mut query = format!("scope={}", escaped(&scope));
        if let Some(service) = challenge.parameter("service") {
            query = format!("service={}&{query}", escaped(service));
        }
        let mut headers = HeaderMap::new();
        let (method, target, body) = match &endpoint.credentials {
            Credentials::Identity { token } => {
                let form = "application/x-www-form-urlencoded";
                headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(form));
                let grant = "grant_type=refresh_token&client_id=shoal";
                let body = format!("{grant}&{query}&refresh_token={}", escaped(token));
                (Method::POST, realm.path().to_owned(), Bytes::from(body))
            }
            credentials => {
                if let Credentials::Basic { username, password } = credentials {
                    let value = HeaderValue::from_str(&basic(username, password));
                    let mut value = value.map_err(|_| self.denied(endpoint))?;
                    value.set_sensitive(true);
                    headers.insert(header::AUTHORIZATION, value);
                }
                let before = realm.query().map(|query| format!("{query}&")).unwrap_or_default();
                (Method::GET, format!("{}?{before}{query}", realm.path()), Bytes::new())
            }
        };
        let response = self.send(endpoint, &base, &target, method, headers, body).await?;
        match response.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => return Err(self.denied(endpoint)),
            StatusCode::TOO_MANY_REQUESTS => {
                return Err(RegistryError::Busy { registry: endpoint.name.clone() });
            }
            status => return Err(self::strange(endpoint, status, response).await),
        }
        let body = short_body(&endpoint.name, response, SHORT_MAX, "a token").await?;
        #[derive(Deserialize)]
        struct Answer {
            token: Option<String>,
            access_token: Option<String>,
        }
        let answer: Answer =
            serde_json::from_slice(&body).map_err(|_| strange("its token response cannot be parsed"))?;
        answer.token.or(answer.access_token).ok_or_else(|| strange("its token response has no token"))
    }
}

/// Whether a connection failed because its address is out of reach.
fn is_forbidden(error: &legacy::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error
            .downcast_ref::<io::Error>()
            .is_some_and(|error| error.kind() == io::ErrorKind::PermissionDenied)
        {
            return true;
        }
        cause = error.source();
    }
    false
}

fn basic(username: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{username}:{password}")))
}

/// Target of a redirect.
fn location(response: &Response<Incoming>, base: &Base) -> Option<(Base, String)> {
    let text = response.headers().get(header::LOCATION)?.to_str().ok()?;
    if text.starts_with('/') && !text.starts_with("//") {
        return Some((base.clone(), text.to_owned()));
    }
    let uri: Uri = text.parse().ok()?;
    let scheme = uri.scheme()?;
    if *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS {
        return None;
    }
    let target = uri.path_and_query().map_or("/", |target| target.as_str()).to_owned();
    Some((Base::of(&uri)?, target))
}

/// Offset at which a partial response begins.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let text = headers.get(header::CONTENT_RANGE)?.to_str().ok()?;
    text.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

async fn strange(endpoint: &Endpoint, status: StatusCode, response: Response<Incoming>) -> RegistryError {
    #[derive(Deserialize)]
    struct Said {
        errors: Vec<SaidError>,
    }
    #[derive(Deserialize)]
    struct SaidError {
        #[serde(default)]
        message: String,
    }
    // The message is optional: without it, the status must suffice.
    let body = short_body(&endpoint.name, response, SHORT_MAX, "an error").await.unwrap_or_default();
    let said = serde_json::from_slice::<Said>(&body).ok().and_then(|said| said.errors.into_iter().next());
    let said = said.map(|said| {
        format!(": {}", said.message.escape_debug().to_string().chars().take(200).collect::<String>())
    });
    RegistryError::Strange {
        registry: endpoint.name.clone(),
        status: status.as_u16(),
        said: said.unwrap_or_default(),
    }
}

async fn short_body(
    registry: &str,
    response: Response<Incoming>,
    limit: usize,
    what: &str,
) -> Result<Bytes, RegistryError> {
    let body = Limited::new(response.into_body(), limit).collect();
    match timeout(Duration::from_secs(SILENCE_SECONDS), body).await {
        Err(_) => Err(RegistryError::Late { registry: registry.into(), seconds: SILENCE_SECONDS }),
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            Err(RegistryError::TooLong { registry: registry.into(), what: what.into(), limit: limit as u64 })
        }
        Ok(Err(source)) => Err(RegistryError::Broken { registry: registry.into(), source }),
    }
}

/// An authentication challenge.
#[derive(Debug, PartialEq, Eq)]
struct Challenge {
    /// Lower case.
    scheme: String,
    parameters: Vec<(String, String)>,
}

impl Challenge {
    fn parameter(&self, name: &str) -> Option<&str> {
        self.parameters.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// The challenges of one `WWW-Authenticate` header: `Bearer realm="…",service="…", Basic realm="…"`.
fn challenges_in(text: &str) -> Vec<Challenge> {
    let mut challenges: Vec<Challenge> = Vec::new();
    let mut rest = text.trim_start();
    while !rest.is_empty() {
        let end = rest.find([' ', '=', ',']).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        rest = after.trim_start_matches(' ');
        if let Some(after) = rest.strip_prefix('=') {
            let after = after.trim_start_matches(' ');
            let (value, after) = quoted(after);
            if let Some(challenge) = challenges.last_mut() {
                challenge.parameters.push((word.to_ascii_lowercase(), value));
            }
            rest = after;
        } else if !word.is_empty() {
            challenges.push(Challenge { scheme: word.to_ascii_lowercase(), parameters: Vec::new() });
        }
        rest = rest.trim_start_matches([' ', ',']);
    }
    challenges
}

/// A value with or without quotes, and the rest.
fn quoted(text: &str) -> (String, &str) {
    let Some(inner) = text.strip_prefix('"') else {
        let end = text.find([',', ' ']).unwrap_or(text.len());
        return (text[..end].to_owned(), &text[end..]);
    };
    let mut value = String::new();
    let mut characters = inner.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return (value, &inner[at + 1..]),
            '\\' => value.extend(characters.next().map(|(_, escaped)| escaped)),
            other => value.push(other),
        }
    }
    (value, "")
}

/// Encodes a text for a query.
fn escaped(text: &str) -> String {
    let mut query = String::new();
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' | b':' => {
                query.push(byte.into())
            }
            other => query += &format!("%{other:02X}"),
        }
    }
    query
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn challenges_are_read_as_they_are_written() {
        let challenges = challenges_in(
            r#"Bearer realm="https://a.b/t?x=1",service="s \"q\"" , scope=x,Basic realm="r, s""#,
        );
        assert_eq!(challenges.len(), 2);
        assert_eq!(challenges[0].scheme, "bearer");
        assert_eq!(challenges[0].parameter("realm"), Some("https://a.b/t?x=1"));
        assert_eq!(challenges[0].parameter("service"), Some(r#"s "q""#));
        assert_eq!(challenges[0].parameter("scope"), Some("x"));
        assert_eq!(
            (challenges[1].scheme.as_str(), challenges[1].parameter("realm")),
            ("basic", Some("r, s"))
        );
        assert_eq!(challenges_in("Basic").len(), 1);
        assert_eq!(challenges_in(""), []);
    }

    proptest! {
        #[test]
        fn no_challenge_panics(text in "\\PC{0,60}") {
            let _ = challenges_in(&text);
        }
    }

    #[test]
    fn mirrors_are_urls_of_hosts() {
        for good in ["https://mirror.local", "http://127.0.0.1:5000/", "https://[::1]:5000"] {
            assert!(Mirror::parse(good).is_some(), "{good}");
        }
        for bad in [
            "",
            "mirror.local",
            "ftp://a.b",
            "https://a.b/path",
            "https://a b",
            "https://user@a.b",
            "https://",
        ] {
            assert!(Mirror::parse(bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn queries_are_escaped() {
        assert_eq!(escaped("repository:a/b:pull&x=ü"), "repository:a/b:pull%26x%3D%C3%BC");
    }
}
