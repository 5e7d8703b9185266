# SPDX-License-Identifier: Apache-2.0
"""Commands in a sandbox."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from datetime import timedelta
from io import IOBase
from types import TracebackType
from typing import Any, Self, TypeAlias

from opensandbox import models
from opensandbox.concurrency import Pieces, beside, call, shielded, sleep
from opensandbox.constants import CLEANUP_LIMIT
from opensandbox.content import Content, content_of, raw_headers
from opensandbox.exceptions import (
    ConflictException,
    InvalidArgumentException,
    NotFoundException,
    SandboxApiException,
    SandboxConnectionException,
    SandboxException,
)
from opensandbox.executions import (
    SET_ENV,
    Progress,
    Recorder,
    broken,
    command_request,
    ended,
    env_line,
    event_of,
    session_request,
)
from opensandbox.requests import segment
from opensandbox.retry import Failure, RetryEvent
from opensandbox.transport import NO_RETRIES, Connection

logger = logging.getLogger("opensandbox")

_CURSOR = "EXECD-COMMANDS-TAIL-CURSOR"
_LOST = "EXECD-COMMANDS-LOST-BYTES"
_KEY = "Idempotency-Key"
# Input is taken when the program wants it, and that may be much later.
_INPUT_LIMIT = timedelta(days=7)

# `list` is a method below.
Words: TypeAlias = list[str]
Statuses: TypeAlias = "list[models.CommandStatus]"
Sessions: TypeAlias = "list[models.SessionInfo]"
Input: TypeAlias = str | bytes | IOBase | Pieces
Happening: TypeAlias = (
    "models.ExecutionInit | models.OutputMessage | models.OutputBytes | models.ExecutionResult"
    " | models.ExecutionNotice | models.ExecutionError | models.ExecutionComplete"
)


class Commands:
    """`sandbox.commands`

        execution = await sandbox.commands.run("ls /")
        print(execution.exit_code, execution.text)

    A command that fails is no exception; its exit code tells.
    """

    def __init__(self, execd: Connection) -> None:
        self._execd = execd

    async def run(
        self,
        command: str | Words,
        *,
        opts: models.RunCommandOpts | None = None,
        handlers: models.ExecutionHandlers | None = None,
        stdin: Input | None = None,
    ) -> models.Execution:
        """Run a command and wait for its end; in the background, only for its start.

        A text is run by the shell, a list as it is. A command that fails is no exception: look at
        `exit_code` and `end`. Giving up the wait does not stop the command; `interrupt` does.

        `stdin` is what the command reads: text, bytes, an open file or an iterator, streamed while it runs.

            sorted_lines = await sandbox.commands.run("sort", stdin="b\\na\\n")
            assert sorted_lines.text == "a\\nb"

        A connection that breaks meanwhile is made again, as often as the `retry_policy` allows, and goes on where it
        broke: every byte comes once, and the command is not started twice. When it cannot be made again,
        `SandboxConnectionException.execution` has the id and the output until then.
        """
        opts = opts or models.RunCommandOpts()
        exact = handlers is not None and handlers.on_output is not None
        body = command_request(command, opts, exact=exact, stdin=stdin is not None)
        if stdin is not None and opts.background:
            raise InvalidArgumentException(
                "stdin is for commands that are waited for", hint="Give opts stdin=True, and use write_stdin."
            )
        source = self._started(body, opts)
        if stdin is None:
            return await recorded(source, handlers, opts.background)
        feeder = _Feeder(self, content_of(stdin))
        execution = await recorded(source, handlers, started=feeder)
        if feeder.failed is not None:
            raise feeder.failed
        return execution

    async def attach(
        self, execution_id: str, offset: int = 0, handlers: models.ExecutionHandlers | None = None
    ) -> models.Execution:
        """Follow a command that runs, or that has ended, to its end; any number of times, from any process.

            started = await sandbox.commands.run("echo one; echo two", opts=RunCommandOpts(background=True))
            execution = await sandbox.commands.attach(started.id)
            assert execution.text == "one\\ntwo"

        `offset` is the byte of its output to begin with, such as the `offset` of an `Execution` that was not followed
        to its end.
        """
        exact = handlers is not None and handlers.on_output is not None
        return await recorded(self._attached(execution_id, offset, exact), handlers)

    async def stream(
        self, command: str | Words, *, opts: models.RunCommandOpts | None = None, exact: bool = False
    ) -> AsyncGenerator[Happening, None]:
        """Run a command, and get what happens as it happens: its id, its output, its end.

            async for event in sandbox.commands.stream("echo one; echo two"):
                if isinstance(event, OutputMessage):
                    print(event.text)

        The first event is an `ExecutionInit`, the last an `ExecutionComplete` or `ExecutionError`, whose `end` says
        how it ended. `exact` gives output as `OutputBytes`, just as it is written. Leaving the loop does not stop the
        command.
        """
        opts = opts or models.RunCommandOpts()
        handlers = models.ExecutionHandlers(on_output=_ignored if exact else None, skip_accumulation=True)
        execution = models.Execution()
        recorder = Recorder(execution, handlers, opts.background)
        async with aclosing(self._started(command_request(command, opts, exact=exact), opts)) as events:
            while True:
                try:
                    event = await anext(events, None)
                except SandboxConnectionException as error:
                    _heard(execution, error)
                    return
                if event is None:
                    return
                _, value = recorder.note(event)
                if value is not None:
                    yield value
                if opts.background and execution.complete is not None:
                    return

    async def write_stdin(self, execution_id: str, data: Input, *, close: bool = False) -> int:
        """Give a running command input, and wait until it has taken it; how many bytes that were.

        The command was started with `RunCommandOpts(stdin=True)`. `data` is text, bytes, an open file or an iterator.
        `close` ends the input behind it. A `ConflictException` says that the command wants no input any more.
        """
        return await self._write(execution_id, content_of(data), close)

    async def close_stdin(self, execution_id: str) -> None:
        """End the input of a running command, as Ctrl-D does."""
        await self._write(execution_id, content_of(b""), close=True)

    async def _write(self, execution_id: str, content: Content, close: bool) -> int:
        response = await self._optional("Input of a running command").call(
            "POST",
            f"/command/{segment(execution_id, 'execution')}/stdin",
            params=[("close", "true")] if close else [],
            body=content.chunks,
            headers=raw_headers(content.size),
            timeout=_INPUT_LIMIT,
        )
        return models.base.parse(models.InputTaken, response.content).bytes

    async def list(self, running: bool | None = None, limit: int = 100) -> Statuses:
        """Commands that run, and that ran in the last 24 hours; newest first.

        `running` True or False asks only for those that run, or that have ended.
        """
        params = [("limit", str(limit))]
        if running is not None:
            params.append(("running", "true" if running else "false"))
        response = await self._optional("Listing commands").call("GET", "/commands", params=params)
        return models.base.parse(models.CommandList, response.content).items

    async def interrupt(self, execution_id: str) -> None:
        """Stop a running command and all it started; when this returns it has ended."""
        # Asked twice, the second answer would be that it does not run.
        await self._execd.call("DELETE", "/command", params=[("id", execution_id)], policy=NO_RETRIES)

    async def get_command_status(self, execution_id: str) -> models.CommandStatus:
        """Whether a command still runs, else how it ended."""
        path = f"/command/status/{segment(execution_id, 'execution')}"
        return models.base.parse(models.CommandStatus, (await self._execd.call("GET", path)).content)

    async def get_background_command_logs(
        self, execution_id: str, cursor: int | None = None, stream: str | None = None
    ) -> models.CommandLogs:
        """Output of a command, from the byte `cursor` on; ask again with the one returned.

        `stream`, `stdout` or `stderr`, asks for one stream of a command that kept them apart (`merge=False` in the
        background); the cursor then counts its bytes alone.
        """
        path = f"/command/{segment(execution_id, 'execution')}/logs"
        given = [("cursor", cursor), ("stream", stream)]
        params = [(name, str(value)) for name, value in given if value is not None]
        response = await self._execd.call("GET", path, params=params, headers={"Accept": "text/plain"})
        position, lost = response.headers.get(_CURSOR, ""), response.headers.get(_LOST, "")
        return models.CommandLogs(
            content=response.content.decode("utf-8", "replace"),
            cursor=int(position) if position.isdigit() else None,
            lost_bytes=int(lost) if lost.isdigit() else 0,
        )

    async def set_env(self, key: str, value: str) -> None:
        """Set an environment variable for the commands that come after."""
        opts = models.RunCommandOpts(envs={"OPENSANDBOX_LINE": env_line(key, value)}, timeout=timedelta(seconds=30))
        execution = await self.run(SET_ENV, opts=opts)
        if execution.exit_code != 0:
            reason = "".join(message.text for message in execution.logs.stderr) or str(execution.end)
            raise SandboxException(f"cannot set {key}: {reason}")

    # --- sessions -----------------------------------------------------------------------------------

    def session(self, *, working_directory: str | None = None) -> Shell:
        """A shell for a block of calls: opened with it, and ended with it.

            async with sandbox.commands.session(working_directory="/tmp") as shell:
                await shell.run("greeting=hello")
                print((await shell.run('echo "$greeting from $PWD"')).text)

        Variables, functions, options, jobs and the directory stay from one command to the next.
        """
        return Shell(self, working_directory)

    async def create_session(self, *, working_directory: str | None = None) -> str:
        """A shell that keeps its directory and variables between commands; the id to run them with."""
        body = None if working_directory is None else {"cwd": working_directory}
        response = await self._execd.call("POST", "/session", json=body)
        return models.base.parse(models.CommandSession, response.content).session_id

    async def run_in_session(
        self,
        session_id: str,
        command: str,
        *,
        working_directory: str | None = None,
        timeout: timedelta | None = None,
        handlers: models.ExecutionHandlers | None = None,
        separate: bool = False,
    ) -> models.Execution:
        """As `run`, in the shell of a session. Commands of one session wait for each other.

        Both streams come as one, in their order, unless they are to be kept `separate`. Giving up the wait interrupts
        the command, as Ctrl-C would; the session stays.
        """
        path = f"/session/{segment(session_id, 'session')}/run"
        exact = handlers is not None and handlers.on_output is not None
        body = session_request(command, working_directory, timeout, separate, exact)
        return await recorded(events_of(self._execd, "POST", path, body), handlers, goes_on=False)

    async def list_sessions(self) -> Sessions:
        """The sessions that are open, oldest first."""
        response = await self._optional("Listing sessions").call("GET", "/sessions")
        return models.base.parse(models.SessionList, response.content).items

    async def delete_session(self, session_id: str) -> None:
        """End a session and what still runs in it."""
        await self._execd.call("DELETE", f"/session/{segment(session_id, 'session')}")

    # --- streams ------------------------------------------------------------------------------------

    def _optional(self, what: str) -> Connection:
        return self._execd.below("", what)

    async def _started(self, body: dict[str, Any], opts: models.RunCommandOpts) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a new command, each once. It is started once, however often that has to be asked for."""
        key = {_KEY: opts.idempotency_key or os.urandom(16).hex()}
        progress = Progress()
        tries = _Tries(self._execd)
        while True:
            try:
                async with aclosing(self._execd.events("POST", "/command", json=body, headers=key)) as stream:
                    async for data in stream:
                        event = event_of(data)
                        if event is not None and progress.take(event):
                            yield event
                why = SandboxConnectionException("the stream of the command's output ended before the command did")
            except SandboxConnectionException as error:
                why = error
            if progress.ended:
                return
            if progress.id is not None and not opts.background:
                break
            # Nothing was heard of it, so the same request may be made again: if this daemon knows keys.
            if not (progress.attachable or await self._knows_keys()):
                raise why
            await tries.again(why, "POST", "/command")
        if not progress.attachable:
            raise why
        async with aclosing(self._going_on(progress, bool(body.get("exact")), why)) as events:
            async for event in events:
                yield event

    async def _attached(self, execution_id: str, offset: int, exact: bool) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._going_on(Progress(execution_id, offset), exact)) as events:
            async for event in events:
                yield event

    async def _going_on(
        self, progress: Progress, exact: bool, why: SandboxConnectionException | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a command from an offset on. `why` the stream before this one broke, if there was one."""
        path = f"/command/{segment(progress.id or '', 'execution')}/attach"
        execd = self._optional("Following a command again")
        tries = _Tries(execd)
        while True:
            if why is not None:
                await tries.again(why, "GET", path)
            before = progress.offset
            params = [("offset", str(progress.offset)), *([("exact", "true")] if exact else [])]
            try:
                async with aclosing(execd.events("GET", path, params=params)) as stream:
                    async for data in stream:
                        event = event_of(data)
                        if event is not None and progress.take(event):
                            yield event
                            if progress.offset > before:
                                tries.reset()
                broke = SandboxConnectionException("the stream of the command's output ended before the command did")
            except SandboxConnectionException as error:
                if error.is_retryable:
                    raise  # there is nobody to connect to, and that was tried often enough
                broke = error
            except SandboxApiException as error:
                if why is None:
                    raise
                raise SandboxConnectionException(
                    f"{why.message}; it cannot be followed any further: {error.message}", request_id=error.request_id
                ) from None
            if progress.ended:
                return
            why = broke

    async def _knows_keys(self) -> bool:
        # The list came with the keys.
        try:
            await self._execd.call("GET", "/commands", params=[("limit", "1")])
        except SandboxException:
            return False
        return True


class _Tries:
    """How often a stream was taken up again without getting any further."""

    def __init__(self, connection: Connection) -> None:
        self._policy = connection.config.retry_policy
        self._base_url = connection.base_url
        self.reset()

    def reset(self) -> None:
        self._count, self._pause = 0, timedelta()

    async def again(self, why: SandboxConnectionException, method: str, path: str) -> None:
        """Wait before the next one; `why` is raised when there were enough. The first comes at once."""
        delay = self._policy.delay(self._count, self._pause)
        if self._count >= self._policy.max_retries or delay is None:
            raise why
        pause = delay if self._count else timedelta()
        logger.debug("%s; going on in %.1f s", why, pause.total_seconds())
        if self._policy.on_retry:
            url = self._base_url + path
            self._policy.on_retry(RetryEvent(method, url, self._count, Failure.BROKEN, None, pause))
        self._count, self._pause = self._count + 1, delay
        if pause:
            await sleep(pause)


class _Feeder:
    """Gives a command its input while its output is read."""

    def __init__(self, commands: Commands, content: Content) -> None:
        self._commands = commands
        self._content = content
        self._id = ""
        self.failed: Exception | None = None

    def told(self, execution_id: str) -> None:
        self._id = execution_id

    async def feed(self) -> None:
        try:
            await self._commands._write(self._id, self._content, close=True)
        except (ConflictException, NotFoundException):
            pass  # it has ended, or reads no more: as a program at the end of a pipe may
        except Exception as error:
            self.failed = error
            # It would wait for the rest for ever.
            try:
                await self._commands.interrupt(self._id)
            except SandboxException as beside_the_point:
                logger.debug("%s", beside_the_point)


class Shell:
    """A session as a block of code; `commands.session` makes it."""

    def __init__(self, commands: Commands, working_directory: str | None) -> None:
        self._commands = commands
        self._working_directory = working_directory
        self._id = ""

    @property
    def id(self) -> str:
        """The session's id."""
        return self._id

    async def run(
        self,
        command: str,
        *,
        working_directory: str | None = None,
        timeout: timedelta | None = None,
        handlers: models.ExecutionHandlers | None = None,
        separate: bool = False,
    ) -> models.Execution:
        """Run a command in this shell, after those that were asked for before."""
        return await self._commands.run_in_session(
            self._id,
            command,
            working_directory=working_directory,
            timeout=timeout,
            handlers=handlers,
            separate=separate,
        )

    async def __aenter__(self) -> Self:
        self._id = await self._commands.create_session(working_directory=self._working_directory)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with shielded(CLEANUP_LIMIT):
            await self._commands.delete_session(self._id)


async def events_of(execd: Connection, method: str, path: str, body: object) -> AsyncGenerator[dict[str, Any], None]:
    """The events of an answer that are known here."""
    async with aclosing(execd.events(method, path, json=body)) as stream:
        async for data in stream:
            event = event_of(data)
            if event is not None:
                yield event


async def recorded(
    events: AsyncGenerator[dict[str, Any], None],
    handlers: models.ExecutionHandlers | None,
    background: bool = False,
    *,
    started: _Feeder | None = None,
    goes_on: bool = True,
) -> models.Execution:
    """Make an `Execution` of events, and tell the handlers. `goes_on`: when nobody listens, the command does."""
    execution = models.Execution()
    recorder = Recorder(execution, handlers, background)
    # Closed here and not by the garbage collector: the connection goes back also when a handler fails.
    async with aclosing(events), AsyncExitStack() as stack:
        while True:
            # Around this line alone: a handler may raise the same exception for a reason of its own.
            try:
                event = await anext(events, None)
            except SandboxConnectionException as error:
                _heard(execution, error, goes_on)
                break
            if event is None:
                break
            told = recorder.take(event)
            if started is not None and event["type"] == "init":
                started.told(execution.id or "")
                await stack.enter_async_context(beside(started.feed))
            if told is not None:
                await call(*told)
            if background and execution.complete is not None:
                break
    if not ended(execution):
        raise broken(execution, "the stream of the command's output ended before the command did", goes_on=goes_on)
    return execution


def _heard(execution: models.Execution, error: SandboxConnectionException, goes_on: bool = True) -> None:
    """Passes over a stream that broke when all had been told; otherwise says what is known."""
    if ended(execution):
        return
    if execution.id is None:
        raise error
    raise broken(execution, error.message, error.request_id, goes_on=goes_on) from None


def _ignored(_: object) -> None:
    return None
