# SPDX-License-Identifier: Apache-2.0
"""Admission: turns in order, a queue with an end, and a count of sandboxes that is right whatever happens at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anyio
import pytest
from world import World, eventually, world_at

from opensandbox_server.admission import LONGEST_RETRY, Admission, Bounds, ClientLeft, Occupancy, Turn, full
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.sandbox import SandboxState

pytestmark = pytest.mark.anyio


class Seconds:
    """A clock for the pace of creations."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Any = None, **bounds: Any) -> Admission:
    return Admission(None, Bounds(**bounds), clock or Seconds())  # type: ignore[arg-type] - nobody counts sandboxes


async def waiting(of: Admission, number: int) -> None:
    async def there() -> bool:
        return of.creating.waiting == number

    await eventually(there)


async def test_turns_come_in_the_order_of_asking() -> None:
    gate, order, turns = admission(creating=1), [], []
    first = await gate.enter()

    async def ask(number: int) -> None:
        turns.append(await gate.enter())
        order.append(number)

    async with anyio.create_task_group() as group:
        for number in range(5):
            group.start_soon(ask, number)
            await waiting(gate, number + 1)
        first.end()
        for number in range(5):

            async def came(number: int = number) -> bool:
                return len(order) == number + 1

            await eventually(came)
            turns[number].end()
    assert order == [0, 1, 2, 3, 4]
    assert gate.creating == Occupancy(0, 1, 0)


async def test_nobody_overtakes_who_waits() -> None:
    gate = admission(creating=1)
    first = await gate.enter()
    async with anyio.create_task_group() as group:
        group.start_soon(gate.enter)
        await waiting(gate, 1)
        first.end()
        # The turn is already the waiter's, although it has not run yet: a newcomer finds none.
        with anyio.move_on_after(0) as scope:
            await gate.enter()
        assert scope.cancelled_caught
    assert gate.creating == Occupancy(1, 1, 0)


async def test_ending_a_turn_twice_counts_once() -> None:
    gate = admission(creating=2)
    one, _two = await gate.enter(), await gate.enter()
    one.end()
    one.end()
    assert gate.creating.now == 1


async def test_a_full_queue_sends_away_with_a_place_and_a_time() -> None:
    clock = Seconds()
    gate = admission(clock, creating=1, waiting=1)
    turn = await gate.enter()
    for _ in range(4):  # one creation every three seconds
        clock.now += 3
        turn.end()
        turn = await gate.enter()
    clock.now += 3
    async with anyio.create_task_group() as group:
        group.start_soon(gate.enter)
        await waiting(gate, 1)
        with pytest.raises(OpenSandboxError) as caught:
            await gate.enter()
        group.cancel_scope.cancel()
    error = caught.value
    assert (error.code, error.status) == (Code.SANDBOX_CAPACITY_EXHAUSTED, 429)
    assert error.details == {"queuePosition": 2, "limit": 1}
    assert error.retry_after == 6
    assert gate.creating.waiting == 0


async def test_the_time_to_come_back_has_bounds() -> None:
    clock = Seconds()
    gate = admission(clock, creating=1, waiting=0)

    async def sent_away() -> int | None:
        with pytest.raises(OpenSandboxError, match="max_waiting") as caught:
            await gate.enter()
        return caught.value.retry_after

    turn = await gate.enter()
    assert await sent_away() == 1, "nothing is known yet"
    turn.end()
    await gate.enter()
    assert await sent_away() == 1
    clock.now += 10_000
    assert await sent_away() == LONGEST_RETRY


@pytest.mark.parametrize(
    ("next_end", "seconds"), [(None, 10), (-3.0, 1), (0.2, 1), (41.5, 42), (60.0, 60), (60.5, 10), (1e12, 10)]
)
async def test_a_full_house_has_no_queue(next_end: float | None, seconds: int) -> None:
    error = full(7, next_end)
    assert (error.code, error.retry_after, error.details) == (Code.SANDBOX_CAPACITY_EXHAUSTED, seconds, {"limit": 7})
    assert "[server] max_sandboxes" in error.message
    assert "[server] max_sandboxes" in error.hint


async def test_a_full_house_is_told_of_the_next_that_ends_and_ended_ones_free_nothing(tmp_path: Path) -> None:
    async with world_at(tmp_path, bounds=Bounds(sandboxes=1)) as world:
        ended = (await world.create(timeout=60)).sandbox
        world.runtime.end(ended.id)
        await world.reconcile.report(world.runtime.sandboxes[ended.id])
        await world.create(timeout=85)
        world.clock.forward(45)
        with pytest.raises(OpenSandboxError, match="max_sandboxes") as caught:
            await world.create()
        assert caught.value.retry_after == 40


