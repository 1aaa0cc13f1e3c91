//! What the engine itself costs, on the fake backend: no kernel, no HTTP.
//!
//! `cargo run --release -p shoal-engine --example measure`

use std::sync::Arc;
use std::time::{Duration, Instant};

use runtime::fake::FakeHost;
use shoal_engine::{
    Capacity, CommandSpec, Engine, EngineConfig, Key, KeyLimits, Offsets, OutputEvent, Owner, Program,
    SandboxSpec, Wait,
};
use wire::SandboxId;

#[tokio::main]
async fn main() {
    let directory = tempfile::tempdir().expect("a directory");
    let host = FakeHost::new();
    let config = EngineConfig {
        data_dir: directory.path().into(),
        capacity: Capacity { sandboxes: 10_000, cpu_millis: u64::MAX, memory_bytes: u64::MAX },
        output_kept_max: 64 << 20,
        images: Default::default(),
        network: Default::default(),
    };
    let engine = Engine::start(config.clone(), Arc::new(host.clone())).await.expect("the engine starts");
    let owner = Owner::default_owner();
    let key = Key {
        id: "measure".into(),
        owner: owner.clone(),
        admin: false,
        metrics_only: false,
        limits: KeyLimits::default(),
        created_at: std::time::SystemTime::now(),
    };
    let create = async || engine.create(&key, SandboxSpec::default(), Wait::Ready).await.expect("made").id;

    let mut creates = Vec::new();
    let mut ids = Vec::new();
    for _ in 0..300 {
        let begun = Instant::now();
        ids.push(create().await);
        creates.push(begun.elapsed());
    }
    report("create (2 commits)", creates);
    let id = ids[0];

    let mut renames = Vec::new();
    for turn in 0..2000 {
        let name = shoal_engine::SandboxName::parse(&format!("n{turn}")).expect("a name");
        let begun = Instant::now();
        engine.rename(&owner, id, name).await.expect("renamed");
        renames.push(begun.elapsed());
    }
    report("one commit (rename)", renames);

    for (what, script) in
        [("run true (2 commits)", "true"), ("run echo (2 commits, output in the row)", "echo hi")]
    {
        let mut runs = Vec::new();
        for _ in 0..3000 {
            let begun = Instant::now();
            run(&engine, &owner, id, script).await.ended().await;
            runs.push(begun.elapsed());
        }
        report(what, runs);
    }

    let begun = Instant::now();
    let tasks: Vec<_> = (0..8)
        .map(|task| {
            let (engine, owner, id) = (engine.clone(), owner.clone(), ids[task]);
            tokio::spawn(async move {
                for _ in 0..1000 {
                    run(&engine, &owner, id, "true").await.ended().await;
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("no panic");
    }
    println!("run true, 8 at once: {:.0} per second", 8000.0 / begun.elapsed().as_secs_f64());

    let length: u64 = 1 << 30;
    for (what, reads) in [("1 GiB without a reader", false), ("1 GiB with a reader", true)] {
        let command = run(&engine, &owner, id, &format!("flood {length}")).await;
        let begun = Instant::now();
        if reads {
            let mut output = command.attach(Offsets::default());
            let mut got = 0;
            while let Some(event) = output.next().await {
                if let OutputEvent::Bytes { bytes, .. } = event {
                    got += bytes.len() as u64;
                }
            }
            assert_eq!(got, length);
        }
        command.ended().await;
        println!("{what}: {:.0} MB/s", length as f64 / 1e6 / begun.elapsed().as_secs_f64());
    }

    for id in &ids[..200] {
        for _ in 0..5 {
            run(&engine, &owner, *id, "flood 100000; hang").await;
        }
    }
    drop(engine); // As a crash would.
    let begun = Instant::now();
    let engine = Engine::start(config, Arc::new(host)).await.expect("the engine starts");
    let opened = begun.elapsed();
    for id in &ids[..200] {
        run(&engine, &owner, *id, "true").await.ended().await;
    }
    println!(
        "restart with 1000 commands in 200 of {} sandboxes: {opened:?} until requests are taken, {:?} until all \
        have answered one",
        ids.len(),
        begun.elapsed()
    );
    engine.stop().await;
}

async fn run(engine: &Engine, owner: &Owner, id: SandboxId, script: &str) -> shoal_engine::CommandRef {
    let spec = CommandSpec::new(Program::script(script).expect("a script"));
    engine.run(owner, id, spec).await.expect("it starts")
}

fn report(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |part: f64| times[((times.len() - 1) as f64 * part) as usize];
    println!("{what}: p50 {:?}, p90 {:?}, p99 {:?}", at(0.5), at(0.9), at(0.99));
}
