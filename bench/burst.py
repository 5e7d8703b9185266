# SPDX-License-Identifier: Apache-2.0
"""Many at once: a hundred creates together."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from opensandbox import ConnectionConfig, Sandbox

from .figure import Book, Figure, median
from .world import World

FIGURES = (
    Figure("burst.wall", "100 creates at once with our SDK: until the last is ready", "s", most=1.2),
    Figure("burst.slowest", "the slowest of them", "s"),
    Figure("burst.failed", "how many failed", "", most=0),
)


def measure(world: World, book: Book) -> None:
    """A few bursts one after the other; everything is deleted in between."""
    size = world.sized(100, 20)
    walls: list[float] = []
    slowest: list[float] = []
    failures: list[BaseException] = []
    for _ in range(world.sized(3, 1)):
        wall, taken, failed = asyncio.run(_burst(world.server.address, size))
        walls.append(wall)
        slowest.append(max(taken, default=0.0))
        failures += failed
    note = "" if size == 100 else f"only {size}"
    book.value(
        "burst.wall", median(walls), note=note or f"of {len(walls)} bursts: {', '.join(f'{w:.2f}' for w in walls)}"
    )
    book.value("burst.slowest", median(slowest), note=note)
    book.value("burst.failed", len(failures), note=str(failures[0])[:80] if failures else note)


async def _burst(address: str, size: int) -> tuple[float, list[float], list[BaseException]]:
    connection = ConnectionConfig(domain=address, request_timeout=timedelta(seconds=60))
    start = time.perf_counter()

    async def create() -> tuple[Sandbox, float]:
        made = await Sandbox.create("host", timeout=timedelta(minutes=5), connection_config=connection)
        return made, time.perf_counter() - start

    results = await asyncio.gather(*(create() for _ in range(size)), return_exceptions=True)
    wall = time.perf_counter() - start
    made = [result for result in results if not isinstance(result, BaseException)]
    await asyncio.gather(*(sandbox.destroy() for sandbox, _ in made))
    return wall, [taken for _, taken in made], [result for result in results if isinstance(result, BaseException)]
