# Generated from _async/files.py by generate_sync.py. Do not edit: change that file and run the program again.
"""The files of a sandbox. Every path is absolute, and every operation runs inside the sandbox."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import httpx

from .. import _archive, _seam
from .._core import FILE_PIECE_BYTES, decoded, query, refused
from ..errors import ResourceNotFoundError, SandboxClientError
from ..models import EditedFile, FileEvent, FileInfo, FilesMade, FoundFiles, FoundLines
from .transport import Events, Transport

FileInfos = list[FileInfo]
#: Entries of a directory in one page, the most that the daemon gives.
LIST_PAGE_ENTRIES = 1000


class Files:
    """The files of a sandbox.

    ``user`` in every method is the user of the sandbox that does it, by name or number; root by default.
    """

    def __init__(self, transport: Transport, sandbox_id: str) -> None:
        self._transport = transport
        self._sandbox_id = sandbox_id
        self._base = f"/sandboxes/{sandbox_id}/files"

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._sandbox_id}>"

    def _path(self, rest: str, **parameters: Any) -> str:
        # `from` is a word of Python's own.
        pairs = [("from" if name == "source" else name, value) for name, value in parameters.items()]
        return query(f"{self._base}{rest}", pairs)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, user: str | None = None) -> bytes:
        """Reads a file, or ``length`` bytes of it from ``offset``.

        >>> sb.files.write("/workspace/digits", "0123456789")
        FileInfo(name='digits', path='/workspace/digits', kind='file', size=10, ...)
        >>> sb.files.read("/workspace/digits", offset=2, length=3)
        b'234'

        Raises:
            ResourceNotFoundError: The file does not exist.
        """
        if length == 0:
            return b""
        headers = {}
        if offset or length is not None:
            end = "" if length is None else offset + length - 1
            headers["Range"] = f"bytes={offset}-{end}"
        answer = self._transport.call("GET", self._path("", path=path, user=user), headers=headers)
        return answer.content

    def write(
        self,
        path: str,
        content: str | bytes | IO[bytes],
        *,
        mode: str | None = None,
        parents: bool = True,
        if_match: str | None = None,
        user: str | None = None,
    ) -> FileInfo:
        """Writes a file: text, bytes, or the rest of an open file.

        An existing file is replaced only when all bytes have arrived, and keeps its permissions and owner.

        Args:
            path: The path; a link at its end is followed.
            content: What to write.
            mode: Permissions in octal, such as ``"0755"``.
            parents: Whether to create missing directories.
            if_match: Write only if the existing file has this ``etag``; otherwise raise ``SandboxOperationError`` with the
                code ``condition_failed``.
            user: The user of the sandbox.
        """
        target = self._path("", path=path, mode=mode, parents=None if parents else False, user=user)
        headers = {"Content-Type": "application/octet-stream"}
        if if_match is not None:
            headers["If-Match"] = if_match
        if isinstance(content, str | bytes | bytearray | memoryview):
            raw = content.encode() if isinstance(content, str) else bytes(content)
            # Once it is written, it does not match any more.
            answer = self._transport.call("PUT", target, content=raw, headers=headers, repeat=if_match is None)
        else:
            # What was read from a file cannot be read again, so this is tried once.
            answer = self._transport.call("PUT", target, content=pieces(content), headers=headers, repeat=False)
        info: FileInfo = decoded(FileInfo, answer.json())
        return info

    def edit(
        self,
        path: str,
        old: str,
        new: str,
        *,
        all: bool = False,
        adapt_line_ends: bool = False,
        if_match: str | None = None,
        user: str | None = None,
    ) -> EditedFile:
        """Replaces text in a file, completely or not at all; keeps permissions, owner and hard links.

        >>> sb.write("/workspace/greeting", "hello world")
        >>> (sb.files.edit("/workspace/greeting", "world", "moon")).replaced
        1
        >>> sb.files.read("/workspace/greeting")
        b'hello moon'

        Args:
            path: The file: UTF-8 text of at most 16 MiB; a link at its end is followed.
            old: The text to find.
            new: The text that replaces it.
            all: Whether to replace every match; otherwise there must be exactly one.
            adapt_line_ends: If the text is not found, look for it with CR LF line ends, then with LF, and use the same
                line ends in the new text.
            if_match: Edit only if the file has this ``etag``.
            user: The user of the sandbox.

        Raises:
            ResourceNotFoundError: The file does not exist.
            SandboxOperationError: With the code ``no_match``, ``several_matches`` (``details["matches"]`` is the count) or
                ``not_text``.
        """
        wish = {"old": old, "new": new, "all": all, "adapt_line_ends": adapt_line_ends}
        headers = {} if if_match is None else {"If-Match": if_match}
        target = self._path("/edit", path=path, user=user)
        # Once it is done, the text is not there any more.
        answer = self._transport.call("POST", target, json=wish, headers=headers, repeat=False)
        edited: EditedFile = decoded(EditedFile, answer.json())
        return edited

    def list(self, path: str, *, user: str | None = None) -> FileInfos:
        """Lists a directory, sorted by name. Does not follow links."""
        entries: FileInfos = []
        cursor: str | None = None
        while True:
            target = self._path("/list", path=path, limit=LIST_PAGE_ENTRIES, cursor=cursor, user=user)
            page = (self._transport.call("GET", target)).json()
            entries += [decoded(FileInfo, entry) for entry in page["entries"]]
            cursor = page.get("next_cursor")
            if cursor is None:
                return entries

    def stat(self, path: str, *, follow: bool = True, user: str | None = None) -> FileInfo:
        """Returns information about a file. ``follow`` says whether to follow a link at the end of the path."""
        target = self._path("/stat", path=path, follow=None if follow else False, user=user)
        info: FileInfo = decoded(FileInfo, (self._transport.call("GET", target)).json())
        return info

    def exists(self, path: str, *, user: str | None = None) -> bool:
        """Returns whether a path exists."""
        try:
            self.stat(path, follow=False, user=user)
        except ResourceNotFoundError as error:
            if error.resource_type != "file":
                raise
            return False
        return True

    def mkdir(self, path: str, *, parents: bool = True, mode: str | None = None, user: str | None = None) -> None:
        """Creates a directory. With ``parents``, also creates missing parents, and accepts an existing directory."""
        target = self._path("/mkdir", path=path, parents=None if parents else False, mode=mode, user=user)
        self._transport.call("POST", target, repeat=parents)

    def move(
        self, source: str, to: str, *, overwrite: bool = False, parents: bool = True, user: str | None = None
    ) -> None:
        """Moves a file or directory. ``to`` is the new path itself, not the directory to put it in."""
        target = self._path(
            "/move", source=source, to=to, overwrite=overwrite or None, parents=None if parents else False, user=user
        )
        self._transport.call("POST", target, repeat=False)

    def copy(
        self,
        source: str,
        to: str,
        *,
        recursive: bool = False,
        overwrite: bool = False,
        parents: bool = True,
        user: str | None = None,
    ) -> FilesMade:
        """Copies a file or directory inside the sandbox. ``to`` is the path of the copy itself."""
        target = self._path(
            "/copy",
            source=source,
            to=to,
            recursive=recursive or None,
            overwrite=overwrite or None,
            parents=None if parents else False,
            user=user,
        )
        made: FilesMade = decoded(FilesMade, (self._transport.call("POST", target, repeat=False)).json())
        return made

    def delete(self, path: str, *, recursive: bool = False, user: str | None = None) -> None:
        """Deletes a file, a link or an empty directory; with ``recursive``, a directory with its contents."""
        self._transport.call("DELETE", self._path("", path=path, recursive=recursive or None, user=user))

    def glob(
        self,
        pattern: str,
        path: str = "/workspace",
        *,
        hidden: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> FoundFiles:
        """Finds files by name. ``cut`` of the result says whether a limit ended the search.

        >>> sb.write("/workspace/src/main.py", "print('hello')")
        >>> [file.path for file in sb.files.glob("**/*.py")]
        ['/workspace/src/main.py']
        """
        target = self._path(
            "/glob",
            path=path,
            pattern=pattern,
            hidden=hidden or None,
            limit=limit,
            timeout_seconds=None if timeout is None else max(1, round(timeout)),
            user=user,
        )
        found: FoundFiles = decoded(FoundFiles, (self._search(target, timeout)).json())
        return found

    def grep(
        self,
        pattern: str,
        path: str = "/workspace",
        *,
        regex: bool = False,
        ignore_case: bool = False,
        include: Sequence[str] | str = (),
        exclude_directories: Sequence[str] | str = (),
        carriage_returns: bool = False,
        hidden: bool = False,
        limit: int | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> FoundLines:
        """Finds lines in files.

        ``include`` are globs of the files to search, ``exclude_directories`` names of directories to skip.
        ``carriage_returns`` says whether the text of a line includes a CR at its end.

        >>> sb.write("/workspace/poem", "a rose\\nis a rose\\n")
        >>> [(match.line, match.text) for match in sb.files.grep("is a")]
        [(2, 'is a rose')]
        """
        includes = [include] if isinstance(include, str) else include
        excluded = [exclude_directories] if isinstance(exclude_directories, str) else exclude_directories
        parameters: list[tuple[str, Any]] = [
            ("path", path),
            ("pattern", pattern),
            ("regex", regex or None),
            ("ignore_case", ignore_case or None),
            *(("include", text) for text in includes),
            *(("exclude_directory", text) for text in excluded),
            ("carriage_returns", carriage_returns or None),
            ("hidden", hidden or None),
            ("limit", limit),
            ("timeout_seconds", None if timeout is None else max(1, round(timeout))),
            ("user", user),
        ]
        found: FoundLines = decoded(
            FoundLines, (self._search(query(f"{self._base}/grep", parameters), timeout)).json()
        )
        return found

    def _search(self, target: str, timeout: float | None) -> httpx.Response:
        longest = None if timeout is None else timeout + self._transport.timeout
        return self._transport.call("GET", target, read_seconds=0.0 if longest is None else longest)

    def watch(self, path: str, *, recursive: bool = False, user: str | None = None) -> FileEvents:
        """Yields changes of a file, or in a directory, from now on, until it is deleted.

        The first event is ``ready``. If the connection breaks, changes until the reconnect are missing, which the event
        ``overflow`` reports.
        """
        target = self._path("/watch", path=path, recursive=recursive or None, user=user)
        return FileEvents(self._transport, target)

    def upload(self, local: str | os.PathLike[str], path: str, *, user: str | None = None) -> FilesMade:
        """Copies a file or a whole directory of this machine to ``path``, which is the path of the copy itself.

        If ``path`` is an existing directory, entries with other names stay.
        """
        source = Path(local)
        if _seam.offload(source.is_dir):
            file = _seam.offload(_archive.pack, source)
            target, type_ = self._path("/tar", path=path, user=user), "application/x-tar"
        else:
            file = _seam.offload(source.open, "rb")
            mode = f"{(_seam.offload(source.stat)).st_mode & 0o777:04o}"
            target, type_ = self._path("", path=path, mode=mode, user=user), "application/octet-stream"
        with file:
            # As long as it takes: the daemon says so when a body does not come.
            answer = self._transport.call(
                "PUT",
                target,
                content=pieces(file),
                headers={"Content-Type": type_},
                repeat=False,
                read_seconds=None,
            )
        said = answer.json()
        if "entries" in said:
            made: FilesMade = decoded(FilesMade, said)
            return made
        return FilesMade(entries=1, bytes=int(said["size"]), skipped=0)

    def download(self, path: str, local: str | os.PathLike[str], *, user: str | None = None) -> None:
        """Copies a file or a whole directory to this machine, to ``local``, which is the path of the copy itself.

        A file appears only when all of it has arrived. The client does not trust the sandbox: it writes nothing outside
        ``local``, and skips links that lead out of it, devices and sockets.
        """
        target = Path(local)
        info = self.stat(path, user=user)
        if info.is_dir:
            with _archive.spool() as file:
                self._fetch(self._path("/tar", path=path, user=user), file)
                _seam.offload(_archive.unpack, file, target)
            return
        _seam.offload(_make_directory, target.parent)
        partial = _archive.partial_name(target)
        try:
            with _seam.offload(_create, partial) as file:
                self._fetch(self._path("", path=path, user=user), file)
            _seam.offload(partial.replace, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    def _fetch(self, target: str, file: IO[bytes]) -> None:
        response = self._transport.open("GET", target)
        try:
            for piece in response.iter_raw(FILE_PIECE_BYTES):
                _seam.offload(file.write, piece)
        except httpx.TransportError as error:
            raise self._transport.broken(error) from error
        finally:
            response.close()


def _create(path: Path) -> IO[bytes]:
    return path.open("wb")


def _make_directory(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)


def pieces(file: IO[bytes]) -> Iterable[bytes]:
    """Yields the rest of an open file."""
    while piece := _seam.offload(file.read, FILE_PIECE_BYTES):
        yield piece


class FileEvents(Events):
    """Events of files."""

    def __init__(self, transport: Transport, target: str) -> None:
        super().__init__(transport)
        self._target = target
        self._seen_ready = False
        self._over = False

    def _place(self) -> tuple[str, dict[str, str]]:
        return self._target, {}

    def __iter__(self) -> Iterator[FileEvent]:
        return self

    def __next__(self) -> FileEvent:
        if self._over:
            raise StopIteration
        _, said = self._next()
        if said.get("type") == "failed":
            self._over = True
            self.close()
            raise self._broke(said)
        event: FileEvent = decoded(FileEvent, said)
        if event.type == "ready":
            if self._seen_ready:
                return FileEvent("overflow")
            self._seen_ready = True
        elif event.type == "gone":
            self._over = True
            self.close()
        return event

    def _broke(self, said: dict[str, Any]) -> SandboxClientError:
        return refused(said["code"], said["message"], said.get("hint"), said.get("details"), None)

    def __enter__(self) -> FileEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
