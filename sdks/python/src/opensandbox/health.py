# SPDX-License-Identifier: Apache-2.0
"""Whether a sandbox answers."""

from __future__ import annotations

from opensandbox.transport import NO_RETRIES, Connection


class Health:
    """The daemon in a sandbox, asked whether it is there."""

    def __init__(self, execd: Connection) -> None:
        self._execd = execd

    async def ping(self, sandbox_id: str | None = None) -> bool:
        """True, or the reason as an exception. The id is taken for compatibility; there is but one."""
        await self._execd.call("GET", "/ping", policy=NO_RETRIES)
        return True
