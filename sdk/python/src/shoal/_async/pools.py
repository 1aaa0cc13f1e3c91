"""Pools: sandboxes that are ready before anyone asks."""

from __future__ import annotations

import math
import time

from .._core import ANSWER_GRACE_SECONDS, decoded, in_path, late, query
from ..errors import ResourceAlreadyExistsError, ResourceCreationError, ResourceNameConflictError
from ..models import Pool
from .transport import AsyncTransport

#: How long one request waits for a pool; the daemon takes up to 300.
WAIT_PIECE_SECONDS = 30
#: How long a pool may take to fill, where it is waited for.
FILL_SECONDS_MAX = 30.0


class PoolCalls:
    """Pools on one daemon."""

    _transport: AsyncTransport

    async def create_pool(
        self,
        name: str,
        template_name: str,
        replicas: int,
        *,
        wait_for_ready: bool = True,
        timeout: float = FILL_SECONDS_MAX,
    ) -> Pool:
        """Creates a pool. Creates with its template claim from it while sandboxes are ready.

        >>> template = await client.create_template("fast-python")
        >>> pool = await client.create_pool(name="python-pool", template_name="fast-python", replicas=2)
        >>> pool.ready, pool.state
        (2, 'ready')
        >>> async with await client.sandbox(template_name="fast-python") as sb:
        ...     print(sb.info.claimed_from)
        python-pool
        >>> (await client.update_pool("python-pool", replicas=3)).replicas
        3
        >>> await client.delete_pool("python-pool")
        >>> await client.delete_template("fast-python")

        Args:
            name: Free text up to 255 bytes, unique among the owner's pools.
            template_name: The template of its sandboxes; it must not mount volumes.
            replicas: How many sandboxes to keep ready, 0 to 1000. They count against the key's limits.
            wait_for_ready: Whether to wait until they are ready; otherwise use ``wait_for_pool``.
            timeout: How many seconds to wait. The pool continues to fill after that.

        Raises:
            ResourceAlreadyExistsError: The name is taken.
            ResourceNotFoundError: The template does not exist.
            ValidationError: The template mounts volumes, or ``replicas`` is out of range.
            QuotaExceededError: A limit of the API key is reached.
            ResourceCreationError: Its sandboxes cannot be created. The pool exists, and retries.
            ResourceTimeoutError: It took too long to fill.
        """
        body = {"name": name, "template": template_name, "replicas": replicas}
        try:
            # Sent once: after a lost answer, a second try would be told that the name is taken, by the first.
            answer = await self._transport.call("POST", "/pools", json=body, repeat=False)
        except ResourceNameConflictError as error:
            raise ResourceAlreadyExistsError(
                error.message,
                resource_type="pool",
                hint=error.hint,
                code=error.code,
                status_code=error.status_code,
                details=error.details,
            ) from error
        pool: Pool = decoded(Pool, answer.json())
        return await self.wait_for_pool(name, timeout=timeout) if wait_for_ready else pool

    async def wait_for_pool(self, name: str, *, timeout: float = FILL_SECONDS_MAX) -> Pool:
        """Waits until all replicas of a pool are ready.

        Raises:
            ResourceCreationError: They cannot be created; the pool retries by itself.
            ResourceTimeoutError: It took too long.
        """
        deadline = time.monotonic() + timeout
        while True:
            # Rounded up: a wait of no seconds would ask again and again until the deadline.
            left = max(0, min(math.ceil(deadline - time.monotonic()), WAIT_PIECE_SECONDS))
            answer = await self._transport.call(
                "GET",
                query(f"/pools/{in_path(name)}", {"wait_seconds": left}),
                read_seconds=left + ANSWER_GRACE_SECONDS,
            )
            pool: Pool = decoded(Pool, answer.json())
            if pool.state == "ready":
                return pool
            if pool.state == "failing":
                raise ResourceCreationError(
                    f"the sandboxes of pool `{name}` cannot be made: {pool.reason}",
                    resource_type="pool",
                    hint="fix the cause, and the pool fills by itself",
                )
            if time.monotonic() >= deadline:
                raise late("pool", name, timeout, pool.state)

    async def get_pool(self, name: str) -> Pool:
        """Returns a pool, with its waiting sandboxes."""
        answer = await self._transport.call("GET", f"/pools/{in_path(name)}")
        pool: Pool = decoded(Pool, answer.json())
        return pool

    async def list_pools(self) -> list[Pool]:
        """Lists the pools of the key's owner, sorted by name."""
        answer = await self._transport.call("GET", "/pools")
        return [decoded(Pool, entry) for entry in answer.json()["pools"]]

    async def update_pool(self, name: str, *, new_name: str | None = None, replicas: int | None = None) -> Pool:
        """Changes the name or the number of ready sandboxes of a pool. It fills in the background.

        Raises:
            ResourceNotFoundError: The pool does not exist.
            ResourceNameConflictError: The new name is taken.
            QuotaExceededError: A limit of the API key is reached.
        """
        body = {key: value for key, value in (("name", new_name), ("replicas", replicas)) if value is not None}
        # With a new name, a second try would not find the old one.
        answer = await self._transport.call("PATCH", f"/pools/{in_path(name)}", json=body, repeat=new_name is None)
        pool: Pool = decoded(Pool, answer.json())
        return pool

    async def delete_pool(self, name: str) -> None:
        """Deletes a pool and its waiting sandboxes. Claimed sandboxes stay."""
        await self._transport.call("DELETE", f"/pools/{in_path(name)}")
