"""Searches by name, as the helper of ``BaseSandbox`` makes them, without running Python in the sandbox.

Only the plain case: a pattern of names, ``*`` and ``**``, and files that are found whole and in order. Everything else, errors
included, is left to the helper of the installed version. (It takes a backslash in a name for a slash; that is seen here where
the name itself is found.)

Until deepagents 0.7.6 the helper is Python's own ``glob``: directories are found too, paths are relative, and links are
followed on the way. The daemon follows none, so that case is taken only where there is none to follow: below a pattern of one
name, or in a tree that is looked at whole.
"""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from importlib.metadata import version

from deepagents.backends.protocol import GlobResult

from ..models import FileInfo, FoundFiles

#: Since this version, files alone are found, with absolute paths, and a pattern without a slash is a name at any depth.
_GIVES_FILES = tuple(int(part) for part in version("deepagents").split(".")[:3] if part.isdigit()) >= (0, 7, 7)
#: As many as the helper gives. More are its business.
MATCHES_MAX = 10_000
#: A tree that is looked at whole. To fetch a larger one would take longer than the helper does.
TREE_ENTRIES_MAX = 2000
#: How long the helper looks.
SECONDS_MAX = 5.0
#: A name without a dot in front, whose stars are single.
_NAME = r"(?:[\w-]|\*(?!\*))(?:[\w.-]|\*(?!\*))*"
_PLAIN = re.compile(rf"(?:(?:\*\*|{_NAME})/)*{_NAME}", re.ASCII)


@dataclass(frozen=True)
class Wish:
    """What to ask the daemon for: pattern, directory, whether hidden names are looked into, and how many."""

    pattern: str
    root: str
    hidden: bool
    limit: int
    #: What of it is meant, where all of it is asked for.
    meant: re.Pattern[str] | None = None


def search(pattern: str, path: str | None) -> Wish | None:
    """What to ask the daemon for. ``None``: ask the helper."""
    root = (path or "/").rstrip("/")
    if not root or posixpath.normpath(root) != root or not root.startswith("/") or not _PLAIN.fullmatch(pattern):
        return None
    if _GIVES_FILES:
        return Wish(pattern if "/" in pattern else f"**/{pattern}", root, "/" not in pattern, MATCHES_MAX)
    if "/" not in pattern:
        return Wish(pattern, root, False, MATCHES_MAX)
    if pattern.count("**") > 1:
        # Python's own finds some of these twice.
        return None
    return Wish("**/*", root, False, TREE_ENTRIES_MAX, _expression(pattern))


def _expression(pattern: str) -> re.Pattern[str]:
    """A plain pattern as a regular expression over a path."""
    text = re.escape(pattern).replace(r"\*\*/", "(?:[^/]+/)*").replace(r"\*", "[^/]*")
    return re.compile(text)


def matched(found: FoundFiles, wish: Wish) -> GlobResult | None:
    """The helper's answer; ``None`` if it is not the plain case."""
    if found.cut or found.skipped:
        return None
    files: dict[str, FileInfo] = {}
    for file in found:
        name = file.path.removeprefix(f"{wish.root}/")
        # A link may lead to a file, and out of the directory.
        if file.kind == "symlink" or name == file.path or "\\" in name or not name.isprintable():
            return None
        files[name] = file
    if _GIVES_FILES:
        names = sorted(name for name, file in files.items() if file.kind == "file" and not file.name.startswith("."))
        return GlobResult(matches=[{"path": f"{wish.root}/{name}", "is_dir": False} for name in names])
    names = sorted(name for name in files if wish.meant is None or wish.meant.fullmatch(name))
    return GlobResult(matches=[{"path": name, "is_dir": files[name].is_dir} for name in names])
