# SPDX-License-Identifier: Apache-2.0
"""Commands, as values: how to run one, what it printed, how it ended."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

from pydantic import ConfigDict, Field, model_validator

from opensandbox.models.base import Asked, Value


class OutputMessage(Value):
    """A piece of output: a line without its terminator, which leads the next piece instead."""

    text: str
    timestamp: int
    is_error: bool = False


class OutputBytes(Value):
    """A piece of output exactly as the command wrote it: no lines, no encoding."""

    data: bytes
    timestamp: int
    is_error: bool = False


class ExecutionResult(Value):
    """A value that running code gave back."""

    text: str | None = None
    timestamp: int
    extra_properties: dict[str, str] = Field(default_factory=dict)


class CommandEnd(Value):
    """How a command ended. `reason` is one of `opensandbox.models.CommandEndReason`, or a newer one as plain text."""

    reason: str
    exit_code: int | None = None
    signal: str | None = None
    """Such as `SIGKILL`."""
    message: str | None = None
    output_truncated: bool | None = None
    cpu_ms: int | None = None
    """Time that it and its children spent on processors, in milliseconds."""
    peak_memory_bytes: int | None = None
    """The most memory that one of its processes had resident."""


class ExecutionError(Value):
    """What went wrong. For a command `value` is its exit code as text, `-1` after a signal."""

    name: str
    value: str
    timestamp: int
    traceback: list[str] = Field(default_factory=list)
    end: CommandEnd | None = Field(default=None, repr=False)


class ExecutionComplete(Value):
    """The execution ended well."""

    timestamp: int
    execution_time_in_millis: int
    end: CommandEnd | None = Field(default=None, repr=False)


class ExecutionNotice(Value):
    """Something to know that is no output: part of it was not kept, or the shell of a session is lost."""

    text: str
    timestamp: int


class ExecutionInit(Value):
    """The execution has begun; `id` is what `interrupt`, status and logs ask for."""

    id: str
    timestamp: int


class ExecutionLogs(Value):
    """Output in the order it came, one list per stream."""

    stdout: list[OutputMessage] = Field(default_factory=list)
    stderr: list[OutputMessage] = Field(default_factory=list)

    def add_stdout(self, message: OutputMessage) -> None:
        """Append to the output."""
        self.stdout.append(message)

    def add_stderr(self, message: OutputMessage) -> None:
        """Append to the error output."""
        self.stderr.append(message)


class Execution(Value):
    """A command that was run.

    `exit_code` is 0 for success, the command's own code for a failure, -1 when a signal ended it, and
    None for a command in the background. `end` tells a timeout, a signal and lack of memory apart. `offset` is the byte
    of its output up to which this has heard; `commands.attach` can go on from there.
    """

    id: str | None = None
    execution_count: int | None = None
    result: list[ExecutionResult] = Field(default_factory=list)
    error: ExecutionError | None = None
    complete: ExecutionComplete | None = None
    exit_code: int | None = None
    logs: ExecutionLogs = Field(default_factory=ExecutionLogs)
    end: CommandEnd | None = None
    offset: int = Field(default=0, repr=False)
    notices: list[ExecutionNotice] = Field(default_factory=list, repr=False)
    framing: str | None = Field(default=None, repr=False)
    """`joined`: the texts of a stream, put together, are its output but for a newline at its end. `pieces`: they are
    all of it. Otherwise each of them is a line."""

    def add_result(self, result: ExecutionResult) -> None:
        """Append a result."""
        self.result.append(result)

    @property
    def cpu_time(self) -> timedelta | None:
        """What it and its children used of processors, where the sandbox tells."""
        spent = self.end.cpu_ms if self.end else None
        return None if spent is None else timedelta(milliseconds=spent)

    @property
    def peak_memory_bytes(self) -> int | None:
        """The most memory that one of its processes had resident, where the sandbox tells."""
        return self.end.peak_memory_bytes if self.end else None

    @property
    def text(self) -> str:
        """The standard output, then the results, as one text.

        The output is exact but for two things: one newline at its end is left out, and what is not UTF-8 is U+FFFD.
        `ExecutionHandlers.on_output` gets the bytes themselves.
        """
        whole = self.framing in ("joined", "pieces")
        lines = [message.text for message in self.logs.stdout]
        output: list[str] = []
        for piece in filter(None, [*(["".join(lines)] if whole else lines), *(r.text for r in self.result)]):
            # A sandbox may send lines with, or without, their terminators; both read the same here.
            if output and not output[-1].endswith("\n") and not piece.startswith("\n"):
                output.append("\n")
            output.append(piece)
        text = "".join(output)
        return text if self.framing == "joined" else text.removesuffix("\n")


class ExecutionHandlers(Asked):
    """Called as events arrive; asynchronous functions are awaited.

    `skip_accumulation` keeps output out of the returned `Execution`, for commands that print more than should be
    held in memory.

    `on_output` gets the bytes of both streams as they are written, for those who pass them on: text that is not
    UTF-8, lines that are not finished yet. There are no lines then: the other two are not called for output,
    and the `Execution` holds none.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    on_stdout: Callable[[OutputMessage], Awaitable[None] | None] | None = None
    on_stderr: Callable[[OutputMessage], Awaitable[None] | None] | None = None
    on_output: Callable[[OutputBytes], Awaitable[None] | None] | None = None
    on_result: Callable[[ExecutionResult], Awaitable[None] | None] | None = None
    on_execution_complete: Callable[[ExecutionComplete], Awaitable[None] | None] | None = None
    on_error: Callable[[ExecutionError], Awaitable[None] | None] | None = None
    on_init: Callable[[ExecutionInit], Awaitable[None] | None] | None = None
    on_notice: Callable[[ExecutionNotice], Awaitable[None] | None] | None = None
    skip_accumulation: bool = False


