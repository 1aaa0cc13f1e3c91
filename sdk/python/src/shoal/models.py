"""The daemon's answers as values. Nothing here does I/O.

Fields that a newer daemon adds are ignored. Names and paths that are not UTF-8 are text with surrogate escapes, as
in Python itself (:func:`os.fsencode` returns the bytes), and can be passed back unchanged.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeVar, Union

__all__ = [
    "Build",
    "CollectedImages",
    "Command",
    "CommandResult",
    "CreatedKey",
    "CreatedLink",
    "DeadLetter",
    "DiskUsage",
    "EditedFile",
    "ExecutionResult",
    "ExplainedRule",
    "Explanation",
    "FileEvent",
    "FileInfo",
    "FilesMade",
    "FoundFiles",
    "FoundLines",
    "HookRun",
    "Image",
    "ImageAlias",
    "ImageConfig",
    "Kept",
    "Key",
    "LastUse",
    "LayerProgress",
    "LifetimeRule",
    "LineMatch",
    "MachineStats",
    "OutputChunk",
    "Pool",
    "PoolMember",
    "Port",
    "PortLink",
    "PortProcess",
    "ResourceSpec",
    "ResourceStatus",
    "SandboxEnd",
    "SandboxEvent",
    "SandboxInfo",
    "SandboxLimits",
    "SandboxStats",
    "SandboxTemplate",
    "SandboxUsage",
    "TerminalSize",
    "Version",
    "Volume",
    "VolumeHolder",
    "VolumeMountSpec",
    "Webhook",
    "WebhookTest",
]

State = Literal["creating", "running", "paused", "deleting", "failed"]
Action = Literal["pause_keep_memory", "pause_drop_memory", "delete"]
Since = Literal["last_use", "start", "paused", "creation"]
Stream = Literal["stdout", "stderr"]
PauseMemory = Literal["keep", "drop"]
TemplateState = Literal["preparing", "ready", "failed"]
BuildState = Literal["running", "done", "failed"]
PoolState = Literal["ready", "filling", "failing", "deleting"]
LayerState = Literal["waiting", "fetching", "fetched", "unpacking", "done", "present"]

#: The LangSmith SDK's words for the states of a sandbox.
STATUS_OF_STATE: Mapping[str, str] = {
    "creating": "provisioning",
    "running": "ready",
    "paused": "stopped",
    "deleting": "deleting",
    "failed": "failed",
}


@dataclass(frozen=True)
class LifetimeRule:
    """After this time since an event, take this action. If there are several rules, the first that is due wins.

    >>> LifetimeRule.idle(1800)
    LifetimeRule(since='last_use', after_seconds=1800, action='delete')
    """

    since: Since
    after_seconds: float
    action: Action = "delete"
    #: For daemons of versions that could not pause: they keep a rule to pause, show it, and do nothing. Others ignore this.
    accept_inactive: bool = field(default=False, repr=False)
    #: Whether the daemon does it; said by the daemon.
    acts: bool = field(default=True, repr=False)

    @classmethod
    def idle(cls, seconds: float, action: Action = "delete") -> LifetimeRule:
        """Deletes the sandbox after this time without use."""
        return cls("last_use", seconds, action)

    @classmethod
    def ttl(cls, seconds: float) -> LifetimeRule:
        """Pauses the sandbox after this time without use: ends its processes and keeps its files. A use resumes it."""
        return cls("last_use", seconds, "pause_drop_memory")

    @classmethod
    def hard_ttl(cls, seconds: float) -> LifetimeRule:
        """Deletes the sandbox this long after its creation, used or not, paused or not. Nothing renews it."""
        return cls("creation", seconds)

    def to_json(self) -> dict[str, Any]:
        """Converts it to the daemon's JSON."""
        wish: dict[str, Any] = {"since": self.since, "after_seconds": self.after_seconds, "action": self.action}
        return {**wish, "accept_inactive": True} if self.accept_inactive else wish


@dataclass(frozen=True)
class SandboxLimits:
    """What a sandbox may use."""

    cpu_millis: int
    memory_bytes: int
    pids: int
    #: What its own files may take; ``None`` where nothing limits them.
    disk_bytes: int | None = None


