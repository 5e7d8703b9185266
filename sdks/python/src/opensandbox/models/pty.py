# SPDX-License-Identifier: Apache-2.0
"""Terminals of a sandbox, as values."""

from __future__ import annotations

from opensandbox.models.base import Value


class PtyInfo(Value):
    """A terminal. Its program starts when the first client connects."""

    session_id: str
    running: bool
    output_offset: int
    """Bytes of output so far."""
    exit_code: int | None = None
    """Of the program that ran last; -1 when a signal ended it."""
    mode: str | None = None
    """`pty`, or `pipe` where the first client asked for pipes."""
    connected: bool | None = None
    """Somebody who may type is connected."""
    viewers: int | None = None


class PtyList(Value):
    """The answer to a list of terminals."""

    items: list[PtyInfo]


class PtyCreated(Value):
    """The answer to a create."""

    session_id: str


class PtyOutput(Value):
    """A piece of a terminal's output."""

    data: bytes
    is_error: bool = False
    """Only with pipes; a terminal has one stream."""
    offset: int
    """The byte behind it: connect with `since=` this to go on here."""
    lost: int = 0
    """So many bytes before it are missing: they are not kept any more."""
