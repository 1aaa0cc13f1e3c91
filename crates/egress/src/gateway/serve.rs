//! One connection, from its first bytes to its end.
//!
//! ```text
//! accepted ─▶ what was meant? ─▶ may anything go there? ─▶ first bytes, and dialling beside them if any kind may go
//!            ─▶ what is it? decide ─▶ check name, request by request for HTTP ─▶ relay ─▶ record
//! ```

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::LazyConfigAcceptor;

use super::{Cut, Decided, Gateway, Kind, To, Usage, sniff};
use crate::control::{Event, What};
use crate::dial::{DialError, Dialled};
use crate::dns::{Meaning, QUESTION_BYTES_MAX, Transport, Zone};
use crate::http::{HEAD_BYTES_MAX, Page, proxy, read_head};
use crate::policy::{Destination, Name, Policy, Protocol, Query, Verdict, destination, opener};
use crate::relay::{Meter, Metered, Prefixed, Way, one_way, prepare, relay, reset_on_close, write_all};
use crate::tls::{Hello, UNRECOGNIZED_NAME};

/// How long a client may take until its first bytes show its protocol.
const FIRST_BYTES_DEADLINE: Duration = Duration::from_secs(15);
/// How long a refused client may take until its first bytes show whether it understands an error page.
const REFUSED_DEADLINE: Duration = Duration::from_millis(250);
/// How long sending a page may take.
const PAGE_DEADLINE: Duration = Duration::from_secs(10);
/// How long a DNS connection may be idle.
const DNS_IDLE: Duration = Duration::from_secs(30);
/// How much is read at once while the first bytes are inspected.
const FIRST_READ_BYTES: usize = 4096;

/// Serves a connection until it ends or is cut.
pub(super) async fn serve(gateway: &Arc<Gateway>, client: TcpStream, id: u64, cut: &Arc<Cut>) {
    let Ok(local) = client.local_addr() else { return };
    let port = local.port();
    let to = match gateway.shared.pool.meaning(local.ip()) {
        Meaning::Resolver if port == 53 => return dns(gateway, client, cut).await,
        Meaning::Refused => return refused_name(gateway, client, port, cut).await,
        Meaning::Name(place) => gateway.name_at(place).map(To::Name),
        Meaning::Outside => Some(To::Address(local.ip().to_canonical())),
        Meaning::Resolver | Meaning::Own | Meaning::Nothing => None,
    };
    let Some(to) = to else {
        reset_on_close(&client);
        return;
    };
    let mut places = Vec::new();
    for usage in [Some(&gateway.usage), gateway.owner.as_ref()].into_iter().flatten() {
        match Place::enter(usage) {
            Ok(place) => places.push(place),
            Err(why) => {
                reset_on_close(&client);
                let mut event = about(gateway, What::Refused, &to, port, None);
                event.why = Some(why.to_owned());
                return refused(gateway, event);
            }
        }
    }
    let shares = places.iter().map(|place| place.0.share.clone()).collect();
    let mut visit = Visit { gateway, id, to, port, meter: Arc::new(Meter::new(shares)), cut: cut.clone() };
    visit.run(client).await;
}

/// A place among the open connections, released at the end.
struct Place<'a>(&'a Usage);

