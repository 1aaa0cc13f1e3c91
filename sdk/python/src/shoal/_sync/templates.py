# Generated from _async/templates.py by generate_sync.py. Do not edit: change that file and run the program again.
"""Templates, and building them."""

from __future__ import annotations

import base64
import codecs
import json
import os
import time
from collections.abc import Iterator, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, overload

import httpx

from .. import _archive, _seam
from .._core import (
    CLEANUP_SECONDS_MAX,
    PULL_SECONDS_MAX,
    SILENCE_SECONDS_MAX,
    Patience,
    decoded,
    hooks_wish,
    in_path,
    late,
    one_disk,
    query,
    template_wish,
)
from ..errors import (
    ResourceCreationError,
    ResourceNotFoundError,
    SandboxClientError,
    SandboxConnectionError,
    SandboxServerReloadError,
)
from ..models import Build, LayerProgress, SandboxTemplate, VolumeMountSpec
from .files import pieces
from .transport import Events, Transport

OnLog = Callable[[str], Any]


class TemplateCalls:
    """Templates on one daemon."""

    _transport: Transport

    def create_template(
        self,
        name: str,
        image: str = "host",
        *,
        cpu: str = "500m",
        memory: str = "512Mi",
        disk: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        command: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
        history: int | None = None,
        hooks: Mapping[str, str | Mapping[str, Any]] | None = None,
        wait_for_ready: bool = False,
        timeout: float = PULL_SECONDS_MAX,
    ) -> SandboxTemplate:
        r"""Creates a template. The daemon pulls its image in the background if needed, and creates wait for it.

        >>> template = client.create_template("small", cpu="250m", memory="128Mi", env={"GREETING": "hello"})
        >>> template.resources
        ResourceSpec(cpu='250m', memory='128Mi', storage=None)
        >>> with client.sandbox(template_name="small") as sb:
        ...     (sb.run("echo $GREETING")).stdout
        'hello\n'
        >>> client.delete_template("small")

        Args:
            name: Free text up to 255 bytes, unique among the owner's templates.
            image: ``host``, a reference such as ``python:3.12-slim``, or an alias.
            cpu: Processors, such as ``"500m"`` or ``"2"``. The default is that of the LangSmith SDK; the command line and the
                HTTP API have 1.
            memory: Memory, such as ``"512Mi"`` or ``"2Gi"``. The default is that of the LangSmith SDK; the command line and
                the HTTP API have 1Gi.
            disk: The disk limit of a sandbox, such as ``"10Gi"``.
            storage: The same, in the terms of the LangSmith SDK.
            volume_mounts: Volumes that its sandboxes mount.
            env: Variables that are added to the image's environment, for every command.
            cwd: The working directory of commands: an absolute path; the image's by default.
            user: The user that commands run as; the image's by default.
            command: What runs if a command names no program; the image's by default.
            labels: Labels of every sandbox that is made from it; a sandbox's own labels win.
            history: How many steps of the history of its sandboxes to keep, for ``Sandbox.undo``.
            hooks: What runs in its sandboxes when something is done to them, as for a sandbox.
            wait_for_ready: Whether to wait until its image is ready; otherwise use ``wait_for_template``.
            timeout: How many seconds to wait.

        Raises:
            ResourceNameConflictError: The name is taken.
            ValidationError: A quantity or a name is not valid: ``field`` says which.
            ResourceCreationError: The pull of its image failed.
        """
        wish = template_wish(
            image=image,
            cpu=cpu,
            memory=memory,
            disk=one_disk(disk, storage),
            volume_mounts=volume_mounts,
            env=env,
            cwd=cwd,
            user=user,
            command=command,
            labels=labels,
        )
        if history is not None:
            wish["history"] = history
        if hooks is not None:
            wish["hooks"] = hooks_wish(hooks)
        # Sent once: after a lost answer, a second try would be told that the name is taken, by the first.
        answer = self._transport.call("POST", "/templates", json={"name": name, **wish}, repeat=False)
        template: SandboxTemplate = decoded(SandboxTemplate, answer.json())
        return self.wait_for_template(name, timeout=timeout) if wait_for_ready else template

    def apply_template(
        self,
        name: str,
        image: str = "host",
        *,
        cpu: str = "500m",
        memory: str = "512Mi",
        disk: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        command: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SandboxTemplate:
        """Creates a template, or replaces the content of an existing one. Repeating the call changes nothing.

        >>> (client.apply_template("tools", env={"A": "1"})).version
        1
        >>> (client.apply_template("tools", env={"A": "1"})).version
        1
        >>> (client.apply_template("tools", env={"A": "2"})).version
        2
        >>> client.delete_template("tools")
        """
        wish = template_wish(
            image=image,
            cpu=cpu,
            memory=memory,
            disk=one_disk(disk, storage),
            volume_mounts=volume_mounts,
            env=env,
            cwd=cwd,
            user=user,
            command=command,
            labels=labels,
        )
        answer = self._transport.call("PUT", f"/templates/{in_path(name)}", json=wish)
        template: SandboxTemplate = decoded(SandboxTemplate, answer.json())
        return template

    def get_template(self, name: str) -> SandboxTemplate:
        """Returns a template, by name.

        >>> (client.get_template("default")).image
        'host'
        """
        answer = self._transport.call("GET", f"/templates/{in_path(name)}")
        template: SandboxTemplate = decoded(SandboxTemplate, answer.json())
        return template

    def list_templates(self) -> list[SandboxTemplate]:
        """Lists the templates of the key's owner, the built-in one first, then by name."""
        answer = self._transport.call("GET", "/templates")
        return [decoded(SandboxTemplate, entry) for entry in answer.json()["templates"]]

    def update_template(
        self,
        name: str,
        *,
        new_name: str | None = None,
        image: str | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        disk: str | None = None,
        storage: str | None = None,
        volume_mounts: Sequence[VolumeMountSpec] | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        user: str | None = None,
        command: Sequence[str] | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> SandboxTemplate:
        """Changes a template. Existing sandboxes keep the version that they were made from.

        Arguments that you leave out do not change. Mappings and lists are replaced as a whole; an empty string for
        ``disk``, ``cwd`` or ``user`` resets it to the default.

        >>> template = client.create_template("python-env")
        >>> template = client.update_template("python-env", new_name="python-env-v2", memory="1Gi")
        >>> template.name, template.version, template.resources.memory
        ('python-env-v2', 2, '1Gi')
        >>> client.delete_template("python-env-v2")

        Raises:
            ResourceNotFoundError: The template does not exist.
            ResourceNameConflictError: The new name is taken.
        """
        wish = template_wish(
            image=image,
            cpu=cpu,
            memory=memory,
            disk=one_disk(disk, storage),
            volume_mounts=volume_mounts,
            env=env,
            cwd=cwd,
            user=user,
            command=command,
            labels=labels,
        )
        if new_name is not None:
            wish["name"] = new_name
        # With a new name, a second try would not find the old one.
        answer = self._transport.call("PATCH", f"/templates/{in_path(name)}", json=wish, repeat=new_name is None)
        template: SandboxTemplate = decoded(SandboxTemplate, answer.json())
        return template

    def delete_template(self, name: str) -> None:
        """Deletes a template.

        Raises:
            ResourceNotFoundError: The template does not exist.
            ResourceInUseError: Sandboxes or pools use it.
        """
        self._transport.call("DELETE", f"/templates/{in_path(name)}")

    def prepare_template(self, name: str) -> SandboxTemplate:
        """Retries a preparation that failed. Has no effect on other templates."""
        answer = self._transport.call("POST", f"/templates/{in_path(name)}/prepare")
        template: SandboxTemplate = decoded(SandboxTemplate, answer.json())
        return template

    def wait_for_template(
        self,
        name: str,
        *,
        timeout: float = PULL_SECONDS_MAX,
        on_progress: Callable[[list[LayerProgress]], Any] | None = None,
    ) -> SandboxTemplate:
        """Waits until a template is ready. ``on_progress`` works as in ``pull_image``.

        Raises:
            ResourceCreationError: The pull of its image failed. ``prepare_template`` retries.
            ResourceTimeoutError: It took too long.
        """
        watch = EventsOfTemplate(self._transport, name)
        deadline = time.monotonic() + timeout
        try:
            while time.monotonic() < deadline:
                _, said = watch._next()
                if said["type"] == "progress":
                    if on_progress is not None:
                        on_progress([decoded(LayerProgress, layer) for layer in said["layers"]])
                elif said["type"] == "gone":
                    raise ResourceNotFoundError(said["message"], resource_type="template", code=said["code"])
                else:
                    template: SandboxTemplate = decoded(SandboxTemplate, said)
                    if template.state == "failed":
                        raise ResourceCreationError(
                            f"template `{name}` could not be prepared: {template.reason}",
                            resource_type="template",
                            error_type="ImagePull",
                            hint="fix the cause, then retry with `prepare_template`",
                        )
                    return template
        finally:
            watch.close()
        raise late("template", name, timeout, "preparing")

    # --- Builds

    @overload
    def build_template(
        self,
        name: str,
        context: str | os.PathLike[str] | IO[bytes] | None = ...,
        *,
        dockerfile: str | None = ...,
        script: str | None = ...,
        image: str | None = ...,
        target: str | None = ...,
        args: Mapping[str, str] | None = ...,
        secrets: Mapping[str, str | bytes] | None = ...,
        cpu: str | None = ...,
        memory: str | None = ...,
        env: Mapping[str, str] | None = ...,
        labels: Mapping[str, str] | None = ...,
        on_log: OnLog | None = ...,
        wait: Literal[True] = ...,
        timeout: float = ...,
    ) -> SandboxTemplate: ...

    @overload
    def build_template(
        self,
        name: str,
        context: str | os.PathLike[str] | IO[bytes] | None = ...,
        *,
        dockerfile: str | None = ...,
        script: str | None = ...,
        image: str | None = ...,
        target: str | None = ...,
        args: Mapping[str, str] | None = ...,
        secrets: Mapping[str, str | bytes] | None = ...,
        cpu: str | None = ...,
        memory: str | None = ...,
        env: Mapping[str, str] | None = ...,
        labels: Mapping[str, str] | None = ...,
        on_log: None = ...,
        wait: Literal[False],
        timeout: float = ...,
    ) -> BuildHandle: ...

    def build_template(
        self,
        name: str,
        context: str | os.PathLike[str] | IO[bytes] | None = None,
        *,
        dockerfile: str | None = None,
        script: str | None = None,
        image: str | None = None,
        target: str | None = None,
        args: Mapping[str, str] | None = None,
        secrets: Mapping[str, str | bytes] | None = None,
        cpu: str | None = None,
        memory: str | None = None,
        env: Mapping[str, str] | None = None,
        labels: Mapping[str, str] | None = None,
        on_log: OnLog | None = None,
        wait: bool = True,
        timeout: float = PULL_SECONDS_MAX,
    ) -> SandboxTemplate | BuildHandle:
        """Builds a template from a directory with a Dockerfile, or by running a script on top of an image.

        ::

            client.build_template("app", "./project", args={"VERSION": "2"}, on_log=print)
            client.build_template("tools", image="python:3.12", script="pip install ruff")

        Steps run in sandboxes and are cached.

        Args:
            name: The name of the template.
            context: A directory with a Dockerfile and the files that it copies, without those that ``.dockerignore``
                excludes; or a tar archive of one, open for reading bytes.
            dockerfile: The Dockerfile's path in the context; ``Dockerfile`` by default.
            script: A shell script to run in ``image``, instead of a context.
            image: The image that ``script`` runs in.
            target: The stage to build; the last by default.
            args: Values for ``ARG``.
            secrets: Secrets by id; a step that names one finds it in a file, and no layer contains it.
            cpu: The limit for sandboxes of the template and for the steps of the build, as in ``create_template``.
            memory: As ``cpu``.
            env: As in ``create_template``.
            labels: As in ``create_template``.
            on_log: Called with each piece of the log while it is written.
            wait: Whether to wait for the end; otherwise return a handle to iterate over.
            timeout: How many seconds to wait. If the wait ends early, the build is cancelled.

        Raises:
            ValidationError: The Dockerfile is not valid; ``details["line"]`` is the line.
            ResourceCreationError: A step failed; ``error_type`` is ``Build``.
            ResourceTimeoutError: It took too long.
        """
        if not wait and on_log is not None:
            raise ValueError(
                "`on_log` is called while `build_template` waits: leave `wait` out, or iterate over the handle"
            )
        if (context is None) == (script is None):
            raise ValueError("a template is built from a context or by a script: give one of the two")
        if (script is None) != (image is None):
            raise ValueError("`script` runs over `image`: give both or none")
        spec = template_wish(
            image=None,
            cpu=cpu,
            memory=memory,
            disk=None,
            volume_mounts=None,
            env=env,
            cwd=None,
            user=None,
            command=None,
            labels=labels,
        )
        wish: dict[str, Any] = {"template": name, "spec": spec}
        optional = {
            "dockerfile": dockerfile,
            "target": target,
            "args": dict(args) if args else None,
            "secrets": {id: _base64(value) for id, value in secrets.items()} if secrets else None,
        }
        wish.update((key, value) for key, value in optional.items() if value is not None)
        archive: IO[bytes]
        if script is not None:
            archive = _archive.script_context(str(image), script)
        elif isinstance(context, str | os.PathLike):
            archive = _seam.offload(_archive.pack_context, Path(context), dockerfile or "Dockerfile")
        else:
            assert context is not None, "one of the two was given"
            archive = context
        try:
            answer = self._transport.call(
                "POST",
                "/builds",
                content=pieces(archive),
                headers={"Content-Type": "application/x-tar", "Shoal-Build": json.dumps(wish)},
                repeat=False,
                read_seconds=None,
            )
        finally:
            if archive is not context:
                archive.close()
        handle = BuildHandle(self._transport, decoded(Build, answer.json()))
        if not wait:
            return handle
        deadline = time.monotonic() + timeout
        try:
            with handle:
                for text in handle._pieces(deadline):
                    if on_log is not None and text:
                        on_log(text)
                if handle._build.state == "running":
                    raise late("template", name, timeout, "building")
                return handle.result
        except BaseException:
            # Ctrl-C, a callback that raised, no more time: nobody will ever hear of this build again.
            if handle._build.state == "running":
                _seam.shielded(CLEANUP_SECONDS_MAX, handle._cancel_quietly)
            raise

    def get_build(self, build_id: str) -> Build:
        """Returns a build, without its log."""
        answer = self._transport.call("GET", f"/builds/{in_path(build_id)}")
        build: Build = decoded(Build, answer.json())
        return build

    def list_builds(self) -> list[Build]:
        """Lists the builds of the key's owner that the daemon still has, newest first."""
        answer = self._transport.call("GET", "/builds")
        return [decoded(Build, entry) for entry in answer.json()["builds"]]

    def reconnect_build(self, build_id: str, *, offset: int = 0) -> BuildHandle:
        """Returns a handle of a build that was started before, from the given offset of its log."""
        return BuildHandle(self._transport, self.get_build(build_id), offset=offset)

    def delete_build(self, build_id: str) -> None:
        """Cancels a running build, and deletes its record and log. A finished template stays."""
        self._transport.call("DELETE", f"/builds/{in_path(build_id)}")


def _base64(value: str | bytes) -> str:
    return base64.b64encode(value.encode() if isinstance(value, str) else value).decode()


class EventsOfTemplate(Events):
    """Progress of a template's preparation."""

    def __init__(self, transport: Transport, name: str) -> None:
        super().__init__(transport)
        self._name = name

    def _place(self) -> tuple[str, dict[str, str]]:
        return f"/templates/{in_path(self._name)}/events", {}


class BuildHandle:
    """A build that was started. Iterate over it to get its log, and read ``result`` to wait for its end.

    The handle connects when it first needs to, and reconnects at the same offset whenever the connection breaks.
    Dropping a handle does not end the build: ``cancel`` does, and ``reconnect_build`` of the client finds it again.
    """

    def __init__(self, transport: Transport, build: Build, *, offset: int = 0) -> None:
        self._transport = transport
        self._build = build
        self._offset = offset
        self._log: Iterator[str] | None = None

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._build.template!r} {self._build.state} id={self.build_id}>"

    @property
    def build_id(self) -> str:
        """The id of the build, for ``reconnect_build``."""
        return self._build.id

    @property
    def offset(self) -> int:
        """How many bytes of the log this handle has seen."""
        return self._offset

    @property
    def result(self) -> SandboxTemplate:
        """Waits for the end of the build, and returns the template.

        Raises:
            ResourceCreationError: A step failed. The log says more.
        """
        for _ in self:
            pass
        if self._build.state == "failed":
            raise ResourceCreationError(
                f"template `{self._build.template}` could not be built: {self._build.reason}",
                resource_type="template",
                error_type="Build",
                hint="steps that succeeded are cached when it is built again",
            )
        answer = self._transport.call("GET", f"/templates/{in_path(self._build.template)}")
        template: SandboxTemplate = decoded(SandboxTemplate, answer.json())
        return template

    def status(self) -> Build:
        """Returns the build's current state."""
        answer = self._transport.call("GET", f"/builds/{in_path(self.build_id)}")
        self._build = decoded(Build, answer.json())
        return self._build

    def cancel(self) -> None:
        """Cancels the build, and deletes its record and log. No template changes."""
        self._transport.call("DELETE", f"/builds/{in_path(self.build_id)}")

    def _cancel_quietly(self) -> None:
        try:
            self._transport.call(
                "DELETE", f"/builds/{in_path(self.build_id)}", repeat=False, read_seconds=CLEANUP_SECONDS_MAX
            )
        except SandboxClientError:
            # It is over, or nobody can be reached.
            pass

    def __iter__(self) -> BuildHandle:
        return self

    def __next__(self) -> str:
        if self._log is None:
            self._log = self._pieces(None)
        return self._log.__next__()

    def __enter__(self) -> BuildHandle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        log, self._log = self._log, None
        if log is not None:
            log.close()  # type: ignore[attr-defined]

    def _pieces(self, deadline: float | None) -> Iterator[str]:
        """Yields the rest of the log, until the build ends or the deadline passes."""
        patience = Patience(self._transport.patience_seconds)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        while True:
            # Asked before the log is read: what a build says before it is over is in the log then.
            running = (self.status()).state == "running"
            left = SILENCE_SECONDS_MAX if deadline is None else min(deadline - time.monotonic(), SILENCE_SECONDS_MAX)
            if running and left <= 0:
                return
            path = query(f"/builds/{in_path(self.build_id)}/log", {"offset": self._offset, "follow": True})
            failure: SandboxConnectionError | None = None
            try:
                response = self._transport._open_once("GET", path, None, max(left, 1.0))
                try:
                    # As it comes: a size would make it wait until so much is there.
                    for piece in response.iter_raw():
                        self._offset += len(piece)
                        patience.renew()
                        yield decoder.decode(piece)
                finally:
                    response.close()
            except httpx.ReadTimeout:
                # A step that says nothing. The connection may be dead; another tells.
                continue
            except httpx.TransportError as error:
                failure = self._transport.broken(error)
            except SandboxServerReloadError as error:
                failure = error
            if failure is None and not running:
                break
            if failure is not None and not self._transport._may_try_again(patience):
                raise failure
        rest = decoder.decode(b"", final=True)
        if rest:
            yield rest
