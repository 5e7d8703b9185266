# SPDX-License-Identifier: Apache-2.0
"""`Idempotency-Key`: a create that may be sent again and makes one sandbox all the same.

A key is kept with the reservation of its sandbox, in one transaction, and answered with its publication, in another.
So at any moment, also after a crash, a key is in one of these conditions:

* at work in this process: whoever sends it again waits for the first and gets its answer;
* answered: it gives that sandbox for a day, or says that the sandbox is gone;
* kept but neither: the create failed, or its server died. Its sandbox was never given to anybody and is undone; when
  that is done the key is free.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Generic, TypeVar

import anyio

from .background import Background
from .errors import Code, OpenSandboxError, unavailable
from .expiry import KEYS, Remove
from .ports import KeyedCreate, Store
from .sandbox import Sandbox, SandboxState
from .wire.lifecycle import CreateSandboxRequest

LONGEST_KEY = 255
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))

T = TypeVar("T")


@dataclass(frozen=True)
class Key:
    """A key as it came with one request."""

    tenant: str
    text: str
    body: str
    """SHA-256 of what was asked for, however it was written down."""


def key_of(tenant: str, text: str, request: CreateSandboxRequest) -> Key:
    """The body counts by its meaning: order and white space do not matter, nor does null for what is left out."""
    meaning = request.model_dump(mode="json", by_alias=True, exclude_none=True)
    return Key(tenant, text, hashlib.sha256(_CANONICAL.encode(meaning).encode()).hexdigest())


class _Flight(Generic[T]):
    """A create at work under a key."""

    def __init__(self, body: str) -> None:
        self.body = body
        self.landed = anyio.Event()
        self.result: T | None = None
        self.refusal: OpenSandboxError | None = None


class Idempotency(Generic[T]):
    """Lets one create per key happen.

    `make` makes the sandbox and keeps the key; `recall` gives the answer for one that was made before.
    """

    def __init__(
        self,
        *,
        store: Store,
        background: Background,
        clock: Callable[[], datetime],
        remove: Remove,
        recall: Callable[[Sandbox, KeyedCreate], T],
    ) -> None:
        self._store = store
        self._background = background
        self._clock = clock
        self._remove = remove
        self._recall = recall
        self._flights: dict[tuple[str, str], _Flight[T]] = {}

    async def once(self, key: Key, make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        """The answer, and whether it was given before."""
        name = (key.tenant, key.text)
        while flight := self._flights.get(name):
            if flight.body != key.body:
                raise _mismatch()
            await flight.landed.wait()
            if flight.result is not None:
                return flight.result, True
            if flight.refusal is not None:
                raise flight.refusal
            # The first broke off for a reason of its own, such as a client that hung up in the queue.
        self._flights[name] = flight = _Flight(key.body)

        def landed() -> None:
            del self._flights[name]
            flight.landed.set()

        # In the background, so that a create whose client left is still known to be at work under its key.
        return await self._background.finish(partial(self._fly, key, flight, make), done=landed)

    async def _fly(self, key: Key, flight: _Flight[T], make: Callable[[], Awaitable[T]]) -> tuple[T, bool]:
        earlier = await self._store.keyed(key.tenant, key.text)
        if earlier is not None and earlier.warnings is not None and self._clock() - earlier.created_at < KEYS:
            flight.result = await self._answered(key, earlier)
            return flight.result, True
        if earlier is not None and earlier.warnings is None:
            await self._undone(earlier)
        try:
            flight.result = await make()
        except OpenSandboxError as refusal:
            flight.refusal = refusal
            raise
        return flight.result, False

    async def _answered(self, key: Key, earlier: KeyedCreate) -> T:
        if earlier.body != key.body:
            raise _mismatch()
        sandbox = await self._store.get(key.tenant, earlier.sandbox_id)
        if sandbox is None or sandbox.state is SandboxState.STOPPING:
            raise OpenSandboxError(
                Code.SANDBOX_NOT_FOUND,
                f"Sandbox {earlier.sandbox_id}, made for this Idempotency-Key, has been deleted or has expired.",
                hint="Use a new Idempotency-Key to make another one.",
            )
        return self._recall(sandbox, earlier)

    async def _undone(self, earlier: KeyedCreate) -> None:
        """Nobody was given that sandbox and nobody will be; but it must be gone before there is another."""
        await self._remove(earlier.sandbox_id, event="undone: its create broke off")
        if await self._store.find(earlier.sandbox_id) is not None:
            raise unavailable(
                "An earlier create with this Idempotency-Key broke off and is still being undone.",
                hint="Try again in a second, with the same key.",
            )


def _mismatch() -> OpenSandboxError:
    return OpenSandboxError(
        Code.GENERAL_IDEMPOTENCY_MISMATCH, "This Idempotency-Key came before with another request body."
    )
