//! The engine on the fake host, when nothing goes wrong.

use crate::common::*;
use engine::*;
use shoal_engine as engine;

#[tokio::test(flavor = "multi_thread")]
async fn a_command_runs_and_its_output_is_exact() {
    let world = World::new().await;
    let sandbox = world.create().await;
    assert_eq!(sandbox.state, State::Running);
    let command = world.run(sandbox.id, "echo hello; err oops; exit 3").await;
    let read = read_all(command.attach(Offsets::default()), Offsets::default()).await;
    assert_eq!((read.stdout.as_slice(), read.stderr.as_slice()), (&b"hello\n"[..], &b"oops\n"[..]));
    let ended = command.ended().await;
    assert_eq!(outcome(&ended), Outcome::Exited(3));
    assert_eq!(ended.stdout, Span { start: 0, end: 6 });
    let gathered = command.output(1000).await.expect("it is kept");
    assert_eq!((gathered.stdout.as_slice(), gathered.stdout_cut), (&b"hello\n"[..], false));
    let gathered = command.output(3).await.expect("it is kept");
    assert_eq!((gathered.stdout.as_slice(), gathered.stdout_cut), (&b"hel"[..], true));
    // The same from the row and the files.
    let again = world.command(sandbox.id, ended.id.as_str()).await;
    assert_eq!(outcome(&again.now()), Outcome::Exited(3));
    assert_eq!(again.output(1000).await.expect("it is kept").stderr, b"oops\n");
    eventually("init forgot the command", async || world.host.remembered(sandbox.id) == 0).await;
    world.engine.delete(&owner(), sandbox.id).await.expect("it goes");
    assert_eq!(world.host.leftovers(), []);
    assert!(!world.directory.path().join("output").join(sandbox.id.to_string()).exists());
}
