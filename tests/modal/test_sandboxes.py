"""Sandboxes: create, wait, poll, terminate, find, tags, names, and whatever is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from typing import Any

import modal
import pytest
from harness import NEWER, Daemon, variables, wait_until


def run_elsewhere(daemon: Daemon, program: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A program of its own, switched over by variables alone."""
    environment = {**os.environ, **variables(daemon), **more}
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=110)


def test_variables_switch_a_program_over(daemon: Daemon) -> None:
    # As the documents have it: the app is looked up and not made.
    program = (
        "import modal\n"
        "app = modal.App.lookup('your-app')\n"
        "sb = modal.Sandbox.create(app=app)\n"
        "p = sb.exec('echo', 'hi')\n"
        "print(p.stdout.read(), end='')\n"
        "sb.terminate()\n"
    )
    done = run_elsewhere(daemon, program)
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr


def test_an_app_is_a_name(daemon: Daemon) -> None:
    one = modal.App.lookup("one", create_if_missing=True)
    assert one.app_id.startswith("ap-") and modal.App.lookup("one").app_id == one.app_id
    assert modal.App.lookup("two").app_id != one.app_id


def test_a_wrong_key_is_refused(daemon: Daemon) -> None:
    program = "import modal\nmodal.App.lookup('a', create_if_missing=True)"
    done = run_elsewhere(daemon, program, MODAL_TOKEN_SECRET="wrong-key-of-some-length")
    assert done.returncode != 0 and "AuthError" in done.stderr, done.stderr


def test_ids_have_the_shape_of_their_calls(sb: Any) -> None:
    plain = re.fullmatch(r"sb-[0-9A-Za-z]{22}", sb.object_id)
    assert sb.object_id.startswith("sb-") and (plain is None) == NEWER


def test_a_terminated_sandbox_is_gone(app: Any) -> None:
    sb = modal.Sandbox.create(app=app)
    assert sb.poll() is None
    sb.terminate()
    wait_until(lambda: sb.poll() is not None)
    assert sb.poll() == 137
    with pytest.raises(Exception):  # noqa: B017, PT011 - each version has its own
        sb.exec("true").wait()


def test_a_sandbox_is_found_by_its_id(daemon: Daemon, sb: Any) -> None:
    sb.exec("bash", "-c", "echo kept > /tmp/kept").wait()
    program = f"import modal\nprint(modal.Sandbox.from_id('{sb.object_id}').exec('cat', '/tmp/kept').stdout.read(), end='')"
    done = run_elsewhere(daemon, program)
    assert done.stdout == "kept\n", done.stderr
    unknown = "sb-" + "0" * 22 + ("-v2" if NEWER else "")
    with pytest.raises(modal.exception.NotFoundError):
        modal.Sandbox.from_id(unknown).poll()


def test_the_timeout_ends_a_sandbox(app: Any) -> None:
    sb = modal.Sandbox.create("sleep", "100", app=app, timeout=2)
    with pytest.raises(modal.exception.SandboxTimeoutError):
        sb.wait()
    assert sb.returncode == 124


def test_a_sandbox_with_a_program(app: Any) -> None:
    sb = modal.Sandbox.create("bash", "-c", "read x; echo got $x; exit 7", app=app)
    assert sb.poll() is None
    sb.stdin.write(b"it\n")
    sb.stdin.drain()
    assert sb.stdout.read() == "got it\n"
    sb.wait(raise_on_termination=False)
    assert sb.returncode == 7
    sb.terminate()


def test_lists_and_tags(app: Any) -> None:
    other = modal.App.lookup("another", create_if_missing=True)
    made = [modal.Sandbox.create(app=other) for _ in range(3)]
    for number, sb in enumerate(made):
        sb.set_tags({"n": str(number), "all": "yes"})
    try:
        def ids(**options: Any) -> set[str]:
            return {sb.object_id for sb in modal.Sandbox.list(app_id=other.app_id, **options)}

        assert ids() == {sb.object_id for sb in made}
        assert ids(tags={"all": "yes", "n": "1"}) == {made[1].object_id}
        assert ids(tags={"n": "9"}) == set()
        made[1].set_tags({"n": "changed"})
        assert ids(tags={"all": "yes"}) == {made[0].object_id, made[2].object_id}
        made[0].terminate()
        wait_until(lambda: ids() == {sb.object_id for sb in made[1:]})
    finally:
        for sb in made:
            sb.terminate()


def test_names(app: Any) -> None:
    sb = modal.Sandbox.create(app=app, name="by-name")
    try:
        with pytest.raises(modal.exception.AlreadyExistsError):
            modal.Sandbox.create(app=app, name="by-name")
        assert modal.Sandbox.from_name("tests", "by-name").object_id == sb.object_id
    finally:
        sb.terminate()
    def is_free() -> bool:
        try:
            modal.Sandbox.from_name("tests", "by-name")
        except modal.exception.NotFoundError:
            return True
        return False

    wait_until(is_free)


