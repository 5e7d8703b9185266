# SPDX-License-Identifier: Apache-2.0
"""The bench is a package at the top of the repository."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
