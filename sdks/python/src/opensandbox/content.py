# SPDX-License-Identifier: Apache-2.0
"""What is sent: texts, bytes, open files and iterators, read piece by piece. Only a chunk is in memory at a time."""

from __future__ import annotations

import hashlib
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import IOBase
from os import PathLike
from pathlib import Path

from opensandbox.concurrency import Pieces, each, in_thread, read_chunk
from opensandbox.exceptions import InvalidArgumentException

CHUNK = 1 << 18


class Bytes:
    """Bytes that are in memory anyway."""

    repeatable = True

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size: int | None = len(data)

    async def chunks(self, skip: int = 0) -> AsyncIterator[bytes]:
        """All of it, but for so many bytes at the beginning."""
        for offset in range(skip, len(self._data), CHUNK):
            yield self._data[offset : offset + CHUNK]


class File:
    """An open file, read from where it stands.

    So that a request which never left can be sent again, its position is remembered, and each call of `chunks` starts
    there.
    """

    def __init__(self, file: IOBase, encoding: str = "utf-8") -> None:
        self._file = file
        self._encoding = encoding
        self._start = file.tell() if file.seekable() else None
        self.repeatable = self._start is not None
        self.size: int | None = None
        # A text file counts characters, not bytes, so its size is not known before it is read.
        if self._start is not None and not isinstance(file, io.TextIOBase):
            self.size = max(0, file.seek(0, io.SEEK_END) - self._start)
            file.seek(self._start)

    async def chunks(self, skip: int = 0) -> AsyncIterator[bytes]:
        """All of it, but for so many bytes at the beginning."""
        if self._start is not None:
            self._file.seek(self._start + skip)
        left = None if self.size is None else self.size - skip
        while left is None or left > 0:
            # A file that grows meanwhile is sent as long as it was announced, and no longer.
            data = await read_chunk(self._file, CHUNK if left is None else min(CHUNK, left))
            if not data:
                break
            chunk = data.encode(self._encoding) if isinstance(data, str) else data
            if left is not None:
                left -= len(chunk)
            yield chunk


class Stream:
    """The pieces of an iterator. They come once."""

    repeatable = False
    size: int | None = None

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces

    async def chunks(self, skip: int = 0) -> AsyncIterator[bytes]:
        """All of them; there is no way to skip some."""
        async for piece in each(self._pieces):
            if not isinstance(piece, (bytes, bytearray, memoryview)):
                raise InvalidArgumentException(f"the iterator gives {type(piece).__name__} instead of bytes")
            # An empty chunk would be taken for the end.
            if piece:
                yield bytes(piece)


Content = Bytes | File | Stream


def content_of(data: str | bytes | IOBase | Pieces, encoding: str = "utf-8") -> Content:
    """Something to send, whatever it was given as."""
    if isinstance(data, str):
        return Bytes(data.encode(encoding))
    if isinstance(data, (bytes, bytearray, memoryview)):
        return Bytes(bytes(data))
    if isinstance(data, IOBase):
        if not data.readable():
            raise InvalidArgumentException("the file is not open for reading")
        return File(data, encoding)
    if not hasattr(data, "__iter__") and not hasattr(data, "__aiter__"):
        raise InvalidArgumentException(
            f"{type(data).__name__} cannot be sent", hint="Give bytes, a text, an open file, or an iterator of bytes."
        )
    return Stream(data)


@asynccontextmanager
async def opened(source: str | PathLike[str] | IOBase | Pieces) -> AsyncIterator[Content]:
    """Something to send; a text is here the path of a local file, which is open as long as the block lasts."""
    if not isinstance(source, (str, PathLike)):
        yield content_of(source)
        return
    file = await in_thread(Path(source).open, "rb")
    try:
        yield File(file)
    finally:
        file.close()


def raw_headers(size: int | None) -> dict[str, str]:
    """The headers of a body that is bytes and nothing else."""
    headers = {"Content-Type": "application/octet-stream"}
    return headers | ({"Content-Length": str(size)} if size is not None else {"Transfer-Encoding": "chunked"})


async def sha256_of(content: Content) -> str:
    """The digest of what will be sent, in hexadecimal digits."""
    digest = hashlib.sha256()
    async for chunk in content.chunks():
        digest.update(chunk)
    return digest.hexdigest()


class Counted:
    """What is sent of a content, digested on its way, for what cannot be read twice."""

    def __init__(self, content: Content) -> None:
        self._content = content
        self._digest = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """Of what has been sent."""
        return self._digest.hexdigest()

    async def chunks(self) -> AsyncIterator[bytes]:
        """All of it."""
        async for chunk in self._content.chunks():
            self._digest.update(chunk)
            yield chunk
