# SPDX-License-Identifier: Apache-2.0
"""sandboxd as seen from the server: its API over a Unix socket, and how it is started.

It is no child that the server looks after: it has its own session, outlives the server, and the next server finds it
by its socket. So it is never started by asyncio, whose transports kill what they started when the loop closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import platform
import subprocess
import tempfile
import threading
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from opensandbox_server.context import outgoing
from opensandbox_server.errors import OpenSandboxError
from opensandbox_server.wire import sandboxd as wire
from opensandbox_server.wire.errors import Code

from . import plan
from .unix_http import NotConnected, UnixHttp

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer", bound=BaseModel)

START_SECONDS = 30.0
"""The first start on a state directory also makes the image `host`, which takes a few seconds of it."""
REQUEST_SECONDS = 30.0
SILENCE_SECONDS = 25.0
"""Two heartbeats and a half: a watch that is quiet for longer is dead."""
_LOG_BYTES = 8 * 1024 * 1024
_ERRORS = 400
_ALREADY_RUNNING = 3
"""Exit code of a sandboxd that finds the state directory taken."""


_GO_ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}


def binary(name: str) -> Path:
    """One of the programs that come inside this package, for this machine."""
    machine = platform.machine()
    return Path(__file__).parents[2] / "_bin" / f"linux-{_GO_ARCHITECTURE.get(machine, machine)}" / name


def pip_directory(state: Path) -> Path | None:
    """A directory that holds the package pip, for sandboxes of a machine whose own Python has none.

    It is the one beside this server or, in an environment made without pip, the one every Python carries for
    `ensurepip`, unpacked once.
    """
    found = importlib.util.find_spec("pip")
    if found is not None and found.origin is not None:
        return Path(found.origin).parents[1]
    wheels = importlib.util.find_spec("ensurepip")
    if wheels is None or wheels.origin is None:
        return None
    for wheel in sorted((Path(wheels.origin).parent / "_bundled").glob("pip-*.whl"), reverse=True):
        unpacked = state / wheel.stem
        if not unpacked.is_dir():
            draft = Path(tempfile.mkdtemp(dir=state, prefix=f".{wheel.stem}."))
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(draft)
            draft.chmod(0o755)
            with contextlib.suppress(OSError):
                draft.rename(unpacked)
        return unpacked
    return None


class Unreachable(OpenSandboxError):
    """Nothing answers on sandboxd's socket, and nothing of the request was sent."""


class Cut(OpenSandboxError):
    """The connection broke after the request was sent: sandboxd may have acted on it or not."""


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """Turn what a connection can do to us into errors of the platform: the only place that knows both."""
    try:
        yield
    except NotConnected as error:
        raise Unreachable(Code.NODE_UNAVAILABLE, f"sandboxd does not answer: {error}.") from error
    except TimeoutError as error:
        raise OpenSandboxError(Code.NODE_UNAVAILABLE, "sandboxd did not answer in time.") from error
    except ConnectionError as error:
        raise Cut(Code.NODE_UNAVAILABLE, f"The connection to sandboxd broke: {error}.") from error


class Client:
    """The node API, one method per operation of spec/sandboxd.yaml.

    >>> async with Client(Path("/run/opensandbox/1f2e3d4c/sandboxd.sock")) as node:     # doctest: +SKIP
    ...     print((await node.version()).pid)
    """

    def __init__(self, socket: Path) -> None:
        self._socket = str(socket)
        self._http: UnixHttp | None = None

    async def __aenter__(self) -> Client:
        self._http = UnixHttp(self._socket)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    async def version(self) -> wire.NodeVersion:
        """Which sandboxd answers."""
        return await self._ask("GET", "/version", wire.NodeVersion)

    async def host(self) -> wire.Host:
        """What this machine can enforce."""
        return await self._ask("GET", "/host", wire.Host)

    async def launch(self, request: wire.LaunchRequest) -> wire.Report:
        """Make a sandbox and wait until it answers."""
        return await self._ask("POST", "/sandboxes", wire.Report, request)

    async def list(self) -> list[wire.Report]:
        """All sandboxes, ended ones too."""
        return (await self._ask("GET", "/sandboxes", wire.ReportList)).items

    async def get(self, sandbox_id: str) -> wire.Report:
        """One sandbox."""
        return await self._ask("GET", f"/sandboxes/{sandbox_id}", wire.Report)

    async def remove(self, sandbox_id: str) -> wire.Remains:
        """End it and forget it; what is left of it. A sandboxd of before this was asked answers nothing."""
        told = await self._call("DELETE", f"/sandboxes/{sandbox_id}?remains=true")
        return wire.Remains.model_validate_json(told or b"{}")

    async def set_deadline(self, sandbox_id: str, request: wire.DeadlineRequest) -> None:
        """When it must end by itself."""
        await self._call("PUT", f"/sandboxes/{sandbox_id}/deadline", request)

    async def acknowledge(self, sandbox_id: str) -> None:
        """Its end is stored."""
        await self._call("POST", f"/sandboxes/{sandbox_id}/acknowledge")

    async def output(self, sandbox_id: str) -> bytes:
        """The last MiB of its entry point's output."""
        return await self._call("GET", f"/sandboxes/{sandbox_id}/output")

    async def journal(self, sandbox_id: str) -> bytes:
        """The records of its commands, as its execd wrote them."""
        return await self._call("GET", f"/sandboxes/{sandbox_id}/journal")

    async def set_ingress(self, request: wire.IngressRequest) -> wire.Ingress:
        """Where clients reach sandboxes."""
        return await self._ask("PUT", "/ingress", wire.Ingress, request)

    async def shutdown(self, when: wire.ShutdownRequestWhen) -> None:
        """Ask it to leave; a conflict when it holds sandboxes and only an idle one should."""
        await self._call("POST", "/shutdown", wire.ShutdownRequest(when=when))

    async def events(self) -> AsyncIterator[wire.Event]:
        """What happens, for as long as the connection lives."""
        with translated():
            rest = b""
            async for status, chunk in self._open.stream("/events", headers=outgoing(), silence=SILENCE_SECONDS):
                if status >= _ERRORS:
                    raise _told(chunk, f"sandboxd answered {status}.")
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield wire.Event.model_validate_json(line)

    async def _ask(self, method: str, path: str, answer: type[_Answer], body: BaseModel | None = None) -> _Answer:
        return answer.model_validate_json(await self._call(method, path, body))

    async def _call(self, method: str, path: str, body: BaseModel | None = None) -> bytes:
        data = body.model_dump_json(by_alias=True, exclude_none=True).encode() if body is not None else b""
        headers = outgoing()
        if data:
            headers["Content-Type"] = "application/json"
        with translated():
            async with asyncio.timeout(REQUEST_SECONDS):
                status, told = await self._open.request(method, path, headers=headers, body=data)
        if status >= _ERRORS:
            raise _told(told, f"sandboxd answered {status}.")
        return told

    @property
    def _open(self) -> UnixHttp:
        if self._http is None:
            raise OpenSandboxError(Code.NODE_UNAVAILABLE, "The runtime is not started.")
        return self._http


