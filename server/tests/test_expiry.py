# SPDX-License-Identifier: Apache-2.0
"""Expiry: what is due goes, what was renewed stays, and the sleeping task wakes for both."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from world import START, TENANT, Clock, World, a_sandbox, eventually, world_at

from opensandbox_server.sandbox import Sandbox, SandboxState

pytestmark = pytest.mark.anyio


class RealClock(Clock):
    def __call__(self) -> datetime:
        return datetime.now(UTC)


async def test_what_is_due_goes_and_the_rest_stays(world: World) -> None:
    due, later, never = [(await world.create(timeout=timeout)).sandbox for timeout in (60, 120, None)]
    assert await world.expiry.once(world.lifecycle.remove) == 0
    assert len(world.runtime.sandboxes) == 3
    world.clock.forward(60)
    await world.expiry.once(world.lifecycle.remove)
    assert sorted(world.runtime.sandboxes) == sorted([later.id, never.id])
    assert await world.store.find(due.id) is None
    assert await world.events(due.id) == ["created", "running", "expired", "deleted"]


async def test_an_ended_sandbox_expires_too(world: World) -> None:
    sandbox = (await world.create(timeout=60)).sandbox
    world.runtime.end(sandbox.id)
    await world.compare()
    world.clock.forward(61)
    await world.expiry.once(world.lifecycle.remove)
    assert await world.store.mine() == ()
    assert world.runtime.sandboxes == {}


async def test_a_renewal_that_comes_after_the_query_still_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = (await world.create(timeout=60)).sandbox
    world.clock.forward(60)
    due = world.store.due

    async def renewed_meanwhile(now: datetime) -> tuple[Sandbox, ...]:
        rows = await due(now)
        await world.lifecycle.renew(TENANT, sandbox.id, now + timedelta(seconds=5))
        return rows

    monkeypatch.setattr(world.store, "due", renewed_meanwhile)
    assert await world.expiry.once(world.lifecycle.remove) == 0
    assert (await world.row(sandbox.id)).state is SandboxState.RUNNING


async def test_what_cannot_be_ended_is_counted_and_ended_later(world: World) -> None:
    await world.create(timeout=60)
    world.clock.forward(60)
    world.runtime.unavailable()
    assert await world.expiry.once(world.lifecycle.remove) == 1
    assert await world.expiry.once(world.lifecycle.remove) == 0, "it is the reconcile's now"
    world.runtime.available()
    assert await world.compare() == "1 undone"
    assert world.runtime.sandboxes == {}


async def test_the_task_sleeps_until_the_next_and_is_woken_by_an_earlier_one(tmp_path: Path) -> None:
    async def asleep() -> bool:
        return world.expiry._planned is not None

    async with world_at(tmp_path, clock=RealClock()) as world, anyio.create_task_group() as group:
        group.start_soon(world.expiry.run, world.lifecycle.remove)
        sandbox = (await world.create(timeout=3600)).sandbox
        await eventually(asleep)
        await world.lifecycle.renew(TENANT, sandbox.id, datetime.now(UTC) + timedelta(milliseconds=50))
        await world.reaches(sandbox.id, None)
        group.cancel_scope.cancel()


async def test_it_looks_again_after_half_a_minute_at_most(world: World) -> None:
    assert await world.expiry._pass(world.lifecycle.remove) == 30.0
    await world.create(timeout=600)
    assert await world.expiry._pass(world.lifecycle.remove) == 30.0
    await world.store.insert(a_sandbox(1, epoch=1, expires_at=START + timedelta(seconds=7)))
    assert await world.expiry._pass(world.lifecycle.remove) == 7.0


async def test_a_store_that_fails_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(now: datetime) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(world.store, "due", broken)
    assert await world.expiry._pass(world.lifecycle.remove) == 1.0


async def test_old_events_are_forgotten(world: World) -> None:
    sandbox = (await world.create(timeout=None)).sandbox
    await world.expiry._pass(world.lifecycle.remove)
    assert await world.events(sandbox.id) == ["created", "running"]
    world.clock.forward(8 * 86400)
    await world.expiry._pass(world.lifecycle.remove)
    assert await world.events(sandbox.id) == []
    assert await world.store.find(sandbox.id) is not None