@dataclass(frozen=True)
class HookRun:
    """How the last run of a hook went."""

    at: datetime
    took_ms: float
    #: The command that ran, if it started.
    command_id: str | None = None
    #: Why it failed; ``None`` if it succeeded.
    failure: str | None = None


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox, as the daemon describes it."""

    id: str
    name: str
    state: State
    template: str
    image: str
    limits: SandboxLimits
    created_at: datetime
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    lifetime: list[LifetimeRule] = field(default_factory=list)
    #: What it may reach: ``mode``, ``rules`` and ``audit``.
    network: dict[str, Any] = field(default_factory=dict)
    #: The version of the template that it was made from, and keeps.
    template_version: int | None = None
    #: Why it is ``failed``, or ``paused`` or ``deleting`` by a rule of its lifetime.
    reason: str | None = None
    #: What it has kept, if it is ``paused``: ``keep`` is everything, ``drop`` is its files.
    memory: PauseMemory | None = None
    #: The pool where it stood ready, if it came from one.
    claimed_from: str | None = None
    #: How many steps of its history are kept for ``undo``; 0 for none.
    history: int = 0
    #: What runs in it when something is done to it, by when that is.
    hooks: dict[str, Any] = field(default_factory=dict, repr=False)
    #: How the last run of each hook went.
    hook_runs: dict[str, HookRun] = field(default_factory=dict, repr=False)
    mounts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    #: Whether the request made it, or found it by its labels.
    created: bool | None = None


@dataclass(frozen=True)
class Webhook:
    """An address that is sent what happens."""

    id: str
    url: str
    #: The types of events that are sent; all if empty.
    events: list[str]
    created_at: datetime
    #: Failed attempts since the last success.
    failed_attempts: int = 0
    #: What requests are signed with; only in the answer to its creation.
    secret: str | None = field(default=None, repr=False)
    delivered_at: datetime | None = None
    last_error: str | None = None


@dataclass(frozen=True)
class WebhookTest:
    """What came of a test of a webhook."""

    delivered: bool
    took_ms: float
    error: str | None = None


@dataclass(frozen=True)
class DeadLetter:
    """An event that could not be delivered to a webhook."""

    id: str
    given_up_at: datetime
    attempts: int
    reason: str
    #: What would have been sent.
    body: dict[str, Any] = field(repr=False)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a sandbox's files, from which sandboxes can be made: name it as ``template_name``."""

    id: str
    name: str
    state: Literal["building", "ready", "failed"]
    created_at: datetime
    #: Why it failed.
    reason: str | None = None
    #: The sandbox that it was taken of, which may be gone.
    sandbox_id: str | None = None
    #: The snapshot that its sandbox began with, or was rolled back to.
    parent: str | None = None
    #: The template that sandboxes are made from.
    template: str | None = None
    image: str | None = None
    labels: dict[str, str] = field(default_factory=dict)
    #: What its sandbox had written.
    size_bytes: int | None = None
    #: How long its sandbox stood still, in milliseconds.
    stopped_ms: float | None = None


@dataclass(frozen=True)
class FamilyMember:
    """A sandbox in a family of forks. It may be gone."""

    sandbox_id: str
    name: str
    created_at: datetime
    #: The sandbox that it was made from.
    parent: str | None = None
    #: The snapshot that it was made from.
    snapshot: str | None = None
    #: ``None`` if it is gone.
    state: State | None = None
    deleted_at: datetime | None = None


@dataclass(frozen=True)
class Difference:
    """A file that differs between two sandboxes or snapshots."""

    path: str
    change: Literal["added", "changed", "removed"]
    kind: Literal["file", "directory", "symlink", "other"]
    size_before: int | None = None
    size_after: int | None = None
    #: The contents of a small text file, if they were asked for.
    before: str | None = None
    after: str | None = None


@dataclass(frozen=True)
class HistoryStep:
    """The files of a sandbox before a command."""

    #: How many steps back; the newest is 1.
    step: int
    snapshot: str
    taken_at: datetime
    size_bytes: int


