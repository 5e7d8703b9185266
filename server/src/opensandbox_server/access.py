# SPDX-License-Identifier: Apache-2.0
"""Tokens: what lets a client talk to the execd of one sandbox, and of no other.

A token is computed, never stored: HMAC-SHA256 of the instance key over the sandbox's id and generation. execd holds
only its digest, so nothing inside a sandbox can learn a token, not even its own.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field

TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"  # noqa: S105 - the name of a header
EXECD_PORT = 44772


@dataclass(frozen=True)
class Access:
    """Makes the tokens of one instance.

    >>> len(Access(b"k" * 32).token("3f0c", 1))
    64
    """

    key: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.key) < 16:
            raise ValueError("the instance key is shorter than 16 bytes")

    def token(self, sandbox_id: str, generation: int) -> str:
        return hmac.digest(self.key, f"{sandbox_id}:{generation}".encode(), "sha256").hex()

    def digest(self, sandbox_id: str, generation: int) -> str:
        """What execd may know: the hex SHA-256 of the token."""
        return hashlib.sha256(self.token(sandbox_id, generation).encode()).hexdigest()

    def headers(self, sandbox_id: str, generation: int, port: int) -> dict[str, str]:
        """What a client sends with every request to that port; only execd's own asks for anything."""
        return {TOKEN_HEADER: self.token(sandbox_id, generation)} if port == EXECD_PORT else {}
