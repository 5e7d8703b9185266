# SPDX-License-Identifier: Apache-2.0
"""Commands in a sandbox."""

from __future__ import annotations

from contextlib import aclosing
from datetime import timedelta
from typing import Any

from opensandbox import models
from opensandbox.concurrency import call
from opensandbox.exceptions import SandboxConnectionException, SandboxException
from opensandbox.executions import (
    SET_ENV,
    Recorder,
    broken,
    command_request,
    ended,
    env_line,
    event_of,
    session_request,
)
from opensandbox.requests import segment
from opensandbox.transport import NO_RETRIES, Connection

_CURSOR = "EXECD-COMMANDS-TAIL-CURSOR"


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
        command: str | list[str],
        *,
        opts: models.RunCommandOpts | None = None,
        handlers: models.ExecutionHandlers | None = None,
    ) -> models.Execution:
        """Run a command and wait for its end; in the background, only for its start.

        A text is run by the shell, a list as it is. A command that fails is no exception: look at
        `exit_code` and `end`. Giving up the wait does not stop the command; `interrupt` does. When the connection
        breaks meanwhile, `SandboxConnectionException.execution` has the id and the output until then.
        """
        opts = opts or models.RunCommandOpts()
        return await self._follow("/command", command_request(command, opts, handlers), handlers, opts.background)

    async def _follow(
        self, path: str, body: dict[str, Any], handlers: models.ExecutionHandlers | None, background: bool = False
    ) -> models.Execution:
        execution = models.Execution()
        recorder = Recorder(execution, handlers, background)
        # Closed here and not by the garbage collector: the connection goes back also when a handler fails.
        async with aclosing(self._execd.events("POST", path, json=body)) as stream:
            while True:
                # Around this line alone: a handler may raise the same exception for a reason of its own.
                try:
                    data = await anext(stream, None)
                except SandboxConnectionException as error:
                    if execution.id is None:
                        raise
                    if ended(execution):
                        break
                    raise broken(execution, error.message, error.request_id) from None
                if data is None:
                    break
                event = event_of(data)
                told = recorder.take(event) if event is not None else None
                if told is not None:
                    await call(*told)
                if background and execution.complete is not None:
                    break
        if not ended(execution):
            raise broken(execution, "the stream of the command's output ended before the command did")
        return execution

    async def interrupt(self, execution_id: str) -> None:
        """Stop a running command and all it started; when this returns it has ended."""
        # Asked twice, the second answer would be that it does not run.
        await self._execd.call("DELETE", "/command", params=[("id", execution_id)], policy=NO_RETRIES)

    async def get_command_status(self, execution_id: str) -> models.CommandStatus:
        """Whether a command still runs, else how it ended."""
        path = f"/command/status/{segment(execution_id, 'execution')}"
        return models.base.parse(models.CommandStatus, (await self._execd.call("GET", path)).content)

    async def get_background_command_logs(self, execution_id: str, cursor: int | None = None) -> models.CommandLogs:
        """Output of a background command, from the byte `cursor` on; ask again with the one returned."""
        path = f"/command/{segment(execution_id, 'execution')}/logs"
        params = [("cursor", str(cursor))] if cursor is not None else []
        response = await self._execd.call("GET", path, params=params, headers={"Accept": "text/plain"})
        position = response.headers.get(_CURSOR, "")
        content = response.content.decode("utf-8", "replace")
        return models.CommandLogs(content=content, cursor=int(position) if position.isdigit() else None)

    async def set_env(self, key: str, value: str) -> None:
        """Set an environment variable for the commands that come after."""
        opts = models.RunCommandOpts(envs={"OPENSANDBOX_LINE": env_line(key, value)}, timeout=timedelta(seconds=30))
        execution = await self.run(SET_ENV, opts=opts)
        if execution.exit_code != 0:
            reason = "".join(message.text for message in execution.logs.stderr) or str(execution.end)
            raise SandboxException(f"cannot set {key}: {reason}")

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
    ) -> models.Execution:
        """As `run`, in the shell of a session."""
        path = f"/session/{segment(session_id, 'session')}/run"
        return await self._follow(path, session_request(command, working_directory, timeout), handlers)

    async def delete_session(self, session_id: str) -> None:
        """End a session and what still runs in it."""
        await self._execd.call("DELETE", f"/session/{segment(session_id, 'session')}")