impl<'a> Place<'a> {
    fn enter(usage: &'a Usage) -> Result<Self, &'static str> {
        usage.enter().map(|()| Self(usage))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

pub(super) struct Visit<'a> {
    pub(super) gateway: &'a Arc<Gateway>,
    id: u64,
    pub(super) to: To,
    pub(super) port: u16,
    pub(super) meter: Arc<Meter>,
    cut: Arc<Cut>,
}

/// The result of reading the first bytes.
enum First {
    /// The client sent first.
    Client(Kind),
    /// The server sent first.
    Server,
    /// The client sent nothing in time, or closed.
    Silence,
}

impl Visit<'_> {
    async fn run(&mut self, client: TcpStream) {
        if prepare(&client).is_err() {
            return;
        }
        let cut = self.cut.clone();
        tokio::select! {
            // First, so that a connection that is cut while it is checked is recorded as cut.
            biased;
            () = self.carry(&client) => {}
            () = cut.wait() => reset_on_close(&client),
        }
    }

    fn decide(&self, policy: &Policy, protocol: Protocol) -> Verdict {
        policy.decide(Query { to: self.to.destination(), port: self.port, protocol })
    }

    async fn carry(&mut self, client: &TcpStream) {
        let policy = self.gateway.policy();
        let any = self.decide(&policy, Protocol::Tcp);
        let some =
            [Protocol::Tls, Protocol::Http, Protocol::Ssh].map(|protocol| self.decide(&policy, protocol));
        if !any.allows() && !some.iter().any(Verdict::allows) {
            let mut bytes = Vec::new();
            let kind = self.wait_briefly(client, &mut bytes).await;
            let verdict = self.decide(&policy, kind.as_ref().map_or(Protocol::Tcp, Kind::protocol));
            return self.refuse(client, bytes, kind, &policy, &verdict, None).await;
        }
        let mut bytes = Vec::new();
        let (first, dialled) = if any.allows() {
            match self.dial_and_listen(client, &mut bytes, &policy, &any).await {
                Ok(both) => both,
                Err(error) => return self.not_dialled(client, bytes, &policy, &any, error).await,
            }
        } else {
            (self.listen(client, &mut bytes, FIRST_BYTES_DEADLINE).await, None)
        };
        let kind = match &first {
            First::Client(kind) => Some(kind.clone()),
            First::Server | First::Silence => None,
        };
        let protocol = kind.as_ref().map_or(Protocol::Tcp, Kind::protocol);
        let verdict = self.decide(&policy, protocol);
        if !verdict.allows() {
            return self.refuse(client, bytes, kind, &policy, &verdict, None).await;
        }
        if let Err(why) = self.check(&policy, &verdict, kind.as_ref()) {
            return self.refuse(client, bytes, kind, &policy, &verdict, Some(why)).await;
        }
        let dialled = match dialled {
            Some(dialled) => Ok(dialled),
            None => {
                self.gateway.shared.dialer.dial(self.to.destination(), self.port, &policy, &verdict).await
            }
        };
        let dialled = match dialled.and_then(|dialled| self.check_address(dialled, &policy, &verdict)) {
            Ok(dialled) => dialled,
            Err(error) => return self.not_dialled(client, bytes, &policy, &verdict, error).await,
        };
        if !self.register(&policy, protocol, dialled.address) {
            reset_on_close(client);
            reset_on_close(&dialled.stream);
            return;
        }
        self.pass(client, dialled, bytes, first, &policy, &verdict, protocol).await;
    }

    /// A connection may have been dialled under another rule of the same policy.
    fn check_address(
        &self,
        dialled: Dialled,
        policy: &Policy,
        verdict: &Verdict,
    ) -> Result<Dialled, DialError> {
        if let Some(address) = dialled.address {
            let table = self.gateway.shared.dialer.addresses();
            policy.may_dial(address.ip(), self.port, verdict, &table)?;
        }
        prepare(&dialled.stream).map_err(|source| DialError::Connect {
            address: dialled.address.unwrap_or(SocketAddr::from(([0, 0, 0, 0], self.port))),
            source,
        })?;
        Ok(dialled)
    }

    /// Records the decision; false if the policy has changed in the meantime and refuses the connection.
    fn register(&self, policy: &Arc<Policy>, protocol: Protocol, address: Option<SocketAddr>) -> bool {
        let decided = Decided { to: self.to.clone(), port: self.port, protocol, address };
        {
            let mut connections = self.gateway.connections.lock().expect("nobody panics while holding it");
            if let Some(connection) = connections.get_mut(&self.id) {
                connection.decided = Some(decided.clone());
            }
        }
        let now = self.gateway.policy();
        Arc::ptr_eq(policy, &now) || self.gateway.still_allows(&now, &decided)
    }

    /// Reads until the first bytes show the protocol.
    async fn listen(&self, client: &TcpStream, bytes: &mut Vec<u8>, deadline: Duration) -> First {
        match timeout(deadline, first_bytes(client, bytes)).await {
            Ok(Ok(Some(kind))) => First::Client(kind),
            // If the client closes or the bytes stay ambiguous, they count as an unknown protocol.
            Ok(Ok(None)) | Err(_) if !bytes.is_empty() => First::Client(Kind::Other),
            Ok(Ok(None) | Err(_)) | Err(_) => First::Silence,
        }
    }

    async fn wait_briefly(&self, client: &TcpStream, bytes: &mut Vec<u8>) -> Option<Kind> {
        match self.listen(client, bytes, REFUSED_DEADLINE).await {
            First::Client(kind) => Some(kind),
            First::Server | First::Silence => None,
        }
    }

    /// Dials while the client's first bytes arrive, and notices a server that sends first.
    async fn dial_and_listen(
        &self,
        client: &TcpStream,
        bytes: &mut Vec<u8>,
        policy: &Policy,
        verdict: &Verdict,
    ) -> Result<(First, Option<Dialled>), DialError> {
        let dialling = self.gateway.shared.dialer.dial(self.to.destination(), self.port, policy, verdict);
        let listening = self.listen(client, bytes, FIRST_BYTES_DEADLINE);
        tokio::pin!(dialling, listening);
        let dialled = tokio::select! {
            biased;
            first = &mut listening => return Ok((first, Some(dialling.await?))),
            dialled = &mut dialling => dialled?,
        };
        let first = tokio::select! {
            biased;
            first = &mut listening => first,
            _ = dialled.stream.readable() => First::Server,
        };
        Ok((first, Some(dialled)))
    }

    /// Whether the first bytes are for the destination of the connection.
    fn check(&self, policy: &Policy, verdict: &Verdict, kind: Option<&Kind>) -> Result<(), String> {
        // The operator vouches for what travels there.
        if verdict.rule.as_ref().is_some_and(|rule| rule.protocol == Some(Protocol::Tcp)) {
            return Ok(());
        }
        match kind {
            Some(Kind::BadTls(why)) => Err((*why).to_owned()),
            Some(Kind::Tls(hello)) => check_hello(&self.to, hello, policy, self.port),
            _ => Ok(()),
        }
    }

    #[expect(
        clippy::too_many_arguments,
        reason = "one flat call at the end of the path, with everything that was found out"
    )]
    async fn pass(
        &self,
        client: &TcpStream,
        dialled: Dialled,
        bytes: Vec<u8>,
        first: First,
        policy: &Policy,
        verdict: &Verdict,
        protocol: Protocol,
    ) {
        let gateway = self.gateway;
        gateway.counts.connections.fetch_add(1, Ordering::Relaxed);
        let address = dialled.address.map(|address| address.ip());
        let what = if verdict.audited { What::Audited } else { What::Opened };
        let mut event = about(gateway, what, &self.to, self.port, Some(protocol));
        event.address = address.or(event.address);
        event.rule = verdict.rule_text(policy);
        if verdict.audited {
            event.opens = Some(opener(Query { to: self.to.destination(), port: self.port, protocol }));
        }
        gateway.record(event.clone());
        let vouched = verdict.rule.as_ref().is_some_and(|rule| rule.protocol == Some(Protocol::Tcp));
        let ended = tokio::select! {
            ended = async {
                match first {
                    First::Client(Kind::Http) if !vouched => self.http(client, &dialled.stream, bytes).await,
                    First::Client(Kind::Tls(_)) if !vouched && self.is_terminated() => {
                        self.terminate(client, &dialled.stream, bytes).await
                    }
                    First::Server if !vouched => self.server_first(client, &dialled.stream, bytes, policy).await,
                    First::Client(_) | First::Server | First::Silence => self.raw(client, &dialled.stream, &bytes).await,
                }
            } => ended,
            () = self.cut.wait() => {
                reset_on_close(client);
                reset_on_close(&dialled.stream);
                event.what = What::Cut;
                Err("the policy or the sandbox has changed".to_owned())
            }
        };
        match ended {
            Ok(()) => event.what = What::Closed,
            Err(why) => {
                if event.what != What::Cut {
                    event.what = What::Closed;
                    reset_on_close(client);
                    reset_on_close(&dialled.stream);
                }
                event.why = Some(why);
            }
        }
        let end = gateway.event(event.what);
        (event.sent, event.received, event.at_ms) = (self.meter.sent(), self.meter.received(), end.at_ms);
        gateway.record(event);
    }

    async fn raw(&self, client: &TcpStream, server: &TcpStream, bytes: &[u8]) -> Result<(), String> {
        self.send_first(server, bytes).await.map_err(words)?;
        relay(client, server, &self.meter).await.map_err(words)
    }

    async fn send_first(&self, server: &TcpStream, bytes: &[u8]) -> io::Result<()> {
        if !bytes.is_empty() {
            write_all(server, bytes).await?;
            tokio::time::sleep(self.meter.count(Way::Out, bytes.len() as u64)?).await;
        }
        Ok(())
    }

    /// The server's bytes pass at once; the client's first bytes are checked before any of them does.
    async fn server_first(
        &self,
        client: &TcpStream,
        server: &TcpStream,
        mut bytes: Vec<u8>,
        policy: &Policy,
    ) -> Result<(), String> {
        let outward = async {
            let kind = first_bytes(client, &mut bytes).await.map_err(words)?;
            let checked = match &kind {
                Some(Kind::Tls(hello)) => check_hello(&self.to, hello, policy, self.port),
                Some(Kind::BadTls(why)) => Err((*why).to_owned()),
                Some(Kind::Http) => Err("HTTP after the server has spoken".to_owned()),
                Some(Kind::Ssh | Kind::Other) | None => Ok(()),
            };
            let protocol = kind.as_ref().map_or(Protocol::Tcp, Kind::protocol);
            checked?;
            if !self.decide(policy, protocol).allows() {
                return Err(format!("the policy does not allow {} here", protocol.word()));
            }
            self.send_first(server, &bytes).await.map_err(words)?;
            one_way(client, server, &self.meter, Way::Out).await.map_err(words)
        };
        let inward = async { one_way(server, client, &self.meter, Way::In).await.map_err(words) };
        tokio::try_join!(outward, inward).map(|_| ())
    }

    async fn http(&self, client: &TcpStream, server: &TcpStream, bytes: Vec<u8>) -> Result<(), String> {
        // hyper needs its own streams; these are copies of the descriptors, and the originals decide how the
        // connections end.
        let (client, server) = (copy(client).map_err(words)?, copy(server).map_err(words)?);
        let name = match &self.to {
            To::Name(name) => Some(name.clone()),
            To::Address(_) => None,
        };
        let refused = crate::http::Refused::default();
        let server = Metered::new(server, self.meter.clone());
        let proxied =
            proxy(Prefixed::new(bytes, client), server, name, self.port, self.guard(), refused.clone()).await;
        let bad = refused.lock().expect("nobody panics while holding it").take();
        match (bad, proxied) {
            (Some(bad), _) => {
                let mut event = about(self.gateway, What::Refused, &self.to, self.port, Some(Protocol::Http));
                event.why = Some(bad.to_string());
                self::refused(self.gateway, event);
                Ok(())
            }
            (None, Ok(())) => Ok(()),
            (None, Err(error)) => Err(with_cause(&error)),
        }
    }

    /// The connection was allowed, but could not be opened.
    async fn not_dialled(
        &self,
        client: &TcpStream,
        mut bytes: Vec<u8>,
        policy: &Policy,
        verdict: &Verdict,
        error: DialError,
    ) {
        let kind = match sniff(&bytes) {
            Some(kind) => Some(kind),
            None => self.wait_briefly(client, &mut bytes).await,
        };
        if let DialError::Denied(denied) = &error {
            return self.refuse(client, bytes, kind, policy, verdict, Some(denied.to_string())).await;
        }
        let protocol = kind.as_ref().map(Kind::protocol);
        let mut event = about(self.gateway, What::Unreachable, &self.to, self.port, protocol);
        event.rule = verdict.rule_text(policy);
        event.why = Some(error.to_string());
        self.gateway.record(event);
        if kind == Some(Kind::Http) {
            plain_page(client, &Page::unreachable(&error.to_string())).await;
        } else {
            reset_on_close(client);
        }
    }

    /// Sends an explanation to clients that understand HTTP, and resets the others.
    async fn refuse(
        &self,
        client: &TcpStream,
        bytes: Vec<u8>,
        kind: Option<Kind>,
        policy: &Policy,
        verdict: &Verdict,
        why: Option<String>,
    ) {
        let protocol = kind.as_ref().map_or(Protocol::Tcp, Kind::protocol);
        let query = Query { to: self.to.destination(), port: self.port, protocol };
        let mut event = about(self.gateway, What::Refused, &self.to, self.port, Some(protocol));
        event.rule = verdict.rule_text(policy);
        event.opens = why.is_none().then(|| opener(query));
        event.why = why.clone();
        let sandbox = self.gateway.sandbox.to_string();
        let page = match &why {
            Some(why) => Page::refused(&format!("{}: {why}", destination(query)), &sandbox, None),
            None => {
                let what = format!("{} is not in the policy ({})", destination(query), event.rule);
                Page::refused(&what, &sandbox, event.opens.as_deref())
            }
        };
        refused(self.gateway, event);
        match (kind, &self.to) {
            (Some(Kind::Http), _) => plain_page(client, &page).await,
            (Some(Kind::Tls(hello)), To::Name(name)) if hello.server_name.as_ref() == Some(name) => {
                tls_page(self.gateway, client, bytes, name, &page).await;
            }
            (Some(Kind::Tls(_)), _) => {
                // The client shows this alert as "unrecognized name"; if the client is gone, the error does not matter.
                let _ = write_all(client, &UNRECOGNIZED_NAME).await;
                finish(client).await;
            }
            (Some(Kind::BadTls(_) | Kind::Ssh | Kind::Other) | None, _) => reset_on_close(client),
        }
    }
}

