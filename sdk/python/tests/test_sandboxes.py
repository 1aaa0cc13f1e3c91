"""Sandboxes: making, finding, changing, waiting, ending; what is refused and how; what is never left behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon import a_daemon, wait_until
from gate import shut
from harness import Daemon, Registry, tiny

from shoal import (
    AsyncSandboxClient,
    LifetimeRule,
    QuotaExceededError,
    ResourceCreationError,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    ResourceTimeoutError,
    Sandbox,
    SandboxAPIError,
    SandboxAuthenticationError,
    SandboxClient,
    SandboxClientError,
    SandboxConnectionError,
    SandboxEvent,
    ValidationError,
)
from shoal._find import data_dir
from shoal._local import START_SECONDS_MAX, _is_held, remove_leftover


def test_a_sandbox_of_a_with_block_is_deleted_at_its_end(client: SandboxClient) -> None:
    with client.sandbox(name="brief") as sb:
        assert (sb.name, sb.status, sb.state, sb.template_name) == ("brief", "ready", "running", "default")
        assert sb.status_message is None
        assert sb.dataplane_url.endswith(sb.id)
        assert "brief" in repr(sb) and "running" in repr(sb)
    with pytest.raises(ResourceNotFoundError) as caught:
        client.get_sandbox("brief")
    assert caught.value.resource_type == "sandbox"
    with pytest.raises(ZeroDivisionError), client.sandbox(name="broken"):
        _ = 1 / 0
    assert "broken" not in [sb.name for sb in client.list_sandboxes()]


def test_a_created_sandbox_stays_and_is_found_by_name_and_id(client: SandboxClient) -> None:
    made = client.create_sandbox(name="kept")
    with made:
        made.write("/workspace/x", "1")
    found = client.get_sandbox("kept")
    assert found.id == made.id == client.get_sandbox(made.id).id
    assert found.read("/workspace/x") == b"1"
    with pytest.raises(ResourceNameConflictError):
        client.create_sandbox(name="kept")
    renamed = client.update_sandbox("kept", new_name="still-kept")
    assert renamed.name == "still-kept"
    client.delete_sandbox("still-kept")
    with pytest.raises(ResourceNotFoundError):
        client.delete_sandbox("still-kept")


def test_a_name_may_look_like_an_id(client: SandboxClient) -> None:
    name = "00000000-0000-4000-8000-000000000001"
    with client.sandbox(name=name) as sb:
        assert client.get_sandbox(name).id == sb.id


def test_creation_that_is_not_waited_for(client: SandboxClient) -> None:
    sb = client.create_sandbox(wait_for_ready=False)
    assert sb.status in ("provisioning", "ready")
    ready = client.wait_for_sandbox(sb.name, timeout=60, poll_interval=0.1)
    assert ready.status == "ready"
    assert client.get_sandbox_status(sb.name).status == "ready"
    assert ready.run("echo up").stdout == "up\n"
    ready.delete()


def test_environment_and_limits(client: SandboxClient) -> None:
    with client.sandbox(env={"WORD": "hello"}, cpu="500m", memory="256Mi") as sb:
        assert sb.run("echo $WORD").stdout == "hello\n"
        assert (sb.limits.cpu_millis, sb.limits.memory_bytes) == (500, 256 << 20)


def test_labels_are_listed_by_and_changed(client: SandboxClient) -> None:
    with client.sandbox(labels={"suite": "labels", "n": "1"}) as one, client.sandbox(labels={"suite": "labels"}) as two:
        assert {sb.id for sb in client.list_sandboxes(labels={"suite": "labels"})} == {one.id, two.id}
        assert [sb.id for sb in client.list_sandboxes(labels=["suite=labels", "!n"])] == [two.id]
        one.update(labels={"n": None, "m": "2"})
        assert one.labels == {"suite": "labels", "m": "2"}
        assert one.refresh().labels == one.labels


def test_get_or_create_makes_one_however_many_ask(client: SandboxClient) -> None:
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        found = list(pool.map(lambda _: client.get_or_create({"thread": "43"}), range(10)))
    assert len({sb.id for sb in found}) == 1
    assert sum(bool(sb.created) for sb in found) == 1
    found[0].delete()


def test_lifetimes_are_kept_explained_and_renewed(client: SandboxClient) -> None:
    rules = [LifetimeRule.idle(1800), LifetimeRule.hard_ttl(86400)]
    with client.sandbox(lifetime=rules) as sb:
        assert [(rule.since, rule.after_seconds, rule.action, rule.acts) for rule in sb.lifetime] == [
            ("last_use", 1800, "delete", True),
            ("creation", 86400, "delete", True),
        ]
        explanation = sb.explain()
        assert explanation.end is not None and explanation.end.rule == 0
        assert "30 min" in str(explanation)
        assert sb.touch().last_use is not None
        assert sb.update(lifetime=[]).lifetime == []
        assert sb.explain().end is None
        pausing = LifetimeRule.idle(60, "pause_keep_memory")
        assert [rule.acts for rule in sb.update(lifetime=[pausing]).lifetime] == [True]


def test_a_sandbox_is_paused_and_resumed(client: SandboxClient) -> None:
    with client.sandbox() as sb:
        handle = sb.run("echo one; read line; echo $line", wait=False)
        for drop in (False, True):
            sb.write("/tmp/kept", "kept")
            assert sb.pause(drop=drop).state == "paused" and sb.status == "stopped"
            assert sb.info.memory == ("drop" if drop else "keep")
            assert client.get_sandbox(sb.name).state == "paused", "looking does not resume it"
            assert sb.read("/tmp/kept") == b"kept"
            assert sb.refresh().state == "running"
            if not drop:
                handle.send_input("two\n")
                assert handle.result.stdout == "one\ntwo\n"
        assert sb.pause(drop=True, grace=0).resume().state == "running"
        with pytest.raises(ValueError, match="grace"):
            sb.pause(grace=1)


def test_a_ttl_pauses_and_a_use_resumes(client: SandboxClient) -> None:
    with client.sandbox(ttl=0.3) as sb:
        sb.write("/workspace/kept", "kept")
        wait_until(lambda: sb.refresh().state == "paused")
        assert sb.status_message == "nobody has used it for 300 ms"
        assert sb.run("cat /workspace/kept").stdout == "kept"


def test_idle_and_ttl_are_short_for_rules(client: SandboxClient) -> None:
    with client.sandbox(ttl=600, idle=1800, hard_ttl=86400) as sb:
        assert sb.lifetime == [LifetimeRule.ttl(600), LifetimeRule.idle(1800), LifetimeRule.hard_ttl(86400)]
    with client.sandbox(lifetime=[LifetimeRule.hard_ttl(60)], idle=30) as sb:
        assert sb.lifetime == [LifetimeRule.hard_ttl(60), LifetimeRule.idle(30)]


def test_handles_of_one_sandbox_are_equal(client: SandboxClient) -> None:
    with client.sandbox() as sb, client.sandbox() as other:
        again = client.get_sandbox(sb.id)
        assert again == sb and again is not sb and len({sb, again, other}) == 2
        assert sb != other and sb != sb.id
        assert sb.id in repr(sb.files) and sb.id in repr(sb.events())


def test_a_lifetime_strikes(client: SandboxClient) -> None:
    # Listened to from before, since it may be gone again when this hears that it is there.
    with client.events() as events:
        assert next(events).type == "ready"
        sb = client.create_sandbox(lifetime=[LifetimeRule.idle(0.5)])
        for event in events:
            if event.type == "deleted" and event.sandbox_id == sb.id:
                break


def test_events_of_a_sandbox(client: SandboxClient) -> None:
    sb = client.create_sandbox()
    with sb.events() as events:
        assert next(events).type == "ready"
        sb.run("exit 3", command_id="c")
        started, ended = next(events), next(events)
        assert (started.type, started.command_id) == ("command_started", "c")
        assert ended.result is not None and ended.result.exit_code == 3
        sb.delete()
        assert [event.type for event in events][-1] == "deleted"


def test_events_go_on_after_a_restart(own_daemon: Daemon) -> None:
    with own_daemon.client() as client, client.events() as events:
        assert next(events).type == "ready"
        own_daemon.restart()
        sb = client.create_sandbox(name="after")
        for event in events:
            if event.sandbox_id == sb.id and event.state == "running":
                break


def test_stats(sb: Sandbox, client: SandboxClient) -> None:
    stats = sb.stats()
    assert stats.usage is not None and stats.usage.pids >= 1
    machine, rows = client.stats()
    assert machine.cpus >= 1
    assert sb.id in [row.sandbox_id for row in rows]


def test_keys_and_quotas(client: SandboxClient, daemon: Daemon) -> None:
    key = client.create_key("guest", sandboxes_max=1)
    assert key.secret not in repr(key)
    assert key.id in [known.id for known in client.list_keys()]
    with SandboxClient(daemon.url, key.secret) as guest, guest.sandbox():
        with pytest.raises(QuotaExceededError) as caught:
            guest.create_sandbox()
        assert caught.value.quota_type == "sandbox_count"
        assert caught.value.resource_type == "sandbox"
        with pytest.raises(SandboxAuthenticationError):
            guest.list_keys()
    client.delete_key(key.id)
    with SandboxClient(daemon.url, key.secret) as guest, pytest.raises(SandboxAuthenticationError):
        guest.list_sandboxes()


def test_images_are_imported_found_and_deleted(client: SandboxClient) -> None:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name in ("bin", "usr"):
            entry = tarfile.TarInfo(name)
            entry.type = tarfile.DIRTYPE
            tar.addfile(entry)
        entry = tarfile.TarInfo("marker")
        entry.size = 5
        tar.addfile(entry, io.BytesIO(b"hello"))
    archive.seek(0)
    (made,) = client.import_image(archive, name="team/tiny:1")
    assert any("team/tiny" in name for name in made.names)
    assert made.digest in [image.digest for image in client.list_images()]
    assert client.get_image("team/tiny:1").digest == made.digest
    with client.sandbox(image="team/tiny:1") as sb:
        assert sb.read("/marker") == b"hello"
        with pytest.raises(ResourceInUseError) as used:
            client.delete_image("team/tiny:1")
        assert used.value.resource_type == "image"
    client.delete_image("team/tiny:1")
    with pytest.raises(ResourceNotFoundError) as gone:
        client.get_image("team/tiny:1")
    assert gone.value.resource_type == "image"
    with client.sandbox(image="host") as sb:
        assert sb.info.image == "host"


def test_wrong_requests_say_what_is_wrong(client: SandboxClient) -> None:
    with pytest.raises(ResourceNotFoundError) as missing:
        client.create_sandbox("no-such-template")
    assert missing.value.resource_type == "template"
    with pytest.raises(ValidationError) as wrong:
        client.create_sandbox(memory="lots")
    assert wrong.value.field == "memory"
    with pytest.raises((ResourceCreationError, ValidationError)):
        client.create_sandbox(memory="100000Gi")


def test_a_wrong_key_is_an_authentication_error(daemon: Daemon) -> None:
    with SandboxClient(daemon.url, "wrong") as client, pytest.raises(SandboxAuthenticationError) as caught:
        client.list_sandboxes()
    assert caught.value.code == "unauthorized"
    with pytest.raises(SandboxClientError, match="characters"):
        SandboxClient(daemon.url, "new\nline")


def test_hints_are_in_the_words_of_python(client: SandboxClient) -> None:
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: client.get_sandbox("nobody"), "list_sandboxes"),
        (lambda: client.get_template("nobody"), "list_templates"),
        (lambda: client.get_volume("nobody"), "list_volumes"),
        (lambda: client.get_pool("nobody"), "list_pools"),
        (lambda: client.get_image("nobody"), "pull_image"),
        (lambda: client.get_build("00000000-0000-4000-8000-000000000000"), "list_builds"),
        (lambda: client.create_sandbox("nobody"), "list_templates"),
        (lambda: SandboxClient(client.api_endpoint, "a-key-that-nobody-has").list_sandboxes(), "api_key"),
    ]
    for call, word in calls:
        with pytest.raises(SandboxClientError) as error:
            call()
        hint = str(error.value.hint)
        assert word in hint and "GET " not in hint and "Bearer" not in hint, error.value


def test_no_daemon_is_told_at_once_with_a_hint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with SandboxClient("http://127.0.0.1:9", "key") as client, pytest.raises(SandboxConnectionError) as caught:
        client.list_sandboxes()
    assert "shoal serve" in str(caught.value)
    monkeypatch.delenv("SHOAL_URL", raising=False)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))
    with pytest.raises(SandboxClientError, match=r"local\(\)"):
        SandboxClient()
    monkeypatch.setenv("SHOAL_URL", "http://127.0.0.1:9")
    monkeypatch.delenv("SHOAL_API_KEY", raising=False)
    with pytest.raises(SandboxClientError, match="SHOAL_API_KEY"):
        SandboxClient()
    for url in ("not a url", "ftp://127.0.0.1", "127.0.0.1:7878"):
        with SandboxClient(url, "key") as client, pytest.raises(SandboxConnectionError):
            client.list_sandboxes()


def test_a_stranger_on_the_port_is_noticed(tmp_path: Path) -> None:
    import http.server

    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"<html>nothing here</html>")

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with (
                SandboxClient(f"http://127.0.0.1:{server.server_port}", "key") as client,
                pytest.raises(SandboxAPIError, match="not one of a daemon"),
            ):
                client.version()
        finally:
            server.shutdown()


def test_the_daemon_of_a_data_directory_is_found(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_URL", raising=False)
    monkeypatch.setenv("SHOAL_API_KEY", daemon.key)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(daemon.directory / "data"))
    with SandboxClient() as client:
        assert client.api_endpoint == daemon.url
        assert client.version().api == "v1"


def test_the_data_directory_of_the_configuration_file_is_found(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("SHOAL_URL", "SHOAL_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHOAL_API_KEY", daemon.key)
    file = tmp_path / "config.toml"
    monkeypatch.setenv("SHOAL_CONFIG", str(file))
    file.write_text(f"# A comment.\nspares = 2\ndata_dir = {json.dumps(str(daemon.directory / 'data'))}\n")
    with SandboxClient() as client:
        assert client.api_endpoint == daemon.url
    # What says nothing, or is none, is as if it were not there.
    for text in ("spares = 2\n", "data_dir = 7\n", "data_dir = \n", None):
        if text is None:
            file.unlink()
        else:
            file.write_text(text)
        assert data_dir() == Path("/var/lib/shoal")
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))
    assert data_dir() == tmp_path


def test_calls_wait_for_a_daemon_that_is_restarted(own_daemon: Daemon) -> None:
    with own_daemon.client() as client:
        address = own_daemon.address
        with client.sandbox(name="through"):
            own_daemon.kill()
            start = threading.Timer(0.3, own_daemon.start, [address])
            start.start()
            assert [sb.name for sb in client.list_sandboxes()] == ["through"]
            start.join()
            own_daemon.restart()
        assert client.list_sandboxes() == []


def test_ctrl_c_in_a_create_leaves_no_sandbox(daemon: Daemon, client: SandboxClient) -> None:
    program = """
