# SPDX-License-Identifier: Apache-2.0
"""What a sandbox costs while it does nothing, and whether the two hundredth is made as fast as the first."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from live_server import LiveServer

from .figure import Book, Figure, median
from .world import World

FIGURES = (
    Figure("memory.idle", "an idle sandbox: PSS of its processes and its kernel memory", "MB", most=2),
    Figure("memory.idle_pss", "its processes' part of that", "MB"),
    Figure("memory.idle_kernel", "the kernel's part of that", "MB"),
    Figure("memory.sandboxd", "RSS of sandboxd with all of them alive", "MB"),
    Figure("memory.ingress", "RSS of ingress with all of them alive", "MB"),
    Figure("memory.server", "RSS of the server with all of them alive", "MB"),
    Figure("create.at_1", "create, as seen by a plain client, with 1 alive, before and after the others"),
    Figure("create.at_100", "the same with 100 alive"),
    Figure("create.at_200", "the same with 200 alive"),
    Figure("create.growth", "create with 200 alive, in creates with 1 alive: flat is 1", "×"),
)
MB = 1e6
PARALLEL = 4


def measure(world: World, book: Book) -> None:
    """Fill up to 200 in steps; at each, time some creates and take them away again."""
    server = world.server
    server.create()
    before = _pss(server), _kernel(server)
    taken: dict[int, list[float]] = {}
    alive = 1
    for level in (1, 100, 200):
        wanted = level if not world.options.quick else min(level, level // 10 + 1)
        with ThreadPoolExecutor(PARALLEL) as pool:
            [*pool.map(lambda _: server.create(), range(wanted - alive))]
        alive = wanted
        taken[level] = _creates(server, world.rounds(20))
        if level > 1:
            book.times(f"create.at_{level}", taken[level], note=f"only {alive} alive" if alive != level else "")
    made = alive - 1
    after = _pss(server), _kernel(server)
    pss = (after[0] - before[0]) / made / MB
    book.value("memory.idle_pss", pss, note=f"{alive} alive")
    if after[1] is None or before[1] is None:
        book.missing("memory.idle_kernel", "this machine's cgroups do not count it")
        book.value("memory.idle", pss, note="processes only")
    else:
        kernel = (after[1] - before[1]) / made / MB
        book.value("memory.idle_kernel", kernel)
        book.value("memory.idle", pss + kernel)
    for pid, command in server.processes().items():
        name = Path(command.split()[0]).name
        if name in ("sandboxd", "ingress"):
            book.value(f"memory.{name}", rss(pid) / MB)
    book.value("memory.server", rss(server.pid) / MB)
    _clear(server)
    server.create()
    # Once more, so that a machine that was busy only for a while is not taken for growth.
    taken[1] += _creates(server, world.rounds(20))
    book.times("create.at_1", taken[1])
    book.value("create.growth", median(taken[200]) / median(taken[1]))
    _clear(server)


def _creates(server: LiveServer, count: int) -> list[float]:
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        sandbox = server.create()
        taken.append((time.perf_counter() - start) * 1000)
        server.call("DELETE", f"/v1/sandboxes/{sandbox.id}").expect(204)
    return taken


def _clear(server: LiveServer) -> None:
    with ThreadPoolExecutor(PARALLEL) as pool:
        while items := server.call("GET", "/v1/sandboxes?pageSize=100").expect(200).json()["items"]:
            [*pool.map(lambda item: server.call("DELETE", f"/v1/sandboxes/{item['id']}").expect(204), items)]


def _sandboxed(server: LiveServer) -> list[int]:
    """Every process inside a sandbox: they are the ones in this instance's cgroups."""
    found = []
    for pid in server.processes():
        with contextlib.suppress(OSError):
            if f"/opensandbox-{server.instance[:8]}" in Path(f"/proc/{pid}/cgroup").read_text():
                found.append(pid)
    return found


def _pss(server: LiveServer) -> int:
    """Bytes: pages shared by n processes count as 1/n in each, so the sum is what they take together."""
    total = 0
    for pid in _sandboxed(server):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total


def _kernel(server: LiveServer) -> int | None:
    """Bytes the kernel keeps for this instance's sandboxes: stacks, page tables, slabs."""
    tree = f"opensandbox-{server.instance[:8]}"
    with contextlib.suppress(OSError):
        return int(Path("/sys/fs/cgroup/memory", tree, "memory.kmem.usage_in_bytes").read_text())
    with contextlib.suppress(OSError):
        for line in Path("/sys/fs/cgroup", tree, "memory.stat").read_text().splitlines():
            if line.startswith("kernel "):
                return int(line.split()[1])
    return None


def rss(pid: int) -> int:
    """Bytes of memory that a process has resident."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0
