# SPDX-License-Identifier: Apache-2.0
"""`make bench`: from create to the first command's output, with our SDK, beside the floor of this machine.

The floor is `posix_spawn("/bin/true")` and its wait, measured in this process between the rounds: what the kernel takes
to start a program at all. Times of a busy machine mean little; the ratio to the floor means more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from demo import Server, clean_environment
from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def floor() -> float:
    start = time.perf_counter()
    os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    return (time.perf_counter() - start) * 1000


async def rounds(address: str, count: int) -> dict[str, list[float]]:
    connection = ConnectionConfig(domain=address)
    times: dict[str, list[float]] = {
        "floor": [],
        "create": [],
        "create to first output": [],
        "warm true": [],
        "delete": [],
    }
    for number in range(count + 1):
        measured = {"floor": floor()}
        start = time.perf_counter()
        sandbox = await Sandbox.create("host", timeout=timedelta(minutes=5), connection_config=connection)
        measured["create"] = (time.perf_counter() - start) * 1000
        await sandbox.commands.run("echo ready")
        measured["create to first output"] = (time.perf_counter() - start) * 1000
        start = time.perf_counter()
        await sandbox.commands.run("true")
        measured["warm true"] = (time.perf_counter() - start) * 1000
        start = time.perf_counter()
        await sandbox.kill()
        measured["delete"] = (time.perf_counter() - start) * 1000
        await sandbox.close()
        # The first round opens connections and imports modules.
        if number:
            for name, value in measured.items():
                times[name].append(value)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description="create to first output, against posix_spawn")
    parser.add_argument("--rounds", type=int, default=50)
    count = parser.parse_args().rounds
    for name in set(os.environ) - set(clean_environment()):
        del os.environ[name]
    server = Server()
    try:
        times = asyncio.run(rounds(server.start(), count))
    finally:
        server.stop()
    base = quantile(times["floor"], 0.5)
    print(f"{count} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")
    print(f"{'':<26}{'p50':>10}{'p95':>10}{'× floor':>10}")
    for name, values in times.items():
        middle = quantile(values, 0.5)
        print(f"{name:<26}{middle:>7.2f} ms{quantile(values, 0.95):>7.2f} ms{middle / base:>10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
