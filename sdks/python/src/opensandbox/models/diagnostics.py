# SPDX-License-Identifier: Apache-2.0
"""Logs and events of a sandbox, for people to read."""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from opensandbox.models.base import Answer


class DiagnosticContent(Answer):
    """A text, or where it can be fetched."""

    sandbox_id: str
    kind: Literal["logs", "events"]
    scope: str
    delivery: Literal["inline", "url"]
    content_type: str
    truncated: bool
    content: str | None = None
    content_url: str | None = None
    content_length: int | None = None
    """Bytes of the content."""
    expires_at: datetime | None = None
    warnings: list[str] | None = None
