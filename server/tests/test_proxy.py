# SPDX-License-Identifier: Apache-2.0
"""The way to a sandbox's ports through the server, over a real HTTP server, to real programs behind real sockets."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import json
import logging
import os
import resource
import socket as sockets_of_the_system
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import pytest
import uvicorn
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, unix_serve
from websockets.exceptions import ConnectionClosed, InvalidStatus
from world import BODY, NODE, eventually

from opensandbox_server.api import dial
from opensandbox_server.api.proxy import LARGEST_MESSAGE, MOST_WEBSOCKETS, ProxyRoute
from opensandbox_server.api.turns import MESSAGES_IN_A_TURN, ClientWebSocket, InSlices
from opensandbox_server.app import Deps, create_app
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.ports import Address
from opensandbox_server.proxy import Caller, Proxy, Target, below, inward, outward
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.serve import bind
from opensandbox_server.store import SqlStore, open_store

pytestmark = pytest.mark.anyio
Program = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
KEY = "correct-horse"


@dataclass
class Behind:
    """A server, and below it one sandbox whose ports are Unix sockets of this test."""

    port: int
    folder: Path
    runtime: FakeRuntime
    store: SqlStore
    id: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def path(self, port: int, rest: str = "/") -> str:
        return f"/v1/sandboxes/{self.id}/proxy/{port}{rest}"

    def websocket(self, port: int, rest: str = "/") -> str:
        return f"ws://127.0.0.1:{self.port}{self.path(port, rest)}"

    async def new(self, **headers: str) -> str:
        async with (
            aiohttp.ClientSession(headers=headers) as client,
            client.post(f"{self.url}/v1/sandboxes", json=BODY) as answer,
        ):
            return str((await answer.json())["id"])

    @contextlib.asynccontextmanager
    async def talking(self, port: int, program: Callable[[ServerConnection], Awaitable[None]], **options: Any) -> Any:
        """A program that speaks WebSocket."""
        async with unix_serve(program, str(self.folder / str(port)), max_size=None, **options):
            yield

    @contextlib.asynccontextmanager
    async def program(self, port: int, program: Program) -> AsyncIterator[None]:
        """Something that listens on a port inside."""

        async def guarded(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                await program(reader, writer)
            writer.close()

        server = await asyncio.start_unix_server(guarded, str(self.folder / str(port)), limit=2**20)
        try:
            yield
        finally:
            server.close()

    @contextlib.asynccontextmanager
    async def answering(self, port: int, answer: bytes) -> AsyncIterator[list[bytes]]:
        """A program that gives one answer to whatever comes, and the heads it saw."""
        heads: list[bytes] = []

        async def answering(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(answer)
            await writer.drain()

        async with self.program(port, answering):
            yield heads

    async def raw(self, request: str, body: bytes = b"") -> tuple[int, list[str], bytes]:
        """Send exactly this; status, header lines and the body as it came."""
        received = b""
        async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
            await stream.send(request.replace("\n", "\r\n").encode() + body)
            async for chunk in stream:
                received += chunk
        head, _, content = received.partition(b"\r\n\r\n")
        status, *headers = head.decode("latin-1").split("\r\n")
        return int(status.split()[1]), headers, content

    async def get(self, path: str, *headers: str, method: str = "GET") -> tuple[int, list[str], bytes]:
        lines = "\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers])
        return await self.raw(lines + "\n\n")

    async def code(self, path: str, *headers: str) -> tuple[int, str]:
        status, _, content = await self.get(path, *headers)
        return status, json.loads(content)["code"]


async def _ports_of_a_sandbox(folder: Path, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """What execd does on its `ports` socket: one line, then bytes in both directions."""
    port = (await reader.readline()).split()[1].decode()

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while chunk := await source.read(65536):
                to.write(chunk)
                await to.drain()
        with contextlib.suppress(OSError, RuntimeError):  # the second from uvloop, when it is closed
            to.write_eof()

    try:
        inner_reader, inner_writer = await asyncio.open_unix_connection(str(folder / port))
    except OSError:
        writer.write(b"ERR INGRESS::PORT_CLOSED nothing\n")
        writer.close()
        return
    writer.write(b"OK\n")
    await asyncio.gather(copy(reader, inner_writer), copy(inner_reader, writer))
    inner_writer.close()
    writer.close()


@contextlib.asynccontextmanager
async def served(folder: Path, read_seconds: float = 180, **settings: Any) -> AsyncIterator[Behind]:
    runtime = FakeRuntime()
    runtime.address = (
        lambda sandbox_id, port: (  # type: ignore[method-assign]
            Address(str(folder / "44772"), "api")
            if port == 44772
            else Address(str(folder / f"{sandbox_id[:8]}"), "ports")
        )
    )
    async with open_store(folder / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, runtime, b"k" * 32, node=NODE, epoch=store.epoch, **settings))
        route = next(route for route in app.router.routes if isinstance(route, ProxyRoute))
        route._read_seconds = read_seconds
        sockets = bind(("127.0.0.1",), 0)
        config = uvicorn.Config(
            app,
            http="httptools",
            ws=ClientWebSocket,  # type: ignore[arg-type]
            ws_max_size=LARGEST_MESSAGE,
            ws_per_message_deflate=False,
            lifespan="on",
            proxy_headers=False,
            server_header=False,
            log_config=None,
        )
        server = uvicorn.Server(config)

        async def started() -> bool:
            return server.started

        async with anyio.create_task_group() as group:
            group.start_soon(server._serve, sockets)
            await eventually(started)
            yield Behind(sockets[0].getsockname()[1], folder, runtime, store)
            server.should_exit = True


@contextlib.asynccontextmanager
async def sandboxed(**settings: Any) -> AsyncIterator[Behind]:
    with tempfile.TemporaryDirectory(prefix="px") as name:  # short: a socket's path has 107 bytes
        folder = Path(name)
        async with served(folder, **settings) as made:
            made.id = await made.new(**{"OPEN-SANDBOX-API-KEY": settings.get("api_key", "")})
            ports = await asyncio.start_unix_server(
                lambda reader, writer: _ports_of_a_sandbox(folder, reader, writer), str(folder / made.id[:8])
            )
            yield made
            ports.close()


@pytest.fixture
async def behind() -> AsyncIterator[Behind]:
    async with sandboxed() as made:
        yield made


OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"


async def closed(socket: Any) -> tuple[int, str]:
    """How it ends."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await socket.recv()
    return socket.close_code, socket.close_reason


