"""Keeps one sandbox per conversation thread, and deletes it after half an hour without use.

    python3 examples/python/threads.py

Uses the daemon that SHOAL_URL names or the one on this machine, or starts a private one.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from shoal import LifetimeRule, Sandbox, SandboxClient


def sandbox_of(client: SandboxClient, thread: str) -> Sandbox:
    """Returns the thread's sandbox, and creates it if there is none."""
    return client.get_or_create({"app": "example", "thread": thread}, lifetime=[LifetimeRule.idle(1800)])


with SandboxClient.here() as client:
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: sandbox_of(client, "42"), range(8)))
    print(len({sandbox.id for sandbox in found}), "sandbox for 8 messages at once")
    sandbox_of(client, "42").write("/workspace/memory", "the user likes tea\n")
    print(sandbox_of(client, "42").run("cat memory").stdout, end="")
    print(sandbox_of(client, "42").explain())
    sandbox_of(client, "42").delete()
