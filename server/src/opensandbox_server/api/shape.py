# SPDX-License-Identifier: Apache-2.0
"""Shapes that several answers share."""

from __future__ import annotations

from typing import Any

from opensandbox_server.sandbox import End


def given(**fields: Any) -> dict[str, Any]:
    """Only what there is something to say about: published clients cannot read null.

    >>> given(a=1, b=None)
    {'a': 1}
    """
    return {name: value for name, value in fields.items() if value is not None}


def pagination(total: int, page: int, page_size: int) -> dict[str, Any]:
    """Where in a list this page is."""
    return {
        "page": page,
        "pageSize": page_size,
        "totalItems": total,
        "totalPages": -(-total // page_size),
        "hasNextPage": page * page_size < total,
    }


def ending(end: End) -> dict[str, Any]:
    """How a sandbox ended."""
    return given(
        reason=end.reason,
        at=end.at,
        exitCode=end.exit_code,
        signal=end.signal,
        message=end.message,
        peakMemoryBytes=end.peak_memory_bytes,
    )
