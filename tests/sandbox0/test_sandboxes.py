"""Sandboxes: claim, list, update, pause, resume, refresh; templates, snapshots, networks, services; and what is refused."""

from __future__ import annotations

import urllib.request
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from conftest import BASE, VERSION, a_client, settings
from daemon import wait_until
from raw import Daemon
from sandbox0 import APIError, CmdOptions
from sandbox0.apispec.models.sandbox_config import SandboxConfig
from sandbox0.apispec.models.sandbox_network_policy import SandboxNetworkPolicy
from sandbox0.apispec.models.sandbox_refresh_request import SandboxRefreshRequest
from sandbox0.apispec.models.sandbox_update_config import SandboxUpdateConfig
from sandbox0.apispec.models.sandbox_update_request import SandboxUpdateRequest


def status_of(error: pytest.ExceptionInfo[APIError]) -> tuple[int, str]:
    return error.value.status_code, error.value.code


def near(at: datetime, seconds: float) -> bool:
    """Whether something happens about that many seconds from now."""
    return abs((at - datetime.now(timezone.utc)) - timedelta(seconds=seconds)) < timedelta(seconds=120)


def test_a_claimed_sandbox_runs(client: Any, sandbox: Any) -> None:
    assert sandbox.id.startswith("sb_") and sandbox.status == "running" and sandbox.template == "default"
    found = client.sandboxes.get(sandbox.id)
    assert (found.id, found.status, found.paused, found.auto_resume) == (sandbox.id, "running", False, True)
    assert found.expires_at is None and found.hard_expires_at is None, "nothing was asked for"
    assert client.sandboxes.status(sandbox.id).status == "running"
    assert sandbox.cmd("pwd").stdout == "/workspace\n"


def test_lengths_are_kept(client: Any) -> None:
    with client.sandboxes.open("default", config=SandboxConfig(ttl=3600, hard_ttl=2_592_000)) as sandbox:
        found = client.sandboxes.get(sandbox.id)
        assert near(found.expires_at, 3600) and near(found.hard_expires_at, 2_592_000)
        changed = client.sandboxes.update(
            sandbox.id, SandboxUpdateRequest(config=SandboxUpdateConfig(ttl=7200, auto_resume=False))
        )
        assert near(changed.expires_at, 7200) and near(changed.hard_expires_at, 2_592_000)
        assert changed.auto_resume is False
        refreshed = client.sandboxes.refresh(sandbox.id, SandboxRefreshRequest(duration=60))
        assert near(refreshed.expires_at, 60) and near(refreshed.hard_expires_at, 2_592_000)
        assert near(client.sandboxes.refresh(sandbox.id).expires_at, 7200), "the length that was configured"
    with pytest.raises(APIError) as error:
        client.sandboxes.claim("default", config=SandboxConfig(ttl=10, hard_ttl=5))
    assert status_of(error) == (400, "bad_request")


def test_a_ttl_pauses_and_a_hard_ttl_deletes(client: Any) -> None:
    sandbox = client.sandboxes.claim("default", config=SandboxConfig(ttl=3))
    sandbox.write_file("kept", b"here")
    wait_until(lambda: client.sandboxes.get(sandbox.id).status == "paused")
    before = client.sandboxes.get(sandbox.id)
    assert before.paused and before.expires_at is None
    assert sandbox.read_file("kept") == b"here", "a use resumes it"
    client.sandboxes.delete(sandbox.id)
    sandbox = client.sandboxes.claim("default", config=SandboxConfig(hard_ttl=1))

    def is_gone() -> bool:
        try:
            client.sandboxes.get(sandbox.id)
        except APIError as error:
            return error.status_code == 404
        return False

    wait_until(is_gone)


def test_pause_and_resume(client: Any, sandbox: Any) -> None:
    first = client.sandboxes.get(sandbox.id)
    sandbox.cmd("sh", CmdOptions(command=["sh", "-c", "echo kept > /workspace/a"]))
    assert client.sandboxes.pause(sandbox.id).paused
    assert client.sandboxes.get(sandbox.id).status == "paused"
    assert [one.id for one in client.sandboxes.list(paused=True)].count(sandbox.id) == 1
    if VERSION >= (0, 10, 3):
        resumed = client.sandboxes.resume_and_wait(sandbox.id)
    else:
        client.sandboxes.resume(sandbox.id)
        resumed = client.sandboxes.get(sandbox.id)
    assert resumed.status == "running" and resumed.runtime_generation == first.runtime_generation + 1
    assert sandbox.cmd("cat a").stdout == "kept\n"
    client.sandboxes.pause(sandbox.id)
    assert sandbox.cmd("cat a").stdout == "kept\n", "a use resumes it"
    assert client.sandboxes.get(sandbox.id).runtime_generation == first.runtime_generation + 2
    client.sandboxes.update(sandbox.id, SandboxUpdateRequest(config=SandboxUpdateConfig(auto_resume=False)))
    client.sandboxes.pause(sandbox.id)
    for use in (lambda: sandbox.cmd("true"), lambda: sandbox.read_file("a"), lambda: sandbox.write_file("b", b"")):
        with pytest.raises(APIError) as error:
            use()
        assert error.value.status_code == 409
    client.sandboxes.resume(sandbox.id)
    assert sandbox.read_file("a") == b"kept\n"


