# SPDX-License-Identifier: Apache-2.0
"""The table, and what is known about the machine."""

from __future__ import annotations

import itertools
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .figure import ABOVE, BELOW, MISSING, OK, Measured

_COLOURS = {OK: "32", ABOVE: "31", BELOW: "31", MISSING: "33"}
_HEAD = ("figure", "p50", "p95", "× floor", "target", "", "")
_LEFT = {0, 4, 5, 6}


def machine() -> dict[str, Any]:
    """What the times depend on."""
    model, memory = "", 0
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory = int(line.split()[1]) * 1024
    return {
        "cores": os.cpu_count(),
        "cpu": model,
        "memoryBytes": memory,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary",
        "load": list(os.getloadavg()),
    }


def number(value: float | None, unit: str = "") -> str:
    """Three digits that matter, and the unit.

    >>> number(0.12345, "ms"), number(1234.5, "/s"), number(None)
    ('0.123 ms', '1,234 /s', '')
    """
    if value is None:
        return ""
    size = abs(value)
    text = f"{value:.3f}" if size < 1 else f"{value:.2f}" if size < 10 else f"{value:.1f}"
    if value == int(value) and not unit:
        text = str(int(value))
    elif size >= 100:
        text = f"{value:,.0f}"
    return f"{text} {unit}".rstrip()


def table(groups: Sequence[Sequence[Measured]]) -> Iterator[str]:
    """Line by line, an empty one between groups; colours only for people."""
    rows = [_HEAD] + [
        (
            line.name,
            number(line.value, line.figure.unit),
            number(line.p95, line.figure.unit),
            f"{line.ratio:.1f}×" if line.ratio is not None else "",
            line.figure.target,
            line.verdict,
            line.note,
        )
        for group in groups
        for line in group
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    starts = [*itertools.accumulate((len(group) for group in groups if group), initial=1)]
    for index, row in enumerate(rows):
        cells = [
            cell.ljust(width) if column in _LEFT else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        if colour and row[5] in _COLOURS:
            cells[5] = f"\033[{_COLOURS[row[5]]}m{cells[5]}\033[0m"
        if index in starts:
            yield "  " + "─" * (sum(widths[:6]) + 10) if index == 1 else ""
        yield ("  " + "  ".join(cells)).rstrip()
