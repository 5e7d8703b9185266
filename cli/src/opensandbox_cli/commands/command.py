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
    RawOutput,
    SandboxId,
    TextOutput,
    TimeLimit,
    Workdir,
    pairs,
)
from opensandbox_cli.screen import Form, RawForm, TextForm
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
    stdin: Annotated[bool, typer.Option("-i", "--stdin", help="Pass standard input on to the command.")] = False,
    keep_stdin: Annotated[
        bool, typer.Option("--keep-stdin", help="With -d: keep its input open, for `osb command stdin`.")
    ] = False,
    output: Annotated[
        TextForm | None,
        typer.Option("-o", "--output", help="raw: the output itself; with -d also table, json, yaml."),
    ] = None,
) -> None:
    """Run a command, show its output as it comes, and end with its exit code.

    `osb command run ID -- ls -l "my file"` runs these words. A single word is a line for the shell:
    `osb command run ID -- 'ls | wc -l'`. Standard output and standard error arrive separately and unchanged;
    standard input goes along with -i. Ctrl-C ends the remote command too.

    Exit codes: those of the command; 128+n when signal n ended it; 124 after --timeout; 125 when osb itself failed.
    """
    session = session_of(ctx)
    session.failure_code = failure.OURS
    if not background and output not in (None, TextForm.RAW):
        raise failure.usage(f"-o {output} needs -d", "In the foreground the output of the command is the result.")
    if stdin and background:
        raise failure.usage("-i and -d exclude each other", "--keep-stdin leaves its input to `osb command stdin`.")
    if keep_stdin and not background:
        raise failure.usage("--keep-stdin needs -d", "-i passes standard input on.")
    variables = pairs(env, "--env", from_environment=True)

    async def work(client: Client) -> Any:
        from opensandbox.models import RunCommandOpts

        opts = RunCommandOpts(
            background=background,
            working_directory=workdir,
            timeout=timeout,
            envs=variables or None,
            stdin=keep_stdin,
        )
        sent = execution.as_command(command, argv)
        async with await client.sandbox(sandbox_id) as sandbox:
            if background:
                return await sandbox.commands.run(sent, opts=opts)
            attached = execution.Attached(sandbox, session.screen)
            given = execution.typed() if stdin else None
            return await execution.attended(lambda: attached.run(sent, opts, given), attached.stop)

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


@app.command(name="list")
def list_commands(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    running: Annotated[
        bool | None, typer.Option("--running/--ended", show_default=False, help="Only those that run, or have ended.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, max=1000, help="How many.")] = 100,
    output: Output = Form.TABLE,
) -> None:
    """Show the commands of the last 24 hours, newest first."""
    session = session_of(ctx)

    async def work(client: Client) -> Any:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await sandbox.commands.list(running, limit)

    found = session.run(work)
    now = datetime.now(UTC)
    rows = [
        [
            one.id,
            "running" if one.running else (one.end.reason if one.end else "ended"),
            "-" if one.exit_code is None else one.exit_code,
            duration.relative(one.started_at, now) if one.started_at else "-",
            one.content,
        ]
        for one in found
    ]
    data = {"items": [one.model_dump(mode="json") for one in found]}
    session.screen.rows(output, ["id", "state", "exit code", "started", "command"], rows, data, empty="No commands.")


@app.command(cls=NamedInErrors)
def attach(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    execution_id: ExecutionId,
    offset: Annotated[int, typer.Option(min=0, help="Begin with this byte of its output.")] = 0,
) -> None:
    """Follow a command that runs, or that has ended: its output, and its exit code.

    Ctrl-C leaves; the command goes on. `osb command interrupt` ends it.
    """
    session = session_of(ctx)
    session.failure_code = failure.OURS

    async def work(client: Client) -> int:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await execution.Attached(sandbox, session.screen).attach(execution_id, offset)

    raise typer.Exit(session.run(work))


@app.command()
def stdin(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    execution_id: ExecutionId,
    content: Annotated[str | None, typer.Option("-c", "--content", help="The input. [default: standard input]")] = None,
    close: Annotated[bool, typer.Option("--close/--keep-open", help="End its input afterwards.")] = True,
    output: Output = Form.TABLE,
) -> None:
    """Give input to a command that was started with `osb command run -d --keep-stdin`."""
    session = session_of(ctx)

    async def work(client: Client) -> int:
        async with await client.sandbox(sandbox_id) as sandbox:
            given = execution.typed() if content is None else content
            return await sandbox.commands.write_stdin(execution_id, given, close=close)

    session.screen.message(output, f"Sent: {session.run(work)} bytes")


shells = typer.Typer(name="session", no_args_is_help=True, help="Shells that keep their state between commands.")
app.add_typer(shells)

ShellId = Annotated[str, typer.Argument(show_default=False, help="Which session.")]


@shells.command(name="create")
def create_shell(
    ctx: typer.Context, sandbox_id: SandboxId, workdir: Workdir = None, output: Output = Form.TABLE
) -> None:
    """Open a shell that stays."""
    session = session_of(ctx)

    async def work(client: Client) -> str:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await sandbox.commands.create_session(working_directory=workdir)

    made = {"sandbox_id": sandbox_id, "session_id": session.run(work), "working_directory": workdir}
    session.screen.record(output, made, made)


@shells.command(name="run", cls=NamedInErrors)
def run_in_shell(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    shell_id: ShellId,
    command: Annotated[list[str], typer.Argument(show_default=False, help="What to run. Write -- before it.")],
    workdir: Workdir = None,
    timeout: TimeLimit = None,
    output: RawOutput = RawForm.RAW,
) -> None:
    """Run a command in a shell, and end with its exit code. What it changes in the shell stays."""
    session = session_of(ctx)
    session.failure_code = failure.OURS
    line = execution.as_command(command, argv=False)

    async def work(client: Client) -> int:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await execution.Attached(sandbox, session.screen).run_in_session(
                shell_id, str(line), workdir, timeout
            )

    raise typer.Exit(session.run(work))


@shells.command(name="list")
def list_shells(ctx: typer.Context, sandbox_id: SandboxId, output: Output = Form.TABLE) -> None:
    """Show the shells that are open."""
    session = session_of(ctx)

    async def work(client: Client) -> Any:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await sandbox.commands.list_sessions()

    found, now = session.run(work), datetime.now(UTC)
    rows = [
        [one.session_id, "busy" if one.running else "idle", duration.relative(one.created_at, now), one.cwd]
        for one in found
    ]
    data = {"items": [one.model_dump(mode="json") for one in found]}
    session.screen.rows(output, ["id", "state", "created", "directory"], rows, data, empty="No sessions.")


@shells.command(name="delete")
def delete_shell(ctx: typer.Context, sandbox_id: SandboxId, shell_id: ShellId, output: Output = Form.TABLE) -> None:
    """End a shell and all that runs in it."""
    session = session_of(ctx)

    async def work(client: Client) -> None:
        async with await client.sandbox(sandbox_id) as sandbox:
            await sandbox.commands.delete_session(shell_id)

    session.run(work)
    session.screen.message(output, f"Deleted session: {shell_id}")
