"""The newer dialect: snapshots, run configuration, ranges, search, links, SSE. Each as far as the installed version has it."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from dialect import (
    NEWEST,
    SandboxClient,
    a_client,
    a_sandbox,
    an_async_client,
    make,
    modern,
    newest,
    sandbox,
    variables,
)
from harness import ALIAS, Daemon, wait_until

pytestmark = modern

GIB = 1 << 30


def has(function: Any, *names: str) -> bool:
    """Whether this version takes these parameters."""
    return set(names) <= set(inspect.signature(function).parameters)


# Sandboxes.


def test_what_a_sandbox_can_be_made_with(client: Any) -> None:
    if not has(SandboxClient.create_sandbox, "delete_after_stop_seconds"):
        pytest.skip("this version does not say it")
    with client.sandbox(vcpus=1, mem_bytes=GIB // 2, idle_ttl_seconds=120, delete_after_stop_seconds=0) as sb:
        assert (sb.vcpus, sb.mem_bytes) == (1, GIB // 2)
        assert (sb.idle_ttl_seconds, sb.delete_after_stop_seconds) == (120, 0)
        assert sb.stopped_at is None and sb.snapshot_id is None
        changed = client.update_sandbox(sb.name, idle_ttl_seconds=0, delete_after_stop_seconds=600)
        assert (changed.idle_ttl_seconds, changed.delete_after_stop_seconds) == (0, 600)
    with a_sandbox(client) as sb:
        assert (sb.idle_ttl_seconds, sb.delete_after_stop_seconds) == (600, 14 * 86_400), "as the vendor has it"


def test_names_are_open_and_literal_addresses_closed(client: Any) -> None:
    with a_sandbox(client) as sb:
        assert json.loads(sb.read("/run/shoal/network.json"))["mode"] == "names", "as the vendor has it"
        refused = sb.run("exec 3<>/dev/tcp/192.0.2.1/80")
        assert not refused.success and "unreachable" in refused.stderr


def test_lengths_are_whole_minutes(daemon: Daemon) -> None:
    for field in ["idle_ttl_seconds", "delete_after_stop_seconds"]:
        for value in [61, -60]:
            status, body = daemon.answer("POST", "/v2/sandboxes/boxes", {field: value})
            assert status == 422 and body["detail"][0]["loc"][-1] == field


def test_an_idle_sandbox_is_stopped_and_a_stopped_one_deleted(daemon: Daemon, client: Any) -> None:
    lengths = {"idle_ttl_seconds": 60, "delete_after_stop_seconds": 60}
    known = inspect.signature(SandboxClient.create_sandbox).parameters
    given = {name: value for name, value in lengths.items() if name in known}
    with a_sandbox(client, **given) as sb:
        explained = daemon.ask("GET", f"/v1/sandboxes/{sb.id}/explain")
        assert explained["end"]["action"] == "pause_drop_memory", explained
        assert explained["end"]["in_seconds"] <= (60 if "idle_ttl_seconds" in given else 600)
        client.stop_sandbox(sb.name)
        explained = daemon.ask("GET", f"/v1/sandboxes/{sb.id}/explain")
        assert explained["end"]["action"] == "delete", explained
        length = 60 if "delete_after_stop_seconds" in given else 14 * 86_400
        assert explained["end"]["in_seconds"] <= length, explained


def test_a_sandbox_is_stopped_and_started(client: Any) -> None:
    with a_sandbox(client) as sb:
        sb.write("/workspace/kept", "kept")
        assert sb.run("echo lost >/dev/shm/lost; echo tmp >/tmp/kept").success
        for _ in range(2):
            client.stop_sandbox(sb.name)
            stopped = client.get_sandbox(sb.name)
            assert stopped.status == "stopped"
            if hasattr(stopped, "stopped_at"):
                assert stopped.stopped_at is not None
            client.stop_sandbox(sb.name)
            assert client.start_sandbox(sb.name).status == "ready"
            assert client.start_sandbox(sb.name).status == "ready", "it runs already"
            assert sb.run("cat /workspace/kept /tmp/kept; ls /dev/shm").stdout == "kepttmp\n"
        # Commands and files wake it. Clients before 0.9.3 refuse a handle that they believe to be stopped, so this is the old one.
        client.stop_sandbox(sb.name)
        assert sb.run("echo awake").stdout == "awake\n"
        client.stop_sandbox(sb.name)
        assert sb.read("/workspace/kept") == b"kept"
        assert client.get_sandbox_status(sb.name).status == "ready"


@newest
def test_names_may_hold_anything(client: Any) -> None:
    sb = make(client, name="a b/c%d ü")
    try:
        assert client.get_sandbox("a b/c%d ü").id == sb.id
        assert client.get_sandbox_status("a b/c%d ü").status == "ready"
        assert client.update_sandbox("a b/c%d ü").id == sb.id, "nothing to change"
    finally:
        client.delete_sandbox("a b/c%d ü")


def test_starting_a_sandbox_that_runs_changes_nothing(client: Any) -> None:
    with a_sandbox(client) as sb:
        assert client.start_sandbox(sb.name).status == "ready"
        assert sb.run("echo still here").success


SERVER = """
import socket, threading
def serve(port, behave):
    server = socket.create_server(("127.0.0.1", port))
    def loop():
        while True:
            connection, _ = server.accept()
            threading.Thread(target=behave, args=(connection,), daemon=True).start()
    threading.Thread(target=loop).start()
