# SPDX-License-Identifier: Apache-2.0
"""A figure: what is measured, what it should be, and what it was."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

OK, ABOVE, BELOW, MISSING = "ok", "above", "below", "not there"


@dataclass(frozen=True)
class Figure:
    """One line of the table. A name that ends with `.*` stands for lines whose names only the run knows."""

    name: str
    what: str
    unit: str = "ms"
    most: float | None = None
    """At most this much."""
    least: float | None = None
    """At least this much."""
    most_floors: float | None = None
    """At most this many times the floor it is measured beside."""

    @property
    def target(self) -> str:
        """As people read it."""
        if self.most_floors is not None:
            return f"≤ {self.most_floors:g}× floor"
        if self.most is not None:
            return f"≤ {self.most:g} {self.unit}".rstrip()
        if self.least is not None:
            return f"≥ {self.least:g} {self.unit}".rstrip()
        return ""


@dataclass(frozen=True)
class Measured:
    """What a figure was in this run."""

    figure: Figure
    name: str
    value: float | None = None
    p95: float | None = None
    floor: float | None = None
    rounds: int | None = None
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """How many floors it is."""
        return self.value / self.floor if self.value is not None and self.floor else None

    @property
    def verdict(self) -> str:
        """`ok`, `above` or `below` the target, `not there`; empty where nothing is promised."""
        if self.value is None:
            return MISSING
        most = self.figure.most
        if self.figure.most_floors is not None and self.floor is not None:
            most = self.figure.most_floors * self.floor
        if most is not None:
            return OK if self.value <= most else ABOVE
        if self.figure.least is not None:
            return OK if self.value >= self.figure.least else BELOW
        return ""

    def json(self) -> dict[str, Any]:
        """For the report file."""
        return {
            "name": self.name,
            "what": self.figure.what,
            "unit": self.figure.unit,
            "value": self.value,
            "p95": self.p95,
            "floor": self.floor,
            "ratio": self.ratio,
            "rounds": self.rounds,
            "target": self.figure.target,
            "verdict": self.verdict,
            "note": self.note,
        }


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of all values does not exceed.

    >>> quantile([4, 1, 3, 2], 0.5)
    2
    """
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


def median(values: Sequence[float]) -> float:
    """The middle one."""
    return quantile(values, 0.5)


class Watch:
    """Runs until it is stopped for the first time."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        self._start = time.perf_counter()

    def stop(self, *_: object) -> None:
        """It has happened. May serve as a handler: what it is called with does not matter."""
        self.milliseconds = self.milliseconds or (time.perf_counter() - self._start) * 1000


class Times:
    """Milliseconds, by name.

    >>> times = Times()
    >>> with times.measure("nothing"):
    ...     pass
    >>> len(times["nothing"])
    1
    """

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = defaultdict(list)

    def __getitem__(self, name: str) -> list[float]:
        return self._taken[name]

    def names(self) -> list[str]:
        """Of everything measured so far, in order."""
        return [*self._taken]

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[Watch]:
        """Add what the block takes, or what it took until it stopped the watch; nothing when it fails."""
        watch = Watch()
        yield watch
        watch.stop()
        self._taken[name].append(watch.milliseconds)

    def forget(self) -> None:
        """After the first round, which opens connections and imports modules."""
        self._taken.clear()


class Book:
    """Takes down what one bench measures; it may only speak of figures it has announced."""

    def __init__(self, figures: Sequence[Figure]) -> None:
        self._figures = {figure.name: figure for figure in figures}
        self._lines: list[Measured] = []

    @property
    def lines(self) -> list[Measured]:
        """In the order the figures were announced in."""
        order = [*self._figures]
        return sorted(self._lines, key=lambda line: order.index(line.figure.name))

    def times(self, name: str, values: Sequence[float], floor: Sequence[float] | None = None, note: str = "") -> None:
        """The median and the 95th percentile of many rounds, beside the median of the floor's."""
        base = median(floor) if floor else None
        p95 = quantile(values, 0.95)
        self._lines.append(Measured(self._figure(name), name, median(values), p95, base, len(values), note))

    def value(self, name: str, value: float, floor: float | None = None, note: str = "") -> None:
        """One number."""
        self._lines.append(Measured(self._figure(name), name, value, floor=floor, note=note))

    def missing(self, name: str, why: str) -> None:
        """It could not be measured here, and that is no failure."""
        self._lines.append(Measured(self._figure(name), name, note=why))

    def left_out(self, why: str) -> None:
        """Name what was announced and not measured."""
        told = {line.figure.name for line in self._lines}
        for name in self._figures:
            if name not in told:
                self.missing(name, why)

    def _figure(self, name: str) -> Figure:
        if name in self._figures:
            return self._figures[name]
        return next(figure for key, figure in self._figures.items() if key[-1] == "*" and name.startswith(key[:-1]))