@dataclass(frozen=True)
class ResourceStatus:
    """The status of a sandbox: ``provisioning``, ``ready``, ``failed``, ``stopped`` or ``deleting``."""

    status: str
    status_message: str | None = None


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    outcome: str
    exit_code: int | None = None
    signal: int | None = None
    message: str | None = None
    #: Whether the snapshot before the command failed, so that ``Sandbox.undo`` cannot undo the command.
    not_undoable: bool = False


@dataclass(frozen=True)
class Kept:
    """The part of a stream that the daemon keeps: bytes from ``start`` up to ``end``."""

    start: int
    end: int


@dataclass(frozen=True)
class Command:
    """A command, without its output."""

    id: str
    sandbox_id: str
    state: Literal["starting", "running", "ended"]
    stdout: Kept
    stderr: Kept
    created_at: datetime
    pid: int | None = None
    argv: list[str] | None = None
    script: str | None = None
    request_cut: bool = False
    terminal: bool = False
    result: CommandResult | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True)
class ExecutionResult:
    """The result of a command.

    ``stdout`` and ``stderr`` are text; bytes that are not UTF-8 are replaced there and kept in ``stdout_bytes`` and
    ``stderr_bytes``.
    """

    #: What a shell would report; 128 + n where signal n ended it.
    exit_code: int
    stdout_bytes: bytes = field(default=b"", repr=False)
    stderr_bytes: bytes = field(default=b"", repr=False)
    #: ``exited``, ``signaled``, ``killed``, ``out_of_memory`` or ``failed_to_start``.
    outcome: str = "exited"
    #: A sentence, where the outcome needs one.
    message: str | None = None
    command_id: str | None = field(default=None, repr=False)
    #: How many bytes at the front of each stream are not here, because they were no longer kept.
    stdout_lost: int = field(default=0, repr=False)
    stderr_lost: int = field(default=0, repr=False)
    #: Whether the snapshot before the command failed, so that ``Sandbox.undo`` cannot undo the command.
    not_undoable: bool = field(default=False, repr=False)

    @functools.cached_property
    def stdout(self) -> str:
        """Standard output as text."""
        return self.stdout_bytes.decode("utf-8", "replace")

    @functools.cached_property
    def stderr(self) -> str:
        """Standard error as text."""
        return self.stderr_bytes.decode("utf-8", "replace")

    @property
    def success(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0

    @property
    def truncated(self) -> bool:
        """Whether output is missing."""
        return bool(self.stdout_lost or self.stderr_lost)

    def __repr__(self) -> str:
        parts = [f"exit_code={self.exit_code}"]
        if self.outcome != "exited":
            parts.append(f"outcome={self.outcome!r}")
        if self.message:
            parts.append(f"message={self.message!r}")
        for name, text in (("stdout", self.stdout), ("stderr", self.stderr)):
            if text:
                parts.append(f"{name}={text!r}" if len(text) <= 80 else f"{name}={text[:77]!r}... {len(text)} chars")
        return f"ExecutionResult({', '.join(parts)})"


@dataclass(frozen=True)
class OutputChunk:
    """A piece of a command's output."""

    stream: Stream
    #: As text. A character that is split between two pieces is in the second.
    data: str
    #: Where ``raw`` begins in the stream, in bytes.
    offset: int
    #: As it was written.
    raw: bytes = field(default=b"", repr=False)


@dataclass(frozen=True)
class TerminalSize:
    """The size of a terminal in characters."""

    rows: int = 24
    columns: int = 80


@dataclass(frozen=True)
class LastUse:
    """The last use of a sandbox."""

    at: datetime
    by: str


@dataclass(frozen=True)
class ExplainedRule:
    """A lifetime rule at one moment."""

    since: Since
    after_seconds: float
    action: Action
    acts: bool
    strikes_at: datetime | None = None
    strikes_in_seconds: float | None = None


@dataclass(frozen=True)
class SandboxEnd:
    """When and how a sandbox ends if it is not used until then."""

    action: Action
    at: datetime
    in_seconds: float
    postponed_by: str
    rule: int


@dataclass(frozen=True)
class Explanation:
    """Why a sandbox lives, and when and how it ends."""

    sandbox_id: str
    state: State
    #: All of it in one sentence.
    sentence: str
    uses: int
    rules: list[ExplainedRule] = field(default_factory=list)
    last_use: LastUse | None = None
    end: SandboxEnd | None = None

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True)
class SandboxUsage:
    """What a sandbox uses at one moment."""

    cpu_seconds: float
    cpu_throttled_seconds: float
    memory_bytes: int
    memory_reclaimable_bytes: int
    pids: int


