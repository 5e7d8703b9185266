# SPDX-License-Identifier: Apache-2.0
"""The server's log: one record, one line, and in it what the record is about.

As JSON for machines, as text for a terminal. What a client or a sandbox said is data: it cannot begin a new line, and
it cannot move the cursor of whoever reads.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, TextIO

from . import context

ACCESS = "opensandbox_server.access"
"""The logger of one line per request."""
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ENCODE = json.JSONEncoder(separators=(",", ":"), default=str).encode
_LEVELS = {"WARNING": "warn", "CRITICAL": "error"}
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def start(level: str, style: str | None, stream: TextIO | None = None) -> None:
    """Write records to `stream` (standard error): `json` or `text`; None: text on a terminal, JSON elsewhere."""
    stream = stream or sys.stderr
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Text() if (style or ("text" if stream.isatty() else "json")) == "text" else Json())
    # No line of ours names a thread, a process or a place in the source, and finding them is half the cost of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    # What it says at INFO is said better by the lines on standard output.
    logging.getLogger("uvicorn.error").setLevel(max(logging.WARNING, logging.getLevelNamesMapping()[level]))


def about(record: logging.LogRecord) -> dict[str, str]:
    """What the record is about: request, sandbox, trace. Absent: nothing known."""
    place = context.trace.get()
    known = {
        "requestId": context.request_id.get(),
        "sandboxId": context.sandbox_id.get() or _mentioned(record),
        "traceId": place.trace_id if place else "",
    }
    return {name: value for name, value in known.items() if value}


class Json(logging.Formatter):
    """One JSON object a line, with the names that sandboxd, ingress and execd use too.

    >>> Json().format(logging.makeLogRecord({"msg": "two\\nlines", "created": 0.0, "name": "x"}))
    '{"ts":"1970-01-01T00:00:00.000Z","level":"info","msg":"two\\\\nlines","component":"server","logger":"x"}'
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "ts": _time(record),
            "level": _LEVELS.get(record.levelname, record.levelname.lower()),
            "msg": record.getMessage(),
            "component": "server",
            "logger": record.name,
            **about(record),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return _ENCODE(line)  # ASCII: no character can end the line


class Text(logging.Formatter):
    """For people: the record on one line, a traceback set off below it."""

    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        known = {**about(record), **{name: fields[name] for name in ("client", "tenant") if name in fields}}
        short = " ".join(f"{name}={_flat(value)}" for name, value in known.items() if name != "traceId")
        line = f"{_time(record)} {record.levelname:<7} {record.name.removeprefix('opensandbox_server.')}: "
        line += _flat(record.getMessage())
        if short:
            line += f" [{short}]"
        if record.exc_info:
            for part in self.formatException(record.exc_info).split("\n"):
                line += f"\n  | {_flat(part)}"
        return line


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def _flat(text: str) -> str:
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def _mentioned(record: logging.LogRecord) -> str:
    """The sandbox that the message names, if the work at hand does not: `log.warning("sandbox %s ...", its_id)`."""
    arguments = record.args if isinstance(record.args, tuple) else ()
    for argument in arguments:
        if isinstance(argument, str) and _UUID.fullmatch(argument):
            return argument
    return ""
