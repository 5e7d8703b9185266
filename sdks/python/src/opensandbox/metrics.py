# SPDX-License-Identifier: Apache-2.0
"""What a sandbox uses."""

from __future__ import annotations

from opensandbox import models
from opensandbox.streams import Watch
from opensandbox.transport import Connection


class Metrics:
    """`sandbox.metrics`"""

    def __init__(self, execd: Connection) -> None:
        self._execd = execd

    async def get_metrics(self, sandbox_id: str | None = None) -> models.SandboxMetrics:
        """Processor and memory of this sandbox. The id is taken for compatibility; there is but one."""
        return models.base.parse(models.SandboxMetrics, (await self._execd.call("GET", "/metrics")).content)

    async def watch(self) -> Watch[models.SandboxMetrics]:
        """The figures now, and then every second until it is closed.

            async with await sandbox.metrics.watch() as figures:
                async for now in figures:
                    print(now.cpu_used_percentage, now.memory_used_in_mib)
                    break

        `async with` closes it.
        """
        source = self._execd.below("", "Watching figures")
        return await Watch.open(source, "/metrics/watch", models.SandboxMetrics)

    async def prometheus(self) -> str:
        """The figures as OpenMetrics text, for Prometheus and the like."""
        source = self._execd.below("", "OpenMetrics text")
        return (await source.call("GET", "/metrics/prometheus", headers={"Accept": "*/*"})).content.decode()
