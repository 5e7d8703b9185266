# SPDX-License-Identifier: Apache-2.0
"""The statements of the history: sandboxes that are gone, for seven days."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select

from opensandbox_server.ports import HistoryEntry, HistoryPage
from opensandbox_server.sandbox import EndReason

from .page import paged, with_metadata
from .rows import from_history, history_row
from .tables import history, history_metadata, history_texts
from .writer import Driver

LARGEST = 1 << 30
"""Characters of output and journals that are kept in all: what sandboxes say must not fill the disk."""
_NEWEST_FIRST = (history.c.gone_at.desc(), history.c.sandbox_id.desc())
_INSERT = history.insert()
_INSERT_TEXTS = history_texts.insert()
_INSERT_METADATA = history_metadata.insert()
_ONE = (
    select(history, history_texts.c.output, history_texts.c.journal)
    .join(history_texts, history_texts.c.sandbox_id == history.c.sandbox_id)
    .where(history.c.sandbox_id == bindparam("id"), history.c.tenant == bindparam("tenant"))
)


def keep(driver: Driver, entry: HistoryEntry, home: dict[str, Any]) -> None:
    """Beside the delete of its row, in the same transaction."""
    driver.execute(_INSERT, history_row(entry, home))
    driver.execute(_INSERT_TEXTS, {"sandbox_id": entry.id, "output": entry.output, "journal": entry.journal})
    for key, value in entry.metadata.items():
        driver.execute(_INSERT_METADATA, {"sandbox_id": entry.id, "key": key, "value": value})


def one(connection: Connection, tenant: str, sandbox_id: str) -> HistoryEntry | None:
    row = connection.execute(_ONE, {"id": sandbox_id, "tenant": tenant}).one_or_none()
    return from_history(row, row.output, row.journal) if row is not None else None


def listed(connection: Connection, wanted: Select[Any], page: int, page_size: int) -> HistoryPage:
    rows, total = paged(connection, history.c.sandbox_id, wanted, _NEWEST_FIRST, page, page_size)
    return HistoryPage(tuple(map(from_history, rows)), total)


def matching(tenant: str, reasons: frozenset[EndReason], metadata: dict[str, str]) -> Select[Any]:
    wanted = select(history.c.sandbox_id).where(history.c.tenant == tenant)
    if reasons:
        wanted = wanted.where(history.c.reason.in_(sorted(reason.value for reason in reasons)))
    return with_metadata(wanted, history.c.sandbox_id, history_metadata, metadata)


def forget(connection: Connection, before: int, largest: int = LARGEST) -> int:
    """Drop what is older than that, and of the rest the oldest that does not fit; how many went."""
    old = connection.execute(history.delete().where(history.c.gone_at < before)).rowcount
    so_far = func.sum(history.c.size).over(order_by=_NEWEST_FIRST, rows=(None, 0)).label("so_far")
    sums = select(history.c.sandbox_id, so_far).subquery()
    over = select(sums.c.sandbox_id).where(sums.c.so_far > largest)
    return old + connection.execute(history.delete().where(history.c.sandbox_id.in_(over))).rowcount