def http(connection):
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += connection.recv(65536)
    body = head.split(b"\\r\\n")[0] + b" " + str(b"service-token" in head.lower()).encode()
    connection.sendall(b"HTTP/1.1 200 OK\\r\\ncontent-length: %d\\r\\n\\r\\n" % len(body) + body)
    connection.close()
def echo(connection):
    while piece := connection.recv(65536):
        connection.sendall(piece)
    connection.close()
serve(3000, http)
serve(3001, echo)
print("ready", flush=True)
"""


@contextmanager
def serving(client: Any) -> Iterator[Any]:
    """A sandbox with a server of HTTP on port 3000, and one that sends everything back on 3001."""
    with a_sandbox(client) as sb:
        sb.write("/tmp/server.py", SERVER)
        sb.run("(python3 /tmp/server.py > /tmp/said &) ; until grep -q ready /tmp/said; do sleep 0.05; done")
        yield sb


def status_of(url: str, headers: dict[str, str]) -> int:
    """The status of a plain request: no client of HTTP comes with every version."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def free_port() -> int:
    """A local port that nothing listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@newest
def test_a_service_is_asked_with_its_token(client: Any) -> None:
    with serving(client) as sb:
        service = sb.service(3000, expires_in_seconds=60)
        assert service.get("/a?b=1").text == "GET /a?b=1 HTTP/1.1 False", "the server does not see the token"
        for token in ("", "wrong", service.token[:-4] + "AAAA"):
            headers = {"X-Langsmith-Sandbox-Service-Token": token}
            assert status_of(service.service_url + "/", headers) == 401
        other = service.service_url.replace("/3000", "/3001")
        headers = {"X-Langsmith-Sandbox-Service-Token": service.token}
        assert status_of(other + "/", headers) == 401, "it opens one port"
        assert ".localhost" in service.browser_url
        short = sb.service(3000, expires_in_seconds=1)
        first = short.token
        assert short.token != first and short.get("/").status_code == 200, "it refreshes itself"


@newest
def test_a_tunnel_carries_connections_side_by_side(client: Any) -> None:
    with serving(client) as sb, sb.tunnel(3001, local_port=free_port()) as tunnel:
        sent = os.urandom(5 << 20)

        def exchange() -> bytes:
            with socket.create_connection(("127.0.0.1", tunnel.local_port), timeout=60) as connection:
                threading.Thread(target=connection.sendall, args=(sent,), daemon=True).start()
                received = b""
                while len(received) < len(sent):
                    received += connection.recv(1 << 16)
                return received

        with ThreadPoolExecutor(2) as both:
            assert [one == sent for one in both.map(lambda _: exchange(), range(2))] == [True, True]
        with sb.tunnel(9, local_port=free_port()) as nothing:
            with socket.create_connection(("127.0.0.1", nothing.local_port), timeout=60) as connection:
                assert connection.recv(1) == b"", "nothing listens there, and that does not hang"


def test_the_generated_client_pages(daemon: Daemon) -> None:
    with a_client(daemon) as client:
        names = [f"page-{number}" for number in range(5)]
        for name in names:
            make(client, name=name)
        try:
            seen: list[str] = []
            cursor = ""
            while True:
                page = daemon.ask("GET", f"/api/v2/sandboxes/boxes?page_size=2&name_contains=PAGE-&cursor={cursor}")
                assert len(page["items"]) <= 2 and page["items"] == page["sandboxes"]
                seen += [box["name"] for box in page["items"]]
                cursor = page["next_cursor"]
                if cursor is None:
                    break
            assert sorted(seen) == names
            assert {box["name"] for box in daemon.ask("GET", "/v2/sandboxes/boxes")["sandboxes"]} >= set(names)
            assert daemon.ask("GET", "/v2/sandboxes/boxes?status=failed")["sandboxes"] == []
            if NEWEST:
                assert set(names) <= set(asyncio.run(generated(daemon)))
        finally:
            for name in names:
                client.delete_sandbox(name)


async def generated(daemon: Daemon) -> list[str]:
    from langsmith import Client

    boxes = Client(api_url=daemon.url, api_key=daemon.key).sandboxes.boxes
    return [box.name async for box in boxes.list(page_size=2)]


def test_a_wrong_field_is_called_as_the_caller_called_it(client: Any) -> None:
    with pytest.raises(sandbox.ValidationError) as error:
        make(client, mem_bytes=1)
    assert error.value.field == "mem_bytes"
    with pytest.raises(sandbox.ValidationError) as error:
        client.create_snapshot(name="no", docker_image="No Image", fs_capacity_bytes=GIB)
    assert error.value.field == "docker_image"


@newest
def test_run_config_has_three_layers(client: Any) -> None:
    config = {"work_dir": "/tmp", "env_vars": {"A": "box", "B": "box"}, "user": "nobody"}
    with client.sandbox(run_config=config) as sb:
        assert sb.run_config.work_dir == "/tmp"
        assert sb.run("echo $A $B $PWD $(id -un)").stdout == "box box /tmp nobody\n"
        result = sb.run("echo $A $B $PWD $(id -un)", run_config={"env_vars": {"B": "own"}, "user": "root"})
        assert result.stdout == "box own /tmp root\n"
        client.update_sandbox(sb.name, run_config={"env_vars": {"A": "new"}, "work_dir": "/var"})
        assert sb.run("echo $A $B $PWD").stdout == "new box /var\n"
    for wrong in [{"work_dir": "relative"}, {"user": ""}]:
        with pytest.raises(sandbox.ValidationError):
            client.create_sandbox(run_config=wrong)


# Commands.


@newest
def test_stdin_is_at_its_end_unless_asked_for(client: Any, sb: Any) -> None:
    assert sb.run("cat; echo over", timeout=60).stdout == "over\n"
    handle = sb.run("cat", timeout=60, wait=False, close_input=False)
    handle.send_input("some\n")
    handle.close_input()
    assert handle.result.stdout == "some\n"


@newest
def test_a_terminal(sb: Any) -> None:
    result = sb.run("test -t 1 && echo terminal; echo merged >&2; stty size", timeout=60, pty=True)
    assert result.stdout.replace("\r\n", "\n") == "terminal\nmerged\n24 80\n" and result.stderr == ""
    handle = sb.run("cat > /tmp/typed", timeout=60, wait=False, pty=True)
    handle.send_input("line\n\x04")
    assert handle.result.exit_code == 0
    assert sb.read("/tmp/typed") == b"line\n"


def test_nobody_attached(daemon: Daemon, client: Any, sb: Any) -> None:
    script = "echo up; until test -e /tmp/never; do sleep 0.05; done"
    if not has(sandbox.Sandbox.run, "kill_on_disconnect", "idle_timeout"):
        pytest.skip("this version does not say it")
    kept, idle, killed = (
        sb.run(script, timeout=0, wait=False, **options)
        for options in [{}, {"idle_timeout": 1}, {"kill_on_disconnect": True}]
    )
    for handle in [kept, idle, killed]:
        next(iter(handle))
        leave(handle)

    def state(handle: Any) -> str:
        return str(daemon.ask("GET", f"/v1/sandboxes/{sb.id}/commands/{handle.command_id}")["state"])

    wait_until(lambda: state(idle) == state(killed) == "ended")
    assert state(kept) == "running", "by default it goes on for minutes"
    assert sb.reconnect(killed.command_id).result.exit_code == 137
    with a_client(daemon) as other:
        other.get_sandbox(sb.name).reconnect(kept.command_id)
    sb.write("/tmp/never", "")


def leave(handle: Any) -> None:
    """Closes the connection of a handle as a client that goes away would."""
    stream = getattr(handle, "_stream", None) or getattr(handle, "_message_stream", None)
    if hasattr(stream, "close"):
        stream.close()
    control = getattr(handle, "_control", None)
    socket = getattr(control, "_ws", None)
    if socket is not None:
        socket.close()


def test_a_finished_command_is_kept_as_long_as_asked(daemon: Daemon, sb: Any) -> None:
    if not has(sandbox.Sandbox.run, "ttl_seconds"):
        pytest.skip("this version does not say it")
    handle = sb.run("echo short", timeout=60, wait=False, ttl_seconds=1)
    assert handle.result.stdout == "short\n"

    def gone() -> bool:
        try:
            _ = sb.reconnect(handle.command_id).result
        except sandbox.SandboxOperationError as error:
            return error.error_type in ("SessionExpired", "CommandNotFound")
        return False

    wait_until(gone)


def test_a_command_id_means_one_command(daemon: Daemon, client: Any, sb: Any) -> None:
    path = sb.dataplane_url.removeprefix(daemon.url)
    body = {"command": "echo again >> /tmp/count; echo ran", "timeout_seconds": 30, "command_id": "0" * 32}
    for _ in range(2):
        assert daemon.ask("POST", path + "/execute", body)["stdout"] == "ran\n"
    assert sb.read("/tmp/count") == b"again\n"


def test_a_bad_key_and_a_missing_sandbox_at_the_socket(daemon: Daemon, sb: Any) -> None:
    from websockets.exceptions import InvalidStatus
    from websockets.sync.client import connect

    url = sb.dataplane_url.replace("http://", "ws://") + "/execute/ws"
    with pytest.raises(InvalidStatus) as error:
        connect(url, additional_headers={"X-Api-Key": "wrong"}, proxy=None)
    assert error.value.response.status_code == 401
    assert "detail" in json.loads(error.value.response.body)
    missing = url.replace(sb.id, "0" * 36)
    with connect(missing, additional_headers={"X-Api-Key": daemon.key}, proxy=None) as socket:
        socket.send(json.dumps({"type": "execute", "command": "true"}))
        answer = json.loads(socket.recv(30))
        assert (answer["type"], answer["error_type"]) == ("error", "SandboxNotFound")
    with connect(url, additional_headers={"x-api-key": daemon.key}, proxy=None) as socket:
        socket.send(json.dumps({"type": "close_stdin"}))
        socket.send(json.dumps({"type": "execute", "command": "cat; echo end", "timeout_seconds": 30}))
        messages = [json.loads(message) for message in socket]
        assert socket.close_code == 1000
    assert [message["type"] for message in messages] == ["started", "stdout", "exit"]
    for first in ["nonsense", json.dumps({"type": "kill"}), json.dumps({"type": "execute"})]:
        with connect(url, additional_headers={"x-api-key": daemon.key}, proxy=None) as socket:
            socket.send(first)
            answer = json.loads(socket.recv(30))
            assert answer["type"] == "error" and answer["error_type"] == "CommandError" and answer["error"]


# Files.


@newest
def test_parts_of_files(sb: Any) -> None:
    sb.write("/data/file", b"0123456789")
    stat = sb.stat("/data/file")
    assert stat.size_bytes == 10 and stat.etag and stat.last_modified
    sb.write("/data/empty", b"")
    assert sb.stat("/data/empty").size_bytes == 0
    part = sb.read_range("/data/file", start=2, end=4)
    assert (part.content, part.partial, part.start, part.total_bytes, part.etag) == (b"234", True, 2, 10, stat.etag)
    assert sb.read_range("/data/file", start=7).content == b"789"
    assert sb.read_range("/data/file", start=7, end=99).content == b"789"
    assert sb.read_range("/data/file", suffix_bytes=3).content == b"789"
    assert sb.read_range("/data/file", start=0, if_none_match=stat.etag).unchanged
    with pytest.raises(sandbox.SandboxOperationError):
        sb.read_range("/data/file", start=10)
    sb.write("/data/file", b"abcdefghijk")
    whole = sb.read_range("/data/file", start=2, if_range=stat.etag)
    assert (whole.content, whole.partial) == (b"abcdefghijk", False)
    assert sb.stat("/data/file").etag != stat.etag
    for act in [sb.stat, lambda path: sb.read_range(path, start=0), lambda path: sb.ls(path)]:
        with pytest.raises(sandbox.ResourceNotFoundError):
            act("/no/such/file")


@newest
def test_searching_files(sb: Any) -> None:
    for path in ["/tree/a.py", "/tree/b.txt", "/tree/sub/c.py", "/tree/.hidden"]:
        sb.write(path, f"first\nneedle in {path}\n")
    assert [entry.path for entry in sb.glob("**/*.py", path="/tree")] == ["/tree/a.py", "/tree/sub/c.py"]
    entries = {entry.path: entry for entry in sb.ls("/tree")}
    assert {"/tree/a.py", "/tree/b.txt", "/tree/sub"} <= set(entries)
    assert entries["/tree/sub"].is_dir and not entries["/tree/a.py"].is_dir
    assert entries["/tree/a.py"].size_bytes > 0 and entries["/tree/a.py"].modified_at
    cut = sb.glob("**/*.py", path="/tree", limit=1)
    assert len(cut) == 1 and cut.truncated
    found = sb.grep("needle", path="/tree", glob="*.py")
    assert [(match.path, match.line) for match in found] == [("/tree/a.py", 2), ("/tree/sub/c.py", 2)]
    assert found.matches[0].text == "needle in /tree/a.py" and not found.truncated
    assert len(sb.grep("needle", path="/tree", limit=2)) == 2
    assert len(sb.grep("need.e", path="/tree")) == 0, "the text is meant as it is"


def test_a_link_needs_no_key(daemon: Daemon, client: Any, sb: Any) -> None:
    if not hasattr(sb, "generate_download_url"):
        pytest.skip("this version has no links")
    sb.write("/out/report.txt", "0123456789")
    link = sb.generate_download_url("/out/report.txt", expires_in_seconds=600, content_disposition="attachment")
    assert link.token and link.expires_at
    status, body, headers = fetch(link.download_url)
    assert (status, body) == (200, b"0123456789") and headers["Content-Disposition"].startswith("attachment")
    status, body, headers = fetch(link.download_url, {"Range": "bytes=2-3"})
    assert (status, body, headers["Content-Range"]) == (206, b"23", "bytes 2-3/10")
    assert fetch(link.download_url, method="HEAD")[2]["Content-Length"] == "10"
    for wrong in [link.download_url[:-2] + "xx", link.download_url.replace("/dl/", "/dl/e")]:
        assert fetch(wrong)[0] == 403
    assert sb.generate_download_url("/out/report.txt").expires_at is None
    short = sb.generate_download_url("/out/report.txt", expires_in_seconds=1)
    wait_until(lambda: fetch(short.download_url)[0] == 403)


def fetch(url: str, headers: dict[str, str] | None = None, method: str = "GET") -> tuple[int, bytes, Any]:
    """Without a key and without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(urllib.request.Request(url, headers=headers or {}, method=method), timeout=60) as response:
            return response.status, response.read(), response.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


