# SPDX-License-Identifier: Apache-2.0
"""Expiry: one query and one sleeping task, whatever the number of sandboxes.

It goes by the wall clock, because that is what clients were promised, and looks again at least every 30 seconds,
because the wall clock may jump and a laptop may sleep.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Protocol

import anyio

from .ports import Store
from .sandbox import Sandbox

log = logging.getLogger(__name__)

LONGEST_SLEEP = 30.0
HISTORY = timedelta(days=7)
KEYS = timedelta(hours=24)
"""How long an Idempotency-Key gives the sandbox that was made for it."""
_AT_ONCE = 8


class Remove(Protocol):
    """How a sandbox goes: `Lifecycle.remove`."""

    async def __call__(self, sandbox_id: str, *, event: str, wanted: Callable[[Sandbox], bool] = ...) -> bool: ...


class Expiry:
    """Ends what is due.

    >>> expiry = Expiry(store, clock)                       # doctest: +SKIP
    >>> task_group.start_soon(expiry.run, lifecycle.remove) # doctest: +SKIP
    >>> expiry.wake(sandbox.expires_at)                     # doctest: +SKIP
    """

    def __init__(
        self, store: Store, clock: Callable[[], datetime], *, expired: Callable[[], None] = lambda: None
    ) -> None:
        """`expired` is called for each that was ended."""
        self._store = store
        self._expired = expired
        self._clock = clock
        self._woken = anyio.Event()
        self._planned: datetime | None = None
        self._forgot: datetime | None = None

    def wake(self, at: datetime) -> None:
        """Somebody is due at that time; sleep no longer than until then."""
        if self._planned is None or at < self._planned:
            self._woken.set()

    async def run(self, remove: Remove) -> None:
        """Until cancelled."""
        while True:
            self._woken = anyio.Event()
            self._planned = None  # a wake during the pass counts: the pass may already have asked the store
            delay = await self._pass(remove)
            with anyio.move_on_after(delay):
                await self._woken.wait()

    async def _pass(self, remove: Remove) -> float:
        """End what is due now; how long to sleep after it."""
        try:
            failed = await self.once(remove)
            await self._forget()
            upcoming = await self._store.next_expiry()
        except Exception:
            log.exception("expiry could not ask the store")
            return 1.0
        now = self._clock()
        self._planned = min(upcoming or datetime.max.replace(tzinfo=now.tzinfo), now + timedelta(seconds=LONGEST_SLEEP))
        # What could not be ended is tried again by the reconcile; without this pause it would be tried here at once.
        return max((self._planned - now).total_seconds(), 1.0 if failed else 0.0)

    async def once(self, remove: Remove) -> int:
        """End every sandbox that is due; how many could not be ended."""
        due = await self._store.due(self._clock())
        failed = 0
        limit = anyio.Semaphore(_AT_ONCE)

        async def expire(sandbox_id: str) -> None:
            nonlocal failed
            async with limit:
                try:
                    # Asked again about the row as it is then: a renewal may have been faster.
                    if await remove(sandbox_id, event="expired", wanted=self._is_due):
                        self._expired()
                except Exception as error:
                    failed += 1
                    log.warning("sandbox %s has expired and could not be ended yet: %s", sandbox_id, error)

        async with anyio.create_task_group() as group:
            for row in due:
                group.start_soon(expire, row.id)
        return failed

    def _is_due(self, row: Sandbox) -> bool:
        return row.expires_at is not None and row.expires_at <= self._clock()

    async def _forget(self) -> None:
        now = self._clock()
        if self._forgot is None or now - self._forgot > timedelta(hours=1):
            await self._store.forget_events(now - HISTORY)
            await self._store.forget_keys(now - KEYS)
            self._forgot = now
