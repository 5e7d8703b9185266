# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server for tests: real sockets, and every byte of the answer in the test's hand."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit

from pydantic import BaseModel

from opensandbox.wire import execd, lifecycle

ID = "9ced3df2-0000-4000-8000-000000000001"
TOKEN = {"X-EXECD-ACCESS-TOKEN": "secret-token"}


@dataclass
class Received:
    """A request as it came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def params(self) -> list[tuple[str, str]]:
        return parse_qsl(urlsplit(self.target).query)

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Reply:
    """An answer. `chunks` are written one by one; `cut` breaks the connection after them."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    chunks: Iterable[bytes] | None = None
    cut: bool = False

    @classmethod
    def of(cls, document: object, status: int = 200, **headers: str) -> Reply:
        return cls(status, json.dumps(document).encode(), {"Content-Type": "application/json", **headers})

    @classmethod
    def error(cls, status: int, code: str, message: str, **more: str) -> Reply:
        return cls.of({"code": code, "message": message, **more}, status)


# What the contract says about the bodies that are sent: a schema, or one for each value of a map or list.
BODIES: dict[tuple[str, str], type[BaseModel]] = {
    ("POST", "/v1/sandboxes"): lifecycle.CreateSandboxRequest,
    ("POST", f"/v1/sandboxes/{ID}/renew-expiration"): lifecycle.RenewRequest,
    ("POST", "/e/command"): execd.RunCommandRequest,
    ("POST", "/e/session"): execd.CreateSessionRequest,
    ("POST", "/e/session/s1/run"): execd.RunInSessionRequest,
    ("POST", "/e/pty"): execd.CreatePtyRequest,
    ("POST", "/e/directories"): execd.Permission,
    ("POST", "/e/files/permissions"): execd.Permission,
    ("POST", "/e/files/mv"): execd.Move,
    ("POST", "/e/files/replace"): execd.Replacement,
}


def against_the_contract(received: Received) -> None:
    """Fails when a body is not what the generated types of the contract allow."""
    model = BODIES.get((received.method, received.path))
    if model is None:
        return
    body = received.json() if received.body else {}
    whole = received.path.startswith(("/v1/", "/e/command", "/e/session", "/e/pty"))
    for document in [body] if whole else body if isinstance(body, list) else body.values():
        model.model_validate(document)
        known = {field.alias or name for name, field in model.model_fields.items()}
        assert set(document) <= known, f"{received.method} {received.path}: {set(document) - known}"


Handler = Callable[[Received], Reply | None]


class Stub:
    """Answers with `routes[(method, path)]`: a reply, a list of replies for successive requests, or a function.

    A function that gives None breaks the connection without an answer. Each connection is served by a thread of
    its own, so that asynchronous and synchronous tests can use it alike.
    """

    def __init__(self) -> None:
        self.routes: dict[tuple[str, str], Reply | list[Reply | None] | Handler] = {}
        self.requests: list[Received] = []
        self.connections = 0
        self.idle = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[socket.socket, threading.Thread] = {}
        # Bound but not listening: until it is started, connections to it are refused.
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self._acceptor = threading.Thread(target=self._accept)

    def __enter__(self) -> Stub:
        self._listener.listen()
        self._acceptor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        self._listener.close()
        with self._lock:
            left = dict(self._open)
        for connection, thread in left.items():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()

    @property
    def address(self) -> str:
        host, port = self._listener.getsockname()
        return f"{host}:{port}"

    @property
    def open(self) -> int:
        """How many connections there are."""
        return len(self._open)

    def calls(self) -> list[str]:
        """Method and path of each request so far."""
        return [f"{r.method} {r.path}" for r in self.requests]

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            thread = threading.Thread(target=self._serve, args=(connection, self.connections))
            with self._lock:
                self._open[connection] = thread
                self.idle.clear()
            thread.start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        try:
            with connection.makefile("rb") as reader:
                while (received := _read(reader, number)) is not None:
                    self.requests.append(received)
                    reply = self._answer(received)
                    if reply is None:
                        return
                    _write(connection, reply)
                    if reply.cut:
                        return
        except OSError:
            pass
        finally:
            connection.close()
            with self._lock:
                del self._open[connection]
                if not self._open:
                    self.idle.set()

    def _answer(self, received: Received) -> Reply | None:
        route = self.routes.get((received.method, received.path))
        if isinstance(route, list):
            return route.pop(0) if len(route) > 1 else route[0]
        if route is None or isinstance(route, Reply):
            return route or Reply.error(404, "GENERAL::NOT_FOUND", f"stub: no {received.method} {received.path}")
        return route(received)


def _read(reader: BinaryIO, connection: int) -> Received | None:
    line = reader.readline()
    if not line:
        return None
    method, target, _ = line.decode().split()
    headers: dict[str, str] = {}
    while (line := reader.readline()).strip():
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    if "content-length" in headers:
        body = reader.read(int(headers["content-length"]))
    elif headers.get("transfer-encoding") == "chunked":
        parts = []
        while size := int(reader.readline().strip(), 16):
            parts.append(reader.read(size))
            reader.readline()
        reader.readline()
        body = b"".join(parts)
    else:
        body = b""
    return Received(method, target, headers, body, connection)


def _write(connection: socket.socket, reply: Reply) -> None:
    headers = dict(reply.headers)
    if reply.chunks is None:
        headers["Content-Length"] = str(len(reply.body))
    else:
        headers["Transfer-Encoding"] = "chunked"
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(f"HTTP/1.1 {reply.status} Stub\r\n{head}\r\n".encode())
    if reply.chunks is None:
        connection.sendall(reply.body)
    else:
        for chunk in reply.chunks:
            connection.sendall(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        if not reply.cut:
            connection.sendall(b"0\r\n\r\n")


def created(stub: Stub, **more: Any) -> Reply:
    """The answer to a create; execd is the same stub, under /e."""
    body = {
        "id": ID,
        "status": {"state": "Running"},
        "createdAt": "2026-01-01T00:00:00Z",
        "entrypoint": ["tail", "-f", "/dev/null"],
        "endpoints": {"44772": {"endpoint": f"{stub.address}/e", "headers": TOKEN}},
        **more,
    }
    return Reply.of({name: value for name, value in body.items() if value is not None}, 202)
