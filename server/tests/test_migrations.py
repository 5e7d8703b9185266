# SPDX-License-Identifier: Apache-2.0
"""The schema: made by steps, known to the statements, refused when it is from the future."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from opensandbox_server.errors import CannotStart
from opensandbox_server.store import open_store
from opensandbox_server.store.migrations import NEWEST
from opensandbox_server.store.tables import metadata

pytestmark = pytest.mark.anyio


async def opened(path: Path) -> None:
    async with open_store(path, node="n", runtime="r"):
        pass


async def test_tables_and_statements_agree(tmp_path: Path) -> None:
    await opened(tmp_path / "a.db")
    with sqlite3.connect(tmp_path / "a.db") as database:
        for table in metadata.sorted_tables:
            columns = [row[1] for row in database.execute(f"PRAGMA table_info({table.name})")]
            assert sorted(columns) == sorted(column.name for column in table.columns)


async def test_the_settings_that_matter_are_on(tmp_path: Path) -> None:
    async with open_store(tmp_path / "a.db", node="n", runtime="r") as store:
        values = {}
        for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout"):
            values[name] = store._writer.connection.exec_driver_sql(f"PRAGMA {name}").scalar()
        store._writer.connection.rollback()
    assert values == {"journal_mode": "wal", "synchronous": 1, "foreign_keys": 1, "busy_timeout": 0}


async def test_a_newer_schema_is_refused_with_what_to_do(tmp_path: Path) -> None:
    await opened(tmp_path / "a.db")
    with sqlite3.connect(tmp_path / "a.db") as database:
        database.execute(f"UPDATE schema_version SET version = {NEWEST + 1}")
    with pytest.raises(CannotStart) as caught:
        await opened(tmp_path / "a.db")
    assert "newer opensandbox-server" in caught.value.message
    assert "\n" not in caught.value.message
    assert "state directory" in caught.value.hint


async def test_a_step_that_breaks_off_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opensandbox_server.store import migrations

    broken = ((*migrations.STEPS[0], "CREATE NONSENSE"),)
    with monkeypatch.context() as patch:
        patch.setattr(migrations, "STEPS", broken)
        with pytest.raises(CannotStart):
            await opened(tmp_path / "a.db")
    with sqlite3.connect(tmp_path / "a.db") as database:
        assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    await opened(tmp_path / "a.db")


async def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "a.db").write_bytes(b"this is no database, but long enough to look at" * 40)
    with pytest.raises(CannotStart, match="cannot be used"):
        await opened(tmp_path / "a.db")


async def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="No such file"):
        await opened(tmp_path / "missing" / "a.db")


async def test_lists_are_read_from_indexes(tmp_path: Path) -> None:
    from opensandbox_server.sandbox import SandboxState
    from opensandbox_server.store.sql import _DUE, _NEWEST_FIRST, _matching

    await opened(tmp_path / "a.db")
    with sqlite3.connect(tmp_path / "a.db") as database:

        def plan(query: object) -> str:
            text = str(query.compile(compile_kwargs={"literal_binds": True}))  # type: ignore[attr-defined]
            return " ".join(row[3] for row in database.execute(f"EXPLAIN QUERY PLAN {text}"))

        newest = plan(_matching("t", frozenset(), {}).order_by(*_NEWEST_FIRST))
        assert "sandboxes_newest" in newest
        assert "TEMP B-TREE" not in newest
        assert "sandboxes_by_state" in plan(_matching("t", frozenset({SandboxState.RUNNING}), {}))
        assert "sandbox_metadata_pairs" in plan(_matching("t", frozenset(), {"a": "b"}))
        assert "sandboxes_due" in plan(_DUE.params(node="n", runtime="r", now=1))
