# SPDX-License-Identifier: Apache-2.0
"""What happens to sandboxes, told as it happens.

The table of events is the truth. This server's own writes are told to all who follow at once; rows that other servers
on the same database wrote are found by one look every few seconds, whoever follows. Who falls behind is cut off and
comes back with the number of the last event it saw, so nothing is ever lost and nothing piles up here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import anyio

from .errors import not_found
from .ports import SandboxEvent, Store

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
HEARTBEAT_SECONDS = 15.0
QUEUE = 256
"""Events that wait for one follower."""
_BATCH = 500

GONE = "deleted"
"""The last event of every sandbox."""


@dataclass(frozen=True)
class Heartbeat:
    """Nothing happened for a while."""


@dataclass(frozen=True)
class Cut:
    """The last thing a follower hears; it may come back."""

    message: str


Item = SandboxEvent | Heartbeat | Cut


@dataclass(frozen=True)
class Following:
    """One who follows: iterate `items`, and `close` in any case, also if nothing was read."""

    items: AsyncIterator[Item]
    close: Callable[[], None]


class _Follower:
    def __init__(self, tenant: str, sandbox_id: str | None, limit: int) -> None:
        self.tenant = tenant
        self.sandbox_id = sandbox_id
        self.waiting: deque[SandboxEvent] = deque()
        self.cut: str | None = None
        self._limit = limit
        self._woken = anyio.Event()

    def offer(self, event: SandboxEvent) -> None:
        if self.cut is None and len(self.waiting) >= self._limit:
            self.stop("You read too slowly; come back with Last-Event-ID.")
        elif self.cut is None:
            self.waiting.append(event)
            self._woken.set()

    def stop(self, message: str) -> None:
        """What waits is still told, and then this."""
        self.cut = self.cut or message
        self._woken.set()

    async def wait(self) -> None:
        """Until there is something to say."""
        while not self.waiting and self.cut is None:
            self._woken = anyio.Event()
            await self._woken.wait()


class Events:
    """Hands every event to those who follow.

    >>> events = Events(store)                                       # doctest: +SKIP
    >>> await events.begin()                                         # doctest: +SKIP
    >>> following = await events.follow(tenant, after=17)            # doctest: +SKIP
    >>> async for item in following.items: ...                       # doctest: +SKIP
    """

    def __init__(self, store: Store, *, queue: int = QUEUE, heartbeat: float = HEARTBEAT_SECONDS) -> None:
        self._store = store
        self._queue = queue
        self._heartbeat = heartbeat
        self._seen = 0
        """Every event up to this one has been offered to whoever followed then."""
        self._followers: set[_Follower] = set()
        self._of_sandbox: dict[str, set[_Follower]] = {}
        self._of_tenant: dict[str, set[_Follower]] = {}
        self._gap = anyio.Event()
        self._stopping = False

    @property
    def followers(self) -> int:
        """How many follow right now."""
        return len(self._followers)

    async def begin(self) -> None:
        """Hear what the store writes from now on."""
        self._stopping = False
        self._store.listen(self.heard)
        self._seen = max(self._seen, await self._store.last_event())

    async def run(self) -> None:
        """Until cancelled: find what other servers wrote."""
        while True:
            with anyio.move_on_after(LOOK_SECONDS):
                await self._gap.wait()
            self._gap = anyio.Event()
            try:
                await self.look()
            except Exception:
                log.exception("the store could not be asked for events")

    def stop(self) -> None:
        """The server stops: everybody who follows is told so."""
        self._stopping = True
        for follower in self._followers:
            follower.stop("The server is stopping; come back with Last-Event-ID.")

    def heard(self, event: SandboxEvent) -> None:
        """The store has written it."""
        if event.seq == self._seen + 1:
            self._publish(event)
        elif event.seq > self._seen:
            self._gap.set()  # another server wrote in between; the table knows the order

    async def look(self) -> None:
        """Catch up with the table."""
        if not self._followers:
            newest = await self._store.last_event()
            if not self._followers:
                self._seen = max(self._seen, newest)
                return
        # Whoever came during that question relies on being offered what it does not read itself.
        while True:
            rows = await self._store.events_after(self._seen, most=_BATCH)
            for event in rows:
                if event.seq > self._seen:
                    self._publish(event)
            if len(rows) < _BATCH:
                return

    def _publish(self, event: SandboxEvent) -> None:
        self._seen = event.seq
        for follower in self._of_sandbox.get(event.sandbox_id, ()):
            follower.offer(event)  # it is its tenant's, or it would not be followed
        for follower in self._of_tenant.get(event.tenant, ()):
            follower.offer(event)

    # -- following -------------------------------------------------------------------------------------------------

    async def follow(
        self, tenant: str, *, sandbox_id: str | None = None, after: int | None = None, follow: bool = True
    ) -> Following:
        """Events behind `after`, then those that happen. Of one sandbox: all of them, until it is gone.

        Without `after`, of all sandboxes: from now on. Raises if that sandbox was never there.
        """
        follower = _Follower(tenant, sandbox_id, self._queue)
        self._enter(follower)
        try:
            # In this order: what is not read here was not there yet, and is offered when it comes.
            if sandbox_id is None:
                cursor, over = (await self._store.last_event() if after is None else after), False
            else:
                cursor = after or 0
                over = await self._store.get(tenant, sandbox_id) is None
                if over and not await self._store.events_after(0, tenant=tenant, sandbox_id=sandbox_id, most=1):
                    raise not_found(sandbox_id)
        except BaseException:
            self._leave(follower)
            raise
        if self._stopping:
            follower.stop("The server is stopping; come back with Last-Event-ID.")
        return Following(self._told(follower, cursor, over or not follow), lambda: self._leave(follower))

    async def _told(self, follower: _Follower, cursor: int, over: bool) -> AsyncIterator[Item]:
        while True:
            rows = await self._store.events_after(
                cursor, tenant=follower.tenant, sandbox_id=follower.sandbox_id, most=_BATCH
            )
            for event in rows:
                cursor = event.seq
                yield event
                if follower.sandbox_id is not None and event.event == GONE:
                    return
            if len(rows) < _BATCH or follower.cut is not None:
                break
        while not over:
            with anyio.move_on_after(self._heartbeat) as pause:
                await follower.wait()
            if pause.cancelled_caught:
                yield Heartbeat()
                continue
            while follower.waiting:
                event = follower.waiting.popleft()
                if event.seq <= cursor:
                    continue
                cursor = event.seq
                yield event
                if follower.sandbox_id is not None and event.event == GONE:
                    return
            if follower.cut is not None:
                yield Cut(follower.cut)
                return

    def _enter(self, follower: _Follower) -> None:
        self._followers.add(follower)
        self._table(follower).setdefault(follower.sandbox_id or follower.tenant, set()).add(follower)

    def _leave(self, follower: _Follower) -> None:
        self._followers.discard(follower)
        table, key = self._table(follower), follower.sandbox_id or follower.tenant
        if others := table.get(key):
            others.discard(follower)
            if not others:
                del table[key]

    def _table(self, follower: _Follower) -> dict[str, set[_Follower]]:
        return self._of_tenant if follower.sandbox_id is None else self._of_sandbox
