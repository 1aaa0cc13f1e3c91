//! Requests that are read out of TLS: what the host gets, what the sandbox sees, over HTTP/1.1 and HTTP/2.

use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use egress::control::{Egress, Record, Used};
use egress::credential::{Credential, CredentialRuleSpec, How, Value};
use egress::policy::Mode;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::client::TlsStream;

use crate::harness::{Guest, Process, World, rules, start, store, until};

const HOST: &str = "api.shoal-example.com";
const SECRET: &str = "tk-4a7f09c2e51b8d36";
const PLACEHOLDER: &str = "shoal0123456789abcdef0123456789abcdef";

/// A host that speaks what its client prefers, answers with what came, and adds a trailer.
struct Host {
    port: u16,
    pem: String,
    seen: Arc<Mutex<Vec<(http::Version, HeaderMap, String)>>>,
}

impl Host {
    async fn new(protocols: &'static [&'static [u8]]) -> Self {
        let made = rcgen::generate_simple_self_signed([HOST.into()]).expect("a certificate");
        let key = PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .expect("a configuration");
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a listener");
        let port = listener.local_addr().expect("an address").port();
        let host = Self { port, pem: made.cert.pem(), seen: Arc::default() };
        let seen = host.seen.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (acceptor, seen) = (acceptor.clone(), seen.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                    let service = hyper::service::service_fn(move |request| {
                        let seen = seen.clone();
                        async move { Ok::<_, Infallible>(echo(request, &seen).await) }
                    });
                    let io = TokioIo::new(stream);
                    // The client may leave at any time.
                    let _ = match http2 {
                        true => {
                            let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                            server.serve_connection(io, service).await
                        }
                        false => {
                            hyper::server::conn::http1::Builder::new().serve_connection(io, service).await
                        }
                    };
                });
            }
        });
        host
    }
}

type EchoBody = http_body_util::combinators::BoxBody<Bytes, Infallible>;

async fn echo(
    request: Request<Incoming>,
    seen: &Mutex<Vec<(http::Version, HeaderMap, String)>>,
) -> Response<EchoBody> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let text =
        format!("{} {:?} {}", parts.uri, parts.headers.get("authorization"), String::from_utf8_lossy(&body));
    seen.lock().expect("a lock").push((parts.version, parts.headers.clone(), text));
    let token = parts.headers.get("authorization").map(|value| value.as_bytes().to_vec()).unwrap_or_default();
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let frames: Vec<Result<Frame<Bytes>, Infallible>> =
        vec![Ok(Frame::data(token.into())), Ok(Frame::data(body)), Ok(Frame::trailers(trailers))];
    let mut response = Response::new(StreamBody::new(futures_util::stream::iter(frames)).boxed());
    response.headers_mut().insert("trailer", HeaderValue::from_static("grpc-status"));
    response
}

struct Room {
    host: Host,
    process: Process,
    egress: Arc<Egress>,
    kept: Arc<Mutex<Vec<Record>>>,
    guest: Guest,
}

fn credential(port: u16, how: How, value: &str) -> Credential {
    let rule = CredentialRuleSpec {
        domain: HOST.into(),
        ports: vec![port.to_string()],
        methods: vec![],
        paths: vec![],
        how,
    };
    Credential {
        id: 7,
        name: "api".into(),
        value: Some(Value::new(value.into())),
        placeholder: PLACEHOLDER.into(),
        rules: vec![rule.check().expect("a rule")],
    }
}

async fn room(protocols: &'static [&'static [u8]], how: How) -> Room {
    let host = Host::new(protocols).await;
    let mut world = World::new().await;
    world.roots = vec![host.pem.clone()];
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[host.port]).await;
    let mut attach = guest.attach(rules(Mode::None, &[&format!("allow {HOST}")]));
    attach.credentials = vec![credential(host.port, how, SECRET)];
    egress.attach(attach, &guest.descriptors()).await.expect("attached");
    Room { host, process, egress, kept, guest }
}

impl Room {
    async fn connect(&self, protocols: &[&[u8]]) -> TlsStream<TcpStream> {
        let mut roots = rustls::RootCertStore::empty();
        let ours = CertificateDer::from_pem_slice(self.process.ca_pem.as_bytes()).expect("pem");
        roots.add(ours).expect("a root");
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
        let stream = self.guest.connect(HOST, self.host.port).await;
        let name = ServerName::try_from(HOST).expect("a name");
        let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
        connector.connect(name, stream).await.expect("our own certificate")
    }

    fn request(&self, body: &'static str) -> Request<Full<Bytes>> {
        Request::post(format!("https://{HOST}:{}/v1/x", self.host.port))
            .header("host", format!("{HOST}:{}", self.host.port))
            .header("te", "trailers")
            .body(Full::new(Bytes::from_static(body.as_bytes())))
            .expect("a request")
    }

