# SPDX-License-Identifier: Apache-2.0
"""Lists that the database filters and cuts, for every table that has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Column, ColumnElement, Connection, Select, Table, func, select

_LARGEST_OFFSET = 1 << 40


def paged(
    connection: Connection,
    key: Column[str],
    wanted: Select[Any],
    newest_first: Sequence[ColumnElement[Any]],
    page: int,
    page_size: int,
) -> tuple[Sequence[Any], int]:
    """One page of the rows whose keys are `wanted`, and the number of them in all."""
    total: int = connection.execute(select(func.count()).select_from(wanted.subquery())).scalar_one()
    offset = (page - 1) * page_size
    if offset >= min(total, _LARGEST_OFFSET):
        return (), total
    # The page is cut from keys alone, which the index holds, so that rows are only read to be shown.
    keys = wanted.order_by(*newest_first).limit(page_size).offset(offset)
    rows = connection.execute(select(key.table).where(key.in_(keys)).order_by(*newest_first))
    return rows.all(), total


def with_metadata(wanted: Select[Any], key: Column[str], pairs: Table, metadata: dict[str, str]) -> Select[Any]:
    """Only those that have all these pairs, each found in an index."""
    for name, value in metadata.items():
        pair = pairs.alias()
        wanted = wanted.where(key.in_(select(pair.c.sandbox_id).where(pair.c.key == name, pair.c.value == value)))
    return wanted
