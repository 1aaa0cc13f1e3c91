"""Runs E2B's own clients, as they are published, against a program ``shoal``.

    python3 tests/e2b/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py. Which versions: the newest, one that still
speaks the older routes with the older transport, and LangChain's integration on the release of Deep Agents that it needs.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

from environments import Environment, main  # noqa: E402

TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0")
PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120")
CLIENT_TESTS = (*PYTEST, "--ignore=test_deepagents.py")
#: For the standard tests of LangChain, without the plugins that come with them.
STANDARD = ("-o", "asyncio_mode=auto", "-p", "no:benchmark", "-p", "no:codspeed", "-p", "no:socket", "-W", "ignore")

ENVIRONMENTS = (
    Environment("e2b 2.63.0", (*TOOLS, "e2b==2.63.0"), (CLIENT_TESTS,)),
    # It takes only keys that look like the vendor's.
    Environment("e2b 2.32.0", (*TOOLS, "e2b==2.32.0"), (CLIENT_TESTS,), {"E2B_TEST_KEY": "e2b_"}),
    Environment(
        "langchain-e2b 0.0.6",
        (*TOOLS, "e2b==2.63.0", "langchain-e2b==0.0.6", "deepagents==0.6.12", "langchain-tests==1.1.9"),
        ((*PYTEST, *STANDARD, "test_deepagents.py"),),
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
