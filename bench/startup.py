# SPDX-License-Identifier: Apache-2.0
"""Starting: the server, the SDK's import, the command line; and how large the programs are."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from live_server import LiveServer
from opensandbox_server.runtimes.local.sandboxd import binary

from .figure import Book, Figure, Times, median
from .world import World

FIGURES = (
    Figure("start.server_new", "the server on an empty state directory, until it answers"),
    Figure("start.server", "the server on a state directory it knows, until it answers"),
    Figure("start.import", "`from opensandbox import Sandbox`, without Python's own start", most=150),
    Figure("start.import_http", "the same with the HTTP client, which the first request fetches"),
    Figure("start.osb_help", "`osb --help`, the whole process"),
    Figure("size.execd", "the execd binary", "MB"),
    Figure("size.ingress", "the ingress binary", "MB"),
    Figure("size.sandboxd", "the sandboxd binary", "MB"),
)
IMPORTS = {
    "python": "pass",
    "import": "from opensandbox import Sandbox",
    "import_http": "from opensandbox import Sandbox; import httpx2",
}


def measure(world: World, book: Book) -> None:
    """Processes of our own, each started several times."""
    times = Times()
    for number in range(world.sized(3, 1)):
        home = world.folder / f"start-{number}"
        home.mkdir()
        server = LiveServer(home)
        try:
            with times.measure("new"):
                _until_it_answers(server)
            server.stop()
            with times.measure("known"):
                _until_it_answers(server)
        finally:
            server.close()
            shutil.rmtree(home, ignore_errors=True)
    book.times("start.server_new", times["new"])
    book.times("start.server", times["known"])
    for name in ("execd", "ingress", "sandboxd"):
        book.value(f"size.{name}", binary(name).stat().st_size / 1e6)
    _imports(world, book)
    _command_line(world, book)


def _until_it_answers(server: LiveServer) -> None:
    server.start()
    server.call("GET", "/health").expect(200)


def _imports(world: World, book: Book) -> None:
    times = Times()
    for number in range(world.rounds(10) + 1):
        for name, code in IMPORTS.items():
            with times.measure(name):
                subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
        if not number:
            times.forget()
    bare = median(times["python"])
    for name in ("import", "import_http"):
        book.times(f"start.{name}", [taken - bare for taken in times[name]], note=f"Python itself: {bare:.0f} ms")


def _command_line(world: World, book: Book) -> None:
    osb = Path(sys.executable).with_name("osb")
    if not osb.exists():
        book.missing("start.osb_help", "osb is not installed in .venv")
        return
    times = Times()
    for number in range(world.rounds(10) + 1):
        with times.measure("osb"):
            subprocess.run([str(osb), "--help"], check=True, timeout=60, stdout=subprocess.DEVNULL)
        if not number:
            times.forget()
    book.times("start.osb_help", times["osb"])
