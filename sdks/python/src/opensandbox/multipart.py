# SPDX-License-Identifier: Apache-2.0
"""Uploads: files as the parts of a multipart body, streamed. Only a chunk is in memory at a time."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence

from opensandbox import models
from opensandbox.content import Content, content_of
from opensandbox.exceptions import InvalidArgumentException


class Upload:
    """Pairs of a `metadata` and a `file` part, one for each entry.

    An open file is read from where it stands. So that a request which never left can be sent again, its
    position is remembered, and each call of `chunks` starts there.
    """

    def __init__(self, entries: Sequence[models.WriteEntry], boundary: str | None = None) -> None:
        self._boundary = boundary or os.urandom(16).hex()
        self._parts = [(self._head(entry), _content(entry)) for entry in entries]
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


def _content(entry: models.WriteEntry) -> Content:
    if entry.data is None:
        raise InvalidArgumentException(f"no data for {entry.path}", hint='Give data="" for an empty file.')
    try:
        return content_of(entry.data, entry.encoding)
    except InvalidArgumentException as error:
        raise InvalidArgumentException(f"{entry.path}: {error.message}", hint=error.hint) from None
