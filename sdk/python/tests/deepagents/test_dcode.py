"""Deep Agents Code: the provider as its registry finds it, and `dcode` itself with a scripted model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon import wait_until
from deepagents_code.integrations.sandbox_factory import create_sandbox
from deepagents_code.integrations.sandbox_provider import SandboxError, SandboxNotFoundError
from deepagents_code.integrations.sandbox_registry import SandboxRegistry
from harness import Daemon

from shoal import ResourceNotFoundError, SandboxClient
from shoal.deepagents import ShoalProvider

HERE = Path(__file__).resolve().parent


@pytest.fixture(autouse=True)
def configured(daemon: Daemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home of its own, and the daemon of the tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SHOAL_URL", daemon.url)
    monkeypatch.setenv("SHOAL_API_KEY", daemon.key)


@pytest.fixture
def scripted_model() -> Iterator[None]:
    """Makes the model known to the server that `dcode` starts, which hears of no PYTHONPATH. The environment is thrown away."""
    path = Path(sysconfig.get_path("purelib")) / "shoal-scripted-model.pth"
    path.write_text(f"{HERE}\n")
    yield
    path.unlink()


def test_the_entry_point_is_found() -> None:
    metadata = SandboxRegistry.load().get_metadata("shoal")
    assert metadata is not None
    assert (metadata.name, metadata.working_dir) == ("shoal", "/workspace")
    assert metadata.supports_sandbox_id and not metadata.supports_snapshot_name


def test_an_owned_sandbox_is_deleted_and_has_its_guards(client: SandboxClient, tmp_path: Path) -> None:
    script = tmp_path / "setup.sh"
    script.write_text("echo prepared > /workspace/setup\n")
    with create_sandbox("shoal", setup_script_path=str(script)) as backend:
        sandbox = client.get_sandbox(backend.id)
        assert [(rule.since, rule.after_seconds, rule.action) for rule in sandbox.lifetime] == [
            ("last_use", 3600, "pause_drop_memory"),
            ("creation", 2_592_000, "delete"),
        ]
        assert sandbox.lifetime[1].acts
        assert backend.execute("cat setup").output == "prepared\n"
    with pytest.raises(ResourceNotFoundError):
        client.get_sandbox(sandbox.id)


def test_an_attached_sandbox_is_left_alone(client: SandboxClient) -> None:
    with client.sandbox(name="mine") as sandbox:
        for name in (sandbox.id, "mine"):
            with create_sandbox("shoal", sandbox_id=name) as backend:
                assert backend.id == sandbox.id
                backend.execute("echo x >> seen")
        assert sandbox.read("/workspace/seen") == b"x\nx\n"
        assert sandbox.refresh().lifetime == []


def test_parameters_come_from_the_configuration(tmp_path: Path) -> None:
    (tmp_path / ".deepagents").mkdir()
    (tmp_path / ".deepagents" / "config.toml").write_text(
        """
[sandboxes]
default = "shoal"
[sandboxes.providers.shoal]
class_path = "shoal.deepagents:ShoalProvider"
working_dir = "/srv/work"
[sandboxes.providers.shoal.params]
template = "default"
sandbox_ttl_sec = 7200
labels = { team = "blue" }
working_dir = "/srv/work"
"""
    )
    # Deep Agents Code looks for its configuration when it is imported.
    program = """
from deepagents_code.integrations.sandbox_factory import create_sandbox
from shoal import SandboxClient
with create_sandbox("shoal") as backend:
    sandbox = SandboxClient().get_sandbox(backend.id)
    print("labels", sandbox.labels)
    print("rules", [rule.after_seconds for rule in sandbox.lifetime])
    print("pwd", backend.execute("pwd").output)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert "labels {'team': 'blue'}" in done.stdout, done.stderr
    assert "rules [7200.0, 2592000.0]" in done.stdout
    assert "pwd /srv/work\n" in done.stdout


