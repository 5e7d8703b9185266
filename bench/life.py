# SPDX-License-Identifier: Apache-2.0
"""The life of one sandbox with our SDK: create, first output, warm command, get, delete. Floors in between."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import Any

import opensandbox
from opensandbox import ConnectionConfig, Sandbox, config
from opensandbox.models import ExecutionHandlers
from opensandbox.models.execd_sync import ExecutionHandlersSync

from . import floor
from .figure import Book, Figure, Times, Watch
from .world import World

FIGURES = (
    Figure("create.first_output", "create, then `echo`: until its output is there", most_floors=12),
    Figure("create.first_command", "the same, until the command has ended too"),
    Figure("create.first_output_alone", "the same in a program without a connection to the server"),
    Figure("create.first_output_sync", "the same with the synchronous SDK"),
    Figure("create.first_output_stub", "the same against the stub: our SDK's own share"),
    Figure("create.answer", "`Sandbox.create` alone"),
    Figure("create.stage.*", "a stage of create, as the server tells it in the answer"),
    Figure("command.warm_true", "the program `true`, in a sandbox that has run a command before", most_floors=3),
    Figure("command.warm_shell", "the same by the shell; its floor is `bash -c true`"),
    Figure("get", "`get_info`"),
    Figure("delete", "`kill`: until the sandbox is gone"),
)
LIFE = timedelta(minutes=5)
# Before each create: by then the server has cleared away the last sandbox and has a shell in the place of its own.
# What creates cost a server that gets no rest is measured by `burst` and `rate`.
REST_SECONDS = 0.1
WARM = 3
"""Commands one after the other, of each kind."""


def measure(world: World, book: Book) -> None:
    """Rounds against server and stub in turn, with a spawn before each."""
    count = world.rounds(50)
    times, stages = Times(), Times()
    asyncio.run(_rounds(world.server.address, world.stub, count, times, stages))
    spawn = times["spawn"]
    book.times("create.first_output", times["first_output"], spawn)
    book.times("create.first_command", times["first_command"], spawn)
    book.times("create.first_output_alone", times["first_output_alone"], spawn)
    _synchronous(world, book, count)
    book.times("create.first_output_stub", times["stub"], spawn)
    book.times("create.answer", times["create"], spawn)
    for name in stages.names():
        book.times(f"create.stage.{name}", stages[name])
    if not stages.names():
        book.missing("create.stage.*", "the server's answer has no timings")
    book.times("command.warm_true", times["warm"], spawn)
    book.times("command.warm_shell", times["warm_shell"], times["spawn_shell"])
    book.times("get", times["get"], spawn)
    book.times("delete", times["delete"], spawn)


async def _rounds(server: str, stub: str, count: int, times: Times, stages: Times) -> None:
    kept = ConnectionConfig(domain=server)
    # The key, which a server without one ignores, makes it another configuration, whose connections nobody keeps.
    alone = ConnectionConfig(domain=server, api_key="alone")
    keeper = await Sandbox.create("host", timeout=LIFE, connection_config=kept)
    for number in range(count + 1):
        await asyncio.sleep(REST_SECONDS)
        with times.measure("spawn"):
            floor.spawn()
        with times.measure("spawn_shell"):
            floor.spawn_shell()
        await _life(kept, times, stages)
        for name, connection in (("first_output_alone", alone), ("stub", ConnectionConfig(domain=stub))):
            await asyncio.sleep(REST_SECONDS)
            with times.measure(name) as watch:
                sandbox = await Sandbox.create("host", timeout=LIFE, connection_config=connection)
                await sandbox.commands.run("echo ready", handlers=_until_output(watch))
            await sandbox.destroy()
        if not number:
            times.forget()
            stages.forget()
    await keeper.destroy()


async def _life(connection: ConnectionConfig, times: Times, stages: Times) -> None:
    with times.measure("first_command"), times.measure("first_output") as watch:
        with times.measure("create"):
            sandbox = await Sandbox.create("host", timeout=LIFE, connection_config=connection)
        await sandbox.commands.run("echo ready", handlers=_until_output(watch))
    for name, taken in sandbox.timings.items():
        stages[name].append(taken)
    for _ in range(WARM):
        with times.measure("warm_shell"):
            await sandbox.commands.run("true")
    for _ in range(WARM):
        with times.measure("warm"):
            await sandbox.commands.run(["true"])
    with times.measure("get"):
        await sandbox.get_info()
    with times.measure("delete"):
        await sandbox.kill()
    await sandbox.close()


def _until_output(watch: Watch) -> ExecutionHandlers:
    async def seen(_: object) -> None:
        watch.stop()

    return ExecutionHandlers(on_stdout=seen)


def _synchronous(world: World, book: Book, count: int) -> None:
    name = "create.first_output_sync"
    kind: Any = getattr(opensandbox, "SandboxSync", None)
    configuration: Any = getattr(config, "ConnectionConfigSync", None)
    if kind is None or configuration is None:
        book.missing(name, "this SDK has no SandboxSync yet")
        return
    times = Times()
    for number in range(count + 1):
        time.sleep(REST_SECONDS)
        with times.measure("spawn"):
            floor.spawn()
        with times.measure("first_output") as watch:
            connection = configuration(domain=world.server.address)
            sandbox = kind.create("host", timeout=LIFE, connection_config=connection)
            sandbox.commands.run("echo ready", handlers=ExecutionHandlersSync(on_stdout=watch.stop))
        sandbox.kill()
        sandbox.close()
        if not number:
            times.forget()
    book.times(name, times["first_output"], times["spawn"])
