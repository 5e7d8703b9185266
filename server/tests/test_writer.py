# SPDX-License-Identifier: Apache-2.0
"""The connection that writes: on the event loop as long as nothing is waited for, else in a thread."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio
import pytest
from world import NODE, TENANT, a_sandbox

from opensandbox_server.ports import SandboxEvent
from opensandbox_server.store import SqlStore, open_store, sql, writer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(tmp_path: Path, no_blocking: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SqlStore]:
    monkeypatch.setattr(writer, "SLOW_SECONDS", 60)  # the machine of a test may be busy
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as opened:
        # Those of a new store carry the log over first.
        await opened.insert(a_sandbox(1))
        await opened.insert(a_sandbox(2))
        yield opened


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where rows are inserted from."""
    insert, seen = sql._insert, []

    def watched(*args: object) -> bool:
        seen.append("loop" if threading.current_thread() is threading.main_thread() else "thread")
        return insert(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sql, "_insert", watched)
    return seen


@contextmanager
def locked(database: Path) -> Iterator[sqlite3.Connection]:
    """Another process that writes."""
    with closing(sqlite3.connect(database, isolation_level=None, check_same_thread=False)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield other


async def test_a_short_write_takes_no_thread(store: SqlStore, threads: list[str]) -> None:
    await store.insert(a_sandbox(3))
    assert threads == ["loop"]


async def test_the_loop_goes_on_while_another_process_holds_the_lock(
    store: SqlStore, threads: list[str], tmp_path: Path
) -> None:
    with locked(tmp_path / "a.db") as other:
        async with anyio.create_task_group() as group:
            group.start_soon(store.insert, a_sandbox(3))
            group.start_soon(store.insert, a_sandbox(4))
            await anyio.wait_all_tasks_blocked()
            # Not on that connection, which waits.
            assert await store.get(TENANT, a_sandbox(1).id) is not None
            assert await store.get(TENANT, a_sandbox(3).id) is None
            other.rollback()
    assert threads == ["thread", "thread"]
    assert (await store.list(TENANT)).total == 4
    await store.insert(a_sandbox(5))
    assert threads[2:] == ["loop"]


async def test_the_log_is_carried_over_in_a_thread(
    store: SqlStore, threads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "CARRY_AFTER", 10)
    store._writer._here = 10
    for number in range(3, 123):
        await store.insert(a_sandbox(number))
    assert threads == (["loop"] * 10 + ["thread"] * 2) * 10
    # What ten rows need, not 120.
    assert (tmp_path / "a.db-wal").stat().st_size < 2_000_000


async def test_a_slow_disk_is_left_to_a_thread(
    store: SqlStore, threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SLOW_SECONDS", 0)
    for number in range(3, 8):
        await store.insert(a_sandbox(number))
    assert threads == ["loop", "thread", "thread", "thread", "thread"]
    monkeypatch.setattr(writer, "SLOW_SECONDS", 60)
    for number in range(8, 10):
        await store.insert(a_sandbox(number))
    assert threads[5:] == ["thread", "loop"]


async def test_a_write_that_fails_leaves_nothing_and_the_next_one_works(store: SqlStore, threads: list[str]) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        await store.insert(a_sandbox(1))
    await store.insert(a_sandbox(3))
    assert threads == ["loop", "loop"]
    assert [event.event for event in await store.events(a_sandbox(1).id)] == ["created"]
    assert (await store.list(TENANT)).total == 3


async def test_events_are_told_in_their_order_whoever_wrote_them(store: SqlStore, tmp_path: Path) -> None:
    heard: list[SandboxEvent] = []
    store.listen(heard.append)
    with locked(tmp_path / "a.db") as other:
        async with anyio.create_task_group() as group:
            for number in range(3, 6):
                group.start_soon(store.insert, a_sandbox(number))
            await anyio.wait_all_tasks_blocked()
            other.rollback()
            for number in range(6, 20):
                await store.insert(a_sandbox(number))
    await anyio.wait_all_tasks_blocked()
    assert [event.seq for event in heard] == list(range(3, 20))
