"""Secrets: keys that sandboxes use without holding them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._core import decoded, in_path
from ..models import Secret
from .transport import AsyncTransport


class SecretCalls:
    """Secrets on one daemon."""

    _transport: AsyncTransport

    async def set_secret(
        self,
        name: str,
        value: str,
        *,
        preset: str | None = None,
        rules: Sequence[Mapping[str, Any]] = (),
        variables: Sequence[str] = (),
    ) -> Secret:
        """Keeps a secret, or gives the secret of this name another value. Nothing returns a value.

        Args:
            name: The name for ``inject``. The name of a preset, such as ``github``, gives the secret its rules.
            value: The value, on one line.
            preset: A preset whose rules and variables the secret gets.
            rules: Which requests get it, such as ``{"domain": "api.example.com", "inject": {"type": "bearer"}}``.
            variables: Variables that hold a placeholder inside sandboxes.

        Raises:
            ValidationError: A rule or the value is not valid.
        """
        body: dict[str, Any] = {"value": value}
        if preset is not None:
            body["preset"] = preset
        if rules:
            body["rules"] = [dict(rule) for rule in rules]
        if variables:
            body["variables"] = list(variables)
        answer = await self._transport.call("PUT", f"/secrets/{in_path(name)}", json=body)
        secret: Secret = decoded(Secret, answer.json())
        return secret

    async def list_secrets(self) -> list[Secret]:
        """Lists the secrets of the key's owner, sorted by name, without their values."""
        answer = await self._transport.call("GET", "/secrets")
        return [decoded(Secret, entry) for entry in answer.json()["secrets"]]

    async def delete_secret(self, name: str) -> None:
        """Deletes a secret. No request carries it any more when this returns.

        Raises:
            ResourceNotFoundError: The secret does not exist.
        """
        await self._transport.call("DELETE", f"/secrets/{in_path(name)}")
