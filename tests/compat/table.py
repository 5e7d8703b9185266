# SPDX-License-Identifier: Apache-2.0
"""What the suite found out about each method of the published SDK and each command of its `osb`, as a table."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

LISTING = Path(__file__).parent / "published" / "recording.py"
NOT_COVERED = "NOT COVERED"


@dataclass
class Table:
    """Filled by the tests, printed at the end of the run."""

    python: Path
    sdk: dict[str, dict[str, set[str]]] = field(default_factory=dict)
    """World and way to method to the ways its calls ended."""
    cli: dict[str, set[str]] = field(default_factory=dict)
    """Command to the ways it ended: `ok`, or `refused: ` and the code it showed."""

    @cached_property
    def published(self) -> dict[str, list[str]]:
        """Asked of the published package."""
        done = subprocess.run([str(self.python), str(LISTING)], capture_output=True, text=True, timeout=60, check=True)
        return dict(json.loads(done.stdout))

    def uncovered_methods(self) -> list[str]:
        """What no check touched, in any of the worlds."""
        return [
            f"{method} ({where})"
            for method in self.published["sdk"]
            for where, calls in self.sdk.items()
            if outcome(method, calls) in (NOT_COVERED, "FAIL")
        ]

    def uncovered_commands(self) -> list[str]:
        return [command for command in self.published["cli"] if command not in self.cli]

    def lines(self) -> list[str]:
        """Empty when nothing was found out."""
        found: list[str] = []
        if self.sdk:
            head = "".join(f"{where:<15}" for where in self.sdk)
            found += [f"{'published SDK 1.1.1':<40}{head}", *map(self._method, self.published["sdk"]), ""]
        if self.cli:
            found += ["published osb 1.1.1", *map(self._command, self.published["cli"]), ""]
        return found

    def _method(self, method: str) -> str:
        cells = [outcome(method, calls) for calls in self.sdk.values()]
        notes = {reason(method, calls) for calls in self.sdk.values()} - {""}
        return f"  {method:<38}{''.join(f'{cell:<15}' for cell in cells)}{'; '.join(sorted(notes))}".rstrip()

    def _command(self, command: str) -> str:
        ended = self.cli.get(command, set())
        refused = sorted(one.removeprefix("refused: ") for one in ended if one.startswith("refused: "))
        cell = "ok" if "ok" in ended else "later" if refused else NOT_COVERED
        return f"  osb {command:<34}{cell:<15}{'' if cell == 'ok' else '; '.join(refused)}".rstrip()


def outcome(method: str, calls: dict[str, set[str]]) -> str:
    """One word.

    >>> outcome("Sandbox.kill", {"Sandbox.kill": {"ok", "SandboxApiException"}})
    'ok'
    """
    ended = calls.get(method, set())
    if "FAIL" in ended:
        return "FAIL"
    if any(one.startswith("refused: ") for one in ended):
        return "later"
    if "ok" in ended:
        return "ok"
    # Those that only the SDK itself calls, on behalf of a method that is refused.
    return "later" if method.startswith("Egress.") and ended else NOT_COVERED


def reason(method: str, calls: dict[str, set[str]]) -> str:
    """Why it comes later, as the client was told."""
    return "; ".join(
        sorted(one.removeprefix("refused: ") for one in calls.get(method, set()) if one.startswith("refused: "))
    )
