# SPDX-License-Identifier: Apache-2.0
"""The table tells what was not tried."""

from __future__ import annotations

from pathlib import Path

from table import Table


def test_what_nobody_tried_is_told() -> None:
    table = Table(Path("no-python"))
    table.published = {
        "sdk": ["Sandbox.kill", "Sandbox.pause", "Sandbox.renew"],
        "cli": ["sandbox list", "sandbox get"],
    }
    table.sdk = {
        "async": {"Sandbox.kill": {"ok"}, "Sandbox.pause": {"SandboxApiException", "refused: 400 NO"}},
        "sync": {"Sandbox.kill": {"SandboxApiException"}, "Sandbox.pause": {"FAIL"}, "Sandbox.renew": {"ok", "FAIL"}},
    }
    table.cli = {"sandbox list": {"ok"}}
    assert table.uncovered_methods() == [
        "Sandbox.kill (sync)",
        "Sandbox.pause (sync)",
        "Sandbox.renew (async)",
        "Sandbox.renew (sync)",
    ]
    assert table.uncovered_commands() == ["sandbox get"]
    told = "\n".join(table.lines())
    assert told.count("NOT COVERED") == 3
    assert told.count("FAIL") == 2
    assert "later" in told
    assert "400 NO" in told
