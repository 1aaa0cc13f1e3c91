"""Sandboxes: create, connect, timeouts, lists, kill, and whatever is refused."""

from __future__ import annotations

import datetime
import inspect
import json
import os
import subprocess
import sys
from typing import Any

import e2b
import pytest
from e2b import Sandbox, SandboxQuery
from e2b.exceptions import AuthenticationException, NotFoundException, SandboxException, TimeoutException
from harness import VERSION, Daemon, switched_to, wait_until

#: A subclass of `NotFoundException` in later clients.
NOT_FOUND = getattr(e2b, "SandboxNotFoundException", NotFoundException)
#: A subclass of `TimeoutException` in later clients.
NOT_RUNNING = getattr(e2b, "SandboxNotRunningException", TimeoutException)


def lifetime(sbx: Any) -> float:
    info = sbx.get_info()
    now = datetime.datetime.now(datetime.timezone.utc)
    return float((info.end_at - now).total_seconds())


def all_of(**options: Any) -> list[Any]:
    paginator, found = Sandbox.list(**options), []
    while paginator.has_next:
        found += paginator.next_items()
    return found


def test_three_variables_switch_a_program_over(daemon: Daemon) -> None:
    program = "from e2b import Sandbox\ns = Sandbox.create()\nprint(s.commands.run('echo hi').stdout, end='')\ns.kill()"
    variables = {**os.environ, "E2B_API_URL": f"{daemon.url}/e2b", "E2B_SANDBOX_URL": f"{daemon.url}/e2b"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_sandboxes_do_not_see_each_other(sbx: Any) -> None:
    other = Sandbox.create()
    try:
        assert sbx.sandbox_id != other.sandbox_id and sbx.sandbox_id.isalnum() and sbx.sandbox_id.islower()
        sbx.files.write("/tmp/mine", "mine")
        assert sbx.files.exists("/tmp/mine") and not other.files.exists("/tmp/mine")
        # A token of one sandbox does not open another.
        headers = {"E2b-Sandbox-Id": other.sandbox_id, "X-Access-Token": token_of(sbx)}
        status, answer = raw(sbx, "/health", headers)
        assert status == 401 and answer["code"] == 401
    finally:
        assert other.kill()


def token_of(sbx: Any) -> str:
    return str(getattr(sbx, "_envd_access_token", None) or sbx.connection_config.sandbox_headers["X-Access-Token"])


def raw(sbx: Any, path: str, headers: dict[str, str], method: str = "GET", body: Any = None) -> tuple[int, Any]:
    base = os.environ["E2B_SANDBOX_URL"]
    import json
    import urllib.error
    import urllib.request

    request = urllib.request.Request(base + path, body, headers, method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text else None


def test_the_lifetime_is_five_minutes_or_what_is_asked_for() -> None:
    for options, expected in [({}, 300), ({"timeout": 60}, 60)]:
        sbx = Sandbox.create(**options)
        try:
            assert expected - 10 < lifetime(sbx) <= expected
        finally:
            sbx.kill()


def test_timeouts_are_set_and_connect_never_shortens(sbx: Any) -> None:
    sbx.set_timeout(1000)
    assert 980 < lifetime(sbx) <= 1000
    again = Sandbox.connect(sbx.sandbox_id, timeout=10)
    assert again.sandbox_id == sbx.sandbox_id and 970 < lifetime(again) <= 1000
    Sandbox.connect(sbx.sandbox_id, timeout=2000)
    assert 1980 < lifetime(sbx) <= 2000
    sbx.set_timeout(1)
    wait_until(lambda: not sbx.is_running(), 20)
    with pytest.raises(NOT_FOUND):
        sbx.get_info()


def test_a_killed_sandbox_is_gone() -> None:
    sbx = Sandbox.create()
    assert sbx.is_running()
    assert sbx.kill() is True
    assert sbx.kill() is False and Sandbox.kill(sbx.sandbox_id) is False
    assert sbx.is_running() is False
    with pytest.raises(NOT_RUNNING):
        sbx.commands.run("true")
    for ask in (sbx.get_info, lambda: Sandbox.connect(sbx.sandbox_id), lambda: sbx.set_timeout(5)):
        with pytest.raises(NOT_FOUND):
            ask()


def test_a_context_kills_at_its_end() -> None:
    with Sandbox.create() as sbx:
        assert sbx.commands.run("echo in").stdout == "in\n"
    assert not sbx.is_running()


def test_lists_are_filtered_and_paged() -> None:
    mark = os.urandom(8).hex()
    made = [Sandbox.create(metadata={"a b": "c/d &=", "mark": mark, "n": str(number)}) for number in range(3)]
    try:
        ids = {sbx.sandbox_id for sbx in made}
        found = all_of(query=SandboxQuery(metadata={"a b": "c/d &=", "mark": mark}))
        assert {info.sandbox_id for info in found} == ids
        assert found[0].metadata["a b"] == "c/d &=" and found[0].state.value == "running"
        one = all_of(query=SandboxQuery(metadata={"mark": mark, "n": "1"}))
        assert [info.sandbox_id for info in one] == [made[1].sandbox_id]
        paged = all_of(query=SandboxQuery(metadata={"mark": mark}), limit=1)
        assert len(paged) == 3 and {info.sandbox_id for info in paged} == ids
        assert all_of(query=SandboxQuery(metadata={"mark": "no"})) == []
        from e2b import SandboxState

        assert all_of(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.PAUSED])) == []
        assert len(all_of(query=SandboxQuery(metadata={"mark": mark}, state=[SandboxState.RUNNING]))) == 3
    finally:
        assert all(sbx.kill() for sbx in made)


