# SPDX-License-Identifier: Apache-2.0
"""The few things that differ between asynchronous and synchronous code.

Everything else in the SDK only awaits. A synchronous twin can be generated from it by dropping `async` and
`await`, given its own version of this file. anyio comes with the first use, as does the HTTP client: importing the
SDK stays cheap.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from io import IOBase
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from anyio.lowlevel import RunVar

T = TypeVar("T")


async def sleep(duration: timedelta) -> None:
    """Pause the caller."""
    import anyio

    await anyio.sleep(duration.total_seconds())


def shielded(limit: timedelta) -> AbstractContextManager[object]:
    """For cleaning up: not cancelled with the caller, but bounded in time."""
    import anyio

    return anyio.move_on_after(limit.total_seconds(), shield=True)


async def read_chunk(source: IOBase, size: int) -> bytes | str:
    """Read from a file without blocking the event loop."""
    import anyio.to_thread

    return await anyio.to_thread.run_sync(source.read, size)


async def call(function: Callable[[T], Awaitable[None] | None], argument: T) -> None:
    """Call a user's function, and await it if it is asynchronous."""
    outcome = function(argument)
    if outcome is not None:
        await outcome


class PerLoop:
    """A dictionary per event loop: connections of one loop cannot be used in another."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._variable: RunVar[dict[Any, Any]] | None = None

    def get(self) -> dict[Any, Any]:
        """The dictionary of the running loop."""
        if self._variable is None:
            from anyio.lowlevel import RunVar

            self._variable = RunVar(self._name)
        found = self._variable.get(None)
        if found is None:
            found = {}
            self._variable.set(found)
        return found
