# Generated from _async/snapshots.py by generate_sync.py. Do not edit: change that file and run the program again.
"""Snapshots of sandboxes. ``Sandbox`` takes them."""

from __future__ import annotations

from .._core import decoded, in_path, query
from ..models import Difference, FamilyMember, Snapshot
from .transport import Transport


class SnapshotCalls:
    """Snapshots on one daemon."""

    _transport: Transport

    def get_snapshot(self, snapshot: str) -> Snapshot:
        """Returns a snapshot, by its id or name."""
        answer = self._transport.call("GET", f"/snapshots/{in_path(snapshot)}")
        found: Snapshot = decoded(Snapshot, answer.json())
        return found

    def list_snapshots(self) -> list[Snapshot]:
        """Lists the snapshots of the key's owner, newest first."""
        answer = self._transport.call("GET", "/snapshots")
        return [decoded(Snapshot, entry) for entry in answer.json()["snapshots"]]

    def delete_snapshot(self, snapshot: str) -> None:
        """Deletes a snapshot, by its id or name. Its files stay as long as a sandbox or another snapshot needs them."""
        self._transport.call("DELETE", f"/snapshots/{in_path(snapshot)}")

    def tree(self) -> list[FamilyMember]:
        """Lists all sandboxes that were forked or have children, oldest first."""
        answer = self._transport.call("GET", "/tree")
        return [decoded(FamilyMember, entry) for entry in answer.json()["members"]]

    def diff(self, a: str, b: str, *, content: bool = False) -> list[Difference]:
        """Compares the files of two sandboxes or snapshots, by id or name. At most 100,000 differences are listed.

        Args:
            a: A sandbox or a snapshot.
            b: Another one, over the same image.
            content: Whether to include the contents of text files of at most 256 KiB.
        """
        answer = self._transport.call("GET", query("/diff", {"a": a, "b": b, "content": content}))
        return [decoded(Difference, entry) for entry in answer.json()["entries"]]