@dataclass(frozen=True)
class DiskUsage:
    """What a sandbox's own files take on disk."""

    bytes: int
    complete: bool
    counted_at: datetime


@dataclass(frozen=True)
class SandboxStats:
    """A sandbox's resource use and limits."""

    sandbox_id: str
    name: str
    state: State
    at: datetime
    commands_running: int
    limits: SandboxLimits
    usage: SandboxUsage | None = None
    disk: DiskUsage | None = None


@dataclass(frozen=True)
class MachineStats:
    """The machine that all sandboxes share."""

    cpus: int
    memory_bytes: int
    memory_available_bytes: int
    disk_bytes: int
    disk_available_bytes: int


@dataclass(frozen=True)
class SandboxEvent:
    """Something that happened to a sandbox, a command, a snapshot, a template, a volume or a pool.

    ``type`` is ``ready`` (first on every stream), ``missed`` (events are gone; query the state), ``sandbox``, ``deleted``,
    ``command_started``, ``command_ended``, ``hook_failed``, ``snapshot``, ``snapshot_deleted``, ``template``,
    ``template_deleted``, ``volume``, ``volume_deleted``, ``pool`` or ``pool_deleted``.
    """

    type: str
    sandbox_id: str | None = None
    #: Of the sandbox, the snapshot, the template, the volume or the pool.
    name: str | None = None
    state: State | TemplateState | Literal["building"] | None = None
    snapshot_id: str | None = None
    #: Of the volume.
    size_bytes: int | None = None
    #: How many sandboxes the pool keeps ready.
    replicas: int | None = None
    #: Which hook failed, such as ``before_pause``.
    hook: str | None = None
    #: The newest version of the template.
    version: int | None = None
    reason: str | None = None
    command_id: str | None = None
    pid: int | None = None
    result: CommandResult | None = None
    at: datetime | None = None


@dataclass(frozen=True)
class FileInfo:
    """Information about a file."""

    name: str
    path: str
    kind: Literal["file", "directory", "symlink", "fifo", "socket", "device", "unknown"]
    size: int
    #: Permissions in octal, as ``0644``.
    mode: str
    modified_at: datetime
    uid: int
    gid: int
    links: int
    etag: str
    #: Where a symbolic link leads.
    target: str | None = None

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.kind == "directory"

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.kind == "file"


@dataclass(frozen=True)
class EditedFile(FileInfo):
    """A file after an edit."""

    #: In how many places.
    replaced: int = field(kw_only=True)


@dataclass(frozen=True)
class FoundFiles:
    """The result of a search by name. Iterate over it to get the files."""

    files: list[FileInfo]
    entries_looked_at: int
    #: What could not be looked into.
    skipped: int
    #: The limit that ended the search before it was through: ``matches``, ``entries``, ``bytes`` or ``time``.
    cut: str | None = None

    def __iter__(self) -> typing.Iterator[FileInfo]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


@dataclass(frozen=True)
class LineMatch:
    """A line in which something was found."""

    path: str
    #: Counted from 1.
    line: int
    #: Where in the line the first match begins, in bytes from 0.
    column: int
    #: The line, or 2 KiB of it around the match.
    text: str
    text_start: int
    text_cut: bool


@dataclass(frozen=True)
class FoundLines:
    """The result of a search by contents. Iterate over it to get the matches."""

    matches: list[LineMatch]
    entries_looked_at: int
    bytes_read: int
    skipped: int
    cut: str | None = None
    #: How many of the skipped were text at their front and binary further on.
    mixed: int = 0

    def __iter__(self) -> typing.Iterator[LineMatch]:
        return iter(self.matches)

    def __len__(self) -> int:
        return len(self.matches)


