"""One sandbox: its commands, its lifetime, and its files through ``files``."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

import httpx

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
    hooks_wish,
    in_path,
    network_wish,
    new_id,
    query,
    refused,
    run_wish,
)
from ..errors import AnswerTimeoutError, ResourceNotFoundError, SandboxClientError
from ..models import (
    STATUS_OF_STATE,
    Command,
    CreatedLink,
    ExecutionResult,
    Explanation,
    FamilyMember,
    HistoryStep,
    HookRun,
    LifetimeRule,
    Port,
    PortLink,
    SandboxEvent,
    SandboxInfo,
    SandboxLimits,
    SandboxStats,
    Snapshot,
    State,
    TerminalSize,
    VolumeMountSpec,
)
from .command import AsyncCommandHandle
from .files import AsyncFiles
from .transport import AsyncEvents, AsyncTransport

Callback = Callable[[str], Any]

#: How long a snapshot, a rollback or a fork may take. Recent changes are written to disk first.
TAKE_SECONDS_MAX = 180.0


class AsyncSandbox:
    """An isolated place to run commands and keep files.

    A ``with`` block deletes it at the end if it came from ``AsyncSandboxClient.sandbox``, and leaves it alone
    otherwise. Its properties are as old as the last ``refresh``.
    """

    def __init__(self, transport: AsyncTransport, info: SandboxInfo, *, delete_on_exit: bool = False) -> None:
        self._transport = transport
        self._info = info
        self._delete_on_exit = delete_on_exit
        #: Read, write, list, search, watch, upload and download.
        self.files = AsyncFiles(transport, info.id)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r} {self.state} id={self.id}>"

    def __eq__(self, other: object) -> bool:
        """Two handles are equal if they are of one sandbox of one daemon, however old they are."""
        if not isinstance(other, AsyncSandbox):
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
        """Unique among the owner's sandboxes."""
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
    def hooks(self) -> dict[str, Any]:
        """What runs in it when something is done to it, by when that is."""
        return self._info.hooks

    @property
    def hook_runs(self) -> dict[str, HookRun]:
        """How the last run of each hook went, when the state was last read."""
        return self._info.hook_runs

    @property
    def status_message(self) -> str | None:
        """Why it is ``failed``, or which lifetime rule has paused it or is deleting it."""
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
    def network(self) -> dict[str, Any]:
        """What it may reach: ``mode``, ``rules`` and ``audit``."""
        return dict(self._info.network)

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

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._delete_on_exit:
            return
        try:
            await _seam.ashielded(self._transport.timeout, self.delete)
        except ResourceNotFoundError:
            pass
        except SandboxClientError:
            # What went wrong inside the block is what the caller should see.
            if error is None:
                raise

    # --- Commands

    @overload
    async def run(
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
    async def run(
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
    ) -> AsyncCommandHandle: ...

    async def run(
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
    ) -> ExecutionResult | AsyncCommandHandle:
        r"""Runs a command: a string is a script for the shell, a list is a program with its arguments.

        >>> result = await sb.run("echo hello; exit 3")
        >>> result.stdout, result.exit_code
        ('hello\n', 3)
        >>> (await sb.run(["printf", "%s", "$HOME"])).stdout
        '$HOME'

        Callbacks get output while the command runs:

        >>> result = await sb.run("echo one; echo two", on_stdout=lambda text: print(text, end=""))
        one
        two

        ``input`` is what the command reads from stdin, and ``check`` makes a failure an exception:

        >>> (await sb.run("sort", input="b\na\n")).stdout
        'a\nb\n'
        >>> await sb.run("echo no >&2; exit 3", check=True)
        Traceback (most recent call last):
        ...
        shoal.errors.CommandFailedError: the command exited with 3: no

        ``wait=False`` returns a handle to iterate over, write to and kill:

        >>> handle = await sb.run("read name; echo hello $name", wait=False)
        >>> await handle.send_input("world\n")
        >>> (await handle.result).stdout
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
            return await self._start(body, timeout)
        try:
            if on_stdout is None and on_stderr is None and input is None:
                result = await self._run_in_request(body, timeout)
            else:
                handle = await self._start(body, timeout)
                async with handle:
                    if input is not None:
                        await handle._feed(input)
                    async for chunk in handle:
                        callback = on_stdout if chunk.stream == "stdout" else on_stderr
                        if callback is not None and chunk.data:
                            callback(chunk.data)
                    result = await handle.result
            if check and not result.success:
                raise failed(result)
            return result
        except Exception:
            raise
        except BaseException:
            # Ctrl-C, or a task that was cancelled: nobody will ever hear of this command again.
            await _seam.ashielded(CLEANUP_SECONDS_MAX, self._kill_quietly, id)
            raise

    async def _start(self, body: dict[str, Any], timeout: float) -> AsyncCommandHandle:
        answer = await self._transport.call("POST", self._path("/commands"), json={**body, "wait": False})
        command: Command = decoded(Command, answer.json())
        return AsyncCommandHandle(self._transport, command, timeout=timeout, started_here=True)

    async def _run_in_request(self, body: dict[str, Any], timeout: float) -> ExecutionResult:
        deadline = time.monotonic() + timeout + ANSWER_GRACE_SECONDS if timeout else math.inf
        while True:
            try:
                answer = await self._transport.call(
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
            async with AsyncCommandHandle(self._transport, command, timeout=timeout) as handle:
                return await handle.result
        return finished(
            command,
            answer_bytes(said, "stdout"),
            answer_bytes(said, "stderr"),
            timeout,
            stdout_lost=command.stdout.start,
            stderr_lost=command.stderr.start,
        )

    async def _kill_quietly(self, id: str) -> None:
        try:
            await self._transport.call(
                "POST", self._path(f"/commands/{in_path(id)}/kill"), repeat=False, read_seconds=CLEANUP_SECONDS_MAX
            )
        except SandboxClientError:
            # It is over, was never started, or nobody can be reached; its timeout ends it then.
            pass

    async def reconnect(self, command_id: str, *, stdout_offset: int = 0, stderr_offset: int = 0) -> AsyncCommandHandle:
        """Returns a handle of a command that was started before, in this program or another.

        >>> handle = await sb.run("echo one; echo two", wait=False)
        >>> [chunk.data async for chunk in await sb.reconnect(handle.command_id, stdout_offset=4)]
        ['two\\n']
        """
        command = await self.get_command(command_id)
        return AsyncCommandHandle(self._transport, command, state=OutputState(stdout_offset, stderr_offset))

    async def get_command(self, command_id: str) -> Command:
        """Returns a command, without its output."""
        answer = await self._transport.call("GET", self._path(f"/commands/{in_path(command_id)}"))
        command: Command = decoded(Command, answer.json())
        return command

    async def list_commands(self) -> list[Command]:
        """Lists all commands of the sandbox, oldest first."""
        commands: list[Command] = []
        cursor: str | None = None
        while True:
            path = query(self._path("/commands"), {"limit": PAGE_ENTRIES, "cursor": cursor})
            page = (await self._transport.call("GET", path)).json()
            commands += [decoded(Command, entry) for entry in page["commands"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                return commands

    # --- Files: the two that everybody needs; the rest is in `files`.

    async def read(self, path: str) -> bytes:
        """Reads a whole file. ``files.read`` reads a part, ``files.download`` writes to disk.

        >>> await sb.write("/workspace/note", "hello")
        >>> await sb.read("/workspace/note")
        b'hello'
        """
        return await self.files.read(path)

    async def write(self, path: str, content: str | bytes) -> None:
        """Writes a whole file, and creates missing directories."""
        await self.files.write(path, content)

    # --- Life

    async def refresh(self) -> AsyncSandbox:
        """Gets the current state from the daemon."""
        self._info = decoded(SandboxInfo, (await self._transport.call("GET", self._path(""))).json())
        return self

    async def update(
        self,
        *,
        new_name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        network: str | Mapping[str, Any] | None = None,
        history: int | None = None,
        hooks: Mapping[str, str | Mapping[str, Any]] | None = None,
    ) -> AsyncSandbox:
        """Changes the sandbox. A label with ``None`` is removed; an empty ``lifetime`` removes all rules; ``history`` is
        how many steps ``undo`` can go back, from now on; ``hooks`` replaces all hooks.

        A ``network`` is in force when this returns, and cuts connections that it no longer allows.

        >>> (await sb.update(labels={"thread": "42"})).labels
        {'thread': '42'}
        """
        body: dict[str, Any] = {}
        if new_name is not None:
            body["name"] = new_name
        if labels is not None:
            body["labels"] = dict(labels)
        if lifetime is not None:
            body["lifetime"] = [rule.to_json() for rule in lifetime]
        if network is not None:
            body["network"] = network_wish(network)
        if history is not None:
            body["history"] = history
        if hooks is not None:
            body["hooks"] = hooks_wish(hooks)
        answer = await self._transport.call("PATCH", self._path(""), json=body)
        self._info = decoded(SandboxInfo, answer.json())
        return self

    async def touch(self) -> Explanation:
        """Renews it: all clocks of its lifetime restart, except the one that counts from its creation."""
        answer = await self._transport.call("POST", self._path("/touch"))
        explanation: Explanation = decoded(Explanation, answer.json())
        return explanation

    async def explain(self) -> Explanation:
        """Explains why it lives, and when and how it ends. This does not count as use.

        >>> print(await sb.explain())
        It runs and has no lifetime rules, so it lives until it is deleted.
        """
        answer = await self._transport.call("GET", self._path("/explain"))
        explanation: Explanation = decoded(Explanation, answer.json())
        return explanation

    async def pause(self, *, drop: bool = False, grace: float | None = None) -> AsyncSandbox:
        """Pauses it: freezes its processes in memory, or ends them and keeps the files. Running a command or using a
        file resumes it.

        >>> (await sb.pause()).state
        'paused'
        >>> (await sb.run("echo on")).stdout
        'on\\n'

        Args:
            drop: End the processes and give processor and memory back. Files are kept, also those in ``/tmp``; those in
                ``/dev/shm`` are not.
            grace: With ``drop``: how many seconds processes may take to end after SIGTERM; 10 by default.
        """
        if grace is not None and not drop:
            raise ValueError("`grace` is for `drop=True`: a frozen process does not end")
        body: dict[str, Any] = {"memory": "drop" if drop else "keep"}
        if grace is not None:
            body["grace_seconds"] = grace
        answer = await self._transport.call(
            "POST", self._path("/pause"), json=body, read_seconds=(grace or 0) + self._transport.timeout
        )
        self._info = decoded(SandboxInfo, answer.json())
        return self

    async def resume(self) -> AsyncSandbox:
        """Lets it run again after a pause, or after a failure if its files are whole. A frozen one goes on where it was.

        >>> (await (await sb.pause(drop=True)).resume()).state
        'running'
        """
        answer = await self._transport.call("POST", self._path("/resume"))
        self._info = decoded(SandboxInfo, answer.json())
        return self

    async def stats(self) -> SandboxStats:
        """Returns its resource use and limits."""
        answer = await self._transport.call("GET", self._path("/stats"))
        stats: SandboxStats = decoded(SandboxStats, answer.json())
        return stats

    async def ports(self) -> list[Port]:
        """Returns the ports that its programs listen on."""
        answer = await self._transport.call("GET", self._path("/ports"))
        return [decoded(Port, port) for port in answer.json()["ports"]]

    async def wait_for_port(self, port: int, timeout: float = 30.0) -> Port:
        """Waits until a program in it listens on a port. It may listen on 127.0.0.1 only.

        Raises:
            SandboxClientError: Nothing listened in time; its ``code`` is ``port_closed``.
        """
        path = query(self._path("/ports"), {"wait": port, "wait_seconds": timeout})
        answer = await self._transport.call("GET", path, read_seconds=timeout + ANSWER_GRACE_SECONDS)
        found: Port = decoded(Port, answer.json()["ports"][0])
        return found

    async def request(
        self,
        port: int,
        path: str = "/",
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        timeout: float | None = 60.0,
    ) -> httpx.Response:
        """Sends a request to a server in it and returns the answer, whatever its status.

        Raises:
            SandboxClientError: No answer of the server came; its ``code`` says why, such as ``port_closed``.

        >>> (await sb.request(8080, "/")).status_code  # doctest: +SKIP
        200
        """
        target = self._path(f"/ports/{port}/{path.removeprefix('/')}")
        return await self._transport.forward(method, target, headers=headers, content=content, read_seconds=timeout)

    async def create_link(
        self,
        port: int,
        *,
        ttl_seconds: float = 3600,
        methods: Sequence[str] = (),
        label: str | None = None,
        public: bool = False,
    ) -> CreatedLink:
        """Makes a link that opens a port in a browser, or to anyone who has its token."""
        body: dict[str, Any] = {"port": port, "ttl_seconds": ttl_seconds, "methods": list(methods), "public": public}
        if label is not None:
            body["label"] = label
        answer = await self._transport.call("POST", self._path("/links"), json=body, repeat=False)
        link: CreatedLink = decoded(CreatedLink, answer.json())
        return link

    async def links(self) -> list[PortLink]:
        """Returns the links to its ports that still work."""
        answer = await self._transport.call("GET", self._path("/links"))
        return [decoded(PortLink, link) for link in answer.json()["links"]]

    async def revoke_link(self, link_id: str) -> None:
        """Ends a link, and the connections that it has opened."""
        await self._transport.call("DELETE", self._path(f"/links/{in_path(link_id)}"))

    def events(self) -> AsyncSandboxEvents:
        """Yields its events and those of its commands, from now on, until it is deleted."""
        return AsyncSandboxEvents(self._transport, self.id)

    async def delete(self) -> None:
        """Deletes it and everything in it. Returns when nothing of it is left."""
        await self._transport.call("DELETE", self._path(""))

    # --- Snapshots

    async def snapshot(self, name: str | None = None, *, labels: Mapping[str, str] | None = None) -> Snapshot:
        """Takes a snapshot of its files. The sandbox stands still for milliseconds and runs on.

        If nothing has changed since a snapshot with the same name and labels, returns that one.

        >>> await sb.write("/workspace/plan.txt", "first")
        >>> clean = await sb.snapshot("clean")
        >>> async with await client.sandbox(template_name="clean") as other:
        ...     await other.read("/workspace/plan.txt")
        b'first'
        >>> await client.delete_snapshot(clean.id)

        Args:
            name: 1 to 200 bytes without spaces and colons; the sandbox's name by default.
            labels: Labels to find it by.
        """
        body: dict[str, Any] = {}
        if name is not None:
            body["name"] = name
        if labels:
            body["labels"] = dict(labels)
        answer = await self._post("snapshots", body)
        taken: Snapshot = decoded(Snapshot, answer)
        return taken

    async def rollback(self, snapshot: str) -> AsyncSandbox:
        """Replaces its files by those of a snapshot of it, or of a sandbox that it was forked from.

        Its id, name, labels, variables, limits and volumes stay. Its commands end.

        Args:
            snapshot: The id or name of the snapshot.
        """
        self._info = decoded(SandboxInfo, await self._post("rollback", {"snapshot": snapshot}))
        return self

    async def fork(
        self,
        count: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> list[AsyncSandbox | SandboxClientError]:
        """Creates sandboxes that begin with its files as they are now. Returns a sandbox or an error for each.

        >>> await sb.write("/workspace/state.txt", "shared")
        >>> children = await sb.fork(2)
        >>> [await child.read("/workspace/state.txt") for child in children]
        [b'shared', b'shared']
        >>> for child in children:
        ...     await child.delete()

        Args:
            count: How many, 1 to 100.
            env: Variables that the children have in addition.
            labels: Labels that the children have in addition.
        """
        body: dict[str, Any] = {"count": count}
        if env:
            body["env"] = dict(env)
        if labels:
            body["labels"] = dict(labels)
        made = (await self._post("fork", body))["children"]
        children: list[AsyncSandbox | SandboxClientError] = []
        for child in made:
            if child.get("sandbox") is None:
                children.append(_refusal_of(child["error"]))
            else:
                children.append(AsyncSandbox(self._transport, decoded(SandboxInfo, child["sandbox"])))
        return children

    async def tree(self) -> list[FamilyMember]:
        """Lists its family, oldest member first: what it was forked from, and what was forked from that."""
        answer = await self._transport.call("GET", self._path("/tree"))
        return [decoded(FamilyMember, entry) for entry in answer.json()["members"]]

    async def delete_tree(self) -> list[str]:
        """Deletes it and all that were forked from it, and theirs. Returns the ids of what was deleted."""
        path = self._path("/tree")
        answer = await self._transport.call("DELETE", path, repeat=False, read_seconds=TAKE_SECONDS_MAX)
        deleted: list[str] = answer.json()["deleted"]
        return deleted

    async def promote(self, *, parent: Literal["keep", "pause", "delete"] = "keep") -> AsyncSandbox:
        """Takes the name and the labels of its parent, which gets another name.

        Args:
            parent: What becomes of the parent.
        """
        self._info = decoded(SandboxInfo, await self._post("promote", {"parent": parent}))
        return self

    async def history(self) -> list[HistoryStep]:
        """Lists the steps that ``undo`` can go back to, newest first."""
        answer = await self._transport.call("GET", self._path("/history"))
        return [decoded(HistoryStep, entry) for entry in answer.json()["steps"]]

    async def undo(self, steps: int = 1) -> AsyncSandbox:
        """Goes back to its files before the last command that changed something, or further.

        Args:
            steps: How many steps of the history to go back.
        """
        self._info = decoded(SandboxInfo, await self._post("undo", {"steps": steps}))
        return self

    async def _post(self, verb: str, body: dict[str, Any]) -> Any:
        path = self._path(f"/{verb}")
        # Sent once: a second try would do it twice.
        answer = await self._transport.call("POST", path, json=body, repeat=False, read_seconds=TAKE_SECONDS_MAX)
        return answer.json()

    def _path(self, rest: str) -> str:
        return f"/sandboxes/{self.id}{rest}"


def _refusal_of(error: dict[str, Any]) -> SandboxClientError:
    """The exception for a child that could not be made."""
    return refused(error["code"], error["message"], error.get("hint"), error.get("details"), None, "sandbox")


class AsyncSandboxEvents(AsyncEvents):
    """Events of sandboxes and their commands. The first event is ``ready``, once.

    If the connection breaks, it reconnects and continues after the last event; the event ``missed`` reports that some
    events are gone.
    """

    def __init__(self, transport: AsyncTransport, sandbox_id: str | None = None) -> None:
        super().__init__(transport)
        self._sandbox_id = sandbox_id
        self._last: str | None = None
        self._over = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._sandbox_id or 'all sandboxes'}>"

    def _place(self) -> tuple[str, dict[str, str]]:
        headers = {} if self._last is None else {"Last-Event-ID": self._last}
        return query("/events", {"sandbox": self._sandbox_id}), headers

    def __aiter__(self) -> AsyncIterator[SandboxEvent]:
        return self

    async def __anext__(self) -> SandboxEvent:
        while not self._over:
            first = self._last is None
            id, said = await self._next()
            self._last = id or self._last
            event: SandboxEvent = decoded(SandboxEvent, said)
            if event.type == "ready" and not first:
                continue
            if event.type == "deleted" and self._sandbox_id is not None:
                self._over = True
                await self.close()
            return event
        raise StopAsyncIteration

    async def __aenter__(self) -> AsyncSandboxEvents:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
