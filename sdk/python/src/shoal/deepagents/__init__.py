"""Shoal for LangChain Deep Agents: a backend for agents, and a provider for Deep Agents Code.

``ShoalSandbox`` needs the package ``deepagents``, ``ShoalProvider`` also ``deepagents-code``; each is imported when it is
first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .backend import ShoalSandbox

if TYPE_CHECKING:
    from .provider import ShoalProvider

__all__ = ["ShoalProvider", "ShoalSandbox"]


def __getattr__(name: str) -> Any:
    if name == "ShoalProvider":
        from .provider import ShoalProvider

        return ShoalProvider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
