"""The part of the client that neither waits nor sends: requests, errors, streams and retries as plain values.

Sync and async share all of it. What waits is in ``_async``, from which ``_sync`` is generated.
"""

from __future__ import annotations

import base64
import codecs
import json
import re
import time
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from .errors import (
    CommandFailedError,
    CommandTimeoutError,
    QuotaExceededError,
    ResourceAlreadyExistsError,
    ResourceCreationError,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    ResourceTimeoutError,
    SandboxAPIError,
    SandboxAuthenticationError,
    SandboxClientError,
    SandboxNotReadyError,
    SandboxOperationError,
    SandboxServerReloadError,
    ValidationError,
)
from .models import Command, ExecutionResult, LifetimeRule, OutputChunk, Stream, TerminalSize, VolumeMountSpec, decode

#: How long one answer may take, unless the caller says otherwise.
TIMEOUT_DEFAULT_SECONDS = 60.0
#: How long a connection may take to come about.
CONNECT_SECONDS_MAX = 5.0
#: How long a daemon that was there may be away before a call or a stream gives up.
PATIENCE_SECONDS = 60.0
#: Between two tries: twice as long each time, within these.
PAUSE_SECONDS_MIN = 0.02
PAUSE_SECONDS_MAX = 1.0
#: The daemon shows every 15 s that a stream lives; one that is silent for longer than this is dead.
SILENCE_SECONDS_MAX = 60.0
#: How long one request waits for a command. Then another does, by the command's id: a connection that died in silence is
#: noticed so.
WAIT_SECONDS_MAX = 100.0
#: How long an image may take to come, on a slow line, and a template to be built.
PULL_SECONDS_MAX = 1800.0
#: What the daemon needs on top of a command's timeout to end its processes and to answer.
ANSWER_GRACE_SECONDS = 30.0
#: How long cleaning up may take after the caller was interrupted.
CLEANUP_SECONDS_MAX = 10.0
#: Output of one stream that a handle keeps for its result. The daemon keeps as much; what came before is counted.
OUTPUT_KEPT_BYTES_MAX = 64 << 20
#: Stdin in one request; the daemon takes 1 MiB.
STDIN_PIECE_BYTES_MAX = 512 << 10
#: Pieces in which files are sent and written.
FILE_PIECE_BYTES = 256 << 10
#: Entries that are asked for in one page.
PAGE_ENTRIES = 500
#: The longest line of a server-sent event; the daemon sends 64 KiB of output at most, escaped.
EVENT_LINE_BYTES_MAX = 4 << 20


class Patience:
    """How long to go on trying, and how fast."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.renew()

    def renew(self) -> None:
        """Resets the time and the pauses after a success."""
        self._deadline = time.monotonic() + self._seconds
        self._pause = PAUSE_SECONDS_MIN

    def next_pause(self) -> float | None:
        """How long to wait before the next try, or ``None`` when there is no more time."""
        pause = self._pause
        if time.monotonic() + pause > self._deadline:
            return None
        self._pause = min(pause * 2, PAUSE_SECONDS_MAX)
        return pause


def query(path: str, parameters: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> str:
    """A path with its query. ``None`` is left out; text with surrogate escapes becomes the bytes it stands for."""
    pairs = parameters.items() if isinstance(parameters, Mapping) else parameters
    parts = [f"{name}={_in_query(value)}" for name, value in pairs if value is not None]
    return f"{path}?{'&'.join(parts)}" if parts else path


def _in_query(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return quote(str(value), safe="/", errors="surrogateescape")


def in_path(text: str) -> str:
    """One part of a path, whatever is in it."""
    return quote(text, safe="", errors="surrogateescape")


def new_id() -> str:
    """An id that makes a create idempotent."""
    return str(uuid.uuid4())


def is_id(text: str) -> bool:
    """Whether this can be a sandbox's id. Names may look like ids too."""
    try:
        return str(uuid.UUID(text)) == text.lower()
    except ValueError:
        return False


def selectors(labels: Mapping[str, str] | Sequence[str] | None) -> list[tuple[str, str]]:
    """The ``label`` parameters that a list is filtered by."""
    if labels is None:
        return []
    if isinstance(labels, str):
        labels = [labels]
    texts = [f"{key}={value}" for key, value in labels.items()] if isinstance(labels, Mapping) else list(labels)
    return [("label", text) for text in texts]


def one_disk(disk: str | None, storage: str | None) -> str | None:
    """The disk limit. ``storage`` is what the LangSmith SDK calls ``disk``.

    >>> one_disk(None, "1Gi"), one_disk("2Gi", None)
    ('1Gi', '2Gi')
    """
    if disk is not None and storage is not None:
        raise ValueError("`disk` and `storage` are the same: give one of them")
    return storage if disk is None else disk


