# SPDX-License-Identifier: Apache-2.0
"""The store: SQLAlchemy Core on SQLite, rows in and out as frozen dataclasses, no ORM."""

from .sql import SqlStore, open_store

__all__ = ["SqlStore", "open_store"]
