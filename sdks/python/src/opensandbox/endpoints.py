# SPDX-License-Identifier: Apache-2.0
"""Addresses of sandboxes' ports, remembered for a while."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from datetime import timedelta

from opensandbox import models

# Where execd answers in every sandbox.
EXECD_PORT = 44772


class EndpointCache:
    """The most recently used addresses, each for a limited time. Threads may share it."""

    def __init__(self, ttl: timedelta, size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl = ttl.total_seconds()
        self._size = size
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, int], tuple[float, models.SandboxEndpoint]] = OrderedDict()

    def get(self, sandbox_id: str, port: int) -> models.SandboxEndpoint | None:
        """The address, unless it is unknown or too old."""
        with self._lock:
            entry = self._entries.get((sandbox_id, port))
            if entry is None or entry[0] <= self._clock():
                self._entries.pop((sandbox_id, port), None)
                return None
            self._entries.move_to_end((sandbox_id, port))
            return entry[1]

    def put(self, sandbox_id: str, port: int, endpoint: models.SandboxEndpoint) -> None:
        """Remember an address."""
        with self._lock:
            self._entries[(sandbox_id, port)] = (self._clock() + self._ttl, endpoint)
            self._entries.move_to_end((sandbox_id, port))
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox."""
        with self._lock:
            for key in [key for key in self._entries if key[0] == sandbox_id]:
                del self._entries[key]
