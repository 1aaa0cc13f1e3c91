# Generated from _async/sandbox.py by generate_sync.py. Do not edit: change that file and run the program again.
"""One sandbox: its commands, its lifetime, and its files through ``files``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from .. import _seam
from .._core import (
    ANSWER_GRACE_SECONDS,
    CLEANUP_SECONDS_MAX,
    PAGE_ENTRIES,
    WAIT_SECONDS_MAX,
    OutputState,
    answer_bytes,
    decoded,
    failed,
    finished,
    in_path,
    new_id,
    query,
    run_wish,
)
from ..errors import AnswerTimeoutError, ResourceNotFoundError, SandboxClientError
from ..models import (
    STATUS_OF_STATE,
    Command,
    ExecutionResult,
    Explanation,
    LifetimeRule,
    SandboxEvent,
    SandboxInfo,
    SandboxLimits,
    SandboxStats,
    State,
    TerminalSize,
    VolumeMountSpec,
)
from .command import CommandHandle
from .files import Files
from .transport import Events, Transport

Callback = Callable[[str], Any]


class Sandbox:
    """An isolated place to run commands and keep files.

    A ``with`` block deletes it at the end if it came from ``SandboxClient.sandbox``, and leaves it alone
    otherwise. Its properties are as old as the last ``refresh``.
    """

    def __init__(self, transport: Transport, info: SandboxInfo, *, delete_on_exit: bool = False) -> None:
        self._transport = transport
        self._info = info
        self._delete_on_exit = delete_on_exit
        #: Read, write, list, search, watch, upload and download.
        self.files = Files(transport, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.state} id={self.id}>"

    def __eq__(self, other: object) -> bool:
        """Two handles are equal if they are of one sandbox of one daemon, however old they are."""
        if not isinstance(other, Sandbox):
            return NotImplemented
        return (self.id, self._transport.endpoint.url) == (other.id, other._transport.endpoint.url)

    def __hash__(self) -> int:
        return hash(self.id)

    @property
    def id(self) -> str:
        """A UUID that never changes."""
        return self._info.id

    @property
    def name(self) -> str:
        """Free text, unique among the owner's sandboxes."""
        return self._info.name

    @property
    def template_name(self) -> str:
        """The template that it was made from."""
        return self._info.template

    @property
    def state(self) -> State:
        """``creating``, ``running``, ``paused``, ``deleting`` or ``failed``."""
        return self._info.state

    @property
    def status(self) -> str:
        """The state in the terms of the LangSmith SDK, such as ``provisioning``, ``ready`` or ``failed``."""
        return STATUS_OF_STATE.get(self._info.state, self._info.state)

    @property
    def status_message(self) -> str | None:
        """Why it is ``failed``, or which lifetime rule is deleting it."""
        return self._info.reason

    @property
    def dataplane_url(self) -> str:
        """The address of its commands and files."""
        return f"{self._transport.endpoint.url}/v1/sandboxes/{self.id}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels to find it by."""
        return dict(self._info.labels)

    @property
    def lifetime(self) -> list[LifetimeRule]:
        """The lifetime rules. If empty, it lives until it is deleted."""
        return list(self._info.lifetime)

    @property
    def limits(self) -> SandboxLimits:
        """Its resource limits."""
        return self._info.limits

    @property
    def volume_mounts(self) -> list[VolumeMountSpec]:
        """The volumes that it mounts, and where."""
        return [VolumeMountSpec.from_json(mount) for mount in self._info.mounts]

    @property
    def created(self) -> bool | None:
        """Whether this request created it; ``False`` if it was found by its labels."""
        return self._info.created

    @property
    def info(self) -> SandboxInfo:
        """Everything that the daemon returned about it."""
        return self._info

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._delete_on_exit:
            return
        try:
            _seam.shielded(self._transport.timeout, self.delete)
        except ResourceNotFoundError:
            pass
        except SandboxClientError:
            # What went wrong inside the block is what the caller should see.
            if error is None:
                raise

    # --- Commands

    @overload
    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = ...,
        on_stdout: Callback | None = ...,
        on_stderr: Callback | None = ...,
        wait: Literal[True] = ...,
        env: Mapping[str, str] | None = ...,
        cwd: str | None = ...,
        user: str | None = ...,
        stdin: bool | None = ...,
        input: str | bytes | None = ...,
        check: bool = ...,
        terminal: TerminalSize | None = ...,
        idle_timeout: float = ...,
        command_id: str | None = ...,
    ) -> ExecutionResult: ...

    @overload
    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = ...,
        on_stdout: None = ...,
        on_stderr: None = ...,
        wait: Literal[False],
        env: Mapping[str, str] | None = ...,
        cwd: str | None = ...,
        user: str | None = ...,
        stdin: bool | None = ...,
        terminal: TerminalSize | None = ...,
        idle_timeout: float = ...,
        command_id: str | None = ...,
    ) -> CommandHandle: ...

    def run(
        self,
        command: str | Sequence[str],
        *,
        timeout: float = 60,
        on_stdout: Callback | None = None,
        on_stderr: Callback | None = None,
        wait: bool = True,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        stdin: bool | None = None,
        input: str | bytes | None = None,
        check: bool = False,
        terminal: TerminalSize | None = None,
        idle_timeout: float = 0,
        command_id: str | None = None,
    ) -> ExecutionResult | CommandHandle:
        r"""Runs a command: a string is a script for the shell, a list is a program with its arguments.

        >>> result = sb.run("echo hello; exit 3")
        >>> result.stdout, result.exit_code
        ('hello\n', 3)
        >>> (sb.run(["printf", "%s", "$HOME"])).stdout
        '$HOME'

        Callbacks get output while the command runs:

        >>> result = sb.run("echo one; echo two", on_stdout=lambda text: print(text, end=""))
        one
        two

        ``input`` is what the command reads from stdin, and ``check`` makes a failure an exception:

        >>> (sb.run("sort", input="b\na\n")).stdout
        'a\nb\n'
        >>> sb.run("echo no >&2; exit 3", check=True)
        Traceback (most recent call last):
        ...
        shoal.errors.CommandFailedError: the command exited with 3: no

        ``wait=False`` returns a handle to iterate over, write to and kill:

        >>> handle = sb.run("read name; echo hello $name", wait=False)
        >>> handle.send_input("world\n")
        >>> handle.result.stdout
        'hello world\n'

        Args:
            command: What to run.
            timeout: Kill all processes of the command after this many seconds; 0 means no timeout.
            on_stdout: Called with each piece of stdout.
            on_stderr: Called with each piece of stderr.
            wait: Whether to wait for the command to end.
            env: Variables that are added to the sandbox's environment.
            cwd: The working directory: an absolute path.
            user: The user of the sandbox; by default the image's, or else root.
            stdin: Whether you will write to stdin; otherwise stdin is empty. Default: only if ``wait`` is
                ``False``.
            input: Text or bytes for stdin, which ends after them.
            check: Raise ``CommandFailedError`` unless the exit code is 0.
            terminal: Give the command a terminal of this size instead of pipes.
            idle_timeout: Kill the command after this many seconds without output; 0 means never.
            command_id: An id of your choice; repeating the call with the same id does not start a second command.

        Raises:
            CommandTimeoutError: The command timed out.
            CommandFailedError: ``check`` is set, and the exit code is not 0.
            SandboxNotReadyError: The sandbox is not running.
        """
        if stdin is not None and not isinstance(stdin, bool):
            raise TypeError("`stdin` says whether you will write to stdin; pass what the command reads as `input`")
        if not wait and (input is not None or check):
            raise ValueError("`input` and `check` need a `run` that waits: leave `wait` out, or use the handle")
        if input is not None and stdin is False:
            raise ValueError("`input` needs stdin: leave `stdin` out")
        if timeout < 0 or idle_timeout < 0:
            raise ValueError("a timeout cannot be negative; 0 means none")
        if not wait and (on_stdout or on_stderr):
            raise ValueError("callbacks are called while `run` waits: leave `wait` out, or iterate over the handle")
        id = command_id or new_id()
        body = run_wish(
            command,
            id=id,
            timeout=timeout,
            idle_timeout=idle_timeout,
            env=env,
            cwd=cwd,
            user=user,
            stdin=(not wait or input is not None) if stdin is None else stdin,
            terminal=terminal,
        )
        if not wait:
            return self._start(body, timeout)
        try:
            if on_stdout is None and on_stderr is None and input is None:
                result = self._run_in_request(body, timeout)
            else:
                handle = self._start(body, timeout)
                with handle:
                    if input is not None:
                        handle._feed(input)
                    for chunk in handle:
                        callback = on_stdout if chunk.stream == "stdout" else on_stderr
                        if callback is not None and chunk.data:
                            callback(chunk.data)
                    result = handle.result
            if check and not result.success:
                raise failed(result)
            return result
        except Exception:
            raise
        except BaseException:
            # Ctrl-C, or a task that was cancelled: nobody will ever hear of this command again.
            _seam.shielded(CLEANUP_SECONDS_MAX, self._kill_quietly, id)
            raise

    def _start(self, body: dict[str, Any], timeout: float) -> CommandHandle:
        answer = self._transport.call("POST", self._path("/commands"), json={**body, "wait": False})
        command: Command = decoded(Command, answer.json())
        return CommandHandle(self._transport, command, timeout=timeout, started_here=True)

    def _run_in_request(self, body: dict[str, Any], timeout: float) -> ExecutionResult:
        deadline = time.monotonic() + timeout + ANSWER_GRACE_SECONDS if timeout else math.inf
        while True:
            try:
                answer = self._transport.call(
                    "POST", self._path("/commands"), json=body, read_seconds=WAIT_SECONDS_MAX
                )
                break
            except AnswerTimeoutError:
                # It still runs. The same request again finds it by its id, and goes on waiting.
                if time.monotonic() > deadline:
                    raise
        said = answer.json()
        command: Command = decoded(Command, said)
        if said.get("stdout_cut") or said.get("stderr_cut"):
            # The answer holds 1 MiB of each stream. The stream has all that is kept, from its start.
            with CommandHandle(self._transport, command, timeout=timeout) as handle:
                return handle.result
        return finished(
            command,
            answer_bytes(said, "stdout"),
            answer_bytes(said, "stderr"),
            timeout,
            stdout_lost=command.stdout.start,
            stderr_lost=command.stderr.start,
        )

    def _kill_quietly(self, id: str) -> None:
        try:
            self._transport.call(
                "POST", self._path(f"/commands/{in_path(id)}/kill"), repeat=False, read_seconds=CLEANUP_SECONDS_MAX
            )
        except SandboxClientError:
            # It is over, was never started, or nobody can be reached; its timeout ends it then.
            pass

    def reconnect(self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> CommandHandle:
        """Returns a handle of a command that was started before, in this program or another.

        >>> handle = sb.run("echo one; echo two", wait=False)
        >>> [chunk.data for chunk in sb.reconnect(handle.command_id, stdout_offset=4)]
        ['two\\n']
        """
        command = self.get_command(command_id)
        return CommandHandle(self._transport, command, state=OutputState(stdout_offset, stderr_offset))

    def get_command(self, command_id: str) -> Command:
        """Returns a command, without its output."""
        answer = self._transport.call("GET", self._path(f"/commands/{in_path(command_id)}"))
        command: Command = decoded(Command, answer.json())
        return command

    def list_commands(self) -> list[Command]:
        """Lists all commands of the sandbox, oldest first."""
        commands: list[Command] = []
        cursor: str | None = None
        while True:
            path = query(self._path("/commands"), {"limit": PAGE_ENTRIES, "cursor": cursor})
            page = (self._transport.call("GET", path)).json()
            commands += [decoded(Command, entry) for entry in page["commands"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                return commands

    # --- Files: the two that everybody needs; the rest is in `files`.

    def read(self, path: str) -> bytes:
        """Reads a whole file. ``files.read`` reads a part, ``files.download`` writes to disk.

        >>> sb.write("/workspace/note", "hello")
        >>> sb.read("/workspace/note")
        b'hello'
        """
        return self.files.read(path)

    def write(self, path: str, content: str | bytes) -> None:
        """Writes a whole file, and creates missing directories."""
        self.files.write(path, content)

    # --- Life

    def refresh(self) -> Sandbox:
        """Gets the current state from the daemon."""
        self._info = decoded(SandboxInfo, (self._transport.call("GET", self._path(""))).json())
        return self

    def update(
        self,
        *,
        new_name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
    ) -> Sandbox:
        """Changes the sandbox. A label with ``None`` is removed; an empty ``lifetime`` removes all rules.

        >>> (sb.update(labels={"thread": "42"})).labels
        {'thread': '42'}
        """
        body: dict[str, Any] = {}
        if new_name is not None:
            body["name"] = new_name
        if labels is not None:
            body["labels"] = dict(labels)
        if lifetime is not None:
            body["lifetime"] = [rule.to_json() for rule in lifetime]
        answer = self._transport.call("PATCH", self._path(""), json=body)
        self._info = decoded(SandboxInfo, answer.json())
        return self

    def touch(self) -> Explanation:
        """Renews it: all clocks of its lifetime restart, except the one that counts from its creation."""
        answer = self._transport.call("POST", self._path("/touch"))
        explanation: Explanation = decoded(Explanation, answer.json())
        return explanation

    def explain(self) -> Explanation:
        """Explains why it lives, and when and how it ends. This does not count as use.

        >>> print(sb.explain())
        It runs and has no lifetime rules, so it lives until it is deleted.
        """
        answer = self._transport.call("GET", self._path("/explain"))
        explanation: Explanation = decoded(Explanation, answer.json())
        return explanation

    def stats(self) -> SandboxStats:
        """Returns its resource use and limits."""
        answer = self._transport.call("GET", self._path("/stats"))
        stats: SandboxStats = decoded(SandboxStats, answer.json())
        return stats

    def events(self) -> SandboxEvents:
        """Yields its events and those of its commands, from now on, until it is deleted."""
        return SandboxEvents(self._transport, self.id)

    def delete(self) -> None:
        """Deletes it and everything in it. Returns when nothing of it is left."""
        self._transport.call("DELETE", self._path(""))

    def _path(self, rest: str) -> str:
        return f"/sandboxes/{self.id}{rest}"


class SandboxEvents(Events):
    """Events of sandboxes and their commands. The first event is ``ready``, once.

    If the connection breaks, it reconnects and continues after the last event; the event ``missed`` reports that some
    events are gone.
    """

    def __init__(self, transport: Transport, sandbox_id: str | None = None) -> None:
        super().__init__(transport)
        self._sandbox_id = sandbox_id
        self._last: str | None = None
        self._over = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._sandbox_id or 'all sandboxes'}>"

    def _place(self) -> tuple[str, dict[str, str]]:
        headers = {} if self._last is None else {"Last-Event-ID": self._last}
        return query("/events", {"sandbox": self._sandbox_id}), headers

    def __iter__(self) -> Iterator[SandboxEvent]:
        return self

    def __next__(self) -> SandboxEvent:
        while not self._over:
            first = self._last is None
            id, said = self._next()
            self._last = id or self._last
            event: SandboxEvent = decoded(SandboxEvent, said)
            if event.type == "ready" and not first:
                continue
            if event.type == "deleted" and self._sandbox_id is not None:
                self._over = True
                self.close()
            return event
        raise StopIteration

    def __enter__(self) -> SandboxEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
