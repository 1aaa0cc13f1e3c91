"""Shoal: sandboxes for AI agents, on your own Linux machine.

>>> from shoal import SandboxClient
>>> with SandboxClient.local() as client, client.sandbox() as sb:  # doctest: +SKIP
...     print(sb.run("python3 -c 'print(2 + 2)'").stdout)
4

``SandboxClient`` is for ordinary programs, and ``AsyncSandboxClient`` has the same methods for asyncio.
"""

from ._async.client import AsyncSandboxClient
from ._async.command import AsyncCommandHandle
from ._async.files import AsyncFileEvents, AsyncFiles
from ._async.sandbox import AsyncSandbox, AsyncSandboxEvents
from ._async.templates import AsyncBuildHandle
from ._sync.client import SandboxClient
from ._sync.command import CommandHandle
from ._sync.files import FileEvents, Files
from ._sync.sandbox import Sandbox, SandboxEvents
from ._sync.templates import BuildHandle
from .errors import (
    AnswerTimeoutError,
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
    SandboxConnectionError,
    SandboxNotReadyError,
    SandboxOperationError,
    SandboxServerReloadError,
    ValidationError,
)
from .models import (
    Build,
    CollectedImages,
    Command,
    CommandResult,
    CreatedKey,
    EditedFile,
    ExecutionResult,
    Explanation,
    FileEvent,
    FileInfo,
    FilesMade,
    FoundFiles,
    FoundLines,
    Image,
    ImageAlias,
    ImageConfig,
    Key,
    LayerProgress,
    LifetimeRule,
    LineMatch,
    MachineStats,
    OutputChunk,
    Pool,
    PoolMember,
    ResourceSpec,
    ResourceStatus,
    SandboxEvent,
    SandboxInfo,
    SandboxLimits,
    SandboxStats,
    SandboxTemplate,
    TerminalSize,
    Version,
    Volume,
    VolumeHolder,
    VolumeMountSpec,
)

__version__ = "0.1.0"

__all__ = [
    "AnswerTimeoutError",
    "AsyncBuildHandle",
    "AsyncCommandHandle",
    "AsyncFileEvents",
    "AsyncFiles",
    "AsyncSandbox",
    "AsyncSandboxClient",
    "AsyncSandboxEvents",
    "Build",
    "BuildHandle",
    "CollectedImages",
    "Command",
    "CommandHandle",
    "CommandResult",
    "CommandTimeoutError",
    "CreatedKey",
    "EditedFile",
    "ExecutionResult",
    "Explanation",
    "FileEvent",
    "FileEvents",
    "FileInfo",
    "Files",
    "FilesMade",
    "FoundFiles",
    "FoundLines",
    "Image",
    "ImageAlias",
    "ImageConfig",
    "Key",
    "LayerProgress",
    "LifetimeRule",
    "LineMatch",
    "MachineStats",
    "OutputChunk",
    "Pool",
    "PoolMember",
    "QuotaExceededError",
    "ResourceAlreadyExistsError",
    "ResourceCreationError",
    "ResourceInUseError",
    "ResourceNameConflictError",
    "ResourceNotFoundError",
    "ResourceSpec",
    "ResourceStatus",
    "ResourceTimeoutError",
    "Sandbox",
    "SandboxAPIError",
    "SandboxAuthenticationError",
    "SandboxClient",
    "SandboxClientError",
    "SandboxConnectionError",
    "SandboxEvent",
    "SandboxEvents",
    "SandboxInfo",
    "SandboxLimits",
    "SandboxNotReadyError",
    "SandboxOperationError",
    "SandboxServerReloadError",
    "SandboxStats",
    "SandboxTemplate",
    "TerminalSize",
    "ValidationError",
    "Version",
    "Volume",
    "VolumeHolder",
    "VolumeMountSpec",
]
