# SPDX-License-Identifier: Apache-2.0
"""Cutting events out of a stream."""

from __future__ import annotations

from typing import Any

import pytest

from opensandbox.sse import EventSplitter

ONE, TWO = '{"type":"init","text":"ä"}', '{"type":"stdout","text":"hi"}'

FRAMINGS = {
    "bare": f"{ONE}\n\n{TWO}\n\n",
    "standard": f"data: {ONE}\n\ndata: {TWO}\n\n",
    "no space after the colon": f"data:{ONE}\n\ndata:{TWO}\n\n",
    "carriage returns": f"data: {ONE}\r\n\r\ndata: {TWO}\r\n\r\n",
    "bare, one newline": f"{ONE}\n{TWO}\n",
    "comments and other fields": f": hello\nevent: x\nid: 1\ndata: {ONE}\nretry: 3\n\n\n\ndata: {TWO}\n\n",
    "mixed": f"data: {ONE}\n\n{TWO}\n\n",
    "no end": f"{ONE}\n\ndata: {TWO}",
}


def split(stream: bytes, size: int) -> list[str]:
    splitter = EventSplitter()
    events = [event for at in range(0, len(stream), size) for event in splitter.feed(stream[at : at + size])]
    return events + splitter.finish()


@pytest.mark.parametrize("framing", FRAMINGS)
def test_every_framing_in_chunks_of_every_size(framing: str) -> None:
    stream = FRAMINGS[framing].encode()
    for size in range(1, len(stream) + 1):
        assert split(stream, size) == [ONE, TWO], f"chunks of {size}"


def test_data_of_several_lines_is_one_event() -> None:
    assert split(b'data: {"a":\ndata: 1}\n\n', 3) == ['{"a":\n1}']


def test_bytes_that_are_not_text_become_replacement_characters() -> None:
    assert split(b'{"text":"a\xff\xfeb"}\n\ndata: {"text":"\xc3"}\n\n', 4) == ['{"text":"a��b"}', '{"text":"�"}']


def test_a_character_may_be_cut_in_two() -> None:
    stream = '{"text":"€"}\n\n'.encode()
    assert split(stream, 10) == ['{"text":"€"}']


def test_an_event_is_given_as_soon_as_its_line_is_complete() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b'{"a":1}\n') == ['{"a":1}']
    assert splitter.feed(b'\n{"b":') == []
    assert splitter.feed(b"2}\n") == ['{"b":2}']
    assert splitter.finish() == []


def test_nothing_comes_from_nothing() -> None:
    assert split(b"", 1) == []
    assert split(b"\n\n\n", 1) == []


class Counting(bytearray):
    """Counts the bytes that are searched."""

    searched = 0

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        found = super().find(sub, start, len(self) if end is None else end)
        self.searched += (len(self) if found < 0 else found + 1) - start
        return found


def test_a_long_event_costs_no_more_than_its_length() -> None:
    splitter = EventSplitter()
    splitter._buffer = buffer = Counting()
    stream = b'{"text":"' + b"x" * (1 << 20) + b'"}\n'
    events = [event for at in range(0, len(stream), 4096) for event in splitter.feed(stream[at : at + 4096])]
    assert len(events) == 1
    assert buffer.searched == len(stream)
