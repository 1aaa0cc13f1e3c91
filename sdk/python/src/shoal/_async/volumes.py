"""Volumes: storage that outlives sandboxes."""

from __future__ import annotations

import os
from pathlib import Path

import httpx

from .. import _archive, _seam
from .._core import FILE_PIECE_BYTES, decoded, in_path, query
from ..models import FilesMade, Volume
from .files import pieces
from .transport import AsyncTransport

#: How long a volume may take to be made, a copy of a large one included.
CREATE_SECONDS_MAX = 60.0


class VolumeCalls:
    """Volumes on one daemon."""

    _transport: AsyncTransport

    async def create_volume(
        self, name: str, size: str, *, copy_of: str | None = None, timeout: float = CREATE_SECONDS_MAX
    ) -> Volume:
        """Creates a volume: empty, or as a copy of another.

        >>> volume = await client.create_volume("my-data", "16Mi")
        >>> mounts = [VolumeMountSpec(volume_name="my-data", mount_path="/data")]
        >>> async with await client.sandbox(volume_mounts=mounts) as sb:
        ...     await sb.write("/data/state.txt", "persistent data")
        >>> async with await client.sandbox(volume_mounts=mounts) as sb:
        ...     await sb.read("/data/state.txt")
        b'persistent data'
        >>> await client.delete_volume("my-data")

        Args:
            name: Up to 255 bytes without ``/`` and ``:``, unique among the owner's volumes.
            size: The size limit, such as ``"1Gi"``.
            copy_of: The volume to copy. The two share their data until one of them changes.
            timeout: How many seconds to wait.

        Raises:
            ResourceNameConflictError: The name is taken.
            ValidationError: The size is not valid, or smaller than the contents to copy.
            ResourceCreationError: There is not enough space, or the daemon's store cannot copy.
        """
        body = {"name": name, "size": size, **({} if copy_of is None else {"from": copy_of})}
        # Sent once: after a lost answer, a second try would be told that the name is taken, by the first.
        answer = await self._transport.call("POST", "/volumes", json=body, repeat=False, read_seconds=timeout)
        volume: Volume = decoded(Volume, answer.json())
        return volume

    async def get_volume(self, name: str) -> Volume:
        """Returns a volume, with its use and the sandboxes that mount it."""
        answer = await self._transport.call("GET", f"/volumes/{in_path(name)}")
        volume: Volume = decoded(Volume, answer.json())
        return volume

    async def list_volumes(self) -> list[Volume]:
        """Lists the volumes of the key's owner, sorted by name."""
        answer = await self._transport.call("GET", "/volumes")
        return [decoded(Volume, entry) for entry in answer.json()["volumes"]]

    async def update_volume(self, name: str, *, new_name: str | None = None, size: str | None = None) -> Volume:
        """Changes the name or size of a volume, even while sandboxes mount it.

        >>> volume = await client.create_volume("grown", "16Mi")
        >>> (await client.update_volume("grown", size="32Mi")).size
        '32Mi'
        >>> await client.delete_volume("grown")

        Raises:
            ResourceNotFoundError: The volume does not exist.
            ResourceNameConflictError: The new name is taken.
            ValidationError: Its contents do not fit into the new size; ``error_type`` is ``VolumeResize``.
        """
        body = {key: value for key, value in (("name", new_name), ("size", size)) if value is not None}
        # With a new name, a second try would not find the old one.
        answer = await self._transport.call("PATCH", f"/volumes/{in_path(name)}", json=body, repeat=new_name is None)
        volume: Volume = decoded(Volume, answer.json())
        return volume

    async def delete_volume(self, name: str) -> None:
        """Deletes a volume and all its files.

        Raises:
            ResourceNotFoundError: The volume does not exist.
            ResourceInUseError: Sandboxes mount it.
        """
        await self._transport.call("DELETE", f"/volumes/{in_path(name)}")

    async def upload_to_volume(self, name: str, local: str | os.PathLike[str], path: str = "/") -> FilesMade:
        """Copies the contents of a local directory into a directory of a volume, and creates that if needed."""
        with await _seam.aoffload(_archive.pack, Path(local)) as file:
            answer = await self._transport.call(
                "PUT",
                query(f"/volumes/{in_path(name)}/tar", {"path": path}),
                content=pieces(file),
                headers={"Content-Type": "application/x-tar"},
                repeat=False,
                read_seconds=None,
            )
        made: FilesMade = decoded(FilesMade, answer.json())
        return made

    async def download_from_volume(self, name: str, local: str | os.PathLike[str], path: str = "/") -> None:
        """Copies a directory of a volume to this machine, to ``local``, as ``files.download`` of a sandbox does."""
        with _archive.spool() as file:
            response = await self._transport.open("GET", query(f"/volumes/{in_path(name)}/tar", {"path": path}))
            try:
                async for piece in response.aiter_raw(FILE_PIECE_BYTES):
                    await _seam.aoffload(file.write, piece)
            except httpx.TransportError as error:
                raise self._transport.broken(error) from error
            finally:
                await response.aclose()
            await _seam.aoffload(_archive.unpack, file, Path(local))
