# SPDX-License-Identifier: Apache-2.0
"""A browser, and web sites in sandboxes."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from chromium import Chromium, Page
from website import Website, start

from live_server import LiveServer


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    if shutil.which("chromium") is None:
        pytest.fail("chromium is not installed; `make setup-test` does it", pytrace=False)
    with Chromium.started() as browser:
        yield browser


@pytest.fixture
def page(browser: Chromium) -> Iterator[Page]:
    with browser.page() as page:
        yield page


@pytest.fixture(scope="module")
def site(server: LiveServer) -> Website:
    return start(server)


@pytest.fixture(scope="module")
def neighbour(server: LiveServer) -> Website:
    return start(server)


@pytest.fixture(scope="module")
def same_origin_site(linux: None) -> Iterator[Website]:
    """On a server whose operator lets pages of sandboxes share its origin."""
    home = Path(tempfile.mkdtemp(prefix="osb-"))
    try:
        with LiveServer.started(home, config="[proxy]\npage_sandbox = false\n") as server:
            yield start(server)
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[str]:
    """An empty page of another origin on this machine: where an attacker's script stands."""

    class Empty(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>elsewhere</title>")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Empty)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.fixture
def untouched(server: LiveServer) -> Iterator[Callable[[], None]]:
    """Call it to see that no sandbox was made or deleted since the test began."""
    before = server.ids()

    def check() -> None:
        assert server.ids() == before

    return check
