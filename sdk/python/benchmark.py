"""Measures the Python SDK and Deep Agents on a program ``shoal``, and writes the page of the results, every row of it.

    cargo build --release
    python3 sdk/python/benchmark.py --shoal target/release/shoal --write docs/benchmarks-python.md

What is measured is in ``benchmark_rows.py``; this runs it in the environments of ``run_tests.py``, one after the other, since
versions of deepagents cannot be installed beside one another. For numbers that mean something, nothing else should run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "clients"))

from environments import work  # noqa: E402

from run_tests import ENVIRONMENTS, INSTALL  # noqa: E402

#: Which parts are measured in which environment. The SDK is the same in all, and helpers are compared in the newest.
PARTS = {"deepagents 0.7.32": ("sdk", "helpers", "suite"), "dcode": ("suite",), "deepagents 0.6.12": ("suite",)}


def main() -> int:
    """Measures all, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True, type=Path, help="the program to measure")
    parser.add_argument("--write", type=Path, help="the page to write [default: standard output]")
    parser.add_argument("--environments", type=Path, help="where environments are kept [default: thrown away]")
    arguments = parser.parse_args()
    program = arguments.shoal.resolve()
    with tempfile.TemporaryDirectory(prefix="shoal-benchmark-", dir="/var/tmp") as scratch:
        place = (arguments.environments or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        measured = [measure(name, parts, place, Path(scratch), program) for name, parts in PARTS.items()]
    said = page(program, measured)
    if arguments.write is None:
        print(said, end="")
    else:
        arguments.write.write_text(said)
    return 0


def measure(name: str, parts: tuple[str, ...], place: Path, scratch: Path, program: Path) -> dict[str, Any]:
    """What ``benchmark_rows.py`` finds in an environment."""
    print(f"{name}: {', '.join(parts)}", file=sys.stderr, flush=True)
    (found,) = (entry for entry in ENVIRONMENTS if entry.name == name)
    to = scratch / "rows.json"
    command = ("{python}", "benchmark_rows.py", *parts, "--to", str(to))
    work(dataclasses.replace(found, commands=(INSTALL, command)), place, scratch, HERE, program)
    rows: dict[str, Any] = json.loads(to.read_text())
    return rows


def page(program: Path, measured: list[dict[str, Any]]) -> str:
    """The page."""
    shoal = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    versions: dict[str, list[str]] = {}
    for one in measured:
        for name, version in one["versions"].items():
            if version not in versions.setdefault(name, []):
                versions[name].append(version)
    head = f"""# Benchmarks of the Python SDK

`sdk/python/benchmark.py` wrote this page from a single run.
The two sides of each comparison alternate within the same minutes; compare the ratios, because the times depend on the machine.
Rows that name no version use the first version of deepagents below.

- {shoal}
- {", ".join(f"{name} {' and '.join(found)}" for name, found in versions.items())}
- {os.cpu_count()} cores, Linux {platform.release()}

| what | median | beside it | ratio |
| --- | --- | --- | --- |
"""
    return head + "".join(f"{row}\n" for one in measured for row in one["rows"])


if __name__ == "__main__":
    sys.exit(main())
