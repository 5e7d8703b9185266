# SPDX-License-Identifier: Apache-2.0
"""One run of the program: its settings, its screen, its connection to the server."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from opensandbox_cli import __version__, config
from opensandbox_cli.screen import Screen

if TYPE_CHECKING:
    import httpx2
    import typer

    from opensandbox import Sandbox

T = TypeVar("T")


@dataclass
class Session:
    """What the global options said."""

    flags: Mapping[str, Any]
    file: Path | None = None
    verbosity: int = 0
    color: bool | None = None
    failure_code: int | None = None
    """Set by commands whose exit code belongs to the remote command: what our own failures give there."""

    @cached_property
    def settings(self) -> config.Settings:
        """Read when first needed: `--help` works with a broken configuration file."""
        settings = config.resolve(self.flags, os.environ, self.file)
        for warning in settings.warnings:
            self.plain_screen.warning(warning)
        return settings

    @property
    def path(self) -> Path:
        """The configuration file, whether it exists or not."""
        return self.file or config.default_path()

    @cached_property
    def plain_screen(self) -> Screen:
        """A screen that does not need the configuration."""
        return Screen(self.color)

    @cached_property
    def screen(self) -> Screen:
        """Where results go."""
        return Screen(False if self.color is False or not self.settings["output.color"] else None)

    def run(self, work: Callable[[Client], Awaitable[T]]) -> T:
        """Do something with the server, and wait for it."""
        import anyio

        settings = self.settings

        async def connected() -> T:
            async with Client(settings, debug=self.verbosity > 1) as client:
                return await work(client)

        return anyio.run(connected)

    def detail(self, text: str) -> None:
        """Said only with -v."""
        if self.verbosity:
            print(f"osb: {text}", file=sys.stderr, flush=True)


def session_of(context: typer.Context) -> Session:
    """The session a command runs in."""
    found = context.find_root().obj
    assert isinstance(found, Session)
    return found


class Client:
    """The SDK, spoken to with the settings of this run."""

    def __init__(self, settings: config.Settings, debug: bool = False) -> None:
        from opensandbox.config import ConnectionConfig
        from opensandbox.lifecycle import Lifecycle

        self.config = ConnectionConfig(
            # "" and not None: what is not set here must not be looked up in the environment once more.
            api_key=settings["connection.api_key"] or "",
            domain=settings["connection.domain"],
            protocol=settings["connection.protocol"],
            request_timeout=settings.request_timeout,
            use_server_proxy=settings["connection.use_server_proxy"],
            user_agent=f"OpenSandbox-CLI/{__version__}",
            debug=debug,
        )
        self.lifecycle = Lifecycle(self.config)

    async def __aenter__(self) -> Self:
        self.lifecycle.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.lifecycle.close()

    async def sandbox(self, sandbox_id: str) -> Sandbox:
        """A sandbox to work in; not asked whether it is well, the next request will show."""
        from opensandbox import Sandbox

        return await Sandbox.connect(sandbox_id, self.config, skip_health_check=True)

    async def server(
        self,
        method: str,
        path: str,
        params: Sequence[tuple[str, str]] = (),
        headers: Mapping[str, str] | None = None,
        timeout: timedelta | None = None,
    ) -> httpx2.Response:
        """A request to the server that the SDK has no method for."""
        from opensandbox.transport import Connection

        return await Connection.to_server(self.config).call(
            method, path, params=params, headers=headers, timeout=timeout
        )

    async def server_version(self) -> str:
        """Asked without a key, and once: it also tells whether there is a server at all."""
        from opensandbox.transport import NO_RETRIES, Connection

        top = Connection(self.config, self.config.get_base_url().removesuffix("/v1"), {})
        answer = await top.call("GET", "/version", policy=NO_RETRIES)
        return str(json.loads(answer.content)["version"])
