"""A Deep Agent on this machine whose commands and files are in a sandbox, and whose secret is not.

    MODEL=anthropic:claude-sonnet-4-5 python3 examples/python/agent_with_sandbox.py

The tool `publish` runs here, beside the sandbox: it has the token, and neither the agent nor its sandbox ever sees it.
"""

from __future__ import annotations

import os

from deepagents import create_deep_agent

from shoal import SandboxClient, SandboxClientError
from shoal.deepagents import ShoalSandbox

TOKEN = os.environ.get("PUBLISH_TOKEN", "a secret")

try:
    client = SandboxClient()
except SandboxClientError:
    client = SandboxClient.local()
with client, client.sandbox() as sandbox:
    backend = ShoalSandbox(sandbox)

    def publish(path: str) -> str:
        """Publishes a file of the sandbox."""
        (file,) = backend.download_files([path])
        if file.content is None:
            return f"cannot read {path}: {file.error}"
        # Here the file would go out, with the token.
        return f"published {len(file.content)} bytes with a token of {len(TOKEN)} letters"

    backend.upload_files([("/workspace/data/a.txt", b"1\n"), ("/workspace/data/b.txt", b"2\n")])
    agent = create_deep_agent(model=os.environ["MODEL"], tools=[publish], backend=backend)
    wish = "Add up the numbers in /workspace/data, write the sum to /workspace/sum.txt, and publish it"
    state = agent.invoke({"messages": [{"role": "user", "content": wish}]})
    print(state["messages"][-1].text)
    for answer in backend.download_files(["/workspace/sum.txt", "/workspace/none.txt"]):
        print(answer.path, answer.error or answer.content)
