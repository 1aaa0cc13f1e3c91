"""Sandboxes for Deep Agents Code: ``dcode --sandbox shoal``.

Deep Agents Code creates the provider without arguments, also to learn its name, so the provider looks for the daemon only
when it needs a sandbox. Parameters come from ``~/.deepagents/config.toml``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from deepagents_code.integrations.sandbox_provider import (
    SandboxError,
    SandboxInstallHint,
    SandboxNotFoundError,
    SandboxProvider,
    SandboxProviderMetadata,
)

from .._find import Endpoint, data_dir
from .._guard import Guard
from .._sync.client import SandboxClient
from .._sync.sandbox import Sandbox
from ..errors import ResourceNotFoundError, SandboxClientError
from ..models import LifetimeRule
from ._threads import off_loop
from .backend import TIMEOUT_DEFAULT_SECONDS, ShoalSandbox

WORKING_DIR_DEFAULT = "/workspace"
#: After how long without a use a sandbox should be paused: a guard for sessions that nobody cleaned up after.
TTL_DEFAULT_SECONDS = 3600
#: After how long a sandbox is deleted, whatever happens.
HARD_TTL_DEFAULT_SECONDS = 2_592_000

_lock = threading.Lock()
_guards: dict[Endpoint, Guard] = {}
_clients: dict[tuple[str | None, str | None, str | None], SandboxClient] = {}


class ShoalProvider(SandboxProvider):
    """Creates, attaches to and deletes sandboxes for Deep Agents Code.

    The daemon is the one that ``SHOAL_URL`` and ``SHOAL_API_KEY`` name (``DEEPAGENTS_CODE_SHOAL_URL`` and
    ``DEEPAGENTS_CODE_SHOAL_API_KEY`` take precedence), or else the one that runs on this machine, or else a private one
    that ends with Deep Agents Code.
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    @property
    def metadata(self) -> SandboxProviderMetadata:
        """What Deep Agents Code shows about the provider."""
        return SandboxProviderMetadata(
            name="shoal",
            working_dir=WORKING_DIR_DEFAULT,
            install=SandboxInstallHint(kind="package", name="shoal[deepagents]"),
            supports_sandbox_id=True,
            supports_snapshot_name=False,
            backend_module="shoal.deepagents.backend",
        )

    def get_or_create(
        self,
        *,
        sandbox_id: str | None = None,
        template: str | None = None,
        sandbox_ttl_sec: float = TTL_DEFAULT_SECONDS,
        sandbox_hard_ttl_sec: float = HARD_TTL_DEFAULT_SECONDS,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        working_dir: str = WORKING_DIR_DEFAULT,
        command_timeout_sec: float = TIMEOUT_DEFAULT_SECONDS,
        **unknown: Any,
    ) -> ShoalSandbox:
        """Creates a sandbox, or attaches to the one with this id or name, which it does not change.

        Args:
            sandbox_id: The sandbox to attach to; a new one by default.
            template: The template of a new sandbox.
            sandbox_ttl_sec: Pause the sandbox after this time without use and keep its files; 0 means never. The next use
                resumes it.
            sandbox_hard_ttl_sec: Delete the sandbox after this time; 0 means never.
            labels: Labels to find the sandbox by.
            env: Variables that are added to the environment of every command.
            cpu: Processors, such as ``"2"``.
            memory: Memory, such as ``"2Gi"``.
            working_dir: The working directory of commands.
            command_timeout_sec: How long a command may run if the agent does not say.
        """
        if unknown:
            raise ValueError(
                f"the sandbox provider `shoal` has no parameter {', '.join(f'`{name}`' for name in unknown)}"
            )
        if sandbox_id is not None:
            sandbox = off_loop(self._attach, sandbox_id, working_dir)
        else:
            rules = []
            if sandbox_ttl_sec:
                rules.append(LifetimeRule("last_use", sandbox_ttl_sec, "pause_drop_memory", accept_inactive=True))
            if sandbox_hard_ttl_sec:
                rules.append(LifetimeRule.hard_ttl(sandbox_hard_ttl_sec))
            sandbox = off_loop(
                self._create,
                working_dir,
                template_name=template,
                labels=labels,
                lifetime=rules,
                env=env,
                cpu=cpu,
                memory=memory,
            )
        return ShoalSandbox(sandbox, working_dir=working_dir, default_timeout=command_timeout_sec)

    def delete(self, *, sandbox_id: str, **_: Any) -> None:
        """Deletes a sandbox. It is not an error if the sandbox does not exist."""
        off_loop(self._delete, sandbox_id)

    def _create(self, working_dir: str, **wish: Any) -> Sandbox:
        try:
            sandbox = self._client(may_start=True).create_sandbox(**wish)
            # Deep Agents Code ends its server with a signal, after which nothing of its own clean-up is done.
            _guard_of(sandbox).own(sandbox.id)
            _prepare(sandbox, working_dir)
            return sandbox
        except SandboxClientError as error:
            raise SandboxError(str(error)) from error

    def _attach(self, sandbox_id: str, working_dir: str) -> Sandbox:
        try:
            sandbox = self._client(may_start=False).get_sandbox(sandbox_id)
            _prepare(sandbox, working_dir)
            return sandbox
        except ResourceNotFoundError as error:
            raise SandboxNotFoundError(str(error)) from error
        except SandboxClientError as error:
            raise SandboxError(str(error)) from error

    def _delete(self, sandbox_id: str) -> None:
        try:
            sandbox = self._client(may_start=False).get_sandbox(sandbox_id)
            sandbox.delete()
            _guard_of(sandbox).free(sandbox.id)
        except ResourceNotFoundError:
            pass
        except SandboxClientError as error:
            raise SandboxError(str(error)) from error

    def _client(self, *, may_start: bool) -> SandboxClient:
        url, key = _resolved("SHOAL_URL"), _resolved("SHOAL_API_KEY")
        where = (url, key, str(data_dir()))
        with _lock:
            if where not in _clients:
                try:
                    _clients[where] = SandboxClient(url, key)
                except SandboxClientError as error:
                    if url is not None or not may_start:
                        raise SandboxError(str(error)) from error
                    try:
                        _clients[where] = SandboxClient.local()
                    except SandboxClientError as broken:
                        raise SandboxError(f"{error}\n{broken}") from broken
            return _clients[where]


def _guard_of(sandbox: Sandbox) -> Guard:
    endpoint = sandbox._transport.endpoint
    with _lock:
        return _guards.setdefault(endpoint, Guard(endpoint))


def _prepare(sandbox: Sandbox, working_dir: str) -> None:
    if working_dir != WORKING_DIR_DEFAULT:
        sandbox.files.mkdir(working_dir)


def _resolved(name: str) -> str | None:
    """Deep Agents Code's own rule: the variable with its prefix takes precedence, even if it is empty."""
    own = os.environ.get(f"DEEPAGENTS_CODE_{name}")
    return (own if own is not None else os.environ.get(name)) or None
