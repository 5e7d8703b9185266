# SPDX-License-Identifier: Apache-2.0
"""Events: nothing lost, nothing twice, nobody waited for, nobody else's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from world import NODE, START, TENANT, a_sandbox, world_at

from opensandbox_server.api.event import framed
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.events import Cut, Events, Heartbeat, Item
from opensandbox_server.ports import SandboxEvent
from opensandbox_server.sandbox import SandboxState
from opensandbox_server.store import SqlStore, open_store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path, no_blocking: None) -> AsyncIterator[SqlStore]:
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as made:
        yield made


@pytest.fixture
async def events(store: SqlStore) -> Events:
    made = Events(store, queue=4, heartbeat=60)
    await made.begin()
    return made


async def take(items: AsyncIterator[Item], count: int) -> list[Item]:
    with anyio.fail_after(10):
        return [await anext(items) for _ in range(count)]


async def the_rest(items: AsyncIterator[Item]) -> list[Item]:
    with anyio.fail_after(10):
        return [item async for item in items]


def names(items: list[Item]) -> list[str]:
    return [item.event if isinstance(item, SandboxEvent) else type(item).__name__ for item in items]


async def live(store: SqlStore, number: int, tenant: str = TENANT) -> str:
    """A sandbox that comes and runs."""
    row = a_sandbox(number, tenant=tenant)
    await store.insert(row)
    await store.replace(row, row.to(SandboxState.RUNNING, START), event="running")
    return row.id


async def test_what_was_comes_first_then_what_is_and_it_ends_with_the_sandbox(store: SqlStore, events: Events) -> None:
    sandbox_id = await live(store, 1)
    following = await events.follow(TENANT, sandbox_id=sandbox_id)
    assert names(await take(following.items, 2)) == ["created", "running"]
    await live(store, 2)
    await store.delete(sandbox_id)
    assert names(await the_rest(following.items)) == ["deleted"]
    following.close()
    assert events.followers == 0


async def test_who_comes_back_hears_only_what_it_missed(store: SqlStore, events: Events) -> None:
    sandbox_id = await live(store, 1)
    [first] = await take((await events.follow(TENANT, sandbox_id=sandbox_id)).items, 1)
    assert isinstance(first, SandboxEvent)
    await store.delete(sandbox_id)
    again = await events.follow(TENANT, sandbox_id=sandbox_id, after=first.seq)
    told = await the_rest(again.items)
    assert names(told) == ["running", "deleted"]
    assert isinstance(told[-1], SandboxEvent)
    assert await the_rest((await events.follow(TENANT, sandbox_id=sandbox_id, after=told[-1].seq)).items) == []


async def test_without_following_it_is_what_is_there(store: SqlStore, events: Events) -> None:
    sandbox_id = await live(store, 1)
    told = await the_rest((await events.follow(TENANT, sandbox_id=sandbox_id, follow=False)).items)
    assert names(told) == ["created", "running"]


async def test_a_tenant_hears_of_its_own_only(store: SqlStore, events: Events) -> None:
    following = await events.follow(TENANT)
    theirs = await live(store, 1, tenant="other")
    mine = await live(store, 2)
    told = await take(following.items, 2)
    assert {item.sandbox_id for item in told if isinstance(item, SandboxEvent)} == {mine}
    for sandbox_id in (theirs, "no-such-sandbox"):
        with pytest.raises(OpenSandboxError) as caught:
            await events.follow(TENANT, sandbox_id=sandbox_id)
        assert caught.value.code is Code.SANDBOX_NOT_FOUND
    assert events.followers == 1


async def test_all_events_begin_now_or_where_the_client_says(store: SqlStore, events: Events) -> None:
    await live(store, 1)
    now = await events.follow(TENANT)
    since = await events.follow(TENANT, after=1)
    await live(store, 2)
    assert names(await take(now.items, 2)) == ["created", "running"]
    assert names(await take(since.items, 3)) == ["running", "created", "running"]


async def test_who_reads_too_slowly_is_cut_off_and_loses_nothing(store: SqlStore, events: Events) -> None:
    following = await events.follow(TENANT)
    ids = [await live(store, number) for number in range(4)]
    told = await the_rest(following.items)
    *heard, last = told
    assert isinstance(last, Cut)
    assert "Last-Event-ID" in last.message
    seen = [item for item in heard if isinstance(item, SandboxEvent)]
    again = await events.follow(TENANT, after=seen[-1].seq)
    missed = await take(again.items, 8 - len(seen))
    everything = [*seen, *(item for item in missed if isinstance(item, SandboxEvent))]
    assert [event.seq for event in everything] == list(range(1, 9))
    assert {event.sandbox_id for event in everything} == set(ids)


async def test_rows_of_another_server_are_found(tmp_path: Path, store: SqlStore, events: Events) -> None:
    following = await events.follow(TENANT)
    await store.insert(a_sandbox(3))
    await take(following.items, 1)  # what comes now is told, not read
    async with open_store(tmp_path / "a.db", node="node-2", runtime="fake") as elsewhere:
        await elsewhere.insert(a_sandbox(1, node="node-2"))
    await store.insert(a_sandbox(2))  # its number leaves a gap: told in order, after a look
    await events.look()
    told = await take(following.items, 2)
    assert [item.sandbox_id[-1] for item in told if isinstance(item, SandboxEvent)] == ["1", "2"]


async def test_a_look_without_followers_reads_no_rows(store: SqlStore, events: Events) -> None:
    events._seen = 0
    await live(store, 1)
    await events.look()
    assert events._seen == 2


async def test_silence_is_told_and_a_stop_ends_it(store: SqlStore) -> None:
    events = Events(store, heartbeat=0.01)
    await events.begin()
    following = await events.follow(TENANT)
    assert await take(following.items, 1) == [Heartbeat()]
    events.stop()
    *_, last = await the_rest(following.items)
    assert isinstance(last, Cut)
    assert "stopping" in last.message


async def test_events_of_a_whole_life(tmp_path: Path, no_blocking: None) -> None:
    async with world_at(tmp_path) as world:
        events = Events(world.store)
        await events.begin()
        following = await events.follow(TENANT)
        sandbox = (await world.create()).sandbox
        await world.lifecycle.delete(TENANT, sandbox.id)
        told = await take(following.items, 4)
        assert names(told) == ["created", "running", "deleting", "deleted"]
        deleting = told[2]
        assert isinstance(deleting, SandboxEvent)
        assert deleting.reason == "KILLED"


def test_no_field_can_bring_a_line_of_its_own() -> None:
    hostile = "create failed\ndata: {}\n\nid: 9: why\r\nevent: deleted"
    text = framed(SandboxEvent(7, "x\n", "t", START, hostile, SandboxState.FAILED, 1, "a\rb", "m\n\nid: 8"))
    lines = text.decode().split("\n")
    assert lines[0] == "id: 7"
    assert lines[1] == "event: create failed data"
    assert lines[2].startswith("data: {")
    assert lines[3:] == ["", ""]
    assert b"\r" not in text
