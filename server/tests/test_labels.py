# SPDX-License-Identifier: Apache-2.0
"""Metadata: label syntax, and the filter of a list."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opensandbox_server import labels
from opensandbox_server.errors import Code, OpenSandboxError

INNER = "abcXYZ019-_."
names = st.from_regex(r"\A[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?\Z")


@pytest.mark.parametrize(
    "key", ["a", "team", "a.b-c_d", "example.com/team", "a" * 63, "x/" + "a" * 63, f"{'a' * 63}.b/c"]
)
def test_keys(key: str) -> None:
    labels.check({key: "v"})


@pytest.mark.parametrize(
    "key",
    [
        "",
        "-a",
        "a-",
        "a b",
        "a" * 64,
        "/a",
        "a/",
        "a/b/c",
        "Upper.Case/a",
        "a..b/c",
        f"{'a' * 64}/c",
        "é",
        "a\n",
        "x/é",
    ],
)
def test_keys_that_are_refused(key: str) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        labels.check({key: "v"})
    assert caught.value.code is Code.SANDBOX_INVALID_METADATA_LABEL


@pytest.mark.parametrize("value", ["a b", "a" * 64, "-", "a\n", "\0", "a/b", "é"])
def test_values_that_are_refused(value: str) -> None:
    with pytest.raises(OpenSandboxError, match="label value"):
        labels.check({"k": value})


def test_an_empty_value_is_fine() -> None:
    labels.check({"k": ""})


def test_the_platforms_own_prefix_is_reserved() -> None:
    with pytest.raises(OpenSandboxError, match="reserved"):
        labels.check({"opensandbox.io/id": "x"})


@given(names)
def test_every_name_is_key_and_value(name: str) -> None:
    assert labels.is_key(name)
    assert labels.is_value(name)


@given(st.text(min_size=1, max_size=80))
def test_what_passes_is_short_and_plain(text: str) -> None:
    if labels.is_value(text):
        assert len(text) <= 63
        assert text.isascii()
        assert text[0].isalnum()
        assert text[-1].isalnum()


@given(st.dictionaries(st.text(min_size=1), st.text(), max_size=5))
def test_a_filter_as_published_clients_write_it(wanted: dict[str, str]) -> None:
    try:
        written = "&".join(f"{quote(key)}={quote(value)}" for key, value in wanted.items())
    except UnicodeEncodeError:  # a lone surrogate cannot be sent at all
        return
    assert labels.parse_filter(written) == wanted


@pytest.mark.parametrize(
    "text", ["novalue", "a=b&c", "=b", "&", "a=1&a=2", "a=%FF", "&".join(f"k{n}=v" for n in range(65))]
)
def test_filters_that_cannot_be_read(text: str) -> None:
    with pytest.raises(OpenSandboxError) as caught:
        labels.parse_filter(text)
    assert caught.value.code is Code.INVALID_METADATA_FORMAT


def test_no_filter() -> None:
    assert labels.parse_filter("") == {}
