# SPDX-License-Identifier: Apache-2.0
"""A server for tests that sends the bytes it is told to, connection by connection, and nothing else."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Self

from websockets.sync.server import ServerConnection, serve

Turn = Callable[[socket.socket], None]


class Scripted:
    """Each connection that comes gets the next script: steps that read or write on it, until it is closed."""

    def __init__(self, *scripts: Iterable[Turn]) -> None:
        self._scripts = list(scripts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.closed = threading.Semaphore(0)  # one for each connection that has ended here

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}/"

    def _serve(self) -> None:
        for script in self._scripts:
            with suppress(OSError):
                connection, _ = self._listener.accept()
                with connection, suppress(OSError):
                    for step in script:
                        step(connection)
            self.closed.release()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


def head(connection: socket.socket) -> None:
    """A step: read the head of a request, byte by byte, so that none of the body is taken."""
    read = b""
    while not read.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            raise ConnectionError
        read += byte


def say(data: bytes) -> Turn:
    """A step: send this."""
    return lambda connection: connection.sendall(data)


def until_closed(connection: socket.socket) -> None:
    """A step: read until the client goes."""
    while connection.recv(65536):
        pass


@contextmanager
def websocket(*frames: str | bytes) -> Iterator[tuple[str, list[str | bytes]]]:
    """A server that sends these frames to whoever opens a WebSocket: its address, and what it has been told."""
    heard: list[str | bytes] = []

    def talk(connection: ServerConnection) -> None:
        for frame in frames:
            connection.send(frame)
        heard.extend(connection)

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", heard
        server.shutdown()
        thread.join(10)
