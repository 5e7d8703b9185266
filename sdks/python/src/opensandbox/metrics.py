# SPDX-License-Identifier: Apache-2.0
"""What a sandbox uses."""

from __future__ import annotations

from opensandbox import models
from opensandbox.transport import Connection


class Metrics:
    """`sandbox.metrics`"""

    def __init__(self, execd: Connection) -> None:
        self._execd = execd

    async def get_metrics(self, sandbox_id: str | None = None) -> models.SandboxMetrics:
        """Processor and memory of this sandbox. The id is taken for compatibility; there is but one."""
        return models.base.parse(models.SandboxMetrics, (await self._execd.call("GET", "/metrics")).content)