    fn uses(&self) -> Vec<Used> {
        let kept = self.kept.lock().expect("a lock");
        let uses = kept.iter().filter_map(|record| match record {
            Record::Used(used) => Some(Used::clone(used)),
            _ => None,
        });
        uses.collect()
    }
}

#[tokio::test]
async fn http2_stays_http2_with_trailers_and_a_rotated_value_acts_on_the_open_connection() {
    let room = room(&[b"h2", b"http/1.1"], How::Bearer).await;
    let stream = room.connect(&[b"h2", b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.expect("h2");
    tokio::spawn(connection);
    let answer = sender.send_request(room.request("first")).await.expect("an answer");
    assert_eq!(answer.status(), 200);
    let answer = answer.into_body().collect().await.expect("a body");
    assert_eq!(answer.trailers().and_then(|trailers| trailers.get("grpc-status")).expect("a trailer"), "0");
    let text = String::from_utf8(answer.to_bytes().to_vec()).expect("text");
    assert_eq!(text, format!("Bearer {}first", "*".repeat(SECRET.len())), "the host repeats the value");
    {
        let seen = room.host.seen.lock().expect("a lock");
        assert_eq!(seen[0].0, http::Version::HTTP_2);
        assert!(seen[0].2.contains(SECRET));
    }
    let next = credential(room.host.port, How::Bearer, "another-value");
    room.egress.set_credentials(room.guest.id, vec![next]).await.expect("set");
    sender
        .send_request(room.request("second"))
        .await
        .expect("an answer")
        .into_body()
        .collect()
        .await
        .expect("a body");
    assert!(room.host.seen.lock().expect("a lock")[1].2.contains("another-value"));
    room.egress.set_credentials(room.guest.id, vec![]).await.expect("removed");
    sender
        .send_request(room.request("third"))
        .await
        .expect("an answer")
        .into_body()
        .collect()
        .await
        .expect("a body");
    assert!(room.host.seen.lock().expect("a lock")[2].2.contains("None"), "no request carries it any more");
    until("both uses are recorded", || room.uses().len() == 2).await;
    let first = &room.uses()[0];
    assert_eq!((first.method.as_str(), first.path.as_str(), first.status), ("POST", "/v1/x", 200));
    assert_eq!((first.sent, first.secret_name.as_str()), (5, "api"));
}

#[tokio::test]
async fn a_placeholder_in_a_body_becomes_the_value_or_stops_the_request() {
    let everywhere = How::Placeholder { header: true, query: true, body: true };
    let room = room(&[b"http/1.1"], everywhere).await;
    let stream = room.connect(&[b"h2", b"http/1.1"]).await;
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(&b"http/1.1"[..]), "the host chooses");
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await.expect("h1");
    tokio::spawn(connection);
    let body = "{\"key\":\"shoal0123456789abcdef0123456789abcdef\"}";
    let answer = sender.send_request(room.request(body)).await.expect("an answer");
    let answer = answer.into_body().collect().await.expect("a body").to_bytes();
    assert!(!String::from_utf8_lossy(&answer).contains(SECRET), "{answer:?}");
    assert!(room.host.seen.lock().expect("a lock")[0].2.contains(&format!("{{\"key\":\"{SECRET}\"}}")));
    // The same body under a rule that does not cover bodies.
    let bearer = credential(room.host.port, How::Bearer, SECRET);
    room.egress.set_credentials(room.guest.id, vec![bearer]).await.expect("set");
    let refused = sender.send_request(room.request(body)).await.expect("an answer");
    assert_eq!(refused.status(), 403);
    let why = refused.into_body().collect().await.expect("a body").to_bytes();
    assert!(String::from_utf8_lossy(&why).contains("would leave unreplaced"), "{why:?}");
    assert_eq!(room.host.seen.lock().expect("a lock").len(), 1, "the request did not arrive whole");
}

#[tokio::test]
async fn a_host_that_cannot_be_verified_gets_nothing() {
    let host = Host::new(&[b"http/1.1"]).await;
    // Egress does not know the root of this host.
    let world = World::new().await;
    let (process, egress, records) = start(&world).await;
    let egress = Arc::new(egress);
    let kept = store(&egress, records);
    let guest = Guest::new(1, process.pool, &[host.port]).await;
    let mut attach = guest.attach(rules(Mode::None, &[&format!("allow {HOST}")]));
    attach.credentials = vec![credential(host.port, How::Bearer, SECRET)];
    egress.attach(attach, &guest.descriptors()).await.expect("attached");
    let room = Room { host, process, egress, kept, guest };
    let stream = room.connect(&[b"http/1.1"]).await;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake::<_, Full<Bytes>>(TokioIo::new(stream)).await.expect("h1");
    tokio::spawn(connection);
    let refused = sender.send_request(room.request("")).await.expect("an answer");
    assert_eq!(refused.status(), 502);
    assert!(room.host.seen.lock().expect("a lock").is_empty());
}