@dataclass(frozen=True)
class FilesMade:
    """What a copy or an upload created."""

    entries: int
    bytes: int
    #: Sockets, devices and FIFOs, which are left out.
    skipped: int


@dataclass(frozen=True)
class FileEvent:
    """Something that happened to a file.

    ``type`` is ``ready`` (changes are reported from here on), ``changed``, ``overflow`` (changes were missed),
    ``not_watched`` or ``gone`` (the last event). ``change`` is ``created``, ``modified``, ``written``, ``attributes``,
    ``removed``, ``moved_from`` or ``moved_to``.
    """

    type: str
    path: str | None = None
    change: str | None = None
    directory: bool | None = None


@dataclass(frozen=True)
class ImageConfig:
    """How an image's programs run."""

    command: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    working_directory: str | None = None


@dataclass(frozen=True)
class Image:
    """An image that the daemon has."""

    digest: str
    names: list[str]
    platform: str
    config: ImageConfig
    #: What was fetched for it.
    size_bytes: int
    #: What its files hold.
    unpacked_bytes: int
    created_at: datetime
    #: Whether only this key's owner sees it.
    private: bool = False
    #: How many of the owner's sandboxes were made from it.
    sandboxes: int = 0
    aliases: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ImageAlias:
    """A name that stands for another."""

    name: str
    target: str
    created_at: datetime


@dataclass(frozen=True)
class LayerProgress:
    """Progress of a layer during a pull."""

    digest: str
    #: ``waiting``, ``fetching``, ``fetched``, ``unpacking``, ``done``, or ``present`` if it was there before.
    state: LayerState
    #: Of ``total_bytes``: fetched so far, or read while it is unpacked.
    bytes: int
    total_bytes: int


@dataclass(frozen=True)
class CollectedImages:
    """What was removed because it was unused."""

    images: int
    layers: int
    bytes: int


@dataclass(frozen=True)
class ResourceSpec:
    """What a sandbox may use, as quantities: ``cpu`` as ``"500m"``, ``memory`` and ``storage`` as ``"512Mi"``."""

    cpu: str = "500m"
    memory: str = "512Mi"
    storage: str | None = None

    @property
    def disk(self) -> str | None:
        """The same as ``storage``, under the name that it has everywhere else."""
        return self.storage


@dataclass(frozen=True)
class VolumeMountSpec:
    """A volume, and where it is mounted: an absolute path."""

    volume_name: str
    mount_path: str
    #: Whether the sandbox can only look.
    read_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """Converts it to the daemon's JSON."""
        wish: dict[str, Any] = {"volume": self.volume_name, "path": self.mount_path}
        return {**wish, "read_only": True} if self.read_only else wish

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> VolumeMountSpec:
        """Converts the daemon's JSON."""
        return cls(said["volume"], said["path"], bool(said.get("read_only", False)))


@dataclass(frozen=True)
class SandboxTemplate:
    """What sandboxes are made from.

    Every change creates a new ``version``; existing sandboxes keep theirs.
    """

    name: str
    image: str
    version: int
    #: ``preparing`` while its image is on its way, ``ready``, or ``failed``, and then ``reason`` says why.
    state: TemplateState
    limits: SandboxLimits
    #: A UUID that stays the same when the name changes; ``None`` for the built-in one.
    id: str | None = None
    reason: str | None = None
    #: What ``image`` stands for, where it is an alias.
    image_target: str | None = None
    #: Just which image, once it is there; it stays the same whatever becomes of the image's name.
    image_digest: str | None = None
    disk_bytes: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    cwd: str | None = None
    user: str | None = None
    #: What runs when a command names no program.
    command: list[str] = field(default_factory=list)
    #: Given to every sandbox that is made from it.
    labels: dict[str, str] = field(default_factory=dict)
    mounts: list[dict[str, Any]] = field(default_factory=list, repr=False)
    #: How many steps of the history of its sandboxes are kept for ``undo``; 0 for none.
    history: int = 0
    #: What runs in its sandboxes when something is done to them, by when that is.
    hooks: dict[str, Any] = field(default_factory=dict, repr=False)
    #: How many of the owner's sandboxes were made from it, whichever version.
    sandboxes: int = 0
    built_in: bool = False
    created_at: datetime | None = None
    updated_at: datetime | None = None

    @property
    def resources(self) -> ResourceSpec:
        """What a sandbox may use, as quantities."""
        storage = None if self.disk_bytes is None else quantity(self.disk_bytes)
        return ResourceSpec(cpu_quantity(self.limits.cpu_millis), quantity(self.limits.memory_bytes), storage)

    @property
    def volume_mounts(self) -> list[VolumeMountSpec]:
        """The volumes that its sandboxes mount, and where."""
        return [VolumeMountSpec.from_json(mount) for mount in self.mounts]


