"""Lets the server that `dcode` starts make blocking calls, as `langgraph dev --allow-blocking` does.

Sandbox0's provider is synchronous, and the release of Deep Agents Code that it is pinned to calls it where the server refuses
blocking calls, whatever they are for. There is no variable that allows them.
"""

from __future__ import annotations

import blockbuster


def activate(self: blockbuster.BlockBuster) -> None:
    """Watches nothing."""


blockbuster.BlockBuster.activate = activate
