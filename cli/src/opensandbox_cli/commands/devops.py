# SPDX-License-Identifier: Apache-2.0
"""`osb devops`: the published plain-text diagnostics."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from opensandbox_cli.options import RawOutput, SandboxId
from opensandbox_cli.screen import RawForm
from opensandbox_cli.session import session_of

app = typer.Typer(name="devops", no_args_is_help=True, help="Diagnostics as plain text, for people.")

Tail = Annotated[int, typer.Option("-n", "--tail", min=1, help="How many lines of output, from the end.")]


def _show(ctx: typer.Context, sandbox_id: str, kind: str, params: dict[str, object]) -> None:
    session = session_of(ctx)
    path = f"/sandboxes/{quote(sandbox_id, safe='')}/diagnostics/{kind}"
    given = [(name, str(value)) for name, value in params.items() if value is not None]
    answer = session.run(lambda client: client.server("GET", path, given, {"Accept": "text/plain"}))
    session.screen.foreign(answer.content.decode("utf-8", "replace"))


@app.command()
def logs(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    tail: Tail = 100,
    since: Annotated[
        str | None, typer.Option("-s", "--since", help="Only what is newer than this, such as 10m.")
    ] = None,
    output: RawOutput = RawForm.RAW,
) -> None:
    """Show what a sandbox printed. `osb diagnostics logs` is the newer form."""
    _show(ctx, sandbox_id, "logs", {"tail": tail, "since": since})


@app.command()
def events(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    limit: Annotated[int, typer.Option("-l", "--limit", min=1, help="How many events.")] = 50,
    output: RawOutput = RawForm.RAW,
) -> None:
    """Show what happened to a sandbox. `osb diagnostics events` is the newer form."""
    _show(ctx, sandbox_id, "events", {"limit": limit})


@app.command()
def inspect(ctx: typer.Context, sandbox_id: SandboxId, output: RawOutput = RawForm.RAW) -> None:
    """Show everything known about a sandbox."""
    _show(ctx, sandbox_id, "inspect", {})


@app.command()
def summary(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    tail: Tail = 50,
    event_limit: Annotated[int, typer.Option("--event-limit", min=1, help="How many events.")] = 20,
    output: RawOutput = RawForm.RAW,
) -> None:
    """Show inspection, events and output in one text."""
    _show(ctx, sandbox_id, "summary", {"tail": tail, "event_limit": event_limit})
