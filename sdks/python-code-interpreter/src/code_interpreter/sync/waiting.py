# SPDX-License-Identifier: Apache-2.0
"""The twin of `code_interpreter.waiting`: here waiting happens at once."""

from __future__ import annotations

from collections.abc import Callable


class Waiting:
    """Something that has been waited for when one gets it."""

    def _begin(self, check: Callable[[], None]) -> None:
        check()

    def _ready(self) -> None:
        """Nothing is left to wait for."""
