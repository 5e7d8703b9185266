# SPDX-License-Identifier: Apache-2.0
"""The synchronous SDK in many threads, and after a fork: one pool, counted right, never shared with a child."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

from stub import ID, Received, Reply, Stub, created

from opensandbox import ConnectionConfigSync, SandboxManagerSync, SandboxSync
from opensandbox.sync import transport

INFO = Reply.of({"id": ID, "status": {"state": "Running"}, "createdAt": "2026-01-01T00:00:00Z", "entrypoint": ["a"]})
THREADS = 8


def pools() -> int:
    with transport._pools.open() as found:
        return len(found)


def test_threads_share_one_pool_and_the_last_one_closes_it(stub: Stub) -> None:
    together = threading.Barrier(THREADS, timeout=10)

    def answer(_: Received) -> Reply:
        # Answered only when all have asked: so they really run at once.
        together.wait()
        return INFO

    stub.routes["GET", f"/v1/sandboxes/{ID}"] = answer

    def use(_: int) -> int:
        with SandboxManagerSync.create(ConnectionConfigSync(domain=stub.address)) as manager:
            for _ in range(5):
                assert manager.get_sandbox_info(ID).id == ID
            return pools()

    with ThreadPoolExecutor(THREADS) as threads:
        assert set(threads.map(use, range(THREADS))) == {1}
    assert pools() == 0
    assert stub.connections == THREADS
    assert stub.idle.wait(5)


def test_one_sandbox_may_be_used_by_many_threads(stub: Stub) -> None:
    stub.routes["POST", "/v1/sandboxes"] = created(stub)
    stub.routes["GET", f"/v1/sandboxes/{ID}/endpoints/80"] = Reply.of({"endpoint": "h:1"})
    stub.routes["GET", "/e/files/download"] = Reply(200, b"x" * 100_000)
    with SandboxSync.create("host", connection_config=ConnectionConfigSync(domain=stub.address)) as sandbox:

        def use(_: int) -> int:
            assert sandbox.get_endpoint(80).endpoint == "h:1"
            return len(sandbox.files.read_bytes("/x"))

        with ThreadPoolExecutor(THREADS) as threads:
            assert set(threads.map(use, range(40))) == {100_000}
    assert pools() == 0


def test_a_forked_child_makes_connections_of_its_own(stub: Stub) -> None:
    stub.routes["GET", f"/v1/sandboxes/{ID}"] = INFO
    with SandboxManagerSync.create(ConnectionConfigSync(domain=stub.address)) as manager:
        manager.get_sandbox_info(ID)
        # The lock of the pools is held by another thread at the moment of the fork.
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with transport._pools.open():
                held.set()
                release.wait(10)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(10)
        child = os.fork()
        if child == 0:
            # A lock that nobody will ever release must end the child, and so fail the test.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            try:
                manager.get_sandbox_info(ID)
                manager.close()
            finally:
                os._exit(0 if pools() == 0 else 1)
        release.set()
        holder.join()
        assert os.waitpid(child, 0)[1] == 0
        manager.get_sandbox_info(ID)
    first, second, third = (received.connection for received in stub.requests)
    assert first == third != second
