# SPDX-License-Identifier: Apache-2.0
"""A plain HTTP client on one kept connection: what it adds to a request is small and always the same."""

from __future__ import annotations

import http.client
from collections.abc import Mapping

from live_server import UnixConnection

SECONDS = 30.0


class Line:
    """One connection to host:port, or to the path of a Unix socket.

    >>> with Line("127.0.0.1:8080") as line:        # doctest: +SKIP
    ...     line.ask("GET", "/health")
    """

    def __init__(self, address: str, headers: Mapping[str, str] | None = None) -> None:
        unix = address.startswith("/")
        self._connection = (UnixConnection if unix else http.client.HTTPConnection)(address, timeout=SECONDS)
        self._headers = dict(headers or {})

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request and read the whole answer."""
        self._connection.request(method, path, body, self._headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status >= 400:
            raise RuntimeError(f"{method} {path}: {response.status} {answer[:300].decode(errors='replace')}")
        return answer

    def __enter__(self) -> Line:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
