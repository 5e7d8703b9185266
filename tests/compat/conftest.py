# SPDX-License-Identifier: Apache-2.0
"""Where the published clients are installed, and the table of all they can do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture(scope="session")
def published() -> Path:
    """The directory with the programs of the published clients."""
    programs = ROOT / ".venv-compat" / "bin"
    if not (programs / "python").exists():
        pytest.fail("the published clients are not installed; `make setup-test` does it", pytrace=False)
    return programs


_TABLE = pytest.StashKey[Table]()


@pytest.fixture(scope="session")
def table(published: Path, pytestconfig: pytest.Config) -> Table:
    """What the tests find out about each method and command."""
    return pytestconfig.stash.setdefault(_TABLE, Table(published / "python"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Method by method, command by command."""
    table = config.stash.get(_TABLE, None)
    if table is not None and (lines := table.lines()):
        terminalreporter.section("what the published clients can do here")
        for line in lines:
            terminalreporter.write_line(line)
