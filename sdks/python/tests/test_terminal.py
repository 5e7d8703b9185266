# SPDX-License-Identifier: Apache-2.0
"""Frames of a terminal, made into output."""

from __future__ import annotations

import pytest

from opensandbox.exceptions import SandboxConnectionException, ServerException
from opensandbox.terminal import Screen, closed


def replay(offset: int, data: bytes) -> bytes:
    return b"\3" + offset.to_bytes(8, "big") + data


def pieces(screen: Screen) -> list[tuple[bytes, bool, int, int]]:
    found = []
    while (piece := screen.next()) is not None:
        found.append((piece.data, piece.is_error, piece.offset, piece.lost))
    return found


def test_output_its_offsets_and_what_is_missing() -> None:
    screen = Screen(3)
    screen.take(replay(10, b"old"))
    assert not screen.connected
    screen.take('{"type":"connected","session_id":"p1","mode":"pipe"}')
    screen.take(b"\1out")
    screen.take(b"\2err")
    screen.take(replay(30, b""))
    screen.take(b"\1on")
    assert (screen.connected, screen.mode, screen.offset) == (True, "pipe", 3)
    assert pieces(screen) == [
        (b"old", False, 13, 7), (b"out", False, 16, 0), (b"err", True, 19, 0), (b"", False, 30, 11),
        (b"on", False, 32, 0),
    ]  # fmt: skip
    assert screen.offset == 32
    screen.take('{"type":"exit","exit_code":7}')
    assert (screen.over, screen.exit_code) == (True, 7)


@pytest.mark.parametrize(
    "frame", [b"", b"\3short", b"\x09newer", "", "[1]", "{", '{"type":"pong"}', '{"type":"newer"}']
)
def test_what_is_not_understood_is_passed_over(frame: str | bytes) -> None:
    screen = Screen(0)
    screen.take(frame)
    assert pieces(screen) == []
    assert not screen.over


def test_ends() -> None:
    screen = Screen(0)
    closed(screen, 1000, "")
    screen.take(None)
    assert screen.over
    broken = Screen(9)
    with pytest.raises(SandboxConnectionException, match="since=9"):
        closed(broken, None, "")
    with pytest.raises(SandboxConnectionException, match="taken over"):
        closed(broken, 4001, "TAKEN_OVER")
    with pytest.raises(ServerException, match="no more"):
        broken.take('{"type":"error","code":"RUNTIME_ERROR","error":"no more"}')
    # Whoever typed at the last moment still gets to know the end.
    broken.take('{"type":"error","code":"NOT_RUNNING","error":"The program has ended."}')
    broken.take('{"type":"exit","exit_code":3}')
    assert (broken.exit_code, broken.signal) == (3, None)
    broken.take('{"type":"exit","exit_code":-1,"signal":"SIGTERM"}')
    assert (broken.exit_code, broken.signal) == (-1, "SIGTERM")
