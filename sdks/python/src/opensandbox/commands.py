# SPDX-License-Identifier: Apache-2.0
"""Commands in a sandbox."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import timedelta
from typing import Any
from urllib.parse import quote

from opensandbox import models
from opensandbox.concurrency import call
from opensandbox.exceptions import InvalidArgumentException, SandboxConnectionException, SandboxException
from opensandbox.sse import EventSplitter
from opensandbox.transport import NO_RETRIES, REQUEST_ID_HEADER, Connection, error_of_body, translated

logger = logging.getLogger("opensandbox")

_CURSOR = "EXECD-COMMANDS-TAIL-CURSOR"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Commands:
    """`sandbox.commands`

    execution = await sandbox.commands.run("ls /")
    print(execution.exit_code, execution.text)
    """

    def __init__(self, execd: Connection) -> None:
        self._execd = execd

    async def run(
        self,
        command: str | list[str],
        *,
        opts: models.RunCommandOpts | None = None,
        handlers: models.ExecutionHandlers | None = None,
    ) -> models.Execution:
        """Run a command and wait for its end; in the background, only for its start.

        A text is run by the shell, a list as it is. A command that fails is no exception: look at
        `exit_code` and `end`. Cancelling stops the waiting, not the command; `interrupt` stops it. When the
        connection breaks meanwhile, `SandboxConnectionException.execution` has the id and the output until then.
        """
        opts = opts or models.RunCommandOpts()
        execution = models.Execution()
        recorder = _Recorder(execution, handlers, opts.background)
        # Closed here and not by the garbage collector: the connection goes back also when a handler fails.
        async with aclosing(self._events(_request(command, opts))) as events:
            while True:
                # Around this line alone: a handler may raise the same exception for a reason of its own.
                try:
                    event = await anext(events, None)
                except SandboxConnectionException as error:
                    if execution.id is None:
                        raise
                    if _ended(execution):
                        break
                    raise _broken(execution, error.message, error.request_id) from None
                if event is None:
                    break
                await recorder.take(event)
                if opts.background and execution.complete is not None:
                    break
        if not _ended(execution):
            raise _broken(execution, "the stream of the command's output ended before the command did")
        return execution

    async def _events(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-cache"}
        splitter = EventSplitter()
        async with self._execd.stream("POST", "/command", json=body, headers=headers, endless=True) as response:
            chunks = response.aiter_raw()
            request_id = response.request.headers.get(REQUEST_ID_HEADER)
            while True:
                with translated("POST", self._execd.base_url, request_id):
                    chunk = await anext(chunks, None)
                for document in splitter.finish() if chunk is None else splitter.feed(chunk):
                    event = _event(document)
                    if event is not None:
                        yield event
                if chunk is None:
                    return

    async def interrupt(self, execution_id: str) -> None:
        """Stop a running command and all it started; when this returns it has ended."""
        # Asked twice, the second answer would be that it does not run.
        await self._execd.call("DELETE", "/command", params=[("id", execution_id)], policy=NO_RETRIES)

    async def get_command_status(self, execution_id: str) -> models.CommandStatus:
        """Whether a command still runs, else how it ended."""
        return models.base.parse(
            models.CommandStatus, (await self._execd.call("GET", f"/command/status/{_id(execution_id)}")).content
        )

    async def get_background_command_logs(self, execution_id: str, cursor: int | None = None) -> models.CommandLogs:
        """Output of a background command, from the byte `cursor` on; ask again with the one returned."""
        params = [("cursor", str(cursor))] if cursor is not None else []
        headers = {"Accept": "text/plain"}
        response = await self._execd.call("GET", f"/command/{_id(execution_id)}/logs", params=params, headers=headers)
        position = response.headers.get(_CURSOR, "")
        content = response.content.decode("utf-8", "replace")
        return models.CommandLogs(content=content, cursor=int(position) if position.isdigit() else None)

    async def set_env(self, key: str, value: str) -> None:
        """Set an environment variable for the commands that come after."""
        if not _NAME.fullmatch(key):
            raise InvalidArgumentException(f"{key!r} is not a name for an environment variable")
        if "\0" in value:
            raise InvalidArgumentException("an environment variable cannot contain a NUL character")
        # The line travels as a variable of the command, so nothing of it is read by the shell.
        script = (
            'test -n "$EXECD_ENVS" || { echo "this sandbox keeps no environment file" >&2; exit 1; }; '
            'mkdir -p "$(dirname "$EXECD_ENVS")" && printf "%s\\n" "$OPENSANDBOX_LINE" >> "$EXECD_ENVS"'
        )
        opts = models.RunCommandOpts(envs={"OPENSANDBOX_LINE": env_line(key, value)}, timeout=timedelta(seconds=30))
        execution = await self.run(script, opts=opts)
        if execution.exit_code != 0:
            reason = "".join(message.text for message in execution.logs.stderr) or str(execution.end)
            raise SandboxException(f"cannot set {key}: {reason}")


class _Recorder:
    """Builds the `Execution` from its events, and tells the handlers."""

    def __init__(
        self, execution: models.Execution, handlers: models.ExecutionHandlers | None, background: bool
    ) -> None:
        self._execution = execution
        self._handlers = handlers or models.ExecutionHandlers()
        self._background = background

    async def take(self, event: dict[str, Any]) -> None:
        execution, handlers = self._execution, self._handlers
        kind, at, text = event["type"], event["timestamp"], event.get("text") or ""
        if kind == "stdout":
            message = models.OutputMessage(text=text, timestamp=at)
            if not handlers.skip_accumulation:
                execution.logs.stdout.append(message)
            if handlers.on_stdout:
                await call(handlers.on_stdout, message)
        elif kind == "stderr":
            message = models.OutputMessage(text=text, timestamp=at, is_error=True)
            if not handlers.skip_accumulation:
                execution.logs.stderr.append(message)
            if handlers.on_stderr:
                await call(handlers.on_stderr, message)
        elif kind == "init":
            execution.id = text
            if handlers.on_init:
                await call(handlers.on_init, models.ExecutionInit(id=text, timestamp=at))
        elif kind == "result":
            result = _result(event.get("results"), at)
            if not handlers.skip_accumulation:
                execution.result.append(result)
            if handlers.on_result:
                await call(handlers.on_result, result)
        elif kind == "execution_count":
            execution.execution_count = event.get("execution_count")
        elif kind == "error":
            execution.error = _error(event.get("error"), at)
            execution.end = _end(event)
            execution.exit_code = _number(execution.error.value)
            if handlers.on_error:
                await call(handlers.on_error, execution.error)
        elif kind == "execution_complete":
            complete = models.ExecutionComplete(timestamp=at, execution_time_in_millis=event.get("execution_time") or 0)
            execution.complete = complete
            execution.end = _end(event) or execution.end
            if not self._background and execution.error is None:
                execution.exit_code = 0
            if handlers.on_execution_complete:
                await call(handlers.on_execution_complete, complete)


def _ended(execution: models.Execution) -> bool:
    return execution.error is not None or execution.complete is not None


def _broken(execution: models.Execution, message: str, request_id: str | None = None) -> SandboxConnectionException:
    """The exception for a command whose end was not heard of."""
    broken = SandboxConnectionException(
        message,
        request_id=request_id,
        hint="The command goes on as long as the sandbox does;"
        f" commands.get_command_status({execution.id!r}) tells how it ends."
        if execution.id
        else "Nothing is known of the command; the sandbox may have ended.",
    )
    broken.execution = execution if execution.id else None
    return broken


def _request(command: str | list[str], opts: models.RunCommandOpts) -> dict[str, Any]:
    if not command:
        raise InvalidArgumentException("the command is empty")
    given = {
        "command": command if isinstance(command, str) else None,
        "argv": None if isinstance(command, str) else list(command),
        "cwd": opts.working_directory,
        "background": opts.background or None,
        # Less than a millisecond is still a limit, and 0 would mean none.
        "timeout": max(1, round(opts.timeout / timedelta(milliseconds=1))) if opts.timeout is not None else None,
        "uid": opts.uid,
        "gid": opts.gid,
        "envs": opts.envs,
    }
    return {name: value for name, value in given.items() if value is not None}


def _event(document: str) -> dict[str, Any] | None:
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


def _error(error: Any, at: int) -> models.ExecutionError:
    fields = error if isinstance(error, dict) else {}
    return models.ExecutionError(
        name=str(fields.get("ename", "")),
        value=str(fields.get("evalue", "")),
        timestamp=at,
        traceback=[str(line) for line in fields.get("traceback") or ()],
    )


def _result(results: Any, at: int) -> models.ExecutionResult:
    fields = dict(results) if isinstance(results, dict) else {}
    text = fields.pop("text", None)
    extra = {key: value if isinstance(value, str) else json.dumps(value) for key, value in fields.items()}
    return models.ExecutionResult(text=text if text is None else str(text), timestamp=at, extra_properties=extra)


def _number(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _id(execution_id: str) -> str:
    if not execution_id:
        raise InvalidArgumentException("the execution id is empty")
    return quote(execution_id, safe="")


def env_line(key: str, value: str) -> str:
    """A line of the file that execd reads the environment of commands from.

    Single quotes keep everything; a value that contains one, or a line break, is written in double quotes.
    """
    if not re.search(r"['\r\n]", value):
        return f"{key}='{value}'"
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$")
    escaped = escaped.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    return f'{key}="{escaped}"'