# Snapshots.


def test_a_snapshot_of_an_image(daemon: Daemon, client: Any) -> None:
    snapshot = client.create_snapshot(name="from-image", docker_image=ALIAS, fs_capacity_bytes=GIB)
    assert (snapshot.name, snapshot.status, snapshot.docker_image) == ("from-image", "ready", ALIAS)
    assert snapshot.id and snapshot.created_at and snapshot.fs_capacity_bytes == GIB
    try:
        with client.sandbox(snapshot_id=snapshot.id) as sb:
            assert sb.snapshot_id == snapshot.id
            assert sb.run("python --version").success
        if has(SandboxClient.create_sandbox, "snapshot_name"):
            with client.sandbox(snapshot_name="from-image") as sb:
                assert sb.snapshot_id == snapshot.id
        assert client.get_snapshot(snapshot.id).name == "from-image"
        assert snapshot.id in [other.id for other in client.list_snapshots()]
    finally:
        client.delete_snapshot(snapshot.id)
    for act in [client.get_snapshot, client.delete_snapshot]:
        with pytest.raises(sandbox.ResourceNotFoundError) as error:
            act(snapshot.id)
        assert error.value.resource_type == "snapshot"
    with pytest.raises(sandbox.ResourceNotFoundError):
        client.create_sandbox(snapshot_id=snapshot.id)