def test_what_get_info_says(sbx: Any) -> None:
    info = sbx.get_info()
    assert info.sandbox_id == sbx.sandbox_id and info.template_id == "base"
    assert info.cpu_count >= 1 and info.memory_mb >= 128 and info.state.value == "running"
    assert info.started_at < info.end_at


def test_metrics_have_one_sample(sbx: Any) -> None:
    samples = sbx.get_metrics()
    assert len(samples) == 1 and samples[0].mem_total > samples[0].mem_used > 0


def test_wrong_keys_and_templates() -> None:
    with pytest.raises(AuthenticationException):
        Sandbox.create(api_key="e2b_" + "0" * 40)
    with pytest.raises(AuthenticationException):
        all_of(api_key="e2b_" + "0" * 40)
    with pytest.raises(SandboxException) as unknown:
        Sandbox.create(template="no-such-template")
    assert "no-such-template" in str(unknown.value)
    for wrong in ("", "x", "debug_sandbox_id", "../v1", "%2e%2e", "ü", "a" * 3000):
        with pytest.raises((NOT_FOUND, SandboxException)):
            Sandbox.connect(wrong)


def test_a_key_of_another_owner_sees_nothing(daemon: Daemon, sbx: Any) -> None:
    key = daemon.ask("POST", "/v1/keys", {"owner": "somebody-else"})["secret"]
    options = {"api_key": key, "validate_api_key": False} if VERSION < (2, 46) else {"api_key": key}
    if VERSION < (2, 46) and "validate_api_key" not in inspect.signature(e2b.ConnectionConfig.__init__).parameters:
        pytest.skip("this version takes only keys that look like the vendor's")
    assert all_of(**options) == []
    with pytest.raises(NOT_FOUND):
        Sandbox.connect(sbx.sandbox_id, **options)
    assert Sandbox.kill(sbx.sandbox_id, **options) is False
    assert sbx.is_running()


def test_a_token_ends_with_its_key(daemon: Daemon) -> None:
    if VERSION < (2, 46):
        pytest.skip("this version takes only keys that look like the vendor's")
    made = daemon.ask("POST", "/v1/keys", {"owner": "brief"})
    sbx = Sandbox.create(api_key=made["secret"])
    assert sbx.commands.run("echo yes").stdout == "yes\n"
    daemon.ask("DELETE", f"/v1/keys/{made['id']}")
    with pytest.raises(AuthenticationException):
        sbx.commands.run("echo no")


def policy_in(sbx: Any) -> Any:
    return json.loads(sbx.files.read("/run/shoal/network.json"))