# -- what arrives ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rest", "seen"),
    [
        ("/", "/"),
        ("/a%2Fb//c/../d?x=%2F&x=;&y", "/a%2Fb//c/../d?x=%2F&x=;&y"),
        ("/../../../../v1/sandboxes", "/../../../../v1/sandboxes"),
        ("/..%2f..%2fsandboxes", "/..%2f..%2fsandboxes"),
        ("//other/proxy/80", "//other/proxy/80"),
        ("/%E4%B8%AD?%zz", "/%E4%B8%AD?%zz"),
    ],
)
async def test_path_and_query_arrive_as_they_were_written(behind: Behind, rest: str, seen: str) -> None:
    for root in ("", "/v1"):
        async with behind.answering(8000, OK) as heads:
            assert (await behind.get(f"{root}/sandboxes/{behind.id}/proxy/8000{rest}"))[0] == 200
        assert heads[0].split(b" ")[1].decode() == seen


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("query", ["", "?a=%2F&b=;c?d"])
async def test_the_root_of_a_program_ends_with_a_slash(behind: Behind, method: str, query: str) -> None:
    """So that relative links of its page stay below it."""
    async with behind.answering(8000, OK) as heads:
        status, headers, content = await behind.get(behind.path(8000, query), method=method)
        assert (status, content) == (308, b"")
        assert f"location: 8000/{query}" in headers  # also right where a proxy in front has a prefix of its own
    assert heads == []
    assert (await behind.get("/v1/sandboxes/nope/proxy/8000", method=method))[0] == 404
    async with behind.answering(8000, OK) as heads:
        assert (await behind.get(behind.path(8000, query), method="POST"))[0] == 200
    assert heads[0].startswith(f"POST /{query} ".encode())
    # execd's API has no pages; its clients are programs.
    assert await behind.code(behind.path(44772, query)) == (502, "BACKEND_CONNECTION_FAILED")


@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "PATCH", "PUT", "POST", "DELETE", "PROPFIND"])
async def test_every_method_arrives(behind: Behind, method: str) -> None:
    async with behind.answering(8000, OK.removesuffix(b"hi") if method == "HEAD" else OK) as heads:
        status, headers, content = await behind.get(behind.path(8000), method=method)
    assert heads[0].startswith(f"{method} / ".encode())
    assert (status, content) == (200, b"" if method == "HEAD" else b"hi")
    assert "content-length: 2" in headers


async def test_what_was_meant_for_the_server_does_not_arrive(behind: Behind) -> None:
    sent = (
        "Authorization: Bearer secret",
        "Cookie: session=secret; other=secret",
        "OPEN-SANDBOX-API-KEY: secret",
        "OpenSandbox-Secure-Access: secret",
        "OpenSandbox-Access-Renew: secret",
        "X-EXECD-ACCESS-TOKEN: token",
        "X-Forwarded-For: 6.6.6.6",
        "X-Forwarded-Anything: 6.6.6.6",
        "Forwarded: for=6.6.6.6",
        "X-Real-IP: 6.6.6.6",
        "Connection: X-For-One-Hop",
        "X-For-One-Hop: secret",
        "Keep-Alive: secret",
        "TE: secret",
        "X-Two: a",
        "X-Two: b",
        "Accept-Encoding: gzip, br",
    )
    async with behind.answering(8000, OK) as heads, behind.answering(44772, OK) as execd:
        await behind.get(behind.path(8000), *sent)
        await behind.get(behind.path(44772), *sent)
    for head in (heads[0], execd[0]):
        seen = head.decode().lower()
        assert "secret" not in seen
        assert "6.6.6.6" not in seen
        lines = seen.split("\r\n")
        assert [line for line in lines if line.startswith("x-two:")] == ["x-two: a", "x-two: b"]
        assert "accept-encoding: gzip, br" in lines
        assert "x-forwarded-proto: http" in lines
        assert "x-forwarded-for: 127.0.0.1" in lines
        assert "host: localhost" in lines
        assert not [line for line in lines if line.startswith(("user-agent", "accept:"))], "nothing is made up"
    assert "token" not in heads[0].decode()
    assert "x-execd-access-token: token" in execd[0].decode().lower()
    assert f"x-forwarded-prefix: /v1/sandboxes/{behind.id}/proxy/8000" in heads[0].decode().lower()


