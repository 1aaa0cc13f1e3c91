"""A sandbox as Deep Agents sees it. Translates, and keeps no state.

``BaseSandbox`` does most of its work by running Python or a shell in the sandbox. Where the native API gives the same result
in one call, the method is overridden here, for ordinary files, patterns and paths (``ls``, ``read``, ``write``,
``edit``, ``glob``, ``grep``); the rest is left to the installed version.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from deepagents.backends.protocol import (
    EditResult,
    ExecuteResponse,
    FileDownloadResponse,
    FileUploadResponse,
    GlobResult,
    GrepResult,
    LsResult,
    ReadResult,
    WriteResult,
)
from deepagents.backends.sandbox import BaseSandbox

from .._async.sandbox import AsyncSandbox
from .._async.transport import AsyncTransport
from .._sync.sandbox import Sandbox
from ..errors import CommandTimeoutError, ResourceNotFoundError, SandboxClientError, SandboxOperationError
from ..models import ExecutionResult, FileInfo
from . import _edits, _globs, _greps
from ._pages import WHOLE_FILE_BYTES_MAX, is_plain, page
from ._threads import off_loop

#: How long a command may run unless the agent says otherwise, as with other Deep Agents sandboxes.
TIMEOUT_DEFAULT_SECONDS = 1800
#: Output that is handed to the agent. A preview of half a MiB in base64 must fit, and nobody reads more than this.
OUTPUT_BYTES_MAX = 10 << 20
#: Files that are moved at once.
TRANSFERS_MAX = 8
#: The exit code of a command that was ended by its timeout, as `timeout(1)` has it.
TIMED_OUT = 124
#: The exit code of a command that could not be started, as a shell has it.
NOT_EXECUTED = 126

#: The daemon's codes that Deep Agents has words for.
FILE_ERRORS = {
    "file_not_found": "file_not_found",
    "permission_denied": "permission_denied",
    "is_directory": "is_directory",
    "invalid_path": "invalid_path",
    "not_a_directory": "invalid_path",
    "read_only": "permission_denied",
}
LS_ERRORS = {
    "file_not_found": "path_not_found",
    "not_a_directory": "not_a_directory",
    "permission_denied": "permission_denied",
}

# Until 0.6, `write` refused a file that was there.
_WRITE_REPLACES = tuple(int(part) for part in version("deepagents").split(".")[:2]) >= (0, 7)


class ShoalSandbox(BaseSandbox):
    """The backend of an agent, on a sandbox that the caller creates and deletes.

    Args:
        sandbox: The sandbox.
        working_dir: The working directory of commands; it must exist.
        default_timeout: How many seconds a command may run if the agent does not say; 0 means no timeout.
    """

    # The capture wrapper needs a shell and coreutils, which every sandbox has.
    enable_capture_offload = True

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        working_dir: str = "/workspace",
        default_timeout: float = TIMEOUT_DEFAULT_SECONDS,
    ) -> None:
        self._sandbox = sandbox
        self._working_dir = working_dir
        self._default_timeout = default_timeout
        # Connections belong to the event loop that made them, and an agent may be driven by several.
        self._of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncSandbox] = weakref.WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"<ShoalSandbox {self._sandbox!r}>"

    @property
    def id(self) -> str:
        """The sandbox's id."""
        return self._sandbox.id

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox itself, for everything that Deep Agents has no method for."""
        return self._sandbox

    def _async(self) -> AsyncSandbox:
        loop = asyncio.get_running_loop()
        sandbox = self._of_loop.get(loop)
        if sandbox is None:
            transport = self._sandbox._transport
            sandbox = AsyncSandbox(AsyncTransport(transport.endpoint, transport.timeout), self._sandbox.info)
            self._of_loop[loop] = sandbox
        return sandbox

    # --- Commands

    def execute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """Runs a command and returns stdout and stderr together, in the order in which they were written."""
        seconds = self._default_timeout if timeout is None else timeout
        try:
            return _executed(
                off_loop(self._sandbox.run, _merged(command), timeout=seconds, cwd=self._working_dir, wait=True)
            )
        except CommandTimeoutError as error:
            return _timed_out(error, seconds)
        except SandboxOperationError as error:
            return _not_executed(error)

    async def aexecute(self, command: str, *, timeout: int | None = None) -> ExecuteResponse:
        """As ``execute``, without a thread."""
        seconds = self._default_timeout if timeout is None else timeout
        try:
            result = await self._async().run(_merged(command), timeout=seconds, cwd=self._working_dir)
            return _executed(result)
        except CommandTimeoutError as error:
            return _timed_out(error, seconds)
        except SandboxOperationError as error:
            return _not_executed(error)

    # --- Files in and out

    def upload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """Writes files, and creates missing directories; reports errors file by file."""
        return [self._upload(path, content) for path, content in files]

    def _upload(self, path: str, content: bytes) -> FileUploadResponse:
        if not path.startswith("/"):
            return FileUploadResponse(path=path, error="invalid_path")
        try:
            off_loop(self._sandbox.files.write, path, content)
        except SandboxClientError as error:
            return FileUploadResponse(path=path, error=_file_error(error))
        return FileUploadResponse(path=path)

    async def aupload_files(self, files: list[tuple[str, bytes]]) -> list[FileUploadResponse]:
        """As ``upload_files``, several at once."""
        sandbox, places = self._async(), asyncio.Semaphore(TRANSFERS_MAX)

        async def upload(path: str, content: bytes) -> FileUploadResponse:
            if not path.startswith("/"):
                return FileUploadResponse(path=path, error="invalid_path")
            try:
                async with places:
                    await sandbox.files.write(path, content)
            except SandboxClientError as error:
                return FileUploadResponse(path=path, error=_file_error(error))
            return FileUploadResponse(path=path)

        return list(await asyncio.gather(*(upload(path, content) for path, content in files)))

    def download_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """Reads files; reports errors file by file."""
        return [self._download(path) for path in paths]

    def _download(self, path: str) -> FileDownloadResponse:
        if not path.startswith("/"):
            return FileDownloadResponse(path=path, error="invalid_path")
        try:
            return FileDownloadResponse(path=path, content=off_loop(self._sandbox.files.read, path))
        except SandboxClientError as error:
            return FileDownloadResponse(path=path, error=_file_error(error))

    async def adownload_files(self, paths: list[str]) -> list[FileDownloadResponse]:
        """As ``download_files``, several at once."""
        sandbox, places = self._async(), asyncio.Semaphore(TRANSFERS_MAX)

        async def download(path: str) -> FileDownloadResponse:
            if not path.startswith("/"):
                return FileDownloadResponse(path=path, error="invalid_path")
            try:
                async with places:
                    return FileDownloadResponse(path=path, content=await sandbox.files.read(path))
            except SandboxClientError as error:
                return FileDownloadResponse(path=path, error=_file_error(error))

        return list(await asyncio.gather(*(download(path) for path in paths)))

    # --- What the native API does in one call

    def ls(self, path: str) -> LsResult:
        """Lists a directory."""
        if not path.startswith("/"):
            # The helper takes the working directory for granted.
            return super().ls(path)
        try:
            return _listed(path, off_loop(self._sandbox.files.list, path))
        except SandboxClientError as error:
            if error.code not in LS_ERRORS:
                return super().ls(path)
            return LsResult(entries=None, error=f"Path '{path}': {LS_ERRORS[error.code]}")

    async def als(self, path: str) -> LsResult:
        """As ``ls``, without a thread."""
        if not path.startswith("/"):
            return await super().als(path)
        try:
            return _listed(path, await self._async().files.list(path))
        except SandboxClientError as error:
            if error.code not in LS_ERRORS:
                return await super().als(path)
            return LsResult(entries=None, error=f"Path '{path}': {LS_ERRORS[error.code]}")

    def read(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """Reads lines of a text file, or a whole binary file."""
        if is_plain(file_path, offset, limit):
            try:
                raw = off_loop(self._sandbox.files.read, file_path, length=WHOLE_FILE_BYTES_MAX + 1)
                found = page(raw, offset, limit)
            except SandboxClientError:
                # The helper says what is wrong with it, in its own words.
                found = None
            if found is not None:
                return found
        return super().read(file_path, offset, limit)

    async def aread(self, file_path: str, offset: int = 0, limit: int = 2000) -> ReadResult:
        """As ``read``, without a thread."""
        if is_plain(file_path, offset, limit):
            try:
                raw = await self._async().files.read(file_path, length=WHOLE_FILE_BYTES_MAX + 1)
                found = page(raw, offset, limit)
            except SandboxClientError:
                found = None
            if found is not None:
                return found
        return await super().aread(file_path, offset, limit)

    def glob(self, pattern: str, path: str | None = None) -> GlobResult:
        """Finds files by name."""
        wish = _globs.search(pattern, path)
        if wish is not None:
            found = None
            try:
                found = _globs.matched(off_loop(self._sandbox.files.glob, **_asked(wish)), wish)
            except SandboxClientError:
                # The helper says what is wrong, in its own words.
                pass
            if found is not None:
                return found
        return super().glob(pattern, path)

    async def aglob(self, pattern: str, path: str | None = None) -> GlobResult:
        """As ``glob``, without a thread."""
        wish = _globs.search(pattern, path)
        if wish is not None:
            found = None
            try:
                found = _globs.matched(await self._async().files.glob(**_asked(wish)), wish)
            except SandboxClientError:
                pass
            if found is not None:
                return found
        return await super().aglob(pattern, path)

    # `max_count` came with 0.7; what the installed version does not know is not passed on to it.
    def grep(self, pattern: str, path: str | None = None, glob: str | None = None, **more: Any) -> GrepResult:
        """Finds lines by their contents, with ``max_count`` as in the installed version."""
        wish = _greps.search(pattern, path, glob, more.get("max_count"), self._not_searched())
        if wish is not None:
            found = None
            try:
                lines = off_loop(self._sandbox.files.grep, **wish)
                found = _greps.matched(lines, wish["path"], glob, more.get("max_count"))
            except SandboxClientError:
                # The helper says what is wrong, in its own words.
                pass
            if found is not None:
                return found
        return super().grep(pattern, path, glob, **more)

    async def agrep(self, pattern: str, path: str | None = None, glob: str | None = None, **more: Any) -> GrepResult:
        """As ``grep``, without a thread."""
        wish = _greps.search(pattern, path, glob, more.get("max_count"), self._not_searched())
        if wish is not None:
            found = None
            try:
                lines = await self._async().files.grep(**wish)
                found = _greps.matched(lines, wish["path"], glob, more.get("max_count"))
            except SandboxClientError:
                pass
            if found is not None:
                return found
        return await super().agrep(pattern, path, glob, **more)

    def _not_searched(self) -> tuple[str, ...]:
        # Since 0.7.26 or so; a class may say other names.
        return tuple(getattr(self, "grep_exclude_dirs", ()))

    def write(self, file_path: str, content: str) -> WriteResult:
        """Writes a text file, and creates missing directories."""
        if not _WRITE_REPLACES:
            return super().write(file_path, content)
        return _written(self._upload(file_path, content.encode()))

    async def awrite(self, file_path: str, content: str) -> WriteResult:
        """As ``write``, without a thread."""
        if not _WRITE_REPLACES:
            return await super().awrite(file_path, content)
        (response,) = await self.aupload_files([(file_path, content.encode())])
        return _written(response)

    def edit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """Replaces text in a file."""
        if _edits.is_plain(file_path, old_string, new_string):
            edit = self._sandbox.files.edit
            try:
                edited = off_loop(edit, file_path, old_string, new_string, all=replace_all, adapt_line_ends=True)
                return _edits.done(file_path, edited)
            except SandboxClientError as error:
                refused = _edits.refused(file_path, old_string, error)
            if refused is not None:
                return refused
        return super().edit(file_path, old_string, new_string, replace_all)

    async def aedit(self, file_path: str, old_string: str, new_string: str, replace_all: bool = False) -> EditResult:
        """As ``edit``, without a thread."""
        if _edits.is_plain(file_path, old_string, new_string):
            edit = self._async().files.edit
            try:
                edited = await edit(file_path, old_string, new_string, all=replace_all, adapt_line_ends=True)
                return _edits.done(file_path, edited)
            except SandboxClientError as error:
                refused = _edits.refused(file_path, old_string, error)
            if refused is not None:
                return refused
        return await super().aedit(file_path, old_string, new_string, replace_all)


def _asked(wish: _globs.Wish) -> dict[str, Any]:
    where: dict[str, Any] = {"path": wish.root, "hidden": wish.hidden, "limit": wish.limit}
    return {"pattern": wish.pattern, **where, "timeout": _globs.SECONDS_MAX}


def _merged(command: str) -> str:
    # On the line of the command's own first, so that the shell counts lines as the agent does.
    return f"exec 2>&1; {command}"


def _executed(result: ExecutionResult) -> ExecuteResponse:
    raw = result.stdout_bytes + result.stderr_bytes
    cut = len(raw) > OUTPUT_BYTES_MAX
    output = raw[:OUTPUT_BYTES_MAX].decode("utf-8", "replace")
    if result.outcome != "exited" and result.message:
        output += f"{'' if not output or output.endswith(chr(10)) else chr(10)}{result.message}"
    return ExecuteResponse(output=output, exit_code=result.exit_code, truncated=cut or result.truncated)


def _timed_out(error: CommandTimeoutError, seconds: float) -> ExecuteResponse:
    output = (error.stdout + error.stderr)[:OUTPUT_BYTES_MAX]
    newline = "" if not output or output.endswith("\n") else "\n"
    return ExecuteResponse(
        output=f"{output}{newline}Error: the command timed out after {seconds:g} seconds and was ended",
        exit_code=TIMED_OUT,
        truncated=False,
    )


def _not_executed(error: SandboxOperationError) -> ExecuteResponse:
    # The agent may have removed the working directory, and can make it again.
    return ExecuteResponse(output=f"Error: {error.message}", exit_code=NOT_EXECUTED, truncated=False)


def _file_error(error: SandboxClientError) -> str:
    if isinstance(error, ResourceNotFoundError) and error.resource_type != "file":
        return error.message
    if error.code is None:
        return error.message
    return FILE_ERRORS.get(error.code, error.code)


def _listed(path: str, entries: Sequence[FileInfo]) -> LsResult:
    base = path if path.endswith("/") else f"{path}/"
    return LsResult(entries=[{"path": f"{base}{entry.name}", "is_dir": entry.is_dir} for entry in entries])


def _written(response: FileUploadResponse) -> WriteResult:
    if response.error:
        return WriteResult(error=f"Failed to write file '{response.path}': {response.error}")
    return WriteResult(path=response.path)
