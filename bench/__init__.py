# SPDX-License-Identifier: Apache-2.0
"""The times and sizes we promise, measured on this machine: `make bench`. README.md says how each is measured."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# The private server of the tests serves here too: it cleans its environment, and proves that nothing is left of it.
sys.path.insert(0, str(ROOT / "tests"))
