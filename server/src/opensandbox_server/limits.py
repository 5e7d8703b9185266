# SPDX-License-Identifier: Apache-2.0
"""Resource limits as clients write them (`500m`, `512Mi`, `1g`) and as numbers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

from .errors import OpenSandboxError, invalid, unsupported_field
from .sandbox import Limits

# Below these nothing useful starts; above them the number is a slip of the pen on any machine. Whether the host has
# that much is the runtime's question. sandboxd has the same bounds (node/sandboxd/request.go).
CPU_MILLIS = (10, 1_024_000)
MEMORY_BYTES = (16 << 20, 16 << 40)
PIDS = (8, 4_194_304)

# Twenty digits before and after the point hold every honest number and keep Decimal from being made to work.
_CPU = re.compile(r"(\d{1,20}(?:\.\d{1,20})?)(m?)", re.ASCII)
_MEMORY = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?(?:([kmgtpe])i?b?|b)?", re.IGNORECASE | re.ASCII)
_PIDS = re.compile(r"\d{1,20}", re.ASCII)


def cpu_millis(text: str) -> int:
    """
    >>> cpu_millis("500m"), cpu_millis("0.5"), cpu_millis("2")
    (500, 500, 2000)
    """
    match = _CPU.fullmatch(text.strip())
    if not match:
        raise _unreadable("cpu", text, "500m, 0.5 or 2")
    return _bounded("cpu", text, Decimal(match[1]) * (1 if match[2] else 1000), CPU_MILLIS, ("10m", "1024"))


def memory_bytes(text: str) -> int:
    """A number of bytes, or with a unit; every unit counts in 1024, as container engines read `1g`.

    >>> memory_bytes("512Mi"), memory_bytes("100mb"), memory_bytes("1g")
    (536870912, 104857600, 1073741824)
    """
    match = _MEMORY.fullmatch(text.strip())
    if not match:
        raise _unreadable("memory", text, "512Mi, 1g or a number of bytes")
    factor = 1024 ** (" kmgtpe".index(match[2].lower()) if match[2] else 0)
    return _bounded("memory", text, Decimal(match[1]) * factor, MEMORY_BYTES, ("16Mi", "16Ti"))


def pids(text: str) -> int:
    """
    >>> pids("256")
    256
    """
    if not _PIDS.fullmatch(text.strip()):
        raise _unreadable("pids", text, "256")
    return _bounded("pids", text, Decimal(text.strip()), PIDS, (str(PIDS[0]), str(PIDS[1])))


def parse(limits: Mapping[str, str], runtime: str) -> Limits:
    """The whole of `resourceLimits`; a key that nobody enforces is refused, not dropped."""
    if "gpu" in limits:
        raise unsupported_field(
            runtime, "resourceLimits.gpu", hint="Leave gpu out; this runtime gives no device to a sandbox."
        )
    if unknown := sorted(limits.keys() - {"cpu", "memory", "pids"}):
        raise invalid(f"Unknown resourceLimits.{unknown[0][:64]}; cpu, memory and pids can be limited.")
    return Limits(
        cpu_millis=cpu_millis(limits["cpu"]) if "cpu" in limits else None,
        memory_bytes=memory_bytes(limits["memory"]) if "memory" in limits else None,
        pids=pids(limits["pids"]) if "pids" in limits else None,
    )


def _unreadable(key: str, text: str, examples: str) -> OpenSandboxError:
    return invalid(
        f"Invalid resourceLimits.{key}: {text[:64]!r}; must resolve to a positive resource limit.",
        hint=f"Write it as {examples}.",
    )


def _bounded(key: str, text: str, value: Decimal, bounds: tuple[int, int], shown: tuple[str, str]) -> int:
    if value <= 0:
        raise _unreadable(key, text, f"a number from {shown[0]} to {shown[1]}")
    number = int(value)
    if not bounds[0] <= number <= bounds[1]:
        raise invalid(
            f"Invalid resourceLimits.{key}: {text[:64]!r} is out of range.",
            hint=f"Give a number from {shown[0]} to {shown[1]}.",
        )
    return number
