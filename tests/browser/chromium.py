# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, driven over its DevTools protocol: as much of it as these tests need."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from live_server import until

SECONDS = 30.0
_SWITCHES = (
    "--headless=new",
    "--remote-debugging-port=0",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    # Nothing but this machine exists: no test may depend on, or tell, the world outside.
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE localhost , EXCLUDE *.localhost , EXCLUDE 127.0.0.1",
)


class Chromium:
    """One browser. `page()` is a tab with cookies of its own."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._number = 0
        self._events: list[dict[str, Any]] = []

    @classmethod
    @contextlib.contextmanager
    def started(cls) -> Iterator[Chromium]:
        home = Path(tempfile.mkdtemp(prefix="osb-chromium-"))
        # Its own sandbox wants to be started by somebody else than root.
        switches = [*_SWITCHES, *(["--no-sandbox"] if os.geteuid() == 0 else []), f"--user-data-dir={home}"]
        with (home / "said").open("w") as said:
            process = subprocess.Popen(
                ["chromium", *switches, "about:blank"],
                env={**os.environ, "HOME": str(home), "XDG_CONFIG_HOME": str(home)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,
            )
        try:
            told = home / "DevToolsActivePort"
            until(lambda: told.exists() and len(told.read_text().split()) == 2, "chromium listens", SECONDS)
            port, path = told.read_text().split()
            with connect(f"ws://127.0.0.1:{port}{path}", max_size=None) as connection:
                yield cls(connection)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(home, ignore_errors=True)

    @contextlib.contextmanager
    def page(self) -> Iterator[Page]:
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable", session)
        try:
            yield Page(self, session)
        finally:
            self.call("Target.disposeBrowserContext", browserContextId=context)

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer; events that come first are kept."""
        self._number += 1
        asked = {"id": self._number, "method": method, "params": parameters}
        self._connection.send(json.dumps(asked | ({"sessionId": session} if session else {})))
        while True:
            told = self._next()
            if told.get("id") == self._number:
                assert "error" not in told, f"{method}: {told['error']}"
                return dict(told["result"])

    def wait(self, method: str, session: str) -> dict[str, Any]:
        """The next event of that name, also one that has already come."""
        while True:
            for event in self._events:
                if event["method"] == method and event.get("sessionId") == session:
                    self._events.remove(event)
                    return dict(event["params"])
            self._next()

    def forget(self, session: str) -> None:
        self._events = [event for event in self._events if event.get("sessionId") != session]

    def _next(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self._connection.recv(SECONDS))
        if "method" in told:
            self._events.append(told)
        return told


@dataclass(frozen=True)
class Page:
    """A tab."""

    browser: Chromium
    session: str

    def open(self, url: str) -> None:
        """Go there as a person would, and wait until it is loaded."""
        self.browser.forget(self.session)
        told = self.browser.call("Page.navigate", self.session, url=url)
        assert "errorText" not in told, f"{url}: {told['errorText']}"
        self.browser.wait("Page.loadEventFired", self.session)

    def run(self, script: str, **values: Any) -> Any:
        """What an async function of the page with this body returns; `values` are its parameters."""
        names, given = ", ".join(values), ", ".join(json.dumps(value) for value in values.values())
        told = self.browser.call(
            "Runtime.evaluate",
            self.session,
            expression=f"(async ({names}) => {{ {script} }})({given})",
            awaitPromise=True,
            returnByValue=True,
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"].get("exception", {}).get("description")
        return told["result"].get("value")

    @property
    def text(self) -> str:
        return str(self.run("return document.body.innerText")).strip()

    @property
    def address(self) -> str:
        return str(self.run("return location.href"))

    def picture(self) -> bytes:
        """What is to be seen, as a PNG."""
        return base64.b64decode(self.browser.call("Page.captureScreenshot", self.session)["data"])
