# SPDX-License-Identifier: Apache-2.0
"""Uploads: files as the parts of a multipart body, streamed. Only a chunk is in memory at a time."""

from __future__ import annotations

import io
import json
import os
from collections.abc import AsyncIterator, Sequence
from io import IOBase

from opensandbox import models
from opensandbox.concurrency import read_chunk
from opensandbox.exceptions import InvalidArgumentException

CHUNK = 1 << 18


class Upload:
    """Pairs of a `metadata` and a `file` part, one for each entry.

    An open file is read from where it stands. So that a request which never left can be sent again, its
    position is remembered, and each call of `chunks` starts there.
    """

    def __init__(self, entries: Sequence[models.WriteEntry], boundary: str | None = None) -> None:
        self._boundary = boundary or os.urandom(16).hex()
        self._parts = [(self._head(entry), _source(entry)) for entry in entries]
        self._tail = f"--{self._boundary}--\r\n".encode()

    @property
    def content_type(self) -> str:
        """The header that goes with the body."""
        return f"multipart/form-data; boundary={self._boundary}"

    @property
    def length(self) -> int | None:
        """The size of the body, if every source knows its own."""
        total = len(self._tail)
        for head, source in self._parts:
            if source.size is None:
                return None
            total += len(head) + source.size + 2
        return total

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body."""
        for head, source in self._parts:
            yield head
            async for chunk in source.chunks():
                yield chunk
            yield b"\r\n"
        yield self._tail

    def _head(self, entry: models.WriteEntry) -> bytes:
        given = {"path": entry.path, "owner": entry.owner, "group": entry.group, "mode": entry.mode}
        metadata = json.dumps({name: value for name, value in given.items() if value is not None})
        return (
            f"--{self._boundary}\r\n"
            'Content-Disposition: form-data; name="metadata"; filename="metadata"\r\n'
            "Content-Type: application/json\r\n\r\n"
            f"{metadata}\r\n"
            f"--{self._boundary}\r\n"
            # The path is in the metadata; a name here would need quoting and is read by nobody.
            'Content-Disposition: form-data; name="file"; filename="file"\r\n'
            "Content-Type: application/octet-stream\r\n\r\n"
        ).encode()


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size: int | None = len(data)

    async def chunks(self) -> AsyncIterator[bytes]:
        for offset in range(0, len(self._data), CHUNK):
            yield self._data[offset : offset + CHUNK]


class _File:
    def __init__(self, file: IOBase, encoding: str) -> None:
        self._file = file
        self._encoding = encoding
        self._start = file.tell() if file.seekable() else None
        self.size: int | None = None
        # A text file counts characters, not bytes, so its size is not known before it is read.
        if self._start is not None and not isinstance(file, io.TextIOBase):
            self.size = max(0, file.seek(0, io.SEEK_END) - self._start)
            file.seek(self._start)

    async def chunks(self) -> AsyncIterator[bytes]:
        if self._start is not None:
            self._file.seek(self._start)
        left = self.size
        while left is None or left > 0:
            # A file that grows meanwhile is sent as long as it was announced, and no longer.
            data = await read_chunk(self._file, CHUNK if left is None else min(CHUNK, left))
            if not data:
                break
            chunk = data.encode(self._encoding) if isinstance(data, str) else data
            if left is not None:
                left -= len(chunk)
            yield chunk


def _source(entry: models.WriteEntry) -> _Bytes | _File:
    data = entry.data
    if data is None:
        raise InvalidArgumentException(f"no data for {entry.path}", hint='Give data="" for an empty file.')
    if isinstance(data, str):
        return _Bytes(data.encode(entry.encoding))
    if isinstance(data, bytes):
        return _Bytes(data)
    if not data.readable():
        raise InvalidArgumentException(f"the file given for {entry.path} is not open for reading")
    return _File(data, entry.encoding)
