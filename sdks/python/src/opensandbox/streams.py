# SPDX-License-Identifier: Apache-2.0
"""Answers that never end: each line or event a value, as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Generic, Self, TypeVar

from opensandbox import models
from opensandbox.answers import translated
from opensandbox.sse import EventSplitter
from opensandbox.transport import Connection, Params

T = TypeVar("T")


class Watch(Generic[T]):
    """What happens, value by value, until it is closed (`async with` does). Nothing is missed as long as it exists."""

    def __init__(self, kind: type[T], chunks: AsyncIterator[bytes], stack: AsyncExitStack, base_url: str) -> None:
        self._kind = kind
        self._chunks = chunks
        self._stack = stack
        self._base_url = base_url
        self._splitter = EventSplitter()
        self._waiting: list[str] = []

    @classmethod
    async def open(cls, connection: Connection, path: str, kind: type[T], params: Params = ()) -> Watch[T]:
        """Ask, and wait for the beginning of the answer."""
        stack = AsyncExitStack()
        headers = {"Accept": "text/event-stream, application/x-ndjson"}
        response = await stack.enter_async_context(
            connection.stream("GET", path, params=params, headers=headers, endless=True)
        )
        return cls(kind, response.aiter_raw(), stack, connection.base_url)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        try:
            while not self._waiting:
                with translated("GET", self._base_url):
                    chunk = await anext(self._chunks, b"")
                if not chunk:
                    raise StopAsyncIteration
                self._waiting = self._splitter.feed(chunk)[::-1]
            return models.base.parse(self._kind, self._waiting.pop().encode())
        except BaseException:
            await self.aclose()
            raise

    async def aclose(self) -> None:
        """Stop watching, and give the connection back."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
