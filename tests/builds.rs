//! Builds: from a Dockerfile and its context to a template.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use shoal_tests::daemon::binary;
use shoal_tests::images::{Layer, MadeImage, Puppet, digest};
use shoal_tests::wait::{until, until_true};
use shoal_tests::{Daemon, Response, Spawn};

/// A daemon with the image `base:1`: busybox, with a user `ada`.
struct Ground {
    daemon: Daemon,
    base: String,
    puppet: Puppet,
}

fn ground() -> Ground {
    let puppet = Puppet::start();
    let layer = Layer::busybox()
        .entry(b'5', "old/", 0o755, (0, 0), "", b"")
        .file("old/one", "1")
        .file("old/two", "2")
        .file("old/sub/deep", "deep")
        .file("etc/kept", "kept")
        .link("bin/chown", "busybox");
    let config = json!({"Env": ["PATH=/bin", "BEFORE=yes"]});
    let base = puppet.serve("base", "1", &MadeImage::of(&layer, config));
    let daemon = Spawn { config: puppet.config(), ..Spawn::default() }.start();
    Ground { daemon, base, puppet }
}

/// A context as a tar stream.
#[derive(Default)]
struct Context(Layer);

impl Context {
    fn file(self, path: &str, text: &str) -> Self {
        Self(self.0.file(path, text))
    }
}

impl Ground {
    fn post(&self, wish: Value, context: Context) -> Response {
        let request = self.daemon.request("POST", "/v1/builds").header("shoal-build", &wish.to_string());
        request
            .header("content-type", "application/x-tar")
            .body(context.0.into_tar())
            .send(self.daemon.address)
    }

    /// Builds `dockerfile` to the template `t`, and waits.
    fn build(&self, dockerfile: &str, context: Context) -> Value {
        self.build_with(json!({"template": "t"}), dockerfile, context)
    }

    fn build_with(&self, wish: Value, dockerfile: &str, context: Context) -> Value {
        let text = dockerfile.replace("BASE", &self.base);
        let started = self.post(wish, context.file("Dockerfile", &text)).expect(202);
        self.over(started["id"].as_str().expect("an id"))
    }

    fn over(&self, id: &str) -> Value {
        until("the build is over", || {
            let build = self.daemon.get(&format!("/v1/builds/{id}")).expect(200);
            (build["state"] != "running").then_some(build)
        })
    }

    #[track_caller]
    fn built(&self, dockerfile: &str, context: Context) -> Value {
        let build = self.build(dockerfile, context);
        assert_eq!(build["state"], "done", "{build}\n{}", self.log(&build));
        build
    }

    fn log(&self, build: &Value) -> String {
        let id = build["id"].as_str().expect("an id");
        let answer = self.daemon.get(&format!("/v1/builds/{id}/log"));
        assert_eq!(answer.status, 200);
        String::from_utf8_lossy(&answer.body).into_owned()
    }

    fn sh(&self, script: &str) -> String {
        let sandbox = self.daemon.sandbox_with(json!({"template": "t"}));
        let text = sandbox.sh(script).ok().text();
        sandbox.delete();
        text
    }

    fn layers(&self) -> usize {
        self.layer_names().len()
    }

    /// As hexadecimal digits.
    fn layer_names(&self) -> BTreeSet<String> {
        let layers = fs::read_dir(self.daemon.data_dir.join("images/layers")).expect("a directory");
        layers.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
    }

    fn cached(&self, build: &Value) -> usize {
        self.log(build).matches("  cached\n").count()
    }

    /// Further requests come from another owner. Returns the previous key.
    fn become_owner(&mut self, owner: &str) -> String {
        let made = self.daemon.post("/v1/keys", &json!({"owner": owner})).expect(201);
        std::mem::replace(&mut self.daemon.key, made["secret"].as_str().expect("a secret").to_owned())
    }
}

