# SPDX-License-Identifier: Apache-2.0
"""One sandbox for all checks of a program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from opensandbox import Sandbox
from opensandbox.config import ConnectionConfig


@asynccontextmanager
async def opened() -> AsyncIterator[Sandbox]:
    sandbox = await Sandbox.create("host", connection_config=ConnectionConfig())
    try:
        yield sandbox
    finally:
        await sandbox.destroy()
