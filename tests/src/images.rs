//! Images for tests: layers written byte by byte, packed as an OCI layout, pushed with `skopeo` to a real registry on
//! loopback; and a fake registry that misbehaves as a test requires.

use std::collections::HashMap;
use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::daemon::Home;
use crate::wait::until;

/// The digest of bytes, as registries write it.
pub fn digest(bytes: &[u8]) -> String {
    let hash: [u8; 32] = Sha256::digest(bytes).into();
    let digits: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digits}")
}

/// A tar stream under construction. Nothing is checked, so that tests can build invalid ones.
#[derive(Debug, Clone, Default)]
pub struct Layer(Vec<u8>);

impl Layer {
    /// An entry with every field given.
    pub fn entry(
        mut self,
        kind: u8,
        path: &str,
        mode: u32,
        owner: (u32, u32),
        link: &str,
        contents: &[u8],
    ) -> Self {
        let mut block = [0u8; 512];
        block[..path.len()].copy_from_slice(path.as_bytes());
        let (uid, gid) = (u64::from(owner.0), u64::from(owner.1));
        for (range, number) in [
            (100..107, u64::from(mode)),
            (108..115, uid),
            (116..123, gid),
            (124..135, contents.len() as u64),
            (136..147, 1_000_000_000),
        ] {
            let width = range.len();
            block[range].copy_from_slice(format!("{number:0width$o}").as_bytes());
        }
        block[156] = kind;
        block[157..157 + link.len()].copy_from_slice(link.as_bytes());
        block[257..263].copy_from_slice(b"ustar\0");
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        self.0.extend_from_slice(&block);
        self.0.extend_from_slice(contents);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    /// A file that belongs to root.
    pub fn file(self, path: &str, contents: &str) -> Self {
        self.entry(b'0', path, 0o644, (0, 0), "", contents.as_bytes())
    }

    /// A directory that belongs to root.
    pub fn directory(self, path: &str) -> Self {
        self.entry(b'5', path, 0o755, (0, 0), "", b"")
    }

    /// A symbolic link.
    pub fn link(self, path: &str, target: &str) -> Self {
        self.entry(b'2', path, 0o777, (0, 0), target, b"")
    }

    /// A hard link.
    pub fn hard_link(self, path: &str, target: &str) -> Self {
        self.entry(b'1', path, 0o644, (0, 0), target, b"")
    }

    /// Busybox with a shell and the usual tools, accounts, and the directories that they expect.
    pub fn busybox() -> Self {
        let program = fs::read("/bin/busybox").expect("the package busybox-static is installed");
        let mut layer = Self::default()
            .directory("bin/")
            .entry(b'0', "bin/busybox", 0o755, (0, 0), "", &program)
            .directory("etc/")
            .file("etc/passwd", "root:x:0:0::/root:/bin/sh\nada:x:1000:1000::/home/ada:/bin/sh\n")
            .file("etc/group", "root:x:0:\nada:x:1000:\n")
            .directory("home/")
            .entry(b'5', "home/ada/", 0o755, (1000, 1000), "", b"");
        for tool in [
            "sh",
            "ls",
            "cat",
            "echo",
            "id",
            "env",
            "find",
            "stat",
            "pwd",
            "sort",
            "test",
            "touch",
            "true",
            "wc",
            "head",
            "sleep",
            "sha256sum",
            "readlink",
            "rm",
        ] {
            layer = layer.hard_link(&format!("bin/{tool}"), "bin/busybox");
        }
        layer
    }

    /// The stream with its end.
    pub fn tar(&self) -> Vec<u8> {
        self.clone().into_tar()
    }

    /// The same without a copy.
    pub fn into_tar(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 1024, 0);
        self.0
    }
}

/// How a layer is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Packing {
    /// Not at all.
    Plain,
    /// Like most layers.
    Gzip,
    /// Like newer layers.
    Zstd,
}

impl Packing {
    /// Compresses.
    pub fn pack(self, bytes: &[u8]) -> Vec<u8> {
        match self {
            Self::Plain => bytes.to_vec(),
            Self::Gzip => {
                let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
                encoder.write_all(bytes).expect("memory takes it");
                encoder.finish().expect("memory takes it")
            }
            Self::Zstd => {
                ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest)
            }
        }
    }

    fn media_type(self) -> &'static str {
        match self {
            Self::Plain => "application/vnd.oci.image.layer.v1.tar",
            Self::Gzip => "application/vnd.oci.image.layer.v1.tar+gzip",
            Self::Zstd => "application/vnd.oci.image.layer.v1.tar+zstd",
        }
    }
}

