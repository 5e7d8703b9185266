# SPDX-License-Identifier: Apache-2.0
"""The use cases on a fake runtime: the story of a create and every way it can go wrong; delete, renew, endpoint."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anyio
import pytest
from world import START, TENANT, World, eventually, world_at

from opensandbox_server.errors import Code, OpenSandboxError, unavailable
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.sandbox import End, EndReason, SandboxState

pytestmark = pytest.mark.anyio
S = SandboxState
EXITED = End(EndReason.EXITED, START, exit_code=3, message="The entry point exited with code 3.")


async def refused(code: Code, call: object) -> OpenSandboxError:
    with pytest.raises(OpenSandboxError) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code is code
    return caught.value


# -- create ------------------------------------------------------------------------------------------------------------


async def test_a_create_answers_with_all_a_client_needs(world: World) -> None:
    created = await world.create(metadata={"team": "blue"}, env={"A": "1"})
    sandbox = created.sandbox
    assert (sandbox.state, sandbox.reason, sandbox.version) == (S.RUNNING, "RUNNING", 2)
    assert sandbox.expires_at == START + timedelta(seconds=600)
    assert await world.row(sandbox.id) == sandbox
    assert list(created.timings) == ["validate", "admit", "reserve", "launch", "launch.remember", "publish", "total"]
    assert created.timings["total"] >= created.timings["launch"] >= 0
    spec = world.runtime.specs[sandbox.id]
    assert (spec.env, spec.limits.memory_bytes, spec.deadline) == ({"A": "1"}, 2 << 30, sandbox.expires_at)
    endpoint = created.endpoints["44772"]
    assert endpoint.endpoint == f"127.0.0.1:28888/{sandbox.id}/44772"
    assert list(endpoint.headers) == ["X-EXECD-ACCESS-TOKEN"]
    assert spec.token_sha256 not in endpoint.headers.values()
    assert await world.events(sandbox.id) == ["created", "running"]


async def test_what_the_runtime_warns_about_is_passed_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    make = world.runtime.create

    async def warn(spec: object) -> object:
        return replace(await make(spec), warnings=("PYTHON_VERSION=3.9 is not on this host.",))  # type: ignore[arg-type]

    monkeypatch.setattr(world.runtime, "create", warn)
    created = await world.create(colour="red", env={"PYTHON_VERSION": "3.9"})
    assert created.warnings == ("The unknown field 'colour' was ignored.", "PYTHON_VERSION=3.9 is not on this host.")


async def test_an_unknown_image_leaves_no_row(world: World) -> None:
    error = await refused(Code.IMAGE_NOT_FOUND, world.create(image={"uri": "nope:1"}))
    assert "host" in error.message
    assert await world.store.mine() == ()


@pytest.mark.parametrize("error", [unavailable("sandboxd is away."), RuntimeError("a bug")])
async def test_a_failed_create_is_undone_and_told(world: World, error: Exception) -> None:
    world.runtime.fail_next_create(error)
    with pytest.raises(type(error)) as caught:
        await world.create()
    assert caught.value is error
    assert await world.store.mine() == ()
    assert world.runtime.sandboxes == {}
    (sandbox_id,) = world.runtime.deleted
    created, failed, deleted = await world.store.events(sandbox_id)
    assert (created.event, failed.kind, deleted.event) == ("created", "create failed", "deleted")
    assert failed.told == deleted.message
    assert (deleted.state, deleted.reason) == (S.FAILED, "START_FAILED")
    assert (await world.create()).sandbox.state is S.RUNNING


async def test_a_create_that_takes_too_long_is_undone(tmp_path: Path) -> None:
    async with world_at(tmp_path, start_timeout=0.05) as world:
        world.runtime.gate.close()
        await refused(Code.SANDBOX_START_TIMEOUT, world.create())
        assert await world.store.mine() == ()
        assert world.runtime.sandboxes == {}


async def test_an_undo_that_fails_is_left_to_the_reconcile(world: World) -> None:
    world.runtime.gate.close()

    async def create() -> None:
        await refused(Code.NODE_UNAVAILABLE, world.create())

    async with anyio.create_task_group() as group:
        group.start_soon(create)
        await world.runtime.gate.reached()
        (row,) = await world.store.mine()
        stolen = world.runtime.sandboxes[row.id]
        world.runtime.unavailable()
        # The launch fails only now, with the node already gone: neither the undo nor anything else gets through.
        group.start_soon(_fail_gate, world)
    world.runtime.sandboxes[row.id] = stolen
    (row,) = await world.store.mine()
    assert row.state is S.STOPPING
    world.runtime.available()
    assert await world.compare() == "1 undone"
    assert await world.store.mine() == ()
    assert world.runtime.sandboxes == {}


async def _fail_gate(world: World) -> None:
    world.runtime.gate.fail(unavailable("sandboxd went away."))


async def test_an_entry_point_that_ends_at_once_is_no_error(world: World) -> None:
    world.runtime.end_next_create(EXITED)
    created = await world.create()
    assert created.sandbox.state is S.FAILED
    assert created.sandbox.end == EXITED
    assert await world.row(created.sandbox.id) == created.sandbox
    assert world.runtime.sandboxes[created.sandbox.id].acknowledged


async def test_a_client_that_leaves_in_the_middle_gets_its_sandbox_all_the_same(world: World) -> None:
    world.runtime.gate.close()
    # A server that stops cancels its request tasks like this, not by a scope.
    request = asyncio.ensure_future(world.create())
    await world.runtime.gate.reached()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    (row,) = await world.store.mine()
    assert row.state is S.PENDING
    world.runtime.gate.open()
    await world.reaches(row.id, S.RUNNING)
    assert list(world.runtime.sandboxes) == [row.id]


async def test_a_server_that_stops_undoes_what_it_cannot_finish(tmp_path: Path) -> None:
    runtime = FakeRuntime()
    runtime.gate.close()
    async with anyio.create_task_group() as group:

        async def create(world: World) -> None:
            await refused(Code.NODE_UNAVAILABLE, world.create())

        async with world_at(tmp_path, runtime) as world:
            world.background._grace = 0.01
            group.start_soon(create, world)
            await runtime.gate.reached()
    assert runtime.sandboxes == {}
    async with world_at(tmp_path, runtime) as world:
        assert await world.store.mine() == ()


async def test_a_sandbox_deleted_while_it_is_made_is_gone(world: World) -> None:
    world.runtime.gate.close()

    async def create() -> None:
        error = await refused(Code.SANDBOX_NOT_FOUND, world.create())
        assert "deleted while" in error.message

    async with anyio.create_task_group() as group:
        group.start_soon(create)
        await world.runtime.gate.reached()
        (row,) = await world.store.mine()
        report = world.runtime.sandboxes[row.id]
        await world.lifecycle.delete(TENANT, row.id)
        # The runtime finishes the launch after the delete has found nothing to end.
        world.runtime.sandboxes[row.id] = report
        world.runtime.gate.open()
    assert world.runtime.sandboxes == {}
    assert await world.store.mine() == ()


async def test_a_sandbox_renewed_while_it_is_made_keeps_the_new_expiry(world: World) -> None:
    world.runtime.gate.close()
    answers = []

    async def create() -> None:
        answers.append(await world.create())

    later = START + timedelta(hours=2)
    async with anyio.create_task_group() as group:
        group.start_soon(create)
        await world.runtime.gate.reached()
        (row,) = await world.store.mine()
        await world.lifecycle.renew(TENANT, row.id, later)
        world.runtime.gate.open()
    assert answers[0].sandbox.state is S.RUNNING
    assert answers[0].sandbox.expires_at == later
    assert world.runtime.deadlines[row.id] == later


async def test_an_end_that_is_heard_before_the_create_is_published(world: World) -> None:
    world.runtime.gate.close()
    answers = []

    async def create() -> None:
        answers.append(await world.create())

    async with anyio.create_task_group() as group:
        group.start_soon(create)
        await world.runtime.gate.reached()
        (row,) = await world.store.mine()
        world.runtime.end(row.id, exit_code=0)
        await world.reconcile.report(world.runtime.sandboxes[row.id])
        world.runtime.gate.open()
    (sandbox,) = [answer.sandbox for answer in answers]
    assert sandbox.state is S.TERMINATED
    assert sandbox.isolation["runtime"] == "fake"
    assert await world.row(sandbox.id) == sandbox


async def test_many_creates_at_once(world: World) -> None:
    ids: list[str] = []

    async def create() -> None:
        ids.append((await world.create()).sandbox.id)

    async with anyio.create_task_group() as group:
        for _ in range(50):
            group.start_soon(create)
    assert len(set(ids)) == 50
    assert {row.state for row in await world.store.mine()} == {S.RUNNING}


# -- delete ------------------------------------------------------------------------------------------------------------


async def test_a_second_delete_finds_nothing(world: World) -> None:
    sandbox = (await world.create()).sandbox
    await world.lifecycle.delete(TENANT, sandbox.id)
    assert world.runtime.sandboxes == {}
    await refused(Code.SANDBOX_NOT_FOUND, world.lifecycle.delete(TENANT, sandbox.id))
    await refused(Code.SANDBOX_NOT_FOUND, world.lifecycle.get(TENANT, sandbox.id))
    assert await world.events(sandbox.id) == ["created", "running", "deleting", "deleted"]


async def test_of_many_deletes_at_once_one_wins(world: World) -> None:
    sandbox = (await world.create()).sandbox
    outcomes: list[str] = []

    async def delete() -> None:
        try:
            await world.lifecycle.delete(TENANT, sandbox.id)
            outcomes.append("gone")
        except OpenSandboxError as error:
            outcomes.append(error.code)

    world.runtime.delete_gate.close()
    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(delete)
        await world.runtime.delete_gate.reached()
        world.runtime.delete_gate.open()
    assert sorted(outcomes) == [Code.SANDBOX_NOT_FOUND] * 9 + ["gone"]
    assert world.runtime.deleted == [sandbox.id]


async def test_a_delete_that_read_the_row_too_late_ends_nothing_twice(world: World) -> None:
    sandbox = (await world.create()).sandbox
    await world.lifecycle.delete(TENANT, sandbox.id)
    stale = sandbox.to(S.STOPPING, START)
    assert not await world.lifecycle.remove(sandbox.id, event="deleting", seen=stale)
    assert world.runtime.deleted == [sandbox.id]


async def test_a_delete_whose_client_leaves_is_finished(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.delete_gate.close()
    request = asyncio.ensure_future(world.lifecycle.delete(TENANT, sandbox.id))
    await world.runtime.delete_gate.reached()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (await world.row(sandbox.id)).state is S.STOPPING
    world.runtime.delete_gate.open()
    await world.reaches(sandbox.id, None)
    assert world.runtime.sandboxes == {}


async def test_a_delete_that_failed_can_be_repeated(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.unavailable()
    await refused(Code.NODE_UNAVAILABLE, world.lifecycle.delete(TENANT, sandbox.id))
    assert (await world.row(sandbox.id)).state is S.STOPPING
    world.runtime.available()
    await world.lifecycle.delete(TENANT, sandbox.id)
    assert await world.store.find(sandbox.id) is None
    assert world.runtime.sandboxes == {}


async def test_somebody_elses_sandbox_is_not_there(world: World) -> None:
    sandbox = (await world.create()).sandbox
    for call in (world.lifecycle.get, world.lifecycle.delete):
        await refused(Code.SANDBOX_NOT_FOUND, call("another", sandbox.id))
    await refused(Code.SANDBOX_NOT_FOUND, world.lifecycle.endpoint("another", sandbox.id, 80))
    await refused(Code.SANDBOX_NOT_FOUND, world.lifecycle.renew("another", sandbox.id, START + timedelta(days=1)))
    assert (await world.row(sandbox.id)).state is S.RUNNING


# -- renew -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (START + timedelta(hours=1), START + timedelta(hours=1)),
        (START + timedelta(seconds=1), START + timedelta(seconds=1)),
        ((START + timedelta(days=900)).replace(tzinfo=None), START + timedelta(days=900)),
    ],
    ids=["longer", "shorter", "naive is UTC, and no limit holds"],
)
async def test_a_renewal_moves_the_expiry_both_ways(world: World, given: datetime, meant: datetime) -> None:
    sandbox = (await world.create()).sandbox
    assert await world.lifecycle.renew(TENANT, sandbox.id, given) == meant
    row = await world.row(sandbox.id)
    assert (row.expires_at, row.state, row.changed_at) == (meant, S.RUNNING, sandbox.changed_at)
    assert world.runtime.deadlines[sandbox.id] == meant


@pytest.mark.parametrize("given", [START, START - timedelta(days=1), datetime.min.replace(tzinfo=UTC)])
async def test_a_renewal_to_the_past_is_refused(world: World, given: datetime) -> None:
    sandbox = (await world.create()).sandbox
    error = await refused(Code.SANDBOX_INVALID_EXPIRATION, world.lifecycle.renew(TENANT, sandbox.id, given))
    assert error.status == 400
    assert (await world.row(sandbox.id)).expires_at == sandbox.expires_at


async def test_what_never_expires_cannot_be_renewed(world: World) -> None:
    sandbox = (await world.create(timeout=None)).sandbox
    error = await refused(
        Code.SANDBOX_NO_EXPIRATION, world.lifecycle.renew(TENANT, sandbox.id, START + timedelta(days=1))
    )
    assert error.status == 409


async def test_a_renewal_holds_even_if_the_node_cannot_be_told(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.unavailable()
    later = START + timedelta(hours=3)
    await world.lifecycle.renew(TENANT, sandbox.id, later)
    assert (await world.row(sandbox.id)).expires_at == later
    world.runtime.available()
    await world.compare()
    assert world.runtime.deadlines[sandbox.id] == later


async def test_many_renewals_at_once_leave_store_and_node_agreed(world: World) -> None:
    sandbox = (await world.create()).sandbox
    async with anyio.create_task_group() as group:
        for hours in range(1, 11):
            group.start_soon(world.lifecycle.renew, TENANT, sandbox.id, START + timedelta(hours=hours))
    assert world.runtime.deadlines[sandbox.id] == (await world.row(sandbox.id)).expires_at


async def test_of_two_renewals_the_node_hears_the_later_one_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = (await world.create()).sandbox
    slow, told = anyio.Event(), world.runtime.set_deadline
    calls = []

    async def first_is_slow(sandbox_id: str, deadline: datetime | None) -> None:
        calls.append(deadline)
        if len(calls) == 1:
            await slow.wait()
        await told(sandbox_id, deadline)

    monkeypatch.setattr(world.runtime, "set_deadline", first_is_slow)

    async def renew(hours: int) -> None:
        await world.lifecycle.renew(TENANT, sandbox.id, START + timedelta(hours=hours))

    async def both_written() -> bool:
        return await world.events(sandbox.id) == ["created", "running", "renewed", "renewed"]

    async def slow_one_waits() -> bool:
        return bool(calls)

    async with anyio.create_task_group() as group:
        group.start_soon(renew, 1)
        await eventually(slow_one_waits)
        group.start_soon(renew, 2)
        await eventually(both_written)
        await anyio.wait_all_tasks_blocked()
        slow.set()
    assert world.runtime.deadlines[sandbox.id] == START + timedelta(hours=2)


# -- endpoint ----------------------------------------------------------------------------------------------------------


async def test_endpoints(world: World) -> None:
    sandbox = (await world.create()).sandbox
    for port in (1, 8080, 18080, 65535):
        endpoint = await world.lifecycle.endpoint(TENANT, sandbox.id, port)
        assert endpoint.endpoint.endswith(f"/{sandbox.id}/{port}")
        assert endpoint.headers == {}
    world.runtime.end(sandbox.id)
    assert (await world.lifecycle.endpoint(TENANT, sandbox.id, 44772)).headers


@pytest.mark.parametrize("port", [0, -1, 65536, 10**20])
async def test_ports_that_do_not_exist(world: World, port: int) -> None:
    await refused(Code.SANDBOX_INVALID_PORT, world.lifecycle.endpoint(TENANT, "any", port))


async def test_routes_that_are_not_served_yet_are_refused(world: World) -> None:
    sandbox = (await world.create()).sandbox
    await refused(Code.SANDBOX_API_NOT_SUPPORTED, world.lifecycle.endpoint(TENANT, sandbox.id, 80, expires=1))


# -- metadata ----------------------------------------------------------------------------------------------------------


async def test_a_patch_is_an_event_and_no_transition(world: World) -> None:
    sandbox = (await world.create(metadata={"a": "1"})).sandbox
    after = await world.lifecycle.patch_metadata(TENANT, sandbox.id, {"b": "2"})
    assert after.metadata == {"a": "1", "b": "2"}
    assert (after.state, after.changed_at, after.version) == (S.RUNNING, sandbox.changed_at, sandbox.version + 1)
    assert await world.row(sandbox.id) == after
    await world.lifecycle.patch_metadata(TENANT, sandbox.id, {"b": "2", "c": None})
    assert await world.events(sandbox.id) == ["created", "running", "metadata changed"], "no change is no event"


async def test_ended_sandboxes_may_be_labelled_but_not_those_on_their_way_out(world: World) -> None:
    sandbox = (await world.create()).sandbox
    world.runtime.end(sandbox.id)
    await world.reconcile.report(world.runtime.sandboxes[sandbox.id])
    assert (await world.lifecycle.patch_metadata(TENANT, sandbox.id, {"seen": "yes"})).state is S.TERMINATED
    world.runtime.delete_gate.close()
    async with anyio.create_task_group() as group:
        group.start_soon(world.lifecycle.delete, TENANT, sandbox.id)
        await world.runtime.delete_gate.reached()
        await refused(Code.SANDBOX_NOT_FOUND, world.lifecycle.patch_metadata(TENANT, sandbox.id, {"a": "b"}))
        world.runtime.delete_gate.open()


async def test_patches_at_once_are_all_kept(world: World) -> None:
    sandbox = (await world.create()).sandbox
    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(world.lifecycle.patch_metadata, TENANT, sandbox.id, {f"k{number}": "v"})
    assert len((await world.row(sandbox.id)).metadata) == 20
