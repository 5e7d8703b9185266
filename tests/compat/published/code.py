# SPDX-License-Identifier: Apache-2.0
"""Every call of the code interpreter: contexts, cells, results, errors, interrupts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from checks import check, raises, run
from sdk import CodeInterpreter, Sandbox, config

from code_interpreter import CodeContext, SupportedLanguage
from opensandbox.exceptions import SandboxApiException
from opensandbox.models.execd import Execution, ExecutionHandlers


@asynccontextmanager
async def opened() -> AsyncIterator[Any]:
    sandbox = await Sandbox.create(
        "opensandbox/code-interpreter:v1.0.2",
        entrypoint=["/opt/opensandbox/code-interpreter.sh"],
        env={"PYTHON_VERSION": "3.11"},
        connection_config=config(),
    )
    try:
        yield await CodeInterpreter.create(sandbox)
    finally:
        await sandbox.destroy()


def out(execution: Execution) -> str:
    return "".join(message.text for message in execution.logs.stdout)


def err(execution: Execution) -> str:
    return "".join(message.text for message in execution.logs.stderr)


@check
async def what_it_is(interpreter: Any) -> None:
    assert interpreter.id == interpreter.sandbox.id
    assert (await interpreter.commands.run("echo hi")).text == "hi"
    await interpreter.files.write_file("/tmp/a.txt", "a")
    assert await interpreter.files.read_file("/tmp/a.txt") == "a"
    assert (await interpreter.metrics.get_metrics(interpreter.id)).cpu_count > 0
    assert await interpreter.ping()
    assert await interpreter.codes.ping()
    assert await interpreter.is_healthy()
    await interpreter.check_ready(timedelta(seconds=5), timedelta(milliseconds=50))


@check
async def python_cell(interpreter: Any) -> None:
    execution = await interpreter.codes.run(
        "import sys\nprint(sys.version)\nresult = 2 + 2\nresult", language=SupportedLanguage.PYTHON
    )
    assert execution.result[0].text == "4"
    assert len(execution.result) == 1
    assert out(execution).endswith("\n"), "newlines are kept"
    assert execution.error is None
    assert execution.complete is not None
    assert execution.exit_code is None
    assert execution.id, "the id of the context"


@check
async def what_a_cell_defines_stays(interpreter: Any) -> None:
    codes = interpreter.codes
    await codes.run("import math\nx = 20")
    execution = await codes.run("x + math.floor(1.5)")
    assert execution.result[0].text == "21"
    again = await codes.run("x")
    assert again.id == execution.id, "the default context of the language"
    assert again.execution_count == execution.execution_count + 1


@check
async def output_of_all_kinds(interpreter: Any) -> None:
    execution = await interpreter.codes.run(
        "import os, subprocess, sys\nprint('a')\nos.system('echo b')\nsubprocess.run(['sh', '-c', 'echo c >&2'])\n"
        "print('d', file=sys.stderr)\nNone"
    )
    assert (out(execution), err(execution)) == ("a\nb\n", "c\nd\n"), execution
    assert execution.result == []
    large = await interpreter.codes.run("for i in range(50000): print(i)")
    assert out(large) == "".join(f"{i}\n" for i in range(50000))


@check
async def a_cell_that_fails(interpreter: Any) -> None:
    execution = await interpreter.codes.run("print('before')\ndef f():\n    return undefined_name\nf()")
    assert out(execution) == "before\n"
    assert execution.error.name == "NameError"
    assert "undefined_name" in execution.error.value
    assert any("line 3" in line for line in execution.error.traceback), execution.error.traceback
    assert execution.complete is None
    assert execution.result == []
    assert (await interpreter.codes.run("input()")).error.name == "EOFError"


@check
async def contexts(interpreter: Any) -> None:
    codes = interpreter.codes
    one, two = await codes.create_context("python"), await codes.create_context("python")
    shell = await codes.create_context(SupportedLanguage.BASH)
    assert (one.language, shell.language) == ("python", "bash")
    await codes.run("x = 'one'", context=one)
    await codes.run("x = 'two'", context=two)
    assert (await codes.run("x", context=one)).result[0].text == "'one'"
    assert (await codes.run("x", context=one)).id == one.id
    assert (await codes.get_context(two.id)).id == two.id
    assert {one.id, two.id} <= {context.id for context in await codes.list_contexts("python")}
    assert [context.id for context in await codes.list_contexts("bash")] == [shell.id]
    await codes.delete_context(one.id)
    assert one.id not in {context.id for context in await codes.list_contexts("python")}
    for call in (codes.get_context(one.id), codes.delete_context(one.id), codes.run("x", context=one)):
        error = await raises(SandboxApiException, call)
        assert error.status_code == 404, error
    await codes.delete_contexts("python")
    assert await codes.list_contexts("python") == []


@check
async def bash_cells(interpreter: Any) -> None:
    codes = interpreter.codes
    context = await codes.create_context("bash")
    await codes.run("greeting=hello; cd /usr", context=context)
    execution = await codes.run("echo $greeting; pwd; echo oh >&2", context=context)
    assert (out(execution), err(execution)) == ("hello\n/usr\n", "oh\n")
    failed = await codes.run("echo so; (exit 3)", context=context)
    assert (out(failed), failed.error.value) == ("so\n", "3")
    await codes.delete_context(context.id)


@check
async def languages_that_are_not_there(interpreter: Any) -> None:
    for call in (interpreter.codes.create_context("cobol"), interpreter.codes.run("x", language="cobol")):
        error = await raises(SandboxApiException, call)
        assert error.status_code == 400, error
        assert "cobol" in str(error)


@check
async def handlers(interpreter: Any) -> None:
    told: list[str] = []

    def note(kind: str) -> Any:
        async def handler(event: Any) -> None:
            told.append(kind)

        return handler

    names = ("on_init", "on_stdout", "on_stderr", "on_result", "on_error", "on_execution_complete")
    execution = await interpreter.codes.run(
        "print('x')\n7", handlers=ExecutionHandlers(**{name: note(name) for name in names})
    )
    assert told == ["on_init", "on_stdout", "on_result", "on_execution_complete"], told
    assert execution.result[0].text == "7"


@check
async def interrupt_and_busy(interpreter: Any) -> None:
    codes = interpreter.codes
    context = await codes.create_context("python")
    await codes.run("kept = 1", context=context)
    started = asyncio.Event()

    async def on_stdout(message: Any) -> None:
        started.set()

    running = asyncio.ensure_future(
        codes.run(
            "import time\nprint('on')\ntime.sleep(1000)",
            context=context,
            handlers=ExecutionHandlers(on_stdout=on_stdout),
        )
    )
    await started.wait()
    error = await raises(SandboxApiException, codes.run("1", context=context))
    assert "session is busy" in str(error), error
    await codes.interrupt(context.id)
    execution = await running
    assert execution.error.name == "KeyboardInterrupt"
    assert (await codes.run("kept", context=context)).result[0].text == "1", "the context survives"


@check
async def a_kernel_that_dies(interpreter: Any) -> None:
    codes = interpreter.codes
    context = await codes.create_context("python")
    execution = await codes.run("import os; os._exit(1)", context=context)
    assert execution.error.name == "KernelDied"
    await raises(SandboxApiException, codes.run("1", context=context))
    lost = await codes.run("import os; os._exit(1)")
    assert lost.error.name == "KernelDied"
    assert (await codes.run("1 + 1")).result[0].text == "2", "the default context is made again"
    assert (await codes.run("1 + 1", context=CodeContext(language="python"))).result[0].text == "2"


run(opened)
