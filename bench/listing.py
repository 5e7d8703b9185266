# SPDX-License-Identifier: Apache-2.0
"""A page of 50 out of 1,000 sandboxes, at the server."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

from .figure import Book, Figure, Times, median
from .rate import BODY
from .roundtrip import Line
from .world import World

FIGURES = (
    Figure("list.page", "the first page of 50 out of 1,000, at the server", most=10),
    Figure("list.last_page", "the last page of them", most=10),
    Figure("list.filtered", "the first page of those with one metadata value, 500 of 1,000", most=10),
)
ROWS = 1000
PAGES = {
    "page": "/v1/sandboxes?page=1&pageSize=50",
    "last_page": "/v1/sandboxes?page=20&pageSize=50",
    "filtered": "/v1/sandboxes?page=1&pageSize=50&metadata=half%3Dodd",
}
PARALLEL = 4


def measure(world: World, book: Book) -> None:
    """On the fake runtime, so that a thousand rows need no thousand sandboxes; routes and database are real."""
    rows = world.sized(ROWS, 100)
    pages = PAGES if rows == ROWS else {name: path.replace("page=20", "page=2") for name, path in PAGES.items()}
    _fill(world.fake, rows)
    times = Times()
    with Line(world.fake) as server, Line(world.bare) as bare:
        for number in range(world.rounds(100, 5) + 1):
            with times.measure("floor"):
                bare.ask("GET", "/ping")
            for name, path in pages.items():
                with times.measure(name):
                    answer = server.ask("GET", path)
                if len(json.loads(answer)["items"]) != 50:
                    raise RuntimeError(f"{path} has not 50 items")
            if not number:
                times.forget()
    way = median(times["floor"])
    for name in pages:
        at_server = [max(0.0, taken - way) for taken in times[name]]
        note = f"{median(times[name]):.1f} ms at the client"
        book.times(f"list.{name}", at_server, note=note if rows == ROWS else f"only {rows} rows")


def _fill(address: str, rows: int) -> None:
    def some(start: int) -> None:
        with Line(address, {"Content-Type": "application/json"}) as line:
            for number in range(start, rows, PARALLEL):
                metadata = {"number": str(number), "half": "odd" if number % 2 else "even"}
                line.ask("POST", "/v1/sandboxes", json.dumps({**BODY, "metadata": metadata}).encode())

    with ThreadPoolExecutor(PARALLEL) as pool:
        [*pool.map(some, range(PARALLEL))]
