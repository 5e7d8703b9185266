# SPDX-License-Identifier: Apache-2.0
"""One sandbox for all checks of a program."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from sdk import Sandbox, config


@asynccontextmanager
async def opened() -> AsyncIterator[Any]:
    sandbox = await Sandbox.create("host", connection_config=config())
    try:
        yield sandbox
    finally:
        await sandbox.destroy()
