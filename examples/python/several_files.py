"""Copies several files into a sandbox and out of it at once, with an error for each file that fails.

    python3 examples/python/several_files.py

Uses the daemon that SHOAL_URL names or the one on this machine, or starts a private one. Needs the package `deepagents`.
"""

from __future__ import annotations

import asyncio

from shoal import SandboxClient
from shoal.deepagents import ShoalSandbox

FILES = [
    ("/workspace/in/a.txt", b"first\n"),
    ("/workspace/in/deep/b.bin", bytes(range(256))),
    ("relative.txt", b"nowhere to go\n"),
    ("/workspace", b"a directory is there\n"),
]
WANTED = ["/workspace/in/a.txt", "/workspace/in/deep/b.bin", "/workspace/none.txt", "/workspace/in", "relative.txt"]

with SandboxClient.here() as client, client.sandbox() as sandbox:
    backend = ShoalSandbox(sandbox)
    for up in backend.upload_files(FILES):
        print("up", up.path, up.error or "ok")
    # The same for asyncio moves several at once.
    for down in asyncio.run(backend.adownload_files(WANTED)):
        print("down", down.path, down.error or f"{len(down.content or b'')} bytes")