async def test_answers_pass_byte_by_byte(behind: Behind) -> None:
    packed = bytes(range(256))
    told = (
        b"HTTP/1.1 404 Not Here\r\nX-Two: a\r\nX-Two: b\r\nContent-Encoding: gzip\r\nServer: mine\r\nDate: x\r\n"
        b"Connection: X-Hop\r\nX-Hop: 1\r\nContent-Length: 256\r\n\r\n" + packed
    )
    async with behind.answering(8000, told):
        status, headers, content = await behind.get(behind.path(8000))
    assert (status, content) == (404, packed)
    assert [header for header in headers if header.startswith("x-two")] == ["x-two: a", "x-two: b"]
    assert {"content-encoding: gzip", "server: mine"} <= set(headers)
    assert not [header for header in headers if header.startswith("x-hop")]
    for name in ("date:", "x-request-id:", "content-length:"):
        assert len([header for header in headers if header.startswith(name)]) == 1, headers


@pytest.mark.parametrize(
    "told",
    [
        b"HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\nETag: x\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\nuntil the end",
    ],
)
async def test_unusual_answers(behind: Behind, told: bytes) -> None:
    async with behind.answering(8000, told):
        status, _, content = await behind.get(behind.path(8000))
    assert status == int(told.split(b"HTTP/1.")[-1].split()[1])
    assert (b"until the end" in content) == told.endswith(b"until the end")


# -- streams -----------------------------------------------------------------------------------------------------------


