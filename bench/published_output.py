# SPDX-License-Identifier: Apache-2.0
"""Run by output.py with the Python that has the published SDK: the time for 20 MB of output in lines.

    python published_output.py HOST:PORT ROUNDS

Prints the milliseconds as JSON. Knows nothing of the rest of bench/.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from datetime import timedelta

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig

LINES, LINE = 20_000, b"x" * 999 + b"\n"


async def main(address: str, rounds: int) -> None:
    connection = ConnectionConfig(domain=address, disable_metrics=True)
    sandbox = await Sandbox.create("host", timeout=timedelta(minutes=10), connection_config=connection)
    await sandbox.files.write_file("/workspace/lines", LINE * LINES)
    taken = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        execution = await sandbox.commands.run("cat /workspace/lines")
        if number:
            taken.append((time.perf_counter() - start) * 1000)
        if len(execution.logs.stdout) != LINES:
            raise RuntimeError(f"{len(execution.logs.stdout)} lines came instead of {LINES}")
    await sandbox.destroy()
    print(json.dumps(taken))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
