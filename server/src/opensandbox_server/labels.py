# SPDX-License-Identifier: Apache-2.0
"""Metadata is written in the label syntax of Kubernetes, so that it can become labels there. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import parse_qsl

from .errors import Code, OpenSandboxError

RESERVED_PREFIX = "opensandbox.io/"

_NAME = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_MOST_FILTERS = 64
MOST_KEYS = 256


def merge(metadata: Mapping[str, str], patch: Mapping[str, str | None]) -> dict[str, str]:
    """JSON merge patch: null removes a key, other values set it, what is not named stays.

    >>> merge({"a": "1", "b": "2"}, {"a": None, "c": "3"})
    {'b': '2', 'c': '3'}
    """
    _check_number(patch)
    check_keys(patch)
    named = {key: value for key, value in patch.items() if value is not None}
    check(named)
    merged = {key: value for key, value in metadata.items() if key not in patch} | named
    _check_number(merged)
    return merged


def check(metadata: Mapping[str, str]) -> None:
    """Refuse keys and values that are not labels, keys that belong to the platform, and too many of them."""
    _check_number(metadata)
    check_keys(metadata)
    for key, value in metadata.items():
        if not is_value(value):
            raise _refusal(f"The metadata value {value[:64]!r} of {key!r} is not a label value.")


_MOST_NAMED = 10


def change(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Which keys differ, in a sentence. Values stay out: whoever reads events need not see them.

    >>> change({"a": "1", "b": "2"}, {"a": "3", "c": "4"})
    'Set a, c; removed b.'
    """
    written = [key for key, value in after.items() if before.get(key) != value]
    parts = [f"set {_named(written)}"] if written else []
    if removed := [key for key in before if key not in after]:
        parts.append(f"removed {_named(removed)}")
    sentence = "; ".join(parts)
    return f"{sentence[:1].upper()}{sentence[1:]}."


def _named(keys: list[str]) -> str:
    more = len(keys) - _MOST_NAMED
    return ", ".join(sorted(keys)[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def check_keys(keys: Iterable[str]) -> None:
    """Refuse what cannot be a key of metadata, also of metadata that is to be removed."""
    for key in keys:
        if key.startswith(RESERVED_PREFIX):
            raise _refusal(f"The metadata key {key[:64]!r} is reserved: {RESERVED_PREFIX} belongs to the platform.")
        if not is_key(key):
            raise _refusal(f"The metadata key {key[:64]!r} is not a label key.")


def is_key(key: str) -> bool:
    """`name` or `prefix/name`; the prefix is a DNS name.

    >>> is_key("team"), is_key("example.com/team"), is_key("no spaces")
    (True, True, False)
    """
    prefix, slash, name = key.rpartition("/")
    if slash and not (len(prefix) <= 253 and all(_DNS_LABEL.fullmatch(part) for part in prefix.split("."))):
        return False
    return _NAME.fullmatch(name) is not None


def is_value(value: str) -> bool:
    """At most 63 characters, or nothing at all."""
    return value == "" or _NAME.fullmatch(value) is not None


def parse_filter(text: str) -> dict[str, str]:
    """The `metadata` query of a list: `key=value` pairs joined by &, each url-encoded once more by published clients.

    >>> parse_filter("a=b%20c%26d&e=f")
    {'a': 'b c&d', 'e': 'f'}
    """
    if not text:
        return {}
    try:
        pairs = parse_qsl(
            text, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=_MOST_FILTERS
        )
    except ValueError:
        raise _malformed(text) from None
    wanted = dict(pairs)
    if len(wanted) != len(set(pairs)) or "" in wanted:
        raise _malformed(text)
    return wanted


def _check_number(metadata: Mapping[str, str | None]) -> None:
    if len(metadata) > MOST_KEYS:
        raise _refusal(f"{len(metadata)} metadata keys are more than the {MOST_KEYS} a sandbox may have.")


def _refusal(message: str) -> OpenSandboxError:
    return OpenSandboxError(Code.SANDBOX_INVALID_METADATA_LABEL, message)


def _malformed(text: str) -> OpenSandboxError:
    return OpenSandboxError(Code.INVALID_METADATA_FORMAT, f"The metadata filter {text[:64]!r} cannot be read.")