@pytest.mark.skipif(VERSION < (0, 10, 3), reason="this version has no memory")
def test_memory_is_kept_if_asked_for(client: Any, sandbox: Any) -> None:
    counting = sandbox.cmd("sleep 600", CmdOptions(wait=False)).context_id
    client.sandboxes.pause_and_wait(sandbox.id, memory=True)
    assert client.sandboxes.resume(sandbox.id, memory=True).restored_memory is True
    assert sandbox.get_context(counting).running is True
    client.sandboxes.pause_and_wait(sandbox.id)
    with pytest.raises(APIError) as error:
        client.sandboxes.resume(sandbox.id, memory=True)
    assert error.value.status_code == 409


def test_lists_have_pages(client: Any) -> None:
    made = [client.sandboxes.claim("default").id for _ in range(3)]
    try:
        listed = [one.id for one in client.sandboxes.list(template_id="default", limit=2)]
        assert listed == [made[2], made[1]], "newest first"
        assert client.sandboxes.list(offset=2, limit=1)[0].id == made[0]
        assert client.sandboxes.list(template_id="nobody") == []
        assert {one.status for one in client.sandboxes.list(status="running")} == {"running"}
        with pytest.raises(APIError) as error:
            client.sandboxes.list(limit=1000)
        assert status_of(error) == (400, "bad_request")
    finally:
        for name in made:
            client.sandboxes.delete(name)


def test_variables_and_memory(client: Any) -> None:
    config = SandboxConfig.from_dict({"env_vars": {"A": "1", "B": "2"}, "resources": {"memory": "256Mi"}})
    with client.sandboxes.open("default", config=config) as sandbox:
        result = sandbox.cmd("x", CmdOptions(command=["sh", "-c", "echo $A $B"], env_vars={"B": "3"}))
        assert result.stdout == "1 3\n"
        assert client.sandboxes.get(sandbox.id).resources.memory == "256Mi"


def test_what_is_wrong_is_told(client: Any, switched: Daemon) -> None:
    with settings(switched, key="s0_local_0123456789abcdef"), a_client() as wrong, pytest.raises(APIError) as error:
        wrong.sandboxes.claim("default")
    assert error.value.status_code == 401
    if VERSION >= (0, 10, 3):
        assert error.value.code == "unauthorized", "versions before list no failures here"
    with pytest.raises(APIError) as error:
        client.sandboxes.claim("a-template-that-nobody-made")
    assert status_of(error) == (400, "bad_request") and "a-template-that-nobody-made" in error.value.message
    for call in (client.sandboxes.get, client.sandboxes.delete, client.sandboxes.pause, client.sandboxes.status):
        with pytest.raises(APIError) as error:
            call("sb_abc123")
        assert status_of(error) == (404, "not_found")
    with pytest.raises(APIError) as error:
        client.sandboxes.claim("default", config=SandboxConfig.from_dict({"webhook": {"url": "http://x"}}))
    assert error.value.status_code == 400 and "webhook" in error.value.message
    # What is no route has the same shape.
    for path in (f"{BASE}/api/v1/none", BASE, "/sandbox0"):
        status, body = switched.answer("GET", path)
        assert (status, body["success"], body["error"]["code"]) == (404, False, "not_found")
    status, body = switched.answer("PATCH", f"{BASE}/api/v1/sandboxes", {})
    assert (status, body["success"]) == (405, False)


def test_parts_that_are_not_served_say_what_to_use(client: Any, sandbox: Any) -> None:
    for call in (client.list_credential_sources, sandbox.list_sessions):
        with pytest.raises(APIError) as error:
            call()
        assert error.value.status_code == 501 and "this server" in error.value.message
    if VERSION >= (0, 10, 3):
        quotas = {one.dimension: one for one in client.list_team_quotas()}
        assert quotas["active_sandboxes"].unlimited and quotas["active_sandboxes"].current >= 1