/// The name in a hello must be the name of the connection. For a literal address it may be any name that no rule
/// denies.
fn check_hello(to: &To, hello: &Hello, policy: &Policy, port: u16) -> Result<(), String> {
    match (to, &hello.server_name) {
        (To::Name(name), Some(asked)) if asked == name => Ok(()),
        (To::Name(name), Some(asked)) => {
            Err(format!("the TLS client asks for `{asked}`, but the connection was opened to `{name}`"))
        }
        (To::Name(_), None) => Err("the TLS client does not say whom it asks for".to_owned()),
        (To::Address(_), Some(asked)) => {
            let verdict =
                policy.decide(Query { to: Destination::Name(asked), port, protocol: Protocol::Tls });
            if !verdict.allows() && verdict.is_by_written_rule() {
                return Err(format!("a rule refuses `{asked}`"));
            }
            Ok(())
        }
        (To::Address(_), None) => Ok(()),
    }
}

pub(super) fn words(error: io::Error) -> String {
    error.to_string()
}

pub(super) fn with_cause(error: &dyn std::error::Error) -> String {
    let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
    format!("{error}{cause}")
}

/// A second stream for the same connection.
pub(super) fn copy(stream: &TcpStream) -> io::Result<TcpStream> {
    use std::os::fd::AsFd;
    TcpStream::from_std(std::net::TcpStream::from(stream.as_fd().try_clone_to_owned()?))
}

