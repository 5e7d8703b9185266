# SPDX-License-Identifier: Apache-2.0
"""Contexts, and cells in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Any

from pydantic import TypeAdapter

from code_interpreter.models.code import CodeContext, run_request
from opensandbox import models
from opensandbox.commands import recorded
from opensandbox.exceptions import SandboxConnectionException
from opensandbox.executions import event_of
from opensandbox.requests import segment
from opensandbox.transport import NO_RETRIES, Connection

_CONTEXTS = TypeAdapter(list[CodeContext])


class Codes:
    """`interpreter.codes`

        context = await interpreter.codes.create_context("python")
        await interpreter.codes.run("x = 1", context=context)
        execution = await interpreter.codes.run("x + 1", context=context)
        print(execution.result[0].text)  # 2

    Code that fails is no exception here; `execution.error` tells.
    """

    def __init__(self, execd: Connection, ready: Callable[[], Awaitable[None]] | None = None) -> None:
        """Use `CodeInterpreter.create`. `ready` is waited for before anything is asked."""
        self._execd = execd.below("", "Running code")
        self._ready = ready

    async def run(
        self,
        code: str,
        *,
        language: str | None = None,
        context: CodeContext | None = None,
        handlers: models.ExecutionHandlers | None = None,
        timeout: timedelta | None = None,
        envs: dict[str, str] | None = None,
    ) -> models.Execution:
        """Run a cell and wait for its end. The value of its last line is in `result`, an exception in `error`.

            execution = await interpreter.codes.run("print('hi')\\n6 * 7")
            print(execution.logs.stdout[0].text, execution.result[0].text)  # hi 42

        Without a context it runs in the default one of the language, which is Python unless another is named.
        After `timeout` the cell is interrupted and the context stays. `envs` are set in the context before the cell
        runs. Giving up the wait does not stop the cell; `interrupt` does.
        """
        await self._wait()
        body = run_request(code, language, context, timeout, envs)
        try:
            execution = await recorded(self._events("/code", body), handlers)
        except SandboxConnectionException as error:
            if error.execution is None:
                raise
            broken = SandboxConnectionException(
                error.message,
                request_id=error.request_id,
                hint=f"The cell goes on in its context {error.execution.id}; codes.interrupt stops it.",
            )
            broken.execution = error.execution
            raise broken from None
        # A cell has no exit code; what looks like one is the text of an exception.
        execution.exit_code = None
        return execution

    async def create_context(
        self, language: str, *, working_directory: str | None = None, envs: dict[str, str] | None = None
    ) -> CodeContext:
        """A context of its own; it lives until it is deleted or the sandbox ends."""
        await self._wait()
        given = {"language": language, "cwd": working_directory, "envs": envs}
        body = {name: value for name, value in given.items() if value is not None}
        return models.base.parse(CodeContext, (await self._execd.call("POST", "/code/context", json=body)).content)

    async def get_context(self, context_id: str) -> CodeContext:
        """A context that exists."""
        await self._wait()
        path = f"/code/contexts/{segment(context_id, 'context')}"
        return models.base.parse(CodeContext, (await self._execd.call("GET", path)).content)

    async def list_contexts(self, language: str | None = None) -> list[CodeContext]:
        """The contexts of a language, or all, oldest first."""
        await self._wait()
        return await self._list(language)

    async def delete_context(self, context_id: str) -> None:
        """End a context, with everything its cells have started."""
        await self._wait()
        await self._execd.call("DELETE", f"/code/contexts/{segment(context_id, 'context')}")

    async def delete_contexts(self, language: str) -> None:
        """End all contexts of a language."""
        await self._wait()
        await self._execd.call("DELETE", "/code/contexts", params=[("language", language)])

    async def interrupt(self, execution_id: str) -> None:
        """Stop the cell that runs in a context, as Ctrl-C would; the context stays.

        The id is that of the context, which is the `id` of the `Execution` too.
        """
        await self._wait()
        # Asked twice, the second answer would be that no cell runs.
        await self._execd.call("DELETE", "/code", params=[("id", execution_id)], policy=NO_RETRIES)

    async def ping(self) -> bool:
        """True when code can be run, or the reason as an exception."""
        await self._list("python")
        return True

    async def _list(self, language: str | None) -> list[CodeContext]:
        params = [("language", language)] if language else []
        response = await self._execd.call("GET", "/code/contexts", params=params)
        return _CONTEXTS.validate_json(response.content)

    async def _events(self, path: str, body: object) -> AsyncGenerator[dict[str, Any], None]:
        async with aclosing(self._execd.events("POST", path, json=body)) as stream:
            async for data in stream:
                event = event_of(data)
                if event is not None:
                    yield event

    async def _wait(self) -> None:
        if self._ready is not None:
            await self._ready()