def test_the_network_is_open_unless_the_caller_says_otherwise(sbx: Any) -> None:
    assert policy_in(sbx)["mode"] == "open", "as the vendor has it"
    closed = Sandbox.create(allow_internet_access=False)
    try:
        done = closed.commands.run("bash -c 'exec 3<>/dev/tcp/192.0.2.1/80' 2>&1 || true")
        assert "unreachable" in done.stdout, done.stdout
    finally:
        closed.kill()
    try:
        some = Sandbox.create(network={"allow_out": ["192.0.2.7"], "deny_out": ["0.0.0.0/0"]})
    except TypeError:
        return  # This version does not say it.
    try:
        policy = policy_in(some)
        assert (policy["mode"], [rule["to"] for rule in policy["rules"]]) == ("none", ["192.0.2.7"])
        if hasattr(some, "update_network"):
            some.update_network({"deny_out": ["192.0.2.0/24"]})
            assert policy_in(some)["mode"] == "open"
    finally:
        some.kill()


def test_what_is_refused_says_why(sbx: Any) -> None:
    refused: list[Any] = [
        lambda: sbx.create_snapshot(),
        lambda: Sandbox.create(network={"mask_request_host": "x"}),
    ]
    for ask in refused:
        try:
            with pytest.raises(SandboxException) as error:
                ask()
        except (AttributeError, TypeError):
            continue
        assert "this server" in str(error.value)


def test_nothing_is_told_outside_of_the_vendors_shape(daemon: Daemon, sbx: Any) -> None:
    for method, path, headers, status in [
        ("GET", "/e2b/nowhere", None, 404),
        ("PUT", "/e2b/sandboxes", None, 405),
        ("GET", "/e2b/sandboxes", {}, 401),
        ("POST", "/e2b/v2/sandboxes", {"X-Api-Key": "wrong-key-of-length"}, 401),
        ("GET", "/e2b/v2/sandboxes?limit=x", None, 400),
        ("GET", "/e2b/v2/sandboxes?metadata=%25zz", None, 400),
        ("GET", "/e2b/files?path=/x", {}, 400),
        ("GET", "/e2b/templates/aliases/x", None, 501),
    ]:
        got, answer = daemon.answer(method, path, headers=headers)
        assert (got, answer["code"]) == (status, status) and answer["message"], (path, got, answer)
    headers = {"E2b-Sandbox-Id": sbx.sandbox_id, "X-Access-Token": "bootstrap.AAAA", "Content-Type": "application/json"}
    got, answer = daemon.answer("POST", "/e2b/process.Process/List", raw=b"{}", headers=headers)
    assert (got, answer["code"]) == (401, "unauthenticated")
    for body in [b"", b"{", b"[]", b'{"timeout": "x"}', b'{"timeout": -1}', b'{"timeout": 1e99}', b'{"metadata": {"": ""}}']:
        got, answer = daemon.answer("POST", f"/e2b/sandboxes/{sbx.sandbox_id}/timeout", raw=body)
        assert got in (204, 400), (body, got, answer)


def test_odd_arguments_are_never_a_server_error(sbx: Any) -> None:
    odd: list[Any] = [
        lambda: Sandbox.create(timeout=-1),
        lambda: Sandbox.create(timeout=10**15),
        lambda: Sandbox.create(metadata={"=": "x"}),
        lambda: Sandbox.create(metadata={"k": "v" * 100_000}),
        lambda: Sandbox.create(envs={"A=B": "x"}),
        lambda: Sandbox.create(envs={"A": "\0"}),
        lambda: sbx.set_timeout(-5),
        lambda: sbx.commands.run("true", cwd="/no/such"),
        lambda: sbx.commands.run("true", user="no-such-user"),
        lambda: sbx.commands.run("a\0b"),
        lambda: sbx.commands.run("true", envs={"": "x"}),
        lambda: sbx.commands.kill(2**31),
        lambda: sbx.commands.connect(0),
        lambda: sbx.files.read("/\0"),
        lambda: sbx.files.read("/" + "a" * 4999 + "/b"),
        lambda: sbx.files.list("/dev/null"),
        lambda: sbx.files.write("", "x"),
        lambda: sbx.files.rename("/none", "/tmp/x"),
        lambda: sbx.files.make_dir("/proc/x"),
        lambda: sbx.files.remove("/proc/version"),
        lambda: sbx.files.watch_dir("/none"),
    ]
    for number, ask in enumerate(odd):
        try:
            ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not be the daemon's fault
            text = f"{type(error).__name__}: {error}"
            assert "500:" not in text and "internal" not in text.lower() and "a bug here" not in text, (number, text)
    assert sbx.commands.run("echo alive").stdout == "alive\n"


