//! The functions of Shoal that read untrusted bytes, as fuzzers call them: bytes in, a panic on a fault.
//!
//! The targets in `fuzz/` run them for hours on evolved inputs; `hostile_bytes` runs them in CI on random inputs.

use serde::Serialize;
use serde::de::DeserializeOwned;
use wire::frame::{
    CHUNK_MAX, Decoder, FrameError, Incoming, MESSAGE_FROM_INIT_MAX, MESSAGE_TO_INIT_MAX, put_message,
};
use wire::guest::{FromInit, ToInit};

/// Size of one read: small, so that frames are cut at every position.
const PIECE_MAX: usize = 257;

/// What a guest that took over init writes to the daemon.
pub fn frames_from_init(bytes: &[u8]) {
    frames::<FromInit>(bytes, MESSAGE_FROM_INIT_MAX);
}

/// What the daemon writes to init, corrupted.
pub fn frames_to_init(bytes: &[u8]) {
    frames::<ToInit>(bytes, MESSAGE_TO_INIT_MAX);
}

/// A packet to the launcher.
pub fn launcher_request(bytes: &[u8]) {
    packet::<wire::launch::Request>(bytes);
}

/// A packet from the launcher.
pub fn launcher_reply(bytes: &[u8]) {
    packet::<wire::launch::Reply>(bytes);
}

/// A body, or a text message of a WebSocket, from the network.
pub fn api_bodies(bytes: &[u8]) {
    body::<wire::api::CreateSandbox>(bytes);
    body::<wire::api::UpdateSandbox>(bytes);
    body::<wire::api::RunCommand>(bytes);
    body::<wire::api::SignalCommand>(bytes);
    body::<wire::api::CommandWish>(bytes);
    body::<wire::api::CreateKey>(bytes);
    body::<wire::api::PullImage>(bytes);
    body::<wire::api::SetImageAlias>(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        id::<wire::SandboxId>(text);
        id::<wire::CommandId>(text);
        id::<wire::InstallationId>(text);
    }
}

/// What a file operation returns, from a guest that replaced it.
pub fn file_records(bytes: &[u8]) {
    record::<wire::files::Opened>(bytes);
    record::<wire::files::FileEntry>(bytes);
    record::<wire::files::GrepMatch>(bytes);
    record::<wire::files::WatchEvent>(bytes);
    if let Some(result) = wire::files::result_from_bytes(bytes) {
        let again = wire::files::result_bytes(&result);
        assert_eq!(wire::files::result_from_bytes(&again), Some(result), "a result changed on its way");
    }
}

/// A DNS question from a guest.
pub fn dns_question(bytes: &[u8]) {
    egress::dns::fuzz_packet(bytes);
}

/// The first bytes of a TLS client. What is a hello stays one, whatever follows in the buffer's later records.
pub fn tls_hello(bytes: &[u8]) {
    use egress::tls::{Progress, read_hello};
    let whole = read_hello(bytes);
    for cut in 0..bytes.len().min(64) {
        // A beginning must never name a server that the whole does not name.
        if let Progress::Hello(early) = read_hello(&bytes[..cut]) {
            assert_eq!(whole, Progress::Hello(early), "the first {cut} bytes say something else");
        }
    }
}

/// The head of a request, and what tells HTTP from other protocols.
pub fn http_head(bytes: &[u8]) {
    let _ = egress::gateway::sniff(bytes);
    if let Ok(Some(head)) = egress::http::read_head(bytes) {
        assert!(
            head.length <= bytes.len() && bytes[..head.length].ends_with(b"\r\n\r\n"),
            "a head ends in an empty line"
        );
    }
}

/// Packets between daemon and egress, and addresses in configuration files.
pub fn egress_control(bytes: &[u8]) {
    use egress::control::{FromEgress, Request, Start, from_bytes, to_bytes};
    if let Some(request) = from_bytes::<Request>(bytes) {
        assert_eq!(from_bytes(&to_bytes(&request)), Some(request), "a request changed on its way");
    }
    if let Some(message) = from_bytes::<FromEgress>(bytes) {
        assert_eq!(from_bytes(&to_bytes(&message)), Some(message), "a message changed on its way");
    }
    let _ = from_bytes::<Start>(bytes);
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = egress::presets::site(text);
        let _ = egress::policy::Asked::parse(text);
        let _ = egress::policy::Target::parse(text, egress::policy::Action::Allow);
    }
}

/// A tar stream from anyone: read to its end or rejected, without more contents than there are bytes.
pub fn tar_stream(bytes: &[u8]) {
    let mut entries = archive::Entries::new(bytes);
    let mut read = 0;
    while let Ok(Some(entry)) = entries.next_entry() {
        assert!(!entry.path.contains(&0) && !entry.link.contains(&0), "a name with a NUL");
        let mut contents = [0; 100];
        while let Ok(length @ 1..) = entries.read_contents(&mut contents) {
            read += length;
        }
        assert!(read <= bytes.len(), "more was read than the stream contains");
    }
}

