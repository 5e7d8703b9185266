# SPDX-License-Identifier: Apache-2.0
"""The program: global options, the groups of commands, and the one place where errors are told.

Nothing here or in `commands` imports the SDK or Rich at the top: `osb --help` and completion must come at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer._click.exceptions import UsageError
from typer.core import TyperGroup

from opensandbox_cli import __version__, failure
from opensandbox_cli.commands import command, config, devops, diagnostics, file, sandbox
from opensandbox_cli.commands.insight import register as register_insight
from opensandbox_cli.commands.run import register as register_run
from opensandbox_cli.commands.shell import register as register_shell
from opensandbox_cli.commands.version import register as register_version
from opensandbox_cli.session import Session


class Root(TyperGroup):
    """Turns whatever a command raises into a line on standard error and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            answer = super().invoke(ctx)
            sys.stdout.flush()
            return answer
        except BrokenPipeError:
            # Python would try to flush once more at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(failure.BROKEN_PIPE) from None
        except (typer.Exit, typer.Abort):
            raise
        except UsageError as error:
            if error.ctx is not None and error.ctx.command_path in failure.PASSES_CODE_ON:
                error.exit_code = failure.OURS
            # How pydantic, which checks the choices, begins.
            error.message = error.message.removeprefix("Value error, ")
            raise
        except Exception as error:
            raise typer.Exit(_told(ctx, error)) from None


def _told(ctx: Any, error: Exception) -> int:
    session: Session = ctx.obj or Session({})
    if session.verbosity > 1:
        import traceback

        traceback.print_exception(error)
    try:
        screen, server = session.screen, session.settings.server
    except failure.Failure:
        screen, server = session.plain_screen, ""
    code = failure.show(error, screen, server)
    return code if session.failure_code is None else session.failure_code


app = typer.Typer(
    name="osb",
    cls=Root,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"opensandbox, version {__version__}")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    api_key: Annotated[str | None, typer.Option(help="Key of the server.")] = None,
    domain: Annotated[str | None, typer.Option(help="Address of the server, such as localhost:8080.")] = None,
    protocol: Annotated[str | None, typer.Option(metavar="[http|https]", help="http or https.")] = None,
    request_timeout: Annotated[
        str | None, typer.Option(metavar="DURATION", help="How long to wait for an answer.")
    ] = None,
    use_server_proxy: Annotated[
        bool | None,
        typer.Option("--use-server-proxy/--no-use-server-proxy", help="Reach sandboxes through the server."),
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="Configuration file. [default: ~/.opensandbox/config.toml]")
    ] = None,
    verbose: Annotated[
        int, typer.Option("-v", "--verbose", count=True, show_default=False, help="Say more; twice: everything.")
    ] = 0,
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Make and use OpenSandbox sandboxes.

    Start with `osb run -- echo hello`.
    """
    flags = {
        "connection.api_key": api_key,
        "connection.domain": domain,
        "connection.protocol": protocol,
        "connection.request_timeout": request_timeout,
        "connection.use_server_proxy": use_server_proxy,
    }
    ctx.obj = Session(flags, config_file, verbose, False if no_color else None)


register_run(app)
register_shell(app)
for group in (sandbox, command, file, config, diagnostics, devops):
    app.add_typer(group.app)
register_insight(app)
register_version(app)


def cli() -> None:
    """The entry point of `osb` and `opensandbox`."""
    app(prog_name="osb")