/// Reads until the bytes show the protocol; `None` if the client closes before that.
async fn first_bytes(client: &TcpStream, bytes: &mut Vec<u8>) -> io::Result<Option<Kind>> {
    loop {
        if let Some(kind) = sniff(bytes) {
            return Ok(Some(kind));
        }
        if read_some(client, bytes).await? == 0 {
            return Ok(None);
        }
    }
}

async fn read_some(client: &TcpStream, bytes: &mut Vec<u8>) -> io::Result<usize> {
    loop {
        client.readable().await?;
        let before = bytes.len();
        bytes.resize(before + FIRST_READ_BYTES, 0);
        let read = client.try_read(&mut bytes[before..]);
        bytes.truncate(before + read.as_ref().copied().unwrap_or(0));
        match read {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
            other => return other,
        }
    }
}

pub(super) fn about(gateway: &Gateway, what: What, to: &To, port: u16, protocol: Option<Protocol>) -> Event {
    let mut event = gateway.event(what);
    match to {
        To::Name(name) => event.name = Some(name.clone()),
        To::Address(address) => event.address = Some(*address),
    }
    (event.port, event.protocol) = (Some(port), protocol);
    event
}

/// Counts and records a refusal.
pub(super) fn refused(gateway: &Gateway, event: Event) {
    gateway.counts.refused.fetch_add(1, Ordering::Relaxed);
    gateway.record(event);
}

