# Generated from _async/client.py by generate_sync.py. Do not edit: change that file and run the program again.
"""The client, which creates, finds and deletes sandboxes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from .. import _seam
from .._core import (
    CLEANUP_SECONDS_MAX,
    PAGE_ENTRIES,
    TIMEOUT_DEFAULT_SECONDS,
    create_wish,
    decoded,
    hooks_wish,
    in_path,
    is_id,
    new_id,
    one_disk,
    query,
    selectors,
)
from .._find import Endpoint, find, found
from .._local import start_local
from ..errors import (
    ResourceCreationError,
    ResourceNotFoundError,
    ResourceTimeoutError,
    SandboxClientError,
    SandboxConnectionError,
)
from ..models import (
    STATUS_OF_STATE,
    CreatedKey,
    Key,
    LifetimeRule,
    MachineStats,
    ResourceStatus,
    SandboxInfo,
    SandboxStats,
    Version,
    VolumeMountSpec,
)
from .images import ImageCalls
from .pools import PoolCalls
from .sandbox import Sandbox, SandboxEvents
from .secrets import SecretCalls
from .snapshots import SnapshotCalls
from .templates import TemplateCalls
from .transport import Transport
from .volumes import VolumeCalls
from .webhooks import WebhookCalls

#: How long a sandbox may take to be made.
CREATE_SECONDS_MAX = 120.0


class SandboxClient(ImageCalls, TemplateCalls, VolumeCalls, PoolCalls, SnapshotCalls, WebhookCalls, SecretCalls):
    """A client of one daemon, for sandboxes and what they are made from.

    >>> with client.sandbox() as sb:
    ...     print((sb.run("echo hello")).stdout, end="")
    hello

    Args:
        api_endpoint: The daemon's URL. Default: ``SHOAL_URL``, or else the daemon that runs on this machine.
        api_key: The API key. Default: ``SHOAL_API_KEY``, or else the key of the daemon on this machine.
        timeout: How many seconds a request may take, not counting the run time of commands.

    Raises:
        SandboxClientError: No daemon was given and none runs on this machine. ``local`` starts one.
    """

    # Pausing, forks and network policy are a sandbox's own business and belong into `Sandbox`. What else is kept
    # beside sandboxes, as snapshots will be, has a module of its own like templates, and is added to the bases above.

    def __init__(
        self,
        api_endpoint: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = TIMEOUT_DEFAULT_SECONDS,
    ) -> None:
        self._transport = Transport(find(api_endpoint, api_key), timeout)

    @classmethod
    def local(
        cls, *, binary: str | None = None, directory: str | None = None, timeout: float = TIMEOUT_DEFAULT_SECONDS
    ) -> SandboxClient:
        """Starts a private daemon and returns a client of it.

        The daemon, its sandboxes and its files are removed when the client is closed or the program ends, even if the
        program is killed: the daemon watches a socket of the program, and ends when the kernel closes it.

        Args:
            binary: The program ``shoal``. Default: ``SHOAL_BINARY``, the one in this package, or the one on ``PATH``.
            directory: The daemon's data directory; it must not exist. Default: a new one under ``/var/tmp``.
            timeout: As for the constructor.

        Raises:
            SandboxClientError: The program does not exist or does not start (it needs root and Linux 5.14).
        """
        endpoint = _seam.offload(start_local, binary, directory)
        return cls._of(endpoint, timeout)

    @classmethod
    def here(cls, *, binary: str | None = None, timeout: float = TIMEOUT_DEFAULT_SECONDS) -> SandboxClient:
        """Connects to the daemon that the constructor would find, or starts a private one if there is none.

        Use this for programs that should run anywhere without changes.

        Args:
            binary: As for ``local``.
            timeout: As for the constructor.

        Raises:
            SandboxClientError: ``SHOAL_URL`` is set but there is no key for it; or as for ``local``.
        """
        endpoint = _seam.offload(found)
        return cls.local(binary=binary, timeout=timeout) if endpoint is None else cls._of(endpoint, timeout)

    @classmethod
    def _of(cls, endpoint: Endpoint, timeout: float) -> SandboxClient:
        client = cls.__new__(cls)
        client._transport = Transport(endpoint, timeout)
        return client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transport.endpoint.url}>"

    @property
    def api_endpoint(self) -> str:
        """The daemon's URL."""
        return self._transport.endpoint.url

    def __enter__(self) -> SandboxClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _seam.shielded(self._transport.timeout, self.close)

    def close(self) -> None:
        """Closes all connections. A daemon that ``local`` started ends, with all its sandboxes."""
        self._transport.close()

    # --- Sandboxes

    def sandbox(
        self,
        template_name: str | None = None,
        *,
        image: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        network: str | Mapping[str, Any] | None = None,
        idle: float | None = None,
        ttl: float | None = None,
        hard_ttl: float | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        disk: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        pool_name: str | None = None,
        history: int | None = None,
        hooks: Mapping[str, str | Mapping[str, Any]] | None = None,
        inject: Sequence[str] = (),
        timeout: float = CREATE_SECONDS_MAX,
    ) -> Sandbox:
        """Creates a sandbox that a ``with`` block deletes at its end. Takes the arguments of ``create_sandbox``."""
        sandbox = self.create_sandbox(
            template_name,
            image=image,
            name=name,
            labels=labels,
            lifetime=lifetime,
            network=network,
            idle=idle,
            ttl=ttl,
            hard_ttl=hard_ttl,
            env=env,
            cpu=cpu,
            memory=memory,
            disk=disk,
            storage=storage,
            volume_mounts=volume_mounts,
            pool_name=pool_name,
            history=history,
            hooks=hooks,
            inject=inject,
            timeout=timeout,
        )
        sandbox._delete_on_exit = True
        return sandbox

    def create_sandbox(
        self,
        template_name: str | None = None,
        *,
        image: str | None = None,
        name: str | None = None,
        wait_for_ready: bool = True,
        labels: Mapping[str, str] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        network: str | Mapping[str, Any] | None = None,
        idle: float | None = None,
        ttl: float | None = None,
        hard_ttl: float | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        disk: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        pool_name: str | None = None,
        history: int | None = None,
        hooks: Mapping[str, str | Mapping[str, Any]] | None = None,
        inject: Sequence[str] = (),
        timeout: float = CREATE_SECONDS_MAX,
    ) -> Sandbox:
        """Creates a sandbox, which lives until it is deleted or a lifetime rule deletes it.

        Args:
            template_name: The template, or the id or name of a snapshot; ``default`` by default.
            image: ``host``, a reference such as ``python:3.12``, or an alias, instead of the template's image. The daemon
                pulls it if needed; set a ``timeout`` that is long enough.
            name: Up to 255 bytes without spaces, ``/`` and ``:``, unique among the owner's sandboxes; generated by default.
            wait_for_ready: Whether to wait until the sandbox runs; otherwise use ``wait_for_sandbox``.
            labels: Labels to find the sandbox by.
            lifetime: Rules for how long the sandbox lives.
            network: What the sandbox may reach: ``"none"``, ``"registries"``, ``"open"``, or a policy such as
                ``{"mode": "registries", "rules": [{"to": "example.com"}]}``; the template's by default.
            idle: Delete the sandbox after this many seconds without use: short for ``LifetimeRule.idle(idle)``.
            ttl: Pause the sandbox after this many seconds without use, and keep its files: short for
                ``LifetimeRule.ttl(ttl)``. The next use resumes it.
            hard_ttl: Delete the sandbox this many seconds after its creation: short for
                ``LifetimeRule.hard_ttl(hard_ttl)``.
            env: Variables that are added to the environment of every command.
            cpu: Processors, such as ``"500m"`` or ``"2"``; the template's by default.
            memory: Memory, such as ``"512Mi"`` or ``"2Gi"``; the template's by default.
            disk: The disk limit for the sandbox's files, such as ``"5Gi"``; the template's by default.
            storage: The same, in the terms of the LangSmith SDK.
            volume_mounts: Volumes to mount in addition to the template's.
            pool_name: A pool to claim from, instead of a template, an image and limits. By default, a ready sandbox
                of any pool of the template is claimed.
            history: How many snapshots to keep of those that are taken before commands, up to 100, for ``Sandbox.undo``.
            hooks: What runs in it when something is done to it, by when that is: ``after_create``, ``before_pause``,
                ``after_resume``, ``before_delete``, ``after_fork``, ``after_claim``, ``after_rollback``. Each is a script, or
                a mapping with ``script`` or ``argv``, ``user``, ``timeout_seconds`` and ``required``.
            inject: Names of secrets that its requests may carry; the sandbox never holds them.
            timeout: How many seconds the creation may take; after that it is undone.

        Raises:
            ResourceNotFoundError: The template does not exist.
            ResourceNameConflictError: The name is taken.
            ResourceCreationError: The creation failed; ``error_type`` is ``Unschedulable`` if the machine is full.
            QuotaExceededError: A limit of the API key is reached.
            ResourceTimeoutError: It took too long.
        """
        body = create_wish(
            template_name=template_name,
            image=image,
            name=name,
            labels=labels,
            match_labels=None,
            lifetime=lifetime,
            network=network,
            idle=idle,
            ttl=ttl,
            hard_ttl=hard_ttl,
            env=env,
            cpu=cpu,
            memory=memory,
            disk=one_disk(disk, storage),
            volume_mounts=volume_mounts,
            pool_name=pool_name,
            wait=wait_for_ready,
        )
        if history is not None:
            body["history"] = history
        if hooks is not None:
            body["hooks"] = hooks_wish(hooks)
        if inject:
            body["inject"] = list(inject)
        return self._create(body, timeout)

    def get_or_create(
        self,
        labels: Mapping[str, str],
        template_name: str | None = None,
        *,
        image: str | None = None,
        name: str | None = None,
        more_labels: Mapping[str, str] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        network: str | Mapping[str, Any] | None = None,
        idle: float | None = None,
        ttl: float | None = None,
        hard_ttl: float | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        disk: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        pool_name: str | None = None,
        timeout: float = CREATE_SECONDS_MAX,
    ) -> Sandbox:
        """Returns the sandbox that has all of these labels, or creates it; simultaneous calls create only one.

        >>> one = client.get_or_create({"thread": "42"})
        >>> two = client.get_or_create({"thread": "42"})
        >>> one.id == two.id, one.created, two.created
        (True, True, False)
        >>> one.delete()

        Args:
            labels: The labels to look for; a new sandbox gets them.
            more_labels: Further labels for a new sandbox.

        The other arguments are those of ``create_sandbox``, and apply only to a new sandbox.
        """
        body = create_wish(
            template_name=template_name,
            image=image,
            name=name,
            labels=more_labels,
            match_labels=labels,
            lifetime=lifetime,
            network=network,
            idle=idle,
            ttl=ttl,
            hard_ttl=hard_ttl,
            env=env,
            cpu=cpu,
            memory=memory,
            disk=one_disk(disk, storage),
            volume_mounts=volume_mounts,
            pool_name=pool_name,
            wait=True,
        )
        return self._create(body, timeout)

    def _create(self, body: dict[str, Any], timeout: float) -> Sandbox:
        headers = {"Idempotency-Key": new_id()}
        began = time.monotonic()
        try:
            answer = self._transport.call(
                "POST",
                "/sandboxes",
                json=body,
                headers=headers,
                read_seconds=timeout,
                patience_seconds=min(timeout, self._transport.patience_seconds),
            )
        except SandboxConnectionError as error:
            if time.monotonic() - began < timeout:
                raise
            _seam.shielded(CLEANUP_SECONDS_MAX, self._undo_create, body, headers)
            raise ResourceTimeoutError(
                f"the sandbox was not ready within {timeout:g} s", resource_type="sandbox", last_status="provisioning"
            ) from error
        except Exception:
            raise
        except BaseException:
            # Ctrl-C, or a task that was cancelled: nobody will ever hear of this sandbox again.
            _seam.shielded(CLEANUP_SECONDS_MAX, self._undo_create, body, headers)
            raise
        return Sandbox(self._transport, decoded(SandboxInfo, answer.json()))

    def _undo_create(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Finds the sandbox of an interrupted create by its idempotency key, and deletes it.

        A create that waits for an image or a template needs no undo: the daemon gives up when the connection closes.
        """
        if "match_labels" in body:
            # Others may have found it since.
            return
        try:
            # However far it is: an image may take longer than anybody waits here.
            wish = {**body, "wait": False}
            answer = self._transport.call(
                "POST", "/sandboxes", json=wish, headers=headers, repeat=False, read_seconds=CLEANUP_SECONDS_MAX
            )
            self._transport.call("DELETE", f"/sandboxes/{answer.json()['id']}")
        except SandboxClientError:
            # It was never made, or nobody can be reached; there is nothing more to try.
            pass

    def get_sandbox(self, name: str) -> Sandbox:
        """Returns an existing sandbox, by its name or id."""
        return Sandbox(self._transport, self._find(name))

    def _find(self, name: str) -> SandboxInfo:
        if is_id(name):
            try:
                answer = self._transport.call("GET", f"/sandboxes/{name}")
                info: SandboxInfo = decoded(SandboxInfo, answer.json())
                return info
            except ResourceNotFoundError:
                # A name may look like an id.
                pass
        answer = self._transport.call("GET", query("/sandboxes", {"name": name}))
        for entry in answer.json()["sandboxes"]:
            named: SandboxInfo = decoded(SandboxInfo, entry)
            return named
        raise ResourceNotFoundError(
            f"sandbox `{name}` does not exist",
            resource_type="sandbox",
            hint="`list_sandboxes` lists the sandboxes of this key's owner",
            code="sandbox_not_found",
            status_code=404,
        )

    def get_sandbox_status(self, name: str) -> ResourceStatus:
        """Returns the status of a sandbox."""
        info = self._find(name)
        return ResourceStatus(STATUS_OF_STATE.get(info.state, info.state), info.reason)

    def wait_for_sandbox(
        self, name: str, *, timeout: float = CREATE_SECONDS_MAX, poll_interval: float = 1.0
    ) -> Sandbox:
        """Waits until a sandbox runs.

        ``poll_interval`` is the longest pause between two requests; the first pauses are shorter.

        Raises:
            ResourceCreationError: The sandbox has failed.
            ResourceTimeoutError: It took too long.
        """
        deadline = time.monotonic() + timeout
        pause = min(0.01, poll_interval)
        while True:
            info = self._find(name)
            if info.state == "running":
                return Sandbox(self._transport, info)
            if info.state in ("failed", "deleting"):
                raise ResourceCreationError(
                    f"sandbox `{name}` is {info.state}: {info.reason or 'no reason was given'}",
                    resource_type="sandbox",
                )
            if time.monotonic() + pause > deadline:
                raise ResourceTimeoutError(
                    f"sandbox `{name}` was not ready within {timeout:g} s",
                    resource_type="sandbox",
                    last_status=STATUS_OF_STATE.get(info.state, info.state),
                )
            _seam.sleep(pause)
            pause = min(pause * 2, poll_interval)

    def list_sandboxes(self, *, labels: Mapping[str, str] | Sequence[str] | None = None) -> list[Sandbox]:
        """Lists the sandboxes of the key's owner, newest first.

        Args:
            labels: Return only sandboxes with these labels: a mapping, or selectors such as ``"app=chat"``, ``"app!=chat"``,
                ``"app"`` (any value) and ``"!app"`` (no such label). All must match.
        """
        sandboxes: list[Sandbox] = []
        cursor: str | None = None
        while True:
            path = query("/sandboxes", [("limit", PAGE_ENTRIES), ("cursor", cursor), *selectors(labels)])
            page = (self._transport.call("GET", path)).json()
            sandboxes += [Sandbox(self._transport, decoded(SandboxInfo, entry)) for entry in page["sandboxes"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                return sandboxes

    def update_sandbox(
        self,
        name: str,
        *,
        new_name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        network: str | Mapping[str, Any] | None = None,
    ) -> Sandbox:
        """Changes a sandbox. Takes the arguments of its ``update``."""
        sandbox = self.get_sandbox(name)
        return sandbox.update(new_name=new_name, labels=labels, lifetime=lifetime, network=network)

    def delete_sandbox(self, name: str) -> None:
        """Deletes a sandbox and everything in it. Returns when nothing of it is left."""
        self._transport.call("DELETE", f"/sandboxes/{(self._find(name)).id}")

    def events(self) -> SandboxEvents:
        """Yields events of the owner's sandboxes and their commands, from now on."""
        return SandboxEvents(self._transport)

    def stats(self) -> tuple[MachineStats, list[SandboxStats]]:
        """Returns the machine's statistics, and those of each of the owner's sandboxes."""
        rows: list[SandboxStats] = []
        cursor: str | None = None
        while True:
            path = query("/stats", {"limit": PAGE_ENTRIES, "cursor": cursor})
            page = (self._transport.call("GET", path)).json()
            rows += [decoded(SandboxStats, entry) for entry in page["sandboxes"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                machine: MachineStats = decoded(MachineStats, page["machine"])
                return machine, rows

    # --- Keys and the daemon

    def create_key(
        self,
        owner: str | None = None,
        *,
        sandboxes_max: int | None = None,
        cpu_max: str | None = None,
        memory_max: str | None = None,
        disk_max: str | None = None,
        volumes_max: str | None = None,
        output_max: str | None = None,
        snapshots_max: int | None = None,
        builds_max: int | None = None,
        connections_max: int | None = None,
        metrics_only: bool = False,
    ) -> CreatedKey:
        """Creates an API key. Its secret is shown only once."""
        wish = {
            "owner": owner,
            "sandboxes_max": sandboxes_max,
            "cpu_max": cpu_max,
            "memory_max": memory_max,
            "disk_max": disk_max,
            "volumes_max": volumes_max,
            "output_max": output_max,
            "snapshots_max": snapshots_max,
            "builds_max": builds_max,
            "connections_max": connections_max,
            "metrics_only": metrics_only or None,
        }
        body = {key: value for key, value in wish.items() if value is not None}
        key: CreatedKey = decoded(
            CreatedKey, (self._transport.call("POST", "/keys", json=body, repeat=False)).json()
        )
        return key

    def list_keys(self) -> list[Key]:
        """Lists all keys, without their secrets."""
        answer = self._transport.call("GET", "/keys")
        return [decoded(Key, entry) for entry in answer.json()["keys"]]

    def delete_key(self, key_id: str) -> None:
        """Deletes a key, which stops working at once; its owner's sandboxes stay."""
        self._transport.call("DELETE", f"/keys/{in_path(key_id)}")

    def version(self) -> Version:
        """Returns the daemon's version."""
        version: Version = decoded(Version, (self._transport.call("GET", "/version")).json())
        return version
