# SPDX-License-Identifier: Apache-2.0
"""The tables as statements see them. `migrations` makes them; a test holds the two together."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, MetaData, Table, Text

metadata = MetaData()

instance = Table("instance", metadata, Column("id", Text, primary_key=True))

epochs = Table(
    "epochs",
    metadata,
    Column("node", Text, primary_key=True),
    Column("runtime", Text, primary_key=True),
    Column("epoch", BigInteger),
)

sandboxes = Table(
    "sandboxes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text),
    Column("node", Text),
    Column("runtime", Text),
    Column("epoch", BigInteger),
    Column("generation", BigInteger),
    Column("version", BigInteger),
    Column("state", Text),
    Column("reason", Text),
    Column("message", Text),
    Column("image", Text),
    Column("entrypoint", Text),
    Column("env", Text),
    Column("cpu_millis", BigInteger),
    Column("memory_bytes", BigInteger),
    Column("pids", BigInteger),
    Column("metadata", Text),
    Column("extensions", Text),
    Column("platform", Text),
    Column("isolation", Text),
    Column("ending", Text),
    Column("created_at", BigInteger),
    Column("changed_at", BigInteger),
    Column("expires_at", BigInteger),
)

sandbox_metadata = Table(
    "sandbox_metadata",
    metadata,
    Column("sandbox_id", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text),
)

sandbox_events = Table(
    "sandbox_events",
    metadata,
    Column("seq", BigInteger, primary_key=True),
    Column("sandbox_id", Text),
    Column("tenant", Text),
    Column("node", Text),
    Column("runtime", Text),
    Column("at", BigInteger),
    Column("event", Text),
    Column("state", Text),
    Column("version", BigInteger),
    Column("reason", Text),
    Column("message", Text),
)

idempotency_keys = Table(
    "idempotency_keys",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("body", Text),
    Column("sandbox_id", Text),
    Column("created_at", BigInteger),
    Column("answer", Text),
)

history = Table(
    "history",
    metadata,
    Column("sandbox_id", Text, primary_key=True),
    Column("tenant", Text),
    Column("node", Text),
    Column("runtime", Text),
    Column("image", Text),
    Column("entrypoint", Text),
    Column("metadata", Text),
    Column("created_at", BigInteger),
    Column("gone_at", BigInteger),
    Column("reason", Text),
    Column("ending", Text),
    Column("executions", BigInteger),
    Column("size", BigInteger),
)

history_texts = Table(
    "history_texts",
    metadata,
    Column("sandbox_id", Text, primary_key=True),
    Column("output", Text),
    Column("journal", Text),
)

history_metadata = Table(
    "history_metadata",
    metadata,
    Column("sandbox_id", Text, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("value", Text),
)
