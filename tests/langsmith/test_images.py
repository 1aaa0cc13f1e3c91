"""The same with images: what the documents call ``python:3.12-slim`` comes from a registry, under that name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from dialect import a_client, legacy, modern, variables
from harness import ALIAS, Daemon, a_daemon
from registry import IMAGES, MARK, a_registry
from test_documented import follow_the_document

GIB = 1 << 30


@pytest.fixture(scope="module")
def imaged_daemon() -> Iterator[Daemon]:
    """A daemon for which Docker Hub is a registry on loopback, and to which no name means this machine."""
    with (
        a_registry() as registry,
        variables(SHOAL_REGISTRY_MIRRORS=f"docker.io={registry.url}"),
        a_daemon(Daemon) as daemon,
    ):
        for alias in daemon.ask("GET", "/v1/image-aliases")["aliases"]:
            daemon.ask("DELETE", f"/v1/image-aliases/{alias['name'].replace('/', '%2F')}")
        yield daemon


def pulled(daemon: Daemon) -> set[str]:
    """The names of the images that are here."""
    return {name for image in daemon.ask("GET", "/v1/images")["images"] for name in image["names"]}


@legacy
def test_the_examples_of_the_document_with_an_image(imaged_daemon: Daemon, capsys: Any) -> None:
    follow_the_document(imaged_daemon)
    assert "Command timed out" in capsys.readouterr().out
    assert any(ALIAS in name for name in pulled(imaged_daemon))
    with a_client(imaged_daemon) as client:
        for number, image in enumerate(IMAGES):
            client.create_template(name=f"common-{number}", image=image)
            with client.sandbox(template_name=f"common-{number}", timeout=60) as sb:
                assert sb.read(MARK) == b"an image\n"
                assert sb.run("python -c 'print(2 + 2)'").stdout == "4\n"
            client.delete_template(f"common-{number}")


@modern
def test_a_snapshot_of_an_image_of_a_registry(imaged_daemon: Daemon) -> None:
    with a_client(imaged_daemon) as client:
        snapshot = client.create_snapshot(name="imaged", docker_image=ALIAS, fs_capacity_bytes=GIB)
        assert (snapshot.status, snapshot.docker_image) == ("ready", ALIAS)
        with client.sandbox(snapshot_id=snapshot.id) as sb:
            assert sb.read(MARK) == b"an image\n"
            assert sb.run("python -c 'print(2 + 2)'").stdout == "4\n"
            sb.write("/srv/more.txt", "more")
            sb.run("rm /etc/group")
            captured = client.capture_snapshot(sb.name, "imaged-more")
        with client.sandbox(snapshot_id=captured.id) as sb:
            assert (sb.read(MARK), sb.read("/srv/more.txt")) == (b"an image\n", b"more")
            assert sb.run("test -e /etc/group").exit_code == 1
        for made in (captured, snapshot):
            client.delete_snapshot(made.id)
        with pytest.raises(Exception, match="no-such-tag"):
            client.create_snapshot(name="no", docker_image="python:no-such-tag", fs_capacity_bytes=GIB)
