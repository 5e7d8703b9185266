# SPDX-License-Identifier: Apache-2.0
"""`osb command`: run programs in a sandbox."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from opensandbox_cli import duration, execution, failure
from opensandbox_cli.options import (
    Environment,
    ExecutionId,
    NamedInErrors,
    Output,
    SandboxId,
    TextOutput,
    TimeLimit,
    Workdir,
    pairs,
)
from opensandbox_cli.screen import Form, TextForm
from opensandbox_cli.session import Client, session_of

app = typer.Typer(name="command", no_args_is_help=True, help="Run programs in a sandbox.")


@app.command(cls=NamedInErrors)
def run(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    command: Annotated[list[str], typer.Argument(show_default=False, help="What to run. Write -- before it.")],
    background: Annotated[bool, typer.Option("-d", "--background", help="Do not wait for its end.")] = False,
    workdir: Workdir = None,
    timeout: TimeLimit = None,
    env: Environment = None,
    argv: Annotated[
        bool, typer.Option("--argv", help="Without a shell: the words are the program's arguments.")
    ] = False,
    output: Annotated[
        TextForm | None,
        typer.Option("-o", "--output", help="raw: the output itself; with -d also table, json, yaml."),
    ] = None,
) -> None:
    """Run a command, show its output as it comes, and end with its exit code.

    `osb command run ID -- ls -l "my file"` runs these words. A single word is a line for the shell:
    `osb command run ID -- 'ls | wc -l'`. Standard output and standard error arrive separately and unchanged; there is
    no standard input. Ctrl-C ends the remote command too.

    Exit codes: those of the command; 128+n when signal n ended it; 124 after --timeout; 125 when osb itself failed.
    """
    session = session_of(ctx)
    session.failure_code = failure.OURS
    if not background and output not in (None, TextForm.RAW):
        raise failure.usage(f"-o {output} needs -d", "In the foreground the output of the command is the result.")
    variables = pairs(env, "--env", from_environment=True)

    async def work(client: Client) -> Any:
        from opensandbox.models import RunCommandOpts

        opts = RunCommandOpts(background=background, working_directory=workdir, timeout=timeout, envs=variables or None)
        sent = execution.as_command(command, argv)
        async with await client.sandbox(sandbox_id) as sandbox:
            if background:
                return await sandbox.commands.run(sent, opts=opts)
            attached = execution.Attached(sandbox, session.screen)
            return await execution.attended(lambda: attached.run(sent, opts), attached.stop)

    done = session.run(work)
    if not background:
        raise typer.Exit(done)
    started = {"execution_id": done.id, "sandbox_id": sandbox_id, "mode": "background"}
    if output == TextForm.RAW:
        session.screen.text(done.id)
    else:
        session.screen.record(output or Form.TABLE, started, started)


@app.command()
def status(ctx: typer.Context, sandbox_id: SandboxId, execution_id: ExecutionId, output: Output = Form.TABLE) -> None:
    """Show whether a command still runs, or how it ended."""
    session = session_of(ctx)

    async def work(client: Client) -> Any:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await sandbox.commands.get_command_status(execution_id)

    found = session.run(work)
    now = datetime.now(UTC)
    end = found.end
    fields = {
        "id": found.id,
        "command": found.content,
        "running": "yes" if found.running else "no",
        "exit code": found.exit_code,
        "end": end and ": ".join(filter(None, [end.reason, end.signal, end.message])),
        "error": found.error or None,
        "started": found.started_at and duration.relative(found.started_at, now),
        "finished": found.finished_at and duration.relative(found.finished_at, now),
    }
    session.screen.record(output, fields, found.model_dump(mode="json"))


@app.command()
def logs(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    execution_id: ExecutionId,
    cursor: Annotated[
        int | None, typer.Option(min=0, help="From this byte on; json and yaml say the next one.")
    ] = None,
    output: TextOutput = TextForm.RAW,
) -> None:
    """Show the output of a command in the background."""
    session = session_of(ctx)

    async def work(client: Client) -> Any:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await sandbox.commands.get_background_command_logs(execution_id, cursor)

    found = session.run(work)
    if output == TextForm.RAW:
        sys.stdout.write(found.content)
    elif output == TextForm.TABLE:
        session.screen.foreign(found.content)
    else:
        session.screen.data(output, {"content": found.content, "cursor": found.cursor})


@app.command()
def interrupt(
    ctx: typer.Context, sandbox_id: SandboxId, execution_id: ExecutionId, output: Output = Form.TABLE
) -> None:
    """End a command and all it started."""
    session = session_of(ctx)

    async def work(client: Client) -> None:
        async with await client.sandbox(sandbox_id) as sandbox:
            await sandbox.commands.interrupt(execution_id)

    session.run(work)
    session.screen.message(output, f"Interrupted: {execution_id}")
