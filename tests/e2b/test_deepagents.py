"""LangChain's integration for E2B, as it is published: its standard tests, and the documents' examples with an agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from deepagents import create_deep_agent
from e2b import Sandbox
from harness import Daemon, switched_to
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_e2b import AsyncE2BSandbox, E2BSandbox  # noqa: F401
from langchain_tests.integration_tests import SandboxIntegrationTests


class TestStandard(SandboxIntegrationTests):
    """What every backend of Deep Agents must do: execute, upload, download, read, write, edit, ls, grep, glob; also async."""

    @pytest.fixture(scope="class")
    def sandbox(self, daemon: Daemon) -> Iterator[Any]:
        with switched_to(daemon):
            sandbox = Sandbox.create(timeout=900)
            yield E2BSandbox(sandbox=sandbox)
            sandbox.kill()


@pytest.fixture
def backend(sbx: Any) -> Any:
    return E2BSandbox(sandbox=sbx)


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


def test_the_documents_example_with_an_agent() -> None:
    # Their example, with E2B where it says "can also do this with E2B", and a model that needs no network.
    sandbox = Sandbox.create()
    backend = E2BSandbox(sandbox=sandbox)
    calls = [
        {"name": "write_file", "args": {"file_path": "/home/user/hello.py", "content": "print('hello world')\n"}},
        {"name": "execute", "args": {"command": "python3 hello.py"}},
    ]
    agent = create_deep_agent(
        model=Scripted(calls=calls),
        backend=backend,
        system_prompt="You are a coding assistant with sandbox access. You can create and run code in the sandbox.",
    )
    try:
        result = agent.invoke({"messages": [{"role": "user", "content": "Create a hello world Python script and run it"}]})
        told = [str(message.content) for message in result["messages"] if isinstance(message, ToolMessage)]
        assert "hello world" in told[1] and result["messages"][-1].content == "done", told
    finally:
        sandbox.kill()


def test_the_documents_example_with_files(backend: Any) -> None:
    backend.upload_files(
        [("/src/index.py", b"print('Hello')\n"), ("/pyproject.toml", b"[project]\nname = 'my-app'\n")]
    )
    results = backend.download_files(["/src/index.py", "/output.txt"])
    assert results[0].content == b"print('Hello')\n" and results[0].error is None
    assert results[1].content is None and results[1].error == "file_not_found"


def test_everything_that_an_agent_uses(backend: Any, sbx: Any) -> None:
    assert backend.id == sbx.sandbox_id
    done = backend.execute("echo out; echo err >&2; exit 3")
    assert (done.exit_code, done.output) == (3, "out\n\nerr\n")
    assert backend.execute("sleep 30", timeout=1).exit_code == 124
    assert backend.write("/data/a.py", "import os\nprint('needle')\n").error is None
    edited = backend.edit("/data/a.py", "needle", "thread")
    assert (edited.error, edited.occurrences) == (None, 1)
    large = "".join(f"line {number} ü\n" for number in range(60_000))
    assert backend.write("/data/large.txt", large).error is None
    assert backend.edit("/data/large.txt", "line 59999 ü", "x" * 300_000).error is None
    assert sbx.files.read("/data/large.txt") == large.replace("line 59999 ü", "x" * 300_000)
    found = backend.grep("thread", path="/data").matches
    assert [(match["path"], match["line"]) for match in found] == [("/data/a.py", 2)]
