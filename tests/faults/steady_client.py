# SPDX-License-Identifier: Apache-2.0
"""A program of a user: one sandbox, a command for each line it is given, the answer on a line of its own.

It runs under the interpreter that has the published SDK as well as under ours, and imports nothing of this repository.
"""

from __future__ import annotations

import asyncio
import sys

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig


async def main() -> None:
    sandbox = await Sandbox.create("host", connection_config=ConnectionConfig())
    print(sandbox.id, flush=True)
    try:
        # In a thread: what waits for the next line must not keep the SDK's connections from being looked after.
        while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
            await sandbox.files.write_file("/tmp/word", word)
            done = await sandbox.commands.run("cat /tmp/word")
            print("".join(message.text for message in done.logs.stdout).strip(), flush=True)
    finally:
        await sandbox.kill()
        await sandbox.close()


asyncio.run(main())