#[test]
fn every_word_does_what_it_says() {
    let ground = ground();
    let dockerfile = r#"
ARG WHICH=1
FROM BASE
LABEL maker="a test" team=x
ARG WORD=hello
ENV GREETING="$WORD there" OTHER=${BEFORE:-no}
WORKDIR /srv/app
RUN echo "$GREETING $WORD" > said && pwd >> said && id -u >> said
COPY src/ .
COPY --chmod=711 tool /usr/local/bin/
ADD note.txt /notes/renamed
COPY --chown=ada:ada *.cfg /etc/app/
USER ada
RUN id -u > /tmp/who
ENTRYPOINT ["/bin/sh", "-c"]
CMD ["echo entry $GREETING from $PWD as $(id -u)"]
EXPOSE 80
"#;
    let context = Context::default()
        .file("src/main.txt", "main")
        .file("src/deep/inner.txt", "inner")
        .file("tool", "#!/bin/sh\necho tool\n")
        .file("note.txt", "note")
        .file("a.cfg", "a")
        .file("b.cfg", "b");
    let build = ground.built(dockerfile, context);
    assert_eq!(build["version"], 1);
    let log = ground.log(&build);
    assert!(log.contains("RUN echo") && log.contains("EXPOSE has no effect"), "{log}");
    assert_eq!(
        ground.sh("cat said; cat main.txt deep/inner.txt; pwd"),
        "hello there hello\n/srv/app\n0\nmaininner/srv/app"
    );
    assert_eq!(ground.sh("stat -c %a /usr/local/bin/tool; cat /notes/renamed"), "711\nnote");
    assert_eq!(
        ground.sh("cat /etc/app/a.cfg /etc/app/b.cfg; stat -c %U /etc/app/a.cfg; cat /tmp/who; echo $OTHER"),
        "abada\n1000\nyes"
    );
    let sandbox = ground.daemon.sandbox_with(json!({"template": "t"}));
    assert_eq!(sandbox.run(json!({})).ok().text(), "entry hello there from /srv/app as 1000");
    let digest = sandbox.get()["image_digest"].as_str().expect("a digest").to_owned();
    let image = ground.daemon.get(&format!("/v1/images/{digest}")).expect(200);
    assert_eq!(image["config"]["labels"], json!({"maker": "a test", "team": "x"}));
}

#[test]
fn a_cache_keeps_its_files_between_builds_and_is_in_no_layer() {
    let ground = ground();
    let mount = "--mount=type=cache,target=/var/cache/x,sharing=locked";
    for word in ["one", "two"] {
        let run = format!("RUN {mount} echo {word} >> /var/cache/x/all && cp /var/cache/x/all /seen");
        ground.built(&format!("FROM BASE\nSHELL [\"/bin/sh\", \"-ec\"]\n{run}\n"), Context::default());
    }
    assert_eq!(ground.sh("cat /seen; ls /var/cache/x"), "one\ntwo");
    let volumes = ground.daemon.get("/v1/volumes").expect(200)["volumes"].clone();
    assert_eq!(volumes.as_array().map(Vec::len), Some(1), "{volumes}");
    let name = volumes[0]["name"].as_str().expect("a name");
    assert!(name.starts_with("build-cache-var-cache-x-"), "{name}");
    assert_eq!(volumes[0]["mounted_by"], json!([]), "{volumes}");
    ground.daemon.delete(&format!("/v1/volumes/{name}")).expect(204);
}

#[test]
fn chown_needs_neither_a_program_nor_an_account_in_the_image() {
    let ground = ground();
    // Neither has a shell, a `chown` or an `/etc/passwd`.
    let dockerfile =
        "FROM scratch\nCOPY old /srv/app\nCOPY --chown=1000:1001 new /srv/app\nCOPY --chown=7 old/a /b\n";
    let context = Context::default().file("old/a", "old").file("new/a", "new").file("new/deep/b", "b");
    ground.built(dockerfile, context);
    let sandbox = ground.daemon.sandbox_with(json!({"template": "t"}));
    let owner = |path: &str| {
        let file =
            sandbox.request("GET", &format!("/files/stat?path={path}")).send(sandbox.address).expect(200);
        (file["uid"].as_u64().expect("a number"), file["gid"].as_u64().expect("a number"))
    };
    let owners = ["/srv/app", "/srv/app/a", "/srv/app/deep", "/srv/app/deep/b", "/b"].map(owner);
    assert_eq!(owners, [(0, 0), (1000, 1001), (1000, 1001), (1000, 1001), (7, 7)]);
    let content = sandbox.request("GET", "/files?path=/srv/app/a").send(sandbox.address);
    assert_eq!((content.status, content.body.as_slice()), (200, b"new".as_slice()));
    sandbox
        .request("GET", "/files/stat?path=/.shoal-copy")
        .send(sandbox.address)
        .expect_refusal(404, "file_not_found");
}