@dataclass(frozen=True)
class VolumeHolder:
    """A sandbox that mounts a volume."""

    sandbox_id: str
    name: str
    #: Where the volume is in it.
    path: str
    read_only: bool = False


@dataclass(frozen=True)
class Volume:
    """Storage that outlives sandboxes."""

    #: A UUID that stays the same when the name changes.
    id: str
    name: str
    size_bytes: int
    #: Whether it is held to that. A store of plain directories cannot.
    size_enforced: bool
    created_at: datetime
    updated_at: datetime
    #: What its files take; ``None`` in a list where it would have to be counted.
    used_bytes: int | None = None
    #: While there is one, it cannot be deleted.
    mounted_by: list[VolumeHolder] = field(default_factory=list)

    @property
    def size(self) -> str:
        """The size limit, as a quantity."""
        return quantity(self.size_bytes)


@dataclass(frozen=True)
class Secret:
    """A key that sandboxes use without holding it. Its value is never returned."""

    name: str
    #: ``value``, ``file`` or ``environment``.
    source: str
    #: How often its value was set.
    version: int
    #: How many sandboxes may use it.
    sandboxes: int
    created_at: datetime
    updated_at: datetime
    #: Which requests get it.
    rules: list[dict[str, Any]] = field(default_factory=list)
    #: Variables that hold a placeholder inside sandboxes.
    variables: list[str] = field(default_factory=list)
    #: The path or the variable that it is read from; for admins.
    origin: str | None = None


@dataclass(frozen=True)
class PoolMember:
    """A sandbox that waits in a pool."""

    id: str
    name: str
    #: ``making``, ``ready``, ``broken`` or ``deleting``.
    state: str
    template_version: int
    created_at: datetime


@dataclass(frozen=True)
class Pool:
    """Sandboxes of one template that are kept ready."""

    #: A UUID that stays the same when the name changes.
    id: str
    name: str
    template: str
    template_version: int
    #: How many should stand ready.
    replicas: int
    #: How many do.
    ready: int
    #: How many are being made.
    making: int
    #: ``ready``, ``filling``, ``failing``, and then ``reason`` says why, or ``deleting``.
    state: PoolState
    created_at: datetime
    updated_at: datetime
    reason: str | None = None
    #: When that is tried again.
    retry_at: datetime | None = None
    #: What waits in it, the next to be claimed first; ``None`` in a list.
    members: list[PoolMember] | None = None
    #: Creates since the daemon started that found one ready, and that found none.
    claims: int = 0
    misses: int = 0

    @property
    def template_name(self) -> str:
        """The template of its sandboxes."""
        return self.template


def cpu_quantity(millis: int) -> str:
    """Thousandths of a processor, as the daemon takes them.

    >>> cpu_quantity(500), cpu_quantity(2000)
    ('500m', '2')
    """
    return str(millis // 1000) if millis % 1000 == 0 else f"{millis}m"


def quantity(count: int) -> str:
    """Bytes, as the daemon takes them.

    >>> quantity(512 << 20), quantity(3 << 30), quantity(1000)
    ('512Mi', '3Gi', '1000')
    """
    for power, unit in ((40, "Ti"), (30, "Gi"), (20, "Mi"), (10, "Ki")):
        if count and count % (1 << power) == 0:
            return f"{count >> power}{unit}"
    return str(count)


@dataclass(frozen=True)
class Build:
    """A build of a template, running or ended."""

    id: str
    #: What it becomes.
    template: str
    #: ``running``, ``done``, or ``failed``, and then ``reason`` says why.
    state: BuildState
    log_bytes: int
    created_at: datetime
    reason: str | None = None
    #: Of the template, once it is ``done``.
    version: int | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True)
