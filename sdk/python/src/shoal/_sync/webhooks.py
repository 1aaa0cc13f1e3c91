# Generated from _async/webhooks.py by generate_sync.py. Do not edit: change that file and run the program again.
"""Webhooks: addresses that are sent what happens."""

from __future__ import annotations

from collections.abc import Sequence

from .._core import decoded, in_path
from ..models import DeadLetter, Webhook, WebhookTest
from .transport import Transport


class WebhookCalls:
    """Webhooks on one daemon."""

    _transport: Transport

    def create_webhook(self, url: str, *, events: Sequence[str] = ()) -> Webhook:
        """Sends every event from now on to an address, as a signed request.

        The answer has the ``secret`` that requests are signed with, which is shown only once. Signatures are those of the
        Standard Webhooks specification.

        Args:
            url: Where to. Only a key with admin rights may name an address that is not on the public internet.
            events: The types of events to send, such as ``sandbox`` or ``command_ended``; all by default.
        """
        body = {"url": url, "events": list(events)}
        # Sent once: a second try would make two.
        answer = self._transport.call("POST", "/webhooks", json=body, repeat=False)
        made: Webhook = decoded(Webhook, answer.json())
        return made

    def list_webhooks(self) -> list[Webhook]:
        """Lists the webhooks of the key's owner, oldest first."""
        answer = self._transport.call("GET", "/webhooks")
        return [decoded(Webhook, entry) for entry in answer.json()["webhooks"]]

    def delete_webhook(self, webhook_id: str) -> None:
        """Deletes a webhook. Nothing more is sent to it."""
        self._transport.call("DELETE", f"/webhooks/{in_path(webhook_id)}")

    def test_webhook(self, webhook_id: str) -> WebhookTest:
        """Sends a webhook a test, once, and returns what came of it."""
        answer = self._transport.call("POST", f"/webhooks/{in_path(webhook_id)}/test", repeat=False)
        test: WebhookTest = decoded(WebhookTest, answer.json())
        return test

    def dead_letters(self, webhook_id: str) -> list[DeadLetter]:
        """Lists the events that a webhook could not deliver, oldest first."""
        answer = self._transport.call("GET", f"/webhooks/{in_path(webhook_id)}/dead-letters")
        return [decoded(DeadLetter, entry) for entry in answer.json()["dead_letters"]]
