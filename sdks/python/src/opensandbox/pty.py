# SPDX-License-Identifier: Apache-2.0
"""Terminals in a sandbox."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias
from urllib.parse import urlencode

from opensandbox import models
from opensandbox.answers import error_of_body, unsupported_route
from opensandbox.concurrency import connect_websocket, shielded
from opensandbox.constants import CLEANUP_LIMIT
from opensandbox.exceptions import (
    InvalidArgumentException,
    SandboxConnectionException,
    SandboxException,
    SandboxTimeoutException,
)
from opensandbox.requests import segment
from opensandbox.terminal import LARGEST_FRAME, LARGEST_SIDE, SIGNALS, Screen, closed
from opensandbox.transport import Connection

if TYPE_CHECKING:
    from websockets.exceptions import ConnectionClosed

_WHAT = "A terminal"

# `list` is a method below.
Words: TypeAlias = list[str]
Infos: TypeAlias = "list[models.PtyInfo]"


class Pty:
    """`sandbox.pty`

        async with sandbox.pty.open("read name; echo hello $name") as terminal:
            await terminal.write("Ada\\n")
            print(await terminal.wait())

    A terminal outlives its connections: `create` it, `connect` from anywhere, `delete` it.
    """

    def __init__(self, execd: Connection) -> None:
        self._execd = execd.below("", _WHAT)

    async def create(
        self,
        command: str | Words | None = None,
        *,
        working_directory: str | None = None,
        envs: dict[str, str] | None = None,
        cols: int = 80,
        rows: int = 24,
        term: str | None = None,
    ) -> str:
        """A terminal; the id to connect to it with. Its program starts when somebody connects.

        A text is run by the shell, a list as it is; by default it is an interactive shell. `term` is its TERM.
        """
        given = {
            "command": command if isinstance(command, str) else None,
            "argv": list(command) if command is not None and not isinstance(command, str) else None,
            "cwd": working_directory,
            "envs": envs,
            "cols": cols,
            "rows": rows,
            "term": term,
        }
        if command is not None and not command:
            raise InvalidArgumentException("the command is empty", hint="Leave it out for an interactive shell.")
        body = {name: value for name, value in given.items() if value is not None}
        response = await self._execd.call("POST", "/pty", json=body)
        return models.base.parse(models.PtyCreated, response.content).session_id

    async def connect(
        self, pty_id: str, *, since: int = 0, takeover: bool = False, viewer: bool = False, pipes: bool = False
    ) -> PtyConnection:
        """Look at a terminal and type into it.

        What it showed before comes first, from the byte `since` on, as far as it is kept. One client at a time may
        type: another one is a `ConflictException`, unless it asks for `takeover`; any number may watch as `viewer`.
        `pipes`, from the first client, runs the program without a terminal, standard output and error apart.
        """
        flags = {"takeover": takeover, "viewer": viewer}
        query = urlencode({"since": since, "pty": int(not pipes), **{name: 1 for name, on in flags.items() if on}})
        path = f"/pty/{segment(pty_id, 'terminal')}/ws"
        connection = PtyConnection(pty_id, await self._websocket(f"{path}?{query}"), since, viewer)
        try:
            await connection._begun()
        except BaseException:
            with shielded(CLEANUP_LIMIT):
                await connection.close()
            raise
        return connection

    @asynccontextmanager
    async def open(
        self,
        command: str | Words | None = None,
        *,
        working_directory: str | None = None,
        envs: dict[str, str] | None = None,
        cols: int = 80,
        rows: int = 24,
        term: str | None = None,
        pipes: bool = False,
    ) -> AsyncIterator[PtyConnection]:
        """A terminal of its own for a block: created, connected to, and deleted with what still runs in it."""
        pty_id = await self.create(
            command, working_directory=working_directory, envs=envs, cols=cols, rows=rows, term=term
        )
        try:
            async with await self.connect(pty_id, pipes=pipes) as connection:
                yield connection
        finally:
            with shielded(CLEANUP_LIMIT):
                await self.delete(pty_id)

    async def list(self) -> Infos:
        """The terminals that there are, oldest first."""
        return models.base.parse(models.PtyList, (await self._execd.call("GET", "/ptys")).content).items

    async def get(self, pty_id: str) -> models.PtyInfo:
        """Whether the program of a terminal runs, how much it wrote, who is connected."""
        path = f"/pty/{segment(pty_id, 'terminal')}"
        return models.base.parse(models.PtyInfo, (await self._execd.call("GET", path)).content)

    async def delete(self, pty_id: str) -> None:
        """End a terminal, its program and all that came out of it."""
        await self._execd.call("DELETE", f"/pty/{segment(pty_id, 'terminal')}")

    async def _websocket(self, target: str) -> Any:
        from websockets.exceptions import InvalidHandshake, InvalidStatus

        url = "ws" + self._execd.base_url.removeprefix("http") + target
        seconds = self._execd.config.request_timeout.total_seconds()
        try:
            return await connect_websocket(url, self._execd.headers, seconds, LARGEST_FRAME)
        except InvalidStatus as error:
            answer = error.response
            body, request_id = bytes(answer.body or b""), answer.headers.get("X-Request-ID")
            raise unsupported_route(error_of_body(answer.status_code, body, request_id=request_id), _WHAT) from None
        except TimeoutError as error:
            raise SandboxTimeoutException(f"connecting to {self._execd.base_url} took too long", error) from error
        except (OSError, InvalidHandshake, EOFError) as error:
            raise SandboxConnectionException(f"cannot connect to {self._execd.base_url}: {error}", error) from error


class PtyConnection:
    """A terminal that is connected: iterate it for its output, `write` to type.

        pty_id = await sandbox.pty.create("echo hello")
        async with await sandbox.pty.connect(pty_id) as terminal:
            async for piece in terminal:
                print(piece.data.decode(), end="")
            print("ended with", terminal.exit_code)

    Keep reading: a connection whose output nobody takes is closed after a minute. The program goes on; connect again
    with `since=connection.offset`.
    """

    def __init__(self, pty_id: str, websocket: Any, since: int = 0, viewer: bool = False) -> None:
        """Use `sandbox.pty.connect`."""
        self._id = pty_id
        self._viewer = viewer
        self._left = False
        self._websocket = websocket
        self._screen = Screen(since)

    @property
    def id(self) -> str:
        """The terminal's id."""
        return self._id

    @property
    def mode(self) -> str:
        """`pty`, or `pipe` when the program runs without a terminal."""
        return self._screen.mode

    @property
    def offset(self) -> int:
        """The byte of the output behind what has been read."""
        return self._screen.offset

    @property
    def exit_code(self) -> int | None:
        """Of the program, once its end has been read; -1 after a signal."""
        return self._screen.exit_code

    @property
    def ended_by(self) -> str | None:
        """The signal that ended the program, such as `SIGTERM`, once its end has been read; None after a normal end."""
        return self._screen.signal

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> models.PtyOutput:
        piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def read(self) -> bytes:
        """The next piece of output, of either stream; empty when the program has ended."""
        piece = await self._next()
        return b"" if piece is None else piece.data

    async def wait(self) -> int:
        """Pass over the rest of the output and wait for the program's end; its exit code, -1 after a signal."""
        while await self._next() is not None:
            pass
        if self.exit_code is None:
            raise SandboxException("the terminal was deleted before its program began")
        return self.exit_code

    async def write(self, data: str | bytes) -> None:
        """Type. A text is sent as UTF-8."""
        if not isinstance(data, (str, bytes, bytearray, memoryview)):
            raise InvalidArgumentException(f"{type(data).__name__} cannot be typed", hint="Give a text, or bytes.")
        self._expect_a_program()
        raw = data.encode() if isinstance(data, str) else bytes(data)
        # In pieces that the other side takes.
        for start in range(0, len(raw), LARGEST_FRAME // 8):
            await self._send(b"\0" + raw[start : start + LARGEST_FRAME // 8])

    async def resize(self, cols: int, rows: int) -> None:
        """Tell the program that the window has another size."""
        if not all(type(number) is int and 1 <= number <= LARGEST_SIDE for number in (cols, rows)):
            raise InvalidArgumentException(
                f"cols and rows are between 1 and {LARGEST_SIDE}", hint="Such as resize(cols=80, rows=24)."
            )
        if self.mode != "pty":
            raise InvalidArgumentException("pipes have no size", hint="Connect without pipes=True for a terminal.")
        self._expect_a_program()
        await self._say(type="resize", cols=cols, rows=rows)

    async def signal(self, name: str) -> None:
        """Send a signal to the program in the foreground: SIGINT, SIGTERM, SIGKILL, SIGQUIT or SIGHUP."""
        if name not in SIGNALS:
            raise InvalidArgumentException(f"{name!r} cannot be sent", hint=f"One of {', '.join(SIGNALS)}.")
        self._expect_a_program()
        await self._say(type="signal", signal=name)

    async def close(self) -> None:
        """Disconnect. The program goes on, and what it writes is kept for the next client. Harmless when repeated."""
        self._left = True
        await self._websocket.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with shielded(CLEANUP_LIMIT):
            await self.close()

    async def _begun(self) -> None:
        """Wait until the other side says that we are connected; output that comes before is kept."""
        while not self._screen.connected:
            self._screen.take(await self._receive())

    async def _next(self) -> models.PtyOutput | None:
        while True:
            piece = self._screen.next()
            if piece is not None:
                return piece
            if self._screen.over:
                return None
            self._screen.take(await self._receive())

    async def _receive(self) -> str | bytes | None:
        from websockets.exceptions import ConnectionClosed

        try:
            frame: str | bytes = await self._websocket.recv()
        except ConnectionClosed as error:
            self._closed(error)
            return None
        return frame

    def _expect_a_program(self) -> None:
        """The other side would tell the reader, and not whoever asked for what cannot be."""
        if self._viewer:
            raise InvalidArgumentException("a viewer can only look", hint="Connect without viewer=True to type.")
        if self._left:
            raise SandboxConnectionException(
                "this connection is closed", hint=f"Connect again, with since={self.offset}."
            )
        if self._screen.over:
            raise SandboxConnectionException("the program has ended", hint="Create another terminal.")

    async def _send(self, frame: str | bytes) -> None:
        from websockets.exceptions import ConnectionClosed

        try:
            await self._websocket.send(frame)
        except ConnectionClosed as error:
            self._closed(error)
            raise SandboxConnectionException("the program has ended", error, hint="Create another terminal.") from None

    def _closed(self, error: ConnectionClosed) -> None:
        told = error.rcvd
        closed(self._screen, told.code if told else None, told.reason if told else "")

    async def _say(self, **wish: object) -> None:
        await self._send(json.dumps(wish))
