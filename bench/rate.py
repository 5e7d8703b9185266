# SPDX-License-Identifier: Apache-2.0
"""How many sandboxes a second, made and deleted: through the server, and at sandboxd itself."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp

from live_server import LiveServer
from opensandbox_server.runtimes.local.sandboxd import Client
from opensandbox_server.wire import sandboxd as wire

from . import floor
from .figure import Book, Figure, Times
from .world import World

FIGURES = (
    Figure("rate.server", "creates with deletes through the server", "/s", least=60),
    Figure("node.create", "create at sandboxd, over its socket: until it answers", most=6),
    Figure("node.rate", "creates with deletes at sandboxd", "/s", least=150),
)
WORKERS = 8
BODY = {
    "image": {"uri": "host"},
    "entrypoint": ["tail", "-f", "/dev/null"],
    "timeout": 300,
    "resourceLimits": {"cpu": "1", "memory": "2Gi"},
}


def measure(world: World, book: Book) -> None:
    """The server first; then it is stopped, so that sandboxd has nobody else to serve, and started again."""
    seconds = world.sized(10, 1)
    made = asyncio.run(_through_server(world.server.address, seconds))
    book.value("rate.server", made, note=f"{WORKERS} at a time for {seconds} s")
    server = world.server
    # A sandboxd that holds nothing would leave with its server.
    held = server.create()
    server.stop()
    times = Times()
    try:
        made = asyncio.run(_at_sandboxd(server, world.rounds(50), seconds, times))
    finally:
        server.start()
        server.call("DELETE", f"/v1/sandboxes/{held.id}").expect(204)
    book.times("node.create", times["create"], times["spawn"])
    book.value("node.rate", made, note=f"{WORKERS} at a time for {seconds} s")


async def _per_second(one: Callable[[], Awaitable[None]], seconds: float) -> float:
    """How often a second it was done by several workers; what is under way at the end is finished and counted."""
    start = time.perf_counter()
    done = 0

    async def work() -> None:
        nonlocal done
        while time.perf_counter() - start < seconds:
            await one()
            done += 1

    await asyncio.gather(*(work() for _ in range(WORKERS)))
    return done / (time.perf_counter() - start)


async def _through_server(address: str, seconds: float) -> float:
    # A leaner client than the SDK's: it shares the processors with what is measured.
    async with aiohttp.ClientSession(f"http://{address}", raise_for_status=True) as session:

        async def one() -> None:
            async with session.post("/v1/sandboxes", json=BODY) as answer:
                made = (await answer.json())["id"]
            async with session.delete(f"/v1/sandboxes/{made}"):
                pass

        await one()
        return await _per_second(one, seconds)


async def _at_sandboxd(server: LiveServer, count: int, seconds: float, times: Times) -> float:
    async with Client(server.run_dir / "sandboxd.sock") as node, _watching(node):

        async def one() -> None:
            sandbox = str(uuid.uuid4())
            with times.measure("create"):
                await node.launch(_request(sandbox))
            await node.remove(sandbox)

        for number in range(count + 1):
            with times.measure("spawn"):
                floor.spawn()
            await one()
            if not number:
                times.forget()
        alone = [*times["create"]]
        made = await _per_second(one, seconds)
        times["create"][:] = alone
        return made


def _request(sandbox: str) -> wire.LaunchRequest:
    return wire.LaunchRequest(
        id=sandbox,
        image="host",
        entrypoint=["tail", "-f", "/dev/null"],
        limits=wire.Limits(cpu_millis=1000, memory_bytes=2 << 30),
        token_sha256=hashlib.sha256(sandbox.encode()).hexdigest(),
        generation=1,
    )


@contextlib.asynccontextmanager
async def _watching(node: Client) -> AsyncIterator[None]:
    """As a server does: without anybody who watches, a sandboxd that holds nothing leaves after ten seconds."""

    async def watch() -> None:
        async for _ in node.events():
            pass

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
