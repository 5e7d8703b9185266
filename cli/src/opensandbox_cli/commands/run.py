# SPDX-License-Identifier: Apache-2.0
"""`osb run`: a command in a sandbox of its own."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opensandbox_cli import duration, execution, failure, transfer
from opensandbox_cli.commands.sandbox import lifetime
from opensandbox_cli.options import Environment, NamedInErrors, TimeLimit, Workdir, pairs
from opensandbox_cli.session import Client, Session, session_of

if TYPE_CHECKING:
    from opensandbox import Sandbox

# A sandbox whose osb was killed ends after this time; while osb lives, it renews.
LEASE = timedelta(minutes=10)
DEFAULT_IMAGE = "host"
# What runs a local script inside.
INTERPRETERS = {".py": "python3", ".sh": "bash", ".js": "node", ".mjs": "node", ".rb": "ruby", ".pl": "perl"}
SCRIPTS = "/tmp/"  # noqa: S108 (inside a sandbox of our own)
NOT_FOUND = 127
ENDING = timedelta(seconds=10)


class CommandLast(NamedInErrors):
    """Everything from the first word that is no option on belongs to the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note whether `--` was written: then the first word is no local script."""
        before = list(args)
        rest = super().parse_args(ctx, args)
        words = ctx.params.get("command") or []
        ctx.meta["osb.literal"] = before[-len(words) - 1 : -len(words)] == ["--"] if words else False
        return rest


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(cls=CommandLast, context_settings={"allow_interspersed_args": False}, no_args_is_help=True)(run)


def run(
    ctx: typer.Context,
    command: Annotated[list[str], typer.Argument(show_default=False, help="What to run, or a local script.")],
    image: Annotated[
        str | None, typer.Option("-i", "--image", help="Image. [default: defaults.image, else host]")
    ] = None,
    timeout: TimeLimit = None,
    env: Environment = None,
    file: Annotated[
        list[str] | None,
        typer.Option("-f", "--file", metavar="LOCAL[:REMOTE]", help="Upload a file first. [default REMOTE: /tmp/NAME]"),
    ] = None,
    resource: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="Limit, such as memory=2Gi.")] = None,
    workdir: Workdir = None,
    argv: Annotated[
        bool, typer.Option("--argv", help="Without a shell: the words are the program's arguments.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the sandbox, and say which it is.")] = False,
) -> None:
    """Run a command in a sandbox that is made and ended for it.

    Its output is shown as it comes, and its exit code is that of osb.

    `osb run -- python3 -c 'print(1)'` runs these words; a single word is a line for the shell:
    `osb run -- 'ls | wc -l'`. `osb run script.py one two` uploads a local script (.py .sh .js .rb .pl) to /tmp and runs
    it with its interpreter; after `--` the first word is never taken for a local file.

    The sandbox is ended also on Ctrl-C, SIGTERM and errors. Exit codes are those of `osb command run`.
    """
    session = session_of(ctx)
    session.failure_code = failure.OURS
    uploads = [_upload(word) for word in file or ()]
    local = Path(command[0])
    if not ctx.meta.get("osb.literal") and local.suffix in INTERPRETERS and local.is_file():
        uploads.append((str(local), SCRIPTS + local.name))
        command, argv = [INTERPRETERS[local.suffix], SCRIPTS + local.name, *command[1:]], True
        looked_for = None
    else:
        # Perhaps a script that was meant to be uploaded; perhaps a program inside. The exit code will tell.
        script = local.suffix in INTERPRETERS and " " not in command[0] and not ctx.meta.get("osb.literal")
        looked_for = command[0] if script else None
    for path, _ in uploads:
        if not Path(path).is_file():
            raise failure.usage(f"there is no file {path}")
    visit = _Visit(
        session=session,
        image=image or session.settings["defaults.image"] or DEFAULT_IMAGE,
        lease=lifetime(session, None) if keep else LEASE,
        env=pairs(env, "--env", from_environment=True),
        resource=pairs(resource, "--resource"),
        uploads=uploads,
        command=execution.as_command(command, argv),
        workdir=workdir,
        timeout=timeout,
        keep=keep,
    )
    code = session.run(lambda client: execution.attended(lambda: visit.all(client), visit.stop, visit.renew))
    if looked_for and code == NOT_FOUND:
        session.screen.hint(f"There is no file {looked_for} here either; osb uploads a script that it finds.")
    raise typer.Exit(code)


def _upload(word: str) -> tuple[str, str]:
    local, colon, remote = word.rpartition(":")
    if not colon:
        local, remote = word, ""
    if remote.endswith("/") or not remote:
        remote = (remote or SCRIPTS) + Path(local).name
    return local, remote


@dataclass
class _Visit:
    """A sandbox from its making to its end."""

    session: Session
    image: str
    lease: timedelta | None
    env: dict[str, str]
    resource: dict[str, str]
    uploads: list[tuple[str, str]]
    command: str | list[str]
    workdir: str | None
    timeout: timedelta | None
    keep: bool
    sandbox: Sandbox | None = field(default=None, init=False)
    attached: execution.Attached | None = field(default=None, init=False)

    async def all(self, client: Client) -> int:
        from opensandbox import Sandbox

        began = time.monotonic()
        self.sandbox = await Sandbox.create(
            self.image,
            timeout=self.lease,
            env=self.env or None,
            resource=self.resource or None,
            connection_config=client.config,
        )
        for warning in self.sandbox.warnings:
            self.session.screen.warning(warning)
        self.session.detail(f"sandbox {self.sandbox.id} after {_milliseconds(began)}")
        try:
            return await self._inside(self.sandbox)
        finally:
            await self._leave(self.sandbox)

    async def _inside(self, sandbox: Sandbox) -> int:
        from opensandbox.models import RunCommandOpts

        began = time.monotonic()
        for local, remote in self.uploads:
            await transfer.upload(sandbox, self.session.screen, local, remote)
        if self.uploads:
            self.session.detail(f"uploaded {len(self.uploads)} in {_milliseconds(began)}")
        began = time.monotonic()
        self.attached = execution.Attached(sandbox, self.session.screen, stays=self.keep)
        try:
            opts = RunCommandOpts(working_directory=self.workdir, timeout=self.timeout)
            return await self.attached.run(self.command, opts)
        finally:
            self.session.detail(f"the command took {_milliseconds(began)}")

    async def _leave(self, sandbox: Sandbox) -> None:
        from opensandbox.concurrency import shielded
        from opensandbox.exceptions import SandboxException

        began = time.monotonic()
        # Also when we are being stopped: nothing may be left behind.
        with shielded(ENDING):
            if self.keep:
                ends = "never ends by itself" if self.lease is None else f"ends in {duration.brief(self.lease)}"
                self.session.screen.note(f"sandbox {sandbox.id} is kept; it {ends}")
                await sandbox.close()
                return
            try:
                await sandbox.destroy()
                self.session.detail(f"ended in {_milliseconds(began)}")
            except SandboxException as error:
                self.session.screen.warning(f"sandbox {sandbox.id} could not be ended: {error.message}")

    async def stop(self) -> None:
        """End the command, if there is one yet."""
        if self.attached is not None:
            await self.attached.stop()

    async def renew(self) -> None:
        """Keep the sandbox as long as the command runs."""
        import anyio

        from opensandbox.exceptions import SandboxException

        while True:
            await anyio.sleep(LEASE.total_seconds() / 3)
            if self.sandbox is not None and self.lease is not None:
                try:
                    await self.sandbox.renew(max(self.lease, LEASE))
                except SandboxException as error:
                    self.session.detail(f"not renewed: {error.message}")


def _milliseconds(began: float) -> str:
    return f"{(time.monotonic() - began) * 1000:.0f} ms"
