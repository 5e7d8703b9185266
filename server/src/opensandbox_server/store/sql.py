# SPDX-License-Identifier: Apache-2.0
"""The store on a SQL database: plain synchronous SQLAlchemy Core.

An asynchronous driver hops once per statement, fetch and commit, and a create took three times as long with it. Here
what a create or delete waits for runs on the event loop (see `writer`), everything else in a thread as a whole. Either
way it cannot be cancelled half way: its transaction ends.

SQLite has one writer at a time and lets the others poll for their turn with growing pauses; so here the writers of
this process queue for one connection that stays open, and readers, which WAL never blocks, have their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import anyio
from anyio import to_thread
from sqlalchemy import URL, Connection, Engine, Select, bindparam, create_engine, event, func, select, text
from sqlalchemy.exc import DatabaseError

from opensandbox_server.errors import CannotStart
from opensandbox_server.ports import HistoryEntry, HistoryPage, KeyedCreate, Page, SandboxEvent
from opensandbox_server.sandbox import ENDED, EndReason, Sandbox, SandboxState

from . import history, idempotency
from .migrations import migrate
from .page import paged, with_metadata
from .rows import SandboxRow, changing, event_row, from_row, micros, moment, to_event, to_row
from .tables import instance as instances
from .tables import sandbox_events, sandbox_metadata, sandboxes
from .writer import BUSY_MILLISECONDS, Driver, Writer, prepare

P = ParamSpec("P")
T = TypeVar("T")

_READERS = 4
_LONG = 64 * 1024
"""Characters that are not written on the event loop."""
_NEWEST_FIRST = (sandboxes.c.created_at.desc(), sandboxes.c.id.desc())

# Built once: SQLAlchemy then compiles each of them once.
_INSERT = sandboxes.insert()
_INSERT_METADATA = sandbox_metadata.insert()
_DELETE_METADATA = sandbox_metadata.delete().where(sandbox_metadata.c.sandbox_id == bindparam("of"))
_INSERT_EVENT = sandbox_events.insert().returning(sandbox_events.c.seq)
_DELETE = sandboxes.delete().where(sandboxes.c.id == bindparam("id"))
_REPLACE = sandboxes.update().where(
    sandboxes.c.id == bindparam("old_id"), sandboxes.c.version == bindparam("old_version")
)
_GET = select(sandboxes).where(sandboxes.c.id == bindparam("id"), sandboxes.c.tenant == bindparam("tenant"))
_MINE = select(sandboxes).where(sandboxes.c.node == bindparam("node"), sandboxes.c.runtime == bindparam("runtime"))
_FIND = _MINE.where(sandboxes.c.id == bindparam("id"))
_WAITING = (
    sandboxes.c.node == bindparam("node"),
    sandboxes.c.runtime == bindparam("runtime"),
    sandboxes.c.expires_at.is_not(None),
    sandboxes.c.state != SandboxState.STOPPING.value,
)
_DUE = select(sandboxes).where(*_WAITING, sandboxes.c.expires_at <= bindparam("now")).order_by(sandboxes.c.expires_at)
_NEXT = select(func.min(sandboxes.c.expires_at)).where(*_WAITING)
_LAST_EVENT = select(func.max(sandbox_events.c.seq))
_COUNTS = (
    select(sandboxes.c.state, func.count())
    .where(sandboxes.c.node == bindparam("node"), sandboxes.c.runtime == bindparam("runtime"))
    .group_by(sandboxes.c.state)
)
# Written as the index is, or it would not be used.
_NOT_ENDED = text("state NOT IN ('Terminated', 'Failed')")
_NEXT_ALIVE = _NEXT.where(_NOT_ENDED)
_ALIVE = (
    select(func.count())
    .select_from(sandboxes)
    .where(
        sandboxes.c.node == bindparam("node"),
        sandboxes.c.runtime == bindparam("runtime"),
        _NOT_ENDED,
    )
)


class SqlStore:
    """`ports.Store` on one database, for one node and one runtime. Made by `open_store`."""

    def __init__(
        self, engine: Engine, writer: Connection, *, node: str, runtime: str, instance: str, epoch: int
    ) -> None:
        self._engine = engine
        self._writer = Writer(writer, self._tell)
        self._read_turn = anyio.CapacityLimiter(_READERS)
        self._mine = {"node": node, "runtime": runtime}
        self._heard: Callable[[SandboxEvent], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.instance = instance
        """The id of the installation that this database belongs to."""
        self.epoch = epoch
        """Which start of the server on this node this is; grows by one each time."""

    # -- writing ---------------------------------------------------------------------------------------------------

    async def insert(self, sandbox: Sandbox, *, at_most: int | None = None, keyed: KeyedCreate | None = None) -> bool:
        return await self._writer.write(_insert, sandbox, at_most, keyed)

    async def replace(self, old: Sandbox, new: Sandbox, *, event: str, keyed: KeyedCreate | None = None) -> bool:
        if new.version != old.version + 1:
            raise ValueError("a change takes the version one further")
        return await self._writer.write(_replace, old, new, event, keyed)

    async def delete(self, sandbox_id: str, *, entry: HistoryEntry | None = None) -> bool:
        long = entry is not None and len(entry.output) + len(entry.journal) > _LONG
        write = self._writer.write_long if long else self._writer.write
        return await write(_delete, {**self._mine, "id": sandbox_id}, entry)

    async def forget_events(self, before: datetime) -> int:
        return await self._writer.sweep(_forget, micros(before))

    async def forget_keys(self, before: datetime) -> int:
        return await self._writer.sweep(idempotency.forget, micros(before))

    # -- reading ---------------------------------------------------------------------------------------------------

    async def get(self, tenant: str, sandbox_id: str) -> Sandbox | None:
        return await self._ask(_one, _GET, {"id": sandbox_id, "tenant": tenant})

    async def find(self, sandbox_id: str) -> Sandbox | None:
        return await self._ask(_one, _FIND, {**self._mine, "id": sandbox_id})

    async def list(
        self,
        tenant: str,
        *,
        states: frozenset[SandboxState] = frozenset(),
        metadata: dict[str, str] | None = None,
        page: int = 1,
        page_size: int = 20,
    ) -> Page:
        return await self._read(_page, _matching(tenant, states, metadata or {}), page, page_size)

    async def alive(self) -> int:
        return int(await self._read(_scalar, _ALIVE, self._mine))

    async def keyed(self, tenant: str, key: str) -> KeyedCreate | None:
        return await self._ask(idempotency.find, tenant, key)

    async def due(self, now: datetime) -> tuple[Sandbox, ...]:
        return await self._read(_all, _DUE, {**self._mine, "now": micros(now)})

    async def next_expiry(self, *, of_alive: bool = False) -> datetime | None:
        at = await self._read(_scalar, _NEXT_ALIVE if of_alive else _NEXT, self._mine)
        return moment(at) if at is not None else None

    async def mine(self) -> tuple[Sandbox, ...]:
        return await self._read(_all, _MINE, self._mine)

    async def counts(self) -> dict[str, int]:
        return await self._read(_counts, self._mine)

    async def events(self, sandbox_id: str) -> tuple[SandboxEvent, ...]:
        return await self._read(_events, 0, None, sandbox_id, None)

    async def events_after(
        self, seq: int, *, tenant: str | None = None, sandbox_id: str | None = None, most: int = 500
    ) -> tuple[SandboxEvent, ...]:
        return await self._read(_events, seq, tenant, sandbox_id, most)

    async def last_event(self) -> int:
        return int(await self._read(_scalar, _LAST_EVENT, {}) or 0)

    async def history(
        self,
        tenant: str,
        *,
        reasons: frozenset[EndReason] = frozenset(),
        metadata: dict[str, str] | None = None,
        page: int = 1,
        page_size: int = 20,
    ) -> HistoryPage:
        return await self._read(history.listed, history.matching(tenant, reasons, metadata or {}), page, page_size)

    async def departed(self, tenant: str, sandbox_id: str) -> HistoryEntry | None:
        return await self._read(history.one, tenant, sandbox_id)

    def listen(self, heard: Callable[[SandboxEvent], None]) -> None:
        self._heard, self._loop = heard, asyncio.get_running_loop()

    # --------------------------------------------------------------------------------------------------------------

    def _tell(self, events: Sequence[SandboxEvent], *, in_thread: bool) -> None:
        if self._heard is not None and self._loop is not None:
            for written in events:
                # Either way in one queue. A loop that is at work need not be woken.
                call = self._loop.call_soon_threadsafe if in_thread else self._loop.call_soon
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
                    call(self._heard, written)

    async def _ask(self, work: Callable[Concatenate[Driver, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A question for a row or two."""
        answer = self._writer.read(work, *args, **kwargs)
        if answer is not None:
            return answer[0]

        def elsewhere(connection: Connection) -> T:
            return work(Driver(connection), *args, **kwargs)

        return await self._read(elsewhere)

    async def _read(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        def run() -> T:
            with self._engine.connect() as connection:
                return work(connection, *args, **kwargs)

        return await to_thread.run_sync(run, limiter=self._read_turn)


def _insert(driver: Driver, sandbox: Sandbox, at_most: int | None, keyed: KeyedCreate | None) -> bool:
    # One writer at a time: nobody inserts between the count and the insert.
    if at_most is not None and driver.execute(_ALIVE, _home(sandbox)).fetchone()[0] >= at_most:
        return False
    if keyed is not None:
        idempotency.keep(driver, keyed)
    driver.execute(_INSERT, to_row(sandbox))
    _insert_metadata(driver, sandbox)
    _insert_event(driver, event_row(sandbox, "created", micros(sandbox.created_at)))
    return True


def _home(sandbox: Sandbox) -> dict[str, Any]:
    return {"node": sandbox.node, "runtime": sandbox.runtime}


def _replace(driver: Driver, old: Sandbox, new: Sandbox, event: str, keyed: KeyedCreate | None) -> bool:
    taken = driver.execute(_REPLACE, {"old_id": old.id, "old_version": old.version, **changing(new)})
    if taken.rowcount == 0:
        return False
    if new.metadata != old.metadata:
        driver.execute(_DELETE_METADATA, {"of": old.id})
        _insert_metadata(driver, new)
    if keyed is not None:
        idempotency.answer(driver, keyed)
    at = micros(new.changed_at) if new.state is not old.state else _now()
    _insert_event(driver, event_row(new, event, at))
    return True


def _delete(driver: Driver, which: dict[str, Any], entry: HistoryEntry | None) -> bool:
    row = _one(driver, _FIND, which)
    if row is None:
        return False
    driver.execute(_DELETE, {"id": row.id})
    if entry is not None:
        history.keep(driver, entry, {"node": which["node"], "runtime": which["runtime"]})
    if entry is not None and row.state not in ENDED:
        row = row.ended(entry.end)  # the last event says how it ended, as the history does
    _insert_event(driver, event_row(row, "deleted", _now()))
    return True


def _insert_event(driver: Driver, values: dict[str, Any]) -> None:
    (seq,) = driver.execute(_INSERT_EVENT, values).fetchone()
    driver.written.append(to_event(seq, values))


def _forget(connection: Connection, before: int) -> int:
    history.forget(connection, before)
    return connection.execute(sandbox_events.delete().where(sandbox_events.c.at < before)).rowcount


def _insert_metadata(driver: Driver, sandbox: Sandbox) -> None:
    for key, value in sandbox.metadata.items():
        driver.execute(_INSERT_METADATA, {"sandbox_id": sandbox.id, "key": key, "value": value})


def _one(driver: Driver, query: Select[Any], values: dict[str, Any]) -> Sandbox | None:
    found = driver.execute(query, values).fetchone()
    return from_row(SandboxRow._make(found)) if found is not None else None


def _all(connection: Connection, query: Select[Any], values: dict[str, Any]) -> tuple[Sandbox, ...]:
    return tuple(map(from_row, connection.execute(query, values)))


def _scalar(connection: Connection, query: Select[Any], values: dict[str, Any]) -> Any:
    return connection.execute(query, values).scalar()


def _page(connection: Connection, wanted: Select[Any], page: int, page_size: int) -> Page:
    rows, total = paged(connection, sandboxes.c.id, wanted, _NEWEST_FIRST, page, page_size)
    return Page(tuple(map(from_row, rows)), total)


def _counts(connection: Connection, mine: dict[str, Any]) -> dict[str, int]:
    return {row[0]: row[1] for row in connection.execute(_COUNTS, mine)}


def _events(
    connection: Connection, after: int, tenant: str | None, sandbox_id: str | None, most: int | None
) -> tuple[SandboxEvent, ...]:
    wanted = select(sandbox_events).where(sandbox_events.c.seq > after).order_by(sandbox_events.c.seq).limit(most)
    if sandbox_id is not None:
        wanted = wanted.where(sandbox_events.c.sandbox_id == sandbox_id)
    if tenant is not None:
        wanted = wanted.where(sandbox_events.c.tenant == tenant)
    return tuple(to_event(row["seq"], row) for row in connection.execute(wanted).mappings())


def _matching(tenant: str, states: frozenset[SandboxState], metadata: dict[str, str]) -> Select[Any]:
    wanted = select(sandboxes.c.id).where(sandboxes.c.tenant == tenant)
    if states:
        wanted = wanted.where(sandboxes.c.state.in_(sorted(state.value for state in states)))
    return with_metadata(wanted, sandboxes.c.id, sandbox_metadata, metadata)


@asynccontextmanager
async def open_store(path: Path, *, node: str, runtime: str, instance: str | None = None) -> AsyncIterator[SqlStore]:
    """The store in that file, made if it is not there, brought to the newest schema, and taken into a new epoch.

    `instance` is the id that the state directory holds; a database of another installation is refused. A new
    database takes that id, or makes one.

    >>> async with open_store(state / "opensandbox.db", node="local", runtime="local") as store:  # doctest: +SKIP
    ...     await store.get("default", sandbox_id)
    """
    engine = await to_thread.run_sync(_engine, path)
    try:
        writer, found, epoch = await to_thread.run_sync(_take, engine, path, node, runtime, instance)
        try:
            yield SqlStore(engine, writer, node=node, runtime=runtime, instance=found, epoch=epoch)
        finally:
            writer.close()
    finally:
        engine.dispose()


def _engine(path: Path) -> Engine:
    _make_private(path)
    engine = create_engine(
        URL.create("sqlite", database=str(path)),
        connect_args={"check_same_thread": False},  # the threads of the readers come and go
        pool_size=_READERS + 1,
        max_overflow=0,
        # Readers never write, so there is nothing to roll back when they give a connection back.
        pool_reset_on_return=None,
        isolation_level="AUTOCOMMIT",
    )
    event.listen(engine, "connect", _configure)
    return engine


def _take(engine: Engine, path: Path, node: str, runtime: str, instance: str | None) -> tuple[Connection, str, int]:
    try:
        writer = engine.connect().execution_options(isolation_level="SERIALIZABLE")
        try:
            with writer.begin():
                # The driver opens no transaction before CREATE TABLE by itself, and half a migration must not stay.
                writer.exec_driver_sql("BEGIN IMMEDIATE")
                migrate(writer, str(path))
                found, epoch = _identify(writer, path, instance), _next_epoch(writer, node, runtime)
            with writer.begin():
                prepare(writer)
            return writer, found, epoch
        except BaseException:
            writer.close()
            raise
    except DatabaseError as error:
        raise CannotStart(
            f"{path} cannot be used: {error.orig}.", "Move it away, or start with another state directory."
        ) from error


def _identify(connection: Connection, path: Path, expected: str | None) -> str:
    found: str | None = connection.execute(select(instances.c.id)).scalar()
    if found is None:
        found = expected or uuid.uuid4().hex
        connection.execute(instances.insert(), {"id": found})
    if expected is not None and found != expected:
        raise CannotStart(
            f"{path} belongs to another installation ({found[:8]}, this state directory is {expected[:8]}).",
            "Put the database and the state directory of one installation together again.",
        )
    return found


def _next_epoch(connection: Connection, node: str, runtime: str) -> int:
    epoch: int = connection.execute(
        text(
            "INSERT INTO epochs (node, runtime, epoch) VALUES (:node, :runtime, 1)"
            " ON CONFLICT (node, runtime) DO UPDATE SET epoch = epochs.epoch + 1 RETURNING epoch"
        ),
        {"node": node, "runtime": runtime},
    ).scalar_one()
    return epoch


def _configure(connection: Any, record: Any) -> None:
    cursor = connection.cursor()
    for pragma in (f"busy_timeout={BUSY_MILLISECONDS}", "journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _make_private(path: Path) -> None:
    """Environments of sandboxes are in there; SQLite gives its other files the mode of this one."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise CannotStart(
            f"{path} cannot be opened: {error.strerror}.", "Check its owner and the space on its disk."
        ) from None


def _now() -> int:
    return micros(datetime.now(UTC))
