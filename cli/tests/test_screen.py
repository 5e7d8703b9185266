# SPDX-License-Identifier: Apache-2.0
"""Durations, and text that would like to drive the terminal."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from opensandbox_cli import duration
from opensandbox_cli.screen import Screen, visible


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("1.5", 1.5), ("10m", 600), ("1h30m45s", 5445), ("2d", 172800), ("500ms", 0.5), (" 1M ", 60)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert duration.parse(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["", "m", "-1", "1m1h", "1x", "none", "1 m", "9" * 30, "²"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError):
        duration.parse(text)


def test_no_limit() -> None:
    assert duration.parse_or_none("None") is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59, "59s"), (90, "1m30s"), (840, "14m"), (5400, "1h30m"), (259200, "3d")]
)
def test_durations_are_written(seconds: int, text: str) -> None:
    assert duration.brief(timedelta(seconds=seconds)) == text


def test_moments_are_relative() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert duration.relative(now - timedelta(minutes=3), now) == "3m ago"
    assert duration.relative(now + timedelta(minutes=7), now) == "in 7m"
    assert duration.relative(None, now) == "never"


UNSAFE = "\x1b\x00\x7f\x9b\u202e\u2066\u200b\ufeff\r\n\t\u2028"


@given(st.text(alphabet=st.one_of(st.sampled_from(UNSAFE), st.characters())))
def test_nothing_that_is_shown_can_drive_a_terminal(text: str) -> None:
    shown = visible(text)
    assert not set(shown) & set(UNSAFE)
    assert all(ord(c) >= 32 and not 0x7F <= ord(c) < 0xA0 for c in shown)
    assert not set(visible(text, lines=True)) & (set(UNSAFE) - {"\n", "\t"})


def test_ordinary_text_is_left_alone() -> None:
    assert visible("naïve 日本 🙂 \\x1b") == "naïve 日本 🙂 \\x1b"
    assert visible("\x1b[31m") == "\\x1b[31m"


@pytest.mark.parametrize("form", ["json", "yaml"])
def test_data_is_exact_and_harmless(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"ü": f"a{UNSAFE}b", "n": [1, None]}
    Screen().data(form, data)
    text = capsys.readouterr().out
    assert not set(text) & (set(UNSAFE) - {"\n"})
    assert (json.loads if form == "json" else yaml.safe_load)(text) == data


def test_an_error_is_a_line_a_hint_and_facts(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().error("it\x1b broke", "mend it", ["code X", "request 1"])
    assert capsys.readouterr().err == "error: it\\x1b broke\nhint: mend it\n  code X, request 1\n"
