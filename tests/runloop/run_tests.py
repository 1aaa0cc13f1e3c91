"""Runs Runloop's own client, as it is published, against a program ``shoal``.

    python3 tests/runloop/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py. Which versions: the newest, one that waits for devboxes
by another route, and LangChain's integration on top of the newest.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

from environments import Environment, main  # noqa: E402

TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0")
PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "180", "-W", "ignore")
CLIENT = (*PYTEST, "test_client.py", "test_faults.py")
#: For the standard tests of LangChain, without the plugins that come with them.
STANDARD = ("-o", "asyncio_mode=auto", "-p", "no:benchmark", "-p", "no:codspeed", "-p", "no:socket")
LANGCHAIN = ("deepagents==0.7.32", "langchain==1.4.7", "langchain-core==1.7.2", "langchain-tests==1.1.9")

ENVIRONMENTS = (
    Environment("runloop-api-client 3.0.0", (*TOOLS, "runloop-api-client==3.0.0"), (CLIENT,)),
    Environment("runloop-api-client 1.20.0", (*TOOLS, "runloop-api-client==1.20.0"), (CLIENT,)),
    Environment(
        "langchain-runloop 0.0.7",
        (*TOOLS, *LANGCHAIN, "runloop-api-client==3.0.0", "langchain-runloop==0.0.7"),
        ((*PYTEST, *STANDARD, "test_langchain.py"),),
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
