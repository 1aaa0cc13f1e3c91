# Generated from _async/snapshots.py by generate_sync.py. Do not edit: change that file and run the program again.
"""Snapshots of sandboxes. ``Sandbox`` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO

import httpx

from .. import _seam
from .._core import FILE_PIECE_BYTES, decoded, in_path, query
from ..models import Difference, FamilyMember, Snapshot
from .files import pieces
from .transport import Transport

#: How long the files of a snapshot may take to be packed.
EXPORT_SECONDS_MAX = 3600.0


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

    def export_snapshot(self, snapshot: str, file: IO[bytes], *, usr: str = "refuse") -> None:
        """Writes all files of a snapshot as one OCI archive, which other tools read.

        Args:
            snapshot: The id or name of the snapshot.
            file: Where the archive goes, open for writing bytes. After an error, what is in it is incomplete.
            usr: ``include`` or ``refuse`` the ``/usr`` of the daemon's machine, which sandboxes over the image ``host`` see.

        Raises:
            ResourceNotFoundError: The snapshot does not exist.
            SandboxClientError: The snapshot is over the image ``host``, and ``usr`` is ``refuse``.
        """
        target = query(f"/snapshots/{in_path(snapshot)}/export", {"usr": usr})
        # All files are packed before the first byte comes.
        response = self._transport.open("GET", target, silence=EXPORT_SECONDS_MAX)
        try:
            for piece in response.iter_raw(FILE_PIECE_BYTES):
                _seam.offload(file.write, piece)
        except httpx.TransportError as error:
            raise self._transport.broken(error) from error
        finally:
            response.close()

    def import_snapshot(self, file: IO[bytes], name: str, *, labels: Mapping[str, str] | None = None) -> Snapshot:
        """Makes a snapshot of an OCI archive with one image: an exported snapshot, or what another tool has saved.

        Args:
            file: The archive, open for reading bytes, compressed or not.
            name: The name of the snapshot.
            labels: How it can be found.
        """
        pairs = [("label", f"{key}={value}") for key, value in (labels or {}).items()]
        answer = self._transport.call(
            "POST",
            query("/snapshots", [("name", name), *pairs]),
            content=pieces(file),
            headers={"Content-Type": "application/octet-stream"},
            repeat=False,
            read_seconds=None,
        )
        imported: Snapshot = decoded(Snapshot, answer.json())
        return imported

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
