# SPDX-License-Identifier: Apache-2.0
"""Much output of one command: 20 MB in lines, with the published SDK and with ours."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from datetime import timedelta

from opensandbox import ConnectionConfig, Sandbox

from . import ROOT
from .figure import Book, Figure
from .published import PYTHON
from .world import World

FIGURES = (
    Figure("output.published", "20 MB of output in lines of 2,000 characters, with the published SDK", most=400),
    Figure("output.published_1000", "the same in lines of 1,000"),
    Figure("output.published_stub", "that from the stub: the SDK's own time"),
    Figure("output.ours", "20 MB in lines of 1,000 characters, with our SDK"),
    Figure("output.short_lines", "the same in lines of 100"),
)
BYTES = 20_000_000
SECONDS = 300


def measure(world: World, book: Book) -> None:
    """The output lies in a file in the sandbox; the command is `cat`."""
    rounds = world.rounds(7, 1)
    asyncio.run(_ours(world, book, rounds))
    if not PYTHON.exists():
        book.left_out("the published SDK is not installed; `make setup-test` does it")
        return
    # -I: neither a module here nor one named by the environment may be taken for the SDK.
    script = str(ROOT / "bench" / "published_output.py")
    command = [str(PYTHON), "-I", script, str(rounds), world.server.address, world.stub]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS, check=True)
    taken = json.loads(done.stdout.splitlines()[-1])
    book.times("output.published", taken["2000"])
    book.times("output.published_1000", taken["1000"], taken["stub"])
    book.times("output.published_stub", taken["stub"])


async def _ours(world: World, book: Book, rounds: int) -> None:
    connection = ConnectionConfig(domain=world.server.address)
    async with await Sandbox.create("host", timeout=timedelta(minutes=10), connection_config=connection) as sandbox:
        for name, width in (("output.ours", 1000), ("output.short_lines", 100)):
            line = b"x" * (width - 1) + b"\n"
            await sandbox.files.write_file("/workspace/lines", line * (BYTES // width))
            taken = []
            for number in range(rounds + 1):
                start = time.perf_counter()
                execution = await sandbox.commands.run("cat /workspace/lines")
                if number:
                    taken.append((time.perf_counter() - start) * 1000)
                if len(execution.logs.stdout) != BYTES // width:
                    raise RuntimeError(f"{len(execution.logs.stdout)} lines came instead of {BYTES // width}")
            book.times(name, taken)
    await sandbox.destroy()
