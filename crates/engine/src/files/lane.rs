//! A file operation, as the link to init sees it.

use std::sync::Arc;

use wire::guest::{End, Start, StartError, Stream, ToInit};

use super::transfer::Transfer;
use crate::guest::{Lane, Violation};

impl Lane for Transfer {
    fn start(&self) -> &Start {
        &self.start
    }

    fn take_acks(&self, put: &mut dyn FnMut(ToInit)) {
        Transfer::take_acks(self, put);
    }

    fn put_stdin(&self, out: &mut Vec<u8>) -> bool {
        Transfer::put_stdin(self, out)
    }

    fn unqueue(&self) {
        Transfer::unqueue(self);
    }

    fn started(self: Arc<Self>, pid: u32) -> Result<(), Violation> {
        Transfer::started(&self, pid)
    }

    fn failed_to_start(self: Arc<Self>, error: StartError) -> Result<(), Violation> {
        Transfer::failed_to_start(&self, error);
        Ok(())
    }

    fn receive(self: Arc<Self>, stream: Stream, offset: u64, bytes: &[u8]) -> Result<(), Violation> {
        Transfer::receive(&self, stream, offset, bytes)
    }

    fn stdin_given(self: Arc<Self>, offset: u64) -> Result<(), Violation> {
        Transfer::stdin_given(&self, offset)
    }

    fn stdin_closed(&self) {
        Transfer::stdin_closed(self);
    }

    fn ended(self: Arc<Self>, end: End, ends: [u64; 2]) -> Result<(), Violation> {
        Transfer::ended(&self, end, ends)
    }

    fn resume(self: Arc<Self>, pid: Option<u32>, stdin: u64) -> Result<Vec<ToInit>, Violation> {
        Transfer::resume(&self, pid, stdin)
    }

    fn missing(self: Arc<Self>) -> Result<bool, Violation> {
        if self.restart() {
            return Ok(true);
        }
        self.lost();
        Ok(false)
    }
}