class RunCommandOpts(Asked):
    """How to run a command.

    `RunCommandOpts(working_directory="/srv", timeout=timedelta(seconds=5), envs={"A": "b"})`
    """

    background: bool = False
    working_directory: str | None = None
    timeout: timedelta | None = None
    """After this time the command and all it started are killed."""
    uid: int | None = Field(default=None, ge=0)
    gid: int | None = Field(default=None, ge=0)
    envs: dict[str, str] | None = None
    stdin: bool = False
    """Keep its input open for `commands.write_stdin`; otherwise it has none."""
    merge: bool | None = None
    """Both streams as one, in their exact order; by default so in the background only."""
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=255)
    """Run again with the same key and options, the command is not started twice: the second call follows it too.
    By default each call has a key of its own."""

    @model_validator(mode="after")
    def _gid_needs_uid(self) -> RunCommandOpts:
        if self.gid is not None and self.uid is None:
            raise ValueError("uid is required when gid is given")
        return self


class CommandStatus(Value):
    """A command, running or ended."""

    id: str | None = None
    content: str | None = None
    """The command as it was given."""
    running: bool | None = None
    exit_code: int | None = None
    error: str | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    background: bool | None = None
    end: CommandEnd | None = None
    stdin_open: bool | None = None
    """`commands.write_stdin` would be taken."""
    output_bytes: int | None = None
    """Output so far."""


class CommandList(Value):
    """The answer to a list of commands."""

    items: list[CommandStatus]


class InputTaken(Value):
    """The answer to input."""

    bytes: int


class CommandLogs(Value):
    """Output of a background command; pass `cursor` (a byte offset) to get what comes after it."""

    content: str
    cursor: int | None = None
    lost_bytes: int = 0
    """So many from the cursor on were not kept: the output went over its limit."""


class CommandSession(Value):
    """A shell that keeps its state between commands."""

    session_id: str


class SessionInfo(Value):
    """A session that is open."""

    session_id: str
    cwd: str
    created_at: datetime
    running: bool
    """A command runs in it."""


class SessionList(Value):
    """The answer to a list of sessions."""

    items: list[SessionInfo]