def test_an_image_that_does_not_come_is_a_failed_snapshot(client: Any) -> None:
    with pytest.raises(sandbox.ResourceCreationError) as error:
        client.create_snapshot(name="no-image", docker_image="127.0.0.1:1/no/such:image", fs_capacity_bytes=GIB)
    assert error.value.resource_type == "snapshot" and "127.0.0.1:1" in str(error.value)
    for snapshot in client.list_snapshots():
        if snapshot.name == "no-image":
            assert snapshot.status == "failed" and snapshot.status_message
            client.delete_snapshot(snapshot.id)


def test_a_sandbox_is_captured_while_it_runs(client: Any) -> None:
    with a_sandbox(client) as sb:
        sb.write("/data/kept.txt", "kept")
        sb.run("mkdir -p /usr/local/captured && echo in-usr > /usr/local/captured/file && rm -f /etc/issue")
        ticking = sb.run("for i in $(seq 1 200); do echo $i; sleep 0.01; done", timeout=60, wait=False)
        snapshot = client.capture_snapshot(sb.name, "captured")
        assert snapshot.status == "ready" and snapshot.source_sandbox_id == sb.id
        assert ticking.result.stdout.splitlines()[-1] == "200", "it goes on as if nothing had happened"
        sb.write("/data/kept.txt", "changed later")
    try:
        with client.sandbox(snapshot_id=snapshot.id) as sb:
            assert sb.read("/data/kept.txt") == b"kept"
            assert sb.run("cat /usr/local/captured/file; test -e /etc/issue || echo gone").stdout == "in-usr\ngone\n"
            sb.write("/data/more.txt", "more")
            second = client.capture_snapshot(sb.name, "captured")
        with client.sandbox(snapshot_id=second.id) as sb:
            assert (sb.read("/data/kept.txt"), sb.read("/data/more.txt")) == (b"kept", b"more")
            # What is used can be deleted; it goes with what uses it.
            client.delete_snapshot(second.id)
            assert sb.run("cat /data/more.txt").stdout == "more"
            with pytest.raises(sandbox.ResourceNotFoundError):
                client.get_snapshot(second.id)
    finally:
        client.delete_snapshot(snapshot.id)


