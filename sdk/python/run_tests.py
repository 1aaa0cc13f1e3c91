"""Runs every test of the Python SDK against a program ``shoal``, in environments of their own.

    python3 sdk/python/run_tests.py --shoal target/debug/shoal

Each environment is a virtual one with pinned versions, made in a temporary directory and thrown away; ``--environments DIR``
keeps them there for the next run. The package under test is installed into each from this folder. Two environments are
worked on at once; what each says is printed when it is done, and the last lines are the count.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: What the tests themselves need, everywhere.
RUNNER = ("pytest-timeout==2.4.0",)
#: What builds this package, so that an installation needs no environment of its own.
BUILDER = ("hatchling==1.33.0", "editables==0.6")
LANGCHAIN_TESTS = "langchain-tests==1.1.9"
#: Most environments are waiting for a download or a daemon most of the time.
LANES = 2
#: A bound for one step: an installation on a slow line.
STEP_SECONDS_MAX = 900


@dataclass(frozen=True)
class Environment:
    """What is installed, and what is run there. ``{python}`` stands for its interpreter."""

    name: str
    packages: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...] = field(default=())


PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider")
MYPY = ("{python}", "-m", "mypy", "--cache-dir", "{scratch}")

ENVIRONMENTS = (
    Environment(
        "dcode",
        ("deepagents==0.7.6", "deepagents-code==0.1.57", LANGCHAIN_TESTS, "mypy==2.4.1"),
        (
            (*MYPY, "--python-version", "3.11", "src/shoal/deepagents", "tests/deepagents"),
            (*PYTEST, "tests/deepagents"),
        ),
    ),
    Environment(
        "sdk",
        ("httpx==0.28.1", "pytest==9.2.0", "pytest-asyncio==1.4.1.post1", "mypy==2.4.1", "ruff==0.17.4"),
        (
            ("{python}", "-m", "ruff", "check", "--no-cache", ".", "../../examples/python"),
            ("{python}", "-m", "ruff", "format", "--no-cache", "--check", ".", "../../examples/python"),
            (*MYPY, "--exclude", "/deepagents/"),
            PYTEST,
        ),
    ),
    Environment(
        "deepagents 0.7.32",
        ("deepagents==0.7.32", LANGCHAIN_TESTS),
        ((*PYTEST, "tests/deepagents", "--ignore=tests/deepagents/test_dcode.py"),),
    ),
    Environment(
        "deepagents 0.6.12",
        ("deepagents==0.6.12", LANGCHAIN_TESTS),
        ((*PYTEST, "tests/deepagents", "--ignore=tests/deepagents/test_dcode.py"),),
    ),
    Environment("wheel", (), (("{python}", "tests/wheel_check.py"),)),
)


class StepFailed(Exception):
    """A step of an environment failed; everything that was said is in it."""


def main() -> int:
    """Runs all, or those that were named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True, type=Path, help="the program to test against")
    parser.add_argument("--environments", type=Path, help="where environments are kept [default: thrown away]")
    parser.add_argument("--only", action="append", help="the name of an environment; may be given several times")
    arguments = parser.parse_args()
    program = arguments.shoal.resolve()
    if not os.access(program, os.X_OK):
        parser.error(f"`{arguments.shoal}` is not a program")
    chosen = [entry for entry in ENVIRONMENTS if not arguments.only or entry.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="shoal-environments-", dir="/var/tmp") as scratch:
        place = (arguments.environments or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(LANES) as lanes:
            jobs = {lanes.submit(work, entry, place, Path(scratch), program): entry for entry in chosen}
            failed = []
            for job in concurrent.futures.as_completed(jobs):
                entry = jobs[job]
                try:
                    said, how = job.result(), "passed"
                except StepFailed as error:
                    said, how = str(error), "FAILED"
                    failed.append(entry.name)
                print(f"=== {entry.name}: {how}\n{said}", flush=True)
    print(f"{len(chosen) - len(failed)} of {len(chosen)} environments passed" + (f"; not {failed}" if failed else ""))
    return 1 if failed or not chosen else 0


def work(entry: Environment, place: Path, scratch: Path, program: Path) -> str:
    """Makes an environment if it is not there, installs the package, runs the commands. What they said."""
    packages = (*RUNNER, *BUILDER, *entry.packages)
    key = hashlib.sha256("\n".join((sys.version, *packages)).encode()).hexdigest()[:16]
    home = place / key
    python = home / "bin" / "python"
    said: list[str] = []
    variables = {**os.environ, "SHOAL_BINARY": str(program), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("SHOAL_URL", "SHOAL_API_KEY", "SHOAL_DATA_DIR", "SHOAL_PRIVATE_DIR", "PYTHONPATH", "VIRTUAL_ENV"):
        variables.pop(name, None)

    def step(*command: str) -> None:
        began = time.monotonic()
        done = subprocess.run(
            command,
            cwd=HERE,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=STEP_SECONDS_MAX,
        )
        said.append(f"$ {' '.join(command)}  # {time.monotonic() - began:.0f} s\n{done.stdout}")
        if done.returncode != 0:
            raise StepFailed("".join(said))

    ready = home / "ready"
    pip = (str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q")
    if not ready.exists():
        step(sys.executable, "-m", "venv", "--clear", str(home))
        step(*pip, *packages)
        ready.touch()
    if entry.name == "wheel":
        wheels = scratch / "wheels"
        variables["SHOAL_WHEEL_BINARY"] = str(program)
        build = ("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), ".")
        step(str(python), "-m", "pip", "--disable-pip-version-check", *build)
        (wheel,) = wheels.glob("*.whl")
        del variables["SHOAL_BINARY"]
        step(*pip, "--force-reinstall", str(wheel))
    else:
        step(*pip, "--no-build-isolation", "-e", ".")
    for command in entry.commands:
        step(*(part.format(python=python, scratch=scratch / key) for part in command))
    return "".join(said)


if __name__ == "__main__":
    sys.exit(main())
