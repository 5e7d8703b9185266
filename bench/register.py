# SPDX-License-Identifier: Apache-2.0
"""The list of what is measured. A new bench is a file with FIGURES and `measure`, and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import burst, code, daemon, file, floor, life, listing, memory, output, proxy, published, rate, startup
from .figure import Book, Figure
from .world import World


@dataclass(frozen=True)
class Bench:
    """Figures that are measured together."""

    name: str
    figures: tuple[Figure, ...]
    measure: Callable[[World, Book], None]


BENCHES = (
    Bench("floor", floor.FIGURES, floor.measure),
    Bench("life", life.FIGURES, life.measure),
    Bench("published", published.FIGURES, published.measure),
    Bench("burst", burst.FIGURES, burst.measure),
    Bench("memory", memory.FIGURES, memory.measure),
    Bench("file", file.FIGURES, file.measure),
    Bench("output", output.FIGURES, output.measure),
    Bench("code", code.FIGURES, code.measure),
    Bench("execd", daemon.FIGURES, daemon.measure),
    Bench("way", proxy.FIGURES, proxy.measure),
    Bench("list", listing.FIGURES, listing.measure),
    Bench("rate", rate.FIGURES, rate.measure),
    Bench("start", startup.FIGURES, startup.measure),
)
