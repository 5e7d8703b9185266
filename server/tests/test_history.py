# SPDX-License-Identifier: Apache-2.0
"""What stays of a sandbox when it is gone, whichever way it went."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path

import pytest
from world import START, TENANT, World, a_sandbox, world_at

from opensandbox_server.errors import Code, OpenSandboxError, unavailable
from opensandbox_server.expiry import HISTORY
from opensandbox_server.history import OUTPUT_BYTES, History
from opensandbox_server.ports import HistoryEntry
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import End, EndReason, SandboxState
from opensandbox_server.store import history as statements

pytestmark = pytest.mark.anyio

RECORD = {"id": "a" * 32, "content": "ls", "started_at": "2026-01-02T03:04:05Z"}


async def gone(world: World, sandbox_id: str) -> HistoryEntry:
    return await History(world.store).get(TENANT, sandbox_id)


async def test_a_deleted_one_was_killed(world: World) -> None:
    sandbox = (await world.create(metadata={"team": "blue"})).sandbox
    world.runtime.outputs[sandbox.id] = b"x" * OUTPUT_BYTES + b"\xff\0last words"
    world.runtime.journals[sandbox.id] = json.dumps(RECORD).encode() + b"\nrubbish\n"
    world.clock.forward(5)
    await world.lifecycle.delete(TENANT, sandbox.id)
    entry = await gone(world, sandbox.id)
    assert (entry.end.reason, entry.end.message) == (EndReason.KILLED, "It was deleted.")
    assert entry.end.peak_memory_bytes == 1 << 20
    assert (entry.created_at, entry.gone_at) == (START, START + timedelta(seconds=5))
    assert (entry.image, entry.metadata, entry.entrypoint) == (sandbox.image, {"team": "blue"}, sandbox.entrypoint)
    assert entry.executions == 1
    assert entry.output.endswith("x\ufffd\ufffdlast words")
    assert len(entry.output) == OUTPUT_BYTES


async def test_one_whose_time_was_over_expired(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.clock.forward(601)
    assert await world.expiry.once(world.lifecycle.remove) == 0
    assert (await gone(world, sandbox.id)).end.reason is EndReason.EXPIRED


async def test_one_that_ended_by_itself_keeps_its_end(world: World) -> None:
    sandbox = (await world.create()).sandbox
    end = world.runtime.end(sandbox.id, exit_code=3)
    await world.compare()
    await world.lifecycle.delete(TENANT, sandbox.id)
    assert (await gone(world, sandbox.id)).end == end


async def test_an_end_just_before_the_delete_is_the_end(world: World) -> None:
    sandbox = (await world.create()).sandbox
    end = world.runtime.end(sandbox.id, exit_code=3)  # nobody has told the store yet
    await world.lifecycle.delete(TENANT, sandbox.id)
    assert (await gone(world, sandbox.id)).end == end


async def test_a_create_that_failed_says_why(world: World) -> None:
    world.runtime.fail_next_create(unavailable("No room."))
    with pytest.raises(OpenSandboxError):
        await world.create()
    [entry] = (await world.store.history(TENANT)).items
    assert entry.end.reason is EndReason.START_FAILED
    assert entry.end.message is not None
    assert "No room." in entry.end.message


async def test_a_server_that_takes_over_knows_why(tmp_path: Path, no_blocking: None) -> None:
    runtime = FakeRuntime()
    async with world_at(tmp_path, runtime) as world:
        sandbox = (await world.create()).sandbox
        world.clock.forward(601)
        runtime.unavailable()
        assert await world.expiry.once(world.lifecycle.remove) == 1
        assert await world.state(sandbox.id) is SandboxState.STOPPING
    runtime.available()
    async with world_at(tmp_path, runtime) as world:
        await world.compare()
        entry = await gone(world, sandbox.id)
        assert (entry.end.reason, entry.end.message) == (EndReason.EXPIRED, "Its time was over.")


async def test_lists_are_filtered_paged_and_of_one_tenant(world: World) -> None:
    ids = []
    for number, team in enumerate(["red", "blue", "blue"]):
        ids.append((await world.create(metadata={"team": team})).sandbox.id)
        world.clock.forward(1)
        if number == 2:
            world.clock.forward(601)
            await world.expiry.once(world.lifecycle.remove)
    assert {entry.id for entry in (await world.store.history(TENANT)).items} == set(ids)
    page = await world.store.history(TENANT, metadata={"team": "blue"}, page=2, page_size=1)
    assert (len(page.items), page.total) == (1, 2)
    assert (await world.store.history(TENANT, reasons=frozenset({EndReason.KILLED}))).total == 0
    assert (await world.store.history(TENANT, reasons=frozenset({EndReason.EXPIRED, EndReason.KILLED}))).total == 3
    assert (await world.store.history("another")).total == 0
    with pytest.raises(OpenSandboxError) as caught:
        await History(world.store).get("another", ids[0])
    assert caught.value.code is Code.SANDBOX_NOT_FOUND


async def test_it_goes_after_seven_days_and_when_it_grows_too_large(world: World) -> None:
    async def keep(number: int, size: int) -> None:
        row = a_sandbox(number)
        await world.store.insert(row)
        at = START + timedelta(seconds=number)
        entry = HistoryEntry(
            row.id, TENANT, "host", ("x",), {"a": "b"}, START, at, End(EndReason.KILLED, at), output="x" * size
        )
        await world.store.delete(row.id, entry=entry)

    async def left() -> list[str]:
        return [entry.id[-1] for entry in (await world.store.history(TENANT)).items]

    for number in range(1, 5):
        await keep(number, 1000)
    assert await left() == ["4", "3", "2", "1"]
    await world.store._writer.sweep(statements.forget, 0, 2500)
    assert await left() == ["4", "3"]
    await world.store.forget_events(START + timedelta(seconds=4))
    assert await left() == ["4"]
    world.clock.forward(HISTORY.total_seconds() + 5)
    await world.expiry._forget()
    assert await left() == []
    connection = world.store._writer.connection
    for table in ("history", "history_texts", "history_metadata"):
        assert connection.exec_driver_sql(f"SELECT count(*) FROM {table}").scalar() == 0
    connection.rollback()
