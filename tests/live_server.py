# SPDX-License-Identifier: Apache-2.0
"""A real server for tests: its own process, state directory and ports; and a last look that nothing is left of it.

Clients here are plain HTTP on purpose: what these suites find must not hide behind the SDK.

>>> with LiveServer.started(tmp_path) as server:            # doctest: +SKIP
...     sandbox = server.create()
...     assert sandbox.run("echo hello").stdout == "hello"
"""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from opensandbox_server.statedir import run_dir

START_SECONDS = 30.0
STOP_SECONDS = 30.0
SLEEP_FOREVER = ("sleep", "infinity")
T = TypeVar("T")


def clean_environment(home: Path, **extra: str) -> dict[str, str]:
    """This process's environment without anything that configures a server or a client."""
    # Without compiled modules a server takes twice as long to start, and these suites start many.
    own = ("OPENSANDBOX_", "OPEN_SANDBOX_", "SANDBOX_", "PYTHONDONTWRITEBYTECODE")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(own)}
    return {**kept, "HOME": str(home), **extra}


def server_command() -> list[str]:
    """The installed program where there is one, else the module."""
    script = Path(sys.executable).with_name("opensandbox-server")
    return [str(script)] if script.exists() else [sys.executable, "-m", "opensandbox_server"]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def expect(self, status: int) -> Answer:
        assert self.status == status, f"{self.status} instead of {status}: {self.body[:2000].decode(errors='replace')}"
        return self


def request(
    address: str,
    method: str,
    path: str,
    *,
    body: Any = None,
    headers: dict[str, str] | None = None,
    timeout: float = 60,
    content_type: str = "application/json",
) -> Answer:
    """One HTTP request on a connection of its own. `address` is host:port or a socket's path, `body` bytes or JSON."""
    unix = address.startswith("/")
    connection = (UnixConnection if unix else http.client.HTTPConnection)(address, timeout=timeout)
    try:
        data = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        sent = dict(headers or {})
        if data is not None:
            sent.setdefault("Content-Type", content_type)
        connection.request(method, path, body=data, headers=sent)
        response = connection.getresponse()
        return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
    finally:
        connection.close()


@dataclass(frozen=True)
class Output:
    """A command that has ended, put together from its events."""

    id: str
    stdout: str
    stderr: str
    end: dict[str, Any]
    events: list[dict[str, Any]] = field(repr=False)

    @property
    def exit_code(self) -> int:
        return int(self.end.get("exit_code", -1))


