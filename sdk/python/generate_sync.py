"""Generates ``src/shoal/_sync`` from ``src/shoal/_async``: the sync client is the async one without ``async`` and ``await``.

``python generate_sync.py`` writes the files; ``python generate_sync.py --check`` fails if they are out of date.
Docstrings are converted like code, so their examples work in both.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "src" / "shoal" / "_async"
TARGET = HERE / "src" / "shoal" / "_sync"

#: In this order. Whole words only, so that `AsyncSandbox` does not touch `AsyncSandboxClient`.
WORDS = {
    "AsyncClient": "Client",
    "AsyncIterable": "Iterable",
    "AsyncIterator": "Iterator",
    "StopAsyncIteration": "StopIteration",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "__anext__": "__next__",
    "aclose": "close",
    "aiter_raw": "iter_raw",
    "aoffload": "offload",
    "aread": "read",
    "ashielded": "shielded",
    "asleep": "sleep",
}
#: Our own classes, and those of the seam.
OWN = re.compile(r"\bAsync((?:Sandbox|Command|Build|File|Transport|Events|Lock)\w*)\b")


def convert(text: str) -> str:
    """The sync form of an async module."""
    for word, plain in WORDS.items():
        text = re.sub(rf"\b{word}\b", plain, text)
    text = OWN.sub(r"\1", text)
    text = re.sub(r"\basync (def|with|for)\b", r"\1", text)
    text = re.sub(r"\(await ([\w.]+\.\w+)\)", r"\1", text)
    text = re.sub(r"\bawait ", "", text)
    return text


def header(name: str) -> str:
    """Says where a file comes from."""
    return f"# Generated from _async/{name} by generate_sync.py. Do not edit: change that file and run the program again.\n"


def generated() -> dict[Path, str]:
    """What should be there."""
    files = {TARGET / source.name: convert(source.read_text()) for source in sorted(SOURCE.glob("*.py"))}
    init = TARGET / "__init__.py"
    files[init] = '"""The client for ordinary programs."""\n'
    return {path: header(path.name) + text for path, text in files.items()}


def main() -> int:
    """Writes or compares."""
    wanted = generated()
    if "--check" in sys.argv[1:]:
        there = {path: path.read_text() for path in TARGET.glob("*.py")}
        stale = sorted(path.name for path in {*wanted, *there} if wanted.get(path) != there.get(path))
        if stale:
            print(f"not what would be generated: {', '.join(stale)}; run `python generate_sync.py`", file=sys.stderr)
        return 1 if stale else 0
    TARGET.mkdir(exist_ok=True)
    for path, text in wanted.items():
        path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
