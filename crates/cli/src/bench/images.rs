//! Images: pulled and unpacked beside the tools that people use for it, and the first sandbox made from one.
//!
//! Needs a registry and those tools: where `docker-registry`, `skopeo` or `umoci` is not installed, the rows are left out.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use client::{Client, InUse};
use wire::api::{CreateSandbox, PullImage};

use super::comparators::{installed, quietly};
use super::report::{Figure, Row, median};
use super::run_true;

/// How often each is measured: each takes seconds.
const ROUNDS: usize = 3;
/// How long the registry may take to listen.
const START_MAX: Duration = Duration::from_secs(10);
const START_STEP: Duration = Duration::from_millis(20);
/// What the image holds: programs, as most images do, and what the smallest of them needs to run. For a shell at `/`.
const CONTENTS: &str = "bin lib lib64 usr/bin usr/lib64 usr/lib/python3 usr/lib/*-linux-gnu/ld-linux* \
     usr/lib/*-linux-gnu/libc.so.6";

/// The rows about images; none where a tool is missing.
pub async fn rows(client: &Client, scratch: &Path) -> anyhow::Result<Vec<Row>> {
    if let Some(missing) = ["docker-registry", "skopeo", "umoci", "tar"].iter().find(|tool| !installed(tool))
    {
        eprintln!("left out: images: {missing} is not installed");
        return Ok(Vec::new());
    }
    let registry = Registry::start(scratch).await?;
    let reference = registry.fill(scratch)?;
    let source = format!("docker://{reference}");
    let (mut pulls, mut creates) = (Vec::new(), Vec::new());
    let mut bytes = 0;
    for _ in 0..ROUNDS {
        let wish = PullImage { reference: reference.clone(), insecure: true, ..Default::default() };
        let began = Instant::now();
        let images = client.pull_image(&wish).await?.finished().await?;
        pulls.push(began.elapsed());
        bytes = images.first().map_or(0, |image| image.unpacked_bytes);
        let began = Instant::now();
        let create = CreateSandbox { image: Some(reference.clone()), ..Default::default() };
        let sandbox = client.create_sandbox(&create).await?;
        run_true(client, sandbox.id).await?;
        creates.push(began.elapsed());
        client.delete_sandbox(sandbox.id).await?;
        client.remove_image(&reference, InUse::Refuse).await?;
    }
    let (layout, bundle) = (scratch.join("skopeo"), scratch.join("umoci"));
    let mut theirs = Vec::new();
    for _ in 0..ROUNDS {
        let image = format!("{}:1", layout.display());
        let began = Instant::now();
        quietly(Command::new("skopeo").args(COPY).args([source.as_str(), &format!("oci:{image}")]))?;
        quietly(Command::new("umoci").args(["unpack", "--image", &image]).arg(&bundle))?;
        theirs.push(began.elapsed());
        for directory in [&layout, &bundle] {
            std::fs::remove_dir_all(directory).context("cannot remove what was unpacked")?;
        }
    }
    let mut pull = Row::new("image pulled and unpacked", Figure::Throughput(bytes, median(pulls)));
    pull.compare("skopeo and umoci", Some(median(theirs)));
    let first = Row::new("first create from it, to first result", Figure::Time(median(creates)));
    Ok(vec![pull, first])
}

const COPY: [&str; 5] =
    ["--insecure-policy", "copy", "--quiet", "--src-tls-verify=false", "--dest-tls-verify=false"];

/// A registry that ends with the run.
struct Registry {
    child: Child,
    name: String,
}

impl Registry {
    async fn start(scratch: &Path) -> anyhow::Result<Self> {
        let (config, log) = (scratch.join("registry.yml"), scratch.join("registry.log"));
        let text = format!(
            "version: 0.1\nlog: {{level: info, formatter: text}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\n\
             http: {{addr: \"127.0.0.1:0\"}}\n",
            scratch.join("registry").display()
        );
        std::fs::write(&config, text).context("cannot write the registry's configuration")?;
        let said = std::fs::File::create(&log).context("cannot make the registry's log")?;
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(said)
            .spawn()
            .context("cannot start docker-registry")?;
        let mut registry = Self { child, name: String::new() };
        let deadline = Instant::now() + START_MAX;
        while registry.name.is_empty() {
            ensure!(Instant::now() < deadline, "docker-registry does not listen");
            tokio::time::sleep(START_STEP).await;
            let said = std::fs::read_to_string(&log).unwrap_or_default();
            if let Some((_, rest)) = said.split_once("listening on ")
                && rest.contains('\n')
            {
                registry.name = rest.split(['"', ' ', '\n', ',']).next().unwrap_or_default().to_owned();
            }
        }
        Ok(registry)
    }

    /// An image of one layer with the machine's own programs.
    fn fill(&self, scratch: &Path) -> anyhow::Result<String> {
        let (layout, tar) = (scratch.join("layout"), scratch.join("layer.tar"));
        // Some machines lack some of these, which is no harm.
        let script = format!("cd / && tar -cf \"$0\" $(ls -d {CONTENTS} 2>/dev/null)");
        quietly(Command::new("sh").args(["-c", &script]).arg(&tar))?;
        let image = format!("{}:1", layout.display());
        quietly(Command::new("umoci").args(["init", "--layout"]).arg(&layout))?;
        quietly(Command::new("umoci").args(["new", "--image", &image]))?;
        quietly(Command::new("umoci").args(["raw", "add-layer", "--image", &image]).arg(&tar))?;
        let reference = format!("{}/bench:1", self.name);
        let (from, to) = (format!("oci:{image}"), format!("docker://{reference}"));
        quietly(Command::new("skopeo").args(COPY).args([from, to]))?;
        Ok(reference)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        // It may have ended by itself; then there is nothing to end.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