/// An image as blobs, valid or not.
#[derive(Debug, Clone)]
pub struct MadeImage {
    /// By digest.
    pub blobs: HashMap<String, Vec<u8>>,
    /// The digest of its manifest.
    pub manifest: Vec<u8>,
}

impl MadeImage {
    /// An image of these layers, the lowest first, with this `config` part in its configuration.
    pub fn new(layers: &[(&[u8], Packing)], config: Value) -> Self {
        let mut blobs = HashMap::new();
        let mut descriptors = Vec::new();
        let mut contents = Vec::new();
        for (tar, packing) in layers {
            let blob = packing.pack(tar);
            contents.push(digest(tar));
            descriptors.push(
                json!({"mediaType": packing.media_type(), "digest": digest(&blob), "size": blob.len()}),
            );
            blobs.insert(digest(&blob), blob);
        }
        let architecture = if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" };
        let config = json!({
            "os": "linux", "architecture": architecture, "config": config,
            "rootfs": {"type": "layers", "diff_ids": contents},
        });
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": digest(&config), "size": config.len(),
            },
            "layers": descriptors,
        });
        blobs.insert(digest(&config), config);
        Self { blobs, manifest: manifest.to_string().into_bytes() }
    }

    /// One layer, for most tests.
    pub fn of(layer: &Layer, config: Value) -> Self {
        Self::new(&[(&layer.tar(), Packing::Gzip)], config)
    }

    /// The manifest, for changes.
    pub fn document(&self) -> Value {
        serde_json::from_slice(&self.manifest).expect("a manifest is JSON")
    }

    /// Writes an OCI layout with one tag.
    pub fn write_layout(&self, directory: &Path, tag: &str) {
        let blobs = directory.join("blobs/sha256");
        fs::create_dir_all(&blobs).expect("the test's own directory takes directories");
        let write = |name: &str, bytes: &[u8]| {
            fs::write(blobs.join(name.strip_prefix("sha256:").unwrap_or(name)), bytes)
                .expect("it takes files");
        };
        self.blobs.iter().for_each(|(name, bytes)| write(name, bytes));
        write(&digest(&self.manifest), &self.manifest);
        let index = json!({
            "schemaVersion": 2,
            "manifests": [{
                "mediaType": "application/vnd.oci.image.manifest.v1+json",
                "digest": digest(&self.manifest), "size": self.manifest.len(),
                "annotations": {"org.opencontainers.image.ref.name": tag},
            }],
        });
        fs::write(directory.join("index.json"), index.to_string()).expect("it takes files");
        fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion": "1.0.0"}"#)
            .expect("it takes files");
    }
}

