# SPDX-License-Identifier: Apache-2.0
"""The few things that differ between asynchronous and synchronous code, in their synchronous form.

The twin of `opensandbox.concurrency`, and the only one that is written by hand.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from io import IOBase
from typing import Generic, TypeVar

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


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


def call(function: Callable[[T], None], argument: T) -> None:
    """Call a user's function."""
    function(argument)


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
