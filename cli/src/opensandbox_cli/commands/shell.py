# SPDX-License-Identifier: Apache-2.0
"""`osb shell`: a terminal in a sandbox, as if it were here."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from opensandbox_cli import execution, failure
from opensandbox_cli.options import Environment, NamedInErrors, SandboxId, Workdir, pairs
from opensandbox_cli.session import Client, session_of

if TYPE_CHECKING:
    from opensandbox.pty import PtyConnection

END_OF_INPUT = b"\x04"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=NamedInErrors)(shell)


def shell(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    command: Annotated[
        list[str] | None, typer.Argument(show_default=False, help="What to run there. [default: a shell]")
    ] = None,
    workdir: Workdir = None,
    env: Environment = None,
) -> None:
    """Open a terminal in a sandbox.

    Keys go there as they are, Ctrl-C too; the window keeps its size. It ends with the program, and with its exit code.
    """
    session = session_of(ctx)
    session.failure_code = failure.OURS
    variables = pairs(env, "--env", from_environment=True)

    async def work(client: Client) -> int:
        async with await client.sandbox(sandbox_id) as sandbox:
            cols, rows = _size()
            wanted = execution.as_command(command, argv=False) if command else None
            async with sandbox.pty.open(
                wanted,
                working_directory=workdir,
                envs=variables or None,
                cols=cols,
                rows=rows,
                term=os.environ.get("TERM") or None,
            ) as terminal:
                with _raw():
                    return await _joined(terminal)

    raise typer.Exit(session.run(work))


async def _joined(terminal: PtyConnection) -> int:
    """Pass keys and output on until the program ends."""
    import anyio

    code = failure.OURS
    error: Exception | None = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_keys, terminal)
        tasks.start_soon(_sizes, terminal)
        try:
            async for piece in terminal:
                await execution.written(piece.data)
            code = await terminal.wait()
        except Exception as raised:
            error = raised
        tasks.cancel_scope.cancel()
    if error is not None:
        raise error
    if code >= 0:
        return code
    # Without a name nobody knows which signal it was.
    number = getattr(signal, terminal.ended_by or "", 0)
    return failure.SIGNAL + int(number)


async def _keys(terminal: PtyConnection) -> None:
    from opensandbox.exceptions import SandboxConnectionException

    # The reader of the output finds out why.
    with contextlib.suppress(SandboxConnectionException):
        async for data in execution.typed():
            await terminal.write(data)
        await terminal.write(END_OF_INPUT)


async def _sizes(terminal: PtyConnection) -> None:
    import anyio

    from opensandbox.exceptions import SandboxConnectionException

    with anyio.open_signal_receiver(signal.SIGWINCH) as signals, contextlib.suppress(SandboxConnectionException):
        async for _ in signals:
            await terminal.resize(*_size())


def _size() -> tuple[int, int]:
    for stream in (sys.stdout, sys.stdin, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            size = os.get_terminal_size(stream.fileno())
            if size.columns and size.lines:
                return size.columns, size.lines
    return 80, 24


@contextlib.contextmanager
def _raw() -> Iterator[None]:
    """The terminal here hands every key on; it is as before afterwards."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        # What was typed already stays.
        tty.setraw(sys.stdin, termios.TCSADRAIN)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
