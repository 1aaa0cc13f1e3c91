# Generated from _async/command.py by generate_sync.py. Do not edit: change that file and run the program again.
"""A running command: its output in order, each byte once, and its stdin, across reconnects."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from .. import _seam
from .._core import (
    PATIENCE_SECONDS,
    STDIN_PIECE_BYTES_MAX,
    OutputState,
    Patience,
    decoded,
    event_bytes,
    in_path,
    query,
)
from ..errors import SandboxClientError, SandboxConnectionError, SandboxOperationError
from ..models import Command, ExecutionResult, OutputChunk, Stream
from .transport import Events, Transport


class CommandHandle(Events):
    """A command that was started. Iterate over it to get its output, and read ``result`` to wait for its end.

    The handle connects when it first needs to, and reconnects at the same offset whenever the connection breaks, even
    across a restart of the daemon. Dropping a handle does not end the command: ``kill`` ends it, and
    ``Sandbox.reconnect`` finds it again by its ``command_id``, in this program or another.
    """

    def __init__(
        self,
        transport: Transport,
        command: Command,
        *,
        state: OutputState | None = None,
        timeout: float | None = None,
        started_here: bool = False,
    ) -> None:
        super().__init__(transport)
        self._command = command
        self._state = state or OutputState()
        self._timeout = timeout
        # Where stdin ends, as far as we know: what is sent again after a lost answer must say where it belongs.
        self._stdin_end: int | None = 0 if started_here else None
        self._stdin_lock = _seam.Lock()
        self._reading = _seam.Lock()
        self._ended = False
        # The ends of characters that were cut off by the end of their stream.
        self._rests: list[OutputChunk] = []

    def __repr__(self) -> str:
        how: str = self._command.state
        if self._command.result is not None:
            how = self._command.result.outcome
        return f"<{type(self).__name__} {self.command_id} {how}>"

    @property
    def command_id(self) -> str:
        """The id of the command in its sandbox, for ``reconnect``."""
        return self._command.id

    @property
    def pid(self) -> int | None:
        """The process id inside the sandbox."""
        return self._command.pid

    @property
    def stdout_offset(self) -> int:
        """How many bytes of stdout this handle has seen, for ``reconnect``."""
        return self._state.offsets["stdout"]

    @property
    def stderr_offset(self) -> int:
        """How many bytes of stderr this handle has seen, for ``reconnect``."""
        return self._state.offsets["stderr"]

    @property
    def result(self) -> ExecutionResult:
        """Waits for the end, and returns the result with all output that this handle has seen.

        Raises:
            CommandTimeoutError: The command timed out.
        """
        while not self._ended:
            self._next_chunk()
        return self._state.result(self._command, self._timeout)

    def __iter__(self) -> CommandHandle:
        return self

    def __next__(self) -> OutputChunk:
        chunk = self._next_chunk()
        if chunk is None:
            raise StopIteration
        return chunk

    def __enter__(self) -> CommandHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def kill(self) -> None:
        """Kills all processes of the command at once. Has no effect if the command has ended."""
        try:
            self._transport.call("POST", self._path("/kill"))
        except SandboxOperationError as error:
            if error.code != "command_ended":
                raise

    def signal(self, signal: str) -> None:
        """Sends a signal such as ``"INT"`` to the command's process group."""
        self._transport.call("POST", self._path("/signal"), json={"signal": signal}, repeat=False)

    def resize(self, rows: int, columns: int) -> None:
        """Changes the size of the command's terminal."""
        self._transport.call("POST", self._path("/resize"), json={"rows": rows, "columns": columns})

    def send_input(self, data: str | bytes) -> None:
        """Writes to the command's stdin; returns when the sandbox has accepted the bytes.

        Raises:
            SandboxOperationError: The command has closed its stdin, has ended, or has not read for a minute.
        """
        raw = data.encode() if isinstance(data, str) else bytes(data)
        with self._stdin_lock:
            for start in range(0, len(raw), STDIN_PIECE_BYTES_MAX):
                self._write(raw[start : start + STDIN_PIECE_BYTES_MAX])

    def _write(self, piece: bytes) -> None:
        """Sends one write. If the answer is lost, the offset keeps the daemon from writing the bytes twice."""
        patience = Patience(PATIENCE_SECONDS)
        offset: int | None = None
        while True:
            path = query(self._path("/stdin"), {"offset": offset})
            try:
                answer = self._transport.call(
                    "POST",
                    path,
                    content=piece,
                    headers={"Content-Type": "application/octet-stream"},
                    repeat=offset is not None,
                )
                self._stdin_end = int(answer.json()["offset"])
                return
            except SandboxConnectionError as error:
                failure: SandboxClientError = error
            except SandboxOperationError as error:
                if error.code != "stdin_stalled":
                    raise
                failure = error
            pause = patience.next_pause()
            if self._stdin_end is None or pause is None:
                raise failure
            offset = self._stdin_end
            _seam.sleep(pause)

    def close_stdin(self) -> None:
        """Closes the command's stdin after everything that was written before."""
        with self._stdin_lock:
            self._transport.call("POST", self._path("/stdin/end"))

    def _feed(self, data: str | bytes) -> None:
        """Writes all of stdin and ends it. A command need not read it."""
        try:
            self.send_input(data)
            self.close_stdin()
        except SandboxOperationError as error:
            if error.code not in ("stdin_closed", "command_ended"):
                raise

    def status(self) -> Command:
        """Returns the command's current state."""
        answer = self._transport.call("GET", self._path(""))
        self._command = decoded(Command, answer.json())
        return self._command

    def reconnect(self) -> CommandHandle:
        """Returns another handle of the same command, which continues where this one is."""
        offsets = self._state.offsets
        state = OutputState(offsets["stdout"], offsets["stderr"])
        handle = CommandHandle(self._transport, self.status(), state=state, timeout=self._timeout)
        handle._stdin_end = self._stdin_end
        return handle

    def _path(self, rest: str) -> str:
        return f"/sandboxes/{self._command.sandbox_id}/commands/{in_path(self._command.id)}{rest}"

    def _place(self) -> tuple[str, dict[str, str]]:
        offsets = self._state.offsets
        parameters = {"stdout_offset": offsets["stdout"], "stderr_offset": offsets["stderr"]}
        return query(self._path("/events"), parameters), {}

    def _next_chunk(self) -> OutputChunk | None:
        """Returns the next piece of output, or ``None`` at the end."""
        with self._reading:
            while not self._ended:
                _, event = self._next()
                chunk = self._hear(event)
                if self._ended:
                    self.close()
                elif chunk is not None:
                    return chunk
            return self._rests.pop(0) if self._rests else None

    def _hear(self, event: dict[str, Any]) -> OutputChunk | None:
        kind = event.get("type")
        if kind == "output":
            return self._state.output(event["stream"], event["offset"], event_bytes(event))
        if kind == "lost":
            self._state.skip(event["stream"], event["to"])
        elif kind == "command":
            self._command = decoded(Command, event)
        elif kind == "ended":
            self._command = decoded(Command, event)
            self._ended = True
            streams: tuple[Stream, Stream] = ("stdout", "stderr")
            for stream in streams:
                rest = self._state.text_rest(stream)
                if rest:
                    self._rests.append(OutputChunk(stream, rest, self._state.offsets[stream]))
        return None
