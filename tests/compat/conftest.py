# SPDX-License-Identifier: Apache-2.0
"""Where the published clients are installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))


@pytest.fixture(scope="session")
def published() -> Path:
    """The directory with the programs of the published clients."""
    programs = ROOT / ".venv-compat" / "bin"
    if not (programs / "python").exists():
        pytest.fail("the published clients are not installed; `make setup-test` does it", pytrace=False)
    return programs