def test_tags_move_and_lists_are_filtered(daemon: Daemon, client: Any) -> None:
    if not has(SandboxClient.create_snapshot, "tag"):
        pytest.skip("this version has no tags")
    one = client.create_snapshot(name="tagged", docker_image="host", fs_capacity_bytes=GIB, tag="v1")
    two = client.create_snapshot(name="tagged", docker_image="host", fs_capacity_bytes=GIB, tag="v1")
    three = client.create_snapshot(name="tagged", docker_image="host", fs_capacity_bytes=GIB)
    try:
        assert client.get_snapshot("tagged:v1").id == two.id
        assert client.get_snapshot(one.id).tags == []
        assert client.get_snapshot("tagged").id == client.get_snapshot("tagged:latest").id == three.id
        tags = {tag.tag: tag.snapshot_id for tag in client.list_snapshot_tags("tagged")}
        assert tags == {"v1": two.id, "latest": three.id}
        for reference, meant in [("tagged:v1", two), ("tagged", three), (one.id, one)]:
            with client.sandbox(snapshot=reference) as sb:
                assert sb.snapshot_id == meant.id
        for wrong in ["tagged:no", "nothing", "nothing:latest"]:
            with pytest.raises(sandbox.ResourceNotFoundError):
                client.create_sandbox(snapshot=wrong)
        with pytest.raises(sandbox.ResourceNotFoundError):
            client.list_snapshot_tags("never-published")
        found = client.list_snapshots(name_contains="AGGE", limit=2)
        assert [snapshot.id for snapshot in found] == [three.id, two.id]
        assert [snapshot.id for snapshot in client.list_snapshots(name_contains="tagged", limit=2, offset=2)] == [
            one.id
        ]
        page = daemon.ask("GET", "/v2/sandboxes/snapshots?name_contains=tagged&page_size=2")
        assert len(page["items"]) == 2 and page["next_cursor"]
    finally:
        client.delete_snapshot("tagged:v1")
        for snapshot in [one, three]:
            client.delete_snapshot(snapshot.id)


