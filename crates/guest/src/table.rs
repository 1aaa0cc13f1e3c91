//! All commands, and their turns.
//!
//! Streams wait in two queues, one to be read from their pipes and one to be sent to the daemon. Each turn moves at
//! most one chunk, and the stream goes to the back, so that a flood in one command delays another by one chunk only.
//! A stream whose window is full waits in neither.

use std::collections::{BTreeMap, VecDeque};

use rustix::io::Errno;
use wire::frame::{CHUNK_MAX, put_message};
use wire::guest::{FromInit, Handle, Stream};

use crate::command::Command;
use crate::streams::Pool;
use crate::watch::{Watch, Watched};

/// A chunk of stream bytes for the daemon, sent as one frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    pub handle: Handle,
    pub stream: Stream,
    pub offset: u64,
    pub length: usize,
}

/// All commands.
#[derive(Debug, Default)]
pub struct Table {
    commands: BTreeMap<Handle, Command>,
    /// Main processes that are not reaped yet.
    mains: BTreeMap<i32, Handle>,
    to_read: VecDeque<(Handle, Stream)>,
    to_send: VecDeque<(Handle, Stream)>,
    pool: Pool,
    /// Encoded messages for the current connection.
    pub outbox: Vec<u8>,
}

impl Table {
    pub fn get(&self, handle: Handle) -> Option<&Command> {
        self.commands.get(&handle)
    }

    pub fn get_mut(&mut self, handle: Handle) -> Option<&mut Command> {
        self.commands.get_mut(&handle)
    }

    /// Number of commands, including forgotten ones of which something is left: they cost descriptors too.
    pub fn len(&self) -> usize {
        self.commands.len()
    }

    pub fn insert(&mut self, handle: Handle, command: Command) {
        if let Some(main) = command.root().main {
            self.mains.insert(main, handle);
        }
        self.commands.insert(handle, command);
    }

    /// The command whose main process this was; removes the entry.
    pub fn take_main(&mut self, pid: i32) -> Option<Handle> {
        let handle = self.mains.remove(&pid)?;
        if let Some(command) = self.commands.get_mut(&handle) {
            command.reaped = true;
        }
        Some(handle)
    }

    /// Commands whose main process is gone and whose cgroup may still exist.
    pub fn with_groups_left(&self) -> Vec<Handle> {
        let over = self.commands.iter().filter(|(_, command)| command.reaped && command.group_left);
        over.map(|(handle, _)| *handle).collect()
    }

    /// Removes the command if nothing is left of it.
    pub fn remove_if_gone(&mut self, handle: Handle) {
        if self.commands.get(&handle).is_some_and(Command::is_gone) {
            self.commands.remove(&handle);
        }
    }

    /// Appends a message to the outbox.
    pub fn say(&mut self, message: &FromInit) {
        put_message(message, &mut self.outbox);
    }

    /// Sends everything that is due about a command's life.
    pub fn tell(&mut self, handle: Handle) {
        while let Some(news) = self.commands.get_mut(&handle).and_then(Command::news) {
            self.say(&news);
        }
    }

    /// Reports every command to a new connection.
    pub fn introduce_all(&mut self) {
        let known: Vec<FromInit> = self
            .commands
            .values_mut()
            .filter(|command| !command.is_forgotten())
            .map(Command::introduce)
            .collect();
        known.iter().for_each(|message| self.say(message));
        self.say(&FromInit::KnownEnd);
    }

    /// The connection is gone.
    pub fn detach_all(&mut self) {
        self.commands.values_mut().for_each(Command::detach);
        self.to_send.clear();
        self.outbox.clear();
    }

    /// A stream has something to read.
    pub fn mark_readable(&mut self, handle: Handle, stream: Stream, hung_up: bool) {
        if let Some(output) = self.commands.get_mut(&handle).and_then(|command| command.output_mut(stream)) {
            output.mark_readable(hung_up);
            self.want_read(handle, stream);
        }
    }

    /// Queues the stream for reading, if a read would do anything.
    pub fn want_read(&mut self, handle: Handle, stream: Stream) {
        let Some(output) = self.commands.get_mut(&handle).and_then(|command| command.output_mut(stream))
        else {
            return;
        };
        if output.wants_turn() && !std::mem::replace(&mut output.waits_to_read, true) {
            self.to_read.push_back((handle, stream));
        }
    }