def test_templates(client: Any, switched: Daemon) -> None:
    assert "default" in {one.template_id for one in client.list_templates()}
    from sandbox0.apispec.models.sandbox_template_spec import SandboxTemplateSpec
    from sandbox0.apispec.models.template_create_request import TemplateCreateRequest

    spec = {"mainContainer": {"image": "python:3", "resources": {"memory": "256Mi"}}, "envVars": {"FROM": "template"}}
    request = TemplateCreateRequest(template_id="mine", spec=SandboxTemplateSpec.from_dict(spec))
    made = client.create_template(request)
    assert made.template_id == "mine" and client.get_template("mine").spec.main_container.resources.memory == "256Mi"
    with client.sandboxes.open("mine") as sandbox:
        assert sandbox.template == "mine" and client.sandboxes.get(sandbox.id).template_id == "mine"
        assert sandbox.cmd("sh", CmdOptions(command=["sh", "-c", "echo $FROM; pwd"])).stdout == "template\n/workspace\n"
    client.delete_template("mine")
    with pytest.raises(APIError) as error:
        client.get_template("mine")
    assert status_of(error) == (404, "not_found")


def test_snapshots_and_forks(client: Any, sandbox: Any) -> None:
    from sandbox0.apispec.models.create_sandbox_root_fs_snapshot_request import CreateSandboxRootFSSnapshotRequest

    sandbox.write_file("a", b"before")
    request = CreateSandboxRootFSSnapshotRequest(name="my first: one", description="a text")
    taken = client.sandboxes.create_rootfs_snapshot(sandbox.id, request)
    assert (taken.sandbox_id, taken.name, taken.description) == (sandbox.id, "my first: one", "a text")
    sandbox.write_file("a", b"after")
    assert [one.id for one in client.sandboxes.list_rootfs_snapshots(sandbox.id)] == [taken.id]
    assert client.sandboxes.get_rootfs_snapshot(taken.id).name == "my first: one"
    with client.sandboxes.open("default", snapshot_id=taken.id) as child:
        assert child.read_file("a") == b"before"
    # With a key, asking twice makes one.
    fork = client.sandboxes.fork(sandbox.id, **({"idempotency_key": "k"} if VERSION >= (0, 10, 3) else {}))
    assert fork.source_sandbox_id == sandbox.id and fork.sandbox.status == "paused"
    if VERSION >= (0, 10, 3):
        assert client.sandboxes.fork(sandbox.id, idempotency_key="k").sandbox.id == fork.sandbox.id
    assert client.sandbox(fork.sandbox.id).read_file("a") == b"after"
    client.sandboxes.delete(fork.sandbox.id)
    client.sandboxes.delete_rootfs_snapshot(taken.id)
    with pytest.raises(APIError) as error:
        client.sandboxes.get_rootfs_snapshot(taken.id)
    assert status_of(error) == (404, "not_found")


def test_files_are_restored_where_the_store_can(client: Any, sandbox: Any) -> None:
    from sandbox0.apispec.models.restore_sandbox_root_fs_request import RestoreSandboxRootFSRequest

    sandbox.write_file("a", b"before")
    taken = client.sandboxes.create_rootfs_snapshot(sandbox.id)
    request = RestoreSandboxRootFSRequest(snapshot_id=taken.id)
    with pytest.raises(APIError) as error:
        client.sandboxes.restore_rootfs(sandbox.id, request)
    assert status_of(error) == (409, "conflict") and "pause" in error.value.message
    client.sandboxes.pause(sandbox.id)
    # The tests' store is plain directories, which cannot go back.
    with pytest.raises(APIError) as error:
        client.sandboxes.restore_rootfs(sandbox.id, request)
    assert status_of(error) == (409, "conflict")
    assert client.sandboxes.get(sandbox.id).status == "paused"
    client.sandboxes.delete_rootfs_snapshot(taken.id)


def test_a_template_from_a_sandbox(client: Any, sandbox: Any) -> None:
    sandbox.write_file("/srv/installed", b"yes")
    from sandbox0.apispec.models.template_from_sandbox_create_request import TemplateFromSandboxCreateRequest

    request = TemplateFromSandboxCreateRequest(template_id="captured", sandbox_id=sandbox.id)
    made = client.create_template_from_sandbox(request)
    assert made.template_id == "captured"
    client.wait_template_ready("captured")
    with client.sandboxes.open("captured") as child:
        assert child.read_file("/srv/installed") == b"yes"
    assert "captured" in {one.template_id for one in client.list_templates()}
    client.delete_template("captured")


def test_networks(client: Any) -> None:
    rule = {"action": "allow", "domains": ["example.com"], "ports": [{"port": 443}]}
    policy = {"mode": "block-all", "egress": {"trafficRules": [rule]}}
    config = SandboxConfig.from_dict({"network": policy})
    with client.sandboxes.open("default", config=config) as sandbox:
        assert sandbox.get_network_policy().to_dict()["egress"]["trafficRules"][0]["domains"] == ["example.com"]
        changed = sandbox.update_network_policy(SandboxNetworkPolicy.from_dict({"mode": "block-all"}))
        assert changed.to_dict()["mode"] == "block-all"
        mixed = [{"action": "allow", "domains": ["*.example.com"]}, {"action": "deny", "domains": ["a.example.com"]}]
        refused = SandboxNetworkPolicy.from_dict({"mode": "block-all", "egress": {"trafficRules": mixed}})
        with pytest.raises(APIError) as error:
            sandbox.update_network_policy(refused)
        assert error.value.status_code == 400 and "most specific" in error.value.message
        assert sandbox.get_network_policy().to_dict()["mode"] == "block-all", "the one before stays"


