"""A chat model for agents in tests, and the standard tests that Deep Agents' newer releases no longer agree with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult

#: Where the standard tests disagree with Deep Agents 0.7.32, whatever the sandbox: it writes over a file that exists, and what it
#: globs are whole paths, of files alone.
OF_ANOTHER_MIND = {
    "test_write_existing_file_fails",
    "test_glob",
    "test_glob_basic_pattern",
    "test_glob_hidden_files_explicitly",
    "test_glob_with_character_class",
    "test_glob_with_directories",
    "test_glob_with_question_mark",
}

#: What the documents ask an agent for: a script that says hello, and a run of it.
HELLO = [
    {"name": "write_file", "args": {"file_path": "/tmp/hello.py", "content": "print('Hello, World!')\n"}},
    {"name": "execute", "args": {"command": "python3 /tmp/hello.py"}},
]


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
            message = AIMessage(content=str(messages[-1].content))
        return ChatResult(generations=[ChatGeneration(message=message)])
