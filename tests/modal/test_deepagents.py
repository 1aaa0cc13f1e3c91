"""LangChain's integration for Modal, as it is published: its standard tests, and the documents' examples with an agent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import modal
import pytest
from deepagents import create_deep_agent
from harness import Daemon
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_modal import ModalSandbox
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
        app = modal.App.lookup("standard", create_if_missing=True)
        sandbox = modal.Sandbox.create(app=app, timeout=900)
        yield ModalSandbox(sandbox=sandbox)
        sandbox.terminate()


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


def test_the_documents_example_with_an_agent(daemon: Daemon) -> None:
    # Their example, with a model that needs no network.
    app = modal.App.lookup("your-app")
    modal_sandbox = modal.Sandbox.create(app=app)
    backend = ModalSandbox(sandbox=modal_sandbox)
    calls = [
        {"name": "write_file", "args": {"file_path": "/app/test_it.py", "content": "print(sum(range(11)))\n"}},
        {"name": "execute", "args": {"command": "python3 /app/test_it.py"}},
    ]
    agent = create_deep_agent(model=Scripted(calls=calls), backend=backend)
    result = agent.invoke({"messages": [{"role": "user", "content": "Run pytest"}]})
    told = [str(message.content) for message in result["messages"] if isinstance(message, ToolMessage)]
    assert "55" in told[1] and result["messages"][-1].content == "done", told
    modal_sandbox.terminate()


def test_the_documents_example_with_files(daemon: Daemon) -> None:
    app = modal.App.lookup("your-app")
    modal_sandbox = modal.Sandbox.create(app=app)
    backend = ModalSandbox(sandbox=modal_sandbox)
    backend.upload_files(
        [("/src/index.py", b"print('Hello')\n"), ("/pyproject.toml", b"[project]\nname = 'my-app'\n")]
    )
    results = backend.download_files(["/src/index.py", "/output.txt"])
    assert results[0].content == b"print('Hello')\n" and results[0].error is None
    assert results[1].content is None and results[1].error == "file_not_found"
    assert backend.download_files(["/src"])[0].error == "is_directory"
    modal_sandbox.terminate()