/// Runs a program, which must succeed.
#[track_caller]
pub fn program(command: &mut Command) -> String {
    let output = command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// `skopeo`, with the options of all calls.
pub fn skopeo(arguments: &[&str]) -> Command {
    let mut command = Command::new("skopeo");
    command.args([
        "--insecure-policy",
        "copy",
        "--quiet",
        "--dest-tls-verify=false",
        "--src-tls-verify=false",
    ]);
    command.args(arguments);
    command
}

/// Debian's `docker-registry` on its own port, with its files in the test's directory.
#[derive(Debug)]
pub struct Registry {
    /// `host:port`.
    pub name: String,
    child: Child,
    home: Home,
}

impl Registry {
    /// Starts one that is readable for everyone.
    #[track_caller]
    pub fn start() -> Self {
        Self::start_with(Home::new(), "")
    }

    /// Starts one for the user `ada` with the password `secret` only.
    #[track_caller]
    pub fn start_guarded() -> Self {
        let home = Home::new();
        let users = home.join("htpasswd");
        fs::write(&users, "ada:$2b$04$iDuHdlJruw2Irq3sB8PILOuB2dejdMCFCLTSCjSjKZdDN6KRN8HqS\n")
            .expect("the test's own directory takes files");
        let text = format!("auth:\n  htpasswd: {{realm: test, path: {}}}\n", users.display());
        Self::start_with(home, &text)
    }

    #[track_caller]
    fn start_with(home: Home, more: &str) -> Self {
        let (config, log) = (home.join("config.yml"), home.join("registry.log"));
        let storage = home.join("storage");
        let text = format!(
            "version: 0.1\nlog: {{level: info, formatter: text}}\nstorage:\n  filesystem: {{rootdirectory: {}}}\n\
             http: {{addr: \"127.0.0.1:0\"}}\n{more}",
            storage.display()
        );
        fs::write(&config, text).expect("the test's own directory takes files");
        let stderr = fs::File::create(&log).expect("the test's own directory takes files");
        let child = Command::new("docker-registry")
            .arg("serve")
            .arg(&config)
            .env("OTEL_TRACES_EXPORTER", "none")
            .stdin(Stdio::null())
            .stdout(stderr.try_clone().expect("a file can be shared"))
            .stderr(stderr)
            .spawn()
            .expect("the package docker-registry is installed");
        let name = until("the registry listens", || {
            let said = fs::read_to_string(&log).unwrap_or_default();
            let (_, rest) = said.split_once("listening on ")?;
            let address = rest.split(['"', ' ', '\n', ',']).next()?;
            rest.contains('\n').then(|| address.to_owned())
        });
        Self { name, child, home }
    }

    /// The configuration line of a daemon that uses it.
    pub fn config(&self) -> String {
        format!("insecure_registries = [\"{}\"]\n", self.name)
    }

    /// Pushes an image, and returns its reference.
    #[track_caller]
    pub fn push(&self, name: &str, image: &MadeImage) -> String {
        self.push_with(name, image, &[])
    }

    /// The same, with more arguments for `skopeo copy`.
    #[track_caller]
    pub fn push_with(&self, name: &str, image: &MadeImage, arguments: &[&str]) -> String {
        let layout = self.home.join(format!("layout-{}", name.replace(['/', ':'], "-")));
        image.write_layout(&layout, "t");
        let to = format!("{}/{name}", self.name);
        let (source, target) = (format!("oci:{}:t", layout.display()), format!("docker://{to}"));
        program(&mut skopeo(&[arguments, &[&source, &target]].concat()));
        to
    }

    /// A path for further files of the test beside it.
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.join(name)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What a misbehaving registry does on one path.
#[derive(Debug, Clone)]
pub enum Deed {
    /// Serves it correctly, with ranges.
    Serve(Vec<u8>),
    /// Sends this many bytes of a range and cuts the connection, this many times; then serves it.
    Cut {
        /// All of it.
        bytes: Vec<u8>,
        /// Sent each time.
        after: usize,
        /// How often.
        times: usize,
    },
    /// Sends this many bytes and then nothing until the test ends; ranges are served.
    Stall {
        /// All of it.
        bytes: Vec<u8>,
        /// Sent before.
        after: usize,
    },
    /// A fixed response.
    Answer(u16, Vec<(String, String)>, Vec<u8>),
}

/// A request that came.
#[derive(Debug, Clone)]
pub struct Seen {
    /// With its query.
    pub target: String,
    /// Names in lower case.
    pub headers: HashMap<String, String>,
}

#[derive(Default)]
struct Script {
    deeds: HashMap<String, Deed>,
    seen: Vec<Seen>,
    /// What every path under `/v2/` requires.
    guard: Option<Guard>,
}

/// Who may read.
#[derive(Debug, Clone)]
pub enum Guard {
    /// Clients that send this header.
    Basic(String),
    /// Clients that send this token, which this URL issues.
    Bearer(String, String),
}

/// A registry with scripted behaviour.
pub struct Puppet {
    /// Where it listens.
    pub address: SocketAddr,
    script: Arc<Mutex<Script>>,
}

impl Puppet {
    /// Starts one. Its threads end with the test's process.
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback has a free port");
        let address = listener.local_addr().expect("a listener has an address");
        let script = Arc::new(Mutex::new(Script::default()));
        let shared = Arc::clone(&script);
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let script = Arc::clone(&shared);
                std::thread::spawn(move || serve(stream, &script));
            }
        });
        Self { address, script }
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves an image under a name and tag, and returns its reference.
    pub fn serve(&self, name: &str, tag: &str, image: &MadeImage) -> String {
        let mut script = self.script();
        let manifest = Deed::Serve(image.manifest.clone());
        script.deeds.insert(format!("/v2/{name}/manifests/{tag}"), manifest.clone());
        script.deeds.insert(format!("/v2/{name}/manifests/{}", digest(&image.manifest)), manifest);
        for (digest, bytes) in &image.blobs {
            script.deeds.insert(format!("/v2/{name}/blobs/{digest}"), Deed::Serve(bytes.clone()));
        }
        format!("{}/{name}:{tag}", self.address)
    }

    /// Sets the behaviour of a path.
    pub fn on(&self, path: &str, deed: Deed) {
        self.script().deeds.insert(path.to_owned(), deed);
    }

    /// Requires authentication from now on.
    pub fn guard(&self, guard: Guard) {
        self.script().guard = Some(guard);
    }

    /// All requests so far whose target contains this.
    pub fn seen(&self, part: &str) -> Vec<Seen> {
        self.script().seen.iter().filter(|seen| seen.target.contains(part)).cloned().collect()
    }

    /// The configuration line of a daemon that uses it.
    pub fn config(&self) -> String {
        format!("insecure_registries = [\"{}\"]\n", self.address)
    }
}

