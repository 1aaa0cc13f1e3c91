"""Directories as tar streams on this machine: packed for an upload or a build, unpacked without trust after a download.

Both go by way of a temporary file, so that memory stays constant and sync and async share the code.
"""

from __future__ import annotations

import io
import os
import re
import tarfile
import tempfile
from pathlib import Path
from typing import IO, Any

from .errors import SandboxClientError

#: An expression that fits no text.
NOTHING = "(?!)"


def spool() -> IO[bytes]:
    """A file without a name, which is gone when it is closed."""
    return tempfile.TemporaryFile(prefix="shoal-")


def pack(directory: Path) -> IO[bytes]:
    """Packs the contents of a directory. Skips sockets, FIFOs and devices."""
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


def pack_context(directory: Path, dockerfile: str) -> IO[bytes]:
    """A directory to build from, without what its ``.dockerignore`` names. The Dockerfile is sent in any case."""
    try:
        ignore = Ignore((directory / ".dockerignore").read_text("utf-8", "surrogateescape"))
    except FileNotFoundError:
        ignore = Ignore("")
    file = spool()
    try:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
            _add_wanted(archive, directory, "", ignore, os.path.normpath(dockerfile))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _add_wanted(archive: tarfile.TarFile, directory: Path, prefix: str, ignore: Ignore, dockerfile: str) -> None:
    for entry in sorted(os.listdir(directory)):  # noqa: PTH208 names as they are, bytes included
        path, name = directory / entry, prefix + entry
        is_directory = path.is_dir() and not path.is_symlink()
        leads_on = dockerfile == name or dockerfile.startswith(f"{name}/")
        if ignore.ignores(name) and not leads_on and not (is_directory and ignore.takes_back):
            continue
        archive.add(path, arcname=name, recursive=False, filter=_only_files)
        if is_directory:
            _add_wanted(archive, path, f"{name}/", ignore, dockerfile)


def script_context(image: str, script: str) -> IO[bytes]:
    """What to build from where there is nothing but a script to run over an image."""
    # A word that the script does not have on a line of its own.
    end = "SHOAL_SETUP"
    while end in script.splitlines():
        end += "_"
    script = script.rstrip("\n")
    text = f"FROM {image}\nRUN <<{end}\n{script}\n{end}\n".encode()
    file = spool()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        about = tarfile.TarInfo("Dockerfile")
        about.size = len(text)
        archive.addfile(about, io.BytesIO(text))
    file.seek(0)
    return file


class Ignore:
    """A ``.dockerignore``: one pattern in a line, ``!`` takes back, and the last that fits decides.

    ``*``, ``?`` and ``[...]`` mean anything but a slash, ``**`` any number of directories. A pattern that fits a directory
    fits all that is in it.

    >>> ignore = Ignore("*.log\\n!keep.log\\n**/cache")
    >>> [name for name in ("a.log", "keep.log", "deep/a.log", "deep/cache/x") if ignore.ignores(name)]
    ['a.log', 'deep/cache/x']
    """

    def __init__(self, text: str) -> None:
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.removeprefix("\ufeff").splitlines():
            pattern = line.strip()
            if not pattern or pattern.startswith("#"):
                continue
            back = pattern.startswith("!")
            parts = [part for part in pattern.removeprefix("!").strip().split("/") if part not in ("", ".")]
            if parts:
                self._rules.append((back, re.compile(_as_expression(parts), re.DOTALL)))

    def ignores(self, path: str) -> bool:
        """Whether a path is left out."""
        ignored = False
        for back, expression in self._rules:
            if expression.fullmatch(path):
                ignored = not back
        return ignored

    @property
    def takes_back(self) -> bool:
        """Whether something in a directory that is left out may be sent all the same."""
        return any(back for back, _ in self._rules)


