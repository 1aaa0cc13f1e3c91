"""The part of the client that has to do with images: pull, import, names for names, and what nobody uses."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from .._core import PULL_SECONDS_MAX, decoded, in_path, late, query, refused
from ..errors import AnswerTimeoutError
from ..models import CollectedImages, Image, ImageAlias, LayerProgress
from .files import pieces
from .transport import AsyncEvents, AsyncTransport

OnProgress = Callable[[list[LayerProgress]], Any]


class ImageCalls:
    """Images on one daemon."""

    _transport: AsyncTransport

    async def pull_image(
        self,
        reference: str,
        *,
        username: str | None = None,
        password: str | None = None,
        platform: str | None = None,
        insecure: bool = False,
        on_progress: OnProgress | None = None,
        timeout: float = PULL_SECONDS_MAX,
    ) -> Image:
        """Pulls an image from its registry, also when one of that name is there: a tag may mean something else today.

        Whoever asks for an image that is on its way joins, so asking again after a connection broke loses nothing.

        Args:
            reference: Such as ``python:3.12`` or ``registry.local:5000/team/app:1``.
            username: For the registry; what is pulled so is seen by this key's owner alone.
            password: With ``username``.
            platform: Such as ``linux/arm64``; the daemon's machine's if left out.
            insecure: Speak plain HTTP with the registry; needs a key with admin rights.
            on_progress: Called with all layers, the lowest first, whenever one of them is further on.
            timeout: How many seconds it may take. It goes on behind the scenes after that.

        Raises:
            ResourceNotFoundError: The registry has no such image.
            ResourceCreationError: It could not be had; ``error_type`` is ``ImagePull``, and ``code`` says what is wrong.
            ResourceTimeoutError: It took too long.
        """
        wish = {
            "reference": reference,
            "username": username,
            "password": password,
            "platform": platform,
            "insecure": insecure or None,
        }
        body = {key: value for key, value in wish.items() if value is not None}
        if on_progress is not None:
            pull = AsyncEventsOfImage(self._transport, "/images/pull", body)
            (pulled,) = await pull.images(on_progress, timeout)
            return pulled
        try:
            answer = await self._transport.call(
                "POST", "/images/pull", json=body, read_seconds=timeout, patience_seconds=0
            )
        except AnswerTimeoutError as error:
            raise late("image", reference, timeout) from error
        image: Image = decoded(Image, answer.json())
        return image

    async def import_image(self, file: IO[bytes], *, name: str | None = None, format: str | None = None) -> list[Image]:
        """Takes the images of an archive: of OCI or Docker, or a root file system as a tar stream, compressed or not.

        Args:
            file: The archive, open for reading bytes.
            name: What to call the image; needed where the archive does not say.
            format: ``oci``, ``docker`` or ``rootfs``; what it looks like if left out.
        """
        answer = await self._transport.call(
            "POST",
            query("/images/import", {"name": name, "format": format}),
            content=pieces(file),
            headers={"Content-Type": "application/octet-stream"},
            repeat=False,
            read_seconds=None,
        )
        return [decoded(Image, entry) for entry in answer.json()["images"]]

    async def list_images(self) -> list[Image]:
        """The images that this key's owner may use, newest first. ``host`` is not among them."""
        answer = await self._transport.call("GET", "/images")
        return [decoded(Image, entry) for entry in answer.json()["images"]]

    async def get_image(self, name: str) -> Image:
        """An image, by a name or its digest."""
        image: Image = decoded(Image, (await self._transport.call("GET", f"/images/{in_path(name)}")).json())
        return image

    async def delete_image(self, name: str, *, force: bool = False) -> CollectedImages:
        """Takes an image's name away, or all its names when it is named by its digest, and removes what nobody uses.

        Raises:
            ResourceInUseError: Sandboxes or templates use it. With ``force`` sandboxes go on, and what they need is
                removed after them.
        """
        answer = await self._transport.call("DELETE", query(f"/images/{in_path(name)}", {"force": force or None}))
        # An earlier try may have done it, and its answer was lost.
        said = answer.json() if answer.content else {"images": 0, "layers": 0, "bytes": 0}
        collected: CollectedImages = decoded(CollectedImages, said)
        return collected

    async def collect_images(self) -> CollectedImages:
        """Removes images that have neither a name nor a sandbox, and layers without an image.

        >>> (await client.collect_images()).images
        0
        """
        answer = await self._transport.call("POST", "/images/gc")
        collected: CollectedImages = decoded(CollectedImages, answer.json())
        return collected

    async def set_image_alias(self, name: str, target: str) -> ImageAlias:
        """From now on, whoever asks for ``name`` gets ``target``: a reference, or ``host``. Sandboxes that exist stay.

        >>> (await client.set_image_alias("python:3", "host")).target
        'host'
        >>> async with await client.sandbox(image="python:3") as sb:
        ...     print((await sb.run("python3 -c 'print(2 + 2)'")).stdout, end="")
        4
        >>> await client.delete_image_alias("python:3")
        """
        answer = await self._transport.call("PUT", f"/image-aliases/{in_path(name)}", json={"target": target})
        alias: ImageAlias = decoded(ImageAlias, answer.json())
        return alias

    async def list_image_aliases(self) -> list[ImageAlias]:
        """All aliases, by name."""
        answer = await self._transport.call("GET", "/image-aliases")
        return [decoded(ImageAlias, entry) for entry in answer.json()["aliases"]]

    async def delete_image_alias(self, name: str) -> None:
        """Ends an alias."""
        await self._transport.call("DELETE", f"/image-aliases/{in_path(name)}")


class AsyncEventsOfImage(AsyncEvents):
    """What happens while an image is pulled. A connection that breaks is followed by another, which joins."""

    def __init__(self, transport: AsyncTransport, path: str, body: dict[str, Any]) -> None:
        super().__init__(transport)
        self._path = path
        self._body = body

    def _place(self) -> tuple[str, dict[str, str]]:
        return self._path, {"Accept": "text/event-stream"}

    async def images(self, on_progress: OnProgress, timeout: float) -> list[Image]:
        """What has come, when all of it is there."""
        deadline = time.monotonic() + timeout
        try:
            while True:
                if time.monotonic() > deadline:
                    raise late("image", str(self._body["reference"]), timeout)
                _, said = await self._next()
                if said["type"] == "progress":
                    on_progress([decoded(LayerProgress, layer) for layer in said["layers"]])
                elif said["type"] == "done":
                    return [decoded(Image, entry) for entry in said["images"]]
                elif said["type"] == "failed":
                    details = said.get("details")
                    raise refused(said["code"], said["message"], said.get("hint"), details, None, "image")
        finally:
            await self.close()
