# Generated from _async/transport.py by generate_sync.py. Do not edit: change that file and run the program again.
"""Requests and event streams, across reconnects.

A call is repeated only if that cannot do anything twice, and only to a daemon that has answered before: one that was
never there will not come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import httpx

from .. import _seam
from .._core import (
    CONNECT_SECONDS_MAX,
    PATIENCE_SECONDS,
    SILENCE_SECONDS_MAX,
    Patience,
    SseParser,
    refusal,
)
from .._find import Endpoint
from ..errors import AnswerTimeoutError, SandboxClientError, SandboxConnectionError, SandboxServerReloadError

#: As many as there are streams and calls at once: a bound would make a call wait for ever behind streams that are open.
CONNECTIONS = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=5.0)

Body = bytes | Iterable[bytes]


class Transport:
    """The connections to one daemon."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self.endpoint = endpoint
        self.timeout = timeout
        self.patience_seconds = PATIENCE_SECONDS
        self._reached = False
        headers = {"Authorization": f"Bearer {endpoint.key}"}
        # Proxies of the environment are for the way out, and a daemon is ours; a redirect would carry the key away.
        self._http = httpx.Client(
            headers=headers, trust_env=False, timeout=self._times(timeout), limits=CONNECTIONS
        )

    def _times(self, read: float | None) -> httpx.Timeout:
        return httpx.Timeout(read, connect=CONNECT_SECONDS_MAX, pool=None)

    def close(self) -> None:
        """Closes all connections, and ends a daemon that was started for this client."""
        self._http.close()
        _seam.offload(self.endpoint.release)

    def call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: Body | None = None,
        headers: Mapping[str, str] | None = None,
        repeat: bool = True,
        read_seconds: float | None = 0.0,
        patience_seconds: float | None = None,
    ) -> httpx.Response:
        """Sends a request and reads the answer. ``repeat`` says whether the request is idempotent.

        ``read_seconds`` of 0 means the client's own timeout; ``None`` means no timeout.
        """
        patience = Patience(self.patience_seconds if patience_seconds is None else patience_seconds)
        times = self._times(self.timeout if read_seconds == 0.0 else read_seconds)
        tries = 0
        while True:
            tries += 1
            try:
                request = self._request(method, path, json=json, content=content, headers=headers, times=times)
                response = self._http.send(request)
                self._reached = True
                if response.is_success:
                    return response
                raise refusal(response.status_code, response.content, self.endpoint.url, path)
            except httpx.TransportError as error:
                failure = self._failure(error)
                cause: Exception | None = error
            except SandboxServerReloadError as error:
                failure, cause = error, None
            except SandboxClientError as error:
                if method == "DELETE" and tries > 1 and error.status_code == 404:
                    # An earlier try did it, and its answer was lost.
                    return httpx.Response(204)
                raise
            if not repeat or not self._may_try_again(patience):
                raise failure from cause

    def forward(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
        read_seconds: float | None = None,
    ) -> httpx.Response:
        """Sends a request to a server in a sandbox, once. Only an answer of the daemon itself is an error."""
        request = self._request(method, path, content=content, headers=headers, times=self._times(read_seconds))
        try:
            response = self._http.send(request)
        except httpx.TransportError as error:
            raise self._failure(error) from error
        self._reached = True
        if "x-shoal-port" in response.headers:
            return response
        raise refusal(response.status_code, response.content, self.endpoint.url, path)

    def _may_try_again(self, patience: Patience) -> bool:
        if not self._reached:
            return False
        pause = patience.next_pause()
        if pause is None:
            return False
        _seam.sleep(pause)
        _seam.offload(self.endpoint.follow)
        return True

    def _request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        content: Body | None = None,
        headers: Mapping[str, str] | None = None,
        times: httpx.Timeout,
    ) -> httpx.Request:
        url = f"{self.endpoint.url}/v1{path}"
        extensions = {"timeout": times.as_dict()}
        return self._http.build_request(method, url, json=json, content=content, headers=headers, extensions=extensions)

    def _failure(self, error: httpx.TransportError) -> SandboxConnectionError:
        url = self.endpoint.url
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return SandboxConnectionError(
                f"cannot reach the daemon at {url}: {error or 'no answer in time'}",
                hint="is the daemon running? `shoal serve` starts one",
            )
        if isinstance(error, httpx.UnsupportedProtocol | httpx.ProxyError):
            return SandboxConnectionError(
                f"`{url}` is not the URL of a daemon", hint="give it as http://127.0.0.1:7878"
            )
        if isinstance(error, httpx.TimeoutException):
            return AnswerTimeoutError(f"the daemon at {url} did not answer in time")
        return SandboxConnectionError(f"the connection to the daemon at {url} broke: {error or type(error).__name__}")

    def open(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, silence: float | None = None
    ) -> httpx.Response:
        """Returns an answer before its body is read. The caller closes it. ``silence`` replaces the client's timeout."""
        patience = Patience(self.patience_seconds)
        while True:
            try:
                return self._open_once(method, path, headers, self.timeout if silence is None else silence)
            except httpx.TransportError as error:
                failure = self._failure(error)
                cause: Exception | None = error
            except SandboxServerReloadError as error:
                failure, cause = error, None
            if not self._may_try_again(patience):
                raise failure from cause

    def _open_once(
        self, method: str, path: str, headers: Mapping[str, str] | None, silence: float, *, json: Any = None
    ) -> httpx.Response:
        request = self._request(method, path, json=json, headers=headers, times=self._times(silence))
        response = self._http.send(request, stream=True)
        self._reached = True
        if response.is_success:
            return response
        try:
            body = response.read()
        finally:
            response.close()
        raise refusal(response.status_code, body, self.endpoint.url, path)

    def broken(self, error: httpx.TransportError) -> SandboxConnectionError:
        """The exception for a failure in the middle of a body."""
        return self._failure(error)


class Events:
    """Server-sent events of one kind. Reconnects if the connection breaks.

    Subclasses say where to continue, and what an event means. Most use GET; those with a body use POST, which must be
    idempotent.
    """

    _body: Any = None

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._patience = Patience(transport.patience_seconds)
        self._response: httpx.Response | None = None
        self._events: Iterator[tuple[str | None, Any]] | None = None

    def _place(self) -> tuple[str, dict[str, str]]:
        """The path and headers that continue after the last event."""
        raise NotImplementedError

    def _connected(self) -> None:
        """A new connection was opened."""

    def _next(self) -> tuple[str | None, Any]:
        """Returns the next event with its id, and reconnects if needed."""
        while True:
            try:
                if self._events is None:
                    path, headers = self._place()
                    method = "GET" if self._body is None else "POST"
                    self._response = self._transport._open_once(
                        method, path, headers, SILENCE_SECONDS_MAX, json=self._body
                    )
                    self._events = _events_of(self._response)
                    self._connected()
                event = self._events.__next__()
                self._patience.renew()
                return event
            except StopIteration:
                url = self._transport.endpoint.url
                failure = SandboxConnectionError(f"the daemon at {url} cut a stream, and it could not be continued")
                cause: Exception | None = None
            except httpx.TransportError as error:
                failure, cause = self._transport.broken(error), error
            except SandboxServerReloadError as error:
                failure, cause = error, None
            self.close()
            if not self._transport._may_try_again(self._patience):
                raise failure from cause

    def close(self) -> None:
        """Closes the connection."""
        response, self._response, self._events = self._response, None, None
        if response is not None:
            response.close()


def _events_of(response: httpx.Response) -> Iterator[tuple[str | None, Any]]:
    parser = SseParser()
    for piece in response.iter_raw():
        for event in parser.feed(piece):
            yield event