    /// Queues the stream for sending, if there is anything that the daemon wants.
    pub fn want_send(&mut self, handle: Handle, stream: Stream) {
        let Some(command) = self.commands.get_mut(&handle) else { return };
        let attached = command.is_attached();
        let Some(output) = command.output_mut(stream) else { return };
        let unsent = attached && output.sent < output.window.end();
        if unsent && !std::mem::replace(&mut output.waits_to_send, true) {
            self.to_send.push_back((handle, stream));
        }
    }

    /// Whether any stream waits to be read.
    pub fn has_reading(&self) -> bool {
        !self.to_read.is_empty()
    }

    /// Whether any stream waits to be sent.
    pub fn has_sending(&self) -> bool {
        !self.to_send.is_empty()
    }

    /// Gives each waiting stream one turn of reading.
    pub fn read_turns(&mut self, now: u64, watch: &Watch) -> Result<usize, Errno> {
        let mut gained = 0;
        for _ in 0..self.to_read.len() {
            let Some((handle, stream)) = self.to_read.pop_front() else { break };
            let Some(command) = self.commands.get_mut(&handle) else { continue };
            let Some(output) = command.output_mut(stream) else { continue };
            output.waits_to_read = false;
            let turn = output.turn(&mut self.pool);
            if turn.again {
                output.waits_to_read = true;
                self.to_read.push_back((handle, stream));
            }
            if turn.dry
                && let Some(from) = output.descriptor()
            {
                let watched = if stream == Stream::Stderr { Watched::Stderr } else { Watched::Stdout };
                watch.again(from, watched(handle))?;
            }
            gained += turn.gained;
            if turn.gained > 0 {
                command.deadlines.heard(now);
                self.want_send(handle, stream);
            }
            self.tell(handle);
            self.remove_if_gone(handle);
        }
        Ok(gained)
    }

    /// The daemon has stored a stream up to `offset`, which was sent before.
    pub fn acknowledge(&mut self, handle: Handle, stream: Stream, offset: u64) {
        if let Some(output) = self.commands.get_mut(&handle).and_then(|command| command.output_mut(stream)) {
            output.window.release_to(offset, &mut self.pool);
            output.sent = output.sent.max(output.window.acked());
            self.want_read(handle, stream);
        }
    }

    /// The next chunk to send, one from each stream in turn.
    pub fn next_chunk(&mut self) -> Option<Chunk> {
        loop {
            let (handle, stream) = self.to_send.pop_front()?;
            let Some(output) = self.commands.get_mut(&handle).and_then(|command| command.output_mut(stream))
            else {
                continue;
            };
            output.waits_to_send = false;
            let offset = output.sent;
            let length: usize = output.window.slices(offset, CHUNK_MAX).iter().map(|piece| piece.len()).sum();
            if length > 0 {
                return Some(Chunk { handle, stream, offset, length });
            }
        }
    }

    /// The bytes of a chunk from [`Self::next_chunk`]. Empty if its command was forgotten since.
    pub fn chunk_bytes(&self, chunk: &Chunk) -> [&[u8]; 2] {
        let output = self.commands.get(&chunk.handle).and_then(|command| command.output(chunk.stream));
        output.map_or([&[][..]; 2], |output| output.window.slices(chunk.offset, chunk.length))
    }

    /// The whole chunk was written.
    pub fn chunk_sent(&mut self, chunk: &Chunk) {
        let command = self.commands.get_mut(&chunk.handle);
        if let Some(output) = command.and_then(|command| command.output_mut(chunk.stream)) {
            output.sent = chunk.offset + chunk.length as u64;
            self.want_send(chunk.handle, chunk.stream);
            self.tell(chunk.handle);
        }
    }

    /// The daemon has stored the result: frees the command's output.
    pub fn forget(&mut self, handle: Handle) {
        let Some(command) = self.commands.get_mut(&handle) else { return };
        command.forget();
        for output in command.outputs() {
            let end = output.window.end();
            output.window.release_to(end, &mut self.pool);
            output.sent = end;
        }
        self.remove_if_gone(handle);
    }

    /// Frees memory that is held only for speed.
    pub fn release_memory(&mut self) {
        self.pool.release();
        self.commands.values_mut().for_each(|command| command.stdin.release_memory());
        self.to_read.shrink_to_fit();
        self.to_send.shrink_to_fit();
        self.outbox.shrink_to_fit();
    }
}
