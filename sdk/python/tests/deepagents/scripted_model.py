"""A chat model that says what it was told to, in order: no network, no chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult

BROKEN = "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 3)\n\n\nprint(fib(10))\nassert fib(10) == 55\n"
#: Writes a program, runs it, sees it fail, finds the mistake, mends it, runs it again, keeps what it printed.
SESSION: list[tuple[str, dict[str, Any]]] = [
    ("write_file", {"file_path": "/workspace/src/fib.py", "content": BROKEN}),
    ("execute", {"command": "cd src && python3 fib.py"}),
    ("grep", {"pattern": "n - 3", "path": "/workspace"}),
    ("edit_file", {"file_path": "/workspace/src/fib.py", "old_string": "n - 3", "new_string": "n - 2"}),
    ("read_file", {"file_path": "/workspace/src/fib.py"}),
    ("execute", {"command": "cd src && python3 fib.py > ../answer.txt && cat ../answer.txt"}),
    ("ls", {"path": "/workspace"}),
    ("glob", {"pattern": "**/*.py", "path": "/workspace"}),
]


class ScriptedModel(BaseChatModel):
    """Calls the next tool of a session, by how often it has spoken already; then says that it is done."""

    #: Named by whoever makes it from a configuration.
    model: str = "session"
    steps: list[tuple[str, dict[str, Any]]] = SESSION

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **_: Any) -> ScriptedModel:
        """The tools are known to the session."""
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **_: Any,
    ) -> ChatResult:
        said = sum(isinstance(message, AIMessage) for message in messages)
        if said < len(self.steps):
            name, arguments = self.steps[said]
            calls = [{"name": name, "args": arguments, "id": f"call-{said}", "type": "tool_call"}]
            message = AIMessage(content="", tool_calls=calls)
        else:
            message = AIMessage(content="all is done")
        return ChatResult(generations=[ChatGeneration(message=message)])
