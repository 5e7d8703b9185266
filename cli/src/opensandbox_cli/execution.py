# SPDX-License-Identifier: Apache-2.0
"""Running a command far away as if it ran here: its output, its exit code, Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from opensandbox_cli import failure

if TYPE_CHECKING:
    from opensandbox import Sandbox
    from opensandbox.models import Execution, ExecutionHandlers, OutputBytes, RunCommandOpts
    from opensandbox_cli.screen import Screen

# How long ending a command may take after Ctrl-C, before we leave without it.
STOP_SECONDS = 10.0

Work = Callable[[], Awaitable[int]]
Step = Callable[[], Coroutine[Any, Any, None]]


def as_command(words: list[str], argv: bool) -> str | list[str]:
    """What to send. One word is a line for the shell as it is; several are words, whatever is in them."""
    if argv:
        return words
    return words[0] if len(words) == 1 else shlex.join(words)


class Attached:
    """A command whose output goes to our own streams, byte for byte and as it comes."""

    def __init__(self, sandbox: Sandbox, screen: Screen, *, stays: bool = True) -> None:
        """`stays`: whether the sandbox outlives this run, so that a lost command can be asked for."""
        self._sandbox = sandbox
        self._screen = screen
        self._stays = stays
        self._id: str | None = None

    async def run(
        self, command: str | list[str], opts: RunCommandOpts, stdin: AsyncIterator[bytes] | None = None
    ) -> int:
        """Run to the end; the exit code to leave with. `stdin` is what it reads."""
        more = {} if stdin is None else {"stdin": stdin}
        return await self._followed(
            lambda handlers: self._sandbox.commands.run(command, opts=opts, handlers=handlers, **more)
        )

    async def attach(self, execution_id: str, offset: int) -> int:
        """Follow a command that runs or has ended; the exit code to leave with."""
        return await self._followed(lambda handlers: self._sandbox.commands.attach(execution_id, offset, handlers))

    async def run_in_session(
        self, session_id: str, command: str, workdir: str | None, timeout: timedelta | None
    ) -> int:
        """Run in a shell that stays; the exit code to leave with."""
        from opensandbox.models import ExecutionHandlers

        handlers = ExecutionHandlers(
            on_output=_write,
            on_notice=lambda notice: self._screen.warning(notice.text),
            skip_accumulation=True,
        )
        execution = await self._sandbox.commands.run_in_session(
            session_id, command, working_directory=workdir, timeout=timeout, handlers=handlers, separate=True
        )
        return exit_code(execution, self._screen)

    async def _followed(self, following: Callable[[ExecutionHandlers], Awaitable[Execution]]) -> int:
        from opensandbox.exceptions import SandboxConnectionException
        from opensandbox.models import ExecutionHandlers

        handlers = ExecutionHandlers(
            on_init=lambda event: self._started(event.id),
            on_output=_write,
            on_notice=lambda notice: self._screen.warning(notice.text),
        )
        try:
            execution = await following(handlers)
        except BrokenPipeError:
            # As a local program would end that writes into a closed pipe.
            await self.stop()
            raise
        except SandboxConnectionException as error:
            if self._id is None:
                raise
            raise failure.Failure(error.message, self._way_on(self._id)) from error
        return exit_code(execution, self._screen)

    async def stop(self) -> None:
        """End the command and all it started."""
        from opensandbox.exceptions import SandboxException

        if self._id is not None:
            # It may have ended by itself just now.
            with contextlib.suppress(SandboxException):
                await self._sandbox.commands.interrupt(self._id)

    def _way_on(self, execution_id: str) -> str:
        if not self._stays:
            return "It is ended with its sandbox; --keep leaves both."
        place = f"{self._sandbox.id} {execution_id}"
        return (
            f"The command goes on; `osb command status {place}` tells how it ends, `osb command attach` what it wrote."
        )

    def _started(self, execution_id: str) -> None:
        self._id = execution_id


async def _write(piece: OutputBytes) -> None:
    await written(piece.data, error=piece.is_error)


async def written(data: bytes, *, error: bool = False) -> None:
    """Write to our own streams."""
    from anyio import to_thread

    # In a thread: a reader that pauses must not keep us from hearing Ctrl-C.
    await to_thread.run_sync(_put, sys.stderr if error else sys.stdout, data, abandon_on_cancel=True)


async def typed() -> AsyncIterator[bytes]:
    """What comes on our own standard input, as it comes."""
    import anyio

    # Not in a thread: one that still waits for a key would keep us from leaving.
    source = sys.stdin.fileno()
    while True:
        # What cannot be waited for, such as a file, is always ready.
        with contextlib.suppress(PermissionError):
            await anyio.wait_readable(source)
        data = os.read(source, 65536)
        if not data:
            return
        yield data


def _put(stream: object, data: bytes) -> None:
    stream.buffer.write(data)  # type: ignore[attr-defined]
    stream.buffer.flush()  # type: ignore[attr-defined]


async def attended(work: Work, stop: Step, beside: Step | None = None) -> int:
    """Do `work`; on Ctrl-C or SIGTERM `stop` it. `beside` runs as long as the work does.

    The second Ctrl-C leaves at once.
    """
    import anyio
    from anyio.abc import TaskStatus

    heard = 0
    code = failure.OURS
    error: BaseException | None = None

    async def listen(*, task_status: TaskStatus[None]) -> None:
        nonlocal heard
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            task_status.started()
            async for number in signals:
                if heard:
                    os._exit(failure.SIGNAL + number)
                heard = number
                tasks.start_soon(end)

    async def end() -> None:
        with anyio.move_on_after(STOP_SECONDS):
            await stop()
            # The stream tells the end, after the last output.
            await finished.wait()
        tasks.cancel_scope.cancel()

    finished = anyio.Event()
    async with anyio.create_task_group() as tasks:
        await tasks.start(listen)
        if beside is not None:
            tasks.start_soon(beside)
        try:
            code = await work()
        except Exception as raised:
            error = raised
        finally:
            finished.set()
            tasks.cancel_scope.cancel()
    if heard:
        return failure.SIGNAL + heard
    if error is not None:
        raise error
    return code


def exit_code(execution: Execution, screen: Screen) -> int:
    """The exit code to leave with, as a local command's; what it cannot say is shown."""
    end = execution.end
    if end is None:
        return execution.exit_code if execution.exit_code is not None and execution.exit_code >= 0 else failure.REFUSED
    if end.output_truncated:
        screen.warning("some output is missing: it came faster than it could be read")
    if end.reason == "exited":
        return end.exit_code if end.exit_code is not None else 0
    if end.reason == "timed_out":
        screen.error("the command took longer than --timeout and was ended")
        return failure.TIMED_OUT
    if end.reason == "start_failed":
        message = end.message or "it could not be started"
        screen.error(message)
        return 127 if "no such program" in message or "not found" in message else 126
    if end.reason == "lost":
        screen.error(end.message or "nobody knows how the command ended")
        return failure.OURS
    if end.reason != "signalled":
        screen.error(f"the command was ended: {end.message or end.reason.replace('_', ' ')}")
    number = getattr(signal, end.signal or "", signal.SIGKILL)
    return failure.SIGNAL + int(number)
