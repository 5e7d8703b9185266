# SPDX-License-Identifier: Apache-2.0
"""`osb version`: of this program, of the SDK under it, and of the server it speaks to."""

from __future__ import annotations

import typer

from opensandbox_cli import __version__
from opensandbox_cli.options import Output
from opensandbox_cli.screen import Form
from opensandbox_cli.session import Client, session_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(version)


def version(ctx: typer.Context, output: Output = Form.TABLE) -> None:
    """Show the versions of osb, of the SDK and of the server."""
    import opensandbox

    session = session_of(ctx)

    async def work(client: Client) -> str | None:
        from opensandbox.exceptions import SandboxException

        try:
            return await client.server_version()
        except (SandboxException, ValueError, KeyError, TypeError) as error:
            session.detail(str(error))
            return None

    server = session.run(work)
    data = {"osb": __version__, "sdk": opensandbox.__version__, "server": server, "server_url": session.settings.server}
    where = session.settings.server
    shown = f"{server} at {where}" if server else f"none at {where}"
    session.screen.record(output, {"osb": __version__, "sdk": opensandbox.__version__, "server": shown}, data)