#[test]
fn what_a_step_removes_is_gone_and_what_it_replaces_is_new() {
    let ground = ground();
    let dockerfile = "FROM BASE\n\
        RUN rm /old/one && rm -r /old/sub && mkdir /old/sub && echo fresh > /old/sub/new\n\
        RUN rm -r /old/two && mkdir /old/two && echo x > /old/two/in && ln /old/two/in /old/two/again && ln -s in /old/two/soft\n\
        RUN echo changed > /etc/kept && chown 1000:1000 /etc/kept && chmod 4755 /etc/kept && mkfifo /old/pipe\n";
    ground.built(dockerfile, Context::default());
    let seen = ground.sh("ls /old; ls /old/sub; cat /old/sub/new; ls /old/two; cat /old/two/soft; \
         [ /old/two/in -ef /old/two/again ] && echo one; stat -c '%a %u %g' /etc/kept; cat /etc/kept");
    assert_eq!(seen, "pipe\nsub\ntwo\nnew\nfresh\nagain\nin\nsoft\nx\none\n4755 1000 1000\nchanged");
}

#[test]
fn steps_that_were_done_are_not_done_again() {
    let ground = ground();
    let dockerfile = "FROM BASE\nRUN date +%N > /stamp\nCOPY a /a\nRUN cat /a > /b\n";
    let first = ground.built(dockerfile, Context::default().file("a", "1"));
    let (stamp, layers) = (ground.sh("cat /stamp"), ground.layers());
    let second = ground.built(dockerfile, Context::default().file("a", "1").file("unused", "x"));
    assert_eq!(ground.log(&second).matches("  cached\n").count(), 3, "{}", ground.log(&second));
    assert_eq!(
        (second["version"].clone(), ground.layers()),
        (first["version"].clone(), layers),
        "nothing is new"
    );
    let third = ground.built(dockerfile, Context::default().file("a", "2"));
    assert_eq!(
        ground.log(&third).matches("  cached\n").count(),
        1,
        "only the steps before the change are cached"
    );
    assert_eq!(third["version"], 2);
    assert_eq!(ground.sh("cat /stamp /b"), format!("{stamp}\n2"));
    // Another value of an ARG, another variable or another user gives another layer.
    for (dockerfile, cached) in [
        ("FROM BASE\nARG A=1\nRUN date +%N > /stamp\n", 0),
        ("FROM BASE\nENV A=1\nRUN date +%N > /stamp\n", 0),
        ("FROM BASE\nUSER ada\nRUN date +%N > /tmp/stamp\n", 0),
        ("FROM BASE\nRUN date +%N > /stamp\n", 1),
    ] {
        let build = ground.built(dockerfile, Context::default());
        assert_eq!(ground.log(&build).matches("  cached\n").count(), cached, "{dockerfile}");
    }
}

#[test]
fn stages_are_built_as_far_as_they_are_needed() {
    let ground = ground();
    let dockerfile = "FROM BASE AS build\nRUN mkdir -p /out/d && echo made > /out/made && echo deep > /out/d/x\n\
        FROM BASE AS unused\nRUN exit 1\n\
        FROM BASE\nCOPY --from=build /out/made /from-name\nCOPY --from=0 /out /tree/\n";
    ground.built(dockerfile, Context::default());
    assert_eq!(
        ground.sh("cat /from-name /tree/d/x; ls /tree; ls /out 2>/dev/null || echo none"),
        "made\ndeep\nd\nmade\nnone"
    );
    let again = ground.built(dockerfile, Context::default());
    assert_eq!(ground.log(&again).matches("  cached\n").count(), 3);
    let target =
        ground.build_with(json!({"template": "t", "target": "build"}), dockerfile, Context::default());
    assert_eq!(target["state"], "done");
    assert_eq!(ground.sh("cat /out/made"), "made");
}

#[test]
fn a_stage_that_a_variable_names_is_built_or_refused() {
    let ground = ground();
    let dockerfile =
        "ARG START=tools\nFROM BASE AS tools\nRUN echo made > /tool\nFROM $START\nRUN cp /tool /copy\n";
    ground.built(dockerfile, Context::default());
    assert_eq!(ground.sh("cat /copy"), "made");
    // Which stages are built is decided before any step runs, so a variable of a step cannot name one.
    let dockerfile = "FROM BASE AS tools\nRUN echo made > /tool\nFROM BASE\nARG SOURCE=tools\n\
        COPY --from=$SOURCE /tool /\n";
    let build = ground.build(dockerfile, Context::default());
    assert_eq!(build["state"], "failed", "{build}");
    let log = ground.log(&build);
    assert!(log.contains("line 5: stage `tools` is not built"), "{log}");
}

