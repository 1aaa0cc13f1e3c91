"""Gives an agent a tool that runs on this machine and holds a secret, which neither the agent nor its sandbox ever sees.

    MODEL=anthropic:claude-sonnet-4-5 PUBLISH_TOKEN=... python3 examples/python/host_tool.py

Uses the daemon that SHOAL_URL names or the one on this machine, or starts a private one.
"""

from __future__ import annotations

import os

from deepagents import create_deep_agent

from shoal import SandboxClient
from shoal.deepagents import ShoalSandbox

TOKEN = os.environ.get("PUBLISH_TOKEN", "a secret")

with SandboxClient.here() as client, client.sandbox() as sandbox:
    backend = ShoalSandbox(sandbox)

    def publish(path: str) -> str:
        """Publishes a file of the sandbox."""
        (file,) = backend.download_files([path])
        if file.content is None:
            return f"cannot read {path}: {file.error}"
        # Here the file would go out, with the token.
        return f"published {len(file.content)} bytes with a token of {len(TOKEN)} letters"

    agent = create_deep_agent(model=os.environ["MODEL"], tools=[publish], backend=backend)
    wish = "Write a haiku to /workspace/haiku.txt, and publish it"
    state = agent.invoke({"messages": [{"role": "user", "content": wish}]})
    for message in state["messages"]:
        if message.type == "tool" and message.name == "publish":
            print(message.text)
    seen = backend.execute("env; cat /proc/*/environ; grep -rs . /workspace").output
    print("the sandbox has seen the token" if TOKEN in seen else "the sandbox has not seen the token")
