# SPDX-License-Identifier: Apache-2.0
"""`osb diagnostics`: what a sandbox printed, and what happened to it."""

from __future__ import annotations

from typing import Annotated

import typer

from opensandbox_cli.options import SandboxId, TextOutput
from opensandbox_cli.screen import TextForm
from opensandbox_cli.session import session_of

app = typer.Typer(name="diagnostics", no_args_is_help=True, help="Look into a sandbox that does not do what it should.")


def _show(ctx: typer.Context, sandbox_id: str, kind: str, scope: str, form: TextForm) -> None:
    session = session_of(ctx)
    found = session.run(lambda client: client.lifecycle.diagnostic(sandbox_id, kind, scope))
    for warning in found.warnings or ():
        session.screen.warning(warning)
    if form in (TextForm.JSON, TextForm.YAML):
        session.screen.data(form, found.model_dump(mode="json"))
        return
    session.screen.foreign(found.content or found.content_url or "")
    if found.truncated and form == TextForm.TABLE:
        session.screen.note("There was more; this is the end of it." if kind == "logs" else "There is more.")


@app.command()
def logs(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    scope: Annotated[str, typer.Option("-s", "--scope", help="container, all, or what the server knows.")] = "all",
    output: TextOutput = TextForm.TABLE,
) -> None:
    """Show what the entry point of a sandbox printed."""
    _show(ctx, sandbox_id, "logs", scope, output)


@app.command()
def events(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    scope: Annotated[str, typer.Option("-s", "--scope", help="runtime, all, or what the server knows.")] = "all",
    output: TextOutput = TextForm.TABLE,
) -> None:
    """Show what happened to a sandbox."""
    _show(ctx, sandbox_id, "events", scope, output)
