//! A command, as the link to init sees it.

use std::sync::Arc;

use wire::frame;
use wire::guest::{End, Start, StartError, Stream, ToInit};

use super::LiveCommand;
use crate::guest::{Lane, Violation};

impl Lane for LiveCommand {
    fn start(&self) -> &Start {
        &self.start
    }

    fn take_acks(&self, put: &mut dyn FnMut(ToInit)) {
        LiveCommand::take_acks(self, put);
    }

    fn put_stdin(&self, out: &mut Vec<u8>) -> bool {
        let taken = self.take_stdin();
        if !taken.bytes.is_empty() {
            let length = taken.bytes.len();
            self.live.shared.metrics.stdin(length);
            out.extend_from_slice(&frame::data_header(self.handle, Stream::Stdin, taken.offset, length));
            out.extend_from_slice(&taken.bytes);
        }
        if let Some(offset) = taken.end {
            frame::put_message(&ToInit::StdinEnd { handle: self.handle, offset }, out);
        }
        taken.more
    }

    fn unqueue(&self) {
        LiveCommand::unqueue(self);
    }

    fn started(self: Arc<Self>, pid: u32) -> Result<(), Violation> {
        LiveCommand::started(&self, pid)
    }

    fn failed_to_start(self: Arc<Self>, error: StartError) -> Result<(), Violation> {
        LiveCommand::failed_to_start(&self, error)
    }

    fn receive(self: Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        LiveCommand::receive(&self, stream, offset, bytes)
    }

    fn stdin_given(self: Arc<Self>, offset: u64) -> Result<(), Violation> {
        LiveCommand::stdin_given(&self, offset)
    }

    fn stdin_closed(&self) {
        LiveCommand::stdin_closed(self);
    }

    fn ended(self: Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        LiveCommand::ended(&self, end, ends)
    }

    fn resume(self: Arc<Self>, pid: Option<u32>, stdin: u64) -> Result<Vec<ToInit>, Violation> {
        Ok(vec![LiveCommand::resume(&self, pid, stdin)?])
    }

    fn missing(self: Arc<Self>) -> Result<bool, Violation> {
        if self.was_started() {
            return Err(Violation::Forgotten { handle: self.handle });
        }
        self.restart();
        Ok(true)
    }
}
