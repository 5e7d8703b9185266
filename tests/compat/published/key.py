# SPDX-License-Identifier: Apache-2.0
"""A server that wants a key."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from checks import check, raises, run

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig
from opensandbox.exceptions import SandboxApiException


@asynccontextmanager
async def opened() -> AsyncIterator[None]:
    yield


@check
async def the_right_key(_: None) -> None:
    """From the environment; the sandbox itself is reached by its own token."""
    sandbox = await Sandbox.create("host")
    assert (await sandbox.commands.run("echo in")).text == "in"
    await sandbox.destroy()


@check
async def a_wrong_key(_: None) -> None:
    error = await raises(
        SandboxApiException, Sandbox.create("host", connection_config=ConnectionConfig(api_key="wrong"))
    )
    assert error.status_code == 401, error
    assert error.error.code == "INVALID_API_KEY", error


run(opened)