def test_templates_are_snapshots_too(daemon: Daemon, client: Any) -> None:
    daemon.ask("POST", "/v1/templates", {"name": "native-template", "image": "host", "env": {"FROM": "template"}})
    try:
        snapshot = next(snapshot for snapshot in client.list_snapshots() if snapshot.name == "native-template")
        with client.sandbox(snapshot_id=snapshot.id) as sb:
            assert sb.run("echo $FROM").stdout == "template\n"
    finally:
        daemon.ask("DELETE", "/v1/templates/native-template")


def test_snapshots_survive_the_daemon(own_daemon: Daemon) -> None:
    with a_client(own_daemon) as client:
        with a_sandbox(client) as sb:
            sb.write("/data/kept.txt", "kept")
            snapshot = client.capture_snapshot(sb.name, "durable")
        own_daemon.restart()
        with client.sandbox(snapshot_id=snapshot.id) as sb:
            assert sb.read("/data/kept.txt") == b"kept"


# One way.


@newest
def test_commands_over_server_sent_events(daemon: Daemon, client: Any) -> None:
    with variables(LANGSMITH_EXPERIMENTAL_FEATURES="sandbox_sse_exec"):
        from langsmith import utils

        utils.get_env_var.cache_clear()
        with a_sandbox(client) as sb:
            result = sb.run("echo out; echo err >&2; exit 3")
            assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
            handle = sb.run("seq 1 400000", timeout=60, wait=False)
            text = "".join(chunk.data for chunk in handle)
            assert text == "".join(f"{number}\n" for number in range(1, 400_001)), "more than one response holds"
            sb.write("/tmp/text.py", "import sys\nsys.stdout.buffer.write('aä€🐟'.encode() * 200000 + b'\\xf0')\n")
            assert sb.run("python /tmp/text.py", timeout=60).stdout == "aä€🐟" * 200_000 + "\ufffd"
            again = sb.reconnect(handle.command_id, stdout_offset=2)
            assert again.result.stdout.startswith("2\n3\n")
            with pytest.raises(sandbox.SandboxOperationError):
                _ = sb.reconnect("never-seen").result
            with pytest.raises(sandbox.CommandTimeoutError):
                sb.run("sleep 300", timeout=1)
            assert sb.run("cat; echo over", timeout=60).stdout == "over\n"
    utils.get_env_var.cache_clear()


