"""The client for JavaScript, as it is published."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from harness import Daemon

HERE = Path(__file__).resolve().parent


def test_the_client_for_javascript(daemon: Daemon) -> None:
    # Modules are found beside the program, so it is put beside them.
    program = Path(os.environ["LANGSMITH_NPM"]) / "client.mjs"
    shutil.copy(HERE / "client.mjs", program)
    variables = {**os.environ, "LANGSMITH_ENDPOINT": daemon.url, "LANGSMITH_API_KEY": daemon.key}
    done = subprocess.run(["node", str(program)], env=variables, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("all is well\n")
