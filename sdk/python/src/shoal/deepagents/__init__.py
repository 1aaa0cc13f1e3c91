"""Shoal for LangChain Deep Agents: a backend for agents, and a provider for Deep Agents Code.

``ShoalSandbox`` needs the package ``deepagents``, ``ShoalProvider`` also ``deepagents-code``; each is imported when it is
first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from .backend import ShoalSandbox
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "deepagents":
        raise
    message = "`shoal.deepagents` needs the package `deepagents`: install Shoal with its extra, `shoal[deepagents]`"
    raise ModuleNotFoundError(message, name=error.name) from error

if TYPE_CHECKING:
    from .provider import ShoalProvider

__all__ = ["ShoalProvider", "ShoalSandbox"]


def __getattr__(name: str) -> Any:
    if name == "ShoalProvider":
        from .provider import ShoalProvider

        return ShoalProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
