"""Runs Daytona's own client, as it is published, against a program ``shoal``.

    python3 tests/daytona/run_tests.py --shoal target/debug/shoal

How environments are made and kept is said in tests/clients/environments.py. Which versions: the newest, one of the middle that has
neither codes of errors nor an event socket, one of the last that have ``find_one``, which the documents use, and LangChain's
integration on top of the newest and of that one.
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
    Environment("daytona 0.226.1", (*TOOLS, "daytona==0.226.1"), (CLIENT,)),
    Environment("daytona 0.197.0", (*TOOLS, "daytona==0.197.0"), (CLIENT,)),
    Environment(
        "daytona 0.150.0 with find_one",
        (*TOOLS, *LANGCHAIN, "daytona==0.150.0", "langchain-daytona==0.0.2"),
        (CLIENT, (*PYTEST, *STANDARD, "test_documents.py")),
    ),
    Environment(
        "langchain-daytona 0.0.9",
        (*TOOLS, *LANGCHAIN, "daytona==0.226.1", "langchain-daytona==0.0.9"),
        ((*PYTEST, *STANDARD, "test_langchain.py", "test_documents.py"),),
    ),
)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRONMENTS, HERE))
