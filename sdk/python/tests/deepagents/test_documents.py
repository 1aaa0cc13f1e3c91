"""The example in the guide runs with a scripted model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from documents import programs
from harness import Daemon


def test_the_agent_of_the_guide(daemon: Daemon) -> None:
    ((program, _),) = programs("docs/guides/deepagents.md")
    scripted = program.replace('os.environ["MODEL"]', "ScriptedModel()")
    assert scripted != program
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
    assert done.stdout.splitlines() == [
        "all is done",
        "/workspace/answer.txt b'55\\n'",
        "/workspace/none file_not_found",
    ]
