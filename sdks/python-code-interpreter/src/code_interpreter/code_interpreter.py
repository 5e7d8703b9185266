# SPDX-License-Identifier: Apache-2.0
"""The interpreter of a sandbox."""

from __future__ import annotations

import time
from datetime import timedelta
from types import TracebackType
from typing import Self

from code_interpreter.services.code import Codes
from code_interpreter.waiting import Waiting
from opensandbox.commands import Commands
from opensandbox.concurrency import sleep
from opensandbox.exceptions import (
    AuthenticationException,
    InvalidArgumentException,
    PermissionDeniedException,
    SandboxException,
    SandboxReadyTimeoutException,
    UnsupportedException,
)
from opensandbox.files import Files
from opensandbox.metrics import Metrics
from opensandbox.requests import seconds_of
from opensandbox.sandbox import Sandbox


class CodeInterpreter(Waiting):
    """Runs code in a sandbox.

        interpreter = await CodeInterpreter.create(sandbox)
        execution = await interpreter.codes.run("import sys; sys.version_info.major")
        print(execution.result[0].text)  # 3

    It is the sandbox seen from another side: `sandbox`, `files`, `commands` and `metrics` are those of the sandbox, and
    closing it does not end the sandbox.
    """

    def __init__(self, sandbox: Sandbox, code_service: Codes | None = None) -> None:
        """Use `CodeInterpreter.create`."""
        self._sandbox = sandbox
        # The connection is the sandbox's own: what it waits for and how it is closed is decided there.
        self._codes = code_service or Codes(sandbox._execd, self._ready)

    @classmethod
    def create(
        cls,
        sandbox: Sandbox,
        *,
        ready_timeout: timedelta = timedelta(seconds=30),
        health_check_polling_interval: timedelta = timedelta(milliseconds=200),
        skip_health_check: bool = False,
    ) -> CodeInterpreter:
        """The interpreter of a sandbox, which can run code when this has been waited for."""
        if sandbox is None:
            raise InvalidArgumentException("an interpreter needs a sandbox")
        interpreter = cls(sandbox)
        limit = seconds_of(ready_timeout, "ready_timeout")
        seconds_of(health_check_polling_interval, "health_check_polling_interval")

        async def check() -> None:
            await interpreter._until_ready(time.monotonic() + limit, health_check_polling_interval)

        if not skip_health_check:
            interpreter._begin(check)
        return interpreter

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox it runs code in."""
        return self._sandbox

    @property
    def id(self) -> str:
        """The id of the sandbox."""
        return self._sandbox.id

    @property
    def files(self) -> Files:
        """The sandbox's files."""
        return self._sandbox.files

    @property
    def commands(self) -> Commands:
        """Commands to run in the sandbox."""
        return self._sandbox.commands

    @property
    def metrics(self) -> Metrics:
        """What the sandbox uses."""
        return self._sandbox.metrics

    @property
    def codes(self) -> Codes:
        """Contexts, and cells to run in them."""
        return self._codes

    async def ping(self) -> bool:
        """True when code can be run, or the reason as an exception."""
        return await self._codes.ping()

    async def is_healthy(self) -> bool:
        """Whether code can be run."""
        try:
            return await self.ping()
        except SandboxException:
            return False

    async def check_ready(self, timeout: timedelta, polling_interval: timedelta) -> None:
        """Wait until code can be run, or raise `SandboxReadyTimeoutException`."""
        seconds_of(polling_interval, "polling_interval")
        await self._until_ready(time.monotonic() + seconds_of(timeout, "timeout"), polling_interval)

    async def _until_ready(self, deadline: float, interval: timedelta) -> None:
        while True:
            try:
                await self._codes.ping()
                return
            except (AuthenticationException, PermissionDeniedException, UnsupportedException):
                raise  # waiting does not change it
            except SandboxException as error:
                why = error
            left = timedelta(seconds=deadline - time.monotonic())
            if left <= timedelta():
                raise SandboxReadyTimeoutException(
                    f"the code interpreter of sandbox {self.id} is not ready: {why}",
                    why,
                    hint="Give it more time (ready_timeout), or look at the sandbox's state with get_info().",
                )
            await sleep(min(interval, left))

    async def aclose(self) -> None:
        """Let go of the connections; the sandbox lives on."""
        await self._sandbox.close()

    async def __aenter__(self) -> Self:
        await self._ready()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        return f"CodeInterpreter({self.id!r})"
