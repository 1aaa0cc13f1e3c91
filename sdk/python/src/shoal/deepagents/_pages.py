"""Pages of text files, as the helper of ``BaseSandbox`` makes them, without running Python in the sandbox.

Only the plain case: a text file of a known kind that is small, valid and has the lines that are asked for. Everything else,
errors included, is left to the helper of the installed version, whose words they are.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import PurePosixPath
from typing import Any

from deepagents.backends.protocol import FileData, ReadResult

#: Files up to here are fetched whole. The helper cuts pages at 500 KiB, so none of these would be.
WHOLE_FILE_BYTES_MAX = 256 << 10
#: Kinds of files that every version takes for text. What an unknown kind is taken for differs.
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".c", ".cc", ".cfg", ".conf", ".cpp", ".cs", ".css", ".csv", ".go", ".h", ".hpp", ".ini", ".java", ".js", ".json", ".jsx",
    ".kt", ".log", ".lua", ".md", ".php", ".pl", ".py", ".pyi", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".swift", ".tex",
    ".toml", ".ts", ".tsx", ".txt", ".xml", ".yaml", ".yml",
))
# fmt: on

_HAS_LINES = "total_lines" in {entry.name for entry in dataclasses.fields(ReadResult)}


def is_plain(path: str, offset: int, limit: int) -> bool:
    """Whether it is worth fetching."""
    return path.startswith("/") and offset >= 0 and limit > 0 and PurePosixPath(path).suffix in TEXT_SUFFIXES


def page(raw: bytes, offset: int, limit: int) -> ReadResult | None:
    """The page; ``None`` if it is not the plain case."""
    if not raw or len(raw) > WHOLE_FILE_BYTES_MAX:
        return None
    try:
        lines = io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8", newline=None).readlines()
    except UnicodeDecodeError:
        return None
    shown = [line.rstrip("\n") for line in lines[offset : offset + limit]]
    if not shown:
        return None
    end = offset + len(shown)
    where: dict[str, Any] = {}
    if _HAS_LINES:
        following = end if end < len(lines) else None
        where = {"total_lines": len(lines), "start_line": offset + 1, "end_line": end, "next_offset": following}
    return ReadResult(file_data=FileData(content="\n".join(shown), encoding="utf-8"), **where)
