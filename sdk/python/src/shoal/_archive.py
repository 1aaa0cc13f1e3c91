"""Directories as tar streams on this machine: packed for an upload, unpacked without trust after a download.

Both go by way of a temporary file, so that memory stays constant and sync and async share the code.
"""

from __future__ import annotations

import os
import tarfile
import tempfile
from pathlib import Path
from typing import IO

from .errors import SandboxClientError


def spool() -> IO[bytes]:
    """A file without a name, which is gone when it is closed."""
    return tempfile.TemporaryFile(prefix="shoal-")


def pack(directory: Path) -> IO[bytes]:
    """The contents of a directory, ready to be read. Sockets, FIFOs and devices are left out."""
    file = spool()
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for entry in sorted(os.listdir(directory)):  # noqa: PTH208 names as they are, bytes included
                archive.add(directory / entry, arcname=entry, filter=_only_files)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _only_files(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None


def unpack(file: IO[bytes], directory: Path) -> None:
    """Unpacks what a sandbox sent. Nothing of it lands outside of the directory, and links that lead out are refused."""
    if not hasattr(tarfile, "data_filter"):
        raise SandboxClientError(
            "this Python cannot unpack an archive that is not trusted",
            hint="use Python 3.12, 3.11.4, 3.10.12 or newer",
        )
    file.seek(0)
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=file, mode="r") as archive:
            archive.extractall(directory, filter=_data_only)
    except tarfile.TarError as error:
        raise SandboxClientError(f"the archive from the sandbox cannot be unpacked: {error}") from error


def _data_only(entry: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    try:
        return tarfile.data_filter(entry, path)
    except (tarfile.LinkOutsideDestinationError, tarfile.AbsoluteLinkError, tarfile.SpecialFileError):
        # Common in honest directories (a link to /usr/bin/python in a venv) and of no use outside of the sandbox.
        return None


def partial_name(target: Path) -> Path:
    """Where a download goes until all of it has arrived."""
    return target.with_name(f".{target.name}.{os.getpid()}.part")
