# SPDX-License-Identifier: Apache-2.0
"""Files up and down with our SDK, beside a bare Go file server with the same transport."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from datetime import timedelta

import httpx2

from opensandbox import ConnectionConfig, Sandbox
from opensandbox.plain_http import PlainTransport

from .figure import Book, Figure, Times, median
from .world import World

FIGURES = (
    Figure("file.up_1KB", "write 1 KB"),
    Figure("file.down_1KB", "read 1 KB"),
    Figure("file.up_10MB", "write 10 MB"),
    Figure("file.down_10MB", "read 10 MB"),
    Figure("file.up_100MB", "write 100 MB", most_floors=2),
    Figure("file.down_100MB", "read 100 MB", most_floors=2),
)
CHUNK = 1 << 18
"""Bytes the SDK reads and sends at a time; the bare server gets them in the same pieces."""
# Name, bytes, rounds.
SIZES = (("1KB", 1000, 50), ("10MB", 10_000_000, 10), ("100MB", 100_000_000, 4))


def measure(world: World, book: Book) -> None:
    """Sandbox and bare server in turn, for each size."""
    asyncio.run(_sizes(world, book))
    book.left_out("left out by --quick")


async def _sizes(world: World, book: Book) -> None:
    connection = ConnectionConfig(domain=world.server.address, request_timeout=timedelta(seconds=120))
    sandbox = await Sandbox.create("host", timeout=timedelta(minutes=10), connection_config=connection)
    # The bare server is spoken to with what the SDK itself sends its requests with.
    async with httpx2.AsyncClient(timeout=120, transport=PlainTransport(httpx2.AsyncHTTPTransport)) as client:
        for name, size, rounds in SIZES[: world.sized(3, 2)]:
            times = Times()
            content = os.urandom(size)
            # However many rounds are asked for, large files are not sent hundreds of times.
            for number in range(min(world.rounds(rounds), rounds) + 1):
                await _round(sandbox, client, f"http://{world.bare}/files/{name}", content, times)
                if not number:
                    times.forget()
            for way in ("up", "down"):
                taken = times[way]
                speed = f"{size / median(taken) / 1000:,.0f} MB/s" if size > 1000 else ""
                book.times(f"file.{way}_{name}", taken, times[f"bare {way}"], speed)
    await sandbox.destroy()


async def _round(sandbox: Sandbox, client: httpx2.AsyncClient, url: str, content: bytes, times: Times) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for offset in range(0, len(content), CHUNK):
            yield content[offset : offset + CHUNK]

    with times.measure("up"):
        await sandbox.files.write_file("/workspace/file", content)
    with times.measure("bare up"):
        (await client.put(url, content=chunks(), headers={"Content-Length": str(len(content))})).raise_for_status()
    with times.measure("down"):
        back = await sandbox.files.read_bytes("/workspace/file")
    with times.measure("bare down"):
        bare = (await client.get(url, headers={"Accept-Encoding": "identity"})).raise_for_status().content
    if back != content or bare != content:
        raise RuntimeError("a file came back different")
