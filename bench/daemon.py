# SPDX-License-Identifier: Apache-2.0
"""execd by itself, as it runs in a container: how soon it answers, and how much memory it takes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from live_server import UnixConnection
from opensandbox_server.runtimes.local.sandboxd import binary

from .figure import Book, Figure, Times
from .floor import spawn
from .memory import MB, rss
from .world import World

FIGURES = (
    Figure("execd.start", "execd, from its exec to the first answer"),
    Figure("execd.idle", "its RSS when it has answered", "MB"),
    Figure("execd.flooded", "its most RSS while a command writes 300 MB that nobody reads", "MB", most=32),
    Figure("execd.streaming", "the same while a client reads them", "MB"),
)
TOKEN = "bench"
FLOOD = 300_000_000


def measure(world: World, book: Book) -> None:
    """The binary, on a socket and a spool of its own."""
    times, idle = Times(), []
    for number in range(world.rounds(20) + 1):
        with times.measure("spawn"):
            spawn()
        with _daemon(world.folder / f"execd-{number}", times) as (pid, _):
            idle.append(rss(pid) / MB)
        if not number:
            times.forget()
    book.times("execd.start", times["start"], times["spawn"])
    book.value("execd.idle", sorted(idle)[len(idle) // 2])
    flood = world.sized(FLOOD, FLOOD // 10)
    with _daemon(world.folder / "execd-flood", Times()) as (pid, socket):
        book.value("execd.flooded", _most(pid, socket, flood, background=True))
        book.value("execd.streaming", _most(pid, socket, flood, background=False))


@contextlib.contextmanager
def _daemon(folder: Path, times: Times) -> Iterator[tuple[int, str]]:
    folder.mkdir()
    socket = str(folder / "api")
    command = [str(binary("execd")), "-listen", socket, "-spool", str(folder / "spool"), "-log-level", "error"]
    (folder / "spool").mkdir()
    command += ["-token-sha256", hashlib.sha256(TOKEN.encode()).hexdigest()]
    with times.measure("start"):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, cwd=folder)
        while True:
            try:
                connection = UnixConnection(socket, timeout=30)
                connection.request("GET", "/ping", headers={"X-EXECD-ACCESS-TOKEN": TOKEN})
                connection.getresponse().read()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError(f"execd ended with {process.returncode}") from None
    try:
        yield process.pid, socket
    finally:
        connection.close()
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def _most(pid: int, socket: str, size: int, *, background: bool) -> float:
    """The most memory seen until the command has ended."""
    done, most = threading.Event(), [0]

    def look() -> None:
        while not done.wait(0.005):
            most[0] = max(most[0], rss(pid))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        _run(socket, f"yes {'x' * 999} | head -c {size}", background)
    finally:
        done.set()
        watcher.join()
    return most[0] / MB


def _run(socket: str, command: str, background: bool) -> None:
    headers = {"X-EXECD-ACCESS-TOKEN": TOKEN, "Content-Type": "application/json"}
    connection = UnixConnection(socket, timeout=120)
    connection.request("POST", "/command", json.dumps({"command": command, "background": background}), headers)
    answer = connection.getresponse()
    first = answer.readline()
    while answer.read(1 << 20):
        pass
    identity = json.loads(first)["text"]
    while background:
        connection.request("GET", f"/command/status/{identity}", headers=headers)
        if not json.loads(connection.getresponse().read())["running"]:
            break
        time.sleep(0.02)
    connection.close()
