# SPDX-License-Identifier: Apache-2.0
"""`osb config`: the settings of this program."""

from __future__ import annotations

from typing import Annotated

import typer

from opensandbox_cli import config
from opensandbox_cli.options import Output
from opensandbox_cli.screen import Form
from opensandbox_cli.session import session_of

app = typer.Typer(name="config", no_args_is_help=True, help="Show and change the settings of osb.")


@app.command()
def init(
    ctx: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
    output: Output = Form.TABLE,
) -> None:
    """Write a configuration file with every setting as a comment."""
    session = session_of(ctx)
    config.initialise(session.path, force)
    session.plain_screen.message(output, f"Config file created: {session.path}")


@app.command()
def show(ctx: typer.Context, output: Output = Form.TABLE) -> None:
    """Show the settings in effect and where they come from. Secrets are masked."""
    session = session_of(ctx)
    settings = session.settings
    values = {key: settings[key.path] for key in config.KEYS}
    shown = {key: config.masked(value) if key.name == "api_key" else value for key, value in values.items()}
    data = {key.shown_as: value for key, value in shown.items()}
    data |= {"config_path": str(settings.file), "config_file_exists": settings.file.exists()}
    rows = [
        [key.path, _written(key.unset if value is None else value), settings.sources[key.path]]
        for key, value in shown.items()
    ]
    session.screen.rows(output, ["setting", "value", "from"], rows, data, empty="")


@app.command("set")
def set_value(
    ctx: typer.Context,
    key: Annotated[str, typer.Argument(show_default=False, help="Such as connection.domain.")],
    value: Annotated[str, typer.Argument(show_default=False, help="Its new value.")],
    output: Output = Form.TABLE,
) -> None:
    """Change a setting in the configuration file."""
    session = session_of(ctx)
    stored = config.store(session.path, key, value)
    shown = config.masked(stored) if key.endswith("api_key") else _written(stored)
    session.plain_screen.message(output, f"Set {key} = {shown}")


@app.command()
def path(ctx: typer.Context) -> None:
    """Show where the configuration file is."""
    session = session_of(ctx)
    session.plain_screen.text(session.path)


def _written(value: object) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