import os, signal, httpx
from shoal import SandboxClient
client = SandboxClient()
send = httpx.Client.send
def interrupted(self, *arguments, **more):
    httpx.Client.send = send
    send(self, *arguments, **more)
    raise KeyboardInterrupt
httpx.Client.send = interrupted
client.create_sandbox(labels={"from": "ctrl-c"})
"""
    environment = {**os.environ, "SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
    assert client.list_sandboxes(labels={"from": "ctrl-c"}) == []


@pytest.fixture
def pulling_client(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxClient]:
    """One of a daemon that pulls from the registry of this test."""
    monkeypatch.setenv("SHOAL_INSECURE_REGISTRIES", registry.address)
    with a_daemon(Daemon) as daemon, daemon.client() as client:
        yield client


@pytest.mark.parametrize("by", ["image", "template"])
def test_a_create_that_takes_too_long_leaves_no_sandbox(
    pulling_client: SandboxClient, registry: Registry, by: str
) -> None:
    client = pulling_client
    image = registry.push(f"late:{by}", tiny(by).getvalue())
    labels = {"from": f"too long, by {by}"}
    with shut(registry) as opened:
        template = client.create_template("late", image) if by == "template" else None
        with pytest.raises(ResourceTimeoutError):
            if template is None:
                client.create_sandbox(image=image, labels=labels, timeout=0.5)
            else:
                client.create_sandbox("late", labels=labels, timeout=0.5)
        with client.events() as events:
            assert next(events).type == "ready"
            opened.set()
            # What waited would be made before this one, which waits for the same.
            last = client.create_sandbox(image=image) if template is None else client.create_sandbox("late")
            seen = {event.sandbox_id for event in until_running(events, last.id)}
            # Templates have events too.
            assert seen - {None} == {last.id}
    assert client.list_sandboxes(labels=labels) == []


def until_running(events: Iterator[SandboxEvent], sandbox: str) -> Iterator[SandboxEvent]:
    """The events up to the one that says that this sandbox runs."""
    for event in events:
        yield event
        if event.sandbox_id == sandbox and event.state == "running":
            return


async def test_a_cancelled_create_and_block_leave_no_sandbox(async_client: AsyncSandboxClient) -> None:
    labels = {"from": "cancelled"}

    async def work() -> None:
        async with await async_client.sandbox(labels=labels) as sb:
            await sb.run("sleep 1000")

    for place in range(10):
        task = asyncio.create_task(work())
        # At another place in its life each time.
        await asyncio.sleep(0.003 * place)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await async_client.list_sandboxes(labels=labels) == []


async def test_the_async_client_does_the_same(async_client: AsyncSandboxClient) -> None:
    sb = await async_client.create_sandbox(name="async", wait_for_ready=False)
    sb = await async_client.wait_for_sandbox("async")
    assert (await async_client.get_sandbox_status("async")).status == "ready"
    assert (await async_client.get_sandbox(sb.id)).name == "async"
    assert (await sb.update(labels={"a": "b"})).labels == {"a": "b"}
    assert (await async_client.get_or_create({"a": "b"})).id == sb.id
    async with sb.events() as events:
        assert (await events.__anext__()).type == "ready"
        await async_client.delete_sandbox("async")
        assert [event.type async for event in events][-1] == "deleted"


# --- The private daemon


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where private daemons of this test are, and no other's: not a deep directory, since sockets have short names."""
    with tempfile.TemporaryDirectory(prefix=f"shoal-test-{os.getpid()}-", dir="/var/tmp") as name:
        monkeypatch.setattr("shoal._local.PLACE", Path(name))
        monkeypatch.setenv("PLACE_OF_THIS_TEST", name)
        yield Path(name)


