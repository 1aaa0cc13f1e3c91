"""The part of the client that has to do with pools: sandboxes that stand ready before anybody asks."""

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
        """A new pool. Sandboxes of its template are taken from it while some stand ready.

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
            template_name: What its sandboxes are made from. One that mounts volumes is refused.
            replicas: How many should stand ready, 0 to 1000. They count against what the key allows.
            wait_for_ready: Whether to wait until they do; if not, ``wait_for_pool`` does.
            timeout: How many seconds that wait may take. The pool goes on filling after that.

        Raises:
            ResourceAlreadyExistsError: The name is taken.
            ResourceNotFoundError: There is no such template.
            ValidationError: The template mounts volumes, or there cannot be so many.
            QuotaExceededError: A limit of the api key is reached.
            ResourceCreationError: Its sandboxes cannot be made. The pool is there, and tries again.
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
        """Waits until as many sandboxes stand ready in a pool as should.

        Raises:
            ResourceCreationError: They cannot be made; the pool tries again by itself.
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
                    hint="mend that, and the pool fills by itself",
                )
            if time.monotonic() >= deadline:
                raise late("pool", name, timeout, pool.state)

    async def get_pool(self, name: str) -> Pool:
        """A pool, with what waits in it."""
        answer = await self._transport.call("GET", f"/pools/{in_path(name)}")
        pool: Pool = decoded(Pool, answer.json())
        return pool

    async def list_pools(self) -> list[Pool]:
        """The pools of the key's owner, by name."""
        answer = await self._transport.call("GET", "/pools")
        return [decoded(Pool, entry) for entry in answer.json()["pools"]]

    async def update_pool(self, name: str, *, new_name: str | None = None, replicas: int | None = None) -> Pool:
        """Gives a pool another name, or another number of sandboxes that stand ready. It fills behind the scenes.

        Raises:
            ResourceNotFoundError: There is no such pool.
            ResourceNameConflictError: The new name is taken.
            QuotaExceededError: A limit of the api key is reached.
        """
        body = {key: value for key, value in (("name", new_name), ("replicas", replicas)) if value is not None}
        # With a new name, a second try would not find the old one.
        answer = await self._transport.call("PATCH", f"/pools/{in_path(name)}", json=body, repeat=new_name is None)
        pool: Pool = decoded(Pool, answer.json())
        return pool

    async def delete_pool(self, name: str) -> None:
        """Deletes a pool with the sandboxes that wait in it. Those that were claimed stay."""
        await self._transport.call("DELETE", f"/pools/{in_path(name)}")
