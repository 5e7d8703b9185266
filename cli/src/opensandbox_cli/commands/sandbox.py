# SPDX-License-Identifier: Apache-2.0
"""`osb sandbox`: make, find and end sandboxes."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opensandbox_cli import config, duration
from opensandbox_cli.failure import Failure, usage
from opensandbox_cli.options import (
    Environment,
    Lifetime,
    Output,
    Quiet,
    ReadyTimeout,
    SandboxId,
    Span,
    TextOutput,
    pairs,
)
from opensandbox_cli.screen import Form, TextForm
from opensandbox_cli.session import Client, Session, session_of

if TYPE_CHECKING:
    from opensandbox.models import PaginationInfo, SandboxInfo

app = typer.Typer(name="sandbox", no_args_is_help=True, help="Make, find and end sandboxes.")

SHORTEST_LIFETIME = timedelta(minutes=1)


def lifetime(session: Session, given: str | None) -> timedelta | None:
    """How long a new sandbox may live: as asked for, else as configured, else ten minutes."""
    span = duration.parse_or_none(given or session.settings["defaults.timeout"] or config.DEFAULT_LIFETIME)
    if span is not None and span < SHORTEST_LIFETIME:
        raise usage(
            f"{'--timeout' if given else 'defaults.timeout'} is at least one minute",
            "`osb sandbox kill` ends a sandbox sooner; `osb run` makes one that ends with its command.",
        )
    return span


@app.command()
def create(
    ctx: typer.Context,
    image: Annotated[str | None, typer.Option("-i", "--image", help="Image. [default: defaults.image]")] = None,
    image_auth_username: Annotated[str | None, typer.Option(help="User name for a private image.")] = None,
    image_auth_password: Annotated[str | None, typer.Option(help="Password for a private image.")] = None,
    template: Annotated[str | None, typer.Option(help="Template to make it from, instead of an image.")] = None,
    snapshot_id: Annotated[str | None, typer.Option(help="Snapshot to make it from, instead of an image.")] = None,
    file: Annotated[
        Path | None,
        typer.Option("-f", "--file", help="JSON file with the whole request; - is standard input.", allow_dash=True),
    ] = None,
    timeout: Lifetime = None,
    env: Environment = None,
    metadata: Annotated[list[str] | None, typer.Option("-m", "--metadata", metavar="KEY=VALUE", help="Label.")] = None,
    extension: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Extension parameter.")] = None,
    resource: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Limit, such as cpu=1 or memory=2Gi.")
    ] = None,
    entrypoint: Annotated[
        list[str] | None, typer.Option(help="A word of the entry point; repeat it for each word.")
    ] = None,
    network_policy_file: Annotated[Path | None, typer.Option(help="JSON file with a network policy.")] = None,
    credential_proxy: Annotated[bool, typer.Option("--credential-proxy", help="With a credential proxy.")] = False,
    volumes_file: Annotated[Path | None, typer.Option(help="JSON file with a list of volumes.")] = None,
    skip_health_check: Annotated[
        bool, typer.Option("--skip-health-check", help="Do not wait until it is ready.")
    ] = False,
    ready_timeout: ReadyTimeout = timedelta(seconds=30),
    output: Output = Form.TABLE,
    quiet: Quiet = False,
) -> None:
    """Make a sandbox."""
    session = session_of(ctx)
    if file is not None:
        building = (image, image_auth_username, image_auth_password, template, snapshot_id, timeout, env, metadata)
        if any((*building, extension, resource, entrypoint, network_policy_file, credential_proxy, volumes_file)):
            raise usage("--file is the whole request; leave the other options out")
        request = _document(file, dict)
    else:
        if sum(source is not None for source in (image, template, snapshot_id)) > 1:
            raise usage("give one of --image, --template and --snapshot-id")
        if not (template or snapshot_id):
            image = image or session.settings["defaults.image"]
            if image is None:
                raise usage(
                    "which image?", "Pass --image (this machine's own programs: -i host), or set defaults.image."
                )
        if (image_auth_username is None) != (image_auth_password is None):
            raise usage("--image-auth-username and --image-auth-password go together")
        ends_after = lifetime(session, timeout)
        auth = {"username": image_auth_username, "password": image_auth_password}
        wanted: dict[str, Any] = {
            "image": {"uri": image, **({"auth": auth} if image_auth_username else {})} if image else None,
            "templateId": template,
            "snapshotId": snapshot_id,
            "timeout": None if ends_after is None else int(ends_after.total_seconds()),
            "env": pairs(env, "--env", from_environment=True) or None,
            "metadata": pairs(metadata, "--metadata") or None,
            "extensions": pairs(extension, "--extension") or None,
            "resourceLimits": pairs(resource, "--resource") or {"cpu": "1", "memory": "2Gi"},
            "entrypoint": entrypoint or (["tail", "-f", "/dev/null"] if image else None),
            "networkPolicy": _document(network_policy_file, dict) if network_policy_file else None,
            "credentialProxy": {"enabled": True} if credential_proxy else None,
            "volumes": _document(volumes_file, list) if volumes_file else None,
        }
        request = {name: value for name, value in wanted.items() if value is not None}

    made = session.run(lambda client: _create(client, session, request, ready_timeout, skip_health_check))
    seconds, source = request.get("timeout"), request.get("image")
    result = {
        "id": made,
        "status": "created",
        "timeout": "manual-cleanup" if seconds is None else str(timedelta(seconds=seconds)),
        "image": source.get("uri") if isinstance(source, dict) else None,
    }
    if quiet:
        session.screen.text(made)
    else:
        ends = "never" if seconds is None else f"in {duration.brief(timedelta(seconds=seconds))}"
        session.screen.record(output, {**result, "timeout": None, "expires": ends}, result)


async def _create(
    client: Client, session: Session, request: dict[str, Any], ready_timeout: timedelta, skip_health_check: bool
) -> str:
    from opensandbox import Sandbox

    limit = max(client.config.request_timeout, ready_timeout)
    created = await client.lifecycle.create(request, limit, time.monotonic() + limit.total_seconds())
    for warning in created.warnings:
        session.screen.warning(warning)
    if created.timings:
        session.detail("created in " + ", ".join(f"{name} {spent:.1f} ms" for name, spent in created.timings.items()))
    if skip_health_check:
        return created.id
    try:
        if created.status.state in ("Terminated", "Failed"):
            said = (created.end and created.end.message) or created.status.message or created.status.state
            raise Failure(
                f"the sandbox ended at once: {said}",
                "It lives as long as its entry point; give one that keeps running.",
            )
        # An answer that carries the endpoints was given by a sandbox that works already.
        if not created.endpoints:
            await Sandbox.connect(created.id, client.config, connect_timeout=ready_timeout)
    except BaseException:
        from opensandbox.concurrency import shielded

        with shielded(timedelta(seconds=10)):
            await client.lifecycle.delete(created.id)
        raise
    return created.id


@app.command("list")
def list_sandboxes(
    ctx: typer.Context,
    state: Annotated[
        list[str] | None, typer.Option("-s", "--state", help="Only those in this state: Running, Pending, ...")
    ] = None,
    metadata: Annotated[
        list[str] | None, typer.Option("-m", "--metadata", metavar="KEY=VALUE", help="Only those with this label.")
    ] = None,
    page: Annotated[int | None, typer.Option(min=1, help="Which page.")] = None,
    page_size: Annotated[int | None, typer.Option(min=1, help="How many on a page.")] = None,
    output: Output = Form.TABLE,
    quiet: Annotated[bool, typer.Option("-q", "--quiet", help="Only the ids.")] = False,
) -> None:
    """List sandboxes, newest first."""
    session = session_of(ctx)
    labels = pairs(metadata, "--metadata")

    async def work(client: Client) -> Any:
        from opensandbox.models import SandboxFilter

        wanted = SandboxFilter(states=state or None, metadata=labels or None, page=page, page_size=page_size)
        return await client.lifecycle.list(wanted)

    found = session.run(work)
    if quiet:
        for info in found.sandbox_infos:
            session.screen.text(info.id)
        return
    now = datetime.now(UTC)
    rows = [
        [
            info.id,
            info.status.state,
            _source(info),
            duration.relative(info.created_at, now),
            _expiry(info, now),
        ]
        for info in found.sandbox_infos
    ]
    paging = found.pagination
    data = {"items": [_dump(info) for info in found.sandbox_infos], "pagination": _dump(found.pagination)}
    session.screen.rows(output, ["id", "status", "image", "created", "expires"], rows, data, empty=_none_there(paging))
    if output == Form.TABLE and paging.has_next_page:
        session.screen.note(
            f"Page {paging.page} of {paging.total_pages}, {paging.total_items} in all;"
            f" --page {paging.page + 1} goes on."
        )


@app.command()
def get(ctx: typer.Context, sandbox_id: SandboxId, output: Output = Form.TABLE) -> None:
    """Show what is known about a sandbox."""
    session = session_of(ctx)
    info = session.run(lambda client: client.lifecycle.get(sandbox_id))
    now = datetime.now(UTC)
    fields = {
        "id": info.id,
        "status": info.status.state,
        "reason": info.status.reason,
        "message": info.status.message,
        **_end(info),
        "image": _source(info),
        "entrypoint": _words(info.entrypoint),
        "created": f"{info.created_at.isoformat()} ({duration.relative(info.created_at, now)})",
        "expires": f"{info.expires_at.isoformat()} ({_expiry(info, now)})" if info.expires_at else "never",
        "metadata": _labels(info.metadata),
        "extensions": _labels(info.extensions),
        "platform": f"{info.platform.os}/{info.platform.arch}" if info.platform else None,
        **_isolation(info),
    }
    session.screen.record(output, fields, _dump(info))


@app.command()
def kill(
    ctx: typer.Context,
    sandbox_ids: Annotated[list[str], typer.Argument(show_default=False, help="Which.")],
    output: Output = Form.TABLE,
) -> None:
    """End sandboxes; their files are gone with them.

    One that cannot be ended does not keep the others; the exit code is 1 then.
    """
    session = session_of(ctx)
    failed: list[tuple[str, Exception]] = []

    async def work(client: Client) -> list[str]:
        from opensandbox.exceptions import SandboxApiException

        ended: list[str] = []
        for sandbox_id in dict.fromkeys(sandbox_ids):
            try:
                await client.lifecycle.delete(sandbox_id)
                ended.append(sandbox_id)
            except SandboxApiException as error:
                failed.append((sandbox_id, error))
        return ended

    ended = session.run(work)
    if failed and len(sandbox_ids) == 1:
        raise failed[0][1]
    rows = [{"sandbox_id": sandbox_id, "status": "terminated"} for sandbox_id in ended]
    if rows or output != Form.TABLE:
        session.screen.rows(output, ["sandbox_id", "status"], [list(row.values()) for row in rows], rows, empty="")
    for sandbox_id, error in failed:
        session.screen.error(f"{sandbox_id}: {getattr(error, 'message', error)}")
    if failed:
        raise typer.Exit(1)


@app.command()
def pause(ctx: typer.Context, sandbox_id: SandboxId, output: Output = Form.TABLE) -> None:
    """Pause a sandbox, where the server's runtime can."""
    session = session_of(ctx)
    session.run(lambda client: client.lifecycle.pause(sandbox_id))
    session.screen.message(output, f"Paused: {sandbox_id}")


