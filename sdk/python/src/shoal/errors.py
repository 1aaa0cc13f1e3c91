"""The exceptions, one class for each error that a caller may want to handle.

The names are those of the LangSmith SDK, so code written for it keeps its ``except`` clauses. Every error of the daemon
has a stable ``code`` (docs/reference/errors.md of the repository lists them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models import ExecutionResult

__all__ = [
    "AnswerTimeoutError",
    "CommandFailedError",
    "CommandTimeoutError",
    "QuotaExceededError",
    "ResourceAlreadyExistsError",
    "ResourceCreationError",
    "ResourceInUseError",
    "ResourceNameConflictError",
    "ResourceNotFoundError",
    "ResourceTimeoutError",
    "SandboxAPIError",
    "SandboxAuthenticationError",
    "SandboxClientError",
    "SandboxConnectionError",
    "SandboxNotReadyError",
    "SandboxOperationError",
    "SandboxServerReloadError",
    "ValidationError",
]


class SandboxClientError(Exception):
    """Base class of all exceptions of this package.

    Attributes:
        message: What happened, in a sentence.
        hint: What to do about it, if known.
        code: The daemon's stable code, if the error came from the daemon.
        status_code: The HTTP status, if the error came from the daemon.
        details: More for programs, depending on the code.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        code: str | None = None,
        status_code: int | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.code = code
        self.status_code = status_code
        self.details: Mapping[str, Any] = details or {}

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class SandboxAPIError(SandboxClientError):
    """The answer was not a valid answer of a daemon: a bug, or another program at this address."""


class SandboxAuthenticationError(SandboxClientError):
    """The API key is missing, wrong, or may not do this."""


class SandboxConnectionError(SandboxClientError):
    """The daemon cannot be reached, or did not come back in time."""


class AnswerTimeoutError(SandboxConnectionError):
    """The daemon did not answer in time."""


class SandboxServerReloadError(SandboxConnectionError):
    """The daemon is stopping; sandboxes and commands continue, and the next daemon adopts them."""


class SandboxNotReadyError(SandboxClientError):
    """The sandbox is not running: it is being created or deleted, is paused, or has failed."""


class QuotaExceededError(SandboxClientError):
    """A limit of the API key is reached.

    ``quota_type`` says which: ``sandbox_count``, ``volume_count``, ``cpu``, ``memory`` or ``storage``.
    ``resource_type`` is what could not be created.
    """

    def __init__(
        self, message: str, *, quota_type: str | None = None, resource_type: str | None = None, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.quota_type = quota_type
        self.resource_type = resource_type


class ValidationError(SandboxClientError):
    """The request is not valid. ``field`` says which part of it, if known.

    ``error_type`` is ``VolumeResize`` if a volume would become too small for its contents.
    """

    def __init__(self, message: str, *, field: str | None = None, error_type: str | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.field = field
        self.error_type = error_type


class _ResourceError(SandboxClientError):
    def __init__(self, message: str, *, resource_type: str | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.resource_type = resource_type


class ResourceNotFoundError(_ResourceError):
    """There is no such sandbox, template, image, build, volume, pool, key, command or file. ``resource_type`` says which."""


class ResourceAlreadyExistsError(_ResourceError):
    """The resource exists already. ``resource_type`` says what it is."""


class ResourceNameConflictError(_ResourceError):
    """The name is taken. ``resource_type`` says by what."""


class ResourceInUseError(_ResourceError):
    """The resource is still in use. ``resource_type`` says what it is."""


class ResourceCreationError(_ResourceError):
    """The resource could not be created. ``resource_type`` says what it is.

    ``error_type`` is ``Unschedulable`` if the machine is full, ``ImagePull`` if the pull of its image failed, ``Build`` if
    a build failed, and the daemon's code otherwise.
    """

    def __init__(self, message: str, *, error_type: str | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.error_type = error_type


class ResourceTimeoutError(_ResourceError):
    """The resource was not ready in time. ``last_status`` is its status when the wait ended."""

    def __init__(self, message: str, *, last_status: str | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.last_status = last_status


class SandboxOperationError(SandboxClientError):
    """A command or a file operation was refused, or failed inside the sandbox.

    ``operation`` is what was tried (``"command"``, ``"file"``); ``error_type`` is the daemon's code.
    """

    def __init__(
        self, message: str, *, operation: str | None = None, error_type: str | None = None, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.operation = operation
        self.error_type = error_type


class CommandTimeoutError(SandboxOperationError):
    """The command timed out, and all its processes were killed.

    ``stdout`` and ``stderr`` hold its output up to then.
    """

    def __init__(
        self, message: str, *, timeout: float | None = None, stdout: str = "", stderr: str = "", **more: Any
    ) -> None:
        super().__init__(message, operation="command", error_type="CommandTimeout", **more)
        self.timeout = timeout
        self.stdout = stdout
        self.stderr = stderr


class CommandFailedError(SandboxOperationError):
    """A command that was run with ``check=True`` did not exit with 0. ``result`` has its exit code and its output."""

    def __init__(self, message: str, *, result: ExecutionResult, **more: Any) -> None:
        super().__init__(message, operation="command", error_type="CommandFailed", **more)
        self.result = result