def _as_expression(parts: list[str]) -> str:
    """What is below what fits, fits too, so that directories at the end say nothing."""
    while parts and parts[-1] == "**":
        parts = parts[:-1]
    fits = ["(?:[^/]+/)*" if part == "**" else f"{_name_expression(part)}/" for part in parts]
    return "".join(fits).removesuffix("/") + "(?:/.*)?" if fits else ".*"


def _name_expression(part: str) -> str:
    found, at = "", 0
    while at < len(part):
        letter = part[at]
        if letter == "*":
            found += "[^/]*"
        elif letter == "?":
            found += "[^/]"
        elif letter == "[":
            end = part.find("]", at)
            # A class that does not end fits nothing.
            found += _class_expression(part[at + 1 : end]) if end > 0 else NOTHING
            at = end if end > 0 else len(part)
        else:
            if letter == "\\" and at + 1 < len(part):
                at += 1
            found += re.escape(part[at])
        at += 1
    return found


def _class_expression(inside: str) -> str:
    negated = inside[:1] in ("^", "!")
    inside = inside[1:] if negated else inside
    found, at = "", 0
    while at < len(inside):
        if inside[at + 1 : at + 2] == "-" and at + 2 < len(inside):
            low, high = inside[at], inside[at + 2]
            found += f"{re.escape(low)}-{re.escape(high)}" if low <= high else ""
            at += 3
        else:
            found += re.escape(inside[at])
            at += 1
    if negated:
        return f"[^/{found}]"
    return f"[{found}]" if found else NOTHING


def _only_files(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return entry if entry.isreg() or entry.isdir() or entry.issym() or entry.islnk() else None


def unpack(file: IO[bytes], directory: Path) -> None:
    """Unpacks what a sandbox sent. Writes nothing outside the directory, and skips links that lead out of it."""
    file.seek(0)
    directory.mkdir(parents=True, exist_ok=True)
    # Python's own filters are not in every Python that we run on. What we allow is decided here, for all of them alike.
    trust: dict[str, Any] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
    top = directory.resolve()
    directories: list[tarfile.TarInfo] = []
    try:
        with tarfile.open(fileobj=file, mode="r") as archive:
            for entry in archive:
                if _is_harmless(entry, top):
                    archive.extract(entry, top, set_attrs=not entry.isdir(), **trust)
                    directories += [entry] if entry.isdir() else []
            # Directories last and from below: one that must not be written to is first filled.
            for entry in sorted(directories, key=lambda entry: entry.name, reverse=True):
                archive.extract(entry, top, **trust)
    except tarfile.TarError as error:
        raise SandboxClientError(f"the archive from the sandbox cannot be unpacked: {error}") from error


def _is_harmless(entry: tarfile.TarInfo, top: Path) -> bool:
    """Whether an entry is unpacked. Makes it ours, and takes rights away that no download should have."""
    if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
        return False
    place = top / entry.name
    # What is there by now decides where a name leads: a link that was unpacked before is followed.
    if entry.name.startswith("/") or ".." in entry.name.split("/") or not _is_inside(place.parent, top):
        raise SandboxClientError(f"the archive from the sandbox has a name that leads out of it: `{entry.name}`")
    if entry.issym() or entry.islnk():
        # Common in honest directories (a link to /usr/bin/python in a venv) and of no use outside of the sandbox.
        start = place.parent if entry.issym() else top
        if entry.linkname.startswith("/") or not _is_inside(start / entry.linkname, top):
            return False
    elif place.is_symlink():
        # A file is never written through a link, wherever that leads.
        place.unlink()
    entry.uid, entry.gid, entry.uname, entry.gname = os.geteuid(), os.getegid(), "", ""
    entry.mode = (entry.mode & 0o755) | (0o700 if entry.isdir() else 0o600)
    return True


def _is_inside(path: Path, top: Path) -> bool:
    # As `resolve`, which some Pythons end in the middle where links lead in a circle.
    found = Path(os.path.realpath(path))
    return found == top or top in found.parents


def partial_name(target: Path) -> Path:
    """Where a download goes until all of it has arrived."""
    return target.with_name(f".{target.name}.{os.getpid()}.part")
