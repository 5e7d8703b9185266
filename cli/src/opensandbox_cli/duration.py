# SPDX-License-Identifier: Apache-2.0
"""Spans of time as people write and read them: `1h30m`, `3m ago`."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_SPAN = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?(?:(\d+)ms)?")
_SECONDS = re.compile(r"\d+(\.\d+)?")
_LONGEST = timedelta(days=36500)


def parse(text: str) -> timedelta:
    """`1h30m45s`, `2d`, `500ms`, or a number of seconds.

    >>> parse("1m30s")
    datetime.timedelta(seconds=90)
    """
    text = text.strip().lower()
    if _SECONDS.fullmatch(text):
        seconds = float(text)
    elif text and (match := _SPAN.fullmatch(text)):
        days, hours, minutes, whole, milliseconds = (int(part or 0) for part in match.groups())
        seconds = days * 86400 + hours * 3600 + minutes * 60 + whole + milliseconds / 1000
    else:
        raise ValueError(f"{text!r} is not a duration; write 90s, 10m, 1h30m, or a number of seconds")
    if seconds > _LONGEST.total_seconds():
        raise ValueError(f"{text!r} is longer than a hundred years")
    return timedelta(seconds=seconds)


def parse_or_none(text: str) -> timedelta | None:
    """As `parse`; `none` means no limit."""
    return None if text.strip().lower() == "none" else parse(text)


def brief(span: timedelta) -> str:
    """The span in one or two units, rounded down.

    >>> brief(timedelta(minutes=90))
    '1h30m'
    """
    seconds = int(span.total_seconds())
    if seconds < 60:
        return f"{seconds}s"
    minutes, seconds = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}m{seconds}s" if seconds and minutes < 10 else f"{minutes}m"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}h{minutes}m" if minutes and hours < 10 else f"{hours}h"
    return f"{hours // 24}d"


def relative(moment: datetime | None, now: datetime | None = None) -> str:
    """How far a moment is from now: `3m ago`, `in 7m`; `never` when there is none."""
    if moment is None:
        return "never"
    distance = moment - (now or datetime.now(UTC))
    if distance >= timedelta():
        return f"in {brief(distance)}"
    return f"{brief(-distance)} ago"
