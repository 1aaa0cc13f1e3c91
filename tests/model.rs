//! Random lives of sandboxes, compared with a small model after every step.
//!
//! The model knows what a caller was promised: which sandboxes exist, with their names, labels and files, and that
//! none of it depends on the daemon or the launcher staying alive. A run is a list of steps drawn from a seed. A
//! failure prints the seed and all steps so far; `SHOAL_TEST_SEED=<seed>` runs the same steps again.
//!
//! To add a verb: add a variant to [`Step`] and a line to [`STEPS`], its precondition to
//! `draw`, the request and the model's new state to `act`, and the comparison to `compare`.

use std::collections::BTreeMap;

use serde_json::{Value, json};
use shoal_tests::daemon::kill_hard;
use shoal_tests::wait::until_true;
use shoal_tests::{Daemon, Sandbox, Spawn};

/// Steps of one run, and runs.
const STEPS_MAX: usize = 60;
const RUNS: u64 = 2;
/// More than these make a run slower without finding more.
const SANDBOXES_MAX: usize = 4;
const FILES: u64 = 3;

/// The kinds of steps, and their relative frequency.
const STEPS: &[(Verb, u64)] = &[
    (Verb::Create, 6),
    (Verb::Run, 8),
    (Verb::WriteFile, 8),
    (Verb::RemoveFile, 3),
    (Verb::Touch, 3),
    (Verb::Label, 5),
    (Verb::Rename, 3),
    (Verb::Pause, 5),
    (Verb::Resume, 3),
    (Verb::Snapshot, 4),
    (Verb::RollBack, 3),
    (Verb::Fork, 3),
    (Verb::Promote, 3),
    (Verb::Expire, 2),
    (Verb::Delete, 2),
    (Verb::CrashDaemon, 3),
    (Verb::RestartDaemon, 2),
    (Verb::KillLauncher, 2),
];

#[derive(Debug, Clone, Copy)]
enum Verb {
    Create,
    Run,
    WriteFile,
    RemoveFile,
    Touch,
    Label,
    Rename,
    Pause,
    Resume,
    Snapshot,
    RollBack,
    Fork,
    Promote,
    Expire,
    Delete,
    CrashDaemon,
    RestartDaemon,
    KillLauncher,
}

/// One step with all its details: repeating it does the same.
#[derive(Debug, Clone)]
enum Step {
    Create {
        name: String,
        label: Option<String>,
    },
    /// A command that writes a file, and leaves a process behind.
    Run {
        name: String,
        file: String,
        text: String,
    },
    /// Through the file routes.
    WriteFile {
        name: String,
        file: String,
        text: String,
    },
    RemoveFile {
        name: String,
        file: String,
    },
    Touch {
        name: String,
    },
    Label {
        name: String,
        key: String,
        value: Option<String>,
    },
    Rename {
        name: String,
        new: String,
    },
    /// `keep` or `drop`. Whatever works in the sandbox resumes it.
    Pause {
        name: String,
        memory: &'static str,
    },
    Resume {
        name: String,
    },
    Snapshot {
        name: String,
    },
    /// To a snapshot of the sandbox, or one that its parent had before the fork.
    RollBack {
        name: String,
        snapshot: String,
    },
    Fork {
        name: String,
    },
    /// With what becomes of the parent.
    Promote {
        name: String,
        parent: &'static str,
    },
    /// A rule that acts at once.
    Expire {
        name: String,
    },
    Delete {
        name: String,
    },
    /// `kill -9` and a restart.
    CrashDaemon,
    /// SIGTERM and a restart.
    RestartDaemon,
    KillLauncher,
}

/// What a caller was promised, by name of the sandbox.
#[derive(Debug, Default)]
struct Model {
    sandboxes: BTreeMap<String, Expected>,
    /// Names are used once.
    named: u64,
}

#[derive(Debug)]
struct Expected {
    id: String,
    labels: BTreeMap<String, String>,
    files: BTreeMap<String, String>,
    state: &'static str,
    /// The id of the sandbox that it was forked from.
    parent: Option<String>,
    /// The files of each snapshot that it can be rolled back to, by the snapshot's id.
    snapshots: BTreeMap<String, BTreeMap<String, String>>,
}

/// SplitMix64: the same steps for the same seed on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn verb(&mut self) -> Verb {
        let mut left = self.below(STEPS.iter().map(|(_, weight)| weight).sum());
        for (verb, weight) in STEPS {
            if left < *weight {
                return *verb;
            }
            left -= weight;
        }
        unreachable!("what is drawn is below the sum of all weights")
    }
}

