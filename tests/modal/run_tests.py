"""Runs Modal's own client, as it is published, against a program ``shoal``.

    python3 tests/modal/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py. Which versions: the newest with its newer calls,
the same with the older calls, the last one with the older interface to files, and LangChain's integration on that one.
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
    Environment("modal 1.6.3", (*TOOLS, "modal==1.6.3"), (CLIENT_TESTS,)),
    Environment("modal 1.6.3 with older calls", (*TOOLS, "modal==1.6.3"), (CLIENT_TESTS,), {"MODAL_SANDBOX_V2": "0"}),
    Environment("modal 1.5.5", (*TOOLS, "modal==1.5.5"), (CLIENT_TESTS,)),
    Environment(
        "langchain-modal 0.0.7",
        (*TOOLS, "modal==1.5.5", "langchain-modal==0.0.7", "deepagents==0.7.32", "langchain-tests==1.1.9"),
        ((*PYTEST, *STANDARD, "test_deepagents.py"),),
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
