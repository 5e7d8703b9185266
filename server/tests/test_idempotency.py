# SPDX-License-Identifier: Apache-2.0
"""Idempotency-Key: one sandbox per key, whatever is sent twice, breaks off or crashes; never a key that is stuck."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
from world import BODY, TENANT, World, eventually, world_at

from opensandbox_server.admission import Bounds, ClientLeft
from opensandbox_server.errors import Code, OpenSandboxError, unavailable
from opensandbox_server.idempotency import key_of
from opensandbox_server.lifecycle import Created, Stopwatch
from opensandbox_server.sandbox import SandboxState
from opensandbox_server.validation import validate
from opensandbox_server.wire.lifecycle import CreateSandboxRequest

pytestmark = pytest.mark.anyio


def wish(**changes: Any) -> CreateSandboxRequest:
    return CreateSandboxRequest.model_validate({**BODY, **changes})


async def keyed(world: World, text: str = "k", *, tenant: str = TENANT, left: Any = None, **changes: Any) -> Created:
    request = wish(**changes)
    return await world.lifecycle.create(tenant, request, key=key_of(tenant, text, request), client_left=left)


async def refused(code: Code, call: Any) -> OpenSandboxError:
    with pytest.raises(OpenSandboxError) as caught:
        await call
    assert caught.value.code is code
    return caught.value


def test_a_body_counts_by_its_meaning() -> None:
    def body(content: dict[str, Any]) -> str:
        return key_of("t", "k", CreateSandboxRequest.model_validate(content)).body

    assert body(BODY) == body(dict(reversed(BODY.items()))) == body({**BODY, "metadata": None})
    assert body(BODY) != body({**BODY, "timeout": 601})
    assert body(BODY) != body({**BODY, "unknown": 1}), "what we do not know may still matter to who sent it"


async def test_the_same_key_gives_the_same_sandbox(world: World) -> None:
    first = await keyed(world, colour="red")
    again = await keyed(world, colour="red")
    assert (first.replayed, again.replayed) == (False, True)
    assert again.sandbox == first.sandbox
    assert (again.endpoints, again.warnings) == (first.endpoints, first.warnings)
    assert len(world.runtime.specs) == 1
    assert (await keyed(world, "other", colour="red")).sandbox.id != first.sandbox.id
    assert (await keyed(world, tenant="somebody else", colour="red")).sandbox.id != first.sandbox.id


async def test_another_body_is_refused(world: World) -> None:
    await keyed(world)
    error = await refused(Code.GENERAL_IDEMPOTENCY_MISMATCH, keyed(world, timeout=700))
    assert error.status == 409


async def test_who_asks_again_in_the_middle_waits_for_the_first(world: World) -> None:
    world.runtime.gate.close()
    made: list[Created] = []

    async def ask() -> None:
        made.append(await keyed(world))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await world.runtime.gate.reached()
        for _ in range(5):
            group.start_soon(ask)
        await refused(Code.GENERAL_IDEMPOTENCY_MISMATCH, keyed(world, timeout=700))
        world.runtime.gate.open()
    assert len({one.sandbox.id for one in made}) == 1
    assert sorted(one.replayed for one in made) == [False, True, True, True, True, True]
    assert len(world.runtime.specs) == 1


async def test_a_failed_create_frees_the_key_and_those_who_waited_hear_of_it(world: World) -> None:
    world.runtime.gate.close()
    errors: list[OpenSandboxError] = []

    async def ask() -> None:
        errors.append(await refused(Code.NODE_UNAVAILABLE, keyed(world)))

    async with anyio.create_task_group() as group:
        group.start_soon(ask)
        await world.runtime.gate.reached()
        group.start_soon(ask)
        await anyio.lowlevel.checkpoint()
        world.runtime.gate.fail(unavailable("sandboxd is away."))
    assert len(errors) == 2
    assert await world.store.mine() == ()
    # Free for the same wish and, as nobody was given anything, for another.
    made = await keyed(world, timeout=700)
    assert not made.replayed
    assert (await keyed(world, timeout=700)).sandbox.id == made.sandbox.id


async def test_a_refused_create_never_held_the_key(world: World) -> None:
    await refused(Code.IMAGE_NOT_FOUND, keyed(world, image={"uri": "nope"}))
    assert not (await keyed(world)).replayed


async def test_a_client_that_leaves_the_queue_frees_the_key(tmp_path: Path) -> None:
    async with world_at(tmp_path, bounds=Bounds(creating=1)) as world:
        world.runtime.gate.close()
        gone = anyio.Event()
        made: list[Created] = []

        async def leaver() -> None:
            with pytest.raises(ClientLeft):
                await keyed(world, left=gone.wait)

        async def stayer() -> None:
            made.append(await keyed(world))

        async def one_waits() -> bool:
            return world.admission.creating.waiting == 1

        async with anyio.create_task_group() as group:
            group.start_soon(world.create)
            await world.runtime.gate.reached()
            group.start_soon(leaver)
            await eventually(one_waits)
            group.start_soon(stayer)  # behind the leaver, under the same key
            await anyio.lowlevel.checkpoint()
            gone.set()
            await eventually(one_waits)
            world.runtime.gate.open()
        assert [one.replayed for one in made] == [False]
        assert len(world.runtime.specs) == 2


async def test_a_create_whose_request_was_cancelled_goes_on_under_its_key(world: World) -> None:
    world.runtime.gate.close()
    made: list[Created] = []

    async def again() -> None:
        made.append(await keyed(world))

    async with anyio.create_task_group() as group:
        async with anyio.create_task_group() as first:
            first.start_soon(keyed, world)
            await world.runtime.gate.reached()
            first.cancel_scope.cancel()
        group.start_soon(again)
        await anyio.lowlevel.checkpoint()
        world.runtime.gate.open()
    assert [one.replayed for one in made] == [True]
    assert list(world.runtime.specs) == [made[0].sandbox.id]


async def test_a_deleted_sandbox_is_not_made_again(world: World) -> None:
    made = await keyed(world)
    await world.lifecycle.delete(TENANT, made.sandbox.id)
    error = await refused(Code.SANDBOX_NOT_FOUND, keyed(world))
    assert made.sandbox.id in error.message
    assert "new Idempotency-Key" in (error.hint or "")
    assert await world.store.mine() == ()


async def test_an_ended_sandbox_is_still_the_answer(world: World) -> None:
    made = await keyed(world)
    world.runtime.end(made.sandbox.id, exit_code=3)
    await world.reconcile.report(world.runtime.sandboxes[made.sandbox.id])
    assert (await keyed(world)).sandbox.state is SandboxState.FAILED


async def test_after_a_day_the_key_is_new_and_its_row_is_swept(world: World) -> None:
    first = await keyed(world, timeout=86400)
    world.clock.forward(24 * 3600)
    second = await keyed(world, timeout=86400)
    assert not second.replayed
    assert second.sandbox.id != first.sandbox.id
    assert await world.store.forget_keys(world.clock.now) == 0
    world.clock.forward(1)
    assert await world.store.forget_keys(world.clock.now) == 1
    assert await world.store.keyed(TENANT, "k") is None


# -- crashes: the world is left as kill -9 leaves it, and entered again ------------------------------------------------


class Killed(BaseException):
    """Goes through everything, and nothing that would be done after it is done."""


async def crashed(world: World, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """A create under the key that its dying server had brought that far."""
    make = world.runtime.create

    async def die(*_: Any) -> Any:
        raise Killed

    async def make_and_die(spec: Any) -> Any:
        await make(spec)
        raise Killed

    request = wish()
    life = world.lifecycle
    pending = life._pending(TENANT, validate(request, life._rules, world.clock()), world.clock())
    with monkeypatch.context() as patch:
        patch.setattr(life, "_undo", die)
        patch.setattr(world.runtime, "create", {"reserved": die, "launched": make_and_die}[moment])
        with pytest.raises(Killed):
            await life._make(pending, life._plan(pending, None), key_of(TENANT, "k", request), (), Stopwatch())


@pytest.mark.parametrize("moment", ["reserved", "launched"])
@pytest.mark.parametrize("body", [{}, {"timeout": 700}])
async def test_killed_between_reserve_and_publish_the_key_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, body: dict[str, Any]
) -> None:
    async with world_at(tmp_path) as world:
        await crashed(world, monkeypatch, moment)
        (row,) = await world.store.mine()
        assert row.state is SandboxState.PENDING
        assert len(world.runtime.sandboxes) == (moment == "launched")
    async with world_at(tmp_path, world.runtime, world.clock) as world:
        assert await world.compare() == "1 undone"
        made = await keyed(world, **body)
        assert not made.replayed
        assert [*world.runtime.sandboxes] == [made.sandbox.id], "never two"
        assert (await keyed(world, **body)).sandbox.id == made.sandbox.id


async def test_killed_after_publish_the_key_gives_the_sandbox(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        row = (await keyed(world)).sandbox  # and its answer is lost
    async with world_at(tmp_path, world.runtime, world.clock) as world:
        await world.compare()
        again = await keyed(world)
        assert again.replayed
        assert again.sandbox.id == row.id
        assert [*world.runtime.sandboxes] == [row.id]


async def test_what_could_not_be_undone_yet_holds_the_key_until_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_at(tmp_path) as world:
        await crashed(world, monkeypatch, "launched")
    async with world_at(tmp_path, world.runtime, world.clock) as world:
        (stale,) = await world.store.mine()
        world.runtime.unavailable()
        await refused(Code.NODE_UNAVAILABLE, keyed(world))
        assert len(await world.store.mine()) == 1
        world.runtime.available()
        made = await keyed(world)  # undoes it itself, without waiting for the reconcile
        assert [*world.runtime.sandboxes] == [made.sandbox.id] != [stale.id]
