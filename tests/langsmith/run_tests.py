"""Runs LangSmith's own clients, as they are published, against a program ``shoal``.

    python3 tests/langsmith/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py. Which versions: the last of the documented
dialect, one in the middle that has neither templates nor files with ranges, the newest, one for JavaScript, and Deep Agents'
own backend on top of the newest.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "clients"))

from environments import Environment, main  # noqa: E402

TOOLS = ("pytest==9.2.0", "pytest-timeout==2.4.0")
PYTEST = ("{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120")
PYTHON_TESTS = (*PYTEST, "--ignore=test_npm.py", "--ignore=test_deepagents.py")
#: For the standard tests of LangChain, without the plugins that come with them.
STANDARD = ("-o", "asyncio_mode=auto", "-p", "no:benchmark", "-p", "no:codspeed", "-p", "no:socket", "-W", "ignore")
#: What the WebSocket is spoken with; pinned, since how it closes is part of what is tested.
WEBSOCKETS = "websockets==17.4"

ENVIRONMENTS = (
    Environment("langsmith 0.14.17", (*TOOLS, "langsmith[sandbox]==0.14.17", WEBSOCKETS), (PYTHON_TESTS,)),
    Environment("langsmith 0.7.16", (*TOOLS, "langsmith[sandbox]==0.7.16", WEBSOCKETS), (PYTHON_TESTS,)),
    Environment("langsmith 0.10.10", (*TOOLS, "langsmith[sandbox]==0.10.10", WEBSOCKETS), (PYTHON_TESTS,)),
    Environment(
        "deepagents 0.7.32",
        (
            *TOOLS,
            "deepagents==0.7.32",
            "langchain==1.4.7",
            "langchain-core==1.7.2",
            "langchain-tests==1.1.9",
            "langsmith[sandbox]==0.14.17",
            WEBSOCKETS,
        ),
        ((*PYTEST, *STANDARD, "test_deepagents.py"),),
    ),
    Environment(
        "langsmith 0.10.5 for JavaScript",
        TOOLS,
        (
            (
                "npm",
                "install",
                "--silent",
                "--no-audit",
                "--no-fund",
                "--prefix",
                "{scratch}",
                "langsmith@0.10.5",
                "ws@8",
            ),
            (*PYTEST, "test_npm.py"),
        ),
        {"LANGSMITH_NPM": "{scratch}"},
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