#[test]
fn a_secret_is_seen_by_its_step_and_by_nothing_else() {
    let ground = ground();
    // "hush-hush" in base64.
    let wish = json!({"template": "t", "secrets": {"token": "aHVzaC1odXNo"}});
    let dockerfile = "FROM BASE\nRUN --mount=type=secret,id=token cat /run/secrets/token | wc -c > /length\n\
        RUN --mount=type=secret,id=token,target=/deep/er/key test -s /deep/er/key\n\
        RUN --mount=type=secret,id=token mv /run/secrets/token /moved; stat -c %d /dev/shm > /a; stat -L -c %d /moved > /b; cmp /a /b\nRUN ls /run/secrets /deep > /seen 2>&1 || true\n";
    let build = ground.build_with(wish, dockerfile, Context::default());
    assert_eq!(build["state"], "done", "{build} {}", ground.log(&build));
    assert_eq!(ground.sh("cat /length; ls /run/secrets /deep 2>/dev/null || echo none"), "9\nnone");
    let mut command = Command::new("grep");
    command.args(["-r", "-l", "hush-hush"]).arg(&ground.daemon.data_dir);
    let found = command.output().expect("it runs");
    assert_eq!(String::from_utf8_lossy(&found.stdout), "", "nothing of it is on the disk");
    let missing = "FROM BASE\nRUN --mount=type=secret,id=other,required=true true\n";
    let build = ground.build(missing, Context::default());
    assert!(
        build["reason"].as_str().expect("a reason").contains("line 2: the secret `other` was not given"),
        "{build}"
    );
}

#[test]
fn another_owners_steps_are_never_taken_for_ones_own() {
    let mut ground = ground();
    // Only its owner sees what a step wrote, by its own commands or because someone changed files in its sandbox.
    let dockerfile = "FROM BASE AS first\nRUN cat /proc/sys/kernel/random/uuid > /stamp\n\
        FROM BASE\nWORKDIR /app\nCOPY a /a\nCOPY --from=first /stamp /stamp\nRUN cat /proc/sys/kernel/random/uuid >> /stamp\n\
        WORKDIR /last\n";
    let context = || Context::default().file("a", "1");
    let first = ground.built(dockerfile, context());
    let (stamp, layers) = (ground.sh("cat /stamp"), ground.layer_names());
    assert_eq!((ground.cached(&first), stamp.lines().count()), (0, 2), "{}", ground.log(&first));
    let admin = ground.become_owner("bob");
    let others = ground.built(dockerfile, context());
    assert_eq!(ground.cached(&others), 0, "{}", ground.log(&others));
    let other = ground.sh("cat /stamp");
    let shared = stamp.lines().find(|line| other.contains(line));
    assert_eq!(shared, None, "a step of one owner is in the image of another");
    let made = layers.len() - 2;
    assert_eq!(
        ground.layers(),
        layers.len() + made,
        "all layers but the pulled and the finishing one are made again"
    );
    for (owner, stamp) in [("bob", other), ("the first", stamp)] {
        let again = ground.built(dockerfile, context());
        assert_eq!(ground.cached(&again), 4, "{owner}: {}", ground.log(&again));
        assert_eq!(ground.sh("cat /stamp"), stamp, "{owner}");
        ground.daemon.key.clone_from(&admin);
    }
}

#[test]
fn a_step_is_done_again_for_another_secret_and_never_seen_by_another_owner() {
    let mut ground = ground();
    let dockerfile = "FROM BASE\nRUN --mount=type=secret,id=token cat /run/secrets/token > /etc/app-token\nRUN wc -c < /etc/app-token > /length\n";
    // "ours-4711", "ours-4712" and "theirs" in base64.
    let build = |ground: &Ground, token: Option<&str>| {
        let secrets = token.map(|token| json!({"token": token})).unwrap_or_else(|| json!({}));
        let build =
            ground.build_with(json!({"template": "t", "secrets": secrets}), dockerfile, Context::default());
        assert_eq!(build["state"], "done", "{build} {}", ground.log(&build));
        (ground.cached(&build), ground.sh("cat /etc/app-token"))
    };
    assert_eq!(build(&ground, Some("b3Vycy00NzEx")), (0, "ours-4711".into()));
    assert_eq!(build(&ground, Some("b3Vycy00NzEx")), (2, "ours-4711".into()), "the same secret");
    assert_eq!(build(&ground, Some("b3Vycy00NzEy")), (0, "ours-4712".into()), "another secret");
    assert_eq!(build(&ground, Some("b3Vycy00NzEx")), (2, "ours-4711".into()), "the first one again");
    let without = ground.build(dockerfile, Context::default());
    assert_eq!(without["state"], "failed", "without a secret there is nothing to copy");
    // Neither the result of another owner's step nor whether the secrets are equal can be learnt.
    ground.become_owner("bob");
    assert_eq!(build(&ground, Some("dGhlaXJz")), (0, "theirs".into()));
    assert_eq!(build(&ground, Some("b3Vycy00NzEx")), (0, "ours-4711".into()));
}