def test_variables_secrets_and_the_working_directory(app: Any) -> None:
    sb = modal.Sandbox.create(
        app=app,
        secrets=[modal.Secret.from_dict({"A": "secret", "B": "secret"})],
        workdir="/workspace/new",
        block_network=True,
    )
    try:
        done = sb.exec("bash", "-c", "echo $A $B; pwd", secrets=[modal.Secret.from_dict({"B": "exec"})])
        assert done.stdout.read() == "secret exec\n/workspace/new\n"
        assert sb.exec("pwd", workdir="/tmp").stdout.read() == "/tmp\n"
        refused = sb.exec("bash", "-c", "exec 3<>/dev/tcp/192.0.2.1/80")
        assert refused.wait() != 0
    finally:
        sb.terminate()


def policy_in(sb: Any) -> Any:
    return json.loads(sb.exec("cat", "/run/shoal/network.json").stdout.read())


def test_the_network_is_open_unless_the_caller_says_otherwise(app: Any) -> None:
    sb = modal.Sandbox.create(app=app)
    some = modal.Sandbox.create(app=app, cidr_allowlist=["192.0.2.0/24"])
    try:
        assert policy_in(sb)["mode"] == "open", "as the vendor has it"
        policy = policy_in(some)
        assert (policy["mode"], [rule["to"] for rule in policy["rules"]]) == ("none", ["192.0.2.0/24"])
    finally:
        sb.terminate()
        some.terminate()


def test_images_that_need_no_building(daemon: Daemon, app: Any) -> None:
    daemon.ask("PUT", "/v1/image-aliases/tests%3Amachine", {"target": "host"})
    image = modal.Image.from_registry("tests:machine").env({"LAYER": "of the image"}).workdir("/opt")
    sb = modal.Sandbox.create(app=app, image=image)
    try:
        assert sb.exec("bash", "-c", "echo $LAYER; pwd").stdout.read() == "of the image\n/opt\n"
    finally:
        sb.terminate()


def test_what_is_refused_says_why(app: Any) -> None:
    with pytest.raises(Exception, match="no GPUs"):
        modal.Sandbox.create(app=app, gpu="T4")
    with pytest.raises(Exception, match="does not run"):
        modal.Sandbox.create(app=app, image=modal.Image.debian_slim().run_commands("make"))
    with pytest.raises(modal.exception.NotFoundError):
        modal.Sandbox.create(app=app, secrets=[modal.Secret.from_name("absent")])
    with pytest.raises(Exception, match="ports"):
        modal.Sandbox.create(app=app, encrypted_ports=[8000])


def test_nothing_is_told_outside_of_the_protocol(daemon: Daemon) -> None:
    # Over HTTP/1.1, where a status is in the headers all the same.
    import http.client

    host, port = daemon.address
    for path, headers, status in [
        ("/modal.client.ModalClient/Nothing", {"x-modal-token-secret": daemon.key}, "12"),
        ("/modal.client.ModalClient/SandboxWait", {}, "16"),
        ("/modal.task_command_router.TaskCommandRouter/TaskExecWait", {"Authorization": "Bearer x"}, "16"),
        ("/modal.client.ModalClient/SandboxWait", {"x-modal-token-secret": daemon.key}, "5"),
    ]:
        connection = http.client.HTTPConnection(host, port, timeout=30)
        connection.request("POST", path, b"", {"Content-Type": "application/grpc", **headers})
        answer = connection.getresponse()
        assert (answer.status, answer.getheader("grpc-status")) == (200, status), path
        connection.close()


def test_odd_arguments_are_never_the_daemons_fault(app: Any, sb: Any) -> None:
    odd: list[Any] = [
        lambda: sb.exec("no-such-program").wait(),
        lambda: sb.exec("true", workdir="/no/such").wait(),
        lambda: sb.exec("").wait(),
        lambda: sb.exec("a\0b").wait(),
        lambda: sb.set_tags({"=": "x"}),
        lambda: modal.Sandbox.create(app=app, cpu=100_000.0),
        lambda: modal.Sandbox.create(app=app, memory=10**9),
        lambda: modal.Sandbox.create(app=app, workdir="relative"),
        lambda: modal.Sandbox.from_id("sb-"),
        lambda: modal.Sandbox.from_name("tests", "absent"),
    ]
    for number, ask in enumerate(odd):
        try:
            ask()
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not be the daemon's fault
            text = f"{type(error).__name__}: {error}"
            assert "InternalError" not in text and "a bug here" not in text, (number, text)
    assert sb.exec("echo", "alive").stdout.read() == "alive\n"


def test_the_sandbox_ends_at_its_idle_timeout(app: Any) -> None:
    sb = modal.Sandbox.create(app=app, idle_timeout=1)
    began = time.monotonic()
    wait_until(lambda: time.monotonic() - began > 3 and sb.poll() is not None, 30)
