# SPDX-License-Identifier: Apache-2.0
"""Frames of a terminal's WebSocket, made into output. Pure: frames in, values out."""

from __future__ import annotations

import json
from collections import deque

from opensandbox import models
from opensandbox.answers import error_of_body
from opensandbox.exceptions import SandboxConnectionException

# The replay is at most 1 MiB; nothing else is as large.
LARGEST_FRAME = 4 << 20
LARGEST_SIDE = 65535
SIGNALS = ("SIGINT", "SIGTERM", "SIGKILL", "SIGQUIT", "SIGHUP")

_STDOUT, _STDERR, _REPLAY = 1, 2, 3
_NORMAL, _TAKEN_OVER = 1000, 4001
# What was typed as the program ended. How it ended comes behind this.
_TOO_LATE = "NOT_RUNNING"


class Screen:
    """What a terminal has shown."""

    def __init__(self, since: int) -> None:
        self.offset = since
        self.mode = "pty"
        self.connected = False
        self.over = False
        self.exit_code: int | None = None
        self.signal: str | None = None
        self._arrived = since
        self._waiting: deque[models.PtyOutput] = deque()

    def next(self) -> models.PtyOutput | None:
        """The next piece of output that is here."""
        if not self._waiting:
            return None
        piece = self._waiting.popleft()
        self.offset = piece.offset
        return piece

    def take(self, frame: str | bytes | None) -> None:
        """A frame that came; None is the end."""
        if frame is None:
            self.connected = self.over = True
        elif isinstance(frame, str):
            self._told(frame)
        elif frame[:1] and frame[0] in (_STDOUT, _STDERR):
            self._output(frame[1:], frame[0] == _STDERR, self._arrived)
        elif frame[:1] and frame[0] == _REPLAY and len(frame) >= 9:
            self._output(frame[9:], False, int.from_bytes(frame[1:9], "big"))
        # Others are of a newer sandbox.

    def _output(self, data: bytes, is_error: bool, start: int) -> None:
        lost = max(0, start - self._arrived)
        self._arrived = start + len(data)
        if data or lost:
            self._waiting.append(models.PtyOutput(data=data, is_error=is_error, offset=self._arrived, lost=lost))

    def _told(self, frame: str) -> None:
        try:
            notice = json.loads(frame)
        except ValueError:
            return
        if not isinstance(notice, dict):
            return
        kind = notice.get("type")
        if kind == "connected":
            self.connected, self.mode = True, str(notice.get("mode", "pty"))
        elif kind == "exit":
            code = notice.get("exit_code")
            self.connected, self.over, self.exit_code = True, True, code if isinstance(code, int) else -1
            ended_by = notice.get("signal")
            self.signal = ended_by if isinstance(ended_by, str) else None
        elif kind == "error" and notice.get("code") != _TOO_LATE:
            document = {"code": notice.get("code"), "message": notice.get("error") or "the terminal failed"}
            raise error_of_body(500, json.dumps(document).encode())


def closed(screen: Screen, code: int | None, reason: str) -> None:
    """What it means that the other side closed the connection: the end of the output, or an exception."""
    if code == _NORMAL or screen.over:
        return
    if code == _TAKEN_OVER:
        raise SandboxConnectionException(
            "another client has taken over this terminal", hint="Connect as viewer to watch, or with takeover=True."
        )
    raise SandboxConnectionException(
        f"the connection to the terminal broke{f': {code} {reason}'.rstrip() if code else ''}",
        hint=f"Its program goes on; connect again with since={screen.offset}.",
    )