/// Documents of images from registries and archives, and image references.
pub fn image_documents(bytes: &[u8]) {
    let _ = image::manifest::Document::parse(bytes);
    let _ = image::ImageConfig::parse(bytes);
    let _ = image::DockerConfig::parse(bytes);
    if let Ok(text) = std::str::from_utf8(bytes)
        && let Ok(reference) = image::ImageRef::parse(text)
    {
        assert_eq!(
            image::ImageRef::parse(&reference.to_string()),
            Ok(reference.clone()),
            "two canonical spellings"
        );
        assert_eq!(
            image::ImageRef::parse(&reference.familiar()),
            Ok(reference),
            "a short spelling of another"
        );
    }
}

/// A layer, compressed or not: read to its end or rejected, within bounds.
pub fn layer_stream(bytes: &[u8]) {
    const LONGEST: u64 = 1 << 20;
    let Ok(stream) = image::layer::decompressed(bytes) else { return };
    let mut entries = archive::Entries::new(std::io::Read::take(stream, LONGEST));
    while let Ok(Some(entry)) = entries.next_entry() {
        assert!(!entry.path.contains(&0) && !entry.link.contains(&0), "a name with a NUL");
        let mut contents = [0; 100];
        while let Ok(1..) = entries.read_contents(&mut contents) {}
    }
}

/// Decoding stays within its bounds and does not depend on how the bytes are cut, and what was read can be written
/// again.
fn frames<M>(bytes: &[u8], message_max: usize)
where
    M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let whole = decode::<M>(bytes.chunks(bytes.len().max(1)), message_max);
    // The first byte says where to cut, so that a fuzzer can choose.
    let piece = 1 + usize::from(bytes.first().copied().unwrap_or(0)) % PIECE_MAX;
    let cut = decode::<M>(bytes.chunks(piece), message_max);
    assert_eq!(whole, cut, "the result must not depend on how the bytes are cut");
}

fn decode<'a, M>(
    pieces: impl Iterator<Item = &'a [u8]>,
    message_max: usize,
) -> (Vec<String>, Option<FrameError>)
where
    M: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug,
{
    let mut decoder = Decoder::<M>::new(message_max);
    let mut seen = Vec::new();
    for piece in pieces {
        let fed = decoder.feed(piece, |incoming| {
            match incoming {
                Incoming::Message(message) => {
                    let mut again = Vec::new();
                    put_message(&message, &mut again);
                    let mut reader = Decoder::<M>::new(usize::MAX);
                    let mut count = 0;
                    reader.feed(&again, |back| {
                        assert_eq!(
                            Incoming::Message(&message),
                            as_ref(&back),
                            "a message changed on its way"
                        );
                        count += 1;
                        Ok::<(), FrameError>(())
                    })?;
                    assert_eq!(count, 1, "one message was written");
                    seen.push(format!("{message:?}"));
                }
                Incoming::Data { handle, stream, offset, bytes } => {
                    assert!(bytes.len() <= CHUNK_MAX, "a chunk of {} bytes", bytes.len());
                    assert!(offset.checked_add(bytes.len() as u64).is_some(), "an offset that overflows");
                    seen.push(format!("{handle:?} {stream:?} {offset} {bytes:?}"));
                }
            }
            Ok::<(), FrameError>(())
        });
        if let Err(error) = fed {
            return (seen, Some(error));
        }
    }
    (seen, None)
}

fn as_ref<'a, M>(incoming: &'a Incoming<'a, M>) -> Incoming<'a, &'a M> {
    match incoming {
        Incoming::Message(message) => Incoming::Message(message),
        Incoming::Data { handle, stream, offset, bytes } => {
            Incoming::Data { handle: *handle, stream: *stream, offset: *offset, bytes }
        }
    }
}

/// A record that parses can be written and parses to the same.
fn record<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(Some((record, length))) = wire::files::take_record::<T>(bytes) {
        assert!(length <= bytes.len(), "a record is longer than its bytes");
        let mut again = Vec::new();
        wire::files::put_record(&record, &mut again);
        let (back, _) = wire::files::take_record::<T>(&again).expect("it parses").expect("it is whole");
        assert_eq!(back, record, "a record changed on its way");
    }
}

/// A packet that parses can be written and parses to the same.
fn packet<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Some(packet) = wire::launch::from_packet::<T>(bytes) {
        let again = wire::launch::to_packet(&packet);
        assert_eq!(wire::launch::from_packet::<T>(&again), Some(packet), "a packet changed on its way");
    }
}

/// A body that parses can be written and parses to the same.
fn body<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    if let Ok(body) = serde_json::from_slice::<T>(bytes) {
        let again = serde_json::to_vec(&body).expect("a body that was read can be written");
        assert_eq!(serde_json::from_slice::<T>(&again).ok(), Some(body), "a body changed on its way");
    }
}

/// An id has only one spelling.
fn id<T: std::str::FromStr + std::fmt::Display>(text: &str) {
    if let Ok(id) = text.parse::<T>() {
        assert_eq!(id.to_string(), text, "an id has two spellings");
    }
}
