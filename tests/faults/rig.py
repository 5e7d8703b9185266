# SPDX-License-Identifier: Apache-2.0
"""What the fault tests ask of the machine after a kill: that store, sandboxd, kernel and disk tell one story."""

from __future__ import annotations

import http.client
import os
import select
import signal
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from live_server import Answer, LiveServer, Sandbox, request, until


@dataclass
class Rig:
    """A server whose sandboxes carry a mark in their entry point, so that every one of their processes is known."""

    server: LiveServer
    mark: str = field(default_factory=lambda: str(uuid.uuid4().int % 10**9 + 10**9))

    def create(self, **fields: Any) -> Sandbox:
        return self.server.create(entrypoint=("sleep", self.mark), **fields)

    @property
    def socket(self) -> str:
        return str(self.server.run_dir / "sandboxd.sock")

    def node(self, method: str, path: str, **options: Any) -> Any:
        return request(self.socket, method, path, **options)

    def sandboxd_pid(self) -> int:
        return int(self.node("GET", "/version").expect(200).json()["pid"])

    def kill_sandboxd(self) -> None:
        """Kill it and wait until it is gone; the server then starts another one."""
        pid = self.sandboxd_pid()
        self.end(pid)
        until(lambda: self._new_sandboxd(pid), "sandboxd is started again")

    @staticmethod
    def end(pid: int) -> None:
        """Kill it and wait until it is gone."""
        pidfd = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([pidfd], [], [], 10)[0]
        os.close(pidfd)

    def _new_sandboxd(self, old: int) -> bool:
        try:
            return self.sandboxd_pid() != old
        except (OSError, http.client.HTTPException):
            return False

    def known_to_sandboxd(self) -> set[str]:
        return {item["id"] for item in self.node("GET", "/sandboxes").expect(200).json()["items"]}

    def marked_processes(self) -> list[int]:
        """The entry points of all sandboxes of this rig that live, known by the number they sleep."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (entry / "cmdline").read_bytes() == f"sleep\0{self.mark}\0".encode():
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    def directories_of(self) -> set[str]:
        return {Path(name).name[:36] for name in self.server.directories()}

    def settle(self) -> set[str]:
        """Wait until nothing is on its way, then the ids that exist: the same for everyone who counts them."""

        def story() -> dict[str, Any]:
            ids = self.server.ids()
            return {
                "ids": ids,
                "sandboxd": self.known_to_sandboxd(),
                "states": {self.server.get(one)["status"]["state"] for one in ids},
                "processes": len(self.marked_processes()),
                "directories": self.directories_of(),
                "shells": self.node("GET", "/host").expect(200).json()["shells"],
            }

        def agreed() -> bool:
            try:
                told = story()
            except (AssertionError, OSError, http.client.HTTPException):
                return False
            return bool(
                told["ids"] == told["sandboxd"]
                and told["ids"] <= told["directories"]
                # sandboxd's waiting shells have directories too, and nobody else.
                and len(told["directories"]) == len(told["ids"]) + told["shells"]
                and told["processes"] == len(told["ids"])
                and told["states"] <= {"Running"}
            )

        try:
            until(agreed, "store, sandboxd, processes and directories agree", 30)
        except AssertionError as error:
            raise AssertionError(f"{error}: {story()}\n{self.server.told()}") from None
        return self.server.ids()

    def rest(self) -> None:
        """Wait until sandboxd has as many shells waiting as it wants: each of them holds a few open files."""
        until(lambda: self.node("GET", "/host").expect(200).json()["shells"] == SHELLS_AT_REST, "the pool is full")

    def all_answer(self) -> None:
        for sandbox_id in self.settle():
            sandbox = self.server.connect(sandbox_id)
            assert sandbox.run("echo alive").stdout == "alive"


SHELLS_AT_REST = 8
"""sandboxd's own default."""

COUNTING = "for i in $(seq 1 200); do echo line $i; sleep 0.01; done"
COUNTED = "".join(f"line {number}\n" for number in range(1, 201)).encode()

# How long after the first request the kill comes. A create takes some ten milliseconds: these hit every part of it.
MOMENTS = [0.0, 0.003, 0.006, 0.01, 0.015, 0.025, 0.05]


def attempt(call: Callable[[], Answer]) -> int:
    """The status of the answer; 0 when the server was killed before it answered."""
    try:
        return call().status
    except (OSError, http.client.HTTPException):
        return 0


def answers(sandbox: Sandbox) -> bool:
    """Whether it can be reached right now."""
    try:
        return sandbox.ping()
    except (OSError, http.client.HTTPException):
        return False


def failed_with(server: LiveServer, sandbox_id: str, code: int) -> bool:
    """Whether the store knows that its entry point ended with that code."""
    told = server.get(sandbox_id)
    return bool(told["status"]["state"] == "Failed" and told["end"]["exitCode"] == code)
