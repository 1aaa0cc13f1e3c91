"""Deep Agents' own backend for LangSmith's sandboxes, as it is published: its standard tests, and an agent that uses it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from deepagents import create_deep_agent
from deepagents.backends.langsmith import LangSmithSandbox
from dialect import a_client, a_sandbox
from harness import Daemon
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_tests.integration_tests import SandboxIntegrationTests


#: Where the standard tests are of another mind than this release of Deep Agents, whatever the sandbox: it writes over a file
#: that is there, and what it globs are whole paths, of files alone.
OF_ANOTHER_MIND = {
    "test_write_existing_file_fails",
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_hidden_files_explicitly",
    "test_glob_with_character_class",
    "test_glob_with_directories",
    "test_glob_with_question_mark",
}


class TestStandard(SandboxIntegrationTests):
    """What every backend of Deep Agents must do: execute, upload, download, read, write, edit, ls, grep, glob; also async."""

    @pytest.fixture(autouse=True)
    def leave_out(self, request: pytest.FixtureRequest) -> None:
        if request.node.originalname in OF_ANOTHER_MIND:
            pytest.skip("this release of Deep Agents does it otherwise")

    @pytest.fixture(scope="class")
    def sandbox(self, daemon: Daemon) -> Iterator[Any]:
        with a_client(daemon) as client, a_sandbox(client) as sb:
            yield LangSmithSandbox(sb)


@pytest.fixture
def backend(sb: Any) -> Any:
    return LangSmithSandbox(sb)


def test_everything_that_the_backend_has(backend: Any, sb: Any) -> None:
    assert backend.id == sb.name
    done = backend.execute("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.output, done.truncated) == (3, "out\n\nerr\n", False)
    assert backend.write("/data/a.py", "import os\nprint('needle')\n").error is None
    assert backend.read("/data/a.py").file_data["content"].endswith("print('needle')")
    assert backend.read("/data/a.py", offset=1, limit=1).file_data["content"] == "print('needle')"
    assert "file_not_found" in backend.read("/data/none").error
    edited = backend.edit("/data/a.py", "needle", "thread")
    assert (edited.error, edited.occurrences) == (None, 1)
    assert sb.read("/data/a.py") == b"import os\nprint('thread')\n"
    assert backend.edit("/data/a.py", "nowhere", "x").error
    # More than fits into the words of a command.
    large = "".join(f"line {number} ü\n" for number in range(60_000))
    assert backend.write("/data/large.txt", large).error is None
    assert backend.edit("/data/large.txt", "line 59999 ü", "x" * 300_000).error is None
    assert sb.read("/data/large.txt").decode() == large.replace("line 59999 ü", "x" * 300_000)
    names = {entry["path"].rstrip("/") for entry in backend.ls("/data").entries}
    assert names == {"/data/a.py", "/data/large.txt"}
    assert [match["path"] for match in backend.glob("*.py", path="/data").matches] == ["/data/a.py"]
    found = backend.grep("thread", path="/data").matches
    assert [(match["path"], match["line"], match["text"]) for match in found] == [("/data/a.py", 2, "print('thread')")]


def test_files_up_and_down(backend: Any) -> None:
    files = [("/up/text ü.txt", "ünïcode".encode()), ("/up/bytes", bytes(range(256)) * 4096), ("/up/empty", b"")]
    assert [answer.error for answer in backend.upload_files(files)] == [None, None, None]
    assert [answer.content for answer in backend.download_files([path for path, _ in files])] == [
        content for _, content in files
    ]
    wrong = backend.download_files(["/up/none", "/up", "relative"])
    assert [answer.error for answer in wrong] == ["file_not_found", "is_directory", "invalid_path"]
    wrong = backend.upload_files([("/proc/version", b"no"), ("/up", b"no"), ("relative", b"no")])
    assert [answer.error for answer in wrong] == ["permission_denied", "permission_denied", "invalid_path"]


def test_the_same_with_asyncio(backend: Any) -> None:
    async def everything() -> None:
        try:
            done = await asyncio.gather(*(backend.aexecute(f"echo {number}") for number in range(8)))
            assert [one.output for one in done] == [f"{number}\n" for number in range(8)]
            assert (await backend.awrite("/data/a.txt", "one\ntwo\n")).error is None
            assert (await backend.aedit("/data/a.txt", "two", "three")).error is None
            assert (await backend.aread("/data/a.txt")).file_data["content"] == "one\nthree"
            assert [entry["path"] for entry in (await backend.als("/data")).entries] == ["/data/a.txt"]
            assert len((await backend.agrep("three", path="/data")).matches) == 1
            assert len((await backend.aglob("*.txt", path="/data")).matches) == 1
        finally:
            if hasattr(backend, "aclose"):
                await backend.aclose()

    asyncio.run(everything())


class Scripted(BaseChatModel):
    """A model that does what it was told beforehand: calls of tools, one after the other, then a word."""

    calls: list[dict[str, Any]]

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> Scripted:
        return self

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        said = sum(isinstance(message, ToolMessage) for message in messages)
        if said < len(self.calls):
            call = {**self.calls[said], "id": f"call-{said}", "type": "tool_call"}
            message = AIMessage(content="", tool_calls=[call])
        else:
            message = AIMessage(content="done")
        return ChatResult(generations=[ChatGeneration(message=message)])


def test_an_agent_works_in_the_sandbox(backend: Any, sb: Any) -> None:
    calls = [
        {"name": "write_file", "args": {"file_path": "/app/sum.py", "content": "print(sum(range(11)))\n"}},
        {"name": "execute", "args": {"command": "python3 /app/sum.py"}},
        {"name": "edit_file", "args": {"file_path": "/app/sum.py", "old_string": "11", "new_string": "101"}},
        {"name": "execute", "args": {"command": "python3 /app/sum.py"}},
        {"name": "read_file", "args": {"file_path": "/app/sum.py"}},
        {"name": "ls", "args": {"path": "/app"}},
        {"name": "grep", "args": {"pattern": "range", "path": "/app"}},
        {"name": "glob", "args": {"pattern": "*.py", "path": "/app"}},
        # More than is shown: the backend keeps it in a file of the sandbox.
        {"name": "execute", "args": {"command": "seq 1 200000"}},
    ]
    agent = create_deep_agent(model=Scripted(calls=calls), backend=backend)
    answer = agent.invoke({"messages": [{"role": "user", "content": "add up"}]})
    told = [message for message in answer["messages"] if isinstance(message, ToolMessage)]
    texts = [str(message.content) for message in told]
    assert len(texts) == len(calls) and answer["messages"][-1].content == "done", texts
    assert "55" in texts[1] and "5050" in texts[3], texts
    assert "range(101)" in texts[4]
    assert all("/app/sum.py" in text for text in texts[5:8]), texts
    assert len(texts[8]) < 200_000, "the rest is in a file"
    assert sb.read("/app/sum.py") == b"print(sum(range(101)))\n"
