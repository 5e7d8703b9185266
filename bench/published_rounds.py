# SPDX-License-Identifier: Apache-2.0
"""Run by published.py with the Python that has the published SDK: create and first output, in turn at each address.

    python published_rounds.py ROUNDS NAME=HOST:PORT …

Prints JSON: for each name, milliseconds of `create` and of `first_output`. Knows nothing of the rest of bench/.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig


async def one(address: str) -> dict[str, float]:
    """A sandbox as a program makes it that makes one: a configuration of its own, then a command."""
    # Its reports of use would load certificates in the middle of the first command, and hide what that takes.
    connection = ConnectionConfig(domain=address, disable_metrics=True)
    start = time.perf_counter()
    sandbox = await Sandbox.create("host", timeout=timedelta(minutes=5), connection_config=connection)
    created = time.perf_counter()
    execution = await sandbox.commands.run("echo ready")
    ended = time.perf_counter()
    if not execution.logs.stdout:
        raise RuntimeError(f"no output from {address}: {execution}")
    await sandbox.destroy()
    return {"create": (created - start) * 1000, "first_output": (ended - start) * 1000}


async def main(rounds: int, places: dict[str, str]) -> None:
    taken: dict[str, dict[str, list[float]]] = {name: {"create": [], "first_output": []} for name in places}
    for number in range(rounds + 1):
        for name, address in places.items():
            measured = await one(address)
            # The first round imports modules.
            if number:
                for what, value in measured.items():
                    taken[name][what].append(value)
    print(json.dumps(taken))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), dict(word.split("=", 1) for word in sys.argv[2:])))
