"""Snapshots of sandboxes. ``AsyncSandbox`` takes them."""

from __future__ import annotations

from .._core import decoded, in_path, query
from ..models import Difference, FamilyMember, Snapshot
from .transport import AsyncTransport


class SnapshotCalls:
    """Snapshots on one daemon."""

    _transport: AsyncTransport

    async def get_snapshot(self, snapshot: str) -> Snapshot:
        """Returns a snapshot, by its id or name."""
        answer = await self._transport.call("GET", f"/snapshots/{in_path(snapshot)}")
        found: Snapshot = decoded(Snapshot, answer.json())
        return found

    async def list_snapshots(self) -> list[Snapshot]:
        """Lists the snapshots of the key's owner, newest first."""
        answer = await self._transport.call("GET", "/snapshots")
        return [decoded(Snapshot, entry) for entry in answer.json()["snapshots"]]

    async def delete_snapshot(self, snapshot: str) -> None:
        """Deletes a snapshot, by its id or name. Its files stay as long as a sandbox or another snapshot needs them."""
        await self._transport.call("DELETE", f"/snapshots/{in_path(snapshot)}")

    async def tree(self) -> list[FamilyMember]:
        """Lists all sandboxes that were forked or have children, oldest first."""
        answer = await self._transport.call("GET", "/tree")
        return [decoded(FamilyMember, entry) for entry in answer.json()["members"]]

    async def diff(self, a: str, b: str, *, content: bool = False) -> list[Difference]:
        """Compares the files of two sandboxes or snapshots, by id or name. At most 100,000 differences are listed.

        Args:
            a: A sandbox or a snapshot.
            b: Another one, over the same image.
            content: Whether to include the contents of text files of at most 256 KiB.
        """
        answer = await self._transport.call("GET", query("/diff", {"a": a, "b": b, "content": content}))
        return [decoded(Difference, entry) for entry in answer.json()["entries"]]