def network_wish(network: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """What is said of a network: a word, or a policy."""
    return dict(network) if isinstance(network, Mapping) else network


def hooks_wish(hooks: Mapping[str, str | Mapping[str, Any]]) -> dict[str, Any]:
    """What is said of hooks: a script, or all of it.

    >>> hooks_wish({"before_pause": "sync", "after_resume": {"argv": ["true"], "required": True}})
    {'before_pause': {'script': 'sync'}, 'after_resume': {'argv': ['true'], 'required': True}}
    """
    return {when: {"script": hook} if isinstance(hook, str) else dict(hook) for when, hook in hooks.items()}


def create_wish(
    *,
    template_name: str | None,
    image: str | None,
    name: str | None,
    labels: Mapping[str, str] | None,
    match_labels: Mapping[str, str] | None,
    lifetime: Sequence[LifetimeRule] | None,
    network: str | Mapping[str, Any] | None,
    idle: float | None,
    ttl: float | None,
    hard_ttl: float | None,
    env: Mapping[str, str] | None,
    cpu: str | None,
    memory: str | None,
    disk: str | None,
    volume_mounts: Sequence[VolumeMountSpec] | None,
    pool_name: str | None,
    wait: bool,
) -> dict[str, Any]:
    """The body of a create. ``idle``, ``ttl`` and ``hard_ttl`` are short for lifetime rules."""
    short = [LifetimeRule.ttl(ttl)] if ttl is not None else []
    short += [LifetimeRule.idle(idle)] if idle is not None else []
    short += [LifetimeRule.hard_ttl(hard_ttl)] if hard_ttl is not None else []
    if short:
        lifetime = [*(lifetime or []), *short]
    wish = {
        "template": template_name,
        "image": image,
        "name": name,
        "labels": dict(labels) if labels else None,
        "match_labels": dict(match_labels) if match_labels is not None else None,
        "lifetime": [rule.to_json() for rule in lifetime] if lifetime is not None else None,
        "network": network_wish(network),
        "env": dict(env) if env else None,
        "cpu": cpu,
        "memory": memory,
        "disk": disk,
        "mounts": [mount.to_json() for mount in volume_mounts] if volume_mounts else None,
        "pool": pool_name,
        "wait": wait,
    }
    return {key: value for key, value in wish.items() if value is not None}


def template_wish(
    *,
    image: str | None,
    cpu: str | None,
    memory: str | None,
    disk: str | None,
    volume_mounts: Sequence[VolumeMountSpec] | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    command: Sequence[str] | None,
    labels: Mapping[str, str] | None,
) -> dict[str, Any]:
    """What is said of a template. ``None`` says nothing; an empty text is the daemon's ``null``."""
    wish = {
        "image": image,
        "cpu": cpu,
        "memory": memory,
        "disk": disk,
        "mounts": [mount.to_json() for mount in volume_mounts] if volume_mounts is not None else None,
        "env": dict(env) if env is not None else None,
        "cwd": cwd,
        "user": user,
        "command": list(command) if command is not None else None,
        "labels": dict(labels) if labels is not None else None,
    }
    return {key: None if value == "" else value for key, value in wish.items() if value is not None}


def run_wish(
    command: str | Sequence[str],
    *,
    id: str,
    timeout: float,
    idle_timeout: float,
    env: Mapping[str, str] | None,
    cwd: str | None,
    user: str | None,
    stdin: bool,
    terminal: TerminalSize | None,
) -> dict[str, Any]:
    """The body of a command. Text is a script for the shell, a list is a program with its arguments."""
    what = {"script": command} if isinstance(command, str) else {"argv": list(command)}
    wish: dict[str, Any] = {**what, "id": id}
    optional = {
        "timeout_seconds": timeout or None,
        "idle_timeout_seconds": idle_timeout or None,
        "env": dict(env) if env else None,
        "cwd": cwd,
        "user": user,
        "stdin": stdin or None,
        "terminal": {"rows": terminal.rows, "columns": terminal.columns} if terminal else None,
    }
    wish.update((key, value) for key, value in optional.items() if value is not None)
    return wish


#: What a path is about, where the whole of it names a thing and not something in it.
_RESOURCE = re.compile(r"/(sandbox|template|build|image|volume|pool|key|snapshot)e?s(?:/[^/?]*)?(?:\?.*)?")


def resource_of(path: str) -> str | None:
    """What a request is about; ``None`` for what is inside of something.

    >>> resource_of("/volumes/a%20b?force=true"), resource_of("/sandboxes/1/files?path=/x")
    ('volume', None)
    """
    found = _RESOURCE.fullmatch(path)
    return found and found.group(1)


def refusal(status: int, body: bytes, url: str, path: str = "") -> SandboxClientError:
    """The exception for an error answer of the daemon."""
    try:
        said = json.loads(body)
        code, message = said["code"], said["message"]
    except (ValueError, KeyError, TypeError):
        return SandboxAPIError(
            f"the answer from {url} is not one of a daemon (status {status})",
            hint="is this the address of a Shoal daemon?",
            status_code=status,
        )
    return refused(code, message, said.get("hint"), said.get("details"), status, resource_of(path))


_AUTHENTICATION = {"unauthorized", "admin_required", "metrics_only", "metrics_not_allowed", "origin_not_allowed"}
_NOT_READY = {"wrong_state", "sandbox_failed", "sandbox_too_new", "sandbox_too_old"}
_COMMAND = {"command_ended", "no_terminal", "stdin_closed", "stdin_stalled", "stdin_overflow"}
_SANDBOX = {"sandbox_unresponsive", "sandbox_exhausted", "sandbox_strange"}
#: The LangSmith SDK's words for what a key may have so much of.
_QUOTAS = {"sandboxes": "sandbox_count", "volumes": "volume_count"}
#: Something could not be made because its image could not be had.
_IMAGE = {
    "image_invalid",
    "image_removed",
    "image_too_large",
    "registry_busy",
    "registry_denied",
    "registry_failed",
    "registry_insecure",
    "registry_unreachable",
    "template_failed",
    "unpack_failed",
    "wrong_platform",
}
#: What the daemon's store of files cannot do.
_UNSUPPORTED = {"copies_not_supported", "disk_limits_not_supported", "snapshots_not_supported"}
_OWN_FAULT = {"internal", "route_not_found", "method_not_allowed", "idempotency_key_reused", "delete_failed"}


#: What to do about an error, in the words of this package. The daemon's own hints are for those who write HTTP requests.
_HINTS = {
    "sandbox_not_found": "`list_sandboxes` lists the sandboxes of this key's owner",
    "command_not_found": "`list_commands` of the sandbox lists its commands",
    "template_not_found": "`list_templates` lists the templates of this key's owner; `default` is always there",
    "template_failed": "fix the cause, then retry with `prepare_template`",
    "pool_not_found": "`list_pools` lists the pools of this key's owner",
    "pool_deleting": "its sandboxes are still being deleted; `list_pools` shows when it is gone",
    "pool_has_volumes": "create a template without `volume_mounts` for the pool",
    "volume_not_found": "`list_volumes` lists the volumes of this key's owner",
    "secret_not_found": "`list_secrets` lists the secrets of this key's owner, and `set_secret` keeps one",
    "key_not_found": "`list_keys` lists all keys",
    "image_not_found": "`list_images` lists the images that are here, and `pull_image` gets others",
    "image_in_use": "delete what uses it, or remove the name with `force=True`",
    "alias_not_found": "`list_image_aliases` lists all aliases",
    "build_not_found": "`list_builds` lists the builds that are remembered",
    "name_taken": "choose another name, or delete the other one first",
    "unauthorized": "pass a valid `api_key`, or set SHOAL_API_KEY; the first key is in `api.key` in the daemon's data directory",
    "admin_required": "use the key in `api.key` in the daemon's data directory",
    "disk_limits_not_supported": "leave `disk` out, or give the daemon storage that has limits; `shoal doctor` says how",
    "no_terminal": "start the command with `terminal=TerminalSize()` to give it a terminal",
    "stdin_closed": "start the command with `stdin=True` to write to it",
}
#: Words of other clients.
_FOREIGN = re.compile(r"\b(?:GET|POST|PUT|PATCH|DELETE) |/v1/|Bearer|--[a-z]")


def hint_for(code: str, hint: str | None) -> str | None:
    """What a caller of this package should do about an error.

    >>> hint_for("volume_not_found", "GET /v1/volumes lists the volumes of this key's owner")
    "`list_volumes` lists the volumes of this key's owner"
    >>> hint_for("disk_full", "free some of it"), hint_for("x", "or use --force")
    ('free some of it', None)
    """
    if code in _HINTS:
        return _HINTS[code]
    return None if hint is None or _FOREIGN.search(hint) else hint


def refused(
    code: str,
    message: str,
    hint: str | None,
    details: Mapping[str, Any] | None,
    status: int | None,
    resource: str | None = None,
) -> SandboxClientError:
    """The exception for one of the daemon's codes. ``resource`` is what the request was about."""
    details = details or {}
    more: dict[str, Any] = {"hint": hint_for(code, hint), "code": code, "status_code": status, "details": details}
    if code.endswith("_not_found") and code not in _OWN_FAULT:
        return ResourceNotFoundError(message, resource_type=code.removesuffix("_not_found"), **more)
    if code.endswith("_in_use"):
        return ResourceInUseError(message, resource_type=code.removesuffix("_in_use"), **more)
    if code in _AUTHENTICATION:
        return SandboxAuthenticationError(message, **more)
    if code in _NOT_READY:
        return SandboxNotReadyError(message, **more)
    if code == "quota_exceeded":
        what = details.get("resource")
        return QuotaExceededError(message, quota_type=_QUOTAS.get(str(what), what), resource_type=resource, **more)
    if code == "no_capacity":
        return ResourceCreationError(message, resource_type=resource or "sandbox", error_type="Unschedulable", **more)
    if code == "create_failed":
        return ResourceCreationError(message, resource_type=resource or "sandbox", error_type=code, **more)
    if code in _IMAGE:
        return ResourceCreationError(message, resource_type=resource or "image", error_type="ImagePull", **more)
    if code in ("volume_too_small", "pool_has_volumes"):
        error_type, field = ("VolumeResize", "size") if code == "volume_too_small" else (None, "template")
        return ValidationError(message, field=field, error_type=error_type, **more)
    if code in _UNSUPPORTED or code == "volume_failed":
        error_type = "VolumeProvisioning" if code == "volume_failed" else code
        return ResourceCreationError(message, resource_type=resource, error_type=error_type, **more)
    if code == "pool_deleting":
        return ResourceInUseError(message, resource_type="pool", **more)
    if code == "disk_full" and resource is not None:
        return ResourceCreationError(message, resource_type=resource, error_type=code, **more)
    if code == "name_taken":
        return ResourceNameConflictError(message, resource_type=resource or "sandbox", **more)
    if code == "command_id_reused":
        return ResourceAlreadyExistsError(message, resource_type="command", **more)
    if code == "already_exists":
        return ResourceAlreadyExistsError(message, resource_type="file", **more)
    if code == "stopping":
        return SandboxServerReloadError(message, **more)
    if code in _COMMAND:
        return SandboxOperationError(message, operation="command", error_type=code, **more)
    if code in _SANDBOX:
        return SandboxOperationError(message, operation="sandbox", error_type=code, **more)
    if code in _OWN_FAULT:
        return SandboxAPIError(message, **more)
    if status in (400, 413, 414, 415, 421, 431):
        return ValidationError(message, field=details.get("field"), **more)
    if "path" in details or status in (403, 408, 409, 412, 416, 507):
        return SandboxOperationError(message, operation="file", error_type=code, **more)
    return SandboxAPIError(message, **more)


def late(resource: str, name: str, timeout: float, last_status: str | None = None) -> ResourceTimeoutError:
    """What is raised when something was not ready in time."""
    return ResourceTimeoutError(
        f"{resource} `{name}` was not ready within {timeout:g} s", resource_type=resource, last_status=last_status
    )


class SseParser:
    """Parses server-sent events from bytes in pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._id: str | None = None

    def feed(self, piece: bytes) -> Iterator[tuple[str | None, Any]]:
        """The events that are complete by now, each with its id."""
        lines = (self._rest + piece).split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > EVENT_LINE_BYTES_MAX:
            raise SandboxAPIError("an event of the daemon is longer than any event can be")
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if not line:
                if self._data:
                    data, self._data = b"\n".join(self._data), []
                    yield self._id, json.loads(data)
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self._id = line[3:].strip().decode("utf-8", "replace")


class OutputState:
    """What has been seen of a command's output: each byte once, in order, with gaps only where they were named."""

    def __init__(self, stdout_offset: int = 0, stderr_offset: int = 0) -> None:
        self.offsets: dict[Stream, int] = {"stdout": stdout_offset, "stderr": stderr_offset}
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in ("stdout", "stderr")}
        self._kept: dict[Stream, deque[bytes]] = {"stdout": deque(), "stderr": deque()}
        self._kept_bytes: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        self.lost: dict[Stream, int] = {"stdout": 0, "stderr": 0}

    def output(self, stream: Stream, offset: int, raw: bytes) -> OutputChunk | None:
        """Takes a piece; returns ``None`` if nothing in it is new."""
        seen = self.offsets[stream]
        if offset > seen:
            raise SandboxAPIError(f"the daemon sent {stream} at {offset} where {seen} is due")
        raw = raw[seen - offset :]
        if not raw:
            return None
        self.offsets[stream] = seen + len(raw)
        self._keep(stream, raw)
        return OutputChunk(stream, self._decoders[stream].decode(raw), seen, raw)

    def skip(self, stream: Stream, to: int) -> None:
        """The daemon has dropped the bytes up to ``to``."""
        self.lost[stream] += self._kept_bytes[stream] + to - self.offsets[stream]
        self._kept[stream].clear()
        self._kept_bytes[stream] = 0
        self.offsets[stream] = to
        self._decoders[stream].reset()

    def _keep(self, stream: Stream, raw: bytes) -> None:
        kept = self._kept[stream]
        kept.append(raw)
        self._kept_bytes[stream] += len(raw)
        while self._kept_bytes[stream] > OUTPUT_KEPT_BYTES_MAX:
            dropped = len(kept.popleft())
            self._kept_bytes[stream] -= dropped
            self.lost[stream] += dropped

    def text_rest(self, stream: Stream) -> str:
        """What is left of a character that was cut off by the end of the stream."""
        return self._decoders[stream].decode(b"", final=True)

    def result(self, command: Command, timeout: float | None) -> ExecutionResult:
        """The result of a command whose output was all seen."""
        return finished(
            command,
            b"".join(self._kept["stdout"]),
            b"".join(self._kept["stderr"]),
            timeout,
            stdout_lost=self.lost["stdout"],
            stderr_lost=self.lost["stderr"],
        )


