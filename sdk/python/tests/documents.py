"""The examples of a page, as programs with what they print."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)


def programs(page: str) -> list[tuple[str, str | None]]:
    """Each Python block of a page, with the text block that follows at once, if one does."""
    found = [(block.group(1), block.group(2)) for block in BLOCK.finditer((ROOT / page).read_text())]
    assert found, f"{page} has examples"
    return found
