//! Bytes: the output of a command and files, beside the same bytes through plain sockets.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use bytes::Bytes;
use client::{Client, StreamEvent, Upload, WriteFile};
use wire::api::{CreateSandbox, RunCommand};

use super::langsmith;
use super::report::{Figure, Row, median};
use crate::daemon::find::read_key;

/// How much is sent each time: long enough that the start of a process does not show.
const BYTES: u64 = 256 << 20;
/// How often each is measured.
const ROUNDS: usize = 9;
/// What is read and written at once, as most programs do.
const PIECE: usize = 64 << 10;
/// Pieces of an upload that wait to be sent.
const PIECES_WAITING: usize = 8;
/// What is asked of the plain server, at most.
const REQUEST_MAX: usize = 8192;

/// All rows about bytes.
pub async fn rows(client: &Client, data_dir: &Path, scratch: &Path) -> anyhow::Result<Vec<Row>> {
    let sandbox = client.create_sandbox(&CreateSandbox::default()).await?.id;
    // Each by turns with what it is compared with, so that what else goes on meets both.
    let (mut output, mut cats) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        output.push(stream_output(client, sandbox).await?);
        cats.push(beside(cat_to_cat).await?);
    }
    let mut row = Row::new("256 MiB of output, native stream", Figure::Throughput(BYTES, median(output)));
    let theirs = median(cats);
    row.compare("`cat` to `cat` over loopback TCP", Some(theirs));
    row.budget("at least a quarter of", "`cat` to `cat` over loopback TCP", 4.0);
    let (url, key) = (client.url(), read_key(data_dir)?);
    let json = beside(move || repeat(|| langsmith::output(&url, &key, sandbox, BYTES))).await?;
    let mut text = Row::new("256 MiB of output, LangSmith's JSON", Figure::Throughput(BYTES, json));
    text.compare("`cat` to `cat` over loopback TCP", Some(theirs));
    text.budget("at least a tenth of", "`cat` to `cat` over loopback TCP", 10.0);

    let files = client.files(sandbox);
    let (mut up, mut down, mut plain_up, mut plain_down) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let file = scratch.join("plain");
    let plain = Plain::start(&file)?;
    for _ in 0..ROUNDS {
        let began = Instant::now();
        files.write("/workspace/bench", zeros(), &WriteFile::default()).await?;
        up.push(began.elapsed());
        let began = Instant::now();
        let mut download = files.read("/workspace/bench").await?;
        let mut got = 0;
        while let Some(piece) = download.next().await? {
            got += piece.len() as u64;
        }
        ensure!(got == BYTES, "{got} bytes came back of {BYTES}");
        down.push(began.elapsed());
        files.remove("/workspace/bench", false).await?;
        plain_up.push(beside(move || plain.put()).await?);
        plain_down.push(beside(move || plain.get()).await?);
        std::fs::remove_file(&file).context("cannot remove a file of the benchmark")?;
    }
    client.delete_sandbox(sandbox).await?;
    let mut upload = Row::new("file of 256 MiB up", Figure::Throughput(BYTES, median(up)));
    upload.compare("plain HTTP up", Some(median(plain_up)));
    upload.budget("at least half of", "plain HTTP up", 2.0);
    let mut download = Row::new("file of 256 MiB down", Figure::Throughput(BYTES, median(down)));
    download.compare("plain HTTP down", Some(median(plain_down)));
    download.budget("at least half of", "plain HTTP down", 2.0);
    Ok(vec![row, text, upload, download])
}

async fn stream_output(client: &Client, sandbox: wire::SandboxId) -> anyhow::Result<Duration> {
    let argv = ["head", "-c", &BYTES.to_string(), "/dev/zero"].map(str::to_owned).to_vec();
    let began = Instant::now();
    let mut stream = client.stream(sandbox, RunCommand { argv: Some(argv), ..Default::default() });
    let mut got = 0;
    while let Some(event) = stream.next().await {
        match event? {
            StreamEvent::Output { bytes, .. } => got += bytes.len() as u64,
            StreamEvent::Lost { from, to, .. } => bail!("the bytes from {from} to {to} were lost"),
            StreamEvent::Refused(error) => bail!("{}", error.message),
            StreamEvent::Command(_) | StreamEvent::Ended(_) => {}
        }
    }
    ensure!(got == BYTES, "{got} bytes came of {BYTES}");
    Ok(began.elapsed())
}