def test_snapshots_with_asyncio(daemon: Daemon) -> None:
    asyncio.run(snapshots_with_asyncio(daemon))


async def snapshots_with_asyncio(daemon: Daemon) -> None:
    async with an_async_client(daemon) as client:
        snapshot = await client.create_snapshot(name="async-image", docker_image="host", fs_capacity_bytes=GIB)
        async with await client.sandbox(snapshot_id=snapshot.id) as sb:
            await sb.write("/data/a", "b")
            captured = await client.capture_snapshot(sb.name, "async-captured")
            if NEWEST:
                assert (await sb.stat("/data/a")).size_bytes == 1
                assert (await sb.read_range("/data/a", start=0)).content == b"b"
                assert [entry.path for entry in await sb.ls("/data")] == ["/data/a"]
                assert len(await sb.grep("b", path="/data")) == 1
                link = await sb.generate_download_url("/data/a")
                assert fetch(link.download_url)[1] == b"b"
        async with await client.sandbox(snapshot_id=captured.id) as sb:
            assert await sb.read("/data/a") == b"b"
        for made in [captured, snapshot]:
            await client.delete_snapshot(made.id)


def test_a_command_on_a_sandbox_that_is_not_ready(daemon: Daemon, client: Any) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as silent:
        image = f"127.0.0.1:{silent.getsockname()[1]}/slow:image"
        daemon.ask("POST", "/v1/templates", {"name": "never-ready", "image": image})
        box = daemon.ask("POST", "/v2/sandboxes/boxes", {"template_name": "never-ready", "wait_for_ready": False})
        sb = client.get_sandbox(box["name"])
        assert sb.status == "provisioning"
        path = sb.dataplane_url.removeprefix(daemon.url)
        status, body = daemon.answer("GET", path + "/download?path=/etc/hostname")
        assert (status, body["detail"]["error"]) == (400, "NotReady")
        began = time.monotonic()
        client.delete_sandbox(sb.name)
        assert time.monotonic() - began < 30
        daemon.ask("DELETE", "/v1/templates/never-ready")