/// A connection to the shared address of refused names: the name is in its first bytes.
async fn refused_name(gateway: &Gateway, client: TcpStream, port: u16, cut: &Cut) {
    let serving = async {
        let mut bytes = Vec::new();
        let kind = match timeout(FIRST_BYTES_DEADLINE, first_bytes(&client, &mut bytes)).await {
            Ok(Ok(Some(kind))) => kind,
            _ => return reset_on_close(&client),
        };
        let name = match &kind {
            Kind::Tls(hello) => hello.server_name.clone(),
            Kind::Http => timeout(PAGE_DEADLINE, whole_head(&client, &mut bytes)).await.unwrap_or_default(),
            Kind::BadTls(_) | Kind::Ssh | Kind::Other => None,
        };
        let Some(name) = name else { return reset_on_close(&client) };
        let policy = gateway.policy();
        let query = Query { to: Destination::Name(&name), port, protocol: kind.protocol() };
        let verdict = policy.decide(query);
        let sandbox = gateway.sandbox.to_string();
        // A guest may cache the address longer than the refusal holds: the name may have been allowed since it was
        // looked up.
        let page = if verdict.allows() {
            Page::refused(
                &format!("{name} was looked up before the policy allowed it: try again"),
                &sandbox,
                None,
            )
        } else {
            let what = format!("{name} is not in the policy ({})", verdict.rule_text(&policy));
            Page::refused(&what, &sandbox, Some(&opener(query)))
        };
        let mut event = about(gateway, What::Refused, &To::Name(name.clone()), port, Some(kind.protocol()));
        event.rule = verdict.rule_text(&policy);
        event.opens = Some(opener(query));
        refused(gateway, event);
        match kind {
            Kind::Tls(_) => tls_page(gateway, &client, bytes, &name, &page).await,
            _ => plain_page(&client, &page).await,
        }
    };
    tokio::select! {
        () = serving => {}
        () = cut.wait() => reset_on_close(&client),
    }
}