@app.command()
def resume(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    skip_health_check: Annotated[
        bool, typer.Option("--skip-health-check", help="Do not wait until it is ready.")
    ] = False,
    resume_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait until it is ready.")
    ] = "30s",
    output: Output = Form.TABLE,
) -> None:
    """Let a paused sandbox go on."""
    session = session_of(ctx)
    try:
        limit = duration.parse(resume_timeout)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--resume-timeout") from None

    async def work(client: Client) -> None:
        from opensandbox import Sandbox

        await client.lifecycle.resume(sandbox_id)
        if not skip_health_check:
            async with await Sandbox.connect(sandbox_id, client.config, connect_timeout=limit):
                pass

    session.run(work)
    session.screen.message(output, f"Resumed: {sandbox_id}")


@app.command()
def renew(ctx: typer.Context, sandbox_id: SandboxId, timeout: Span, output: Output = Form.TABLE) -> None:
    """Let a sandbox end later, or sooner."""
    session = session_of(ctx)
    renewed = session.run(lambda client: client.lifecycle.renew(sandbox_id, timeout))
    expires = renewed.expires_at.isoformat()
    fields = {"sandbox_id": sandbox_id, "expires": f"{expires} ({duration.relative(renewed.expires_at)})"}
    session.screen.record(output, fields, {"sandbox_id": sandbox_id, "expires_at": expires})


