# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.stub`: a server that does nothing, and says what a client wants to hear.

It answers as the lifecycle API and as execd, with bytes made beforehand, on one event loop. What a client takes
against it is the client's own time.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import cast

import uvloop

SANDBOX = "5a4d7b1e-2c3f-4e5a-9b8c-7d6e5f4a3b2c"
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def _answer(status: str, kind: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _json(status: str, value: object) -> bytes:
    return _answer(status, "application/json", json.dumps(value).encode())


def _lines() -> bytes:
    """20 MB of output in lines of 1,000 characters; told in a session, which has a path of its own."""
    told = [{"type": "init", "text": "c0ffee", "timestamp": 1}]
    told += [{"type": "stdout", "timestamp": 2, "text": "\n"[:n] + "x" * 999} for n in range(20_000)]
    told += [{"type": "execution_complete", "execution_time": 1, "timestamp": 3}]
    return b"".join(json.dumps(event).encode() + b"\n\n" for event in told)


def answers(address: str) -> dict[bytes, bytes]:
    """Every answer, by the method and the last word of the path."""
    endpoint = {"endpoint": f"{address}/{SANDBOX}/44772", "headers": {"X-EXECD-ACCESS-TOKEN": "t" * 43}}
    sandbox = {
        "id": SANDBOX,
        "image": {"uri": "host"},
        "status": {"state": "Running"},
        "metadata": {},
        "entrypoint": ["tail", "-f", "/dev/null"],
        "createdAt": "2030-01-01T00:00:00Z",
        "expiresAt": "2030-01-01T00:10:00Z",
        "endpoints": {"44772": endpoint},
        "timings": {"total": 0.0},
        "warnings": [],
    }
    events = [
        {"type": "init", "text": "c0ffee", "timestamp": 1},
        {"type": "stdout", "text": "ready\n", "timestamp": 2},
        {
            "type": "execution_complete",
            "execution_time": 1,
            "timestamp": 3,
            "end": {"reason": "exited", "exit_code": 0},
        },
    ]
    stream = b"".join(json.dumps(event).encode() + b"\n\n" for event in events)
    return {
        b"POST sandboxes": _json("202 Accepted", sandbox),
        b"GET 44772": _json("200 OK", endpoint),
        # The published SDK asks where egress answers, too.
        b"GET 18080": _json("200 OK", endpoint),
        b"POST command": _answer("200 OK", "text/event-stream", stream),
        b"POST run": _answer("200 OK", "text/event-stream", _lines()),
        b"DELETE": b"HTTP/1.1 204 No Content\r\n\r\n",
        # Whatever else: /ping, the reports of use that the published SDK sends, a look at the sandbox.
        b"GET": _json("200 OK", sandbox),
        b"POST": _json("200 OK", {}),
    }


class Stub(asyncio.Protocol):
    """One connection. Requests are told apart by method and last path word; bodies are only counted."""

    def __init__(self, said: dict[bytes, bytes]) -> None:
        self._said = said
        self._read = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        # uvloop's transports do not say that they are one.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer each request that is complete."""
        assert self._transport is not None
        self._read += data
        while (end := self._read.find(b"\r\n\r\n")) >= 0:
            head = self._read[:end]
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            if len(self._read) < whole:
                return
            self._read = self._read[whole:]
            method, path = head.split(b" ", 2)[:2]
            word = path.partition(b"?")[0].rpartition(b"/")[2]
            self._transport.write(self._said.get(method + b" " + word) or self._said[method])


async def serve() -> None:
    """Until it is ended."""
    loop = asyncio.get_running_loop()
    said: dict[bytes, bytes] = {}
    server = await loop.create_server(lambda: Stub(said), "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    said |= answers(address)
    print(address, flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve())