LOCAL = """
import os, pathlib, sys
import shoal._local
from shoal import SandboxClient
shoal._local.PLACE = pathlib.Path(os.environ.get("PLACE_OF_THIS_TEST", "/var/tmp"))
client = SandboxClient.local()
sb = client.create_sandbox()
sb.run("sleep 3600", timeout=0, wait=False)
daemon = client._transport.endpoint
print(daemon.base, daemon._process.pid, flush=True)
"""


@pytest.mark.parametrize(
    "end", ["", "raise SystemExit(3)", "os._exit(4)", "os.kill(os.getpid(), 9)", "raise KeyboardInterrupt"]
)
def test_a_private_daemon_is_gone_however_its_program_ends(end: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOCAL + end], capture_output=True, text=True)
    base, pid = done.stdout.split()
    wait_until(lambda: not Path(base).exists() and not Path(f"/proc/{pid}").exists())


def test_a_forked_child_does_not_keep_a_private_daemon() -> None:
    fork = "\nif os.fork() == 0:\n    import time; time.sleep(20); os._exit(0)\nos._exit(0)"
    process = subprocess.Popen(
        [sys.executable, "-c", LOCAL + fork], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    base, pid = process.stdout.readline().split()
    try:
        wait_until(lambda: not Path(base).exists() and not Path(f"/proc/{pid}").exists(), 15)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.wait()


def test_a_private_daemon_that_is_killed_is_started_again() -> None:
    with SandboxClient.local() as client:
        sb = client.create_sandbox()
        sb.write("/workspace/x", "kept")
        handle = sb.run("echo one; read line; echo two", wait=False)
        assert next(handle).data == "one\n"
        process = client._transport.endpoint._process  # type: ignore[attr-defined]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert sb.read("/workspace/x") == b"kept"
        handle.send_input("go\n")
        assert handle.result.stdout == "one\ntwo\n"


def test_what_a_killed_pair_left_is_removed_by_the_next(place: Path) -> None:
    end = "os.kill(daemon._process.pid, 9)\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", LOCAL + end], capture_output=True, text=True)
    base = Path(done.stdout.split()[0])
    assert base.exists() and base.parent == place, "sandboxes outlive a daemon that is killed"
    # A daemon that is still on its way out is left alone, and removed by the program after the next.
    wait_until(lambda: not _is_held(base / "data" / "lock"))
    with SandboxClient.local() as client:
        wait_until(lambda: not base.exists())
        assert client.list_sandboxes() == []