#[test]
fn an_image_cannot_claim_a_layer_that_was_made_here() {
    let mut ground = ground();
    ground.built("FROM BASE\n", Context::default());
    let before = ground.layer_names();
    ground.built("FROM BASE\nRUN echo private > /private\n", Context::default());
    let made: Vec<String> = ground.layer_names().difference(&before).cloned().collect();
    assert_eq!(made.len(), 1, "{made:?}");
    ground.become_owner("bob");
    // Its configuration claims that its only layer is the one that another owner's step made.
    let honest = MadeImage::of(&Layer::busybox(), json!({}));
    let mut claiming = honest.clone();
    let mut manifest = honest.document();
    let config = honest.blobs[manifest["config"]["digest"].as_str().expect("a digest")].clone();
    let mut config: Value = serde_json::from_slice(&config).expect("JSON");
    config["rootfs"]["diff_ids"] = json!([format!("sha256:{}", made[0])]);
    let config = config.to_string().into_bytes();
    manifest["config"]["digest"] = json!(digest(&config));
    manifest["config"]["size"] = json!(config.len());
    claiming.blobs.insert(digest(&config), config);
    claiming.manifest = manifest.to_string().into_bytes();
    let name = ground.puppet.serve("claiming", "1", &claiming);
    let build = ground.build(&format!("FROM {name}\n"), Context::default());
    assert_eq!(build["state"], "failed", "{build}");
    let reason = build["reason"].as_str().expect("a reason");
    assert!(reason.contains("layer 1 of 1") && reason.contains("digest"), "{reason}");
}

#[test]
fn values_that_grow_with_each_line_are_refused() {
    let ground = ground();
    let before = ground.daemon.audit();
    let repeated = |first: &str, line: &str, count: usize| {
        format!("FROM BASE\nENV X=0123456789\n{first}\n{}", format!("{line}\n").repeat(count))
    };
    let long = "x".repeat(60_000);
    for (dockerfile, line, part) in [
        (repeated("ENV A=0123456789", "ENV A=$A$A", 40), 17, "a value may have at most 131072 bytes"),
        (repeated("ARG A=0123456789", "ARG A=$A${A}", 40), 17, "a value may have at most 131072 bytes"),
        (
            repeated("ENV A=x", "LABEL a=${A:-$A}$A$A", 1).replace("A=x", &format!("A={long}")),
            4,
            "a value may have",
        ),
        (
            format!("FROM BASE\nENV A={long}\nENV B=$A C=$A D=$A\nENV E=$A\n"),
            4,
            "the environment may have at most 262144 bytes",
        ),
        (
            format!("FROM BASE\nENV A={long}\nLABEL B=$A C=$A D=$A\nLABEL E=$A F=$A\n"),
            4,
            "all labels together",
        ),
        (format!("FROM BASE\nENV A={long}\nENV B=$A C=$A D=$A E=$A F=$A\n"), 3, "one instruction may have"),
        (
            format!("FROM BASE\nENV A={long}\nCOPY {} /x/\n", "$A ".repeat(1000)),
            3,
            "one instruction may have",
        ),
        (
            repeated("WORKDIR /", "WORKDIR $X$X$X$X$X$X$X$X$X$X", 100),
            44,
            "a working directory may have at most 4096 bytes",
        ),
        (format!("FROM BASE\nENV A={}x{}\n", "${B:-".repeat(9000), "}".repeat(9000)), 2, "16 deep"),
    ] {
        let build = ground.build(&dockerfile, Context::default());
        let reason = build["reason"].as_str().unwrap_or_else(|| panic!("it was built: {build}"));
        assert!(reason.contains(&format!("line {line}: ")) && reason.contains(part), "{part}: {reason}");
        assert!(ground.log(&build).contains("hint: "), "{part}");
    }
    ground.daemon.get("/v1/templates/t").expect_refusal(404, "template_not_found");
    ground.daemon.expect_nothing_beyond(&before);
}

