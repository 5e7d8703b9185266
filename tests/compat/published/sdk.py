# SPDX-License-Identifier: Apache-2.0
"""The SDK in the world that was asked for, so that every check is written once.

COMPAT_WORLD is `async`, or `sync`: then synchronous objects are given out dressed as their asynchronous twins, each
call in a thread. COMPAT_PROXIED=yes sends everything through the server. COMPAT_RECORD=yes notes every call.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import recording

import code_interpreter
import opensandbox
from opensandbox.config import ConnectionConfig, ConnectionConfigSync
from opensandbox.models.execd import ExecutionHandlers
from opensandbox.models.execd_sync import ExecutionHandlersSync

SYNC = os.environ.get("COMPAT_WORLD") == "sync"
PROXIED = os.environ.get("COMPAT_PROXIED") == "yes"
# These return at once in both worlds.
_PLAIN = ("files_with_identity", "session")

if os.environ.get("COMPAT_RECORD") == "yes":
    recording.record(SYNC)


def config(**options: Any) -> Any:
    """Where the server is, from the environment."""
    return (ConnectionConfigSync if SYNC else ConnectionConfig)(use_server_proxy=PROXIED, **options)


class Awaited:
    """A synchronous object, used as its asynchronous twin is."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not callable(value):
            return _dressed(value)
        if name in _PLAIN:
            return lambda *arguments, **options: _dressed(value(*arguments, **options))

        async def call(*arguments: Any, **options: Any) -> Any:
            loop = asyncio.get_running_loop()
            plain = {key: _undressed(option, loop) for key, option in options.items()}
            result = await asyncio.to_thread(value, *(_undressed(one, loop) for one in arguments), **plain)
            return _in_steps(result) if isinstance(result, Iterator) else _dressed(result)

        return call

    async def __aenter__(self) -> Any:
        return _dressed(await asyncio.to_thread(self._inner.__enter__))

    async def __aexit__(self, *error: Any) -> Any:
        return await asyncio.to_thread(self._inner.__exit__, *error)


def _dressed(value: Any) -> Any:
    """Sandboxes, their services and their sessions; never values."""
    ours = type(value).__module__.startswith(("opensandbox", "code_interpreter")) and not hasattr(
        type(value), "model_fields"
    )
    return Awaited(value) if ours or hasattr(value, "__enter__") else value


def _undressed(value: Any, loop: asyncio.AbstractEventLoop) -> Any:
    if isinstance(value, Awaited):
        return value._inner
    if not isinstance(value, ExecutionHandlers):
        return value

    def waiting(handler: Any) -> Any:
        return lambda event: asyncio.run_coroutine_threadsafe(handler(event), loop).result()

    given = {name: getattr(value, name) for name in type(value).model_fields}
    return ExecutionHandlersSync(**{name: waiting(one) if callable(one) else one for name, one in given.items()})


async def _in_steps(pieces: Iterator[Any]) -> AsyncIterator[Any]:
    nothing = object()
    while (piece := await asyncio.to_thread(next, pieces, nothing)) is not nothing:
        yield piece


Sandbox: Any = Awaited(opensandbox.SandboxSync) if SYNC else opensandbox.Sandbox
SandboxManager: Any = Awaited(opensandbox.SandboxManagerSync) if SYNC else opensandbox.SandboxManager
CodeInterpreter: Any = Awaited(code_interpreter.CodeInterpreterSync) if SYNC else code_interpreter.CodeInterpreter
