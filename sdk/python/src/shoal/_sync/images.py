# Generated from _async/images.py by generate_sync.py. Do not edit: change that file and run the program again.
"""Images: pull, import, aliases, and removal of unused ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import IO, Any

from .._core import PULL_SECONDS_MAX, decoded, in_path, late, query, refused
from ..errors import AnswerTimeoutError
from ..models import CollectedImages, Image, ImageAlias, LayerProgress
from .files import pieces
from .transport import Events, Transport

OnProgress = Callable[[list[LayerProgress]], Any]


class ImageCalls:
    """Images on one daemon."""

    _transport: Transport

    def pull_image(
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
        """Pulls an image from its registry, even if the daemon has one of that name, because the tag may have moved.

        Simultaneous pulls of one image share the transfer, so calling again after a broken connection loses nothing.

        Args:
            reference: Such as ``python:3.12`` or ``registry.local:5000/team/app:1``.
            username: For the registry; an image that is pulled this way is visible only to this key's owner.
            password: With ``username``.
            platform: Such as ``linux/arm64``; that of the daemon's machine by default.
            insecure: Use plain HTTP; needs a key with admin rights.
            on_progress: Called with all layers, the lowest first, whenever one of them progresses.
            timeout: How many seconds to wait. After that the pull continues in the background.

        Raises:
            ResourceNotFoundError: The registry has no such image.
            ResourceCreationError: The pull failed; ``error_type`` is ``ImagePull``, and ``code`` says why.
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
            pull = EventsOfImage(self._transport, "/images/pull", body)
            (pulled,) = pull.images(on_progress, timeout)
            return pulled
        try:
            answer = self._transport.call(
                "POST", "/images/pull", json=body, read_seconds=timeout, patience_seconds=0
            )
        except AnswerTimeoutError as error:
            raise late("image", reference, timeout) from error
        image: Image = decoded(Image, answer.json())
        return image

    def import_image(self, file: IO[bytes], *, name: str | None = None, format: str | None = None) -> list[Image]:
        """Imports the images of an OCI or Docker archive, or a root file system as a tar stream, compressed or not.

        Args:
            file: The archive, open for reading bytes.
            name: The name of the image; required if the archive does not name it.
            format: ``oci``, ``docker`` or ``rootfs``; detected by default.
        """
        answer = self._transport.call(
            "POST",
            query("/images/import", {"name": name, "format": format}),
            content=pieces(file),
            headers={"Content-Type": "application/octet-stream"},
            repeat=False,
            read_seconds=None,
        )
        return [decoded(Image, entry) for entry in answer.json()["images"]]

    def list_images(self) -> list[Image]:
        """Lists the images that this key's owner may use, newest first, without ``host``."""
        answer = self._transport.call("GET", "/images")
        return [decoded(Image, entry) for entry in answer.json()["images"]]

    def get_image(self, name: str) -> Image:
        """Returns an image, by name or digest."""
        image: Image = decoded(Image, (self._transport.call("GET", f"/images/{in_path(name)}")).json())
        return image

    def delete_image(self, name: str, *, force: bool = False) -> CollectedImages:
        """Removes a name of an image, or all its names if given a digest, and then what is no longer used.

        Raises:
            ResourceInUseError: Sandboxes or templates use it. With ``force``, sandboxes keep running, and their layers
                are removed after them.
        """
        answer = self._transport.call("DELETE", query(f"/images/{in_path(name)}", {"force": force or None}))
        # An earlier try may have done it, and its answer was lost.
        said = answer.json() if answer.content else {"images": 0, "layers": 0, "bytes": 0}
        collected: CollectedImages = decoded(CollectedImages, said)
        return collected

    def collect_images(self) -> CollectedImages:
        """Removes images without a name or a sandbox, and layers without an image.

        >>> (client.collect_images()).images
        0
        """
        answer = self._transport.call("POST", "/images/gc")
        collected: CollectedImages = decoded(CollectedImages, answer.json())
        return collected

    def set_image_alias(self, name: str, target: str) -> ImageAlias:
        """Makes ``name`` stand for ``target``: a reference, or ``host``. Existing sandboxes do not change.

        >>> (client.set_image_alias("python:3", "host")).target
        'host'
        >>> with client.sandbox(image="python:3") as sb:
        ...     print((sb.run("python3 -c 'print(2 + 2)'")).stdout, end="")
        4
        >>> client.delete_image_alias("python:3")
        """
        answer = self._transport.call("PUT", f"/image-aliases/{in_path(name)}", json={"target": target})
        alias: ImageAlias = decoded(ImageAlias, answer.json())
        return alias

    def list_image_aliases(self) -> list[ImageAlias]:
        """Lists all aliases, sorted by name."""
        answer = self._transport.call("GET", "/image-aliases")
        return [decoded(ImageAlias, entry) for entry in answer.json()["aliases"]]

    def delete_image_alias(self, name: str) -> None:
        """Deletes an alias."""
        self._transport.call("DELETE", f"/image-aliases/{in_path(name)}")


class EventsOfImage(Events):
    """Progress of a pull. Reconnects to the same pull if the connection breaks."""

    def __init__(self, transport: Transport, path: str, body: dict[str, Any]) -> None:
        super().__init__(transport)
        self._path = path
        self._body = body

    def _place(self) -> tuple[str, dict[str, str]]:
        return self._path, {"Accept": "text/event-stream"}

    def images(self, on_progress: OnProgress, timeout: float) -> list[Image]:
        """Returns the images when the pull is complete."""
        deadline = time.monotonic() + timeout
        try:
            while True:
                if time.monotonic() > deadline:
                    raise late("image", str(self._body["reference"]), timeout)
                _, said = self._next()
                if said["type"] == "progress":
                    on_progress([decoded(LayerProgress, layer) for layer in said["layers"]])
                elif said["type"] == "done":
                    return [decoded(Image, entry) for entry in said["images"]]
                elif said["type"] == "failed":
                    details = said.get("details")
                    raise refused(said["code"], said["message"], said.get("hint"), details, None, "image")
        finally:
            self.close()
