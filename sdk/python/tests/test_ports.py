"""Ports: servers in sandboxes, and links to them."""

from __future__ import annotations

import httpx
import pytest

from shoal import AsyncSandboxClient, ResourceNotFoundError, SandboxClient, SandboxClientError, ValidationError

#: Listens on loopback only, and answers with what it was asked.
SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        length = int(self.headers.get("content-length") or 0)
        body = f"{self.command} {self.path} ".encode() + self.rfile.read(length)
        self.send_response(418 if self.path == "/teapot" else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_asked(client: SandboxClient) -> None:
    with client.sandbox() as sb:
        sb.write("/tmp/server.py", SERVER)
        sb.run("exec python3 /tmp/server.py", wait=False)
        port = sb.wait_for_port(8000, timeout=60)
        assert (port.port, port.addresses, port.reachable) == (8000, ["127.0.0.1"], True)
        assert port.process is not None and port.process.name == "python3"
        assert [found.port for found in sb.ports()] == [8000]
        assert sb.request(8000, "/a?b=1").text == "GET /a?b=1 "
        assert sb.request(8000, "/x", method="POST", content=b"hello").text == "POST /x hello"
        assert sb.request(8000, "/teapot").status_code == 418, "the server's own answers are no errors"
        with pytest.raises(SandboxClientError) as closed:
            sb.request(9, "/")
        assert (closed.value.code, closed.value.status_code) == ("port_closed", 502)
        with pytest.raises(SandboxClientError) as late:
            sb.wait_for_port(9, timeout=0.05)
        assert late.value.code == "port_closed"


def test_a_link_opens_a_port_until_it_is_revoked(client: SandboxClient) -> None:
    with client.sandbox() as sb:
        sb.write("/tmp/server.py", SERVER)
        sb.run("exec python3 /tmp/server.py", wait=False)
        sb.wait_for_port(8000, timeout=60)
        link = sb.create_link(8000, ttl_seconds=600, methods=["GET"], label="a test")
        assert link.token is not None and link.token in link.url and link.token not in repr(link)
        assert [(found.id, found.label, found.methods) for found in sb.links()] == [(link.id, "a test", ["GET"])]
        host = httpx.URL(link.url).netloc.decode()
        daemon = sb.dataplane_url.split("/v1/")[0]
        headers = {"Host": host, "X-Shoal-Token": link.token}
        assert httpx.get(f"{daemon}/by-name", headers=headers).text == "GET /by-name "
        sb.revoke_link(link.id)
        assert httpx.get(f"{daemon}/by-name", headers=headers).status_code == 401
        assert sb.links() == []
        with pytest.raises(ResourceNotFoundError):
            sb.revoke_link(link.id)
        with pytest.raises(ValidationError):
            sb.create_link(0)


async def test_a_server_is_asked_async(async_client: AsyncSandboxClient) -> None:
    async with await async_client.sandbox() as sb:
        await sb.write("/tmp/server.py", SERVER)
        await sb.run("exec python3 /tmp/server.py", wait=False)
        await sb.wait_for_port(8000, timeout=60)
        assert (await sb.request(8000, "/a")).text == "GET /a "