def event_bytes(event: Mapping[str, Any]) -> bytes:
    """The bytes of an ``output`` event."""
    encoded = event.get("base64")
    return base64.b64decode(encoded) if encoded is not None else str(event.get("text", "")).encode()


def answer_bytes(answer: Mapping[str, Any], stream: Stream) -> bytes:
    """The bytes of a stream in the answer to a command that was waited for."""
    encoded = answer.get(f"{stream}_base64")
    return base64.b64decode(encoded) if encoded is not None else str(answer.get(f"{stream}_text", "")).encode()


def finished(
    command: Command,
    stdout: bytes,
    stderr: bytes,
    timeout: float | None,
    *,
    stdout_lost: int = 0,
    stderr_lost: int = 0,
) -> ExecutionResult:
    """The result, or the exception where there is none to give."""
    result = command.result
    if result is None:
        raise SandboxAPIError(f"the daemon says that command `{command.id}` is over, and not how it ended")
    if result.outcome in ("timed_out", "idle_timed_out"):
        after = f" after {timeout:g} s" if timeout and result.outcome == "timed_out" else ""
        raise CommandTimeoutError(
            f"the command was ended{after}: {result.message or 'its timeout struck'}",
            timeout=timeout,
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
        )
    if result.outcome == "sandbox_gone":
        raise SandboxOperationError(
            result.message or "the sandbox ended under the command", operation="command", error_type=result.outcome
        )
    exit_code = result.exit_code
    if exit_code is None:
        if result.outcome not in ("killed", "out_of_memory"):
            raise SandboxOperationError(
                result.message or "nobody heard how the command ended", operation="command", error_type=result.outcome
            )
        # A tree that was killed has no honest number; 137 is what a shell says of a process that SIGKILL ended.
        exit_code = 128 + (result.signal or 9)
    return ExecutionResult(
        exit_code=exit_code,
        stdout_bytes=stdout,
        stderr_bytes=stderr,
        outcome=result.outcome,
        message=result.message,
        command_id=command.id,
        stdout_lost=stdout_lost,
        stderr_lost=stderr_lost,
        not_undoable=result.not_undoable,
    )


def failed(result: ExecutionResult) -> CommandFailedError:
    """The exception for a command that had to succeed, with the last line that it wrote to stderr.

    >>> failed(ExecutionResult(exit_code=3, stderr_bytes=b"a\\nno\\n"))
    CommandFailedError('the command exited with 3: no')
    """
    how = result.message or f"the command exited with {result.exit_code}"
    last = result.stderr.strip().rpartition("\n")[2]
    return CommandFailedError(f"{how}: {last}" if last else how, result=result)


def decoded(kind: type[Any], data: Any) -> Any:
    """As :func:`shoal.models.decode`, with our own error."""
    try:
        return decode(kind, data)
    except (ValueError, KeyError, TypeError) as error:
        raise SandboxAPIError(f"the daemon's answer cannot be understood: {error}") from error
