# SPDX-License-Identifier: Apache-2.0
"""Limits: what clients write, what it means, what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensandbox_server import limits
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.sandbox import Limits

Mi = 1024 * 1024


@pytest.mark.parametrize(
    ("text", "millis"),
    [("500m", 500), ("1", 1000), ("0.5", 500), ("2.25", 2250), ("10m", 10), (" 1 ", 1000), ("1024", 1_024_000)],
)
def test_cpu(text: str, millis: int) -> None:
    assert limits.cpu_millis(text) == millis


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512Mi", 512 * Mi),
        ("1Gi", 1024 * Mi),
        ("1g", 1024 * Mi),
        ("1G", 1024 * Mi),
        ("100mb", 100 * Mi),
        ("100MiB", 100 * Mi),
        ("0.5Gi", 512 * Mi),
        ("16Mi", 16 * Mi),
        ("33554432", 32 * Mi),
        ("33554432b", 32 * Mi),
        ("1Ti", 1024 * 1024 * Mi),
        ("16Ti", 16 * 1024 * 1024 * Mi),
    ],
)
def test_memory(text: str, size: int) -> None:
    assert limits.memory_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["abc", "", " ", "-1", "0", "1e3", "inf", "nan", "1,5", "1 m", "0x10", "١", "9m", "1025"]
)
def test_cpu_that_is_refused(text: str) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        limits.cpu_millis(text)
    assert caught.value.code is Code.SANDBOX_INVALID_PARAMETER
    assert caught.value.message.startswith(f"Invalid resourceLimits.cpu: {text!r}")


@pytest.mark.parametrize(
    "text", ["abc", "", "-1g", "0", "0Mi", "1Zi", "1gg", "15Mi", "1024", "17Ti", "1Pi", "9" * 30, "1e9", "m"]
)
def test_memory_that_is_refused(text: str) -> None:
    with pytest.raises(OpenSandboxError, match=r"resourceLimits\.memory"):
        limits.memory_bytes(text)


@pytest.mark.parametrize("text", ["0", "7", "-8", "8.5", "4194305", "many", ""])
def test_pids_that_are_refused(text: str) -> None:
    with pytest.raises(OpenSandboxError, match=r"resourceLimits\.pids"):
        limits.pids(text)


def test_sandboxd_has_the_same_bounds() -> None:
    source = (Path(__file__).resolve().parents[2] / "node" / "sandboxd" / "request.go").read_text()
    for name, bounds in (("CPU", limits.CPU_MILLIS), ("Memory", limits.MEMORY_BYTES), ("Pids", limits.PIDS)):
        found = re.search(rf"min{name}, max{name} += ([\d <*]+), ([\d <*]+)\n", source)
        assert found, f"the bounds of {name} are not where they were"
        assert tuple(eval(number, {}) for number in found.groups()) == bounds, name


def test_none_given_leaves_the_runtime_its_default() -> None:
    assert limits.parse({}, "local") == Limits(None, None, None)
    assert limits.parse({"pids": "64"}, "local") == Limits(pids=64)


def test_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(OpenSandboxError) as caught:
        limits.parse({"cpu": "1", "gpu": "1"}, "local")
    assert caught.value.code is Code.SANDBOX_API_NOT_SUPPORTED
    assert "local" in caught.value.message
    assert "gpu" in caught.value.message


def test_an_unknown_limit_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(OpenSandboxError, match="cpu, memory and pids"):
        limits.parse({"disk": "1Gi"}, "local")


@given(st.integers(min_value=10, max_value=1_024_000))
def test_millis_and_cores_say_the_same(millis: int) -> None:
    assert limits.cpu_millis(f"{millis}m") == limits.cpu_millis(f"{millis // 1000}.{millis % 1000:03d}") == millis


@given(st.integers(min_value=16, max_value=16 << 20), st.sampled_from(["Mi", "m", "mb", "M", "MiB", "MB"]))
def test_every_spelling_of_a_unit_counts_the_same(count: int, unit: str) -> None:
    assert limits.memory_bytes(f"{count}{unit}") == limits.memory_bytes(str(count * Mi)) == count * Mi


@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read, bounds in ((limits.cpu_millis, limits.CPU_MILLIS), (limits.memory_bytes, limits.MEMORY_BYTES)):
        try:
            number = read(text)
        except OpenSandboxError:
            continue
        assert bounds[0] <= number <= bounds[1]
