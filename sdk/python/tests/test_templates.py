"""Templates, builds and images: what sandboxes are made from."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import wait_until
from harness import BUSYBOX, Daemon, Registry, tiny

from shoal import (
    AsyncSandboxClient,
    Build,
    LayerProgress,
    ResourceCreationError,
    ResourceInUseError,
    ResourceNameConflictError,
    ResourceNotFoundError,
    ResourceSpec,
    ResourceTimeoutError,
    SandboxClient,
    SandboxClientError,
    ValidationError,
)
from shoal._archive import Ignore, pack_context


@pytest.fixture(scope="module")
def base(daemon: Daemon) -> Iterator[str]:
    """An image to build on."""
    with daemon.client() as client:
        client.import_image(tiny(), name="base:1")
        yield "base:1"
        # Builds keep what they made for a while, and hold it.
        client.delete_image("base:1", force=True)


def test_a_template_is_made_found_changed_and_deleted(client: SandboxClient) -> None:
    made = client.create_template("plain", "host", cpu="250m", memory="128Mi", disk="1Gi", labels={"team": "a"})
    assert (made.name, made.image, made.version, made.state) == ("plain", "host", 1, "ready")
    assert made.resources == ResourceSpec("250m", "128Mi", "1Gi")
    assert (made.volume_mounts, made.sandboxes, made.built_in) == ([], 0, False)
    assert made.id and made.created_at and made.updated_at
    assert client.get_template("plain") == made
    assert {template.name for template in client.list_templates()} >= {"default", "plain"}
    with pytest.raises(ResourceNameConflictError) as taken:
        client.create_template("plain")
    assert taken.value.resource_type == "template"
    assert taken.value.hint == "choose another name, or delete the other one first"
    with pytest.raises(ValueError, match="`disk` and `storage` are the same"):
        client.create_template("both", disk="1Gi", storage="1Gi")
    assert made.resources.disk == "1Gi"
    client.create_template("other")
    with pytest.raises(ResourceNameConflictError) as taken:
        client.update_template("plain", new_name="other")
    assert taken.value.resource_type == "template"
    client.delete_template("other")
    renamed = client.update_template("plain", new_name="plain v2/é")
    assert (renamed.id, renamed.name, renamed.version) == (made.id, "plain v2/é", 1)
    changed = client.update_template("plain v2/é", cpu="1", disk="", env={"A": "1"}, command=["true"], cwd="/tmp")
    assert (changed.version, changed.resources) == (2, ResourceSpec("1", "128Mi", None))
    assert (changed.env, changed.command, changed.cwd, changed.labels) == ({"A": "1"}, ["true"], "/tmp", {"team": "a"})
    assert client.update_template("plain v2/é", cwd="", labels={}).cwd is None
    client.delete_template("plain v2/é")
    for call in (client.get_template, client.delete_template, client.prepare_template):
        with pytest.raises(ResourceNotFoundError) as gone:
            call("plain v2/é")
        assert gone.value.resource_type == "template"


def test_the_documented_defaults_are_those_of_a_template(client: SandboxClient) -> None:
    assert client.create_template(name="documented", image="host").resources == ResourceSpec("500m", "512Mi", None)
    client.delete_template("documented")


def test_a_sandbox_has_what_its_template_says(client: SandboxClient) -> None:
    client.create_template(
        "rich", env={"WORD": "hello"}, cwd="/tmp", user="1000:1000", labels={"team": "a"}, memory="256Mi"
    )
    with client.sandbox(template_name="rich", labels={"more": "b"}) as sb:
        assert sb.run("echo $WORD $PWD $(id -u)").stdout == "hello /tmp 1000\n"
        assert (sb.template_name, sb.info.template_version, sb.labels) == ("rich", 1, {"team": "a", "more": "b"})
        assert sb.limits.memory_bytes == 256 << 20
        client.update_template("rich", env={"WORD": "bye"})
        assert sb.run("echo $WORD").stdout == "hello\n"
        with client.sandbox("rich") as newer:
            assert (newer.run("echo $WORD").stdout, newer.info.template_version) == ("bye\n", 2)
        with pytest.raises(ResourceInUseError) as used:
            client.delete_template("rich")
        assert used.value.resource_type == "template"
    client.delete_template("rich")
    with pytest.raises(ResourceNotFoundError) as gone, client.sandbox(template_name="rich"):
        pass
    assert gone.value.resource_type == "template"


def test_applying_twice_changes_nothing(client: SandboxClient) -> None:
    assert [client.apply_template("applied", env={"A": "1"}).version for _ in range(2)] == [1, 1]
    assert client.apply_template("applied").env == {}
    client.delete_template("applied")


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        ("memory", {"memory": "12Q"}),
        ("cpu", {"cpu": "-1"}),
        ("cwd", {"cwd": "relative"}),
        ("name", {"name": ""}),
        ("name", {"name": "x" * 256}),
    ],
)
def test_what_cannot_be_taken_is_named(client: SandboxClient, field: str, wish: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        client.create_template(**{"name": "rubbish", **wish})  # type: ignore[arg-type]
    assert caught.value.field == field


def test_the_built_in_template_stays(client: SandboxClient) -> None:
    assert client.get_template("default").built_in
    for change in (lambda: client.update_template("default", memory="1Gi"), lambda: client.delete_template("default")):
        with pytest.raises(SandboxClientError) as caught:
            change()
        assert caught.value.code == "template_built_in"


def test_an_image_that_cannot_be_had_is_told_wherever_it_is_asked_for(client: SandboxClient) -> None:
    nowhere = "localhost:1/team/app:1"
    made = client.create_template("far", nowhere)
    assert made.state == "preparing"
    with pytest.raises(ResourceCreationError) as caught:
        client.wait_for_template("far")
    assert (caught.value.resource_type, caught.value.error_type) == ("template", "ImagePull")
    failed = client.get_template("far")
    assert failed.state == "failed" and "localhost:1" in str(failed.reason)
    with pytest.raises(ResourceCreationError) as caught, client.sandbox("far"):
        pass
    assert (caught.value.resource_type, caught.value.error_type) == ("sandbox", "ImagePull")
    with pytest.raises(ResourceCreationError) as caught, client.sandbox(image=nowhere):
        pass
    assert (caught.value.resource_type, caught.value.error_type) == ("sandbox", "ImagePull")
    for on_progress in (None, lambda layers: None):
        with pytest.raises(ResourceCreationError) as caught:
            client.pull_image(nowhere, on_progress=on_progress)
        assert (caught.value.resource_type, caught.value.code) == ("image", "registry_unreachable")
    client.set_image_alias(nowhere, "host")
    client.prepare_template("far")
    assert client.wait_for_template("far").image_target == "host"
    client.delete_template("far")
    client.delete_image_alias(nowhere)
    with pytest.raises(ResourceNotFoundError) as gone:
        client.wait_for_template("far")
    assert gone.value.resource_type == "template"


def test_aliases_stand_for_other_images(client: SandboxClient) -> None:
    assert client.set_image_alias("python:3.12-slim", "host").target == "host"
    assert [(alias.name, alias.target) for alias in client.list_image_aliases()] == [("python:3.12-slim", "host")]
    client.create_template(name="python-sandbox", image="python:3.12-slim")
    with client.sandbox(template_name="python-sandbox") as sb:
        assert sb.run("python3 -c 'print(2 + 2)'").stdout == "4\n"
    client.delete_template("python-sandbox")
    client.delete_image_alias("python:3.12-slim")
    with pytest.raises(ResourceNotFoundError) as gone:
        client.delete_image_alias("python:3.12-slim")
    assert gone.value.resource_type == "alias"


def test_what_nobody_uses_is_collected(client: SandboxClient) -> None:
    client.collect_images()  # What other tests have left.
    (image,) = client.import_image(tiny("one"), name="short:1")
    with client.sandbox(image="short:1") as sb:
        assert client.delete_image("short:1", force=True).images == 0
        assert sb.run("echo up").stdout == "up\n"
        assert client.collect_images().images == 0
    wait_until(lambda: client.collect_images().images == 0)
    assert image.digest not in [entry.digest for entry in client.list_images()]
    client.import_image(tiny("two"), name="short:2")
    collected = client.delete_image("short:2")
    assert collected.images == 1 and collected.layers >= 1 and collected.bytes >= BUSYBOX.stat().st_size


def test_a_pull_shows_its_progress(client: SandboxClient, registry: Registry) -> None:
    reference = registry.push("team/app:1", tiny().getvalue())
    seen: list[list[LayerProgress]] = []
    image = client.pull_image(reference, insecure=True, on_progress=seen.append)
    assert reference in image.names
    assert seen and all(isinstance(layer, LayerProgress) for layer in seen[-1])
    assert seen[-1][0].total_bytes > 0
    assert client.pull_image(reference, insecure=True).digest == image.digest
    client.create_template("pulled", reference, wait_for_ready=True)
    assert client.get_template("pulled").image_digest == image.digest
    with client.sandbox(template_name="pulled") as sb:
        assert sb.run("echo $((2 + 2))").stdout == "4\n"
    client.delete_template("pulled")
    client.delete_image(reference)
    with pytest.raises(ResourceNotFoundError) as gone:
        client.pull_image(f"{registry.address}/team/none:1", insecure=True)
    assert gone.value.resource_type == "image"


def test_a_wait_for_an_image_ends(client: SandboxClient) -> None:
    # One that takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"localhost:{silent.getsockname()[1]}"
        client.create_template("slow", f"{address}/team/app:1")
        with pytest.raises(ResourceTimeoutError) as caught:
            client.wait_for_template("slow", timeout=0)
        assert (caught.value.resource_type, caught.value.last_status) == ("template", "preparing")
        with pytest.raises(ResourceTimeoutError) as caught:
            client.pull_image(f"{address}/team/app:1", timeout=0.2)
        assert caught.value.resource_type == "image"
        client.delete_template("slow")


# --- Builds


def project(directory: Path, dockerfile: str, **files: str) -> Path:
    (directory / "Dockerfile").write_text(dockerfile)
    for name, text in files.items():
        (directory / name.replace("_", ".")).write_text(text)
    return directory


def test_a_build_makes_a_template(client: SandboxClient, base: str, tmp_path: Path) -> None:
    steps = f"FROM {base}\nARG WHO=you\nENV PATH=/bin GREETING=$WHO\nCOPY notes.txt /srv/\nRUN wc -c < /srv/notes.txt > /n\n"
    context = project(tmp_path, steps, notes_txt="hello\n", left_out="x", _dockerignore="left.*\n")
    log: list[str] = []
    template = client.build_template(
        "built", context, args={"WHO": "reader"}, memory="256Mi", labels={"team": "a"}, on_log=log.append
    )
    assert (template.name, template.version, template.labels) == ("built", 1, {"team": "a"})
    assert template.resources.memory == "256Mi"
    assert f"FROM {base}" in "".join(log) and "version 1 is ready" in "".join(log)
    with client.sandbox("built") as sb:
        assert sb.run("echo $GREETING; cat /n").stdout == "reader\n6\n"
    assert (
        client.build_template(
            "built", str(context), args={"WHO": "reader"}, memory="256Mi", labels={"team": "a"}
        ).version
        == 1
    )
    assert [build.state for build in client.list_builds() if build.template == "built"] == ["done", "done"]
    client.delete_template("built")


def test_a_build_by_a_script_and_by_an_archive(client: SandboxClient, base: str, tmp_path: Path) -> None:
    made = client.build_template("scripted", image=base, script="mkdir /opt\necho ready > /opt/ready\n", env={"A": "1"})
    assert made.env == {"A": "1"}
    with client.sandbox("scripted") as sb:
        assert sb.run("cat /opt/ready; echo $A").stdout == "ready\n1\n"
    client.delete_template("scripted")
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "app").write_text(f"FROM {base} AS one\nRUN echo 1 > /n\nFROM {base}\nRUN echo 2 > /n\n")
    with pack_context(tmp_path, "docker/app") as archive:
        client.build_template("staged", archive, dockerfile="docker/app", target="one")
    with client.sandbox("staged") as sb:
        assert sb.run("cat /n").stdout == "1\n"
    client.delete_template("staged")


def test_a_secret_is_in_the_step_and_nowhere_else(client: SandboxClient, base: str, tmp_path: Path) -> None:
    context = project(tmp_path, f"FROM {base}\nRUN --mount=type=secret,id=token wc -c < /run/secrets/token > /length\n")
    log: list[str] = []
    client.build_template("secretive", context, secrets={"token": "s3cret-é"}, on_log=log.append)
    assert "s3cret" not in "".join(log)
    with client.sandbox("secretive") as sb:
        assert sb.run("cat /length; test -e /run/secrets/token || echo gone").stdout == "9\ngone\n"
    client.delete_template("secretive")


def test_a_build_that_fails_says_why_and_changes_nothing(client: SandboxClient, base: str, tmp_path: Path) -> None:
    log: list[str] = []
    with pytest.raises(ResourceCreationError) as caught:
        client.build_template("broken", image=base, script="echo before; false", on_log=log.append)
    assert (caught.value.resource_type, caught.value.error_type) == ("template", "Build")
    assert "before" in "".join(log)
    with pytest.raises(ResourceNotFoundError):
        client.get_template("broken")
    with pytest.raises(ValidationError) as wrong:
        client.build_template("broken", project(tmp_path, f"FROM {base}\nCOPPY a b\n"))
    assert wrong.value.details["line"] == 2 and "COPY" in str(wrong.value.hint)
    with pytest.raises(ValueError, match="context"):
        client.build_template("broken")
    with pytest.raises(ValueError, match="both"):
        client.build_template("broken", script="true")
    with pytest.raises(FileNotFoundError):
        client.build_template("broken", tmp_path / "nothing")


def test_a_handle_of_a_build_is_left_and_found_again(client: SandboxClient, base: str) -> None:
    handle = client.build_template("handled", image=base, script="echo one; sleep 1; echo two", wait=False)
    text = ""
    for piece in handle:
        text += piece
        if "one\n" in text:
            break
    handle.close()
    again = client.reconnect_build(handle.build_id, offset=handle.offset)
    rest = "".join(again)
    assert "two\n" in rest and "FROM" not in rest
    assert again.result.name == "handled"
    assert "".join(client.reconnect_build(handle.build_id)) == text + rest
    assert "done" in repr(again)
    assert isinstance(again.status(), Build)
    client.delete_template("handled")
    client.delete_build(handle.build_id)
    with pytest.raises(ResourceNotFoundError) as gone:
        client.get_build(handle.build_id)
    assert gone.value.resource_type == "build"


def test_a_build_that_is_cancelled_leaves_nothing(client: SandboxClient, base: str) -> None:
    handle = client.build_template("cancelled", image=base, script="echo up; sleep 1000", wait=False)
    for piece in handle:
        if "up\n" in piece:
            handle.cancel()
            break
    with pytest.raises(ResourceNotFoundError):
        handle.status()
    with pytest.raises(ResourceTimeoutError) as late:
        client.build_template("cancelled", image=base, script="echo up; sleep 1000", timeout=1)
    assert late.value.resource_type == "template"

    def angry(text: str) -> None:
        if "up\n" in text:
            raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        client.build_template("cancelled", image=base, script="echo up; sleep 1000", on_log=angry)
    wait_until(lambda: [build for build in client.list_builds() if build.template == "cancelled"] == [])
    with pytest.raises(ResourceNotFoundError):
        client.get_template("cancelled")


def test_ctrl_c_ends_a_build(daemon: Daemon, client: SandboxClient, base: str) -> None:
    program = """
