# SPDX-License-Identifier: Apache-2.0
"""What differs between the two worlds; `code_interpreter.sync.waiting` is the hand-written twin of this file."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, Self


class Waiting:
    """Something that has to be waited for, and that may be used at once all the same: then its first use waits."""

    _check: Callable[[], Awaitable[None]] | None = None

    def _begin(self, check: Callable[[], Awaitable[None]]) -> None:
        self._check = check

    async def _ready(self) -> None:
        if self._check is not None:
            await self._check()
            self._check = None

    async def _settled(self) -> Self:
        await self._ready()
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self._settled().__await__()