fn serve(stream: TcpStream, script: &Mutex<Script>) {
    let mut reader = BufReader::new(stream);
    // One request after the other, until either side closes.
    while let Ok(Some(seen)) = read_request(&mut reader) {
        let (guard, deed) = {
            let mut script = script.lock().unwrap_or_else(PoisonError::into_inner);
            script.seen.push(seen.clone());
            let path = seen.target.split('?').next().unwrap_or_default().to_owned();
            let deed = match script.deeds.get_mut(&path) {
                None => Deed::Answer(404, Vec::new(), b"{}".to_vec()),
                Some(deed) => {
                    let now = deed.clone();
                    if let Deed::Cut { bytes, times, .. } = deed {
                        match *times {
                            0 => *deed = Deed::Serve(std::mem::take(bytes)),
                            _ => *times -= 1,
                        }
                    }
                    now
                }
            };
            (script.guard.clone().filter(|_| path.starts_with("/v2/")), deed)
        };
        let authorization = seen.headers.get("authorization").map(String::as_str).unwrap_or_default();
        let challenge = match &guard {
            Some(Guard::Basic(wanted)) if authorization != wanted => Some("Basic realm=\"test\"".to_owned()),
            Some(Guard::Bearer(token, realm)) if authorization != format!("Bearer {token}") => {
                Some(format!("Bearer realm=\"{realm}\",service=\"test\""))
            }
            Some(_) | None => None,
        };
        let done = match challenge {
            Some(challenge) => {
                answer(reader.get_mut(), 401, &[("www-authenticate".into(), challenge)], b"{}", 2)
            }
            None => perform(reader.get_mut(), &seen, &deed),
        };
        if done.is_err() {
            return;
        }
    }
}

fn read_request(reader: &mut BufReader<TcpStream>) -> io::Result<Option<Seen>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let target = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = HashMap::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            return Ok(Some(Seen { target, headers }));
        }
        if let Some((name, value)) = line.split_once(':') {
            headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
        }
    }
}

fn perform(stream: &mut TcpStream, seen: &Seen, deed: &Deed) -> io::Result<()> {
    let start = seen
        .headers
        .get("range")
        .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let part = |bytes: &[u8]| match start {
        Some(start) if start <= bytes.len() => {
            let headers =
                vec![("content-range".to_owned(), format!("bytes {start}-{}/{}", bytes.len(), bytes.len()))];
            (206, headers, bytes[start..].to_vec())
        }
        _ => (200, Vec::new(), bytes.to_vec()),
    };
    match deed {
        Deed::Serve(bytes) | Deed::Cut { bytes, times: 0, .. } => {
            let (status, headers, bytes) = part(bytes);
            answer(stream, status, &headers, &bytes, bytes.len())
        }
        Deed::Cut { bytes, after, .. } => {
            let (status, headers, bytes) = part(bytes);
            let some = &bytes[..bytes.len().min(*after)];
            answer(stream, status, &headers, some, bytes.len())?;
            Err(io::ErrorKind::ConnectionAborted.into())
        }
        Deed::Stall { bytes, after } => {
            let (status, headers, rest) = part(bytes);
            if start.is_some() {
                return answer(stream, status, &headers, &rest, rest.len());
            }
            answer(stream, status, &headers, &rest[..rest.len().min(*after)], rest.len())?;
            // Until the other side closes.
            let mut nothing = [0; 1];
            let _ = io::Read::read(stream, &mut nothing);
            Err(io::ErrorKind::ConnectionAborted.into())
        }
        Deed::Answer(status, headers, body) => answer(stream, *status, headers, body, body.len()),
    }
}

fn answer(
    stream: &mut TcpStream,
    status: u16,
    headers: &[(String, String)],
    body: &[u8],
    announced: usize,
) -> io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} X\r\ncontent-length: {announced}\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}
