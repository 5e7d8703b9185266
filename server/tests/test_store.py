# SPDX-License-Identifier: Apache-2.0
"""What every store promises. Another database joins by one more entry in STORES and inherits every test."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio import to_thread
from world import NODE, START, TENANT, a_sandbox

from opensandbox_server.errors import CannotStart
from opensandbox_server.ports import KeyedCreate
from opensandbox_server.sandbox import End, EndReason, Limits, Sandbox, SandboxState
from opensandbox_server.store import SqlStore, open_store, sql
from opensandbox_server.store.writer import Driver

pytestmark = pytest.mark.anyio

Open = Callable[..., AbstractAsyncContextManager[SqlStore]]
S = SandboxState


def sqlite(folder: Path) -> Open:
    def opened(node: str = NODE, runtime: str = "fake", instance: str | None = None) -> Any:
        return open_store(folder / "opensandbox.db", node=node, runtime=runtime, instance=instance)

    return opened


STORES = {"sqlite": sqlite}


@pytest.fixture(params=STORES)
def opener(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return STORES[request.param](tmp_path)


@pytest.fixture
async def store(opener: Open, no_blocking: None) -> AsyncIterator[SqlStore]:
    async with opener() as opened:
        yield opened


FULL = a_sandbox(
    7,
    state=S.RUNNING,
    version=5,
    generation=2,
    expires_at=START + timedelta(minutes=10, microseconds=1),
    env={"A": "ä\n\u2028", "B": ""},
    limits=Limits(500, 1 << 40, 64),
    metadata={"a": "b", "c": ""},
    extensions={"opensandbox.extensions.x": "y"},
    platform={"os": "linux", "arch": "arm64"},
    reason="EXITED",
    message='It\'s "over".',
    end=End(EndReason.SIGNALLED, START, None, "SIGKILL", "m", 1 << 40),
    isolation={"runtime": "fake", "limits": {"cpu": {"means": "none"}}, "rootless": False},
)


@pytest.mark.parametrize("sandbox", [a_sandbox(), FULL])
async def test_what_goes_in_comes_out(store: SqlStore, sandbox: Sandbox) -> None:
    await store.insert(sandbox)
    assert await store.get(TENANT, sandbox.id) == sandbox
    assert await store.find(sandbox.id) == sandbox
    assert await store.mine() == (sandbox,)


async def test_everything_that_may_change_is_stored(store: SqlStore) -> None:
    row = a_sandbox(
        7, epoch=FULL.epoch, env=FULL.env, limits=FULL.limits, extensions=FULL.extensions, platform=FULL.platform
    )
    await store.insert(row)
    assert await store.replace(row, replace(FULL, version=2), event="changed")
    assert await store.find(row.id) == replace(FULL, version=2)


async def test_a_tenant_sees_only_its_own(store: SqlStore) -> None:
    await store.insert(a_sandbox(1))
    assert await store.get("another", a_sandbox(1).id) is None
    assert (await store.list("another")).total == 0


async def test_a_node_and_a_runtime_act_only_on_their_own(opener: Open) -> None:
    async with opener() as store, opener(node="node-2") as neighbour, opener(runtime="docker") as other:
        await store.insert(a_sandbox(1, expires_at=START))
        for stranger in (neighbour, other):
            assert await stranger.mine() == ()
            assert await stranger.due(START) == ()
            assert await stranger.next_expiry() is None
            assert await stranger.find(a_sandbox(1).id) is None
            assert not await stranger.delete(a_sandbox(1).id)
            assert await stranger.get(TENANT, a_sandbox(1).id) is not None


async def test_the_second_of_two_changes_loses(store: SqlStore) -> None:
    row = a_sandbox()
    await store.insert(row)
    assert await store.replace(row, row.to(S.RUNNING, START), event="running")
    assert not await store.replace(row, row.to(S.FAILED, START), event="failed")
    assert (await store.mine())[0].state is S.RUNNING
    assert [event.event for event in await store.events(row.id)] == ["created", "running"]


async def test_of_many_changes_at_once_one_wins(store: SqlStore) -> None:
    row = a_sandbox()
    await store.insert(row)
    won = []

    async def change(number: int) -> None:
        if await store.replace(row, row.to(S.RUNNING, START, message=str(number)), event="running"):
            won.append(str(number))

    async with anyio.create_task_group() as group:
        for number in range(20):
            group.start_soon(change, number)
    assert [(await store.mine())[0].message] == won


async def test_a_change_must_move_the_version_by_one(store: SqlStore) -> None:
    row = a_sandbox()
    await store.insert(row)
    with pytest.raises(ValueError, match="version"):
        await store.replace(row, replace(row, message="x"), event="changed")


async def test_a_change_of_what_is_gone_fails(store: SqlStore) -> None:
    assert not await store.replace(a_sandbox(), a_sandbox().to(S.RUNNING, START), event="running")


async def test_of_many_deletes_one_finds_it(store: SqlStore) -> None:
    await store.insert(a_sandbox(1, metadata={"a": "b"}))
    found = []

    async def delete() -> None:
        found.append(await store.delete(a_sandbox(1).id))

    async with anyio.create_task_group() as group:
        for _ in range(10):
            group.start_soon(delete)
    assert sorted(found) == [False] * 9 + [True]
    assert await store.get(TENANT, a_sandbox(1).id) is None


async def test_events_tell_the_story_and_outlive_the_row(store: SqlStore) -> None:
    row = a_sandbox()
    await store.insert(row)
    await store.replace(row, row.to(S.RUNNING, START + timedelta(seconds=1), reason="RUNNING"), event="running")
    await store.delete(row.id)
    story = await store.events(row.id)
    assert [(event.event, event.state, event.version) for event in story] == [
        ("created", S.PENDING, 1),
        ("running", S.RUNNING, 2),
        ("deleted", S.RUNNING, 2),
    ]
    assert story[1].at == START + timedelta(seconds=1)
    assert story[1].reason == "RUNNING"
    assert await store.forget_events(START + timedelta(milliseconds=500)) == 1
    assert [event.event for event in await store.events(row.id)] == ["running", "deleted"]


async def test_an_id_can_come_back_with_the_same_metadata(store: SqlStore) -> None:
    for _ in range(2):
        await store.insert(a_sandbox(1, metadata={"a": "b"}))
        assert (await store.list(TENANT, metadata={"a": "b"})).total == 1
        await store.delete(a_sandbox(1).id)
        assert (await store.list(TENANT, metadata={"a": "b"})).total == 0


async def test_a_list_is_newest_first_and_comes_in_pages(store: SqlStore) -> None:
    for number in range(7):
        await store.insert(a_sandbox(number))
    pages = [await store.list(TENANT, page=page, page_size=3) for page in (1, 2, 3, 4)]
    assert [[int(item.id[-2:]) for item in page.items] for page in pages] == [[6, 5, 4], [3, 2, 1], [0], []]
    assert {page.total for page in pages} == {7}
    assert await store.list(TENANT, page=10**30, page_size=200) == (await store.list(TENANT, page=4, page_size=3))


async def test_rows_of_one_instant_keep_their_order_over_pages(store: SqlStore) -> None:
    for number in range(6):
        await store.insert(a_sandbox(number, created_at=START))
    seen = [item.id for page in (1, 2, 3) for item in (await store.list(TENANT, page=page, page_size=2)).items]
    assert seen == sorted(seen, reverse=True)
    assert len(set(seen)) == 6


async def test_states_are_alternatives_and_metadata_must_all_match(store: SqlStore) -> None:
    states = [S.RUNNING, S.PENDING, S.FAILED, S.RUNNING]
    for number, state in enumerate(states):
        await store.insert(
            a_sandbox(number, state=state, metadata={"n": str(number), "all": "yes", "even": str(number % 2)})
        )

    async def found(**filters: Any) -> list[int]:
        return sorted(int(item.id[-2:]) for item in (await store.list(TENANT, **filters)).items)

    assert await found(states=frozenset({S.RUNNING})) == [0, 3]
    assert await found(states=frozenset({S.RUNNING, S.FAILED})) == [0, 2, 3]
    assert await found(metadata={"all": "yes"}) == [0, 1, 2, 3]
    assert await found(metadata={"all": "yes", "even": "0"}) == [0, 2]
    assert await found(metadata={"all": "YES"}) == []
    assert await found(metadata={"all": "ye"}) == []
    assert await found(metadata={"n": "3", "even": "0"}) == []
    assert await found(states=frozenset({S.RUNNING}), metadata={"even": "1"}) == [3]


async def test_changed_metadata_is_found_and_the_old_is_not(store: SqlStore) -> None:
    row = a_sandbox(1, metadata={"a": "b", "c": "d"})
    await store.insert(row)
    await store.replace(row, replace(row, metadata={"a": "x"}, version=2), event="changed")
    assert (await store.list(TENANT, metadata={"a": "x"})).total == 1
    assert (await store.list(TENANT, metadata={"a": "b"})).total == 0
    assert (await store.list(TENANT, metadata={"c": "d"})).total == 0


async def test_what_is_due_and_when_the_next_is(store: SqlStore) -> None:
    assert await store.next_expiry() is None
    for number, seconds in enumerate([30, 10, 20]):
        await store.insert(a_sandbox(number, expires_at=START + timedelta(seconds=seconds)))
    await store.insert(a_sandbox(3))
    assert await store.next_expiry() == START + timedelta(seconds=10)
    assert [row.id[-1] for row in await store.due(START + timedelta(seconds=20))] == ["1", "2"]
    first = await store.find(a_sandbox(1).id)
    assert first is not None
    await store.replace(first, first.to(S.STOPPING, START), event="deleting")
    assert [row.id[-1] for row in await store.due(START + timedelta(seconds=20))] == ["2"]
    assert await store.next_expiry() == START + timedelta(seconds=20)


async def test_a_cancelled_write_is_there_or_not_and_harms_nobody(store: SqlStore) -> None:
    for number in range(20):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(store.insert, a_sandbox(number))
                await anyio.lowlevel.checkpoint()
                scope.cancel()
    await store.insert(a_sandbox(99))
    page = await store.list(TENANT, page_size=200)
    assert page.total == len(page.items)
    for row in page.items:
        assert [event.event for event in await store.events(row.id)] == ["created"]


async def test_writers_whose_tasks_are_killed_do_not_meet_in_one_transaction(
    store: SqlStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, go_on, overlapping = threading.Event(), threading.Event(), []
    write = sql._insert

    def slow(driver: Driver, sandbox: Sandbox, at_most: int | None, keyed: KeyedCreate | None) -> bool:
        overlapping.append(at_work.is_set() and not go_on.is_set())
        at_work.set()
        assert go_on.wait(10)
        return write(driver, sandbox, at_most, keyed)

    monkeypatch.setattr(sql, "_insert", slow)
    killed = asyncio.ensure_future(store.insert(a_sandbox(1)))
    await to_thread.run_sync(at_work.wait)
    killed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await killed
    async with anyio.create_task_group() as group:
        group.start_soon(store.insert, a_sandbox(2))
        group.start_soon(to_thread.run_sync, threading.Timer(0.05, go_on.set).start)
    assert overlapping == [False, False]
    assert (await store.list(TENANT)).total == 2


async def test_everything_is_there_after_a_restart_in_a_new_epoch(opener: Open) -> None:
    async with opener() as store:
        first = store.epoch, store.instance
        await store.insert(FULL)
    async with opener() as store:
        assert (store.epoch, store.instance) == (first[0] + 1, first[1])
        assert await store.mine() == (FULL,)
    async with opener(node="node-2") as store:
        assert store.epoch == 1


async def test_a_new_database_takes_the_id_of_its_state_directory(opener: Open) -> None:
    async with opener(instance="a" * 32) as store:
        assert store.instance == "a" * 32
    with pytest.raises(CannotStart, match="another installation"):
        async with opener(instance="b" * 32):
            pass
    async with opener() as store:
        assert store.instance == "a" * 32


async def test_the_file_is_nobody_elses_business(tmp_path: Path) -> None:
    async with sqlite(tmp_path)() as store:
        await store.insert(FULL)
        for path in tmp_path.iterdir():  # noqa: ASYNC240 - a test may wait for a disk
            assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
