# SPDX-License-Identifier: Apache-2.0
"""`osb events`, `executions`, `history` and `runtime`: what happened, and who makes the sandboxes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from opensandbox_cli import duration
from opensandbox_cli.options import Output, SandboxId, pairs
from opensandbox_cli.screen import Form, LineForm
from opensandbox_cli.session import Client, session_of

if TYPE_CHECKING:
    from opensandbox.models import PagedExecutionRecords, PagedHistoryEntries, RuntimeInfo

Page = Annotated[int, typer.Option(min=1, help="Which page.")]
PageSize = Annotated[int, typer.Option(min=1, max=200, help="How many on a page.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (events, executions, history, runtime):
        app.command()(command)


def events(
    ctx: typer.Context,
    sandbox_id: Annotated[str | None, typer.Argument(show_default=False, help="Which sandbox. [default: all]")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="And what happens from now on.")] = False,
    output: Annotated[
        LineForm, typer.Option("-o", "--output", help="raw: words; json: an object a line.")
    ] = LineForm.RAW,
) -> None:
    """Show what happened to sandboxes, a line each."""
    session = session_of(ctx)

    async def work(client: Client) -> None:
        async for event in client.lifecycle.events(sandbox_id, follow=follow, after=None):
            if output == LineForm.JSON:
                session.screen.line(event.model_dump(mode="json", exclude_none=True))
            else:
                words = [f"{event.at:%Y-%m-%dT%H:%M:%SZ}", event.sandbox_id, event.event, event.state, event.message]
                session.screen.text("  ".join(word for word in words if word))

    session.run(work)


def executions(
    ctx: typer.Context, sandbox_id: SandboxId, page: Page = 1, page_size: PageSize = 20, output: Output = Form.TABLE
) -> None:
    """Show who ran what in a sandbox, newest first. Of one that is gone, too."""
    session = session_of(ctx)

    async def work(client: Client) -> PagedExecutionRecords:
        return await client.lifecycle.executions(sandbox_id, page, page_size)

    found, now = session.run(work), datetime.now(UTC)
    rows = [
        [
            one.id,
            "running" if one.running else one.reason or "ended",
            "-" if one.exit_code is None else one.exit_code,
            duration.relative(one.started_at, now),
            one.client or "-",
            one.content,
        ]
        for one in found.records
    ]
    data = {
        "items": [one.model_dump(mode="json") for one in found.records],
        "pagination": found.pagination.model_dump(mode="json"),
    }
    columns = ["id", "state", "exit code", "started", "client", "command"]
    session.screen.rows(output, columns, rows, data, empty="Nothing ran.")


def history(
    ctx: typer.Context,
    metadata: Annotated[
        list[str] | None, typer.Option("-m", "--metadata", metavar="KEY=VALUE", help="Only those with it.")
    ] = None,
    reason: Annotated[
        list[str] | None, typer.Option("-r", "--reason", help="Only those that ended so, such as expired.")
    ] = None,
    page: Page = 1,
    page_size: PageSize = 20,
    output: Output = Form.TABLE,
) -> None:
    """Show sandboxes that are gone: when, and why. `osb executions` tells what ran in them."""
    session = session_of(ctx)
    wanted = pairs(metadata, "--metadata")

    async def work(client: Client) -> PagedHistoryEntries:
        from opensandbox.models import HistoryFilter

        return await client.lifecycle.history(
            HistoryFilter(reasons=reason, metadata=wanted or None, page=page, page_size=page_size)
        )

    found, now = session.run(work), datetime.now(UTC)
    rows = [
        [
            one.id,
            one.end.reason,
            duration.relative(one.gone_at, now),
            duration.relative(one.created_at, now),
            one.image,
            one.executions if one.executions is not None else "-",
        ]
        for one in found.entries
    ]
    data = {
        "items": [one.model_dump(mode="json") for one in found.entries],
        "pagination": found.pagination.model_dump(mode="json"),
    }
    columns = ["id", "reason", "gone", "created", "image", "commands"]
    session.screen.rows(output, columns, rows, data, empty="No sandbox has gone.")


def runtime(ctx: typer.Context, output: Output = Form.TABLE) -> None:
    """Show what makes the sandboxes. Also what it can do, and how full it is."""
    session = session_of(ctx)

    async def work(client: Client) -> RuntimeInfo:
        return await client.lifecycle.runtime()

    found = session.run(work)
    count = found.sandboxes
    fields = {
        "name": found.name,
        "version": found.version,
        "sandboxes": f"{count.now} of {count.limit}" if count.limit else count.now,
        "can": ", ".join(sorted(name for name, able in found.abilities.items() if able)),
        "cannot": ", ".join(sorted(name for name, able in found.abilities.items() if not able)) or None,
        "images": ", ".join(image.get("name", "") for image in found.images or ()) or None,
        "missing": "; ".join(found.missing or ()) or None,
    }
    session.screen.record(output, fields, found.model_dump(mode="json"))