@app.command()
def endpoint(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    port: Annotated[int, typer.Option("-p", "--port", min=1, max=65535, show_default=False, help="Port inside.")],
    output: Output = Form.TABLE,
) -> None:
    """Show where a port of a sandbox is reached."""
    session = session_of(ctx)
    found = session.run(lambda client: client.lifecycle.endpoint(sandbox_id, port))
    scheme = session.settings.server.partition("://")[0]
    fields = {
        "endpoint": found.endpoint,
        "url": found.endpoint if "://" in found.endpoint else f"{scheme}://{found.endpoint}",
        "browser": _browser_url(found.endpoint, sandbox_id, port),
        "headers": _labels(found.headers),
    }
    for warning in found.warnings:
        session.screen.warning(warning)
    session.screen.record(output, fields, _dump(found))


def _browser_url(endpoint: str, sandbox_id: str, port: int) -> str | None:
    """Where a page on this port has an origin of its own. Only ingress on this machine answers to such names."""
    from opensandbox.endpoints import EXECD_PORT

    address, _, path = endpoint.partition("/")
    host, _, ingress_port = address.rpartition(":")
    here = host in ("localhost", "[::1]") or host.startswith("127.")
    if not here or path.rstrip("/") != f"{sandbox_id}/{port}" or port == EXECD_PORT:
        return None
    return f"http://{sandbox_id}-{port}.localhost:{ingress_port}/"