async def test_who_hangs_up_leaves_the_queue() -> None:
    gate = admission(creating=1)
    turn = await gate.enter()
    gone = anyio.Event()
    left: list[Exception] = []

    async def ask() -> None:
        try:
            await gate.enter(gone.wait)
        except ClientLeft as error:
            left.append(error)

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await waiting(gate, 1)
        gone.set()
    assert len(left) == 1
    assert gate.creating == Occupancy(1, 1, 0)
    turn.end()
    assert gate.creating.now == 0


async def test_a_turn_that_comes_to_somebody_cancelled_goes_to_the_next() -> None:
    gate = admission(creating=1)
    first = await gate.enter()
    got: list[Turn] = []

    async def next_one() -> None:
        got.append(await gate.enter())

    async with anyio.create_task_group() as group:
        unlucky = asyncio.ensure_future(gate.enter())
        await waiting(gate, 1)
        group.start_soon(next_one)
        await waiting(gate, 2)
        first.end()
        unlucky.cancel()  # in the same step, natively, as a server that stops does: the turn was given, but not taken
    assert unlucky.cancelled()
    assert len(got) == 1
    assert gate.creating == Occupancy(1, 1, 0)


async def test_a_hundred_at_once_all_succeed_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world_at(tmp_path, bounds=Bounds(creating=3)) as world:
        most = now = 0
        make = world.runtime.create

        async def counted(spec: Any) -> Any:
            nonlocal most, now
            now += 1
            most = max(most, now)
            try:
                await anyio.lowlevel.checkpoint()
                return await make(spec)
            finally:
                now -= 1

        monkeypatch.setattr(world.runtime, "create", counted)
        async with anyio.create_task_group() as group:
            for _ in range(100):
                group.start_soon(world.create)
        assert len(await world.store.mine()) == 100
        assert most <= 3
        assert world.admission.creating == Occupancy(0, 3, 0)


async def test_the_limit_of_sandboxes_holds_whatever_happens_at_once(tmp_path: Path) -> None:
    refused: list[OpenSandboxError] = []

    async def create(world: World) -> None:
        try:
            await world.create()
        except OpenSandboxError as error:
            refused.append(error)

    async with world_at(tmp_path, bounds=Bounds(sandboxes=7, creating=20)) as world:
        async with anyio.create_task_group() as group:
            for _ in range(20):
                group.start_soon(create, world)
        rows = await world.store.mine()
        assert [row.state for row in rows] == [SandboxState.RUNNING] * 7
        assert {error.code for error in refused} == {Code.SANDBOX_CAPACITY_EXHAUSTED}
        assert len(refused) == 13
        assert refused[0].details is not None
        assert refused[0].details["limit"] == 7
        assert refused[0].retry_after
        assert await world.admission.sandboxes() == Occupancy(7, 7)
        assert world.admission.creating.now == 0
        runtime, clock = world.runtime, world.clock

    async with world_at(tmp_path, runtime, clock, bounds=Bounds(sandboxes=7)) as world:
        with pytest.raises(OpenSandboxError):
            await world.create()  # a new server counts the same rows
        # An ended sandbox gives its place back although its row is still there; a deleted one too.
        end = runtime.end(rows[0].id)
        await world.reconcile.report(runtime.sandboxes[rows[0].id])
        assert (await world.row(rows[0].id)).end == end
        await world.create()
        await world.lifecycle.delete("default", rows[1].id)
        await world.create()
        with pytest.raises(OpenSandboxError):
            await world.create()


async def test_a_create_that_fails_gives_its_place_back(tmp_path: Path) -> None:
    async with world_at(tmp_path, bounds=Bounds(sandboxes=1, creating=1)) as world:
        world.runtime.fail_next_create(RuntimeError("a bug"))
        with pytest.raises(RuntimeError):
            await world.create()
        await world.create()


async def test_the_time_of_a_sandbox_begins_when_its_turn_comes(tmp_path: Path) -> None:
    async with world_at(tmp_path, bounds=Bounds(creating=1)) as world:
        world.runtime.gate.close()
        made = []

        async def create() -> None:
            made.append((await world.create()).sandbox)

        async with anyio.create_task_group() as group:
            group.start_soon(create)
            await world.runtime.gate.reached()
            group.start_soon(create)
            await waiting(world.admission, 1)
            world.clock.forward(30)
            world.runtime.gate.open()
        for sandbox in made:
            assert sandbox.expires_at is not None
            assert (sandbox.expires_at - sandbox.created_at).total_seconds() == 600
        assert (made[1].created_at - made[0].created_at).total_seconds() == 30


async def test_counting_reads_an_index(tmp_path: Path) -> None:
    import sqlite3

    from opensandbox_server.store.sql import _ALIVE

    async with world_at(tmp_path):
        text = str(_ALIVE.params(node="n", runtime="r").compile(compile_kwargs={"literal_binds": True}))
    with sqlite3.connect(tmp_path / "opensandbox.db") as database:
        plan = " ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {text}"))
    assert "INDEX sandboxes_alive" in plan
