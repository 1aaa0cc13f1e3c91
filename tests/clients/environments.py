"""Runs test suites of clients against a program ``shoal``, each in a virtual environment with pinned versions.

A suite is a program that calls ``main`` with its environments. Owns how environments are made, kept and reported on; what
is installed there, and what is run, is the suite's business. Nothing here needs more than Python itself, so that
``cargo xtask test`` can start it anywhere.

Environments are made in a temporary directory and thrown away; ``--environments DIR`` keeps them there for the next run. A
few are worked on at once; what each says is printed when it is done, and the last line is the count of environments.
``--results FILE`` writes the names of those that passed, when all were run.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: Most environments wait for a download or a daemon most of the time.
LANES = 2
#: A bound for one step: an installation on a slow line, or a suite on a slow machine.
STEP_SECONDS_MAX = 900
#: What says which daemon to use. A suite starts its own, whatever its caller has set.
FOREIGN_VARIABLES = ("SHOAL_URL", "SHOAL_API_KEY", "SHOAL_DATA_DIR", "SHOAL_PRIVATE_DIR", "PYTHONPATH", "VIRTUAL_ENV")

#: Held by whoever makes the environment with this key; the map itself is guarded by the lock below.
MAKING: dict[str, threading.Lock] = {}
MAKING_LOCK = threading.Lock()


@dataclass(frozen=True)
class Environment:
    """What is installed, and what is run there.

    In ``commands`` and ``variables``, ``{python}`` stands for the interpreter, ``{shoal}`` for the program under test and
    ``{scratch}`` for a directory that is thrown away. Commands find the program in ``SHOAL_BINARY`` too, unless
    ``variables`` says otherwise; a variable that is ``None`` is not set.
    """

    name: str
    packages: tuple[str, ...] = ()
    commands: tuple[tuple[str, ...], ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    #: The interpreter that makes it; the one that runs this if left out.
    interpreter: str = sys.executable


class StepFailed(Exception):
    """A step of an environment failed; everything that was said is in it."""


def main(description: str | None, environments: Sequence[Environment], directory: Path) -> int:
    """Runs all environments, or those that the command line names. Commands run in ``directory``. The exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shoal", required=True, type=Path, help="the program to test against")
    parser.add_argument("--environments", type=Path, help="where environments are kept [default: thrown away]")
    parser.add_argument("--results", type=Path, help="where to write the names of the environments that passed")
    names = [entry.name for entry in environments]
    parser.add_argument("--only", action="append", choices=names, help="an environment; may be given several times")
    arguments = parser.parse_args()
    program = arguments.shoal.resolve()
    if not os.access(program, os.X_OK):
        parser.error(f"`{arguments.shoal}` is not a program")
    chosen = [entry for entry in environments if not arguments.only or entry.name in arguments.only]
    failed = []
    with tempfile.TemporaryDirectory(prefix="shoal-environments-", dir="/var/tmp") as scratch:
        place = (arguments.environments or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(LANES) as lanes:
            jobs = {lanes.submit(work, entry, place, Path(scratch), directory, program): entry for entry in chosen}
            for job in concurrent.futures.as_completed(jobs):
                entry = jobs[job]
                try:
                    said, how = job.result(), "passed"
                except StepFailed as error:
                    said, how = str(error), "FAILED"
                    failed.append(entry.name)
                print(f"=== {entry.name}: {how}\n{said}", flush=True)
    if arguments.results and not arguments.only:
        passed = [entry.name for entry in chosen if entry.name not in failed]
        arguments.results.parent.mkdir(parents=True, exist_ok=True)
        arguments.results.write_text(json.dumps(passed))
    print(f"{len(chosen) - len(failed)} of {len(chosen)} environments passed" + (f"; not {failed}" if failed else ""))
    return 1 if failed else 0


def work(entry: Environment, place: Path, scratch: Path, directory: Path, program: Path) -> str:
    """Makes an environment if it is not there, and runs its commands. What they said."""
    version = subprocess.run((entry.interpreter, "-VV"), capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256("\n".join((entry.interpreter, version, *entry.packages)).encode()).hexdigest()[:16]
    home = place / key
    own_scratch = Path(tempfile.mkdtemp(prefix=f"{key}-", dir=scratch))
    words = {"python": str(home / "bin" / "python"), "shoal": str(program), "scratch": str(own_scratch)}
    variables = {name: value for name, value in os.environ.items() if name not in FOREIGN_VARIABLES}
    variables.update(SHOAL_BINARY=str(program), PYTHONDONTWRITEBYTECODE="1", PIP_DISABLE_PIP_VERSION_CHECK="1")
    for name, value in entry.variables.items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value.format(**words)
    said: list[str] = []

    def step(*command: str) -> None:
        began = time.monotonic()
        try:
            done = subprocess.run(
                command,
                cwd=directory,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=STEP_SECONDS_MAX,
            )
            output, how = done.stdout, "" if done.returncode == 0 else f"it ended with {done.returncode}\n"
        except subprocess.TimeoutExpired as error:
            output, how = error.stdout or b"", f"it was ended after {STEP_SECONDS_MAX} s\n"
        text = output.decode("utf-8", "replace")
        said.append(f"$ {' '.join(command)}  # {time.monotonic() - began:.0f} s\n{text}{how}")
        if how:
            raise StepFailed("".join(said))

    # Two entries may share an environment and differ in their variables.
    with MAKING_LOCK:
        making = MAKING.setdefault(key, threading.Lock())
    ready = home / "ready"
    with making:
        if not ready.exists():
            step(entry.interpreter, "-m", "venv", "--clear", str(home))
            if entry.packages:
                step(words["python"], "-m", "pip", "install", "-q", *entry.packages)
            ready.touch()
    for command in entry.commands:
        step(*(part.format(**words) for part in command))
    return "".join(said)
