# SPDX-License-Identifier: Apache-2.0
"""Which addresses a sandbox may reach."""

from __future__ import annotations

from opensandbox import models
from opensandbox.lifecycle import Lifecycle


class Egress:
    """The network policy of one sandbox. A runtime that governs no network refuses each call."""

    def __init__(self, lifecycle: Lifecycle, sandbox_id: str) -> None:
        self._lifecycle = lifecycle
        self._id = sandbox_id

    async def get_policy(self) -> models.NetworkPolicy:
        """The policy in force."""
        return await self._lifecycle.network_policy(self._id)

    async def patch_rules(self, rules: list[models.NetworkRule]) -> None:
        """Add rules, in front of those that are there; one for a target that has a rule replaces it."""
        models.base.expect_each(rules, models.NetworkRule)
        body = [models.base.dump(rule, models.NetworkRule) for rule in rules]
        await self._lifecycle.change_network_policy(self._id, "PATCH", body)

    async def delete_rules(self, targets: list[str]) -> None:
        """Remove the rules for these targets; those that have none are passed over."""
        await self._lifecycle.change_network_policy(self._id, "DELETE", targets)
