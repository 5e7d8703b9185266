# SPDX-License-Identifier: Apache-2.0
"""Arguments and options that several commands have."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Annotated, Any

import typer
from typer._click.exceptions import UsageError
from typer.core import TyperCommand

from opensandbox_cli import duration
from opensandbox_cli.screen import Form, RawForm, TextForm


def _duration(text: str | timedelta) -> timedelta:
    if isinstance(text, timedelta):
        return text  # a default
    try:
        return duration.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _limit(text: str) -> timedelta:
    limit = _duration(text)
    if limit < timedelta(milliseconds=1):
        raise typer.BadParameter("a command needs some time; leave it out for no limit")
    return limit


def _lifetime(text: str) -> str:
    try:
        duration.parse_or_none(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def pairs(words: list[str] | None, option: str, *, from_environment: bool = False) -> dict[str, str]:
    """`KEY=VALUE` words as a dictionary; `KEY` alone may take its value from our own environment."""
    found: dict[str, str] = {}
    for word in words or ():
        key, equals, value = word.partition("=")
        if any(letter.isspace() or not letter.isprintable() for letter in key):
            raise typer.BadParameter(f"{key!r} is not a name: it contains a space", param_hint=option)
        if not equals and from_environment:
            if key not in os.environ:
                raise typer.BadParameter(f"{key} has no value and is not set here", param_hint=option)
            value = os.environ[key]
        elif not equals or not key:
            raise typer.BadParameter(f"{word!r} is not KEY=VALUE", param_hint=option)
        found[key] = value
    return found


def octal(text: str) -> int:
    """A mode as the protocol has it: the octal digits read as a decimal number, so `0644` is 644."""
    if not text.isdecimal() or len(text) > 5 or set(text) & {"8", "9"} or int(text) > 7777:
        raise typer.BadParameter(f"{text!r} is not a mode; write octal digits, such as 0644")
    return int(text)


class NamedInErrors(TyperCommand):
    """A command whose name is in every error of its options, also when the parser itself finds it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line."""
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx
            raise


SandboxId = Annotated[str, typer.Argument(show_default=False, help="Which sandbox.")]
ExecutionId = Annotated[str, typer.Argument(show_default=False, help="Which command.")]
Path = Annotated[str, typer.Argument(show_default=False, help="A path in the sandbox.")]
Paths = Annotated[list[str], typer.Argument(show_default=False, help="Paths in the sandbox.")]

Output = Annotated[Form, typer.Option("-o", "--output", help="How to show the result.")]
TextOutput = Annotated[TextForm, typer.Option("-o", "--output", help="How to show the result.")]
RawOutput = Annotated[RawForm, typer.Option("-o", "--output", help="Only raw.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Only the id.")]

Lifetime = Annotated[
    str | None,
    typer.Option(
        "-t", "--timeout", metavar="DURATION", parser=_lifetime,
        help="When it ends by itself, such as 10m or 1h30m; none: never. [default: defaults.timeout, else 10m]",
    ),
]  # fmt: skip
TimeLimit = Annotated[
    timedelta | None,
    typer.Option(
        "-t", "--timeout", metavar="DURATION", parser=_limit,
        help="End the command after this time, with exit code 124.",
    ),
]  # fmt: skip
Span = Annotated[
    timedelta,
    typer.Option(
        "-t", "--timeout", metavar="DURATION", parser=_duration, show_default=False, help="How long from now on."
    ),
]
ReadyTimeout = Annotated[
    timedelta,
    typer.Option(
        "--ready-timeout", metavar="DURATION", parser=_duration, show_default="30s",
        help="How long to wait until it is ready.",
    ),
]  # fmt: skip
Workdir = Annotated[str | None, typer.Option("-w", "--workdir", help="Working directory.")]
Environment = Annotated[
    list[str] | None,
    typer.Option("-e", "--env", metavar="KEY[=VALUE]", help="Environment variable; KEY alone passes ours on."),
]
Mode = Annotated[int | None, typer.Option(metavar="MODE", parser=octal, help="Permissions, such as 0644.")]
Owner = Annotated[str | None, typer.Option(help="Its owner.")]
Group = Annotated[str | None, typer.Option(help="Its group.")]