class OwnerUse:
    """What an owner uses of what keys limit."""

    sandboxes: int = 0
    cpu_millis: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    volume_bytes: int = 0
    output_bytes: int = 0
    snapshots: int = 0
    builds: int = 0


@dataclass(frozen=True)
class Key:
    """An API key, without its secret."""

    id: str
    owner: str
    admin: bool
    created_at: datetime
    metrics_only: bool = False
    sandboxes_max: int | None = None
    cpu_millis_max: int | None = None
    memory_bytes_max: int | None = None
    disk_bytes_max: int | None = None
    volume_bytes_max: int | None = None
    output_bytes_max: int | None = None
    snapshots_max: int | None = None
    builds_max: int | None = None
    connections_max: int | None = None
    #: What the key's owner uses, in a list of keys.
    used: OwnerUse | None = None


@dataclass(frozen=True)
class CreatedKey(Key):
    """A new API key. Its secret is shown only once."""

    secret: str = field(default="", repr=False)


@dataclass(frozen=True)
class PortProcess:
    """A process that listens on a port."""

    pid: int
    name: str


@dataclass(frozen=True)
class Port:
    """A port that a program in a sandbox listens on. ``url`` is its address in a browser, which needs a link."""

    port: int
    addresses: list[str]
    reachable: bool
    process: PortProcess | None = None
    url: str | None = None


@dataclass(frozen=True)
class PortLink:
    """A link that opens one port of one sandbox without a key."""

    id: str
    sandbox_id: str
    port: int
    public: bool
    created_at: datetime
    expires_at: datetime
    methods: list[str] = field(default_factory=list)
    label: str | None = None


@dataclass(frozen=True)
class CreatedLink(PortLink):
    """A new link. ``url`` is for a browser; programs send ``token``, which is shown only here, in ``X-Shoal-Token``."""

    url: str = field(default="", repr=False)
    token: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Version:
    """The daemon's version."""

    api: str
    version: str


T = TypeVar("T")


def decode(kind: type[T], data: Any) -> T:
    """Converts JSON to a value of ``kind``; raises ``ValueError`` or ``KeyError`` if it does not fit."""
    value = _decode(kind, data)
    return typing.cast(T, value)


_TEXTS = (str, str | None)


@functools.cache
def _fields(kind: Any) -> list[tuple[str, Any]]:
    hints = typing.get_type_hints(kind)
    return [(entry.name, hints[entry.name]) for entry in dataclasses.fields(kind)]


def _decode(kind: Any, data: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, data)
    if kind is datetime:
        # Before Python 3.11, `Z` is not understood.
        return datetime.fromisoformat(data[:-1] + "+00:00" if data.endswith("Z") else data)
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        if data is None:
            return None
        inner, *others = (entry for entry in typing.get_args(kind) if entry is not type(None))
        # Where there are several, they are words.
        return data if others else _decode(inner, data)
    if origin is list:
        (inner,) = typing.get_args(kind)
        return [_decode(inner, entry) for entry in data]
    if origin is dict:
        _, inner = typing.get_args(kind)
        return {key: _decode(inner, entry) for key, entry in data.items()}
    return data


def _decode_dataclass(kind: Any, data: Any) -> Any:
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} is not an object")
    values: dict[str, Any] = {}
    for name, hint in _fields(kind):
        # Only text has a twin in base64; `stdout_base64` of a command that was waited for is not its `stdout`.
        encoded = data.get(f"{name}_base64") if hint in _TEXTS else None
        if encoded is not None:
            values[name] = base64.b64decode(encoded).decode("utf-8", "surrogateescape")
        elif data.get(name) is not None:
            values[name] = _decode(hint, data[name])
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{kind.__name__} lacks a field: {error}") from None
