//! Policies on a fake host and a fake egress: the order of steps, what happens when a step fails, and what survives a crash.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use egress::control::{
    Answer, Ask, Channel, Event, Failure, FromEgress, Record, Request, Start, Started, Totals, Used, VERSION,
    What, from_bytes, to_bytes,
};
use egress::credential::Credential;
use egress::policy::Name;
use engine::secret::{CACHE_DEFAULT, SecretName, SecretSource, SecretSpec, SecretValue};
use engine::{
    EngineError, NetworkAction, NetworkChange, NetworkEventQuery, NetworkMode, NetworkPolicy, NetworkRule,
    SandboxSpec, SandboxUpdate, Wait,
};
use runtime::fake::{FakeHost, FakeNetworkCall};
use shoal_engine as engine;
use wire::SandboxId;
use wire::network::{NetworkFault, Routes};

use crate::common::{World, key, owner};

/// What egress was asked, in order.
type Asked = Arc<Mutex<Vec<String>>>;

/// Acts as every egress process that a host starts, one after the other.
fn serve_egress(host: &FakeHost) -> (Asked, Arc<Mutex<Vec<Record>>>) {
    let (asked, records) = (Asked::default(), Arc::<Mutex<Vec<Record>>>::default());
    let (host, log, queue) = (host.clone(), Arc::clone(&asked), Arc::clone(&records));
    tokio::spawn(async move {
        loop {
            if let Some(socket) = host.take_egress().and_then(|mut given| given.pop()) {
                tokio::spawn(one_egress(socket, Arc::clone(&log), Arc::clone(&queue), host.clone()));
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    (asked, records)
}

async fn one_egress(socket: OwnedFd, asked: Asked, records: Arc<Mutex<Vec<Record>>>, host: FakeHost) {
    let channel = Channel::new(socket).expect("a channel");
    let Ok(Some((message, _))) = channel.receive().await else { return };
    let start: Start = from_bytes(&message).expect("the first packet");
    assert_eq!((start.version, start.directory.as_str()), (VERSION, "."));
    let started = Started { version: VERSION, ca_pem: "ca".into() };
    channel.send(&to_bytes(&FromEgress::Started(Ok(started))), &[]).await.expect("sent");
    let mut held: BTreeMap<SandboxId, Vec<OwnedFd>> = BTreeMap::new();
    let mut sequence = 0;
    loop {
        // It ends when the host's egress is killed.
        if host.egress_count() == 0 {
            return;
        }
        let ready: Vec<Record> = std::mem::take(&mut *records.lock().expect("nobody panics"));
        for record in ready {
            sequence += 1;
            let message = FromEgress::Record { sequence, record };
            channel.send(&to_bytes(&message), &[]).await.expect("sent");
        }
        let received = tokio::time::timeout(Duration::from_millis(5), channel.receive()).await;
        let (message, descriptors) = match received {
            Err(_) => continue,
            Ok(Ok(Some(received))) => received,
            Ok(_) => return,
        };
        let Request { serial, ask } = from_bytes(&message).expect("a request");
        let say = |text: String| asked.lock().expect("nobody panics").push(text);
        let result = match ask {
            Ask::Hello { .. } => {
                Ok(Answer::Hello { version: VERSION, attached: held.keys().copied().collect() })
            }
            Ask::Attach(attach) => {
                say(format!(
                    "attach {} {} names {}",
                    attach.sandbox,
                    attach.rules.mode.word(),
                    attach.names.len()
                ));
                say(format!("credentials {}{}", attach.sandbox, shown(&attach.credentials)));
                held.insert(attach.sandbox, descriptors);
                Ok(Answer::Done)
            }
            Ask::SetPolicy { sandbox, rules } => {
                say(format!(
                    "set {sandbox} {} with {} routes",
                    rules.mode.word(),
                    i32::from(host.routes(sandbox).is_some())
                ));
                Ok(Answer::Done)
            }
            Ask::SetCredentials { sandbox, credentials } => {
                say(format!("credentials {sandbox}{}", shown(&credentials)));
                Ok(Answer::Done)
            }
            Ask::Detach { sandbox } => {
                say(format!("detach {sandbox}"));
                held.remove(&sandbox);
                Ok(Answer::Detached(Totals {
                    sandbox,
                    sent: 0,
                    received: 0,
                    connections: 0,
                    refused: 0,
                    unrecorded: 0,
                }))
            }
            Ask::Acknowledge { through } => {
                say(format!("acknowledged {through}"));
                continue;
            }
            _ => Err(Failure { what: "not by a fake".into() }),
        };
        channel.send(&to_bytes(&FromEgress::Answer { serial, result }), &[]).await.expect("sent");
    }
}

/// Names, values and placeholders, as egress gets them.
fn shown(credentials: &[Credential]) -> String {
    let one = |credential: &Credential| {
        let value =
            credential.value.as_ref().map(|value| String::from_utf8_lossy(value.bytes()).into_owned());
        format!(" {}={}", credential.name, value.unwrap_or_default())
    };
    credentials.iter().map(one).collect()
}

fn secret(name: &str, value: &str) -> SecretSpec {
    SecretSpec {
        name: SecretName::parse(name).expect("a name"),
        source: SecretSource::Value(SecretValue::new(value.into())),
        preset: None,
        rules: vec![],
        variables: vec![],
        cache: CACHE_DEFAULT,
    }
}

#[tokio::test]
async fn secrets_reach_egress_before_the_create_is_answered_and_changes_before_they_are() {
    let world = World::new().await;
    let (asked, _) = serve_egress(&world.host);
    let missing = SandboxSpec { inject: vec!["openai".into()], ..SandboxSpec::default() };
    let refused =
        world.engine.create(&key(), missing.clone(), Wait::Ready).await.expect_err("no such secret");
    assert!(matches!(refused, EngineError::SecretNotFound { .. }), "{refused}");
    world.engine.set_secret(&key(), secret("openai", "first")).await.expect("it is kept");
    let made = world.engine.create(&key(), missing, Wait::Ready).await.expect("it is made");
    assert!(said(&asked, &format!("credentials {} openai=first", made.id)));
    assert_eq!(world.host.routes(made.id), Some(Routes::Listed(vec![])), "its hosts are opened");
    world.engine.set_secret(&key(), secret("openai", "second")).await.expect("it is rotated");
    assert!(said(&asked, &format!("credentials {} openai=second", made.id)));
    assert_eq!(world.engine.secret(&key(), "openai").expect("a secret").sandboxes, 1);
    world.engine.delete_secret(&key(), "openai").await.expect("it is deleted");
    until("nothing is open", || world.host.routes(made.id).is_none()).await;
    assert!(said(&asked, &format!("detach {}", made.id)), "nothing else was open");
    let gone = world.engine.delete_secret(&key(), "openai").await.expect_err("it is gone");
    assert!(matches!(gone, EngineError::SecretNotFound { .. }), "{gone}");
}

#[tokio::test]
async fn the_ledger_keeps_each_use_once_and_shows_a_changed_line() {
    let world = World::new().await;
    let (_, records) = serve_egress(&world.host);
    let made = world.engine.create(&key(), spec(NetworkMode::Names), Wait::Ready).await.expect("it is made");
    let used = |id: u128| {
        Record::Used(Box::new(Used {
            id,
            sandbox: made.id,
            at_ms: 1_700_000_000_000,
            secret: 7,
            secret_name: "api".into(),
            host: Name::parse("api.example.com").expect("a name"),
            port: 443,
            method: "GET".into(),
            path: "/v1".into(),
            status: 200,
            sent: 1,
            received: 2,
        }))
    };
    let all = [used(1), used(2), used(2), used(3)];
    records.lock().expect("nobody panics").extend(all);
    let mut lines = Vec::new();
    for _ in 0..2000 {
        lines = world.engine.ledger(&owner(), None, None).await.expect("lines");
        if lines.len() == 3 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(lines.iter().map(|line| line.number).collect::<Vec<_>>(), [1, 2, 3]);
    assert_eq!(world.engine.ledger(&owner(), Some(2), None).await.expect("lines").len(), 1);
    let check = world.engine.verify_ledger().await.expect("a check");
    assert_eq!((check.lines, check.broken_at), (3, None));
    let database = rusqlite::Connection::open(world.directory.path().join("shoal.db")).expect("a database");
    let change = |sql: &str| database.execute_batch(sql).expect("changed");
    for (sql, undo, broken) in [
        (
            "UPDATE ledger SET path = '/v2' WHERE number = 2",
            "UPDATE ledger SET path = '/v1' WHERE number = 2",
            2,
        ),
        (
            "UPDATE ledger SET status = 201 WHERE number = 1",
            "UPDATE ledger SET status = 200 WHERE number = 1",
            1,
        ),
        ("DELETE FROM ledger WHERE number = 3", "", 3),
    ] {
        change(sql);
        assert_eq!(world.engine.verify_ledger().await.expect("a check").broken_at, Some(broken), "{sql}");
        change(undo);
    }
}

fn spec(mode: NetworkMode) -> SandboxSpec {
    SandboxSpec { network: Some(NetworkPolicy::of_mode(mode)), ..SandboxSpec::default() }
}

fn to(mode: NetworkMode) -> SandboxUpdate {
    SandboxUpdate {
        network: Some(NetworkChange::Replace(NetworkPolicy::of_mode(mode))),
        ..SandboxUpdate::default()
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..2000 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("waited in vain until {what}");
}

fn said(asked: &Asked, what: &str) -> bool {
    asked.lock().expect("nobody panics").iter().any(|line| line == what)
}

#[tokio::test]
async fn a_policy_is_in_force_before_the_create_is_answered_and_gone_before_the_teardown() {
    let world = World::new().await;
    let (asked, _) = serve_egress(&world.host);
    let made = world.engine.create(&key(), spec(NetworkMode::Names), Wait::Ready).await.expect("it is made");
    assert!(said(&asked, &format!("attach {} names names 0", made.id)));
    assert_eq!(world.host.routes(made.id), Some(Routes::Listed(vec![])));
    assert!(world.host.policy(made.id).is_some_and(|text| String::from_utf8_lossy(&text).contains("names")));
    world.engine.delete(&owner(), made.id).await.expect("it goes");
    assert!(said(&asked, &format!("detach {}", made.id)));
    assert_eq!(world.host.leftovers(), []);
}

#[tokio::test]
async fn a_sandbox_without_a_policy_starts_no_egress() {
    let world = World::new().await;
    let made = world.create().await;
    assert_eq!((world.host.egress_count(), world.host.routes(made.id)), (0, None));
    assert_eq!(world.host.network_calls(), []);
}

#[tokio::test]
async fn egress_changes_before_routes_do_and_none_closes() {
    let world = World::new().await;
    let (asked, _) = serve_egress(&world.host);
    let made = world.engine.create(&key(), spec(NetworkMode::Open), Wait::Ready).await.expect("it is made");
    world.engine.update(&owner(), made.id, to(NetworkMode::Names)).await.expect("it changes");
    assert!(said(&asked, &format!("set {} names with 1 routes", made.id)));
    assert_eq!(world.host.routes(made.id), Some(Routes::Listed(vec![])));
    world.engine.update(&owner(), made.id, to(NetworkMode::None)).await.expect("it closes");
    assert!(said(&asked, &format!("detach {}", made.id)));
    assert_eq!(world.host.routes(made.id), None);
    assert!(matches!(world.host.network_calls().last(), Some((_, FakeNetworkCall::Close))));
}

#[tokio::test]
async fn a_wrong_rule_changes_nothing_and_an_added_rule_keeps_the_others() {
    let world = World::new().await;
    let _egress = serve_egress(&world.host);
    let made =
        world.engine.create(&key(), spec(NetworkMode::Registries), Wait::Ready).await.expect("it is made");
    let add = |to: &str| SandboxUpdate {
        network: Some(NetworkChange::Add(NetworkRule {
            action: NetworkAction::Allow,
            to: to.into(),
            ports: vec![],
            protocol: None,
            private: false,
        })),
        ..SandboxUpdate::default()
    };
    world.engine.update(&owner(), made.id, add("a.example")).await.expect("a rule");
    let error = world.engine.update(&owner(), made.id, add("*.com")).await.expect_err("a public suffix");
    assert!(matches!(error, EngineError::Policy { .. }), "{error}");
    let now = world.engine.update(&owner(), made.id, add("b.example")).await.expect("a rule");
    let rules: Vec<&str> = now.network.spec().rules.iter().map(|rule| rule.to.as_str()).collect();
    assert_eq!((now.network.spec().mode, rules), (NetworkMode::Registries, vec!["a.example", "b.example"]));
}

#[tokio::test]
async fn a_create_fails_where_networks_cannot_be_opened_and_never_without_its_policy() {
    let world = World::new().await;
    let _egress = serve_egress(&world.host);
    world.host.lack_networks(Some(NetworkFault::NoTproxy));
    let error =
        world.engine.create(&key(), spec(NetworkMode::Open), Wait::Ready).await.expect_err("no tproxy");
    assert!(matches!(error, EngineError::Create { .. }), "{error}");
    assert_eq!(error.class(), engine::ErrorClass::Unsupported);
    assert_eq!(world.host.leftovers(), []);
    world.create().await;
}

#[tokio::test]
async fn a_sandbox_from_before_networks_stays_without() {
    let world = World::new().await;
    let _egress = serve_egress(&world.host);
    let made = world.create().await;
    world.host.make_too_old(made.id);
    let error = world.engine.update(&owner(), made.id, to(NetworkMode::Open)).await.expect_err("too old");
    assert!(matches!(error, EngineError::SandboxTooOld { .. }), "{error}");
    assert!(world.engine.get(&owner(), made.id).await.expect("it is there").network.is_none());
}

#[tokio::test]
async fn a_dead_egress_is_replaced_and_gets_the_names_that_were_stored() {
    let world = World::new().await;
    let (asked, records) = serve_egress(&world.host);
    let made = world.engine.create(&key(), spec(NetworkMode::Names), Wait::Ready).await.expect("it is made");
    let name = Name::parse("a.example").expect("a name");
    let event = Event {
        sandbox: made.id,
        at_ms: 1,
        what: What::NameRefused,
        name: Some(name.clone()),
        address: None,
        port: None,
        protocol: None,
        rule: "mode none".into(),
        why: None,
        opens: Some("a.example".into()),
        sent: 0,
        received: 0,
    };
    // Each record twice: storing must be harmless.
    let twice = |record: Record| [record.clone(), record];
    let totals =
        |sent| Totals { sandbox: made.id, sent, received: 1, connections: 1, refused: 1, unrecorded: 0 };
    let gone = Record::Name { sandbox: SandboxId::from_random(7), place: 0, name: name.clone() };
    let all = [
        Record::Name { sandbox: made.id, place: 0, name },
        Record::Event(event),
        Record::Totals(totals(5)),
        gone,
    ];
    records.lock().expect("nobody panics").extend(all.into_iter().flat_map(twice));
    until("the records are acknowledged", || said(&asked, "acknowledged 8")).await;
    let events =
        world.engine.network_events(&owner(), made.id, NetworkEventQuery::default(), Duration::ZERO).await;
    assert_eq!(events.expect("events").len(), 1);
    // The next egress counts from zero; sums go on.
    world.host.kill_egress();
    until("another egress serves it", || said(&asked, &format!("attach {} names names 1", made.id))).await;
    asked.lock().expect("nobody panics").clear();
    records.lock().expect("nobody panics").push(Record::Totals(totals(2)));
    until("its record is acknowledged", || said(&asked, "acknowledged 1")).await;
    let view = world.engine.network(&owner(), made.id).await.expect("a view");
    assert_eq!(view.totals.sent, 7);
}

#[tokio::test]
async fn a_policy_is_in_force_again_after_a_crash() {
    let world = World::new().await;
    let (asked, _) = serve_egress(&world.host);
    let made = world.engine.create(&key(), spec(NetworkMode::Names), Wait::Ready).await.expect("it is made");
    world.host.kill_egress();
    asked.lock().expect("nobody panics").clear();
    let world = world.crash().await;
    until("it is attached again", || said(&asked, &format!("attach {} names names 0", made.id))).await;
    let found = world.engine.get(&owner(), made.id).await.expect("it is there");
    assert_eq!(found.network.spec().mode, NetworkMode::Names);
}