impl Model {
    /// A step that is possible now.
    fn draw(&mut self, random: &mut Random) -> Step {
        loop {
            let verb = random.verb();
            let some = self.sandboxes.len() as u64;
            let name = match some {
                0 => None,
                _ => self.sandboxes.keys().nth(random.below(some) as usize).cloned(),
            };
            let file = format!("/workspace/f{}", random.below(FILES));
            let text = format!("{:016x}", random.next());
            return match (verb, name) {
                (Verb::Create, _) if self.sandboxes.len() < SANDBOXES_MAX => {
                    let label = (random.below(2) == 0).then_some(text);
                    Step::Create { name: self.new_name(), label }
                }
                (Verb::Run, Some(name)) => Step::Run { name, file, text },
                (Verb::WriteFile, Some(name)) => Step::WriteFile { name, file, text },
                (Verb::RemoveFile, Some(name)) => match self.sandboxes[&name].files.keys().next().cloned() {
                    Some(file) => Step::RemoveFile { name, file },
                    None => continue,
                },
                (Verb::Touch, Some(name)) => Step::Touch { name },
                (Verb::Label, Some(name)) => {
                    let key = format!("k{}", random.below(3));
                    Step::Label { name, key, value: (random.below(3) > 0).then_some(text) }
                }
                (Verb::Rename, Some(name)) => Step::Rename { name, new: self.new_name() },
                (Verb::Pause, Some(name)) => {
                    Step::Pause { name, memory: ["keep", "drop"][random.below(2) as usize] }
                }
                (Verb::Resume, Some(name)) => Step::Resume { name },
                (Verb::Snapshot, Some(name)) => Step::Snapshot { name },
                (Verb::RollBack, Some(name)) => {
                    let snapshots = &self.sandboxes[&name].snapshots;
                    let Some(chosen) = snapshots.len().checked_sub(1) else { continue };
                    let chosen = random.below(chosen as u64 + 1) as usize;
                    let snapshot = snapshots.keys().nth(chosen).cloned().expect("there are as many");
                    Step::RollBack { name, snapshot }
                }
                (Verb::Fork, Some(name)) if self.sandboxes.len() < SANDBOXES_MAX => Step::Fork { name },
                (Verb::Promote, Some(name)) => match self.parent_of(&name) {
                    Some(_) => {
                        let parent = ["keep", "pause", "delete"][random.below(3) as usize];
                        Step::Promote { name, parent }
                    }
                    None => continue,
                },
                (Verb::Expire, Some(name)) => Step::Expire { name },
                (Verb::Delete, Some(name)) => Step::Delete { name },
                (Verb::CrashDaemon, _) => Step::CrashDaemon,
                (Verb::RestartDaemon, _) => Step::RestartDaemon,
                (Verb::KillLauncher, _) => Step::KillLauncher,
                _ => continue,
            };
        }
    }

    fn new_name(&mut self) -> String {
        self.named += 1;
        format!("model-{}", self.named)
    }

    fn expected(&mut self, name: &str) -> &mut Expected {
        self.sandboxes.get_mut(name).expect("steps are drawn for what there is")
    }

    /// The name of the sandbox that this one was forked from, if that one is there.
    fn parent_of(&self, name: &str) -> Option<String> {
        let parent = self.sandboxes[name].parent.as_ref()?;
        self.sandboxes.iter().find(|(_, one)| one.id == *parent).map(|(name, _)| name.clone())
    }

    /// A sandbox in which something has worked, so that it runs.
    fn used(&mut self, name: &str) -> &mut Expected {
        let expected = self.expected(name);
        expected.state = "running";
        expected
    }

