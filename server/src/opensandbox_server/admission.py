# SPDX-License-Identifier: Apache-2.0
"""Admission: how many sandboxes may be in the making at once, who waits for a turn, and who is sent away.

A machine that makes too many sandboxes at once makes all of them slowly. So a few are made at a time and the others
wait, first come, first served. Only a full queue, or as many sandboxes as the operator allows, is a refusal; it says
when to come back.

A sandbox counts from its reservation until its row is gone or it has ended: an ended one holds no process and no
memory. The count itself is the store's, taken in the transaction that reserves the row, so it is right whatever
happens at once and after any restart.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio

from .errors import Code, OpenSandboxError
from .ports import Store

LONGEST_RETRY = 60
_RECENT = 32
_ASK_AGAIN = 10
"""Seconds, when no sandbox expires soon: somebody may delete one at any time."""


@dataclass(frozen=True)
class Bounds:
    """What the operator allows; None: no limit, or for `creating` what suits the machine."""

    sandboxes: int | None = None
    creating: int | None = None
    waiting: int = 1000


DEFAULT = Bounds()


@dataclass(frozen=True)
class Occupancy:
    """How full something is, to be shown."""

    now: int
    limit: int | None = None
    waiting: int | None = None


class ClientLeft(Exception):
    """Who asked has hung up before its turn came; nothing was begun."""


class Turn:
    """The right to make one sandbox now. Ends with `end`, as often as that is called."""

    def __init__(self, admission: Admission) -> None:
        self._admission: Admission | None = admission

    def end(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._ended()


class Admission:
    """Gives turns.

    >>> turn = await admission.enter()                      # doctest: +SKIP
    >>> try: ...
    >>> finally: turn.end()
    """

    def __init__(self, store: Store, bounds: Bounds = DEFAULT, now: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._bounds = bounds
        self._now = now
        self._most_at_once = bounds.creating or suits_this_machine()
        self._at_work = 0
        self._queue: deque[anyio.Event] = deque()
        self._ends: deque[float] = deque(maxlen=_RECENT)

    @property
    def most_sandboxes(self) -> int | None:
        """For the reservation, which counts and refuses in one transaction."""
        return self._bounds.sandboxes

    @property
    def creating(self) -> Occupancy:
        """Creations at work and waiting right now."""
        return Occupancy(self._at_work, self._most_at_once, len(self._queue))

    async def sandboxes(self) -> Occupancy:
        """Sandboxes that count, of all tenants."""
        return Occupancy(await self._store.alive(), self._bounds.sandboxes)

    async def enter(self, client_left: Callable[[], Awaitable[None]] | None = None) -> Turn:
        """Wait for a turn. `client_left` returns when who asked has hung up: then its place goes to the next."""
        if self._at_work < self._most_at_once and not self._queue:
            self._at_work += 1
            return Turn(self)
        if len(self._queue) >= self._bounds.waiting:
            raise self._queue_is_full()
        await self._wait(client_left)
        return Turn(self)

    def _queue_is_full(self) -> OpenSandboxError:
        """Sent away, with the place there would have been and the time to come back."""
        waiting = len(self._queue)
        return OpenSandboxError(
            Code.SANDBOX_CAPACITY_EXHAUSTED,
            f"{waiting} creations are already waiting, and [server] max_waiting allows no more.",
            details={"queuePosition": waiting + 1, "limit": self._bounds.waiting},
            retry_after=self._until_room(),
        )

    async def _wait(self, client_left: Callable[[], Awaitable[None]] | None) -> None:
        called = anyio.Event()
        self._queue.append(called)
        try:
            if client_left is None:
                await called.wait()
            else:
                await _first_of(called, client_left)
            if not called.is_set():
                raise ClientLeft
        except BaseException:
            # Called and cancelled may happen in the same moment: then the turn is ours to pass on.
            if called.is_set():
                self._pass_on()
            else:
                self._queue.remove(called)
            raise

    def _ended(self) -> None:
        self._ends.append(self._now())
        self._pass_on()

    def _pass_on(self) -> None:
        if self._queue:
            self._queue.popleft().set()
        else:
            self._at_work -= 1

    def _until_room(self) -> int:
        """Seconds, by the pace of the last creations: a full queue moves at it."""
        if not self._ends:
            return 1
        pace = (self._now() - self._ends[0]) / len(self._ends)
        return max(1, min(LONGEST_RETRY, math.ceil(pace * (len(self._queue) + 1))))


def full(most: int, next_end: float | None) -> OpenSandboxError:
    """There are as many sandboxes as the operator allows. Nobody waits for a place, so there is no queue to be in.

    `next_end` is the number of seconds until one of them expires; None: none of them does.
    """
    soon = next_end is not None and next_end <= LONGEST_RETRY
    return OpenSandboxError(
        Code.SANDBOX_CAPACITY_EXHAUSTED,
        f"There are {most} sandboxes on this server, and [server] max_sandboxes allows no more.",
        hint="Delete sandboxes that are no longer needed, or have the operator raise [server] max_sandboxes; it "
        "counts the sandboxes of all tenants.",
        details={"limit": most},
        retry_after=max(1, math.ceil(next_end)) if soon and next_end is not None else _ASK_AGAIN,
    )


def suits_this_machine() -> int:
    """Twice the cores, at least four: making a sandbox is partly waiting."""
    return max(4, 2 * len(os.sched_getaffinity(0)))


async def _first_of(called: anyio.Event, client_left: Callable[[], Awaitable[None]]) -> None:
    async with anyio.create_task_group() as group:

        async def watch() -> None:
            await client_left()
            group.cancel_scope.cancel()

        group.start_soon(watch)
        await called.wait()
        group.cancel_scope.cancel()
