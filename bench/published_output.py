# SPDX-License-Identifier: Apache-2.0
"""Run by output.py with the Python that has the published SDK: the time for 20 MB of output in lines.

    python published_output.py ROUNDS HOST:PORT STUB:PORT

Prints JSON: the milliseconds at our server, in lines of two lengths, and at the stub, where they are this SDK's own.
Knows nothing of the rest of bench/.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig

BYTES = 20_000_000


async def main(rounds: int, server: str, stub: str) -> None:
    ours, own = [
        await Sandbox.create(
            "host",
            timeout=timedelta(minutes=10),
            connection_config=ConnectionConfig(domain=address, disable_metrics=True),
        )
        for address in (server, stub)
    ]
    for width in (1000, 2000):
        await ours.files.write_file(f"/workspace/{width}", (b"x" * (width - 1) + b"\n") * (BYTES // width))
    taken: dict[str, list[float]] = {"1000": [], "2000": [], "stub": []}
    for number in range(rounds + 1):
        for name, width, run in (
            ("1000", 1000, lambda: ours.commands.run("cat /workspace/1000")),
            ("2000", 2000, lambda: ours.commands.run("cat /workspace/2000")),
            ("stub", 1000, lambda: own.commands.run_in_session("stub", "lines")),
        ):
            start = time.perf_counter()
            execution = await run()
            if number:
                taken[name].append((time.perf_counter() - start) * 1000)
            if len(execution.logs.stdout) != BYTES // width:
                raise RuntimeError(f"{len(execution.logs.stdout)} lines came instead of {BYTES // width}")
    await ours.destroy()
    print(json.dumps(taken))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *sys.argv[2:4]))
