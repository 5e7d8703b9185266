# SPDX-License-Identifier: Apache-2.0
"""The SDK against a real server, where a stub would only repeat what we believe: keys, events, the server's proxy."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from live_server import LiveServer
from opensandbox import ConnectionConfig, ConnectionConfigSync, Sandbox, SandboxManagerSync, SandboxSync
from opensandbox.exceptions import ConflictException, NotFoundException, UnsupportedException


@pytest.fixture
def config(server: LiveServer) -> ConnectionConfigSync:
    return ConnectionConfigSync(domain=server.address)


@pytest.fixture
def sandbox(server: LiveServer, config: ConnectionConfigSync) -> Iterator[SandboxSync]:
    with SandboxSync.create("host", connection_config=config) as made:
        yield made
        if made.id in server.ids():
            made.kill()


def test_one_key_one_sandbox(server: LiveServer, config: ConnectionConfigSync) -> None:
    first = SandboxSync.create("host", connection_config=config, idempotency_key="one-wish")
    again = SandboxSync.create("host", connection_config=config, idempotency_key="one-wish")
    other = SandboxSync.create("host", connection_config=config)
    try:
        assert first.id == again.id != other.id
        # What comes back with the answer of the first time still works.
        assert again.commands.run("echo here").text == "here"
        with pytest.raises(ConflictException):
            SandboxSync.create("host", connection_config=config, idempotency_key="one-wish", env={"A": "b"})
    finally:
        first.destroy()
        other.destroy()
        again.close()


def test_events_are_followed_to_the_end(sandbox: SandboxSync) -> None:
    heard: list[str] = []
    running = threading.Event()

    def follow() -> None:
        for event in sandbox.events():
            heard.append(event.event)
            if event.state == "Running":
                running.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert running.wait(10)
    sandbox.kill()
    follower.join(10)
    assert not follower.is_alive()
    assert heard[0] == "created"
    assert heard[-1] == "deleted"


def test_what_ran_is_known_afterwards(sandbox: SandboxSync, config: ConnectionConfigSync) -> None:
    sandbox.commands.run("exit 3")
    with SandboxManagerSync.create(config) as manager:
        record = manager.executions(sandbox.id).records[0]
        assert (record.content, record.exit_code, record.reason) == ("exit 3", 3, "exited")
        assert "OpenSandbox-Python-SDK" in (record.user_agent or "")
        sandbox.kill()
        assert manager.get_history(sandbox.id).end.reason == "killed"
        with pytest.raises(NotFoundException):
            manager.get_sandbox_info(sandbox.id)
        assert manager.runtime().name == "local"


def test_what_the_server_cannot_do_is_typed(sandbox: SandboxSync) -> None:
    for call in (sandbox.pause, sandbox.create_snapshot, sandbox.get_egress_policy):
        with pytest.raises(UnsupportedException) as raised:
            call()
        assert raised.value.hint
        assert raised.value.request_id


def test_everything_through_the_server(server: LiveServer) -> None:
    config = ConnectionConfigSync(domain=server.address, use_server_proxy=True)
    with SandboxSync.create("host", connection_config=config) as sandbox:
        try:
            assert sandbox.get_endpoint(44772).endpoint.startswith(server.address)
            assert sandbox.commands.run("echo through the server").text == "through the server"
            sandbox.files.write_file("/tmp/big", b"x" * 3_000_000)
            assert sum(len(chunk) for chunk in sandbox.files.read_bytes_stream("/tmp/big")) == 3_000_000
            assert sandbox.get_metrics().memory_total_in_mib > 0
            assert sandbox.is_healthy()
        finally:
            sandbox.kill()


@pytest.mark.anyio
async def test_everything_through_the_server_without_waiting(server: LiveServer) -> None:
    config = ConnectionConfig(domain=server.address, use_server_proxy=True)
    async with await Sandbox.create("host", connection_config=config) as sandbox:
        try:
            assert (await sandbox.commands.run("echo through the server")).text == "through the server"
            await sandbox.files.write_file("/tmp/big", b"x" * 3_000_000)
            assert len(await sandbox.files.read_bytes("/tmp/big")) == 3_000_000
        finally:
            await sandbox.kill()
