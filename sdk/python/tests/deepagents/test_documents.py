"""The example in the guide runs with a scripted model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from documents import ROOT, programs
from harness import Daemon

SUM = [
    ("execute", {"command": "cat data/*.txt | paste -sd+ | bc > sum.txt || python3 -c 'print(1 + 2)' > sum.txt"}),
    ("publish", {"path": "/workspace/none.txt"}),
    ("publish", {"path": "/workspace/sum.txt"}),
]


def test_the_agent_of_the_guide(daemon: Daemon) -> None:
    ((program, _),) = programs("docs/deepagents.md")
    assert run(program, "ScriptedModel()", daemon) == [
        "all is done",
        "/workspace/answer.txt b'55\\n'",
        "/workspace/none file_not_found",
    ]


def test_the_agent_of_the_examples(daemon: Daemon) -> None:
    program = (ROOT / "examples/python/agent_with_sandbox.py").read_text()
    assert run(program, f"ScriptedModel(steps={SUM!r})", daemon) == [
        "all is done",
        "/workspace/sum.txt b'3\\n'",
        "/workspace/none.txt file_not_found",
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