    /// Performs a step, and updates what must hold afterwards.
    #[track_caller]
    fn act(&mut self, daemon: &mut Daemon, step: Step) {
        match step {
            Step::Create { name, label } => {
                let labels: BTreeMap<String, String> =
                    label.map(|value| ("k0".to_owned(), value)).into_iter().collect();
                let made = daemon.sandbox_with(json!({"name": name, "labels": labels}));
                let (files, snapshots) = (BTreeMap::new(), BTreeMap::new());
                let expected =
                    Expected { id: made.id, labels, files, state: "running", parent: None, snapshots };
                self.sandboxes.insert(name, expected);
            }
            Step::Run { name, file, text } => {
                let done = self.sandbox(daemon, &name).sh(&format!(
                    "printf %s {text} > {file}; (setsid sleep 1000 > /dev/null 2>&1 &); cat {file}"
                ));
                assert_eq!(done.ok().text(), text);
                self.used(&name).files.insert(file, text);
            }
            Step::WriteFile { name, file, text } => {
                let sandbox = self.sandbox(daemon, &name);
                let answer = sandbox.request("PUT", &format!("/files?path={file}")).body(text.clone());
                let status = answer.send(sandbox.address).status;
                assert!([200, 201].contains(&status), "{status}");
                self.used(&name).files.insert(file, text);
            }
            Step::RemoveFile { name, file } => {
                let sandbox = self.sandbox(daemon, &name);
                sandbox.request("DELETE", &format!("/files?path={file}")).send(sandbox.address).expect(204);
                self.used(&name).files.remove(&file);
            }
            Step::Touch { name } => {
                let sandbox = self.sandbox(daemon, &name);
                sandbox.request("POST", "/touch").send(sandbox.address).expect(200);
            }
            Step::Label { name, key, value } => {
                patch(&self.sandbox(daemon, &name), &json!({"labels": {&key: value}}));
                let labels = &mut self.expected(&name).labels;
                match value {
                    Some(value) => drop(labels.insert(key, value)),
                    None => drop(labels.remove(&key)),
                }
            }
            Step::Rename { name, new } => {
                patch(&self.sandbox(daemon, &name), &json!({"name": new}));
                let expected = self.sandboxes.remove(&name).expect("steps are drawn for what there is");
                self.sandboxes.insert(new, expected);
            }
            Step::Pause { name, memory } => {
                let sandbox = self.sandbox(daemon, &name);
                let body = json!({"memory": memory, "grace_seconds": 0});
                sandbox.request("POST", "/pause").json(&body).send(sandbox.address).expect(200);
                self.expected(&name).state = "paused";
            }
            Step::Resume { name } => {
                let sandbox = self.sandbox(daemon, &name);
                sandbox.request("POST", "/resume").send(sandbox.address).expect(200);
                self.expected(&name).state = "running";
            }
            Step::Snapshot { name } => {
                let sandbox = self.sandbox(daemon, &name);
                let taken = sandbox.request("POST", "/snapshots").json(&json!({})).send(sandbox.address);
                let id = taken.expect(201)["id"].as_str().expect("a snapshot has an id").to_owned();
                let expected = self.expected(&name);
                expected.snapshots.insert(id, expected.files.clone());
            }
            Step::RollBack { name, snapshot } => {
                let sandbox = self.sandbox(daemon, &name);
                let body = json!({"snapshot": snapshot});
                sandbox.request("POST", "/rollback").json(&body).send(sandbox.address).expect(200);
                let expected = self.used(&name);
                expected.files = expected.snapshots[&snapshot].clone();
            }
            Step::Fork { name } => {
                let sandbox = self.sandbox(daemon, &name);
                let forked =
                    sandbox.request("POST", "/fork").json(&json!({})).send(sandbox.address).expect(201);
                let child = &forked["children"][0]["sandbox"];
                let text =
                    |field: &str| child[field].as_str().unwrap_or_else(|| panic!("{forked}")).to_owned();
                let parent = &self.sandboxes[&name];
                let expected = Expected {
                    id: text("id"),
                    labels: parent.labels.clone(),
                    files: parent.files.clone(),
                    state: "running",
                    parent: Some(parent.id.clone()),
                    snapshots: parent.snapshots.clone(),
                };
                self.sandboxes.insert(text("name"), expected);
            }
            Step::Promote { name, parent: becomes } => {
                let parent = self.parent_of(&name).expect("steps are drawn for what there is");
                let sandbox = self.sandbox(daemon, &name);
                let body = json!({"parent": becomes});
                sandbox.request("POST", "/promote").json(&body).send(sandbox.address).expect(200);
                let mut child = self.sandboxes.remove(&name).expect("steps are drawn for what there is");
                let mut old = self.sandboxes.remove(&parent).expect("it was found above");
                child.labels.extend(old.labels.clone());
                self.sandboxes.insert(parent, child);
                if becomes != "delete" {
                    let seen = daemon.sandbox_of(&old.id);
                    let seen = seen.request("GET", "").send(seen.address).expect(200);
                    if becomes == "pause" {
                        old.state = "paused";
                    }
                    self.sandboxes.insert(seen["name"].as_str().expect("a name").to_owned(), old);
                }
            }
            Step::Expire { name } => {
                let sandbox = self.sandbox(daemon, &name);
                let rules = json!([{"since": "creation", "after_seconds": 0.1, "action": "delete"}]);
                patch(&sandbox, &json!({"lifetime": rules}));
                until_true("its time is over", || {
                    sandbox.request("GET", "").send(sandbox.address).status == 404
                });
                self.sandboxes.remove(&name);
            }
            Step::Delete { name } => {
                self.sandbox(daemon, &name).delete();
                self.sandboxes.remove(&name);
            }
            Step::CrashDaemon => daemon.crash(),
            Step::RestartDaemon => {
                assert!(daemon.stop(), "the daemon ends well");
                daemon.start_again();
            }
            Step::KillLauncher => daemon.launchers().into_iter().for_each(kill_hard),
        }
    }

