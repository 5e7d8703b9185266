# SPDX-License-Identifier: Apache-2.0
"""Every call of `sandbox.commands` but for sessions, and the exact framing of output."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

from checks import check, raises, run, until
from sdk import Sandbox
from world import opened

from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import Execution, ExecutionHandlers, RunCommandOpts


def out(execution: Execution) -> list[str]:
    return [message.text for message in execution.logs.stdout]


def err(execution: Execution) -> list[str]:
    return [message.text for message in execution.logs.stderr]


async def ended(sandbox: Sandbox, execution_id: str) -> Any:
    return await until(lambda: sandbox.commands.get_command_status(execution_id), lambda status: not status.running)


@check
async def run_text(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run("echo 'Hello OpenSandbox!'")
    assert execution.logs.stdout[0].text == "Hello OpenSandbox!"
    assert len(execution.logs.stdout) == 1
    assert execution.exit_code == 0
    assert execution.error is None
    assert execution.complete is not None
    assert execution.id


@check
async def framing_of_lines(sandbox: Sandbox) -> None:
    """A line without its terminator; the terminator leads the next one; one at the very end is dropped."""
    cases = {
        r"line1\nline2\n": ["line1", "\nline2"],
        r"line1\nline2": ["line1", "\nline2"],
        r"one\n": ["one"],
        r"a\n\nb\n": ["a", "\n", "\nb"],
        r"a\n\n": ["a", "\n"],
        r"\na\n": ["", "\na"],
        "": [],
    }
    for text, expected in cases.items():
        execution = await sandbox.commands.run(f"printf '{text}'")
        # An empty text carries nothing, and a client may or may not be shown it.
        got = [piece for piece in out(execution) if piece]
        assert got == [piece for piece in expected if piece], (text, out(execution))
        whole = text.replace(r"\n", "\n")
        assert "".join(out(execution)) == whole.removesuffix("\n"), (text, out(execution))


@check
async def framing_of_two_lines_counts_two(sandbox: Sandbox) -> None:
    await sandbox.commands.run("mkdir -p /tmp/two/d1 /tmp/two/d2")
    execution = await sandbox.commands.run("ls /tmp/two | grep d")
    assert len(execution.logs.stdout) == 2
    assert execution.text == "d1\nd2"


@check
async def framing_keeps_long_lines_whole(sandbox: Sandbox) -> None:
    """`text` puts a newline between events, so a line must be one, however long."""
    for size in (200_000, 5_000_000):
        execution = await sandbox.commands.run(f"head -c {size} /dev/zero | tr '\\0' x; echo; echo end")
        assert execution.text == "x" * size + "\nend", (size, len(execution.text), len(execution.logs.stdout))
    execution = await sandbox.commands.run("for n in $(seq 100000); do printf 'ä€'; done; printf '\\nend'")
    assert execution.text == "ä€" * 100_000 + "\nend", len(execution.text)


@check
async def framing_of_carriage_returns(sandbox: Sandbox) -> None:
    for text in ("a\rb", "10%\r20%\r\nend\n", "a\r\nb\r\nc", "\r\r"):
        execution = await sandbox.commands.run(["printf", "%s", text])
        assert "".join(out(execution)) == text.removesuffix("\n"), (text, out(execution))
        # The published `text` turns each of them into a newline, and has none at the end.
        newlines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n")
        assert execution.text in (newlines, text.removesuffix("\n")), (text, execution.text)


@check
async def framing_keeps_the_streams_apart(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run("echo o1; echo e1 >&2; echo o2; echo e2 >&2")
    assert "".join(out(execution)) == "o1\no2"
    assert "".join(err(execution)) == "e1\ne2"


@check
async def run_list(sandbox: Sandbox) -> None:
    """A list is not given to a shell."""
    execution = await sandbox.commands.run(["printf", "%s|", "a b", "$HOME", "'"])
    assert out(execution) == ["a b|$HOME|'|"]


@check
async def run_with_directory_and_environment(sandbox: Sandbox) -> None:
    opts = RunCommandOpts(working_directory="/tmp", envs={"GREETING": "hi $HOME", "EMPTY": ""})
    execution = await sandbox.commands.run('pwd; echo "$GREETING"; echo "[${EMPTY-unset}]"', opts=opts)
    assert "".join(out(execution)) == "/tmp\nhi $HOME\n[]"


@check
async def run_in_a_directory_that_does_not_exist(sandbox: Sandbox) -> None:
    call = sandbox.commands.run("true", opts=RunCommandOpts(working_directory="/no/such/place"))
    error = await raises(SandboxApiException, call)
    assert error.status_code == 400, error


@check
async def run_as_another_user(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run("id -u; id -g", opts=RunCommandOpts(uid=65534, gid=65534))
    assert "".join(out(execution)) == "65534\n65534"


@check
async def run_that_fails(sandbox: Sandbox) -> None:
    """One last event, an error whose value is the code."""
    for code in (1, 7, 255):
        execution = await sandbox.commands.run(f"echo before; echo why >&2; exit {code}")
        assert execution.exit_code == code
        assert (execution.error.name, execution.error.value) == ("CommandExecError", str(code))
        assert execution.complete is None
        assert (out(execution), err(execution)) == (["before"], ["why"])
    execution = await sandbox.commands.run("no-such-program-here")
    assert execution.exit_code == 127


@check
async def run_of_a_program_that_does_not_exist(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run(["/no/such/program"])
    assert execution.error is not None
    assert execution.complete is None


@check
async def run_ended_by_a_signal(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run(["bash", "-c", "kill -9 $$"])
    assert execution.error.value == "-1", execution.error
    assert execution.exit_code == -1


@check
async def run_with_a_timeout(sandbox: Sandbox) -> None:
    """The command and what it started are killed."""
    opts = RunCommandOpts(timeout=timedelta(milliseconds=300))
    begun = datetime.now(UTC)
    execution = await sandbox.commands.run("echo begun; sleep 3217 & sleep 3217", opts=opts)
    assert datetime.now(UTC) - begun < timedelta(seconds=20)
    assert execution.error.value == "-1"
    assert out(execution) == ["begun"]
    left = await sandbox.commands.run("ps ax 2>/dev/null | grep -c '[s]leep 3217'")
    assert out(left) == ["0"], out(left)


@check
async def handlers_in_order(sandbox: Sandbox) -> None:
    heard: list[str] = []

    def hear(kind: str) -> object:
        async def handler(event: object) -> None:
            heard.append(kind)

        return handler

    kinds = ("on_init", "on_stdout", "on_stderr", "on_execution_complete", "on_error")
    handlers = ExecutionHandlers(**{kind: hear(kind) for kind in kinds}, skip_accumulation=True)
    execution = await sandbox.commands.run("echo a; echo b >&2", handlers=handlers)
    assert heard[0] == "on_init"
    assert heard[-1] == "on_execution_complete"
    assert sorted(heard[1:-1]) == ["on_stderr", "on_stdout"]
    assert out(execution) == []


@check
async def output_comes_while_the_command_runs(sandbox: Sandbox) -> None:
    first = asyncio.Event()

    async def on_stdout(message: object) -> None:
        first.set()

    task = asyncio.ensure_future(
        sandbox.commands.run(
            "echo first; while ! test -e /tmp/go-on; do sleep 0.01; done; echo last",
            handlers=ExecutionHandlers(on_stdout=on_stdout),
        )
    )
    await asyncio.wait_for(first.wait(), 10)
    assert not task.done()
    await sandbox.files.write_file("/tmp/go-on", "")
    assert (await task).text == "first\nlast"


@check
async def much_output(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run("seq 1 100000")
    assert "".join(out(execution)) == "\n".join(str(n) for n in range(1, 100001))


@check
async def output_that_is_not_text(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run(r"printf 'a\xff\xfeb\n'; printf 'gr\xc3\xbc\xc3\x9f\n'")
    assert "".join(out(execution)) == "a\ufffd\ufffdb\ngrüß", out(execution)


@check
async def status_of_a_foreground_command(sandbox: Sandbox) -> None:
    execution = await sandbox.commands.run("exit 3")
    status = await sandbox.commands.get_command_status(execution.id)
    assert (status.running, status.exit_code, status.content) == (False, 3, "exit 3")
    assert status.started_at <= status.finished_at


@check
async def background(sandbox: Sandbox) -> None:
    """It starts, it can be asked for, its output is kept with both streams in one."""
    execution = await sandbox.commands.run("echo one; echo two >&2; exit 5", opts=RunCommandOpts(background=True))
    assert execution.id
    assert execution.exit_code is None
    status = await ended(sandbox, execution.id)
    assert status.exit_code == 5
    logs = await sandbox.commands.get_background_command_logs(execution.id)
    assert sorted(logs.content.split()) == ["one", "two"]
    assert logs.cursor == 8


@check
async def background_logs_by_byte(sandbox: Sandbox) -> None:
    command = "printf 'grüß\\n'; while ! test -e /tmp/more; do sleep 0.01; done; echo end"
    execution = await sandbox.commands.run(command, opts=RunCommandOpts(background=True))
    logs = await until(
        lambda: sandbox.commands.get_background_command_logs(execution.id), lambda logs: logs.cursor >= 7
    )
    assert (logs.content, logs.cursor) == ("grüß\n", 7)
    assert (await sandbox.commands.get_command_status(execution.id)).running
    nothing = await sandbox.commands.get_background_command_logs(execution.id, cursor=7)
    assert (nothing.content, nothing.cursor) == ("", 7)
    await sandbox.files.write_file("/tmp/more", "")
    await ended(sandbox, execution.id)
    rest = await sandbox.commands.get_background_command_logs(execution.id, cursor=7)
    assert (rest.content, rest.cursor) == ("end\n", 11)
    again = await sandbox.commands.get_background_command_logs(execution.id, cursor=0)
    assert again.content == "grüß\nend\n"


@check
async def interrupt(sandbox: Sandbox) -> None:
    """When it returns the command has ended; a second time it does not run."""
    execution = await sandbox.commands.run("echo up; sleep 3218", opts=RunCommandOpts(background=True))
    assert (await sandbox.commands.get_command_status(execution.id)).running
    await sandbox.commands.interrupt(execution.id)
    status = await sandbox.commands.get_command_status(execution.id)
    assert not status.running
    error = await raises(SandboxApiException, sandbox.commands.interrupt(execution.id))
    assert error.status_code == 500, error


@check
async def interrupt_in_the_foreground(sandbox: Sandbox) -> None:
    started = asyncio.get_running_loop().create_future()

    async def on_init(event: object) -> None:
        started.set_result(event.id)

    task = asyncio.ensure_future(sandbox.commands.run("sleep 3219", handlers=ExecutionHandlers(on_init=on_init)))
    await sandbox.commands.interrupt(await started)
    execution = await task
    assert execution.error.value == "-1", execution.error
    assert execution.complete is None


@check
async def unknown_ids(sandbox: Sandbox) -> None:
    commands = sandbox.commands
    for call in (commands.get_command_status("f" * 32), commands.get_background_command_logs("f" * 32)):
        error = await raises(SandboxApiException, call)
        assert error.status_code == 404, error


@check
async def set_env(sandbox: Sandbox) -> None:
    values = {
        "PLAIN": "value", "SPACES": "two  words ", "DOLLAR": "$HOME `id` $(id)", "QUOTE": "it's \"quoted\"",
        "LINES": "it's\ttwo\nlines", "EQUALS": "a=b#c", "EMPTY": "",
    }  # fmt: skip
    for key, value in values.items():
        await sandbox.commands.set_env(key, value)
    for key, value in values.items():
        execution = await sandbox.commands.run(f'printf "%s." "${key}"')
        assert "".join(out(execution)) == f"{value}.", (key, out(execution))
    await sandbox.commands.set_env("PLAIN", "newer")
    assert (await sandbox.commands.run("echo $PLAIN")).text == "newer"
    opts = RunCommandOpts(envs={"PLAIN": "newest"})
    assert (await sandbox.commands.run("echo $PLAIN", opts=opts)).text == "newest"


@check
async def many_at_once(sandbox: Sandbox) -> None:
    done = await asyncio.gather(*(sandbox.commands.run(f"echo {n}") for n in range(20)))
    assert [execution.text for execution in done] == [str(n) for n in range(20)]


run(opened)
