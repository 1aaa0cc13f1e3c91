"""The client: sandboxes are made, found and deleted here."""

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
    in_path,
    is_id,
    new_id,
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
from .sandbox import AsyncSandbox, AsyncSandboxEvents
from .templates import TemplateCalls
from .transport import AsyncTransport
from .volumes import VolumeCalls

#: How long a sandbox may take to be made.
CREATE_SECONDS_MAX = 120.0


class AsyncSandboxClient(ImageCalls, TemplateCalls, VolumeCalls, PoolCalls):
    """Sandboxes on one daemon, and what they are made from.

    >>> async with await client.sandbox() as sb:
    ...     print((await sb.run("echo hello")).stdout, end="")
    hello

    Args:
        api_endpoint: The daemon's URL. Left out: ``SHOAL_URL``, else the daemon that runs on this machine.
        api_key: What opens it. Left out: ``SHOAL_API_KEY``, else the key that the daemon on this machine keeps.
        timeout: How many seconds one answer may take, commands aside.

    Raises:
        SandboxClientError: No daemon was named and none runs on this machine. ``local`` starts one.
    """

    # Pausing, forks and network policy are a sandbox's own business and belong into `AsyncSandbox`. What else is kept
    # beside sandboxes, as snapshots will be, has a module of its own like templates, and is added to the bases above.

    def __init__(
        self,
        api_endpoint: str | None = None,
        api_key: str | None = None,
        *,
        timeout: float = TIMEOUT_DEFAULT_SECONDS,
    ) -> None:
        self._transport = AsyncTransport(find(api_endpoint, api_key), timeout)

    @classmethod
    async def local(
        cls, *, binary: str | None = None, directory: str | None = None, timeout: float = TIMEOUT_DEFAULT_SECONDS
    ) -> AsyncSandboxClient:
        """A client of a private daemon, started for it and ended with it.

        The daemon, its sandboxes and its files are gone when the client is closed, when the program ends, and also
        when the program is killed: the daemon holds on to a socket of the program, and ends when that does.

        Args:
            binary: The program ``shoal``. Left out: ``SHOAL_BINARY``, the one that came with this package, or ``PATH``.
            directory: Where the daemon keeps its things; it must not exist. Left out: a new one under ``/var/tmp``.
            timeout: As for the client itself.

        Raises:
            SandboxClientError: There is no such program, or it does not start (it needs root and Linux 5.14).
        """
        endpoint = await _seam.aoffload(start_local, binary, directory)
        return cls._of(endpoint, timeout)

    @classmethod
    async def here(cls, *, binary: str | None = None, timeout: float = TIMEOUT_DEFAULT_SECONDS) -> AsyncSandboxClient:
        """A client of the daemon that the client itself would find, or of a private one where nobody names one and none runs.

        For programs that should run anywhere, as they are.

        Args:
            binary: As for ``local``.
            timeout: As for the client itself.

        Raises:
            SandboxClientError: ``SHOAL_URL`` names a daemon and no key for it is known; or as for ``local``.
        """
        endpoint = await _seam.aoffload(found)
        return await cls.local(binary=binary, timeout=timeout) if endpoint is None else cls._of(endpoint, timeout)

    @classmethod
    def _of(cls, endpoint: Endpoint, timeout: float) -> AsyncSandboxClient:
        client = cls.__new__(cls)
        client._transport = AsyncTransport(endpoint, timeout)
        return client

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._transport.endpoint.url}>"

    @property
    def api_endpoint(self) -> str:
        """Where the daemon is."""
        return self._transport.endpoint.url

    async def __aenter__(self) -> AsyncSandboxClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await _seam.ashielded(self._transport.timeout, self.close)

    async def close(self) -> None:
        """Lets go of all connections. A daemon that ``local`` started ends, with all its sandboxes."""
        await self._transport.close()

    # --- Sandboxes

    async def sandbox(
        self,
        template_name: str | None = None,
        *,
        image: str | None = None,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        pool_name: str | None = None,
        timeout: float = CREATE_SECONDS_MAX,
    ) -> AsyncSandbox:
        """A new sandbox that is deleted at the end of a ``with`` block. The arguments are those of ``create_sandbox``."""
        sandbox = await self.create_sandbox(
            template_name,
            image=image,
            name=name,
            labels=labels,
            lifetime=lifetime,
            env=env,
            cpu=cpu,
            memory=memory,
            storage=storage,
            volume_mounts=volume_mounts,
            pool_name=pool_name,
            timeout=timeout,
        )
        sandbox._delete_on_exit = True
        return sandbox

    async def create_sandbox(
        self,
        template_name: str | None = None,
        *,
        image: str | None = None,
        name: str | None = None,
        wait_for_ready: bool = True,
        labels: Mapping[str, str] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        pool_name: str | None = None,
        timeout: float = CREATE_SECONDS_MAX,
    ) -> AsyncSandbox:
        """A new sandbox, which lives until it is deleted or a rule of its lifetime strikes.

        Args:
            template_name: What to make it from; the template ``default`` if left out.
            image: ``host``, a reference such as ``python:3.12``, or an alias, in place of the template's. It is pulled if
                it is not there, so give it time with ``timeout``.
            name: Free text up to 255 bytes, unique among the owner's sandboxes; generated if left out.
            wait_for_ready: Whether to wait until it runs; if not, ``wait_for_sandbox`` does.
            labels: Free text to find it by.
            lifetime: How long it lives.
            env: Added to the environment of every command.
            cpu: Processors, as ``"500m"`` or ``"2"``; the template's if left out.
            memory: Memory, as ``"512Mi"`` or ``"2Gi"``; the template's if left out.
            storage: What its files may take, as ``"5Gi"``; the template's if left out.
            volume_mounts: Volumes beside the template's, and where.
            pool_name: A pool to take it from, in place of a template, an image and limits. Without it, one that stands
                ready in any pool of the template is taken.
            timeout: How many seconds it may take. What was begun by then is undone.

        Raises:
            ResourceNotFoundError: There is no such template.
            ResourceNameConflictError: The name is taken.
            ResourceCreationError: It could not be made; ``error_type`` is ``Unschedulable`` where the machine is full.
            QuotaExceededError: A limit of the api key is reached.
            ResourceTimeoutError: It took too long.
        """
        body = create_wish(
            template_name=template_name,
            image=image,
            name=name,
            labels=labels,
            match_labels=None,
            lifetime=lifetime,
            env=env,
            cpu=cpu,
            memory=memory,
            storage=storage,
            volume_mounts=volume_mounts,
            pool_name=pool_name,
            wait=wait_for_ready,
        )
        return await self._create(body, timeout)

    async def get_or_create(
        self,
        labels: Mapping[str, str],
        template_name: str | None = None,
        *,
        image: str | None = None,
        name: str | None = None,
        more_labels: Mapping[str, str] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        pool_name: str | None = None,
        timeout: float = CREATE_SECONDS_MAX,
    ) -> AsyncSandbox:
        """The sandbox that has all of these labels, made if there is none. However many ask at once, one is made.

        >>> one = await client.get_or_create({"thread": "42"})
        >>> two = await client.get_or_create({"thread": "42"})
        >>> one.id == two.id, one.created, two.created
        (True, True, False)
        >>> await one.delete()

        Args:
            labels: What it is found by, and gets if it is made.
            more_labels: Labels that it gets beside those if it is made.

        The other arguments are those of ``create_sandbox``, and matter only if it is made.
        """
        body = create_wish(
            template_name=template_name,
            image=image,
            name=name,
            labels=more_labels,
            match_labels=labels,
            lifetime=lifetime,
            env=env,
            cpu=cpu,
            memory=memory,
            storage=storage,
            volume_mounts=volume_mounts,
            pool_name=pool_name,
            wait=True,
        )
        return await self._create(body, timeout)

    async def _create(self, body: dict[str, Any], timeout: float) -> AsyncSandbox:
        headers = {"Idempotency-Key": new_id()}
        began = time.monotonic()
        try:
            answer = await self._transport.call(
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
            await _seam.ashielded(CLEANUP_SECONDS_MAX, self._undo_create, body, headers)
            raise ResourceTimeoutError(
                f"the sandbox was not ready within {timeout:g} s", resource_type="sandbox", last_status="provisioning"
            ) from error
        except Exception:
            raise
        except BaseException:
            # Ctrl-C, or a task that was cancelled: nobody will ever hear of this sandbox again.
            await _seam.ashielded(CLEANUP_SECONDS_MAX, self._undo_create, body, headers)
            raise
        return AsyncSandbox(self._transport, decoded(SandboxInfo, answer.json()))

    async def _undo_create(self, body: dict[str, Any], headers: dict[str, str]) -> None:
        """Finds by its idempotency key what an interrupted create has made, and deletes it.

        What waits for an image or a template makes nothing any more: the daemon gives up when the connection is gone.
        """
        if "match_labels" in body:
            # Others may have found it since.
            return
        try:
            # However far it is: an image may take longer than anybody waits here.
            wish = {**body, "wait": False}
            answer = await self._transport.call(
                "POST", "/sandboxes", json=wish, headers=headers, repeat=False, read_seconds=CLEANUP_SECONDS_MAX
            )
            await self._transport.call("DELETE", f"/sandboxes/{answer.json()['id']}")
        except SandboxClientError:
            # It was never made, or nobody can be reached; there is nothing more to try.
            pass

    async def get_sandbox(self, name: str) -> AsyncSandbox:
        """A sandbox that exists, by its name or its id."""
        return AsyncSandbox(self._transport, await self._find(name))

    async def _find(self, name: str) -> SandboxInfo:
        if is_id(name):
            try:
                answer = await self._transport.call("GET", f"/sandboxes/{name}")
                info: SandboxInfo = decoded(SandboxInfo, answer.json())
                return info
            except ResourceNotFoundError:
                # A name may look like an id.
                pass
        answer = await self._transport.call("GET", query("/sandboxes", {"name": name}))
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

    async def get_sandbox_status(self, name: str) -> ResourceStatus:
        """How far a sandbox is."""
        info = await self._find(name)
        return ResourceStatus(STATUS_OF_STATE.get(info.state, info.state), info.reason)

    async def wait_for_sandbox(
        self, name: str, *, timeout: float = CREATE_SECONDS_MAX, poll_interval: float = 1.0
    ) -> AsyncSandbox:
        """Waits until a sandbox runs.

        ``poll_interval`` is the longest pause between two looks; the first ones are shorter.

        Raises:
            ResourceCreationError: It has failed.
            ResourceTimeoutError: It took too long.
        """
        deadline = time.monotonic() + timeout
        pause = min(0.01, poll_interval)
        while True:
            info = await self._find(name)
            if info.state == "running":
                return AsyncSandbox(self._transport, info)
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
            await _seam.asleep(pause)
            pause = min(pause * 2, poll_interval)

    async def list_sandboxes(self, *, labels: Mapping[str, str] | Sequence[str] | None = None) -> list[AsyncSandbox]:
        """The sandboxes of the key's owner, newest first.

        Args:
            labels: Only those with these labels: a mapping, or selectors such as ``"app=chat"``, ``"app!=chat"``,
                ``"app"`` (any value) and ``"!app"`` (no such label). All must hold.
        """
        sandboxes: list[AsyncSandbox] = []
        cursor: str | None = None
        while True:
            path = query("/sandboxes", [("limit", PAGE_ENTRIES), ("cursor", cursor), *selectors(labels)])
            page = (await self._transport.call("GET", path)).json()
            sandboxes += [AsyncSandbox(self._transport, decoded(SandboxInfo, entry)) for entry in page["sandboxes"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                return sandboxes

    async def update_sandbox(
        self,
        name: str,
        *,
        new_name: str | None = None,
        labels: Mapping[str, str | None] | None = None,
        lifetime: Sequence[LifetimeRule] | None = None,
    ) -> AsyncSandbox:
        """Changes a sandbox; the arguments are those of its ``update``."""
        sandbox = await self.get_sandbox(name)
        return await sandbox.update(new_name=new_name, labels=labels, lifetime=lifetime)

    async def delete_sandbox(self, name: str) -> None:
        """Deletes a sandbox with all that is in it. Returns when nothing of it is left."""
        await self._transport.call("DELETE", f"/sandboxes/{(await self._find(name)).id}")

    def events(self) -> AsyncSandboxEvents:
        """What happens to the owner's sandboxes and their commands, from now on, until the caller leaves."""
        return AsyncSandboxEvents(self._transport)

    async def stats(self) -> tuple[MachineStats, list[SandboxStats]]:
        """The machine, and what each of the owner's sandboxes uses."""
        rows: list[SandboxStats] = []
        cursor: str | None = None
        while True:
            path = query("/stats", {"limit": PAGE_ENTRIES, "cursor": cursor})
            page = (await self._transport.call("GET", path)).json()
            rows += [decoded(SandboxStats, entry) for entry in page["sandboxes"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                machine: MachineStats = decoded(MachineStats, page["machine"])
                return machine, rows

    # --- Keys and the daemon

    async def create_key(
        self,
        owner: str | None = None,
        *,
        sandboxes_max: int | None = None,
        cpu_max: str | None = None,
        memory_max: str | None = None,
        metrics_only: bool = False,
    ) -> CreatedKey:
        """A new api key. Its secret is shown this once."""
        wish = {
            "owner": owner,
            "sandboxes_max": sandboxes_max,
            "cpu_max": cpu_max,
            "memory_max": memory_max,
            "metrics_only": metrics_only or None,
        }
        body = {key: value for key, value in wish.items() if value is not None}
        key: CreatedKey = decoded(
            CreatedKey, (await self._transport.call("POST", "/keys", json=body, repeat=False)).json()
        )
        return key

    async def list_keys(self) -> list[Key]:
        """All keys, without their secrets."""
        answer = await self._transport.call("GET", "/keys")
        return [decoded(Key, entry) for entry in answer.json()["keys"]]

    async def delete_key(self, key_id: str) -> None:
        """Deletes a key. It opens nothing from then on; its owner's sandboxes stay."""
        await self._transport.call("DELETE", f"/keys/{in_path(key_id)}")

    async def version(self) -> Version:
        """What is running there."""
        version: Version = decoded(Version, (await self._transport.call("GET", "/version")).json())
        return version
