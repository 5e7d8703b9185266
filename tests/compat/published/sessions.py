# SPDX-License-Identifier: Apache-2.0
"""Sessions: shells that keep their state from one command to the next, and the framing of what they print."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta

from checks import check, raises, run
from sdk import Sandbox
from world import opened

from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import Execution, ExecutionHandlers


def out(execution: Execution) -> list[str]:
    return [message.text for message in execution.logs.stdout]


@asynccontextmanager
async def session(sandbox: Sandbox, **options: str) -> AsyncIterator[str]:
    found = await sandbox.commands.create_session(**options)
    assert isinstance(found, str)
    assert found
    yield found
    await sandbox.commands.delete_session(found)


@check
async def state_stays(sandbox: Sandbox) -> None:
    async with session(sandbox) as shell:
        steps = ["export SHOWN=one; HIDDEN=two", "greet() { echo hello $1; }", "cd /usr/lib", "umask 027", "set -u"]
        for step in steps:
            execution = await sandbox.commands.run_in_session(shell, step)
            assert (execution.exit_code, out(execution), execution.error) == (0, [], None), (step, execution)
        asked = "echo $SHOWN $HIDDEN; greet you; pwd; umask; echo $-"
        execution = await sandbox.commands.run_in_session(shell, asked)
        assert out(execution)[:4] == ["one two", "\nhello you", "\n/usr/lib", "\n0027"], execution
        assert "u" in out(execution)[4]
        assert (execution.id, execution.complete is not None) == (shell, True)


@check
async def two_sessions_know_nothing_of_each_other(sandbox: Sandbox) -> None:
    async with session(sandbox) as one, session(sandbox) as other:
        await sandbox.commands.run_in_session(one, "A=1; cd /")
        execution = await sandbox.commands.run_in_session(other, "echo ${A-unset}")
        assert execution.text == "unset"


@check
async def directories(sandbox: Sandbox) -> None:
    """One that does not exist is made with the session; that of a run stays."""
    async with session(sandbox, working_directory="/tmp/made/for it") as shell:
        assert (await sandbox.commands.run_in_session(shell, "pwd")).text == "/tmp/made/for it"
        moved = await sandbox.commands.run_in_session(shell, "pwd", working_directory="/usr")
        assert moved.text == "/usr"
        assert (await sandbox.commands.run_in_session(shell, "pwd")).text == "/usr"


@check
async def framing_of_lines(sandbox: Sandbox) -> None:
    """As of commands: a line without its terminator, which leads the next one; both streams in one, in their order."""
    cases = {
        r"line1\nline2\n": ["line1", "\nline2"],
        r"line1\nline2": ["line1", "\nline2"],
        r"one\n": ["one"],
        r"a\n\nb\n": ["a", "\n", "\nb"],
        "": [],
    }
    async with session(sandbox) as shell:
        for text, expected in cases.items():
            execution = await sandbox.commands.run_in_session(shell, f"printf '{text}'")
            assert out(execution) == expected, (text, out(execution))
        execution = await sandbox.commands.run_in_session(shell, "echo o1; echo e1 >&2; echo o2; echo e2 >&2")
        assert (out(execution), execution.logs.stderr) == (["o1", "\ne1", "\no2", "\ne2"], [])
        assert execution.text == "o1\ne1\no2\ne2"


@check
async def a_command_that_fails(sandbox: Sandbox) -> None:
    async with session(sandbox) as shell:
        execution = await sandbox.commands.run_in_session(shell, "KEPT=1; sh -c 'echo x >&2; exit 7'")
        assert (execution.exit_code, execution.complete, out(execution)) == (7, None, ["x"])
        assert (execution.error.name, execution.error.value) == ("CommandExecError", "7")
        assert (await sandbox.commands.run_in_session(shell, "echo $KEPT")).text == "1"
        # `exit` ends with that code too; the session can be used again, from the beginning.
        assert (await sandbox.commands.run_in_session(shell, "exit 9")).exit_code == 9
        assert (await sandbox.commands.run_in_session(shell, "echo back")).text == "back"


@check
async def the_end_cannot_be_forged(sandbox: Sandbox) -> None:
    """Whatever a command prints or leaves open, its output and its code are its own."""
    async with session(sandbox) as shell:
        forged = '{"type":"execution_complete","timestamp":1}'
        hostile = f"set; printf '\\0\\x1f\\n{forged}\\n\\n'; (exit 5)"
        assert (await sandbox.commands.run_in_session(shell, hostile)).exit_code == 5
        assert (await sandbox.commands.run_in_session(shell, "echo next")).text == "next"


@check
async def a_timeout_ends_the_run(sandbox: Sandbox) -> None:
    async with session(sandbox) as shell:
        call = sandbox.commands.run_in_session(shell, "echo begun; sleep 1000", timeout=timedelta(milliseconds=300))
        execution = await call
        # The shell, which lives on, has a word to say about it too.
        assert (execution.exit_code, out(execution)[0]) == (-1, "begun"), execution
        assert (await sandbox.commands.run_in_session(shell, "echo next")).text == "next"


@check
async def handlers(sandbox: Sandbox) -> None:
    heard: list[str] = []

    async def on_stdout(message: object) -> None:
        heard.append(message.text)

    async with session(sandbox) as shell:
        await sandbox.commands.run_in_session(shell, "echo a; echo b", handlers=ExecutionHandlers(on_stdout=on_stdout))
    assert heard == ["a", "\nb"]


@check
async def runs_wait_for_each_other(sandbox: Sandbox) -> None:
    async with session(sandbox) as shell:
        await sandbox.commands.run_in_session(shell, "n=0")
        calls = [sandbox.commands.run_in_session(shell, "m=$n; sleep 0.02; n=$((m+1))") for _ in range(5)]
        assert {execution.exit_code for execution in await asyncio.gather(*calls)} == {0}
        assert (await sandbox.commands.run_in_session(shell, "echo $n")).text == "5"


@check
async def what_is_deleted_is_gone(sandbox: Sandbox) -> None:
    async with session(sandbox) as shell:
        await sandbox.commands.run_in_session(shell, "sleep 4321 & true")
    left = await sandbox.commands.run("ps ax 2>/dev/null | grep -c '[s]leep 4321'")
    assert left.text == "0", left.text
    for call in (sandbox.commands.delete_session(shell), sandbox.commands.delete_session("f" * 32)):
        error = await raises(SandboxApiException, call)
        assert (error.status_code, error.error.code) == (404, "CONTEXT_NOT_FOUND"), error
    await raises(SandboxApiException, sandbox.commands.run_in_session(shell, "true"))


run(opened)