    fn sandbox(&self, daemon: &Daemon, name: &str) -> Sandbox {
        daemon.sandbox_of(&self.sandboxes[name].id)
    }

    /// Compares what the API shows with the model.
    #[track_caller]
    fn compare(&self, daemon: &Daemon) {
        let seen: BTreeMap<String, Value> = daemon
            .list()
            .into_iter()
            .map(|one| {
                let name = one["name"].as_str().expect("a sandbox has a name").to_owned();
                (name, json!({"id": one["id"], "state": one["state"], "labels": one["labels"]}))
            })
            .collect();
        let expected: BTreeMap<String, Value> = self
            .sandboxes
            .iter()
            .map(|(name, one)| {
                (name.clone(), json!({"id": one.id, "state": one.state, "labels": one.labels}))
            })
            .collect();
        assert_eq!(seen, expected, "left: what the daemon lists; right: the model");
        // Looking at the files of a paused sandbox would resume it.
        for (name, one) in self.sandboxes.iter().filter(|(_, one)| one.state == "running") {
            let listed = self
                .sandbox(daemon, name)
                .sh("cd /workspace && for f in *; do [ -e \"$f\" ] && echo \"$f $(cat \"$f\")\"; done; true");
            let files: BTreeMap<String, String> = listed
                .ok()
                .text()
                .lines()
                .filter_map(|line| line.split_once(' '))
                .map(|(file, text)| (format!("/workspace/{file}"), text.to_owned()))
                .collect();
            assert_eq!(files, one.files, "left: the files of `{name}`; right: the model");
        }
    }
}

#[track_caller]
fn patch(sandbox: &Sandbox, body: &Value) {
    sandbox.request("PATCH", "").json(body).send(sandbox.address).expect(200);
}

fn live(seed: u64) {
    println!("SHOAL_TEST_SEED={seed}");
    let mut random = Random(seed);
    let environment = [("SHOAL_STORE", "loop"), ("SHOAL_STORE_SIZE", "2Gi")];
    let environment = environment.map(|(name, value)| (name.into(), value.into())).into();
    let mut daemon = Spawn { environment, ..Spawn::default() }.start();
    // The first life fills caches that are kept on purpose.
    daemon.sandbox().delete();
    let before = daemon.audit();
    let mut model = Model::default();
    for number in 0..STEPS_MAX {
        let step = model.draw(&mut random);
        println!("{number}: {step:?}");
        model.act(&mut daemon, step);
        model.compare(&daemon);
    }
    for name in model.sandboxes.keys() {
        model.sandbox(&daemon, name).delete();
    }
    assert_eq!(daemon.list(), [] as [Value; 0]);
    for snapshot in daemon.get("/v1/snapshots").expect(200)["snapshots"].as_array().expect("a list") {
        let path = format!("/v1/snapshots/{}", snapshot["id"].as_str().expect("an id"));
        daemon.request("DELETE", &path).send(daemon.address).expect(204);
    }
    // The daemon and its launcher have other process ids by now; no other process may be left, and nothing else at
    // all.
    until_true("no process of a sandbox is left", || daemon.scope().inside().is_empty());
    until_true("at most the launcher is left", || daemon.launchers().len() <= 1);
    until_true("nothing of a sandbox is left", || {
        let left = daemon.audit().beyond(&before);
        println!("left: {left:?}");
        left.iter().all(|line| line.starts_with("process "))
    });
}

#[test]
fn sandboxes_are_what_callers_were_promised_whatever_happens() {
    let seed = std::env::var("SHOAL_TEST_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
    match seed {
        Some(seed) => live(seed),
        None => {
            let random = u64::from_str_radix(&shoal_tests::daemon::random_hex(4), 16).expect("hex digits");
            (0..RUNS).for_each(|run| live(random + run));
        }
    }
}
