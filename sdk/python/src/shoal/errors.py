"""What can go wrong, one class for each thing that a caller may want to handle.

The names are those of the LangSmith SDK, so that code written for it keeps its ``except`` clauses. Every error that the
daemon reports has its stable ``code`` (docs/reference/errors.md of the repository lists them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = [
    "AnswerTimeoutError",
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
    """Whatever goes wrong between a program and its sandboxes.

    Attributes:
        message: What happened, in a sentence.
        hint: What to do about it, where there is something.
        code: The daemon's stable code, where the daemon refused.
        status_code: The HTTP status, where the daemon refused.
        details: More for programs, by code.
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
    """The daemon answered with something that no request should get: a mistake of ours, or another program's answer."""


class SandboxAuthenticationError(SandboxClientError):
    """The api key is missing, wrong, or may not do this."""


class SandboxConnectionError(SandboxClientError):
    """The daemon cannot be reached, or could not be reached again in time."""


class AnswerTimeoutError(SandboxConnectionError):
    """The daemon was reached and did not answer in time."""


class SandboxServerReloadError(SandboxConnectionError):
    """The daemon is stopping; sandboxes and commands go on, and the next daemon knows them."""


class SandboxNotReadyError(SandboxClientError):
    """The sandbox does not run: it is being made, is paused, has failed or is being deleted."""


class QuotaExceededError(SandboxClientError):
    """A limit of the api key is reached.

    ``quota_type`` says of what: ``sandbox_count``, ``volume_count``, ``cpu``, ``memory`` or ``storage``.
    ``resource_type`` is what could not be made.
    """

    def __init__(
        self, message: str, *, quota_type: str | None = None, resource_type: str | None = None, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.quota_type = quota_type
        self.resource_type = resource_type


class ValidationError(SandboxClientError):
    """The request cannot be taken as it is. ``field`` says which part of it, where that is known.

    ``error_type`` is ``VolumeResize`` where a volume would become too small for what is in it.
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
    """There is one already. ``resource_type`` says of what."""


class ResourceNameConflictError(_ResourceError):
    """The name is taken. ``resource_type`` says of what."""


class ResourceInUseError(_ResourceError):
    """Something still uses it. ``resource_type`` says what it is."""


class ResourceCreationError(_ResourceError):
    """It could not be made. ``resource_type`` says what.

    ``error_type`` is ``Unschedulable`` where the machine is full, ``ImagePull`` where its image could not be had,
    ``Build`` where a build failed, and the daemon's code otherwise.
    """

    def __init__(self, message: str, *, error_type: str | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.error_type = error_type


class ResourceTimeoutError(_ResourceError):
    """It was not ready in time. ``last_status`` is how it was when the wait ended."""

    def __init__(self, message: str, *, last_status: str | None = None, **more: Any) -> None:
        super().__init__(message, **more)
        self.last_status = last_status


class SandboxOperationError(SandboxClientError):
    """A command or a file operation was refused or broke inside the sandbox.

    ``operation`` is what was tried (``"command"``, ``"file"``); ``error_type`` is the daemon's code.
    """

    def __init__(
        self, message: str, *, operation: str | None = None, error_type: str | None = None, **more: Any
    ) -> None:
        super().__init__(message, **more)
        self.operation = operation
        self.error_type = error_type


class CommandTimeoutError(SandboxOperationError):
    """The command's timeout struck, and its whole tree of processes was ended.

    ``stdout`` and ``stderr`` are what it had written until then.
    """

    def __init__(
        self, message: str, *, timeout: float | None = None, stdout: str = "", stderr: str = "", **more: Any
    ) -> None:
        super().__init__(message, operation="command", error_type="CommandTimeout", **more)
        self.timeout = timeout
        self.stdout = stdout
        self.stderr = stderr