#[test]
fn mistakes_are_told_with_their_line_and_leave_nothing() {
    let ground = ground();
    let post =
        |text: &str| ground.post(json!({"template": "t"}), Context::default().file("Dockerfile", text));
    for (text, line, part) in [
        ("FROM x\nRUNN y\n", 2, "`RUNN` is not a supported instruction"),
        ("FROM x\n\nCOPY ../secret /\n", 3, "leads out of the context"),
        ("RUN y\n", 1, "before the first FROM"),
        ("FROM x\nADD https://example.com/a /\n", 2, "not a local file"),
    ] {
        let refused = post(text).expect_refusal(400, "dockerfile_invalid");
        assert_eq!(refused["details"]["line"], line, "{refused}");
        assert!(refused["message"].as_str().expect("text").contains(part), "{refused}");
        assert!(refused["hint"].is_string(), "{refused}");
    }
    ground
        .post(json!({"template": "t"}), Context::default().file("other", ""))
        .expect_refusal(400, "context_invalid");
    let quantity = json!({"template": "t", "spec": {"memory": "12Q"}});
    ground
        .post(quantity, Context::default().file("Dockerfile", "FROM x"))
        .expect_refusal(400, "invalid_request");
    let request = ground.daemon.request("POST", "/v1/builds").body(b"rubbish".to_vec());
    request.send(ground.daemon.address).expect_refusal(400, "invalid_request");
    let request = ground.daemon.request("POST", "/v1/builds").header("shoal-build", r#"{"template": "t"}"#);
    request.body(b"rubbish".to_vec()).send(ground.daemon.address).expect_refusal(400, "context_invalid");

    let before = ground.daemon.audit();
    for (dockerfile, part) in [
        ("FROM BASE\nRUN true\nRUN echo loud; exit 7\n", "line 3: the command exited with 7"),
        ("FROM BASE\nCOPY missing /\n", "line 2: `missing` is not in the context"),
        ("FROM BASE\nARG UP=..\nCOPY $UP/x /\n", "leads out of the context"),
        ("FROM BASE\nUSER nobody-here\nRUN true\n", "line 3"),
        ("FROM localhost:1/none:1\n", "line 1"),
    ] {
        let build = ground.build(dockerfile, Context::default());
        assert_eq!(build["state"], "failed", "{dockerfile}");
        assert!(build["reason"].as_str().expect("a reason").contains(part), "{build}");
        assert!(ground.log(&build).contains(part));
    }
    assert_eq!(ground.daemon.list(), Vec::<Value>::new(), "no sandbox is left");
    ground.daemon.expect_nothing_beyond(&before);
    ground.daemon.get("/v1/templates/t").expect_refusal(404, "template_not_found");
    let names = ground.daemon.get("/v1/images").expect(200)["images"].to_string();
    assert!(!names.contains("localhost/build"), "{names}");
    ground.built("FROM BASE\nRUN true\n", Context::default());
}

#[test]
fn a_crash_in_the_middle_leaves_nothing_half_made_and_the_next_try_works() {
    let mut ground = ground();
    let dockerfile = "FROM BASE\nRUN echo one > /one\nRUN echo waiting; test -e /never || sleep 600\n"
        .replace("BASE", &ground.base);
    let context = || Context::default().file("Dockerfile", &dockerfile);
    let started = ground.post(json!({"template": "t"}), context()).expect(202);
    let id = started["id"].as_str().expect("an id").to_owned();
    until_true("the second step runs", || {
        let log = ground.daemon.get(&format!("/v1/builds/{id}/log"));
        String::from_utf8_lossy(&log.body).contains("\nwaiting\n")
    });
    ground.daemon.crash();
    let build = ground.over(&id);
    assert!(build["reason"].as_str().expect("a reason").contains("stopped in its middle"), "{build}");
    assert!(ground.log(&build).contains("waiting"), "the log stays");
    let sandboxes = ground.daemon.data_dir.join("sandboxes");
    until_true("nothing of its sandbox is on the disk", || {
        fs::read_dir(&sandboxes).expect("a directory").count() == 0
    });
    ground.daemon.get("/v1/templates/t").expect_refusal(404, "template_not_found");
    let again = ground.built("FROM BASE\nRUN echo one > /one\nRUN echo two > /two\n", Context::default());
    assert!(ground.log(&again).contains("  cached\n"), "steps before the crash are cached");
    assert_eq!(ground.sh("cat /one /two"), "one\ntwo");
}

#[test]
fn an_image_can_be_built_on_the_machine_itself() {
    let mut ground = ground();
    // Both unions of `host` are written to, over what is below and over what the previous step wrote.
    let dockerfile = "FROM host AS tools\n\
        RUN mkdir -p /opt/x /usr/local/lib/y && echo one > /opt/x/one && echo two > /usr/local/lib/y/two \
            && rm -r /usr/share/doc /home/user && chmod 700 /srv\n\
        COPY note /usr/share/\n\
        RUN rm /opt/x/one && ln /usr/local/lib/y/two /usr/local/lib/y/again && chown 1000:1000 /usr/share/note\n\
        FROM tools\n\
        WORKDIR /srv/app\n\
        RUN echo three > three\n";
    let build = ground.built(dockerfile, Context::default().file("note", "note\n"));
    assert!(!ground.log(&build).contains("cached"));
    let look = "ls -A /opt/x /home /usr/share/doc 2>&1; cat /usr/share/note /usr/local/lib/y/again three; \
        stat -c '%a %u' /srv /usr/share/note; [ /usr/local/lib/y/two -ef /usr/local/lib/y/again ] && echo same; \
        python3 -c 'print(6 * 7)'";
    let seen = "ls: cannot access '/usr/share/doc': No such file or directory\n/home:\n\n/opt/x:\nnote\ntwo\nthree\n\
        700 0\n644 1000\nsame\n42";
    assert_eq!(ground.sh(look), seen);
    assert!(Path::new("/usr/share/doc").exists(), "the machine is as it was");
    let again = ground.built(dockerfile, Context::default().file("note", "note\n"));
    assert_eq!(ground.log(&again).matches("  cached\n").count(), 4, "{}", ground.log(&again));
    assert_eq!(again["version"], 1, "the same image is the same version");
    // The rows record that it is over the machine, and not only memory.
    ground.daemon.crash();
    assert_eq!(ground.sh(look), seen);
}

#[test]
fn kills_all_along_a_build_leave_nothing_half_made() {
    let mut ground = ground();
    // Large enough that steps and captures take a while.
    let dockerfile = "FROM BASE\n\
        RUN i=0; while [ $i -lt 300 ]; do echo $i > /$i; i=$((i + 1)); done; dd if=/dev/zero of=/big bs=1M count=32 2>/dev/null\n\
        RUN rm -r /old /1* && i=0; while [ $i -lt 300 ]; do echo $i > /etc/$i; i=$((i + 1)); done\n"
        .replace("BASE", &ground.base);
    for kill in 0..6 {
        let context = Context::default().file("Dockerfile", &dockerfile);
        let started = ground.post(json!({"template": "t"}), context).expect(202);
        let id = started["id"].as_str().expect("an id").to_owned();
        // Later each time, judged by the disk: a sandbox, an unfinished layer, a layer.
        let mark = if kill % 2 == 0 { "sandboxes" } else { "images/layers" };
        let count =
            |ground: &Ground| fs::read_dir(ground.daemon.data_dir.join(mark)).map_or(0, Iterator::count);
        let before = count(&ground);
        until_true("it has come that far, or has ended", || {
            count(&ground) != before
                || ground.daemon.get(&format!("/v1/builds/{id}")).expect(200)["state"] != "running"
        });
        ground.daemon.crash();
        ground.over(&id);
        until_true("its sandboxes are gone", || {
            let left = fs::read_dir(ground.daemon.data_dir.join("sandboxes")).expect("a directory").count();
            ground.daemon.list().is_empty() && left == 0
        });
        let layers = fs::read_dir(ground.daemon.data_dir.join("images/layers")).expect("a directory");
        let names = layers.map(|entry| entry.expect("an entry").file_name().into_string().expect("text"));
        let unfinished: Vec<String> = names.filter(|name| name.starts_with("unfinished")).collect();
        assert_eq!(unfinished, Vec::<String>::new(), "after kill {kill}");
    }
    let build = ground.over(
        ground.post(json!({"template": "t"}), Context::default().file("Dockerfile", &dockerfile)).expect(202)
            ["id"]
            .as_str()
            .expect("an id"),
    );
    assert_eq!(build["state"], "done", "{build}\n{}", ground.log(&build));
    let seen = ground
        .sh("ls / | grep -c '^[0-9]'; ls /etc | grep -c '^[0-9]'; wc -c < /big; ls -d /old 2>&1 | wc -l");
    assert_eq!(seen, "189\n300\n33554432\n1");
}

#[test]
fn nobody_reaches_the_sandbox_of_a_running_build() {
    let mut ground = ground();
    let dockerfile = "FROM BASE\nRUN echo waiting; sleep 600\n".replace("BASE", &ground.base);
    let context = Context::default().file("Dockerfile", &dockerfile);
    let started = ground.post(json!({"template": "t"}), context).expect(202);
    let id = started["id"].as_str().expect("an id").to_owned();
    until_true("the step runs", || {
        let log = ground.daemon.get(&format!("/v1/builds/{id}/log"));
        String::from_utf8_lossy(&log.body).contains("\nwaiting\n")
    });
    let sandboxes = ground.daemon.data_dir.join("sandboxes");
    let names = || -> Vec<String> {
        let entries = fs::read_dir(&sandboxes).expect("a directory");
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
    };
    let steps = names();
    assert_eq!(steps.len(), 1, "{steps:?}");
    let path = format!("/v1/sandboxes/{}", steps[0]);
    let attack = |daemon: &Daemon| {
        assert_eq!(daemon.list(), Vec::<Value>::new());
        daemon.get(&path).expect_refusal(404, "sandbox_not_found");
        daemon.get(&format!("{path}/commands")).expect_refusal(404, "sandbox_not_found");
        daemon.get(&format!("{path}/stats")).expect_refusal(404, "sandbox_not_found");
        let command = json!({"command": "echo stolen > /stolen"});
        daemon.post(&format!("{path}/commands"), &command).expect_refusal(404, "sandbox_not_found");
        let file = format!("{path}/files?path=/stolen");
        let written = daemon.request("PUT", &file).body("stolen").send(daemon.address);
        written.expect_refusal(404, "sandbox_not_found");
        daemon.delete(&path).expect_refusal(404, "sandbox_not_found");
    };
    attack(&ground.daemon);
    let owner = ground.become_owner("eve");
    attack(&ground.daemon);
    ground.daemon.key = owner;
    assert_eq!(names(), steps, "the step still runs");
    ground.daemon.delete(&format!("/v1/builds/{id}")).expect(204);
    until_true("nothing of its sandbox is left", || names().is_empty());
}

#[test]
fn a_build_can_be_cancelled() {
    let ground = ground();
    let dockerfile = "FROM BASE\nRUN echo waiting; sleep 600\n".replace("BASE", &ground.base);
    let started =
        ground.post(json!({"template": "t"}), Context::default().file("Dockerfile", &dockerfile)).expect(202);
    let path = format!("/v1/builds/{}", started["id"].as_str().expect("an id"));
    until_true("it runs", || {
        String::from_utf8_lossy(&ground.daemon.get(&format!("{path}/log")).body).contains("\nwaiting\n")
    });
    ground.daemon.delete(&path).expect(204);
    ground.daemon.get(&path).expect_refusal(404, "build_not_found");
    assert_eq!(ground.daemon.list(), Vec::<Value>::new());
}

fn shoal(ground: &Ground, directory: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary());
    command.args(arguments).env_remove("SHOAL_DATA_DIR").env("HOME", ground.daemon.home.path());
    command
        .env("SHOAL_URL", format!("http://{}", ground.daemon.address))
        .env("SHOAL_API_KEY", &ground.daemon.key);
    command.env("TOKEN", "hush").current_dir(directory).stdin(Stdio::null());
    command.output().expect("it runs")
}

