# SPDX-License-Identifier: Apache-2.0
"""Cells of code: a new Python context, its first cell and its tenth, with our SDK."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from code_interpreter import CodeInterpreter, SupportedLanguage
from opensandbox import ConnectionConfig, Sandbox

from . import floor
from .figure import Book, Figure, Times
from .world import World

FIGURES = (
    Figure("code.context", "a new Python context"),
    Figure("code.first_cell", "the first cell of a new Python context", most=10),
    Figure("code.tenth_cell", "the tenth", most=3),
    Figure("code.bash_cell", "the tenth cell of a Bash context"),
)
IMAGE = "opensandbox/code-interpreter:v1.0.2"
ENTRYPOINT = ["/opt/opensandbox/code-interpreter.sh"]


def measure(world: World, book: Book) -> None:
    """One sandbox; each round has a context of its own."""
    times = Times()
    asyncio.run(_rounds(world.server.address, world.rounds(30), times))
    spawn = times["spawn"]
    for name in ("context", "first_cell", "tenth_cell", "bash_cell"):
        book.times(f"code.{name}", times[name], spawn)


async def _rounds(address: str, count: int, times: Times) -> None:
    sandbox = await Sandbox.create(
        IMAGE,
        entrypoint=ENTRYPOINT,
        timeout=timedelta(minutes=10),
        connection_config=ConnectionConfig(domain=address),
    )
    interpreter = await CodeInterpreter.create(sandbox)
    for number in range(count + 1):
        with times.measure("spawn"):
            floor.spawn()
        with times.measure("context"):
            context = await interpreter.codes.create_context(SupportedLanguage.PYTHON)
        for cell in range(1, 11):
            with times.measure("first_cell" if cell == 1 else "tenth_cell" if cell == 10 else "other"):
                execution = await interpreter.codes.run(f"{cell} * {cell}", context=context)
            if not execution.result or execution.result[0].text != str(cell * cell):
                raise RuntimeError(f"a cell went wrong: {execution}")
        await interpreter.codes.delete_context(context.id)
        shell = await interpreter.codes.create_context(SupportedLanguage.BASH)
        for cell in range(1, 11):
            with times.measure("bash_cell" if cell == 10 else "other"):
                await interpreter.codes.run("echo $((6 * 7))", context=shell)
        await interpreter.codes.delete_context(shell.id)
        if not number:
            times.forget()
    await sandbox.destroy()
