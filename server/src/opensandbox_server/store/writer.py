# SPDX-License-Identifier: Apache-2.0
"""The one connection that writes, and how short work gets to it without a thread.

A create writes two rows and waits for both. In a thread each of them took 1 ms, of which SQLite needs a quarter: the
rest were two switches of threads and SQLAlchemy's way to the driver. With a write-ahead log and `synchronous=NORMAL`
a commit waits for no disk, so a short transaction runs right on the event loop, unless it would have to wait after
all. It waits in a thread when

* a thread is at work on this connection, or another process holds the database's lock;
* the log is to be carried over into the database. That syncs both; so SQLite is told not to do it by itself in the
  middle of a commit, and every `CARRY_AFTER` transactions it is done here, in a thread. The first transaction after
  it begins the log anew, which syncs too;
* one took longer than `SLOW_SECONDS`: the disk is at its limit, and a thread finds out when that is over;
* the caller knows that it is long.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import anyio
from anyio import to_thread
from sqlalchemy import Connection, Executable
from sqlalchemy.sql.compiler import SQLCompiler

from opensandbox_server.ports import SandboxEvent

P = ParamSpec("P")
T = TypeVar("T")

BUSY_MILLISECONDS = 5000
SLOW_SECONDS = 0.02
CARRY_AFTER = 100
"""Transactions; of a create and its delete, four of them, about 50 pages."""


_COMPILED: dict[tuple[str, Executable], tuple[str, Sequence[str]]] = {}
"""The text of each statement and the order of its values. They are constants of this package, so there is an end."""


class Tell(Protocol):
    """What hears of the events of a transaction."""

    def __call__(self, events: Sequence[SandboxEvent], *, in_thread: bool) -> None:
        """After its commit and before the next one; `in_thread`: not on the event loop."""


class Driver:
    """Statements of SQLAlchemy, compiled once each and run by the database's own driver.

    >>> driver.execute(_FIND, {"id": sandbox_id}).fetchone()        # doctest: +SKIP
    """

    def __init__(self, connection: Connection) -> None:
        self._dialect = connection.dialect
        self.raw: Any = connection.connection.driver_connection
        self.written: list[SandboxEvent] = []
        """Events of this transaction."""

    def execute(self, statement: Executable, values: Mapping[str, Any]) -> Any:
        """A cursor. A statement has the same names of values each time."""
        text, names = _COMPILED.get((self._dialect.name, statement)) or self._compile(statement, values)
        return self.raw.execute(text, [values[name] for name in names])

    def _compile(self, statement: Executable, values: Mapping[str, Any]) -> tuple[str, Sequence[str]]:
        compiled = statement.compile(dialect=self._dialect, column_keys=list(values))  # type: ignore[attr-defined]
        assert isinstance(compiled, SQLCompiler)
        assert compiled.positiontup is not None
        assert not compiled._bind_processors, "a type that SQLAlchemy would translate"
        known = _COMPILED[self._dialect.name, statement] = compiled.string, compiled.positiontup
        return known


def prepare(connection: Connection) -> None:
    """Never wait, neither for a lock nor for the disk, unless told to."""
    for pragma in ("wal_autocheckpoint=0", "busy_timeout=0"):
        connection.exec_driver_sql(f"PRAGMA {pragma}")


class Writer:
    """Transactions, one at a time, in the order of their numbers."""

    def __init__(self, connection: Connection, tell: Tell) -> None:
        self.connection = connection
        self._tell = tell
        self._driver = Driver(connection)
        self._at_work = threading.Lock()
        self._turn = anyio.CapacityLimiter(1)
        self._here = 0
        """How many transactions more may run on the event loop."""
        self._carried = False
        """The next transaction begins the log anew."""

    async def write(self, work: Callable[Concatenate[Driver, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One transaction, short enough for the event loop."""
        if self._here > 0 and self._at_work.acquire(blocking=False):
            try:
                started = time.perf_counter()
                if self._begun():
                    answer = self._finish(lambda driver: work(driver, *args, **kwargs), in_thread=False)
                    self._here = self._here - 1 if time.perf_counter() - started < SLOW_SECONDS else 0
                    return answer
            finally:
                self._at_work.release()
        return await self.write_long(work, *args, **kwargs)

    async def write_long(self, work: Callable[Concatenate[Driver, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One transaction, in a thread."""

        def run() -> T:
            self._driver.raw.execute("BEGIN IMMEDIATE")
            return self._finish(lambda driver: work(driver, *args, **kwargs), in_thread=True)

        return await self._in_thread(run)

    async def sweep(self, work: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """One transaction of any size, with all that SQLAlchemy can do."""

        def run() -> T:
            with self.connection.begin():
                return work(self.connection, *args, **kwargs)

        return await self._in_thread(run)

    def read(self, work: Callable[Concatenate[Driver, P], T], *args: P.args, **kwargs: P.kwargs) -> tuple[T] | None:
        """The answer to a question for a row or two; None when somebody is at work here: then ask elsewhere.

        This connection has what it last wrote at hand, which is what is mostly asked for.
        """
        if not self._at_work.acquire(blocking=False):
            return None
        try:
            return (work(self._driver, *args, **kwargs),)
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                return None
            raise
        finally:
            self._at_work.release()

    # --------------------------------------------------------------------------------------------------------------

    async def _in_thread(self, run: Callable[[], T]) -> T:
        def patiently() -> T:
            # A request task that is cancelled natively gives its turn back while its thread is still at work.
            with self._at_work:
                execute = self._driver.raw.execute
                execute(f"PRAGMA busy_timeout={BUSY_MILLISECONDS}")
                try:
                    started = time.perf_counter()
                    answer = run()
                    self._carry_over(slow=time.perf_counter() - started > SLOW_SECONDS)
                finally:
                    execute("PRAGMA busy_timeout=0")
                return answer

        return await to_thread.run_sync(patiently, limiter=self._turn)

    def _begun(self) -> bool:
        try:
            self._driver.raw.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            if _is_busy(error):
                return False
            raise
        return True

    def _finish(self, work: Callable[[Driver], T], *, in_thread: bool) -> T:
        self._driver.written = []
        try:
            answer = work(self._driver)
            self._driver.raw.commit()
        except BaseException:
            self._driver.raw.rollback()
            raise
        # Told in the order of their numbers, and only if true.
        self._tell(self._driver.written, in_thread=in_thread)
        return answer

    def _carry_over(self, *, slow: bool) -> None:
        if self._here > 0 or (slow and self._carried):
            return
        if self._carried:
            self._here, self._carried = CARRY_AFTER, False
        else:
            # Without waiting for readers: what one of them still needs is carried over the next time.
            self._driver.raw.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
            self._carried = True


def _is_busy(error: sqlite3.OperationalError) -> bool:
    return error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
