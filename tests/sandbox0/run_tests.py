"""Runs Sandbox0's own client, as it is published, against a program ``shoal``.

    python3 tests/sandbox0/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py. Which versions: the newest, one that knows another
status for a deleted sandbox, the last with volumes, and the adapter for Deep Agents with `dcode` on top of the newest.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

from environments import Environment, main  # noqa: E402

TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0")
#: What the WebSocket is spoken with; pinned, since how it closes is part of what is tested.
WEBSOCKETS = "websockets==17.4"
PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "180", "-W", "ignore")
CLIENT = (*PYTEST, "test_sandboxes.py", "test_contexts.py", "test_files.py", "test_faults.py")
#: For the standard tests of LangChain, without the plugins that come with them.
STANDARD = ("-o", "asyncio_mode=auto", "-p", "no:benchmark", "-p", "no:codspeed", "-p", "no:socket")
#: What the adapter's own pins lead to.
DEEPAGENTS = (
    "sandbox0[deepagents]==0.10.4",
    "deepagents==0.7.0a2",
    "deepagents-code==0.1.26",
    "langchain==1.4.7",
    "langchain-core==1.7.2",
    "langchain-tests==1.1.9",
    WEBSOCKETS,
)

ENVIRONMENTS = (
    Environment("sandbox0 0.10.4", (*TOOLS, "sandbox0==0.10.4", WEBSOCKETS), (CLIENT,)),
    Environment("sandbox0 0.10.2", (*TOOLS, "sandbox0==0.10.2", WEBSOCKETS), (CLIENT,)),
    Environment("sandbox0 0.9.7", (*TOOLS, "sandbox0==0.9.7", WEBSOCKETS), (CLIENT,)),
    Environment("sandbox0[deepagents] 0.10.4", (*TOOLS, *DEEPAGENTS), ((*PYTEST, *STANDARD, "test_deepagents.py"),)),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