from shoal import SandboxClient
def show(text):
    print(text, end="", flush=True)
with SandboxClient() as client:
    client.build_template("interrupted", image="base:1", script="echo up; sleep 1000", on_log=show)
"""
    environment = {**os.environ, "SHOAL_URL": daemon.url, "SHOAL_API_KEY": daemon.key}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "up\n":
            break
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert "KeyboardInterrupt" in complaint
    wait_until(lambda: [build for build in client.list_builds() if build.template == "interrupted"] == [])


def test_a_log_goes_on_over_a_restart_that_ends_the_build(own_daemon: Daemon) -> None:
    with own_daemon.client() as client:
        client.import_image(tiny(), name="base:1")
        handle = client.build_template("cut", image="base:1", script="echo up; sleep 1000", wait=False)
        text = ""
        for piece in handle:
            text += piece
            if "up\n" in text and own_daemon.address:
                own_daemon.restart()
                break
        text += "".join(handle)
        with pytest.raises(ResourceCreationError) as caught:
            _ = handle.result
        assert caught.value.error_type == "Build"


async def test_templates_and_builds_for_asyncio(async_client: AsyncSandboxClient, base: str) -> None:
    await async_client.create_template(name="async-python", image="host")
    async with await async_client.sandbox(template_name="async-python") as sb:
        assert (await sb.run("echo up")).stdout == "up\n"
    assert (await async_client.update_template("async-python", new_name="async-2")).name == "async-2"
    await async_client.delete_template("async-2")
    log: list[str] = []
    template = await async_client.build_template("async-built", image=base, script="echo up", on_log=log.append)
    assert template.state == "ready" and "up\n" in "".join(log)
    await async_client.delete_template("async-built")
    started = asyncio.Event()

    def on_log(text: str) -> None:
        if "up\n" in text:
            started.set()

    task = asyncio.create_task(
        async_client.build_template("async-cut", image=base, script="echo up; sleep 1000", on_log=on_log)
    )
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    builds = await async_client.list_builds()
    assert [build for build in builds if build.template == "async-cut"] == []


def test_events_tell_of_templates(client: SandboxClient) -> None:
    with client.events() as events:
        assert next(events).type == "ready"
        client.create_template("told")
        client.delete_template("told")
        seen = [(event.type, event.name, event.state, event.version) for event in (next(events), next(events))]
    assert seen == [("template", "told", "ready", 1), ("template_deleted", "told", None, None)]


# --- What is sent of a directory


@pytest.mark.parametrize(
    ("rules", "left_out", "sent"),
    [
        ("# no\n*.log\ntarget/\n", ["a.log", "target", "target/debug/x"], ["deep/a.log", "targets", "# no"]),
        ("**/node_modules\n", ["node_modules", "web/node_modules/y"], ["node_modules2"]),
        ("/docs/*\n!docs/keep.md\n", ["docs/a.md"], ["docs", "docs/keep.md", "src/main.rs"]),
        ("a/**\n", ["a", "a/b", "a/b/c"], ["ab", "b/a"]),
        ("[a-c]?[!x]\n", ["bzz", "c1y"], ["dzz", "bzx", "b/z", "bz"]),
        ("[z-a]\n[\n[]\n", [], ["z", "a", "[", "]"]),
        (r"\*\n", [], ["a"]),
        ("\\*\n", ["*"], ["a"]),
        ("*\n!*.py\n", ["a", "a/b.txt"], ["x.py"]),
        ("**\n", ["a", "a/b"], []),
        ("a/**/b\n", ["a/b", "a/x/y/b", "a/b/c"], ["a", "a/x", "b"]),
        ("", [], ["anything"]),
    ],
)
def test_what_a_dockerignore_means(rules: str, left_out: list[str], sent: list[str]) -> None:
    ignore = Ignore(rules)
    assert [name for name in left_out + sent if ignore.ignores(name)] == left_out


def test_the_dockerfile_is_sent_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in (".dockerignore", "deep/er/Dockerfile", "deep/er/other", "deep/x", "top"):
        (tmp_path / name).write_text("*\n")
    os.mkfifo(tmp_path / "deep" / "er" / "Dockerfile.fifo")
    with pack_context(tmp_path, "./deep/er/Dockerfile") as file, tarfile.open(fileobj=file) as archive:
        assert archive.getnames() == ["deep", "deep/er", "deep/er/Dockerfile"]
