"""The example in the guide, and those that need Deep Agents, run with a scripted model where they have one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT, programs
from harness import Daemon

SUM = [("execute", {"command": "python3 -c 'print(sum(map(int, open(\"data/numbers.txt\"))))' > sum.txt"})]
PUBLISHED = [
    ("write_file", {"file_path": "/workspace/haiku.txt", "content": "an old silent pond"}),
    ("publish", {"path": "/workspace/none.txt"}),
    ("publish", {"path": "/workspace/haiku.txt"}),
]
EXAMPLES = ROOT / "examples/python"


def test_the_agent_of_the_guide(daemon: Daemon) -> None:
    ((program, _),) = programs("docs/deepagents.md")
    assert run(program, "ScriptedModel()", daemon) == [
        "all is done",
        "/workspace/answer.txt b'55\\n'",
        "/workspace/none file_not_found",
    ]


def test_an_agent_has_a_sandbox_as_its_tool(daemon: Daemon) -> None:
    program = (EXAMPLES / "agent_with_sandbox.py").read_text()
    assert run(program, f"ScriptedModel(steps={SUM!r})", daemon) == ["all is done", "/workspace/sum.txt b'3\\n'"]


def test_a_tool_on_the_host_keeps_its_secret(daemon: Daemon) -> None:
    program = (EXAMPLES / "host_tool.py").read_text()
    assert run(program, f"ScriptedModel(steps={PUBLISHED!r})", daemon) == [
        "cannot read /workspace/none.txt: file_not_found",
        "published 18 bytes with a token of 8 letters",
        "the sandbox has not seen the token",
    ]


@pytest.mark.parametrize("private", [False, True])
def test_several_files_have_errors_of_their_own(private: bool, daemon: Daemon) -> None:
    environment = {**os.environ, "SHOAL_DATA_DIR": "/nonexistent"}
    if not private:
        environment |= {"SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    command = [sys.executable, str(EXAMPLES / "several_files.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "up /workspace/in/a.txt ok",
        "up /workspace/in/deep/b.bin ok",
        "up relative.txt invalid_path",
        "up /workspace is_directory",
        "down /workspace/in/a.txt 6 bytes",
        "down /workspace/in/deep/b.bin 256 bytes",
        "down /workspace/none.txt file_not_found",
        "down /workspace/in is_directory",
        "down relative.txt invalid_path",
    ]


def run(program: str, model: str, daemon: Daemon) -> list[str]:
    """What the program prints with a scripted model."""
    future = "from __future__ import annotations\n"
    scripted = program.replace('os.environ["MODEL"]', model).replace(future, "")
    assert model in scripted
    environment = {**os.environ, "SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    environment["PYTHONPATH"] = str(Path(__file__).resolve().parent)
    done = subprocess.run(
        [sys.executable, "-c", f"from scripted_model import ScriptedModel\n{scripted}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
