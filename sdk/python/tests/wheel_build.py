"""Builds and installs the wheel with the lines that the documents show, in a tree that looks like the repository after a build.

python wheel_build.py PROGRAM SCRATCH
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PAGES = ("README.md", "docs/python.md", "sdk/python/README.md")
BLOCK = re.compile(r"^```sh\n(SHOAL_WHEEL_BINARY=.*?)^```\n", re.MULTILINE | re.DOTALL)


def main(program: str, scratch: str) -> None:
    """Runs the lines. They must be the same on every page."""
    found = {page: BLOCK.findall((ROOT / page).read_text()) for page in PAGES}
    lines = {block for blocks in found.values() for block in blocks}
    assert all(found.values()) and len(lines) == 1, f"the documents do not agree on how to build the wheel: {found}"
    tree = Path(scratch, "repository")
    (tree / "target/release").mkdir(parents=True)
    (tree / "target/release/shoal").symlink_to(program)
    (tree / "sdk").symlink_to(ROOT / "sdk")
    # The `pip` of this environment, which has the build's own requirements installed.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_FORCE_REINSTALL": "1",
        "PIP_QUIET": "1",
    }
    subprocess.run(["sh", "-ec", lines.pop()], cwd=tree, env=environment, check=True)


main(*sys.argv[1:])