/// One process writes into a socket what another reads from it.
fn cat_to_cat() -> anyhow::Result<Duration> {
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
    let began = Instant::now();
    let near = TcpStream::connect(listener.local_addr()?).context("cannot connect")?;
    let (far, _) = listener.accept().context("cannot accept")?;
    let head = Command::new("head")
        .args(["-c", &BYTES.to_string(), "/dev/zero"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn();
    let mut head = head.context("cannot start head")?;
    let zeros = head.stdout.take().context("head has an output")?;
    let writer = Command::new("cat").stdin(zeros).stdout(Stdio::from(OwnedFd::from(near))).spawn();
    let mut writer = writer.context("cannot start cat")?;
    let reader = Command::new("cat").stdin(Stdio::from(OwnedFd::from(far))).stdout(Stdio::null()).spawn();
    let mut reader = reader.context("cannot start cat")?;
    for child in [&mut head, &mut writer, &mut reader] {
        let status = child.wait().context("cannot wait for cat")?;
        ensure!(status.success(), "cat ended with {status}");
    }
    Ok(began.elapsed())
}

fn zeros() -> Upload {
    let (send, pieces) = tokio::sync::mpsc::channel(PIECES_WAITING);
    tokio::spawn(async move {
        let piece = Bytes::from(vec![0; PIECE]);
        for _ in 0..BYTES / PIECE as u64 {
            if send.send(Ok(piece.clone())).await.is_err() {
                return; // The upload has failed, and says why itself.
            }
        }
    });
    Upload::pieces(pieces, Some(BYTES))
}

async fn beside<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    tokio::task::spawn_blocking(work).await.context("a comparator panicked")?
}

fn repeat(mut what: impl FnMut() -> anyhow::Result<Duration>) -> anyhow::Result<Duration> {
    Ok(median((0..ROUNDS).map(|_| what()).collect::<anyhow::Result<_>>()?))
}

/// A server that does no more than HTTP needs: a file is written with PUT and read with GET, by read(2) and write(2).
#[derive(Clone, Copy)]
struct Plain {
    address: std::net::SocketAddr,
}

impl Plain {
    fn start(file: &Path) -> anyhow::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen")?;
        let address = listener.local_addr()?;
        let file = file.to_owned();
        // Ends with the program; it holds nothing but its socket.
        std::thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                if let Err(error) = Self::answer(connection, &file) {
                    eprintln!("the plain server: {error:#}");
                }
            }
        });
        Ok(Self { address })
    }

    fn answer(mut connection: TcpStream, file: &Path) -> anyhow::Result<()> {
        let (head, rest) = head_of(&mut connection)?;
        if head.starts_with("PUT ") {
            let mut to = std::fs::File::create(file)?;
            to.write_all(&rest)?;
            let size = length_in(&head)?;
            move_bytes(&mut connection, &mut to, size - rest.len() as u64)?;
            connection.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")?;
        } else {
            let mut from = std::fs::File::open(file)?;
            write!(connection, "HTTP/1.1 200 OK\r\nContent-Length: {BYTES}\r\n\r\n")?;
            move_bytes(&mut from, &mut connection, BYTES)?;
        }
        Ok(())
    }

    fn put(&self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let mut connection = TcpStream::connect(self.address)?;
        write!(connection, "PUT /file HTTP/1.1\r\nHost: bench\r\nContent-Length: {BYTES}\r\n\r\n")?;
        move_bytes(&mut std::io::repeat(0), &mut connection, BYTES)?;
        head_of(&mut connection)?;
        Ok(began.elapsed())
    }

    fn get(&self) -> anyhow::Result<Duration> {
        let began = Instant::now();
        let mut connection = TcpStream::connect(self.address)?;
        write!(connection, "GET /file HTTP/1.1\r\nHost: bench\r\n\r\n")?;
        let (head, rest) = head_of(&mut connection)?;
        move_bytes(&mut connection, &mut std::io::sink(), length_in(&head)? - rest.len() as u64)?;
        Ok(began.elapsed())
    }
}

/// The head of a request or an answer, and what of the body came with it.
fn head_of(connection: &mut TcpStream) -> anyhow::Result<(String, Vec<u8>)> {
    let mut bytes = vec![0; REQUEST_MAX];
    let mut have = 0;
    loop {
        let got = connection.read(&mut bytes[have..])?;
        ensure!(got > 0, "the connection ended within a head");
        have += got;
        if let Some(end) = bytes[..have].windows(4).position(|window| window == b"\r\n\r\n") {
            let head = String::from_utf8_lossy(&bytes[..end]).into_owned();
            return Ok((head, bytes[end + 4..have].to_vec()));
        }
    }
}

fn length_in(head: &str) -> anyhow::Result<u64> {
    let line = head.lines().find_map(|line| line.strip_prefix("Content-Length: "));
    Ok(line.context("a head without a length")?.parse()?)
}

/// By hand: `io::copy` would let the kernel move the bytes, which no program in user space that looks at them can do.
fn move_bytes(from: &mut impl Read, to: &mut impl Write, mut count: u64) -> anyhow::Result<()> {
    let mut piece = vec![0; PIECE];
    while count > 0 {
        let most = PIECE.min(usize::try_from(count).unwrap_or(PIECE));
        let got = from.read(&mut piece[..most])?;
        ensure!(got > 0, "the bytes ended {count} too soon");
        to.write_all(&piece[..got])?;
        count -= got as u64;
    }
    Ok(())
}
