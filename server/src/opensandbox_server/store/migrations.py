# SPDX-License-Identifier: Apache-2.0
"""The schema, as numbered steps that only go forward. A step that has been released is never edited.

Plain SQL that SQLite and PostgreSQL both read; `{serial}` is the one word they disagree on. Times are microseconds
since 1970 in UTC: they sort, and both databases index them alike.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

from opensandbox_server.errors import CannotStart

SERIAL = {"sqlite": "INTEGER PRIMARY KEY AUTOINCREMENT", "postgresql": "BIGSERIAL PRIMARY KEY"}

STEPS: tuple[tuple[str, ...], ...] = (
    # 1: sandboxes and what happened to them
    (
        "CREATE TABLE instance (id TEXT NOT NULL PRIMARY KEY)",
        """CREATE TABLE epochs (
            node TEXT NOT NULL,
            runtime TEXT NOT NULL,
            epoch BIGINT NOT NULL,
            PRIMARY KEY (node, runtime)
        )""",
        """CREATE TABLE sandboxes (
            id TEXT NOT NULL PRIMARY KEY,
            tenant TEXT NOT NULL,
            node TEXT NOT NULL,
            runtime TEXT NOT NULL,
            epoch BIGINT NOT NULL,
            generation BIGINT NOT NULL,
            version BIGINT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT,
            message TEXT,
            image TEXT NOT NULL,
            entrypoint TEXT NOT NULL,
            env TEXT NOT NULL,
            cpu_millis BIGINT,
            memory_bytes BIGINT,
            pids BIGINT,
            metadata TEXT NOT NULL,
            extensions TEXT NOT NULL,
            platform TEXT,
            isolation TEXT NOT NULL,
            ending TEXT,
            created_at BIGINT NOT NULL,
            changed_at BIGINT NOT NULL,
            expires_at BIGINT
        )""",
        "CREATE INDEX sandboxes_newest ON sandboxes (tenant, created_at, id)",
        "CREATE INDEX sandboxes_by_state ON sandboxes (tenant, state, created_at, id)",
        "CREATE INDEX sandboxes_due ON sandboxes (node, runtime, expires_at) WHERE expires_at IS NOT NULL",
        # Metadata a second time, one row per pair, so that a filter is a lookup in an index.
        """CREATE TABLE sandbox_metadata (
            sandbox_id TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (sandbox_id, key)
        )""",
        "CREATE INDEX sandbox_metadata_pairs ON sandbox_metadata (key, value, sandbox_id)",
        # Events outlive their sandbox, so there is no reference to it.
        """CREATE TABLE sandbox_events (
            seq {serial},
            sandbox_id TEXT NOT NULL,
            tenant TEXT NOT NULL,
            node TEXT NOT NULL,
            runtime TEXT NOT NULL,
            at BIGINT NOT NULL,
            event TEXT NOT NULL,
            state TEXT NOT NULL,
            version BIGINT NOT NULL,
            reason TEXT,
            message TEXT
        )""",
        "CREATE INDEX sandbox_events_of ON sandbox_events (sandbox_id, seq)",
        "CREATE INDEX sandbox_events_age ON sandbox_events (at)",
    ),
    # 2: keys that make a create repeatable, and counting those that live
    (
        # A key outlives its sandbox, so there is no reference to it. Without an answer the create is at work or failed.
        """CREATE TABLE idempotency_keys (
            tenant TEXT NOT NULL,
            key TEXT NOT NULL,
            body TEXT NOT NULL,
            sandbox_id TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            answer TEXT,
            PRIMARY KEY (tenant, key)
        )""",
        "CREATE INDEX idempotency_keys_age ON idempotency_keys (created_at)",
        "CREATE INDEX sandboxes_alive ON sandboxes (node, runtime) WHERE state NOT IN ('Terminated', 'Failed')",
    ),
    # 3: sandboxes that are gone
    (
        """CREATE TABLE history (
            sandbox_id TEXT NOT NULL PRIMARY KEY,
            tenant TEXT NOT NULL,
            node TEXT NOT NULL,
            runtime TEXT NOT NULL,
            image TEXT NOT NULL,
            entrypoint TEXT NOT NULL,
            metadata TEXT NOT NULL,
            created_at BIGINT NOT NULL,
            gone_at BIGINT NOT NULL,
            reason TEXT NOT NULL,
            ending TEXT NOT NULL,
            executions BIGINT NOT NULL,
            size BIGINT NOT NULL
        )""",
        "CREATE INDEX history_newest ON history (tenant, gone_at, sandbox_id)",
        "CREATE INDEX history_by_reason ON history (tenant, reason, gone_at, sandbox_id)",
        "CREATE INDEX history_age ON history (gone_at, size)",
        # The long texts apart, so that a list never reads them.
        """CREATE TABLE history_texts (
            sandbox_id TEXT NOT NULL PRIMARY KEY REFERENCES history (sandbox_id) ON DELETE CASCADE,
            output TEXT NOT NULL,
            journal TEXT NOT NULL
        )""",
        """CREATE TABLE history_metadata (
            sandbox_id TEXT NOT NULL REFERENCES history (sandbox_id) ON DELETE CASCADE,
            key TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (sandbox_id, key)
        )""",
        "CREATE INDEX history_metadata_pairs ON history_metadata (key, value, sandbox_id)",
        "CREATE INDEX sandbox_events_by_tenant ON sandbox_events (tenant, seq)",
    ),
)

NEWEST = len(STEPS)


def migrate(connection: Connection, where: str) -> int:
    """Bring the schema to the newest version inside the caller's transaction; how many steps that took."""
    connection.execute(text("CREATE TABLE IF NOT EXISTS schema_version (version BIGINT NOT NULL)"))
    version = connection.execute(text("SELECT version FROM schema_version")).scalar()
    if version is None:
        version = 0
        connection.execute(text("INSERT INTO schema_version (version) VALUES (0)"))
    if version > NEWEST:
        raise CannotStart(
            f"{where} was written by a newer opensandbox-server (schema {version}, this one knows {NEWEST}).",
            "Install that version again, or start with another state directory.",
        )
    for step in STEPS[version:]:
        for statement in step:
            connection.execute(text(statement.format(serial=SERIAL[connection.dialect.name])))
    if version < NEWEST:
        connection.execute(text("UPDATE schema_version SET version = :version"), {"version": NEWEST})
    return NEWEST - version
