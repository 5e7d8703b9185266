# SPDX-License-Identifier: Apache-2.0
"""The journal of commands comes out of a sandbox: whatever it holds, it is read, bounded, and never believed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from world import TENANT, World

from opensandbox_server import executions
from opensandbox_server.errors import Code, OpenSandboxError
from opensandbox_server.executions import Executions, dump, load, parse


def line(**fields: Any) -> bytes:
    return json.dumps({"id": "a", "content": "ls", "started_at": "2026-01-02T03:04:05Z", **fields}).encode() + b"\n"


END = {"reason": "exited", "exit_code": 3}


def test_the_last_line_of_an_id_counts() -> None:
    one, two = parse(line() + line(id="b") + line(end=END, finished_at="2026-01-02T03:04:06.5+00:00", output=12))
    assert (one.id, one.running, one.exit_code, one.output_bytes) == ("a", False, 3, 12)
    assert one.finished_at is not None
    assert (two.id, two.running) == ("b", True)


@pytest.mark.parametrize(
    "bad",
    [
        b"\xff\xfe\n",
        b"{\n",
        b"null\n",
        b"[]\n",
        b"7\n",
        b'"text"\n',
        b"[" * 100_000 + b"\n",
        line(id=5),
        line(id=""),
        line(started_at=None),
        line(started_at="yesterday"),
        line(started_at="9999-12-31T23:59:59-23:59"),
        line(content="x" * executions.LONGEST_LINE),
    ],
)
def test_lines_without_sense_are_skipped(bad: bytes) -> None:
    assert [one.id for one in parse(line(id="first") + bad + line(id="last"))] == ["first", "last"]


def test_wrong_types_and_long_texts_are_left_out_or_cut() -> None:
    [one] = parse(
        line(
            uid="root",
            background="yes",
            client="9" * 500,
            user_agent=["x"],
            output=1 << 80,
            end={"exit_code": True},
            content="\ud800\0" + "x" * 20_000,
            cwd=7,
        )
    )
    assert (one.uid, one.background, one.user_agent, one.output_bytes, one.exit_code, one.cwd) == (None,) * 6
    assert one.client == "9" * 64
    assert len(one.content) == 16 * 1024
    one.content.encode()
    assert "\0" not in one.content


@given(st.binary(max_size=300))
def test_no_bytes_break_it(journal: bytes) -> None:
    parse(journal)


def test_only_the_newest_are_kept_and_come_back_as_they_were() -> None:
    found = parse(b"".join(line(id=f"{n:04}", end=END, client="10.0.0.1", user_agent="SDK") for n in range(1500)))
    kept = load(dump(found))
    assert kept == found[-executions.KEPT_RECORDS :]
    large = parse(b"".join(line(id=f"{n:04}", content="x" * 16_000) for n in range(100)))
    text = dump(large)
    assert len(text) <= executions.KEPT_CHARACTERS + 2
    assert load(text) == large[-len(load(text)) :]


@pytest.mark.anyio
async def test_newest_first_in_pages_and_also_when_it_is_gone(world: World) -> None:
    use_case = Executions(world.store, world.runtime)
    sandbox_id = (await world.create()).sandbox.id
    world.runtime.journals[sandbox_id] = line(id="entrypoint") + b"".join(line(id=str(n)) for n in range(5))
    page = await use_case.list(TENANT, sandbox_id, page=2, page_size=2)
    assert ([one.id for one in page.items], page.total) == (["2", "1"], 5)
    assert all(one.running for one in page.items)
    await world.lifecycle.delete(TENANT, sandbox_id)
    page = await use_case.list(TENANT, sandbox_id)
    assert [one.id for one in page.items] == ["4", "3", "2", "1", "0"]
    assert {(one.running, one.reason) for one in page.items} == {(False, "killed")}
    for tenant, other in (("another", sandbox_id), (TENANT, "no-such")):
        with pytest.raises(OpenSandboxError) as caught:
            await use_case.list(tenant, other)
        assert caught.value.code is Code.SANDBOX_NOT_FOUND


@pytest.mark.anyio
async def test_a_large_journal_does_not_hold_up_the_others(world: World) -> None:
    sandbox_id = (await world.create()).sandbox.id
    world.runtime.journals[sandbox_id] = b"".join(line(id=str(n), content="x" * 1000) for n in range(3000))
    assert (await Executions(world.store, world.runtime).list(TENANT, sandbox_id)).total == 3000
