"""Every example in the documents of the SDK runs, and prints what the page says."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from documents import ROOT, programs
from harness import Daemon, tiny

EXAMPLES = [
    pytest.param(program, printed, id=f"{page}-{number}")
    for page in ("README.md", "sdk/python/README.md", "docs/python.md", "docs/guides/ports.md")
    for number, (program, printed) in enumerate(programs(page), 1)
]


@pytest.mark.parametrize(("program", "printed"), EXAMPLES)
def test_an_example_prints_what_the_page_says(program: str, printed: str | None, daemon: Daemon) -> None:
    environment = {**os.environ, "SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    if "busybox:1" in program:
        with daemon.client() as client:
            client.import_image(tiny(), name="busybox:1")
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (printed or "")


#: Examples that need no more than this package, with what they print.
STARTED = {
    "threads.py": ["1 sandbox for 8 messages at once", "the user likes tea"],
    "setup_script.py": ["hello, once", "hello, every time"],
    "agent_in_sandbox.py": ["counting", '{"a": 2, "rose": 2, "is": 1}', "finished with 0"],
}
#: Examples that need Deep Agents; deepagents/test_documents.py runs them.
OTHERS = {"agent_with_sandbox.py", "host_tool.py", "several_files.py"}


def test_every_example_is_run_by_a_test() -> None:
    assert {path.name for path in (ROOT / "examples/python").glob("*.py")} == {*STARTED, *OTHERS}
    tests = (ROOT / "sdk/python/tests/deepagents/test_documents.py").read_text()
    assert all(f'"{name}"' in tests for name in OTHERS)


@pytest.mark.parametrize(("name", "printed"), STARTED.items())
@pytest.mark.parametrize("private", [False, True])
def test_an_example_runs_with_one_command(name: str, printed: list[str], private: bool, daemon: Daemon) -> None:
    environment = {**os.environ, "SHOAL_DATA_DIR": "/nonexistent"}
    if not private:
        environment |= {"SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    done = subprocess.run(
        [sys.executable, ROOT / "examples/python" / name], env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line in printed] == printed