def _told(body: bytes, otherwise: str) -> OpenSandboxError:
    """sandboxd's own error; codes it does not share with us count as internal, their text goes to the log."""
    try:
        error = wire.NodeError.model_validate_json(body)
        return OpenSandboxError(Code(error.code), error.message, hint=error.hint)
    except ValueError:
        _log.error("sandboxd gave an answer that is no error of ours: %r", body[:500])
        return OpenSandboxError(Code.SANDBOX_INTERNAL_ERROR, otherwise)


def copied_from(version: wire.NodeVersion, state: Path) -> str | None:
    """Where the sandboxd that answers keeps its state, if that is not this directory.

    A copied or restored state directory has the instance id of the original, and so finds the original's sandboxd.
    """
    if version.state_inode is None or version.state_device is None:
        return None
    own = state.stat()
    if (own.st_dev, own.st_ino) == (version.state_device, version.state_inode):
        return None
    return version.state_dir or "another directory"


async def start(settings: plan.Settings) -> None:
    """Start sandboxd and wait for its ready line. Fine when another one was faster."""
    log = settings.state_dir / "log" / "sandboxd.log"
    process = await asyncio.to_thread(_spawn, settings, log)
    assert process.stdout is not None
    line = b""
    try:
        line = await asyncio.wait_for(_first_line(process), START_SECONDS)
    except TimeoutError:
        process.kill()
        raise OpenSandboxError(
            Code.NODE_UNAVAILABLE, f"sandboxd was not ready after {START_SECONDS:.0f} s.", hint=f"See {log}."
        ) from None
    finally:
        # Reaps it whenever it ends; a thread, because the loop may be gone long before.
        threading.Thread(target=_reap, args=(process,), name="sandboxd-reaper", daemon=True).start()
    try:
        ready = json.loads(line) if line else {}
    except ValueError:
        ready = {}
    if ready.get("ready"):
        return
    code = await asyncio.to_thread(process.wait)
    if code == _ALREADY_RUNNING:
        return
    if "error" in ready:
        raise _told(json.dumps(ready["error"]).encode(), "sandboxd could not start.")
    said = await asyncio.to_thread(_last_line, log)
    raise OpenSandboxError(
        Code.NODE_UNAVAILABLE, f"sandboxd ended at once with code {code}: {said}", hint=f"See {log}."
    )


def _spawn(settings: plan.Settings, log: Path) -> subprocess.Popen[bytes]:
    if not settings.sandboxd.is_file():
        raise OpenSandboxError(
            Code.NODE_UNAVAILABLE,
            f"The sandboxd binary is missing: {settings.sandboxd}.",
            hint="In a source tree run `make setup`; otherwise reinstall opensandbox-server for this architecture.",
        )
    with contextlib.suppress(FileNotFoundError):
        if log.stat().st_size > _LOG_BYTES:
            log.replace(log.with_suffix(".log.1"))
    with os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o640), "wb") as errors:
        return subprocess.Popen(
            plan.daemon_command(settings),
            cwd="/",
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )


async def _first_line(process: subprocess.Popen[bytes]) -> bytes:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), process.stdout)
    try:
        return await reader.readline()
    finally:
        transport.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    # An ordinary user's sandboxd starts itself again in a user namespace, and its first process ends with 0.
    _log.log(logging.WARNING if code else logging.DEBUG, "sandboxd (pid %d) ended with code %d", process.pid, code)


def _last_line(log: Path) -> str:
    try:
        lines = log.read_bytes()[-4096:].decode(errors="replace").strip().splitlines()
    except OSError:
        return "it wrote nothing."
    return lines[-1] if lines else "it wrote nothing."
