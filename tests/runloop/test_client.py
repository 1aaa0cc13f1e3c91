"""The client alone: devboxes, executions, files, blueprints, and its own exceptions."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import time
from typing import Any

import pytest
import runloop_api_client as runloop
from conftest import settings
from raw import Daemon
from runloop_api_client import RunloopSDK

VERSION = tuple(int(part) for part in importlib.metadata.version("runloop-api-client").split(".")[:2])


def test_a_devbox_runs_when_create_returns(sdk: Any) -> None:
    box = sdk.devbox.create(name="n", metadata={"a": "b ü"})
    second = sdk.devbox.create(name="n")
    try:
        info = box.get_info()
        assert (info.status, info.name, info.metadata) == ("running", "n", {"a": "b ü"})
        assert box.id.startswith("dbx_") and abs(info.create_time_ms / 1000 - time.time()) < 60
        assert second.id != box.id and second.get_info().name == "n", "names need not be unique"
    finally:
        box.shutdown()
        second.shutdown()


def test_the_network_is_open_as_the_vendor_has_it(box: Any) -> None:
    assert json.loads(box.file.read(file_path="/run/shoal/network.json"))["mode"] == "open"


def test_a_wrong_key_is_refused_at_once(daemon: Daemon) -> None:
    with settings(daemon, key="a-key-that-nobody-has-made-here"):
        began = time.monotonic()
        with pytest.raises(runloop.AuthenticationError):
            RunloopSDK().devbox.create()
        assert time.monotonic() - began < 2


def test_commands_have_codes_and_two_streams(box: Any) -> None:
    result = box.cmd.exec("echo out; echo err >&2; exit 4")
    assert (result.exit_code, result.stdout(), result.stderr()) == (4, "out\n", "err\n")
    assert result.failed


def test_commands_begin_at_home_and_share_nothing(box: Any) -> None:
    home = box.cmd.exec("echo $HOME").stdout()
    assert box.cmd.exec("pwd").stdout() == home
    assert box.cmd.exec("cd /; X=1; export X; pwd").stdout() == "/\n"
    assert box.cmd.exec("pwd; echo [$X]").stdout() == f"{home}[]\n"
    box.file.write(file_path=".profile", contents="export FROM_PROFILE=yes\n")
    assert box.cmd.exec("echo $FROM_PROFILE").stdout() == "yes\n", "a login shell reads its profile"
    assert box.cmd.exec("cat <<'END'\nit's \"$X\"\nEND").stdout() == "it's \"$X\"\n"
    assert box.cmd.exec(f": '{'x' * 300_000}'; echo long").stdout() == "long\n"


def test_a_command_that_takes_longer_than_one_wait(box: Any) -> None:
    assert box.cmd.exec("sleep 28; echo ok").stdout() == "ok\n"


def test_long_output_is_whole(box: Any) -> None:
    text = "print('ä€🐟' * 100)\n"
    box.file.write(file_path="/tmp/long.py", contents=f"for i in range(9000): {text}")
    result = box.cmd.exec("python3 /tmp/long.py")
    assert result.stdout() == ("ä€🐟" * 100 + "\n") * 9000


def test_output_comes_before_the_end(box: Any) -> None:
    seen: list[tuple[float, str]] = []
    began = time.monotonic()
    command = "for i in 1 2 3 4 5 6 7 8 9 10; do echo $i; sleep 0.3; done"
    result = box.cmd.exec(command, stdout=lambda text: seen.append((time.monotonic() - began, text)))
    assert "".join(text for _, text in seen).split() == [str(number) for number in range(1, 11)]
    assert result.exit_code == 0 and seen[0][0] < time.monotonic() - began - 0.5


def test_stdin_and_its_end(box: Any) -> None:
    execution = box.cmd.exec_async("cat; echo over", attach_stdin=True)
    execution_id = execution.execution_id
    api = box._client.devboxes.executions
    api.send_std_in(execution_id, devbox_id=box.id, text="hi\n")
    api.send_std_in(execution_id, devbox_id=box.id, signal="EOF")
    assert execution.result().stdout() == "hi\nover\n"


def test_a_kill_ends_everything(box: Any) -> None:
    execution = box.cmd.exec_async("sleep 4242")
    assert execution.get_state().status == "running"
    execution.kill()
    began = time.monotonic()
    assert execution.result().exit_code != 0
    assert time.monotonic() - began < 3
    assert box.cmd.exec("pgrep -f 'sleep 424[2]' || echo none").stdout() == "none\n"


def test_files_up_and_down(box: Any) -> None:
    content = bytes(range(256)) * 4096
    box.file.upload(path="d/x.bin", file=content)
    assert box.file.download(path="d/x.bin") == content
    assert box.cmd.exec("wc -c < ~/d/x.bin").stdout().strip() == str(len(content))
    box.file.upload(path="/tmp/ü \"x\"/y", file=b"")
    assert box.file.download(path="/tmp/ü \"x\"/y") == b""
    box.file.write(file_path="/tmp/text", contents="ünïcode\n")
    assert box.file.read(file_path="/tmp/text") == "ünïcode\n"
    began = time.monotonic()
    for call in (lambda: box.file.download(path="/none"), lambda: box.file.read(file_path="/none")):
        with pytest.raises(runloop.NotFoundError):
            call()
    with pytest.raises(runloop.BadRequestError):
        box.file.download(path="/tmp")
    assert time.monotonic() - began < 2, "nothing is tried again"


def test_a_large_file_up_and_down(box: Any) -> None:
    content = b"0123456789abcdef" * (40 << 16)
    box.file.upload(path="/tmp/large", file=content)
    assert box.file.download(path="/tmp/large") == content


def test_shutting_down_twice_and_coming_back_later(sdk: Any) -> None:
    box = sdk.devbox.create()
    assert sdk.devbox.from_id(box.id).cmd.exec("echo same").stdout() == "same\n"
    assert sdk.api.devboxes.shutdown(box.id).status == "shutdown"
    assert sdk.api.devboxes.shutdown(box.id).status == "shutdown"
    assert box.get_info().status == "shutdown"
    began = time.monotonic()
    with pytest.raises(runloop.BadRequestError, match="shut down"):
        box.cmd.exec("true")
    if VERSION >= (1, 30):
        with pytest.raises(runloop.RunloopError, match="shutdown"):
            sdk.devbox.from_id(box.id)
    for unknown in ("dbx_nonsense", "dbx_" + "0" * 48, box.id[:-1] + ("0" if box.id[-1] != "0" else "1")):
        with pytest.raises(runloop.NotFoundError):
            sdk.api.devboxes.retrieve(unknown)
    assert time.monotonic() - began < 5


def test_devboxes_are_listed_page_by_page(sdk: Any) -> None:
    boxes = [sdk.devbox.create(metadata={"page": "yes"}) for _ in range(7)]
    try:
        ids = [info.id for info in sdk.api.devboxes.list(limit=3, status="running")]
        assert len(ids) == len(set(ids)) and {box.id for box in boxes} <= set(ids)
        assert list(sdk.api.devboxes.list(limit=3, status="suspended")) == []
    finally:
        for box in boxes:
            box.shutdown()


def test_a_request_that_is_repeated_is_one(sdk: Any) -> None:
    first = sdk.api.devboxes.create(name="once", idempotency_key="same-create")
    second = sdk.api.devboxes.create(name="once", idempotency_key="same-create")
    try:
        assert first.id == second.id
        for _ in range(2):
            sdk.api.devboxes.execute_async(first.id, command="echo x >> /tmp/times", idempotency_key="same-command")
        count = sdk.devbox.from_id(first.id).cmd.exec("sleep 0.2; wc -l < /tmp/times").stdout()
        assert count.strip() == "1"
    finally:
        sdk.api.devboxes.shutdown(first.id)


def test_what_a_devbox_is_made_with(sdk: Any) -> None:
    box = sdk.devbox.create(
        environment_variables={"GREETING": "hi there"},
        file_mounts={"/etc/mounted": "mounted\n"},
        launch_parameters={
            "resource_size_request": "SMALL",
            "keep_alive_time_seconds": 600,
            "launch_commands": ["echo launched > /tmp/launched"],
        },
    )
    try:
        result = box.cmd.exec("echo $GREETING; cat /etc/mounted /tmp/launched")
        assert result.stdout() == "hi there\nmounted\nlaunched\n"
        assert box.get_info().launch_parameters.keep_alive_time_seconds == 600
        box.keep_alive()
        changed = sdk.api.devboxes.update(box.id, name="other", metadata={"x": "y"})
        assert (changed.name, changed.metadata) == ("other", {"x": "y"})
    finally:
        box.shutdown()
    began = time.monotonic()
    for odd in (
        {"launch_parameters": {"launch_commands": ["echo no >&2; exit 3"]}},
        {"launch_parameters": {"resource_size_request": "ENORMOUS"}},
        {"entrypoint": "sleep 1"},
        {"snapshot_id": "snp_1"},
        {"metadata": {"a=b": "x"}},
    ):
        with pytest.raises(runloop.BadRequestError):
            sdk.devbox.create(**odd)
    assert time.monotonic() - began < 10


def test_a_devbox_that_nobody_keeps_alive_is_shut_down(sdk: Any) -> None:
    box = sdk.devbox.create(launch_parameters={"keep_alive_time_seconds": 2})
    deadline = time.monotonic() + 30
    while box.get_info().status != "shutdown":
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_blueprint_is_built_and_booted(sdk: Any) -> None:
    text = "FROM python:3\nRUN echo built > /etc/built\n"
    blueprint = sdk.api.blueprints.create_and_await_build_complete(name="tools", dockerfile=text)
    assert blueprint.status == "build_complete" and blueprint.id.startswith("bpt_")
    for box in (
        sdk.devbox.create_from_blueprint_name("tools"),
        sdk.devbox.create_from_blueprint_id(blueprint.id),
    ):
        assert box.cmd.exec("cat /etc/built").stdout() == "built\n"
        box.shutdown()
    assert [found.name for found in sdk.api.blueprints.list(name="tools")] == ["tools"]
    assert sdk.api.blueprints.logs(blueprint.id).logs
    with pytest.raises(runloop.RunloopError, match="failed"):
        sdk.api.blueprints.create_and_await_build_complete(name="broken", dockerfile="FROM python:3\nRUN exit 3\n")
    with pytest.raises(runloop.BadRequestError):
        sdk.api.blueprints.create(name="nonsense", dockerfile="NONSENSE\n")
    with pytest.raises(runloop.NotFoundError):
        sdk.devbox.create_from_blueprint_name("nowhere")
    sdk.api.blueprints.delete(blueprint.id)
    assert list(sdk.api.blueprints.list(name="tools")) == []


def test_suspend_and_resume(box: Any) -> None:
    box.file.write(file_path="/tmp/kept", contents="kept")
    assert box.suspend().status == "suspended"
    assert box.resume().status == "running"
    assert box.file.read(file_path="/tmp/kept") == "kept"
    assert box.suspend().status == "suspended"
    assert box.cmd.exec("cat /tmp/kept").stdout() == "kept", "a command resumes it"


def test_the_same_with_asyncio(switched: Daemon) -> None:
    from runloop_api_client import AsyncRunloopSDK

    async def everything() -> None:
        async with AsyncRunloopSDK() as sdk:
            box = await sdk.devbox.create()
            try:
                results = await asyncio.gather(*(box.cmd.exec(f"echo {number}") for number in range(8)))
                assert [await result.stdout() for result in results] == [f"{number}\n" for number in range(8)]
                await box.file.upload(path="a", file=b"bytes")
                assert await box.file.download(path="a") == b"bytes"
            finally:
                await box.shutdown()

    asyncio.run(everything())


def test_odd_arguments_are_never_our_failure(box: Any, daemon: Daemon) -> None:
    devbox = f"/runloop/v1/devboxes/{box.id}"
    for method, path, body in [
        ("POST", "/runloop/v1/devboxes", {"launch_parameters": "x"}),
        ("POST", "/runloop/v1/devboxes", {"environment_variables": {"a=b": "x"}}),
        ("POST", "/runloop/v1/devboxes", {"mounts": [{"type": "object_mount"}]}),
        ("POST", "/runloop/v1/devboxes", {"blueprint_id": "a", "blueprint_name": "b"}),
        ("GET", "/runloop/v1/devboxes?limit=0", None),
        ("GET", "/runloop/v1/devboxes?starting_after=nonsense", None),
        ("GET", "/runloop/v1/devboxes/%00", None),
        ("POST", f"{devbox}/execute_async", {}),
        ("POST", f"{devbox}/execute_async", {"command": "a\0b"}),
        ("POST", f"{devbox}/executions/none/kill", {}),
        ("GET", f"{devbox}/executions/none", None),
        ("POST", f"{devbox}/upload_file", {"not": "a form"}),
        ("POST", f"{devbox}/download_file", {}),
        ("POST", f"{devbox}/snapshot_disk", {}),
        ("POST", "/runloop/v1/blueprints", {}),
        ("GET", "/runloop/v1/blueprints/none", None),
        ("GET", "/runloop/v1/nowhere", None),
        ("PATCH", "/runloop/v1/devboxes", {}),
    ]:
        status, answer = daemon.answer(method, path, body)
        assert 400 <= status < 500, f"{method} {path} {body}: {status} {answer}"
        assert answer["message"], answer
    began = time.monotonic()
    status, _ = daemon.answer("POST", f"{devbox}/wait_for_status", {"statuses": ["suspended"], "timeout_seconds": 1})
    assert status == 408 and time.monotonic() - began >= 1, "it is really held"


def test_another_owner_sees_nothing(box: Any, daemon: Daemon) -> None:
    key = daemon.ask("POST", "/v1/keys", {"owner": "eve"})["secret"]
    assert daemon.ask("GET", "/runloop/v1/devboxes", key=key)["devboxes"] == []
    for method, path in [("GET", ""), ("POST", "/shutdown"), ("POST", "/execute_async"), ("POST", "/download_file")]:
        assert daemon.answer(method, f"/runloop/v1/devboxes/{box.id}{path}", {}, key=key)[0] == 404, path
    assert box.get_info().status == "running"