def test_what_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = ShoalProvider()
    with pytest.raises(SandboxNotFoundError):
        provider.get_or_create(sandbox_id="nobody")
    with pytest.raises(ValueError, match="`colour`"):
        provider.get_or_create(colour="red")
    with pytest.raises(SandboxError, match="template"):
        provider.get_or_create(template="none")
    provider.delete(sandbox_id="nobody")
    monkeypatch.setenv("DEEPAGENTS_CODE_SHOAL_API_KEY", "wrong")
    with pytest.raises(SandboxError):
        provider.get_or_create()


@pytest.mark.parametrize("end", ["os._exit(1)", "os.kill(os.getpid(), 9)", "raise SystemExit"])
def test_an_owned_sandbox_does_not_outlive_its_program(client: SandboxClient, end: str) -> None:
    program = f"""
import os
from shoal.deepagents import ShoalProvider
provider = ShoalProvider()
print(provider.get_or_create(labels={{"from": "killed"}}).id, flush=True)
kept = provider.get_or_create(labels={{"from": "freed"}})
provider.delete(sandbox_id=kept.id)
{end}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=90)
    assert done.stdout.strip(), done.stderr
    wait_until(lambda: client.list_sandboxes(labels={"from": "killed"}) == [])


def test_without_a_daemon_there_is_a_private_one(tmp_path: Path) -> None:
    program = """
from deepagents_code.integrations.sandbox_factory import create_sandbox
with create_sandbox("shoal") as backend:
    print(backend.execute("echo from a private one").output)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHOAL_")}
    environment |= {"SHOAL_DATA_DIR": str(tmp_path / "none"), "SHOAL_BINARY": os.environ.get("SHOAL_BINARY", "shoal")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90)
    assert "from a private one" in done.stdout, done.stderr


@pytest.mark.usefixtures("scripted_model")
@pytest.mark.parametrize("owned", [True, False])
def test_dcode_drives_a_whole_session(owned: bool, client: SandboxClient, tmp_path: Path) -> None:
    (tmp_path / ".deepagents").mkdir()
    (tmp_path / ".deepagents" / "config.toml").write_text(
        """
[models.providers.scripted]
class_path = "scripted_model:ScriptedModel"
models = ["session"]
[warnings]
suppress = ["ripgrep", "tavily"]
[sandboxes.providers.shoal]
class_path = "shoal.deepagents:ShoalProvider"
[sandboxes.providers.shoal.params]
labels = { from = "dcode" }
"""
    )
    setup = tmp_path / "setup.sh"
    setup.write_text("echo prepared > /workspace/setup\n")
    sandbox = client.create_sandbox()
    before = {command.id for command in sandbox.list_commands()}
    arguments = ["--sandbox", "shoal", "--sandbox-setup", str(setup), "--no-mcp", "-S", "all"]
    arguments += ["-M", "scripted:session", "-n", "print the tenth Fibonacci number"]
    if not owned:
        arguments += ["--sandbox-id", sandbox.id]
    environment = {**os.environ, "LANGSMITH_TRACING": "false", "NO_COLOR": "1"}
    with client.events() as events:
        assert next(events).type == "ready"
        done = subprocess.run(
            [str(Path(sys.executable).parent / "dcode"), *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            stdin=subprocess.DEVNULL,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0, said
        assert "all is done" in said
        if owned:
            made = next(event for event in events if event.type == "sandbox" and event.sandbox_id != sandbox.id)
            wait_until(lambda: client.list_sandboxes(labels={"from": "dcode"}) == [])
            assert made.sandbox_id is not None
            assert {command.id for command in sandbox.list_commands()} == before
        else:
            assert sandbox.read("/workspace/answer.txt") == b"55\n", json.dumps(said)
            assert sandbox.read("/workspace/setup") == b"prepared\n"
            assert sandbox.refresh().state == "running"
    sandbox.delete()