async def test_each_event_arrives_before_the_next_is_made(behind: Behind) -> None:
    seen = asyncio.Queue[None]()

    async def events(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for number in range(3):
            writer.write(b"data: %d\n\n" % number)
            await seen.get()

    async with (
        behind.program(8000, events),
        aiohttp.ClientSession() as client,
        client.get(behind.url + behind.path(8000)) as answer,
    ):
        for number in range(3):
            assert await answer.content.readuntil(b"\n\n") == b"data: %d\n\n" % number
            seen.put_nowait(None)


async def test_an_answer_may_begin_before_the_request_ends(behind: Behind) -> None:
    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        while (line := await reader.readline()) != b"bye\r\n":
            if line.strip().isalpha():
                writer.write(line.upper())

    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def body() -> AsyncIterator[bytes]:
        yield b"hello\r\n"
        assert await heard.get() == b"HELLO\r\n"
        yield b"bye\r\n"

    async with (
        behind.program(8000, shout),
        aiohttp.ClientSession() as client,
        client.post(behind.url + behind.path(8000), data=body()) as answer,
    ):
        heard.put_nowait(await answer.content.readline())
        assert await answer.content.read() == b""


@pytest.mark.parametrize("known", [True, False])
async def test_large_bodies_pass_with_little_memory(behind: Behind, known: bool) -> None:
    """300 MB up and back at once: the program answers with what it reads."""
    size, piece = 300 << 20, bytes(1 << 18)
    seen: list[bytes] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        left = size
        while left:
            if known:
                chunk = await reader.read(min(left, 1 << 18))
            else:
                chunk = await reader.readexactly(int(await reader.readline(), 16))
                await reader.readexactly(2)
            left -= len(chunk)
            writer.write(chunk)
            await writer.drain()

    async def body() -> AsyncIterator[bytes]:
        for _ in range(size // len(piece)):
            yield piece

    gc.collect()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    received = 0
    headers = {"Content-Length": str(size)} if known else {}
    async with (
        behind.program(8000, echo),
        aiohttp.ClientSession() as client,
        client.put(behind.url + behind.path(8000), data=body(), headers=headers) as answer,
    ):
        async for chunk in answer.content.iter_any():
            received += len(chunk)
    assert received == size
    assert (b"content-length: %d" % size in seen[0].lower()) == known
    assert (b"transfer-encoding: chunked" in seen[0].lower()) == (not known)
    # All of this runs in one process, the client and the program too.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40 * 1024


async def test_a_slow_client_slows_the_program(behind: Behind) -> None:
    stuck = asyncio.Event()

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(1000):
            writer.write(bytes(1 << 20))
            try:
                async with asyncio.timeout(1):
                    await writer.drain()
            except TimeoutError:
                stuck.set()
                return

    async with behind.program(8000, flood), await anyio.connect_tcp("127.0.0.1", behind.port) as stream:
        await stream.send(f"GET {behind.path(8000)} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        with anyio.fail_after(30):
            await stuck.wait()


@pytest.mark.parametrize("body", ["none", "half"])
async def test_a_client_that_leaves_ends_what_the_program_does_for_it(behind: Behind, body: str) -> None:
    arrived, left = asyncio.Event(), asyncio.Event()

    async def patient(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        arrived.set()
        await reader.read()  # until the connection ends
        left.set()

    async with behind.program(8000, patient):
        stream = await anyio.connect_tcp("127.0.0.1", behind.port)
        length = "" if body == "none" else "Content-Length: 1000\r\n"
        await stream.send(f"POST {behind.path(8000)} HTTP/1.1\r\nHost: localhost\r\n{length}\r\n".encode())
        await arrived.wait()
        await stream.aclose()
        with anyio.fail_after(10):
            await left.wait()


async def test_connections_to_a_program_are_used_again(behind: Behind) -> None:
    connections = 0

    async def keeping(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK)

    async with behind.program(8000, keeping):
        for _ in range(5):
            assert (await behind.get(behind.path(8000)))[0] == 200
    assert connections == 1


# -- failures ----------------------------------------------------------------------------------------------------------


async def test_reasons_of_refusal(behind: Behind) -> None:
    assert await behind.code(behind.path(8000)) == (502, "BACKEND_CONNECTION_FAILED")
    assert await behind.code(behind.path(44772)) == (502, "BACKEND_CONNECTION_FAILED")
    assert await behind.code(behind.path(18080)) == (501, "INGRESS::NO_EGRESS")
    for port in ("0", "080", "65536", "99999999"):
        assert await behind.code(f"/sandboxes/{behind.id}/proxy/{port}/") == (400, "SANDBOX::INVALID_PORT")
    for port in ("x", "+80", "80%30", "%38000", "8000;x", "-1"):
        status, _, content = await behind.get(f"/sandboxes/{behind.id}/proxy/{port}/")
        assert status == 422, port
        assert json.loads(content)["detail"][0]["loc"] == ["path", "port"]
    assert await behind.code("/v1/sandboxes/nope/proxy/80") == (404, "SANDBOX::NOT_FOUND")
    assert await behind.code(f"/v1/sandboxes/{behind.id}/proxy") == (404, "GENERAL::NOT_FOUND")
    assert await behind.code(f"/v1/sandboxes/{behind.id}%2fproxy%2f8000/") == (404, "GENERAL::NOT_FOUND")
    assert await behind.code(f"/v1/sandboxes/{behind.id}/%70roxy/8000/") == (404, "GENERAL::NOT_FOUND")
    assert await behind.code(f"/v1/sandboxes/..%2f{behind.id}/proxy/8000/") == (404, "SANDBOX::NOT_FOUND")


async def test_a_sandbox_that_has_ended_is_a_conflict(behind: Behind) -> None:
    async with behind.answering(8000, OK):
        behind.runtime.end(behind.id)

        async def refused() -> bool:
            return await behind.code(behind.path(8000)) == (409, "SANDBOX::NOT_RUNNING")

        async def ended() -> bool:
            return (await behind.get(behind.path(8000)))[0] != 200

        await eventually(ended)
        assert await refused()


@pytest.mark.parametrize(
    "told",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: a\x00b\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(1000)) + b"\r\n",
    ],
    ids=["nothing", "not HTTP", "long header", "switch", "nul", "many headers"],
)
async def test_a_program_that_talks_nonsense(behind: Behind, told: bytes) -> None:
    async with behind.answering(8000, told):
        assert await behind.code(behind.path(8000)) == (502, "BACKEND_RESPONSE_FAILED")


async def test_an_answer_cut_short_is_seen_to_be(behind: Behind) -> None:
    async with (
        behind.answering(8000, b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf"),
        aiohttp.ClientSession() as c,
        c.get(behind.url + behind.path(8000)) as answer,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n"
    async with (
        behind.answering(8001, chunked),
        aiohttp.ClientSession() as client,
        client.get(behind.url + behind.path(8001)) as answer,
    ):
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.read()


async def test_a_silent_program_times_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async def halting(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await reader.read()

    async with sandboxed(read_seconds=0.2) as behind, behind.program(8000, silent), behind.program(8001, halting):
        assert await behind.code(behind.path(8000)) == (504, "BACKEND_TIMEOUT")
        status, _, content = await behind.get(behind.path(8001))
        assert (status, content) == (200, b"4\r\nhalf\r\n"), "it has begun, and is not ended"
        async with connect(behind.websocket(8000)) as socket:
            assert await closed(socket) == (1011, "BACKEND_TIMEOUT")


# -- the browser's side ------------------------------------------------------------------------------------------------


TARGET = Target("0b8f3c1e-5a50-4d0c-9d3a-2f6c1e7a9b11", 8000, "/v1/sandboxes/0b8f/proxy/8000")
CALLER = Caller("http", "localhost:8080", "127.0.0.1")


@pytest.mark.parametrize(
    ("location", "becomes"),
    [
        ("/login?x=1#f", "{}/login?x=1#f"),
        ("/", "{}/"),
        ("next", "next"),
        ("?q", "?q"),
        ("", ""),
        ("https://other.example/x", "https://other.example/x"),
        ("//other.example/x", "//other.example/x"),
        ("mailto:x@y.example", "mailto:x@y.example"),
        ("http://localhost:8080/deep", "{}/deep"),
        ("//localhost:8080", "{}/"),
        ("/../../../other/proxy/80", "{}/other/proxy/80"),
        ("/a/%2e%2E/../%2e/b/..", "{}/"),
        ("/\\..\\..\\x", "{}/x"),
        ("{}/already", "{}/already"),
        ("{}/../8001/x", "/v1/sandboxes/0b8f/proxy/8000/v1/sandboxes/0b8f/proxy/8001/x"),
        ("http://[::1", "http://[::1"),
    ],
)
def test_redirects_stay_below(location: str, becomes: str) -> None:
    assert below(TARGET.prefix, CALLER.host, location.replace("{}", TARGET.prefix)) == becomes.replace(
        "{}", TARGET.prefix
    )


def cookies(*lines: str) -> list[str]:
    told = outward([(b"Set-Cookie", line.encode()) for line in lines], TARGET, CALLER)
    return [value.decode() for name, value in told if name == b"set-cookie"]


def test_cookies_are_for_their_own_port_alone() -> None:
    mark = TARGET.cookie_mark.decode()
    prefix = TARGET.prefix
    assert cookies("a=1; Path=/app; Domain=localhost; HttpOnly; Max-Age=5; Unknown=x") == [
        f"{mark}a=1; HttpOnly; Max-Age=5; Path={prefix}/app"
    ]
    assert cookies("a=1", "b=2; path=relative") == [f"{mark}a=1; Path={prefix}/", f"{mark}b=2; Path={prefix}/"]
    assert cookies("session[x]=evil; Path=/", "=nameless", "nothing", " =x") == []
    sent = [(b"cookie", f"{mark}a=1; session=secret; {mark}b=2; osb-other-8000-a=3".encode())]
    assert ("cookie", "a=1; b=2") in inward(sent, TARGET, CALLER)
    assert not [name for name, _ in inward([(b"cookie", b"a=1")], TARGET, CALLER) if name == "cookie"]


def test_what_speaks_for_the_whole_host_is_dropped() -> None:
    told = [
        (b"Clear-Site-Data", b'"cookies"'),
        (b"Strict-Transport-Security", b"max-age=1"),
        (b"Service-Worker-Allowed", b"/"),
        (b"Content-Security-Policy", b"default-src 'self'"),
        (b"X-Kept", b"1"),
    ]
    passed = outward(told, TARGET, CALLER)
    assert [name for name, _ in passed] == [b"content-security-policy", b"x-kept", b"content-security-policy"]
    assert passed[-1][1].startswith(b"sandbox ")
    assert b"same-origin" not in passed[-1][1]
    assert [name for name, _ in outward(told, TARGET, CALLER, page_sandbox=False)][-1] == b"x-kept"
    execd = Target(TARGET.sandbox_id, 44772, TARGET.prefix)
    assert b"content-security-policy" not in dict(outward([(b"X", b"1")], execd, CALLER))


# -- WebSockets --------------------------------------------------------------------------------------------------------


async def echo(socket: ServerConnection) -> None:
    async for message in socket:
        await socket.send(message)


async def test_messages_pass_as_they_are(behind: Behind) -> None:
    async with behind.talking(8000, echo), connect(behind.websocket(8000), max_size=None) as socket:
        for message in ("text \u4e2d", b"\x00\xff", "", b"", "x" * 1_000_000, os.urandom(LARGEST_MESSAGE)):
            await socket.send(message)
            assert await socket.recv() == message
        await socket.send(["in ", "pieces"])
        assert await socket.recv() == "in pieces"
        await (await socket.ping())


async def test_a_handshake_arrives_as_it_was_sent(behind: Behind) -> None:
    seen: list[Any] = []

    async def tell(socket: ServerConnection) -> None:
        seen.append(socket.request)

    async with (
        behind.talking(8000, tell, subprotocols=["two"]),
        connect(
            behind.websocket(8000, "/a;b/%2F//c?x=;1&x"),
            subprotocols=["one", "two"],  # type: ignore[list-item]
            origin=f"http://127.0.0.1:{behind.port}",  # type: ignore[arg-type]
            additional_headers={
                "Authorization": "secret",
                "Cookie": "a=secret",
                "X-EXECD-ACCESS-TOKEN": "secret",
                "X": "y",
            },
        ) as socket,
    ):
        assert socket.subprotocol == "two"
        await closed(socket)
    assert seen[0].path == "/a;b/%2F//c?x=;1&x"
    headers = dict(seen[0].headers.raw_items())
    assert "secret" not in str(headers)
    assert headers["Host"] == f"127.0.0.1:{behind.port}"
    assert headers["x"] == "y"
    assert headers["origin"] == f"http://127.0.0.1:{behind.port}"
    assert headers["x-forwarded-for"] == "127.0.0.1"


async def test_close_codes_pass_both_ways(behind: Behind) -> None:
    ended: asyncio.Queue[tuple[int | None, str | None]] = asyncio.Queue()

    async def wait(socket: ServerConnection) -> None:
        await socket.wait_closed()
        ended.put_nowait((socket.close_code, socket.close_reason))

    async def leave(socket: ServerConnection) -> None:
        await socket.close(4321, "enough")

    async def vanish(socket: ServerConnection) -> None:
        socket.transport.abort()

    async with behind.talking(8000, wait), behind.talking(8001, leave), behind.talking(8002, vanish):
        socket = await connect(behind.websocket(8000))
        await socket.close(4123, "my reason")
        assert await ended.get() == (4123, "my reason")
        socket = await connect(behind.websocket(8000))
        await socket.close()
        assert await ended.get() == (1000, "")
        socket = await connect(behind.websocket(8000))
        socket.transport.abort()
        assert await ended.get() == (1001, "")
        async with connect(behind.websocket(8001)) as socket:
            assert await closed(socket) == (4321, "enough")
        async with connect(behind.websocket(8002)) as socket:
            assert await closed(socket) == (1011, "BACKEND_RESPONSE_FAILED")


async def test_websockets_that_cannot_be_opened_say_why(behind: Behind) -> None:
    redirect = f"HTTP/1.1 302 Found\r\nLocation: http://{behind.id}:8001/\r\nContent-Length: 0\r\n\r\n".encode()
    reached: list[Any] = []

    async def reach(socket: ServerConnection) -> None:
        reached.append(socket)

    async def refusal(path: str) -> tuple[int, str]:
        async with connect(f"ws://127.0.0.1:{behind.port}{path}") as socket:
            return await closed(socket)

    async with behind.answering(8000, redirect), behind.talking(8001, reach), behind.answering(8002, OK):
        assert await refusal(behind.path(8000)) == (1011, "BACKEND_RESPONSE_FAILED")
        assert await refusal(behind.path(8002)) == (1011, "BACKEND_RESPONSE_FAILED")
        assert await refusal(behind.path(8003)) == (1011, "BACKEND_CONNECTION_FAILED")
        assert await refusal("/sandboxes/nope/proxy/80") == (1008, "SANDBOX::NOT_FOUND")
        assert await refusal(f"/sandboxes/{behind.id}/proxy/x") == (1008, "GENERAL::INVALID_REQUEST")
    assert reached == [], "a program's redirect led to another port"


async def test_a_websocket_that_execd_refuses_is_refused_with_its_answer(behind: Behind) -> None:
    told = b'{"code":"CONTEXT_NOT_FOUND","message":"There is no terminal."}'
    head = "HTTP/1.1 {} X\r\nContent-Type: application/json\r\nSet-Cookie: a=b\r\nContent-Length: {}\r\n\r\n"
    async with behind.answering(44772, head.format(404, len(told)).encode() + told):
        with pytest.raises(InvalidStatus) as refused:
            await connect(behind.websocket(44772, "/pty/x/ws"))
        answer = refused.value.response
        assert (answer.status_code, answer.body) == (404, told)
        assert answer.headers["Content-Type"] == "application/json"
        assert answer.headers["X-Request-ID"]
        assert "Set-Cookie" not in answer.headers
    # A program could answer anything.
    program = behind.answering(8000, head.format(404, len(told)).encode() + told)
    async with program, connect(behind.websocket(8000)) as socket:
        assert await closed(socket) == (1011, "BACKEND_RESPONSE_FAILED")


async def test_a_message_larger_than_allowed_ends_only_its_socket(behind: Behind) -> None:
    told: asyncio.Queue[int | None] = asyncio.Queue()

    async def flood(socket: ServerConnection) -> None:
        with contextlib.suppress(ConnectionClosed):
            await socket.send(bytes(LARGEST_MESSAGE + 1))
        await socket.wait_closed()
        told.put_nowait(socket.close_code)

    async def listen(socket: ServerConnection) -> None:
        await socket.wait_closed()
        told.put_nowait(socket.close_code)

    async with behind.talking(8000, flood), behind.talking(8001, listen):
        async with connect(behind.websocket(8000), max_size=None) as socket:
            assert await closed(socket) == (1009, "BACKEND_RESPONSE_FAILED")
        assert await told.get() == 1009
        async with connect(behind.websocket(8001)) as socket:
            with contextlib.suppress(ConnectionClosed):
                await socket.send(bytes(LARGEST_MESSAGE + 1))
            assert (await closed(socket))[0] == 1009
        assert await told.get() == 1009
    assert (await behind.get("/health"))[0] == 200


async def test_a_socket_that_is_not_read_slows_its_program(behind: Behind) -> None:
    stuck = asyncio.Event()
    noise = os.urandom(1 << 20)  # nothing on the way can make it small

    async def flood(socket: ServerConnection) -> None:
        for _ in range(500):
            sending = asyncio.ensure_future(socket.send(noise))
            await asyncio.wait({sending}, timeout=1)
            if not sending.done():
                stuck.set()
            with contextlib.suppress(ConnectionClosed):
                await sending

    async with behind.talking(8000, flood):
        socket = await connect(behind.websocket(8000), max_size=None, max_queue=1)
        with anyio.fail_after(15):
            await stuck.wait()
        socket.transport.abort()


# -- hostile programs and clients --------------------------------------------------------------------------------------

# Both loops, because they read differently: uvloop, which the server runs, up to 8 MB before anybody else has a turn.
both_loops = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
EMPTY_TEXT, PING, CLOSE = b"\x81\x00", b"\x89\x00", b"\x88\x02\x03\xe8"


@contextlib.asynccontextmanager
async def ticking() -> AsyncIterator[list[int]]:
    """Counts how often somebody else gets a turn."""
    turns = [0]

    async def tick() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    ticker = asyncio.create_task(tick())
    try:
        yield turns
    finally:
        ticker.cancel()


def shouting(frames: bytes) -> Program:
    """A program that opens a WebSocket and sends these bytes all at once; then it stays, whatever it is told."""

    async def shout(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        key = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key")).split()[1]
        accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
        writer.write(
            b"HTTP/1.1 101 Yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            + accept
            + b"\r\n\r\n"
        )
        writer.write(frames)
        await reader.read()

    return shout


@contextlib.asynccontextmanager
async def raw_websocket(behind: Behind, path: str, *headers: str) -> AsyncIterator[anyio.abc.SocketStream]:
    """A client that parses nothing, so that all work is the server's."""
    async with await anyio.connect_tcp("127.0.0.1", behind.port) as stream:
        lines = (
            f"GET {path} HTTP/1.1",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Version: 13",
            "Sec-WebSocket-Key: YWFhYWFhYWFhYWFhYWFhYQ==",
            *(headers or ("Host: localhost",)),
        )
        await stream.send("\r\n".join((*lines, "", "")).encode())
        yield stream


async def received(stream: anyio.abc.SocketStream, least: int) -> bytes:
    """What follows the head: that many bytes, or all until the end."""
    content, start = bytearray(), -1
    with contextlib.suppress(anyio.EndOfStream):
        while start < 0 or len(content) < start + 4 + least:
            content += await stream.receive()
            start = content.find(b"\r\n\r\n") if start < 0 else start
    return bytes(content[start + 4 :])


@both_loops
async def test_what_is_there_to_read_is_read_in_slices() -> None:
    """However much there is: nobody waits for more than one slice."""
    total, size = 1 << 20, 1000
    largest, seen, before = 0, 0, 0
    finished = asyncio.Event()

    class Counting(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            nonlocal seen
            seen += len(data)

        def eof_received(self) -> None:
            finished.set()

    ours, theirs = sockets_of_the_system.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    loop = asyncio.get_running_loop()

    async def write() -> None:
        await loop.sock_sendall(theirs, bytes(total))
        theirs.close()

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    transport, _ = await loop.create_unix_connection(lambda: InSlices(Counting(), size), sock=ours)
    while not finished.is_set():
        largest, before = max(largest, seen - before), seen
        await asyncio.sleep(0)
    await writing
    transport.close()
    assert seen == total
    assert largest <= 2 * size, "at most the slice before the turn and the one after it"


@both_loops
@pytest.mark.parametrize("frame", [EMPTY_TEXT, b"\x81\x01a"], ids=["empty", "one byte"])
async def test_many_small_messages_leave_turns_to_others(frame: bytes) -> None:
    count = 20_000
    async with (
        sandboxed() as behind,
        behind.program(8000, shouting(frame * count)),
        ticking() as turns,
        raw_websocket(behind, behind.path(8000)) as stream,
    ):
        before = turns[0]
        assert await received(stream, len(frame) * count) == frame * count
        assert turns[0] - before >= count // MESSAGES_IN_A_TURN


@both_loops
async def test_many_small_messages_of_a_client_leave_turns_to_others() -> None:
    count = 20_000
    arrived = asyncio.Event()

    async def listen(socket: ServerConnection) -> None:
        for _ in range(count):
            assert await socket.recv() == ""
        arrived.set()

    async with (
        sandboxed() as behind,
        behind.talking(8000, listen),
        ticking() as turns,
        raw_websocket(behind, behind.path(8000)) as stream,
    ):
        assert (await stream.receive()).startswith(b"HTTP/1.1 101 ")
        before = turns[0]
        await stream.send(b"\x81\x80\x00\x00\x00\x00" * count)
        await arrived.wait()
        assert turns[0] - before >= count // MESSAGES_IN_A_TURN


@both_loops
async def test_a_flood_of_pings_ends_the_websocket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "_CLOSE_SECONDS", 0.1)
    enough = PING * dial.MOST_CONTROL_FRAMES + b"\x81\x02hi" + CLOSE
    async with (
        sandboxed() as behind,
        behind.program(8000, shouting(enough)),
        behind.program(8001, shouting(PING * 100_000)),
        behind.program(8002, shouting((PING * 10 + EMPTY_TEXT) * 10_000)),
    ):
        async with connect(behind.websocket(8000)) as socket:
            assert await socket.recv() == "hi"
        for port in (8001, 8002):
            async with connect(behind.websocket(port)) as socket:
                assert await closed(socket) == (1008, "BACKEND_RESPONSE_FAILED")


async def test_a_program_that_closes_and_stays_is_left(behind: Behind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "_CLOSE_SECONDS", 0.1)
    async with behind.program(8000, shouting(CLOSE)), connect(behind.websocket(8000)) as socket:
        with anyio.fail_after(4):
            assert await closed(socket) == (1000, "")


@both_loops
async def test_a_message_of_endless_pieces_ends_the_websocket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial, "_CLOSE_SECONDS", 0.1)
    async with (
        sandboxed() as behind,
        behind.program(8000, shouting(b"\x01\x00" + b"\x00\x00" * 20_000)),
        connect(behind.websocket(8000)) as socket,
    ):
        assert await closed(socket) == (1009, "BACKEND_RESPONSE_FAILED")


@both_loops
async def test_endless_interim_answers_are_no_answer() -> None:
    interim = b"HTTP/1.1 102 Processing\r\n\r\n"
    async with (
        sandboxed() as behind,
        behind.answering(8000, interim * dial.MOST_INTERIM + OK),
        behind.answering(8001, interim * (dial.MOST_INTERIM + 1) + OK),
        behind.answering(8002, interim * 50_000),
    ):
        assert (await behind.get(behind.path(8000)))[0] == 200
        assert await behind.code(behind.path(8001)) == (502, "BACKEND_RESPONSE_FAILED")
        assert await behind.code(behind.path(8002)) == (502, "BACKEND_RESPONSE_FAILED")


@both_loops
async def test_tiny_chunks_leave_turns_to_others() -> None:
    count = 200_000
    chunks = b"1\r\na\r\n" * count
    told = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    async with sandboxed() as behind, behind.answering(8000, told), ticking() as turns:
        before = turns[0]
        async with aiohttp.ClientSession() as client, client.get(behind.url + behind.path(8000)) as answer:
            assert await answer.read() == b"a" * count
        assert turns[0] - before >= len(chunks) // dial._HTTP_SLICE


@pytest.mark.parametrize("status", [0, 42, 101, 199, 600, 999])
async def test_a_status_that_means_nothing(behind: Behind, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with behind.answering(8000, b"HTTP/1.1 %03d X\r\nContent-Length: 2\r\n\r\nhi" % status):
        assert await behind.code(behind.path(8000)) == (502, "BACKEND_RESPONSE_FAILED")
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("host", ["127.0.0.1:abc", "127.0.0.1:99999999", "127.0.0.1:65536", "[", "[::1", "a b", "a@b"])
async def test_a_websocket_for_a_host_that_is_none(host: str, caplog: pytest.LogCaptureFixture) -> None:
    async def reach(socket: ServerConnection) -> None:
        raise AssertionError("a program was reached")

    async with sandboxed(api_key=KEY) as behind, behind.talking(8000, reach):
        headers = (f"Host: {host}", f"OPEN-SANDBOX-API-KEY: {KEY}")
        async with raw_websocket(behind, behind.path(8000), *headers) as stream:
            frame = await received(stream, 4)
    assert (frame[0], int.from_bytes(frame[2:4], "big")) == (0x88, 1008)
    assert not [record for record in caplog.records if record.exc_info]


async def test_websockets_of_a_sandbox_are_limited(behind: Behind) -> None:
    async def stay(socket: ServerConnection) -> None:
        await socket.wait_closed()

    async with behind.talking(8000, stay), contextlib.AsyncExitStack() as stack:
        first = await connect(behind.websocket(8000))
        for _ in range(MOST_WEBSOCKETS - 1):
            await stack.enter_async_context(connect(behind.websocket(8000)))
        async with connect(behind.websocket(8000)) as socket:
            assert await closed(socket) == (1013, "INGRESS::BUSY")
        await first.close()

        async def has_room() -> bool:
            async with connect(behind.websocket(8000)) as socket:
                try:
                    async with asyncio.timeout(0.2):
                        await socket.recv()
                except TimeoutError:
                    return True
                except ConnectionClosed:
                    return False
            return False

        await eventually(has_room)


async def test_proxied_requests_have_a_name_in_the_log(behind: Behind, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with behind.answering(8000, OK):
        await behind.get(behind.path(8000, "/private?x=1"))
    lines = [record.getMessage() for record in caplog.records if record.name == "opensandbox_server.access"]
    assert any(line.startswith("GET /sandboxes/{sandboxId}/proxy/{port} 200 ") for line in lines), lines
    assert "private" not in str(lines)
    _, _, figures = await behind.get("/metrics")
    assert b'route="/sandboxes/{sandboxId}/proxy/{port}"' in figures


# -- who may -----------------------------------------------------------------------------------------------------------


async def test_the_key_is_asked_for_also_here() -> None:
    async with sandboxed(api_key=KEY) as behind, behind.answering(8000, OK), behind.talking(8001, echo):
        assert await behind.code(behind.path(8000)) == (401, "MISSING_API_KEY")
        assert await behind.code(behind.path(8000), "OPEN-SANDBOX-API-KEY: wrong") == (401, "INVALID_API_KEY")
        assert (await behind.get(behind.path(8000), f"OPEN-SANDBOX-API-KEY: {KEY}"))[0] == 200
        with pytest.raises(InvalidStatus):
            await connect(behind.websocket(8001))
        async with connect(behind.websocket(8001), additional_headers={"OPEN-SANDBOX-API-KEY": KEY}) as socket:
            await socket.send("in")
            assert await socket.recv() == "in"


async def test_a_tenant_reaches_only_its_own(behind: Behind) -> None:
    proxy = Proxy(behind.store, behind.runtime)
    assert (await proxy.target("default", behind.id, "8000", root="")).sandbox_id == behind.id
    with pytest.raises(OpenSandboxError) as refused:
        await proxy.target("another", behind.id, "8000", root="")
    assert refused.value.code is Code.SANDBOX_NOT_FOUND


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:1"])
async def test_without_a_key_a_foreign_page_gets_nowhere(behind: Behind, origin: str) -> None:
    async def reach(socket: ServerConnection) -> None:
        raise AssertionError("a foreign page opened a WebSocket")

    async with behind.answering(8000, OK) as heads, behind.talking(8001, reach):
        assert await behind.code(behind.path(8000), f"Origin: {origin}") == (403, "FOREIGN_ORIGIN")
        with pytest.raises(InvalidStatus):
            await connect(behind.websocket(8001), origin=origin)  # type: ignore[arg-type]
        assert heads == []


# -- the endpoint ------------------------------------------------------------------------------------------------------


async def test_endpoints_through_the_server() -> None:
    async with sandboxed() as behind:

        async def endpoint(root: str, host: str, port: int = 8000, more: str = "") -> tuple[int, Any]:
            path = f"{root}/sandboxes/{behind.id}/endpoints/{port}?use_server_proxy=true{more}"
            status, _, content = await behind.raw(f"GET {path} HTTP/1.1\nHost: {host}\nConnection: close\n\n")
            return status, json.loads(content)

        there = f"sandboxes/{behind.id}/proxy/8000"
        assert await endpoint("/v1", "localhost:8080") == (200, {"endpoint": f"localhost:8080/v1/{there}"})
        assert await endpoint("", "[::1]:8080") == (200, {"endpoint": f"[::1]:8080/{there}"})
        assert await endpoint("/v1", "127.0.0.1") == (200, {"endpoint": f"127.0.0.1/v1/{there}"})
        status, told = await endpoint("/v1", "localhost", 44772)
        assert (status, list(told["headers"])) == (200, ["X-EXECD-ACCESS-TOKEN"])
        status, told = await endpoint("/v1", "localhost", more="&expires=9999999999")
        assert (status, told["code"]) == (400, "SANDBOX::INVALID_PARAMETER")
    async with sandboxed(api_key=KEY, loopback=False, public_host="sandboxes.example") as behind:
        path = f"/v1/sandboxes/{behind.id}/endpoints/8000?use_server_proxy=true"
        for host, status in (
            ("evil/x", 400),
            ("a b", 400),
            ("a@b", 400),
            ("", 400),
            ("h:1:2", 400),
            ("h.example:99", 200),
        ):
            request = f"GET {path} HTTP/1.1\nHost: {host}\nConnection: close\nOPEN-SANDBOX-API-KEY: {KEY}\n\n"
            told = await behind.raw(request)
            assert told[0] == status, host
        assert json.loads(told[2])["endpoint"] == f"sandboxes.example:99/v1/sandboxes/{behind.id}/proxy/8000"
