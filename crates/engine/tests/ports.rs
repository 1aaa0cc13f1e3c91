//! Ports of sandboxes on the fake host, whose sockets are on the machine's own loopback.

use std::time::Duration;

use crate::common::*;
use engine::*;
use runtime::ListeningPort;
use runtime::fake::{FakeFailure, FakeStep};
use shoal_engine as engine;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// A server that answers each connection with what it was sent.
async fn echo() -> Port {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let port = listener.local_addr().expect("it has one").port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let (mut from, mut to) = stream.split();
                let _ = tokio::io::copy(&mut from, &mut to).await;
            });
        }
    });
    Port::new(port).expect("a port")
}

/// A port that nothing listens on.
async fn closed() -> Port {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    Port::new(listener.local_addr().expect("it has one").port()).expect("a port")
}

fn other() -> Owner {
    Owner::parse("other").expect("an owner")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_is_a_use_while_it_is_open() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let port = echo().await;
    let mut stream = world.engine.connect_port(&owner(), sandbox.id, port).await.expect("it is connected");
    stream.write_all(b"hello").await.expect("it is taken");
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).await.expect("it answers");
    assert_eq!(&answer, b"hello");
    let uses = async || world.engine.explain(&owner(), sandbox.id).await.expect("an explanation").uses;
    assert_eq!((uses().await, world.engine.port_connections(&owner(), sandbox.id).expect("told")), (1, 1));
    drop(stream);
    assert_eq!((uses().await, world.engine.port_connections(&owner(), sandbox.id).expect("told")), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_are_made_ahead_and_one_request_serves_several_connections() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let port = echo().await;
    for _ in 0..4 {
        drop(world.engine.connect_port(&owner(), sandbox.id, port).await.expect("it is connected"));
    }
    assert_eq!(world.host.network_calls().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_port_another_owner_and_a_failed_backend_are_told_apart() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let port = closed().await;
    let connect = async |owner: &Owner, id, port| {
        world.engine.connect_port(owner, id, port).await.err().expect("it is refused")
    };
    let error = connect(&owner(), sandbox.id, port).await;
    assert!(matches!(error, EngineError::PortClosed { port: told, .. } if told == port.number()), "{error}");
    let error = connect(&other(), sandbox.id, port).await;
    assert!(matches!(error, EngineError::SandboxNotFound { .. }), "{error}");
    // In a sandbox for which no socket is kept.
    let fresh = world.create().await;
    world.host.fail(FakeStep::Sockets, FakeFailure::Refused, 1);
    let error = connect(&owner(), fresh.id, echo().await).await;
    assert!(matches!(error, EngineError::PortSockets { .. }), "{error}");
    world.engine.delete(&owner(), sandbox.id).await.expect("it is deleted");
    let error = connect(&owner(), sandbox.id, port).await;
    assert!(matches!(error, EngineError::SandboxNotFound { .. }), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_is_waited_for_until_it_listens_where_it_can_be_reached() {
    let world = World::new().await;
    let sandbox = world.create().await;
    let port = Port::new(8080).expect("a port");
    let listens = |address: &str| ListeningPort {
        port: 8080,
        address: address.parse().expect("an address"),
        process: None,
    };
    world.host.set_listening(sandbox.id, vec![listens("127.0.0.2")]);
    let wait = async |wait| world.engine.wait_for_port(&owner(), sandbox.id, port, wait).await;
    let late = wait(Duration::from_millis(1)).await.expect_err("it listens elsewhere");
    assert!(matches!(late, EngineError::PortWait { .. }), "{late}");
    let (found, ()) = tokio::join!(wait(Duration::from_secs(60)), async {
        world.host.set_listening(sandbox.id, vec![listens("127.0.0.1")]);
    });
    assert!(found.expect("it listens").reachable);
    let other = world.engine.listening_ports(&other(), sandbox.id).await.expect_err("it is somebody else's");
    assert!(matches!(other, EngineError::SandboxNotFound { .. }), "{other}");
}

fn link(port: Port) -> LinkSpec {
    LinkSpec { port, label: None, methods: Vec::new(), ttl: Duration::from_secs(60), public: false }
}

async fn made_key(world: &World) -> Key {
    let spec = KeySpec { owner: owner(), admin: false, metrics_only: false, limits: KeyLimits::default() };
    world.engine.create_key(spec).await.expect("a key").0
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_works_until_it_is_revoked_and_survives_a_crash() {
    let world = World::new().await;
    let key = made_key(&world).await;
    let sandbox = world.create().await;
    let port = Port::new(8080).expect("a port");
    let (made, token) = world.engine.create_link(&key, sandbox.id, link(port)).await.expect("it is made");
    let token = token.expect("it has a token");
    let world = world.crash().await;
    let grant = world.engine.follow_link(&token).expect("it works");
    assert_eq!((&*grant.link, grant.link.owner.clone()), (&made, owner()));
    for at in 0..token.len() {
        let mut forged = token.clone();
        forged[at] ^= 1;
        assert!(world.engine.follow_link(&forged).is_none(), "byte {at}");
    }
    assert!(world.engine.follow_link(&token[..16]).is_none() && world.engine.follow_link(b"").is_none());
    assert!(world.engine.public_link(sandbox.id, port).is_none(), "it is not public");
    assert_eq!(world.engine.links(&owner(), sandbox.id).expect("told"), std::slice::from_ref(&made));
    let refused = world.engine.revoke_link(&other(), sandbox.id, made.id).await.expect_err("another's");
    assert!(matches!(refused, EngineError::SandboxNotFound { .. }), "{refused}");
    let mut end = grant.end;
    world.engine.revoke_link(&owner(), sandbox.id, made.id).await.expect("it is revoked");
    end.wait().await;
    assert!(world.engine.follow_link(&token).is_none());
    let world = world.crash().await;
    assert!(world.engine.follow_link(&token).is_none(), "and stays so");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_ends_with_its_time_its_key_and_its_sandbox() {
    let world = World::new().await;
    let port = Port::new(8080).expect("a port");
    let (key, sandbox) = (made_key(&world).await, world.create().await);
    let make = async |spec| {
        let (_, token) = world.engine.create_link(&key, sandbox.id, spec).await.expect("it is made");
        token.unwrap_or_default()
    };
    let short = make(LinkSpec { ttl: Duration::from_secs(1), ..link(port) }).await;
    let mut end = world.engine.follow_link(&short).expect("it works").end;
    end.wait().await;
    assert!(world.engine.follow_link(&short).is_none(), "its time is over");
    let by_key = make(link(port)).await;
    make(LinkSpec { public: true, ..link(port) }).await;
    assert!(world.engine.public_link(sandbox.id, port).is_some());
    assert!(world.engine.public_link(sandbox.id, Port::new(81).expect("a port")).is_none());
    let mut end = world.engine.follow_link(&by_key).expect("it works").end;
    world.engine.delete_key(&key.id).await.expect("it is deleted");
    end.wait().await;
    assert!(world.engine.follow_link(&by_key).is_none(), "its key is gone");
    assert!(world.engine.public_link(sandbox.id, port).is_none());
    let key = made_key(&world).await;
    let (_, token) = world.engine.create_link(&key, sandbox.id, link(port)).await.expect("it is made");
    world.engine.delete(&owner(), sandbox.id).await.expect("it is deleted");
    assert!(world.engine.follow_link(&token.expect("a token")).is_none(), "its sandbox is gone");
    assert!(matches!(
        world.engine.create_link(&key, sandbox.id, link(port)).await,
        Err(EngineError::SandboxNotFound { .. })
    ));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_that_makes_no_sense_is_not_made() {
    let world = World::new().await;
    let (key, sandbox) = (made_key(&world).await, world.create().await);
    let port = Port::new(8080).expect("a port");
    for spec in [
        LinkSpec { ttl: Duration::ZERO, ..link(port) },
        LinkSpec { ttl: LinkSpec::TTL_MAX + Duration::from_secs(1), ..link(port) },
        LinkSpec { label: Some("x".repeat(1000)), ..link(port) },
        LinkSpec { methods: vec!["get".into()], ..link(port) },
        LinkSpec { methods: vec!["GET".into(); 100], ..link(port) },
    ] {
        let refused = world.engine.create_link(&key, sandbox.id, spec).await.expect_err("it is refused");
        assert!(matches!(refused, EngineError::Invalid { .. }), "{refused}");
    }
    assert!(world.engine.links(&owner(), sandbox.id).expect("told").is_empty());
}
