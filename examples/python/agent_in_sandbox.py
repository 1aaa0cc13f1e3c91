"""Runs a whole agent inside a sandbox: uploads its program and its input, prepares it, and downloads its results.

    python3 examples/python/agent_in_sandbox.py

This agent needs no model: it counts words. Replace it with your own program.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from shoal import SandboxClient

AGENT = """
import collections, json, pathlib
words = collections.Counter(pathlib.Path("work/text").read_text().split())
print("counting", flush=True)
pathlib.Path("out").mkdir()
pathlib.Path("out/words.json").write_text(json.dumps(words))
"""

with (
    SandboxClient.here() as client,
    client.sandbox(env={"PYTHONUNBUFFERED": "1"}) as sb,
    tempfile.TemporaryDirectory() as local,
):
    work = Path(local, "work")
    work.mkdir()
    (work / "text").write_text("a rose is a rose")
    sb.files.upload(work, "/workspace/work")
    sb.write("/workspace/agent.py", AGENT)
    assert sb.run("python3 -m compileall -q agent.py").success, "the set-up failed"
    result = sb.run("python3 agent.py", timeout=600, on_stdout=lambda text: print(text, end=""))
    sb.files.download("/workspace/out", Path(local, "out"))
    print(Path(local, "out", "words.json").read_text())
    print("finished" if result.success else "failed", "with", result.exit_code)
