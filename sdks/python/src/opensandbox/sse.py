# SPDX-License-Identifier: Apache-2.0
"""Server-sent events, cut out of a stream of bytes. Pure: bytes in, documents out."""

from __future__ import annotations


class EventSplitter:
    """Feeds on chunks of any size and gives back the data of each event that is complete.

    Two framings are understood: the standard one (`data: {...}` lines, an empty line ends the event) and
    the bare one of the published daemon (`{...}` and an empty line). A bare line is a whole event, for
    JSON written on the wire never contains a raw newline. Bytes that are not UTF-8 become U+FFFD.
    """

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._searched = 0
        self._data: list[str] = []

    def feed(self, chunk: bytes) -> list[str]:
        """The events that this chunk completes."""
        self._buffer += chunk
        events: list[str] = []
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._searched))) >= 0:
            self._line(bytes(self._buffer[start:end]), events)
            start = end + 1
        del self._buffer[:start]
        # A long event arrives in many chunks: do not look at the same bytes again for each.
        self._searched = len(self._buffer)
        return events

    def finish(self) -> list[str]:
        """What is left when the stream has ended without a last empty line."""
        events: list[str] = []
        if self._buffer:
            self._line(bytes(self._buffer), events)
            self._buffer.clear()
            self._searched = 0
        self._flush(events)
        return events

    def _line(self, raw: bytes, events: list[str]) -> None:
        line = raw.removesuffix(b"\r")
        if not line:
            self._flush(events)
        elif line.startswith(b"{"):
            self._flush(events)
            events.append(line.decode("utf-8", "replace"))
        elif line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
        # Comments and the fields event, id and retry carry nothing that we use.

    def _flush(self, events: list[str]) -> None:
        if self._data:
            events.append("\n".join(self._data))
            self._data.clear()
