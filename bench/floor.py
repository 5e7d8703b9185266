# SPDX-License-Identifier: Apache-2.0
"""Floors: what this machine takes for the least that could be done."""

from __future__ import annotations

import asyncio
import os

import httpx2

from opensandbox.plain_http import PlainTransport

from .figure import Book, Figure, Times
from .roundtrip import Line
from .world import World

FIGURES = (
    Figure("floor.spawn", "start /bin/true and wait for it"),
    Figure("floor.http", "a request to a bare Go server, with the SDK's transport"),
    Figure("floor.http_plain", "the same with a plain client on one connection"),
)


def spawn() -> None:
    """The floor of everything that starts a program: posix_spawn and wait, in this process."""
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)


def spawn_shell() -> None:
    """The floor of everything that starts a shell."""
    os.waitpid(os.posix_spawn("/bin/bash", ["bash", "-c", "true"], {}), 0)


def measure(world: World, book: Book) -> None:
    """All three, in turn."""
    times = Times()
    asyncio.run(_rounds(world.bare, world.rounds(200, 20), times))
    book.times("floor.spawn", times["spawn"])
    book.times("floor.http", times["http"])
    book.times("floor.http_plain", times["plain"])


async def _rounds(address: str, count: int, times: Times) -> None:
    async with httpx2.AsyncClient(transport=PlainTransport(httpx2.AsyncHTTPTransport)) as client:
        with Line(address) as line:
            for number in range(count + 1):
                with times.measure("spawn"):
                    spawn()
                with times.measure("http"):
                    await client.get(f"http://{address}/ping")
                with times.measure("plain"):
                    line.ask("GET", "/ping")
                if not number:
                    times.forget()
