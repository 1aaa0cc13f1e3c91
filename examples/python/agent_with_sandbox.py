"""Runs a Deep Agent on this machine, with its commands and files in a sandbox.

    MODEL=anthropic:claude-sonnet-4-5 python3 examples/python/agent_with_sandbox.py

Uses the daemon that SHOAL_URL names or the one on this machine, or starts a private one.
"""

from __future__ import annotations

import os

from deepagents import create_deep_agent

from shoal import SandboxClient
from shoal.deepagents import ShoalSandbox

with SandboxClient.here() as client, client.sandbox() as sandbox:
    backend = ShoalSandbox(sandbox)
    backend.write("/workspace/data/numbers.txt", "1\n2\n")
    agent = create_deep_agent(model=os.environ["MODEL"], backend=backend)
    wish = "Add up the numbers in /workspace/data/numbers.txt, and write the sum to /workspace/sum.txt"
    state = agent.invoke({"messages": [{"role": "user", "content": wish}]})
    print(state["messages"][-1].text)
    (answer,) = backend.download_files(["/workspace/sum.txt"])
    print(answer.path, answer.error or answer.content)
