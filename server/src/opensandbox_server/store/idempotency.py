# SPDX-License-Identifier: Apache-2.0
"""Keys of creates: kept in the transaction that reserves the sandbox, answered in the one that publishes it."""

from __future__ import annotations

from pydantic_core import from_json, to_json
from sqlalchemy import Connection, bindparam, select, text

from opensandbox_server.ports import KeyedCreate

from .rows import micros, moment
from .tables import idempotency_keys
from .writer import Driver

_ONE = (idempotency_keys.c.tenant == bindparam("a_tenant"), idempotency_keys.c.key == bindparam("a_key"))
_FIND = select(
    idempotency_keys.c.body, idempotency_keys.c.sandbox_id, idempotency_keys.c.created_at, idempotency_keys.c.answer
).where(*_ONE)
# A key that is free again may still have its row.
_KEEP = text(
    "INSERT INTO idempotency_keys (tenant, key, body, sandbox_id, created_at, answer)"
    " VALUES (:tenant, :key, :body, :sandbox_id, :created_at, NULL) ON CONFLICT (tenant, key) DO UPDATE SET"
    " body = excluded.body, sandbox_id = excluded.sandbox_id, created_at = excluded.created_at, answer = NULL"
)
_ANSWER = (
    idempotency_keys.update()
    .where(*_ONE, idempotency_keys.c.sandbox_id == bindparam("of"))
    .values(answer=bindparam("told"))
)


def find(driver: Driver, tenant: str, key: str) -> KeyedCreate | None:
    """What was asked under that key, and whether it was answered."""
    row = driver.execute(_FIND, {"a_tenant": tenant, "a_key": key}).fetchone()
    if row is None:
        return None
    body, sandbox_id, created_at, told = row
    return KeyedCreate(
        tenant=tenant,
        key=key,
        body=body,
        sandbox_id=sandbox_id,
        created_at=moment(created_at),
        warnings=tuple(from_json(told)) if told is not None else None,
    )


def keep(driver: Driver, keyed: KeyedCreate) -> None:
    """Not answered yet."""
    driver.execute(_KEEP, {**vars(keyed), "created_at": micros(keyed.created_at)})


def answer(driver: Driver, keyed: KeyedCreate) -> None:
    """The sandbox is made, and from now on it is what this key gives."""
    driver.execute(
        _ANSWER,
        {
            "a_tenant": keyed.tenant,
            "a_key": keyed.key,
            "of": keyed.sandbox_id,
            "told": to_json(keyed.warnings or ()).decode(),
        },
    )


def forget(connection: Connection, before: int) -> int:
    """Drop keys older than that."""
    return connection.execute(idempotency_keys.delete().where(idempotency_keys.c.created_at < before)).rowcount
