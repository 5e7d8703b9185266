# SPDX-License-Identifier: Apache-2.0
"""What to look at when a sandbox does not do what it should."""

from __future__ import annotations

from opensandbox import models
from opensandbox.lifecycle import Lifecycle


class Diagnostics:
    """`sandbox.diagnostics`

        logs = await sandbox.diagnostics.get_logs(sandbox.id, "container")
        print(logs.content)

    Both work also after the sandbox has ended, as long as the server knows it.
    """

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def get_logs(self, sandbox_id: str, scope: str) -> models.DiagnosticContent:
        """The end of the entry point's output; `scope` is `container` or `all`."""
        return await self._lifecycle.diagnostic(sandbox_id, "logs", scope)

    async def get_events(self, sandbox_id: str, scope: str) -> models.DiagnosticContent:
        """What happened to it, a line each; `scope` is `runtime` or `all`."""
        return await self._lifecycle.diagnostic(sandbox_id, "events", scope)
