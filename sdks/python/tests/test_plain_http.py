# SPDX-License-Identifier: Apache-2.0
"""The SDK's own HTTP, against a server that sends exactly what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from scripted import Scripted, head, say, until_closed

from opensandbox.plain_http import PlainTransport

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


def general() -> Any:
    raise AssertionError("only plain HTTP here")


async def get(transport: PlainTransport, url: str, method: str = "GET", **more: Any) -> tuple[int, bytes]:
    limits = {"connect": 10.0, "read": more.pop("read", 10.0), "write": 10.0, "pool": more.pop("pool", 10.0)}
    request = httpx2.Request(method, url, extensions={"timeout": limits}, **more)
    response = await transport.handle_async_request(request)
    try:
        return response.status_code, await response.aread()
    finally:
        await response.aclose()


@pytest.mark.anyio
async def test_a_connection_is_used_again() -> None:
    with Scripted(
        [head, say(OK), head, say(OK)],
    ) as server:
        transport = PlainTransport(general)
        assert await get(transport, server.url) == (200, b"ok")
        assert await get(transport, server.url) == (200, b"ok")
        await transport.aclose()


@pytest.mark.anyio
async def test_one_that_the_server_has_closed_is_not() -> None:
    with Scripted(
        [head, say(OK)],
        [head, say(OK)],
    ) as server:
        transport = PlainTransport(general)
        assert await get(transport, server.url) == (200, b"ok")
        assert server.closed.acquire(timeout=10)
        assert await get(transport, server.url, "POST", content=b"x") == (200, b"ok")
        await transport.aclose()


@pytest.mark.anyio
async def test_an_answer_that_was_given_up_takes_its_connection_along() -> None:
    with Scripted(
        [head, say(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nbegin"), until_closed],
        [head, say(OK)],
    ) as server:
        transport = PlainTransport(general)
        response = await transport.handle_async_request(httpx2.Request("GET", server.url))
        await response.aclose()
        assert server.closed.acquire(timeout=10)
        assert await get(transport, server.url) == (200, b"ok")
        await transport.aclose()


@pytest.mark.anyio
async def test_a_refusal_before_the_end_of_the_body_is_read() -> None:
    """The server answers and closes while megabytes are still being sent."""

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(1000):
            yield bytes(65536)

    with Scripted(
        [
            head,
            say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\nConnection: close\r\n\r\nbig"),
            lambda connection: connection.shutdown(1),
            # Closing with unread bytes would be a reset, which may overtake the answer: read some, then go.
            lambda connection: connection.recv(1 << 20),
            until_closed,
        ],
    ) as server:
        transport = PlainTransport(general)
        assert await get(transport, server.url, "POST", content=endless()) == (413, b"big")
        await transport.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("failure", [OSError("the disk is gone"), TimeoutError("no more input"), BrokenPipeError()])
async def test_a_body_that_fails_is_the_callers_error(failure: OSError) -> None:
    """A server waits for the rest of the body, so that nobody may wait for its answer."""

    async def failing() -> AsyncIterator[bytes]:
        yield b"begin"
        raise failure

    with Scripted(
        [head, until_closed],
        [head, say(OK)],
    ) as server:
        transport = PlainTransport(general)
        with pytest.raises(OSError) as raised:
            await get(transport, server.url, "POST", content=failing())
        assert raised.value is failure
        assert server.closed.acquire(timeout=10)
        assert await get(transport, server.url) == (200, b"ok")
        await transport.aclose()


@pytest.mark.anyio
async def test_interim_answers_chunks_and_trailers() -> None:
    answer = (
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"3\r\nabc\r\n4;x=y\r\ndefg\r\n0\r\nX-Sum: 7\r\n\r\n"
    )
    with Scripted(
        [head, *(say(answer[i : i + 1]) for i in range(len(answer)))],
    ) as server:
        # Byte by byte: nothing may depend on how it is cut.
        transport = PlainTransport(general)
        assert await get(transport, server.url) == (200, b"abcdefg")
        await transport.aclose()


@pytest.mark.anyio
async def test_head_has_no_body_and_a_body_may_end_with_the_connection() -> None:
    with Scripted(
        [head, say(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"), head, say(OK)],
        [head, say(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nto the end")],
    ) as server:
        transport = PlainTransport(general)
        assert await get(transport, server.url, "HEAD") == (200, b"")
        assert await get(transport, server.url) == (200, b"ok")
        assert server.closed.acquire(timeout=10)
        assert await get(transport, server.url) == (200, b"to the end")
        await transport.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 200_000,
    ],
)
async def test_what_is_no_whole_answer_is_an_error(answer: bytes) -> None:
    with Scripted(
        [head, say(answer)],
    ) as server:
        transport = PlainTransport(general)
        with pytest.raises(httpx2.TransportError):
            await get(transport, server.url)
        await transport.aclose()


@pytest.mark.anyio
async def test_silence_has_a_limit() -> None:
    with Scripted(
        [head, until_closed],
        [head, say(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc"), until_closed],
    ) as server:
        transport = PlainTransport(general)
        for _ in range(2):
            with pytest.raises(httpx2.ReadTimeout):
                await get(transport, server.url, read=0.05)
            assert server.closed.acquire(timeout=10)
        await transport.aclose()


@pytest.mark.anyio
async def test_so_many_connections_and_no_more() -> None:
    with Scripted(
        [head, say(OK), head, say(OK)],
    ) as server:
        transport = PlainTransport(general, most=1)
        held = await transport.handle_async_request(httpx2.Request("GET", server.url))
        with pytest.raises(httpx2.PoolTimeout):
            await get(transport, server.url, pool=0.01)
        await held.aread()
        await held.aclose()
        assert await get(transport, server.url) == (200, b"ok")
        await transport.aclose()


@pytest.mark.anyio
async def test_nobody_listens() -> None:
    with Scripted([]) as server:
        url = server.url
    transport = PlainTransport(general)
    with pytest.raises(httpx2.ConnectError):
        await get(transport, url)
    await transport.aclose()
