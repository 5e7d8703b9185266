# SPDX-License-Identifier: Apache-2.0
"""Store and runtime after anything happened: what each state of the two leads to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from world import START, World, a_sandbox, eventually, world_at

from opensandbox_server.ports import Report
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import EndReason, Sandbox, SandboxState

pytestmark = pytest.mark.anyio
S = SandboxState


async def test_nothing_to_do(world: World) -> None:
    assert await world.compare() == "nothing to do"


async def test_a_running_sandbox_is_adopted_with_its_deadline(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    async with world_at(tmp_path, runtime) as world:
        sandbox = (await world.create()).sandbox
    runtime.deadlines.clear()
    async with world_at(tmp_path, runtime) as world:
        assert await world.compare() == "1 adopted"
        assert await world.row(sandbox.id) == sandbox
        assert runtime.deadlines == {sandbox.id: sandbox.expires_at}
        runtime.deadlines.clear()
        await world.compare(deadlines=False)
        assert runtime.deadlines == {}


async def test_a_row_without_a_sandbox_is_lost(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.lose(sandbox.id)
    assert await world.compare() == "1 lost"
    row = await world.row(sandbox.id)
    assert row.state is S.FAILED
    assert row.end is not None
    assert row.end.reason is EndReason.LOST
    assert await world.compare() == "nothing to do"
    await world.lifecycle.delete(row.tenant, row.id)


async def test_a_sandbox_without_a_row_is_ended(world: World) -> None:
    sandbox = (await world.create()).sandbox
    await world.store.delete(sandbox.id)
    assert await world.compare() == "1 orphans"
    assert world.runtime.sandboxes == {}


@pytest.mark.parametrize("made", [True, False], ids=["the sandbox was made", "it was not"])
async def test_a_create_of_a_dead_server_is_undone(tmp_path: Path, made: bool) -> None:
    runtime = FakeRuntime()
    async with world_at(tmp_path, runtime) as world:
        row = a_sandbox(1, epoch=world.store.epoch)
        await world.store.insert(row)
        if made:
            runtime.sandboxes[row.id] = Report(row.id, 1, running=True)
        assert await world.compare() == "nothing to do", "of this epoch: a create at work"
    async with world_at(tmp_path, runtime) as world:
        assert await world.compare() == "1 undone"
        assert await world.store.mine() == ()
        assert runtime.sandboxes == {}


async def test_a_delete_of_a_dead_server_is_finished(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    async with world_at(tmp_path, runtime) as world:
        row = (await world.create()).sandbox
        await world.store.replace(row, row.to(S.STOPPING, START), event="deleting")
    async with world_at(tmp_path, runtime) as world:
        assert await world.compare() == "1 undone"
        assert await world.store.mine() == ()
        assert runtime.sandboxes == {}


async def test_an_end_that_nobody_heard_is_stored_and_acknowledged(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    async with world_at(tmp_path, runtime) as world:
        sandbox = (await world.create()).sandbox
    end = runtime.end(sandbox.id, exit_code=3)
    async with world_at(tmp_path, runtime) as world:
        assert await world.compare() == "1 ended"
        row = await world.row(sandbox.id)
        assert (row.state, row.end) == (S.FAILED, end)
        assert runtime.sandboxes[sandbox.id].acknowledged


async def test_an_end_that_was_stored_but_not_acknowledged(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.end(sandbox.id)
    await world.compare()
    world.runtime.sandboxes[sandbox.id] = replace(world.runtime.sandboxes[sandbox.id], acknowledged=False)
    assert await world.compare() == "nothing to do"
    assert world.runtime.sandboxes[sandbox.id].acknowledged
    assert await world.events(sandbox.id) == ["created", "running", "ended"]


async def test_a_sandbox_of_another_generation_is_ended(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.sandboxes[sandbox.id] = replace(world.runtime.sandboxes[sandbox.id], generation=7)
    assert await world.compare() == "1 lost"
    assert world.runtime.sandboxes == {}
    assert (await world.row(sandbox.id)).state is S.FAILED


async def test_a_sandbox_that_runs_on_after_its_end_was_told_is_ended(world: World) -> None:
    sandbox = (await world.create()).sandbox
    report = world.runtime.sandboxes[sandbox.id]
    world.runtime.lose(sandbox.id)
    await world.compare()
    world.runtime.sandboxes[sandbox.id] = report
    await world.compare()
    assert world.runtime.sandboxes == {}
    assert (await world.row(sandbox.id)).state is S.FAILED


async def test_one_that_fails_does_not_stop_the_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = [(await world.create()).sandbox for _ in range(3)]
    for sandbox in lost:
        world.runtime.lose(sandbox.id)
    inspect = world.runtime.inspect

    async def sometimes(sandbox_id: str) -> Report | None:
        if sandbox_id == lost[1].id:
            raise OSError("once")
        return await inspect(sandbox_id)

    monkeypatch.setattr(world.runtime, "inspect", sometimes)
    assert await world.compare() == "2 lost, 1 failed"


async def test_a_sandbox_that_appears_between_the_two_questions_is_not_lost(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = world.runtime.list

    async def earlier() -> list[Report]:
        before = await listed()
        await world.create()
        return before

    monkeypatch.setattr(world.runtime, "list", earlier)
    assert await world.compare() == "nothing to do"
    assert [row.state for row in await world.store.mine()] == [S.RUNNING]
    assert len(world.runtime.sandboxes) == 1


async def test_a_sandbox_deleted_between_the_two_questions_is_no_orphan_twice(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = (await world.create()).sandbox
    mine = world.store.mine

    async def later() -> tuple[Sandbox, ...]:
        await world.lifecycle.delete(sandbox.tenant, sandbox.id)
        return await mine()

    monkeypatch.setattr(world.store, "mine", later)
    await world.compare()
    assert world.runtime.sandboxes == {}


# -- the watch ---------------------------------------------------------------------------------------------------------


async def test_ends_are_stored_as_they_happen(world: World) -> None:
    early, late = [(await world.create()).sandbox for _ in range(2)]
    world.runtime.end(early.id, exit_code=1)
    async with anyio.create_task_group() as group:
        group.start_soon(world.reconcile.watch)
        await world.reaches(early.id, S.FAILED)
        end = world.runtime.end(late.id, exit_code=0)
        await world.reaches(late.id, S.TERMINATED)
        group.cancel_scope.cancel()
    assert (await world.row(late.id)).end == end
    assert all(report.acknowledged for report in world.runtime.sandboxes.values())


async def test_an_end_of_what_has_no_row_or_is_older_is_forgotten(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.end(sandbox.id)
    report = world.runtime.sandboxes[sandbox.id]
    await world.reconcile.report(replace(report, generation=9))
    assert world.runtime.sandboxes == {}
    assert (await world.row(sandbox.id)).state is S.RUNNING
    await world.store.delete(sandbox.id)
    world.runtime.sandboxes[sandbox.id] = report
    await world.reconcile.report(report)
    assert world.runtime.sandboxes == {}


async def test_an_end_during_a_delete_is_the_deletes_business(world: World) -> None:
    row = (await world.create()).sandbox
    stopping = row.to(S.STOPPING, START)
    await world.store.replace(row, stopping, event="deleting")
    world.runtime.end(row.id)
    await world.reconcile.report(world.runtime.sandboxes[row.id])
    assert await world.row(row.id) == stopping


async def test_a_failed_pass_is_repeated_until_it_succeeds(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("opensandbox_server.reconcile.RETRY", 0.01)
    sandbox = (await world.create()).sandbox
    world.runtime.unavailable()
    with pytest.raises(Exception, match="fake is down"):
        await world.lifecycle.delete(sandbox.tenant, sandbox.id)

    async def tried_again() -> bool:
        return "could not be compared" in caplog.text

    async with anyio.create_task_group() as group:
        group.start_soon(world.reconcile.run, world.lifecycle.remove)
        await eventually(tried_again)
        world.runtime.available()
        await world.reaches(sandbox.id, None)
        group.cancel_scope.cancel()