@app.command()
def health(ctx: typer.Context, sandbox_id: SandboxId, output: Output = Form.TABLE) -> None:
    """Ask a sandbox whether it answers; the exit code is 1 when it does not."""
    session = session_of(ctx)

    async def work(client: Client) -> bool:
        async with await client.sandbox(sandbox_id) as sandbox:
            return await sandbox.is_healthy()

    healthy = session.run(work)
    result = {"sandbox_id": sandbox_id, "healthy": healthy}
    session.screen.record(output, {**result, "healthy": "yes" if healthy else "no"}, result)
    if not healthy:
        raise typer.Exit(1)


@app.command()
def metrics(
    ctx: typer.Context,
    sandbox_id: SandboxId,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, one line a second, until Ctrl-C.")] = False,
    output: TextOutput = TextForm.TABLE,
) -> None:
    """Show what a sandbox uses."""
    session = session_of(ctx)

    async def work(client: Client) -> None:
        import anyio

        async with await client.sandbox(sandbox_id) as sandbox:
            while True:
                used = await sandbox.get_metrics()
                if watch and output in (TextForm.JSON, TextForm.RAW):
                    session.screen.text(json.dumps(_dump(used)))
                elif watch and output == TextForm.TABLE:
                    session.screen.text(_usage(used))
                elif output == TextForm.RAW:
                    session.screen.text(json.dumps(_dump(used)))
                else:
                    fields = {
                        "cpu": f"{used.cpu_used_percentage:.1f} % of {used.cpu_count:g}",
                        "memory": f"{used.memory_used_in_mib:.1f} of {used.memory_total_in_mib:.0f} MiB",
                        "measured": datetime.fromtimestamp(used.timestamp / 1000, UTC).isoformat(),
                    }
                    session.screen.record(output, fields, _dump(used))
                if not watch:
                    return
                await anyio.sleep(1)

    session.run(work)


def _usage(used: Any) -> str:
    at = datetime.fromtimestamp(used.timestamp / 1000, UTC).astimezone()
    return (
        f"{at:%H:%M:%S}  cpu {used.cpu_used_percentage:6.1f} %"
        f"  memory {used.memory_used_in_mib:8.1f} of {used.memory_total_in_mib:.0f} MiB"
    )


def _document(file: Path, kind: type) -> Any:
    """The content of a JSON file."""
    text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text(encoding="utf-8")
    try:
        document = json.loads(text)
    except ValueError as error:
        raise usage(f"{file} is not JSON: {error}") from None
    if not isinstance(document, kind):
        raise usage(f"{file} holds no JSON {'object' if kind is dict else 'list'}")
    return document


def _none_there(paging: PaginationInfo) -> str:
    if not paging.total_items:
        return "No sandboxes."
    pages = "one page" if paging.total_pages == 1 else f"{paging.total_pages} pages"
    return f"No sandboxes on page {paging.page}: {paging.total_items} in all, on {pages}."


def _dump(model: Any) -> Any:
    return model.model_dump(mode="json")


def _source(info: SandboxInfo) -> str:
    return info.image.image if info.image else info.snapshot_id or "-"


def _expiry(info: SandboxInfo, now: datetime) -> str:
    if info.status.state in ("Terminated", "Failed"):
        return "-"
    return duration.relative(info.expires_at, now)


def _words(words: list[str]) -> str:
    import shlex

    return shlex.join(words)


def _labels(labels: dict[str, str] | None) -> str | None:
    return ", ".join(f"{key}={value}" for key, value in labels.items()) if labels else None


def _isolation(info: SandboxInfo) -> dict[str, str]:
    if info.isolation is None:
        return {}
    facts = info.isolation.model_dump(mode="json", exclude_none=True)
    shown: dict[str, str] = {}
    for name, value in facts.items():
        if name == "limits" and isinstance(value, dict):
            shown |= {f"limit.{limit}": _enforced(how) for limit, how in value.items()}
        elif isinstance(value, list):
            shown[f"isolation.{name}"] = ", ".join(str(entry) for entry in value)
        else:
            shown[f"isolation.{name}"] = _enforced(value)
    return shown


def _enforced(how: Any) -> str:
    if not isinstance(how, dict):
        return str(how).lower() if isinstance(how, bool) else str(how)
    value, means = how.get("value"), how.get("means", "")
    return f"{value} ({means})" if value else str(means)


def _end(info: SandboxInfo) -> dict[str, str]:
    if info.end is None:
        return {}
    facts = info.end.model_dump(mode="json", exclude_none=True)
    return {f"end.{name}": str(value) for name, value in facts.items()}
