# SPDX-License-Identifier: Apache-2.0
"""Through a real HTTP server: clients that leave at the worst moment, and answers byte by byte."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from world import BODY, NODE, eventually

from opensandbox_server.admission import suits_this_machine
from opensandbox_server.app import Deps, create_app
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import SandboxState
from opensandbox_server.serve import bind
from opensandbox_server.store import SqlStore, open_store

pytestmark = pytest.mark.anyio


@dataclass
class Live:
    port: int
    store: SqlStore
    runtime: FakeRuntime
    stopping: Callable[[], None]

    async def send(
        self, method: str, path: str, body: Any = None, *, promise: int | None = None
    ) -> anyio.abc.SocketStream:
        """Send a request and hand out the connection. `promise` announces a longer body than is sent."""
        content = b"" if body is None else json.dumps(body).encode()
        stream = await anyio.connect_tcp("127.0.0.1", self.port)
        await stream.send(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {promise or len(content)}\r\n"
            f"Connection: close\r\n\r\n".encode()
            + content
        )
        return stream

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, list[str], bytes]:
        received = b""
        async with await self.send(method, path, body) as stream:
            async for chunk in stream:
                received += chunk
        head, _, content = received.partition(b"\r\n\r\n")
        status, *headers = head.decode().lower().split("\r\n")
        return int(status.split()[1]), headers, content


@pytest.fixture
async def live(tmp_path: Path) -> AsyncIterator[Live]:
    runtime = FakeRuntime()
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch))
        sockets = bind(("127.0.0.1",), 0)
        server = uvicorn.Server(uvicorn.Config(app, http="httptools", lifespan="on", log_config=None))

        async def started() -> bool:
            return server.started

        async with anyio.create_task_group() as group:
            group.start_soon(server._serve, sockets)
            await eventually(started)
            yield Live(sockets[0].getsockname()[1], store, runtime, app.state.stopping)
            runtime.gate.open()
            server.should_exit = True


async def rows(live: Live) -> list[SandboxState]:
    return [row.state for row in await live.store.mine()]


async def until(live: Live, states: list[SandboxState]) -> None:
    async def there() -> bool:
        return await rows(live) == states

    await eventually(there)


async def test_a_client_that_leaves_before_the_answer_has_its_sandbox_in_the_list(live: Live) -> None:
    live.runtime.gate.close()
    stream = await live.send("POST", "/v1/sandboxes", {**BODY, "metadata": {"job": "7"}})
    await live.runtime.gate.reached()
    await stream.aclose()
    assert (await live.ask("GET", "/health"))[0] == 200
    live.runtime.gate.open()
    await until(live, [SandboxState.RUNNING])
    _, _, content = await live.ask("GET", "/v1/sandboxes?metadata=job%3D7")
    assert [item["id"] for item in json.loads(content)["items"]] == list(live.runtime.sandboxes)


async def test_a_client_that_leaves_the_queue_made_nothing(live: Live) -> None:
    async def waiting(number: int) -> None:
        async def there() -> bool:
            _, _, content = await live.ask("GET", "/v1/runtime")
            return bool(json.loads(content)["creating"]["waiting"] == number)

        await eventually(there)

    live.runtime.gate.close()
    at_work = [await live.send("POST", "/v1/sandboxes", BODY) for _ in range(suits_this_machine())]
    stream = await live.send("POST", "/v1/sandboxes", BODY)
    await waiting(1)
    await stream.aclose()
    await waiting(0)
    live.runtime.gate.open()
    for other in at_work:
        assert (await other.receive()).startswith(b"HTTP/1.1 202")
        await other.aclose()
    assert len(await live.store.mine()) == len(at_work)


async def test_a_client_that_leaves_in_the_middle_of_its_request_made_nothing(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    stream = await live.send("POST", "/v1/sandboxes", BODY, promise=10_000)
    assert (await live.ask("GET", "/health"))[0] == 200
    await stream.aclose()
    assert (await live.ask("GET", "/v1/sandboxes"))[0] == 200
    assert await rows(live) == []
    assert "Traceback" not in caplog.text


async def test_a_client_that_leaves_during_a_delete(live: Live) -> None:
    await live.ask("POST", "/v1/sandboxes", BODY)
    (row,) = await live.store.mine()
    live.runtime.delete_gate.close()
    stream = await live.send("DELETE", f"/v1/sandboxes/{row.id}")
    await live.runtime.delete_gate.reached()
    await stream.aclose()
    live.runtime.delete_gate.open()
    await until(live, [])
    assert live.runtime.sandboxes == {}


async def test_headers_that_every_answer_has_once(live: Live) -> None:
    for path in ("/health", "/v1/sandboxes/nope"):
        _, headers, _ = await live.ask("GET", path)
        names = [header.partition(":")[0] for header in headers]
        for name in ("date", "x-request-id", "content-type", "content-length"):
            assert names.count(name) == 1, headers
        assert not [name for name in names if name.startswith("access-control")]


async def test_a_stream_of_events_comes_as_it_happens_and_is_forgotten_when_its_client_leaves(live: Live) -> None:
    async def followers(number: int) -> None:
        async def there() -> bool:
            _, _, content = await live.ask("GET", "/metrics")
            return f"opensandbox_event_followers {number}\n".encode() in content

        await eventually(there)

    stream = await live.send("GET", "/v1/events")
    await followers(1)
    received = b""
    await live.ask("POST", "/v1/sandboxes", BODY)
    with anyio.fail_after(10):
        while b"event: running" not in received:
            received += await stream.receive()
    assert b"text/event-stream" in received
    await stream.aclose()
    await followers(0)


async def test_open_streams_do_not_hold_up_the_end(live: Live) -> None:
    _, _, content = await live.ask("POST", "/v1/sandboxes", BODY)
    stream = await live.send("GET", f"/v1/sandboxes/{json.loads(content)['id']}/events")
    received = b""
    with anyio.fail_after(10):
        while b"event: running" not in received:
            received += await stream.receive()
        live.stopping()
        async for chunk in stream:
            received += chunk
    assert b"event: cut\n" in received
    assert received.endswith(b"0\r\n\r\n")
