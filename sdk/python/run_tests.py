"""Runs every test of the Python SDK against a program ``shoal``, in environments of their own.

    python3 sdk/python/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py of the repository.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "clients"))

from environments import Environment, main  # noqa: E402

#: What the tests themselves need, and what builds this package, so that installing it needs no environment of its own.
TOOLS = ("pytest-timeout==2.4.0", "hatchling==1.33.0", "editables==0.6")
LANGCHAIN_TESTS = "langchain-tests==1.1.9"
MYPY_PACKAGE = "mypy==2.4.1"

#: Where the version manager pyenv keeps Pythons, whether or not they are on `PATH`.
PYENV = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))

PIP = ("{python}", "-m", "pip")
#: The package under test, from this folder.
INSTALL = (*PIP, "install", "-q", "--no-build-isolation", "-e", ".")
PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider")
MYPY = ("{python}", "-m", "mypy", "--cache-dir", "{scratch}")
RUFF = ("{python}", "-m", "ruff")
#: What is not in this folder and is held to its rules.
ELSEWHERE = ("../../examples/python", "../../tests/clients", "../../tests/openapi")
#: LangChain's standard tests have a count and a time of their own.
STANDARD = (*PYTEST, "tests/deepagents/test_standard.py")
#: Deep Agents Code pins an exact version of deepagents, so its tests run beside that one alone.
OTHERS = (*PYTEST, "tests/deepagents", "--deselect=tests/deepagents/test_standard.py")
WITHOUT_DCODE = (*OTHERS, "--ignore=tests/deepagents/test_dcode.py")

TESTERS = (*TOOLS, "httpx==0.28.1", "pytest==9.2.0", "pytest-asyncio==1.4.1.post1")


def pythons() -> Iterator[tuple[str, str]]:
    """The oldest Python that this package is for, and the newest that is here. Types are always for the oldest."""
    for names in (("python3.10",), ("python3.14", "python3.13", "python3.12")):
        found = next(((name, place) for name in names for place in places(name)), None)
        if found is not None:
            yield found


def places(name: str) -> Iterator[str]:
    """Where a Python of this name is that makes environments. What a version manager puts on ``PATH`` may lead nowhere."""
    for place in (shutil.which(name), *map(str, PYENV.glob(f"versions/*/bin/{name}"))):
        if place and subprocess.run((place, "-c", "import ensurepip, venv"), capture_output=True).returncode == 0:
            yield place


ENVIRONMENTS = (
    Environment(
        "dcode",
        (*TOOLS, "deepagents==0.7.6", "deepagents-code==0.1.57", LANGCHAIN_TESTS, MYPY_PACKAGE),
        (
            INSTALL,
            (*MYPY, "--python-version", "3.11", "src/shoal/deepagents", "tests/deepagents", "benchmark_rows.py"),
            STANDARD,
            OTHERS,
        ),
    ),
    Environment(
        "sdk",
        (*TESTERS, MYPY_PACKAGE, "ruff==0.17.4"),
        (
            INSTALL,
            (*RUFF, "check", "--no-cache", ".", *ELSEWHERE),
            (*RUFF, "format", "--no-cache", "--check", ".", *ELSEWHERE),
            (*MYPY, "--exclude", "/deepagents/"),
            PYTEST,
        ),
    ),
    Environment(
        "deepagents 0.7.32", (*TOOLS, "deepagents==0.7.32", LANGCHAIN_TESTS), (INSTALL, STANDARD, WITHOUT_DCODE)
    ),
    Environment(
        "deepagents 0.6.12", (*TOOLS, "deepagents==0.6.12", LANGCHAIN_TESTS), (INSTALL, STANDARD, WITHOUT_DCODE)
    ),
    Environment(
        "wheel",
        TOOLS,
        (
            ("{python}", "tests/wheel_build.py", "{shoal}", "{scratch}"),
            ("{python}", "tests/wheel_check.py"),
        ),
        {"SHOAL_BINARY": None},
    ),
    *(Environment(name, TESTERS, (INSTALL, PYTEST), interpreter=found) for name, found in pythons()),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
