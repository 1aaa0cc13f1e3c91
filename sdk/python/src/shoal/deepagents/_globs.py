"""Searches by name, as the helper of ``BaseSandbox`` makes them since deepagents 0.7.7, without running Python in the sandbox.

Only the plain case: a pattern of names, ``*`` and ``**``, and files that are found whole and in order. Everything else, errors
included, is left to the helper of the installed version.
"""

from __future__ import annotations

import posixpath
import re
from importlib.metadata import version

from deepagents.backends.protocol import GlobResult

from ..models import FoundFiles

#: Since this version, files alone are found, with absolute paths, and a pattern without a slash is a name at any depth.
_GIVES_FILES = tuple(int(part) for part in version("deepagents").split(".")[:3] if part.isdigit()) >= (0, 7, 7)
#: As many as the helper gives. More are its business.
MATCHES_MAX = 10_000
#: How long the helper looks.
SECONDS_MAX = 5.0
#: A name without a dot in front, whose stars are single.
_NAME = r"(?:[\w-]|\*(?!\*))(?:[\w.-]|\*(?!\*))*"
_PLAIN = re.compile(rf"(?:(?:\*\*|{_NAME})/)*{_NAME}", re.ASCII)


def search(pattern: str, path: str | None) -> tuple[str, str, bool] | None:
    """What to ask the daemon for: pattern, directory, and whether hidden names are looked into. ``None``: ask the helper."""
    root = (path or "/").rstrip("/")
    if not _GIVES_FILES or not root or posixpath.normpath(root) != root or not root.startswith("/"):
        return None
    if not _PLAIN.fullmatch(pattern):
        return None
    return (pattern, root, False) if "/" in pattern else (f"**/{pattern}", root, True)


def matched(found: FoundFiles, root: str) -> GlobResult | None:
    """The helper's answer; ``None`` if it is not the plain case."""
    if found.cut or found.skipped:
        return None
    paths = []
    for file in found:
        name = file.path.removeprefix(f"{root}/")
        # A link may lead to a file, and out of the directory.
        if file.kind == "symlink" or name == file.path or "\\" in name or not name.isprintable():
            return None
        if file.kind == "file" and not file.name.startswith("."):
            paths.append(name)
    return GlobResult(matches=[{"path": f"{root}/{name}", "is_dir": False} for name in sorted(paths)])
