# SPDX-License-Identifier: Apache-2.0
"""Commands on the wire: what is sent to run one, and what is made of the events that come back. Pure."""

from __future__ import annotations

import base64
import json
import logging
import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from opensandbox import models
from opensandbox.answers import error_of_body
from opensandbox.exceptions import InvalidArgumentException, SandboxConnectionException
from opensandbox.requests import seconds_of

logger = logging.getLogger("opensandbox")

# Appends a line that travels as a variable of the command, so that nothing of it is read by the shell.
SET_ENV = (
    'test -n "$EXECD_ENVS" || { echo "this sandbox keeps no environment file" >&2; exit 1; }; '
    'mkdir -p "$(dirname "$EXECD_ENVS")" && printf "%s\\n" "$OPENSANDBOX_LINE" >> "$EXECD_ENVS"'
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

Told = tuple[Callable[[Any], Any], Any]


class Recorder:
    """Builds the `Execution` from its events."""

    def __init__(
        self, execution: models.Execution, handlers: models.ExecutionHandlers | None, background: bool
    ) -> None:
        self._execution = execution
        self._handlers = handlers or models.ExecutionHandlers()
        self._background = background

    def take(self, event: dict[str, Any]) -> Told | None:
        """Note an event; the user's function to call about it, and with what, if there is one."""
        name, value = self.note(event)
        handler = getattr(self._handlers, name) if name else None
        return None if handler is None else (handler, value)

    def note(self, event: dict[str, Any]) -> tuple[str, Any]:
        """Note an event; the handler it is for, and the value it carries. Nothing for what carries none."""
        execution, keep = self._execution, not self._handlers.skip_accumulation
        kind, at, text = event["type"], event["timestamp"], event.get("text") or ""
        offset = event.get("offset")
        if type(offset) is int:
            execution.offset = offset
        if kind in ("stdout", "stderr") and self._handlers.on_output:
            # Asked for byte for byte: there are no lines to keep.
            data = _bytes(event, text)
            return "on_output", models.OutputBytes(data=data, timestamp=at, is_error=kind == "stderr")
        if kind == "stdout":
            message = models.OutputMessage(text=text, timestamp=at)
            if keep:
                execution.logs.stdout.append(message)
            return "on_stdout", message
        if kind == "stderr":
            message = models.OutputMessage(text=text, timestamp=at, is_error=True)
            if keep:
                execution.logs.stderr.append(message)
            return "on_stderr", message
        if kind == "init":
            execution.id = text
            framing = event.get("framing")
            execution.framing = framing if isinstance(framing, str) else None
            return "on_init", models.ExecutionInit(id=text, timestamp=at)
        if kind == "result":
            result = _result(event.get("results"), at)
            if keep:
                execution.result.append(result)
            return "on_result", result
        if kind == "error":
            execution.end = _end(event)
            execution.error = _error(event.get("error"), at, execution.end)
            execution.exit_code = _number(execution.error.value)
            return "on_error", execution.error
        if kind == "execution_complete":
            execution.end = _end(event) or execution.end
            complete = models.ExecutionComplete(
                timestamp=at, execution_time_in_millis=event.get("execution_time") or 0, end=execution.end
            )
            execution.complete = complete
            if not self._background and execution.error is None:
                execution.exit_code = 0
            return "on_execution_complete", complete
        if kind == "status" and text:
            notice = models.ExecutionNotice(text=text, timestamp=at)
            execution.notices.append(notice)
            return "on_notice", notice
        if kind == "execution_count":
            execution.execution_count = event.get("execution_count")
        return "", None


class Progress:
    """How far the events of a command have come, so that a stream that breaks can be taken up again."""

    def __init__(self, execution_id: str | None = None, offset: int = 0) -> None:
        self.id = execution_id
        self.offset = offset
        self.ended = False
        # Published daemons keep nothing to come back to. Ours say offsets, and how they frame lines.
        self._kept = execution_id is not None
        self._begun = False

    @property
    def attachable(self) -> bool:
        """Whether the sandbox is one that keeps the output of its commands, and the command is known."""
        return self.id is not None and self._kept

    def take(self, event: dict[str, Any]) -> bool:
        """Note an event; whether it is news. The beginning of a stream that goes on is none."""
        kind, offset = event["type"], event.get("offset")
        if type(offset) is int:
            self.offset, self._kept = offset, True
        if kind == "stdout":
            return True
        if kind == "init":
            first, self._begun = not self._begun, True
            self.id = event.get("text") or self.id
            self._kept = self._kept or event.get("framing") is not None
            return first
        self.ended = self.ended or kind in ("error", "execution_complete")
        return True


def ended(execution: models.Execution) -> bool:
    """Whether the last event was seen."""
    return execution.error is not None or execution.complete is not None


def broken(
    execution: models.Execution, message: str, request_id: str | None = None, *, goes_on: bool = True
) -> SandboxConnectionException:
    """The exception for a command whose end was not heard of."""
    if not execution.id:
        hint = "Nothing is known of the command; the sandbox may have ended."
    elif not goes_on:
        hint = "The command was interrupted with it; the session stays."
    else:
        rest = f", commands.attach({execution.id!r}, offset={execution.offset}) the rest" if execution.offset else ""
        hint = (
            "The command goes on as long as the sandbox does;"
            f" commands.get_command_status({execution.id!r}) tells how it ends{rest}."
        )
    error = SandboxConnectionException(message, request_id=request_id, hint=hint)
    error.execution = execution if execution.id else None
    return error


def command_request(
    command: str | list[str], opts: models.RunCommandOpts, *, exact: bool = False, stdin: bool = False
) -> dict[str, Any]:
    """The body of the request that runs a command. `stdin`: there is something to give it."""
    _expect_a_command(command)
    given = {
        "command": command if isinstance(command, str) else None,
        "argv": None if isinstance(command, str) else list(command),
        "cwd": opts.working_directory,
        "background": opts.background or None,
        "timeout": milliseconds(opts.timeout),
        "uid": opts.uid,
        "gid": opts.gid,
        "envs": opts.envs,
        "exact": exact or None,
        "stdin": stdin or opts.stdin or None,
        "merge": opts.merge,
    }
    return {name: value for name, value in given.items() if value is not None}


def session_request(
    command: str,
    working_directory: str | None,
    timeout: timedelta | None,
    separate: bool = False,
    exact: bool = False,
) -> dict[str, Any]:
    """The body of the request that runs a command in a session."""
    if not isinstance(command, str):
        raise InvalidArgumentException(
            f"a command for a session is a text, not {type(command).__name__}", hint="Write it as for a shell."
        )
    _expect_a_command(command)
    given = {
        "command": command,
        "cwd": working_directory,
        "timeout": milliseconds(timeout),
        "separate": separate or None,
        "exact": exact or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _expect_a_command(command: object) -> None:
    example = 'Such as "ls -l", or ["ls", "-l"].'
    if not isinstance(command, (str, list, tuple)):
        raise InvalidArgumentException(f"a command is a text or a list, not {type(command).__name__}", hint=example)
    if not command:
        raise InvalidArgumentException("the command is empty", hint=example)
    for word in () if isinstance(command, str) else command:
        if not isinstance(word, str):
            raise InvalidArgumentException(f"a command is a list of texts; {word!r:.100} is none", hint=example)


def milliseconds(limit: timedelta | None) -> int | None:
    """A limit of time as the protocol has it; none for None and for 0."""
    if limit is None:
        return None
    if seconds_of(limit, "timeout") < 0:
        raise InvalidArgumentException("timeout must be positive", hint="Leave it out for no limit.")
    # Less than a millisecond is still a limit, and 0 would mean none.
    return max(1, round(limit / timedelta(milliseconds=1))) if limit else None


def event_of(document: str) -> dict[str, Any] | None:
    """An event of the protocol; None for what is not one. An error document in the stream is raised."""
    try:
        event = json.loads(document)
    except ValueError:
        logger.warning("dropped an event that is not JSON: %.200s", document)
        return None
    if not isinstance(event, dict):
        return None
    if isinstance(event.get("type"), str) and isinstance(event.get("timestamp"), int):
        return event
    if isinstance(event.get("code"), str) and isinstance(event.get("message"), str):
        raise error_of_body(500, document.encode())
    logger.warning("dropped an event without type and timestamp: %.200s", document)
    return None


def _end(event: dict[str, Any]) -> models.CommandEnd | None:
    end = event.get("end")
    return models.CommandEnd.model_validate(end) if isinstance(end, dict) and "reason" in end else None


def _error(error: Any, at: int, end: models.CommandEnd | None) -> models.ExecutionError:
    fields = error if isinstance(error, dict) else {}
    return models.ExecutionError(
        name=str(fields.get("ename", "")),
        value=str(fields.get("evalue", "")),
        timestamp=at,
        traceback=[str(line) for line in fields.get("traceback") or ()],
        end=end,
    )


def _result(results: Any, at: int) -> models.ExecutionResult:
    fields = dict(results) if isinstance(results, dict) else {}
    text = fields.pop("text", None)
    extra = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return models.ExecutionResult(text=text if text is None else str(text), timestamp=at, extra_properties=extra)


def _bytes(event: dict[str, Any], text: str) -> bytes:
    """The output of an event; of a sandbox that knows no exact output, its text is the best there is."""
    data = event.get("data")
    if not isinstance(data, str):
        return text.encode("utf-8", "replace")
    try:
        return base64.b64decode(data)
    except ValueError as error:
        raise SandboxConnectionException(f"the command's output cannot be decoded: {error}") from error


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def env_line(key: str, value: str) -> str:
    """A line of the file that execd reads the environment of commands from.

    Single quotes keep everything; a value that contains one, or a line break, is written in double quotes.
    """
    if not _NAME.fullmatch(key):
        raise InvalidArgumentException(f"{key!r} is not a name for an environment variable")
    if "\0" in value:
        raise InvalidArgumentException("an environment variable cannot contain a NUL character")
    if not re.search(r"['\r\n]", value):
        return f"{key}='{value}'"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f'{key}="{escaped}"'