#[test]
fn the_command_line_sends_the_context_and_shows_the_log() {
    let ground = ground();
    let directory = ground.daemon.home.join("project");
    fs::create_dir_all(directory.join("src")).expect("made");
    let dockerfile = format!(
        "FROM {}\nARG WHO\nCOPY . /all\nRUN --mount=type=secret,id=t echo built for $WHO with $(wc -c < /run/secrets/t)\n",
        ground.base
    );
    for (path, text) in [
        ("Dockerfile", dockerfile.as_str()),
        ("src/kept", "kept"),
        ("src/left.log", "left"),
        ("notes.md", "notes"),
        (".dockerignore", "**/*.log\n*.md\n!README.md\n"),
    ] {
        fs::write(directory.join(path), text).expect("written");
    }
    let built = shoal(
        &ground,
        &directory,
        &[
            "build",
            "-t",
            "t",
            "--build-arg",
            "WHO=you",
            "--secret",
            "id=t,env=TOKEN",
            "--memory",
            "256Mi",
            ".",
        ],
    );
    let log = String::from_utf8_lossy(&built.stderr).into_owned();
    assert!(built.status.success(), "{log}");
    assert_eq!(String::from_utf8_lossy(&built.stdout), "t  version 1  ready\n");
    assert!(log.contains("built for you with 4\n"), "{log}");
    assert_eq!(ground.sh("cd /all; find . -type f | sort"), "./.dockerignore\n./Dockerfile\n./src/kept");
    assert_eq!(ground.daemon.get("/v1/templates/t").expect(200)["limits"]["memory_bytes"], 256 << 20);
    fs::write(directory.join("Dockerfile"), "FROM x\nCOPPY a b\n").expect("written");
    let typo = shoal(&ground, &directory, &["build", "-t", "t"]);
    let told = String::from_utf8_lossy(&typo.stderr).into_owned();
    assert_eq!(typo.status.code(), Some(1));
    assert!(
        told.contains("line 2: `COPPY` is not a supported instruction")
            && told.contains("did you mean COPY?"),
        "{told}"
    );
}