/// The host of a plain request.
async fn whole_head(client: &TcpStream, bytes: &mut Vec<u8>) -> Option<Name> {
    loop {
        match read_head(bytes) {
            Ok(Some(head)) => return head.host,
            Ok(None) if bytes.len() < HEAD_BYTES_MAX => {}
            Ok(None) | Err(_) => return None,
        }
        if !matches!(read_some(client, bytes).await, Ok(1..)) {
            return None;
        }
    }
}

async fn plain_page(client: &TcpStream, page: &Page) {
    if let Ok(Ok(())) = timeout(PAGE_DEADLINE, write_all(client, &page.bytes())).await {
        finish(client).await;
    }
}

/// Ends a connection so that all sent bytes arrive: closing it with unread bytes would reset it.
async fn finish(client: &TcpStream) {
    // If the client is gone, the error does not matter.
    let _ = rustix::net::shutdown(client, rustix::net::Shutdown::Write);
    let rest = async {
        let mut bytes = Vec::new();
        while matches!(read_some(client, &mut bytes).await, Ok(1..)) {
            bytes.clear();
        }
    };
    // A client that keeps sending for longer does not read the page.
    let _ = timeout(PAGE_DEADLINE, rest).await;
}

/// Sends the page over TLS, with a leaf for the name that the client asks for.
async fn tls_page(gateway: &Gateway, client: &TcpStream, bytes: Vec<u8>, name: &Name, page: &Page) {
    let serving = async {
        let config = gateway.shared.ca.config(name).map_err(io::Error::other)?;
        let stream = Prefixed::new(bytes, copy(client)?);
        let start = LazyConfigAcceptor::new(rustls::server::Acceptor::default(), stream).await?;
        let mut stream = start.into_stream(config).await?;
        // The request is read, because some clients read only after they have written it.
        let mut head = Vec::new();
        let mut buffer = [0; FIRST_READ_BYTES];
        while matches!(read_head(&head), Ok(None)) && head.len() < HEAD_BYTES_MAX {
            let count = stream.read(&mut buffer).await?;
            if count == 0 {
                break;
            }
            head.extend_from_slice(&buffer[..count]);
        }
        stream.write_all(&page.bytes()).await?;
        stream.shutdown().await
    };
    match timeout(PAGE_DEADLINE, serving).await {
        Ok(Ok(())) => finish(client).await,
        // The client does not trust us, or has disconnected: it has seen a certificate error.
        Ok(Err(error)) => {
            tracing::debug!(sandbox = %gateway.sandbox, %error, "cannot show a refusal over TLS")
        }
        Err(_) => reset_on_close(client),
    }
}

/// DNS over TCP: a length and a question, any number of times, one after the other.
async fn dns(gateway: &Gateway, mut client: TcpStream, cut: &Cut) {
    let serving = async {
        loop {
            let mut length = [0; 2];
            timeout(DNS_IDLE, client.read_exact(&mut length)).await.map_err(io::Error::from)??;
            let length = usize::from(u16::from_be_bytes(length));
            if length > QUESTION_BYTES_MAX {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let mut question = vec![0; length];
            timeout(DNS_IDLE, client.read_exact(&mut question)).await.map_err(io::Error::from)??;
            let Some(answer) = gateway.answer(&question, Transport::Tcp).await else {
                return Err(io::ErrorKind::InvalidData.into());
            };
            let length = u16::try_from(answer.len()).map_err(|_| io::ErrorKind::InvalidData)?;
            client.write_all(&[&length.to_be_bytes()[..], &answer].concat()).await?;
        }
    };
    let ended: Option<io::Result<()>> = tokio::select! {
        ended = serving => Some(ended),
        () = cut.wait() => None,
    };
    match ended {
        Some(Ok(())) => {}
        Some(Err(error)) => tracing::trace!(%error, "a DNS connection ended"),
        None => reset_on_close(&client),
    }
}
