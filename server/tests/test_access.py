# SPDX-License-Identifier: Apache-2.0
"""Tokens: one per sandbox and generation, computed, and in nobody's representation."""

from __future__ import annotations

import hashlib

import pytest

from opensandbox_server.access import Access


def test_a_token_is_what_the_contract_says() -> None:
    # printf '%s' 'abc:1' | openssl dgst -sha256 -hmac kkkkkkkkkkkkkkkk
    assert Access(b"k" * 16).token("abc", 1) == "036e8bfbd6ec10a648760858be353830ae978e6d04b49e80140e08c20acb3b9e"


def test_tokens_differ_by_id_generation_and_key() -> None:
    access = Access(b"k" * 32)
    tokens = {access.token("a", 1), access.token("b", 1), access.token("a", 2), Access(b"x" * 32).token("a", 1)}
    assert len(tokens) == 4


def test_execd_knows_the_digest_only() -> None:
    access = Access(b"k" * 32)
    assert access.digest("a", 1) == hashlib.sha256(access.token("a", 1).encode()).hexdigest()


def test_only_execds_port_asks_for_a_token() -> None:
    access = Access(b"k" * 32)
    assert access.headers("a", 1, 44772) == {"X-EXECD-ACCESS-TOKEN": access.token("a", 1)}
    assert access.headers("a", 1, 8080) == access.headers("a", 1, 18080) == {}


def test_the_key_is_not_shown_and_not_short() -> None:
    assert "kkkk" not in repr(Access(b"k" * 32))
    with pytest.raises(ValueError, match="shorter"):
        Access(b"k")
