# SPDX-License-Identifier: Apache-2.0
"""What the ways into a sandbox add to a request: ingress, and the server's own proxy."""

from __future__ import annotations

import contextlib

from live_server import Sandbox

from .figure import Book, Figure, Times, median
from .roundtrip import Line
from .world import World

FIGURES = (
    Figure("way.socket", "a request straight to execd's Unix socket"),
    Figure("way.ingress", "what ingress adds to it", most=0.5),
    Figure("way.proxy", "what the server's proxy adds to it (use_server_proxy)", most=3),
)


def measure(world: World, book: Book) -> None:
    """`GET /ping` of one sandbox, each way in turn, each on a connection of its own that is kept."""
    server = world.server
    sandbox = server.create()
    ways = {
        "socket": (str(server.run_dir / sandbox.id / "api"), "", sandbox.headers),
        "ingress": (sandbox.address, sandbox.prefix, sandbox.headers),
    }
    answer = server.call("GET", f"/v1/sandboxes/{sandbox.id}/endpoints/44772?use_server_proxy=true")
    if answer.status == 200:
        proxied = Sandbox.of(sandbox.id, answer.json())
        ways["proxy"] = (proxied.address, proxied.prefix, proxied.headers)
    times = Times()
    with contextlib.ExitStack() as stack:
        lines = {
            name: (stack.enter_context(Line(address, headers)), f"{prefix}/ping")
            for name, (address, prefix, headers) in ways.items()
        }
        for number in range(world.rounds(300, 20) + 1):
            for name, (line, path) in lines.items():
                with times.measure(name):
                    line.ask("GET", path)
            if not number:
                times.forget()
    base = median(times["socket"])
    book.times("way.socket", times["socket"])
    for name in ("ingress", "proxy"):
        if name in ways:
            whole = median(times[name])
            book.value(f"way.{name}", whole - base, note=f"{whole:.2f} ms the whole request")
        else:
            book.missing(f"way.{name}", f"the server answers {answer.status}: {answer.json().get('message', '')}"[:80])
    server.call("DELETE", f"/v1/sandboxes/{sandbox.id}").expect(204)