def until(condition: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """Ask again until it is true. For what the system under test tells nobody about; polls, never assumes a time."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:.0f} s: {what}")
        time.sleep(0.01)
    return value


@dataclass(frozen=True)
class Sandbox:
    """A sandbox, and execd's API behind its endpoint."""

    id: str
    address: str
    prefix: str
    headers: dict[str, str]
    created: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, sandbox_id: str, endpoint: dict[str, Any], created: dict[str, Any] | None = None) -> Sandbox:
        address, slash, path = endpoint["endpoint"].partition("/")
        return cls(sandbox_id, address, slash + path, endpoint.get("headers", {}), created or {})

    def call(self, method: str, path: str, *, body: Any = None, timeout: float = 60, **options: Any) -> Answer:
        headers = {**self.headers, **options.pop("headers", {})}
        return request(self.address, method, self.prefix + path, body=body, headers=headers, timeout=timeout, **options)

    def ping(self) -> bool:
        return self.call("GET", "/ping", timeout=10).status == 200

    def run(self, command: str | list[str], *, timeout: float = 120, **fields: Any) -> Output:
        """Run in the foreground and wait. A string goes to the shell, a list is run as it is."""
        asked = {"command": command} if isinstance(command, str) else {"argv": command}
        answer = self.call("POST", "/command", body={**asked, **fields}, timeout=timeout).expect(200)
        return output_of(answer.body)

    def start(self, command: str, **fields: Any) -> str:
        """Run in the background; the id of the command."""
        body = {"command": command, "background": True, **fields}
        answer = self.call("POST", "/command", body=body).expect(200)
        return str(next(event for event in events_of(answer.body) if event["type"] == "init")["text"])

    def status(self, command_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/command/status/{command_id}").expect(200).json())

    def logs(self, command_id: str, cursor: int = 0) -> bytes:
        return self.call("GET", f"/command/{command_id}/logs?cursor={cursor}").expect(200).body

    def wait(self, command_id: str, seconds: float = 60) -> dict[str, Any]:
        def ended() -> dict[str, Any] | None:
            status = self.status(command_id)
            return None if status["running"] else status

        found = until(ended, f"command {command_id} ends", seconds)
        assert found is not None
        return found

    def write(self, path: str, data: bytes, mode: int = 644) -> None:
        boundary = uuid.uuid4().hex
        metadata = json.dumps({"path": path, "mode": mode}).encode()
        body = b"".join(
            [
                f'--{boundary}\r\nContent-Disposition: form-data; name="metadata"; filename="metadata"\r\n'.encode(),
                b"Content-Type: application/json\r\n\r\n" + metadata + b"\r\n",
                f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="file"\r\n'.encode(),
                b"Content-Type: application/octet-stream\r\n\r\n" + data + b"\r\n",
                f"--{boundary}--\r\n".encode(),
            ]
        )
        self.call("POST", "/files/upload", body=body, content_type=f"multipart/form-data; boundary={boundary}").expect(
            200
        )

    def read(self, path: str) -> bytes:
        return self.call("GET", f"/files/download?path={urllib.parse.quote(path)}").expect(200).body

    def python(self, script: str, *, timeout: float = 120, **fields: Any) -> Output:
        """Run a Python script inside, given to the interpreter as a file."""
        path = f"/tmp/{uuid.uuid4().hex}.py"
        self.write(path, script.encode())
        return self.run(["python3", path], timeout=timeout, **fields)


def events_of(body: bytes) -> list[dict[str, Any]]:
    lines = (line.removeprefix(b"data:").strip() for line in body.splitlines())
    return [json.loads(line) for line in lines if line.startswith(b"{")]


def output_of(body: bytes) -> Output:
    events = events_of(body)
    text = {kind: "".join(e.get("text", "") for e in events if e["type"] == kind) for kind in ("stdout", "stderr")}
    started = next((event["text"] for event in events if event["type"] == "init"), "")
    last = [event for event in events if event["type"] in ("execution_complete", "error")]
    assert len(last) == 1, f"not exactly one last event: {events[-5:]}"
    return Output(started, text["stdout"], text["stderr"], last[0].get("end", {}), events)


class LiveServer:
    """One server process on a state directory of its own; may be killed and started again on the same one."""

    def __init__(self, home: Path, *, config: str = "", arguments: tuple[str, ...] = (), **environment: str) -> None:
        self.home = home
        self.state = home / "state"
        self.arguments = arguments
        self.environment = clean_environment(home, **environment)
        self.log = home / "server.log"
        self.config = home / "test.toml"
        self.config.write_text(config)
        self.url = ""
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._said: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    @classmethod
    @contextlib.contextmanager
    def started(cls, home: Path, **options: Any) -> Iterator[LiveServer]:
        """A server until the end of the block; then everything of it is ended, and checked to be gone."""
        server = cls(home, **options)
        try:
            server.start()
            yield server
        finally:
            server.close()

    # -- the process -----------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def address(self) -> str:
        return self.url.removeprefix("http://")

    @property
    def instance(self) -> str:
        return (self.state / "instance").read_text().strip()

    @property
    def run_dir(self) -> Path:
        return run_dir(self.instance, environ=self.environment)

    def command(self, *more: str) -> list[str]:
        return [*server_command(), *more, "--config", str(self.config), "--state-dir", str(self.state)]

    def start(self) -> None:
        """Start it and read what it says until it serves."""
        port = self.address.rpartition(":")[2] or "0"
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self.command(), "--port", port, *self.arguments],
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._said = queue.SimpleQueue()
        threading.Thread(target=self._listen, args=(self.process, self._said), daemon=True).start()
        self.lines = []
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                line = self._said.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"the server was not ready after {START_SECONDS:.0f} s\n{self.told()}") from None
            if line is None:
                raise AssertionError(f"the server ended with code {self.process.wait()}\n{self.told()}")
            self.lines.append(line)
            if line.split()[:1] == ["api"]:
                self.url = line.split()[1]
            if line.startswith("Ready"):
                return

    @staticmethod
    def _listen(process: subprocess.Popen[str], said: queue.SimpleQueue[str | None]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.put(line.rstrip("\n"))
        said.put(None)

    def told(self) -> str:
        """What it said, for the message of a test that fails."""
        daemon = self.state / "log" / "sandboxd.log"
        parts = ["\n".join(self.lines), self.log.read_text()[-4000:] if self.log.exists() else ""]
        return "\n".join([*parts, daemon.read_text()[-4000:] if daemon.exists() else ""])

    def signal(self, number: int) -> int:
        """Send a signal and wait for the end; the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(STOP_SECONDS)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def stop(self) -> int:
        return self.signal(signal.SIGTERM)

    def down(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command("down", *arguments),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def close(self) -> None:
        """End everything of this instance, then prove it."""
        if not (self.state / "instance").exists():
            if self.process is not None and self.process.poll() is None:
                self.kill()
            return
        ended = self.down("--all")
        if self.process is not None and self.process.poll() is None:
            self.kill()
        if ended.returncode:
            # What is under test did not work; what it started must not outlive the test all the same.
            with contextlib.suppress(OSError, http.client.HTTPException):
                request(str(self.run_dir / "sandboxd.sock"), "POST", "/shutdown", body={"when": "all"})
        assert ended.returncode == 0, f"down --all: {ended.stdout}{ended.stderr}\n{self.told()}"
        until(lambda: not self.leftovers(), f"nothing is left of {self.instance}: {self.leftovers()}", 15)

    # -- what exists on the machine --------------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Every living process of this instance: the daemons by their arguments, sandboxed ones by their cgroup."""
        found: dict[int, str] = {}
        tree, state = f"/opensandbox-{self.instance[:8]}", str(self.state)
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            with contextlib.suppress(OSError):
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                    continue
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                daemon = state in words or str(self.run_dir) in words
                if daemon or tree in (entry / "cgroup").read_text():
                    found[int(entry.name)] = " ".join(words)[:120]
        return found

    def cgroups(self) -> list[str]:
        tree = f"opensandbox-{self.instance[:8]}"
        roots = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")]
        return [str(group) for root in roots for group in (root / tree).glob("*") if group.is_dir()]

    def mounts(self) -> list[str]:
        with open("/proc/self/mountinfo") as lines:
            return [line for line in lines if str(self.state) in line or str(self.run_dir) in line]

    def directories(self) -> list[str]:
        """What sandboxes leave on disk."""
        places = [self.run_dir, self.state / "spool", self.state / "fs" / "sandboxes", self.state / "records"]
        return [str(entry) for place in places if place.is_dir() for entry in place.iterdir() if len(entry.name) >= 36]

    @staticmethod
    def stale_blocks() -> list[str]:
        """Claims on uid blocks that nobody holds any more: a claim in use is flocked by whoever uses it."""
        stale = []
        for file in Path("/run/opensandbox/blocks").glob("[0-9]*"):
            with contextlib.suppress(OSError), file.open("rb") as claim:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
                stale.append(str(file))
        return stale

    def leftovers(self) -> list[str]:
        return [
            *(f"uid block {file}" for file in self.stale_blocks()),
            *(f"process {pid}: {command}" for pid, command in self.processes().items()),
            *(f"cgroup {group}" for group in self.cgroups()),
            *(f"mount {line}" for line in self.mounts()),
        ]

    # -- the API ---------------------------------------------------------------------------------------------------

    def call(self, method: str, path: str, **options: Any) -> Answer:
        return request(self.address, method, path, **options)

    def create(
        self, image: str = "host", entrypoint: tuple[str, ...] = SLEEP_FOREVER, expect: int = 202, **fields: Any
    ) -> Sandbox:
        body = {"image": {"uri": image}, "entrypoint": list(entrypoint), "resourceLimits": {}, **fields}
        created = self.call("POST", "/v1/sandboxes", body=body).expect(expect).json()
        return Sandbox.of(created["id"], created["endpoints"]["44772"], created)

    def get(self, sandbox_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"/v1/sandboxes/{sandbox_id}").expect(200).json())

    def connect(self, sandbox_id: str) -> Sandbox:
        """A sandbox made before, by the endpoint the server gives now."""
        endpoint = self.call("GET", f"/v1/sandboxes/{sandbox_id}/endpoints/44772").expect(200).json()
        return Sandbox.of(sandbox_id, endpoint)

    def ids(self) -> set[str]:
        page = self.call("GET", "/v1/sandboxes?pageSize=200").expect(200).json()
        return {item["id"] for item in page["items"]}

    def delete(self, sandbox_id: str) -> None:
        self.call("DELETE", f"/v1/sandboxes/{sandbox_id}").expect(204)