def test_a_sandbox_of_another_client_is_connected_to(daemon: Daemon) -> None:
    made = daemon.ask("POST", "/v1/sandboxes", {})
    bits = int(made["id"].replace("-", ""), 16)
    digits, name = "0123456789abcdefghijklmnopqrstuvwxyz", ""
    for _ in range(25):
        bits, digit = divmod(bits, 36)
        name = digits[digit] + name
    wait_until(lambda: daemon.ask("GET", f"/v1/sandboxes/{made['id']}")["state"] == "running")
    sbx = Sandbox.connect(name)
    assert sbx.commands.run("pwd").stdout == "/home/user\n"
    assert sbx.kill()
    assert daemon.answer("GET", f"/v1/sandboxes/{made['id']}")[0] == 404


def pause(sbx: Any, **options: Any) -> bool:
    """Whether it was paused by this."""
    if hasattr(sbx, "pause"):
        return bool(sbx.pause(**options) is not False)
    return bool(sbx.beta_pause(**options) is not False)


def test_a_paused_sandbox_goes_on_where_it_was() -> None:
    sbx = Sandbox.create(timeout=600)
    try:
        handle = sbx.commands.run("sleep 300", background=True, timeout=0)
        assert pause(sbx) and sbx.get_info().state.value == "paused"
        assert not sbx.is_running()
        with pytest.raises(NOT_RUNNING):
            sbx.commands.run("true")
        if VERSION >= (2, 46):
            assert not pause(sbx)
        again = Sandbox.connect(sbx.sandbox_id, timeout=60)
        assert again.is_running() and sbx.get_info().state.value == "running"
        # A resumed sandbox lives as long as the connect says.
        assert 40 < lifetime(again) <= 60
        assert handle.pid in [process.pid for process in again.commands.list()]
    finally:
        assert sbx.kill()


def test_a_timeout_does_not_kill_a_paused_sandbox(daemon: Daemon) -> None:
    sbx = Sandbox.create(timeout=600)
    try:
        sbx.set_timeout(3)
        assert pause(sbx)
        # Longer than the timeout: it is the next sandbox's whole life.
        other = Sandbox.create(timeout=4)
        wait_until(lambda: not other.is_running(), 30)
        assert sbx.get_info().state.value == "paused"
    finally:
        assert sbx.kill()


def test_a_timeout_pauses_where_the_caller_wants_it() -> None:
    if "lifecycle" not in inspect.signature(Sandbox.create).parameters:
        pytest.skip("this version has no `lifecycle`")
    for auto_resume in (False, True):
        sbx = Sandbox.create(timeout=2, lifecycle={"on_timeout": "pause", "auto_resume": auto_resume})
        try:
            wait_until(lambda: sbx.get_info().state.value == "paused", 30)
            described = sbx.get_info().lifecycle
            assert (described["on_timeout"], described["auto_resume"]) == ("pause", auto_resume), described
            if auto_resume:
                assert sbx.commands.run("echo awake").stdout == "awake\n"
            else:
                with pytest.raises(NOT_RUNNING):
                    sbx.commands.run("true")
        finally:
            assert sbx.kill()


def test_a_pause_can_keep_files_alone() -> None:
    sbx = Sandbox.create(timeout=600)
    try:
        sbx.files.write("/tmp/kept", "yes")
        handle = sbx.commands.run("sleep 300", background=True, timeout=0)
        assert pause(sbx, keep_memory=False)
        again = Sandbox.connect(sbx.sandbox_id)
        assert again.files.read("/tmp/kept") == "yes"
        assert again.commands.list() == [], handle.pid
    finally:
        assert sbx.kill()
