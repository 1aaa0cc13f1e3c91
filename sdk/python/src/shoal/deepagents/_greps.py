"""Searches by contents, as the helper of ``BaseSandbox`` makes them, without running a shell and ``grep`` in the sandbox.

Only the plain case: a text of one line, below an absolute path, in files of any name or of a plain pattern, found whole.
Everything else is left to the helper of the installed version. Its matches come in whatever order the file system has them;
these come by path and line.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

from deepagents.backends.protocol import GrepResult

from ..models import FoundLines

#: What the daemon gives at most. More are the helper's business.
MATCHES_MAX = 10_000
#: How long it may look. The helper has three times as long.
SECONDS_MAX = 10.0
#: What is looked for at most, in bytes.
PATTERN_BYTES_MAX = 4096
#: What the lines may add up to: less than what is told of the helper's output.
LINES_BYTES_MAX = 4 << 20
#: A name, or a pattern that everybody reads alike.
_NAME = re.compile(r"[\w.-]+", re.ASCII)
_INCLUDE = re.compile(r"(?:[\w.-]|\*(?!\*))+", re.ASCII)


def search(
    pattern: str, path: str | None, glob: str | None, max_count: int | None, exclude: tuple[str, ...]
) -> dict[str, Any] | None:
    """What to ask the daemon for. ``None``: ask the helper."""
    root = path or ""
    if not root.startswith("/") or posixpath.normpath(root) != root or root == "/" or not root.isprintable():
        return None
    # To the helper, lines of a pattern are patterns of their own.
    raw = pattern.encode("utf-8", "replace")
    if not raw or raw.decode() != pattern or b"\n" in raw or b"\0" in raw or len(raw) > PATTERN_BYTES_MAX:
        return None
    if glob is not None and not _INCLUDE.fullmatch(glob):
        return None
    if max_count is not None and not 0 < max_count < MATCHES_MAX:
        return None
    # One whose own name is excluded is searched all the same: it was named.
    excluded = [name for name in exclude if name != posixpath.basename(root)]
    if not all(_NAME.fullmatch(name) for name in excluded):
        return None
    return {
        "pattern": pattern,
        "path": root,
        "include": () if glob is None else (glob,),
        "exclude_directories": excluded,
        "carriage_returns": True,
        "hidden": True,
        "limit": MATCHES_MAX if max_count is None else max_count + 1,
        "timeout": SECONDS_MAX,
    }


def matched(found: FoundLines, root: str, glob: str | None, max_count: int | None) -> GrepResult | None:
    """The helper's answer; ``None`` if it is not the plain case."""
    # Which come first is not the same to both; and a binary file may have it, of which the helper says a word of its own.
    if found.cut or found.mixed or (found.skipped and not found.matches):
        return None
    # The helper counts its words about binary files as matches.
    if max_count is not None and len(found) + found.skipped > max_count:
        return None
    if sum(len(match.text) for match in found) > LINES_BYTES_MAX:
        return None
    for match in found:
        # A file that was named is told whatever it is called, and the helper looks at its name too.
        if match.text_cut or match.text_start or not match.path.isprintable() or (glob and match.path == root):
            return None
        try:
            match.text.encode()
        except UnicodeEncodeError:
            return None
    return GrepResult(matches=[{"path": match.path, "line": match.line, "text": match.text} for match in found])
