# SPDX-License-Identifier: Apache-2.0
"""Tenants: the file, how it is followed, and that one tenant's sandboxes are nothing to another."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from world import BODY, NODE

from opensandbox_server.app import Deps, create_app
from opensandbox_server.errors import CannotStart
from opensandbox_server.runtimes.fake import FakeRuntime
from opensandbox_server.store import open_store
from opensandbox_server.tenants import BadTenants, Tenants, parse

A, B = "key-of-a", "key-of-b"
FILE = f"""
[[tenants]]
name = "a"
namespace = "team-a"
api_keys = ["{A}", "second-key-of-a"]
[[tenants]]
name = "b"
api_keys = ["{B}"]
"""


def write(path: Path, text: str) -> Path:
    """As another file, as editors do; with another time even on a coarse clock."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    new = path.with_suffix(".new")
    new.write_text(text)
    os.utime(new, ns=(before + 10**9, before + 10**9))
    new.replace(path)
    return path


def test_keys_belong_to_tenants() -> None:
    found = parse(FILE)
    assert [found.tenant(key) for key in (A.encode(), b"second-key-of-a", B.encode())] == ["a", "a", "b"]
    assert [found.tenant(key) for key in (b"", b"key-of", b"\xff", b"key-of-a ")] == [None] * 4
    assert A not in repr(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "one or more"),
        ("tenants = []", "one or more"),
        ("tenants = 3", "one or more"),
        ("tenants = [3]", "not a table"),
        ("[[tenants", "not valid TOML"),
        (FILE + "\n[other]\n", "nothing else"),
        ('[[tenants]]\napi_keys = ["k"]', "needs a name"),
        ('[[tenants]]\nname = ""\napi_keys = ["k"]', "needs a name"),
        ('[[tenants]]\nname = "a\\n"\napi_keys = ["k"]', "needs a name"),
        ('[[tenants]]\nname = "a"', "api_keys"),
        ('[[tenants]]\nname = "a"\napi_keys = []', "api_keys"),
        ('[[tenants]]\nname = "a"\napi_keys = [""]', "api_keys"),
        ('[[tenants]]\nname = "a"\napi_keys = ["with space"]', "api_keys"),
        ('[[tenants]]\nname = "a"\napi_keys = [1]', "api_keys"),
        ('[[tenants]]\nname = "a"\nnamespace = 1\napi_keys = ["k"]', "namespace"),
        ('[[tenants]]\nname = "a"\napi_key = "k"\napi_keys = ["k"]', "unknown key 'api_key'"),
        (FILE + '[[tenants]]\nname = "a"\napi_keys = ["k"]', "two tenants"),
        (FILE + f'[[tenants]]\nname = "c"\napi_keys = ["{A}"]', "the same key"),
    ],
)
def test_a_bad_list_is_refused_as_a_whole_and_shows_no_key(text: str, why: str) -> None:
    with pytest.raises(BadTenants, match=why) as caught:
        parse(text)
    assert A not in str(caught.value)


def test_a_server_does_not_start_without_its_list(tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="No such file") as caught:
        Tenants(tmp_path / "tenants.toml")
    assert "[[tenants]]" in caught.value.hint
    (tmp_path / "tenants.toml").write_bytes(b"\xff")
    with pytest.raises(CannotStart, match="not UTF-8"):
        Tenants(tmp_path / "tenants.toml")


@pytest.mark.anyio
async def test_the_list_is_followed_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "tenants.toml", FILE)
    tenants = Tenants(file)
    write(file, FILE.replace(B, "new-key-of-b"))
    await tenants.look()
    assert [tenants.tenant(key) for key in (B.encode(), b"new-key-of-b")] == [None, "b"]
    with caplog.at_level(logging.ERROR):
        write(file, "nonsense")
        await tenants.look()
        await tenants.look()
        file.unlink()
        await tenants.look()
    assert len(caplog.records) == 2, "once for each bad file, not every two seconds"
    assert tenants.tenant(b"new-key-of-b") == "b"
    write(file, FILE)
    await tenants.look()
    assert tenants.tenant(B.encode()) == "b"


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    return Tenants(write(tmp_path / "tenants.toml", FILE))


@pytest.fixture
async def client(tmp_path: Path, tenants: Tenants, no_blocking: None) -> AsyncIterator[httpx2.AsyncClient]:
    async with open_store(tmp_path / "a.db", node=NODE, runtime="fake") as store:
        app = create_app(Deps(store, FakeRuntime(), b"k" * 32, node=NODE, epoch=store.epoch, tenants=tenants))
        async with (
            app.router.lifespan_context(app),
            httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://sandboxes.example") as made,
        ):
            yield made


async def ask(client: httpx2.AsyncClient, key: str | None, method: str, path: str, **options: Any) -> httpx2.Response:
    headers = {**options.pop("headers", {}), **({"OPEN-SANDBOX-API-KEY": key} if key else {})}
    return await client.request(method, f"/v1{path}", headers=headers, **options)


@pytest.mark.anyio
async def test_a_key_is_needed_and_must_be_somebodys(client: httpx2.AsyncClient) -> None:
    assert (await ask(client, None, "GET", "/sandboxes")).json()["code"] == "MISSING_API_KEY"
    assert (await ask(client, "nobody", "GET", "/sandboxes")).json()["code"] == "INVALID_API_KEY"
    assert (await client.get("/health")).status_code == 200
    assert (await ask(client, A, "GET", "/sandboxes")).status_code == 200


@pytest.mark.anyio
async def test_another_tenants_sandbox_is_as_if_it_did_not_exist(client: httpx2.AsyncClient) -> None:
    made = (await ask(client, A, "POST", "/sandboxes", json=BODY)).json()["id"]
    never = "00000000-0000-4000-8000-000000000000"
    assert (await ask(client, B, "GET", "/sandboxes")).json()["items"] == []
    assert (await ask(client, "second-key-of-a", "GET", f"/sandboxes/{made}")).status_code == 200
    calls: list[tuple[str, str, Any]] = [
        ("GET", "", None),
        ("DELETE", "", None),
        ("PATCH", "/metadata", {"a": "b"}),
        ("POST", "/renew-expiration", {"expiresAt": "2999-01-01T00:00:00Z"}),
        ("GET", "/endpoints/8000", None),
        ("GET", "/endpoints/8000?use_server_proxy=true", None),
        ("GET", "/diagnostics/logs", None),
        ("GET", "/diagnostics/events?scope=all", None),
        ("GET", "/diagnostics/inspect", None),
        ("GET", "/diagnostics/summary", None),
        ("GET", "/events?follow=false", None),
        ("GET", "/executions", None),
        ("GET", "/proxy/8000/", None),
    ]
    for method, rest, content in calls:
        theirs = await ask(client, B, method, f"/sandboxes/{made}{rest}", json=content)
        nobodys = await ask(client, B, method, f"/sandboxes/{never}{rest}", json=content)
        assert theirs.status_code == nobodys.status_code == 404, (method, rest, theirs.text)
        told = theirs.json() | {"requestId": ""}
        assert str(told).replace(made, never) == str(nobodys.json() | {"requestId": ""}), (method, rest)
    assert (await ask(client, A, "GET", f"/sandboxes/{made}")).status_code == 200


@pytest.mark.anyio
async def test_keys_of_creates_are_the_tenants_own(client: httpx2.AsyncClient) -> None:
    key = {"Idempotency-Key": "same"}
    one, other = [(await ask(client, who, "POST", "/sandboxes", json=BODY, headers=key)).json() for who in (A, B)]
    assert one["id"] != other["id"]
