# SPDX-License-Identifier: Apache-2.0
"""One fixture: a server to be hurt, and a last look that nothing is left of what it made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rig import Rig

from live_server import LiveServer


@pytest.fixture
def rig(server: LiveServer) -> Iterator[Rig]:
    """The module's server with a mark of this test; it is started again if the test left it dead."""
    made = Rig(server)
    yield made
    if server.process is None or server.process.poll() is not None:
        server.start()
    for sandbox_id in server.ids():
        server.call("DELETE", f"/v1/sandboxes/{sandbox_id}")
    assert made.settle() == set()
    assert made.marked_processes() == []
