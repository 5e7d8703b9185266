# SPDX-License-Identifier: Apache-2.0
"""Work that is finished even when whoever asked for it is gone."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

import anyio
from anyio.abc import TaskGroup

from .errors import OpenSandboxError, unavailable

log = logging.getLogger(__name__)

T = TypeVar("T")


class _Outcome(Generic[T]):
    def __init__(self) -> None:
        self.done = anyio.Event()
        self.value: T | None = None
        self.error: BaseException | None = None
        self.awaited = True


class Background:
    """Owns the tasks of creates and deletes, so that a request that is cancelled leaves nothing half done.

    A shielded scope would not do: a server that stops cancels its request tasks natively, and that goes through
    every shield.

    >>> async with Background() as background:              # doctest: +SKIP
    ...     sandbox = await background.finish(make_sandbox)
    """

    def __init__(self, grace: float = 5.0) -> None:
        self._grace = grace
        self._group: TaskGroup | None = None
        self._running = 0
        self._idle = anyio.Event()

    async def __aenter__(self) -> Background:
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        group, self._group = self._group, None
        assert group is not None
        if kind is None:
            with anyio.move_on_after(self._grace):
                while self._running:
                    self._idle = anyio.Event()
                    await self._idle.wait()
        group.cancel_scope.cancel()
        return await group.__aexit__(kind, error, trace)

    def open(self) -> TaskGroup:
        """Raises when the server is stopping: nothing is begun then."""
        if self._group is None:
            raise unavailable("The server is stopping.", hint="Try again when it has started.")
        return self._group

    async def finish(self, work: Callable[[], Awaitable[T]], *, done: Callable[[], None] = lambda: None) -> T:
        """Run `work` to its end and answer what it answers; if the caller is cancelled, it goes on without it.

        `done` is called when the work has ended, or cannot begin.
        """
        try:
            group = self.open()
        except OpenSandboxError:
            done()
            raise
        outcome: _Outcome[T] = _Outcome()
        self._running += 1
        group.start_soon(self._run, work, outcome, done)
        try:
            await outcome.done.wait()
        except BaseException:
            outcome.awaited = False
            raise
        if outcome.error is not None:
            raise outcome.error
        return outcome.value  # type: ignore[return-value]

    async def _run(self, work: Callable[[], Awaitable[T]], outcome: _Outcome[T], done: Callable[[], None]) -> None:
        try:
            outcome.value = await work()
        except anyio.get_cancelled_exc_class():
            outcome.error = unavailable("The server stopped in the middle of it; it has been undone.")
            raise
        except BaseException as error:
            outcome.error = error
            if not outcome.awaited:
                known = isinstance(error, OpenSandboxError)
                log.warning("failed after its client had left: %s", error, exc_info=None if known else error)
            if not isinstance(error, Exception):
                raise
        finally:
            done()
            outcome.done.set()
            self._running -= 1
            if not self._running:
                self._idle.set()