async def test_a_private_daemon_for_asyncio() -> None:
    async with await AsyncSandboxClient.local() as client, await client.sandbox() as sb:
        assert (await sb.run("echo up")).stdout == "up\n"


def test_a_program_takes_the_daemon_that_runs_or_starts_its_own(
    daemon: Daemon, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_URL", raising=False)
    monkeypatch.setenv("SHOAL_API_KEY", daemon.key)
    monkeypatch.setenv("SHOAL_DATA_DIR", str(daemon.directory / "data"))
    with SandboxClient.here() as client:
        assert client.api_endpoint == daemon.url
        assert list(place.iterdir()) == [], "no other was started"
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path))
    with SandboxClient.here() as client:
        assert client.api_endpoint != daemon.url
        assert client.list_sandboxes() == []
    # A daemon that is named is meant, also where something is amiss with it.
    monkeypatch.setenv("SHOAL_URL", daemon.url)
    monkeypatch.delenv("SHOAL_API_KEY")
    with pytest.raises(SandboxClientError, match="no api key"):
        SandboxClient.here()


def test_a_directory_that_is_just_made_is_left_alone(place: Path) -> None:
    base = place / "new"
    base.mkdir(mode=0o700)
    (base / "lock").touch(mode=0o600)
    remove_leftover("/bin/false", base)
    assert base.exists(), "its program is about to take the lock"
    long_ago = time.time() - START_SECONDS_MAX - 1
    os.utime(base, (long_ago, long_ago))
    remove_leftover("/bin/false", base)
    assert not base.exists()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "no" / "such"):
        with pytest.raises(SandboxClientError, match="cannot make the directory"):
            SandboxClient.local(binary="/bin/false", directory=str(directory))


def test_a_program_that_is_none_is_told(tmp_path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SandboxClientError, match="not a program"):
        SandboxClient.local(binary=str(tmp_path / "nothing"))
    with pytest.raises(SandboxClientError, match="did not start"):
        SandboxClient.local(binary="/bin/false")
    assert list(place.iterdir()) == []
    monkeypatch.delenv("SHOAL_BINARY", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxClientError, match="SHOAL_BINARY"):
        SandboxClient.local()


def test_a_network_is_given_at_creation_and_changed_later(client: SandboxClient) -> None:
    with client.sandbox(network={"rules": [{"to": "example.com"}]}) as sb:
        assert [rule["to"] for rule in sb.network["rules"]] == ["example.com"]
        assert sb.update(network="none").network["mode"] == "none"
        with pytest.raises(ValidationError):
            sb.update(network={"rules": [{"to": "*.com"}]})
    with client.sandbox() as sb:
        assert sb.network == {"mode": "none"}
