# SPDX-License-Identifier: Apache-2.0
"""The few things that differ between asynchronous and synchronous code, in their synchronous form.

The twin of `opensandbox.concurrency`, and the only one that is written by hand.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from io import IOBase
from typing import Any, Generic, TypeVar

from opensandbox.concurrency import readable

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

# What may be streamed to a sandbox piece by piece.
Pieces = Iterable[bytes]


def sleep(duration: timedelta) -> None:
    """Pause the caller."""
    time.sleep(duration.total_seconds())


def shielded(limit: timedelta) -> AbstractContextManager[object]:
    """For cleaning up. Nobody cancels a thread, and each request has a limit of its own."""
    return nullcontext()


def read_chunk(source: IOBase, size: int) -> bytes | str:
    """Read from a file."""
    data: bytes | str = source.read(size)
    return data


def in_thread(function: Callable[..., T], *arguments: object) -> T:
    """Call what may block: here, as everything does."""
    return function(*arguments)


def each(pieces: Pieces) -> Iterator[bytes]:
    """The pieces, one after the other."""
    yield from pieces


def pulled(chunks: Iterator[bytes], work: Callable[[Callable[[], bytes]], T]) -> T:
    """Do work that asks for the chunks of a stream, one by one; an empty one is the end."""
    return work(lambda: next(chunks, b""))


@contextmanager
def beside(work: Callable[[], None]) -> Iterator[None]:
    """Do `work`, which raises nothing, as long as the block lasts."""
    # Nobody waits for it after a failure: it may hang on what failed.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join()


def connect_websocket(url: str, headers: dict[str, str], seconds: float, largest: int) -> Any:
    """A WebSocket: `recv`, `send` and `close`. The server sends the pings."""
    from websockets.sync.client import connect

    return connect(
        url, additional_headers=headers, user_agent_header=None, compression=None, proxy=None, open_timeout=seconds,
        ping_interval=None, max_size=largest,
        legacy=True,  # the connection itself, and not something to iterate over
    )  # fmt: skip


def call(function: Callable[[T], None], argument: T) -> None:
    """Call a user's function."""
    function(argument)


class Slots:
    """So many may do something at once; the others wait for their turn."""

    def __init__(self, count: int) -> None:
        self._semaphore = threading.Semaphore(count)

    def take(self, limit: float | None) -> None:
        """Wait for a slot; a `TimeoutError` after so many seconds."""
        if not self._semaphore.acquire(timeout=limit):
            raise TimeoutError

    def give(self) -> None:
        """Give it back."""
        self._semaphore.release()


class Wire:
    """A TCP connection. Failures are `OSError`, among them `TimeoutError` after so many seconds."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def send(self, data: bytes, limit: float | None) -> None:
        """Send all of it."""
        self._socket.settimeout(limit)
        self._socket.sendall(data)

    def receive(self, size: int, limit: float | None) -> bytes:
        """What has come, at most so much; empty at the end."""
        self._socket.settimeout(limit)
        return self._socket.recv(size)

    def readable(self) -> bool:
        """Whether there is something to read, if only the end."""
        return readable(self._socket)

    def close(self) -> None:
        """Close it."""
        self._socket.close()


def connect(host: str, port: int, limit: float | None) -> Wire:
    """A TCP connection to there."""
    connection = socket.create_connection((host, port), limit)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Wire(connection)


class SharedDict(Generic[K, V]):
    """A dictionary for the threads of this process. A forked child starts with an empty one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._reset()
        if hasattr(os, "register_at_fork"):
            # Two processes must not speak through the same connections.
            os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[K, V] = {}

    @contextmanager
    def open(self) -> Iterator[dict[K, V]]:
        """The dictionary, for one thread at a time."""
        with self._lock:
            yield self._entries