def test_the_network_is_open_as_the_vendor_has_it(sandbox: Any) -> None:
    assert sandbox.get_network_policy().to_dict()["mode"] == "allow-all"


def test_services_and_previews(client: Any, sandbox: Any) -> None:
    from sandbox0.apispec.api.sandboxes import post_api_v1_sandboxes_id_previews as previews
    from sandbox0.apispec.models.sandbox_app_service import SandboxAppService
    from sandbox0.apispec.models.sandbox_preview_create_request import SandboxPreviewCreateRequest

    sandbox.write_file("/srv/index.html", b"hello from a port")
    sandbox.cmd("python3 -m http.server 8080 --bind 127.0.0.1 --directory /srv", CmdOptions(wait=False))
    service = SandboxAppService.from_dict({"id": "web", "port": 8080, "ingress": {"public": False}})
    updated = sandbox.update_services([service])
    assert [one.id for one in updated.services] == ["web"] and updated.services[0].publishable is False
    assert [one.id for one in sandbox.get_services().services] == ["web"]
    wrong = SandboxAppService.from_dict({"id": "f", "port": 1, "runtime": {"type": "cmd"}, "ingress": {"public": False}})
    with pytest.raises(APIError) as error:
        sandbox.update_services([wrong])
    assert error.value.status_code == 400 and "manual" in error.value.message
    request = SandboxPreviewCreateRequest(port=8080, path="/index.html")
    grant = previews.sync_detailed(id=sandbox.id, client=client.api, body=request).parsed.data
    # Not every resolver finds names below `localhost`: the host is named in a header instead.
    host, rest = grant.url.removeprefix("http://").split("/", 1)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), KeepCookies())

    def fetched() -> bytes:
        port = host.rsplit(":", 1)[1]
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{rest}", headers={"Host": host})
        try:
            return opener.open(request, timeout=30).read()
        except OSError:
            return b""

    wait_until(lambda: fetched() == b"hello from a port")


class KeepCookies(urllib.request.HTTPRedirectHandler):
    """Follows the redirect that puts a preview's token into a cookie."""

    def redirect_request(self, request: Any, file: Any, code: int, message: str, headers: Any, url: str) -> Any:
        again = super().redirect_request(request, file, code, message, headers, url)
        if again is not None:
            again.add_header("Host", request.get_header("Host"))
            cookies = [cookie.split(";", 1)[0] for cookie in headers.get_all("Set-Cookie", [])]
            again.add_header("Cookie", "; ".join(cookies))
        return again


@pytest.mark.skipif(VERSION >= (0, 10), reason="this version has no volumes")
def test_volumes_outlive_sandboxes(client: Any) -> None:
    from sandbox0.apispec.models.claim_mount_request import ClaimMountRequest
    from sandbox0.apispec.models.create_sandbox_volume_request import CreateSandboxVolumeRequest

    volume = client.create_volume(CreateSandboxVolumeRequest())
    mount = ClaimMountRequest(sandboxvolume_id=volume.id, mount_point="/data")
    with client.sandboxes.open("default", mounts=[mount]) as sandbox:
        sandbox.write_file("/data/kept", b"here")
        with pytest.raises(APIError) as error:
            client.delete_volume(volume.id)
        assert status_of(error) == (409, "conflict")
    with client.sandboxes.open("default", mounts=[mount]) as sandbox:
        assert sandbox.read_file("/data/kept") == b"here"
    assert volume.id in {one.id for one in client.list_volumes()} and client.get_volume(volume.id).id == volume.id
    with pytest.raises(APIError) as error:
        client.list_volume_files(volume.id, "/")
    assert error.value.status_code == 501
    client.delete_volume(volume.id)
    with pytest.raises(APIError) as error:
        client.get_volume(volume.id)
    assert status_of(error) == (404, "not_found")


def test_a_sandbox_of_another_client(client: Any, switched: Daemon) -> None:
    native = switched.ask("POST", "/v1/sandboxes", {})["id"]
    found = client.sandboxes.get(native)
    assert found.status == "running" and found.id == f"sb_{native.replace('-', '')}"
    assert client.sandbox(found.id).cmd("echo hello").stdout == "hello\n"
    client.sandboxes.delete(found.id)
